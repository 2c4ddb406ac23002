"""Our forward, at step 0 and later ones, against the engines' own draft classes, on tiny random drafts in float32.

Every option on every engine, and the profile is the judge of what is to be expected: where it says that the engine runs
a draft as it was trained, the numbers are ours. Where it says that the engine runs another model, they are not, but
they are those of our draft under the conventions that the profile reads. Where it says "does not start", so it is.

    make test-engines
"""

from __future__ import annotations

import functools
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from variants import build_latent_target, build_target

from drafts import make_draft, with_embedding
from eyas.conventions import Conventions
from eyas.draft.checkpoint import load_draft, save_draft
from eyas.draft.files import open_folder
from eyas.draft.model import Draft
from eyas.draft.unroll import Packing, Unroll
from eyas.engines.compare import differences
from eyas.engines.environment import LOADERS, ready
from eyas.engines.profiles import profile
from eyas.engines.reading import GARBAGE, EngineReading, Seen
from eyas.export import export_draft
from eyas.target.facts import read_facts
from eyas.vocab import VocabMap

pytestmark = pytest.mark.engine
ENGINES = ("vllm", "sglang")
LENGTH, STEPS = 40, 4
# Of the largest number: float32 sums in another order, amplified by every layer and step. Our own forward is apart from
# itself in float64 by 3e-6 for the plain draft, and by 7e-5 after four steps of three layers.
TOLERANCE = 1e-4
# Widths that engines do not pad, a head of 32 (the smallest that vLLM's attention on a CPU knows), and heads that are
# together wider than the stream, so that no two sizes can be mistaken for each other.
SIZES = {"hidden_size": 64, "target_hidden_size": 64, "intermediate_size": 128, "num_heads": 4, "num_kv_heads": 2,
         "head_dim": 32, "vocab_size": 320, "draft_vocab_size": 64}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A draft: what differs from the contract's plain one."""

    conventions: dict[str, Any] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    """Fields of the exported config.json that are written over."""


SCALED = {"factor": 4.0, "original_max_position_embeddings": 64}  # positions up to 256, as make_draft's
LLAMA3 = {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}
# vLLM's class with norms on the heads of q and k; no other engine knows the name.
QWEN3 = {"architectures": ["Eagle3Qwen3ForCausalLM"], "model_type": "qwen3"}
# vLLM's attention over latents on a CPU knows these two sizes alone. SGLang's class asks for CUDA.
LATENT = {"q_lora_rank": 48, "kv_lora_rank": 512, "qk_nope_head_dim": 24, "qk_rope_head_dim": 64, "v_head_dim": 40}
CASES = {
    "plain": Case(),
    "full_vocabulary": Case(sizes={"draft_vocab_size": 320}),
    "norm_before_residual": Case({"norm_before_residual": True}),
    "norm_before_fc": Case({"norm_before_fc": True}),
    "fc_norm": Case({"fc_norm": True}),
    "norm_output": Case({"norm_output": True}),
    "fc_norm_norm_output": Case({"fc_norm": True, "norm_output": True}),
    "fc_bias": Case({"fc_bias": True}),
    "attention_bias": Case({"attention_bias": True}),
    "mlp_bias": Case({"mlp_bias": True}),
    "qk_norm": Case({"qk_norm": True}),
    "qwen3": Case({"qk_norm": True}, config=QWEN3),
    "qwen3_without_norms": Case(config=QWEN3),
    "qwen3_attention_bias": Case({"qk_norm": True, "attention_bias": True}, config=QWEN3),
    "qwen3_three_layers": Case({"qk_norm": True, "norm_before_residual": True}, {"num_layers": 3}, QWEN3),
    "qwen3_four_taps": Case(
        {"qk_norm": True, "taps": (1, 3, 5, 6), "fc_norm": True, "norm_output": True}, {"num_taps": 4}, QWEN3
    ),
    "logit_scale": Case({"logit_scale": 0.5}),
    "rms_norm_eps": Case({"rms_norm_eps": 0.1}),
    "gelu": Case({"hidden_act": "gelu"}),
    "own_embedding": Case({"embedding": "own"}),
    "another_width": Case({"embedding": "own"}, {"target_hidden_size": 96}),
    "one_key_head": Case(sizes={"num_kv_heads": 1}),
    "two_layers": Case(sizes={"num_layers": 2}),
    "three_layers_norm_before_residual": Case({"norm_before_residual": True}, {"num_layers": 3}),
    "four_taps": Case({"taps": (1, 3, 5, 6)}, {"num_taps": 4}),
    "one_tap": Case({"taps": (5,)}, {"num_taps": 1}),
    "sliding_window": Case({"sliding_window": 8}),
    "rope_theta": Case({"rope_theta": 5e5}),
    "rope_partial": Case({"partial_rotary_factor": 0.5}),
    "rope_linear": Case({"rope_type": "linear", "rope_scaling": {"factor": 4.0}}),
    "rope_llama3": Case({"rope_type": "llama3", "rope_scaling": LLAMA3}),
    "rope_dynamic": Case({"rope_type": "dynamic", "rope_scaling": {"factor": 4.0}}),
    "rope_yarn": Case({"rope_type": "yarn", "rope_scaling": SCALED}),
    "rope_yarn_partial": Case({"rope_type": "yarn", "rope_scaling": SCALED, "partial_rotary_factor": 0.5}),
    "latent": Case(sizes=LATENT),
    "latent_norms": Case({"fc_norm": True, "norm_output": True, "norm_before_residual": True}, LATENT),
    "latent_yarn": Case(
        {"rope_type": "yarn", "rope_scaling": {**SCALED, "mscale": 1.0, "mscale_all_dim": 1.0}}, LATENT
    ),
    "latent_yarn_mscale": Case(
        {"rope_type": "yarn", "rope_scaling": {**SCALED, "mscale": 0.7, "mscale_all_dim": 1.3}}, LATENT
    ),
    "latent_two_layers": Case(sizes={**LATENT, "num_layers": 2}),
    "rope_yarn_attention": Case({"rope_type": "yarn", "rope_scaling": {**SCALED, "attention_factor": 1.5}}),
}


