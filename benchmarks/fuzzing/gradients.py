"""Gradients and Hessian-vector products of some samples, against ball arithmetic.

A sample is well-posed where changes of 2^-52 in its slopes, gradients and A move the true answer by
less than 1e-10 of its largest entry. There ∂v, ∂b, ∂A and the Hessian times a direction must be
right to 1e-8 of their largest entry, elsewhere to ten times what such changes do.
"""

from dataclasses import dataclass, replace

import numpy as np
from flint import arb, arb_mat
from numpy.typing import NDArray

from fuzzing.laws import Law, Rng
from fuzzing.precise import Gradients, Precise, activate, column, matrix

Array = NDArray[np.floating]

RIGHT, POSED, TIMES = 1e-8, 1e-10, 10.0
_LEAST = 1e-250  # below, products of slopes underflow
_LARGEST = 400  # I·K up to which a sample is looked at: a hundredth of a second
_EACH = 12  # samples of a block


@dataclass(frozen=True)
class Case:
    """One sample at the λ and u returned, what is asked of it, and the direction of its Hessian."""

    law: Law
    A: Array
    multipliers: Array
    u: Array
    g: tuple[Array, Array, Array]  # of z, λ and u
    direction: tuple[Array, Array, Array]  # of v, b and A
    kept: tuple[int, ...]
    exact: bool  # is A given exactly, as whole numbers are?

    def truth(self) -> tuple[Gradients, Gradients, float] | None:
        """The gradients, the Hessian times the direction, and how changes of 2^-52 move them."""
        found = activate(self.law, self.u)
        if found is None:
            return None
        z, w, bend = found
        sample = Precise(matrix(self.A), column(self.multipliers), z, w, bend, self.kept)
        try:
            first, second = self._answers(sample, np.random.default_rng(0), 0.0)
            effect = 0.0
            for trial in range(5):
                rng = np.random.default_rng(trial)
                moved = self._answers(_blurred(sample, rng, self.exact), rng, 2.0**-52)
                for one, other in zip((first, second), moved, strict=True):
                    gaps = distance(one, other).values()
                    effect = max(effect, *gaps)
        except ZeroDivisionError:  # slopes that have underflowed leave H singular
            return None
        return first, second, effect

    def _answers(self, sample: Precise, rng: Rng, size: float) -> tuple[Gradients, Gradients]:
        g = [
            column(
                [
                    x * (1 + size * e)
                    for x, e in zip(column(g).entries(), _signs(rng, len(g)), strict=True)
                ]
            )
            for g in self.g
        ]
        dv, db, dA = self.direction
        second = sample.hessian_product(*g, column(dv), column(db), matrix(dA))
        return sample.gradients(*g), second


def _signs(rng: Rng, n: int) -> list[arb]:
    return [arb(x) for x in rng.choice([-1, 1], size=n) * rng.uniform(0.5, 1, size=n)]


def _blurred(sample: Precise, rng: Rng, exact: bool) -> Precise:
    def blur(x: arb_mat) -> arb_mat:
        signs = _signs(rng, x.nrows() * x.ncols())
        moved = [y * (1 + arb(2.0) ** -52 * e) for y, e in zip(x.entries(), signs, strict=True)]
        return arb_mat(x.nrows(), x.ncols(), moved)

    A = sample.A if exact else blur(sample.A)
    return replace(sample, A=A, w=blur(sample.w), bend=blur(sample.bend))


def distance(one: Gradients, other: Gradients) -> dict[str, float]:
    """The largest difference of each, of its largest entry; of that of all three if it is 0."""
    sizes = {name: np.abs(x).max(initial=0.0) for name, x in one.named().items()}
    found = {}
    for name, x in one.named().items():
        size = sizes[name] if sizes[name] > _LEAST else max(_LEAST, *sizes.values())
        found[name] = float(np.abs(x - other.named()[name]).max(initial=0.0) / size)
    return found


def allowed(effect: float, eps: float) -> float:
    """What may be wrong where changes of 2^-52 have this effect, for answers rounded to `eps`."""
    return max(RIGHT, TIMES * effect) + 4 * (eps if eps > 1e-10 else 0.0)
