"""Rounds and whole answers of speculative decoding against slower ways to the same numbers.

    pytest -q tests/test_decode_step.py

Everything is float32 with weights of ordinary size; states from a cache and from one whole forward differ by the order
of sums only, hence tolerances of 1e-4 on values of order 1.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from eyas.conventions import Conventions
from eyas.decode.acceptance import Acceptance
from eyas.decode.answers import Answer, decode
from eyas.decode.replay import accepted_per_row, walk_rounds
from eyas.decode.rules import Proposal, Rule
from eyas.decode.step import Batch, ChainDrafter, Slots, refuse_uncroppable
from eyas.draft.model import Draft
from eyas.draft.shape import DraftShape
from eyas.draft.unroll import Packing
from eyas.errors import BadInput, EyasError
from eyas.target.model import Target
from eyas.vocab import VocabMap

PROMPTS = [[5, 17, 40, 8, 99, 3], [7], [250, 11, 11, 42, 60, 61, 62, 63, 64, 65], [1, 33, 21]]
TOLERANCE = {"atol": 1e-4, "rtol": 1e-4}


@pytest.fixture(scope="module")
def target(tiny_target: Path) -> Target:
    return Target.load(tiny_target)


def make_draft(target: Target, seed: int = 0, size: int = 100, **conventions) -> tuple[Draft, VocabMap]:
    """A random draft with `size` ids, every third of the target's."""
    given = {"taps": (2, 4, 5), "num_target_layers": 8, "rms_norm_eps": 1e-5, **conventions}
    shape = DraftShape(32, 32, 64, 2, 1, 16, 300, size, num_taps=3)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        draft = Draft(shape, Conventions(**given))
        for p in draft.parameters():
            if p.ndim > 1:
                torch.nn.init.normal_(p, std=0.2)
    draft.set_embedding(target.model.get_input_embeddings().weight)
    return draft.requires_grad_(False), VocabMap.from_absolute(torch.arange(size) * (300 // size), 300)


@pytest.fixture(scope="module")
def truths(target: Target) -> list[list[int]]:
    """Forty tokens after each prompt by transformers' own greedy decoding: nothing of ours in it."""
    how = {"max_new_tokens": 40, "do_sample": False, "eos_token_id": None}
    return [target.model.generate(torch.tensor([p]), **how)[0, len(p) :].tolist() for p in PROMPTS]


class Coached(ChainDrafter):
    """Runs the draft as ever, but proposes the true continuation, except that the `wrong`-th draft of round r is wrong.

    `wrong[b][r % len]` in 0 .. k: how many drafts sequence b gets accepted in round r.
    """

    def __init__(self, draft, vocab_map, truths: list[list[int]], wrong: list[list[int]]) -> None:
        super().__init__(draft, vocab_map)
        self.truths, self.wrong, self.said, self.round = truths, wrong, [1] * len(truths), 0

    def propose(self, k: int, slots: Slots) -> Proposal:
        ids = super().propose(k, slots).ids
        for b, (truth, wrong, said) in enumerate(zip(self.truths, self.wrong, self.said, strict=True)):
            good = min(wrong[self.round % len(wrong)], k)
            ids[b] = torch.tensor(truth[said : said + k])
            if good < k:
                ids[b, good] = (ids[b, good] + 1) % 300
            self.said[b] = said + good + 1
        self.round += 1
        return Proposal(ids)


def text_of(batch: Batch, first: torch.Tensor, rounds: int, k: int) -> list[list[int]]:
    text = [[t] for t in first.tolist()]
    for _ in range(rounds):
        accepted, tokens = batch.step(k)
        for b, n in enumerate(accepted.tolist()):
            text[b] += tokens[b, : n + 1].tolist()
    return text


@pytest.mark.parametrize(
    "conventions", [{}, {"norm_output": True, "fc_norm": True}, {"norm_before_residual": True, "qk_norm": True}]
)
def test_state_after_partial_accepts_is_that_of_a_fresh_prefill(
    target: Target, truths: list[list[int]], conventions: dict
):
    draft, vocab = make_draft(target, **conventions)
    wrong = [[0, 2, 4, 1], [4], [1, 0, 0], [3, 4]]
    batch = Batch(target, PROMPTS, Coached(draft, vocab, truths, wrong))
    text = text_of(batch, batch.last, 5, k=4)
    batch.select([2, 0, 1])  # closes the holes, drops a sequence, changes the order
    drafts = ChainDrafter.propose(batch.drafter, 4, batch.slots).ids

    for row, b in enumerate([2, 0, 1]):
        assert text[b] == truths[b][: len(text[b])]
        fresh = Batch(target, [PROMPTS[b] + text[b][:-1]], ChainDrafter(draft, vocab))
        n = len(PROMPTS[b]) + len(text[b]) - 1
        assert fresh.last[0] == batch.last[row] == text[b][-1]
        assert batch.slots.lengths[row] == fresh.slots.lengths[0] == n
        torch.testing.assert_close(batch.drafter.h[row], fresh.drafter.h[0], **TOLERANCE)
        for mine, theirs in zip(batch.drafter.cache._kv[0], fresh.drafter.cache._kv[0], strict=True):
            torch.testing.assert_close(mine[row, :, :n], theirs[0, :, :n], **TOLERANCE)
        for mine, theirs in zip(batch.cache.layers, fresh.cache.layers, strict=True):
            torch.testing.assert_close(mine.keys[row, :, :n], theirs.keys[0], **TOLERANCE)
            torch.testing.assert_close(mine.values[row, :, :n], theirs.values[0], **TOLERANCE)
        assert drafts[row].tolist() == fresh.drafter.propose(4, fresh.slots).ids[0].tolist()


def test_a_single_sequence_never_has_holes(target: Target, truths: list[list[int]]):
    draft, vocab = make_draft(target)
    batch = Batch(target, PROMPTS[:1], Coached(draft, vocab, truths[:1], [[0, 2, 4, 1]]))
    for _ in range(4):
        batch.step(4)
        n = int(batch.slots.lengths)
        assert batch.slots.real.shape[1] == n == batch.cache.get_seq_length() == batch.drafter.cache.length


def test_chain_follows_the_contract(target: Target):
    """Inputs, positions and keys of a chain, written out row by row without a cache."""
    draft, vocab = make_draft(target, seed=3)
    prompt = PROMPTS[2]
    batch = Batch(target, [prompt], ChainDrafter(draft, vocab))
    drafts = batch.drafter.propose(4, batch.slots).ids[0].tolist()

    taps, final = target.states(torch.tensor([prompt]), taps=(2, 4, 5))
    x = [*prompt, int(target.head(final[0, -1]).argmax())]
    last, mine = len(prompt) - 1, []
    for k in range(4):
        # Anew for every step: all step-0 rows, then row `last` at its steps 1 .. k, one key each.
        cache, rows = draft.new_cache(), torch.arange(len(prompt))
        h = draft.step(draft.embed(torch.tensor([x[1 : last + 2]])), draft.fuse(taps), rows, cache)[:, -1:]
        for j in range(1, k + 1):
            token = torch.tensor([[mine[j - 1]]])
            h = draft.step(draft.embed(token), draft.feedback(h), torch.tensor([last + j]), cache)
        assert cache.length == len(prompt) + k
        mine.append(int(vocab.ids[draft.logits(h)[0, 0].argmax()]))
    assert drafts == mine


def test_the_drafter_gets_the_states_of_exactly_the_text(target: Target, truths: list[list[int]]):
    class Spy:
        taps = (0, 5, 8)  # the ends of the range too: the embedding output, and the stream before the final norm

        def __init__(self) -> None:
            self.rows: list[list[torch.Tensor]] = [[] for _ in PROMPTS]
            self.tokens: list[list[int]] = [[] for _ in PROMPTS]

        def start(self, rule: Rule) -> None:
            pass

        def commit(self, taps: torch.Tensor, tokens: torch.Tensor, counts: torch.Tensor, slots: Slots) -> None:
            for b, n in enumerate(counts.tolist()):
                self.rows[b].append(taps[b, :n])
                self.tokens[b] += tokens[b, :n].tolist()

        def propose(self, k: int, slots: Slots) -> Proposal:
            return Proposal(torch.stack([torch.tensor(truths[b][len(self.tokens[b]) - len(p) + 1 :][:k]) + (b % 2)
                                         for b, p in enumerate(PROMPTS)]))  # fmt: skip

    spy = Spy()
    batch = Batch(target, PROMPTS, spy)  # type: ignore[arg-type]
    text = text_of(batch, batch.last, 3, k=3)
    for b, prompt in enumerate(PROMPTS):
        assert len(text[b]) == (4 if b % 2 else 13)
        whole = torch.tensor([prompt + text[b][:-1]])
        assert spy.tokens[b] == (prompt + text[b])[1:], "beside row i stands token i + 1"
        torch.testing.assert_close(torch.cat(spy.rows[b]), target.states(whole, taps=(0, 5, 8))[0][0], **TOLERANCE)


def test_slots_by_hand():
    slots = Slots(2, torch.device("cpu"))
    assert slots.add(torch.tensor([3, 1]), 3) == 3
    assert slots.mask(1).tolist() == [[True, True, True, True], [True, False, False, True]]
    assert slots.add(torch.tensor([1, 2]), 5) == 2, "three rows that both reject are not kept"
    assert slots.real.int().tolist() == [[1, 1, 1, 1, 0], [1, 0, 0, 1, 1]]
    assert slots.lengths.tolist() == [4, 3]
    assert slots.select(torch.tensor([1])).tolist() == [[0, 3, 4]]
    assert slots.mask(2) is None


def test_refusals(target: Target):
    draft, vocab = make_draft(target, token_shift=0)
    with pytest.raises(BadInput, match="token_shift of 1"):
        ChainDrafter(draft, vocab)
    with pytest.raises(BadInput, match="without tokens"):
        Batch(target, [[1], []])
    facts = SimpleNamespace(raw={"layer_types": ["linear_attention", "full_attention"]})
    hybrid = SimpleNamespace(facts=facts, dir="somewhere")
    with pytest.raises(EyasError, match="linear_attention"):
        refuse_uncroppable(hybrid)  # type: ignore[arg-type]
    refuse_uncroppable(target)


# ---------------------------------------------------------------- whole answers


def test_plain_decoding_is_that_of_transformers(target: Target, truths: list[list[int]]):
    answers = decode(target, PROMPTS, max_new_tokens=20).answers
    assert [a.tokens for a in answers] == [truth[:20] for truth in truths]
    assert {a.finish for a in answers} == {"length"}


@pytest.mark.parametrize("k", [1, 4])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_any_draft_is_lossless(target: Target, seed: int, k: int):
    draft, vocab = make_draft(target, seed=seed, norm_output=seed == 1)
    plain = decode(target, PROMPTS, max_new_tokens=24)
    mixed = decode(target, PROMPTS, ChainDrafter(draft, vocab), k=k, max_new_tokens=24)
    assert [a.tokens for a in mixed.answers] == [a.tokens for a in plain.answers]
    alone = decode(target, PROMPTS[2:3], ChainDrafter(draft, vocab), k=k, max_new_tokens=24)
    assert alone.answers[0] == mixed.answers[2], "company changes neither the text nor the rounds"


def test_a_perfect_draft_reaches_k_plus_one(target: Target, truths: list[list[int]]):
    draft, vocab = make_draft(target)
    coach = Coached(draft, vocab, truths, [[4]] * 4)
    done = decode(target, PROMPTS, coach, k=4, max_new_tokens=21)
    assert done.rounds == 4
    for answer, truth in zip(done.answers, truths, strict=True):
        assert answer.tokens == truth[:21]
        assert answer.accepted == [4, 4, 4, 4]
        assert answer.acceptance(4).tau == 5.0


def test_partial_accepts_in_one_batch(target: Target, truths: list[list[int]]):
    """Each sequence at its own pace; batches shrink and caches close their holes on the way."""
    draft, vocab = make_draft(target)

    class Pacing(Coached):
        def select(self, rows, order):  # the script follows the sequences that go on
            super().select(rows, order)
            for name in ("truths", "wrong", "said"):
                setattr(self, name, [getattr(self, name)[i] for i in rows.tolist()])

    paces = [[0, 2, 4, 1], [4], [1, 0, 0], [3, 4]]
    done = decode(target, PROMPTS, Pacing(draft, vocab, truths, paces), k=4, max_new_tokens=30)
    for answer, truth, pace in zip(done.answers, truths, paces, strict=True):
        assert answer.tokens == truth[:30]
        assert answer.accepted == [pace[r % len(pace)] for r in range(len(answer.accepted))]
        assert answer.ends[-1] == 1 + sum(answer.accepted) + len(answer.accepted) >= 30


def test_cut_off_rounds_are_left_out():
    answer = Answer([9])
    assert not answer._append([1, 2, 3], limit=6, eos_ids=())
    assert answer._append([4, 5, 6, 7], limit=6, eos_ids=())
    answer.accepted = [2, 3]
    assert answer.tokens == [9, 1, 2, 3, 4, 5]
    assert answer.finish == "length"
    assert answer.acceptance(4).histogram == (0, 0, 1, 0, 0), "of the second round's four drafts two reach too far"
    assert answer.whole_acceptance(4).histogram == (0, 0, 1, 1, 0)
    assert answer.acceptance(4, upto=5).rounds == 1
    assert answer.acceptance(4, upto=4).rounds == 0, "a round that reaches into a loop does not count"

    stopped = Answer([9])
    assert stopped._append([1, 2, 3], limit=64, eos_ids=(2,))
    stopped.accepted = [2]
    assert (stopped.tokens, stopped.finish) == ([9, 1, 2], "stop")
    assert stopped.acceptance(2).histogram == (0, 0, 1), "only the bonus token was cut off"
    assert stopped.acceptance(3).rounds == 0


def test_answers_end_where_the_target_ends_them(target: Target, truths: list[list[int]]):
    draft, vocab = make_draft(target)
    eos = {truths[0][0], truths[1][7]}  # one answer ends with prefill's token
    expected = []
    for truth in truths:
        stop = next((i for i, t in enumerate(truth) if t in eos), None)
        expected.append((truth[:24], "length") if stop is None else (truth[: stop + 1], "stop"))
    for drafter, k in ((None, 0), (ChainDrafter(draft, vocab), 3)):
        done = decode(target, PROMPTS, drafter, k=k, max_new_tokens=24, eos_ids=eos)
        assert [(a.tokens, a.finish) for a in done.answers] == expected
    assert decode(target, PROMPTS[:1], max_new_tokens=24, eos_ids=eos).rounds == 0


def test_drafts_without_a_draft_are_refused(target: Target):
    with pytest.raises(BadInput, match="need a draft"):
        decode(target, PROMPTS, k=4)


def test_rounds_are_those_that_replay_predicts(target: Target, truths: list[list[int]]):
    """Decoding with two caches, and replay over recorded states of the finished text, count the same rounds.

    Replay unrolls all rows at once with other code. The head is fitted to these texts, so that some drafts are right.
    """
    draft, _ = make_draft(target, size=300)
    vocab, k = VocabMap.identity(300), 3
    texts = [torch.tensor(p + t) for p, t in zip(PROMPTS, truths, strict=True)]
    taps = [target.states(x[None], taps=draft.conventions.taps)[0][0] for x in texts]
    outputs = [
        draft.step(draft.embed(x[None, 1:]), draft.fuse(t[None, :-1]), torch.arange(len(x) - 1), draft.new_cache())[
            0, :-1
        ]
        for x, t in zip(texts, taps, strict=True)
    ]
    wanted = torch.nn.functional.one_hot(torch.cat([x[2:] for x in texts]), 300).float()
    draft.lm_head.weight.copy_(torch.linalg.lstsq(draft.norm(torch.cat(outputs)), wanted).solution.T)

    done = decode(target, PROMPTS, ChainDrafter(draft, vocab), k=k, max_new_tokens=40)
    for prompt, x, t, answer in zip(PROMPTS, texts, taps, done.answers, strict=True):
        assert prompt + answer.tokens == x.tolist()
        run = (len(x) - 1 - torch.arange(len(x))) * (torch.arange(len(x)) >= len(prompt) - 1)
        accepted = accepted_per_row(draft, x, t, run, Packing(torch.tensor([0, len(x)])), vocab.ids, k)
        assert tuple(walk_rounds(accepted, run, k).tolist()) == answer.acceptance(k).histogram
    whole = Acceptance.merged([answer.acceptance(k) for answer in done.answers], k)
    assert min(whole.histogram) > 0, "every number of accepted drafts occurred"
