"""`eyas measure` from outside: options, exit codes, and the file that is written whatever happens.

pytest -q tests/test_measure_cli.py
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click
import pytest

from doctoring import patient_of, save
from eyas.cli import main
from eyas.cli import measure as verb
from eyas.errors import BadInput, EyasError
from eyas.measure import locate as locating
from eyas.measure import questions as asking
from eyas.measure import whole as starting
from eyas.measure.asking import Question
from eyas.measure.measured import of_file
from eyas.measure.running import with_url
from fake_engines import CUT, Engine, K, Raw, rounds

LIMIT = 12
Call = Callable[..., tuple[int, str, str]]
PROMPTS = [f"say {word}" for word in ("one", "two", "three", "four", "five")]


@pytest.fixture(scope="module")
def draft(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    who = patient_of(tiny_target, text={"documents": 2, "length": 12})
    return save(who, tmp_path_factory.mktemp("drafts") / "good", tiny_target)


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    file = tmp_path / "mine.jsonl"
    file.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in PROMPTS))
    return file


@pytest.fixture
def call(prompts: Path, tiny_target: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Call:
    """Exit code, what was printed, and what was said on standard error; short prompts through the tiny target."""
    monkeypatch.setenv("COLUMNS", "200")

    def called(*args: Any, plain: bool = False) -> tuple[int, str, str]:
        words = ["measure", *map(str, args)]
        if not plain:
            words += ["--target", str(tiny_target), "--prompts", str(prompts), "--max-new-tokens", str(LIMIT),
                      "--context-length", "128"]  # fmt: skip
        with pytest.raises(SystemExit) as left:
            main(words)
        out, err = capsys.readouterr()
        return int(left.value.code or 0), out, err

    return called


def asked(target: Path, prompts: Path) -> list[Question]:
    from eyas.cli.sets import read_sets

    return asking.questions_of(target, read_sets([str(prompts)], None, 8), 100)


# ---------------------------------------------------------------- usage


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ([], 2, "give one of --engine"),
        (["--log", "x", "--url", "http://h:1"], 2, "--log reads a file and asks nobody"),
        (["--log", "x", "--engine", "vllm"], 2, "--log reads a file and asks nobody"),
        (["--log", "nowhere.log"], 2, "is no file"),
        (["--url", "http://h:1", "--engine", "vllm", "--engine", "sglang", "--target", "t"], 2, "--url is one server"),
        (["--engine", "vllm", "--target", "t"], 2, "--engine serves a DRAFT"),
        (["--url", "http://h:1", "--target", "t", "--concurrency", "1,1"], 2, "different whole numbers"),
        (["--url", "http://h:1", "--target", "t", "--concurrency", "0"], 2, "different whole numbers"),
        (["--url", "http://h:1", "--target", "t", "--concurrency", "many"], 2, "different whole numbers"),
        (["--url", "http://h:1", "--target", "t", "--launch", "vllm 'serve"], 2, "is no command line"),
        (["--url", "http://h:1", "--target", "t", "--timeout", "0"], 2, "--timeout"),
        (["--url", "http://h:1", "--target", "t", "--wait", "-1"], 2, "--wait"),
        (["--url", "http://h:1", "--target", "t", "--max-new-tokens", "1"], 2, "--max-new-tokens"),
        (["--url", "http://h:1", "--target", "t", "--out", f"{__file__}/m.json"], 2, "cannot be written"),
        (["nowhere", "--url", "http://h:1", "--target", "t"], 2, "nowhere"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)  # fmt: skip
def test_usage(call: Call, words: list[str], code: int, said: str):
    found, out, err = call(*words, plain=True)
    assert (found, out) == (code, "") and said in err and "Traceback" not in err


def test_addresses_engines_and_models_that_are_none(call: Call):
    assert call("--url", "http://h:99999")[0] == 2
    code, _, err = call("--url", "http://127.0.0.1:9")
    assert code == 1 and "nobody answers" in err
    with Engine("vllm", models=["a", "b"]) as server:
        code, _, err = call("--url", server.url)
        assert code == 2 and "serves a, b" in err and "--model" in err
        assert call("--url", server.url, "--model", "c")[0] == 2
        assert call("--url", server.url, "--model", "b")[0] == 0
        assert call("--url", server.url, "--engine", "triton")[0] == 2


def test_prompts_that_do_not_fit_are_said(call: Call, prompts: Path, tiny_target: Path):
    code, _, err = call("--url", "http://h:1", "--target", tiny_target, "--prompts", prompts, "--context-length", 40,
                        "--max-new-tokens", 30, plain=True)  # fmt: skip
    assert code == 2 and "mine" in err and "--context-length" in err


# ---------------------------------------------------------------- a server that runs


def test_a_running_server_by_itself(call: Call, tmp_path: Path, tiny_target: Path, prompts: Path):
    out_file = tmp_path / "m.json"
    with Engine("vllm") as server, Engine("vllm", draft=False, counts=False) as plain:
        code, out, err = call(
            "--url", server.url, "--baseline-url", plain.url, "--out", out_file, "--strict", "--concurrency", "1,2"
        )
    assert (code, err) == (0, "")
    each = [n for q in asked(tiny_target, prompts) for n in rounds(q.ids, LIMIT)]
    said = json.loads(out_file.read_text())
    (part,) = said["engines"]
    assert said["complete"] is True and said["interrupted"] is False and said["failed"] == {}
    assert (part["acceptance"]["rounds"], part["acceptance"]["accepted"]) == (len(each), sum(each))
    assert said["settings"]["prompts"] == {"mine": 5} and said["settings"]["concurrency"] == [1, 2]
    assert [q["ids"] for q in said["questions"]] == [list(q.ids) for q in asked(tiny_target, prompts)]
    assert f"{part['acceptance']['tau']:.3f}" in out and "5/5" in out and f"Written to {out_file}" in out
    file = of_file(out_file)
    assert file.served is not None and file.served.rounds == len(each)


def test_json_is_the_file(call: Call, tmp_path: Path):
    with Engine("sglang") as server:
        code, out, _ = call("--url", server.url, "--json", "--out", tmp_path / "m.json")
    assert code == 0 and json.loads(out) == json.loads((tmp_path / "m.json").read_text())


def test_fail_below_and_strict(call: Call):
    with Engine("vllm") as server, Engine("vllm", draft=False, counts=False, wrong=True) as other:
        tau = json.loads(call("--url", server.url, "--json")[1])["engines"][0]["acceptance"]["tau"]
        assert call("--url", server.url, "--fail-below", tau)[0] == 0
        code, out, err = call("--url", server.url, "--fail-below", tau + 0.001)
        assert code == 1 and "below the --fail-below" in err and f"{tau:.3f}" in out
        code, _, err = call("--url", server.url, "--strict")
        assert code == 1 and "no answers without the draft" in err
        code, out, err = call("--url", server.url, "--baseline-url", other.url, "--strict")
        assert code == 1 and "answers differ" in err and "NO 0/5" in out and "DIFFERS" in out
        assert call("--url", server.url, "--baseline-url", other.url)[0] == 0


def test_a_server_that_does_not_say_what_it_is(call: Call):
    """A proxy before it answers for the list of models; --engine says what is behind."""
    with Engine("llamacpp") as server:
        page = server._page
        server._page = lambda r: r.reply(404) if r.path == "/v1/models" else page(r)  # type: ignore[method-assign]
        code, _, err = call("--url", server.url)
        assert code == 2 and "--engine vllm|sglang|llamacpp|openvino" in err
        code, out, _ = call("--url", server.url, "--engine", "llamacpp", "--json")
        assert code == 0 and json.loads(out)["engines"][0]["engine"] == "llamacpp"


def test_other_traffic_and_missing_metrics_are_said(call: Call):
    with Engine("vllm") as server:
        original = server.exposition

        def busy() -> str:
            server.count("m", 77, [1] * 20)
            return original()

        server.exposition = busy  # type: ignore[method-assign]
        code, out, _ = call("--url", server.url)
        assert code == 0 and "Somebody else was served meanwhile (77 tokens" in out
    with Engine("vllm", metrics=False) as server:
        code, out, _ = call("--url", server.url)
        assert code == 0 and "is not known: no metrics: the server answers 404" in out


def test_a_server_without_a_draft_is_no_draft_that_accepts_nothing(call: Call):
    with Engine("llamacpp", draft=False, counts=False) as server:
        code, out, _ = call("--url", server.url, "--fail-below", 1.0)
    assert code == 1 and "did not say what it accepted" in out


# ---------------------------------------------------------------- partial results


@pytest.mark.parametrize(
    ("instead", "said"),
    [
        (lambda r: r.stream([b"data: {", CUT]), "connection"),
        (lambda r: r.stream([3.0]), "said nothing for 0.4 s"),
        (lambda r: r.reply(500, {"error": {"message": "CUDA error"}}), "CUDA error"),
        (lambda r: r.reply(400, {"error": {"message": "too long"}}), "too long"),
        (lambda r: r.stream([b"data: <html>\n\n"]), "not JSON"),
    ],
    ids=["killed", "hangs", "500", "400", "garbage"],
)  # fmt: skip
def test_what_came_is_written_and_the_exit_code_is_1(call: Call, tmp_path: Path, instead: Any, said: str):
    with Engine("vllm", fail=lambda n: instead if n >= 3 else None) as server:
        code, out, err = call("--url", server.url, "--out", tmp_path / "m.json", "--timeout", 0.4)
    assert code == 1 and "only a part could be measured" in err and said in err and said in out
    assert "Traceback" not in err
    kept = json.loads((tmp_path / "m.json").read_text())
    (part,) = kept["engines"]
    assert kept["complete"] is False and sum(not a["error"] for a in part["answers"]) == 3
    assert part["acceptance"]["rounds"] > 0 and of_file(tmp_path / "m.json").served is not None


@pytest.mark.parametrize("engine", ["vllm", "openvino"])
def test_ctrl_c_writes_what_came(call: Call, tmp_path: Path, engine: str, monkeypatch: pytest.MonkeyPatch, draft: Path):
    def interrupt(n: int) -> None:
        if n == 3:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(locating, "locate", lambda *a, **k: pytest.fail("nothing is replayed after Ctrl-C"))
    with Engine(engine, slow=0.003, fail=interrupt) as server:  # type: ignore[arg-type]
        code, out, err = call(draft, "--url", server.url, "--out", tmp_path / "m.json")
    assert code == 130 and "interrupted" in err and "Traceback" not in err
    kept = json.loads((tmp_path / "m.json").read_text())
    assert kept["complete"] is False and kept["interrupted"] is True
    assert len(kept["engines"][0]["answers"]) == 3 and "Written to" in out


def test_ctrl_c_while_it_is_replayed_keeps_the_measurement(
    call: Call, tmp_path: Path, draft: Path, monkeypatch: pytest.MonkeyPatch
):
    def locate(*args: Any, **more: Any) -> Any:
        assert json.loads((tmp_path / "m.json").read_text())["engines"], "written before"
        raise KeyboardInterrupt

    monkeypatch.setattr(locating, "locate", locate)
    with Engine("vllm") as server:
        assert call(draft, "--url", server.url, "--out", tmp_path / "m.json")[0] == 130
    kept = json.loads((tmp_path / "m.json").read_text())
    assert kept["interrupted"] is True and len(kept["engines"][0]["answers"]) == 5


def test_a_replay_that_fails_does_not_cost_the_measurement(
    call: Call, tmp_path: Path, draft: Path, monkeypatch: pytest.MonkeyPatch
):
    def locate(*args: Any, **more: Any) -> Any:
        raise BadInput("its config.json holds nothing")

    monkeypatch.setattr(locating, "locate", locate)
    with Engine("vllm") as server:
        code, out, err = call(draft, "--url", server.url, "--out", tmp_path / "m.json")
    assert code == 1 and "could not be looked up: its config.json holds nothing" in err and "τ" in out
    assert json.loads((tmp_path / "m.json").read_text())["engines"][0]["acceptance"]["rounds"] > 0


def test_only_what_was_answered_is_replayed(call: Call, draft: Path, monkeypatch: pytest.MonkeyPatch):
    replayed: list[list[int]] = []

    def locate(d: Any, folder: Any, engine: str, questions: Sequence[Question], *args: Any, **more: Any) -> Any:
        replayed.append([q.index for q in questions])
        return {"rows": [], "falls": "", "says": "", "engine": engine}

    monkeypatch.setattr(locating, "locate", locate)
    with Engine("vllm", fail=lambda n: (lambda r: r.reply(500)) if n in (0, 3) else None) as server:
        call(draft, "--url", server.url)
    with Engine("vllm", fail=lambda n: lambda r: r.reply(500)) as server:
        call(draft, "--url", server.url)
    assert replayed == [[1, 2, 4]], "and nothing where nothing was answered"


# ---------------------------------------------------------------- engines that are started


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Engines that need not be started: name -> an Engine, or what is raised instead."""
    given: dict[str, Any] = {}

    def with_engine(launch: Any, questions: Any, how: Any, **more: Any) -> dict[str, Any]:
        one = given[launch.engine]
        if isinstance(one, BaseException):
            raise one
        part = with_url(one.url, None, questions, how, levels=more["levels"], on_answer=more["on_answer"])
        return {**part, "command": [launch.engine, "--k", str(launch.k)], "dtype": launch.dtype}

    monkeypatch.setattr(starting, "with_engine", with_engine)
    monkeypatch.setattr(locating, "locate", lambda *a, **k: {"rows": [], "falls": "", "says": "", "engine": a[2]})
    return given


