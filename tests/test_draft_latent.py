"""Latent attention: our forward against transformers' DeepSeek-V3 attention, unrolled against stepped, faults found.

Against vLLM's own draft class: tests/real/test_against_engines.py.   pytest -q tests/test_draft_latent.py
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from doctoring import Patient, patient_of, save
from drafts import make_draft, with_embedding
from eyas.conventions import Conventions
from eyas.decode.prove import prove
from eyas.doctor import record as recording
from eyas.doctor.diagnosis import diagnose
from eyas.draft.latent import LatentAttention
from eyas.draft.model import Draft
from eyas.draft.rope import draft_frequencies, latent_scale
from eyas.draft.shape import DraftShape, MlaShape
from eyas.draft.unroll import Packing, Unroll
from eyas.errors import BadInput
from eyas.train.inputs import check_trainable

YARN = {"factor": 8.0, "mscale": 1.0, "mscale_all_dim": 1.0, "beta_fast": 32.0, "beta_slow": 1.0,
        "original_max_position_embeddings": 32}  # fmt: skip
WIDE = {"q_lora_rank": 12, "kv_lora_rank": 10, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 13}
NARROW = {**WIDE, "v_head_dim": 5}


def shape_of(mla: dict[str, int | None], **more: int) -> DraftShape:
    part = MlaShape(**mla)  # type: ignore[arg-type]
    sizes = {"hidden_size": 32, "target_hidden_size": 32, "intermediate_size": 48, "num_heads": 4, "num_kv_heads": 4,
             "vocab_size": 300, "draft_vocab_size": 120, **more}  # fmt: skip
    return DraftShape(**sizes, head_dim=part.qk_head_dim, mla=part)


def latent_draft(mla: dict[str, int | None], seed: int = 0, layers: int = 1, **conventions: object) -> Draft:
    draft = Draft(
        shape_of(mla, num_layers=layers),
        Conventions(taps=(2, 4, 5), attention="mla", max_position=256, **conventions),  # type: ignore[arg-type]
    ).double()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in draft.named_parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3 + ("norm" in name))
    with_embedding(draft)
    return draft.eval()


@pytest.mark.parametrize("rope", [{}, {"rope_type": "yarn", "rope_scaling": YARN}], ids=["plain", "yarn"])
@pytest.mark.parametrize("interleave", [True, False])
@pytest.mark.parametrize("sizes", [NARROW, WIDE, {**NARROW, "q_lora_rank": None}], ids=["narrow", "wide", "no rank"])
def test_against_transformers(sizes: dict[str, int | None], interleave: bool, rope: dict):
    """A layer of transformers' DeepSeek-V3 with our weights, over a whole sequence."""
    from transformers import DeepseekV3Config
    from transformers.models.deepseek_v3 import modeling_deepseek_v3 as theirs

    conventions = Conventions(taps=(2, 4, 5), attention="mla", rms_norm_eps=1e-6, max_position=256, **rope)
    torch.manual_seed(0)
    mine = LatentAttention(shape_of({**sizes, "rope_interleave": interleave}), conventions, 32).double()
    parameters = {"rope_type": "default", "rope_theta": 10000.0, **rope.get("rope_scaling", {})}
    config = DeepseekV3Config(
        hidden_size=32, num_attention_heads=4, num_key_value_heads=4, rope_interleave=interleave,
        max_position_embeddings=256, rope_parameters=parameters | {"rope_type": rope.get("rope_type", "default")},
        attention_bias=False, **sizes,
    )  # fmt: skip
    config._attn_implementation = "eager"
    layer = theirs.DeepseekV3Attention(config, 0).double()
    layer.load_state_dict(mine.state_dict())
    x = torch.randn(1, 20, 32, dtype=torch.float64)
    places = torch.arange(20)[None]
    cos, sin = theirs.DeepseekV3RotaryEmbedding(config)(x, places)
    causal = torch.full((20, 20), float("-inf"), dtype=torch.float64).triu(1)[None, None]
    expected = layer(x, position_embeddings=(cos, sin), attention_mask=causal)[0]

    inv_freq, factor = draft_frequencies(shape_of(sizes), conventions)
    angle = places[..., None].float() * inv_freq
    cos, sin = (angle.cos() * factor).double(), (angle.sin() * factor).double()
    flat_q, *flat = (projection(x) for projection in mine.inputs())
    q, (k, v) = mine.queries(flat_q, cos, sin), mine.keys(flat, cos, sin)
    out = torch.nn.functional.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)), is_causal=True)
    torch.testing.assert_close(mine.output(out.transpose(1, 2).flatten(-2)), expected, rtol=1e-6, atol=1e-6)


