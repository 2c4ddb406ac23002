"""The layout of a feature shard: names, dtypes and shapes of its tensors, and the metadata that travels with them.

A folder of features holds `shard-00000.safetensors` and so on, `shards.json` (one entry a finished shard; grows while
the extraction runs) and, once complete, `manifest.json`. In a shard, N tokens of many conversations lie one after the
other; document d is rows `offsets[d]:offsets[d+1]`. The states of its last row are zero where they were recorded during
generation (target/record.py): row i stands with token i+1, so nobody reads them.

Exercise it:  pytest tests/test_features_layout.py
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from eyas.conventions import Conventions
from eyas.errors import BadInput
from eyas.untrusted import parse_json

SCHEMA = "eyas-features/1"
STAGE = "extract"
INDEX = "shards.json"
PLAIN_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,100}")  # of a shard: no path, nothing odd
METADATA = "eyas"
"""The one key of a shard's metadata: safetensors writes several keys in no fixed order, one gives the same bytes."""
NOT_READ = -1
"""`top1` where no teacher is stored; `logsumexp` is 0 there and means nothing."""

ROW_DTYPES: Mapping[str, torch.dtype] = {
    "ids": torch.int32,  # [N] token ids
    "mask": torch.uint8,  # [N] 1 on the assistant's tokens
    "taps": torch.bfloat16,  # [N, T*H] residual streams after the tapped blocks, ascending
    "final": torch.bfloat16,  # [N, H] after the target's final norm
    "top1": torch.int32,  # [N] the target's choice for the next token over all V ids, -1 where not stored
    "logsumexp": torch.float32,  # [N] of the target's logits over all V ids, 0 where not stored
}


def shard_name(index: int) -> str:
    """File name of shard `index`."""
    return f"shard-{index:05d}.safetensors"


def teacher_rows(mask: torch.Tensor) -> torch.Tensor:
    """Rows of ONE document whose teacher is stored: `j` with `m_{j+1} = 1`. mask [L] of 0/1 -> bool [L].

    Row i, step k reads the final state at `j = i+1+k` with weight `w(i,k) = m_{i+1} ... m_{i+2+k}` (design.md, section
    3), whose last two factors are `m_j` and `m_{j+1}`; step 0 of row j-1 reaches every j where both are 1. So the
    contract reads exactly the j with `m_j = m_{j+1} = 1`. Where `m_j = 0` and `m_{j+1} = 1`, j is the last token before
    an answer: no row reads it, but it says what the target chose first, and costs one row an answer.
    """
    read = torch.zeros(mask.shape[0], dtype=torch.bool)
    read[:-1] = mask[1:] != 0
    return read


