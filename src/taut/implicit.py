"""The solve as a differentiable function of v, A and b, by the implicit function theorem."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, final

import torch
from torch import Tensor

from taut.activation import Activation
from taut.autograd import apply
from taut.dual import Dual
from taut.factor import share, solve_gram
from taut.kernel import Kernel, readable
from taut.linear import DenseMap, LinearMap, dense_map
from taut.newton import contradictory, smallest
from taut.rows import Rows, analyse, unexamined
from taut.solution import SolveError, Status, explain
from taut.solver import Outcome
from taut.solvers import Newton, Solver
from taut.sparse import Pattern, SparseMap

OnFailure = Literal["raise", "return"]


@final
@dataclass(eq=False)
class Task:
    """What the autograd functions need besides tensors."""

    activation: Activation
    solver: Solver
    rows: Rows | None  # what is known of A; None to have it worked out
    pattern: Pattern | None  # where the non-zeros of a sparse A are
    on_failure: OnFailure
    group_size: int = 1  # so many consecutive samples are a group, for solvers that go by groups
    # Noted by the solve: the kernel, if it took part, and whether every sample has converged.
    kernel: Kernel | None = None
    complete: bool = False

    def map(self, data: Tensor) -> LinearMap:
        """A, from the tensor that carries its gradient."""
        return dense_map(data) if self.pattern is None else SparseMap(data, self.pattern)

    def examined(self, data: Tensor) -> Rows:
        """What there is to know of A's rows, in the dtype of the solver."""
        return examine(self.map(data.detach()), self.solver) if self.rows is None else self.rows


def examine(A: LinearMap, solver: Solver) -> Rows:
    """What depends on A alone; `Projection` does it once for all batches."""
    data, finite = A.data.detach(), A.data.isfinite()
    data = data.where(finite, 0).to(solver.dtype or data.dtype)
    if isinstance(A, SparseMap):
        return unexamined(SparseMap(data, A.pattern))
    if data.ndim > 2:
        data = data.reshape(data.shape[:-2].numel(), *data.shape[-2:])
    rows = analyse(data, torch.finfo(A.data.dtype).eps)
    return rows if bool(finite.all()) else replace(rows, kernels=None)


@final
class Multipliers(torch.autograd.Function):
    """(v, A, b) → (λ, u, z): the solve, and the implicit function theorem as its derivative.

    With w = σ'(u), H = A diag(w) Aᵀ, gradients g_λ, g_u, g_z and g = g_u + w∘g_z:
    s = H⁻¹(A g + g_λ),  ∂v = g − w∘Aᵀs,  ∂b = s,  ∂A = λ ∂vᵀ − s zᵀ.
    """

    @staticmethod
    def forward(v: Tensor, data: Tensor, b: Tensor, init: Tensor | None, task: Task) -> tuple:
        batch, n = v.shape[:-1], v.shape[:-1].numel()
        rows = task.examined(data)
        flat_v, flat_b, start = v, b, init
        if v.ndim != 2:
            flat_v, flat_b = (x.reshape(n, x.shape[-1]) for x in (v, b))
            start = None if init is None else init.reshape(n, init.shape[-1])
        if data.ndim > 2:
            data = data.reshape(n, *data.shape[-2:])
        quick = _quickly(flat_v, flat_b, start, data, task, rows)
        if quick is None:
            found = _solve(flat_v, flat_b, start, data, task, rows)
            residual = _residual(flat_v, flat_b, found.z, data, task)
        else:
            found, residual = quick
        if task.on_failure == "raise" and not task.complete and bool(found.status.any()):
            problem = Dual(task.activation, task.map(data), flat_v, flat_b)
            status, residual = found.status.reshape(batch), residual.reshape(batch)
            raise SolveError(_raised(status, residual, problem), status, residual)
        condition = rows.condition.to(v.dtype).expand(n)
        multipliers, u, z, iterations, status = found
        each = residual, iterations, status, condition
        if v.ndim == 2:
            return multipliers, u, z, *each
        outputs = multipliers.reshape(b.shape), u.reshape(v.shape), z.reshape(v.shape)
        return *outputs, *(x.reshape(batch) for x in each)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
        multipliers, u, _, residual, iterations, status, condition = output
        ctx.mark_non_differentiable(residual, iterations, status, condition)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(inputs[1], multipliers, u, status)
        ctx.task = inputs[4]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple:
        if all(g is None for g in grads):  # `matched_loss` needs nothing from here
            return None, None, None, None, None
        data, multipliers, u, status = ctx.saved_tensors
        if not ctx.needs_input_grad[1]:
            found = _quick_gradient(data, multipliers, u, status, grads[:3], ctx.task)
            if found is not None:
                return found[0], None, found[1], None, None
        dv, db, outer = _gradient(data, multipliers, u, status, grads[:3], ctx.task)
        return dv, outer() if ctx.needs_input_grad[1] else None, db, None, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple, *args: Any) -> tuple:
        A, task = args[1], args[4]
        v, b = (_lead(args[i], in_dims[i], info.batch_size) for i in (0, 2))
        init = None if args[3] is None else _lead(args[3], in_dims[3], info.batch_size)
        A, task = _lead_map(A, in_dims[1], v, task)
        outputs = Multipliers.apply(v, A, b, init, task)
        return outputs, (0,) * len(outputs)


