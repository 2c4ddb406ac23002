"""What --reference takes: a map in any file that trainers write, or another checkpoint of the same draft.

pytest -q tests/test_doctor_reference.py
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from doctoring import Patient, make_patient, without
from drafts import write_flat
from eyas.doctor.reference import FEW, reference
from eyas.draft.checkpoint import save_draft
from eyas.errors import BadInput

D, V = 120, 300


@pytest.fixture(scope="module")
def patient() -> Patient:
    return make_patient(text={"documents": 2, "length": 8})


def of(path: Path, patient: Patient, tensors: dict[str, torch.Tensor] | None = None) -> Any:
    return reference(path, patient.draft.shape, patient.tensors if tensors is None else tensors)


@pytest.mark.parametrize("kind", ["tensor", "dict", "long name", "int32", "npy"])
def test_a_saved_map_is_read_both_ways(tmp_path: Path, patient: Patient, kind: str):
    d2t = patient.vocab_map.d2t
    path = tmp_path / ("map.npy" if kind == "npy" else "map.pt")
    if kind == "npy":
        np.save(path, d2t.numpy())
    else:
        held = {"tensor": d2t, "dict": {"t2d": patient.vocab_map.t2d, "d2t": d2t}, "int32": d2t.int(),
                "long name": {"draft_id_to_target_id": d2t}}  # fmt: skip
        torch.save(held[kind], path)
    found = of(path, patient)
    assert set(found.maps) == {f"offsets of {path.name}", f"ids of {path.name}"}
    assert torch.equal(found.maps[f"offsets of {path.name}"], patient.vocab_map.ids)
    assert torch.equal(found.maps[f"ids of {path.name}"], torch.where(d2t >= V, -1, d2t))
    assert found.tensors == {} and found.differing == ()
    torch.save(patient.vocab_map.ids, tmp_path / "ids.pt")
    assert torch.equal(of(tmp_path / "ids.pt", patient).maps["ids of ids.pt"], patient.vocab_map.ids)


def test_another_checkpoint_gives_its_map_and_what_differs(tmp_path: Path, patient: Patient):
    folder = save_draft(patient.draft, patient.vocab_map, tmp_path / "ref")
    same = of(folder, patient)
    assert same.differing == () and same.tensors == {}
    assert torch.equal(same.maps["offsets of ref"], patient.vocab_map.ids)
    mine = patient.tensors
    mine["fc.weight"] = mine["fc.weight"] + 1
    del mine["norm.weight"]
    found = of(folder, patient, mine)
    assert set(found.differing) == set(found.tensors) == {"fc.weight", "norm.weight"}
    assert torch.equal(found.tensors["fc.weight"], patient.tensors["fc.weight"])
    assert torch.equal(found.tensors["norm.weight"], patient.tensors["norm.weight"])


def test_another_dtype_is_no_difference(tmp_path: Path, patient: Patient):
    """A draft in bfloat16, the float32 masters that it was rounded from."""
    folder = save_draft(patient.draft, patient.vocab_map, tmp_path / "ref")
    rounded = {k: t.bfloat16() if t.is_floating_point() else t for k, t in patient.tensors.items()}
    assert of(folder, patient, rounded).differing == ()
    assert set(of(folder, patient, rounded | {"fc.weight": rounded["fc.weight"] * 2}).tensors) == {"fc.weight"}


def test_another_run_is_not_tried_tensor_by_tensor(tmp_path: Path, patient: Patient):
    """Also one that does not name its taps, as SpecForge writes it."""
    other = make_patient(9, text={"documents": 2, "length": 8})
    found = of(write_flat(tmp_path / "ref", other.draft, other.vocab_map), patient)
    assert len(found.differing) > FEW and found.tensors == {}
    assert torch.equal(found.maps["offsets of ref"], other.vocab_map.ids)


def test_a_tensor_of_another_shape_is_not_offered(tmp_path: Path, patient: Patient):
    folder = save_draft(patient.draft, patient.vocab_map, tmp_path / "ref")
    mine = patient.tensors | {"fc.weight": torch.zeros(3, 3)}
    assert of(folder, patient, mine).tensors == {}
    lost = dict(without(patient.specimen, "fc.weight").tensors)
    assert set(of(folder, patient, lost).tensors) == {"fc.weight"}


def bad(tmp_path: Path, kind: str) -> Path:
    path = tmp_path / ("x.npy" if kind.startswith("npy") else "x.pt")
    if kind == "missing":
        return path
    if kind == "a folder":
        return tmp_path
    if kind == "npy of objects":
        np.save(path, np.array([{"a": 1}], dtype=object), allow_pickle=True)
    elif kind == "npy of words":
        np.save(path, np.array(["a"]))
    elif kind == "no pickle":
        path.write_bytes(b"nothing of the kind")
    elif kind == "a list":
        torch.save([1, 2], path)
    elif kind == "a dict without":
        torch.save({"t2d": torch.ones(V)}, path)
    else:
        torch.save({"floats": torch.zeros(D), "short": torch.zeros(D - 1, dtype=torch.int64),
                    "square": torch.zeros(D, 1, dtype=torch.int64)}[kind], path)  # fmt: skip
    return path


@pytest.mark.parametrize(
    ("kind", "why"),
    [("missing", "does not exist"), ("a folder", "no config.json"), ("npy of objects", "cannot be read as an array"),
     ("npy of words", "cannot be read as an array"), ("no pickle", "cannot be read with weights_only"),
     ("a list", "neither a tensor nor a dict"), ("a dict without", "neither a tensor nor a dict"),
     ("floats", "has 120 integers"), ("short", r"\[119\]"), ("square", r"\[120, 1\]")],
)  # fmt: skip
def test_what_is_no_reference_is_refused_with_the_reason(tmp_path: Path, patient: Patient, kind: str, why: str):
    with pytest.raises(BadInput, match=why):
        of(bad(tmp_path, kind), patient)


def test_a_draft_of_other_sizes_is_refused(tmp_path: Path, patient: Patient):
    other = make_patient(sizes={"draft_vocab_size": 100}, text={"documents": 2, "length": 8})
    with pytest.raises(BadInput, match="maps 100 of 300 ids, this draft 120 of 300"):
        of(save_draft(other.draft, other.vocab_map, tmp_path / "ref"), patient)


def test_code_in_a_pickle_is_not_run(tmp_path: Path, patient: Patient):
    class Trap:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "touched",))

    torch.save({"d2t": Trap()}, tmp_path / "x.pt")
    with pytest.raises(BadInput, match="weights_only"):
        of(tmp_path / "x.pt", patient)
    assert not (tmp_path / "touched").exists()
