"""How an environment is built: step by step, each finished step stamped, so that a killed setup goes on.

A recipe is a list of steps. A step that finished leaves `steps/<name>.json` in the environment's folder, with the pins
that it depended on; the same command skips it next time, unless its pins changed, which repeats it and all that follow.
An environment is ready when, after the last step, the recipe's check has run the engine itself and `ready.json` was
written, whole, as the last file.

    eyas engines setup llamacpp
    pytest tests/test_engines_setup.py
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...digests import sha256_json
from ...errors import EyasError
from ...writes import atomic_write_json, disk_errors
from ..environment import LOG, READY, Environment, engine_folder, read_json, ready_in
from .build import Build, CommandFailed, disk_usage, drop_half_installed
from .explain import explain
from .steps import Step

STAMPS = "steps"
Say = Callable[[str], None]


@dataclass(frozen=True)
class Recipe:
    """What to build, and what to expect of it."""

    engine: str
    version: str
    steps: tuple[Step, ...]
    check: Callable[[Build], str]  # runs the engine and returns the version that it names
    disk_mib: int  # as measured, when ready
    minutes: float  # as measured on two cores, downloads included
    peak_mib: int = 0  # while it is built, where that is more
    needs: Mapping[str, str] = field(default_factory=dict)  # program or programs (a|b) -> package to install
    variables: Mapping[str, str] = field(default_factory=dict)  # environment variables that the engine needs
    programs: Mapping[str, str] = field(default_factory=dict)  # name -> path inside the environment

    def digest(self) -> str:
        """Changes when anything changes that a finished environment depends on."""
        return sha256_json(
            [self.engine, self.version, [[s.name, *s.pins] for s in self.steps], self.variables, self.programs]
        )


# ------------------------------------------------------------------------------------------------ building


def setup(
    recipe: Recipe, *, force: bool = False, jobs: int | None = None, say: Say = lambda _: None
) -> tuple[Environment, dict[str, Any]]:
    """Build what is missing of an engine's environment and return it with what that took.

    force: start from nothing. jobs: compilers at a time. Raises EyasError with the reason, the remedy and the log.
    """
    folder = engine_folder(recipe.engine, recipe.version)
    for program, package in recipe.needs.items():
        if not any(shutil.which(name) for name in program.split("|")):
            raise EyasError(
                f"{recipe.engine} is compiled on this machine, which needs {program.replace('|', ' or ')}: install it "
                f"(Debian and Ubuntu: `apt-get install {package}`) and run the same command again."
            )
    with disk_errors(folder), _locked(folder, say) as lock:
        if force and folder.exists():
            (folder / READY).unlink(missing_ok=True)  # first: a half-removed environment must not look ready
            say(f"{recipe.engine}: removing {folder}")
            shutil.rmtree(folder)
        found = ready_in(folder, recipe.digest())
        if found is not None:
            return found, {**read_json(folder / READY), "built": []}
        (folder / STAMPS).mkdir(parents=True, exist_ok=True)
        (folder / READY).unlink(missing_ok=True)
        with open(folder / LOG, "ab") as log:
            build = Build(folder, log, lock, jobs or os.cpu_count() or 1, recipe.variables)
            built = _steps(recipe, build, say)
            return _finish(recipe, build, built, say)


def _steps(recipe: Recipe, build: Build, say: Say) -> list[str]:
    """Do the steps that are not done; return their names."""
    missing = unfinished(recipe, build.folder)
    if not missing:
        return []
    _room(recipe, build.folder, len(missing) / len(recipe.steps))
    kept = len(recipe.steps) - len(missing)
    say(
        f"{recipe.engine} {recipe.version}: about {recipe.disk_mib / 1024:.1f} GiB of disk and {recipe.minutes:.0f} "
        f"minutes on two cores, into {build.folder}"
        + (f"; {kept} of {len(recipe.steps)} steps are done" if kept else "")
    )
    if build.python.exists():
        for name in drop_half_installed(build.site_packages()):
            say(f"  {name}: its installation was cut short and is repeated")
    for step in missing:
        (build.folder / STAMPS / f"{step.name}.json").unlink(missing_ok=True)
    for step in missing:
        say(f"  {step.name}: {step.says} ...")
        started = time.monotonic()
        _explained(recipe, build, step.name, functools.partial(step.work, build))
        seconds = round(time.monotonic() - started, 1)
        atomic_write_json(build.folder / STAMPS / f"{step.name}.json", {"pins": list(step.pins), "seconds": seconds})
        say(f"  {step.name}: done in {seconds:,.0f} s")
    return [step.name for step in missing]


def _finish(recipe: Recipe, build: Build, built: list[str], say: Say) -> tuple[Environment, dict[str, Any]]:
    """Run the engine once and, if it answers as it should, declare the environment ready."""
    say("  check: running it ...")
    started = time.monotonic()
    named = _explained(recipe, build, "check", lambda: recipe.check(build))
    stamps = [read_json(build.folder / STAMPS / f"{step.name}.json") for step in recipe.steps]
    seconds = {step.name: stamp.get("seconds", 0.0) for step, stamp in zip(recipe.steps, stamps, strict=True)}
    seconds["check"] = round(time.monotonic() - started, 1)
    size = disk_usage(build.folder)
    report = {
        "engine": recipe.engine,
        "version": recipe.version,
        "names_itself": named,
        "recipe": recipe.digest(),
        "folder": str(build.folder),
        "python": "venv/bin/python",
        "programs": dict(recipe.programs),
        "variables": dict(recipe.variables),
        "disk_bytes": size,
        "seconds": seconds,
        "seconds_total": round(sum(seconds.values()), 1),
    }
    atomic_write_json(build.folder / READY, report)
    found = ready_in(build.folder, recipe.digest())
    assert found is not None, "written a moment ago"
    return found, {**report, "built": built}


def _explained(recipe: Recipe, build: Build, step: str, work: Callable[[], Any]) -> Any:
    """Do something; where it fails, say which step of which engine, why, what to do, and where the log is."""
    log = build.folder / LOG
    try:
        return work()
    except CommandFailed as error:
        why = explain(error.said) or f"{error}; the log ends: {_last_lines(error.said)}"
        raise EyasError(
            f"{recipe.engine}: step '{step}' failed: {why} Finished steps are kept: run the same command again when "
            f"that is mended. Log: {log}"
        ) from error
    except EyasError as error:
        raise EyasError(
            f"{recipe.engine}: step '{step}' failed: {error} Log: {log}; finished steps are kept: run the same "
            "command again when that is mended"
        ) from error


def _last_lines(said: str, count: int = 3) -> str:
    return " / ".join([line.strip() for line in said.splitlines() if line.strip()][-count:])[-600:] + "."


def unfinished(recipe: Recipe, folder: Path) -> list[Step]:
    """The steps that are not done: from the first one on whose stamp is missing or has other pins."""
    for position, step in enumerate(recipe.steps):
        stamp = read_json(folder / STAMPS / f"{step.name}.json")
        if stamp.get("pins") != list(step.pins):
            return list(recipe.steps[position:])
    return []


def state(recipe: Recipe) -> dict[str, Any]:
    """What there is of an environment: `state` is ready, unfinished or absent."""
    folder = engine_folder(recipe.engine, recipe.version)
    done = len(recipe.steps) - len(unfinished(recipe, folder))
    found: dict[str, Any] = {
        "engine": recipe.engine,
        "version": recipe.version,
        "folder": str(folder),
        "state": "ready" if ready_in(folder, recipe.digest()) else "unfinished" if folder.exists() else "absent",
        "steps": len(recipe.steps),
        "steps_done": done,
        "disk_mib": recipe.disk_mib,
        "minutes": recipe.minutes,
    }
    if found["state"] == "ready":
        stamp = read_json(folder / READY)
        found |= {name: stamp.get(name) for name in ("names_itself", "disk_bytes", "seconds", "seconds_total")}
    return found


def _room(recipe: Recipe, folder: Path, share: float) -> None:
    """Raise EyasError where the disk cannot hold what is still to come."""
    wanted = int(max(recipe.disk_mib, recipe.peak_mib) * share) << 20
    free = shutil.disk_usage(folder).free
    if free < wanted:
        raise EyasError(
            f"{recipe.engine} needs about {wanted / 2**30:.1f} GiB under {folder}, where {free / 2**30:.1f} GiB are "
            "free: make room, or name another place with EYAS_CACHE."
        )


@contextlib.contextmanager
def _locked(folder: Path, say: Say) -> Iterator[int]:
    """One setup of an engine at a time; a second one waits.

    Commands inherit the descriptor, and a lock of flock's kind is free only when its last holder is gone: so what a
    killed setup had started (pip, a compiler) is waited for, too, and never works beside its successor.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder.with_name(f".{folder.name}.lock"), os.O_CREAT | os.O_RDWR, 0o644)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"another setup, or what a killed one left running, is at work in {folder}; waiting for it ...")
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield descriptor
    finally:
        os.close(descriptor)
