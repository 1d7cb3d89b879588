"""Composite-step SQP along u: a step onto the surface and one along it, judged by a merit function.

f = Σψ(z) − vᵀz is to be least on {c = 0}; the merit is f + Σμ|c|, and u is what moves: z = σ(u)
stays in its range by itself. Lengths are in the local metric, y = dz/r with r = √σ'(u).
"""

from typing import NamedTuple, final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from taut.problems.surface import Patch
from taut.solvers.curve import REACH, Attempt, Curve, Scales, worst
from taut.systems.saddle import Rows, back, diagonal, length, times

STEPS = 60
# Stationary: |t| ≤ so much of |g| + _SMALL size, at once, or where two steps have halved neither
# |c| nor |t|.
_EXACT, _STALLED, _SMALL = 1e-11, 1e-9, 1e-3
_CONVEX = 1e-2  # least pivot of the Hessian along the surface; below, the step is Gauss–Newton's
_FLAT = 1e-8  # r below which du = dz/r² has no digits
# Penalties halve for `_YOUNG` steps and then only grow: one that may fall for ever lets the
# iteration cycle. A step must promise `_PROMISE` of what it gains in c.
_YOUNG, _PROMISE, _RAISES = 6, 0.1, 3
_ARMIJO, _CUT, _TRIALS = 1e-4, 0.4, 20
_ROUNDING = 1e-10  # of the merit: within it, the residual decides
_PATIENCE, _STUCK = 20, 1e-6  # steps after which a minimum of the violation is given up


@final
class _State(NamedTuple):
    """The samples that are being worked on."""

    place: Int[Tensor, "n"]
    u: Float[Tensor, "n K"]
    μ: Float[Tensor, "n rows"]  # penalties
    δ: Float[Tensor, "n"]  # damping of the step onto the surface
    best: Float[Tensor, "n"]
    stalls: Int[Tensor, "n"]

    def take(self, index: Tensor) -> "_State":
        return _State(*(x[index] for x in self))


@final
class _View(NamedTuple):
    """All there is to know of the samples where they stand."""

    z: Float[Tensor, "n K"]
    patch: Patch
    c: Float[Tensor, "n rows"]
    J: Float[Tensor, "n rows K"]
    r: Float[Tensor, "n K"]
    scaled: Float[Tensor, "n rows K"]  # J̃
    gram: Float[Tensor, "n rows rows"]
    rows: Rows
    g: Float[Tensor, "n K"]  # the gradient of f
    multipliers: Float[Tensor, "n rows"]
    t: Float[Tensor, "n K"]  # what of g lies along the surface
    scales: Scales
    size: Float[Tensor, "n"]  # the largest of `Curve.sizes`
    still: Float[Tensor, "n"]  # |t|/(|g| + _SMALL size)


@final
class _Step(NamedTuple):
    """Where to go."""

    y: Float[Tensor, "n K"]
    du: Float[Tensor, "n K"]
    multipliers: Float[Tensor, "n rows"]
    onto: Float[Tensor, "n"]  # the lengths of its parts
    along: Float[Tensor, "n"]


def compose(curve: Curve, u: Tensor, limit: int) -> Attempt:
    """Where each sample ends, and which are done: feasible to rounding, a strict minimum."""
    whole, n = curve, len(u)
    c = curve.surface.value(curve.sigma(u))
    found, zero = Attempt.start(u, torch.zeros_like(c)), u.new_zeros(n)
    place = torch.arange(n, device=u.device)
    state = _State(place, u, torch.zeros_like(c), zero, zero + torch.inf, torch.zeros_like(place))
    limit = min(limit, STEPS)
    for count in range(limit + 1):
        view = _viewed(curve, state.u)
        off = worst(view.c, view.scales.cap)
        level = torch.maximum(off, _SMALL * view.still)
        stalls = torch.where(level < 0.5 * state.best, 0, state.stalls + 1)
        state = state._replace(best=torch.minimum(level, state.best), stalls=stalls)
        done = _is_done(curve, view, state.u, off, stalls)
        over = done | (_is_stuck(view, off) & (count > _PATIENCE)) | ~off.isfinite()
        over = over | (count == limit)
        index, left = over.nonzero().squeeze(-1), (~over).nonzero().squeeze(-1)
        if len(index):
            steps = torch.full_like(index, count)
            ends = state.u[index], view.multipliers[index], done[index], steps, off[index]
            found.write(state.place[index], *ends)
        if len(left) == 0:
            break
        state = _moved(curve, state, view, left, count)
        if len(index):
            curve, state = curve.take(left), state.take(left)
    index = found.done.nonzero().squeeze(-1)
    if len(index):
        strict = whole.take(index).strict(found.u[index], found.multipliers[index])
        found.done[index] = strict
    return found


