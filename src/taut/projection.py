"""taut.project: validate, solve, differentiate."""

import torch
from jaxtyping import Float
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from taut.activation import Activation
from taut.activations import resolve
from taut.autograd import apply, is_transformed
from taut.dual import Dual
from taut.implicit import Multipliers, OnFailure, Task, examine
from taut.linear import LinearMap, dense_map
from taut.rows import Rows
from taut.solution import Solution
from taut.solvers import Newton, Solver
from taut.sparse import SparseMap, sparse_map
from taut.validation import validate


def project(
    v: Float[Tensor, "*batch K"],
    A: Float[Tensor, "*A_batch I K"],
    b: Float[Tensor, "*b_batch I"],
    *,
    activation: str | Activation = "linear",
    solver: Solver = Newton(),
    init: Float[Tensor, "*init_batch I"] | None = None,
    on_failure: OnFailure = "raise",
) -> Solution:
    """The Bregman projection of σ(v) on {z : A z = b}: z = σ(v + Aᵀλ) with A z = b.

    A is (I, K), dense or torch sparse, for all samples, or dense (*batch, I, K); b is
    (*batch, I), or (I,) for all.
    `z`, `multipliers` and `u` are differentiable in v, A and b, twice. Each sample of the batch
    is judged alone; `on_failure` says whether one that fails raises `SolveError` or is returned
    with its `status`, z as far as it got, and zero gradients.

    >>> import taut
    >>> v = torch.tensor([1.0, 2.0, 3.0])
    >>> taut.project(v, torch.ones(1, 3), torch.ones(1), activation="exp").z  # softmax
    tensor([0.0900, 0.2447, 0.6652])
    """
    row = resolve(activation)
    validate(v, A, b, init, row, on_failure)
    linear = as_map(A)
    rows = None if is_transformed(A) else _examined(A, linear, solver)
    return project_examined(v, linear, b, rows, row, solver, init, on_failure)


# What is known of an A, for as long as that tensor lives: with it the values it was found for.
_known = WeakTensorKeyDictionary()


def _examined(A: Tensor, linear: LinearMap, solver: Solver) -> Rows:
    """`examine`, or what it gave last time, if A is still what it was then."""
    if isinstance(linear, SparseMap) or A.requires_grad or torch.compiler.is_compiling():
        return examine(linear, solver)
    known = _known.get(A)
    if known is not None:
        values, dtype, rows = known
        if dtype == solver.dtype and values.dtype == A.dtype and values.device == A.device:
            if torch.equal(values, A):
                return rows
    rows = examine(linear, solver)
    if rows.transform is None:  # else there is a warning to be given again
        _known[A] = A.clone(), solver.dtype, rows
    return rows


def as_map(A: Tensor) -> LinearMap:
    """A as an operator."""
    return dense_map(A) if A.layout == torch.strided else sparse_map(A)


def project_examined(
    v: Tensor,
    A: LinearMap,
    b: Tensor,
    rows: Rows | None,
    activation: Activation,
    solver: Solver,
    init: Tensor | None,
    on_failure: OnFailure,
) -> Solution:
    """`project` with validated arguments and `rows = examine(A)`, or None to have it made."""
    if b.ndim < v.ndim:
        b = b.expand(*v.shape[:-1], b.shape[-1])
    start = None if init is None else init.detach().expand_as(b)
    pattern = A.pattern if isinstance(A, SparseMap) else None
    task = Task(activation, solver, rows, pattern, on_failure, v.shape[-2] if v.ndim > 1 else 1)
    found = apply(Multipliers, v, A.data, b, start, task)
    multipliers, u, z, residual, iterations, status, condition = found
    dual = Dual(activation, A, v, b)
    kernel, complete = (None, False) if is_transformed(z) else (task.kernel, task.complete)
    given = (z, multipliers, u, residual, iterations, status, condition, dual)
    return Solution(*given, kernel, complete)
