"""Operations: what they refuse, what they make, and what brings the old bytes back.

pytest -q tests/test_repair_operations.py
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from drafts import make_draft, write_latent
from eyas.doctor.case import Case
from eyas.draft.assemble import Extent, assemble
from eyas.draft.dialects import interpret
from eyas.draft.files import open_folder
from eyas.engines.profiles import profile
from eyas.engines.reading import Seen
from eyas.errors import BadInput
from eyas.repair import maps, places
from eyas.repair.fold import CANNOT, FOLDED, cannot_fold
from eyas.repair.operations import OPERATIONS, Done, perform
from eyas.repair.overlay import Overlay
from eyas.repair.refs import of_array
from eyas.repair.step import Step
from eyas.target.weights import load_ends
from mending import (
    FACTS,
    D,
    H,
    V,
    change,
    contents,
    healthy,
    logits,
    right_map,
    same_tensors,
    says_the_same,
    small_target,
    specimen,
)

PLACE = torch.arange(D)
ATTN, MLP = "midlayer.self_attn.", "midlayer.mlp."


def opened(folder: Path) -> Overlay:
    return Overlay.of(folder, FACTS)


def do(overlay: Overlay, operation: str, **arguments: Any) -> Done:
    return perform(overlay, Step(operation, arguments))


def undone(done: Done) -> Overlay:
    """After the inverse steps, each performed like any other."""
    assert done.inverse is not None, f"{done.step} has no inverse"
    overlay = done.after
    for step in done.inverse:
        overlay = perform(overlay, Step.from_dict(json.loads(json.dumps(step.to_dict())))).after
    return overlay


def comes_back(done: Done) -> bool:
    return contents(undone(done)) == contents(done.before)


# ---------------------------------------------------------------- the overlay


def test_an_overlay_reads_like_the_files_that_it_becomes(tmp_path: Path):
    before = opened(change(healthy(tmp_path / "a"), lambda t, c: t.update(d2t=right_map().ids)))
    done = do(before, "absolute-to-offset")
    told = done.told
    assert told[0].startswith("found d2t: 120 numbers, it begins [0, 1, 2, 3]")
    assert told[1] == "writes d2t: 120 numbers, it begins [0, 0, 0, 0]"
    assert told[2].startswith("reads back d2t: 120 numbers") and told[2].endswith("target ids 0 to 126")
    made = done.after.change()
    assert list(made.tensors) == ["d2t"] and made.config is None and made.eyas is None
    assert done.after.base is before.base and before.change().tensors == {}
    assert isinstance(done.after.case(), Case) and done.after.case().reading is not None
    assert interpret(done.after.folder, 8).conventions == interpret(open_folder(tmp_path / "a"), 8).conventions


def test_a_renamed_tensor_passes_through_no_memory(tmp_path: Path):
    overlay = opened(healthy(tmp_path / "a"))
    done = do(overlay, "swap", a=MLP + "gate_proj.weight", b=MLP + "up_proj.weight")
    pieces = done.after.change().tensors
    assert all(isinstance(part, Extent) for piece in pieces.values() for part in piece.parts)
    assemble(tmp_path / "new.safetensors", list(pieces.values()))
    old, new = load_file(tmp_path / "a" / "model.safetensors"), load_file(tmp_path / "new.safetensors")
    assert torch.equal(new[MLP + "gate_proj.weight"], old[MLP + "up_proj.weight"])


def test_lazy_tensors_are_the_numbers_that_are_written(tmp_path: Path):
    def bf16(tensors: dict[str, torch.Tensor], _: Any) -> None:
        tensors |= {n: t.bfloat16() for n, t in tensors.items() if t.is_floating_point()}

    overlay = opened(change(healthy(tmp_path / "a", "fused"), bf16))
    after = do(overlay, "swap-halves").after
    after = do(after, "permute-rotary", stored_as="interleaved").after
    after = do(after, "transpose", name=ATTN + "o_proj.weight").after
    after = do(after, "add-to-norms", value=1.0).after
    made = after.change().tensors
    assemble(tmp_path / "new.safetensors", [piece for piece in made.values() if piece is not None])
    written = load_file(tmp_path / "new.safetensors")
    for name, tensor in written.items():
        assert torch.equal(after.tensors[name].load(), tensor) and tensor.dtype == torch.bfloat16, name
    assert made["midlayer.self_attn.qkv_proj.weight"] is None
    assert len(made) == len(written) + 1


@pytest.mark.parametrize(
    "style", ["eyas", "flat", "layers0", "prefixed", "prefixed_midlayer", "fused", "sharded", "bin"]
)
def test_names_of_each_style(tmp_path: Path, style: str):
    overlay = opened(healthy(tmp_path / "a", style))
    first, inner = ("layers.0.", "model.") if style == "prefixed" else ("midlayer.", "")
    first = "layers.0." if style == "layers0" else first
    inner = "model." if style == "prefixed_midlayer" else inner
    names = {"fc.weight": inner, "midlayer.hidden_norm.weight": inner, "d2t": inner, "lm_head.weight": ""}
    for name, prefix in names.items():
        assert overlay.stored(name) == prefix + name.replace("midlayer.", first)
        gone = overlay.with_tensors({overlay.stored(name): None})
        assert gone.stored(name) is None and gone.spelled(name) == overlay.stored(name)
    held = overlay.fused(ATTN + "k_proj.weight")
    assert held == ("midlayer.self_attn.qkv_proj.weight" if style == "fused" else None)
    assert overlay.spelling == "flat"


def test_the_speculators_style(tmp_path: Path):
    overlay = opened(healthy(tmp_path / "a", "speculators"))
    assert overlay.spelling == "speculators"
    done = do(overlay, "write-taps", taps=[1, 4, 6])
    assert "eagle_config" not in done.after.config and done.after.reading.conventions.taps == (1, 4, 6)
    done = do(overlay, "set-rope", theta=500.0)
    assert done.after.config["transformer_layer_config"]["rope_parameters"]["rope_theta"] == 500.0
    assert "rope_theta" not in done.after.config and comes_back(done)
    done = do(overlay, "set-flag", name="hidden_act", value="gelu")
    assert (
        done.after.config["transformer_layer_config"]["hidden_act"] == "gelu" and "hidden_act" not in done.after.config
    )
    done = do(overlay, "set-flag", name="sliding_window", value=None)
    assert done.after.reading.conventions.sliding_window is None and comes_back(done)


# ---------------------------------------------------------------- the map


BROKEN: dict[str, tuple[Callable[[Any], dict[str, Any]], str, dict[str, Any]]] = {
    "absolute": (lambda m: {"d2t": m.ids}, "absolute-to-offset", {}),
    "twice": (lambda m: {"d2t": m.d2t - PLACE}, "add-arange", {}),
    "arange": (lambda m: {"d2t": PLACE}, "d2t-from-t2d", {}),
    "short": (lambda m: {"d2t": m.d2t[:-3]}, "d2t-from-t2d", {}),
    "floats": (lambda m: {"d2t": m.d2t.float()}, "map-dtype", {}),
    "halves": (lambda m: {"d2t": m.d2t.half()}, "map-dtype", {}),
    "int32": (lambda m: {"d2t": m.d2t.int()}, "map-dtype", {}),
    "shuffled": (lambda m: {"d2t": m.ids.flip(0) - PLACE}, "set-map-form", {"form": "sorted offsets"}),
    "absolute form": (lambda m: {"d2t": m.ids}, "set-map-form", {"form": "absolute"}),
    "twice form": (lambda m: {"d2t": m.d2t - PLACE}, "set-map-form", {"form": "subtracted twice"}),
    "added twice": (lambda m: {"d2t": m.d2t + 2 * PLACE}, "set-map-form", {"form": "added twice"}),
    "marks": (lambda m: {"d2t": m.t2d.long(), "t2d": None}, "set-map-form", {"form": "marks"}),
    "no t2d": (lambda m: {"t2d": None}, "t2d-from-d2t", {}),
    "short t2d": (lambda m: {"t2d": m.t2d[:-1]}, "t2d-from-d2t", {}),
    "no d2t": (lambda m: {"d2t": None}, "d2t-from-t2d", {}),
}


@pytest.mark.parametrize("style", ["eyas", "flat"])
@pytest.mark.parametrize("fault", BROKEN)
def test_each_form_of_the_map_becomes_the_right_one(tmp_path: Path, fault: str, style: str):
    wrong, operation, arguments = BROKEN[fault]

    def inject(tensors: dict[str, Any], _: Any) -> None:
        tensors |= wrong(right_map())
        for name in [n for n, t in tensors.items() if t is None]:
            del tensors[name]

    good = opened(healthy(tmp_path / "good", style))
    done = do(opened(change(healthy(tmp_path / "bad", style), inject)), operation, **arguments)
    assert same_tensors(done.after, good)
    assert says_the_same(done.after, good)
    assert done.inverse is None or comes_back(done)
    exact = ("absolute", "twice", "floats", "halves", "int32", "absolute form", "twice form", "no t2d", "no d2t")
    assert (done.inverse is not None) == (fault in exact)
    if fault not in ("no t2d", "short t2d", "twice form"):
        with pytest.raises(BadInput):  # what is right is not mended again
            do(done.after, operation, **arguments)


def test_a_right_map_is_never_made_wrong(tmp_path: Path):
    good = opened(healthy(tmp_path / "good"))
    with pytest.raises(
        BadInput, match=r"d2t is right as it stands.*Zeros at its beginning only say.*Nothing was changed"
    ):
        do(good, "absolute-to-offset")
    with pytest.raises(BadInput, match="right as it stands"):
        do(good, "add-arange")
    with pytest.raises(BadInput, match="I64 already"):
        do(good, "map-dtype")
    with pytest.raises(BadInput, match=r"there is no map here as 'absolute'; found offsets"):
        do(good, "set-map-form", form="absolute")
    with pytest.raises(BadInput, match="so already, nothing would change"):
        do(good, "t2d-from-d2t")
    with pytest.raises(BadInput, match="needs its map"):
        do(good, "drop-maps")
    away = opened(change(healthy(tmp_path / "a"), lambda t, c: t.update(d2t=right_map().d2t + 250)))
    for operation in ("absolute-to-offset", "add-arange"):
        with pytest.raises(BadInput, match="that would not make a map of d2t"):
            do(away, operation)
    with pytest.raises(BadInput, match="no right map, so this undoes nothing"):
        do(away, "offset-to-absolute")
    other = opened(change(healthy(tmp_path / "b"), lambda t, c: t.update(t2d=torch.ones(V, dtype=torch.bool))))
    with pytest.raises(BadInput, match="t2d marks 300 ids, the draft vocabulary has 120: it is of another map"):
        do(other, "d2t-from-t2d")
    rounded = opened(change(healthy(tmp_path / "c"), lambda t, c: t.update(d2t=(t["d2t"] + 0.5))))
    with pytest.raises(BadInput, match="rebuild it from t2d"):
        do(rounded, "map-dtype")


def test_maps_that_a_reference_has(tmp_path: Path):
    good = healthy(tmp_path / "good")
    bad = opened(change(healthy(tmp_path / "bad"), lambda t, c: t.update(d2t=PLACE + 100)))
    torch.save(right_map().d2t, tmp_path / "d2t.pt")
    np.save(tmp_path / "ids.npy", right_map().ids.numpy())
    torch.save({"d2t": right_map().d2t, "t2d": right_map().t2d}, tmp_path / "vocab_mapping.pt")
    for name in ("good", "d2t.pt", "ids.npy", "vocab_mapping.pt"):
        done = do(bad, "map-from-reference", reference=str(tmp_path / name))
        assert same_tensors(done.after, opened(good)), name
    np.save(tmp_path / "high.npy", right_map().ids.numpy() + 150)
    with pytest.raises(BadInput, match="broken: examine it first"):
        do(bad, "map-from-reference", reference=str(tmp_path / "high.npy"), read_as="offsets")
    torch.save(PLACE, tmp_path / "both.pt")
    with pytest.raises(BadInput, match="fits both as offsets and as absolute ids: say read_as"):
        do(bad, "map-from-reference", reference=str(tmp_path / "both.pt"))
    with pytest.raises(BadInput, match="does not exist"):
        do(bad, "map-from-reference", reference=str(tmp_path / "none"))
    small = healthy(tmp_path / "small", "eyas")
    change(small, lambda t, c: t.update(d2t=t["d2t"][:100]))
    with pytest.raises(BadInput, match="not of the same draft"):
        do(bad, "map-from-reference", reference=str(small))


def test_a_whole_vocabulary_needs_no_map(tmp_path: Path):
    from eyas.draft.checkpoint import save_draft

    draft, vocab_map = make_draft(sizes={"draft_vocab_size": V})
    folder = save_draft(draft, vocab_map, tmp_path / "a", facts=FACTS)
    change(folder, lambda t, c: t.update(d2t=torch.arange(V).flip(0), t2d=torch.ones(V, dtype=torch.bool)))
    done = do(opened(folder), "drop-maps")
    assert not {"d2t", "t2d"} & done.after.tensors.keys() and done.inverse is None


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_adding_and_subtracting_arange_are_inverse(data: st.DataObject):
    size = data.draw(st.integers(1, 40))
    vocab = data.draw(st.integers(size, 200))
    ids = np.array(sorted(data.draw(st.sets(st.integers(0, vocab - 1), min_size=size, max_size=size))))
    times = data.draw(st.sampled_from([1, -1]))  # what was done needlessly: added (absolute ids), or subtracted
    marked = data.draw(st.booleans())
    right, wrong = ids - np.arange(size), ids - np.arange(size) + times * np.arange(size)
    base = Overlay.over(TEMPLATE[0], None)
    t2d = np.zeros(vocab, bool)
    t2d[ids] = True
    refs = {"d2t": of_array("d2t", wrong, Path("x.safetensors"))}
    refs["t2d"] = of_array("t2d", t2d, Path("x.safetensors")) if marked else None
    overlay = base.with_tensors(refs).with_config({**base.config, "vocab_size": vocab, "draft_vocab_size": size})
    operation = "absolute-to-offset" if times == 1 else "add-arange"
    if maps.is_map(np.arange(size) + wrong, np.flatnonzero(t2d) if marked else None, vocab):
        with pytest.raises(BadInput, match="right as it stands"):
            do(overlay, operation)
        return
    done = do(overlay, operation)
    assert np.array_equal(done.after.tensors["d2t"].array(), right)
    assert comes_back(done)


TEMPLATE: list[Any] = []


@pytest.fixture(scope="module", autouse=True)
def _template(tmp_path_factory: pytest.TempPathFactory):
    TEMPLATE[:] = [open_folder(healthy(tmp_path_factory.mktemp("template") / "a", "flat"))]


# ---------------------------------------------------------------- taps


@pytest.mark.parametrize("style", ["eyas", "flat", "speculators"])
def test_taps_are_written_where_everybody_looks(tmp_path: Path, style: str):
    overlay = Overlay.of(healthy(tmp_path / "a", style), replace(FACTS, max_position=256))
    done = do(overlay, "write-taps", taps=[1, 4, 6])
    assert done.after.reading.conventions.taps == (1, 4, 6) and comes_back(done)
    for engine in ("sglang", "vllm", "llamacpp"):
        read = profile(engine).read(Seen(done.after.folder, done.after.facts, {}))
        if style != "speculators":  # of which SGLang and llama.cpp know no ids
            assert read.conventions.taps == (1, 4, 6), engine
    for taps in ([2, 2, 5], [1, 4], [1, 4, 9], [-1, 2, 3]):
        with pytest.raises(BadInput, match=r"are no taps of a target with 8 layers|taps wide"):
            do(overlay, "write-taps", taps=taps)
    with pytest.raises(BadInput, match="so already"):
        do(overlay, "write-taps", taps=[2, 4, 5])


def test_tap_0_has_no_number_in_eagle_config(tmp_path: Path):
    done = do(opened(healthy(tmp_path / "a")), "write-taps", taps=[0, 4, 6])
    assert done.after.config["eagle_config"] == {"use_aux_hidden_state": True}
    assert done.after.config["eagle_aux_hidden_state_layer_ids"] == [0, 4, 6] and comes_back(done)


@pytest.mark.parametrize("norms", [{}, {"norm_before_fc": True}, {"fc_norm": True}])
def test_slices_of_fc_move_with_their_norms(tmp_path: Path, norms: dict[str, bool]):
    good = opened(healthy(tmp_path / "a", "flat", **norms))
    done = do(good, "permute-fc-slices", order=[1, 2, 0])
    assert comes_back(done) and not says_the_same(done.after, good)
    # slices in the order 1, 2, 0 of the taps 2, 4, 5 read 4, 5, 2: written so, fc is brought into ascending order again
    back = do(done.after.with_config({**good.config, "eagle_config": {}}), "write-taps", taps=[4, 5, 2])
    assert same_tensors(back.after, good) and back.after.reading.conventions.taps == (2, 4, 5) and comes_back(back)
    assert says_the_same(back.after, good)
    for order in ([0, 1, 2], [0, 1], [0, 0, 2]):
        with pytest.raises(BadInput, match="moves nothing, or is no order"):
            do(good, "permute-fc-slices", order=order)


# ---------------------------------------------------------------- config


FLAGS = [("norm_before_residual", True), ("norm_output", True), ("hidden_act", "gelu"), ("tie_word_embeddings", True),
         ("rms_norm_eps", 1e-6), ("sliding_window", 16), ("logit_scale", 0.5)]  # fmt: skip


@pytest.mark.parametrize("style", ["eyas", "flat", "speculators"])
@pytest.mark.parametrize(("name", "value"), FLAGS)
def test_flags(tmp_path: Path, style: str, name: str, value: Any):
    overlay = opened(healthy(tmp_path / "a", style))
    done = do(overlay, "set-flag", name=name, value=value)
    assert comes_back(done)
    if name != "tie_word_embeddings":
        assert getattr(done.after.reading.conventions, name) == value
        plain = interpret(replace(done.after.folder, eyas=None), 8)  # as engines do, without eyas.json
        assert getattr(plain.conventions, name) == value
    with pytest.raises(BadInput, match="so already"):
        do(done.after, "set-flag", name=name, value=value)


def test_a_flag_is_written_in_every_place_where_it_stands(tmp_path: Path):
    folder = healthy(tmp_path / "a", "flat", norm_before_fc=True)
    change(
        folder, lambda t, c: c.update(norm_before_fc=False, eagle_config={**c["eagle_config"], "norm_before_fc": False})
    )
    overlay = opened(folder)
    done = do(overlay, "set-flag", name="norm_before_fc", value=True)
    assert done.after.config["norm_before_fc"] is True and done.after.config["eagle_config"]["norm_before_fc"] is True
    assert profile("vllm").read(Seen(done.after.folder, FACTS, {})).values["norm_before_fc"] is True
    with pytest.raises(BadInput, match=r"norm_before_fc = False: there are such tensors"):
        do(done.after, "set-flag", name="norm_before_fc", value=False)
    with pytest.raises(BadInput, match=r"no tensors fc_norm\.\*"):
        do(overlay, "set-flag", name="fc_norm", value=True)
    with pytest.raises(BadInput, match="expected true or false"):
        do(overlay, "set-flag", name="norm_output", value="yes")
    with pytest.raises(BadInput, match="Eyas knows gelu"):
        do(overlay, "set-flag", name="hidden_act", value="swish")
    with pytest.raises(BadInput, match="head changes from row to row"):
        do(overlay, "set-flag", name="norm_before_head", value=False)
    with pytest.raises(BadInput, match=r"no config\.json says it"):
        do(overlay, "set-flag", name="nonsense", value=False)


def test_specforge_means_another_thing_by_norm_output(tmp_path: Path):
    overlay = opened(change(healthy(tmp_path / "a", "flat"), lambda t, c: c.update(norm_output=True)))
    assert "norm_output" not in do(overlay, "set-flag", name="norm_output", value=False).after.config


ROPES = [
    {},
    {"rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"}},
    {"rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"}, "rope_theta": None},
    {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    {"rope_parameters": {"sliding_attention": {"rope_theta": 10000.0}, "full_attention": {"rope_theta": 10000.0}}},
]


@pytest.mark.parametrize("said", ROPES)
def test_rope_in_every_spelling(tmp_path: Path, said: dict[str, Any]):
    overlay = opened(change(healthy(tmp_path / "a", "flat"), lambda t, c: c.update(said)))
    done = do(overlay, "set-rope", theta=500.0)
    assert done.after.reading.conventions.rope_theta == 500.0 and comes_back(done)
    assert profile("vllm").read(Seen(done.after.folder, FACTS, {})).values.get("rope_theta", 500.0) == 500.0
    done = do(overlay, "set-rope", kind="linear", scaling={"factor": 2.0})
    c = done.after.reading.conventions
    assert (c.rope_type, dict(c.rope_scaling), c.rope_theta) == ("linear", {"factor": 2.0}, 10000.0) and comes_back(
        done
    )
    plain = do(done.after, "set-rope", kind="default", theta=77.0).after
    assert (plain.reading.conventions.rope_type, plain.reading.conventions.rope_theta) == ("default", 77.0)
    read = profile("sglang").read(Seen(plain.folder, FACTS, {}))
    assert read.values.get("rope_type", "default") == "default" and read.values.get("rope_theta", 77.0) == 77.0
    with pytest.raises(BadInput, match="neither theta nor kind"):
        do(overlay, "set-rope")
    with pytest.raises(BadInput, match="above 0"):
        do(overlay, "set-rope", theta=-1.0)


def test_what_a_dialect_cannot_say_is_refused(tmp_path: Path):
    """AngelSlim's training code has a base of its own: Eyas believes that, whatever stands in the config."""
    wrote = {"architectures": ["Eagle3LlamaForCausalLM"], "target_model_type": "llama"}
    overlay = opened(change(healthy(tmp_path / "a", "flat"), lambda t, c: c.update(wrote)))
    with pytest.raises(BadInput, match=r"rope_theta = 500\.0 would be read as 10000\.0.*Export"):
        do(overlay, "set-rope", theta=500.0)


