"""Where Eyas keeps what it can make again: converted targets, recorded text, engines' environments, logs.

    cache_dir() / "targets"                             pytest tests/test_cache.py

Models from the hub are not in it: huggingface_hub keeps them, where HF_HOME says.
"""

from __future__ import annotations

import os
from pathlib import Path


def cache_dir(given: str | os.PathLike[str] | None = None) -> Path:
    """`given`, else $EYAS_CACHE, else $XDG_CACHE_HOME/eyas, else ~/.cache/eyas; an absolute path.

    An XDG_CACHE_HOME that is not absolute is ignored, as its specification asks (XDG Base Directory 0.8).
    """
    named = given or os.environ.get("EYAS_CACHE")
    if named:
        return Path(named).expanduser().absolute()
    home = Path(os.environ.get("XDG_CACHE_HOME") or "")
    return (home if home.is_absolute() else Path.home() / ".cache") / "eyas"
