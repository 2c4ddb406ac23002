"""Drafts of other shapes, from settings to an engine's directory: gradients, training, resuming, export, prove, doctor.

pytest -q tests/test_train_variants.py
"""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from doctoring import make_patient, patient_of, save
from eyas.decode.prove import prove
from eyas.describe import inspect_draft
from eyas.doctor import record as recording
from eyas.doctor.diagnosis import diagnose
from eyas.draft.checkpoint import load_draft
from eyas.draft.files import open_folder
from eyas.draft.model import Draft
from eyas.draft.shape import DraftShape
from eyas.engines.compare import differences
from eyas.engines.profiles import profile
from eyas.engines.reading import Seen
from eyas.errors import Mismatch
from eyas.export import NotExpressible, export_draft
from eyas.features.count import count_supervised
from eyas.features.extract import extract
from eyas.features.reader import FeatureSet
from eyas.target.facts import read_facts
from eyas.target.model import Target
from eyas.target.weights import load_ends
from eyas.train import loop, start
from eyas.train.batches import make_batch
from eyas.train.linear import PAIRS, SHARPNESS
from eyas.train.objective import ttt_loss
from eyas.train.settings import TrainSettings
from eyas.vocab import VocabMap
from plain_training import plain_loss
from test_draft_model import SHAPE, make
from test_train_curve import DECAY, IDS, K, batches
from training import Material, conversations, die, exit_code_of, material, run

TEXT = {"documents": 14, "length": 32}

# ---------------------------------------------------------------- gradients


