"""States that an engine computes: it turns ids into residual streams, and all that follows them is done here.

    fill_from_states(states, ends, documents, buffer, taps)

An engine knows nothing of Eyas: it is asked for the residual streams at the taps and after the last block. The final
norm, the target's choices and their logsumexp are made of the last one with the target's own norm and head, as they are
for files of other trainers. What comes back is believed only as far as it can be checked here: its ids, its lengths,
finite numbers and no empty rows. Whether it is of the right request, only the target can say: see audit.py.

pytest tests/test_features_states.py
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

import torch

from eyas.errors import EyasError
from eyas.features.conversations import Document
from eyas.features.passes import store
from eyas.features.writer import ShardBuffer
from eyas.target.weights import Ends

States = Callable[[Sequence[torch.Tensor]], Iterable[tuple[torch.Tensor, torch.Tensor]]]
"""ids int [L] of each conversation -> (ids int [L] as computed, streams [L, layers, H]) of each, in their order."""


class Engine(Protocol):
    """What computes states elsewhere than in this process. Small and picklable: it holds settings, no model."""

    spare: int
    """Positions of the context that a conversation must leave free."""

    def told(self) -> Mapping[str, Any]:
        """What decides its numbers, for the manifest: name, version, arguments."""
        ...

    def open(
        self, folder: Path, layers: Sequence[int], longest: int, batch_tokens: int, dtype: str, scratch: Path,
        trust_remote_code: bool,
    ) -> AbstractContextManager[States]:  # fmt: skip
        """The engine with the target in `folder` loaded; layers: taps, ascending; longest: tokens of a conversation.

        batch_tokens: of one forward pass. scratch: a folder for its files, which is removed afterwards.
        """
        ...


def layers_of(taps: Sequence[int], num_layers: int) -> list[int]:
    """What an engine is asked for: the taps, and the stream after the last block. Ascending, each once."""
    return sorted({*taps, num_layers})


@torch.inference_mode()
def fill_from_states(
    states: States,
    ends: Ends,
    documents: Sequence[Document],
    buffer: ShardBuffer,
    taps: Sequence[int],
    advance: Callable[[int], Any] = lambda n: None,
    places: Sequence[int] | None = None,
) -> None:
    """As passes.fill_shard, of an engine's streams. Raises EyasError naming the conversation that is not right."""
    layers = layers_of(taps, ends.facts.num_layers)
    chosen = [layers.index(t) for t in taps]
    places = range(len(documents)) if places is None else places
    came = iter(states([documents[i].ids for i in places]))
    for i in places:
        document = documents[i]
        streams = _next(came, document, (len(document), len(layers), ends.facts.hidden_size))
        final = ends.normed(streams[:, -1].to(ends.embedding.device))  # [L, H]
        store(document, streams[:, chosen].flatten(1), final, ends, buffer, i)
        advance(len(document))


def _next(came: Iterator[tuple[torch.Tensor, torch.Tensor]], document: Document, shape: tuple[int, ...]) -> Any:
    """The streams of the next conversation, which must be this one."""
    try:
        ids, streams = next(came)
    except StopIteration:
        raise EyasError(
            f"conversation {document.id}: the engine returned no states for it; extract it with --engine hf"
        ) from None
    except EyasError as error:
        raise EyasError(f"conversation {document.id}: {error}; extract it with --engine hf") from error
    sent = document.ids
    if ids.shape != sent.shape or not torch.equal(ids.to(sent.dtype), sent):
        same = min(len(ids), len(sent))
        differ = (ids[:same].to(sent.dtype) != sent[:same]).nonzero().flatten()
        where = f"they differ from token {int(differ[0])} on" if len(differ) else "the others match"
        raise EyasError(
            f"conversation {document.id}: {len(sent)} ids were sent, states of {len(ids)} returned ({where}); the "
            "engine mixes up its requests: extract with --engine hf"
        )
    if streams.shape != shape:
        raise EyasError(
            f"conversation {document.id}: the engine returned states of shape {list(streams.shape)}, expected "
            f"[tokens, layers, hidden size] = {list(shape)}"
        )
    largest = streams.abs().amax(-1)  # [L, layers]
    if not bool(torch.isfinite(largest).all()):
        raise EyasError(
            f"conversation {document.id}: its states are not finite; the target runs in a precision too low for it, "
            "or rows were never written: try --dtype bfloat16 or float32"
        )
    rows = (largest[:, -1] == 0).nonzero().flatten()  # a token's layers are written together; tap 0 may well be zero
    if len(rows):
        raise EyasError(
            f"conversation {document.id}: its states are zero from token {int(rows[0])} on, so the engine never wrote "
            "them; extract it with --engine hf"
        )
    return streams
