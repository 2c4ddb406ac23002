"""The page of a run: what it shows is what the run wrote, escaped, loading nothing; partial runs; two side by side.

pytest -q tests/test_report_run.py          in a real browser: make test-browser
"""

from __future__ import annotations

import base64
import fcntl
import hashlib
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from eyas.cli.report import command
from eyas.errors import BadInput, Mismatch
from eyas.report.interactive import Curve, Plot, data, joined
from eyas.report.run import read_report
from eyas.report.run_curve import POINTS, read_training
from eyas.report.run_html import render
from eyas.report.run_marks import visible
from eyas.train.inputs import check_run
from html_page import Page
from tiny_runs import HOSTILE, SET, two_runs

PARTS = ["results", "accept-length", "training", "vocabulary", "masks", "rounds", "stages", "provenance"]


@pytest.fixture(scope="module")
def runs(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return two_runs(tiny_target, tmp_path_factory)


@pytest.fixture(scope="module")
def report(runs: tuple[Path, Path]) -> dict[str, Any]:
    return read_report([runs[0]])


@pytest.fixture
def copy(runs: tuple[Path, Path], tmp_path: Path) -> Path:
    """A copy of the first run, to take parts from."""
    return Path(shutil.copytree(runs[0], tmp_path / "run"))


def unfinish(folder: Path, *stages: str) -> None:
    """The run as it was before it began the first of these stages."""
    path = folder / "stages.json"
    told = json.loads(path.read_text())
    for stage in stages:
        del told["stages"][stage]
        shutil.rmtree(folder / stage)
    path.write_text(json.dumps(told))
    (folder / "summary.json").unlink(missing_ok=True)


def page_of(*folders: Path) -> Page:
    return Page(render(read_report(folders)))


# ---- one run --------------------------------------------------------------------------------------------------------


def test_the_page_shows_what_the_run_wrote(runs: tuple[Path, Path], report: dict[str, Any]) -> None:
    text = render(report)
    page, run = Page(text), runs[0]
    assert [name for name in page.ids if name in PARTS] == PARTS
    assert [link for link in page.links if link.startswith("#")] == page.links, "every link stays on the page"
    assert {link[1:] for link in page.links} <= set(page.ids)
    proof = json.loads((run / "prove/result.json").read_text())
    last = json.loads((run / "train/metrics.jsonl").read_text().splitlines()[-1])
    for words in (
        f"Accept length {proof['tau_mean']:.3f}",
        f"{last['predicted']['accept_length']:.3f}",
        f"{last['tokens']:,}",
        "2 of 2 answers are token for token",
        "60 of the target's 300 ids",
    ):
        assert words in page.said, words
    assert "Not there yet" not in page.said
    for stage, manifest in ((p.parent.name, json.loads(p.read_text())) for p in run.glob("*/manifest.json")):
        assert stage in page.said
        for digest in json.loads((run / "stages.json").read_text())["stages"][stage]["inputs"].values():
            assert digest[:16] in page.said
        assert manifest["code_version"] in page.said
    assert text == render(report), "equal data give an equal page"


def test_curves_are_those_of_the_log(runs: tuple[Path, Path], report: dict[str, Any]) -> None:
    lines = [json.loads(line) for line in (runs[0] / "train/metrics.jsonl").read_text().splitlines()]
    training = report["runs"][0]["training"]
    assert training["tokens"] == [line["tokens"] for line in lines]
    assert training["loss"] == [[line["loss"][k] for line in lines] for k in range(2)]
    assert [p["accept_length"] for p in training["predicted"]] == [
        line["predicted"]["accept_length"] for line in lines if "predicted" in line
    ]
    plots = json.loads(next(s for s in Page(render(report)).scripts if s.startswith("{")))
    assert list(plots) == ["acceptance", "loss", "predicted", "coverage"]
    assert plots["loss"]["x"] == training["tokens"]
    assert [s["values"] for s in plots["loss"]["series"]] == training["loss"]


def test_a_long_log_is_averaged_by_rows_and_torn_lines_are_left_out(tmp_path: Path) -> None:
    rows = 0
    with (tmp_path / "metrics.jsonl").open("w") as log:
        for step in range(1, 4 * POINTS + 1):
            rows += 1 if step % 4 else 5  # every fourth step has five rows
            loss = 8.0 if step % 4 == 0 else 0.0
            log.write(
                json.dumps({"step": step, "tokens": 10 * step, "rows": rows, "loss": [loss], "seconds": 0.5}) + "\n"
            )
        log.write('{"step": 9999, "tok')
    training = read_training(tmp_path / "metrics.jsonl")
    assert training is not None
    assert (training["steps"], training["steps_a_point"], len(training["tokens"])) == (4 * POINTS, 4, POINTS)
    assert training["loss"] == [[5.0] * POINTS], "(3 * 1 * 0 + 1 * 5 * 8) / 8 rows"
    assert training["tokens_per_s"] == 20.0
    assert read_training(tmp_path / "nothing.jsonl") is None


def test_coverage_is_that_of_the_map_and_reaches_the_whole(report: dict[str, Any]) -> None:
    vocabulary = report["runs"][0]["vocabulary"]
    curve = vocabulary["curve"]
    at = curve["ids"].index(60)
    assert curve["counted"][at] == pytest.approx(vocabulary["coverage"], abs=1e-5)
    assert curve["held_out"][at] == pytest.approx(vocabulary["held_out_coverage"], abs=1e-5)
    assert curve["ids"][-1] == 300 and curve["counted"][-1] == curve["held_out"][-1] == 1.0
    for line in (curve["counted"], curve["held_out"]):
        assert line == sorted(line)


def test_masks_and_rounds_add_up(runs: tuple[Path, Path], report: dict[str, Any]) -> None:
    run = report["runs"][0]
    for document in run["conversations"]:
        assert document["shown"] == document["tokens"]
        assert any(part["supervised"] for part in document["parts"])
        joined_text = "".join(part["text"] for part in document["parts"])
        assert HOSTILE in joined_text and joined_text.startswith("<|im_start|>user\n")
        assert "<|im_start|>" not in next(part["text"] for part in document["parts"] if part["supervised"])
    page = page_of(runs[0])
    assert page.tags.count("mark") >= len(run["conversations"])
    assert [(s["set"], s["index"]) for s in run["samples"]] == [(SET, 0), (SET, 1)]
    assert sum(len(s["rounds"]) for s in run["samples"]) == run["proof"]["all_rounds"]["rounds"]
    for answer in run["samples"]:
        for one in answer["rounds"]:
            assert len(one["drafted"]) == 2
            assert one["drafted"][: len(one["accepted"])] == one["accepted"]


@pytest.mark.parametrize("count", [1, 2])
def test_names_and_prompts_stay_text(runs: tuple[Path, Path], count: int) -> None:
    page = page_of(*runs[:count])
    assert HOSTILE in "".join(page.text) and f"{SET}, prompt 1" in page.said
    assert not {"img", "b", "i", "link", "iframe", "object", "embed", "form"} & set(page.tags)
    assert page.tags.count("script") == 3, "the data, the library, and what draws"


def test_only_the_scripts_of_the_policy_may_run_and_nothing_is_loaded(report: dict[str, Any]) -> None:
    text = render(report)
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]+)"', text)
    assert policy is not None
    rules = dict(rule.strip().split(" ", 1) for rule in policy[1].split(";"))
    assert rules["default-src"] == "'none'" and "unsafe" not in rules["script-src"]
    ran = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
    digests = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in ran]
    assert rules["script-src"].split() == [f"'sha256-{digest}'" for digest in digests] and len(digests) == 2
    style = "".join(re.findall(r"<style>(.*?)</style>", text, re.DOTALL))
    assert "@import" not in style and "url(" not in style
    assert len(text.encode()) < 250_000, "the page has grown out of what can be mailed"


