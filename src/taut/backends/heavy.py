"""Weighted Gauss–Jordan for samples whose slopes lie far apart: compiled where it can be."""

import torch
from torch import Tensor

from taut.backends.cpu import readable, run, variant
from taut.systems import Pulled, solve_stably


def pull_stably(
    A: Tensor, w: Tensor, left_out: Tensor | None, g_z: Tensor, g_u: Tensor, g_ν: Tensor
) -> Pulled:
    """`solve_stably` of systems/stable.py, by the compiled code for float64 on a CPU.

    >>> A, w = torch.ones(1, 1, 2, dtype=torch.float64), torch.ones(1, 2, dtype=torch.float64)
    >>> pull_stably(A, w, None, torch.eye(2, dtype=torch.float64)[:1], 0 * w, 0 * w[:, :1]).x
    tensor([[ 0.5000, -0.5000]], dtype=torch.float64)
    """
    given = A, w, g_z, g_u, g_ν
    fits = all(x.dtype == torch.float64 for x in given) and len(w) > 0
    if variant() is None or not fits or not readable(*given, left_out):
        return solve_stably(A, w, left_out, g_z, g_u, g_ν)
    # Kept by name: C reads them by address.
    A, w, g_z, g_u, g_ν = (x.contiguous() for x in given)
    out = None if left_out is None else left_out.contiguous()
    found = Pulled(torch.empty_like(w), torch.empty_like(g_ν), torch.empty_like(w))
    (I, K), n = A.shape[-2:], len(w)
    values = {
        "a": A.data_ptr(),
        "stride": 0 if len(A) == 1 else I * K,
        "left_out": 0 if out is None else out.data_ptr(),
        "w": w.data_ptr(),
        "g_z": g_z.data_ptr(),
        "g_u": g_u.data_ptr(),
        "g_v": g_ν.data_ptr(),
        "x": found.x.data_ptr(),
        "s": found.s.data_ptr(),
        "t": found.t.data_ptr(),
        "samples": n,
        "equations": I,
        "outputs": K,
        "next": 0,
        "unsolved": n,
    }
    if run("stable", values, n * I * I * K).unsolved > 0:
        raise MemoryError("no memory left for derivatives.")
    return found
