"""`eyas doctor` from outside: options, exit codes, what it prints and what it refuses.

pytest -q tests/test_doctor_cli.py
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from doctoring import Config, D, Patient, Tensors, patient_of, save
from eyas.cli import main
from eyas.cli.doctor import seconds
from eyas.doctor import diagnosis as module
from eyas.doctor import record as recording
from eyas.errors import BadInput

KEYS = {"verdict", "where", "findings", "tau"}
FINDING = {
    "id", "status", "severity", "convention", "declared", "best", "equivalents", "delta_tau", "interval", "evidence",
    "remedy",
}  # fmt: skip
Call = Callable[..., tuple[int, str, str]]


def wrong_map(tensors: Tensors, _: Config) -> None:
    tensors["d2t"] = tensors["d2t"] + torch.arange(D)


@pytest.fixture(scope="module")
def who(tiny_target: Path) -> Patient:
    return patient_of(tiny_target, text={"documents": 10, "length": 24})


@pytest.fixture(scope="module")
def drafts(who: Patient, tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("drafts")
    return {"good": save(who, root / "good", tiny_target), "bad": save(who, root / "bad", tiny_target, wrong_map)}


@pytest.fixture
def call(who: Patient, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Call:
    """Exit code, what was printed and what was said on standard error; a target answers with the patient's text."""
    monkeypatch.setattr(recording, "record", lambda *args, **kwargs: who.material)
    monkeypatch.setenv("COLUMNS", "200")

    def called(*args: Any) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as left:
            main(["doctor", *map(str, args)])
        out, err = capsys.readouterr()
        return int(left.value.code or 0), out, err

    return called


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What the command asks of `diagnose`, which is not run."""
    calls: list[dict[str, Any]] = []
    empty = {"verdict": "healthy", "where": "none", "summary": "", "findings": [], "tau": {}, "next": "eyas prove"}
    monkeypatch.setattr(
        module, "diagnose", lambda draft, **kwargs: (calls.append({"draft": draft, **kwargs}), empty)[1]
    )
    return calls


# ---------------------------------------------------------------- what it says


def test_a_healthy_draft_exits_with_0(call: Call, drafts: dict[str, Path], tiny_target: Path):
    code, out, err = call(drafts["good"], "--target", tiny_target)
    assert (code, err) == (0, "")
    assert "Your draft is healthy" in out and "Traceback" not in out


def test_findings_exit_with_1(call: Call, drafts: dict[str, Path], tiny_target: Path):
    code, out, _ = call(drafts["bad"], "--target", tiny_target)
    assert code == 1 and "EY-D2T-ABSOLUTE" in out and "measured" in out
    assert call(drafts["bad"], "--target", tiny_target, "--fail-on", "never")[0] == 0


def test_json_is_what_the_issue_asks_for(call: Call, drafts: dict[str, Path], tiny_target: Path):
    code, out, err = call(drafts["bad"], "--target", tiny_target, "--engine", "vllm@0.32.0", "--json")
    told = json.loads(out, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert (code, err) == (1, "") and set(told) >= KEYS and out.count("\n") == 1
    assert told["where"] in "none|training|data|checkpoint|export|launch|engine|unknown".split("|")
    assert set(told["tau"]) >= {"declared", "best", "as_read"} and set(told["tau"]["as_read"]) == {"vllm"}
    first = told["findings"][0]
    assert set(first) >= FINDING
    assert (first["id"], first["status"], first["severity"]) == ("EY-D2T-ABSOLUTE", "confirmed", "error")
    assert first["delta_tau"] > 0.5 and len(first["interval"]) == 2
    assert call(drafts["bad"], "--target", tiny_target, "--format", "json", "--fail-on", "never")[0] == 0


def test_the_next_command_names_the_target_as_it_was_named(call, drafts, tiny_target, monkeypatch):
    from eyas.target import source

    monkeypatch.setattr(source, "resolve_target", lambda spec, cache=None: tiny_target)
    told = json.loads(call(drafts["good"], "--target", "smollm2", "--json")[1])
    assert told["next"] == f"eyas prove {drafts['good']} --target smollm2"


def test_html_is_written_beside_what_is_printed(call: Call, drafts: dict[str, Path], tiny_target: Path, tmp_path: Path):
    report = tmp_path / "report.html"
    code, out, _ = call(drafts["bad"], "--target", tiny_target, "--html", report)
    page = report.read_text()
    assert code == 1 and "EY-D2T-ABSOLUTE" in out
    assert page.lstrip().lower().startswith("<!doctype html>") and "EY-D2T-ABSOLUTE" in page
    assert not re.search(r"""(src|href)\s*=\s*["']?https?:""", page), "it loads nothing"


