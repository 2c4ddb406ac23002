"""What forward_vllm.py and forward_sglang.py read and write: the rows of a document, each a sequence of its own.

Beside a DRAFT lies `inputs.safetensors`: `ids` [L], `taps` [L, T*Ht], `embedding` [V, H] of the target, `steps`: K.
Row r (0 ... L - K - 1) becomes a sequence: step 0 runs the rows 0 ... r of the document, as after a prefill, and each
later step one more token behind them, as in drafting. `out.safetensors`: `logits` [K, R, V], with -inf for ids that the
draft cannot say, and `state` [K, R, H], what is fed back. Imported under an engine's Python; needs only torch.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file


class Rows:
    """The sequences of one document: what goes into each step, and what came out of it."""

    def __init__(self, draft: Path) -> None:
        self.draft = draft
        given = load_file(draft.with_name("inputs.safetensors"))
        self.embedding, self.steps = given["embedding"], int(given["steps"])
        self._ids, self._taps = given["ids"].long(), given["taps"]
        self.count = len(self._ids) - self.steps
        self.lengths = torch.arange(1, self.count + 1)  # tokens of each sequence at step 0
        self.capacity = len(self._ids)  # tokens that the longest of them ever has
        self.positions = torch.cat([torch.arange(n) for n in self.lengths.tolist()])  # of step 0, sequences in a row
        self.last = self.lengths.cumsum(0) - 1  # where each sequence's last token lies among them
        self.logits: list[torch.Tensor] = []
        self.state: list[torch.Tensor] = []

    def first(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Step 0: (ids, taps) of all tokens of all sequences; row i reads the token i + 1."""
        return self._ids[self.positions + 1], self._taps[self.positions]

    def later(self, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Step k: (id, position) of each sequence's one token."""
        rows = torch.arange(self.count)
        return self._ids[rows + 1 + k], rows + k

    def keep(self, logits: torch.Tensor, state: torch.Tensor) -> None:
        """Note a step; copied, because engines add to their tensors in place."""
        self.logits.append(logits.float().clone())
        self.state.append(state.float().clone())

    def save(self) -> None:
        save_file(
            {"logits": torch.stack(self.logits), "state": torch.stack(self.state)},
            self.draft.with_name("out.safetensors"),
        )
