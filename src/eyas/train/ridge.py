"""Ridge regression of many unknowns in bounded memory: normal equations, or the rows' square where they are fewer.

ridge = Gram(unknowns, outputs); ridge.add(x, y); weights, *_ = ridge.solve(wide)
Exercise it:  pytest tests/test_train_linear.py
"""

from __future__ import annotations

import torch

RIDGE = 1e-2  # of the mean diagonal: keeps directions that the inputs hardly use near zero
BLOCK = 4096  # rows that are multiplied out at once
PANEL = 2048  # unknowns that are factored at once


def keeps_rows(unknowns: int, rows: int) -> bool:
    """Are so few rows that a square of them is smaller than one of the unknowns?"""
    return 2 * rows <= unknowns


def fit_bytes(unknowns: int, outputs: int, rows: int) -> int:
    """What the regression holds at most: a float64 square, its right side, and (of few rows) the rows themselves.

    While it multiplies and factors, a strip of BLOCK or PANEL rows comes on top.
    """
    side = rows if keeps_rows(unknowns, rows) else unknowns
    strip = max(4 * BLOCK * (unknowns + outputs), 8 * PANEL * side)
    kept = 8 * rows * (unknowns + outputs) if side == rows else 0  # in blocks, then in one piece
    return 8 * side * (side + outputs) + kept + strip


class Gram:
    """Normal equations: (X^T X + strength I) W^T = X^T Y, float64, of which only the lower triangle is filled."""

    strength = 0.0

    def __init__(self, unknowns: int, outputs: int) -> None:
        self.gram = torch.zeros(unknowns, unknowns, dtype=torch.float64)
        self.cross = torch.zeros(unknowns, outputs, dtype=torch.float64)
        self.total = torch.zeros(unknowns, dtype=torch.float64)

    def add(self, x: torch.Tensor, y: torch.Tensor) -> None:
        """Rows x float32 [n, unknowns], y float32 [n, outputs]."""
        _add_gram(self.gram, x)
        self.cross.add_(x.T @ y)
        self.total.add_(x.sum(0))

    def solve(self, wide: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """W float32 [outputs, unknowns]; X_t^T X_t and the sum of X_t, float64, X_t the columns from `wide` on."""
        token_gram, token_sum = self.gram[wide:, wide:].clone(), self.total[wide:]
        self.strength = _strength(float(self.gram.diagonal().sum()), len(self.gram))
        self.gram.diagonal().add_(self.strength)
        return solve_in_place(self.gram, self.cross).T.float(), token_gram, token_sum


class Rows:
    """The same of fewer rows than unknowns: W = Y^T (X X^T + strength I)^-1 X, exactly the same numbers."""

    strength = 0.0

    def __init__(self, unknowns: int, outputs: int) -> None:
        self.x, self.y = [torch.empty(0, unknowns)], [torch.empty(0, outputs)]

    def add(self, x: torch.Tensor, y: torch.Tensor) -> None:
        """Rows x float32 [n, unknowns], y float32 [n, outputs]."""
        self.x.append(x)
        self.y.append(y)

    def solve(self, wide: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """As `Gram.solve`."""
        x, y = torch.cat(self.x), torch.cat(self.y).double()
        self.x, self.y = [], []
        gram = torch.zeros(len(x), len(x), dtype=torch.float64)
        _add_gram(gram, x.T)
        self.strength = _strength(float(gram.diagonal().sum()), x.shape[1])
        gram.diagonal().add_(self.strength)
        weights = solve_in_place(gram, y).float()  # [n, outputs]
        token = x[:, wide:]
        token_gram = torch.zeros(token.shape[1], token.shape[1], dtype=torch.float64)
        _add_gram(token_gram, token)
        return weights.T @ x, token_gram, token.sum(0).double()


def _strength(trace: float, unknowns: int) -> float:
    return RIDGE * trace / unknowns + 1e-12


def _add_gram(gram: torch.Tensor, x: torch.Tensor) -> None:
    """gram float64 [u, u] += x^T x of float32 x [n, u], in the lower triangle of panels, a panel of rows at a time."""
    for a in range(0, len(gram), PANEL):
        b = a + PANEL
        gram[a:b, :b] += x[:, a:b].T @ x[:, :b]


def solve_in_place(matrix: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """`right` becomes matrix^-1 right: float64 [n, n], of which the lower triangle of panels is read, and [n, m].

    Cholesky, panel by panel, where the matrix lies: the library's takes two copies of it, and at 28,672 unknowns (taps
    and token of 7,168 each) one is 6.6 GB. Both arguments are overwritten.
    """
    n = len(matrix)
    panels = [(a, min(a + PANEL, n)) for a in range(0, n, PANEL)]
    for i, (a, b) in enumerate(panels):
        own = matrix[a:b, a:b].copy_(torch.linalg.cholesky(matrix[a:b, a:b]))
        below = torch.linalg.solve_triangular(own, matrix[b:, a:b].T, upper=False).T.contiguous()  # [n - b, b - a]
        matrix[b:, a:b] = below
        for c, d in panels[i + 1 :]:
            matrix[c:d, b:d].addmm_(below[c - b : d - b], below[: d - b].T, alpha=-1)
    for a, b in panels:
        right[a:b].addmm_(matrix[a:b, :a], right[:a], alpha=-1)
        right[a:b] = torch.linalg.solve_triangular(matrix[a:b, a:b], right[a:b], upper=False)
    for a, b in reversed(panels):
        right[a:b].addmm_(matrix[b:, a:b].T, right[b:], alpha=-1)
        right[a:b] = torch.linalg.solve_triangular(matrix[a:b, a:b].T, right[a:b], upper=True)
    return right