def _residual(v: Tensor, b: Tensor, z: Tensor, data: Tensor, task: Task) -> Tensor:
    """max_i |A z − b|_i, 0 where there are no rows."""
    residual = Dual(task.activation, task.map(data), v, b).residual(z)
    if residual.shape[-1] == 0:
        return residual.new_zeros(residual.shape[:-1])
    return residual.abs().amax(-1)


def _quickly(
    v: Tensor, b: Tensor, init: Tensor | None, data: Tensor, task: Task, rows: Rows
) -> tuple[Outcome, Tensor] | None:
    """Outcome and residuals by the compiled kernel, with `_solve` for what it leaves.

    None where there is no kernel. What it finds out is noted in `task`.
    """
    solver = task.solver
    if not isinstance(solver, Newton) or solver.dtype != torch.float64 or not len(v):
        return None
    kernel = Kernel.of(rows, task.activation)
    if kernel is None or not readable(v, b, init):
        return None
    eps = torch.finfo(v.dtype).eps
    start = init
    if init is not None and rows.fold is not None:
        start = rows.enter(rows.basis, init.to(rows.fold.dtype))
    target = solver.target(torch.float64, eps)
    found = kernel.solve(v, b, start, target, solver.max_iterations)
    multipliers, solved = found.multipliers, found.solved
    if rows.projector is not None:
        dual = Dual(task.activation, rows.basis, v.to(torch.float64), b.to(torch.float64))
        multipliers = smallest(rows, dual, multipliers.to(torch.float64), eps).to(v.dtype)
        agree = ~contradictory(rows, dual.b, eps)
        solved = agree if solved is None else solved & agree
        solved = None if bool(solved.all()) else solved
    task.kernel, task.complete = kernel, solved is None
    status = torch.zeros_like(found.iterations)
    outcome = Outcome(multipliers, found.u, found.z, found.iterations, status)
    if solved is not None:
        left = (~solved).nonzero().squeeze(-1)
        v, b, init = v[left], b[left], None if init is None else init[left]
        rest = _solve(v, b, init, data, task, rows)
        outcome.write(left, rest)
        found.residual.index_copy_(0, left, _residual(v, b, rest.z, data, task))
    return outcome, found.residual


def _solve(
    v: Tensor, b: Tensor, init: Tensor | None, data: Tensor, task: Task, rows: Rows
) -> Outcome:
    """Any samples by the solver itself, one batch dimension; the result in the dtype of v."""
    dual, finite = _problems(v, data, b, task, rows)
    start = torch.zeros_like(dual.b) if init is None else _usable(dual, init.to(dual.b.dtype))
    outcome = task.solver.solve(dual, rows, start, task.group_size, torch.finfo(v.dtype).eps)
    status = outcome.status
    multipliers, u, z = (x.to(v.dtype) for x in (outcome.multipliers, outcome.u, outcome.z))
    terms = dual.A.abs().apply(outcome.z.abs()).to(v.dtype)
    if not _all_finite(multipliers, z, terms):  # too large for the dtype of v
        fits = _finite_rows(multipliers) & _finite_rows(z) & _finite_rows(terms)
        status = status.where(fits, int(Status.NONFINITE))
    if finite is not None:
        status = status.where(finite, int(Status.NONFINITE))
        multipliers = multipliers.where(finite.unsqueeze(-1), 0)
        u = u.where(finite.unsqueeze(-1), v)
        z = z.where(finite.unsqueeze(-1), task.activation.sigma(u))
    return Outcome(multipliers, u, z, outcome.iterations, status)


