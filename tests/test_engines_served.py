"""What servers say about acceptance, in their words, becomes one definition.   pytest -q tests/test_engines_served.py

The lines are made with the engines' own format strings; each says where it stands.
"""

from __future__ import annotations

import contextlib
import http.server
import json
import math
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from eyas.decode.acceptance import Acceptance
from eyas.engines.served import Served, from_log, from_metadata, from_number, from_prometheus, from_url
from eyas.errors import BadInput

HISTOGRAMS = ((58, 14, 3, 0, 0), (30, 20, 6, 4, 4))


def sglang_line(at: str, length: float, rate: float | None, running: int = 1) -> str:
    """SGLang 0.5.23 managers/scheduler_components/metrics_reporter.py:957, 1005, 1027; without the rate: 0.5.2."""
    rate_said = "" if rate is None else f"accept rate: {rate:.2f}, "
    return (
        f"[{at} TP0] Decode batch, #running-req: {running}, #token: 86, token usage: 0.02, "
        f"accept len: {length:.2f}, {rate_said}cuda graph: True, gen throughput (token/s): 6.11, #queue-req: 0"
    )


def vllm_line(at: str, counts: Acceptance, *, bonus: bool = True, name: str = "APIServer pid=7") -> str:
    """vLLM 0.32 v1/spec_decode/metrics.py:123-140, logger.py:28; `bonus` off: before vllm-project/vllm#17908."""
    rates = ", ".join(f"{rate:.3f}" for rate in counts.unconditional)
    drafted, accepted = counts.rounds * counts.k, counts.accepted
    return (
        f"({name}) INFO {at} [metrics.py:120] SpecDecoding metrics: "
        f"Mean acceptance length: {counts.tau - (not bonus):.2f}, "
        f"Accepted throughput: {accepted / 5:.2f} tokens/s, "
        f"Drafted throughput: {drafted / 5:.2f} tokens/s, "
        f"Accepted: {accepted} tokens, "
        f"Drafted: {drafted} tokens, "
        f"Per-position acceptance rate: {rates}, "
        f"Avg Draft acceptance rate: {100 * accepted / drafted:.1f}%"
    )


# ---------------------------------------------------------------- logs


def test_vllm_counts_rounds_and_weighs_by_them(tmp_path: Path):
    parts = [Acceptance(h) for h in HISTOGRAMS]
    whole = Acceptance.merged(parts, 4)
    start = "(EngineCore pid=9) INFO 11-30 04:12:16 [core.py:133] Initializing a V1 LLM engine (v0.32.0) with config: "
    start += "model='t', speculative_config=SpeculativeConfig(method='eagle3', model='d', num_spec_tokens=4), x=1"
    log = tmp_path / "server.log"
    lines = [start, vllm_line("11-30 04:12:50", parts[0]), "\x1b[36m" + vllm_line("11-30 04:13:00", parts[1])]
    log.write_text("\n".join(lines))
    for source in (log, str(log), log.read_text()):
        said = from_log(source)
        assert (said.engine, said.version, said.steps) == ("vllm", "0.32.0", 4)
        assert (said.rounds, said.accepted, said.drafted) == (whole.rounds, whole.accepted, 4 * whole.rounds)
        assert said.tau == pytest.approx(whole.tau)
        assert said.unconditional == pytest.approx(whole.unconditional, abs=1e-3)
        assert [at for at, _ in said.series] == [0, 10]
        assert [tau for _, tau in said.series] == pytest.approx([p.tau for p in parts])
        assert said.events == ()
    assert json.loads(json.dumps(said.to_dict()))["said"]["lines"] == 2


