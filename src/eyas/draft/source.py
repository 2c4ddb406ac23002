"""Where a draft comes from: a directory or file as it is, or a hub id, whose files are fetched.

resolve_draft("org/draft@main")                     pytest tests/test_hub.py
"""

from __future__ import annotations

import os
from pathlib import Path

from ..errors import BadInput
from ..hub import download, is_id

# Nothing that runs code or unpickles; *.bin, which is unpickled with weights only, where a repository has nothing else.
SAFE = ("*.json", "*.safetensors", "*.txt", "*.md")


def resolve_draft(spec: str | os.PathLike[str]) -> Path:
    """`spec` itself where it is a path; for a hub id, OWNER/NAME or OWNER/NAME@REVISION, its folder in the hub's cache.

    Raises BadInput where there is nothing at a path, or no such draft on the hub; EyasError where that is not reached.
    """
    path, text = Path(spec).expanduser(), os.fspath(spec)
    if path.exists():
        return path
    if not is_id(text):
        raise BadInput(f"{path} does not exist; give a directory with config.json and the draft's weights")
    folder = download(text, only=SAFE, what="draft")
    if not any(folder.glob("*.safetensors")):  # an old repository
        folder = download(text, only=(*SAFE, "*.bin"), what="draft")
    if not (folder / "config.json").is_file():
        raise BadInput(f"{text} on the hub has no config.json, so it is no draft; download what it has, and name that")
    return folder
