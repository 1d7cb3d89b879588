"""taut.project: validate, solve, differentiate."""

from dataclasses import dataclass
from typing import Any, Literal, final

import torch
from jaxtyping import Float
from torch import Tensor

from taut.activation import Activation
from taut.activations import resolve
from taut.dual import Dual
from taut.factor import solve_gram
from taut.linear import dense_map
from taut.rows import Rows, analyse
from taut.solution import Solution, SolveError, Status, explain
from taut.solvers import Newton, Solver

OnFailure = Literal["raise", "return"]


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

    A is (I, K), one for all samples, or (*batch, I, K); b is (*batch, I), or (I,) for all.
    `z`, `multipliers` and `u` are differentiable in v, A and b, twice. Each sample of the batch
    is judged alone; `on_failure` says whether one that fails raises `SolveError` or is returned
    with its `status`, z as far as it got, and zero gradients.

    >>> import taut
    >>> v = torch.tensor([1.0, 2.0, 3.0])
    >>> taut.project(v, torch.ones(1, 3), torch.ones(1), activation="exp").z  # softmax
    tensor([0.0900, 0.2447, 0.6652])
    """
    validate(v, A, b, init, on_failure)
    rows = None if _is_transformed(A) else prepare(A)
    return project_prepared(v, A, b, rows, resolve(activation), solver, init, on_failure)


def prepare(A: Tensor) -> Rows:
    """What depends on A alone; `Projection` does it once for all batches."""
    matrix = A.detach()
    matrix = matrix.where(matrix.isfinite(), 0)
    return analyse(matrix if A.ndim == 2 else matrix.reshape(A.shape[:-2].numel(), *A.shape[-2:]))


def project_prepared(
    v: Tensor,
    A: Tensor,
    b: Tensor,
    rows: Rows | None,
    activation: Activation,
    solver: Solver,
    init: Tensor | None,
    on_failure: OnFailure,
) -> Solution:
    """`project` with validated arguments and `rows = prepare(A)`, or None to have it made."""
    b = b.expand(*v.shape[:-1], b.shape[-1])
    start = torch.zeros_like(b) if init is None else init.detach().expand_as(b)
    task = _Task(activation, solver, rows, on_failure, v.ndim - 1)
    multipliers, u, iterations, status = _Multipliers.apply(v, A, b, start.to(v.dtype), task)
    z = activation.output(u)
    dual = Dual(activation, dense_map(A), v, b)
    with torch.no_grad():
        residual = _largest(dual.residual(z))
    return Solution(z, multipliers, u, residual, iterations, status, dual)


def _largest(residual: Tensor) -> Tensor:
    if residual.shape[-1] == 0:
        return residual.new_zeros(residual.shape[:-1])
    return residual.abs().amax(-1)


def _is_transformed(x: Tensor) -> bool:
    """Is x seen through torch.func (vmap, grad), so that its values cannot be looked at?"""
    return torch._C._functorch.is_functorch_wrapped_tensor(x)  # pyright: ignore


@final
@dataclass(frozen=True, eq=False)
class _Task:
    """What the autograd functions need besides tensors."""

    activation: Activation
    solver: Solver
    rows: Rows | None
    on_failure: OnFailure
    batch_ndim: int

    def analysed(self, A: Tensor) -> Rows:
        return prepare(A) if self.rows is None else self.rows


@final
class _Multipliers(torch.autograd.Function):
    """(v, A, b) → (λ, u): the solve, and the implicit function theorem as its derivative.

    With w = σ'(u), H = A diag(w) Aᵀ and gradients g on u and g_λ on λ:
    s = H⁻¹(A g + g_λ),  ∂v = g − w∘Aᵀs,  ∂b = s,  ∂A = λ ∂vᵀ − s zᵀ.
    """

    @staticmethod
    def forward(v: Tensor, A: Tensor, b: Tensor, init: Tensor, task: _Task) -> tuple:
        batch, columns, rows = v.shape[:-1], v.shape[-1], b.shape[-1]
        n = batch.numel()
        flat_v, flat_b, start = v.reshape(n, columns), b.reshape(n, rows), init.reshape(n, rows)
        flat_A = A if A.ndim == 2 else A.reshape(n, rows, columns)
        finite = _finite(flat_v) & _finite(flat_b) & _finite(flat_A)
        if bool(finite.all()):
            dual = Dual(task.activation, dense_map(flat_A), flat_v, flat_b)
        else:
            dual = _neutral(task.activation, flat_v, flat_A, flat_b, finite)
        start = _usable(dual, start)
        size = batch[-1] if task.batch_ndim else 1
        outcome = task.solver.solve(dual, task.analysed(A), start, size)
        multipliers, u, status = outcome.multipliers, outcome.u, outcome.status
        if not bool(finite.all()):
            status = status.where(finite, int(Status.NONFINITE))
            multipliers = multipliers.where(finite.unsqueeze(-1), 0)
            u = u.where(finite.unsqueeze(-1), flat_v)
        if task.on_failure == "raise" and bool((status != Status.CONVERGED).any()):
            z = task.activation.sigma(u)
            residual = _largest(dense_map(flat_A).apply(z) - flat_b)
            raise SolveError(
                explain(status.reshape(batch), residual.reshape(batch)),
                status.reshape(batch),
                residual.reshape(batch),
            )
        return (
            multipliers.reshape(b.shape),
            u.reshape(v.shape),
            outcome.iterations.reshape(batch),
            status.reshape(batch),
        )

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
        _, A, _, _, task = inputs
        multipliers, u, iterations, status = output
        ctx.mark_non_differentiable(iterations, status)
        ctx.save_for_backward(A, multipliers, u, status)
        ctx.task = task

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple:
        A, multipliers, u, status = ctx.saved_tensors
        # A failed sample has zero gradient, and nothing of it may reach its neighbours.
        ok = (status == Status.CONVERGED).unsqueeze(-1)
        zero = torch.zeros((), dtype=u.dtype, device=u.device)
        g_multipliers, g_u = (torch.where(ok, g, zero) for g in grads[:2])
        multipliers, u = torch.where(ok, multipliers, zero), torch.where(ok, u, zero)
        activation, linear = ctx.task.activation, dense_map(A)
        w, z = activation.slope(u), activation.output(u)
        w, z = torch.where(ok, w, zero), torch.where(ok, z, zero)
        s = _GramSolve.apply(w, A, linear.apply(g_u) + g_multipliers, ctx.task)
        s = torch.where(ok, s, zero)
        dv = g_u - w * linear.adjoint(s)
        dA = None
        if ctx.needs_input_grad[1]:
            dA = linear.outer(multipliers, dv) - linear.outer(s, z)
        return dv, dA, s, None, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple, *args: Any) -> tuple:
        A, task = args[1], args[4]
        v, b, init = (_lead(args[i], in_dims[i], info.batch_size) for i in (0, 2, 3))
        A, task = _lead_map(A, in_dims[1], v, task)
        outputs = _Multipliers.apply(v, A, b, init, task)
        return outputs, (0, 0, 0, 0)


def _finite(x: Tensor) -> Tensor:
    """For each sample: is every entry a number? The sum settles the usual case at once."""
    if bool(x.sum().isfinite()):
        return torch.ones((), dtype=torch.bool, device=x.device)
    if x.ndim == 3:
        x = x.flatten(1)
    return x.isfinite().all(-1)


def _neutral(activation: Activation, v: Tensor, A: Tensor, b: Tensor, finite: Tensor) -> Dual:
    """The problems with those that hold NaN or inf replaced by ones already solved."""
    keep = finite.expand(len(v)).unsqueeze(-1)
    v = v.where(keep, 0)
    linear = dense_map(A.where(A.isfinite(), 0))
    return Dual(activation, linear, v, b.where(keep, linear.apply(activation.sigma(v))))


def _usable(dual: Dual, init: Tensor) -> Tensor:
    """A start that is not a number, or absurdly far, is worse than none."""
    if bool(init.abs().sum() < 1e3):
        return init
    y = dual.A.adjoint(init.nan_to_num()).abs().amax(-1)
    near = init.isfinite().all(-1) & (y <= 1e3 * (1 + dual.v.abs().amax(-1)))
    return init.where(near.unsqueeze(-1), 0)


@final
class _GramSolve(torch.autograd.Function):
    """s = (A diag(w) Aᵀ)⁻¹ r, differentiable as often as needed: its backward is itself.

    With t = (A diag(w) Aᵀ)⁻¹ g: ∂r = t, ∂w = −Aᵀt ∘ Aᵀs, ∂A = −t (w∘Aᵀs)ᵀ − s (w∘Aᵀt)ᵀ.
    """

    @staticmethod
    def forward(w: Tensor, A: Tensor, rhs: Tensor, task: _Task) -> Tensor:
        rows = task.analysed(A)
        n = rhs.shape[:-1].numel()
        flat = rows.restrict(rhs.reshape(n, rhs.shape[-1]))
        s = solve_gram(rows.basis, w.reshape(n, w.shape[-1]), flat, rows.left_out)
        return rows.leave(s).reshape(rhs.shape)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        w, A, _, ctx.task = inputs
        ctx.save_for_backward(w, A, output)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple:
        w, A, s = ctx.saved_tensors
        linear = dense_map(A)
        t = _GramSolve.apply(w, A, grads[0], ctx.task)
        forth, back = linear.adjoint(s), linear.adjoint(t)
        dA = None
        if ctx.needs_input_grad[1]:
            dA = -linear.outer(t, w * forth) - linear.outer(s, w * back)
        return -back * forth, dA, t, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple, *args: Any) -> tuple:
        w, A, rhs, task = args
        w, rhs = _lead(w, in_dims[0], info.batch_size), _lead(rhs, in_dims[2], info.batch_size)
        A, task = _lead_map(A, in_dims[1], w, task)
        return _GramSolve.apply(w, A, rhs, task), 0


def _lead(x: Tensor, dim: int | None, size: int) -> Tensor:
    """x with the mapped dimension in front, repeated where x is not mapped."""
    return x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)


def _lead_map(A: Tensor, dim: int | None, v: Tensor, task: _Task) -> tuple[Tensor, _Task]:
    if dim is None and A.ndim == 2:
        batch_ndim = task.batch_ndim
        return A, _Task(task.activation, task.solver, task.rows, task.on_failure, batch_ndim)
    A = _lead(A, dim, v.shape[0])
    if A.ndim < v.ndim + 1:  # one matrix for each mapped element, shared by the batch within
        A = A.reshape(A.shape[0], *[1] * (v.ndim + 1 - A.ndim), *A.shape[1:])
        A = A.expand(*v.shape[:-1], *A.shape[-2:])
    return A, _Task(task.activation, task.solver, None, task.on_failure, task.batch_ndim)


def validate(v: Any, A: Any, b: Any, init: Any, on_failure: str) -> None:
    """Refuse what cannot be a problem, and say what was received."""
    given = {"v": v, "A": A, "b": b} | ({} if init is None else {"init": init})
    for name, x in given.items():
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} must be a torch.Tensor; got {type(x).__name__}.")
        if name != "init" and x.dtype not in (torch.float32, torch.float64):
            raise ValueError(
                f"{name} has dtype {x.dtype}; taut works in torch.float32 or torch.float64. "
                f"Convert it with {name}.float() or {name}.double()."
            )
    if not v.dtype == A.dtype == b.dtype:
        raise ValueError(
            f"v, A and b must have one dtype; got {v.dtype}, {A.dtype} and {b.dtype}. "
            "Convert them to the one you want the result in."
        )
    if len({x.device for x in given.values()}) > 1:
        where = ", ".join(f"{name} on {x.device}" for name, x in given.items())
        raise ValueError(f"all tensors must be on one device; got {where}.")
    if on_failure not in ("raise", "return"):
        raise ValueError(f'on_failure must be "raise" or "return"; got {on_failure!r}.')
    _validate_shapes(v, A, b, init)


def _validate_shapes(v: Tensor, A: Tensor, b: Tensor, init: Tensor | None) -> None:
    shapes = f"got v {tuple(v.shape)}, A {tuple(A.shape)}, b {tuple(b.shape)}"
    if v.ndim < 1 or b.ndim < 1 or A.ndim < 2:
        raise ValueError(
            f"v must be (*batch, K), A (I, K) or (*batch, I, K), b (*batch, I); {shapes}."
        )
    batch, columns, rows = v.shape[:-1], v.shape[-1], A.shape[-2]
    if columns == 0:
        raise ValueError(f"v has no outputs (K = 0); {shapes}.")
    if A.shape[-1] != columns:
        hint = " Is A transposed?" if A.ndim == 2 and A.shape[0] == columns else ""
        raise ValueError(
            f"A must have one column for each of the K = {columns} outputs in v; {shapes}.{hint}"
        )
    if A.ndim > 2 and A.shape[:-2] != batch:
        raise ValueError(
            f"A for each sample must have the batch dimensions of v, {tuple(batch)}; {shapes}."
        )
    if b.shape not in ((rows,), (*batch, rows)):
        raise ValueError(
            f"b must be (I,) or (*batch, I) = {(*batch, rows)}, an entry per row of A; {shapes}."
        )
    if init is not None and init.shape not in ((rows,), (*batch, rows)):
        raise ValueError(
            f"init must be (I,) or (*batch, I) = {(*batch, rows)}; got {tuple(init.shape)}."
        )
