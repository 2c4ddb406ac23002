"""What would stop a repair, looked for before minutes of trials; and whether the files are still the same after them.

pytest tests/test_repair.py
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from ..draft.files import CONFIG, EYAS_JSON, open_folder, weight_files
from ..errors import BadInput
from .in_place import check_files, check_folder
from .overlay import Overlay
from .plan import SHOWN
from .plan_files import INDEX
from .write_new import check_out


def check_places(source: Path, out: str | Path | None, in_place: bool) -> None:
    """Before minutes of trials, what would stop the writing."""
    if out is not None and in_place:
        raise BadInput("give a new directory or change the draft in place, not both")
    if out is not None:
        check_out(source, Path(out))
    elif in_place:
        check_folder(source)
    elif not source.is_dir():
        raise BadInput(f"{source} is not a directory; repair works on draft directories; name one")


def check_given(reference: Path | None, features: Path | None) -> None:
    """What is named must be there, even where nothing comes to need it."""
    if reference is not None and not reference.exists():
        raise BadInput(
            f"{reference} does not exist; --reference takes a draft directory, d2t.pt, d2t.npy or vocab_mapping.pt; "
            "check the path"
        )
    if reference is not None and reference.is_dir():
        open_folder(reference)
    if features is not None and not features.is_dir():
        raise BadInput(
            f"{features} is not a directory; --features takes recorded features (eyas extract); check the path"
        )


def stamps(source: Path) -> dict[str, tuple[int, ...] | None]:
    """What tells that a file of the draft was written to: an overlay is valid as long as nobody did."""

    def stamp(path: Path) -> tuple[int, ...] | None:
        try:
            at = path.stat()
        except OSError:
            return None
        return at.st_dev, at.st_ino, at.st_size, at.st_mtime_ns, at.st_ctime_ns

    try:
        files = [source / CONFIG, source / EYAS_JSON, source / INDEX, *weight_files(source)[0]]
    except OSError as error:
        raise BadInput(
            f"{error.filename or source} cannot be read ({error.strerror or error}); check its permissions"
        ) from error
    return {str(path.relative_to(source)): stamp(path) for path in files}


def check_unchanged(source: Path, files: Mapping[str, tuple[int, ...] | None]) -> None:
    now = stamps(source)
    other = sorted(name for name in now.keys() | files.keys() if now.get(name) != files.get(name))
    if other:
        raise BadInput(
            f"{source} was changed while its repair was being tried ({', '.join(other[:SHOWN])}); nothing was written. "
            f"Run the same command again"
        )


def check_own_files(overlay: Overlay) -> None:
    """Where not one file may be changed in place (a hub cache), no trial is worth its time."""
    names = [CONFIG, *(str(file.relative_to(overlay.path)) for file in overlay.base.files)]
    refused = []
    for name in names:
        try:
            check_files(overlay.path, [name])
        except BadInput as error:
            refused.append(error)
    if len(refused) == len(names):
        raise refused[0]
