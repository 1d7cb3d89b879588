"""Inequalities and bounds with sparse matrices: the answers of dense ones."""

import pytest
import torch
from torch.testing import assert_close

import taut
from tables import STRUCTURES, few_activations, patchy, problem
from taut import Projection, Status, is_certificate, matched_loss, prepare, project
from taut.maps import sparse

# many solves: the shapes are checked elsewhere
pytestmark = pytest.mark.usefixtures("as_user")

each_structure = pytest.mark.parametrize("structure", STRUCTURES)
which_sparse = pytest.mark.parametrize("which", ["A", "G", "AG"])
OUTPUTS = 12
#: Where several rows ask for the same, any of them may have the multiplier.
UNIQUE = ("plain", "pairs", "boxes")


def draw(activation, structure="plain", **options):
    shape = {"n": 6, "I": 2, "K": OUTPUTS, "M": 6, "matrix": patchy}
    return problem(activation, kind="inequalities", structure=structure, **{**shape, **options})


def spread(given, which, layout=torch.sparse_coo):
    """The same constraints with some of the matrices sparse."""
    return {k: x.to_sparse(layout=layout) if k in which else x for k, x in given.items()}


@pytest.fixture(params=["factorised", "conjugate gradients"])
def size(request, monkeypatch):
    """Small matrices, treated as small ones and as large ones."""
    if request.param != "factorised":
        monkeypatch.setattr(sparse, "DENSE_GRAM", 2)
    return request.param


@each_structure
@which_sparse
@pytest.mark.parametrize("name", ["linear", "exp", "sigmoid"])
def test_sparse_is_dense(name, structure, which, size):
    given = draw(name, structure)
    right = given.solve()
    found = project(given.v, **spread(given.constraints, which), activation=name)
    assert_close(found.z, right.z, rtol=1e-10, atol=1e-12)
    if structure in UNIQUE:
        assert torch.equal(found.active, right.active)
        assert_close(found.multipliers, right.multipliers, rtol=1e-8, atol=1e-9)


@few_activations
def test_bounds_beside_a_sparse_A_are_those_beside_a_dense_one(activation, size):
    given = draw(activation, "boxes", K=5)
    lower, upper = given.constraints["lower"], given.constraints["upper"]
    options = {"lower": lower, "upper": upper, "activation": activation}
    right = project(given.v, given.A, given.b, **options)
    found = project(given.v, given.A.to_sparse_csr(), given.b, **options)
    assert_close(found.z, right.z, rtol=1e-10, atol=1e-12)
    assert (found.z >= lower).all()
    assert (found.z <= upper).all()
    assert torch.equal(found.active, right.active)


@which_sparse
@pytest.mark.parametrize("name", ["linear", "exp", "sigmoid"])
def test_gradients_are_those_of_dense_matrices(name, which, size):
    """Once and twice, also to the zeros of a dense matrix beside a sparse one."""
    given = draw(name)
    seed = torch.linspace(-1, 1, OUTPUTS)

    def gradients(which):
        leaves = [x.clone().requires_grad_() for x in given]
        constraints = spread(dict(zip(given.constraints, leaves[1:], strict=True)), which)
        found = project(leaves[0], **constraints, activation=name)
        first = torch.autograd.grad((found.z * seed).sum(), leaves, create_graph=True)
        function = first[0].square().sum() + first[2].sin().sum()
        options = {"retain_graph": True, "allow_unused": True, "materialize_grads": True}
        second = torch.autograd.grad(function, leaves, **options)
        loss = torch.autograd.grad(matched_loss(found, given.y), leaves)
        return [x.detach() for x in (*first, *second, *loss)]

    names = ["v", *given.constraints]
    for i, (x, y) in enumerate(zip(gradients(which), gradients(""), strict=True)):
        part = names[i % len(names)]
        where = given.constraints[part] != 0 if part in which else torch.ones_like(y) > 0
        assert_close(x[where], y[where], rtol=1e-7, atol=1e-9)


def test_sparse_matrices_in_layers_and_prepared():
    given = draw("sigmoid")
    A, b, G, lower, upper = given.constraints.values()
    right = given.solve().z
    layer = Projection(A.to_sparse(), G=G.to_sparse(), activation="sigmoid")
    assert_close(layer(given.v, b, lower=lower, upper=upper), right, rtol=1e-10, atol=1e-12)
    ready = prepare(A, "sigmoid", G=G.to_sparse())
    found = project(given.v, ready, b, lower=lower, upper=upper)
    assert_close(found.z, right, rtol=1e-10, atol=1e-12)
    alone = prepare(None, "sigmoid", G=G.to_sparse())
    dense = project(given.v, G=G, lower=lower, upper=upper, activation="sigmoid").z
    found = project(given.v, alone, lower=lower, upper=upper).z
    assert_close(found, dense, rtol=1e-10, atol=1e-12)

    def one(v, b):
        sides = {"G": G.to_sparse(), "lower": lower[0], "upper": upper[0]}
        return project(v, A.to_sparse(), b, **sides, activation="sigmoid").z

    few = given.v[:1].expand(3, -1), given.b[:1].expand(3, -1)
    assert_close(torch.func.vmap(one)(*few)[0], right[0], rtol=1e-10, atol=1e-12)


