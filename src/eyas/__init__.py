"""Eyas trains, proves and debugs EAGLE-3 draft models.

Follow one token of data by opening, in this order: pipeline.py, prompts.py, regenerate.py, features/, vocab.py, train/,
draft/, decode/.
The words are those of README.md; `eyas --help` lists the verbs. The functions below are those of api.py (docs/api.md);
importing this package imports nothing else, they are looked up when they are used.
"""

from typing import TYPE_CHECKING, Any

from eyas._version import __version__

if TYPE_CHECKING:
    from eyas.api import (
        BadInput,
        EyasError,
        LoadedDraft,
        Mismatch,
        diagnose,
        export_draft,
        inspect,
        load_draft,
        load_target,
        prove,
        verify,
    )

__all__ = [
    "BadInput", "EyasError", "LoadedDraft", "Mismatch", "__version__", "diagnose", "export_draft", "inspect",
    "load_draft", "load_target", "prove", "verify",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in __all__:
        from eyas import api

        return getattr(api, name)
    raise AttributeError(f"module 'eyas' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