def test_positions(tmp_path: Path):
    overlay = opened(healthy(tmp_path / "a", "flat"))
    done = do(overlay, "set-positions", longest=512)
    assert done.after.config["max_position_embeddings"] == 512 and comes_back(done)
    with pytest.raises(BadInput, match="nothing to write"):
        do(overlay, "set-positions", longest=256)
    table = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64}
    yarn = opened(change(healthy(tmp_path / "b", "flat"), lambda t, c: c.update(rope_scaling=table)))
    with pytest.raises(BadInput, match="derives its angles from max_position_embeddings"):
        do(yarn, "set-positions", longest=512)


@pytest.mark.parametrize("style", ["flat", "speculators", "fused"])
def test_sizes(tmp_path: Path, style: str):
    good = opened(healthy(tmp_path / "good", style))

    def wrong(name: str, value: Any) -> Callable[[Any, Any], None]:
        def inject(tensors: Any, config: dict[str, Any]) -> None:
            place = config.get("transformer_layer_config", config)
            if name == "draft_vocab_size":
                config.pop(name)
            else:
                place[name] = value

        return inject

    faults = [
        ("num_attention_heads", 8),
        ("num_key_value_heads", 4),
        ("intermediate_size", 64),
        ("num_hidden_layers", 2),
    ]
    for name, value in faults:
        if style == "fused" and name == "num_hidden_layers":
            continue
        bad = opened(change(healthy(tmp_path / f"{name}", style), wrong(name, value)))
        done = do(bad, "sizes-from-tensors")
        assert places.first(done.after.config, name) == places.first(good.config, name) and comes_back(done), name
        assert says_the_same(done.after, good)
    with pytest.raises(BadInput, match="names the sizes of its tensors already"):
        do(good, "sizes-from-tensors")
    bad = opened(change(healthy(tmp_path / "v", style), wrong("vocab_size", 1300)))
    done = do(bad, "set-vocab-size", vocab_size=V)
    assert says_the_same(done.after, good) and comes_back(done)
    with pytest.raises(BadInput, match=r"1,300 is not what the target's ids are counted by: t2d 300, the target 300"):
        do(bad, "set-vocab-size", vocab_size=1300)
    bad = opened(change(healthy(tmp_path / "d", style), wrong("draft_vocab_size", None)))
    done = do(bad, "name-draft-vocabulary")
    assert places.first(done.after.config, "draft_vocab_size") == D and comes_back(done)
    with pytest.raises(BadInput, match="is 120 already"):
        do(good, "name-draft-vocabulary")


