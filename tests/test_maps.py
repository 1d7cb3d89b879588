"""A as an operator: maps agree with einsum and with each other; systems, also ill-conditioned."""

import threading
import warnings
from pathlib import Path

import mpmath
import numpy
import pytest
import scipy.sparse
import torch
from torch.testing import assert_close

import taut
from tables import apply, conditioned, patchy, problem
from taut.maps import BatchedMap, DenseMap, as_map, sparse_map
from taut.systems import conjugate_gradient

BATCHES = [(), (1,), (3,), (20,), (2, 3), (0,)]
SHAPES = [(2, 5), (1, 5), (5, 5), (7, 5), (0, 5), (1, 1), (3, 1)]


def maps(batch, shape):
    yield DenseMap(torch.randn(*shape))
    if batch:
        yield BatchedMap(torch.randn(*batch, *shape))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("batch", BATCHES, ids=str)
def test_products(batch, shape):
    rows, columns = shape
    z, multipliers = torch.randn(*batch, columns), torch.randn(*batch, rows)
    for A in maps(batch, shape):
        assert_close(A.apply(z), apply(A.data, z))
        assert_close(A.adjoint(multipliers), apply(A.data.mT, multipliers))
        gram = torch.einsum("...ik,...k,...jk->...ij", A.data, z, A.data)
        assert_close(A.gram(z), gram)
        assert_close(A.gram(z), A.gram(z).mT)
        assert_close(A.abs().apply(z), apply(A.data.abs(), z))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("batch", BATCHES, ids=str)
def test_adjoint_is_the_adjoint(batch, shape):
    """⟨A z, λ⟩ = ⟨z, Aᵀλ⟩."""
    z, multipliers = torch.randn(*batch, shape[1]), torch.randn(*batch, shape[0])
    for A in maps(batch, shape):
        left, right = A.apply(z) * multipliers, z * A.adjoint(multipliers)
        assert_close(left.sum(-1), right.sum(-1))


@pytest.mark.parametrize("batch", BATCHES, ids=str)
def test_outer_is_the_gradient_of_a_bilinear_form(batch):
    z, multipliers = torch.randn(*batch, 5), torch.randn(*batch, 2)
    for A in maps(batch, (2, 5)):
        data = A.data.clone().requires_grad_()
        (apply(data, z) * multipliers).sum().backward()
        assert_close(A.outer(multipliers, z), data.grad)
        assert A.outer(multipliers, z).shape == A.data.shape


def test_take_selects_samples():
    index = torch.tensor([3, 0])
    z = torch.randn(4, 5)
    for A in maps((4,), (2, 5)):
        assert_close(A.take(index).apply(z[index]), A.apply(z)[index])
        assert_close(A.take(index).gram(z[index]), A.gram(z)[index])


def test_highest_is_over_the_outputs_of_each_equation():
    A, u = torch.tensor([[1.0, 0.0, -2.0], [0.0, 3.0, 0.0], [0.0] * 3]), torch.randn(4, 3)
    expected = torch.stack([u[:, ::2].amax(-1), u[:, 1], torch.full((4,), -torch.inf)], -1)
    for held in (DenseMap(A), BatchedMap(A.expand(4, 3, 3)), sparse_map(A.to_sparse())):
        assert torch.equal(held.highest(u), expected)
    assert torch.equal(sparse_map(A).highest(u), expected)  # with zeros among its entries


def test_as_map_looks_at_the_dimensions():
    assert isinstance(as_map(torch.ones(2, 3)), DenseMap)
    assert isinstance(as_map(torch.ones(4, 2, 3)), BatchedMap)


@pytest.mark.parametrize("batch", [(0,), (2,), (2, 120)], ids=["empty", "one block", "two blocks"])
def test_gram_of_large_A_is_made_in_blocks(batch):
    """64² · 1100 products are too many for a table, and 238 samples make a block."""
    A, s = torch.randn(64, 1100), torch.rand(*batch, 1100)
    gram = DenseMap(A).gram(s)
    assert gram.shape == (*batch, 64, 64)
    flat, weights = gram.flatten(0, -3), s.flatten(0, -2)
    for i in {0, 1, 237, 238, 239} & set(range(len(flat))):
        assert_close(flat[i], (A * weights[i]) @ A.mT)


# Sparse A


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr, torch.sparse_csc])
def test_sparse_is_dense(layout):
    v, dense, b = problem(n=3, I=4, K=9, matrix=patchy)
    A = dense.to_sparse(layout=layout)
    expected = taut.project(v, dense, b, activation="sigmoid")
    solution = taut.project(v, A, b, activation="sigmoid")
    assert_close(solution.z, expected.z, rtol=0, atol=1e-13)
    assert_close(solution.multipliers, expected.multipliers, rtol=1e-10, atol=1e-10)
    assert_close(solution.condition, expected.condition, rtol=1e-6, atol=0)