# As vLLM 0.32.0 printed them for four requests of 96 tokens, whose 248 rounds accepted 87, 26, 12 and 7 drafts.
PRINTED = """\
04:12:50 [metrics.py:120] SpecDecoding metrics: Mean acceptance length: 1.23, Accepted throughput: 1.13 tokens/s, \
Drafted throughput: 19.66 tokens/s, Accepted: 9 tokens, Drafted: 156 tokens, \
Per-position acceptance rate: 0.205, 0.026, 0.000, 0.000, Avg Draft acceptance rate: 5.8%
04:12:55 [metrics.py:120] SpecDecoding metrics: Mean acceptance length: 1.36, Accepted throughput: 5.40 tokens/s, \
Drafted throughput: 59.19 tokens/s, Accepted: 27 tokens, Drafted: 296 tokens, \
Per-position acceptance rate: 0.270, 0.068, 0.014, 0.014, Avg Draft acceptance rate: 9.1%
04:13:00 [metrics.py:120] SpecDecoding metrics: Mean acceptance length: 1.84, Accepted throughput: 10.59 tokens/s, \
Drafted throughput: 50.36 tokens/s, Accepted: 53 tokens, Drafted: 252 tokens, \
Per-position acceptance rate: 0.508, 0.190, 0.095, 0.048, Avg Draft acceptance rate: 21.0%
04:13:05 [metrics.py:120] SpecDecoding metrics: Mean acceptance length: 1.59, Accepted throughput: 7.60 tokens/s, \
Drafted throughput: 51.20 tokens/s, Accepted: 38 tokens, Drafted: 256 tokens, \
Per-position acceptance rate: 0.344, 0.125, 0.078, 0.047, Avg Draft acceptance rate: 14.8%
04:13:10 [metrics.py:120] SpecDecoding metrics: Mean acceptance length: 1.62, Accepted throughput: 1.00 tokens/s, \
Drafted throughput: 6.40 tokens/s, Accepted: 5 tokens, Drafted: 32 tokens, \
Per-position acceptance rate: 0.625, 0.000, 0.000, 0.000, Avg Draft acceptance rate: 15.6%
"""


def test_a_real_log_gives_the_counts_of_the_real_counters():
    said = from_log(PRINTED)
    assert (said.rounds, said.accepted, said.drafted) == (248, 132, 992)
    assert said.unconditional == pytest.approx([n / 248 for n in (87, 26, 12, 7)], abs=1e-3)


def test_an_early_vllm_left_the_bonus_token_out():
    counts = Acceptance(HISTOGRAMS[0])
    said = from_log(vllm_line("05-01 04:12:50", counts, bonus=False))
    assert said.tau == pytest.approx(counts.tau)
    assert any("1 was added" in note for note in said.notes)


def test_vllm_rounds_of_fewer_drafts_are_counted_by_the_mean():
    """Structured output cuts drafts (v1/metrics/stats.py:371), so drafted / K is less than the rounds."""
    line = vllm_line("05-01 04:12:50", Acceptance((10, 10))).replace("Drafted: 20 tokens", "Drafted: 15 tokens")
    said = from_log(line)
    assert (said.tau, said.rounds) == (1.5, 20)


@pytest.mark.parametrize("strict", [True, False], ids=["since #23530", "before #23530"])
def test_sglang_lengths_are_weighed_by_running_requests(strict: bool):
    """Until sgl-project/sglang#23530 the rate was length / (steps + 1): 0.54 with 2.17 in sglang#11948."""
    points = [(2.17, 1), (1.57, 3), (1.0, 2)]
    lines = [
        sglang_line(f"2025-10-22 10:27:{56 + place}", tau, (tau - 1) / 3 if strict else tau / 4, running)
        for place, (tau, running) in enumerate(points)
    ]
    said = from_log("\n".join(lines))
    assert said.engine == "sglang"
    assert said.tau == pytest.approx((2.17 + 3 * 1.57 + 2 * 1.0) / 6)
    assert said.steps == 3
    assert (said.rounds, said.unconditional) == (None, ())
    assert [at for at, _ in said.series] == [0, 1, 2]
    assert any("counts the bonus token" in note for note in said.notes) is not strict


def test_sglang_says_its_settings_and_older_lines_no_rate():
    """entrypoints/engine.py:311 prints all settings; 0.4 and 0.5.2 print no rate (scheduler.py, log_decode_stats)."""
    settings_line = "[2026-11-30 04:13:31] server_args={'model_path': 't', 'speculative_algorithm': 'EAGLE3', "
    settings_line += "'speculative_num_steps': 4, 'speculative_eagle_topk': 1, 'speculative_num_draft_tokens': 5}"
    said = from_log(
        settings_line + "\n" + sglang_line("2026-11-30 04:14:31", 2.5, None).replace("Decode batch,", "Decode batch.")
    )
    assert (said.tau, said.steps, said.events) == (2.5, 4, ())
    tree = settings_line.replace("topk': 1", "topk': 4").replace("num_steps", "other")
    assert from_log(tree + "\n" + sglang_line("2026-11-30 04:14:31", 2.5, 0.5)).steps is None
    block = sglang_line("2026-11-30 04:14:31", 2.5, 0.5).replace("accept len: 2.50", "block accept len: 2.50")
    with pytest.raises(BadInput, match="says nothing about acceptance"):
        from_log(block)


