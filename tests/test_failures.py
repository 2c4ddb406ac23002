"""Errors that are not Eyas's own: no memory, refused paths, a full disk, Ctrl-C; and what stays a bug.

pytest -q tests/test_failures.py
"""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest
import torch

from eyas import cli
from eyas.cli import VERBS, failures
from eyas.cli.failures import explained, interrupted, verb_of
from eyas.errors import BadInput, EyasError, OutOfMemory
from eyas.memory import is_out_of_memory, size_of, spending, wanted
from training import material, run

HUGE = 1 << 60


def caught(work: Any) -> BaseException:
    with pytest.raises(BaseException) as raised:
        work()
    return raised.value


def of_torch() -> BaseException:
    """What torch really raises on this machine."""
    return caught(lambda: torch.empty(HUGE, dtype=torch.float32))


def of_numpy() -> BaseException:
    return caught(lambda: np.empty(HUGE, dtype=np.float32))


def of_cuda() -> BaseException:
    return torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total of 79.10 GiB")


LOST = [of_torch, of_numpy, of_cuda, MemoryError, lambda: OSError(errno.ENOMEM, "Cannot allocate memory")]


@pytest.mark.parametrize("make", LOST)
def test_a_failed_allocation_is_told_from_other_errors(make):
    assert is_out_of_memory(make())
    assert not is_out_of_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    assert not is_out_of_memory(OSError(errno.ENOENT, "No such file or directory", "x"))


def test_how_much_was_asked_for_is_said_where_it_is_known():
    assert wanted(of_torch()) == " (4.0 EiB more were asked for)"
    assert wanted(of_cuda()) == " (2.50 GiB more were asked for)"
    assert wanted(of_numpy()) == " (4.00 EiB more were asked for)"
    assert wanted(MemoryError()) == ""
    assert [size_of(n) for n in (512, 2048, 3 << 20, 5 << 30)] == ["512 bytes", "2.0 KiB", "3.0 MiB", "5.0 GiB"]


@pytest.mark.parametrize("make", LOST)
def test_whoever_allocates_says_what_it_was_for(make):
    with (
        pytest.raises(OutOfMemory, match=r"^out of memory in reading a book.*: read fewer pages$"),
        spending("reading a book", "read fewer pages"),
    ):
        raise make()
    with pytest.raises(ZeroDivisionError), spending("reading a book", "read fewer pages"):
        raise ZeroDivisionError
    with pytest.raises(OutOfMemory, match="in a word"), spending("a page", "less"), spending("a word", "less"):
        raise MemoryError  # the innermost knows best


def test_training_names_the_step_and_the_settings_that_lower_it(tiny_target, tmp_path, tmp_path_factory, monkeypatch):
    from eyas.train.loop import Run

    m = material(tiny_target, tmp_path_factory)
    monkeypatch.setattr(Run, "_loss", lambda *_: torch.empty(HUGE))
    with pytest.raises(OutOfMemory) as told:
        run(m, tmp_path / "run", held_out=None)
    text = str(told.value)
    assert text.startswith("out of memory in training step 1, on ")
    assert "micro_tokens = 40, the longest document has " in text
    assert "unrolled 3 times on cpu (4.0 EiB more were asked for): give --set recompute=true" in text


def test_extraction_and_answering_name_their_sizes(tiny_target, tmp_path, monkeypatch):
    from eyas.features.extract import extract
    from eyas.prompts import Prompt
    from eyas.regenerate import regenerate
    from eyas.target.generate import Generator
    from eyas.target.model import Target
    from training import conversations

    monkeypatch.setattr(Target, "states", lambda *_: torch.empty(HUGE))
    with pytest.raises(OutOfMemory, match=r"forward pass over \d+ conversations of up to \d+ tokens .*--batch-tokens"):
        extract(tiny_target, conversations(4, 1), tmp_path / "features", progress=False)
    monkeypatch.setattr(Generator, "step", lambda _: torch.empty(HUGE))
    with pytest.raises(OutOfMemory, match=r"answering \d+ prompts at once .*: lower --slots"):
        regenerate([Prompt("a", (({"role": "user", "content": "hawk?"},),))], tiny_target, tmp_path / "answers")