def test_yarn_scales_scores_by_the_square_of_mscale_and_cosines_by_the_quotient():
    conventions = Conventions(taps=(2, 4, 5), attention="mla", rope_type="yarn", rope_scaling=YARN)
    mscale = 0.1 * torch.tensor(8.0).log().item() + 1
    assert latent_scale(conventions) == pytest.approx(mscale**2)
    assert draft_frequencies(shape_of(NARROW), conventions)[1] == 1.0
    half = conventions.with_(rope_scaling={**YARN, "mscale": 0.5, "mscale_all_dim": 0.0})
    assert latent_scale(half) == 1.0
    assert draft_frequencies(shape_of(NARROW), half)[1] == pytest.approx(0.5 * (mscale - 1) + 1)
    assert latent_scale(Conventions(taps=(2, 4, 5), attention="mla")) == 1.0


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("sizes", [NARROW, WIDE], ids=["narrow", "wide"])
def test_the_unrolled_pass_is_the_decoding_one(sizes: dict[str, int | None], layers: int):
    """`Unroll`, which trials replay with, against `Draft.step` with its cache, row by row."""
    draft = latent_draft(sizes, layers=layers, rope_type="yarn", rope_scaling=YARN, norm_output=True)
    packing = Packing(torch.tensor([0, 5, 14]))
    ids, aux = torch.randint(0, 300, (14,)), torch.randn(14, 96, dtype=torch.float64)
    rows = torch.tensor([1, 7, 10])
    unroll = Unroll(draft, packing, rows)
    embedded = unroll.embed(torch.cat([ids[1:], ids[-1:]]))
    outputs = [unroll.start(embedded, aux)]
    for k in (1, 2):
        outputs.append(unroll.step(embedded[rows + k], draft.feedback(outputs[-1])))
    for n, row in enumerate(rows.tolist()):
        start = int(packing.offsets[packing.document[row]])
        local, cache = row - start, draft.new_cache()
        h = draft.step(draft.embed(ids[start + 1 : row + 2])[None], draft.fuse(aux[start : row + 1])[None],
                       torch.arange(local + 1), cache)[:, -1:]  # fmt: skip
        torch.testing.assert_close(outputs[0][n], h[0, 0])
        for k in (1, 2):
            h = draft.step(
                draft.embed(ids[row + 1 + k])[None, None], draft.feedback(h), torch.tensor([local + k]), cache
            )
            torch.testing.assert_close(outputs[k][n], h[0, 0])


def test_no_rotation_at_all():
    """Kimi K3's `mla_use_nope`: positions do not matter."""
    draft = latent_draft(NARROW, rope_type="none")
    e, g = torch.randn(2, 1, 6, 32, dtype=torch.float64)
    near = draft.step(e[None] if e.ndim == 2 else e, g, torch.arange(6), draft.new_cache())
    far = draft.step(e, g, torch.arange(6) * 7, draft.new_cache())
    torch.testing.assert_close(near, far)
    rotated = latent_draft(NARROW)
    assert not torch.allclose(
        rotated.step(e, g, torch.arange(6), rotated.new_cache()),
        rotated.step(e, g, torch.arange(6) * 7, rotated.new_cache()),
    )


