"""Gradients and Hessian-vector products of inequalities and bounds, against ball arithmetic.

They are those of equations: of the rows that are active, at the ν and u returned, with outputs at a
bound standing still. The measure is that of `gradients`.
"""

from collections import Counter
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fuzzing.gradients import POSED, Case, allowed, distance
from fuzzing.precise import Gradients, independent
from fuzzing.within import Within
from taut import Status

Array = NDArray[np.floating]

_LARGEST = 500  # (I + M)·K up to which a sample is looked at
_EACH, _SHARED = 16, 8  # samples of a block
_SLOPES = {np.float64: (1e-280, 1e-90), np.float32: (1e-280, 1e-10)}
_RANGE = {np.float64: (1e-250, 1e250), np.float32: (1e-30, 1e30)}
_SQUARED = 1e-150  # of second derivatives: below, squares of what they are made of underflow


def check_tangents(block: Within) -> tuple[list[tuple[int, str]], Counter[str]]:
    """Failures as (sample, check), and how many samples were looked at."""
    counts: Counter[str] = Counter()
    if block.C.shape[1] * block.C.shape[2] > _LARGEST:
        return [], counts
    rng = np.random.default_rng([block.seed, block.number, 17])
    rows = np.sort(rng.permutation(len(block))[:_EACH])
    failures = []
    for places, own in ((rows, True), (rows[:_SHARED], False)):
        if not own and not block.shared:
            continue
        found = _Found(block, places, own, rng)
        for place in (found.solution.status == int(Status.CONVERGED)).nonzero().flatten().tolist():
            about, wrong = found.judge(place)
            counts["gradients of inequalities " + about] += 1
            failures += [(int(places[place]), text) for text in wrong]
    return failures, counts