@pytest.mark.parametrize("verb", sorted(failures.LOWERS))
def test_the_net_below_names_options_that_the_verb_has(verb: str):
    import importlib
    import re

    told = explained(MemoryError(), verb)
    assert isinstance(told, OutOfMemory)
    assert f"`eyas {verb}`" in str(told)
    command = importlib.import_module(VERBS[verb][0]).command
    options = {name for param in command.params for name in (*param.opts, *param.secondary_opts)}
    assert set(re.findall(r"--[a-z-]+", failures.LOWERS[verb])) <= options


def test_settings_named_as_remedies_exist():
    import re

    from eyas.config import RunConfig
    from eyas.train.loop import REMEDY
    from eyas.train.settings import TrainSettings

    for name in re.findall(r"--set (\w+)=", REMEDY + failures.LOWERS["train"]):
        assert name in TrainSettings.model_fields
    for section, name in re.findall(r"(train|extract|regenerate)\.(\w+)", failures.LOWERS["run"]):
        assert name in RunConfig.model_fields[section].annotation.model_fields


REFUSED = [
    (
        FileNotFoundError(errno.ENOENT, "No such file or directory", "a/b"),
        BadInput,
        "a/b: No such file.*check the path",
    ),
    (PermissionError(errno.EACCES, "Permission denied", "a/b"), BadInput, "a/b: Permission denied; mend its perm"),
    (IsADirectoryError(errno.EISDIR, "Is a directory", "a"), BadInput, "a: Is a directory; .*name the file"),
    (NotADirectoryError(errno.ENOTDIR, "Not a directory", "a/b"), BadInput, "a/b: .*choose another path"),
    (OSError(errno.ENOSPC, "No space left on device", "a"), EyasError, "a: .*free some space.*same command again"),
    (OSError(errno.ENOSPC, "No space left on device"), EyasError, "^No space left.*free some space"),
    (OSError(errno.EMFILE, "Too many open files"), EyasError, "ulimit -n"),
]


@pytest.mark.parametrize(("error", "kind", "said"), REFUSED)
def test_what_the_system_refuses_is_said_with_the_path_and_a_remedy(error, kind, said):
    told = explained(error, "train")
    assert type(told) is kind
    with pytest.raises(kind, match=said):
        raise told


@pytest.mark.parametrize(
    "bug", [KeyError("x"), RuntimeError("shapes"), OSError("odd"), FileNotFoundError(errno.ENOENT, "x")]
)
def test_a_bug_stays_a_bug(bug):
    assert explained(bug, "train") is None


def leave(verb: str, error: BaseException, monkeypatch, capsys) -> tuple[int, str]:
    @click.command(context_settings={"ignore_unknown_options": True})
    @click.argument("words", nargs=-1)
    def command(words: tuple[str, ...]) -> None:
        raise error

    monkeypatch.setattr(cli, "cli", command)
    with pytest.raises(SystemExit) as left:
        cli.main([verb, "x"])
    return int(left.value.code or 0), capsys.readouterr().err


def test_they_leave_the_program_as_one_line(monkeypatch, capsys):
    code, said = leave("extract", of_torch(), monkeypatch, capsys)
    assert (code, said.count("\n")) == (1, 1)
    assert said.startswith("eyas: out of memory in `eyas extract` (4.0 EiB more were asked for): lower --batch")
    code, said = leave("vocab", PermissionError(errno.EACCES, os.strerror(errno.EACCES), "v"), monkeypatch, capsys)
    assert (code, said.count("\n")) == (2, 1)


@pytest.mark.parametrize("verb", list(VERBS))
def test_an_interruption_says_what_is_left(verb: str, monkeypatch, capsys):
    code, said = leave(verb, KeyboardInterrupt(), monkeypatch, capsys)
    assert code == 130
    assert said.strip() == f"eyas: {interrupted(verb)}"  # click ends the line of the ^C first
    resumes = "goes on where this one stopped" in said
    help_text = Path(cli.__file__).with_name(f"{verb}.py").read_text()
    says_so = "same command goes on" in " ".join(help_text.split()) or "killed goes on where it stopped" in help_text
    # extract's shards and regenerate's answers: docs say so where the help does not.
    assert resumes == (says_so or verb == "extract")


def test_the_verb_is_the_first_word_that_is_one():
    assert verb_of(["--verbose", "train", "export"], VERBS) == "train"
    assert verb_of(["--help"], VERBS) == ""
