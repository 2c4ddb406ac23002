"""The arithmetic of benchmarks/train_step.py and what benchmarks/performance.py makes of its rows; nothing is timed."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))

import performance  # noqa: E402
from step import rows, works  # noqa: E402
from step.features import for_specforge, for_speculators, packs, subset, synthetic  # noqa: E402

from eyas.vocab import VocabMap  # noqa: E402

ABOUT: dict[str, Any] = {
    "warmup": 1, "steps": 3, "machine": {"cpu": "abacus", "cores": 2, "bf16": False}, "date": "2026-01-01 00:00",
    "commit": "abc",
}  # fmt: skip


def made(work: str, tool: str, cpu_s: float, peak: float = 100, dtype: str = "float32", **more: Any) -> dict[str, Any]:
    """A row of three rounds whose middle one is `cpu_s`."""
    told = [
        rows.Measured([s], [s * more.get("wall", 1)], 512, 50, 50 + peak, [500] if tool == "eyas" else [], 40e9, "2.13")
        for s in (cpu_s / 2, cpu_s, 3 * cpu_s)
    ]
    setting, threads = more.get("setting", dtype), more.get("threads", 1)
    return rows.row(work, tool, setting, dtype, threads, told, about=ABOUT)


def test_a_row_is_the_median_of_the_medians():
    rounds = [
        rows.Measured([1.0, 2.0, 9.0], [3.0], 1024, 100.0, 400.0, [700, 800, 900], 50e9),
        rows.Measured([4.0], [5.0], 1024, 100.0, 500.0, [800], 75e9),
        rows.Measured([3.0], [4.0], 1024, 100.0, 450.0, [800], 50e9),
    ]
    made = rows.row("w", "eyas", "s", "float32", 1, rounds)
    assert made["cpu_s"] == 3 and made["wall_s"] == 4 and made["peak_mib"] == 350
    assert made["supervised_rows"] == 800 and made["tokens_per_cpu_s"] == pytest.approx(1024 / 3, abs=0.01)
    # 375 MFLOP x 800 rows = 300 GFLOP: 3 of 2 s x 50, 1 of 4 s x 75, 2 of 3 s x 50 GFLOP
    assert made["limit_ratio"] == 2.0
    assert rows.row("w", "eyas", "s", "float32", 2, rounds)["limit_ratio"] is None


def test_peers_get_the_rows_and_the_rate_that_eyas_told():
    told = {"cpu_s_median": 10.0, "step_s_median": 11.0, "seq": 512, "batch": 1, "rss_before_mib": 1.0,
            "peak_rss_mib": 3.0, "torch": "2.13"}  # fmt: skip
    row = rows.row("w", "specforge", "s", "float32", 1, [rows.of_specforge(told)], rows=400, gemm_flop_s=60e9)
    assert row["limit_ratio"] == 0.25 and row["peak_mib"] == 2.0 and row["supervised_rows"] == 400
    assert rows.row("w", "specforge", "s", "float32", 1, [rows.of_specforge(told)])["limit_ratio"] is None


def test_the_last_object_is_found_below_other_lines():
    assert rows.last_object('Warning: {x}\n{"a": {\n"b": 1}\n}\n') == {"a": {"b": 1}}
    assert rows.last_object('{"a": 1}\n{"a": 2}\n') == {"a": 2}
    with pytest.raises(ValueError, match="no JSON"):
        rows.last_object("nothing")


def test_documents_are_packed_to_exactly_the_length():
    lengths = [700, 300, 24, 512, 512, 1000, 1025]
    assert subset(lengths, 1024) == [0, 1, 2]
    assert packs(lengths, 1024, 9) == [[0, 1, 2], [3, 4]]
    assert subset([3, 3], 7) is None and packs([3, 3], 7, 1) == []


def test_all_three_layouts_hold_the_same_states(tiny_target, tmp_path):
    features = synthetic(tmp_path / "features", tiny_target, [5, 7])
    vocab = VocabMap.from_absolute(torch.arange(20), features.meta.vocab_size)
    for_specforge(features, [[0], [1, 0]], vocab, tmp_path / "specforge")
    for_speculators(features, [1, 0], tmp_path / "speculators" / "hs_0.safetensors")
    sample = torch.load(tmp_path / "specforge" / "data_001.ckpt", weights_only=True)
    from safetensors.torch import load_file

    states = load_file(tmp_path / "speculators" / "hs_0.safetensors")
    parts = [features.document(1), features.document(0)]
    assert torch.equal(sample["input_ids"], torch.cat([p["ids"] for p in parts]).long())
    assert torch.equal(states["token_ids"], sample["input_ids"]) and bool(sample["loss_mask"].all())
    assert torch.equal(sample["aux_hidden_state"][0], torch.cat([p["taps"] for p in parts]))
    assert torch.equal(states["hidden_states"][:, :-1].flatten(1), sample["aux_hidden_state"][0])
    assert torch.equal(states["hidden_states"][:, -1], sample["hidden_state"][0])
    assert parts[0]["top1"][:-1].min() >= 0  # a teacher at every row that is read


def test_goals_are_held_against_the_better_setting_of_each_peer():
    work = "full mask, L = 512"
    held = [
        made(work, "eyas", 3.0),
        made(work, "eyas", 9.0, dtype="bfloat16"),
        made(work, "specforge", 8.0),
        made(work, "specforge", 4.0, dtype="bfloat16"),
        made(work, "speculators", 10.0),
    ]
    (line,) = performance.beside_peers(held)
    assert line.ours == "3.00 s (float32)" and line.specforge == "4.00 s (bfloat16)"
    assert line.ratios == "0.75 (missed), 0.30"
    assert line.limit == "1.56"  # 375 MFLOP x 500 rows in 3 s, of 40 GFLOP/s


def test_memory_tokens_and_threads():
    long, packed = performance.LONG
    held = [
        made("full mask, L = 2,048", "eyas", 3.0, peak=100),
        made("full mask, L = 2,048", "specforge", 3.0, peak=250),
        made("full mask, L = 2,048", "specforge", 9.0, peak=190, dtype="bfloat16"),
        made("full mask, L = 2,048", "speculators", 3.0, peak=400),
        made("full mask, L = 512", "eyas", 1.0),
        made("full mask, L = 512", "eyas", 1.0, wall=0.5, threads=2),
        made(long, "eyas", 1.5),
        made(packed, "eyas", 1.5),
    ]
    (line,) = performance.memory(held)
    assert line.ours == "100 MiB (float32)" and line.specforge == "190 MiB (bfloat16)"
    assert line.ratios == "0.53 (missed), 0.25"
    assert [one.ratios for one in performance.long_documents(held)] == ["1.50", "1.50 (missed)"]
    assert [one.ratios for one in performance.two_threads(held)] == ["2.00"]


def test_only_the_part_between_the_markers_is_replaced(tmp_path):
    page = f"before\n{performance.BEGIN}\nold\n{performance.END}\nafter\n"
    text = performance.render([made("full mask, L = 512", "eyas", 3.0)], [])
    once = performance.replace(page, text)
    assert once.startswith("before\n") and once.endswith("after\n") and "old" not in once
    assert performance.replace(once, text) == once
    assert "abacus, 2 cores, without bf16" in text and "commit abc" in text
    assert re.search(r"\| full mask, L = 512 \| .* \| 3\.00 s \(float32\) \| – \| – \|", text)
    with pytest.raises(ValueError, match="needs the lines"):
        performance.replace("no markers", text)
    assert performance.BEGIN in (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")


def test_later_files_replace_rows_of_earlier_ones(tmp_path):
    for name, cpu_s in (("a", 1.0), ("b", 2.0)):
        (tmp_path / name).write_text(json.dumps([made("w", "eyas", cpu_s)]))
    assert [r["cpu_s"] for r in performance.merged([tmp_path / "a", tmp_path / "b"])] == [2.0]


def test_goals_name_works_that_are_measured():
    names = {work.name for work in works.WORKS}
    goals = {*performance.BESIDE_PEERS, *performance.LIMIT, *performance.LONG, performance.SHORT, performance.MEMORY[0]}
    assert goals <= names
    assert all(work.tools(["eyas", "specforge"]) == ["eyas"] for work in works.WORKS if work.alone)
