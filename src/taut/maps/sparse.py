"""A sparse map A, never made dense: hierarchies, margins of tables, block structures."""

import warnings
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast, final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from taut.maps.base import LinearMap
from taut.maps.pairs import Pairs

DENSE_GRAM = 2048  # equations up to which A diag(w) Aᵀ is formed; beyond, it is only applied

# torch says once in a process that its CSR tensors are in beta. It says so here, while the module
# is imported: a filter set later would be one for all threads.
with warnings.catch_warnings():
    warnings.simplefilter("ignore", UserWarning)
    torch.sparse_csr_tensor([0, 0], [], [], (1, 1), dtype=torch.float64, device="cpu")


@final
@dataclass(frozen=True, eq=False)
class Pattern:
    """Where the non-zeros are: `rows` and `columns`, sorted by row, of an (I, K) matrix."""

    rows: Int[Tensor, "nnz"]
    columns: Int[Tensor, "nnz"]
    shape: tuple[int, int]

    @cached_property
    def _by_column(self) -> Tensor:
        return torch.argsort(self.columns, stable=True)

    @cached_property
    def _starts(self) -> tuple[Tensor, Tensor]:
        return _starts(self.rows, self.shape[0]), _starts(self.columns, self.shape[1])

    def product(self, values: Tensor, x: Tensor, transpose: bool) -> Tensor:
        """x @ Aᵀ, or x @ A with `transpose`, for a batch x of (n, K) or (n, I)."""
        rows, columns = self.shape
        order = self._by_column if transpose else slice(None)
        shape = (columns, rows) if transpose else (rows, columns)
        inner = self.rows if transpose else self.columns
        starts = self._starts[transpose]
        matrix = torch.sparse_csr_tensor(
            starts, inner[order], values[order], shape, check_invariants=False
        )
        return (matrix @ x.mT).mT

    def only(self, rows: Int[Tensor, "m"]) -> tuple[Int[Tensor, "few"], "Pattern"]:
        """Some of the rows: which non-zeros stay, and where they are then."""
        place = torch.full((self.shape[0],), -1, device=self.rows.device)
        place[rows] = torch.arange(len(rows), device=rows.device)
        kept = (place[self.rows] >= 0).nonzero().squeeze(-1)
        shape = (len(rows), self.shape[1])
        return kept, Pattern(place[self.rows[kept]], self.columns[kept], shape)

    @cached_property
    def pairs(self) -> Pairs:
        """The pairs of non-zeros that share a column."""
        return Pairs.of(self.rows, self.columns, self.shape)


def _starts(sorted_or_not: Tensor, size: int) -> Tensor:
    counts = torch.bincount(sorted_or_not, minlength=size)
    return torch.cat([counts.new_zeros(1), counts.cumsum(0)])


@final
class _Product(torch.autograd.Function):
    """A x, or Aᵀx with `transpose`, differentiable in the values of A and in x, repeatedly."""

    @staticmethod
    def forward(values: Tensor, x: Tensor, pattern: Pattern, transpose: bool) -> Tensor:
        flat = x.reshape(x.shape[:-1].numel(), x.shape[-1])
        found = pattern.product(values, flat, transpose)
        return found.reshape(*x.shape[:-1], found.shape[-1]).contiguous()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        values, x, ctx.pattern, ctx.transpose = inputs
        ctx.kind = inputs[2:]
        ctx.save_for_backward(values, x)
        ctx.save_for_forward(values, x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        values, x = ctx.saved_tensors
        (g,) = grads
        dvalues = dx = None
        if ctx.needs_input_grad[0]:
            row_side, column_side = (x, g) if ctx.transpose else (g, x)
            dvalues = _gather(ctx.pattern, row_side, column_side)
        if ctx.needs_input_grad[1]:
            dx = _Product.apply(values, g, ctx.pattern, not ctx.transpose)
        return dvalues, dx, None, None

    @staticmethod
    def jvp(ctx: Any, dvalues: Any, dx: Any, *_: Any) -> Tensor:
        values, x = ctx.saved_tensors
        dvalues = torch.zeros_like(values) if dvalues is None else dvalues
        dx = torch.zeros_like(x) if dx is None else dx
        moved = _Product.apply(dvalues, x, *ctx.kind)
        return cast(Tensor, moved) + cast(Tensor, _Product.apply(values, dx, *ctx.kind))

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[Any, ...], values: Tensor, x: Tensor, *rest: Any
    ) -> tuple[Any, ...]:
        if in_dims[0] is not None:
            raise NotImplementedError(
                "vmap over a sparse A: map over v and b, or give a dense A for each sample."
            )
        return _Product.apply(values, x.movedim(in_dims[1], 0), *rest), 0


