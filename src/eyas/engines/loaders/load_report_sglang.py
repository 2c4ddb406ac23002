"""What SGLang's own loader makes of EAGLE-3 drafts, on a CPU.   load_report_sglang.py DRAFT ... --target TARGET

Takes the steps of SGLang's start in their order: server arguments, the target's configuration and the draft's, which
taps the target is told to capture, the draft's class and weights, and what of the target's it then shares.

SGLang's CPU mode stays off, and with it the stand-in kernels: that mode pads a projection with too few rows where every
other one refuses it (layers/linear.py, `narrow_padded_param_and_loaded_weight`). Loading computes nothing anyway.
"""

# ruff: noqa: E402  SGLang looks at variables and modules while it is imported

from __future__ import annotations

import os
import socket
import sys
import types
from pathlib import Path
from typing import Any

os.environ.pop("SGLANG_USE_CPU_ENGINE", None)
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
sys.modules["sgl_kernel"] = None  # type: ignore[assignment]  # not to be found
_ops = types.ModuleType("vllm._custom_ops")  # layers/rotary_embedding/base.py takes a kernel from there, to call later
_ops.rotary_embedding = None  # type: ignore[attr-defined]
sys.modules["vllm"], sys.modules["vllm._custom_ops"] = types.ModuleType("vllm"), _ops

import sglang
import torch
from reporting import Report, main, mark_uninitialised_memory
from sglang.srt.configs.device_config import DeviceConfig
from sglang.srt.configs.load_config import LoadConfig
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.distributed import bootstrap
from sglang.srt.layers.moe.utils import draft_model_build_scope
from sglang.srt.model_loader.loader import DefaultModelLoader, get_model_loader
from sglang.srt.models import registry  # noqa: F401  imports every model's module, once, before the forks
from sglang.srt.runtime_context import SpawnRanks, publish
from sglang.srt.server_args import ServerArgs
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

FLAGS = ("norm_output", "norm_before_fc", "input_norm", "fc_norm", "num_aux_hidden_states", "hidden_size_in")


def start(draft: Path, target: Path) -> tuple[ServerArgs, ModelConfig]:
    """SGLang ready to build models on a CPU: its arguments, and the target's config."""
    arguments = ServerArgs(
        model_path=str(target), speculative_algorithm="EAGLE3", speculative_draft_model_path=str(draft),
        speculative_num_steps=3, speculative_eagle_topk=1, speculative_num_draft_tokens=4, device="cpu",
        dtype="float32", attention_backend="torch_native", sampling_backend="pytorch", grammar_backend="none",
        disable_cuda_graph=True, mem_fraction_static=0.3,
    )  # fmt: skip
    publish(arguments, role="scheduler", ranks=SpawnRanks(world_rank=0, gpu_id=0))
    bootstrap.init_parallel_runtime(server_args=arguments, device="cpu", dist_port=free_port())
    of_target = ModelConfig.from_server_args(arguments)
    bootstrap.init_layer_runtime(model_config=of_target)
    return arguments, of_target


def load(report: Report, draft: Path, target: Path) -> None:
    arguments, of_target = start(draft, target)
    taps = told_to_capture(arguments, of_target)
    report.fields["taps"] = taps.eagle_aux_hidden_state_layer_ids
    report.fields["flags"]["use_aux_hidden_state"] = bool(taps.eagle_use_aux_hidden_state)
    model = load_draft(report, arguments, draft, of_target.context_len)
    report.fields["captured"] = captures(of_target, taps)
    report.fields["shared"] = shares(model, of_target)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def told_to_capture(arguments: ServerArgs, of_target: ModelConfig) -> Any:
    from sglang.srt.model_executor.model_runner_components import spec_aux_hidden_state

    return spec_aux_hidden_state.resolve_spec_aux_hidden_state_config(
        server_args=arguments,
        model_config=of_target,
        spec_algorithm=SpeculativeAlgorithm.from_string("EAGLE3"),
        is_draft_worker=False,
    )


def load_draft(report: Report, arguments: ServerArgs, draft: Path, context_length: int) -> torch.nn.Module:
    """The draft's class, built and filled by SGLang's loader; the report notes both."""
    config = ModelConfig.from_server_args(
        arguments, model_path=str(draft), is_draft_model=True, context_length=context_length
    )
    original = DefaultModelLoader.load_weights_only

    def watched(model: torch.nn.Module, weights: Any, target_device: torch.device) -> Any:
        report.fields["architecture"] = type(model).__name__
        report.blank(model.named_parameters())
        return original(model, report.numbered(weights, lambda: getattr(model, "hot_token_id", None)), target_device)

    DefaultModelLoader.load_weights_only = staticmethod(watched)
    mark_uninitialised_memory()
    loader = get_model_loader(load_config=LoadConfig(load_format="auto"), model_config=config)
    with draft_model_build_scope():
        model = loader.load_model(model_config=config, device_config=DeviceConfig("cpu", 0))
    report.collect(model.named_parameters())
    for part in (getattr(model, "model", None), model):
        report.flags(part, FLAGS)
    report.flags(model, ("load_lm_head_from_target",))
    report.fields["flags"]["max_position_embeddings"] = config.hf_config.max_position_embeddings
    rope = next((m for m in model.modules() if hasattr(m, "rotary_dim") and hasattr(m, "base")), None)
    report.flags(rope, ("base", "max_position_embeddings"))
    ids = getattr(model, "hot_token_id", None)
    report.fields["hot_token_id"] = None if ids is None else ids[:8].tolist()
    return model


def captures(of_target: ModelConfig, taps: Any) -> Any:
    """Where the target's class captures once it was told; its weights do not matter, so none are read."""
    from sglang.srt.model_executor.model_runner_components.attention_backend_setup import (
        configure_aux_hidden_state_capture,
    )
    from sglang.srt.model_loader.utils import get_model_architecture

    kind, _ = get_model_architecture(of_target)
    with torch.device("meta"):
        target = kind(config=of_target.hf_config, quant_config=None)
    configure_aux_hidden_state_capture(
        model=target,
        eagle_use_aux_hidden_state=taps.eagle_use_aux_hidden_state,
        eagle_aux_hidden_state_layer_ids=taps.eagle_aux_hidden_state_layer_ids,
        dflash_use_aux_hidden_state=False,
        dflash_target_layer_ids=None,
        is_dspark=False,
    )
    inner = next((m for m in target.modules() if hasattr(m, "layers_to_capture")), None)
    return None if inner is None else sorted(inner.layers_to_capture)


def shares(model: Any, of_target: ModelConfig) -> dict[str, Any]:
    """Which of embedding and head the draft then takes from the target, as the EAGLE worker's init_lm_head does it."""
    width, ids = of_target.hidden_size, of_target.vocab_size
    embed, head = (torch.nn.Parameter(torch.zeros(ids, width)) for _ in range(2))
    try:
        if getattr(model, "load_lm_head_from_target", False):
            model.set_embed_and_head(embed, head)
        else:
            model.set_embed(embed)
    except Exception as error:  # the MLA class synchronises CUDA, after it has shared
        failed = {"raises": f"{type(error).__name__}: {error}"}
    else:
        failed = {}
    return {
        "embedding": model.model.embed_tokens.weight is embed,
        "head": model.lm_head.weight is head or model.lm_head is model.model.embed_tokens,
        **failed,
    }


if __name__ == "__main__":
    main("sglang", sglang.__version__, load)