LLAMA = "0.09.401.679 I slot print_timing: id  1 | task 90 | "


def test_llama_cpp_prints_one_line_a_request():
    """llama.cpp b11434 tools/server/server-context.cpp:714; what ran in shared facts: 0 of 183."""
    nothing = LLAMA + "draft acceptance = 0.00000 (    0 accepted /   183 generated), mean len =  1.00"
    some = LLAMA.replace("0.09", "0.19")
    some += "draft acceptance = 0.54671 (  158 accepted /   289 generated), mean len =  2.63"
    said = from_log(nothing + "\n" + some)
    assert (said.engine, said.accepted, said.drafted) == ("llamacpp", 158, 472)
    assert said.tau == pytest.approx((183 + 289 * 2.63) / 472)
    assert [at for at, _ in said.series] == pytest.approx([0, 10])
    assert from_log(nothing).tau == 1.0


def test_llama_cpp_before_it_printed_a_mean():
    said = from_log("draft acceptance rate = 0.57576 (  171 accepted /   297 generated)")
    assert said.tau is None
    assert any("171 of 297" in note for note in said.notes)


def test_llama_cpp_statistics_count_since_the_start():
    """common/speculative.cpp:3053; ggml-org/llama.cpp#24536 shows this one."""
    request = "draft acceptance = 0.64479 (  167 accepted /   259 generated), mean acceptance length =  2.92, "
    request = LLAMA + request + "acceptance rate per position = (0.805, 0.632, 0.483)"
    total = "0.06.896.057 I statistics     draft-eagle3: #calls(b,g,a) =    1     {n}     {n}, #gen drafts =     {n}, "
    total += "#acc drafts =    70, #gen tokens =    259, #acc tokens =   167, #mean acc len = 2.92, "
    total += "#acc rate/pos = (0.805, 0.632, 0.483), dur(b,g,a) = 0.005, 325.555, 0.114 ms"
    said = from_log("\n".join([request, total.format(n=80), request, total.format(n=87)]))
    assert (said.rounds, said.accepted, said.steps) == (87, 167, 3)
    assert said.tau == pytest.approx(1 + 167 / 87)
    assert said.unconditional == pytest.approx((0.805, 0.632, 0.483))
    assert len(said.series) == 2


def test_the_speculative_example_counts_whole_rounds():
    """examples/speculative-simple/speculative-simple.cpp:353-357; 281-299: each round adds accepted + 1."""
    counts = Acceptance(HISTOGRAMS[1])
    made = {"n_draft": 4, "n_predict": counts.rounds + counts.accepted, "n_drafted": 4 * counts.rounds}
    text = "".join(f"{name:<9} = {n}\n" for name, n in {**made, "n_accept": counts.accepted}.items())
    said = from_log(text + "accept    = 29.688%\n")
    assert (said.tau, said.steps, said.rounds) == (counts.tau, 4, counts.rounds)


