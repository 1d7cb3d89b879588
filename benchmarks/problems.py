"""The common problems, defined once: NumPy only, so that every environment makes the same ones.

Each is ``z = σ((v + Aᵀλ)/τ), A z = b`` for N samples, equivalently

    minimise  τ Σ ψ(z_k) − vᵀz   subject to  A z = b

with ψ the negative entropy that belongs to σ, and G z ≤ upper where there are inequalities. The
loss is ``Σ g∘z`` with a fixed random ``g``; the gradient compared is the one in ``v``. The first
samples of a large N are the samples of a smaller N.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Problem:
    """N samples of one problem. ``b`` is (N, I), or (I,) where the family shares it."""

    family: str
    activation: str
    v: Array
    A: Array
    b: Array
    g: Array
    temperature: float = 1.0
    side: int = 0  # z is a side × side matrix, when not 0
    G: Array | None = None  # G z ≤ upper, which is (N, M), or (M,) where the family shares it
    upper: Array | None = None

    def rows(self, count: int) -> "Problem":
        """The same problem for the first ``count`` samples."""
        b = self.b if self.b.ndim == 1 else self.b[:count]
        upper = self.upper if self.upper is None or self.upper.ndim == 1 else self.upper[:count]
        return replace(self, v=self.v[:count], b=b, g=self.g[:count], upper=upper)

    @property
    def b_rows(self) -> Array:
        """``b`` with one row per sample."""
        return np.broadcast_to(self.b, (len(self.v), len(self.A)))

    @property
    def upper_rows(self) -> Array:
        """``upper`` with one row per sample."""
        return np.broadcast_to(self.upper, (len(self.v), len(self.G)))


def _normal(seed: int, stream: int, *shape: int) -> Array:
    """Normal numbers from their own stream, so that samples do not depend on how many are drawn."""
    return np.random.default_rng([seed, stream]).normal(size=shape)


def _uniform(seed: int, stream: int, *shape: int) -> Array:
    return np.random.default_rng([seed, stream]).uniform(size=shape)


def _sigmoid(u: Array) -> Array:
    return 1 / (1 + np.exp(-u))


def sigmoid(samples: int, K: int, I: int, seed: int = 0) -> Problem:
    """Dense normal A, logits of standard deviation 2, a target per sample inside the range."""
    A = _normal(seed, 0, I, K)
    interior = _sigmoid(_normal(seed, 1, samples, K))
    v = 2 * _normal(seed, 2, samples, K)
    return Problem("sigmoid", "sigmoid", v, A, interior @ A.T, _normal(seed, 3, samples, K))


def marginals_matrix(n: int) -> Array:
    """Row sums, then column sums, of an n × n matrix in row-major order; rank 2n − 1."""
    eye, ones = np.eye(n), np.ones((1, n))
    return np.concatenate([np.kron(eye, ones), np.kron(ones, eye)])


def doubly_stochastic(samples: int, n: int, epsilon: float = 0.1, seed: int = 0) -> Problem:
    """v = −C/ε with uniform costs, exp geometry, unit row and column sums: entropic transport."""
    v = -_uniform(seed, 2, samples, n * n) / epsilon
    g = _normal(seed, 3, samples, n * n)
    return Problem("doubly_stochastic", "exp", v, marginals_matrix(n), np.ones(2 * n), g, side=n)


def doubly_stochastic_sigmoid(samples: int, n: int, epsilon: float = 0.1, seed: int = 0) -> Problem:
    """The same matrices in sigmoid geometry, which is the problem LinSATNet solves for them."""
    problem = doubly_stochastic(samples, n, epsilon, seed)
    return replace(problem, family="doubly_stochastic_sigmoid", activation="sigmoid")


def cover(samples: int, K: int, I: int, seed: int = 0) -> Problem:
    """Sigmoid with a 0/1 matrix (about a third ones) and one ``b`` for all: LinSATNet's own form.

    LinSATNet's Sinkhorn steps shift all logits in the support of a row by the same amount, so what
    it approaches is z = σ(v + Pᵀμ) with P the 0/1 pattern of A. For a 0/1 A that is our problem.
    """
    A = (_uniform(seed, 0, I, K) < 1 / 3).astype(float)
    A[np.arange(I), np.arange(I) % K] = 1.0  # no empty row
    b = A @ _sigmoid(_normal(seed, 1, K))
    v = 2 * _normal(seed, 2, samples, K)
    return Problem("cover", "sigmoid", v, A, b, _normal(seed, 3, samples, K))


def nonnegative(samples: int, K: int, I: int, seed: int = 0) -> Problem:
    """``cover`` with weights in (½, 1½) on the pattern: LinSATNet's z is then not the projection.

    (With a dense positive A all its patterns coincide and it cannot meet two constraints at all.)
    """
    problem = cover(samples, K, I, seed)
    A = problem.A * (0.5 + _uniform(seed, 4, I, K))
    b = A @ _sigmoid(_normal(seed, 1, K))
    return replace(problem, family="nonnegative", A=A, b=b)


def linear(samples: int, K: int, I: int, seed: int = 0) -> Problem:
    """The least-squares projection on {A z = b}."""
    A, inside = _normal(seed, 0, I, K), _normal(seed, 1, samples, K)
    v = _normal(seed, 2, samples, K)
    return Problem("linear", "linear", v, A, inside @ A.T, _normal(seed, 3, samples, K))


def softmax(samples: int, K: int, temperature: float, seed: int = 0) -> Problem:
    """exp, Σz = 1, at a temperature. The two largest logits differ by about one temperature.

    Without that tie every gradient of a cold softmax would be 0, and 0 would be right to any digit.
    """
    v = _normal(seed, 2, samples, K)
    top = np.abs(v).max(axis=1)
    v[:, 0] = top
    v[:, 1] = top + temperature * _normal(seed, 4, samples)
    g = _normal(seed, 3, samples, K)
    return Problem("softmax", "exp", v, np.ones((1, K)), np.ones(1), g, temperature=temperature)


def quadratic(samples: int, K: int, I: int, M: int, seed: int = 17) -> Problem:
    """The constraints of DC3's quadratic programs, with a v of its own for each sample."""
    random = np.random.RandomState(seed)
    A, G = random.normal(size=(I, K)), random.normal(size=(M, K))
    upper = np.abs(G @ np.linalg.pinv(A)).sum(1)
    b = 2 * _uniform(seed, 1, samples, I) - 1
    v = 3 * _normal(seed, 2, samples, K)
    return Problem("quadratic", "linear", v, A, b, _normal(seed, 3, samples, K), G=G, upper=upper)