def test_heads_without_a_named_size(tmp_path: Path):
    def inject(tensors: Any, config: dict[str, Any]) -> None:
        del config["head_dim"]
        config["num_attention_heads"] = 8

    done = do(opened(change(healthy(tmp_path / "a", "flat"), inject)), "sizes-from-tensors", head_dim=8)
    assert done.after.config["num_attention_heads"] == 4 and "head_dim" not in done.after.config
    with pytest.raises(BadInput, match="heads of 4 or 8 rows fit its tensors: say head_dim"):
        do(done.before, "sizes-from-tensors")
    with pytest.raises(BadInput, match="latent attention"):
        do(opened(write_latent(tmp_path / "mla")), "sizes-from-tensors")


# ---------------------------------------------------------------- names


@pytest.mark.parametrize("style", ["eyas", "flat", "layers0", "prefixed", "sharded"])
def test_rename(tmp_path: Path, style: str):
    good = opened(healthy(tmp_path / "a", style))
    held = good.stored("fc.weight")
    bad = do(good, "rename-keys", names={held: "fusion.weight"})
    assert comes_back(bad)
    done = do(bad.after, "rename", name="fusion.weight", to="fc.weight")
    assert same_tensors(done.after, good) and comes_back(done)
    turned = bad.after.with_tensors(
        {"fusion.weight": do(good, "transpose", name="fc.weight", undo=True).after.ref("fc.weight")}
    )
    with pytest.raises(BadInput, match=r"must be \[32, 96\]"):
        do(turned, "rename", name="fusion.weight", to="fc.weight")
    done = do(turned, "rename", name="fusion.weight", to="fc.weight", transpose=True)
    assert same_tensors(done.after, good) and comes_back(done)
    with pytest.raises(BadInput, match=r"has norm\.weight already"):
        do(bad.after, "rename", name="fusion.weight", to="norm.weight")
    with pytest.raises(BadInput, match="has no tensor nothing"):
        do(good, "rename", name="nothing", to="fc.weight")
    with pytest.raises(BadInput, match="is there already"):
        do(good, "rename-keys", names={held: good.stored("norm.weight")})


