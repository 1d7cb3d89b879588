"""The tables every test runs over: activations × solvers × problems with known answers.

A row put in the registry appears in `ROWS` at once, alone, weighted, tempered and mixed.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

import taut
from taut.activations import ACTIVATIONS, bounded, mixed, srlu, tempered, weighted

SEED = int(os.environ.get("TAUT_TEST_SEED", "0"))  # set by pytest --seed
K = 5  # rows with one parameter per coordinate have this many


def generator(stream: int) -> torch.Generator:
    """A source of random numbers of its own, which `--seed` changes like all others."""
    return torch.Generator().manual_seed(1000 * SEED + stream)


def _t(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


LOWER, UPPER = _t(-1.0, 0.0, 2.0, -5.0, 0.1), _t(1.0, 3.0, 2.5, 5.0, 0.2)
WEIGHTS = _t(0.5, 1.0, 2.0, 3.0, 0.25)
TEMPERATURES = _t(0.5, 1.0, 2.0, 1.5, 0.75)

#: One of each way to build a row.
DERIVED = {
    "srlu(0.5, 2)": srlu(0.5, 2.0),
    "srlu(2, 2)": srlu(2.0, 2.0),
    "bounded": bounded(-1.0, 3.0),
    "bounded each": bounded(LOWER, UPPER),
    "weighted by a number": weighted("exp", 3.0),
    "tempered by a number": tempered("sigmoid", 0.5),
    "weighted bounded each": weighted(bounded(LOWER, UPPER), WEIGHTS),
    "tempered weighted tanh": tempered(weighted("tanh", WEIGHTS), TEMPERATURES),
    "mixed": mixed(["exp", "sigmoid", "tanh", "linear", "exp"]),
    "mixed of derived": mixed(
        [
            "sigmoid",
            bounded(-2.0, 1.0),
            weighted(bounded(0.0, 2.0), 3.0),
            tempered("tanh", 0.5),
            weighted("tanh", 2.0),
        ]
    ),
    "weighted mixed": weighted(mixed(["exp", "sigmoid", "tanh", "linear", "exp"]), WEIGHTS),
}
ROWS: dict[str, taut.Activation] = {
    **ACTIVATIONS,
    **{f"weighted {name}": weighted(row, WEIGHTS) for name, row in ACTIVATIONS.items()},
    **{f"tempered {name}": tempered(row, TEMPERATURES) for name, row in ACTIVATIONS.items()},
    **DERIVED,
}
#: For what takes long: the paper's table, and every kind of derived row once.
SHORT = {
    **ACTIVATIONS,
    **{
        name: DERIVED[name]
        for name in ("bounded each", "tempered weighted tanh", "mixed of derived")
    },
}


def target(row: taut.Activation, *batch: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Outputs in the interior of the range: what a feasible b is made of."""
    return row.sigma(torch.randn(*batch, K, dtype=torch.float64)).to(dtype)


def apply(A: Tensor, z: Tensor) -> Tensor:
    """A z, written in the plainest way."""
    return torch.einsum("...ik,...k->...i", A, z)


def scale(A: Tensor, b: Tensor, z: Tensor) -> Tensor:
    """1 + |b| + |A||z|: the size of what is rounded in A z − b."""
    return 1 + b.abs() + apply(A.abs(), z.abs())


def relative_residual(A: Tensor, b: Tensor, z: Tensor) -> float:
    """The largest |A z − b| over its scale, evaluated in float64."""
    A, b, z = A.detach().double(), b.detach().double(), z.detach().double()
    ratio = (apply(A, z) - b).abs() / scale(A, b, z)
    return ratio.max().item() if ratio.numel() else 0.0


def output_rounding(row: taut.Activation, z: Tensor) -> Tensor:
    """What a few roundings change in z = σ(u), which may be computed as lower + width·s(u)."""
    lower, upper = row.range.bounds(z)
    width = (upper - lower).where((upper - lower).isfinite(), 1.0)
    return 4 * torch.finfo(z.dtype).eps * (z.abs() + width)


def condition(solution: taut.Solution, A: Tensor, row: taut.Activation) -> float:
    """The largest condition number of A diag(σ'(u)) Aᵀ, scaled to a unit diagonal."""
    gram = A * row.slope(solution.u.detach()).unsqueeze(-2) @ A.mT
    scale = gram.diagonal(dim1=-2, dim2=-1).rsqrt()
    return torch.linalg.cond(gram * scale.unsqueeze(-1) * scale.unsqueeze(-2)).max().item()


def spread(solution: taut.Solution, v: Tensor, A: Tensor, b: Tensor, row: taut.Activation):
    """How far z and λ of two CONVERGED solutions of one float64 problem can be apart, each entry.

    Both have |A z − b| within 32 eps of what is rounded in it. To first order a change r of the
    residual moves λ by H⁻¹r and z by diag(w) Aᵀ H⁻¹r, with H = A diag(w) Aᵀ.
    """
    z, u = solution.z.detach(), solution.u.detach()
    w, eps = row.slope(u), torch.finfo(torch.float64).eps
    rounded = z.abs() + w * (u.abs() + v.abs())
    r = 64 * eps * (b.abs() + apply(A.abs(), rounded))
    inverse = torch.linalg.pinv(A * w.unsqueeze(-2) @ A.mT, hermitian=True)
    gain = w.unsqueeze(-1) * (A.mT @ inverse)
    return apply(gain.abs(), r) + 4 * eps * rounded, apply(inverse.abs(), r) + eps