EVENTS = [
    ("positions", "x.py:37: unknown: block: [9,0,0] Assertion `index out of bounds: 0 <= tmp < 2048` failed."),
    ("positions", "Assertion `index out of bounds: 0 <= tl.broadcast_to(tmp10, [XBLOCK]) < 2048` failed."),
    ("positions-raised", "Overriding draft model max_position_embeddings from 2048 to the target model's"),
    ("positions-short", "Target model's context_length (8192) is greater than the derived context_length (2048)."),
    ("weight-unexpected", "Eagle3 MLA: skipping unexpected weight midlayer.foo"),
    ("weight-unknown", "ValueError: There is no module or parameter named 'model.midlayer' in Eagle3LlamaForCausalLM."),
    ("weight-missing", "ValueError: Following weights were not initialized from checkpoint: {'fc.weight'}"),
    ("weight-shape", "AssertionError: Attempted to load weight (torch.Size([64])) into parameter (torch.Size([32]))"),
    ("weight-key-error", "KeyError: 'embed_tokens.weight'"),
    ("weight-key-error", "KeyError: 'layers.0.mlp.down_proj.weight'"),
    ("head-target", "Detected EAGLE model without its own lm_head in the checkpoint. Sharing target model lm_head"),
    ("embedding-own", "Detected EAGLE model with distinct embed_tokens weights. Keeping separate embedding weights"),
    ("embedding-same", "Detected EAGLE model with embed_tokens identical to the target model. Sharing target model"),
    ("no-taps", "RuntimeError: Model does not support EAGLE3 interface but aux_hidden_state_outputs was requested"),
    ("algorithm-eagle", "server_args=ServerArgs(speculative_algorithm='EAGLE', speculative_num_steps=3)"),
    ("algorithm-eagle", "server_args={'speculative_algorithm': 'EAGLE', 'speculative_num_steps': 3}"),
    ("algorithm-eagle", "python -m sglang.launch_server --speculative-algorithm EAGLE --tp 8"),
    ("method-eagle", "speculative_config=SpeculativeConfig(method='eagle', model='d', num_spec_tokens=4)"),
    ("nan", "NaN detected in verify: target model logits; values were sanitized before sampling."),
    ("nan", "RuntimeError: probability tensor contains either `inf`, `nan` or element < 0"),
    ("draft-tokens", "speculative_num_draft_tokens is adjusted to speculative_num_steps + 1 when"),
    ("synthetic", "synthetic speculative acceptance is enabled for benchmarking; generated output is not valid"),
    ("drafting-off", "srv  load_model: speculative decoding not supported by this context"),
]


@pytest.mark.parametrize(("id", "line"), EVENTS, ids=[f"{i}-{id}" for i, (id, _) in enumerate(EVENTS)])
def test_a_line_that_gives_something_away_is_quoted(id: str, line: str):
    said = from_log(f"starting\n{line}\ngoing on")
    assert [(event.id, event.line) for event in said.events] == [(id, line[:300])]
    assert said.tau is None
    assert said.events[0].meaning


def test_what_is_right_is_no_event():
    right = (
        "speculative_algorithm='EAGLE3'\n--speculative-algorithm EAGLE3\nSpeculativeConfig(method='eagle3', \n"
        "Avg Draft acceptance rate: nan%\nKeyError: 'user'\n"
        "Overriding draft model max model len from 8192 to 1024\n"
    )
    assert from_log(right + sglang_line("2026-11-30 04:14:31", 2.5, 0.5)).events == ()


def test_ranks_that_judge_the_embedding_differently():
    lines = [line for id, line in EVENTS if id.startswith("embedding-")]
    assert [event.id for event in from_log("\n".join(lines)).events][-1] == "embedding-ranks"


def test_a_log_without_acceptance(tmp_path: Path):
    with pytest.raises(BadInput, match="serve some requests"):
        from_log("INFO: nothing\n")
    with pytest.raises(BadInput, match="cannot be read"):
        from_log(tmp_path / "none.log")
    with pytest.raises(BadInput, match="cannot be read"):
        from_log(tmp_path)


def test_a_long_series_is_thinned():
    lines = [sglang_line("2026-11-30 04:14:31", 1 + (i % 2), None) for i in range(3001)]
    said = from_log("\n".join(lines))
    assert len(said.series) <= 1000
    assert said.series[0][1] == pytest.approx(1.5, abs=0.01)


# ---------------------------------------------------------------- metrics


def vllm_metrics(counts: Acceptance, engine: int = 0) -> str:
    """What prometheus_client writes for v1/spec_decode/metrics.py:220-258; seen so on 0.32.0."""
    label, k = f'engine="{engine}",model_name="t"', counts.k
    lines = [
        "# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.",
        "# TYPE vllm:spec_decode_num_drafts_total counter",
        f"vllm:spec_decode_num_drafts_total{{{label}}} {counts.rounds:.1f}",
        f"vllm:spec_decode_num_drafts_created{{{label}}} 1.796011962827156e+09",
        f"vllm:spec_decode_num_draft_tokens_total{{{label}}} {counts.rounds * k:.1f}",
        f"vllm:spec_decode_num_accepted_tokens_total{{{label}}} {counts.accepted:.1f}",
    ]
    lines += [
        f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{{label},position="{j}"}} {n:.1f}'
        for j, n in enumerate(counts.at_least[1:])
    ]
    return "\n".join(lines) + "\n"