def test_keys_of_a_dialect(tmp_path: Path):
    styles = {"flat": {}, "layers0": {"first": "layers.0."}, "prefixed": {"first": "layers.0.", "prefix": "model."}}
    found = {style: opened(healthy(tmp_path / style, style)) for style in styles}
    for style, arguments in styles.items():
        for other, overlay in found.items():
            if other == style:
                if style != "prefixed":  # its maps lie inside the model
                    with pytest.raises(BadInput, match="names its tensors so already"):
                        do(overlay, "respell", **arguments)
                continue
            done = do(overlay, "respell", **arguments)
            bare = {name.replace("model.d2t", "d2t").replace("model.t2d", "t2d") for name in found[style].tensors}
            assert done.after.tensors.keys() == bare and comes_back(done) and says_the_same(done.after, overlay)
    with pytest.raises(BadInput, match="expected midlayer"):
        do(found["flat"], "respell", first="layer.")


def test_fused_projections(tmp_path: Path):
    plain, fused = opened(healthy(tmp_path / "a", "flat")), opened(healthy(tmp_path / "b", "fused"))
    names = ["midlayer.self_attn.qkv_proj.weight", "midlayer.mlp.gate_up_proj.weight"]
    done = do(fused, "split", names=names)
    assert same_tensors(done.after, plain) and comes_back(done)
    pieces = done.after.change().tensors.values()
    assert all(isinstance(part, Extent) for piece in pieces if piece for part in piece.parts)
    done = do(plain, "fuse", names=names)
    assert same_tensors(done.after, fused) and comes_back(done)
    with pytest.raises(BadInput, match="no such fused projection"):
        do(plain, "fuse", names=["midlayer.self_attn.kv_proj.weight"])
    with pytest.raises(BadInput, match="has no fused projection"):
        do(plain, "split", names=names)


