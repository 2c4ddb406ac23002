"""A key-value cache of independent slots for any Hugging Face decoder, and the attention that reads it.

A *slot* holds one sequence, from column 0; slots live in groups that share a capacity, so that a long sequence does not
pad all the others. One forward pass feeds rows that each stand at their own position: the pass knows where. Hugging
Face models ask for three things by name, and get ours while a pass is on: the cache (`SlotCache`), the mask (`_mask`,
built by the model's own mask function, so sliding windows hold) and attention (`_attend`). No model code is copied or
patched.

A row's result does not depend on what the other rows hold: each sequence starts at column 0, the padded length is a
multiple of COLUMNS whose surplus adds exact zeros, and a pass has a multiple of ROWS rows, for which the matrix
products of CPU libraries round each row alike.

    pytest tests/test_generate.py
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import Cache
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from eyas.machine import round_up

COLUMNS = 32
ROWS = 16
NAME = "eyas_slots"


class SlotGroup:
    """Keys and values of `rows` slots, allocated at a layer's first use.

    Values are [rows, kv_heads, capacity, head_dim], keys [rows, kv_heads, head_dim, capacity]: with a query they are
    multiplied along head_dim, and the CPU's bfloat16 product copies them first where they lie the other way.
    """

    def __init__(self, rows: int, capacity: int):
        self.rows = rows
        self.capacity = round_up(capacity, COLUMNS)
        self.keys: list[torch.Tensor | None] = []
        self.values: list[torch.Tensor | None] = []

    def grow(self, capacity: int) -> None:
        """Make room for `capacity` columns, keeping what is there."""
        capacity = round_up(capacity, COLUMNS)
        if capacity > self.capacity:
            extra = capacity - self.capacity
            self.keys = [None if k is None else F.pad(k, (0, extra)) for k in self.keys]
            self.values = [None if v is None else F.pad(v, (0, 0, 0, extra)) for v in self.values]
            self.capacity = capacity

    def layer(self, index: int, like_k: torch.Tensor, like_v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        while len(self.keys) <= index:
            self.keys.append(None)
            self.values.append(None)
        keys, values = self.keys[index], self.values[index]
        if keys is None or values is None:
            # Zeros, not empty: columns that were never written are multiplied by a weight of zero, and 0 * nan is nan.
            keys = like_k.new_zeros(self.rows, like_k.shape[1], like_k.shape[3], self.capacity)
            values = like_v.new_zeros(self.rows, like_v.shape[1], self.capacity, like_v.shape[3])
            self.keys[index], self.values[index] = keys, values
        return keys, values

    def copy_prefix(self, row: int, source: SlotGroup, columns: int) -> None:
        """Begin `row` with the first `columns` of the only row of `source`: a prompt's shared beginning."""
        for index, (k, v) in enumerate(zip(source.keys, source.values, strict=True)):
            if k is not None and v is not None:
                keys, values = self.layer(index, k.transpose(-1, -2), v)
                keys[row, :, :, :columns] = k[0, :, :, :columns]
                values[row, :, :columns] = v[0, :, :columns]


@dataclass
class Segment:
    """Rows of one pass that live in one group."""

    group: SlotGroup
    batch: slice
    """Their rows in the batch."""
    rows: slice
    """Their rows in the group."""
    columns: int
    """Columns that any of them may look at."""


@dataclass
class Pass:
    """One forward pass: whose rows are fed, and at which positions."""

    segments: list[Segment]
    positions: torch.Tensor  # int64 [B, q], consecutive within a row
    layer: int = -1

    @property
    def columns(self) -> int:
        return max(s.columns for s in self.segments)


class SlotCache(Cache):
    """What a model believes to be its cache. It stores new keys and values in the slots of the current pass."""

    def __init__(self) -> None:
        super().__init__(layers=[])

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """[B, kv_heads, q, head_dim] -> the same: attention reads the slots itself."""
        now = _current()
        now.layer = layer_idx
        for s in now.segments:
            keys, values = s.group.layer(layer_idx, key_states, value_states)
            new_k, new_v, at = key_states[s.batch], value_states[s.batch], now.positions[s.batch]
            if at.shape[1] == 1:
                rows = torch.arange(s.rows.start, s.rows.stop, device=at.device)
                keys[rows, :, :, at[:, 0]] = new_k[:, :, 0]
                values[rows, :, at[:, 0]] = new_v[:, :, 0]
            else:
                start = int(at[0, 0])
                keys[s.rows, :, :, start : start + at.shape[1]] = new_k.transpose(-1, -2)
                values[s.rows, :, start : start + at.shape[1]] = new_v
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0  # positions are always given

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return _current().columns, 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return -1

    @property
    def is_sliding(self) -> list[bool]:
        return [False]  # all columns are kept; windows are a matter of the mask

    @property
    def is_compileable(self) -> bool:
        return False


