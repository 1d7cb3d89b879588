"""Redundant equations whose b differ by powers of ten: what rounding leaves goes to the largest."""

import pytest
import torch
from torch.testing import assert_close

from tables import ALL, SEED, margins
from taut import Status, project, reconcile

HOLDERS = {
    "shared": lambda A, n: A,
    "own": lambda A, n: A.expand(n, *A.shape).contiguous(),
    "sparse": lambda A, n: A.to_sparse_csr(),
}
holders = pytest.mark.parametrize("held", HOLDERS)


def wide(rows: int, columns: int, n: int, decades: float, dtype=torch.float64):
    """Marginals of a table with entries of 1 … 10^−decades; they are redundant by one."""
    draw = torch.Generator().manual_seed(SEED)
    sides = [
        10 ** (-decades * torch.rand(n, m, generator=draw, dtype=torch.float64))
        for m in (rows, columns)
    ]
    b = torch.cat([x / x.sum(-1, keepdim=True) for x in sides], -1)
    v = torch.randn(n, rows * columns, generator=draw, dtype=torch.float64)
    return v.to(dtype), margins(rows, columns).to(dtype), b.to(dtype)


def off(z, A, b):
    """|A z − b| over |b|, sorted, in float64."""
    return ((z.double() @ A.double().T - b.double()).abs() / b.double()).sort(-1).values


@holders
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(
    ("rows", "columns", "decades"), [(4, 3, 0.5), (10, 10, 5), (7, 12, 9), (6, 6, 12)], ids=str
)
def test_every_margin_is_met_to_its_own_digits(rows, columns, decades, dtype, held):
    v, A, b = wide(rows, columns, 24, decades, dtype)
    found = project(v, HOLDERS[held](A, 24), b, activation="exp", on_failure="return")
    assert found.converged.all()
    eps = torch.finfo(dtype).eps
    worst = off(found.z, A, b)
    # Rounding z, and what rounding b makes the margins disagree by: in the largest of them.
    assert worst[:, -2].max() < 32 * eps
    assert worst[:, -1].max() < (32 + 2 * (rows + columns)) * eps
    assert found.iterations.max() <= 2 * found.iterations.double().median() + 5


@holders
def test_the_answer_is_that_without_the_largest_margin(held):
    """And so are u and its derivatives in v: which equation is left out changes nothing."""
    v, A, b = wide(6, 8, 8, 8)
    weights = torch.randn(v.shape, dtype=v.dtype)
    v.requires_grad_()
    found = project(v, HOLDERS[held](A, 8), b, activation="exp")
    (slope,) = torch.autograd.grad((weights * found.u).sum(), v)
    for i in range(8):
        rest = [k for k in range(14) if k != int(b[i].argmax())]
        alone = v.detach()[i].requires_grad_()
        expected = project(alone, A[rest], b[i, rest], activation="exp")
        assert_close(found.u[i], expected.u, rtol=0, atol=1e-12)
        (right,) = torch.autograd.grad((weights[i] * expected.u).sum(), alone)
        assert_close(slope[i], right, rtol=1e-10, atol=1e-10)


@holders
def test_wide_and_narrow_margins_in_one_batch(held):
    """A sample's answer does not depend on how its neighbours' margins differ."""
    (v, A, b), (_, _, narrow) = wide(5, 6, 6, 9), wide(5, 6, 6, 0.5)
    b = torch.where(torch.arange(6).unsqueeze(-1) % 2 == 0, b, narrow)
    found = project(v, HOLDERS[held](A, 6), b, activation="exp")
    for i in range(6):
        alone = project(v[i : i + 1], HOLDERS[held](A, 1), b[i : i + 1], activation="exp")
        assert_close(found.z[i], alone.z[0], rtol=1e-12, atol=0)
        assert found.iterations[i] == alone.iterations[0]


@pytest.mark.parametrize("held", ["shared", "sparse"])
def test_several_tables_with_a_total(held):
    """Three tables, and the total of all: four redundant equations in two layers."""
    v, A, b = (wide(3, 4, 6, d) for d in (1, 6, 10)), margins(3, 4), None
    parts = list(v)
    A = torch.block_diag(A, A, A)
    A = torch.cat([A, torch.ones(1, A.shape[1], dtype=A.dtype)])
    b = torch.cat([x[2] for x in parts], -1)
    b = torch.cat([b, torch.full((6, 1), 3.0, dtype=b.dtype)], -1)
    v = torch.cat([x[0] for x in parts], -1)
    found = project(v, HOLDERS[held](A, 6), b, activation="exp")
    assert off(found.z, A, b)[:, :-4].max() < 64 * torch.finfo(b.dtype).eps


@holders
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_what_is_more_than_rounding_is_a_contradiction(dtype, held):
    """Beside the largest b of its group, however small the equation is that was changed."""
    v, A, b = wide(5, 6, 4, 7, dtype)
    A_held, eps = HOLDERS[held](A, 4), torch.finfo(dtype).eps
    b[1, b[1].argmax()] *= 1 + 1e4 * eps
    b[2, b[2].argmin()] += 1e4 * eps * b[2].max()
    found = project(v, A_held, b, activation="exp", on_failure="return")
    assert found.status.tolist() == [0, Status.INCONSISTENT, Status.INCONSISTENT, 0]


@pytest.mark.parametrize("name", ["linear", "exp", "sigmoid", "tanh", "srlu"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("by", [0.0, 1e-10, 1e-6, 1e-2, 10.0], ids=str)
def test_sparse_and_dense_end_alike(name, dtype, by):
    """Redundant equations, in agreement or in contradiction by any amount."""
    A = margins(6, 5).to(dtype)
    A = torch.block_diag(A, A)
    activation = ALL[name]
    draw = torch.Generator().manual_seed(SEED)
    v = torch.randn(16, A.shape[1], generator=draw, dtype=torch.float64).to(dtype)
    middle = {"exp": 1.0, "sigmoid": 0.5}.get(name, 0.0)
    z = middle + 0.4 * (torch.rand(v.shape, generator=draw, dtype=torch.float64) - 0.5)
    b = (z @ A.double().T).to(dtype)
    b[:, 2] += by
    dense, sparse = (
        project(v, x, b, activation=activation, on_failure="return") for x in (A, A.to_sparse())
    )
    assert torch.equal(dense.status, sparse.status)
    assert_close(dense.z, sparse.z, rtol=0, atol=2e2 * torch.finfo(dtype).eps * (1 + by))
    assert_close(
        dense.multipliers, sparse.multipliers, rtol=0, atol=1e3 * torch.finfo(dtype).eps * (1 + by)
    )


@pytest.mark.slow
def test_entropic_transport_between_peaks():
    """The usual plan between two peaks on a grid: marginals of 40 decades and logits of −1e4."""
    x = torch.linspace(0, 1, 24, dtype=torch.float64)
    peaks = [torch.softmax(-((x - m) ** 2) / 0.02, -1) for m in (0.3, 0.4)]
    cost = (x[:, None] - x).square().reshape(-1)
    A, b = margins(24, 24), torch.cat(peaks)
    for strength in (1e-1, 1e-2, 1e-3):
        for found in (
            project(-cost / strength, A, b, activation="exp"),
            reconcile(torch.exp(-cost / strength), A.to_sparse(), b, activation="exp"),
        ):
            assert off(found.z, A, b)[-1] < 1e-13