# ---------------------------------------------------------------- tensors

MOVED = [
    ("swap", {"a": ATTN + "k_proj.weight", "b": ATTN + "v_proj.weight"}),
    ("swap", {"a": MLP + "gate_proj.weight", "b": MLP + "up_proj.weight"}),
    ("swap", {"a": "midlayer.hidden_norm.weight", "b": "norm.weight"}),
    ("swap-halves", {}),
    ("permute-rotary", {"stored_as": "interleaved"}),
    ("permute-rotary", {"stored_as": "halves"}),
    ("transpose", {"name": ATTN + "o_proj.weight"}),
    ("permute-fc-slices", {"order": [2, 0, 1]}),
]


@pytest.mark.parametrize("style", ["eyas", "fused", "prefixed", "sharded", "bin"])
@pytest.mark.parametrize(("operation", "arguments"), MOVED)
def test_what_moves_numbers_comes_back(tmp_path: Path, style: str, operation: str, arguments: dict[str, Any]):
    overlay = opened(healthy(tmp_path / "a", style))
    done = do(overlay, operation, **arguments)
    assert comes_back(done)
    assert not says_the_same(done.after, overlay)
    split = (
        style == "fused"
        and not operation.startswith(("permute-fc", "transpose"))
        and "norm.weight" not in str(arguments)
    )
    assert any("is taken apart" in text for text in done.told) == split


