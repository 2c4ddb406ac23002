"""An engine's private environment, and how its own loader is asked what it makes of a draft.

    environment = ready("sglang")
    reports = environment.load_report(["path/to/draft"], target="path/to/target")

The scripts in loaders/ run under the environment's Python, drive the engine's real loader and print one line a draft
that begins with `REPORT `; see loaders/README.md for what it holds.  pytest tests/test_engines_setup.py
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..cache import cache_dir
from ..errors import BadInput, EyasError

READY = "ready.json"
LOG = "setup.log"
LOADERS = Path(__file__).with_name("loaders")
SCRIPTS = Path(__file__).with_name("servers")
"""Of what serves or records under an engine's own Python."""
_MARK = "REPORT "


def engine_folder(engine: str, version: str) -> Path:
    return cache_dir() / "engines" / f"{engine}-{version}"


def read_json(path: Path) -> dict[str, Any]:
    """A file's JSON object, empty where there is none: a stamp that cannot be read is a stamp that is missing."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


@dataclass(frozen=True)
class Environment:
    """A finished environment: its Python, its programs and the variables that the engine needs."""

    engine: str
    version: str
    folder: Path
    python: Path
    programs: Mapping[str, Path]
    variables: Mapping[str, str]

    def environ(self) -> dict[str, str]:
        """Variables for a process of this environment: offline, one thread unless asked otherwise, nothing of ours."""
        from .setup.build import clean_environment

        quiet = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
        return quiet | clean_environment() | dict(self.variables)

    def run(
        self, script: str | os.PathLike[str], args: Sequence[str | os.PathLike[str]] = (), timeout: float = 600
    ) -> list[dict[str, Any]]:
        """Run a script under the environment's Python; return the objects of its REPORT lines, in their order.

        Raises EyasError, with the end of what it printed, where it fails or is not done after `timeout` seconds.
        """
        command = [os.fspath(word) for word in (self.python, script, *args)]
        name = Path(script).name
        process = subprocess.Popen(
            command,
            env=self.environ(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,  # a group of its own, so that on a timeout its children end with it
        )
        try:
            said, _ = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired as error:
            raise EyasError(
                f"{self.engine}: {name} was not done after {timeout:.0f} s; run the same command again when the "
                "machine is less busy."
            ) from error
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        reports = [json.loads(line.removeprefix(_MARK)) for line in said.splitlines() if line.startswith(_MARK)]
        if process.returncode != 0:
            raise EyasError(
                f"{self.engine}: {name} left with exit code {process.returncode}: {said[-2000:].strip()}; `eyas "
                "engines setup ENGINE --force` builds it anew"
            )
        return reports

    def load_report(
        self, drafts: Sequence[str | os.PathLike[str]], target: str | os.PathLike[str], timeout: float = 1800
    ) -> list[dict[str, Any]]:
        """What the engine's own loader makes of each draft, in their order."""
        script = LOADERS / f"load_report_{self.engine}.py"
        reports = self.run(script, [*drafts, "--target", target], timeout)
        if len(reports) != len(drafts):
            raise EyasError(
                f"{self.engine}: {len(drafts)} drafts were given and {len(reports)} reports came back; run the same "
                "command again, or `eyas engines setup ENGINE --force`."
            )
        return reports


def ready_in(folder: Path, digest: str) -> Environment | None:
    """The environment in a folder, if it is finished and was built by the recipe of that digest."""
    stamp = read_json(folder / READY)
    if stamp.get("recipe") != digest or not (folder / stamp["python"]).exists():
        return None
    return Environment(
        engine=stamp["engine"],
        version=stamp["version"],
        folder=folder,
        python=folder / stamp["python"],
        programs={name: folder / path for name, path in stamp["programs"].items()},
        variables=stamp["variables"],
    )


def ready(engine: str) -> Environment | None:
    """An engine's finished environment, None where `eyas engines setup ENGINE` has still to be run."""
    from .setup import recipe

    known = recipe(engine)
    return ready_in(engine_folder(known.engine, known.version), known.digest())


def required(engine: str) -> Environment:
    """The same. Raises BadInput where it was not set up here, or is no engine's name."""
    found = ready(engine)
    if found is None:
        raise BadInput(f"{engine} is not set up on this machine; run `eyas engines setup {engine}` first")
    return found
