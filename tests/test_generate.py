"""Batched generation says what transformers' own generate says, whatever else it generates at the same time.

pytest -q tests/test_generate.py
"""

from __future__ import annotations

import contextlib
from pathlib import Path

import numpy as np
import pytest
import torch

from eyas.errors import BadInput
from eyas.target import generate
from eyas.target.answering import make_generator
from eyas.target.generate import Generator
from eyas.target.model import Target
from eyas.target.plain import PlainGenerator
from eyas.target.requests import Request


@pytest.fixture(scope="module")
def target(tiny_target: Path) -> Target:
    return Target.load(tiny_target)


def prompts(count: int, longest: int, vocab: int = 300) -> list[list[int]]:
    rng = np.random.default_rng(0)
    return [rng.integers(3, vocab, size=n).tolist() for n in rng.integers(1, longest, size=count)]


def reference(target: Target, ids: list[int], new: int) -> list[int]:
    """transformers' greedy generate, one prompt at a time."""
    out = target.model.generate(
        torch.tensor([ids]), attention_mask=torch.ones(1, len(ids)), max_new_tokens=new, do_sample=False
    )
    return out[0, len(ids) :].tolist()


def answers(generator: Generator | PlainGenerator, asked: list[list[int]], **fields) -> list:
    for key, ids in enumerate(asked):
        generator.add(Request(key, ids, **{k: v[key] for k, v in fields.items()}))
    out = {}
    with generator.running():
        while generator.waiting or generator.active:
            out |= {a.key: a for a in generator.step()}
    return [out[key] for key in range(len(asked))]


@pytest.mark.parametrize("slots", [3, 24])
def test_against_transformers_greedy(target: Target, slots: int):
    asked = [
        *prompts(10, 60),
        *prompts(2, 3),
        list(range(3, 90)),
    ]  # prompts from 64 tokens on are read in a pass of their own
    got = answers(Generator(target, slots=slots, max_new_tokens=12, stop_loops=False), asked)
    for ids, answer in zip(asked, got, strict=True):
        assert answer.ids == reference(target, ids, 12)
        assert answer.finish == ("stop" if answer.ids[-1] == 2 else "length")
    assert {a.finish for a in got} == {"stop", "length"}


def test_sampled_answers_depend_on_their_seed_alone(target: Target):
    asked = [[5, 6, 7], [5, 6, 7], *prompts(6, 20)]
    seeds = list(range(len(asked)))
    kwargs = {"max_new_tokens": 8, "temperature": 1.0, "stop_loops": False}
    together = answers(Generator(target, slots=64, **kwargs), asked, seed=seeds)
    backwards = answers(Generator(target, slots=5, **kwargs), asked[::-1], seed=seeds[::-1])[::-1]
    alone = answers(PlainGenerator(target, **kwargs), asked, seed=seeds)
    assert [a.ids for a in together] == [a.ids for a in backwards] == [a.ids for a in alone]
    assert together[0].ids != together[1].ids, "equal prompts with different seeds"


def test_sampling_follows_the_distribution(target: Target):
    """2,000 first tokens at temperature 1 against the target's probabilities; total variation below 0.15."""
    ids = [5, 6, 7]
    with torch.no_grad():
        wanted = target.model(torch.tensor([ids])).logits[0, -1].double().softmax(-1)
    generator = Generator(target, slots=256, max_new_tokens=1, temperature=1.0)
    got = answers(generator, [ids] * 2000, seed=list(range(2000)))
    seen = torch.bincount(torch.tensor([a.ids[0] for a in got]), minlength=300).double() / 2000
    assert 0.5 * (seen - wanted).abs().sum() < 0.15


def test_states_do_not_depend_on_the_batch(target: Target):
    """Bit-equal: what lies in the slots of an answer after its last step is the same alone and among others."""
    asked = prompts(20, 30)

    def first_slot(generator: Generator) -> list[torch.Tensor]:
        for key, ids in enumerate(asked if generator is not alone else asked[:1]):
            generator.add(Request(key, ids))
        with generator.running():
            for _ in range(len(asked[0]) + 4):
                generator.step()
        group, row = next((g, i) for g in generator._groups for i, r in enumerate(g.requests) if r and r.key == 0)
        return [k[row, :, : group.fed[row]] for k in group.slots.keys if k is not None]

    alone = Generator(target, slots=16, max_new_tokens=40, stop_loops=False)
    among = Generator(target, slots=32, max_new_tokens=40, stop_loops=False)
    for a, b in zip(first_slot(alone), first_slot(among), strict=True):
        assert torch.equal(a, b)


