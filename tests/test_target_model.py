"""Target: taps by their numbers, batch equal to one at a time, and the head of each family.

    pytest -q tests/test_target_model.py

The families are random and tiny, built by transformers; the references are transformers' own outputs and hooks on the
*outputs* of blocks (Target reads their inputs).
"""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import pytest
import torch

from eyas.errors import BadInput, EyasError
from eyas.target.facts import read_facts
from eyas.target.model import Target
from eyas.target.weights import load_ends

LAYERS, WIDTH = 3, 16


def _config(family: str):
    import transformers as t

    plain = {
        "vocab_size": 300, "hidden_size": WIDTH, "intermediate_size": 24, "num_hidden_layers": LAYERS,
        "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 128, "initializer_range": 0.3,
        "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
    }  # fmt: skip
    headed = {**plain, "head_dim": 8}
    gemma = {**headed, "query_pre_attn_scalar": 8, "sliding_window": 4}
    if family == "gemma3":  # a multimodal wrapper with its language model in text_config
        vision = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1,
                  "image_size": 16, "patch_size": 8}  # fmt: skip
        return t.Gemma3Config(text_config=gemma, vision_config=vision, mm_tokens_per_image=4)
    return {
        "llama": lambda: t.LlamaConfig(**headed, tie_word_embeddings=True),
        "qwen2": lambda: t.Qwen2Config(**plain),
        "qwen3": lambda: t.Qwen3Config(**headed),
        "gemma2": lambda: t.Gemma2Config(**gemma, final_logit_softcapping=3.0),
        "gemma3_text": lambda: t.Gemma3TextConfig(**gemma, final_logit_softcapping=5.0),
        "cohere": lambda: t.CohereConfig(**plain, logit_scale=0.25),
        "granite": lambda: t.GraniteConfig(**plain, logits_scaling=4.0, embedding_multiplier=3.0),
        "gpt2": lambda: t.GPT2Config(
            vocab_size=300,
            n_embd=WIDTH,
            n_layer=LAYERS,
            n_head=2,
            n_positions=128,
            initializer_range=0.3,
            eos_token_id=2,
        ),
    }[family]()


FAMILIES = ["llama", "qwen2", "qwen3", "gemma2", "gemma3_text", "gemma3", "cohere", "granite", "gpt2"]


@pytest.fixture(scope="module", params=FAMILIES)
def family_dir(request: pytest.FixtureRequest, tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import AutoModelForCausalLM

    folder = tmp_path_factory.mktemp(request.param)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = AutoModelForCausalLM.from_config(_config(request.param)).float()
        for name, weight in model.named_parameters():
            if "norm" in name or "ln_" in name:  # all ones (or zeros) would hide a forgotten or doubled norm
                weight.data.add_(torch.rand_like(weight) * 0.5)
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tiny_target / name, folder / name)
    return folder