@dataclass(frozen=True)
class Problem:
    """Matrices A that are worth a test of their own; b is always feasible."""

    name: str
    matrix: Callable[[], Tensor]
    batch: tuple[int, ...] = (6,)
    logits: float = 3.0

    def make(
        self, row: taut.Activation, dtype: torch.dtype = torch.float64
    ) -> tuple[Tensor, Tensor, Tensor]:
        v = (2 * torch.rand(*self.batch, K, dtype=torch.float64) - 1) * self.logits
        A = self.matrix().to(torch.float64)
        b = apply(A, target(row, *self.batch))
        return v.to(dtype), A.to(dtype), b.to(dtype)


def _redundant() -> Tensor:
    A = torch.randn(2, K)
    return torch.stack([A[0], A[1], A[0] + A[1], 2 * A[0]])


def _with_zero_row() -> Tensor:
    A = torch.randn(3, K)
    A[1] = 0
    return A


def _with_zero_column() -> Tensor:
    A = torch.randn(2, K)
    A[:, 2] = 0
    return A


def _square() -> Tensor:
    return torch.eye(K) + 0.3 * torch.randn(K, K)


PROBLEMS = [
    Problem("sum", lambda: torch.ones(1, K)),
    Problem("two rows", lambda: torch.randn(2, K)),
    Problem("no rows", lambda: torch.zeros(0, K)),
    Problem("redundant rows", _redundant),
    Problem("zero row", _with_zero_row),
    Problem("zero column", _with_zero_column),
    Problem("only zeros", lambda: torch.zeros(2, K)),
    Problem("I = K", _square),
    Problem("I > K", lambda: torch.cat([_square(), torch.randn(2, K)])),
    Problem("A per sample", lambda: torch.randn(6, 2, K)),
    Problem("some A redundant", lambda: torch.stack([_redundant()] + 5 * [torch.randn(4, K)])),
    Problem("rows of very different size", lambda: torch.randn(2, K) * _t(1e-4, 1e4)[:, None]),
    Problem("unbatched", lambda: torch.randn(2, K), batch=()),
    Problem("batch of one", lambda: torch.randn(2, K), batch=(1,)),
    Problem("empty batch", lambda: torch.randn(2, K), batch=(0,)),
    Problem("leading dimensions", lambda: torch.randn(2, K), batch=(2, 3)),
    Problem("leading dimensions, A per sample", lambda: torch.randn(2, 3, 2, K), batch=(2, 3)),
    Problem("leading empty dimension", lambda: torch.randn(2, K), batch=(3, 0)),
]


@dataclass(frozen=True)
class Known:
    """A problem whose answer is a formula."""

    name: str
    activation: str | taut.Activation
    v: Tensor
    A: Tensor
    b: Tensor
    z: Tensor
    multipliers: Tensor | None = None


def known() -> list[Known]:
    """Built anew for each call, from its own seed."""
    source = generator(7)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=source, dtype=torch.float64)

    v, A = randn(4, K), randn(2, K)
    b = randn(4, 2)
    one, ones = torch.ones(4, 1, dtype=torch.float64), torch.ones(1, K, dtype=torch.float64)
    gain = torch.linalg.solve(A @ A.mT, (b - v @ A.mT).mT).mT
    greg = torch.linalg.solve((A * WEIGHTS) @ A.mT, (b - (WEIGHTS * v) @ A.mT).mT).mT
    square, y = torch.eye(K, dtype=torch.float64) + 0.2 * randn(K, K), torch.sigmoid(randn(4, K))
    d = WEIGHTS * v.exp()
    blocks = torch.block_diag(_t(1, 1)[None], _t(1, 1, 1)[None])
    halves = torch.cat([v[:, :2].softmax(-1), 2 * v[:, 2:].softmax(-1)], -1)
    half = torch.full((4, K), 0.5, dtype=torch.float64)
    return [
        Known("softmax", "exp", v, ones, one, v.softmax(-1), -v.logsumexp(-1, keepdim=True)),
        Known("two softmaxes", "exp", v, blocks, _t(1, 2), halves),
        Known("weighted softmax", weighted("exp", WEIGHTS), v, ones, one, d / d.sum(-1, True)),
        Known("tempered softmax", tempered("exp", 0.5), v, ones, one, (v / 0.5).softmax(-1)),
        Known("orthogonal projection", "linear", v, A, b, v + gain @ A, gain),
        Known(
            "GREG weights",
            weighted("linear", WEIGHTS),
            v,
            A,
            b,
            WEIGHTS * (v + greg @ A),
            greg,
        ),
        Known("I = K", "sigmoid", v, square, y @ square.mT, y),
        Known("I = 0", "tanh", v, A[:0], b[:, :0], v.tanh(), b[:, :0]),
        Known("equal logits", "sigmoid", 0 * v, ones, _t(2.5), half),
        Known("K = 1", "exp", v[:, :1], _t(2)[None], _t(3), 1.5 * torch.ones_like(v[:, :1])),
    ]


SOLVERS = {
    "Newton": (taut.Newton(), 1e-12),
    "GradientDescent": (
        taut.GradientDescent(step=1.0, min_step=1e-12, threshold=1e-13, max_iterations=2000),
        1e-5,
    ),
}
