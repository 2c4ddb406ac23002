"""Target: the loaded model, its tapped states and its head.

    target = Target.load(resolve_target(None))
    taps, final = target.states(ids, lengths, taps=(2, 15, 27))

Tap j is the residual stream after j blocks, read by a hook at the entrance of block j, and tap n at the entrance of the
final norm (Hugging Face's hidden_states[n] is already normed).   Exercise it:  pytest tests/test_target_model.py
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from eyas.errors import BadInput, EyasError, OutOfMemory
from eyas.machine import check_device
from eyas.memory import spending
from eyas.target.facts import TargetFacts, read_facts
from eyas.target.gguf import quiet
from eyas.target.head import BlockedHead, greedy_of
from eyas.target.source import with_template

TOO_LARGE = (
    "load it as bfloat16 (--dtype bfloat16, half of float32), spread it over the accelerators (--device auto), or let "
    "a server run it (`eyas regenerate --base-url`, `eyas extract --engine vllm`)"
)

# Names under which families keep their blocks and their final norm inside the decoder.
BLOCKS = ("layers", "h", "blocks", "block")
FINAL_NORM = ("norm", "final_layernorm", "final_layer_norm", "ln_f", "norm_f", "final_norm")


class Target:
    """A frozen causal language model. `states` runs it without its head; `head` turns final states into logits."""

    def __init__(self, model: Any, tokenizer: Any, facts: TargetFacts, folder: Path):
        self.model = model
        self.tokenizer = tokenizer
        self.facts = facts
        self.dir = folder
        self.decoder, self.blocks, self.final_norm = _anatomy(model, facts, folder)
        self._head: nn.Module = model.get_output_embeddings()
        self._head_checked = False

    @classmethod
    def load(
        cls,
        folder: str | Path,
        device: str | torch.device = "cpu",
        dtype: torch.dtype | str = torch.float32,
        trust_remote_code: bool = False,
    ) -> Target:
        """Load model and tokenizer from a Hugging Face folder, frozen, in evaluation mode.

        `device="auto"` spreads the model over all accelerators. Raises EyasError naming the folder when transformers
        cannot load it.
        """
        from transformers import AutoTokenizer

        folder = Path(folder)
        if str(device) != "auto":
            device = check_device(device)
        facts = read_facts(folder)
        options: dict[str, Any] = {"local_files_only": True, "trust_remote_code": trust_remote_code}
        loading = f"loading the target {folder} as {str(dtype).removeprefix('torch.')} on {device}"
        with quiet():
            try:
                tokenizer = with_template(AutoTokenizer.from_pretrained(folder, **options), folder)
                spread = {"device_map": "auto"} if str(device) == "auto" else {}
                with spending(loading, TOO_LARGE):
                    model: Any = _model_class(folder, options).from_pretrained(folder, dtype=dtype, **options, **spread)
            except OutOfMemory:
                raise
            except Exception as error:
                hint = "" if trust_remote_code else _remote_code_hint(error)
                remedy = hint or "; download it again, or update transformers"
                raise EyasError(f"{folder}: transformers cannot load this target ({error}){remedy}") from error
            if not spread:
                with spending(loading, TOO_LARGE):
                    model = model.to(device)
        return cls(model.eval().requires_grad_(False), tokenizer, facts, folder)

    @property
    def device(self) -> torch.device:
        """Where ids go in."""
        return next(self.decoder.parameters()).device

    @torch.no_grad()
    def states(
        self, ids: torch.Tensor, lengths: torch.Tensor | Sequence[int] | None = None, taps: Sequence[int] | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Residual streams at `taps` and the final state of a batch padded on the right.

        ids: int [B, L], padded with any valid id; lengths: [B] tokens of each row (None: no padding); taps: ascending,
        default `facts.default_taps`. Returns (taps [B, L, T*H], final [B, L, H]) in the model's dtype; rows at and past
        a sequence's length mean nothing. Attention is causal and positions count from 0, so right padding cannot reach
        a real row and no attention mask is needed. The head is not run. Raises BadInput for impossible taps, ids or
        lengths.
        """
        chosen = self.facts.check_taps(self.facts.default_taps if taps is None else list(taps))
        self._check(ids, lengths)
        with self.recording(chosen) as seen:
            out = self.decoder(input_ids=ids.to(self.device, torch.long), use_cache=False)
        final = out.last_hidden_state  # [B, L, H]
        missing = [t for t in chosen if t not in seen]
        if missing or any(seen[t].shape != final.shape for t in chosen):
            raise EyasError(
                f"{self.dir}: a {self.facts.model_type} does not show its residual stream at taps "
                f"{missing or list(chosen)} as one tensor [B, L, H]; this family is not supported; let an engine "
                "compute the states (eyas extract --engine vllm)"
            )
        return torch.cat([seen[t].to(final.device) for t in chosen], -1), final  # [B, L, T*H], [B, L, H]

    @torch.no_grad()
    def head(self, final: torch.Tensor) -> torch.Tensor:
        """Logits from final states, scale and soft-cap applied: [..., H] -> [..., V] in the model's dtype.

        The first call compares them with what the model itself says for a few ids. Raises EyasError where its family
        makes logits in another way than `facts` knows.
        """
        if not self._head_checked:
            self._check_head()
        return self._logits(final)

    @torch.no_grad()
    def choices(self, final: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The target's choice and logsumexp over all V ids: final [R, H] -> (int32 [R], float32 [R]) on the CPU.

        Raises EyasError as `head` does.
        """
        if not self._head_checked:
            self._check_head()
        weight = getattr(self._head, "weight", None)
        if type(self._head) is nn.Linear and weight is not None and weight.device.type != "meta":
            blocked = BlockedHead(weight, self._head.bias, self.facts)
            best, total = blocked.greedy(final.to(weight.device, weight.dtype))
        else:  # quantised, or moved here for each call by accelerate
            best, total = greedy_of(self._logits, final, self.facts.vocab_size)
        assert total is not None
        return best.to(torch.int32).cpu(), total.cpu()

    def _logits(self, final: torch.Tensor) -> torch.Tensor:
        weight = next(self._head.parameters())
        return self.facts.finish_logits(self._head(final.to(weight.device, weight.dtype)))

    def _check_head(self) -> None:
        ids = torch.arange(4, device=self.device)[None] % self.facts.vocab_size  # [1, 4]
        mine = self._logits(self.decoder(input_ids=ids, use_cache=False).last_hidden_state).float()
        theirs = self.model(input_ids=ids, use_cache=False).logits.float()  # [1, 4, V]
        tolerance = 0.05 if self.model.dtype.itemsize < 4 else 1e-3  # of the largest logit
        if not float((mine - theirs).abs().max()) <= tolerance * float(theirs.abs().max()):
            raise EyasError(
                f"{self.dir}: the logits of this {self.facts.model_type} are not head(final state) with scale "
                f"{self.facts.logit_scale} and soft-cap {self.facts.logit_softcap}, as its config says (largest "
                f"difference {float((mine - theirs).abs().max()):.3g}); this family is not supported as a target; "
                "correct its config, or report the family"
            )
        self._head_checked = True

    @contextlib.contextmanager
    def recording(self, taps: Sequence[int]) -> Iterator[dict[int, torch.Tensor]]:
        """Hooks that keep the input of block `tap`, or of the final norm for tap n."""
        seen: dict[int, torch.Tensor] = {}

        def keep(tap: int) -> Any:
            def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
                seen[tap] = args[0] if args else kwargs["hidden_states"]

            return hook

        places = [self.final_norm if t == self.facts.num_layers else self.blocks[t] for t in taps]
        handles = [m.register_forward_pre_hook(keep(t), with_kwargs=True) for t, m in zip(taps, places, strict=True)]
        try:
            yield seen
        finally:
            for handle in handles:
                handle.remove()

    def _check(self, ids: torch.Tensor, lengths: torch.Tensor | Sequence[int] | None) -> None:
        if ids.ndim != 2 or ids.numel() == 0:
            raise BadInput(f"ids have shape {list(ids.shape)}, expected a non-empty [B, L]")
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high >= self.facts.vocab_size:
            raise BadInput(
                f"ids run from {low} to {high}; the target knows 0 to {self.facts.vocab_size - 1}; use the "
                "tokenizer of this target"
            )
        if lengths is None:
            return
        counts = torch.as_tensor(lengths)
        if counts.shape != ids.shape[:1] or int(counts.min()) < 1 or int(counts.max()) > ids.shape[1]:
            raise BadInput(
                f"lengths {counts.tolist()} do not fit ids of shape {list(ids.shape)}: one a row, 1 to L; give one "
                "length a row"
            )


def _model_class(folder: Path, options: dict[str, Any]) -> Any:
    """The auto class that knows this family: that of language models, else that of models for text with images."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    config = AutoConfig.from_pretrained(folder, **options)
    # The keys of an auto class are private to transformers; a family without one is told by the error of the first.
    known = {auto: type(config) in auto._model_mapping for auto in (AutoModelForCausalLM, AutoModelForImageTextToText)}
    remote = "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {})
    language_only = remote or known[AutoModelForCausalLM] or not known[AutoModelForImageTextToText]
    return AutoModelForCausalLM if language_only else AutoModelForImageTextToText


def _anatomy(model: Any, facts: TargetFacts, folder: Path) -> tuple[nn.Module, nn.ModuleList, nn.Module]:
    """Decoder, its blocks and its final norm. Raises EyasError for a family built otherwise."""
    decoder = model.get_decoder()
    inner: Any
    for inner in (decoder, getattr(decoder, "decoder", None), getattr(decoder, "model", None)):
        blocks = next((b for n in BLOCKS if isinstance(b := getattr(inner, n, None), nn.ModuleList)), None)
        norm = next((m for n in FINAL_NORM if isinstance(m := getattr(inner, n, None), nn.Module)), None)
        if blocks is not None and norm is not None and len(blocks) == facts.num_layers:
            # A wrapper's language model may be one with a head, whose inside returns states.
            return (inner if hasattr(decoder, "lm_head") else decoder), blocks, norm
    raise EyasError(
        f"{folder}: no {facts.num_layers} blocks followed by a final norm in a {type(decoder).__name__}; this "
        "family is not supported as a target; let an engine compute the states (eyas extract --engine vllm)"
    )


def _remote_code_hint(error: Exception) -> str:
    needs = "trust_remote_code" in str(error)
    return "; it brings its own code: read that, then allow it with trust_remote_code" if needs else ""
