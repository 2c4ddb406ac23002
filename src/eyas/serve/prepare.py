"""What an engine needs made of target and draft before it can serve them: made once, kept in the cache.

vLLM and SGLang read the folders as they are. llama.cpp needs GGUF files, OpenVINO its own format: the engines' own
converters make them (export/convert.py), below $EYAS_CACHE/serve, under a name that is a digest of what they were made
of. They appear whole or not at all, and two processes that want the same make it once.

    pytest tests/test_serve_prepare.py
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .._version import __version__
from ..cache import cache_dir
from ..digests import sha256_file, sha256_json
from ..engines.environment import read_json, required
from ..errors import BadInput, EyasError
from ..headers import read_header
from ..writes import atomic_dir, atomic_write_json, remove_leftovers
from .command import Inputs
from .explain import explained
from .launch import Launch
from .process import Tell, default_log, guarded

IR = "openvino_model.xml"
MADE = "made.json"  # written last: what was made, and of what
OUTTYPE = {"float32": "f32", "bfloat16": "bf16", "auto": "auto"}  # of convert_hf_to_gguf.py
CONVERSION = 3600.0  # seconds


@dataclass(frozen=True)
class Wanted:
    """One thing to be made: where it will lie, and what decides its content."""

    folder: Path
    name: str
    """Of the file or folder in `folder`."""
    of: dict[str, Any]

    @property
    def path(self) -> Path:
        return self.folder / self.name


def prepared(launch: Launch, tell: Tell = lambda _: None) -> Inputs:
    """Target and draft as the engine reads them.

    Raises NotExpressible where the engine's format cannot say what was trained, BadInput for what is unreadable or an
    engine that is not set up, EyasError with the end of what the converter said.
    """
    target, draft = launch.target.absolute(), launch.draft.absolute() if launch.draft else None
    if launch.engine not in ("llamacpp", "openvino"):
        return Inputs(target, draft)
    model = target if as_it_is(launch.engine, target) else _target(launch, target, tell)
    if draft is None or as_it_is(launch.engine, draft):
        return Inputs(model, draft)
    draft = _draft(launch, target, draft, tell)
    notes = [mended_taps(draft.with_name(MADE), hugging_face(target))] if launch.engine == "openvino" else []
    for note in notes:
        tell(note)
    return Inputs(model, draft, tuple(notes))


def as_it_is(engine: str, path: Path) -> bool:
    """Is it in the engine's own format already?"""
    return path.suffix == ".gguf" if engine == "llamacpp" else (path / IR).is_file()


# ---------------------------------------------------------------- target


def wanted_target(launch: Launch, target: Path, version: str) -> Wanted:
    """Of a target: the same place for the same files at the same path, of the same age."""
    kind = OUTTYPE[launch.dtype] if launch.engine == "llamacpp" else "fp32"
    of = {"of": str(target), "files": stamps(target), "as": kind, "engine": version}
    folder = _place(launch.engine, "targets", target.name, of)
    return Wanted(folder, "model.gguf" if launch.engine == "llamacpp" else "model", of)


def _target(launch: Launch, target: Path, tell: Tell) -> Path:
    if not (target / "config.json").is_file():
        raise BadInput(
            f"--target {target} has no config.json, so it cannot be converted for {launch.engine}; name a Hugging "
            "Face folder"
        )
    found = required(launch.engine)
    wanted = wanted_target(launch, target, found.version)

    def work(out: Path) -> None:
        if launch.engine == "llamacpp":
            program = [str(found.python), str(found.programs["convert"])]
            line = [*program, str(target), "--outtype", wanted.of["as"], "--outfile", str(out)]
        else:
            line = [str(found.programs["optimum-cli"]), "export", "openvino", "-m", str(target), "--task",
                    "text-generation-with-past", "--weight-format", "fp32", str(out)]  # fmt: skip
        _run(line, found.environ(), default_log(f"{launch.engine}-converter"), f"{launch.engine}'s converter")

    return made(wanted, work, tell, f"converting {target.name} for {launch.engine}")


# ---------------------------------------------------------------- draft


def wanted_draft(launch: Launch, target: Path, draft: Path, version: str) -> Wanted:
    """Of a draft: the same place for the same bytes of config and headers, whatever its path."""
    of = {
        "draft": identity(draft), "target": stamps(target), "engine": version, "eyas": __version__,
    }  # fmt: skip
    folder = _place(launch.engine, "drafts", draft.name, of)
    return Wanted(folder, "draft.gguf" if launch.engine == "llamacpp" else "draft", of)


