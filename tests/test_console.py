"""Colours, bars and notes appear where they are wanted and nowhere else.   pytest -q tests/test_console.py"""

from __future__ import annotations

import io
import json
import logging
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from drafts import make_draft, write_speculators
from eyas import cli, console, terminal
from eyas.cli import LazyGroup


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("stream", "environment", "wanted"),
    [
        (Terminal, {}, True),
        (Terminal, {"NO_COLOR": "1"}, False),
        (Terminal, {"NO_COLOR": ""}, True),
        (Terminal, {"TERM": "dumb"}, False),
        (io.StringIO, {}, False),
        (io.StringIO, {"FORCE_COLOR": "1"}, True),
        (io.StringIO, {"FORCE_COLOR": ""}, False),
        (io.StringIO, {"FORCE_COLOR": "1", "NO_COLOR": "1"}, False),
    ],
)
def test_when_colours_are_wanted(stream: type[io.StringIO], environment: dict[str, str], wanted: bool):
    assert terminal.wants_color(stream(), environment) is wanted


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_speculators(tmp_path_factory.mktemp("draft") / "draft", *make_draft())


def on_a_terminal(*args: str, **environment: str) -> str:
    """What a command writes to a terminal, stdout and stderr together."""
    ours, theirs = pty.openpty()
    told = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "FORCE_COLOR")}
    told |= {"TERM": "xterm-256color", **environment}
    command = subprocess.Popen([sys.executable, "-m", "eyas", *args], stdout=theirs, stderr=theirs, env=told)
    os.close(theirs)
    seen = b""
    try:
        while piece := os.read(ours, 65536):
            seen += piece
    except OSError:  # Linux: the other side closed
        pass
    os.close(ours)
    assert command.wait() == 0, seen.decode()
    return seen.decode()


def test_a_terminal_gets_letters_in_bold_and_who_refuses_them_gets_none(draft: Path):
    args = ("inspect", str(draft))
    assert "\x1b[" in on_a_terminal(*args)
    plain = on_a_terminal(*args, NO_COLOR="1")
    assert "\x1b" not in plain
    assert "draft vocabulary" in plain
    assert "\x1b" not in on_a_terminal(*args, TERM="dumb")


def test_a_pipe_gets_escape_sequences_only_where_they_are_forced(draft: Path):
    def piped(**environment: str) -> str:
        told = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "FORCE_COLOR")} | {"TERM": "xterm"}
        call = [sys.executable, "-m", "eyas", "inspect", str(draft)]
        return subprocess.run(call, capture_output=True, text=True, check=True, env=told | environment).stdout

    assert "\x1b" not in piped()
    assert "\x1b[" in piped(FORCE_COLOR="1")


def test_bars_are_for_watchers(monkeypatch: pytest.MonkeyPatch):
    def drawn(stream: io.StringIO, **how: bool) -> str:
        monkeypatch.setattr(sys, "stderr", stream)
        with console.bar(total=2, desc="prove", file=stream, **how) as bar:
            bar.update(2)
        console.teller()("looking")
        return stream.getvalue()

    monkeypatch.setenv("TERM", "xterm")
    assert "prove" in (seen := drawn(Terminal())) and "looking ..." in seen
    assert "prove" not in drawn(Terminal(), show=False)
    assert drawn(io.StringIO()) == ""
    with console.speaking():
        console.speak("quiet")
        console.say("a note")
        assert drawn(Terminal()) == ""
    monkeypatch.setenv("TERM", "dumb")
    assert drawn(Terminal()) == ""
    monkeypatch.setattr(console, "PAUSE_S", 0.0)
    assert drawn(io.StringIO(), show=False) == "  looking ...\n"
    assert "\r" not in drawn(Terminal())  # a dumb one