def _viewed(curve: Curve, u: Tensor) -> _View:
    z, w = curve.sigma(u), curve.slope(u)
    patch, r = curve.surface.at(z), w.sqrt()
    J = patch.jacobian()
    scaled = J * r.unsqueeze(-2)
    gram = scaled @ scaled.mT
    rows = Rows.of(gram)
    g = r * (u - curve.v)
    multipliers = rows.solve(times(scaled, g))
    # Refined, for redundant equations.
    multipliers = multipliers + rows.solve(times(scaled, g - back(scaled, multipliers)))
    t = g - back(scaled, multipliers)
    sizes = curve.sizes(u, r)
    scales, size = curve.scales(J, z, w, u, multipliers, sizes), sizes.amax(-1)
    still = length(t) / (length(g) + _SMALL * size)
    c = patch.c
    return _View(z, patch, c, J, r, scaled, gram, rows, g, multipliers, t, scales, size, still)


def _is_done(
    curve: Curve, view: _View, u: Tensor, off: Tensor, stalls: Tensor
) -> Bool[Tensor, "n"]:
    exact = (worst(view.c, view.scales.full) <= curve.target) & (view.still <= _EXACT)
    stalled = (view.still <= _STALLED) & (stalls >= 2)
    near = off <= curve.floor
    return (near & (exact | stalled)) | curve.noisy(stalled & ~near, u)


def _is_stuck(view: _View, off: Tensor) -> Bool[Tensor, "n"]:
    """Has the violation a minimum here, above 0?"""
    size = length(view.scaled).clamp_min(1e-300)
    c = view.c / size
    pull = length(back(view.scaled / size.unsqueeze(-1), c))
    return (pull <= _STUCK * length(c)) & (off > _STUCK)


def _directed(curve: Curve, state: _State, view: _View) -> _Step:
    """y_N = −J̃ᵀ(G + δ diag G)⁻¹c onto the surface, and a Newton step y_T along it."""
    r, scaled, rows = view.r, view.scaled, view.rows
    damped = rows
    if bool((state.δ > 0).any()):
        gram = view.gram.clone()
        diagonal(gram).mul_(1 + state.δ.unsqueeze(-1))
        damped = Rows.of(gram)
    onto = -back(scaled, damped.solve(view.c))
    along, S = -view.t, curve.curvature(view.patch, view.multipliers)
    if S is not None:
        P = rows.projector(scaled)
        bent = S * (r.unsqueeze(-1) * r.unsqueeze(-2))
        R = -(P @ bent @ P)
        diagonal(R).add_(1)
        L, info = torch.linalg.cholesky_ex(R.nan_to_num(0.0, 0.0, 0.0))
        bad = (info != 0) | ~(diagonal(L).amin(-1) > _CONVEX) | ~R.isfinite().flatten(1).all(-1)
        index = bad.nonzero().squeeze(-1)
        if len(index):
            L[index] = torch.eye(L.shape[-1], dtype=L.dtype, device=L.device)
            bent, S = bent.index_fill(0, index, 0), S.index_fill(0, index, 0)
        rhs = view.t - times(P, times(bent, onto))
        along = -times(P, torch.cholesky_solve(rhs.unsqueeze(-1), L).squeeze(-1))
    y = onto + along
    turned = torch.zeros_like(y) if S is None else times(S, r * y)
    multipliers = rows.solve(times(scaled, y - r * turned + view.g))
    flat = curve.v - state.u + back(view.J, multipliers) + turned
    du = torch.where(r > _FLAT, y / r.clamp_min(1e-30), flat)
    return _Step(y, du, multipliers, length(onto), length(along))