def test_vllm_counters_are_added_over_engines_and_differ_from_a_snapshot():
    first, second = (Acceptance(h) for h in HISTOGRAMS)
    whole = first + second
    said = from_prometheus(vllm_metrics(first) + vllm_metrics(second, 1))
    assert (said.tau, said.rounds, said.accepted, said.steps) == (whole.tau, whole.rounds, whole.accepted, 4)
    assert said.unconditional == pytest.approx(whole.unconditional)
    since = from_prometheus(vllm_metrics(whole), before=vllm_metrics(first))
    assert (since.tau, since.rounds) == (second.tau, second.rounds)
    assert since.unconditional == pytest.approx(second.unconditional)
    with pytest.raises(BadInput, match="restarted"):
        from_prometheus(vllm_metrics(first), before=vllm_metrics(whole))
    with pytest.raises(BadInput, match="no round"):
        from_prometheus(vllm_metrics(first), before=vllm_metrics(first))
    with pytest.raises(BadInput, match="no speculative decoding"):
        from_prometheus('vllm:num_requests_running{engine="0"} 1.0\n')


SGLANG = """# TYPE sglang:spec_accept_length gauge
sglang:spec_accept_length{{engine_type="unified",model_name="t",tp_rank="0"}} {length}
sglang:spec_accept_rate{{engine_type="unified",model_name="t",tp_rank="0"}} 0.25
sglang:spec_num_steps{{model_name="t",tp_rank="0"}} 4.0
sglang:spec_num_draft_tokens{{model_name="t",tp_rank="0"}} 5.0
"""
SGLANG_FINISHED = """sglang:spec_verify_calls_total{{model_name="t"}} {rounds}
sglang:generation_tokens_total{{model_name="t",is_streaming="false"}} {tokens}
sglang:num_requests_total{{model_name="t",is_streaming="false"}} {requests}
"""


def test_sglang_gauges_and_counters():
    """observability/metrics_collector.py:511-546; 1860-1940 and 2095-2136 for what finished requests add."""
    said = from_prometheus(SGLANG.format(length=2.0))
    assert (said.tau, said.steps, said.rounds) == (2.0, 4, None)
    counts = Acceptance(HISTOGRAMS[1])
    finished = SGLANG_FINISHED.format(rounds=counts.rounds, tokens=counts.rounds + counts.accepted + 3, requests=3)
    said = from_prometheus(SGLANG.format(length=2.0) + finished)
    assert (said.tau, said.rounds, said.accepted) == (counts.tau, counts.rounds, counts.accepted)
    assert said.said["sglang:spec_accept_length"] == 2.0
    with pytest.raises(BadInput, match="every 40 decode steps"):
        from_prometheus(SGLANG.format(length=0.0))


def test_llama_cpp_counters():
    """tools/server/server-task.cpp:1565-1575, with the prefix that it puts before them."""
    text = "llamacpp:spec_decode_num_draft_tokens_total 300\nllamacpp:spec_decode_num_accepted_tokens_total 50\n"
    said = from_prometheus(text + "llamacpp:spec_decode_num_drafts_total 100\n")
    assert (said.engine, said.tau, said.steps) == ("llamacpp", 1.5, None)


# ---------------------------------------------------------------- metadata


def sglang_meta(counts: Acceptance, old: bool = False) -> dict[str, Any]:
    """managers/tokenizer_manager.py:3149-3200, with the names before sgl-project/sglang#23530 where `old`."""
    histogram = list(counts.histogram)
    while histogram and not histogram[-1]:
        histogram.pop()  # as long as the best round needs
    names = ("spec_accept_token_num", "spec_draft_token_num", "spec_accept_histogram") if old else (
        "spec_num_correct_drafts", "spec_num_proposed_drafts", "spec_correct_drafts_histogram")  # fmt: skip
    tokens = counts.rounds + counts.accepted + 1
    return {
        "completion_tokens": tokens, "spec_verify_ct": counts.rounds, "spec_accept_length": tokens / counts.rounds,
        "spec_accept_rate": counts.accepted / (counts.rounds * counts.k), names[0]: counts.accepted,
        names[1]: counts.rounds * counts.k, names[2]: histogram,
    }  # fmt: skip


