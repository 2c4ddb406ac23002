"""Weights that nobody trained look it; those that were do not; and what is no number at all is named.

pytest -q tests/test_doctor_weights.py
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from drafts import flat_config, make_draft, write_flat
from eyas.doctor.case import Case
from eyas.doctor.checks.weights import LEAST, ROWS, about, check
from eyas.doctor.finding import Finding, Severity
from eyas.doctor.groups import group

BIG = {"hidden_size": 128, "target_hidden_size": 128, "intermediate_size": 160, "vocab_size": 400}
FC, HEAD, EMBED, DOWN = "fc.weight", "lm_head.weight", "embed_tokens.weight", "midlayer.mlp.down_proj.weight"


def trained(rows: int, columns: int, seed: int = 0, uneven: float = 0.25) -> torch.Tensor:
    """Rows and columns of several sizes, as training leaves them."""
    generator = torch.Generator().manual_seed(seed)
    across = torch.exp(uneven * torch.randn(rows, 1, generator=generator))
    down = torch.exp(uneven * torch.randn(1, columns, generator=generator))
    return torch.randn(rows, columns, generator=generator) * 0.02 * across * down


def fresh(rows: int, columns: int, seed: int = 0, kind: str = "normal") -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    if kind == "normal":
        return torch.randn(rows, columns, generator=generator) * 0.02
    return (torch.rand(rows, columns, generator=generator) * 2 - 1) / columns**0.5  # nn.Linear


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A draft of trained-looking matrices; one tensor of it is replaced by each test."""
    draft, vocab_map = make_draft(sizes=BIG)
    with torch.no_grad():
        for i, parameter in enumerate(draft.parameters()):
            if parameter.dim() == 2:
                parameter.copy_(trained(*parameter.shape, seed=i))
    return write_flat(tmp_path_factory.mktemp("weights") / "d", draft, vocab_map)


def found(folder: Path, tmp_path: Path, **changed: torch.Tensor) -> list[Finding]:
    from safetensors.torch import load_file

    copy = tmp_path / "copy"
    copy.mkdir(exist_ok=True)
    (copy / "config.json").write_bytes((folder / "config.json").read_bytes())
    save_file({**load_file(folder / "model.safetensors"), **changed}, copy / "model.safetensors")
    return list(check(Case.open(copy)))


def told(findings: list[Finding]) -> list[tuple[str, str | None]]:
    assert all(f.severity is Severity.ERROR and f.evidence and f.consequence and f.remedy for f in findings)
    return [(f.id, f.convention) for f in findings]


def test_of_trained_matrices_nothing_is_said(folder: Path, tmp_path: Path):
    assert found(folder, tmp_path) == []
    assert flat_config(make_draft(sizes=BIG)[0])["hidden_size"] >= LEAST, "large enough to be judged"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("kind", ["normal", "uniform"])
def test_a_fresh_matrix_is_named_in_every_dtype(folder: Path, tmp_path: Path, dtype: torch.dtype, kind: str):
    out = found(folder, tmp_path, **{FC: fresh(128, 384, kind=kind).to(dtype)})
    assert told(out) == [("EY-TENSOR-FRESH", "tensor fc")]
    assert "fc.weight [128, 384] looks freshly initialised" in out[0].evidence
    assert found(folder, tmp_path, **{FC: trained(128, 384).to(dtype)}) == []


@pytest.mark.parametrize("seed", range(8))
def test_chance_decides_neither_way(folder: Path, tmp_path: Path, seed: int):
    names = {DOWN: (128, 160), HEAD: (120, 128), EMBED: (400, 128)}
    new = {name: fresh(*size, seed=seed) for name, size in names.items()}
    assert {f.convention for f in found(folder, tmp_path, **new)} == {"tensor down_proj", "head", "embedding"}
    old = {name: trained(*size, seed=seed, uneven=0.1) for name, size in names.items()}
    assert found(folder, tmp_path, **old) == []


def test_either_rows_or_columns_that_differ_are_training(folder: Path, tmp_path: Path):
    """The norms before a matrix give its columns their size, what reads it its rows; one of the two is enough."""
    base = fresh(128, 384)
    for scale in (torch.linspace(0.5, 1.5, 128)[:, None], torch.linspace(0.5, 1.5, 384)[None]):
        assert found(folder, tmp_path, **{FC: base * scale}) == []
    assert told(found(folder, tmp_path, **{FC: base * 7})) == [("EY-TENSOR-FRESH", "tensor fc")], "size says nothing"


