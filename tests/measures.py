"""How far from right, and from each other, answers may lie: bounds that follow from rounding."""

import warnings
from types import SimpleNamespace

import torch
from torch import Tensor

import taut
from tables import Problem, apply


def scale(A: Tensor, b: Tensor, z: Tensor) -> Tensor:
    """1 + |b| + |A||z|: the size of what is rounded in A z − b."""
    return 1 + b.abs() + apply(A.abs(), z.abs())


def relative_residual(A: Tensor, b: Tensor, z: Tensor) -> float:
    """The largest |A z − b| over its scale, evaluated in float64."""
    A, b, z = A.detach().double(), b.detach().double(), z.detach().double()
    ratio = (apply(A, z) - b).abs() / scale(A, b, z)
    return ratio.max().item() if ratio.numel() else 0.0


def rounded(z: Tensor, u: Tensor, v: Tensor, activation: taut.Activation) -> Tensor:
    """|z| + w(|u| + |v|), with w = σ'(u): what is rounded in z = σ(v + Aᵀλ)."""
    moved = activation.slope(u) * (u.abs() + v.abs())
    return z.abs() + moved.nan_to_num(0.0)  # at an end u is ±inf, and w is 0


def output_rounding(activation: taut.Activation, z: Tensor) -> Tensor:
    """What a few roundings change in z = σ(u), which may be computed as lower + width·s(u)."""
    lower, upper = activation.range.bounds(z)
    width = (upper - lower).where((upper - lower).isfinite(), 1.0)
    return 4 * torch.finfo(z.dtype).eps * (z.abs() + width)


def condition(solution: taut.Solution, A: Tensor, activation: taut.Activation) -> Tensor:
    """Of each sample, the condition number of A diag(σ'(u)) Aᵀ, scaled to a unit diagonal.

    Without the directions that redundant equations do not have.
    """
    gram = A.double() * activation.slope(solution.u.detach().double()).unsqueeze(-2) @ A.double().mT
    scale = gram.diagonal(dim1=-2, dim2=-1).rsqrt()
    values = torch.linalg.eigvalsh(gram * scale.unsqueeze(-1) * scale.unsqueeze(-2))
    largest = values[..., -1:]
    return (largest / values.where(values > 1e-12 * largest, torch.inf)).amax(-1)


def spread(solution: taut.Solution, v: Tensor, A: Tensor, b: Tensor, activation: taut.Activation):
    """How far z and λ of two CONVERGED solutions of one problem can be apart, each entry.

    Both have |A z − b| within 32 eps of what is rounded in it; of numbers given in float32, within
    4 eps. To first order a change r of the residual moves λ by H⁻¹r and z by diag(w) Aᵀ H⁻¹r, with
    H = A diag(w) Aᵀ.
    """
    eps = torch.finfo(v.dtype).eps
    units = 64 if v.dtype == torch.float64 else 8
    λ = solution.multipliers
    v, A, b, z, u, λ = (x.detach().double() for x in (v, A, b, solution.z, solution.u, λ))
    w = activation.slope(u)
    # Where equations are alike λ is large, and its terms cancel in u = v + Aᵀλ.
    size = rounded(z, u, v, activation) + w * apply(A.mT.abs(), λ.abs())
    r = units * eps * (b.abs() + apply(A.abs(), size))
    inverse = torch.linalg.pinv(A * w.unsqueeze(-2) @ A.mT, hermitian=True)
    gain = w.unsqueeze(-1) * (A.mT @ inverse)
    return apply(gain.abs(), r) + 4 * eps * size, apply(inverse.abs(), r) + eps


def assert_edge_verdicts(one, other):
    """The same, but for what rounding decides there: it may keep the rule and be out of reach, or
    stay undecided."""
    same = (
        (one == other) | (one == taut.Status.MAX_ITERATIONS) | (other == taut.Status.MAX_ITERATIONS)
    )
    reach = {int(taut.Status.CONVERGED), int(taut.Status.INFEASIBLE)}
    for a, b in zip(one[~same].tolist(), other[~same].tolist(), strict=True):
        assert {a, b} == reach


def assert_same_answers(one: taut.Solution, other: taut.Solution, given: Problem) -> None:
    """Verdict by verdict; z and λ of what converged as far as rounding determines them."""
    assert one.status.tolist() == other.status.tolist()
    bounds = spread(other, *given, given.activation)
    for name, most in zip(("z", "multipliers"), bounds, strict=True):
        error = (getattr(one, name).detach() - getattr(other, name).detach()).abs()
        far = other.converged & (error > most).any(-1)
        assert not far.any(), f"{name} of samples {far.nonzero().flatten().tolist()} differs"


FIELDS = ("z", "multipliers", "u", "residual", "iterations", "status", "converged")


def solve_and_differentiate(
    v, A, b, activation, y, *, init=None, through=("z", "u", "multipliers")
):
    """The fields of the solution; ∂v and ∂b of a function of `through`; the matched loss of y."""
    v, b = (x.detach().clone().requires_grad_() for x in (v, b))
    solution = taut.project(v, A, b, activation=activation, init=init, on_failure="return")
    made = {name: getattr(solution, name) for name in FIELDS}
    ok = solution.converged
    value = torch.stack([getattr(solution, name)[ok].sin().sum() for name in through]).sum()
    value = value + solution.z[ok].square().sum()
    made["dv"], made["db"] = torch.autograd.grad(value, (v, b), retain_graph=True)
    with warnings.catch_warnings():  # of samples that fail, which are part of what is compared
        warnings.simplefilter("ignore", taut.FailureWarning)
        made["loss"] = taut.matched_loss(solution, y, reduction="none")
    (made["dloss"],) = torch.autograd.grad(made["loss"][ok].sum(), v)
    return SimpleNamespace(**{name: x.detach() for name, x in made.items()})


def assert_same_derivatives(one: SimpleNamespace, other: SimpleNamespace, given: Problem) -> None:
    """Rounding is magnified by the condition number in λ, and once more in derivatives at λ.

    They change with λ and u themselves, by as much as rounding leaves these undetermined.
    """
    terms = sum(given.A.shape[-2:])  # of every sum, each with its 64 units of rounding
    digits = 64 * terms * torch.finfo(given.v.dtype).eps
    magnified = condition(other, given.A, given.activation)
    apart = spread(other, *given, given.activation)[1]
    moved = apart.sum(-1) + apply(given.A.double().abs().mT, apart).sum(-1)
    digits = digits * magnified**2 + magnified * moved
    for name in ("dv", "db", "loss", "dloss"):
        x, y = (getattr(made, name).reshape(len(given.v), -1).double() for made in (one, other))
        far = other.converged & ((x - y).abs().amax(-1) > digits * (1 + y.abs().amax(-1)))
        assert not far.any(), f"{name} of samples {far.nonzero().flatten().tolist()} differs"