@pytest.fixture(scope="session")
def places(tmp_path_factory) -> tuple[dict[bool, Path], dict[str, Path]]:
    """(has it latent attention -> target, case -> folder of `trained`, `draft` and `inputs.safetensors`)"""
    root = tmp_path_factory.mktemp("forward")
    targets = {False: build_target(root / "target"), True: build_latent_target(root / "latent_target")}
    return targets, {name: build(case, root / name) for name, case in CASES.items()}


def build(case: Case, folder: Path) -> Path:
    """The draft as it was trained, its canonical directory for the engines, and a document with random taps."""
    draft, vocab_map = make_draft(3, {**SIZES, **case.sizes}, **case.conventions)
    if draft.conventions.embedding == "own":
        with_embedding(draft, seed=8)
    save_draft(draft, vocab_map, folder / "trained")
    if draft.shape.mla is None:
        export_draft(folder / "trained", folder / "draft", dtype="keep")
    else:  # written as trained: no export rewrites these
        shutil.copytree(folder / "trained", folder / "draft", ignore=shutil.ignore_patterns("eyas*"))
    if case.config:
        file = folder / "draft" / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | case.config))
    generator = torch.Generator().manual_seed(0)
    inputs = {
        "ids": torch.randint(0, draft.shape.vocab_size, (LENGTH,), generator=generator),
        "taps": torch.randn(LENGTH, draft.fc.in_features, generator=generator),
        "embedding": with_embedding(make_draft(0, SIZES)[0]),
        "steps": torch.tensor([STEPS]),
    }
    save_file(inputs, folder / "inputs.safetensors")
    return folder


@pytest.fixture(scope="session")
def ran(places) -> Callable[[str], dict[str, dict[str, Any]]]:
    """Engine -> case -> {"raises": ..., "logits": [K, R, V], "state": [K, R, H]}; each engine is started once."""
    targets, folders = places

    @functools.cache
    def ask(engine: str) -> dict[str, dict[str, Any]]:
        environment = ready(engine)
        assert environment is not None, f"run `eyas engines setup {engine}` (make test-engines does)"
        environment = replace(environment, variables={**environment.variables, "PYTHONPATH": os.fspath(LOADERS)})
        script = Path(__file__).with_name(f"forward_{engine}.py")
        reports: dict[str, Any] = {}
        for latent, target in targets.items():  # an engine runs latent attention beside a target that has it, too
            names = [name for name in folders if latent == is_latent(name) and can_run(engine, name)]
            drafts = [folders[name] / "draft" for name in names]
            if drafts:
                said = environment.run(script, [*drafts, "--target", target], timeout=1800)
                reports |= dict(zip(names, said, strict=True))
        out = {}
        for name, report in reports.items():
            written = folders[name] / "out.safetensors"
            out[name] = {"raises": report["raises"], **(load_file(written) if written.exists() else {})}
            written.unlink(missing_ok=True)  # the next engine's is not to be mistaken for this one's
        return out

    return ask


def is_latent(case: str) -> bool:
    """Has this case latent attention?"""
    return "kv_lora_rank" in CASES[case].sizes


