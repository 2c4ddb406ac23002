"""TrainSettings: everything that can be chosen about training. Needs no torch, so that a recipe is checked at once."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator


class TrainSettings(BaseModel):
    """How a draft is trained. The defaults suit a small target on CPU; docs/experiments.md says what was measured."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    epochs: float = Field(default=3.0, gt=0)
    """Passes over the features; ignored when `steps` is given."""
    steps: int | None = Field(default=None, ge=1)
    """Optimizer steps."""
    batch_tokens: int = Field(default=512, ge=1)
    """Tokens of one optimizer step, prompts included. While text is scarce, many small steps learn more from it than a
    few large ones; raise it with `lr` where a device is not kept busy."""
    micro_tokens: int = Field(default=4096, ge=1)
    """Tokens of one forward; smaller than `batch_tokens` accumulates gradients."""
    ttt_steps: int = Field(default=5, ge=1)
    """Steps that the draft is unrolled on its own states (7 in the paper). Serve at most about as many draft tokens."""
    decay: float = Field(default=0.8, gt=0, le=1)
    """Weight of step k is decay**k."""

    optimizer: Literal["muon", "adamw"] = "muon"
    """Muon for the matrices inside the model and AdamW for the rest, or AdamW for all."""
    lr: float = Field(default=1e-3, gt=0)
    """Peak learning rate of the matrices; a draft that begins at random wants 2e-3."""
    head_lr: float = Field(default=1e-3, gt=0)
    """Peak learning rate of the head and the norms."""
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = Field(default=0.0, ge=0)
    clip: float = Field(default=1.0, gt=0)
    """Largest gradient norm."""
    warmup: float = Field(default=0.05, ge=0, lt=1)
    """Share of the steps in which the learning rate rises; after it a cosine falls to `final_lr`."""
    final_lr: float = Field(default=0.0, ge=0, le=1)
    """Learning rate at the end, as a share of the peak."""
    train_head: bool = True
    """Train the draft's head; otherwise it stays the target's rows."""
    dtype: Literal["auto", "float32", "bfloat16"] = "float32"
    """Precision of the matrix products; weights and optimizer are float32 always. `auto`: bfloat16 where the machine
    has instructions for it."""
    recompute: bool = False
    """Keep no activations inside an unrolled step and make them again in the backward pass: a third slower, for
    contexts whose activations do not fit."""
    parallel: Literal["ddp", "fsdp"] = "ddp"
    """Under torchrun: every process holds the whole draft, or (FSDP2) weights, gradients and optimizer in shards."""
    head_chunk: int = Field(default=2048, ge=1)
    """Rows whose exponentials over the draft vocabulary are held, until they are multiplied for the gradients; fewer
    where the vocabulary is large."""

    start: Literal["regression", "target", "random"] = "regression"
    """Initial weights: head and norm from the target, `fc` and a few heads by regression on the features, so that the
    draft begins as the best linear guess from taps and token; without the regression; or all random."""
    start_rows: int = Field(default=100_000, ge=1)
    """Supervised rows that the regression reads, for a few thousand unknowns each; with 30,000 a draft for SmolLM2
    begins 0.026 of τ lower."""
    init_from: str | None = None
    """A draft to go on from: its weights, conventions and vocabulary map are kept, and `start` is ignored."""
    change: dict[str, bool | int | float | str | None] = Field(default_factory=dict)
    """Conventions that a draft that goes on is trained under from now on, for an engine that knows no others:
    `change.norm_before_residual=false`. Only such as need no other weights (train/inputs.py, CHANGEABLE)."""
    intermediate_size: int | None = Field(default=None, ge=1)
    """Width of the draft's MLP; the target's when absent."""
    hidden_size: int | None = Field(default=None, ge=2)
    """Width of the draft; the target's when absent. A draft of another width owns its embedding, a fixed projection of
    the target's. SGLang, vLLM and llama.cpp run it."""
    num_layers: int = Field(default=1, ge=1)
    """Decoder layers; SGLang and vLLM run several."""
    qk_norm: bool = False
    """Norms on the heads of q and k, as in Qwen3; vLLM and speculators know them."""
    norm_before_fc: bool = True
    """One norm over the concatenated taps (EAGLE-3.1 style; read by SGLang, vLLM and llama.cpp)."""
    fc_norm: bool = False
    norm_output: bool = False
    norm_before_residual: bool = False
    """SGLang cannot express it."""

    eval_every: int = Field(default=100, ge=1)
    """Optimizer steps between measurements on the held-out features."""
    eval_draft_tokens: int = Field(default=4, ge=1)
    """Draft tokens a round (K) in the predicted accept length."""
    save_every: int = Field(default=50, ge=1)
    """Optimizer steps between checkpoints."""
    keep: int = Field(default=2, ge=1)
    """Checkpoints kept."""
    track: tuple[Literal["tensorboard", "wandb", "trackio"], ...] = ("tensorboard",)
    """Where metrics go beside metrics.jsonl; the last two are packages of their own. `[]`: nowhere."""

    @field_validator("track", mode="before")
    @classmethod
    def _names(cls, value: Any) -> Any:
        """`wandb,trackio` is a list, too; a name given twice counts once."""
        names = [part.strip() for part in value.split(",") if part.strip()] if isinstance(value, str) else value
        return tuple(dict.fromkeys(names)) if isinstance(names, list | tuple) else names

    @model_validator(mode="after")
    def _coherent(self) -> TrainSettings:
        if self.norm_before_fc and self.fc_norm:
            raise ValueError("norm_before_fc and fc_norm exclude each other: a draft has one of them")
        if self.change and not self.init_from:
            raise ValueError("change says what a given draft goes over to: it goes with init_from")
        return self