@pytest.mark.parametrize("old", [False, True])
def test_sglang_metadata_is_counted_not_averaged(old: bool, tmp_path: Path):
    parts = [Acceptance(h) for h in HISTOGRAMS]
    whole = Acceptance.merged(parts, 4)
    answers = [{"text": "x", "meta_info": sglang_meta(part, old)} for part in parts]
    lines = tmp_path / "answers.jsonl"
    lines.write_text("\n".join(json.dumps(answer) for answer in answers))
    for source in (answers, json.dumps(answers), lines):
        said = from_metadata(source)
        assert (said.engine, said.tau, said.rounds, said.steps) == ("sglang", whole.tau, whole.rounds, 4)
        assert said.unconditional == pytest.approx(whole.unconditional)
        assert said.said["spec_accept_length"] > whole.tau, "prefill's token is in SGLang's own number"


def test_sglang_metadata_of_old_versions_has_two_counts():
    """sgl-project/sglang#3152: completion_tokens and spec_verify_ct alone."""
    counts = Acceptance(HISTOGRAMS[1])
    meta = {"completion_tokens": counts.rounds + counts.accepted + 1, "spec_verify_ct": counts.rounds}
    assert from_metadata({"meta_info": meta}).tau == counts.tau


def test_vllm_metadata():
    """v1/metrics/stats.py:395-425; this is what 0.32.0 answered."""
    answer = {"metrics": {"speculative_decoding": {
        "mean_acceptance_length": 1.2666666666666666, "draft_acceptance_rate": 0.06666666666666667,
        "acceptance_histogram": [58, 14, 3, 0, 0], "num_spec_steps": 75, "num_accepted_draft_tokens": 20,
        "num_draft_tokens": 300, "num_spec_tokens": 4, "per_step_accepted": None, "per_step_drafted": None,
    }}}  # fmt: skip
    said, counts = from_metadata(answer), Acceptance((58, 14, 3, 0, 0))
    assert (said.engine, said.tau, said.rounds, said.steps) == ("vllm", counts.tau, 75, 4)
    assert said.unconditional == pytest.approx(counts.unconditional)


def test_llama_cpp_timings():
    """tools/server/server-common.cpp:85-104; 64 tokens, 21 of 122 accepted in 42 rounds, as facts say."""
    said = from_metadata({"timings": {"predicted_n": 64, "draft_n": 122, "draft_n_accepted": 21}})
    assert (said.tau, said.rounds) == (1 + 21 / 42, 42)


def test_sglang_server_info():
    """entrypoints/http_server.py:864-890, managers/scheduler_components/internal_state.py:125."""
    info = {"speculative_algorithm": "EAGLE3", "speculative_num_steps": 4, "version": "0.5.23",
            "internal_states": [{"avg_spec_accept_length": 2.0}, {"avg_spec_accept_length": 3.0}]}  # fmt: skip
    said = from_metadata(info)
    assert (said.engine, said.version, said.tau, said.steps) == ("sglang", "0.5.23", 2.5, 4)
    with pytest.raises(BadInput, match="runs without a draft"):
        from_metadata({"internal_states": [{}]})
    with pytest.raises(BadInput, match="nothing about acceptance"):
        from_metadata({"choices": []})
    with pytest.raises(BadInput, match="not JSON"):
        from_metadata("{")


# ---------------------------------------------------------------- a number, a server


def test_a_number_is_one_or_more():
    assert from_number(1.03).tau == 1.03
    for wrong in (0.39, math.nan, math.inf, -1):
        with pytest.raises(BadInput, match="1 or more"):
            from_number(wrong)


@pytest.fixture
def serve() -> Iterator[Any]:
    servers = []

    def start(pages: dict[str, str]) -> str:
        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                body = pages.get(self.path)
                self.send_response(200 if body is not None else 404)
                self.end_headers()
                self.wfile.write((body or "").encode())

            def log_message(self, *_: Any) -> None:
                pass

        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        servers.append(server)
        return f"http://127.0.0.1:{server.server_address[1]}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def test_a_server_is_asked(serve: Any):
    counts = Acceptance(HISTOGRAMS[0])
    url = serve({"/metrics": vllm_metrics(counts)})
    for named in (url, url + "/", url + "/metrics", url.removeprefix("http://")):
        assert from_url(named).tau == counts.tau
    info = json.dumps({"internal_states": [{"avg_spec_accept_length": 2.0}]})
    assert from_url(serve({"/server_info": info})).tau == 2.0
    assert from_url(serve({"/get_server_info": info})).tau == 2.0
    with pytest.raises(BadInput, match=r"/metrics: the server answers 404.*server_info"):
        from_url(serve({}))
    with pytest.raises(BadInput, match="no speculative decoding"):
        from_url(serve({"/metrics": "x 1\n"}))


