"""Command lines, here and printed; what is refused before anything starts.   pytest -q tests/test_serve_command.py"""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from drafts import make_draft, write_flat, write_latent, write_speculators
from eyas.cli import cli
from eyas.cli.serve import command, example
from eyas.engines.environment import Environment
from eyas.engines.launch import options
from eyas.errors import BadInput, EyasError, Mismatch
from eyas.serve import Launch
from eyas.serve.check import check, longest
from eyas.serve.command import Inputs, cache_gib, here, joined, variables
from eyas.serve.printed import There, printed
from eyas.target.facts import read_facts

ENGINES = ("vllm", "sglang", "llamacpp", "openvino")


def launch(engine: str, draft: str | None = "d", **more) -> Launch:
    return Launch(engine, Path("t"), None if draft is None else Path(draft), **more)


def line(wanted: Launch, port: int = 1234, threads: int = 1) -> str:
    """As it is run, in an environment at /e."""
    programs = {"serve": Path("/e/serve.py"), "llama-server": Path("/e/llama-server")}
    environment = Environment(wanted.engine, "1", Path("/e"), Path("/e/python"), programs, {})
    return shlex.join(here(wanted, Inputs(Path("/t"), wanted.draft and Path("/d")), environment, port, threads))


# ---------------------------------------------------------------- here


def test_vllm():
    assert line(launch("vllm")) == (
        "/e/python -m vllm.entrypoints.openai.api_server --model /t --served-model-name t --dtype float32 "
        "--max-model-len 1024 --max-num-seqs 8 --enforce-eager --no-enable-prefix-caching --disable-uvicorn-access-log "
        """--speculative-config '{"method": "eagle3", "model": "/d", "num_speculative_tokens": 4}' """
        "--per-request-spec-decode-metrics detailed --host 127.0.0.1 --port 1234"
    )
    assert "spec" not in line(launch("vllm", None)), "vLLM refuses these metrics without a draft"
    assert variables(launch("vllm"), 3) == {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "3"}


def test_sglang():
    assert line(launch("sglang", dtype="bfloat16", context=100, requests=2)) == (
        "/e/python /e/serve.py --model-path /t --served-model-name t --dtype bfloat16 --context-length 100 "
        "--max-running-requests 2 --max-total-tokens 210 --enable-metrics --stream-interval 1 --decode-log-interval 10 "
        "--speculative-algorithm EAGLE3 --speculative-draft-model-path /d --speculative-num-steps 4 "
        "--speculative-eagle-topk 1 --speculative-num-draft-tokens 5 --host 127.0.0.1 --port 1234"
    )
    tree = options(line(launch("sglang", k=3, topk=4)))
    said = [tree[f"speculative-{name}"] for name in ("num-steps", "eagle-topk", "num-draft-tokens")]
    assert said == [3, 4, 13]


def test_llamacpp():
    assert line(launch("llamacpp", host="::1"), threads=2) == (
        "/e/llama-server -m /t --alias t -c 1024 -np 1 -fa off --no-cache-prompt --cache-ram 0 --metrics --no-webui "
        "--offline -ctk f32 -ctv f32 -md /d --spec-type draft-eagle3 --spec-draft-n-max 4 -ctkd f32 -ctvd f32 "
        "-t 2 -td 2 --host ::1 --port 1234"
    )
    assert " -ctk bf16 -ctv bf16 -t 1 --host" in line(launch("llamacpp", None, dtype="bfloat16"))
    assert "-ctk" not in line(launch("llamacpp", dtype="auto"))


def test_openvino():
    said = line(launch("openvino", k=2))
    assert said.startswith("/e/python ") and "/engines/servers/openvino_server.py --target /t --draft /d --k 2 " in said
    assert said.endswith(
        " --alias t --precision f32 --context 1024 --threads 1 --cache-size 1 --host 127.0.0.1 --port 1234"
    )
    assert " --draft none " in line(launch("openvino", None))


def test_room_for_keys_and_values(tiny_target: Path):
    facts = replace(read_facts(tiny_target), num_layers=35, num_kv_heads=8, head_dim=128)  # 288 KiB a token in float32
    sizes = [(1024, 1), (1024, 8), (32768, 1), (32768, 8)]
    assert [cache_gib(launch("vllm", context=c, requests=n, k=1), facts) for c, n in sizes] == [1, 3, 10, 10]
    assert cache_gib(launch("vllm", context=32768, requests=1, dtype="bfloat16"), facts) == 5
    assert cache_gib(launch("openvino"), None) == 1