def test_what_was_chosen_ends_with_the_program(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("TQDM_DISABLE", raising=False)
    handlers, severity = list(logging.root.handlers), logging.root.level
    library = logging.getLogger("transformers").level
    for level in ("quiet", "verbose"):
        with console.speaking():
            console.speak(level)
            assert (console.quiet(), console.verbose()) == (level == "quiet", level == "verbose")
            assert ("TQDM_DISABLE" in os.environ) is (level == "quiet")
            assert (logging.root.level == logging.INFO) is (level == "verbose")
            logging.getLogger("transformers").setLevel(logging.INFO)  # as the library itself does when imported
        assert not console.quiet()
        assert not console.verbose()
        assert "TQDM_DISABLE" not in os.environ
        assert (logging.root.handlers, logging.root.level) == (handlers, severity)
        assert logging.getLogger("transformers").level == library


def test_a_log_gets_lines_now_and_then(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture):
    """A line for what takes long, without control characters; none for what does not, and none with --quiet."""

    def logged(total: int | None) -> str:
        with console.bar(total=total, desc="regenerate", unit="token") as bar:
            for _ in range(4):
                bar.set_description("regenerate", refresh=False)
                bar.update(500)
                bar.refresh()
        return capsys.readouterr().err

    assert logged(2000) == ""
    monkeypatch.setattr(console, "PAUSE_S", 0.0)
    assert "  regenerate: 1,500 of 2,000 tokens, 00:00 elapsed" in (seen := logged(2000))
    assert "\r" not in seen and "\x1b" not in seen
    assert "  regenerate: 1,500 tokens, 00:00 elapsed" in logged(None)
    monkeypatch.setattr(console, "PAUSE_S", 1e9)
    assert logged(2000) == ""
    monkeypatch.setattr(console, "PAUSE_S", 0.0)
    with console.speaking():
        console.speak("quiet")
        assert logged(2000) == ""


@pytest.mark.parametrize("place", ["before", "after"])
def test_every_verb_takes_both_before_and_after_its_name(place: str, monkeypatch: pytest.MonkeyPatch):
    """All verbs are parsed up to their help, which click prints after the eager --quiet was read."""
    said: list[str] = []
    monkeypatch.setattr(console, "speak", said.append)
    for verb in cli.VERBS:
        for flag in ("--quiet", "-q", "--verbose", "-v"):
            args = [flag, verb, "--help"] if place == "before" else [verb, flag, "--help"]
            with pytest.raises(SystemExit) as left:
                cli.main(args)
            assert left.value.code == 0, args
    assert said == ["quiet", "quiet", "verbose", "verbose"] * len(cli.VERBS)


def test_a_verb_with_a_verbose_of_its_own_hears_the_one_before_its_name(draft: Path, capsys: pytest.CaptureFixture):
    def told(*args: str) -> str:
        with pytest.raises(SystemExit):
            cli.main([*args, "--static"])
        return capsys.readouterr().out

    after = told("doctor", str(draft), "-v")
    assert told("-v", "doctor", str(draft)) == after
    assert len(told("doctor", str(draft))) < len(after)


def test_every_verb_prints_json():
    """All but those whose output is for another reader: a shell."""
    without = set()
    for name in cli.VERBS:
        command = LazyGroup().get_command(None, name)  # type: ignore[arg-type]
        leaves = list(command.commands.values()) if hasattr(command, "commands") else [command]
        without |= {name for leaf in leaves if not any("--json" in p.opts for p in leaf.params)}
    assert without == {"completion"}


def test_json_is_all_that_stdout_holds(draft: Path, capsys: pytest.CaptureFixture):
    for args in (["-v", "inspect", str(draft)], ["-v", "doctor", str(draft), "--static"], ["-v", "history", str(draft)],
                 ["-v", "plan", "--target", "kimi-k2.5", "--tokens", "1e6"], ["-v", "train", "--show-settings"],
                 ["-v", "engines", "list"]):  # fmt: skip
        with pytest.raises(SystemExit):
            cli.main([*args, "--json"])
        assert json.loads(capsys.readouterr().out), args


# ---------------------------------------------------------------- completion


def completed(words: str) -> list[str]:
    environment = {**os.environ, "COMP_WORDS": words, "COMP_CWORD": str(words.count(" ")),
                   "_EYAS_COMPLETE": "bash_complete"}  # fmt: skip
    code = "import sys; from eyas.cli import main\ntry: main([])\nfinally: print(*sys.modules, file=sys.stderr)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    assert not {"torch", "transformers", "rich", "pydantic", "numpy"} & set(result.stderr.split())
    return result.stdout.split()


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("eyas tr", ["plain,train"]),
        ("eyas -q tr", ["plain,train"]),
        ("eyas --ver", ["plain,--version", "plain,--verbose"]),
        ("eyas export --to spec", ["plain,speculators", "plain,specforge"]),
        ("eyas prove --target ./mo", ["file,./mo"]),
        ("eyas inspect dra", ["file,dra"]),
        ("eyas engines se", ["plain,setup"]),
    ],
)
def test_the_shell_completes_without_loading_what_works(words: str, found: list[str]):
    assert completed(words) == found


def test_bash_itself_accepts_the_script_and_completes(tmp_path: Path):
    (tmp_path / "eyas").write_text(f'#!/bin/sh\nexec {sys.executable} -m eyas "$@"\n')
    (tmp_path / "eyas").chmod(0o755)
    script = (
        f'PATH={tmp_path}:$PATH; eval "$(eyas completion bash)"; COMP_WORDS=(eyas reg); COMP_CWORD=1; '
        '_eyas_completion eyas reg eyas; echo "${COMPREPLY[@]}"; complete -p eyas'
    )
    result = subprocess.run(["bash", "--norc", "-c", script], capture_output=True, text=True, check=True)
    assert result.stdout.splitlines()[0] == "regenerate"
    assert "_eyas_completion eyas" in result.stdout


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_the_other_shells_get_their_script(shell: str, capsys: pytest.CaptureFixture):
    with pytest.raises(SystemExit):
        cli.main(["completion", shell])
    assert f"_EYAS_COMPLETE={shell}_complete" in capsys.readouterr().out