def test_operations():
    dense = problem(I=4, K=9, matrix=patchy).A
    A, z, multipliers = sparse_map(dense.to_sparse()), torch.randn(5, 9), torch.randn(5, 4)
    assert_close(A.apply(z), z @ dense.T)
    assert_close(A.adjoint(multipliers), multipliers @ dense)
    assert_close(A.gram(z.square()), (dense * z.square()[:, None]) @ dense.T)
    expected = torch.diagonal(A.gram(z.square()), dim1=-2, dim2=-1)
    assert_close(A.gram_diagonal(z.square()), expected)
    assert_close(A.abs().apply(z), z @ dense.abs().T)


def test_many_equations_without_forming_the_hessian():
    """More than a dense Hessian is formed for: conjugate gradients, to the same tolerance."""
    K, I = 20_000, 2_500
    rows = torch.cat([torch.randint(0, I, (K,)), torch.randint(0, I, (K,))])
    indices = torch.stack([rows, torch.arange(K).repeat(2)])
    A = torch.sparse_coo_tensor(
        indices, torch.randn(2 * K), (I, K), check_invariants=False
    ).coalesce()
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


@pytest.mark.usefixtures("as_user")
def test_a_sparse_A_of_another_width_is_refused():
    with pytest.raises(ValueError, match=r"sparse A must be one \(I, K\) matrix.*\(2, 4\)"):
        taut.project(torch.zeros(3), torch.ones(2, 4).to_sparse(), torch.ones(2))


def test_sparse_products_leave_the_filters_of_warnings_alone():
    v, A, b = problem(n=7)
    before = list(warnings.filters)
    sparse = A.to_sparse()
    solve = [
        threading.Thread(target=taut.project, args=(v, sparse, b), kwargs={"activation": "sigmoid"})
        for _ in range(8)
    ]
    for thread in solve:
        thread.start()
    for thread in solve:
        thread.join()
    assert list(warnings.filters) == before


# Equations that are nearly alike: right, or said to be beyond what the precision can tell

# Certified by NIST for the Filip data: y against powers 0 to 10 of x.
CERTIFIED = [
    -1467.48961422980, -2772.17959193342, -2316.37108160893, -1127.97394098372,
    -354.478233703349, -75.1242017393757, -10.8753180355343, -1.06221498588947,
    -0.670191154593408e-01, -0.246781078275479e-02, -0.402962525080404e-04,
]  # fmt: skip


def filip():
    lines = (Path(__file__).parent / "data/filip.csv").read_text().splitlines()[1:]
    y, x = torch.tensor([[float(field) for field in line.split(",")] for line in lines]).T
    A = torch.stack([x**power for power in range(11)])
    return A, A @ y


def test_filip():
    """Least squares as a projection: z = Aᵀλ with A z = A y; λ are the coefficients."""
    A, b = filip()
    with pytest.warns(taut.ConditionWarning, match="condition number about 8e"):
        solution = taut.project(torch.zeros(82), A, b)
    assert solution.condition > 1e8
    # The warning has been given; the answer is nevertheless as good as the numbers given allow.
    most, most_of_z = effect_of_rounding(A, b.abs() + A.abs() @ solution.z.abs())
    right = torch.tensor(CERTIFIED)
    assert ((solution.multipliers - right).abs() <= most).all()
    assert ((solution.z - right @ A).abs() <= most_of_z).all()


def effect_of_rounding(A, size):
    """How far λ and z move when every b moves by eps·size: |(A Aᵀ)⁻¹| and |Aᵀ (A Aᵀ)⁻¹| times that.

    From 60 digits.
    """
    with mpmath.workdps(60):
        matrix = mpmath.matrix(A.tolist())
        inverse = (matrix * matrix.T) ** -1
        gains = [
            torch.tensor([[float(abs(x)) for x in row] for row in gain.tolist()])
            for gain in (inverse, matrix.T * inverse)
        ]
    return [gain @ size * torch.finfo(torch.float64).eps for gain in gains]


@pytest.mark.filterwarnings("ignore::taut.ConditionWarning")
@pytest.mark.parametrize("activation", ["sigmoid", "exp", "linear"])
@pytest.mark.parametrize("digits", [2, 4, 6, 8])
def test_z_is_right_as_far_as_A_tells(activation, digits):
    given = problem(activation, "ill-conditioned", n=20, I=5, K=12, matrix=conditioned(digits))
    assert_close(given.solve().z, given.z, rtol=0, atol=1e-14 * 10**digits)