def test_what_a_sparse_matrix_cannot_be_beside():
    v, G = torch.zeros(4, 3), torch.ones(1, 3).to_sparse()
    with pytest.raises(ValueError, match=r"sparse matrix is one for all samples.*A \(4, 1, 3\)"):
        project(v, torch.ones(4, 1, 3), torch.ones(1), G=G, lower=0.0)
    with pytest.raises(ValueError, match=r"sparse G must be one \(I, K\) matrix.*\(1, 4\)"):
        project(v, G=torch.ones(1, 4).to_sparse(), lower=0.0)


@pytest.mark.parametrize("name", ["linear", "sigmoid"])
def test_sparse_constraints_without_a_solution_are_proven(name, size):
    """Σz = 3 with every output at most 0.2, as rows, and with a sum of two that is too large."""
    v, A, b = torch.randn(3, 6), torch.ones(1, 6), torch.tensor([3.0])
    G = torch.cat([torch.eye(6), torch.eye(6)[:1] + torch.eye(6)[1:2]])
    upper = torch.tensor([0.2] * 6 + [torch.inf])
    lower = torch.tensor([-torch.inf] * 6 + [0.3])
    for A_, G_ in ((A.to_sparse(), G), (A, G.to_sparse()), (A.to_sparse(), G.to_sparse())):
        sides = {"G": G_, "lower": lower, "upper": upper}
        found = project(v, A_, b, **sides, activation=name, on_failure="return")
        assert (found.status == Status.INFEASIBLE).all()
        assert (found.radius > 1e8).all()
        assert is_certificate(found.multipliers, A_, b, name, **sides, radius=1e8).all()
        assert "In sample 0 no row alone rules a solution out" in found.report()
    bounded = project(v, A.to_sparse(), b, upper=0.2, activation=name, on_failure="return")
    assert (bounded.status == Status.INFEASIBLE).all()
    assert is_certificate(bounded.multipliers, A.to_sparse(), b, name, upper=0.2).all()


def network(rows, outputs, source):
    """Sums of neighbours, and capacities of three outputs each, about a third of them tight."""
    each = torch.arange(outputs)
    sums = torch.stack([each * (rows // 4) // outputs, each])
    A = torch.sparse_coo_tensor(sums, torch.ones(outputs), (rows // 4, outputs)).coalesce()
    place = torch.arange(rows).repeat_interleave(3)
    columns = torch.randint(outputs, (3 * rows,), generator=source)
    values = 0.5 + torch.rand(3 * rows, generator=source)
    G = torch.sparse_coo_tensor(torch.stack([place, columns]), values, (rows, outputs)).coalesce()
    return A, G


def assert_solved(name, rows, outputs):
    """Optimal by the conditions themselves: no dense matrix of that size is made."""
    source, activation = torch.Generator().manual_seed(7), taut.activations.resolve(name)
    A, G = network(rows, outputs, source)
    y = activation.sigma(torch.randn(2, outputs, generator=source))
    v = 1.5 * torch.randn(2, outputs, generator=source)
    b, c = (A @ y.T).T.contiguous(), (G @ y.T).T.contiguous()
    upper = c + 0.3 * torch.rand(c.shape, generator=source)
    found = project(v, A, b, G=G, upper=upper, activation=name)
    r, λ, ν = (G @ found.z.T).T, found.multipliers[:, : len(A)], found.multipliers[:, len(A) :]
    assert ((A @ found.z.T).T - b).abs().max() < 1e-11 * (1 + b.abs().max())
    assert (r - upper).max() < 1e-11
    assert (ν <= 0).all()
    assert ((r - upper) * (ν != 0)).abs().max() < 1e-11
    assert 0.05 < (ν != 0).double().mean() < 0.7
    u = v + (A.mT @ λ.T).T + (G.mT @ ν.T).T
    assert_close(activation.sigma(u), found.z, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("name", ["linear", "exp"])
def test_hundreds_of_sparse_inequalities(name):
    assert_solved(name, 200, 400)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["linear", "exp", "sigmoid"])
def test_thousands_of_sparse_inequalities(name):
    """More than are factorised."""
    assert_solved(name, 2500, 5000)
