"""The place where an environment is built: its folder, its Python, and commands whose output goes to the log.

pytest tests/test_engines_setup.py
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from ...errors import EyasError


@dataclass
class Build:
    """The place where steps work: a folder, its Python, and commands whose output goes to the log."""

    folder: Path
    log: IO[bytes]
    lock: int  # descriptor of the lock, which commands inherit: see `_locked`
    jobs: int = 2
    variables: Mapping[str, str] = field(default_factory=dict)

    @property
    def python(self) -> Path:
        return self.folder / "venv" / "bin" / "python"

    def run(self, *command: str | Path, cwd: Path | None = None, variables: Mapping[str, str] | None = None) -> str:
        """Run a command, its output to the log, and return what it printed. Raises EyasError where it fails."""
        words = [os.fspath(word) for word in command]
        self.log.write(f"\n$ {' '.join(words)}\n".encode())
        self.log.flush()
        start = self.log.tell()
        try:
            done = subprocess.run(
                words,
                cwd=cwd or self.folder,
                env=clean_environment() | dict(self.variables) | dict(variables or {}),
                stdin=subprocess.DEVNULL,
                stdout=self.log,
                stderr=subprocess.STDOUT,
                pass_fds=(self.lock,),
            )
        except OSError as error:
            raise EyasError(
                f"{words[0]} cannot be run: {error.strerror}; install it and run the same command again."
            ) from error
        with open(self.log.name, "rb") as file:
            file.seek(start)
            said = file.read().decode(errors="replace")
        if done.returncode != 0:
            raise CommandFailed(words, done.returncode, said)
        return said

    def pip(self, *arguments: str | Path) -> None:
        """pip of the environment."""
        self.run(self.python, "-m", "pip", "--disable-pip-version-check", "--no-input", *arguments)

    def site_packages(self) -> Path:
        return next((self.folder / "venv" / "lib").glob("python3*/site-packages"))


class CommandFailed(EyasError):
    """A command of a step left with an error; `said` is what it printed."""

    def __init__(self, command: Sequence[str], code: int, said: str):
        super().__init__(f"`{' '.join(command)}` left with exit code {code}")
        self.code, self.said = code, said


def clean_environment() -> dict[str, str]:
    """The user's environment without what would lead another Python astray."""
    astray = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "PYTHONSTARTUP", "PIP_TARGET", "PIP_PREFIX", "PIP_USER")
    return {name: value for name, value in os.environ.items() if name not in astray}


def drop_half_installed(site: Path) -> list[str]:
    """Forget packages whose installation was cut short, so that pip installs them again; return their names.

    pip writes RECORD last; without it a package counts as installed, though files may be missing.
    """
    dropped = []
    for info in sorted(site.glob("*.dist-info")):
        if not (info / "RECORD").is_file():
            shutil.rmtree(info)
            dropped.append(info.name)
    return dropped


def disk_usage(folder: Path) -> int:
    """Bytes on disk of all files below a folder, each counted once however many links it has."""
    seen: dict[tuple[int, int], int] = {}
    for root, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                status = os.lstat(os.path.join(root, name))
                seen[status.st_dev, status.st_ino] = status.st_blocks * 512
    return sum(seen.values())