def can_run(engine: str, case: str) -> bool:
    """On a CPU."""
    return engine == "vllm" or not is_latent(case)


@pytest.mark.parametrize(("engine", "case"), [(e, c) for e in ENGINES for c in CASES if can_run(e, c)])
def test_the_forward_is_ours_exactly_where_the_profile_says_so(engine: str, case: str, places, ran):
    targets, folders = places
    folder, target = folders[case], targets[is_latent(case)]
    reading = profile(engine).read(Seen(open_folder(folder / "draft"), read_facts(target)))
    theirs = ran(engine)[case]
    if not reading.starts:
        assert theirs["raises"] is not None, f"the profile says: {reading.failure}"
        assert theirs["raises"]["type"] == reading.failure.error, theirs["raises"]
        return
    assert theirs["raises"] is None, theirs["raises"]
    draft, vocab_map, _ = load_draft(folder / "trained")
    inputs = load_file(folder / "inputs.safetensors")
    other = differences(draft.conventions, reading)
    apart = worst(unrolled(draft, vocab_map, inputs), theirs)
    if not other:
        assert apart < TOLERANCE, f"apart by {apart:.1e}, but the profile says that it runs what was trained"
        return
    assert apart > 100 * TOLERANCE, f"it runs what was trained, but the profile says: {other}"
    chance = [name for name, p in reading.unfilled().items() if p.instead == GARBAGE]
    if not chance and not reading.surprises:
        apart = worst(unrolled(as_run(draft, reading), vocab_map, inputs), theirs)
        assert apart < TOLERANCE, f"apart by {apart:.1e}, but the profile says that {other} is all there is"


@pytest.mark.parametrize(
    "flipped", [{"norm_before_residual": True}, {"norm_output": True}, {"layer_input": "state_embedding"}], ids=str
)
@pytest.mark.parametrize("engine", ENGINES)
def test_another_convention_would_be_seen(engine: str, flipped: dict[str, Any], places, ran):
    folder = places[1]["plain"]
    draft, vocab_map, _ = load_draft(folder / "trained")
    other = Draft(draft.shape, draft.conventions.with_(**flipped))
    other.load_state_dict(draft.state_dict())
    mine = unrolled(other.eval(), vocab_map, load_file(folder / "inputs.safetensors"))
    assert worst(mine, ran(engine)["plain"]) > 100 * TOLERANCE


def as_run(draft: Draft, reading: EngineReading) -> Draft:
    """The draft under the conventions that an engine reads, and without the tensors that it drops."""
    c = draft.conventions
    biases = {name: getattr(c, name) for name in ("fc_bias", "attention_bias", "mlp_bias")}  # one that is dropped is 0
    run = Draft(draft.shape, Conventions(**{"taps": c.taps, **reading.values, **biases}))
    state = {n: t * 0 if n in reading.dropped else t for n, t in draft.state_dict().items()}
    run.load_state_dict({name: state.get(name, made) for name, made in run.state_dict().items()})  # norms: ones
    if draft.embed_tokens is not None and run.conventions.embedding == "own":
        run.set_embedding(draft.embed_tokens.weight)
    return run.eval()


def worst(mine: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    """The largest difference of logits or states at any step, as a share of the largest number; inf for other ids."""
    sayable = mine["logits"].isfinite()
    if not torch.equal(sayable, theirs["logits"].isfinite()):
        return float("inf")
    pairs = [(mine["logits"][sayable], theirs["logits"][sayable]), (mine["state"], theirs["state"])]
    return max(float((a - b).abs().max() / a.abs().max()) for a, b in pairs)


@torch.inference_mode()
def unrolled(draft: Draft, vocab_map: VocabMap, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What forward_rows.py's `out.safetensors` holds, of our draft, teacher-forced."""
    if draft.conventions.embedding == "target":
        draft.set_embedding(inputs["embedding"])
    rows = torch.arange(LENGTH - STEPS)
    unroll = Unroll(draft, Packing(torch.tensor([0, LENGTH])), rows)
    following = torch.cat([inputs["ids"][1:], inputs["ids"][-1:]])
    embedded = unroll.embed(following)
    said = torch.arange(vocab_map.size) + vocab_map.d2t
    h = unroll.start(embedded, inputs["taps"])
    logits, states = [], []
    for k in range(STEPS):
        wide = torch.full((len(rows), draft.shape.vocab_size), float("-inf"))
        logits.append(wide.index_copy(1, said, draft.logits(h)))
        states.append(draft.feedback(h))
        if k + 1 < STEPS:
            h = unroll.step(embedded[rows + k + 1], states[-1])
    return {"logits": torch.stack(logits), "state": torch.stack(states)}
