"""The Hugging Face hub: what is an id, what is fetched, and its refusals in words that say what to do.

    download("org/draft", only=["*.json", "*.safetensors"], what="draft")          pytest tests/test_hub.py

huggingface_hub does the work, and goes by its own variables: HF_HOME, HF_HUB_CACHE, HF_TOKEN, HF_ENDPOINT and
HF_HUB_OFFLINE. Whatever was fetched once is found again without a network.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from eyas import console
from eyas.errors import BadInput, EyasError

_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]*\w(@[\w./-]+)?", re.ASCII)
_FILES = (".safetensors", ".bin", ".pt", ".ckpt", ".gguf", ".json", ".jsonl", ".parquet")


def is_id(spec: str) -> bool:
    """Can `spec` be OWNER/NAME or OWNER/NAME@REVISION, rather than a path? A path whose folder is here is a path."""
    owner, _, name = spec.partition("/")
    return bool(_ID.fullmatch(spec)) and not Path(owner).exists() and not name.endswith(_FILES)


def split(spec: str) -> tuple[str, str | None]:
    """ "org/name@revision" -> ("org/name", "revision"); None is the repository's own choice, `main`."""
    name, _, revision = spec.partition("@")
    return name, revision or None


def download(
    spec: str, *, only: Sequence[str] | None = None, skip: Sequence[str] = (), what: str = "model"
) -> Path:  # fmt: skip
    """The folder in the hub's cache with the files of `spec` that match `only` and not `skip`.

    Raises BadInput where there is no such repository or revision, EyasError where it cannot be reached.
    """
    from huggingface_hub import snapshot_download

    name, revision = split(spec)
    with explained(name, revision, what), bars():
        return Path(
            snapshot_download(
                name, revision=revision, allow_patterns=None if only is None else list(only), ignore_patterns=[*skip]
            )
        )


@contextlib.contextmanager
def bars() -> Iterator[None]:
    """huggingface_hub's own bars, which it draws into files and pipes too, are for watchers only."""
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    if console.watched() or are_progress_bars_disabled():
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()


@contextlib.contextmanager
def explained(name: str, revision: str | None, what: str) -> Iterator[None]:
    """Turn what huggingface_hub raises within into errors that name the repository and the remedy."""
    from huggingface_hub import constants, errors

    try:
        yield
    except errors.HFValidationError as error:
        raise BadInput(f"{name!r} is neither a folder, a file, nor a hub id: {error}; check the spelling") from error
    except errors.GatedRepoError as error:
        raise EyasError(f"{name} is gated: accept its licence on its hub page and run `hf auth login`") from error
    except errors.RevisionNotFoundError as error:
        raise BadInput(f"{name} has no revision {revision!r}; check the name after the @") from error
    except errors.RepositoryNotFoundError as error:
        raise BadInput(
            f"{name!r} is not a folder, and the hub has no such {what} (private? `hf auth login`); check the spelling"
        ) from error
    except (errors.EntryNotFoundError, OSError) as error:
        if constants.HF_HUB_OFFLINE:
            raise EyasError(
                f"{name!r} is not a folder here and not in the hub cache ({constants.HF_HUB_CACHE}), and "
                f"HF_HUB_OFFLINE forbids to download it; unset HF_HUB_OFFLINE, or name a local folder"
            ) from error
        raise EyasError(f"{name} cannot be downloaded ({error}); check the network, or name a local folder") from error
    except Exception as error:
        if not of_the_network(error):
            raise
        raise EyasError(f"{name} cannot be reached ({error}); check the network, or name a local folder") from error


def of_the_network(error: BaseException) -> bool:
    """Was it raised by the client that huggingface_hub speaks HTTP with? Which one that is changes with its version."""
    return any(kind.__module__.partition(".")[0] in ("httpx", "httpx2", "requests") for kind in type(error).__mro__)