def test_the_engines_own_options_win():
    assert joined([("--dtype", "float32"), ("--no-cache-prompt", None), ("-np", "1")], ("--dtype=half", "--x")) == [
        "--no-cache-prompt", "-np", "1", "--dtype=half", "--x",
    ]  # fmt: skip
    assert joined([("--no-cache-prompt", None), ("-np", "1"), ("-c", "9")], ("--cache-prompt", "--parallel", "4")) == [
        "-c", "9", "--cache-prompt", "--parallel", "4",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"engine": "trt"}, "--engine trt: no such engine; choose one of vllm, sglang"),
        ({"engine": "vllm", "topk": 2}, "--topk 2: vllm drafts chains only; .* --engine sglang"),
        ({"engine": "llamacpp", "topk": 2}, "--topk 2: llamacpp drafts chains only"),
        ({"engine": "vllm", "k": 0}, "--k 0: it must be at least 1"),
        ({"engine": "vllm", "dtype": "fp8"}, "--dtype fp8: choose one of float32"),
        ({"engine": "vllm", "port": 70000}, "--port 70000: a port lies between"),
    ],
)
def test_values_that_no_engine_takes(values: dict, says: str):
    with pytest.raises(BadInput, match=says):
        Launch(**{"target": Path("t"), "draft": None, **values})


# ---------------------------------------------------------------- printed


def test_printed_for_vllm_and_sglang():
    there = There("org/t", "my draft")
    assert printed(launch("vllm", dtype="auto", context=4096), there) == [
        "vllm serve org/t --dtype auto --max-model-len 4096 "
        """--speculative-config '{"method": "eagle3", "model": "my draft", "num_speculative_tokens": 4}' """
        "--per-request-spec-decode-metrics detailed"
    ]
    assert printed(launch("sglang", dtype="auto", extra=("--tp", "2")), there) == [
        "python -m sglang.launch_server --model-path org/t --dtype auto --context-length 1024 --enable-metrics "
        "--speculative-algorithm EAGLE3 --speculative-draft-model-path 'my draft' --speculative-num-steps 4 "
        "--speculative-eagle-topk 1 --speculative-num-draft-tokens 5 --tp 2"
    ]
    placed = printed(launch("vllm", None, host="0.0.0.0", port=9), There("t", None, requests=3, address=True))
    assert placed == ["vllm serve t --dtype float32 --max-model-len 1024 --max-num-seqs 3 --host 0.0.0.0 --port 9"]


def test_printed_for_latent_attention():
    """A draft without it cannot run on a backend that is for it alone, which the target may have chosen."""
    flag = "--speculative-draft-attention-backend triton"
    assert flag in printed(launch("sglang"), There("t", "d", target_latent=True))[-1]
    assert flag not in printed(launch("sglang"), There("t", "d", target_latent=True, draft_latent=True))[-1]
    assert flag not in printed(launch("sglang"), There("t", "d"))[-1]


def test_printed_for_llamacpp():
    assert printed(launch("llamacpp", dtype="auto"), There("org/t", "d", taps=(2, 15, 27))) == [
        "python convert_hf_to_gguf.py org/t --outtype auto --outfile target.gguf",
        "eyas export d draft-for-llamacpp --to llamacpp --target org/t",
        "python convert_hf_to_gguf.py draft-for-llamacpp --target-model-dir org/t --outtype auto --outfile draft.gguf",
        "llama-server -m target.gguf -c 1024 -np 1 --metrics -md draft.gguf --spec-type draft-eagle3 "
        "--spec-draft-n-max 4",
    ]
    ready = printed(launch("llamacpp"), There("t.gguf", "d.gguf", requests=4))
    assert ready[0].startswith("# of several slots")
    assert ready[1:] == [
        "llama-server -m t.gguf -c 1024 -np 4 --metrics -fa off -ctk f32 -ctv f32 -md d.gguf --spec-type draft-eagle3 "
        "--spec-draft-n-max 4 -ctkd f32 -ctvd f32"
    ]