@dataclass(frozen=True)
class FeatureMeta:
    """What a shard says of itself: whose states these are, in which sizes and under which conventions."""

    hidden_size: int
    vocab_size: int
    conventions: Conventions
    target: str
    """Fingerprint of the target's weights and config (eyas.target.source.fingerprint)."""
    tokenizer: str
    template: str
    ends: str = ""
    """Fingerprint of embedding, head and final norm alone, for folders that hold no more ("" in older features)."""

    @property
    def taps(self) -> tuple[int, ...]:
        """Taps, ascending."""
        return self.conventions.taps

    def row_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of one row of each tensor."""
        wide = {"taps": (len(self.taps) * self.hidden_size,), "final": (self.hidden_size,)}
        return {name: wide.get(name, ()) for name in ROW_DTYPES}

    def bytes_per_token(self) -> int:
        """Bytes of one token on disk."""
        shapes = self.row_shapes()
        return sum(dtype.itemsize * (shapes[n][0] if shapes[n] else 1) for n, dtype in ROW_DTYPES.items())

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values; the inverse of `from_dict`."""
        return {
            "hidden_size": self.hidden_size,
            "vocab_size": self.vocab_size,
            "taps": list(self.taps),
            "conventions": self.conventions.to_dict(),
            "target": self.target,
            "tokenizer": self.tokenizer,
            "template": self.template,
            **({"ends": self.ends} if self.ends else {}),
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> FeatureMeta:
        """Read what `to_dict` wrote. Raises BadInput naming the field that is missing or contradicts itself."""
        try:
            known = {k: values[k] for k in ("hidden_size", "vocab_size", "target", "tokenizer", "template")}
            ends = values.get("ends", "")
            if not all(type(known[k]) is int and 0 < known[k] < 1 << 32 for k in ("hidden_size", "vocab_size")):
                raise ValueError("hidden_size and vocab_size must be sizes")
            if not all(isinstance(v, str) for v in (ends, *(known[k] for k in ("target", "tokenizer", "template")))):
                raise ValueError("target, tokenizer, template and ends must be digests")
            return cls(**known, ends=ends, conventions=Conventions.from_dict(values["conventions"]))
        except (KeyError, TypeError, ValueError, AttributeError, BadInput) as error:
            raise BadInput(f"feature metadata cannot be read: {error}; expected what {SCHEMA} writes") from error

    def to_metadata(self, doc_ids: list[str], plan: str) -> dict[str, str]:
        """The safetensors metadata of one shard, whose documents are `doc_ids` in row order."""
        told = {"schema": SCHEMA, "meta": self.to_dict(), "plan": plan, "documents": doc_ids}
        return {METADATA: json.dumps(told, ensure_ascii=False, sort_keys=True)}


@dataclass(frozen=True)
class ShardEntry:
    """One finished shard as `shards.json` lists it."""

    name: str
    bytes: int
    sha256: str
    plan: str
    """Digest of the ids and masks that the shard must hold, and of the metadata: what makes it current."""
    lengths: tuple[int, ...]
    """Tokens of each document."""
    supervised: int
    recorded: int | None = None
    """Documents whose states were recorded while they were generated; None where no target of ours computed any."""

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {**self.__dict__, "lengths": list(self.lengths)}


def read_index(text: str, where: str) -> tuple[FeatureMeta, dict[str, ShardEntry]]:
    """Parse `shards.json`: (meta, {shard name: entry}). Raises BadInput naming `where` when it is something else."""
    try:
        parsed = parse_json(text)
        if parsed["schema"] != SCHEMA:
            raise BadInput(f"{where}: schema {parsed['schema']!r}, this Eyas reads {SCHEMA!r}; extract again")
        entries = [_entry(e) for e in parsed["shards"]]
        meta = FeatureMeta.from_dict(parsed["meta"])
    except BadInput as error:
        raise error if where in str(error) else BadInput(f"{where}: {error}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise BadInput(f"{where}: not an index of feature shards ({error}); run the extraction again") from error
    return meta, {e.name: e for e in entries}


def _entry(values: Mapping[str, Any]) -> ShardEntry:
    entry = ShardEntry(**{**values, "lengths": tuple(values["lengths"])})
    if not isinstance(entry.name, str) or not PLAIN_NAME.fullmatch(entry.name):
        raise ValueError(f"{str(entry.name)[:80]!r} is no name of a shard")
    numbers = (entry.bytes, entry.supervised, *entry.lengths, *(() if entry.recorded is None else (entry.recorded,)))
    if not all(type(n) is int and 0 <= n < 1 << 48 for n in numbers):
        raise ValueError(f"{entry.name}: bytes, lengths and supervised must be counts")
    if not isinstance(entry.sha256, str) or not isinstance(entry.plan, str):
        raise ValueError(f"{entry.name}: sha256 and plan must be digests")
    return entry


def dump_index(meta: FeatureMeta, entries: list[ShardEntry]) -> str:
    """The text of `shards.json`, one shard a line."""
    lines = ",\n".join(json.dumps(e.to_dict()) for e in sorted(entries, key=lambda e: e.name))
    return (
        f'{{"schema": "{SCHEMA}",\n"meta": {json.dumps(meta.to_dict(), sort_keys=True)},\n"shards": [\n{lines}\n]}}\n'
    )
