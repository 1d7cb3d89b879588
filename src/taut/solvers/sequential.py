"""Nonlinear equations: A z = b first, then Newton while it contracts, then the careful lane, from
several starts; and the verdict on each sample.
"""

import itertools
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple, final

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from taut.activations.codes import units
from taut.autograd import outside_inference, without_hooks
from taut.backends import Rules
from taut.outcome import Outcome, Status
from taut.problems import Nonlinear
from taut.solvers.composite import compose
from taut.solvers.contract import contract
from taut.solvers.curve import Attempt, Curve, worst
from taut.solvers.violation import least_violation
from taut.systems import wide
from taut.systems.saddle import back, is_minimum, length

#: Further starts t·u + s·unit·ξ: t < 1 brings saturated outputs back, which a kick does not.
STARTS = ((0.3, 0.3), (0.0, 0.3), (0.3, 1.0), (0.0, 1.0))
_FAR = 1e3  # a start further away than this is worse than none
_BETTER = 0.1  # of failed attempts, another is kept only with |c| below this part
_STILL, _SMALL = 1e-8, 1e-3  # |t| ≤ _STILL(|g| + _SMALL size) is stationary


@final
class _First(NamedTuple):
    """What A z = b alone says."""

    status: Tensor  # −1: its samples can be started
    u: Float[Tensor, "n K"]
    multipliers: Float[Tensor, "n rows"]
    end: Float[Tensor, "n K"] | None  # of held outputs; NaN elsewhere


def sequential(problem: Nonlinear, rules: Rules, equations: Any) -> Outcome:
    """A verdict on every sample; `equations` solves A z = b."""
    if (rules.dtype or problem.v.dtype) != torch.float64:
        raise ValueError(
            "nonlinear equations are solved in float64; got a solver of "
            f"{rules.dtype or problem.v.dtype}. Use taut.Newton(), whatever the dtype of v."
        )
    with outside_inference(), without_hooks(), torch.no_grad():
        # Tensors of inference mode cannot be differentiated, and h is.
        inputs = (x.clone() if x.is_inference() else x.detach() for x in problem.inputs)
        start = problem.start
        start = start.clone() if start is not None and start.is_inference() else start
        return _solved(problem.started(start, *inputs), rules, equations, problem.units)


def _solved(problem: Nonlinear, rules: Rules, equations: Any, rows: int) -> Outcome:
    finite = _finite(problem)
    index = finite.nonzero().squeeze(-1)
    part = problem if len(index) == len(finite) else problem.take(index)
    outcome = Outcome.open(problem.v, rows)
    outcome = replace(outcome, u=problem.v.clone(), z=problem.prepared.activation.sigma(problem.v))
    outcome.status.fill_(int(Status.NONFINITE))
    outcome.residual.fill_(torch.nan)
    if len(index):
        first = _linear_first(part, equations, rows)
        outcome = outcome.write(index, _of_finite(part, first, rules))
    return replace(outcome, failed=int((outcome.status != Status.CONVERGED).sum()))


def _finite(problem: Nonlinear) -> Bool[Tensor, "N"]:
    """Which samples hold numbers only; an infinite v at a finite end holds its output."""
    n, whole = len(problem.v), problem.data.isfinite()
    shared = problem.prepared.map.shared
    fine = whole.all().expand(n) if shared else whole.reshape(n, -1).all(-1)
    for name, x in problem.named.items():
        if name != "A":
            fine = fine & ~problem.unusable(name, x).reshape(n, -1).any(-1)
    return fine


def _linear_first(problem: Nonlinear, equations: Any, rows: int) -> _First:
    """The start, and the samples that A z = b alone decides, with its proofs."""
    v, n = problem.v.to(wide(problem.v)), len(problem.v)
    status = torch.full((n,), -1, dtype=torch.long, device=v.device)
    multipliers = v.new_zeros(n, rows)
    u, linear = v, problem.b.shape[-1]
    if linear:
        first = equations(problem.equations())
        good = (first.status == Status.CONVERGED).unsqueeze(-1)
        ruled = (first.status == Status.INFEASIBLE) | (first.status == Status.INCONSISTENT)
        status = torch.where(ruled, first.status, status)
        keep = good | ruled.unsqueeze(-1)
        u = torch.where(good, first.u.to(v.dtype), v)
        multipliers[:, :linear] = torch.where(keep, first.multipliers.to(v.dtype), 0)
    end, held = None, u.isinf()
    if bool(held.any()):
        end = torch.where(held, problem.prepared.activation.sigma(u), torch.nan)
    return _First(status, u, multipliers, end)


def _of_finite(problem: Nonlinear, first: _First, rules: Rules) -> Outcome:
    """The outcome of samples that hold numbers only."""
    activation, dtype = problem.prepared.activation, problem.v.dtype
    v = problem.v.to(first.u.dtype)
    free = v if first.end is None else torch.where(first.end.isnan(), v, 0)
    unit = units(activation, v.shape[-1]).to(v)
    curve = Curve.of(problem.surface(), activation, free, unit, rules)
    curve = replace(curve, end=first.end)
    start = first.u if first.end is None else torch.where(first.end.isnan(), first.u, 0)
    begin = _given(problem, curve, start, first.multipliers)
    open = (first.status < 0).nonzero().squeeze(-1)
    found = Attempt.start(start, first.multipliers)
    status = first.status.clone()
    if len(open):
        few, limit = curve.take(open), rules.max_iterations
        begin = None if begin is None else (begin[0][open], begin[1][open])
        own = _searched(few, (start[open], first.multipliers[open]), begin, limit)
        found.write(open, *own)
        status[open] = _judged(few, own)
    z, u = curve.sigma(found.u), found.u
    if first.end is not None:
        u = torch.where(first.end.isnan(), u, first.u)
    u, z, multipliers = (x.to(dtype) for x in (u, z, found.multipliers))
    residual = curve.surface.value(z.to(v.dtype)).abs().amax(-1).to(dtype)
    fits = z.isfinite().all(-1) & multipliers.isfinite().all(-1)
    status = torch.where(fits, status, int(Status.NONFINITE))
    made = Outcome(z, multipliers, u, residual, found.iterations, status, -1)
    return replace(made, held=first.end is not None)