def test_several_engines_make_one_table(call: Call, draft: Path, tmp_path: Path, engines: dict[str, Any]):
    with Engine("vllm") as one, Engine("sglang") as two:
        engines |= {"vllm": one, "sglang": two}
        code, out, _ = call(draft, "--engine", "vllm", "--engine", "sglang", "--out", tmp_path / "m.json")
    assert code == 0 and "vLLM" in out and "SGLang" in out
    assert [p["engine"] for p in json.loads((tmp_path / "m.json").read_text())["engines"]] == ["vllm", "sglang"]
    with pytest.raises(BadInput, match="choose one with --engine"):
        of_file(tmp_path / "m.json")
    assert of_file(tmp_path / "m.json", "sglang").command == ("sglang", "--k", str(K))


def test_an_engine_that_does_not_start_leaves_the_others(
    call: Call, draft: Path, tmp_path: Path, engines: dict[str, Any]
):
    with Engine("sglang") as two:
        engines |= {"vllm": EyasError("vllm left with exit code 1"), "sglang": two}
        code, out, err = call(draft, "--engine", "vllm", "--engine", "sglang", "--out", tmp_path / "m.json")
        assert code == 1 and "vllm left with exit code 1" in err and "not measured" in out
    kept = json.loads((tmp_path / "m.json").read_text())
    assert list(kept["failed"]) == ["vllm"] and kept["complete"] is False and len(kept["engines"]) == 1
    code, out, err = call(draft, "--engine", "vllm")
    assert (code, out) == (1, "") and "exit code 1" in err


