"""An audit acquits the target's own states, and says of wrong ones whose they are.

pytest -q tests/test_features_audit.py
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from eyas.cli import cli
from eyas.errors import BadInput, Mismatch
from eyas.features.audit import REPORT, audit, beyond, how_many
from eyas.features.extract import extract
from eyas.features.layout import NOT_READ
from feature_files import Rows, changed

TAPS = [2, 4, 5]
WORDS = [
    "the young hawk",
    "a draft guesses four tokens",
    "What is it?",
    "def add(a, b):\n    return",
    "sits on a glove",
]


@pytest.fixture(scope="module")
def features(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ten conversations in a few shards."""
    rows = [
        {"id": f"c{i}", "messages": [{"role": "user", "content": WORDS[i % 5] * (1 + i // 5)},
                                     {"role": "assistant", "content": WORDS[(i + 1) % 5] + WORDS[(3 * i + 2) % 5]}]}
        for i in range(10)
    ]  # fmt: skip
    out = tmp_path_factory.mktemp("audited") / "features"
    extract(tiny_target, rows, out, TAPS, shard_bytes=1 << 16)
    return out


def said(report: dict) -> dict[str, list[str]]:
    return {one["document"]: one["what"] for one in report["wrong"]}


def test_the_targets_own_states_are_acquitted(features: Path, tiny_target: Path):
    report = audit(features, tiny_target, "100%")
    assert report["wrong"] == [] and report["documents"] == report["of"] == 10
    assert set(report["worst"]) == {"2", "4", "5", "final", "logsumexp"}
    assert 0.001 < report["worst"]["2"] < 0.006  # what rounding to bf16 makes, and no less: something was compared
    assert report["worst"]["logsumexp"] < 1e-5 and report["choices"]["same"] == report["choices"]["of"] > 50
    assert json.loads((features / REPORT).read_text()) == report


def test_another_conversations_states_are_named(features: Path, tiny_target: Path, tmp_path: Path):
    """Two whose first rows were exchanged, as by an engine that mixed up two requests."""

    def mixed(rows: Rows) -> None:
        n = min(len(rows[3]["ids"]), len(rows[7]["ids"]))
        for name in ("taps", "final"):
            kept = rows[3][name][:n].clone()
            rows[3][name][:n] = rows[7][name][:n]
            rows[7][name][:n] = kept

    found = said(audit(changed(features, tmp_path / "f", mixed), tiny_target, "100%"))
    assert set(found) == {"c3", "c7"}
    assert found["c3"][0].endswith("another conversation's states, and its own are recorded as those of c7")
    assert found["c7"][0].endswith("another conversation's states, and its own are recorded as those of c3")


def test_a_block_of_another_request_is_found(features: Path, tiny_target: Path, tmp_path: Path):
    def mixed(rows: Rows) -> None:
        for name in ("taps", "final"):
            rows[2][name][48:60] = rows[6][name][48:60]

    found = said(audit(changed(features, tmp_path / "f", mixed), tiny_target, "100%"))
    assert found == {"c2": ["12 of 63 rows (rows 48 to 59): the states of another conversation, c6"]}


@pytest.mark.parametrize(("by", "word"), [(1, "before"), (-1, "after")])
def test_shifted_rows_are_found(features: Path, tiny_target: Path, tmp_path: Path, by: int, word: str):
    def shifted(rows: Rows) -> None:
        for name in ("taps", "final"):
            rows[4][name] = rows[4][name].roll(by, 0)

    found = said(audit(changed(features, tmp_path / "f", shifted), tiny_target, "100%"))
    assert list(found) == ["c4"]
    assert (
        found["c4"][0].startswith("tap 2, tap 4, tap 5, the final state: ") and f"of the token {word}" in found["c4"][0]
    )


def test_another_tap_is_found(features: Path, tiny_target: Path, tmp_path: Path):
    def exchanged(rows: Rows) -> None:
        for row in rows:
            row["taps"][:, :32] = row["taps"][:, 32:64].clone()

    found = said(audit(changed(features, tmp_path / "f", exchanged), tiny_target, "3"))
    assert len(found) == 3
    assert all(len(what) == 1 and what[0].startswith("tap 2: the states of tap 4") for what in found.values())


def test_a_scale_noise_and_other_choices_are_found(features: Path, tiny_target: Path, tmp_path: Path):
    def several(rows: Rows) -> None:
        rows[0]["final"] *= 2
        rows[1]["taps"] += torch.randn(rows[1]["taps"].shape, generator=torch.Generator().manual_seed(0))
        asked = rows[2]["top1"] != NOT_READ
        rows[2]["top1"][asked] = (rows[2]["top1"][asked] + 1) % 300
        rows[3]["logsumexp"] *= 1.1
        rows[4]["final"][3] = float("nan")

    found = said(audit(changed(features, tmp_path / "f", several), tiny_target, "100%"))
    assert set(found) == {f"c{i}" for i in range(5)}
    assert "the final state: 2 times" in found["c0"][0]
    assert "nobody's" in found["c1"][0]
    assert "only 0 of" in found["c2"][0]
    assert "logsumexp" in found["c3"][0]
    assert "row 3" in found["c4"][0]


def test_choices_of_the_row_before_are_told(features: Path, tiny_target: Path, tmp_path: Path):
    """A teacher one row late, where the choices vary: with ids that the target really chose."""

    def late(rows: Rows) -> None:
        for row in rows:
            asked = (row["top1"] != NOT_READ).nonzero().flatten()
            row["top1"][asked[1:]] = row["top1"][asked[:-1]].clone()

    found = said(audit(changed(features, tmp_path / "f", late), tiny_target, "100%"))
    assert found and any("row before" in what for one in found.values() for what in one)


def test_a_row_may_stray_but_not_far_and_not_many():
    """Low precision makes outliers; whatever is of another row or tap is far off, or everywhere."""
    far = torch.full((3, 100), 0.05)
    far[0, 7] = 0.2  # one strays
    far[1, 7] = 0.5  # one is somebody else's
    far[2, :3] = 0.2  # many stray
    bad = beyond(far, 0.15)
    assert bad.sum(1).tolist() == [0, 1, 3] and bool(bad[1, 7]) and bool(bad[2, :3].all())
    assert beyond(torch.full((1, 4), torch.inf), 0.15).all()
    assert not beyond(torch.zeros(1, 0), 0.15).any()


def test_how_many():
    assert [how_many(t, 1000) for t in ("1%", "0.01%", "100%", "20", "5000")] == [10, 2, 1000, 20, 1000]
    assert how_many("1%", 1) == 1
    for wrong in ("0", "-1", "x", "101%", "1.5", "nan", "%"):
        with pytest.raises(BadInput, match="--audit"):
            how_many(wrong, 10)


def test_features_of_another_target_are_refused(features: Path, make_tiny_target, tmp_path: Path):
    with pytest.raises(Mismatch, match="target"):
        audit(features, make_tiny_target(tmp_path / "other", seed=1))


def test_the_command(features: Path, tiny_target: Path, tmp_path: Path):
    base = ["extract", "--target", str(tiny_target), "--audit", "4"]
    good = CliRunner().invoke(cli, [*base, "--out", str(features)], catch_exceptions=False)
    assert good.exit_code == 0 and "4 of 10 conversations" in good.output

    def swapped(rows: Rows) -> None:
        for row in rows:
            row["final"] = row["final"].flip(0)

    bad = changed(features, tmp_path / "f", swapped)
    runner = CliRunner().invoke(cli, [*base, "--out", str(bad), "--json"])
    assert isinstance(runner.exception, Mismatch) and "4 of 4 conversations" in str(runner.exception)
    assert len(json.loads(runner.stdout)["audit"]["wrong"]) == 4
