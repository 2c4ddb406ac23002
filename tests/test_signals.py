"""SIGTERM and SIGHUP end a command as Ctrl-C does, unless somebody else handles them.

pytest -q tests/test_signals.py
"""

from __future__ import annotations

import os
import signal

import pytest

from eyas.signals import Terminated, with_signals


@pytest.fixture(autouse=True)
def _restored():
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    for number in before:
        signal.signal(number, signal.SIG_DFL)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_the_first_signal_is_raised_and_the_second_ends_the_process(number: int, code: int):
    with_signals()
    with pytest.raises(KeyboardInterrupt) as ended:
        os.kill(os.getpid(), number)
    assert isinstance(ended.value, Terminated)
    assert (ended.value.exit_code, ended.value.name) == (code, signal.Signals(number).name)
    assert signal.getsignal(number) is signal.SIG_DFL


def test_what_is_ignored_or_handled_stays_so():
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # nohup
    mine = lambda *_: None  # noqa: E731
    signal.signal(signal.SIGTERM, mine)
    with_signals()
    assert (signal.getsignal(signal.SIGHUP), signal.getsignal(signal.SIGTERM)) == (signal.SIG_IGN, mine)


def test_under_torchrun_nothing_is_caught(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    with_signals()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
