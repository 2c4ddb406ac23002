"""Fault kinds as edits of a draft directory: what people's drafts really suffer from, one function each.

A fault changes config.json or tensors in memory (`Held`) and says which conventions a diagnosis must name. It returns
None where it does not apply to this draft (no norm before fc to leave out, say). Faults of the launch and of recorded
features leave the draft as it is; harmless changes look like faults and are none.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from eyas.doctor.material import Material
from eyas.draft.dialects import Reading
from eyas.draft.dialects.native import SCHEMA
from eyas.draft.directory import read_draft
from eyas.target.facts import read_facts
from eyas.target.weights import load_ends

IDS = "eagle_aux_hidden_state_layer_ids"
FIRST = r"(midlayer|layers\.0)\."
ATTN, MLP, HIDDEN_NORM = FIRST + r"self_attn\.", FIRST + r"mlp\.", FIRST + r"hidden_norm\.weight"


@dataclass
class Held:
    """A draft in memory."""

    config: dict[str, Any]
    tensors: dict[str, torch.Tensor]
    vocab: int
    taps: list[int]
    layers: int
    other_map: torch.Tensor | None = None
    """The map of another run over the same vocabulary sizes."""
    embedding: torch.Tensor | None = None
    """The target's [V, H]."""
    eyas: dict[str, Any] | None = None
    """What an eyas.json declares; None writes none."""
    reading: Reading | None = None
    """The healthy draft's."""
    fields: dict[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        inner = self.config.get("transformer_layer_config")
        self.fields = inner if isinstance(inner, dict) else self.config

    @classmethod
    def read(cls, folder: Path, target: Path) -> Held:
        reading, facts = read_draft(folder, target), read_facts(target)
        tensors: dict[str, torch.Tensor] = {}
        for file in sorted(folder.glob("*.safetensors")):
            tensors |= load_file(file)
        config = json.loads((folder / "config.json").read_text())
        table = load_ends(target, facts).embedding
        return cls(config, tensors, facts.vocab_size, list(reading.conventions.taps), facts.num_layers,
                   embedding=table, reading=reading)  # fmt: skip

    def copy(self) -> Held:
        return replace(self, config=copy.deepcopy(self.config), tensors=dict(self.tensors))

    def declare(self, **conventions: Any) -> bool:
        """Write an eyas.json beside it that says so."""
        assert self.reading is not None
        told = self.reading.conventions.with_(**conventions).to_dict()
        self.eyas = {"schema": SCHEMA, "shape": self.reading.shape.to_dict(), "conventions": told}
        return True

    def write(self, folder: Path) -> Path:
        """A plain directory: no digests, which would give the edit away."""
        folder.mkdir(parents=True)
        if self.eyas is not None:
            (folder / "eyas.json").write_text(json.dumps(self.eyas))
        (folder / "config.json").write_text(json.dumps(self.config, indent=1))
        save_file({k: v.contiguous().clone() for k, v in self.tensors.items()}, folder / "model.safetensors")
        return folder

    def name(self, pattern: str) -> str | None:
        """The stored name that ends in `pattern`."""
        return next((n for n in self.tensors if re.search(pattern + "$", n)), None)

    def swap(self, a: str, b: str) -> bool | None:
        first, second = self.name(a), self.name(b)
        if first is None or second is None or self.tensors[first].shape != self.tensors[second].shape:
            return None
        self.tensors[first], self.tensors[second] = self.tensors[second], self.tensors[first]
        return True

    def change(self, pattern: str, how: Callable[[torch.Tensor], torch.Tensor]) -> bool | None:
        name = self.name(pattern)
        if name is None:
            return None
        self.tensors[name] = how(self.tensors[name])
        return True

    def set_taps(self, taps: list[int]) -> bool:
        self.config[IDS] = taps
        nested = self.config.get("eagle_config")
        if isinstance(nested, dict):
            nested[IDS] = [t - 1 for t in taps]
        return True


@dataclass(frozen=True)
class Fault:
    """`conventions`: what a diagnosis may call it. `apply` returns None where it does not apply."""

    name: str
    conventions: tuple[str, ...]
    apply: Callable[[Held], Any] = lambda held: True
    measured: bool = True
    """Can trials see it, on a draft of some thousand training steps? False: the files alone show it."""
    launch: str = ""
    """The command that serves it, where that is the fault."""
    data: Callable[[Material], Material] | None = None
    """What is wrong with recorded features, where that is the fault."""
    harmless: bool = False
    """It is none, and must not be called one."""


def _taps(change: Callable[[Held], list[int]]) -> Callable[[Held], Any]:
    return lambda held: held.set_taps(change(held))


def _d2t(change: Callable[[torch.Tensor, Held], torch.Tensor]) -> Callable[[Held], Any]:
    return lambda held: held.change("d2t", lambda t: change(t, held))


def _flip(name: str) -> Callable[[Held], Any]:
    def apply(held: Held) -> bool:
        held.config[name] = not held.config.get(name, False)
        return True

    return apply


def _places(t: torch.Tensor) -> torch.Tensor:
    return torch.arange(len(t))


def _other_map(held: Held) -> Any:
    if held.other_map is None:
        return None
    ids = held.other_map
    marks = torch.zeros(held.vocab, dtype=torch.bool)
    marks[ids] = True
    held.change("t2d", lambda t: marks)
    return held.change("d2t", lambda t: ids - torch.arange(len(ids)))


def _another_vocabulary(held: Held) -> Any:
    """As many ids of another tokenizer: as good as random ones."""
    size = len(held.tensors[held.name("d2t") or ""]) if held.name("d2t") else 0
    if not size:
        return None
    ids = torch.randperm(held.vocab, generator=torch.Generator().manual_seed(2))[:size].sort().values
    marks = torch.zeros(held.vocab, dtype=torch.bool)
    marks[ids] = True
    held.change("t2d", lambda t: marks)
    return held.change("d2t", lambda t: ids - _places(t))


def _another_order(held: Held) -> Any:
    """Draft ids in another order, map and head alike: nothing that an engine would notice."""
    head, d2t = held.name(r"lm_head\.weight"), held.name("d2t")
    if head is None or d2t is None:
        return None
    ids = _places(held.tensors[d2t]) + held.tensors[d2t]
    order = torch.randperm(len(ids), generator=torch.Generator().manual_seed(3))
    held.tensors[head] = held.tensors[head][order]
    held.tensors[d2t] = ids[order] - _places(ids)
    return True


def _shuffled(t: torch.Tensor, held: Held) -> torch.Tensor:
    ids = _places(t) + t
    order = torch.randperm(len(t), generator=torch.Generator().manual_seed(0))
    return ids[order] - _places(t)


def _theta(value: float) -> Callable[[Held], Any]:
    def apply(held: Held) -> bool:
        held.fields["rope_theta"] = value
        if isinstance(held.fields.get("rope_parameters"), dict):
            held.fields["rope_parameters"]["rope_theta"] = value
        return True

    return apply


def _no_fc_norm(held: Held) -> Any:
    if not held.config.get("norm_before_fc"):
        return None
    held.config["norm_before_fc"] = False
    name = held.name(r"input_norm\.weight")
    if name is not None:
        del held.tensors[name]
    return True


def _unflagged(held: Held) -> Any:
    if not held.config.get("norm_before_fc"):
        return None
    held.config["norm_before_fc"] = False
    return True


def _slices(order: list[int]) -> Callable[[torch.Tensor], torch.Tensor]:
    def change(t: torch.Tensor) -> torch.Tensor:
        parts = t.chunk(len(order), dim=1)
        return torch.cat([parts[i] for i in order], 1)

    return change


def _halves(held: Held) -> Any:
    done = None
    for x in "qkv":
        done = held.change(FIRST + rf"self_attn\.{x}_proj\.weight", lambda t: torch.cat(t.chunk(2, 1)[::-1], 1))
    return done


def _pairs(held: Held) -> Any:
    d = held.fields.get("head_dim") or held.fields["hidden_size"] // held.fields["num_attention_heads"]
    done = None
    for x in "qk":
        done = held.change(
            FIRST + rf"self_attn\.{x}_proj\.weight",
            lambda t: t.unflatten(0, (-1, 2, d // 2)).transpose(1, 2).flatten(0, 2),
        )
    return done


def _drop(pattern: str) -> Callable[[Held], Any]:
    def apply(held: Held) -> Any:
        name = held.name(pattern)
        if name is None:
            return None
        del held.tensors[name]
        return True

    return apply


def _rename(pattern: str, new: str) -> Callable[[Held], Any]:
    def apply(held: Held) -> Any:
        name = held.name(pattern)
        if name is None:
            return None
        held.tensors[new] = held.tensors.pop(name)
        return True

    return apply


def _field(name: str, value: Any, nested: bool = False) -> Callable[[Held], Any]:
    def apply(held: Held) -> bool:
        place = held.fields if nested else held.config
        if value is ...:
            place.pop(name, None)
        else:
            place[name] = value
        return True

    return apply


def _embedding(held: Held) -> bool:
    size = held.fields["hidden_size"]
    generator = torch.Generator().manual_seed(0)
    prefix = "model." if any(n.startswith("model.") for n in held.tensors) else ""
    table = torch.randn(held.vocab, size, generator=generator) * 0.02
    held.tensors[prefix + "embed_tokens.weight"] = table.bfloat16()
    return True


def _scaled_embedding(held: Held) -> bool:
    """The target's own rows, stored times sqrt(H): the first norm takes the factor out again."""
    assert held.embedding is not None
    prefix = "model." if any(n.startswith("model.") for n in held.tensors) else ""
    size = held.embedding.shape[1]
    held.tensors[prefix + "embed_tokens.weight"] = (held.embedding.float() * size**0.5).bfloat16()
    return True


def _scaling(held: Held) -> bool:
    held.fields["rope_scaling"] = {"rope_type": "linear", "factor": 8.0}
    if isinstance(held.fields.get("rope_parameters"), dict):
        held.fields["rope_parameters"] |= {"rope_type": "linear", "factor": 8.0}
    return True


def _norms(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Held], Any]:
    def apply(held: Held) -> bool:
        held.tensors |= {n: change(t) for n, t in held.tensors.items() if "norm" in n}
        return True

    return apply


def _swap(a: str, b: str) -> Callable[[Held], Any]:
    return lambda held: held.swap(a, b)


def _weight(pattern: str, how: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Held], Any]:
    return lambda held: held.change(pattern, how)


def _nan(t: torch.Tensor) -> torch.Tensor:
    return t.clone().index_fill_(0, torch.tensor([3]), float("nan"))


def _one_less(t: torch.Tensor, held: Held) -> torch.Tensor:
    return t.clone().index_add_(0, torch.tensor([5]), torch.tensor([-1]))


def _vocab(held: Held) -> bool:
    held.fields["vocab_size"] = held.vocab + 1000
    return True


def _noise(t: torch.Tensor) -> torch.Tensor:
    return (torch.randn(t.shape, generator=torch.Generator().manual_seed(1)) * 0.02).to(t.dtype)


def _within(material: Material, x: torch.Tensor, by: int) -> torch.Tensor:
    """Row i holds row i + by of its document, the last one where it ends."""
    document = material.packing.document
    at = torch.arange(len(x)) + by
    return x[at.clamp(material.offsets[document], material.offsets[document + 1] - 1)]


def _states(change: Callable[[Material, int], torch.Tensor]) -> Callable[[Material], Material]:
    return lambda m: replace(m, states={tap: change(m, tap) for tap in m.states if tap + 1 in m.states})


SGLANG = "python -m sglang.launch_server --model-path T --speculative-draft-model-path draft "
VLLM = "vllm serve T --speculative-config "

FAULTS = (
    # the map
    Fault("d2t absolute", ("d2t",), _d2t(lambda t, h: t + _places(t))),
    Fault("d2t subtracted twice", ("d2t",), _d2t(lambda t, h: t - _places(t))),
    Fault("d2t arange", ("d2t",), _d2t(lambda t, h: _places(t))),
    Fault("d2t zeros", ("d2t",), _d2t(lambda t, h: torch.zeros_like(t))),
    Fault("d2t truncated", ("d2t",), _d2t(lambda t, h: t[: len(t) - 1000])),
    Fault("d2t out of range", ("d2t",), _d2t(lambda t, h: t + h.vocab // 2)),
    Fault("d2t duplicates", ("d2t",), _d2t(_one_less)),
    Fault("d2t shuffled", ("d2t",), _d2t(_shuffled)),
    Fault("d2t rolled by one", ("d2t",), _d2t(lambda t, h: (_places(t) + t).roll(1) - _places(t))),
    Fault("d2t as floats", ("d2t",), _d2t(lambda t, h: t.float())),
    Fault("d2t and t2d missing", ("d2t",), lambda h: _drop("d2t")(h) and _drop("t2d")(h)),
    Fault("d2t of another run", ("d2t",), _other_map),
    Fault("d2t of another vocabulary", ("d2t",), _another_vocabulary),
    Fault("t2d of another map", ("d2t",), _weight("t2d", lambda t: t.roll(1))),
    # taps
    Fault("taps one on", ("taps",), _taps(lambda h: [t + 1 for t in h.taps])),
    Fault("taps one back", ("taps",), _taps(lambda h: [t - 1 for t in h.taps])),
    Fault("taps the first three", ("taps",), _taps(lambda h: [0, 1, 2])),
    Fault("highest tap is the last layer", ("taps",), _taps(lambda h: [*h.taps[:-1], h.layers])),
    Fault("taps doubled", ("taps",), _taps(lambda h: [h.taps[0], h.taps[0], h.taps[2]]), measured=False),
    Fault("taps out of range", ("taps",), _taps(lambda h: [*h.taps[:-1], h.layers + 9]), measured=False),
    Fault("one tap too many", ("taps",), _taps(lambda h: [*h.taps, h.layers]), measured=False),
    # norms
    Fault("norm_before_residual flipped", ("norm_before_residual",), _flip("norm_before_residual")),
    Fault("norm_output flipped", ("norm_output",), _flip("norm_output")),
    Fault("norm before fc dropped", ("norm_before_fc",), _no_fc_norm),
    Fault("norm before fc unflagged", ("norm_before_fc",), _unflagged),
    Fault("hidden_norm <-> norm", ("norm_names",), _swap(HIDDEN_NORM, r"(^|model\.)norm\.weight")),
    Fault("norm weights minus one", ("rms_norm_offset",), _norms(lambda t: t - 1)),
    Fault("all norms ones", ("norm_names", "norms"), _norms(torch.ones_like)),
    # the layer
    Fault("k <-> v", ("qkv",), _swap(ATTN + r"k_proj\.weight", ATTN + r"v_proj\.weight")),
    Fault("gate <-> up", ("gate_up",), _swap(MLP + r"gate_proj\.weight", MLP + r"up_proj\.weight")),
    Fault("halves of qkv", ("layer_input",), _halves),
    Fault("rotary pairs interleaved", ("rope_layout",), _pairs),
    Fault("o_proj transposed", ("transposed",), _weight(ATTN + r"o_proj\.weight", lambda t: t.T)),
    Fault("fc transposed", ("transposed",), _weight(r"fc\.weight", lambda t: t.T)),
    Fault("slices of fc 2 1 0", ("slice_order",), _weight(r"fc\.weight", _slices([2, 1, 0]))),
    Fault("slices of fc 0 2 1", ("slice_order",), _weight(r"fc\.weight", _slices([0, 2, 1]))),
    Fault("hidden_act gelu", ("hidden_act",), _field("hidden_act", "gelu", nested=True)),
    # positions
    Fault("rope_theta 100", ("rope_theta",), _theta(100.0)),
    Fault("rope_theta 10,000,000", ("rope_theta",), _theta(1e7), measured=False),
    Fault("rope_scaling linear 8", ("rope_type", "rope_theta"), _scaling),
    Fault("positions that stand still", ("rope_step",), lambda h: h.declare(rope_step=0)),
    # ends
    Fault("head missing", ("head",), _drop(r"lm_head\.weight"), measured=False),
    Fault("head untrained", ("head",), _weight(r"lm_head\.weight", _noise)),
    Fault("tied", ("head",), _field("tie_word_embeddings", True), measured=False),
    Fault("random embedding stored", ("embedding",), _embedding),
    # names and shapes
    Fault("fc under another name", ("name of fc", "taps"), _rename(r"fc\.weight", "fusion.weight")),
    Fault("hidden_norm under another name", ("name of hidden_norm",), _rename(HIDDEN_NORM, "midlayer.h_norm.weight")),
    Fault("down_proj missing", ("tensors",), _drop(FIRST + r"mlp\.down_proj\.weight"), measured=False),
    Fault("fc untrained", ("tensors", "fc"), _weight(r"fc\.weight", _noise), measured=False),
    Fault("NaN in fc", ("tensors",), _weight(r"fc\.weight", _nan), measured=False),
    Fault("wrong number of heads", ("tensors",), _field("num_attention_heads", 8, nested=True), measured=False),
    Fault("draft_vocab_size absent", ("d2t", "head"), _field("draft_vocab_size", ...), measured=False),
    Fault("vocab_size of another target", ("vocab",), _vocab, measured=False),
    # the launch
    Fault("SGLang: EAGLE", ("launch",), launch=SGLANG + "--speculative-algorithm EAGLE", measured=False),
    Fault("SGLang: no algorithm", ("launch",), launch=SGLANG + "--speculative-num-steps 3", measured=False),
    Fault("vLLM: eagle", ("launch",), launch=VLLM + """'{"method": "eagle", "model": "draft"}'""", measured=False),
    Fault("vLLM: not JSON", ("launch",), launch=VLLM + "method=eagle3", measured=False),
    Fault("weights of a dummy", ("launch",), launch=SGLANG + "--speculative-algorithm EAGLE3 --load-format dummy",
          measured=False),
    # recorded features
    Fault("states one token late", ("state_shift",), measured=False,
          data=_states(lambda m, tap: _within(m, m.states[tap], -1))),
    Fault("states one token early", ("state_shift",), measured=False,
          data=_states(lambda m, tap: _within(m, m.states[tap], 1))),
    Fault("features of other taps", ("taps",), data=_states(lambda m, tap: m.states[tap + 1]), measured=False),
    Fault("features on another scale", ("taps",), data=_states(lambda m, tap: m.states[tap] / 3), measured=False),
    Fault("labels one token on", ("label_shift",), measured=False,
          data=lambda m: replace(m, choice=_within(m, m.choice, 1))),
    Fault("labels of another model", ("label_shift",), measured=False,
          data=lambda m: replace(m, choice=m.choice.roll(1000))),
    # harmless
    Fault("target's embedding times sqrt(H)", (), _scaled_embedding, measured=False, harmless=True),
    Fault("embedding scale declared", (), lambda h: h.declare(embedding_scale=24.0), measured=False, harmless=True),
    Fault("draft ids in another order", (), _another_order, measured=False, harmless=True),
    Fault("features as they should be", (), data=lambda m: m, measured=False, harmless=True),
)  # fmt: skip
BY_NAME = {fault.name: fault for fault in FAULTS}
