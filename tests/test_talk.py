"""Rounds of an answer with what they looked at, text in whole characters, conversations, served engines.

pytest -q tests/test_talk.py
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from eyas.decode.answers import decode
from eyas.decode.pieces import Pieces
from eyas.decode.rules import Greedy, Rule, Sampling
from eyas.decode.talk import Round, rounds
from eyas.decode.tree import make_drafter
from eyas.errors import BadInput
from eyas.serve.client import Reply
from eyas.talk import Conversation, Local, Served, Turn, tau
from eyas.target.model import Target
from fitting import fitted_draft, greedy_texts

PROMPT = [5, 17, 40, 8, 99, 3]


@pytest.fixture(scope="module")
def target(tiny_target: Path) -> Target:
    return Target.load(tiny_target)


@pytest.fixture(scope="module")
def draft(target: Target):
    return fitted_draft(target, [PROMPT], greedy_texts(target, [PROMPT]))


# ---------------------------------------------------------------- rounds


@pytest.mark.parametrize("tree", [{}, {"topk": 3, "nodes": 7}])
@pytest.mark.parametrize("temperature", [0.0, 0.03])
def test_rounds_are_those_of_decode(target: Target, draft, tree: dict, temperature: float):
    def rule() -> Rule:
        return Sampling(temperature, 3) if temperature else Greedy()

    drafter, eos = make_drafter(*draft, 3, **tree), {36}
    how = {"k": 3, "max_new_tokens": 23, "eos_ids": eos}
    answer = decode(target, [PROMPT], drafter, rule=rule(), **how).answers[0]
    done = list(rounds(target, PROMPT, drafter, rule=rule(), **how))
    assert [token for r in done for token in r.tokens] == answer.tokens
    assert [r.accepted for r in done[1:]] == answer.accepted
    assert done[-1].finish == answer.finish
    assert not any(r.finish for r in done[:-1])
    assert done[0].own == (True,)
    for r in done[1:-1]:
        assert r.own == (False,) * r.accepted + (True,)
    assert sum(r.drafted for r in done) == (7 if tree else 3) * len(answer.accepted)
    assert max(answer.accepted) > 0


@pytest.mark.parametrize("tree", [{}, {"topk": 3, "nodes": 7}])
@pytest.mark.parametrize("temperature", [0.0, 0.6])
def test_a_look_says_what_the_models_say(target: Target, draft, tree: dict, temperature: float):
    """All odds of every round against whole forwards, the draft's against its own slow path."""
    model, vocab = draft
    drafter, text = make_drafter(*draft, 3, **tree), list(PROMPT)
    rule: Rule = Sampling(temperature, 3) if temperature else Greedy()
    for number, done in enumerate(rounds(target, PROMPT, drafter, k=3, rule=rule, max_new_tokens=16)):
        look, before = done.look, list(text)
        text += done.tokens
        if look is None:
            assert number == 0
            continue
        if done.finish:
            break  # cut off
        assert (look.last, look.token, look.tree) == (before[-1], done.tokens[-1], bool(tree))
        assert look.token_known
        paths: dict[int, list[int]] = {0: []}
        for guess in look.guesses:
            above = paths[guess.parent]
            paths[guess.row] = [*above, guess.token]
            logits = target.model(torch.tensor([before + above])).logits[0, -1]
            p = (logits / (temperature or 1)).softmax(-1)
            assert guess.target_odds == pytest.approx(float(p[guess.token]), abs=1e-4)
            assert (guess.likeliest, guess.likeliest_odds) == (int(p.argmax()), pytest.approx(float(p.max()), abs=1e-4))

            cache, rows = model.new_cache(), torch.arange(len(before) - 1)
            taps = target.states(torch.tensor([before[:-1]]), taps=model.conventions.taps)[0]
            h = model.step(model.embed(torch.tensor([before[1:]])), model.fuse(taps), rows, cache)[:, -1:]
            for j, token in enumerate(above, start=1):
                at = torch.tensor([len(before) - 2 + j])
                h = model.step(model.embed(torch.tensor([[token]])), model.feedback(h), at, cache)
            hot = temperature if temperature and not tree else 1
            q = (model.logits(h)[0, 0] / hot).softmax(-1)
            assert guess.draft_odds == pytest.approx(float(q[vocab.to_draft(torch.tensor(guess.token))]), abs=1e-4)
        accepted = [paths[g.row] for g in look.guesses if g.accepted]
        assert accepted == [list(done.tokens[:n]) for n in range(1, done.accepted + 1)]
        logits = target.model(torch.tensor([before + list(done.tokens[:-1])])).logits[0, -1]
        p = (logits / (temperature or 1)).softmax(-1)
        assert look.token_odds == pytest.approx(float(p[look.token]), abs=1e-4)