def test_what_cannot_run_is_refused():
    with pytest.raises(BadInput, match="has no `mla` sizes"):
        Draft(make_draft()[0].shape, Conventions(taps=(2, 4, 5), attention="mla"))
    gated = shape_of({**NARROW, "output_gate": True})
    with pytest.raises(BadInput, match=r"g_proj, Kimi K3"):
        Draft(gated, Conventions(taps=(2, 4, 5), attention="mla"))


# ---------------------------------------------------------------- diagnosed


TEXT = {"documents": 14, "length": 32}
IDS = "eagle_aux_hidden_state_layer_ids"


@pytest.fixture
def tell(tiny_target: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    """Diagnose a directory with the draft's own text in place of what its target would answer."""

    def diagnosis(folder: Path, who: Patient) -> dict[str, Any]:
        monkeypatch.setattr(recording, "record", lambda *args, **kwargs: who.material)
        return diagnose(folder, target=tiny_target, engines=["vllm"])

    return diagnosis


@pytest.fixture(scope="module")
def who(tiny_target: Path) -> Patient:
    yarn = {"rope_type": "yarn", "rope_scaling": YARN}
    return patient_of(tiny_target, sizes=NARROW, text=TEXT, **yarn)  # type: ignore[arg-type]


def confirmed(told: dict[str, Any]) -> dict[str, Any]:
    return {f["convention"]: f["best"] for f in told["findings"] if f["status"] == "confirmed"}


def test_a_healthy_latent_draft_is_called_healthy(tell, who: Patient, tmp_path: Path, tiny_target: Path):
    told = tell(save(who, tmp_path / "d", tiny_target), who)
    assert (told["verdict"], confirmed(told)) == ("healthy", {})
    assert told["tau"]["declared"] == told["tau"]["as_read"]["vllm"] > 1.5
    tried = {e["convention"] for e in told["ledger"]}
    assert {"taps", "norm_output", "rope_theta", "rope_type", "rope_layout", "norm_before_residual"} <= tried


def test_a_map_subtracted_twice_and_other_taps_are_found(tell, who: Patient, tmp_path: Path, tiny_target: Path):
    def twice(tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
        tensors["d2t"] = tensors["d2t"] - torch.arange(len(tensors["d2t"]))

    told = tell(save(who, tmp_path / "map", tiny_target, twice), who)
    assert (told["verdict"], told["where"]) == ("faulty", "checkpoint")
    assert confirmed(told) == {"d2t": "subtracted twice"}
    assert told["tau"]["best"] > told["tau"]["declared"] + 0.5

    def one_back(tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
        config[IDS] = [1, 3, 4]
        config["eagle_config"].pop(IDS, None)

    told = tell(save(who, tmp_path / "taps", tiny_target, one_back), who)
    assert confirmed(told) == {"taps": [2, 4, 5]}


def test_the_layout_of_rotary_pairs_is_told(tell, who: Patient, tmp_path: Path, tiny_target: Path):
    def halves(tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
        config["rope_interleave"] = False

    told = tell(save(who, tmp_path / "d", tiny_target, halves), who)
    assert confirmed(told) == {"rope_layout": "neighbours"}


def test_training_it_is_refused(who: Patient):
    with pytest.raises(BadInput, match=r"has latent attention \(MLA\): Eyas runs and diagnoses such drafts"):
        check_trainable(who.draft, "kimi")


def test_it_decodes_losslessly(who: Patient, tmp_path: Path, tiny_target: Path):
    """By the reference decoder, which runs it with a cache."""
    folder = save(who, tmp_path / "d", tiny_target)
    told = prove(folder, tiny_target, {"ids": [[5, 17, 40, 8, 99, 3], [7]]}, k=3, max_new_tokens=12)
    assert told["lossless"] is True
    assert told["compared"] == 2
