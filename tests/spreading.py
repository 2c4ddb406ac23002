"""Workers that die or fail, for the tests of stages on Ray; other processes import them by this module's name.

cluster.spread(ShardsWithOneDeath, (how, marker), pieces)
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

from eyas.errors import Mismatch
from eyas.features.filling import Filling, Piece, ShardWorker
from eyas.features.layout import ShardEntry


class ShardsWithOneDeath:
    """Killed in the middle of shard 1, the first time: after the file is there, before anybody has heard of it."""

    def __init__(self, told: tuple[Filling, Path]):
        how, self.marker = told
        self.work = ShardWorker(how)

    def __call__(self, piece: Piece) -> ShardEntry:
        entry = self.work(piece)
        with (self.marker / f"{piece.index}").open("a") as file:
            file.write("x")
        if piece.index == 1 and not (self.marker / "died").exists():
            (self.marker / "died").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return entry


class Complains:
    """Tells the user something."""

    def __init__(self, how: Any):
        pass

    def __call__(self, piece: Any) -> Any:
        raise Mismatch(f"piece {piece} does not fit")
