"""Where a run's metrics go beside metrics.jsonl: TensorBoard, Weights & Biases, trackio; several at once, or none.

    eyas train ... --track wandb --track trackio            pytest tests/test_train_trackers.py

Each is imported only when it is asked for. A run keeps one name in all of them, so that after a kill it goes on where
it was. A tracker that fails does so alone: training goes on, since the same numbers are in metrics.jsonl (all of them;
trackio queues, and a kill takes the last half second with it).
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import os
import re
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from .. import console
from ..errors import BadInput, EyasError
from ..writes import atomic_write_json

BOARD = "tensorboard"
NAMED = "trackers.json"
_ESCAPES = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
PACKAGES = {"tensorboard": "tensorboard", "wandb": "wandb", "trackio": "trackio"}
"""Tracker -> the package on PyPI, which is imported under the same name."""


class Tracker(Protocol):
    """One open run."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Note values of a step. Steps come in ascending order; those after the last checkpoint may come again."""

    def close(self) -> None:
        """Everything is where it belongs."""


def check_trackers(names: Sequence[str]) -> None:
    """Raise BadInput with the command that installs what is missing: before hours of work, not after."""
    for name in names:
        if name != "tensorboard" and importlib.util.find_spec(name) is None:
            raise BadInput(
                f"train.track names {name}, whose package is not installed here: pip install {PACKAGES[name]} (or "
                f"pip install 'eyas[{name}]'), or leave it out; metrics.jsonl holds the same numbers"
            )


class Trackers:
    """All that were asked for, as one. `told` are the run's settings; `warn` hears of one that fails.

    Nothing is opened where `out` is None (another process of the run tracks).
    """

    def __init__(
        self, names: Sequence[str], out: Path | None, step: int, told: Mapping[str, Any], warn: Callable[[str], None]
    ) -> None:
        self.warn = warn
        self.open: dict[str, Tracker] = {}
        if out is None:
            return
        for name in names:
            try:
                with _stdout_is_ours():
                    self.open[name] = OPEN[name](out, step, told)
            except Exception as error:  # theirs: no login, no network, no disk
                if name != "tensorboard":
                    self.close()
                    raise EyasError(
                        f"{name} cannot track this run ({_short(error)}). Log in, or track offline "
                        f"({HINTS[name]}), or leave it out of train.track"
                    ) from error

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Note the values of a step in each."""
        self._each(lambda tracker: tracker.log(step, values))

    def close(self) -> None:
        """Close all."""
        self._each(lambda tracker: tracker.close())
        self.open.clear()

    def _each(self, act: Callable[[Tracker], None]) -> None:
        for name, tracker in list(self.open.items()):
            try:
                with _stdout_is_ours():
                    act(tracker)
            except Exception as error:
                del self.open[name]
                self.warn(f"{name} tracks no longer ({_short(error)}); metrics.jsonl goes on")


@contextlib.contextmanager
def _stdout_is_ours() -> Iterator[None]:
    """Results go to stdout, so what trackers print goes to stderr, in colours where these are wanted."""
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            yield
    finally:
        text = printed.getvalue().rstrip()
        if text:
            console.say(_ESCAPES.sub("", text))


def _short(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


def _name(out: Path) -> tuple[str, str]:
    """(name, id) of the run in `out`, made when it is first tracked."""
    file = out / NAMED
    try:
        kept = json.loads(file.read_text(encoding="utf-8"))
        return str(kept["name"]), str(kept["id"])
    except (OSError, ValueError, KeyError, TypeError):
        made = {"name": out.resolve().name, "id": secrets.token_hex(5)}
        atomic_write_json(file, made)
        return made["name"], made["id"]


# ---------------------------------------------------------------- each of them


class _TensorBoard:
    """Event files in `out/tensorboard`; steps that will be done again are hidden."""

    def __init__(self, out: Path, step: int, told: Mapping[str, Any]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.writer: Any = SummaryWriter(str(out / BOARD), purge_step=step + 1)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)

    def close(self) -> None:
        self.writer.close()


class _Wandb:
    """Project $WANDB_PROJECT, else `eyas`; files in `out/wandb`, unless $WANDB_DIR says otherwise."""

    def __init__(self, out: Path, step: int, told: Mapping[str, Any]) -> None:
        import wandb

        name, run = _name(out)
        self.run: Any = wandb.init(
            project=os.environ.get("WANDB_PROJECT") or "eyas", id=run, name=os.environ.get("WANDB_NAME") or name,
            dir=None if os.environ.get("WANDB_DIR") else str(out), resume="allow", config=dict(told),
        )  # fmt: skip
        self.known = int(getattr(self.run, "step", 0) or 0)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        if step >= self.known:  # it takes no earlier ones; they are equal, since a run goes on bit for bit
            self.run.log(dict(values), step=step)

    def close(self) -> None:
        self.run.finish()


class _Trackio:
    """Project $TRACKIO_PROJECT, else `eyas`; on this machine, unless $TRACKIO_SPACE_ID or a server are named."""

    def __init__(self, out: Path, step: int, told: Mapping[str, Any]) -> None:
        import trackio

        self.package: Any = trackio
        name, run = _name(out)
        self.run: Any = trackio.init(
            project=os.environ.get("TRACKIO_PROJECT") or "eyas", name=f"{name}-{run}", resume="allow",
            config=dict(told), embed=False,
        )  # fmt: skip

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self.run.log(dict(values), step=step)

    def close(self) -> None:
        self.package.finish()  # the run's own leaves it to be finished, and told of, once more at exit


OPEN: dict[str, Callable[[Path, int, Mapping[str, Any]], Tracker]] = {
    "tensorboard": _TensorBoard, "wandb": _Wandb, "trackio": _Trackio,
}  # fmt: skip
HINTS = {"wandb": "WANDB_MODE=offline", "trackio": "without TRACKIO_SPACE_ID and TRACKIO_SERVER_URL"}
