"""What vLLM's own draft class computes, on a CPU.   forward_vllm.py DRAFT ... --target TARGET  (forward_rows.py)

Configured, built and loaded as vLLM's start does it, by its own drafter; nothing is replaced. Attention is vLLM's own
kernel for CPUs over paged keys and values. What the drafter does around the class (its `propose`) is done here: fc at
step 0 alone, ids one further than the states, and from then on what the class returned, one position on.
"""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

import torch
import vllm
from forward_rows import Rows
from reporting import Report, main
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.engine.arg_utils import EngineArgs
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.attention import Attention, MLAAttention
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.model_executor.models import llama, llama_eagle3  # noqa: F401  once, before the forks
from vllm.utils.torch_utils import set_default_torch_dtype
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.spec_decode.eagle import EagleProposer
from vllm.v1.worker.cpu_model_runner import _set_torch_accelerator_to_noop

# Its CPU kernel turns queries of several heads wrongly when they come as [tokens, heads, width], as latent attention
# passes them, and differs from its own Python by the size of the numbers. Elsewhere the two are equal.
TURNED_IN_PYTHON = ["-rotary_embedding"]


def forward(report: Report, draft: Path, target: Path) -> None:
    _set_torch_accelerator_to_noop()
    rows = Rows(draft)
    latent = "kv_lora_rank" in json.loads((target / "config.json").read_text())
    arguments = EngineArgs(
        model=str(target), dtype="float32", enforce_eager=True, max_num_seqs=4, enable_prefix_caching=False,
        compilation_config={"custom_ops": ["all", *(TURNED_IN_PYTHON if latent else [])]},
        attention_backend="CPU_MLA" if latent else None,  # where it can, it takes AMX, which knows bfloat16 alone
        speculative_config={"method": "eagle3", "model": str(draft), "num_speculative_tokens": 3},
    )  # fmt: skip
    config = arguments.create_engine_config()
    with set_current_vllm_config(config), torch.inference_mode():
        init_distributed_environment(1, 0, f"file://{tempfile.mktemp(prefix='eyas-forward-')}", 0, "gloo")
        initialize_model_parallel(1, 1)
        with set_default_torch_dtype(torch.float32):
            its_target = initialize_model(vllm_config=config, model_config=config.model_config)
            its_target.model.embed_tokens.weight.data[: len(rows.embedding)] = rows.embedding
            drafter = EagleProposer(config, torch.device("cpu"), runner=None)
            report.stage = "weights"
            drafter.load_model(its_target)
            run(drafter.model, rows, PagedCache(config, rows))
    rows.save()


def run(model: Any, rows: Rows, cache: PagedCache) -> None:
    ids, taps = rows.first()
    states = model.combine_hidden_states(taps)
    with cache.attending(rows.positions, rows.lengths, rows.lengths):
        normed, back = model(input_ids=ids, positions=rows.positions, hidden_states=states)
    rows.keep(model.compute_logits(normed[rows.last]), back[rows.last])
    for k in range(1, rows.steps):
        ids, positions = rows.later(k)
        with cache.attending(positions, torch.ones_like(ids), rows.lengths + k):
            normed, back = model(input_ids=ids, positions=positions, hidden_states=rows.state[-1].clone())
        rows.keep(model.compute_logits(normed), back)


class PagedCache:
    """Keys and values of the draft's layers; every sequence has pages of its own, as many as it will ever need."""

    def __init__(self, config: VllmConfig, rows: Rows) -> None:
        layers = config.compilation_config.static_forward_context
        first = config.model_config.get_total_num_hidden_layers()  # the draft's layers are numbered after the target's
        self.config, self.builders = config, {}
        for name, layer in layers.items():
            if not isinstance(layer, Attention | MLAAttention) or int(name.split(".layers.")[1].split(".")[0]) < first:
                continue
            spec = layer.get_kv_cache_spec(config)
            self.block = spec.block_size
            pages = -(-rows.capacity // self.block)
            self.table = torch.arange(rows.count * pages, dtype=torch.int32).view(rows.count, pages)
            # As CPUAttentionBackendImpl.forward describes it.
            if isinstance(layer, MLAAttention):
                layer.kv_cache = torch.zeros(rows.count * pages, self.block, spec.head_size)
            else:
                layer.kv_cache = torch.zeros(rows.count * pages, spec.num_kv_heads, self.block, 2 * spec.head_size)
            builder = layer.get_attn_backend().get_builder_cls()
            self.builders[name] = builder(spec, [name], config, torch.device("cpu"))
        assert self.builders, f"no attention layer of the draft among {list(layers)}"

    def attending(self, positions: torch.Tensor, new: torch.Tensor, total: torch.Tensor) -> Any:
        """For a forward of `new` tokens of each sequence at `positions`, `total` in all with earlier ones."""
        starts = torch.cat([new.new_zeros(1), new.cumsum(0)]).int()
        sequence = torch.repeat_interleave(new)
        slots = self.table[sequence, positions // self.block].long() * self.block + positions % self.block
        common = CommonAttentionMetadata(
            query_start_loc=starts, query_start_loc_cpu=starts, seq_lens=total.int(),
            seq_lens_cpu_upper_bound=total.int(), num_reqs=len(new),
            num_actual_tokens=len(positions), max_query_len=int(new.max()), max_seq_len=int(total.max()),
            block_table_tensor=self.table, slot_mapping=slots,
        )  # fmt: skip
        built = {name: builder.build(0, common) for name, builder in self.builders.items()}
        return set_forward_context(
            built, self.config, num_tokens=len(positions), slot_mapping=dict.fromkeys(built, slots)
        )


if __name__ == "__main__":
    main("vllm", vllm.__version__, forward)