def _draft(launch: Launch, target: Path, draft: Path, tell: Tell) -> Path:
    from ..export import export_draft
    from ..export.convert import convert

    wanted = wanted_draft(launch, target, draft, required(launch.engine).version)
    source = hugging_face(target)

    def work(out: Path) -> None:
        spelled = out.with_name("spelled")
        report = export_draft(draft, spelled, to=launch.engine, dtype="keep", target_dir=source)
        wanted.of["taps"] = report.taps
        convert(launch.engine, spelled, source or target, out, tuple(report.taps))

    return made(wanted, work, tell, f"converting the draft {draft.name} for {launch.engine}")


def hugging_face(target: Path) -> Path | None:
    """The target as a Hugging Face folder, for the draft's conversion; None for a converted OpenVINO folder."""
    if target.suffix == ".gguf":
        from ..target.source import resolve_target

        return resolve_target(target)
    return None if (target / IR).is_file() else target


def mended_taps(note: Path, target: Path | None) -> str:
    """What was changed in OpenVINO's model, and what it would have run by itself."""
    from ..export.openvino import layer_list

    taps = tuple(read_json(note).get("taps") or ())
    said = f"taps {', '.join(map(str, taps))} stand in the converted draft (hidden_layers_list {layer_list(taps)!r})"
    if target is None:
        return f"openvino: {said}; its own default is one layer further than everybody's"
    from ..target.facts import read_facts

    n = read_facts(target).num_layers
    return f"openvino: {said}; by itself OpenVINO would take {3}, {n // 2 + 1} and {n - 2}, one layer further"


# ---------------------------------------------------------------- identity


def stamps(path: Path) -> list[list[Any]]:
    """[name, bytes, time of change in ns] of a file, or of the files right in a folder that a model is made of."""
    files = [path] if path.is_file() else sorted(p for p in path.iterdir() if p.is_file() and p.name[0] != ".")
    return [[p.name, p.stat().st_size, p.stat().st_mtime_ns] for p in files]


def identity(draft: Path) -> list[Any]:
    """A draft's content as far as it can be told in a moment: configs whole, of weights header, size and age."""
    out: list[Any] = []
    for file, size, age in stamps(draft):
        path = draft if draft.is_file() else draft / file
        if path.suffix == ".json":
            out.append([file, sha256_file(path)])
        elif path.suffix == ".safetensors":
            entries = {n: [e.dtype, list(e.shape), e.start] for n, e in read_header(path).entries.items()}
            out.append([file, sha256_json(entries), size, age])
        else:
            out.append([file, size, age])
    return out


def _place(engine: str, kind: str, stem: str, of: dict[str, Any]) -> Path:
    return cache_dir() / "serve" / engine / kind / f"{stem[:60]}-{sha256_json(of)[:16]}"


# ---------------------------------------------------------------- making


def made(wanted: Wanted, work: Callable[[Path], None], tell: Tell, says: str) -> Path:
    """`wanted.path`, by `work(path)` in a private folder where it is not there yet."""
    if (wanted.folder / MADE).is_file():
        return wanted.path
    wanted.folder.parent.mkdir(parents=True, exist_ok=True)
    with _one_at_a_time(wanted.folder, tell):
        if (wanted.folder / MADE).is_file():  # somebody else made it while we waited
            return wanted.path
        remove_leftovers(wanted.folder.parent)
        tell(f"{says}, once; it is kept in {wanted.folder}")
        with atomic_dir(wanted.folder) as private:
            work(private / wanted.name)
            if not (private / wanted.name).exists():
                raise EyasError(f"{says} left nothing behind; see {private}")
            atomic_write_json(private / MADE, wanted.of)
    return wanted.path


@contextlib.contextmanager
def _one_at_a_time(folder: Path, tell: Tell) -> Iterator[None]:
    """The kernel lets go of the lock when its holder ends, however it ends."""
    descriptor = os.open(folder.with_name(f".{folder.name}.lock"), os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o644)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            tell(f"another process makes {folder.name}; waiting for it")
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _run(line: list[str], environ: dict[str, str], log: Path, says: str) -> None:
    """A converter, under the same guard as a server: it ends with us."""
    with guarded(line, environ, log) as process:
        end = time.monotonic() + CONVERSION
        while process.alive():
            if time.monotonic() > end:
                raise EyasError(f"{says} was not done after {CONVERSION:.0f} s. {explained(log)}")
            time.sleep(0.1)
        code = process.exit_code()
    if code != 0:
        raise EyasError(f"{says} left with exit code {code}. {explained(log)}")