def test_an_embedding_has_its_own_finding(folder: Path, tmp_path: Path):
    [f] = found(folder, tmp_path, **{EMBED: fresh(400, 128)})
    assert (f.id, f.convention) == ("EY-EMBED-FRESH", "embedding")
    assert "vLLM reads the stored embedding" in f.consequence and "target's" in f.remedy


def test_what_is_small_is_not_judged(folder: Path, tmp_path: Path):
    """Of a narrow matrix chance says too little: the heads of a tiny draft are as even as random ones."""
    assert found(folder, tmp_path, **{"midlayer.self_attn.k_proj.weight": fresh(LEAST - 1, 256)}) == []
    assert told(found(folder, tmp_path, **{"midlayer.self_attn.k_proj.weight": fresh(LEAST + 32, 256)})) == [
        ("EY-TENSOR-FRESH", "tensor k_proj")
    ]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_what_is_no_number_is_named(folder: Path, tmp_path: Path, bad: float, dtype: torch.dtype):
    matrix, norm = trained(128, 384).to(dtype), torch.ones(128, dtype=dtype)
    matrix[3, 5] = matrix[100, 0] = bad
    norm[7] = bad
    out = found(folder, tmp_path, **{FC: matrix, "norm.weight": norm})
    assert told(out) == [("EY-TENSOR-NAN", "tensor fc"), ("EY-TENSOR-NAN", "tensor norm")]
    assert "fc.weight holds NaN or infinite values: 2 in 128 rows" in out[0].evidence


def test_a_matrix_of_zeros_is_named(folder: Path, tmp_path: Path):
    out = found(folder, tmp_path, **{DOWN: torch.zeros(128, 160), HEAD: torch.zeros(120, 128).bfloat16()})
    assert sorted(told(out)) == [("EY-TENSOR-ZERO", "head"), ("EY-TENSOR-ZERO", "tensor down_proj")]
    almost = torch.zeros(128, 160)
    almost[0, 0] = 1.0
    assert found(folder, tmp_path, **{DOWN: almost}) == []
    assert found(folder, tmp_path, **{"midlayer.self_attn.q_proj.bias": torch.zeros(32)}) == [], "a bias may be zero"


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int32, torch.bool], ids=str)
def test_what_is_quantised_is_named_and_a_map_is_not(folder: Path, tmp_path: Path, dtype: torch.dtype):
    [f] = found(folder, tmp_path, **{FC: torch.ones(128, 384).to(dtype)})
    assert (f.id, f.convention) == ("EY-TENSOR-DTYPE", "tensor fc")
    assert "no floating point" in f.evidence


def test_a_single_broken_number_of_a_small_tensor_is_seen(folder: Path, tmp_path: Path):
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        matrix = trained(4 * ROWS, 128).to(dtype)
        matrix[3, 5] = float("inf")
        [f] = found(folder, tmp_path, **{"extra.weight": matrix})
        assert f.id == "EY-TENSOR-NAN" and "values: 1 in" in f.evidence


def test_a_sample_is_spread_over_all_rows(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A large matrix of which only the end is broken."""
    monkeypatch.setattr("eyas.doctor.checks.weights.WHOLE", 0)
    rows = 4 * ROWS
    matrix = trained(rows, 128)
    matrix[rows - rows // ROWS :] = float("nan")
    [f] = found(folder, tmp_path, **{"extra.weight": matrix})
    assert f.id == "EY-TENSOR-NAN" and f"in {ROWS} rows" in f.evidence


def test_odd_shapes_do_no_harm(folder: Path, tmp_path: Path):
    odd = {"empty.weight": torch.zeros(0, 5), "one.weight": torch.tensor(2.0), "three.weight": fresh(128, 128)[None]}
    assert found(folder, tmp_path, **odd) == []


def test_a_single_number_may_be_none(folder: Path, tmp_path: Path):
    [finding] = found(folder, tmp_path, scale=torch.tensor(float("nan")))
    assert finding.id == "EY-TENSOR-NAN" and "1 in 1 rows" in finding.evidence


def test_each_tensor_belongs_to_a_convention():
    assert about("lm_head.weight") == "head" and about("embed_tokens.weight") == "embedding"
    assert about("midlayer.self_attn.q_proj.weight") == "tensor q_proj" and about("fc.weight") == "tensor fc"
    for name in (FC, HEAD, EMBED, DOWN):
        assert group(about(name)).id.startswith("EY-MEASURED-")
