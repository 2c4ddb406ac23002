"""Throughput and latency of one pass.   pytest -q tests/test_measure_speed.py"""

from __future__ import annotations

from eyas.measure.asking import Answered, How, Question, Run, ask_all
from eyas.measure.speed import percentiles, speed
from eyas.serve.client import Reply
from fake_engines import Engine


def answered(chunks: list[tuple[float, int]], lost: int = 0) -> Answered:
    return Answered(Question("s", 0, (1,)), Reply([7] * (sum(n for _, n in chunks)), chunks, lost=lost))


def test_by_hand():
    """Two answers: 1 + 2 + 3 tokens at 0.1, 0.2, 0.5 s, and 2 + 2 at 0.3, 0.4 s; one failed."""
    parts = [answered([(0.1, 1), (0.2, 2), (0.5, 3)]), answered([(0.3, 2), (0.4, 2)]),
             Answered(Question("s", 2, (1,)), error="no")]  # fmt: skip
    said = speed(Run(2, parts, seconds=2.0))
    assert said is not None
    assert (said["requests"], said["tokens"], said["seconds"], said["tokens_per_s"]) == (2, 10, 2.0, 5.0)
    assert said["first_token_ms"]["p50"] == 200.0, "of 100 and 300"
    assert said["per_token_ms"]["p50"] == 65.0, "(0.5 - 0.1) / 5 and (0.4 - 0.3) / 2"
    assert said["gap_ms"] == percentiles([0.1, 0.3, 0.1])


def test_tokens_that_were_not_sent_count():
    said = speed(Run(1, [answered([(0.1, 1), (0.5, 1)], lost=2)], seconds=1.0))
    assert said is not None and said["tokens_per_s"] == 4.0
    assert said["per_token_ms"] == percentiles([0.4 / 3])


def test_of_one_group_there_is_no_time_per_token():
    said = speed(Run(1, [answered([(0.1, 3)])], seconds=1.0))
    assert said is not None and said["tokens_per_s"] == 3.0
    assert said["per_token_ms"] is None and said["gap_ms"] is None
    assert said["first_token_ms"] == {"p50": 100.0, "p95": 100.0, "p99": 100.0}


def test_no_speed_of_nothing_and_none_of_waiting_for_a_server_that_hangs():
    one = answered([(0.1, 1), (0.2, 1)])
    assert speed(Run(1)) is None
    assert speed(Run(1, [Answered(Question("s", 0, (1,)), error="no")], seconds=3.0)) is None
    assert speed(Run(1, [one], seconds=0.0)) is None
    assert speed(Run(1, [one], seconds=300.0, stopped="said nothing for 300 s")) is None
    assert speed(Run(1, [one], seconds=1.0)) is not None


def test_percentiles():
    assert percentiles([]) is None
    assert percentiles([i / 1000 for i in range(101)]) == {"p50": 50.0, "p95": 95.0, "p99": 99.0}


def test_of_a_server_whose_pace_is_known():
    """5 ms before each of about a dozen events: no pass is faster, and more at once give more tokens a second."""
    questions = [Question("s", i, (i, 2)) for i in range(6)]
    with Engine("vllm", slow=0.005) as server:
        one, six = (speed(ask_all(server.url, questions, How(12), concurrency=n)) for n in (1, 6))
    assert one is not None and six is not None
    assert one["gap_ms"]["p50"] >= 5.0 and one["first_token_ms"]["p50"] >= 5.0
    assert one["per_token_ms"]["p50"] < one["gap_ms"]["p50"], "a group holds several tokens"
    assert six["tokens_per_s"] > 1.5 * one["tokens_per_s"]
    assert one["tokens"] == six["tokens"] == 72
