"""Prove a draft: is decoding with it lossless, how long is its accept length, how much faster is it?

    prove("runs/demo/draft", "path/to/target", {"mt_bench": [messages, ...]}, k=4)
    eyas prove runs/demo/draft
    eyas prove runs/demo/draft --topk 4 --nodes 16      # a tree of drafts instead of a chain

Every prompt is answered twice by the same code, plainly (k = 0) and speculatively. A few prompts of each set go one by
one, and those give the speed; the rest go side by side, which changes no counts and is several times faster.

What counts (all of it is in the result, under `definition`):
- tau = 1 + accepted / rounds, prefill's token excluded; per set over all its rounds, then the mean over sets;
- rounds count whose k drafts all fall within the answer, so not near its end, where `max_new_tokens` or the
  end-of-answer token cuts, and not in endless repetition, which is easy to draft;
- answers end at the target's end-of-answer token unless `ignore_eos`, which is the way to compare with an engine run
  so; `all_rounds` gives the numbers as engines count them: every round in full, loops and cut-off tokens included.

Lossless: token-identical in float32, or the first difference is a near-tie of the target's logits.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from eyas.decode.acceptance import Acceptance, interval, rounded
from eyas.decode.answers import Decoded, decode
from eyas.decode.cases import Asked, Case, loop_start, make_cases
from eyas.decode.lossless import losslessness
from eyas.decode.rules import Greedy, Rule, Sampling
from eyas.decode.samples import sample
from eyas.decode.step import Drafter, refuse_uncroppable
from eyas.decode.tree import TreeDrafter, make_drafter
from eyas.errors import BadInput
from eyas.memory import spending
from eyas.target.model import Target

SAMPLES = 2
"""Answers of each set that are kept round by round, for the eye."""
DEFINITION = (
    "tau = 1 + accepted / rounds, prefill's token excluded, rounds whose drafts reach past the answer's end or into a "
    "loop left out; interval: 95 %, bootstrap over prompts; unconditional: share of rounds whose first j drafts were "
    "all accepted (of a tree: j drafts along its accepted path); conditional: of those whose first j-1 were"
)


def prove(
    draft_dir: str | Path,
    target_dir: str | Path,
    prompt_sets: Mapping[str, Sequence[Asked]],
    *,
    k: int = 4,
    max_new_tokens: int = 64,
    temperature: float = 0.0,
    ignore_eos: bool = False,
    seed: int = 0,
    batch: int = 24,
    timed: int = 1,
    topk: int | None = None,
    nodes: int | None = None,
    device: str = "cpu",
    trust_remote_code: bool = False,
    template_kwargs: Mapping[str, Any] | None = None,
    on_answer: Callable[[int], None] | None = None,
) -> dict[str, Any]:
    """Decode `prompt_sets` with and without the draft, in float32; the result is plain JSON values (see `measure`).

    A chain of k drafts a round, or with topk or nodes a tree of depth k (see `make_drafter`). template_kwargs: for the
    chat template. Raises Mismatch where
    draft and target do not belong together, BadInput for prompts that cannot be decoded.
    """
    from eyas.draft.checkpoint import load_draft

    target = Target.load(target_dir, device=device, dtype=torch.float32, trust_remote_code=trust_remote_code)
    draft, vocab_map, conventions = load_draft(draft_dir, target_dir, device=device, dtype=torch.float32)
    if target.facts.raw.get("sliding_window") or conventions.sliding_window:
        batch = 1  # a window counts slots, so it must not contain the holes that a batch has
    return measure(
        target,
        make_drafter(draft, vocab_map, k, topk, nodes),
        prompt_sets,
        k=k,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        ignore_eos=ignore_eos,
        seed=seed,
        batch=batch,
        timed=timed,
        template_kwargs=template_kwargs,
        on_answer=on_answer,
    )


def measure(
    target: Target,
    drafter: Drafter,
    prompt_sets: Mapping[str, Sequence[Asked]],
    *,
    k: int = 4,
    max_new_tokens: int = 64,
    temperature: float = 0.0,
    ignore_eos: bool = False,
    seed: int = 0,
    batch: int = 24,
    timed: int = 1,
    template_kwargs: Mapping[str, Any] | None = None,
    on_answer: Callable[[int], None] | None = None,
) -> dict[str, Any]:
    """`prove` with models that are loaded already. `on_answer(n)` hears of n further answers, two a prompt.

    The result: tau_mean with low and high; tau {set: {tau, low, high, prompts, rounds, ...}}; per_position by both
    definitions, over the rounds of all sets; all_rounds as engines count; lossless (None when sampling: its text is
    distributed as the target's, not equal to it), near_ties and differences; speedup and speed, at batch 1; samples,
    the first SAMPLES answers of each set round by round (samples.py).
    """
    if k < 1 or max_new_tokens < 2:
        raise BadInput(
            f"k = {k} and max_new_tokens = {max_new_tokens}: at least 1 draft and 2 tokens are needed; raise them"
        )
    refuse_uncroppable(target)
    started = time.perf_counter()
    cases, left_out = make_cases(target, prompt_sets, max_new_tokens + k, template_kwargs)

    def run(some: Sequence[Case], with_draft: bool) -> Decoded:
        rule: Rule = Sampling(temperature, seed, target.device) if temperature > 0 else Greedy()
        eos = () if ignore_eos else target.facts.eos_ids
        how: dict[str, Any] = {"rule": rule, "max_new_tokens": max_new_tokens, "eos_ids": eos}
        ids = [case.ids for case in some]
        with spending(f"decoding {len(some)} answers side by side", "lower --batch, or --max-new-tokens"):
            done = decode(target, ids, drafter, k=k, **how) if with_draft else decode(target, ids, **how)
        for case, answer in zip(some, done.answers, strict=True):
            case.speculative, case.plain = (answer, case.plain) if with_draft else (case.speculative, answer)
        if on_answer is not None:
            on_answer(len(some))
        return done

    first = [case for case in cases if case.index < timed]
    rest = sorted((case for case in cases if case.index >= timed), key=lambda case: len(case.ids))
    speed = _speed([(run([case], False), run([case], True)) for case in first])
    for start in range(0, len(rest), batch):
        run(rest[start : start + batch], False)
        run(rest[start : start + batch], True)

    for case in cases:
        assert case.speculative is not None
        case.loop = loop_start(case.speculative.tokens)
    result = {**_acceptance(cases, k, left_out), **losslessness(target, cases, temperature), **speed}
    tree = {"topk": drafter.topk, "nodes": drafter.nodes} if isinstance(drafter, TreeDrafter) else {}
    result["settings"] = {
        "drafting": "tree" if tree else "chain",
        **tree,
        "k": k,
        "max_new_tokens": max_new_tokens,
        "temperature": temperature,
        "ignore_eos": ignore_eos,
        "seed": seed,
        "batch": batch,
        "dtype": str(target.model.dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        **({"template_kwargs": dict(template_kwargs)} if template_kwargs else {}),
    }
    result["samples"] = [sample(target.tokenizer, drafter, case) for case in cases if case.index < SAMPLES]
    result["definition"] = DEFINITION
    result["seconds"] = round(time.perf_counter() - started, 2)
    return result


def _acceptance(cases: Sequence[Case], k: int, left_out: Mapping[str, int]) -> dict[str, Any]:
    """Accept length per set and over sets, and rates per position."""
    sets: dict[str, list[Acceptance]] = {}
    whole = Acceptance.of([], k)
    loops: dict[str, int] = dict.fromkeys(left_out, 0)
    for case in cases:
        assert case.speculative is not None
        sets.setdefault(case.set, []).append(case.speculative.acceptance(k, case.loop))
        whole += case.speculative.whole_acceptance(k)
        loops[case.set] += case.loop is not None
    per_set: dict[str, Any] = {}
    for name, parts in sets.items():
        low, high = interval([parts])
        numbers = Acceptance.merged(parts, k).to_dict()
        per_set[name] = {"tau": numbers.pop("tau"), "low": rounded(low), "high": rounded(high), "prompts": len(parts)}
        per_set[name] |= {**numbers, "loops": loops[name], "left_out": left_out[name]}
    low, high = interval(list(sets.values()))
    pooled = Acceptance.merged([part for parts in sets.values() for part in parts], k).to_dict()
    taus = [entry["tau"] for entry in per_set.values()]
    return {
        "tau_mean": None if None in taus else rounded(sum(taus) / len(taus)),
        "tau_mean_low": rounded(low),
        "tau_mean_high": rounded(high),
        "tau": per_set,
        "per_position": {name: pooled[name] for name in ("unconditional", "conditional")},
        "rounds": pooled["rounds"],
        "accepted": pooled["accepted"],
        "all_rounds": whole.to_dict(),
    }


def _speed(pairs: Sequence[tuple[Decoded, Decoded]]) -> dict[str, Any]:
    """Tokens per second of decoding (prefill excluded) of plain and speculative runs of the same prompts."""

    def rate(runs: Sequence[Decoded]) -> float | None:
        tokens = sum(len(answer.tokens) - 1 for run in runs for answer in run.answers)
        seconds = sum(run.decode_s for run in runs)
        return tokens / seconds if tokens else None

    plain, speculative = rate([a for a, _ in pairs]), rate([b for _, b in pairs])
    return {
        "speedup": rounded(speculative / plain, 3) if plain and speculative else None,
        "speed": {
            "plain_tokens_per_s": rounded(plain, 2),
            "speculative_tokens_per_s": rounded(speculative, 2),
            "prompts": len(pairs),
            "batch": 1,
        },
    }