@pytest.mark.parametrize("url", ["file:///etc/passwd", "http://", "", "ftp://a/b", "http://127.0.0.1:1", "http://a b"])
def test_no_server_there(url: str):
    with pytest.raises(BadInput):
        from_url(url, timeout=2)


# ---------------------------------------------------------------- garbage

WORDS = st.sampled_from(
    ["Decode batch", "accept len: ", "accept rate: ", "#running-req: ", "SpecDecoding metrics: ", "nan", "-1", "1e999",
     "Mean acceptance length: ", "Accepted: ", " tokens", "Drafted: ", "Per-position acceptance rate: ", "0.5, 0.7",
     "draft acceptance = ", "( ", " accepted / ", " generated)", "mean len = ", "1 2 3, ", "#gen tokens = ", ", ", "[",
     "statistics draft-eagle3: #calls(b,g,a) = ", "#acc tokens = ", "#acc rate/pos = (", ")", "0", "1", "2.5", "\n",
     "9" * 400, "2026-02-30 10:00:00", "0.01.002.003 I ", "n_draft = 4", "n_predict = ", "n_accept = 9", "99999999",
     "n_drafted = 3", "num_spec_tokens=", "\x1b[1m", "vllm:spec_decode_num_drafts_total", " ", "{", "}", "\0",
     "vllm:spec_decode_num_accepted_tokens_total", "vllm:spec_decode_num_draft_tokens_total",
     'vllm:spec_decode_num_accepted_tokens_per_pos_total{position="0"} ', "sglang:spec_accept_length ",
     "sglang:spec_verify_calls_total ", "sglang:generation_tokens_total ", "sglang:num_requests_total ",
     "llamacpp:spec_decode_num_drafts_total "]
)  # fmt: skip
garbage = st.text(max_size=40) | st.lists(WORDS | st.text(max_size=3), max_size=25).map("".join)
KEYS = st.sampled_from(
    ["spec_verify_ct", "completion_tokens", "spec_num_correct_drafts", "spec_num_proposed_drafts", "num_spec_tokens",
     "spec_correct_drafts_histogram", "num_spec_steps", "acceptance_histogram", "num_accepted_draft_tokens", "draft_n",
     "num_draft_tokens", "draft_n_accepted", "predicted_n", "avg_spec_accept_length", "internal_states", "version",
     "speculative_num_steps", "x"]
)  # fmt: skip
VALUES = st.none() | st.booleans() | st.integers(-3, 9) | st.integers() | st.floats() | st.text(max_size=3)
documents = st.recursive(
    VALUES, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=6), max_leaves=20
)


def sane(said: Served) -> None:
    assert said.tau is None or 1 - 0.01 <= said.tau < math.inf
    assert all(0 <= rate <= 1 for rate in said.unconditional)
    assert said.steps is None or said.steps > 0
    json.dumps(said.to_dict())


@settings(max_examples=300, deadline=None)
@given(garbage)
@example(vllm_line("02-30 10:00:00", Acceptance((1, 1))))
def test_garbage_is_read_or_refused(text: str):
    for read in (from_log, from_prometheus, from_metadata, lambda t: from_prometheus(t, before=t)):
        with contextlib.suppress(BadInput):
            sane(read(text + "\n"))


@settings(max_examples=300, deadline=None)
@given(documents)
@example({"speculative_num_steps": 0.5, "avg_spec_accept_length": 1})
@example({"num_spec_steps": 2, "num_accepted_draft_tokens": 0, "acceptance_histogram": [2], "num_spec_tokens": 0.5})
def test_garbage_in_json_is_read_or_refused(document: Any):
    with contextlib.suppress(BadInput):
        sane(from_metadata(document))
