"""An exported directory goes to the Hugging Face hub, in one commit; whatever could be refused is refused beforehand.

destination = Destination("me/draft"); ready(destination); ...; push("draft", destination)

eyas export runs/demo draft --push-to-hub me/draft           pytest tests/test_hub.py
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..draft.directory import OURS
from ..errors import BadInput, EyasError
from ..hub import bars, of_the_network

WEIGHTS = (".safetensors", ".bin", ".pt", ".index.json")


@dataclass(frozen=True)
class Destination:
    """A repository of models."""

    repo: str
    """OWNER/NAME."""
    revision: str | None = None
    """A branch, made where it is missing; None is `main`."""
    private: bool = False

    def __post_init__(self) -> None:
        owner, slash, name = self.repo.partition("/")
        if not (owner and slash and name) or "/" in name or "@" in name:
            raise BadInput(
                f"--push-to-hub {self.repo}: expected OWNER/NAME, for example me/my-draft; a branch goes to --revision"
            )


def ready(destination: Destination) -> None:
    """Could `push` go there? Raises, before anything is written, EyasError offline, without a token or a network;
    BadInput for a repository that must not get it."""
    from huggingface_hub import HfApi, constants, errors, get_token

    to = destination
    if constants.HF_HUB_OFFLINE:
        raise EyasError(f"--push-to-hub {to.repo}: HF_HUB_OFFLINE forbids it; unset HF_HUB_OFFLINE, or push later")
    if not get_token():
        raise EyasError(f"--push-to-hub {to.repo}: no token; run `hf auth login`, or set HF_TOKEN to one that writes")
    api = HfApi()
    with _told(to):
        api.whoami()
        try:
            there = api.model_info(to.repo)
        except errors.RepositoryNotFoundError:  # it will be made
            return
        if to.private and not there.private:
            raise BadInput(
                f"--private: {to.repo} exists and is public; make it private on its page, or choose another name"
            )
        try:
            held = api.list_repo_files(to.repo, revision=to.revision)
        except errors.RevisionNotFoundError:
            held = api.list_repo_files(to.repo)  # of which a new branch begins
    others = sorted(name for name in held if name.endswith(WEIGHTS) and name not in OURS)
    if others:
        raise BadInput(
            f"{to.repo} holds weights that would stay beside the pushed ones ({', '.join(others[:4])}), and engines "
            f"load every weight file they find; remove them there, or choose another name"
        )


def push(folder: str | Path, destination: Destination, message: str) -> dict[str, Any]:
    """Upload everything in `folder` as one commit; returns {repo, revision, commit, url}. Killed, it leaves the
    repository as it was."""
    from huggingface_hub import HfApi

    to, api = destination, HfApi()
    with _told(to), bars():
        api.create_repo(to.repo, private=to.private or None, exist_ok=True)
        if to.revision is not None and to.revision != "main":
            api.create_branch(to.repo, branch=to.revision, exist_ok=True)
        done = api.upload_folder(
            folder_path=folder, repo_id=to.repo, revision=to.revision, commit_message=message,
            allow_patterns=sorted(OURS),
        )  # fmt: skip
    return {"repo": to.repo, "revision": to.revision or "main", "commit": done.oid, "url": str(done.commit_url)}


@contextlib.contextmanager
def _told(to: Destination) -> Iterator[None]:
    from huggingface_hub import errors

    try:
        yield
    except errors.HFValidationError as error:
        raise BadInput(f"--push-to-hub {to.repo}: {error}") from error
    except errors.HfHubHTTPError as error:
        status = error.response.status_code if error.response is not None else 0
        advice = "check the token: `hf auth whoami`" if status in (401, 403) else "try again later"
        if status == 403:
            advice = f"the token may not write to {to.repo}; make one that may, or choose another owner"
        raise EyasError(f"--push-to-hub {to.repo}: the hub refused ({_first_line(error)}); {advice}") from error
    except Exception as error:
        if not (isinstance(error, OSError) or of_the_network(error)):
            raise
        raise EyasError(
            f"--push-to-hub {to.repo}: the hub cannot be reached ({_first_line(error)}); check the network"
        ) from error


def _first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