def test_static_needs_no_target_and_replays_nothing(
    call: Call, drafts: dict[str, Path], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(recording, "record", None)
    code, out, _ = call(drafts["bad"], "--static", "--json")
    told = json.loads(out)
    assert code == 1 and {f["status"] for f in told["findings"]} == {"static"}
    assert told["tau"]["declared"] is None and "ledger" not in told and told["seconds"] < 5
    assert call(drafts["good"], "--static", "--fail-on", "warning")[0] == 0
    github = call(drafts["bad"], "--static", "--format", "github")[1]
    assert re.search(r"^::error file=.*bad,title=EY-D2T-ABSOLUTE::", github, re.MULTILINE)


def test_what_is_served(call: Call, drafts: dict[str, Path], tiny_target: Path, tmp_path: Path):
    code, out, _ = call(drafts["good"], "--target", tiny_target, "--served-accept-length", "1.0", "--json")
    told = json.loads(out)
    assert (code, told["where"], told["tau"]["served"]) == (1, "engine", 1.0)
    log = tmp_path / "server.log"
    log.write_text(
        "(EngineCore pid=9) INFO 11-30 04:57:22 [metrics.py:101] SpecDecoding metrics: Mean acceptance length: 1.00, "
        "Accepted throughput: 0.00 tokens/s, Drafted throughput: 40.0 tokens/s, Accepted: 0 tokens, "
        "Drafted: 4000 tokens, Per-position acceptance rate: 0.000, 0.000, 0.000, 0.000, "
        "Avg Draft acceptance rate: 0.0%\n"
    )
    told = json.loads(call(drafts["good"], "--target", tiny_target, "--log", log, "--json")[1])
    assert told["where"] == "engine" and told["served"]["engine"] == "vllm"


# ---------------------------------------------------------------- what it asks for


def test_options_reach_the_diagnosis(call: Call, asked: list, drafts: dict[str, Path], tiny_target, tmp_path: Path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "What is a hawk?"}\n')
    code, _, err = call(
        drafts["good"], "--target", tiny_target, "--features", tmp_path, "--engine", "sglang",
        "--engine", "vllm@0.32.0", "--reference", tmp_path / "d2t.pt", "--training", tmp_path / "run",
        "--draft-tokens", 3, "--budget", "2m", "--prompts", prompts, "--served-accept-length", 1.5,
        "--launch", "vllm serve m --max-model-len 128",
    )  # fmt: skip
    assert (code, err) == (0, "")
    [given] = asked
    assert given["draft"] == drafts["good"] and Path(given["target"]) == tiny_target
    assert given["engines"] == ("sglang", "vllm@0.32.0") and given["k"] == 3 and given["budget"] == 120.0
    assert given["features"] == tmp_path and given["training"] == tmp_path / "run"
    assert given["reference"] == tmp_path / "d2t.pt" and given["prompts"] == ["What is a hawk?"]
    assert given["launch"] and given["served"].tau == 1.5 and given["static"] is False and given["device"] == "cpu"


def test_without_options_the_defaults(call: Call, asked: list, drafts: dict[str, Path]):
    assert call(drafts["good"])[0] == 0
    [given] = asked
    assert given["target"] is given["features"] is given["served"] is given["reference"] is given["prompts"] is None
    assert (given["engines"], given["k"], given["budget"], given["launch"]) == ((), 4, 60.0, {})
    assert given["trust_remote_code"] is False


@pytest.mark.parametrize(("text", "wanted"), [("60s", 60), ("2m", 120), ("1h", 3600), ("90", 90), ("0.5s", 0.5)])
def test_times(text: str, wanted: float):
    assert seconds(text) == wanted


@pytest.mark.parametrize("text", ["", "s", "soon", "-3s", "0", "nan", "inf", "1d", "9999999h"])
def test_what_is_no_time(text: str):
    with pytest.raises(BadInput, match="expected a time such as 60s or 2m"):
        seconds(text)


# ---------------------------------------------------------------- what it refuses


REFUSED: list[tuple[list[str], str]] = [
    (["--budget", "soon"], "--budget 'soon': expected a time"),
    (["--log", "LOG", "--served-accept-length", "1.2"], "give one of --served-accept-length, --log and --metrics"),
    (["--metrics", "LOG", "--served-accept-length", "1.2"], "give one of"),
    (["--log", "LOG", "--metrics", "LOG"], "give one of"),
    (["--engine", "tgi"], "unknown engine 'tgi'; known are sglang, vllm"),
    (["--engine", "vllm@9.9"], "vllm 9.9 is not known"),
    (["--log", "NOWHERE"], "is no file; --log takes the server's log"),
    (["--log", "LOG"], "says nothing about acceptance"),
    (["--metrics", "NOWHERE"], "cannot be read"),
    (["--served-accept-length", "0.4"], "an accept length of 0.4 cannot be"),
    (["--prompts", "NOWHERE"], "no such file"),
    (["--launch", "vllm serve 'm"], "is not a command line"),
    (["--draft-tokens", "0"], "0 is not in the range"),
    (["--target", "NOWHERE"], "no folder or file"),
    (["--target", "TARGET", "--features", "NOWHERE"], "no features lie there"),
    (["--target", "TARGET", "--reference", "NOWHERE"], "does not exist"),
    (["--target", "TARGET", "--device", "nothing"], "device 'nothing' cannot be used here"),
    (["--target", "TORN"], "not a readable safetensors file"),
    (["--static", "--html", "/proc/no.html"], "--html /proc/no.html cannot be written"),
]


@pytest.mark.parametrize(("options", "why"), REFUSED, ids=[" ".join(o) for o, _ in REFUSED])
def test_what_could_not_run_exits_with_2(call, drafts, tiny_target, tmp_path, options: list[str], why: str):
    """In one line that says why: 1 would mean findings."""
    (tmp_path / "server.log").write_text("nothing of the kind\n")
    if "TORN" in options:
        shutil.copytree(tiny_target, tmp_path / "torn")
        weights = tmp_path / "torn" / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:1000])
    places = {
        "LOG": tmp_path / "server.log",
        "NOWHERE": tmp_path / "no",
        "TARGET": tiny_target,
        "TORN": tmp_path / "torn",
    }
    code, out, err = call(drafts["good"], *[places.get(o, o) for o in options])
    assert code == 2 and why in err and "Traceback" not in err
    assert out == ""


@pytest.mark.parametrize("what", ["nothing", "an empty folder", "a torn file"])
def test_what_is_no_draft_exits_with_2(call: Call, drafts: dict[str, Path], tmp_path: Path, what: str):
    folder = tmp_path / "d"
    if what == "an empty folder":
        folder.mkdir()
    elif what == "a torn file":
        shutil.copytree(drafts["good"], folder)
        (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:3000])
    code, out, err = call(folder)
    assert (code, out) == (2, "") and str(tmp_path) in err