def test_a_right_matrix_is_not_turned(tmp_path: Path):
    good = opened(healthy(tmp_path / "a"))
    with pytest.raises(BadInput, match=r"is \[32, 96\] as it should be"):
        do(good, "transpose", name="fc.weight")
    bad = opened(change(healthy(tmp_path / "b"), lambda t, c: t.update({"fc.weight": t["fc.weight"].T})))
    done = do(bad, "transpose", name="fc.weight")
    assert same_tensors(done.after, good) and comes_back(done)
    with pytest.raises(BadInput, match="is no matrix"):
        do(good, "transpose", name="norm.weight")
    with pytest.raises(BadInput, match="cannot stand for each other"):
        do(good, "swap", a="fc.weight", b="norm.weight")
    with pytest.raises(BadInput, match="expected interleaved or halves"):
        do(good, "permute-rotary", stored_as="pairs")
    with pytest.raises(BadInput, match=r"there is no tensor fc\.bias"):
        do(good, "swap", a="fc.bias", b="fc.weight")


def test_one_more_on_the_norms(tmp_path: Path):
    good = opened(healthy(tmp_path / "good", "flat", norm_before_fc=True))
    bad = opened(
        change(
            healthy(tmp_path / "bad", "flat", norm_before_fc=True),
            lambda t, c: t.update({n: x - 1 for n, x in t.items() if "norm" in n}),
        )
    )
    done = do(bad, "add-to-norms", value=1.0)
    assert says_the_same(done.after, good)
    rounds = opened(healthy(tmp_path / "c", "flat")).with_tensors(
        {"norm.weight": of_array("norm.weight", np.full(H, 1e-9, np.float32), Path("x"))}
    )
    assert do(rounds, "add-to-norms", value=1.0).inverse is None, "1 + 1e-9 is 1"
    whole = opened(healthy(tmp_path / "d", "flat")).with_tensors({
        n: of_array(n, np.full(H, 0.25, np.float32), Path("x")) for n, r in good.tensors.items()
        if "norm" in n and n != "input_norm.weight"
    })  # fmt: skip
    assert comes_back(do(whole, "add-to-norms", value=1.0))
    with pytest.raises(BadInput, match="1 or -1"):
        do(good, "add-to-norms", value=2.0)


def test_a_norm_whose_weights_are_lost(tmp_path: Path):
    def inject(tensors: dict[str, Any], config: dict[str, Any]) -> None:
        del tensors["input_norm.weight"]
        config["norm_before_fc"] = False

    bad = opened(change(healthy(tmp_path / "a", "flat", norm_before_fc=True), inject))
    done = do(bad, "norm-of-ones")
    assert done.after.reading.conventions.norm_before_fc and comes_back(done)
    assert torch.equal(done.after.ref("input_norm.weight").load(), torch.ones(3 * H))
    assert specimen(done.after).lacking == ()
    with pytest.raises(BadInput, match=r"norm-of-ones: input_norm\.weight: it is there"):
        do(done.after, "norm-of-ones")
    gone = do(done.after, "without-norms", flag="norm_before_fc")
    assert contents(gone.after)["tensors"] == contents(bad)["tensors"] and gone.inverse is None
    with pytest.raises(BadInput, match="there are no such norms"):
        do(bad, "without-norms", flag="fc_norm")