def test_a_token_outside_the_draft_vocabulary_is_named(target: Target):
    from fitting import random_draft

    drafter = make_drafter(*random_draft(target, size=100), 2)
    looks = [r.look for r in rounds(target, PROMPT, drafter, k=2, max_new_tokens=20) if r.look is not None]
    assert {look.token_known for look in looks} == {True, False}
    assert all(look.token_known == (look.token % 3 == 0) for look in looks)


# ---------------------------------------------------------------- pieces


@pytest.mark.parametrize("text", ["naïve 🦅🦅 日本語\n  two  spaces", "🦅", " leading", "a\tb"])
def test_pieces_are_whole_and_nothing_is_lost(target: Target, text: str):
    ids = target.tokenizer(text, add_special_tokens=False)["input_ids"]
    pieces = Pieces(target.tokenizer, PROMPT)
    parts = [pieces.push(token) for token in ids]
    assert "".join(parts) + pieces.flush() == text
    assert not any("\ufffd" in part for part in parts)
    assert pieces.flush() == ""


def test_broken_bytes_do_not_hold_the_text_back(target: Target):
    eagle = target.tokenizer("🦅", add_special_tokens=False)["input_ids"]
    pieces = Pieces(target.tokenizer)
    broken = [pieces.push(eagle[0]) for _ in range(6)]
    assert "".join(broken).count("\ufffd") >= 4
    plain = target.tokenizer("ok", add_special_tokens=False)["input_ids"]
    assert "".join(pieces.push(token) for token in plain).endswith("ok")
    assert pieces.push(eagle[0]) == ""
    assert pieces.flush() == "\ufffd"


def test_characters_that_share_tokens():
    """Tokens that hold the end of one character and the beginning of the next: what is whole is given out at once."""
    data = "ääää".encode()
    cuts = [data[:1], data[1:3], data[3:5], data[5:7], data[7:]]

    class Tokenizer:
        def decode(self, ids: list[int], **_: object) -> str:
            return b"".join(cuts[i] for i in ids).decode(errors="replace")

    pieces = Pieces(Tokenizer())
    assert [pieces.push(i) for i in range(5)] == ["", "ä", "ä", "ä", "ä"]


def test_a_leading_space_survives_a_tokenizer_that_strips_it():
    class Stripping:  # as sentencepiece decodes: "▁" is a space, but not at the beginning
        words = ("[/INST]", "▁Hello", "▁there", ".")

        def decode(self, ids: list[int], **_: object) -> str:
            return "".join(self.words[i] for i in ids).replace("▁", " ").lstrip()

    pieces = Pieces(Stripping(), [0])
    assert [pieces.push(i) for i in (1, 2, 3)] == [" Hello", " there", "."]


# ---------------------------------------------------------------- conversations


def conversation(target: Target, draft, **how) -> Conversation:
    source = Local(target, make_drafter(*draft, 3), k=3, eos_ids=target.facts.eos_ids)
    return Conversation(target.tokenizer, source, eos_ids=target.facts.eos_ids, **how)


def test_a_conversation_keeps_what_was_said(target: Target, draft):
    talk = conversation(target, draft, system="be brief", max_new_tokens=6)
    first = talk.begin("the hawk")
    said = list(talk.rounds(first))
    talk.end(first)
    assert first.tokens == [token for r in said for token in r.tokens]
    assert first.finish in ("stop", "length")
    second = talk.begin("and?")
    text = target.tokenizer.decode(second.ids)
    for part in ("be brief", "the hawk", talk.text(first), "and?"):
        assert part in text
    talk.reset()
    assert "the hawk" not in target.tokenizer.decode(talk.begin("and?").ids)
    assert "be brief" in target.tokenizer.decode(talk.begin("and?").ids)


def test_an_answer_may_be_left_at_any_time(target: Target, draft):
    talk = conversation(target, draft, max_new_tokens=50)
    turn = talk.begin("the hawk")
    for _ in talk.rounds(turn):
        break
    talk.end(turn)
    assert (turn.finish, len(turn.tokens), len(talk.messages)) == ("interrupted", 1, 2)
    assert tau([turn]) is None
    assert turn.tokens_per_s is None