def test_equations_of_very_different_size():
    A = torch.randn(3, 8) * torch.tensor([1e-8, 1.0, 1e8])[:, None]
    v, y = torch.randn(10, 8), torch.sigmoid(torch.randn(10, 8))
    solution = taut.project(v, A, y @ A.T, activation="sigmoid")
    norms = A.norm(dim=1)
    expected = taut.project(v, A / norms[:, None], (y @ A.T) / norms, activation="sigmoid")
    assert_close(solution.z, expected.z, rtol=0, atol=1e-13)
    assert (((solution.z - y) @ A.T).abs() <= 1e-13 * norms).all()


def test_well_conditioned_is_said_so():
    solution = taut.project(torch.randn(4, 6), torch.eye(6)[:2], torch.zeros(2))
    assert_close(solution.condition, torch.ones(4))


def test_float32_problems_are_solved_in_float64():
    """A float32 u is too coarse at logits of 20; solved in float64, z is the rounding of it."""
    v = (20 * (2 * torch.rand(200, 10) - 1)).float()
    A, y = torch.randn(4, 10).float(), torch.exp(torch.randn(200, 10)).float()
    b = y @ A.T
    solution = taut.project(v, A, b, activation="exp")
    exact = taut.project(v.double(), A.double(), b.double(), activation="exp")
    assert solution.z.dtype == torch.float32
    size = exact.z.amax(-1, keepdim=True)
    assert ((solution.z - exact.z).abs() <= 1e-5 * size).all()
    scale = b.abs() + solution.z @ A.abs().T
    assert (solution.z @ A.T - b).abs().le(2e-6 * scale).all()
    coarse = taut.project(
        v, A, b, activation="exp", solver=taut.Newton(dtype=None), on_failure="return"
    )
    assert coarse.residual.max() > 10 * solution.residual.max()


FORMATS = [
    f"{form}_{kind}"
    for form in ("csr", "csc", "coo", "bsr", "lil", "dok", "dia")
    for kind in ("array", "matrix")
]


@pytest.mark.usefixtures("as_user")
@pytest.mark.parametrize("form", FORMATS)
def test_a_matrix_of_scipy_is_that_matrix(form):
    """Wherever A and G are taken; and its own numbers are left alone."""
    v, dense, b = problem("exp", n=5, I=4, K=9, matrix=patchy, seed=1)
    A = getattr(scipy.sparse, form)(dense.numpy())
    z = taut.project(v, dense, b, activation="exp").z
    layer = taut.Projection(A, activation="exp")
    for found in (
        taut.project(v, A, b, activation="exp"),
        taut.reconcile(v.exp(), A, b, activation="exp"),
        taut.project(v, taut.prepare(A, "exp"), b),
        layer.solve(v, b),
        taut.project(v, G=A, lower=b, upper=b, activation="exp"),
        taut.project(v, taut.prepare(None, "exp", G=A), lower=b, upper=b),
        taut.Projection(G=A, lower=b, upper=b, activation="exp").solve(v),
    ):
        assert_close(found.z, z, rtol=1e-10, atol=1e-12)
    assert taut.project(v.float(), A, b.float(), activation="exp").z.dtype is torch.float32
    head = taut.LagrangeHead(3, A, "exp", G=A, upper=0.0)
    multipliers = torch.randn(5, 8)
    right = v + multipliers[:, :4] @ dense + multipliers[:, 4:] @ dense
    assert_close(head.predictor(v, multipliers), right)
    assert numpy.array_equal(A.toarray(), dense.numpy())


@pytest.mark.usefixtures("as_user")
def test_certificates_are_checked_against_a_matrix_of_scipy():
    v, A, b = (
        torch.zeros(2, 3),
        scipy.sparse.csr_array([[1, 1, 0], [0, 1, 1]]),
        torch.tensor([1, -1]),
    )
    found = taut.project(v, A, b, activation="exp", on_failure="return")
    assert found.status.tolist() == [taut.Status.INFEASIBLE] * 2
    b = b.double()
    assert taut.is_certificate(found.multipliers, A, b, "exp").all()
    sides = {"G": A, "lower": b, "upper": b}
    assert taut.is_certificate(found.multipliers, None, None, "exp", **sides).all()


@pytest.mark.usefixtures("as_user")
def test_only_matrices_may_be_of_scipy():
    A = scipy.sparse.csr_array([[1.0, 1.0]])
    for given, name in (((A, [[1, 1]], [1]), "v"), (([[0.0, 0.0]], [[1, 1]], A), "b")):
        with pytest.raises(TypeError, match=rf"only A and G may be sparse, and {name}\.toarray"):
            taut.project(*given)
    with pytest.raises(TypeError, match=r"A must be \(I, K\), and has the shape \(2,\)"):
        taut.project([[0.0, 0.0]], scipy.sparse.coo_array([1.0, 1.0]), [1.0])
