"""Launch -> what to type on a machine with GPUs, where the engine is installed as its makers say.

    print("\\n".join(printed(launch, There("org/target", "path/to/draft"))))

Conversions come first, then the one command. Nothing of it is run.   pytest tests/test_serve_command.py
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path

from ..export.convert import how
from .command import Flags, joined, llamacpp_drafting, sglang_drafting, vllm_drafting
from .launch import Launch
from .prepare import OUTTYPE, as_it_is

OPENVINO = """\
import openvino_genai as genai
exact = {exact}
pipe = genai.LLMPipeline({target!r}, {device!r}{draft}, **exact)
config = genai.GenerationConfig()
config.max_new_tokens = 256{k}
print(pipe.generate("The capital of France is", config))"""


@dataclass(frozen=True)
class There:
    """What the user calls the models on that machine, and what the command depends on of them."""

    target: str
    draft: str | None
    taps: tuple[int, ...] = ()
    """Of the draft."""
    target_latent: bool = False
    """Has the target latent attention (MLA), as DeepSeek's and Kimi's?"""
    draft_latent: bool = False
    requests: int | None = None
    """Most at once, where a limit is to be set."""
    address: bool = False
    """Are host and port to be set?"""


def printed(launch: Launch, there: There) -> list[str]:
    """Lines for a shell."""
    make = {"vllm": _vllm, "sglang": _sglang, "llamacpp": _llamacpp, "openvino": _openvino}[launch.engine]
    return make(launch, there)


def _place(launch: Launch, there: There) -> Flags:
    return [("--host", launch.host), ("--port", str(launch.port or 8000))] if there.address else []


def _line(program: list[str], flags: Flags, launch: Launch) -> str:
    return shlex.join([*program, *joined(flags, launch.extra)])


def _vllm(launch: Launch, there: There) -> list[str]:
    flags: Flags = [("--dtype", launch.dtype), ("--max-model-len", str(launch.context))]
    if there.requests is not None:
        flags.append(("--max-num-seqs", str(there.requests)))
    if there.draft is not None:
        flags += [
            ("--speculative-config", vllm_drafting(there.draft, launch.k)),
            ("--per-request-spec-decode-metrics", "detailed"),
        ]
    return [_line(["vllm", "serve", there.target], [*flags, *_place(launch, there)], launch)]


def _sglang(launch: Launch, there: There) -> list[str]:
    flags: Flags = [
        ("--model-path", there.target),
        ("--dtype", launch.dtype),
        ("--context-length", str(launch.context)),
    ]
    if there.requests is not None:
        flags.append(("--max-running-requests", str(there.requests)))
    flags.append(("--enable-metrics", None))
    lines = []
    if there.draft is not None:
        flags += sglang_drafting(there.draft, launch.k, launch.topk)
        if there.target_latent and not there.draft_latent:
            # Unset, the draft runs on the target's backend; those for MLA alone (trtllm_mla, the default on Blackwell,
            # cutedsl_mla, flashmla) refuse it or misread it (speculative/draft_utils.py:357). Choices: flashinfer, fa3,
            # fa4, triton, trtllm_mha (arg_groups/choices.py:103).
            flags.append(("--speculative-draft-attention-backend", "triton"))
            lines.append("# the target has latent attention, the draft has not: fa3, fa4 and flashinfer are others")
    return [*lines, _line(["python", "-m", "sglang.launch_server"], [*flags, *_place(launch, there)], launch)]


def _llamacpp(launch: Launch, there: There) -> list[str]:
    lines, model = [], there.target
    if there.draft is not None and (there.requests or 1) > 1:
        lines.append("# of several slots (-np) all but the first accept less, with b11434; the answers are the same")
    kind = OUTTYPE[launch.dtype]
    if not there.target.endswith(".gguf"):
        model = "target.gguf"
        lines.append(
            shlex.join(["python", "convert_hf_to_gguf.py", there.target, "--outtype", kind, "--outfile", model])
        )
    flags: Flags = [("-m", model), ("-c", str(launch.context)), ("-np", str(there.requests or 1)), ("--metrics", None)]
    if launch.dtype == "float32":
        flags += [("-fa", "off"), ("-ctk", "f32"), ("-ctv", "f32")]
    if there.draft is not None:
        converted = there.draft
        if not as_it_is("llamacpp", Path(there.draft)):
            converted = "draft.gguf"
            spelled = "draft-for-llamacpp"
            lines.append(
                shlex.join(["eyas", "export", there.draft, spelled, "--to", "llamacpp", "--target", there.target])
            )
            lines += how("llamacpp", Path(spelled), there.target, there.taps)
        flags += llamacpp_drafting(converted, launch.k)
        if launch.dtype == "float32":
            flags += [("-ctkd", "f32"), ("-ctvd", "f32")]
    return [*lines, _line(["llama-server"], [*flags, *_place(launch, there)], launch)]


def _openvino(launch: Launch, there: There) -> list[str]:
    lines, model, converted = [], there.target, there.draft
    if not as_it_is("openvino", Path(there.target)):
        model = "ov-target"
        weights = ["--weight-format", "fp32"] if launch.dtype == "float32" else []
        words = ["optimum-cli", "export", "openvino", "-m", there.target, "--task", "text-generation-with-past"]
        lines.append(shlex.join([*words, *weights, model]))
    if there.draft is not None and not as_it_is("openvino", Path(there.draft)):
        converted, spelled = "ov-draft", "draft-for-openvino"
        lines.append(shlex.join(["eyas", "export", there.draft, spelled, "--to", "openvino", "--target", there.target,
                                 "--convert", converted]))  # fmt: skip
        lines.append("# without eyas's --convert, its taps have to be written into the model by hand:")
        lines += [f"#   {line}" for line in how("openvino", Path(spelled), there.target, there.taps)]
    exact = {"float32": "f32", "bfloat16": "bf16"}.get(launch.dtype)
    properties = {"INFERENCE_PRECISION_HINT": exact, "KV_CACHE_PRECISION": exact} if exact else {}
    said = "" if converted is None else f", draft_model=genai.draft_model({converted!r}, 'GPU', **exact)"
    k = "" if converted is None else f"\nconfig.num_assistant_tokens = {launch.k}"
    code = OPENVINO.format(exact=properties, target=model, device="GPU", draft=said, k=k)
    return [*lines, "python - <<'END'", *code.splitlines(), "END"]
