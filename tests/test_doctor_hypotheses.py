"""Every alternative can be applied and run, changes nothing of what it is applied to, and undoes its fault exactly.

pytest -q tests/test_doctor_hypotheses.py
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import replace
from functools import cache

import pytest
import torch

from doctoring import FAULTS, HEAD_DIM, Patient, all_of, make_patient, without
from eyas.doctor.groups import GROUPS, group
from eyas.doctor.hypotheses import Context, hypotheses
from eyas.doctor.specimen import Specimen, stored_ids
from eyas.doctor.trial import Bench
from eyas.target.facts import TargetFacts

TEXT = {"documents": 6, "length": 20}
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip


def facts(**changes) -> TargetFacts:
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    sizes = (32, 300, 8, 4, 2, 8, 48, 1e-5, 10000.0, rope, 256, True, "llama")
    return replace(TargetFacts(*sizes), **changes)


@cache
def patient(**conventions) -> Patient:
    return make_patient(text=TEXT, **conventions)


def everything(who: Patient, **more) -> Context:
    """A context in which every family has something to say."""
    other = torch.randn(300, 32, generator=torch.Generator().manual_seed(3))
    return replace(who.context, facts=facts(), embedding=who.embedding, head=other, **more)


def digest(s: Specimen) -> str:
    """Of all that it holds, bytes of tensors included."""
    tensors = [*sorted(s.tensors.items()), ("ids", s.ids), ("embedding", s.embedding)]
    said = {k: v for k, v in s.conventions.to_dict().items() if k != "how"}
    held = hashlib.sha256(repr((s.shape, said, s.slices, s.state_shift, s.label_shift)).encode())
    for name, t in tensors:
        held.update(f"{name} {None if t is None else (t.dtype, tuple(t.shape))} {dict(s.changed)}".encode())
        held.update(b"" if t is None else t.contiguous().view(torch.uint8).numpy().tobytes())
    return held.hexdigest()


# ---------------------------------------------------------------- on a healthy draft


@pytest.mark.parametrize(
    "flags", [{}, {"norm_before_fc": True, "norm_output": True}, {"fc_norm": True, "sliding_window": 9}], ids=str
)
def test_every_alternative_runs_and_leaves_its_base_alone(flags):
    who = patient(**flags)
    base, context = who.specimen, everything(who)
    before = digest(base)
    bench = Bench(who.material, steps=2)
    seen = set()
    nothing = bench.nothing(base)
    for h in hypotheses(base, context):
        assert (h.group, h.label) not in seen, "one name, one alternative"
        seen.add((h.group, h.label))
        changed = h.apply(base)
        assert changed.changed == {h.group: h.label}
        assert digest(base) == before, h.group
        assert changed.lacking == (), h.group
        assert digest(changed) != before
        assert (changed.body == base.body) is h.cheap, (h.group, h.label)
        values = bench.surprise([changed])
        assert torch.isfinite(values).all() and float(values.max()) <= nothing + 1e-5
        assert h.about and h.value is not ..., h.group
    assert {g for g, _ in seen} >= {
        "d2t", "taps", "slice_order", "norm_before_residual", "norm_output", "norm_before_head", "hidden_act",
        "rms_norm_offset", "norm_names", "layer_input", "qkv", "gate_up", "transposed", "rope_layout", "rope_theta",
        "rope_step", "embedding_scale", "head", "state_shift", "label_shift",
    }  # fmt: skip
    for name, _ in seen:
        assert name in GROUPS, name


def test_a_second_substitution_keeps_the_first():
    who = patient()
    base, context = who.specimen, everything(who)
    first = all_of(base, context)["norm_output", "true"].apply(base)
    for h in hypotheses(first, context):
        changed = h.apply(first).changed
        assert changed[h.group] == h.label
        assert h.group == "norm_output" or changed["norm_output"] == "true"


def test_nothing_is_asked_of_states_that_were_not_recorded():
    who = patient()
    few = replace(everything(who), taps=frozenset((2, 3, 4, 5, 6)))
    slices = [h.apply(who.specimen).slices for h in hypotheses(who.specimen, few)]
    assert {t for s in slices for t in s} <= few.taps
    assert (3, 5, 6) in slices and (1, 3, 4) not in slices
    assert all(len(set(s)) == 3 for s in slices), "no layer twice"


def test_what_the_target_says_becomes_alternatives():
    who = patient()
    scaled = replace(everything(who), facts=facts(rope_theta=5e5, rope_parameters=LLAMA3, embedding_scale=12.5))
    found = all_of(who.specimen, scaled)
    assert found["rope_theta", "500000"].about == "the target's base"
    llama3 = found["rope_type", "llama3"].apply(who.specimen)
    assert llama3.conventions.rope_type == "llama3" and llama3.conventions.rope_theta == 5e5
    assert llama3.conventions.rope_scaling["factor"] == 8.0 and "rope_theta" not in llama3.conventions.rope_scaling
    assert ("embedding_scale", "12.5") in found
    bench = Bench(who.material, steps=2)
    assert bench.surprise([llama3]).mean() > bench.surprise([who.specimen]).mean()
    scaling = {k: v for k, v in LLAMA3.items() if not k.startswith("rope_")}
    taught = make_patient(text=TEXT, rope_theta=5e5, rope_type="llama3", rope_scaling=scaling)
    assert ("rope_type", "default") in all_of(taught.specimen, everything(taught))


def test_what_engines_read_becomes_alternatives():
    who = patient()
    theirs = replace(who.specimen, slices=(1, 2, 6)).with_(conventions={"rope_theta": 123.0})
    found = all_of(who.specimen, everything(who, engines={"vllm": theirs}))
    assert found["taps", "1/2/6"].about == "as vllm reads the config"
    assert ("rope_theta", "123") in found


# ---------------------------------------------------------------- each fault is undone exactly


@pytest.mark.parametrize("name", FAULTS)
def test_the_alternative_undoes_the_fault(name: str):
    fault = FAULTS[name]
    who = patient(**fault.patient)
    broken, context = fault.inject(who), replace(who.context, **fault.context(who))
    found = all_of(broken, context)
    assert (fault.group, fault.label) in found, [k for k in found if k[0] == fault.group]
    before = digest(broken)
    mended = found[fault.group, fault.label].apply(broken)
    assert digest(broken) == before
    bench = Bench(who.material, steps=2)
    healthy, ill, now = bench.surprise([who.specimen, broken, mended])
    assert torch.allclose(now, healthy, atol=1e-4)
    assert float(ill.mean()) > float(healthy.mean()) + 0.05
    assert group(fault.group).id.startswith("EY-MEASURED-")


@pytest.mark.parametrize(
    ("name", "there", "back"),
    [
        ("qkv", "k_proj <-> v_proj", "k_proj <-> v_proj"),
        ("gate_up", "gate_proj <-> up_proj", "gate_proj <-> up_proj"),
        ("norm_names", "hidden_norm <-> norm", "hidden_norm <-> norm"), ("transposed", "o_proj", "o_proj"),
        ("rope_layout", "interleaved", "halves"), ("rope_layout", "halves", "interleaved"),
        ("norm_output", "true", "false"), ("slice_order", "5/4/2", "2/4/5"), ("state_shift", "+1", "+0"),
    ],
)  # fmt: skip
def test_there_and_back_is_where_it_was(name: str, there: str, back: str):
    who = patient()
    gone = all_of(who.specimen, who.context)[name, there].apply(who.specimen)
    returned = all_of(gone, who.context)[name, back].apply(gone)
    assert digest(replace(returned, changed={})) == digest(who.specimen)
    assert digest(replace(gone, changed={})) != digest(who.specimen)


def test_rotary_pairs_are_those_of_the_other_layout():
    """Row 2j of a head stored in pairs is row j of its halves, row 2j+1 is row j + half."""
    who = patient()
    name = "midlayer.self_attn.q_proj.weight"
    turned = all_of(who.specimen, who.context)["rope_layout", "interleaved"].apply(who.specimen).tensors[name]
    stored = who.specimen.tensors[name]
    half = HEAD_DIM // 2
    for head in range(4):
        for j in range(half):
            at = head * HEAD_DIM
            assert torch.equal(turned[at + j], stored[at + 2 * j])
            assert torch.equal(turned[at + half + j], stored[at + 2 * j + 1])


def test_a_norm_before_fc_whose_weights_are_lost_is_tried_with_ones():
    who = patient(norm_before_fc=True)
    lost = without(who.specimen, "input_norm.weight").with_(conventions={"norm_before_fc": False})
    h = all_of(lost, who.context)["norm_before_fc", "true, weights lost"]
    mended = h.apply(lost)
    assert torch.equal(mended.tensors["input_norm.weight"], torch.ones(96)) and mended.conventions.norm_before_fc


# ---------------------------------------------------------------- on what is broken in any way


def odd(tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor | None]]:
    if tensor.dim() == 2:
        yield from (("turned", tensor.T), ("a row short", tensor[:-1]), ("a column short", tensor[:, :-1]))
        yield from (("one row", tensor[0]), ("doubled", torch.cat([tensor, tensor])))
    else:
        yield from (("short", tensor[:-1]), ("a matrix", tensor[None]), ("empty", tensor[:0]), ("one", tensor[0]))
    yield from (("int8", tensor.to(torch.int8)), ("bool", tensor.bool()), ("half", tensor.half()), ("missing", None))
    if tensor.dtype.is_floating_point:
        yield "nan", tensor * float("nan")


def test_no_tensor_is_so_broken_that_an_alternative_fails():
    """Each tensor in each odd form: all alternatives can be made, applied and judged."""
    who = make_patient(text={"documents": 2, "length": 8})
    bench, context = Bench(who.material, steps=1), everything(who)
    whole = who.tensors | {"embed_tokens.weight": who.embedding + 1}
    tried = 0
    for name, tensor in whole.items():
        for form, value in odd(tensor):
            tensors = {k: v for k, v in {**whole, name: value}.items() if v is not None}
            ill = replace(who.specimen, tensors=tensors, ids=stored_ids(tensors, who.draft.shape))
            changed = [h.apply(ill) for h in hypotheses(ill, context)]
            # Only those that touch the odd tensor, or need it, are worth the time.
            runs = [s for s in changed if s.tensors.get(name) is not ill.tensors.get(name) or s.lacking != ill.lacking]
            assert torch.isfinite(bench.surprise([ill, *runs])).all(), (name, form)
            tried += len(changed)
    assert tried > 5000


def test_a_missing_tensor_is_looked_for_among_those_that_nothing_reads():
    who = patient()
    lost = without(who.specimen, "midlayer.hidden_norm.weight", "fc.weight")
    lost = lost.with_(tensors={"a.weight": torch.ones(32), "b.weight": torch.ones(96, 32), "c.weight": torch.ones(5)})
    named = {label for g, label in all_of(lost, who.context) if g.startswith("name of ")}
    assert named == {"midlayer.hidden_norm.weight = a.weight", "fc.weight = b.weight"}
    crowd = lost.with_(tensors={f"x{i}.weight": torch.ones(32) for i in range(100)})
    assert sum(g.startswith("name of ") for g, _ in all_of(crowd, who.context)) == 32, "a crowd is not tried whole"