def _within(family: str, activation: str, samples: int, K: int, I: int, M: int, seed: int):
    """Dense signed rows; sides a little beyond a point inside: about a third of them are active."""
    A, G = _normal(seed, 0, I, K), _normal(seed, 5, M, K)
    A[0] = 1
    y = _normal(seed, 1, samples, K)
    y, size = (_sigmoid(y), 0.2) if activation == "sigmoid" else (np.exp(0.5 * y), 0.6)
    upper = y @ G.T + 0.5 * size * np.sqrt(K) * _uniform(seed, 6, samples, M)
    v = _normal(seed, 2, samples, K) * (2 if activation == "sigmoid" else 1)
    g = _normal(seed, 3, samples, K)
    return Problem(family, activation, v, A, y @ A.T, g, G=G, upper=upper)


def exp_within(samples: int, K: int, I: int, M: int, seed: int = 0) -> Problem:
    """Entropic, with inequalities."""
    return _within("exp_within", "exp", samples, K, I, M, seed)


def sigmoid_within(samples: int, K: int, I: int, M: int, seed: int = 0) -> Problem:
    """Fermi–Dirac, with inequalities."""
    return _within("sigmoid_within", "sigmoid", samples, K, I, M, seed)


def cover_within(samples: int, K: int, I: int, M: int, seed: int = 0) -> Problem:
    """LinSATNet's own form: 0/1 rows, I of them =, M/2 ≤ and M/2 ≥ (turned around here)."""
    problem = cover(samples, K, I, seed)
    z = _sigmoid(_normal(seed, 1, K))
    G = (_uniform(seed, 5, M, K) < 1 / 3).astype(float)
    G[np.arange(M), np.arange(M) % K] = 1.0
    gap = 0.02 * G.sum(1) * _uniform(seed, 6, M)
    G[M // 2 :] *= -1
    return replace(problem, family="cover_within", G=G, upper=G @ z + gap)


FAMILIES: dict[str, Callable[..., Problem]] = {
    "sigmoid": sigmoid,
    "doubly_stochastic": doubly_stochastic,
    "doubly_stochastic_sigmoid": doubly_stochastic_sigmoid,
    "cover": cover,
    "nonnegative": nonnegative,
    "linear": linear,
    "softmax": softmax,
    "quadratic": quadratic,
    "exp_within": exp_within,
    "sigmoid_within": sigmoid_within,
    "cover_within": cover_within,
}


def make(family: str, samples: int, size: list[float]) -> Problem:
    """The problem a specification names; ``size`` holds the family's own arguments."""
    return FAMILIES[family](samples, *(int(s) if s == int(s) and s >= 1 else s for s in size))