def test_every_plot_has_a_name_a_sentence_and_its_numbers(report: dict[str, Any]) -> None:
    text = render(report)
    figures = re.findall(r"<figure.*?</figure>", text, re.DOTALL)
    assert len(figures) == 4
    for figure in figures:
        assert re.search(r'role="img" aria-label="[^"]{40,}"', figure)
        assert figure.count("<table") == figure.count("<caption>") == 1
        assert re.search(r'aria-labelledby="([a-z]+)-title".*<h3 id="\1-title">', figure, re.DOTALL)
    said = next(label for label in Page(text).labels if label.startswith("Loss by unrolled step"))
    losses = report["runs"][0]["training"]["loss"]
    assert f"step 1 goes from {losses[0][0]:.3f} to {losses[0][-1]:.3f}" in said


def test_text_that_does_not_print_is_shown_as_its_code() -> None:
    assert visible("a\x1b[2J\u202e<b>\n\tc") == "a\\x1b[2J\\u202e&lt;b&gt;↵\n\tc"


# ---- runs that are not finished -------------------------------------------------------------------------------------


def test_without_a_proof_the_page_says_so_and_shows_what_training_predicts(copy: Path) -> None:
    unfinish(copy, "prove")
    page = page_of(copy)
    assert "Stopped before prove" in page.said and "has not been proved" in page.said
    assert "Acceptance by drafted position" in page.said and "Loss by unrolled step" in page.said


