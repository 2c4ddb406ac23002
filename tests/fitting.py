"""Drafts for a tiny target that know given texts by heart, more or less: some of what they draft is accepted.

from fitting import fitted_draft
"""

from __future__ import annotations

import torch

from eyas.conventions import Conventions
from eyas.draft.model import Draft
from eyas.draft.shape import DraftShape
from eyas.target.model import Target
from eyas.vocab import VocabMap

TAPS = (2, 4, 5)


def random_draft(target: Target, seed: int = 0, size: int = 300, **conventions) -> tuple[Draft, VocabMap]:
    """A random draft for a target of hidden size 32 and 300 ids, of which it can say every so-many-th."""
    given = {"taps": TAPS, "num_target_layers": 8, "rms_norm_eps": 1e-5, **conventions}
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        draft = Draft(DraftShape(32, 32, 64, 2, 1, 16, 300, size, num_taps=3), Conventions(**given))
        for p in draft.parameters():
            if p.ndim > 1:
                torch.nn.init.normal_(p, std=0.2)
    draft.set_embedding(target.model.get_input_embeddings().weight)
    ids = torch.arange(size) * (300 // size)
    return draft.eval().requires_grad_(False), VocabMap.from_absolute(ids, 300)


def greedy_texts(target: Target, prompts: list[list[int]], length: int = 40) -> list[list[int]]:
    """What the target says to each prompt by transformers' own greedy decoding: nothing of ours in it."""
    how = {"max_new_tokens": length, "do_sample": False, "eos_token_id": None}
    return [target.model.generate(torch.tensor([p]), **how)[0, len(p) :].tolist() for p in prompts]


def fitted_draft(
    target: Target, prompts: list[list[int]], texts: list[list[int]], **conventions
) -> tuple[Draft, VocabMap]:
    """A draft whose head half knows these texts: often right, often wrong, and right in second place."""
    draft, vocab = random_draft(target, **conventions)
    outputs, wanted = [], []
    for prompt, text in zip(prompts, texts, strict=True):
        x = torch.tensor(prompt + text)
        taps = target.states(x[None], taps=TAPS)[0]
        h = draft.step(draft.embed(x[None, 1:]), draft.fuse(taps[:, :-1]), torch.arange(len(x) - 1), draft.new_cache())
        outputs.append(draft.norm(h[0, :-1]))
        wanted.append(x[2:])
    x, y = torch.cat(outputs), torch.nn.functional.one_hot(torch.cat(wanted), 300).float()
    draft.lm_head.weight.copy_(8 * torch.linalg.lstsq(x, y).solution.T)
    return draft, vocab