def test_ctrl_c_at_the_second_engine_keeps_the_first(call: Call, draft: Path, tmp_path: Path, engines: dict[str, Any]):
    with Engine("vllm") as one:
        engines |= {"vllm": one, "sglang": KeyboardInterrupt()}
        code, _, _ = call(draft, "--engine", "vllm", "--engine", "sglang", "--out", tmp_path / "m.json")
    kept = json.loads((tmp_path / "m.json").read_text())
    assert code == 130 and kept["interrupted"] is True and kept["engines"][0]["errors"] == []
    engines["vllm"] = KeyboardInterrupt()
    (tmp_path / "m.json").unlink()
    assert call(draft, "--engine", "vllm", "--out", tmp_path / "m.json")[0] == 130
    assert not (tmp_path / "m.json").exists(), "nothing came"


# ---------------------------------------------------------------- logs


def test_a_log_alone(call: Call, tmp_path: Path):
    log = tmp_path / "server.log"
    log.write_text("INFO 11-30 04:12:50 [metrics.py:120] SpecDecoding metrics: Mean acceptance length: 1.50, Accepted "
                   "throughput: 1.00 tokens/s, Drafted throughput: 8.00 tokens/s, Accepted: 10 tokens, Drafted: 80 "
                   "tokens, Per-position acceptance rate: 0.300, 0.100, 0.050, 0.050, Avg Draft acceptance rate: "
                   "12.5%\n")  # fmt: skip
    code, out, _ = call("--log", log, plain=True)
    assert code == 0 and "τ 1.500 over 20 rounds" in out
    code, out, _ = call("--log", log, "--json", plain=True)
    assert code == 0 and json.loads(out)["rounds"] == 20
    log.write_text("nothing of interest\n")
    assert call("--log", log, plain=True)[0] == 2


def test_escape_sequences_of_a_server_stay_out_of_the_terminal(call: Call):
    bad = {"error": {"message": "boo\x1b]0;owned\x07\r\n\x1b[2Jhoo"}}
    with Raw(lambda r: r.reply(500, bad)) as server:
        _, out, err = call("--url", server.url, "--engine", "sglang")
    assert "boo" in err and "hoo" in out and "\x1b" not in out + err and "\x07" not in out + err


def test_its_help_says_the_exit_codes():
    text = verb.command.get_help(click.Context(verb.command, info_name="eyas measure"))
    assert all(f" {code} " in text for code in (0, 1, 2, 3, 130))