def _gradient(
    data: Tensor,
    multipliers: Tensor,
    u: Tensor,
    status: Tensor,
    grads: Sequence[Tensor | None],
    task: Task,
) -> tuple[Tensor, Tensor, Callable[[], Tensor]]:
    """∂v, ∂b, and what makes ∂A; differentiable themselves."""
    # A failed sample has zero gradient, and nothing of it may reach its neighbours.
    ok = (status == Status.CONVERGED).unsqueeze(-1)
    zero = torch.zeros((), dtype=u.dtype, device=u.device)
    g_multipliers, g_u, g_z = (
        torch.zeros_like(x) if g is None else torch.where(ok, g, zero)
        for g, x in zip(grads, (multipliers, u, u), strict=True)
    )
    multipliers, u = torch.where(ok, multipliers, zero), torch.where(ok, u, zero)
    data = torch.where(data.isfinite(), data, zero)
    A, w, z = task.map(data), task.activation.slope(u), task.activation.output(u)
    g_u = g_u + w * g_z
    s = apply(GramSolve, w, data, A.apply(g_u) + g_multipliers, task)
    s = torch.where(ok, s, zero)
    dv = g_u - w * A.adjoint(s)
    return dv, s, lambda: A.outer(multipliers, dv) - A.outer(s, z)


def _quick_gradient(
    data: Tensor,
    multipliers: Tensor,
    u: Tensor,
    status: Tensor,
    grads: Sequence[Tensor | None],
    task: Task,
) -> tuple[Tensor, Tensor] | None:
    """∂v and ∂b by the compiled kernel, where no second derivative is asked for."""
    if torch.is_grad_enabled() or task.rows is None or not readable(u, *grads):
        return None
    rows, kernel = task.rows, Kernel.of(task.rows, task.activation)
    if kernel is None or (rows.projector is not None and grads[0] is not None):
        return None
    if u.ndim != 2:
        n, shape = status.numel(), multipliers.shape
        flat = [None if x is None else x.reshape(n, x.shape[-1]) for x in grads]
        found = multipliers.reshape(n, shape[-1])
        found = _quick_gradient(
            data, found, u.reshape(n, u.shape[-1]), status.reshape(n), flat, task
        )
        return None if found is None else (found[0].reshape(u.shape), found[1].reshape(shape))
    dv, db, left = kernel.backward(u, grads, status)
    if rows.projector is not None:
        db = rows.project(db.to(rows.projector.dtype)).to(db.dtype)
    if left is not None:
        part = [None if g is None else g[left] for g in grads]
        more = _gradient(data, multipliers[left], u[left], status[left], part, task)
        dv.index_copy_(0, left, more[0])
        db.index_copy_(0, left, more[1])
    return dv, db


def _raised(status: Tensor, residual: Tensor, problem: Dual) -> str:
    told = explain(status, residual, problem)
    return f'{told}\nPass on_failure="return" to get all samples with their status instead.'


def _all_finite(*tensors: Tensor) -> bool:
    """Is every entry a number? A sum that overflows says no where it is yes: look again."""
    return all(math.isfinite(x.sum().item()) for x in tensors)


def _finite_rows(x: Tensor) -> Tensor:
    return x.isfinite().flatten(1).all(-1)