@pytest.mark.parametrize(
    ("layers", "flags"),
    [
        (2, {}), (3, {"norm_output": True, "norm_before_residual": True}), (2, {"qk_norm": True, "fc_norm": True}),
        (1, {"qk_norm": True, "norm_before_fc": True}),
    ],
)  # fmt: skip
def test_gradients_are_those_of_the_plain_objective(layers: int, flags: dict[str, Any]):
    """Several layers and head norms: every gradient against dense masks, every row at every step, and autograd.

    The fast path leaves rows out that nobody asks about. In a layer before the last they still feed keys to others.
    """
    shape = DraftShape(**{**SHAPE.to_dict(), "num_layers": layers})
    one = make(flags, shape=shape)
    other = copy.deepcopy(one)
    draft_of = torch.full((50,), -1)
    draft_of[IDS] = torch.arange(len(IDS))
    for batch, head_rows in batches(3):
        batch.final, batch.logsumexp, rows = batch.final.double(), batch.logsumexp.double(), head_rows.double()
        weights = batch.weights(K).clamp(min=1)
        loss, _ = ttt_loss(one, batch, rows, draft_of, steps=K, decay=DECAY, denominators=weights, chunk=16,
                           compute=torch.float64)  # fmt: skip
        plain = plain_loss(other, batch, rows.float(), None, K, DECAY)
        torch.testing.assert_close(loss.double(), plain.double(), rtol=1e-5, atol=1e-6)
        loss.backward()
        plain.backward()
    for (name, p), q in zip(one.named_parameters(), other.parameters(), strict=True):
        if not name.startswith("embed"):
            assert float(q.grad.abs().max()) > 0, name
            torch.testing.assert_close(p.grad, q.grad, rtol=1e-3, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


# ---------------------------------------------------------------- how they begin


@pytest.fixture(scope="module")
def m(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Material:
    return material(tiny_target, tmp_path_factory)


def begun(m: Material, **settings: Any):
    chosen, ends = TrainSettings(**settings), load_ends(m.target)
    draft = start.new_draft(chosen, ends.facts, m.features, m.vocab_map)
    draft.set_embedding(start.embedding_for(draft, ends))
    start.initialise(draft, chosen, ends, m.features, m.vocab_map, 0)
    return draft, ends


def test_principal_directions_are_the_best_of_their_number():
    table = torch.randn(500, 12) * torch.linspace(3, 0.1, 12) @ torch.linalg.qr(torch.randn(12, 12))[0]
    found = start.principal(table, 5)
    torch.testing.assert_close(found @ found.T, torch.eye(5), atol=1e-5, rtol=0)
    singular = torch.linalg.svdvals(table)
    left = (table - table @ found.T @ found).square().sum()
    torch.testing.assert_close(left, singular[5:].square().sum(), rtol=1e-3, atol=1e-3)
    assert torch.equal(start.principal(table, 14), torch.eye(14, 12))


@pytest.mark.parametrize("width", [24, 48])
def test_a_draft_of_another_width_begins_with_projections(m: Material, width: int):
    draft, ends = begun(m, hidden_size=width, start="target")
    s, c = draft.shape, draft.conventions
    assert (s.hidden_size, s.target_hidden_size, c.embedding) == (width, 32, "own")
    assert draft.embed_tokens is not None
    assert not draft.embed_tokens.weight.requires_grad
    assert "embed_tokens.weight" in draft.owned_state_dict()
    space = start.state_space(draft, ends)
    assert space is not None
    torch.testing.assert_close(draft.lm_head.weight.detach(), ends.head[m.vocab_map.ids] @ space.T)
    if width > 32:  # nothing is lost: the same products of rows
        full = ends.embedding @ ends.embedding.T
        torch.testing.assert_close(draft.embed_tokens.weight @ draft.embed_tokens.weight.T, full, rtol=1e-4, atol=1e-4)


def first_loss(m: Material, **settings: Any) -> float:
    """Mean loss of the untrained draft over the features: where it begins, not how well it generalises."""
    return loss_of(m, begun(m, **settings)[0])


def least_loss(m: Material) -> float:
    """Mean loss at step 0 of a draft that knows the teacher."""
    batch, ends = make_batch(m.features, range(m.features.num_docs)), load_ends(m.target)
    at = batch.rows(0) + 1
    logits = batch.final[at].float() @ ends.head[m.vocab_map.ids].float().T
    p = (logits - batch.logsumexp[at, None]).exp()
    return float(-(p * logits.log_softmax(-1)).sum(-1).mean())


def loss_of(m: Material, draft: Draft, steps: int = 1) -> float:
    """Mean loss at the first steps over the features."""
    ends = load_ends(m.target)
    batch = make_batch(m.features, range(m.features.num_docs))
    draft_of = m.vocab_map.to_draft(torch.arange(300))
    weights = batch.weights(steps).clamp(min=1)
    with torch.no_grad():
        return float(ttt_loss(draft, batch, ends.head[m.vocab_map.ids].float(), draft_of, steps=steps, decay=1.0,
                              denominators=weights)[0]) / steps  # fmt: skip


@pytest.mark.parametrize(
    "variant",
    [{"hidden_size": 24}, {"hidden_size": 48}, {"qk_norm": True}, {"num_layers": 3},
     {"hidden_size": 40, "num_layers": 2, "qk_norm": True, "norm_output": True}],
    ids=str,
)  # fmt: skip
def test_the_linear_start_serves_every_variant(m: Material, variant: dict[str, Any]):
    """It knows much of what the plain draft's start knows, and far more than a start without it."""
    plain, guess = first_loss(m), first_loss(m, **variant)
    nothing = first_loss(m, **variant, start="random")
    assert guess < nothing - 0.5 * (nothing - plain), (plain, guess, nothing)


def test_norms_on_q_and_k_give_the_own_row_the_score_that_is_meant(m: Material):
    """Without norms it is so on average, where embeddings have a mean; with them it is so of every token."""
    draft, _ = begun(m, qk_norm=True)
    attn, ids = draft.midlayer.self_attn, m.features.document(0)["ids"].long()
    e = draft.midlayer.input_layernorm(draft.embed(ids))
    wide = torch.cat([e, torch.zeros_like(e)], -1)
    cos, sin = draft.angles(torch.zeros(len(ids), dtype=torch.int64))
    flat_q, *flat = (p(wide) for p in attn.inputs())
    q, (k, _) = attn.queries(flat_q, cos, sin), attn.keys(flat, cos, sin)
    # The heads' other rotary dimensions are random and small beside the pairs in use.
    score = (q[:, 0] * k[:, 0]).sum(-1).detach() / attn.head_dim**0.5
    assert float(score.median()) == pytest.approx(SHARPNESS * PAIRS, rel=0.1)


# ---------------------------------------------------------------- trained, exported, proven


VARIANTS: dict[str, dict[str, Any]] = {
    "qk_norm": {"qk_norm": True, "norm_before_fc": False, "fc_norm": True},
    "two layers": {"num_layers": 2},
    "narrow": {"hidden_size": 24},
    "wide, three layers": {"hidden_size": 48, "num_layers": 3, "norm_output": True},
}
# Engine -> variants that it cannot express, and a word of what is said.
REFUSED = {
    "sglang": {"qk_norm": "Eagle3Qwen3ForCausalLM"},
    "llamacpp": {"qk_norm": "q", "two layers": "layer", "wide, three layers": "layer"},
    "vllm": {},
}


@pytest.fixture(scope="module")
def trained(m: Material, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Variant -> folder of a run."""
    root = tmp_path_factory.mktemp("variants")
    for name, settings in VARIANTS.items():
        run(m, root / name, **settings)
    return {name: root / name for name in VARIANTS}


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_variant_is_trained_and_saved_as_what_it_is(m: Material, trained: dict[str, Path], variant: str):
    draft, vocab_map, conventions = load_draft(trained[variant] / "draft", m.target)
    for name, value in VARIANTS[variant].items():
        has = {**draft.shape.to_dict(), **conventions.to_dict()}
        assert has[name] == value
    assert vocab_map.digest() == m.vocab_map.digest()
    report = inspect_draft(trained[variant] / "draft", m.target)
    assert report["shape"]["num_layers"] == draft.shape.num_layers


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_variant_learns(m: Material, tmp_path: Path, variant: str):
    """From a random start: much of what is above the least possible loss goes, over the features themselves."""
    run(m, tmp_path, **VARIANTS[variant], steps=80, start="random", held_out=None, save_every=80, lr=5e-3, head_lr=5e-3)
    least = least_loss(m)
    before = first_loss(m, **VARIANTS[variant], start="random") - least
    after = loss_of(m, load_draft(tmp_path / "draft", m.target)[0]) - least
    assert 0 < after < 0.65 * before


@pytest.mark.parametrize("engine", REFUSED)
@pytest.mark.parametrize("variant", VARIANTS)
def test_engines_get_what_they_can_express(
    m: Material, trained: dict[str, Path], tmp_path: Path, variant: str, engine: str
):
    if variant in REFUSED[engine]:
        with pytest.raises(NotExpressible, match=REFUSED[engine][variant]):
            export_draft(trained[variant], tmp_path / "out", to=engine, engines=(engine,), target_dir=m.target)
        return
    export_draft(trained[variant], tmp_path / "out", to=engine, engines=(engine,), target_dir=m.target)
    draft, _, conventions = load_draft(tmp_path / "out", m.target)
    reading = profile(engine).read(Seen(open_folder(tmp_path / "out"), read_facts(m.target)))
    assert reading.starts, reading.failure
    assert differences(conventions, reading) == []
    there = load_draft(trained[variant] / "draft", m.target)[0].state_dict()
    assert all(torch.equal(tensor, there[name].bfloat16().float()) for name, tensor in draft.state_dict().items()
               if name in there and not name.startswith("embed"))  # fmt: skip


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_variant_is_proven_lossless(m: Material, trained: dict[str, Path], variant: str):
    result = prove(trained[variant] / "draft", m.target, {"ids": [[5, 17, 40, 8], [7, 9]]}, k=3, max_new_tokens=10)
    assert result["lossless"] is True


@pytest.mark.parametrize(
    ("sizes", "conventions"),
    [
        ({"num_layers": 3}, {"qk_norm": True}), ({"target_hidden_size": 48}, {"embedding": "own"}),
        ({"num_taps": 5}, {"taps": (1, 2, 4, 6, 7)}),
    ],
    ids=str,
)  # fmt: skip
def test_the_doctor_tells_healthy_variants_from_faulty_ones(
    tiny_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sizes: dict[str, int],
    conventions: dict[str, Any],
):  # fmt: skip
    if sizes.get("target_hidden_size"):  # it owns its embedding
        target = another_target(tmp_path / "target", tiny_target, sizes["target_hidden_size"])
        who = make_patient(sizes=sizes, text=TEXT, rope_theta=read_facts(target).rope_theta)
        who.draft.conventions = who.draft.conventions.with_(**conventions)
    else:
        target, who = tiny_target, patient_of(tiny_target, sizes=sizes, text=TEXT, **conventions)
    monkeypatch.setattr(recording, "record", lambda *args, **kwargs: who.material)
    told = diagnose(save(who, tmp_path / "d", target), target=target, engines=["vllm"])
    assert (told["verdict"], [f["id"] for f in told["findings"] if f["status"] == "confirmed"]) == ("healthy", [])
    assert told["tau"]["declared"] == told["tau"]["as_read"]["vllm"] > 1.5

    def twice(tensors: dict[str, torch.Tensor], _: dict[str, Any]) -> None:
        tensors["d2t"] = tensors["d2t"] - torch.arange(len(tensors["d2t"]))

    told = diagnose(save(who, tmp_path / "twice", target, twice), target=target, engines=["vllm"])
    assert {f["convention"]: f["best"] for f in told["findings"] if f["status"] == "confirmed"} == {
        "d2t": "subtracted twice"
    }


def another_target(folder: Path, tiny_target: Path, width: int) -> Path:
    """The tiny target with other weights, `width` wide."""
    from transformers import LlamaConfig, LlamaForCausalLM

    shutil.copytree(tiny_target, folder)
    torch.manual_seed(0)
    config = LlamaConfig.from_pretrained(tiny_target, hidden_size=width, num_attention_heads=3, head_dim=16)
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def test_a_killed_run_of_a_draft_with_its_own_embedding_goes_on_as_if_nothing_had_been(m: Material, tmp_path: Path):
    settings = {"hidden_size": 24, "num_layers": 2, "qk_norm": True}
    run(m, tmp_path / "whole", **settings)
    assert exit_code_of(killed_in_step, m, tmp_path / "cut", settings) == -9
    assert not (tmp_path / "cut" / "manifest.json").exists()
    run(m, tmp_path / "cut", **settings)
    whole, cut = (load_draft(tmp_path / name / "draft", m.target)[0].state_dict() for name in ("whole", "cut"))
    assert whole.keys() == cut.keys()
    assert "embed_tokens.weight" in whole
    assert all(torch.equal(tensor, cut[name]) for name, tensor in whole.items())


def killed_in_step(m: Material, out: Path, settings: dict[str, Any]) -> None:
    """Die in the fourth optimizer step, after the checkpoint of the second."""
    plain, calls = loop.Muon.step, []

    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(None)
        if len(calls) == 4:
            die()
        return plain(self, *args, **kwargs)

    loop.Muon.step = step  # type: ignore[method-assign]
    run(m, out, **settings)


@pytest.mark.parametrize("taps", [(5,), (2, 6), (1, 3, 5, 7), (0, 2, 4, 6, 8)], ids=len)
def test_other_numbers_of_taps(tiny_target: Path, tmp_path: Path, taps: tuple[int, ...]):
    """One to five taps, the embedding's output and the last block's among them: features, training, export, prove."""
    folder = tmp_path / "features"
    extract(Target.load(tiny_target), conversations(8, 1), folder, taps, progress=False)
    features = FeatureSet.open(folder)
    vocab_map = VocabMap.from_counts(count_supervised(features), 150, always=(0, 1, 2))
    given = Material(tiny_target, features, features, vocab_map)
    run(given, tmp_path / "run", held_out=None)
    draft, _, conventions = load_draft(tmp_path / "run" / "draft", tiny_target)
    assert conventions.taps == taps
    assert draft.fc.in_features == 32 * len(taps)
    export_draft(tmp_path / "run", tmp_path / "vllm", to="vllm", engines=("vllm",), target_dir=tiny_target)
    config = json.loads((tmp_path / "vllm" / "config.json").read_text())
    assert config["eagle_aux_hidden_state_layer_ids"] == list(taps)
    assert config["num_aux_hidden_states"] == len(taps)
    if len(taps) != 3:
        with pytest.raises(NotExpressible, match="tap"):
            export_draft(tmp_path / "run", tmp_path / "l", to="llamacpp", engines=("llamacpp",), target_dir=tiny_target)
    result = prove(tmp_path / "vllm", tiny_target, {"ids": [[5, 17, 40, 8]]}, k=2, max_new_tokens=8)
    assert result["lossless"] is True


def test_going_on_with_another_shape_is_refused(m: Material, trained: dict[str, Path], tmp_path: Path):
    with pytest.raises(Mismatch, match=r"hidden_size = 16, the draft has 24; num_layers = 2, the draft has 1"):
        run(m, tmp_path / "out", init_from=str(trained["narrow"] / "draft"), hidden_size=16, num_layers=2,
            intermediate_size=None)  # fmt: skip
    run(m, tmp_path / "on", init_from=str(trained["narrow"] / "draft"), intermediate_size=None, steps=2)
    assert load_draft(tmp_path / "on" / "draft", m.target)[0].shape.hidden_size == 24
