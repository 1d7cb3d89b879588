"""Sparse A: the same answers and gradients as dense A, and sizes that dense A could not have."""

import copy
import pickle

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck
from torch.testing import assert_close

import taut
from taut.maps import DenseMap, sparse_map
from taut.systems import conjugate_gradient


def coo(rows, columns, values, shape):
    indices = torch.stack([rows, columns])
    return torch.sparse_coo_tensor(indices, values, shape, check_invariants=False)


def margins(n):
    """Row sums and column sums of an n×n table: redundant by one."""
    cell = torch.arange(n * n)
    rows = torch.cat([cell // n, n + cell % n])
    return coo(rows, cell.repeat(2), torch.ones(2 * n * n), (2 * n, n * n))


@pytest.fixture
def problem():
    dense = torch.randn(4, 9) * (torch.rand(4, 9) < 0.6)
    dense[:, :4] += torch.eye(4)
    v, y = torch.randn(3, 9), torch.sigmoid(torch.randn(3, 9))
    return v, dense, y @ dense.T


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr, torch.sparse_csc])
def test_sparse_is_dense(problem, layout):
    v, dense, b = problem
    A = dense.to_sparse(layout=layout)
    expected = taut.project(v, dense, b, activation="sigmoid")
    solution = taut.project(v, A, b, activation="sigmoid")
    assert_close(solution.z, expected.z, rtol=0, atol=1e-13)
    assert_close(solution.multipliers, expected.multipliers, rtol=1e-10, atol=1e-10)
    assert solution.condition.isnan().all()


def test_operations(problem):
    _, dense, _ = problem
    A, z, multipliers = sparse_map(dense.to_sparse()), torch.randn(5, 9), torch.randn(5, 4)
    assert_close(A.apply(z), z @ dense.T)
    assert_close(A.adjoint(multipliers), multipliers @ dense)
    assert_close(A.gram(z.square()), (dense * z.square()[:, None]) @ dense.T)
    expected = torch.diagonal(A.gram(z.square()), dim1=-2, dim2=-1)
    assert_close(A.gram_diagonal(z.square()), expected)
    assert_close(A.abs().apply(z), z @ dense.abs().T)


def test_gradients_to_the_values(problem):
    v, dense, b = problem
    pattern = dense.to_sparse().coalesce()

    def solve(v, values, b):
        A = coo(*pattern.indices(), values, pattern.shape)
        solution = taut.project(v, A, b, activation="sigmoid")
        return solution.z, solution.multipliers, solution.u

    inputs = [x.detach().clone().requires_grad_() for x in (v, pattern.values(), b)]
    assert gradcheck(solve, inputs)
    assert gradgradcheck(solve, inputs)


def test_gradient_has_the_layout_of_A(problem):
    v, dense, b = problem
    A = dense.to_sparse().requires_grad_()
    reference = dense.clone().requires_grad_()
    taut.project(v, A, b, activation="tanh", on_failure="return").z.square().sum().backward()
    taut.project(
        v, reference, b, activation="tanh", on_failure="return"
    ).z.square().sum().backward()
    assert A.grad.layout == torch.sparse_coo
    expected = reference.grad * (dense != 0)
    assert_close(A.grad.to_dense(), expected, rtol=1e-9, atol=1e-12)


def test_margins_of_a_table_against_sinkhorn():
    n = 12
    cost = torch.rand(n, n)
    z = taut.project(-cost.flatten() / 0.1, margins(n), torch.ones(2 * n), activation="exp").z
    table = torch.exp(-cost / 0.1)
    for _ in range(2000):
        table = table / table.sum(1, keepdim=True)
        table = table / table.sum(0)
    assert_close(z.reshape(n, n), table, rtol=0, atol=1e-11)


def test_margins_that_contradict_each_other_are_not_solved():
    b = torch.ones(16)
    b[0] = 2.0  # the rows sum to 9, the columns to 8
    solution = taut.project(torch.zeros(64), margins(8), b, activation="exp", on_failure="return")
    verdict = taut.Status(solution.status)
    assert verdict in (taut.Status.INFEASIBLE, taut.Status.INCONSISTENT)


def test_many_rows_without_forming_the_hessian():
    """More rows than a dense Hessian is formed for: conjugate gradients, to the same tolerance."""
    K, I = 20_000, 2_500
    rows = torch.cat([torch.randint(0, I, (K,)), torch.randint(0, I, (K,))])
    A = coo(rows, torch.arange(K).repeat(2), torch.randn(2 * K), (I, K)).coalesce()
    assert sparse_map(A).iterative
    v, y = torch.randn(2, K, requires_grad=True), torch.sigmoid(torch.randn(2, K))
    b = sparse_map(A).apply(y)
    solution = taut.project(v, A, b, activation="sigmoid")
    assert solution.residual.max() < 1e-12
    g = torch.randn(2, K)
    (gradient,) = torch.autograd.grad((solution.z * g).sum(), v)
    # The gradient is w∘(g − Aᵀs): A applied to it vanishes, because z cannot leave A z = b.
    assert sparse_map(A).apply(gradient).abs().max() < 1e-10


def test_conjugate_gradient_solves():
    A = DenseMap(torch.randn(6, 20))
    w, rhs = torch.rand(4, 20) + 0.1, torch.randn(4, 6)
    expected = torch.linalg.solve(A.gram(w), rhs)
    assert_close(conjugate_gradient(A, w, rhs, lambda r: r, 1e-14, 100), expected)


def test_a_layer_with_sparse_A(problem):
    v, dense, b = problem
    layer = taut.Projection(dense.to_sparse(), activation="sigmoid")
    expected = taut.project(v, dense, b, activation="sigmoid").z
    assert_close(pickle.loads(pickle.dumps(copy.deepcopy(layer)))(v, b), expected)
    other = taut.Projection(torch.ones(4, 9).to_sparse(), activation="sigmoid")
    other.load_state_dict(layer.state_dict())
    assert_close(other(v, b), expected)
    assert_close(layer.float()(v.float(), b.float()), expected.float(), rtol=0, atol=1e-6)


def test_certificate_with_sparse_A():
    A, b = torch.ones(1, 2).to_sparse(), torch.tensor([3.0])
    assert taut.is_certificate(torch.tensor([1.0]), A, b, "sigmoid")
    solution = taut.project(torch.zeros(2), A, b, activation="sigmoid", on_failure="return")
    assert taut.is_certificate(solution.multipliers, A, b, "sigmoid")


@pytest.mark.usefixtures("as_user")
def test_refused():
    with pytest.raises(ValueError, match=r"sparse A must be one \(I, K\) matrix.*\(2, 4\)"):
        taut.project(torch.zeros(3), torch.ones(2, 4).to_sparse(), torch.ones(2))