_pass: ContextVar[tuple[Pass, Callable[..., Any] | None] | None] = ContextVar("eyas_pass", default=None)


def _current() -> Pass:
    entry = _pass.get()
    assert entry is not None, "the slot cache is used outside a pass"
    return entry[0]


def _mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    mask_function: Callable[..., torch.Tensor],
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    **_: Any,
) -> torch.Tensor:
    """Additive mask [B, 1, q, columns]: the model's own rule (causal, windows), at each row's own positions."""
    positions = _current().positions
    rows = torch.arange(batch_size, device=device)[:, None, None, None]
    columns = torch.arange(kv_length, device=device)[None, None, None, :]
    allowed = mask_function(rows, torch.zeros_like(rows), positions[:, None, :, None].to(device), columns)
    allowed = allowed.expand(batch_size, 1, q_length, kv_length)
    return torch.zeros(allowed.shape, dtype=dtype, device=device).masked_fill_(~allowed, torch.finfo(dtype).min)


def _attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of one layer over the slots. query [B, heads, q, head_dim] -> [B, q, heads, value_dim].

    Where the model would use plain scaled-dot-product attention, one step of decoding is two batched products that read
    each group of keys once for all its query heads (transformers copies the keys once a head; PyTorch's fused kernel
    was a quarter slower at one query a row). Models with their own formula (soft-caps, sinks) keep it.
    """
    entry = _pass.get()
    assert entry is not None
    now, own = entry
    outputs = []
    for s in now.segments:
        keys, values = s.group.layer(now.layer, key, value)
        k, v = keys[s.rows, :, :, : s.columns], values[s.rows, :, : s.columns]
        q, mask = query[s.batch], attention_mask[s.batch, :, :, : s.columns]
        if own is not None or kwargs.get("position_bias") is not None:
            function = own or sdpa_attention_forward
            outputs.append(function(module, q, k.transpose(-1, -2), v, mask, scaling=scaling, dropout=0.0, **kwargs)[0])
            continue
        b, heads, length, dim = q.shape
        scale = dim**-0.5 if scaling is None else scaling
        if length == 1:
            q = (q * scale).view(b, k.shape[1], heads // k.shape[1], dim)
            weights = torch.matmul(q, k).add_(mask).softmax(-1)  # [b, kv_heads, share, columns]
            outputs.append(torch.matmul(weights, v).view(b, 1, heads, v.shape[-1]))
        else:
            k, shared = k.transpose(-1, -2), heads != k.shape[1]
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=shared)
            outputs.append(out.transpose(1, 2))
    out = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return out.contiguous(), None


AttentionInterface.register(NAME, _attend)
AttentionMaskInterface.register(NAME, _mask)


@contextlib.contextmanager
def slot_attention(model: Any) -> Iterator[Callable[[torch.Tensor, Pass], torch.Tensor]]:
    """While open, `model` attends over slots. Yields step(ids [B, q], pass) -> final states [B, q, H]."""
    before = model.config._attn_implementation
    own = None
    if before != "sdpa":  # eager: the family's own formula, found beside its classes
        own = getattr(sys.modules[type(model).__module__], "eager_attention_forward", None)
    decoder, cache = model.get_decoder(), SlotCache()

    def step(ids: torch.Tensor, now: Pass) -> torch.Tensor:
        token = _pass.set((now, own))
        try:
            return decoder(
                input_ids=ids, position_ids=now.positions, past_key_values=cache, use_cache=True
            ).last_hidden_state
        finally:
            _pass.reset(token)

    model.set_attn_implementation(NAME)
    try:
        if model.config._attn_implementation != NAME:
            raise NotImplementedError(f"{type(model).__name__} does not take its attention by name")
        yield step
    finally:
        if model.config._attn_implementation != before:
            model.set_attn_implementation(before)
