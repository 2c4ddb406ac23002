"""The predicted accept length on held-out features: chain drafting over every recorded answer (decode/replay.py).

Exercise it:  pytest tests/test_train_loop.py tests/test_decode_replay.py
"""

from __future__ import annotations

from typing import Any

import torch

from ..decode.acceptance import Acceptance
from ..decode.replay import accepted_per_row, walk_rounds
from ..draft.model import Draft
from ..features.reader import FeatureSet
from ..vocab import VocabMap
from .batches import make_batch, plan_epoch
from .ranks import ALONE, Ranks

DEFINITION = "1 + accepted/rounds; chain drafting on the draft's own tokens over held-out answers"


def predict_accept_length(
    draft: Draft,
    features: FeatureSet,
    vocab_map: VocabMap,
    draft_tokens: int,
    *,
    batch_tokens: int = 4096,
    ranks: Ranks = ALONE,
) -> dict[str, Any] | None:
    """Accept length, per-position rates and rounds with `draft_tokens` a round; None where no answer fills a round.

    per_position: share of rounds in which the first k tokens are accepted. batch_tokens bounds memory only. The
    processes of `ranks` share the documents.
    """
    device = draft.fc.weight.device
    target_ids = vocab_map.ids.to(device)
    histogram = torch.zeros(draft_tokens + 1, dtype=torch.int64)
    batches = plan_epoch(features.doc_lengths.numpy(), batch_tokens, seed=0, epoch=0)
    for docs in batches[ranks.rank :: ranks.world]:
        b = make_batch(features, docs, device)
        accepted = accepted_per_row(draft, b.ids, b.aux, b.run, b.packing, target_ids, draft_tokens)
        histogram += walk_rounds(accepted, b.run, draft_tokens)
    ranks.sum(histogram)
    if not int(histogram.sum()):
        return None
    found = Acceptance(tuple(histogram.tolist()))
    return {
        "accept_length": round(found.tau, 4),
        "per_position": [round(float(rate), 4) for rate in found.unconditional],
        "rounds": found.rounds,
        "draft_tokens": draft_tokens,
        "definition": DEFINITION,
    }