def test_a_tensor_of_a_reference(tmp_path: Path):
    good = healthy(tmp_path / "good", "layers0", norm_before_fc=True)

    def inject(tensors: dict[str, Any], config: dict[str, Any]) -> None:
        del tensors["input_norm.weight"], tensors[ATTN + "k_proj.weight"]
        tensors["fc.weight"] = torch.zeros_like(tensors["fc.weight"])
        config["norm_before_fc"] = False

    bad = opened(change(healthy(tmp_path / "bad", "flat", norm_before_fc=True), inject))
    names = ["fc.weight", "input_norm.weight", ATTN + "k_proj.weight"]
    done = do(bad, "tensor-from-reference", names=names, reference=str(good))
    assert says_the_same(done.after, opened(good)) and done.after.config["norm_before_fc"] is True
    assert done.inverse is None and comes_back(do(bad, "tensor-from-reference", names=names[1:], reference=str(good)))
    fused = opened(healthy(tmp_path / "fused", "fused", norm_before_fc=True))
    done = do(fused, "tensor-from-reference", names=[ATTN + "k_proj.weight"], reference=str(good))
    assert fused.fused(ATTN + "k_proj.weight") not in done.after.tensors and says_the_same(done.after, fused)
    with pytest.raises(BadInput, match=r"has no fc\.bias either"):
        do(bad, "tensor-from-reference", names=["fc.bias"], reference=str(good))
    wide = healthy(tmp_path / "wide", "flat", sizes={"intermediate_size": 64})
    with pytest.raises(BadInput, match=r"is \[64, 32\], this draft needs \[48, 32\]"):
        do(bad, "tensor-from-reference", names=[MLP + "up_proj.weight"], reference=str(wide))


def test_both_names_of_a_later_layers_norm(tmp_path: Path):
    two = {"num_layers": 2}
    good, bad = healthy(tmp_path / "good", "eyas", two), healthy(tmp_path / "bad", "eyas", two)
    names = ["layers.1.hidden_norm.weight", "layers.1.input_layernorm.weight"]
    change(bad, lambda t, c: t.update({n: torch.ones(H) for n in names}))
    done = do(opened(bad), "tensor-from-reference", names=names[:1], reference=str(good))
    assert same_tensors(done.after, opened(good))


def test_dtypes(tmp_path: Path):
    overlay = opened(healthy(tmp_path / "a"))
    done = do(overlay, "cast", dtype="BF16")
    assert done.after.config["dtype"] == "bfloat16" and done.inverse is None
    assert done.after.ref("fc.weight").load().dtype == torch.bfloat16 and done.after.ref("d2t").dtype == "I64"
    wide = do(done.after, "cast", dtype="F32")
    assert comes_back(wide)
    assert comes_back(do(done.after, "cast", dtype="F32", names=["fc.weight"]))
    big = overlay.with_tensors({"norm.weight": of_array("norm.weight", np.full(H, 1e30, np.float32), Path("x"))})
    with pytest.raises(BadInput, match="that float16 does not reach"):
        do(big, "cast", dtype="F16")
    with pytest.raises(BadInput, match="expected one of F64"):
        do(overlay, "cast", dtype="I8")


# ---------------------------------------------------------------- ends and folding


def test_the_targets_ends(tmp_path: Path):
    tiny_target = small_target(tmp_path / "target")
    ends = load_ends(tiny_target)
    good = opened(healthy(tmp_path / "a", "prefixed"))
    bare = do(good, "drop-tensors", names=["lm_head.weight"])
    assert bare.inverse is None
    done = do(bare.after, "head-from-target", target=str(tiny_target))
    assert torch.equal(done.after.ref("lm_head.weight").load(), ends.head[right_map().ids]) and comes_back(done)
    first = do(good, "head-from-target", target=str(tiny_target), rows="first")
    assert torch.equal(first.after.ref("lm_head.weight").load(), ends.head[:D]) and first.inverse is None
    away = good.with_tensors({"model.d2t": of_array("model.d2t", np.zeros(D, np.int64), Path("x"))})
    with pytest.raises(BadInput, match="is no map of 120 of 300 ids; mend it first"):
        do(away, "head-from-target", target=str(tiny_target))
    with pytest.raises(BadInput, match="there is no embedding"):
        do(good, "drop-embedding")
    done = do(good, "embedding-from-target", target=str(tiny_target))
    assert done.after.stored("embed_tokens.weight") == "model.embed_tokens.weight" and comes_back(done)
    assert torch.equal(done.after.ref("embed_tokens.weight").load(), ends.embedding)
    gone = do(done.after, "drop-embedding")
    assert same_tensors(gone.after, good) and gone.inverse is None
    narrow = opened(healthy(tmp_path / "n", "flat", sizes={"target_hidden_size": 16}))
    table = of_array("embed_tokens.weight", np.ones((V, H), np.float32), Path("x"))
    config = {**narrow.config, "target_hidden_size": 16}
    with pytest.raises(BadInput, match="must own an embedding"):
        do(narrow.with_tensors({"embed_tokens.weight": table}).with_config(config), "drop-embedding")