def _problems(
    v: Tensor, data: Tensor, b: Tensor, task: Task, rows: Rows
) -> tuple[Dual, Tensor | None]:
    """The batch in the solver's dtype, and which samples are finite.

    Those that are not are replaced by problems already solved, so that none has to be left out.
    None says that all are.
    """
    n, dtype, A = len(v), task.solver.dtype or v.dtype, rows.basis
    v, b = v.to(dtype), b.to(dtype)
    if rows.transform is not None:
        A = task.map(data.where(data.isfinite(), 0).to(dtype))
    if _all_finite(v, b, data):
        return Dual(task.activation, A, v, b), None
    whole = data.isfinite()
    whole = whole.all().expand(n) if data.ndim < 3 else whole.reshape(n, -1).all(-1)
    finite = _finite_rows(v) & _finite_rows(b) & whole
    keep = finite.unsqueeze(-1)
    v = v.where(keep, 0)
    return Dual(task.activation, A, v, b.where(keep, A.apply(task.activation.sigma(v)))), finite


def _usable(dual: Dual, init: Tensor) -> Tensor:
    """A start that is not a number, or absurdly far, is worse than none."""
    if init.numel() == 0 or dual.A.abs().adjoint(init.abs()).max() < 1e3:
        return init
    y = dual.A.adjoint(init.nan_to_num()).abs().amax(-1)
    near = init.isfinite().all(-1) & (y <= 1e3 * (1 + dual.v.abs().amax(-1)))
    return init.where(near.unsqueeze(-1), 0)


@final
class GramSolve(torch.autograd.Function):
    """s = (A diag(w) Aᵀ)⁻¹ r, differentiable as often as needed: its backward is itself.

    With t = (A diag(w) Aᵀ)⁻¹ g: ∂r = t, ∂w = −Aᵀt ∘ Aᵀs, ∂A = −t (w∘Aᵀs)ᵀ − s (w∘Aᵀt)ᵀ.
    """

    @staticmethod
    def forward(w: Tensor, data: Tensor, rhs: Tensor, task: Task) -> Tensor:
        rows = task.examined(data)
        n, dtype = rhs.shape[:-1].numel(), rows.basis.data.dtype
        flat = rows.restrict(rows.project(rhs.reshape(n, rhs.shape[-1]).to(dtype)))
        w = w.reshape(n, w.shape[-1]).to(dtype)
        if task.activation.straight and isinstance(rows.basis, DenseMap) and n:
            s = share(rows.basis, w[0], rows.left_out).solve(flat)
        else:
            s = solve_gram(rows.basis, w, flat, rows.left_out)
        s = rows.project(rows.leave(s)).reshape(rhs.shape).to(rhs.dtype)
        # Where all slopes of a row have underflowed it moves nothing, and has no gradient to give.
        return s.where(s.isfinite(), 0)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        w, data, _, ctx.task = inputs
        ctx.save_for_backward(w, data, output)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple:
        w, data, s = ctx.saved_tensors
        A = ctx.task.map(data)
        t = apply(GramSolve, w, data, grads[0], ctx.task)
        forth, back = A.adjoint(s), A.adjoint(t)
        dA = None
        if ctx.needs_input_grad[1]:
            dA = -A.outer(t, w * forth) - A.outer(s, w * back)
        return -back * forth, dA, t, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple, *args: Any) -> tuple:
        w, A, rhs, task = args
        w, rhs = _lead(w, in_dims[0], info.batch_size), _lead(rhs, in_dims[2], info.batch_size)
        A, task = _lead_map(A, in_dims[1], w, task)
        return GramSolve.apply(w, A, rhs, task), 0


def _lead(x: Tensor, dim: int | None, size: int) -> Tensor:
    """x with the mapped dimension in front, repeated where x is not mapped."""
    return x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)


def _lead_map(data: Tensor, dim: int | None, v: Tensor, task: Task) -> tuple[Tensor, Task]:
    if dim is None and data.ndim <= 2:
        return data, task
    if task.pattern is not None:
        raise NotImplementedError(
            "vmap over a sparse A: map over v and b, or give a dense A for each sample."
        )
    data = _lead(data, dim, v.shape[0])
    if data.ndim < v.ndim + 1:  # one matrix for each mapped element, shared by the batch within
        data = data.reshape(data.shape[0], *[1] * (v.ndim + 1 - data.ndim), *data.shape[1:])
        data = data.expand(*v.shape[:-1], *data.shape[-2:])
    return data, replace(task, rows=None)