class _Found:
    """Some samples, what is asked of them, and what taut gives.

    With their `own` matrices, which get gradients, twice; or with shared ones, as layers have them.
    """

    def __init__(self, block: Within, rows: NDArray[np.int64], own: bool, rng: Any):
        self.block, self.own, given = block, own, block.take(rows)
        n, K = len(rows), block.v.shape[1]
        for name in ("A", "G"):
            if own and given[name] is not None and given[name].ndim == 2:
                given[name] = given[name].expand(n, *given[name].shape).clone()
        names = ["v", "A", "b", "G", "lower", "upper"] if own else ["v", "b", "lower", "upper"]
        self.leaves = {k: given[k].requires_grad_() for k in names if given[k] is not None}
        self.solution, self.given = block.project(given), given

        def draw(*shape: int) -> Tensor:
            return torch.from_numpy(rng.normal(size=shape).astype(block.dtype))

        on = ((1, 0, 0), (1, 0, 1), (0, 1, 0), (1, 1, 1))[rng.integers(4)]
        shapes = (n, K), self.solution.multipliers.shape, (n, K)
        self.g = tuple(float(x) * draw(*shape) for x, shape in zip(on, shapes, strict=True))
        self.direction = {k: draw(*x.shape) for k, x in self.leaves.items()}
        for name in ("lower", "upper"):
            self.direction[name] = self._moving(name, self.direction[name], given)
        self.first, self.second = self._differentiate()

    def _differentiate(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """The gradients and, of own matrices, the Hessian times the direction."""
        z, multipliers, u = self.solution.z, self.solution.multipliers, self.solution.u
        u = u.masked_fill(u.isinf(), 0)
        found = zip((z, multipliers, u), self.g, strict=True)
        loss = torch.stack([(x * g).sum() for x, g in found]).sum()
        leaves = list(self.leaves.values())
        options = {"allow_unused": True, "materialize_grads": True}
        first = torch.autograd.grad(loss, leaves, create_graph=self.own, **options)
        made = {k: x.detach() for k, x in zip(self.leaves, first, strict=True)}
        if not self.own:
            return made, {}
        pairs = zip(first, self.direction.values(), strict=True)
        along = torch.stack([(x * d).sum() for x, d in pairs]).sum()
        if not along.requires_grad:  # of a line between bounds: the gradient does not move
            return made, {k: torch.zeros_like(x) for k, x in self.leaves.items()}
        second = torch.autograd.grad(along, leaves, **options)
        return made, dict(zip(self.leaves, second, strict=True))

    def _moving(self, name: str, direction: Tensor, given: dict) -> Tensor:
        if self.block.G is None:
            return torch.zeros_like(direction)  # of bounds, only first derivatives are compared
        return direction.masked_fill(given[name].isinf(), 0)

    def judge(self, row: int) -> tuple[str, list[str]]:
        """Was a sample compared, and which of its derivatives are wrong?"""
        block, law = self.block, self.block.law
        u = self.solution.u[row].detach().double().numpy()
        if np.isinf(u).any():
            return "not compared: outputs held at an end", []
        C, on, side, fixed = self._active(row, u)
        if self._at_kink(row, u):
            return "not compared: an output that just touches its bound", []
        free = np.isnan(fixed)
        kept = independent(np.where(free, C[on], 0.0)) if on.any() else ()
        dependent = len(kept) < on.sum()
        if dependent:
            on[np.flatnonzero(on)] = np.isin(np.arange(on.sum()), kept)
            kept = tuple(range(len(kept)))
        slopes = np.abs(law.slope(u.astype(np.longdouble)))[free]
        least, enough = _SLOPES[block.dtype]
        if len(slopes) and slopes.min() <= least * max(1.0, slopes.max()):
            return "not compared: slopes underflow", []
        case = self._case(row, u, C, on, side, fixed, kept)
        truth = case.truth()
        if truth is None:
            return "not compared: slopes underflow", []
        first, second, effect = truth
        if dependent and float(self.g[1].abs().max()) > 0:
            return "not compared: rows that depend on each other", []
        wrong = self._compare("", first, self.first, row, on, side, effect, dependent)
        wrong += self._bounds(row, C[on], first, fixed, effect) if not dependent else []
        if self.own and not dependent and (not len(slopes) or slopes.min() >= enough):
            name = "Hessian times a direction: "
            scale = effect * block.eps / 2.0**-52
            wrong += self._compare(name, second, self.second, row, on, side, scale, False)
        return "compared" + ("" if effect < POSED else ", not well-posed"), wrong

    def _at_kink(self, row: int, u: Array) -> bool:
        """Is σ(u) at a bound but for rounding? Which side of the kink is taken is then open."""
        if self.block.G is not None:
            return False
        z = self.block.law.activation.sigma(torch.from_numpy(u)).numpy()
        bounds = [self.given[k][row].detach().double().numpy() for k in ("lower", "upper")]
        blur = 16 * self.block.eps * (self.block.law.size + np.abs(z) * (1 + np.abs(u)))
        return any(bool((np.abs(z - x) <= blur).any()) for x in bounds)

    def _active(self, row: int, u: Array) -> tuple[Array, Array, Array, Array]:
        """C; which rows are active, at their upper side or not; outputs at a bound, and where."""
        block = self.block
        I = block.A.shape[1]
        parts = [self.given[k] for k in ("A", "G") if self.given[k] is not None]
        C = np.concatenate(
            [(x[row] if x.ndim == 3 else x).detach().double().numpy() for x in parts]
            or [np.zeros((0, len(u)))]
        )
        ν = self.solution.multipliers[row].detach().numpy()
        equal = np.arange(len(ν)) < I
        fixed = np.full(len(u), np.nan)
        lower, upper = (self.given[k][row].detach().double().numpy() for k in ("lower", "upper"))
        if block.G is not None:
            equal = equal | np.concatenate([np.ones(I, bool), lower == upper])
        else:
            z = block.law.activation.sigma(torch.from_numpy(u)).numpy()
            fixed = np.where(
                (z < lower) | (lower == upper), lower, np.where(z > upper, upper, fixed)
            )
        return C, (ν != 0) | equal, (ν < 0) & ~equal, fixed

    def _case(
        self, row: int, u: Array, C: Array, on: Array, side: Array, fixed: Array, kept: tuple
    ) -> Case:
        I = self.block.A.shape[1]
        ν = self.solution.multipliers[row].detach().double().numpy()[on]
        g = [x[row].double().numpy() for x in self.g]
        moves = {
            k: x[row].double().numpy() for k, x in self.direction.items() if k not in ("A", "G")
        }
        db = np.zeros(len(C))
        if "b" in moves:
            db[:I] = moves["b"]
        if self.block.G is not None:
            db[I:] = np.where(side[I:], moves["upper"], moves["lower"])
        parts = [self.direction[k][row] for k in ("A", "G") if self.own and k in self.direction]
        dC = np.concatenate([x.double().numpy() for x in parts]) if parts else np.zeros_like(C)
        exact = bool((C == np.round(C)).all())
        given = (g[0], g[1][on], g[2]), (moves["v"], db[on], dC[on])
        return Case(self.block.law, C[on], ν, u, *given, kept, exact, fixed)

    def _compare(
        self,
        name: str,
        true: Gradients,
        parts: dict[str, Tensor],
        row: int,
        on: Array,
        side: Array,
        effect: float,
        only_v: bool,
    ) -> list[str]:
        block = self.block
        I, (low, high) = block.A.shape[1], _RANGE[block.dtype]
        sides = [parts["b"][row].double().numpy()] if "b" in parts else []
        if block.G is not None:
            pair = [parts[k][row].double().numpy() for k in ("upper", "lower")]
            sides.append(np.where(side[I:], *pair))
        made = {"∂v": parts["v"][row].double().numpy()[:, None]}
        made["∂b"] = np.concatenate(sides)[on][:, None] if sides else np.zeros((0, 1))
        matrices = [parts[k][row].double().numpy() for k in ("A", "G") if k in parts]
        made["∂A"] = np.concatenate(matrices)[on] if matrices else np.full_like(true.A, np.nan)
        low = max(low, _SQUARED) if name and block.dtype is np.float64 else low
        gaps = distance(true, Gradients(made["∂v"], made["∂b"], made["∂A"]))
        most = allowed(effect, block.eps)
        wrong = []
        for what, gap in gaps.items():
            if (only_v and what != "∂v") or (what == "∂A" and not self.own):
                continue
            size = np.abs(true.named()[what]).max(initial=0.0)
            if low < size < high and not gap <= most:
                wrong.append(f"{name}{'' if self.own else 'shared: '}{what} of inequalities")
        return wrong

    def _bounds(
        self, row: int, C: Array, true: Gradients, fixed: Array, effect: float
    ) -> list[str]:
        """∂(bound of a clipped output) = g_z − Cᵀs."""
        if self.block.G is not None:
            return []
        g = self.g[0][row].double().numpy()
        t = g - C.T @ true.b[:, 0]
        size = np.abs(g) + np.abs(C).T @ np.abs(true.b[:, 0])
        found = (self.first["lower"] + self.first["upper"])[row].double().numpy()
        right = np.where(np.isnan(fixed), 0.0, t)
        most = allowed(effect, self.block.eps) * (size.max(initial=0.0) + 1e-300)
        return [] if (np.abs(found - right) <= most).all() else ["∂(bounds) of clipped outputs"]
