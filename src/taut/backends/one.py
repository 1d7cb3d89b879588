"""The compiled code for samples alone: see csrc/one.h. All numbers are in float64."""

from functools import cache
from typing import Any, final

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import pad

from taut.activations import Activation
from taut.backends.arrays import Arrays, Laid
from taut.backends.base import Rules
from taut.backends.cpu import Given
from taut.backends.library import run, variant
from taut.backends.plan import Plan, bending, functions
from taut.maps import LinearMap

_MOST = 64  # rows, or outputs: with more of them torch is as fast
EVERY = 4  # steps of the interior point method from one ν that is kept to the next


@final
class One:
    """Newton's method, and steps of the interior point method, for one σ."""

    def __init__(self, plan: Plan, given: Given, even: bool) -> None:
        self._plan, self._given, self._even = Laid("plan", plan), given, even

    @staticmethod
    def of(activation: Activation, even: bool, C: LinearMap, rules: Rules) -> "One | None":
        """None where there is no such code, or where torch is as fast. `even`: no σ bends."""
        M, K = C.shape
        if variant() is None or not 0 < M <= _MOST or K > _MOST or not C.data.is_cpu:
            return None
        two = torch.zeros(2, K, dtype=torch.float64, device="cpu")
        known = functions(activation, K, two)
        if known is None:
            return None
        sizes = {"outputs": len(known["kind"]), "given": K, **bending(known, K)}
        more = (0, sizes["outputs"] - K)
        plan = Plan(sizes, known | {"first": pad(two[0], more), "second": pad(two[1], more)})
        return One(plan, Given.of(rules, torch.float64), even)

    def _called(
        self,
        name: str,
        C: LinearMap,
        n: int,
        tensors: Any,  # by name; None where there is none
        **numbers: Any,
    ) -> bool:
        """False where C could not read the tensors, or had no memory."""
        M, K = C.shape
        tensors["matrix"] = C.dense().contiguous().expand(n, M, K)
        kept, boxed = numbers.get("kept", 0), numbers.get("boxed", False)
        found = _arrays(name, M, K, boxed, kept).addresses(n, tensors)
        if found is None:
            return False
        values = found[0] | numbers | {"plan": self._plan.address, "line": self._even}
        return run(name, values, n * M * M * K).unsolved == 0

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
        n, v = len(start), given["v"]
        assert v is not None  # noqa: S101
        made = {"multipliers": start.clone(memory_format=torch.contiguous_format)}
        made |= {name: torch.empty_like(v, memory_format=torch.contiguous_format) for name in "uzw"}
        made |= {"r": torch.empty_like(made["multipliers"]), "level": v.new_empty(n)}
        iterations = torch.zeros(n, dtype=torch.long, device="cpu")
        made |= {"iterations": iterations, "status": iterations - 1}
        numbers = {"rules": self._given.values["rules"], "last": last, "budget": budget}
        numbers["target"] = max(rules.tol or 0.0, 8 * 2.0**-52)
        return made if self._called("one", C, n, given | made, **numbers) else None

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
        seen = given["v"].new_zeros(n, steps // EVERY, C.shape[0])
        iterations = torch.zeros(n, dtype=torch.long, device="cpu")
        made = {"seen": seen, "iterations": iterations}
        made["stopped"] = torch.ones(n, dtype=torch.bool, device="cpu")
        numbers = {
            "kept": seen.shape[1],
            "every": EVERY,
            "steps": steps,
            "boxed": boxed,
            "tol": tol,
        }
        return made if self._called("trail", C, n, given | path | made, **numbers) else None


@cache
def _arrays(name: str, rows: int, outputs: int, boxed: bool, kept: int) -> Arrays:
    sizes = {"rows": rows, "outputs": outputs, "kept": kept, "all": rows + boxed * outputs}
    return Arrays(name, sizes, torch.float64, rows=rows, outputs=outputs)
