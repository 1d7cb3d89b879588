"""The tables every test runs over, and the one builder of problems.

An activation put in the registry appears in `ALL` at once, alone, weighted and tempered. A kind of
constraint is a line of `KINDS`, a regime a line of `REGIMES`, a backend a line of `BACKENDS`.
"""

import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

import taut
from taut import Status
from taut.activations import ACTIVATIONS, bounded, mixed, srlu, tempered, weighted
from taut.analysis import Basis
from taut.backends import Backend, Torch, backend_for, cpu

SEED = int(os.environ.get("TAUT_TEST_SEED", "0"))  # set by pytest --seed
K = 5  # activations with one parameter per output have this many


def generator(stream: int) -> torch.Generator:
    """A source of random numbers of its own, which `--seed` changes like all others."""
    return torch.Generator().manual_seed(1000 * SEED + stream)


def _t(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


# Activations

LOWER, UPPER = _t(-1.0, 0.0, 2.0, -5.0, 0.1), _t(1.0, 3.0, 2.5, 5.0, 0.2)
WEIGHTS = _t(0.5, 1.0, 2.0, 3.0, 0.25)
TEMPERATURES = _t(0.5, 1.0, 2.0, 1.5, 0.75)

#: One of each way to build an activation. Some ends are no numbers of float32.
DERIVED = {
    "srlu(0.5, 2)": srlu(0.5, 2.0),
    "srlu(2, 2)": srlu(2.0, 2.0),
    "bounded": bounded(-1.0, 3.0),
    "bounded each": bounded(LOWER, UPPER),
    "bounded below": bounded(2.1, math.inf),
    "bounded above": bounded(-math.inf, 2.1),
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
ALL: dict[str, taut.Activation] = {
    **ACTIVATIONS,
    **{f"weighted {name}": weighted(a, WEIGHTS) for name, a in ACTIVATIONS.items()},
    **{f"tempered {name}": tempered(a, TEMPERATURES) for name, a in ACTIVATIONS.items()},
    **DERIVED,
}
#: For what takes long: the paper's table, and every kind of derived activation once.
FEW = {
    **ACTIVATIONS,
    **{
        name: DERIVED[name]
        for name in ("bounded each", "tempered weighted tanh", "mixed of derived")
    },
}
each_activation = pytest.mark.parametrize("activation", ALL.values(), ids=ALL.keys())
few_activations = pytest.mark.parametrize("activation", FEW.values(), ids=FEW.keys())
both_dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
shared_or_own = pytest.mark.parametrize("own", [False, True], ids=["shared A", "A per sample"])


def target(activation: taut.Activation, *batch: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Outputs in the interior of the range: what a feasible b is made of."""
    return activation.sigma(torch.randn(*batch, K, dtype=torch.float64)).to(dtype)


# Backends, as (basis, activation) -> Backend; the fastest one for what it does not suit

BACKENDS: dict[str, Callable[[Basis, taut.Activation], Backend]] = {
    "torch": lambda basis, activation: Torch()
}
if cpu.variant() is not None:
    BACKENDS["cpu"] = backend_for
each_backend = pytest.mark.parametrize("backend", BACKENDS)
needs_cpu = pytest.mark.skipif("cpu" not in BACKENDS, reason="no kernel: was there a compiler?")


def prepared(A: Tensor, activation: str | taut.Activation, backend: str) -> taut.Prepared:
    """`taut.prepare`, with the backend of that name."""
    found = taut.prepare(A.detach(), activation)
    return replace(found, backend=BACKENDS[backend](found.basis, found.activation))


def apply(A: Tensor, z: Tensor) -> Tensor:
    """A z, written in the plainest way."""
    return torch.einsum("...ik,...k->...i", A, z)


# Problems


def _independent(draw: "_Draw", *shape: int) -> Tensor:
    return draw.randn(*shape)


def _redundant(draw: "_Draw", *shape: int) -> Tensor:
    """A half of the equations, at least one, is made of the others, in float32 too."""
    *batch, I, outputs = shape
    kept = max(1, I // 2)
    A, mix = draw.randn(*batch, kept, outputs), draw.randn(*batch, I - kept, kept)
    A, mix = (64 * A).round() / 64, (4 * mix).round() / 4
    return torch.cat([A, mix.where(mix != 0, 0.25) @ A], -2)


def conditioned(digits: float) -> Callable[..., Tensor]:
    """Matrices of condition number 10^digits; from 10⁸ on a ConditionWarning is given."""

    def matrix(draw: "_Draw", *shape: int) -> Tensor:
        *batch, I, outputs = shape
        left = torch.linalg.qr(draw.randn(*batch, I, I)).Q
        right = torch.linalg.qr(draw.randn(*batch, outputs, I)).Q
        return left * torch.logspace(0, -digits, I, dtype=torch.float64) @ right.mT

    return matrix


def _with_zeros(draw: "_Draw", *shape: int, row: int | None = None, column: int | None = None):
    A = draw.randn(*shape)
    A[..., slice(None) if row is None else row, slice(None) if column is None else column] = 0
    return A


def patchy(draw: "_Draw", *shape: int) -> Tensor:
    """Two in five entries are zero."""
    return draw.randn(*shape) * (draw.uniform(*shape) < 0.2) + torch.eye(*shape[-2:]).double()


def margins(rows: int, columns: int) -> Tensor:
    """The sums of the rows and columns of a table: redundant by one."""
    one, other = torch.eye(rows).double(), torch.eye(columns).double()
    return torch.cat([one.repeat_interleave(columns, 1), other.repeat(1, rows)])


def _square(draw: "_Draw", *shape: int) -> Tensor:
    outputs = shape[-1]
    return torch.eye(outputs, dtype=torch.float64) + 0.3 * draw.randn(outputs, outputs)


def _scaled(draw: "_Draw", *shape: int, of: Callable[..., Tensor] = _independent) -> Tensor:
    """The largest equation first, then from the smallest on."""
    sizes = 2.0 ** torch.linspace(-13, 13, shape[-2]).double().round().roll(1)
    return of(draw, *shape) * sizes[:, None]


def _some_redundant(draw: "_Draw", *shape: int) -> Tensor:
    A = draw.randn(*shape)
    A[0] = _redundant(draw, *shape[1:])
    return A


@dataclass(frozen=True)
class _Draw:
    """Random numbers in float64, from a source of their own or from torch's."""

    source: torch.Generator | None

    def randn(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.source, dtype=torch.float64)

    def uniform(self, *shape: int) -> Tensor:
        return 2 * torch.rand(*shape, generator=self.source, dtype=torch.float64) - 1


@dataclass(frozen=True)
class Problem:
    """Samples of one kind of constraint, and what is known of their answers.

    `v, A, b = problem(…)` takes equations apart.
    """

    activation: taut.Activation
    v: Tensor
    constraints: dict[str, Tensor]  # as `project` takes them
    status: Tensor  # the right verdicts
    y: Tensor | None = None  # outputs in the range that satisfy the constraints
    z: Tensor | None = None  # the right answer, where it is known, and its multipliers
    multipliers: Tensor | None = None

    def __iter__(self) -> Iterator[Tensor]:
        return iter((self.v, *self.constraints.values()))

    @property
    def A(self) -> Tensor:
        return self.constraints["A"]

    @property
    def b(self) -> Tensor:
        return self.constraints["b"]

    def solve(self, **options) -> taut.Solution:
        return taut.project(self.v, **self.constraints, activation=self.activation, **options)

    def take(self, index: Tensor) -> "Problem":
        """The samples at `index`."""
        given = {
            name: x if name in ("A", "G") and x.ndim == 2 else x[index]
            for name, x in self.constraints.items()
        }
        return replace(
            self,
            v=self.v[index],
            constraints=given,
            status=self.status[index],
            y=None if self.y is None else self.y[index],
            z=None if self.z is None else self.z[index],
            multipliers=None if self.multipliers is None else self.multipliers[index],
        )

    def with_b(self, b: Tensor, status: Tensor) -> "Problem":
        return replace(self, constraints={**self.constraints, "b": b}, status=status, z=None)


def _beyond_reach(found: Problem) -> Problem:
    """The first equation of every other sample asks for more than the range has."""
    A, b, status = found.A.clone(), found.b.clone(), found.status.clone()
    lower, upper = (x.expand(A.shape[-1]) for x in found.activation.range.bounds(found.v))
    sign = torch.where(upper.isfinite(), 1.0, torch.where(lower.isfinite(), -1.0, 0.0))
    A[..., 0, :] = sign * (A[..., 0, :].abs() + 0.1)
    b = apply(A, found.y)
    most = (A[..., 0, :] * torch.where(upper.isfinite(), upper, lower.where(sign < 0, 0.0))).sum(-1)
    b[1::2, 0] = (most + 0.1 + 0.1 * most.abs()).expand(len(b))[1::2]
    status[1::2] = Status.INFEASIBLE
    return replace(found.with_b(b, status), constraints={"A": A, "b": b})


def _contradicted(found: Problem) -> Problem:
    """In every other sample a redundant equation asks for something else than the others."""
    b, status = found.b.clone(), found.status.clone()
    b[1::2, -1] += 1 + b[1::2].abs().amax(-1)
    status[1::2] = Status.INCONSISTENT
    return found.with_b(b, status)


def _not_finite(found: Problem) -> Problem:
    """NaN and ±inf, in v and in b."""
    v, b, status = found.v.clone(), found.b.clone(), found.status.clone()
    v[1::4, 0], b[3::4, -1] = torch.nan, torch.inf
    status[1::2] = Status.NONFINITE
    return replace(found.with_b(b, status), v=v)


def _held(found: Problem) -> Problem:
    """In every other sample v holds an output in five at an end of its range."""
    outputs, samples = torch.arange(found.v.shape[-1]), torch.arange(len(found.v)).unsqueeze(-1)
    which = ((outputs + samples) % 5 == 0) & (samples % 2 == 1)
    ends = [x.expand(found.v.shape) for x in found.activation.range.bounds(found.v)]
    low, high = (which & (samples % 4 == k) & x.isfinite() for k, x in ((1, ends[0]), (3, ends[1])))
    v = found.v.masked_fill(low, -torch.inf).masked_fill(high, torch.inf)
    y = torch.where(low, ends[0], torch.where(high, ends[1], found.y))
    constraints = found.constraints | {"b": apply(found.A, y)}
    return replace(found, v=v, constraints=constraints, y=y, z=y)


@dataclass(frozen=True)
class Regime:
    """What is hard about a problem."""

    matrix: Callable[..., Tensor] = _independent
    size: float = 2.0  # v lies in ±size
    planted: bool = False  # b from z = σ(v + Aᵀλ): the answer is known
    end: bool = False  # b from a y of which some outputs are at an end of the range
    then: Callable[[Problem], Problem] | None = None
    feasible: bool = True
    structure: str = "plain"  # of inequalities
    M: int = 3  # how many


REGIMES = {
    "plain": Regime(),
    "planted": Regime(planted=True),
    "saturated": Regime(size=20.0),
    "redundant": Regime(_redundant, planted=True),
    "ill-conditioned": Regime(conditioned(6), planted=True),
    "at the edge": Regime(end=True),
    "held": Regime(planted=True, then=_held),
    "infeasible": Regime(then=_beyond_reach, feasible=False),
    "inconsistent": Regime(_redundant, then=_contradicted, feasible=False),
    "not finite": Regime(then=_not_finite, feasible=False),
}


def has(regime: str, activation: taut.Activation) -> bool:
    """Can it be so? Nothing is out of reach where outputs are free in both directions."""
    lower, upper = activation.range.bounds(torch.zeros(K))
    ended = lower.isfinite() | upper.isfinite()
    if regime == "held":
        return bool(ended.any())
    return regime not in ("infeasible", "at the edge") or bool(ended.all())


def _equations(
    activation: taut.Activation, regime: Regime, draw: _Draw, batch: tuple[int, ...], A: Tensor
) -> Problem:
    """A z = b."""
    shape = (*batch, A.shape[-1])
    v = regime.size * draw.uniform(*shape)
    y, z, multipliers = activation.sigma(draw.randn(*shape)), None, None
    if regime.end:
        lower, upper = activation.range.bounds(v)
        end = torch.where(upper.isfinite(), upper, lower)
        y = y.where((draw.uniform(*shape) < 0) | ~end.isfinite(), end)
    if regime.planted:
        # Of equal effect in all directions that the equations have, weak ones too.
        inverse = torch.linalg.pinv(A, rtol=1e-12)
        shift = apply(inverse @ A, draw.randn(*shape))
        y = z = activation.sigma(v + shift)
        multipliers = apply(inverse.mT, shift)
    status = torch.zeros(batch, dtype=torch.long)
    found = Problem(activation, v, {"A": A, "b": apply(A, y)}, status, y, z, multipliers)
    return found if regime.then is None else regime.then(found)


# Inequalities around a point y, so that there is a solution: as (G, lower, upper) from the rows
# drawn, what they come to at y, and gaps for the lower and the upper sides.


def _one_and_two_sided(G: Tensor, c: Tensor, below: Tensor, above: Tensor, A: Tensor):
    lower, upper = c - below, c + above
    lower[..., 0::3], upper[..., 1::3] = -torch.inf, torch.inf
    return G, lower, upper


def _pairs(G: Tensor, c: Tensor, below: Tensor, above: Tensor, A: Tensor):
    """lower = upper in one row: an equation."""
    G, lower, upper = _one_and_two_sided(G, c, below, above, A)
    lower[..., -1] = upper[..., -1] = c[..., -1]
    return G, lower, upper


def _redundant_rows(G: Tensor, c: Tensor, below: Tensor, above: Tensor, A: Tensor):
    """Every row twice, and one is an equation of A too."""
    G, lower, upper = _one_and_two_sided(G, c, below, above, A)
    return tuple(torch.cat([x, x], dim) for x, dim in ((G, -2), (lower, -1), (upper, -1)))


def _no_interior(G: Tensor, c: Tensor, below: Tensor, above: Tensor, A: Tensor):
    """Opposite inequalities in two rows; one pair leaves no room."""
    above = above.clone()
    above[..., 0] = below[..., 0] = 0
    upper = torch.cat([c + above, below - c], -1)
    return torch.cat([G, -G], -2), torch.full_like(upper, -torch.inf), upper


def _weak(G: Tensor, c: Tensor, below: Tensor, above: Tensor, A: Tensor):
    """Of the same row two sides, one of which is within rounding of the other's."""
    G, lower, upper = _pairs(G, c, below, above, A)
    rows = torch.cat([G, G[..., -1:, :] + G[..., :1, :]], -2)
    top = upper[..., -1:] + upper[..., :1]
    return rows, torch.cat([lower, -torch.inf + 0 * top], -1), torch.cat([upper, top], -1)


def _boxes(G: Tensor, c: Tensor, below: Tensor, above: Tensor, A: Tensor):
    """A row for each output."""
    K = G.shape[-1]
    return torch.eye(K, dtype=G.dtype), c[..., :K] - below[..., :K], c[..., :K] + above[..., :K]


STRUCTURES = {
    "plain": _one_and_two_sided,
    "pairs": _pairs,
    "redundant": _redundant_rows,
    "empty interior": _no_interior,
    "weak": _weak,
    "boxes": _boxes,
}


def _inequalities(
    activation: taut.Activation, regime: Regime, draw: _Draw, batch: tuple[int, ...], A: Tensor
) -> Problem:
    """A z = b and lower ≤ G z ≤ upper, about half of the rows active."""
    found = _equations(activation, replace(regime, planted=False, then=None), draw, batch, A)
    M, K = regime.M, A.shape[-1]
    G = draw.randn(*A.shape[:-2], M, K)
    if regime.structure == "boxes":
        G = torch.eye(K, dtype=torch.float64)
    spread = torch.linspace(-2, 2, 101, dtype=torch.float64).unsqueeze(-1).expand(-1, K)
    width = activation.sigma(spread).std(0).amin()
    below, above = (
        -(0.5 + 0.5 * draw.uniform(*batch, len(G) if G.ndim == 2 else M)).clamp_min(1e-9).log()
        * width
        * G.norm(dim=-1)
        / 2
        for _ in range(2)
    )
    make = STRUCTURES[regime.structure]
    G, lower, upper = make(G, apply(G, found.y), below, above, A)
    sides = {"G": G, "lower": lower, "upper": upper}
    return replace(found, constraints={**found.constraints, **sides})


#: What is constrained, and how. Nonlinear equations get a line.
KINDS = {"equations": _equations, "inequalities": _inequalities}


def problem(
    activation: str | taut.Activation = "sigmoid",
    regime: str = "plain",
    *,
    kind: str = "equations",
    n: int | tuple[int, ...] = 6,
    I: int = 2,
    K: int = K,
    own: bool = False,
    dtype: torch.dtype = torch.float64,
    seed: int | None = None,
    **changes,
) -> Problem:
    """The one builder. `n` are the batch dimensions, `own` gives each sample its A.

    Without `seed` it draws from torch's generator, so that two calls give two problems.
    `changes` are of the regime: `size=20.0`, `matrix=…`.
    """
    batch = (n,) if isinstance(n, int) else n
    draw = _Draw(None if seed is None else generator(seed))
    chosen = replace(REGIMES[regime], **changes)
    A = chosen.matrix(draw, *(batch if own else ()), I, K)
    found = KINDS[kind](taut.activations.resolve(activation), chosen, draw, batch, A)
    given = {name: x.to(dtype) for name, x in found.constraints.items()}
    return replace(found, v=found.v.to(dtype), constraints=given)


#: Shapes of problems, and matrices that are worth a test of their own: arguments of `problem`.
SHAPES: dict[str, dict] = {
    "sum": {"matrix": lambda draw, *shape: torch.ones(1, K, dtype=torch.float64)},
    "two equations": {},
    "no equations": {"I": 0},
    "redundant equations": {"I": 4, "matrix": _redundant},
    "zero equation": {"I": 3, "matrix": lambda *x: _with_zeros(*x, row=1)},
    "zero output": {"matrix": lambda *x: _with_zeros(*x, column=2)},
    "only zeros": {"matrix": _with_zeros},
    "I = K": {"I": K, "matrix": _square},
    "I > K": {"matrix": lambda *x: torch.cat([_square(*x), x[0].randn(2, K)])},
    "A per sample": {"own": True},
    "some A redundant": {"own": True, "I": 4, "matrix": _some_redundant},
    "equations of very different size": {"matrix": _scaled},
    "redundant equations of very different size": {
        "I": 4,
        "matrix": lambda *x: _scaled(*x, of=_redundant),
    },
    "unbatched": {"n": ()},
    "batch of one": {"n": 1},
    "empty batch": {"n": 0},
    "leading dimensions": {"n": (2, 3)},
    "leading dimensions, A per sample": {"n": (2, 3), "own": True},
    "leading empty dimension": {"n": (3, 0)},
}
each_shape = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
#: Those in which rounding does not grow beyond bounds in derivatives.
DIFFERENTIABLE = set(REGIMES) - {"saturated", "ill-conditioned", "at the edge"}
each_regime = pytest.mark.parametrize("regime", REGIMES)


# Solvers, and how near they come

SOLVERS = {
    "Newton": (taut.Newton(), 1e-12),
    "GradientDescent": (
        taut.GradientDescent(step=1.0, min_step=1e-12, threshold=1e-13, max_iterations=2000),
        1e-5,
    ),
}
