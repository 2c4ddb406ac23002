"""What SGLang's own draft class computes, on a CPU.   forward_sglang.py DRAFT ... --target TARGET  (forward_rows.py)

Built and loaded by SGLang's own loader; nothing of the class is replaced. Attention is its PyTorch backend over its own
pools of keys and values. What the EAGLE worker does around the class is done here: the target's embedding put in, one
id further than the states, what the logits processor returned as the next state, and draft ids looked up in the map.
"""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

import sglang
import torch
from forward_rows import Rows
from load_report_sglang import start
from reporting import Report, main
from sglang.srt.configs.device_config import DeviceConfig
from sglang.srt.configs.load_config import LoadConfig
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.layers.moe.utils import draft_model_build_scope
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context
from sglang.srt.model_loader.loader import get_model_loader
from sglang.srt.models import registry  # noqa: F401  imports every model's module, once, before the forks
from sglang.srt.speculative.eagle_info import EagleDraftExtendInput, EagleDraftInput


def forward(report: Report, draft: Path, target: Path) -> None:
    arguments, of_target = start(draft, target)
    config = ModelConfig.from_server_args(
        arguments, model_path=str(draft), is_draft_model=True, context_length=of_target.context_len
    )
    report.stage = "weights"
    with draft_model_build_scope():
        loader = get_model_loader(load_config=LoadConfig(load_format="auto"), model_config=config)
        model = loader.load_model(model_config=config, device_config=DeviceConfig("cpu", 0))
    rows = Rows(draft)
    with torch.inference_mode():
        model.set_embed(torch.nn.Parameter(rows.embedding, requires_grad=False))
        run(model, rows, Pools(config, rows))
    rows.save()


def run(model: Any, rows: Rows, pools: Pools) -> None:
    ids, taps = rows.first()
    given = EagleDraftExtendInput(hidden_states=taps, num_tokens_per_req=1, num_tokens_for_logprob_per_req=1)
    note(model, rows, pools.forward(model, ForwardMode.EXTEND, ids, rows.positions, rows.lengths, rows.lengths, given))
    for k in range(1, rows.steps):
        ids, positions = rows.later(k)
        given = EagleDraftInput(hidden_states=rows.state[-1].clone(), num_tokens_per_req=1)
        one = torch.ones_like(ids)
        note(model, rows, pools.forward(model, ForwardMode.DECODE, ids, positions, one, rows.lengths + k, given))


def note(model: Any, rows: Rows, output: Any) -> None:
    """Logits over the target's ids, through the map by which the worker looks up what was drafted."""
    logits = output.next_token_logits
    if model.hot_token_id is not None:
        wide = logits.new_full((len(logits), len(rows.embedding)), float("-inf"))
        logits = wide.index_copy(1, model.hot_token_id, logits)
    rows.keep(logits, output.hidden_states)


class Pools:
    """Where keys and values lie: request r + 1 has places of its own, as many as it will ever need."""

    def __init__(self, config: ModelConfig, rows: Rows) -> None:
        requests = ReqToTokenPool(rows.count, rows.capacity, "cpu", False)
        tokens = MHATokenToKVPool(
            rows.count * rows.capacity, 1, torch.float32, config.get_num_kv_heads(1), config.head_dim,
            config.num_hidden_layers, "cpu", False,
        )  # fmt: skip
        places = torch.arange(1, rows.count * rows.capacity + 1, dtype=torch.int32)  # place 0 is for padding
        requests.req_to_token[1:] = places.view(rows.count, rows.capacity)
        runner = SimpleNamespace(device="cpu", req_to_token_pool=requests, token_to_kv_pool=tokens)
        self.table, self.backend = requests.req_to_token, TorchNativeAttnBackend(runner)

    def forward(
        self, model: Any, mode: ForwardMode, ids: torch.Tensor, positions: torch.Tensor, new: torch.Tensor,
        total: torch.Tensor, given: Any,
    ) -> Any:  # fmt: skip
        """`new` tokens of each sequence at `positions`, `total` in all with earlier ones: the class's own output."""
        requests = torch.arange(1, len(new) + 1)
        batch = ForwardBatch(
            forward_mode=mode, batch_size=len(new), input_ids=ids, req_pool_indices=requests, seq_lens=total,
            out_cache_loc=self.table[torch.repeat_interleave(requests, new), positions].long(),
            seq_lens_sum=int(total.sum()), seq_lens_cpu=total, positions=positions, spec_info=given,
            capture_hidden_mode=CaptureHiddenMode.LAST,
        )  # fmt: skip
        if mode.is_extend():
            batch.extend_num_tokens, batch.extend_seq_lens, batch.extend_prefix_lens = len(ids), new, total - new
            batch.extend_start_loc = new.cumsum(0) - new
            batch.extend_seq_lens_cpu, batch.extend_prefix_lens_cpu = new.tolist(), (total - new).tolist()
        self.backend.init_forward_metadata(batch)
        with forward_context(ForwardContext(attn_backend=self.backend), forward_batch=batch):
            return model.forward(ids, positions, batch)


if __name__ == "__main__":
    main("sglang", sglang.__version__, forward)