def test_the_context_ends_the_answer(target: Target, draft):
    used = len(conversation(target, draft).begin("the hawk").ids)
    assert conversation(target, draft, room=used + 4).begin("the hawk").limit == 4
    with pytest.raises(BadInput, match="/reset"):
        conversation(target, draft, room=used).begin("the hawk")


def test_counts_and_speed():
    turn = Turn("", [], 9, [Round((1,), (True,)), Round((2, 3), (False, True), 1, 4), Round((4,), (True,), 0, 4)])
    turn.seconds = 0.5
    assert (turn.counts, tau([turn, turn]), turn.tokens_per_s) == ((2, 1, 8), 1.5, 6.0)
    turn.finish = "length"
    assert (turn.counts, tau([turn]), turn.tokens_per_s) == ((1, 1, 4), 2.0, 6.0), "the last round may be cut off"


# ---------------------------------------------------------------- served


class Client:
    """As eyas.serve.client.Client: chunks of given tokens; `stuck`: waits for ever after them."""

    def __init__(
        self, chunks: Sequence[tuple[int, ...]], by_round: bool = True, stuck: bool = False, counts: dict | None = None
    ) -> None:
        self.chunks, self.by_round, self.stuck, self.counts = chunks, by_round, stuck, counts or {}
        self.asked: list[dict] = []
        self.ended = self.closed = False

    async def know(self):
        return SimpleNamespace(engine="vllm" if self.by_round else "llamacpp", by_round=self.by_round)

    async def stream(self, ids: Sequence[int], *, reply: Reply, **how):
        reply.counts |= self.counts
        self.asked.append({"ids": list(ids), **how})
        try:
            for tokens in self.chunks:
                await asyncio.sleep(0)
                yield SimpleNamespace(tokens=tokens, text="", at=0.0)
            if self.stuck:
                raise KeyboardInterrupt  # as a signal in the middle of waiting
        finally:
            self.ended = True

    async def close(self) -> None:
        self.closed = True


def test_chunks_of_an_engine_are_rounds():
    client = Client([(5,), (6, 7, 8), (), (9,), (2, 2)])
    source = Served(client, temperature=0.5, seed=4)
    done = list(source.rounds([1, 2], 20))
    assert [(r.tokens, r.own, r.accepted) for r in done] == [
        ((5,), (True,), 0), ((6, 7, 8), (False, False, True), 2), ((9,), (True,), 0), ((2, 2), (False, True), 1),
    ]  # fmt: skip
    assert source.visible
    assert client.asked == [{"ids": [1, 2], "max_tokens": 20, "temperature": 0.5, "seed": 4}]
    source.close()
    assert client.closed


def test_a_first_chunk_of_several_tells_nothing():
    done = list(Served(Client([(5, 6), (7, 8)])).rounds([1], 9))
    assert [(r.own, r.accepted) for r in done] == [((None, None), 0), ((False, True), 1)]


@pytest.mark.parametrize(("limit", "eos"), [(4, ()), (9, {8})])
def test_nobody_knows_who_said_the_last_token(limit: int, eos: set[int]):
    done = list(Served(Client([(5,), (6, 7, 8)]), eos_ids=eos).rounds([1], limit))
    assert [(r.own, r.accepted) for r in done] == [((True,), 0), ((False, False, None), 2)]
    assert next(Served(Client([(8,)]), eos_ids={8}).rounds([1], 1)).own == (True,), "prefill's token is the target's"


def test_single_tokens_say_nothing_of_drafts():
    source = Served(Client([(5,), (6,), (7,)], by_round=False))
    assert {own for r in source.rounds([1], 9) for own in r.own} == {None}
    assert not source.visible
    assert source.engine == "llamacpp"


def test_a_served_answer_can_be_left_and_interrupted(target: Target):
    client = Client([(5,), (6, 7)])
    for _ in Conversation(target.tokenizer, Served(client)).rounds(Turn("", [1], 9)):
        break
    assert client.ended, "the request is ended, not left running"
    client = Client([(5,), (6, 7)], stuck=True)
    source, seen = Served(client), []
    with pytest.raises(KeyboardInterrupt):
        for done in source.rounds([1], 9):
            seen.append(done)
    assert len(seen) == 2
    assert client.ended
    source.close()
