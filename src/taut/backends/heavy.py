"""Weighted Gauss–Jordan for samples whose slopes lie far apart: compiled where it can be."""

from functools import lru_cache

from torch import Tensor

from taut.backends.arrays import Arrays
from taut.backends.library import run, variant
from taut.systems import Pulled, solve_stably


def pull_stably(
    A: Tensor,
    w: Tensor,
    left_out: Tensor | None,
    g_z: Tensor,
    g_u: Tensor,
    g_ν: Tensor,
    metric: Tensor | None = None,
) -> Pulled:
    """`solve_stably` of systems/stable.py, by the compiled code for float64 on a CPU.

    >>> import torch
    >>> A, w = torch.ones(1, 1, 2, dtype=torch.float64), torch.ones(1, 2, dtype=torch.float64)
    >>> pull_stably(A, w, None, torch.eye(2, dtype=torch.float64)[:1], 0 * w, 0 * w[:, :1]).x
    tensor([[ 0.5000, -0.5000]], dtype=torch.float64)
    """
    (I, K), n = A.shape[-2:], w.shape[0]
    if variant() is None or not n:
        return solve_stably(A, w, left_out, g_z, g_u, g_ν, metric)
    each = A.contiguous().expand(n, I, K)  # one for all, or its own for each
    length = None if metric is None else metric.contiguous().expand(n, I, I)
    arrays = {"a": each, "left_out": left_out, "metric": length}
    arrays |= {"w": w, "g_z": g_z, "g_u": g_u, "g_v": g_ν}
    found = _arrays(I, K).addresses(n, arrays, ("x", "s", "t"))
    if found is None:
        return solve_stably(A, w, left_out, g_z, g_u, g_ν, metric)
    call, made = found
    if run("stable", call, n * I * I * K).unsolved > 0:
        raise MemoryError("no memory left for derivatives.")
    return Pulled(*made)


@lru_cache(64)
def _arrays(equations: int, outputs: int) -> Arrays:
    sizes = {"equations": equations, "outputs": outputs}
    return Arrays("stable", sizes, None, **sizes)