def test_while_it_trains_the_curves_end_where_it_stands(copy: Path) -> None:
    unfinish(copy, "export", "prove")
    log = copy / "train/metrics.jsonl"
    lines = log.read_text().splitlines()
    log.write_text("\n".join(lines[:3]) + "\n" + lines[3][:20])
    (copy / "train/manifest.json").unlink()
    told = json.loads((copy / "stages.json").read_text())
    told["stages"]["train"] |= {"finished": False, "duration_s": 0.0, "counts": {}}
    (copy / "stages.json").write_text(json.dumps(told))
    with (copy / ".lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        page = page_of(copy)
        assert "At work in train, step 3 of 6" in page.said and "Training is not finished" in page.said
        assert "Numbers of the plot: Loss by unrolled step" in page.said
    assert "Stopped in train, step 3 of 6" in page_of(copy).said


def test_a_run_that_has_just_begun_is_a_page(copy: Path) -> None:
    unfinish(copy, "regenerate", "split", "extract", "heldout", "vocab", "train", "export", "prove")
    page = page_of(copy)
    for words in ("Stopped before regenerate", "Training has not begun", "No draft vocabulary", "No features"):
        assert words in page.said
    assert page.tags.count("script") == 1, "nothing to draw, no library"
    assert [name for name in page.ids if name in PARTS] == PARTS


def test_what_was_cleared_or_comes_from_an_earlier_version_is_said(copy: Path, tmp_path: Path) -> None:
    result = copy / "prove/result.json"
    proof = json.loads(result.read_text())
    del proof["samples"]
    result.write_text(json.dumps(proof))
    (copy / "recipe.json").unlink()
    shutil.rmtree(copy / "heldout")
    report = read_report([copy])
    page = Page(render(report))
    assert "kept no rounds" in page.said
    assert report["runs"][0]["settings"]["train.steps"] == 6, "the stages' records hold the settings, too"
    assert report["runs"][0]["vocabulary"]["held_out_coverage"] is None
    summary = json.loads((copy / "summary.json").read_text())
    (copy / "summary.json").write_text(json.dumps({**summary, "target": str(tmp_path / "gone")}))
    assert "name it with --target" in page_of(copy).said


def test_a_train_folder_alone(runs: tuple[Path, Path]) -> None:
    page = page_of(runs[0] / "train")
    assert "Trained" in page.said and "folder of eyas train alone" in page.said
    assert "Loss by unrolled step" in page.said and "masks" not in page.ids


def test_what_is_no_run_is_refused(runs: tuple[Path, Path], tmp_path: Path, make_tiny_target: Any) -> None:
    for folder, words in (
        (tmp_path, "holds no run"),
        (runs[0] / "vocab", "holds no run"),
        (tmp_path / "x", "no folder"),
    ):
        with pytest.raises(BadInput, match=words):
            read_report([folder])
    with pytest.raises(Mismatch, match="made with tokenizer"):
        read_report([runs[0]], target=str(make_tiny_target(tmp_path / "other", vocab=290)))


# ---- two ------------------------------------------------------------------------------------------------------------


def test_two_runs_side_by_side(runs: tuple[Path, Path]) -> None:
    report = read_report(runs)
    differences = report["differences"]
    assert [(row["name"], row["a"], row["b"]) for row in differences["settings"]] == [
        ("train.steps", 6, 4), ("vocab.size", 60, 40),
    ]  # fmt: skip
    assert {row["stage"] for row in differences["inputs"]} == {"train", "export", "prove"}
    assert differences["proofs"] == {"comparable": True, "because": []}
    page = Page(render(report))
    assert "their τ can be compared" in page.said and "(first)" in page.said and "(second)" in page.said
    plots = json.loads(next(s for s in page.scripts if s.startswith("{")))
    assert [s["label"] for s in plots["predicted"]["series"]] == ["A: predicted τ", "B: predicted τ"]
    for plot in plots.values():
        assert plot["x"] == sorted(set(plot["x"]))
    assert "two losses cannot be compared" in page.said


def test_proofs_on_other_prompts_are_not_compared(runs: tuple[Path, Path], copy: Path) -> None:
    told = json.loads((copy / "stages.json").read_text())
    told["stages"]["prove"]["inputs"][SET] = "0" * 64
    (copy / "stages.json").write_text(json.dumps(told))
    result = json.loads((copy / "prove/result.json").read_text())
    result["settings"]["k"] = 3
    (copy / "prove/result.json").write_text(json.dumps(result))
    report = read_report([runs[0], copy])
    assert report["differences"]["proofs"]["because"] == [f"{SET}: its content differs", "k: 2 and 3"]
    assert "cannot be compared: they were proved differently" in Page(render(report)).said


def test_a_finished_run_beside_one_that_has_no_proof(runs: tuple[Path, Path], copy: Path) -> None:
    unfinish(copy, "vocab", "train", "export", "prove")
    page = page_of(runs[0], copy)
    assert "there are no two accept lengths to compare" in page.said
    assert "B: No draft vocabulary has been cut yet" in page.said and "B: Training has not begun" in page.said


# ---- pieces and command line ----------------------------------------------------------------------------------------


def test_curves_over_different_points_share_an_axis() -> None:
    axis, spread = joined([([1, 3], [[10.0, 30.0]]), ([2, 3], [[0.2, None]])])
    assert axis == [1, 2, 3]
    assert spread == [[[10.0, None, 30.0]], [[None, 0.2, None]]]
    with pytest.raises(ValueError, match="2 values for 1 points"):
        Plot("p", "P", "x", [1], [Curve("c", [1.0, 2.0], "c0")])


def test_data_cannot_end_its_block() -> None:
    block = data([Plot("p", HOSTILE + "\u2028<!--", "x", [1], [Curve("</script>", [1.0], "c0")])])
    assert block.count("<") == 2 and "\u2028" not in block
    assert json.loads(block[block.index(">") + 1 : block.rindex("<")])["p"]["title"].startswith(HOSTILE)


def test_the_command_writes_beside_the_run_and_training_goes_on(copy: Path, runs: tuple[Path, Path]) -> None:
    def call(*args: object) -> Any:
        return CliRunner().invoke(command, [str(arg) for arg in args], catch_exceptions=False)

    done = call(copy)
    assert done.output.strip() == str(copy / "report.html") and "Accept length" in (copy / "report.html").read_text()
    call(copy, runs[1])
    assert "B − A" in (copy / "comparison.html").read_text()
    call(copy / "train", "--out", copy / "here.html")
    call(copy / "train")
    check_run(copy / "train")  # a training that goes on does not take the page for a stranger's file
    printed = json.loads(call(copy, "--json").stdout)
    assert printed["schema"] == "eyas-run-report/1" and printed["runs"][0]["proof"]["lossless"] is True
    assert not list(copy.rglob(".eyas-tmp*"))