def test_what_can_be_folded(tmp_path: Path):
    for name, value in (("rms_norm_offset", True), ("layer_input", "state_embedding"), ("logit_scale", 0.5)):
        overlay = opened(healthy(tmp_path / name, "eyas", **{name: value}))
        done = do(overlay, "fold", convention=name)
        assert says_the_same(done.after, overlay), name
        plain = Overlay.over(done.after.folder, FACTS)
        assert says_the_same(replace(plain, eyas=None), overlay), "also as engines read it"
        assert done.inverse is None or comes_back(done)
        with pytest.raises(BadInput, match="there is nothing to fold"):
            do(done.after, "fold", convention=name)
    overlay = opened(healthy(tmp_path / "e", "eyas", embedding_scale=32**0.5))
    with pytest.raises(BadInput, match="the embedding is the target's, which no draft may scale"):
        do(overlay, "fold", convention="embedding_scale")
    with pytest.raises(BadInput, match="only powers of two"):
        do(opened(healthy(tmp_path / "l", "eyas", logit_scale=0.3)), "fold", convention="logit_scale")
    for name in CANNOT:
        assert "fine-tune" in str(cannot_fold(name))
        with pytest.raises(BadInput, match="fine-tune"):
            do(overlay, "fold", convention=name)
    assert all(cannot_fold(name) is None for name in FOLDED)


def test_a_stored_embedding_takes_its_scale_in(tmp_path: Path):
    table = torch.randn(V, H, generator=torch.Generator().manual_seed(2))
    folder = healthy(tmp_path / "a", "eyas", embedding_scale=4.0)
    change(folder, lambda t, c: t.update({"embed_tokens.weight": table}))
    overlay = do(opened(folder), "declare", name="embedding", value="own").after
    done = do(overlay, "fold", convention="embedding_scale")
    assert says_the_same(done.after, overlay) and comes_back(done)
    assert do(overlay, "scale", name="embed_tokens.weight", factor=3.0).inverse is None
    with pytest.raises(BadInput, match="other than 1"):
        do(overlay, "scale", name="embed_tokens.weight", factor=1.0)


def test_declarations(tmp_path: Path):
    overlay = opened(healthy(tmp_path / "a"))
    done = do(overlay, "declare", name="rope_step", value=0)
    assert done.after.reading.conventions.rope_step == 0 and comes_back(done)
    assert done.after.eyas["conventions"]["how"]["rope_step"] == "declared"
    for name, value in (("norm_output", True), ("nonsense", 1), ("layer_input", "sideways")):
        with pytest.raises(BadInput, match=f"declare: {name}"):
            do(overlay, "declare", name=name, value=value)
    with pytest.raises(BadInput, match=r"has no eyas\.json"):
        do(opened(healthy(tmp_path / "b", "flat")), "declare", name="rope_step", value=0)


# ---------------------------------------------------------------- steps


def test_steps_are_checked_data(tmp_path: Path):
    overlay = opened(healthy(tmp_path / "a"))
    step = Step("write-taps", {"taps": [1, 4, 6]}, "EY-TAPS-RANGE", sure=False)
    assert Step.from_dict(json.loads(json.dumps(step.to_dict()))) == step
    assert str(step) == "write-taps (taps = [1, 4, 6])"
    for wrong in (
        Step("nonsense"), Step("write-taps"), Step("write-taps", {"taps": "2"}),
        Step("write-taps", {"taps": [1.5, 2, 3]}),
        Step("write-taps", {"taps": [1, 4, 6], "more": 1}), Step("swap", {"a": 1, "b": 2}),
        Step("set-rope", {"theta": "x"}), Step("write-fields", {"values": {"passwd": {"/a": 1}}}),
        Step("write-fields", {"values": {"config.json": {"/no/where": 1}}}), Step("write-fields", {"values": {}}),
        Step("write-fields", {"values": {}, "removed": {"config.json": ["/no"]}}), Step("set-map-form", {"form": "x"}),
    ):  # fmt: skip
        with pytest.raises(BadInput):
            perform(overlay, wrong)
    with pytest.raises(BadInput, match="no JSON values"):
        Step("swap", {"a": torch.zeros(1)})
    for values in ([], {"operation": 1}, {"operation": "swap", "arguments": 3}, {"operation": "swap", "extra": 1}):
        with pytest.raises(BadInput, match="step"):
            Step.from_dict(values)
    assert all(operation.what.endswith(".") or operation.what for operation in OPERATIONS.values())


def test_a_step_that_fails_leaves_the_overlay_as_it_was(tmp_path: Path):
    overlay = opened(healthy(tmp_path / "a"))
    before = contents(overlay)
    with pytest.raises(BadInput):
        do(overlay, "absolute-to-offset")
    do(overlay, "swap-halves")
    assert contents(overlay) == before and logits(overlay)[0].shape == (2, 3, D)


def test_pointers():
    old = {"a": {"b/c": 1, "d": [1]}, "e": None, "f": True}
    new = {"a": {"b/c": 2, "g~": {}}, "f": 1}
    values, removed = places.between(old, new)
    assert values == {"/a/b~1c": 2, "/a/g~0": {}, "/f": 1} and removed == ["/e", "/a/d"]
    assert places.apply(old, values, removed) == new


def test_every_operation_is_documented_and_none_that_is_not_there():
    text = (Path(__file__).parents[1] / "docs" / "repair.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `([\w-]+)` \| .* \| (exact|journal) \|$", text, flags=re.MULTILINE))
    assert rows == {name: "exact" if operation.back else "journal" for name, operation in OPERATIONS.items()}
