"""One derivative, whoever asks: autograd, every transform of torch.func, and compiled code.

For every kind of constraint × regime × matrix, each with samples whose outputs are free, held at an
end of their range or clipped at a bound, so that the rest of the equations depend on each other or
not. That they agree says nothing of a derivative that is wrong in all of them: so they are also
compared with a closed form, and with differences of solutions.
"""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from torch.func import grad, jacfwd, jacrev, jvp, vmap
from torch.testing import assert_close

import taut
from tables import apply, conditioned, generator, problem
from taut import compiled as ops

pytestmark = [
    pytest.mark.usefixtures("as_user"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning"),
]

K, HELD = 6, [4, 5]  # outputs, and those that some samples hold
SAMPLES = ("free", "held", "dependent once held", "by two", "at other ends", "forced")
PARTS = ("z", "multipliers", "u")
RIGHT = 1e-8  # of the largest entry, as promised


# Matrices: rows 0 and 1 differ in the outputs that are held, and row 2 has none besides.


def twins(draw, *shape: int) -> Tensor:
    A = (64 * draw.randn(3, shape[-1])).round() / 64
    A[1, : HELD[0]], A[2, : HELD[0]] = A[0, : HELD[0]], 0
    return A


def redundant(draw, *shape: int) -> Tensor:
    A = twins(draw, *shape)
    mix = (4 * draw.randn(2, 3)).round() / 4
    return torch.cat([A, mix.where(mix != 0, 0.25) @ A])


def of_unlike_size(draw, *shape: int) -> Tensor:
    return redundant(draw, *shape) * 2.0 ** torch.tensor([[9.0], [-9], [0], [13], [-4]]).double()


def ill_conditioned(draw, *shape: int) -> Tensor:
    A = twins(draw, *shape)
    A[1, : HELD[0]] += 2.0**-14 * A[2].roll(2)[: HELD[0]]
    return A


MATRICES = {f.__name__: f for f in (twins, redundant, of_unlike_size, ill_conditioned)}


@dataclass(frozen=True)
class Case:
    """Samples that differ in what is held, and how to solve them."""

    activation: str
    tensors: dict[str, Tensor]  # matrices first, by the names of `project`; or "params"
    weights: dict[str, Tensor]  # of each part of the answer
    matrices: int

    def solve(self, solve, *values: Tensor) -> tuple[Tensor, ...]:
        """z, λ and u, where it is finite."""
        given = dict(zip(self.tensors, values, strict=True))
        if "params" in given:
            given |= {"h": energy, "params": (given["params"],)}
        solution = solve(**given, activation=self.activation)
        u = torch.where(solution.u.isinf(), 0, solution.u)
        return solution.z, solution.multipliers, u

    def scalar(self, part: str, solve=taut.project) -> Callable[..., Tensor]:
        place, weights = PARTS.index(part), self.weights[part]
        return lambda *values: (self.solve(solve, *values)[place] * weights).sum()


def energy(z, e):
    return z.square().sum(-1, keepdim=True) - e


REGIMES = {"plain": ("sigmoid", 1.5), "exp": ("exp", 1.5), "saturated": ("sigmoid", 25.0)}


def _held(activation, v, y):
    """The samples of SAMPLES."""
    lower, upper = activation.range.bounds(v)
    other = torch.where(upper.isfinite(), torch.inf, -torch.inf)
    v[1, 0] = v[2, HELD[1]] = v[3, HELD[0]] = v[3, HELD[1]] = v[4, HELD[0]] = -torch.inf
    v[4, HELD[1]] = other
    y = torch.where(v.isinf(), activation.sigma(v), y)
    y[5, HELD] = lower
    return v, y


def case(kind: str, regime: str, matrix: str) -> Case:
    name, size = REGIMES[regime]
    activation, n = taut.activations.resolve(name), len(SAMPLES)
    draw = torch
    C = MATRICES[matrix](draw, 3, K)
    C[2, HELD] = C[2, HELD].abs() + 0.1
    v, y = size * (2 * torch.rand(n, K) - 1), activation.sigma(torch.randn(n, K))
    v, y = _held(activation, v, y)
    at, gap = y @ C.mT, 0.2 * torch.rand(n, K)
    if kind == "equations":
        tensors = {"A": C, "v": v, "b": at}
    elif kind == "bounds":
        tensors = {"A": C, "v": v, "b": at, "lower": y - gap, "upper": y + gap.flip(0)}
        v[5, HELD], tensors["upper"][5, HELD] = 4.0, y[5, HELD]
    elif kind == "nonlinear":
        tensors = {"A": C, "v": v, "b": at, "params": y.square().sum(-1, keepdim=True)}
    elif kind == "inequalities":
        lower, upper = at.clone(), at + 0.2
        upper[:, :2], upper[5, 2], lower[:, 4:] = at[:, :2], at[5, 2], -torch.inf
        tensors = {"G": C, "v": v, "lower": lower, "upper": upper}
    else:
        G = torch.cat([torch.randn(2, K), C[:1]])
        side = y @ G.mT
        tensors = {"A": C, "G": G, "v": v, "b": at, "lower": side - 0.05, "upper": side + 0.2}
        tensors["upper"][:, 2] = torch.inf
    matrices = [x for x in tensors if x in ("A", "G")]
    rows = sum(len(tensors[x]) for x in matrices) + (kind == "nonlinear")
    weights = {part: torch.randn(n, rows if part == "multipliers" else K) for part in PARTS}
    return Case(name, tensors, weights, len(matrices))


# Ways to a gradient: each gives, for every part of the answer, that of every tensor.


def _zeros_but(case: Case, place: int) -> tuple[Tensor, ...]:
    weights = case.weights.values()
    return tuple(w if i == place else torch.zeros_like(w) for i, w in enumerate(weights))


def by_autograd(case: Case, solve=taut.project) -> list[tuple[Tensor, ...]]:
    values = [x.clone().requires_grad_() for x in case.tensors.values()]
    parts = zip(case.solve(solve, *values), case.weights.values(), strict=True)
    options = {"retain_graph": True, "materialize_grads": True, "allow_unused": True}
    return [torch.autograd.grad((x * w).sum(), values, **options) for x, w in parts]


def by_vjp(case: Case) -> list[tuple[Tensor, ...]]:
    def f(*values):
        return case.solve(taut.project, *values)

    _, pull = torch.func.vjp(f, *case.tensors.values())
    return [pull(_zeros_but(case, i)) for i in range(3)]


def by_vmap(case: Case) -> list[tuple[Tensor, ...]]:
    """The gradients sample by sample."""

    def each(weights, *values):
        _, pull = torch.func.vjp(lambda *x: case.solve(taut.project, *x), *values)
        zeros = [torch.zeros_like(w) for w in weights]
        return [pull((*zeros[:i], w, *zeros[i + 1 :])) for i, w in enumerate(weights)]

    dims = [None] * case.matrices + [0] * (len(case.tensors) - case.matrices)
    mapped = vmap(each, in_dims=(0, *dims))
    found = mapped(tuple(case.weights.values()), *case.tensors.values())
    return [tuple(x if d == 0 else x.sum(0) for x, d in zip(g, dims)) for g in found]


def _by_jacobian(jacobian) -> Callable[[Case], list[tuple[Tensor, ...]]]:
    def way(case: Case) -> list[tuple[Tensor, ...]]:
        def f(*values):
            return case.solve(taut.project, *values)

        every = tuple(range(len(case.tensors)))
        found = jacobian(f, argnums=every)(*case.tensors.values())
        return [
            tuple(torch.tensordot(w, x, 2) for x in blocks)
            for w, blocks in zip(case.weights.values(), found, strict=True)
        ]

    return way


def by_ops(case: Case) -> list[tuple[Tensor, ...]]:
    """As compiled code calls it."""

    def solve(v, A=None, b=None, G=None, lower=None, upper=None, activation="linear"):
        chosen = taut.activations.resolve(activation)
        return ops.project(v, A, b, (G, lower, upper), chosen, taut.Newton(), None, True)

    return by_autograd(case, solve)


WAYS = {
    "torch.func.vjp": by_vjp,
    "vmap": by_vmap,
    "jacrev": _by_jacobian(jacrev),
    "jacfwd": _by_jacobian(jacfwd),
    "compiled": by_ops,
}