def _given(
    problem: Nonlinear, curve: Curve, u: Tensor, multipliers: Tensor
) -> tuple[Tensor, Tensor] | None:
    """Where `start` says to begin; as A z = b left it where that is absurd.

    Multipliers alone have their u = v + Jᵀλ with J at the z that A z = b alone has.
    """
    start, rows, outputs = problem.start, multipliers.shape[-1], u.shape[-1]
    if start is None:
        return None
    if start.shape[-1] not in (rows, outputs + rows):
        raise ValueError(
            f"init must have {rows} multipliers, those of A and then those of h, for each sample "
            f"or once for all, or be a pair (u, multipliers); got {start.shape[-1]} numbers a "
            f"sample for {outputs} outputs."
        )
    given = start.to(u.dtype)
    own, own_u = given[:, -rows:], given[:, :outputs]
    known = own.any(-1)  # a memory that has not been filled says nothing
    if start.shape[-1] == rows:
        own_u = curve.v + back(curve.surface.at(curve.sigma(u)).jacobian(), own)
    own_u = own_u if curve.end is None else torch.where(curve.end.isnan(), own_u, 0)
    size, most = ((x / curve.unit).abs().amax(-1) for x in (own_u, curve.v))  # lines do not count
    known = known | (start.shape[-1] > rows)
    near = known & own.isfinite().all(-1) & own_u.isfinite().all(-1) & (size <= _FAR * (1 + most))
    near = near.unsqueeze(-1)
    return torch.where(near, own_u, u), torch.where(near, own, multipliers)


def _searched(
    curve: Curve, start: tuple[Tensor, Tensor], given: tuple[Tensor, Tensor] | None, limit: int
) -> Attempt:
    """The lanes, one after the other, for the samples that are left."""
    found, u = contract(curve, *(given or start), limit), start[0]
    starts = [u]
    if given is not None:
        starts = [given[0], u]
        left = (~found.done).nonzero().squeeze(-1)
        if len(left):  # a start may be worse than none
            own = contract(curve.take(left), start[0][left], start[1][left], limit)
            index = own.done.nonzero().squeeze(-1)
            found.write(left[index], *(x[index] for x in own))
    for own in itertools.chain(starts, _further(curve, u, found)):
        left = (~found.done).nonzero().squeeze(-1)
        if len(left) == 0:
            break
        tried, before = compose(curve.take(left), own[left], limit), found.off[left]
        tried = tried._replace(iterations=found.iterations[left] + tried.iterations)
        found.iterations[left] = tried.iterations
        better = tried.done | (tried.off < _BETTER * before) | before.isinf()
        index = better.nonzero().squeeze(-1)
        found.write(left[index], *(x[index] for x in tried))
    return found


def _further(curve: Curve, u: Tensor, found: Attempt) -> Iterator[Tensor]:
    """Other starts, made when they are needed: the same directions for every sample.

    Where σ is a line in every output, the unit is the size of u, where it began or where it has
    come to; where it bends in some, 1 is a unit of the problem. torch's random numbers are left
    alone, which vmap refuses.
    """
    source = random.Random(0)
    unit = curve.finite_unit
    if curve.lines == u.shape[-1]:
        r = curve.slope(u).sqrt()
        sizes = curve.sizes(u, r)
        come = torch.minimum(curve.sizes(found.u, r), _FAR * sizes)
        unit = torch.maximum(sizes, come.nan_to_num(0.0)) / torch.where(r > 0, r, 1)
    for t, s in STARTS:
        kick = [source.gauss(0.0, 1.0) for _ in range(u.shape[-1])]
        yield t * u + s * unit * torch.tensor(kick, dtype=u.dtype, device=u.device)


def _judged(curve: Curve, found: Attempt) -> Tensor:
    """The verdict on every sample."""
    status = torch.where(found.done, int(Status.CONVERGED), int(Status.MAX_ITERATIONS))
    left = (~found.done).nonzero().squeeze(-1)
    if len(left) == 0:
        return status
    curve, u, multipliers = curve.take(left), found.u[left], found.multipliers[left]
    z, w = curve.sigma(u), curve.slope(u)
    patch, r = curve.surface.at(z), w.sqrt()
    J, c = patch.jacobian(), patch.c
    sizes = curve.sizes(u, r)
    feasible = worst(c, curve.scales(J, z, w, u, multipliers, sizes).cap) <= curve.floor
    feasible = feasible | curve.noisy(~feasible, u)
    g = r * (u - curve.v)
    t = g - r * back(J, multipliers)
    still = feasible & (length(t) <= _STILL * (length(g) + _SMALL * sizes.amax(-1)))
    number, verdict = c.isfinite().all(-1), status[left]
    verdict = torch.where(number, verdict, int(Status.NONFINITE))
    if bool(still.any()):
        strict = is_minimum(J, r, curve.curvature(patch, multipliers))
        verdict = torch.where(still & ~strict, int(Status.NOT_NEAREST), verdict)
    lost = (~feasible & number).nonzero().squeeze(-1)
    if len(lost):
        stuck = least_violation(curve.take(lost), u[lost])
        verdict[lost] = torch.where(stuck, int(Status.STUCK), verdict[lost])
    return status.index_copy(0, left, verdict)
