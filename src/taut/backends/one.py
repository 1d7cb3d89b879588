"""The compiled code for samples alone: see csrc/one.h. All numbers are in float64."""

from ctypes import Structure, addressof
from typing import Any, final

import torch
from jaxtyping import Float
from torch import Tensor

from taut.activations import Activation
from taut.backends.base import Rules
from taut.backends.cpu import Given, laid_out, readable
from taut.backends.library import run, variant
from taut.backends.plan import Plan, functions
from taut.maps import LinearMap

_MOST = 64  # rows, or outputs: with more of them torch is as fast
EVERY = 4  # steps of the interior point method from one ν that is kept to the next


@final
class One:
    """Newton's method, and steps of the interior point method, for one σ."""

    def __init__(self, plan: Plan, given: Given, line: bool) -> None:
        self._arrays, self._given, self._line = plan, given, line  # C reads them by address
        self._plan: Structure = laid_out("plan", plan)

    @staticmethod
    def of(activation: Activation, line: bool, C: LinearMap, rules: Rules) -> "One | None":
        """None where there is no such code, or where torch is as fast."""
        M, K = C.shape
        if variant() is None or not 0 < M <= _MOST or K > _MOST or not C.data.is_cpu:
            return None
        two = torch.zeros(2, K, dtype=torch.float64, device="cpu")
        known = functions(activation, K, two)
        if known is None:
            return None
        sizes = dict.fromkeys(_SIZES, 0) | {"outputs": K, "given": K}
        plan = Plan(sizes, known | {"first": two[0], "second": two[1]})
        return One(plan, Given.of(rules, torch.float64), line)

    def _values(self, C: LinearMap, samples: int) -> tuple[dict[str, Any], dict[str, Any]]:
        """What both calls are given: numbers, and tensors."""
        M, K = C.shape
        matrix = C.dense().contiguous()
        values = {"plan": addressof(self._plan), "rows": M, "outputs": K, "line": self._line}
        values |= {"stride": 0 if C.shared else M * K}
        values |= {"samples": samples, "next": 0, "unsolved": samples}
        return values, {"matrix": matrix}

    def newton(
        self,
        C: LinearMap,
        given: dict[str, Tensor | None],
        start: Float[Tensor, "n M"],
        rules: Rules,
        budget: int,
        last: bool,
    ) -> dict[str, Tensor] | None:
        """Every sample as `newton` of solvers/arc.py leaves it; None where C cannot read them."""
        values, tensors = self._values(C, len(start))
        made = {"multipliers": start.clone(memory_format=torch.contiguous_format)}
        v = given["v"]
        assert v is not None  # noqa: S101
        made |= {name: torch.empty_like(v, memory_format=torch.contiguous_format) for name in "uzw"}
        made |= {"r": torch.empty_like(made["multipliers"]), "level": v.new_empty(len(v))}
        iterations = torch.zeros(len(v), dtype=torch.long, device="cpu")
        made |= {"iterations": iterations, "status": iterations - 1}
        values |= {"rules": self._given.values["rules"], "last": last, "budget": budget}
        values["target"] = max(rules.tol or 0.0, 8 * 2.0**-52)
        return made if self._called("one", values, tensors | given | made) else None

    def walk(
        self,
        C: LinearMap,
        given: dict[str, Tensor],
        path: dict[str, Tensor],
        boxed: bool,
        tol: float,
        steps: int,
    ) -> dict[str, Tensor] | None:
        """So many steps from a point of the path, which is written to."""
        n = len(given["v"])
        values, tensors = self._values(C, n)
        seen = given["v"].new_zeros(n, steps // EVERY, C.shape[0])
        iterations = torch.zeros(n, dtype=torch.long, device="cpu")
        made = {"seen": seen, "iterations": iterations}
        made["stopped"] = torch.ones(n, dtype=torch.bool, device="cpu")
        values |= {"kept": seen.shape[1], "every": EVERY, "steps": steps}
        values |= {"boxed": boxed, "tol": tol}
        return made if self._called("trail", values, tensors | given | path | made) else None

    @staticmethod
    def _called(name: str, values: dict[str, Any], tensors: dict[str, Tensor | None]) -> bool:
        """False where C could not read them, or had no memory."""
        kept = {key: x if x is None else x.contiguous() for key, x in tensors.items()}
        there = [x for x in kept.values() if x is not None and x.numel()]
        if not readable(*there) or any(x.dtype not in _DTYPES for x in there):
            return False
        addresses = {key: 0 if x is None else x.data_ptr() for key, x in kept.items()}
        work = values["samples"] * values["rows"] ** 2 * values["outputs"]
        return run(name, values | addresses, work) == 0


_DTYPES = torch.float64, torch.int64, torch.bool
#: Of a plan; this code needs none but two.
_SIZES = (
    "outputs", "given", "rows", "kept", "disjoint", "constraints",
    "positive", "even", "faint", "safe", "worked", "uniform",
)  # fmt: skip