def test_printed_for_openvino():
    lines = printed(launch("openvino"), There("org/t", "d", taps=(2, 15, 27)))
    assert lines[0] == (
        "optimum-cli export openvino -m org/t --task text-generation-with-past --weight-format fp32 ov-target"
    )
    assert lines[1] == "eyas export d draft-for-openvino --to openvino --target org/t --convert ov-draft"
    assert any('hidden_layers_list value="1 14 26"' in line and line.startswith("#") for line in lines)
    code = "\n".join(lines[lines.index("python - <<'END'") + 1 : lines.index("END")])
    compile(code, "printed", "exec")
    assert "draft_model=genai.draft_model('ov-draft'" in code and "num_assistant_tokens = 4" in code
    assert "'INFERENCE_PRECISION_HINT': 'f32'" in code


# ---------------------------------------------------------------- refused


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plain draft of the tiny target."""
    return write_flat(tmp_path_factory.mktemp("healthy") / "draft", *make_draft())


def of(engine: str, draft: Path, target: Path, **more) -> Launch:
    return Launch(engine, target, draft, **{"context": 128, **more})


@pytest.mark.parametrize("engine", ENGINES)
def test_a_healthy_draft_passes(engine: str, healthy: Path, tiny_target: Path):
    assert check(of(engine, healthy, tiny_target)) == []
    assert longest(of(engine, healthy, tiny_target)) == 256
    assert check(Launch(engine, tiny_target, None, context=256)) == []


@pytest.mark.parametrize("engine", ENGINES)
def test_another_target_is_refused(engine: str, healthy: Path, make_tiny_target, tmp_path: Path):
    other = make_tiny_target(tmp_path / "other", vocab=310)
    with pytest.raises(Mismatch, match=r"made for a target with vocab_size 300, but .* has 310"):
        check(of(engine, healthy, other))


def test_a_context_that_nobody_knows(healthy: Path, tiny_target: Path, tmp_path: Path):
    with pytest.raises(BadInput, match="--context-length 257: the target's positions end at 256"):
        check(of("vllm", healthy, tiny_target, context=257))
    short = write_flat(tmp_path / "short", *make_draft(), max_position_embeddings=100)
    with pytest.raises(
        BadInput, match=r"--context-length 128: .* past it vllm drafts nothing.*--context-length 100 or"
    ):
        check(of("vllm", short, tiny_target))
    assert check(of("vllm", short, tiny_target), force=True) == ["vllm drafts nothing past 100 tokens"]
    with pytest.raises(Mismatch, match="serve with --context-length 100"):
        check(of("sglang", short, tiny_target), force=True)
    assert longest(of("sglang", short, tiny_target)) == 100


@pytest.mark.parametrize(
    ("engine", "changes", "says"),
    [
        ("sglang", {"norm_before_residual": True}, "norm_before_residual is true, it runs false"),
        ("openvino", {"norm_before_fc": True}, "norm_before_fc is true, it runs false"),
        ("llamacpp", {"norm_output": True}, "norm_output is true, it runs false"),
    ],
)
def test_another_model_is_refused(engine: str, changes: dict, says: str, tiny_target: Path, tmp_path: Path):
    draft = write_flat(tmp_path / "draft", *make_draft(**changes), **changes)
    with pytest.raises(Mismatch, match=f"would serve another model than was trained. .*{says}") as caught:
        check(of(engine, draft, tiny_target))
    if engine == "sglang":
        assert "--force serves it all the same" in str(caught.value)
        assert any(says in line for line in check(of(engine, draft, tiny_target), force=True))
    else:  # it would have to be converted, which cannot say it
        assert "--force" not in str(caught.value)
        with pytest.raises(Mismatch, match=says):
            check(of(engine, draft, tiny_target), force=True)


def test_what_does_not_start_is_refused(tiny_target: Path, tmp_path: Path):
    draft = write_speculators(tmp_path / "draft", *make_draft(norm_before_residual=True))
    with pytest.raises(Mismatch, match=r"sglang 0\.5\.23 would not serve it\. .*no model_type"):
        check(of("sglang", draft, tiny_target), force=True)


def test_options_of_the_engine_are_read_too(healthy: Path, tiny_target: Path):
    eagle = of("sglang", healthy, tiny_target, extra=("--speculative-algorithm", "EAGLE"))
    with pytest.raises(Mismatch, match=r"EAGLE instead of EAGLE3.*the options after `--` that do it: leave them out"):
        check(eagle)
    unsaid = of("vllm", healthy, tiny_target, extra=("--speculative-config", json.dumps({"model": str(healthy)})))
    with pytest.raises(Mismatch, match="names no method"):
        check(unsaid)


def test_a_draft_for_cuda_alone(make_tiny_target, tmp_path: Path):
    draft = write_latent(tmp_path / "draft", model_type="llama")
    target = make_tiny_target(tmp_path / "target")
    with pytest.raises(BadInput, match=r"sglang needs CUDA: .*--print shows the command for elsewhere"):
        check(of("sglang", draft, target))
    assert any("needs CUDA" in line for line in check(of("sglang", draft, target), here=False))


def test_drafts_that_were_converted_elsewhere(tiny_target: Path, tmp_path: Path):
    (tmp_path / "d.gguf").write_bytes(b"GGUF")
    assert "is not checked" in check(of("llamacpp", tmp_path / "d.gguf", tiny_target))[0]
    (tmp_path / "openvino_model.xml").write_text('<eagle3_mode value="True" />')
    found = check(of("openvino", tmp_path, tiny_target))
    assert "no hidden_layers_list, so OpenVINO takes taps one layer further than everybody's: 3, 5 and 6" in found[1]


# ---------------------------------------------------------------- the verb


def run(*words: str | Path):
    return CliRunner().invoke(cli, ["serve", *map(str, words)])


@pytest.mark.parametrize("engine", ENGINES)
def test_print(engine: str, healthy: Path, tiny_target: Path):
    result = run(healthy, "--target", tiny_target, "--engine", engine, "--print", "--k", "3")
    assert result.exit_code == 0, result.output
    assert str(healthy) in result.stdout and str(tiny_target) in result.stdout
    said = json.loads(run(healthy, "--target", tiny_target, "--engine", engine, "--print", "--k", "3", "--json").stdout)
    assert said == {"lines": result.stdout.splitlines(), "warnings": []}


def test_print_takes_what_both_models_know_and_the_options_behind(healthy: Path, tiny_target: Path):
    result = run("--engine", "sglang", "--print", healthy, "--target", tiny_target, "--topk", 2, "--", "--tp", "2")
    assert "--context-length 256" in result.stdout and "--dtype auto" in result.stdout
    assert result.stdout.endswith("--speculative-eagle-topk 2 --speculative-num-draft-tokens 9 --tp 2\n")
    alone = run(
        "--no-draft", "--engine", "vllm", "--print", "--target", tiny_target, "--", "--tensor-parallel-size", "2"
    )
    assert "speculative" not in alone.stdout and alone.stdout.endswith("--tensor-parallel-size 2\n")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--engine", "vllm"), "name the DRAFT to serve, or give --no-draft"),
        (("--engine", "vllm", "--", "--tp", "2"), "name the DRAFT to serve"),
        (("a", "b", "--engine", "vllm"), "'b' is too much: one DRAFT is served"),
        (("a", "--no-draft", "--engine", "vllm"), "'a' is too much: --no-draft serves no draft"),
    ],
)
def test_usage(words: tuple[str, ...], says: str):
    result = run(*words)
    assert result.exit_code == 2 and says in " ".join(result.output.split())


def test_errors_of_the_verb(healthy: Path, tiny_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def fails(*words: str | Path) -> EyasError:
        with pytest.raises(EyasError) as caught:
            command.main([str(word) for word in words], standalone_mode=False)
        return caught.value

    assert fails(healthy, "--engine", "tgi").exit_code == 2
    assert "no draft there" in str(fails(tmp_path, "--engine", "vllm", "--target", tiny_target))
    monkeypatch.setenv("EYAS_CACHE", str(tmp_path))  # where no engine is set up
    missing = fails(healthy, "--engine", "vllm", "--target", tiny_target)
    assert missing.exit_code == 2 and "run `eyas engines setup vllm` first" in str(missing)
    offline = fails(healthy, "--engine", "vllm", "--target", "org/no-such-model", "--print")
    assert "--target org/no-such-model: its config.json is neither here nor to be had" in str(offline)


def test_examples_ask_for_what_was_accepted():
    for engine in ENGINES:
        words = shlex.split(example(engine, "http://h:1", "m", True))
        assert json.loads(words[-1])["temperature"] == 0
    assert '"return_spec_tokens_details": true' in example("sglang", "http://h:1", "m", True)
    assert "return_spec_tokens_details" not in example("sglang", "http://h:1", "m", False)