@torch.no_grad()
def test_taps_final_state_and_logits_are_those_of_the_model(family_dir: Path):
    target = Target.load(family_dir)
    ids = torch.randint(3, 300, (2, 9), generator=torch.Generator().manual_seed(0))
    outputs: list[torch.Tensor] = []
    first: list[torch.Tensor] = []

    def after(module, args, output):
        outputs.append((output[0] if isinstance(output, tuple) else output).clone())

    def before(module, args, kwargs):
        first.append((args[0] if args else kwargs["hidden_states"]).clone())

    handles = [block.register_forward_hook(after) for block in target.blocks]
    handles.append(target.blocks[0].register_forward_pre_hook(before, with_kwargs=True))
    reference = target.model(input_ids=ids, output_hidden_states=True)
    for handle in handles:
        handle.remove()

    taps, final = target.states(ids, taps=range(LAYERS + 1))
    slices = taps.split(WIDTH, -1)
    assert len(slices) == LAYERS + 1
    assert torch.equal(slices[0], first[0])
    for j in range(LAYERS):
        assert torch.equal(slices[j + 1], outputs[j]), f"tap {j + 1} is the stream after {j + 1} blocks"
        assert torch.equal(slices[j], reference.hidden_states[j]), "hidden_states[j] is tap j below n"
    assert torch.equal(final, reference.hidden_states[LAYERS]), "hidden_states[n] is already normed: the final state"
    assert not torch.allclose(slices[LAYERS], final, atol=1e-2)
    # float32; only the scale is applied in another order
    torch.testing.assert_close(target.head(final), reference.logits, rtol=1e-5, atol=1e-5)

    ends = load_ends(family_dir)
    torch.testing.assert_close(ends.logits(final), reference.logits, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(
        ends.embedding[ids] * target.facts.embedding_scale, _without_positions(target, ids, first[0])
    )
    torch.testing.assert_close(ends.normed(slices[LAYERS]), final, rtol=1e-5, atol=1e-5)


def _without_positions(target: Target, ids: torch.Tensor, stream: torch.Tensor) -> torch.Tensor:
    if target.facts.model_type != "gpt2":
        return stream
    return stream - target.decoder.wpe.weight[: ids.shape[1]]


def test_a_padded_batch_gives_the_states_of_one_at_a_time(family_dir: Path):
    """Float32: other shapes sum in another order, so equality is to 2e-5 of values of order 1 to 10."""
    target = Target.load(family_dir)
    generator = torch.Generator().manual_seed(3)
    rows = [torch.randint(3, 300, (n,), generator=generator) for n in (13, 1, 6, 12)]
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=2)
    taps, final = target.states(ids, [len(r) for r in rows], taps=(0, 2, LAYERS))
    assert taps.shape == (4, 13, 3 * WIDTH)
    assert final.shape == (4, 13, WIDTH)
    for i, row in enumerate(rows):
        alone, alone_final = target.states(row[None], taps=(0, 2, LAYERS))
        torch.testing.assert_close(taps[i, : len(row)], alone[0], rtol=2e-5, atol=2e-5)
        torch.testing.assert_close(final[i, : len(row)], alone_final[0], rtol=2e-5, atol=2e-5)
    if target.facts.model_type == "llama":  # an explicit mask changes nothing either
        mask = (torch.arange(13) < torch.tensor([[len(r)] for r in rows])).long()
        with torch.no_grad():
            masked = target.decoder(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state
        torch.testing.assert_close(final[mask.bool()], masked[mask.bool()], rtol=2e-5, atol=2e-5)


def test_states_do_not_run_the_head_and_leave_no_hook(tiny_target: Path):
    target = Target.load(tiny_target)
    calls: list[int] = []
    target.model.get_output_embeddings().register_forward_hook(lambda *a: calls.append(1))
    ids = torch.tensor([[5, 6, 7]])
    target.states(ids)
    assert not calls
    assert not any(block._forward_pre_hooks for block in target.blocks)
    target.head(target.states(ids)[1])
    assert calls
    assert not any(p.requires_grad for p in target.model.parameters())
    taps, _ = target.states(ids)
    assert taps.shape[-1] == 3 * target.facts.hidden_size
    assert torch.equal(taps, target.states(ids, taps=target.facts.default_taps)[0])


@pytest.mark.parametrize("taps", [(), (2, 1), (1, 1), (-1, 2), (0, 99)])
def test_impossible_taps_are_refused(tiny_target: Path, taps: tuple[int, ...]):
    with pytest.raises(BadInput, match="not distinct ascending numbers from 0 to"):
        read_facts(tiny_target).check_taps(taps)


def test_impossible_ids_and_lengths_are_refused(tiny_target: Path):
    target = Target.load(tiny_target)
    good = torch.tensor([[5, 6, 7]])
    for ids, lengths, words in [
        (torch.tensor([5, 6]), None, "expected a non-empty"),
        (torch.tensor([[300]]), None, "the target knows 0 to 299"),
        (torch.tensor([[-1]]), None, "ids run from -1"),
        (good, [4], "one a row, 1 to L"),
        (good, [0], "one a row, 1 to L"),
        (good, [1, 1], "one a row, 1 to L"),
    ]:
        with pytest.raises(BadInput, match=words):
            target.states(ids, lengths)


def test_a_head_that_facts_misread_is_refused(tiny_target: Path):
    target = Target.load(tiny_target)
    target.facts = dataclasses.replace(target.facts, logit_scale=0.5)
    with pytest.raises(EyasError, match="not head"):
        target.head(target.states(torch.tensor([[5, 6, 7]]))[1])


def test_loading_says_nothing_on_the_console(tiny_target: Path, capfd: pytest.CaptureFixture[str]):
    Target.load(tiny_target).states(torch.tensor([[5, 6]]))
    assert capfd.readouterr() == ("", "")


def test_a_folder_that_transformers_cannot_load_is_named(tiny_target: Path, tmp_path: Path):
    broken = tmp_path / "broken"
    shutil.copytree(tiny_target, broken)
    (broken / "model.safetensors").write_bytes(b"not safetensors")
    with pytest.raises(EyasError, match=r"broken.*cannot load this target"):
        Target.load(broken)