def _gather(pattern: Pattern, left: Tensor, right: Tensor) -> Tensor:
    products = left[..., pattern.rows] * right[..., pattern.columns]
    return products.reshape(left.shape[:-1].numel(), len(pattern.rows)).sum(0)


@final
@dataclass(frozen=True, eq=False)
class SparseMap(LinearMap):
    """One sparse (I, K) matrix for all samples; `data` holds its non-zeros.

    >>> A = torch.tensor([[1.0, 1.0, 0.0], [0.0, 0.0, 2.0]]).to_sparse()
    >>> sparse_map(A).apply(torch.tensor([1.0, 2.0, 3.0]))
    tensor([3., 6.])
    """

    data: Float[Tensor, "nnz"]
    pattern: Pattern

    @property
    def shape(self) -> tuple[int, int]:
        """(I, K)."""
        return self.pattern.shape

    @property
    def sparse(self) -> bool:
        return True

    @property
    def iterative(self) -> bool:
        return self.pattern.shape[0] > DENSE_GRAM

    def over(self, data: Float[Tensor, "nnz"]) -> "SparseMap":
        return SparseMap(data, self.pattern)

    def scaled(self, scale: Float[Tensor, "I"]) -> "SparseMap":
        return self.over(scale[self.pattern.rows] * self.data)

    def dense(self) -> Float[Tensor, "I K"]:
        return self.adjoint(torch.eye(self.shape[0], dtype=self.data.dtype).to(self.data.device))

    def apply(self, z: Float[Tensor, "*batch K"]) -> Float[Tensor, "*batch I"]:
        return cast(Tensor, _Product.apply(self.data, z, self.pattern, False))

    def adjoint(self, multipliers: Float[Tensor, "*batch I"]) -> Float[Tensor, "*batch K"]:
        return cast(Tensor, _Product.apply(self.data, multipliers, self.pattern, True))

    def gram(self, w: Float[Tensor, "*batch K"]) -> Float[Tensor, "*batch I I"]:
        return self.pattern.pairs.gram(self.data, w)

    def outer(self, left: Float[Tensor, "*batch I"], right: Float[Tensor, "*batch K"]) -> Tensor:
        return _gather(self.pattern, left, right)

    def abs(self) -> "SparseMap":
        return self._absolute

    @cached_property
    def _absolute(self) -> "SparseMap":
        return SparseMap(self.data.abs(), self.pattern)

    def only(self, rows: Int[Tensor, "m"]) -> "SparseMap":
        kept, pattern = self.pattern.only(rows)
        return SparseMap(self.data[kept], pattern)

    def norms(self) -> Float[Tensor, "I"]:
        return self.gram_diagonal(torch.ones_like(self.data[:1]).expand(self.shape[1])).sqrt()

    def largest(self) -> Float[Tensor, "I"]:
        zeros = self.data.new_zeros(self.shape[0])
        return zeros.scatter_reduce(0, self.pattern.rows, self.data.abs(), "amax")

    def highest(self, u: Float[Tensor, "n K"]) -> Float[Tensor, "n I"]:
        found = u.new_full((len(u), self.shape[0]), -torch.inf)
        rows = self.pattern.rows.expand(len(u), -1)
        u = u[:, self.pattern.columns].masked_fill(self.data == 0, -torch.inf)
        return found.scatter_reduce(1, rows, u, "amax")

    def joined(self, data: Tensor, dim: int | None, size: int, n: int) -> "SparseMap":
        if dim is not None:
            raise NotImplementedError(
                "vmap over a sparse A: map over v and b, or give a dense A for each sample."
            )
        return SparseMap(data, self.pattern)

    def take(self, index: Tensor) -> "SparseMap":
        return self


def sparse_map(A: Tensor) -> SparseMap:
    """The map of a torch sparse matrix; its values keep their gradient.

    Of a dense one, every entry counts, those that are 0 too: they may get a gradient.
    """
    if A.layout is torch.strided:
        rows, columns = torch.ones_like(A, dtype=torch.bool).nonzero(as_tuple=True)
        return SparseMap(A.reshape(-1), Pattern(rows, columns, (A.shape[0], A.shape[1])))
    if A.layout != torch.sparse_coo:
        A = A.to_sparse_coo()
    A = A.coalesce()
    rows, columns = A.indices()
    return SparseMap(A.values(), Pattern(rows, columns, (A.shape[0], A.shape[1])))