def test_a_shared_beginning_changes_nothing(target: Target):
    opening = [1, 9, 8, 7, 6, 5, 4]
    asked = [[*opening, *ids] for ids in prompts(5, 80)] + [[3, 4, 5]]
    plain = answers(Generator(target, slots=8, max_new_tokens=6), asked)
    shared = answers(Generator(target, slots=8, max_new_tokens=6, prefix=opening), asked)
    assert [a.ids for a in plain] == [a.ids for a in shared]


def test_loops_are_cut_short(target: Target):
    asked = prompts(30, 12)
    free = answers(Generator(target, slots=32, max_new_tokens=80, stop_loops=False), asked)
    stopped = answers(Generator(target, slots=32, max_new_tokens=80), asked)
    assert any(a.finish == "loop" for a in stopped), "a random model falls into loops"
    for a, b in zip(free, stopped, strict=True):
        assert a.ids[: len(b.ids)] == b.ids
        if b.finish == "loop":
            assert len(b.ids) < 80
        else:
            assert a == b


def test_little_memory_means_fewer_slots_not_other_answers(target: Target):
    asked = prompts(10, 100)
    tight = Generator(target, slots=32, max_new_tokens=4, memory_bytes=1)
    assert [a.ids for a in answers(tight, asked)] == [
        a.ids for a in answers(Generator(target, slots=32, max_new_tokens=4), asked)
    ]


def test_too_long_and_empty_are_refused(target: Target):
    generator = Generator(target, max_new_tokens=100)
    with pytest.raises(BadInput, match="256 positions"):
        generator.add(Request("long", [5] * 200))
    with pytest.raises(BadInput, match="must not be empty"):
        generator.add(Request("none", []))


def _family(config, tmp_path: Path) -> Target:
    """A random model of another family as a Target; no tokenizer is needed here."""
    from transformers import AutoModelForCausalLM

    from eyas.target.facts import read_facts

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    model.generation_config.eos_token_id = 2
    model.save_pretrained(tmp_path)
    return Target(model, None, read_facts(tmp_path), tmp_path)


def _sizes(**more) -> dict:
    return {
        "vocab_size": 300, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256, "initializer_range": 0.2,
        "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, **more,
    }  # fmt: skip


@pytest.mark.parametrize("family", ["gemma3_text", "qwen3", "gemma2"])
def test_other_families_against_transformers(family: str, tmp_path: Path):
    """Sliding windows of 16 tokens, soft-capped logits, q/k norms: the model's own mask and formulas must survive."""
    from transformers import AutoConfig

    window = {"sliding_window": 16} if family != "qwen3" else {}
    target = _family(AutoConfig.for_model(family, **_sizes(**window)), tmp_path)
    generator = make_generator(target, slots=16, max_new_tokens=12, stop_loops=False)
    assert isinstance(generator, Generator)
    before = target.model.config._attn_implementation
    asked = [*prompts(5, 50), list(range(3, 90))]
    for ids, answer in zip(asked, answers(generator, asked), strict=True):
        assert answer.ids == reference(target, ids, 12)
    assert target.model.config._attn_implementation == before


@pytest.mark.parametrize(("share", "kind"), [(1e-4, Generator), (1e-2, PlainGenerator)])
def test_rounding_is_no_disagreement(share: float, kind: type, tmp_path: Path, monkeypatch, caplog):
    """CPUs sum large products in another order than small ones; only more than that is another model, and is said."""
    from transformers import AutoConfig

    target = _family(AutoConfig.for_model("llama", **_sizes()), tmp_path)
    slot_attention = generate.slot_attention

    @contextlib.contextmanager
    def rounded(model):
        with slot_attention(model) as step:
            yield lambda ids, now: (final := step(ids, now)) + share * final.abs().max()

    monkeypatch.setattr(generate, "slot_attention", rounded)
    assert type(make_generator(target, max_new_tokens=4)) is kind
    assert ("its own, slower generation" in caplog.text) is (kind is PlainGenerator)


def test_a_family_without_keys_and_values_falls_back(tmp_path: Path):
    from transformers import MambaConfig, MambaForCausalLM

    config = MambaConfig(
        vocab_size=300, hidden_size=32, num_hidden_layers=2, state_size=4, eos_token_id=2, pad_token_id=0
    )
    torch.manual_seed(0)
    model = MambaForCausalLM(config).eval()

    class Bare:
        pass

    target = Bare()
    target.model, target.facts = model, Target.__new__(Target)
    target.facts = type("Facts", (), {"eos_ids": (2,), "max_position": 256, "num_layers": 2, "num_kv_heads": 1,
                                      "head_dim": 8, "vocab_size": 300})()  # fmt: skip
    generator = make_generator(target, max_new_tokens=8, stop_loops=False)
    assert isinstance(generator, PlainGenerator)
    asked = prompts(3, 10)
    for ids, answer in zip(asked, answers(generator, asked), strict=True):
        assert answer.ids == reference(target, ids, 8)