def _moved(curve: Curve, state: _State, view: _View, open: Tensor, count: int) -> _State:
    step = _directed(curve, state, view)
    keep = 0.5 if count < _YOUNG else 1.0
    # A penalty of 0 would let c go: at least a part of the λ that pulls u by its size.
    least = 1e-8 * view.size.unsqueeze(-1) / length(view.scaled).clamp_min(1e-300)
    μ = torch.maximum(keep * state.μ, 2 * step.multipliers.abs() + least)
    falls = (view.g * step.y).sum(-1)
    after = (view.c + times(view.scaled, step.y)).abs()
    for _ in range(_RAISES):
        gain = (μ * (view.c.abs() - after)).sum(-1)
        weak = falls - gain > -_PROMISE * gain
        if not bool(weak.any()):
            break
        μ = torch.where(weak.unsqueeze(-1), 4 * μ, μ)
    gain = (μ * (view.c.abs() - after)).sum(-1)
    first = (REACH / curve.steps(step.du).clamp_min(1e-300)).clamp(max=1)
    goal = μ, falls - gain, first
    u, taken, failed = _searched(curve, state.u, view, open, step.du, *goal)
    short = (taken < 0.3) & (taken < 0.9 * first) | (first < 0.05) | failed
    easy = (taken >= 0.9 * first) & (first > 0.3)
    harder = short & (step.along <= step.onto)  # the step onto the surface was too long
    δ = torch.where(easy, 0.1 * state.δ, state.δ)
    δ = torch.where(harder, (10 * state.δ).clamp(1e-4, 1e6), δ)
    return state._replace(u=u, μ=μ, δ=torch.where(δ < 1e-5, 0, δ))


def _searched(
    curve: Curve,
    u: Tensor,
    view: _View,
    open: Tensor,
    du: Tensor,
    μ: Tensor,
    promise: Tensor,
    first: Tensor,
) -> tuple[Tensor, Tensor, Bool[Tensor, "n"]]:
    """u after a line search, how much of the step was taken, and where nothing would do."""
    f, cap = curve.objective(view.z), view.scales.cap
    merit = f + (μ * view.c.abs()).sum(-1)
    terms = curve.activation.psi(view.z).abs().sum(-1) + (curve.v * view.z).abs().sum(-1)
    rounding = _ROUNDING * (view.size.square() + f.abs() + terms + 0.01 * (μ * cap).sum(-1))
    # Within the rounding of the merit, the residual decides.
    close = torch.where(promise.abs() <= rounding, 0.9 * worst(view.c, cap), -1)
    close = torch.where(close >= 0, close.clamp_min(curve.floor), -1)
    part, taken, found, α = open, first.clone(), u.clone(), first[open]
    if len(open) < len(u):
        curve = curve.take(open)
    for _ in range(_TRIALS):
        trial = u[part] + α.unsqueeze(-1) * du[part]
        z = curve.sigma(trial)
        c = curve.surface.value(z)
        value = curve.objective(z) + (μ[part] * c.abs()).sum(-1)
        fine = value <= merit[part] + _ARMIJO * α * promise[part]
        fine = fine | (worst(c, cap[part]) <= close[part])
        index = fine.nonzero().squeeze(-1)
        found[part[index]], taken[part[index]] = trial[index], α[index]
        rest = (~fine).nonzero().squeeze(-1)
        if len(rest) == 0:
            return found, taken, torch.zeros_like(first, dtype=torch.bool)
        if len(rest) < len(part):
            curve, part, α = curve.take(rest), part[rest], α[rest]
        α = _CUT * α
    failed = torch.zeros_like(first, dtype=torch.bool).index_fill_(0, part, True)
    return found, taken.index_copy(0, part, α), failed
