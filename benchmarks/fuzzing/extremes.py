"""Proofs among the smallest and the largest numbers, against rational arithmetic.

Each block has some problems of few rows and outputs whose numbers are denormal, 1e308, or anything
between. Multipliers are drawn, and in some blocks those that `project` calls a proof are looked at.
"""

from collections import Counter
from typing import Any

import numpy as np
import torch

import taut
from fuzzing.proofs import Array, exact_claim
from taut import Status

_PROBLEMS, _CANDIDATES = 2, 8  # of a block; multipliers for each
_EVERY = 16  # blocks: such problems take long to solve
_SIZES = (5e-324, 1e-320, 1e-308, 1e-290, 1e-200, 1e-20, 1.0, 1e20, 1e200, 1e300, 1.7e308)
_ACTIVATIONS = {"linear": (-np.inf, np.inf), "exp": (0.0, np.inf), "tanh": (-1.0, 1.0)}
_CLAIM = "a proof among extreme numbers holds in exact arithmetic"


def check_extremes(seed: int, number: int) -> tuple[list[tuple[int, str]], Counter[str]]:
    """The problems of block `number` with a claim that is not true; and how many were looked at."""
    draws = np.random.default_rng([seed, number, 29])
    failures, counts = [], Counter[str]()
    for problem in range(_PROBLEMS):
        given = _drawn(draws)
        candidates = _candidates(draws, given["C"])
        claims = _claims(given, candidates)
        if number % _EVERY == 0:
            claims += _verdicts(given)
        counts["proofs among extreme numbers"] += len(claims)
        if not all(_is_true(given, *claim) for claim in claims):
            failures.append((problem, _CLAIM))
    return failures, counts


def _numbers(draws: np.random.Generator, *shape: int) -> Array:
    """Of a few sizes, some of them 0; a third of all powers of two, whose sums are exact."""
    sizes = draws.choice(draws.choice(_SIZES, 3), shape)
    x = sizes * draws.choice([-1.0, 1.0], shape) * draws.uniform(0.5, 1.0, shape)
    x = np.where(draws.random() < 0.3, np.sign(x) * sizes, x)
    return np.where(draws.random(shape) < 0.2, 0.0, x)


def _drawn(draws: np.random.Generator) -> dict[str, Any]:
    """Rows C with their sides, the first of them equations; and ends of z."""
    rows, outputs = (int(draws.integers(1, most)) for most in (4, 5))
    name = str(draws.choice(list(_ACTIVATIONS)))
    equations = int(draws.integers(0, rows + 1))
    C, side = _numbers(draws, rows, outputs), _numbers(draws, rows)
    lower, upper = side.copy(), side.copy()
    open_, which = draws.random(rows - equations) < 0.7, draws.random(rows - equations) < 0.5
    lower[equations:][open_ & which], upper[equations:][open_ & ~which] = -np.inf, np.inf
    low, high = (np.full(outputs, x) for x in _ACTIVATIONS[name])
    if equations == rows and draws.random() < 0.5:  # bounds on z
        bound = _numbers(draws, outputs)
        low = np.maximum(low, np.where(draws.random(outputs) < 0.5, bound, -np.inf))
        high = np.minimum(high, np.where(draws.random(outputs) < 0.5, np.abs(bound), np.inf))
        given = {"lower": low, "upper": high}
    elif equations < rows:
        given = {"G": C[equations:], "lower": lower[equations:], "upper": upper[equations:]}
    else:
        given = {}
    if equations:
        given |= {"A": C[:equations], "b": side[:equations]}
    return {"C": C, "sides": (lower, upper), "ends": (low, high), "name": name, "given": given}


def _candidates(draws: np.random.Generator, C: Array) -> Array:
    """Multipliers: any, and ones for which columns of C cancel."""
    found = [_numbers(draws, len(C)) for _ in range(_CANDIDATES - 2)]
    return np.stack([*found, *draws.choice([-1.0, 0.0, 1.0], (2, len(C)))])


def _claims(problem: dict[str, Any], candidates: Array) -> list[tuple[Array, float]]:
    """What `is_certificate` says is proven: multipliers, and how far."""
    dense = {name: torch.from_numpy(x) for name, x in problem["given"].items()}
    sparse = {name: x.to_sparse() if name in "AG" else x for name, x in dense.items()}
    claims = []
    for given in (dense, sparse):
        A, b = given.pop("A", None), given.pop("b", None)
        for radius in (np.inf, 1e300, 1.0):
            proven = taut.is_certificate(
                torch.from_numpy(candidates), A, b, problem["name"], **given, radius=radius
            )
            claims += [(x, radius) for x in candidates[proven.expand(len(candidates)).numpy()]]
    return claims


def _verdicts(problem: dict[str, Any]) -> list[tuple[Array, float]]:
    """The proof that comes with INFEASIBLE."""
    given = {name: torch.from_numpy(x) for name, x in problem["given"].items()}
    v = torch.zeros(problem["C"].shape[1], dtype=torch.float64)
    options = {"activation": problem["name"], "on_failure": "return"}
    solution = taut.project(v, given.pop("A", None), given.pop("b", None), **given, **options)
    if int(solution.status) != Status.INFEASIBLE:
        return []
    return [(solution.multipliers.numpy(), solution.radius.item())]


def _is_true(problem: dict[str, Any], multipliers: Array, radius: float) -> bool:
    (lower, upper), (least, most) = problem["sides"], problem["ends"]
    if (lower > upper).any() or (least > most).any():
        return True
    sides, ends = problem["sides"], problem["ends"]
    return exact_claim(multipliers, problem["C"], sides, ends, radius)
