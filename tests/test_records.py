"""A Solution and a Prepared are records: later writes to their inputs do not change them."""

import copy
import pickle

import numpy as np
import pytest
import scipy.sparse
import torch
from torch.testing import assert_close

import taut
from tables import K, needs_cpu, patchy, problem
from taut import Projection, Status, prepare, project

pytestmark = pytest.mark.usefixtures("as_user")
ATTRIBUTES = (
    *("z", "multipliers", "u", "residual", "iterations", "status"),
    *("converged", "active", "condition", "radius", "report"),
)


def by_data(x):
    (x if x.layout is torch.strided else x.coalesce().values()).data.mul_(-3.0).sub_(1.5)


def by_numpy(x):
    """torch shares the memory of a dense tensor with NumPy."""
    numbers = (x if x.layout is torch.strided else x.coalesce().values()).detach().numpy()
    numbers *= -3.0
    numbers -= 1.5


def in_place(x):
    with torch.no_grad():
        x.mul_(-3.0)
        if x.layout is torch.strided:
            x.sub_(1.5)


WAYS = {"in place": in_place, "data": by_data, "numpy": by_numpy}
each_way = pytest.mark.parametrize("write", WAYS.values(), ids=WAYS.keys())


def equations(regime="plain", activation="sigmoid", **changes):
    given = problem(activation, regime, n=4, seed=7, **changes)
    return {"v": given.v, **given.constraints, "activation": activation}


def inequalities(regime="plain", **changes):
    given = problem("sigmoid", regime, kind="inequalities", n=4, I=1, seed=8, **changes)
    return {"v": given.v, **given.constraints, "activation": "sigmoid"}


def bounds(batch=(), **changes):
    A, ends = torch.ones(1, K), torch.tensor([0.3, 0.6])
    lower, upper = (x.expand(*batch, K).clone() for x in ends)
    b = torch.tensor([[2.0], [2.5], [1.7]])
    v = 2 * torch.randn(3, K, generator=torch.Generator().manual_seed(1))
    given = {"v": v, "A": A, "b": b, "lower": lower, "upper": upper, "activation": "sigmoid"}
    return {**given, **changes}


def without_equations(given):
    return {name: x for name, x in given.items() if name not in "Ab"}


def spheres(radius=1.0):
    """Without a z where the radius is negative."""
    v = torch.tensor([[0.3, -1.0, 2.0], [1.0, 0.5, 0.0]])
    size = torch.full((2, 1), radius)
    return {"v": v, "A": torch.ones(1, 3), "b": torch.zeros(1), "h": sphere, "params": (size,)}


def sphere(z, size):
    return z.square().sum(-1, keepdim=True) - size


def sparse(regime="plain"):
    given = equations(regime, I=3, matrix=patchy)
    return {**given, "A": given["A"].to_sparse()}


def held():
    given = equations()
    given["v"][:, 0] = -torch.inf
    return given


RECORDS = {
    "equations": equations,
    "A per sample": lambda: equations(own=True),
    "redundant": lambda: equations("redundant", I=4),
    "no equations": lambda: equations(I=0, activation="linear"),
    "infeasible": lambda: equations("infeasible"),
    "infeasible, A per sample": lambda: equations("infeasible", own=True),
    "inconsistent": lambda: equations("inconsistent", I=4),
    "not finite": lambda: equations("not finite"),
    "held": held,
    "sparse": sparse,
    "sparse, infeasible": lambda: sparse("infeasible"),
    "float32": lambda: equations(dtype=torch.float32),
    "inequalities": inequalities,
    "inequalities alone": lambda: without_equations(inequalities()),
    "inequalities, infeasible": lambda: {**inequalities(), "lower": torch.full((3,), 1e3)},
    "bounds": bounds,
    "bounds per sample": lambda: bounds((3,)),
    "bounds by a tensor": lambda: bounds(lower=torch.tensor(0.3), upper=torch.tensor(0.6)),
    "bounds alone": lambda: without_equations(bounds()),
    "bounds of linear alone": lambda: {**without_equations(bounds()), "activation": "linear"},
    "bounds, infeasible": lambda: bounds(b=torch.tensor([[2.0], [0.5], [9.0]])),
    "h": spheres,
    "h without a solution": lambda: {**spheres(-1.0), "solver": taut.Newton(max_iterations=5)},
}
each_record = pytest.mark.parametrize("name", RECORDS)


def solved(given, **options):
    given = {**given, "on_failure": "return", **options}
    return project(given.pop("v"), given.pop("A", None), given.pop("b", None), **given)


def told(solution):
    """All that a solution says."""
    found = {name: getattr(solution, name) for name in ATTRIBUTES}
    found["report"] = solution.report()
    return {name: x.clone() if isinstance(x, torch.Tensor) else x for name, x in found.items()}


def assert_same(found, right):
    for name in ATTRIBUTES:
        if name == "report":
            assert found[name] == right[name]
        else:
            assert_close(found[name], right[name], rtol=0, atol=0, equal_nan=True, msg=name)


def inputs_of(given):
    """The tensors that were given, by name."""
    found = {k: x for k, x in given.items() if isinstance(x, torch.Tensor) and x.numel()}
    return {**found, **({"params": given["params"][0]} if "params" in given else {})}


@each_way
@each_record
def test_what_a_solution_says_is_fixed(name, write):
    """Whichever input is written to, before anything is asked of the solution."""
    start = solved(RECORDS[name]()).multipliers
    right = told(solved({**RECORDS[name](), "init": start.clone()}))
    for which in inputs_of({**RECORDS[name](), "init": start}):
        given = {**RECORDS[name](), "init": start.clone()}
        solution = solved(given)
        write(inputs_of(given)[which])
        assert_same(told(solution), right)


@each_record
def test_copies_of_a_solution_say_the_same(name):
    given = {**RECORDS[name](), "v": RECORDS[name]()["v"].requires_grad_()}
    solution, right = solved(given), told(solved(RECORDS[name]()))
    for x in inputs_of(given).values():
        in_place(x)
    found = told(pickle.loads(pickle.dumps(solution)))
    assert_same({k: x if k == "report" else x.detach() for k, x in found.items()}, right)


@pytest.mark.parametrize("which", ["z", "multipliers", "u", "residual", "status"])
@each_record
def test_what_was_found_is_not_written_to_in_silence(name, which):
    """A solution that was changed says the same, or raises: no other of its tensors has changed."""
    solution, right = solved(RECORDS[name]()), told(solved(RECORDS[name]()))
    x = getattr(solution, which)
    if not x.numel():
        pytest.skip("there is nothing to write to")
    with torch.no_grad():
        x.add_(1)
    for twin in (solution, copy.deepcopy(solution)):
        for other in set(ATTRIBUTES) - {which, "converged"}:
            try:
                found = twin.report() if other == "report" else getattr(twin, other)
            except ValueError as error:
                assert f"{which} was changed in place after the solve" in str(error)
                assert other in ("active", "radius", "report")
                continue
            if other == "report":
                assert found == right[other]
            else:
                assert_close(found, right[other], rtol=0, atol=0, equal_nan=True, msg=other)


@pytest.mark.parametrize("which", ["z", "multipliers", "u", "status"])
@pytest.mark.parametrize("name", ["equations", "inequalities", "bounds", "h", "infeasible"])
def test_the_loss_notices_writes_to_what_was_found(name, which):
    given = RECORDS[name]()
    y = torch.rand(given["v"].shape)
    solution = solved(given)
    with torch.no_grad():
        getattr(solution, which).add_(1)
    for twin in (solution, copy.deepcopy(solution)):
        with pytest.raises(ValueError, match=f"{which} was changed in place after the solve"):
            taut.matched_loss(twin, y)


@needs_cpu
def test_a_copy_of_a_solution_knows_that_its_input_was_written_to():
    given = equations()
    solution = solved(given)
    given["v"].add_(1.0)
    with pytest.raises(ValueError, match="v was changed in place after the solve"):
        taut.matched_loss(copy.deepcopy(solution), torch.rand(4, K))


# Prepared matrices, and layers


def as_given(A):
    return A


def csr(A):
    return A.to_sparse_csr()


def write_numbers(A, way):
    """Whatever holds A: a tensor, sparse or not, an array, or a matrix of scipy."""
    if isinstance(A, np.ndarray):
        A *= 2.0
    elif hasattr(A, "tocoo"):
        A.data *= 2.0
    elif A.layout is torch.sparse_csr or A.layout is torch.sparse_coo:
        values = (
            A.values().detach() if A.layout is torch.sparse_csr else A.coalesce().values().detach()
        )
        if way == "numpy":
            values.numpy()[:] *= 2.0
        else:
            (values.data if way == "data" else values).mul_(2.0)
    elif way == "numpy":
        A.detach().numpy()[:] *= 2.0
    else:
        (A.data if way == "data" else A.detach()).mul_(2.0)


HOLDERS = {
    "tensor": as_given,
    "coo": lambda A: A.to_sparse().coalesce(),
    "csr": csr,
    "numpy": lambda A: A.numpy().copy(),
    "scipy": lambda A: scipy.sparse.csr_array(A.numpy()),
}


@pytest.mark.parametrize("constraint", ["A", "G", "h"])
@pytest.mark.parametrize("way", [*WAYS, "inference"])
@pytest.mark.parametrize("holder", HOLDERS)
def test_what_was_prepared_is_not_written_to(constraint, way, holder):
    v, b = torch.randn(2, 3), torch.full((2, 1), 1.5)
    rows, options = torch.ones(1, 3), {}
    make = HOLDERS[holder]
    if constraint == "G":
        options = {"G": make(rows)}
        asked = {"lower": b}
        A, b = None, None
        written = options["G"]
    else:
        options = {"h": lambda z: z[:, :1] - z[:, 1:2].square()} if constraint == "h" else {}
        A = written = make(rows)
        asked = {}
    with torch.inference_mode(way == "inference"):
        ready = prepare(A, "exp", **options)
        right = project(v, ready, b, **asked)
        write_numbers(written, way)
        found = project(v, ready, b, **asked)
        assert_close(found.z, right.z, rtol=0, atol=1e-12)
        total = found.z.sum(-1)
        assert (total > 1.5 - 1e-12).all()
        assert constraint == "G" or (total < 1.5 + 1e-12).all()


@pytest.mark.parametrize("holder", ["tensor", "coo", "csr"])
@pytest.mark.parametrize(
    "way", ["in place", "data", "numpy", "inference", "optimizer", "state_dict"]
)
@pytest.mark.parametrize("with_G", [False, True], ids=["A", "A and G"])
def test_a_layer_sees_each_write_to_its_matrix(holder, way, with_G):
    v, b, A = torch.randn(2, 4), torch.full((2, 1), 1.5), torch.tensor([[1.0, 2.0, 1.0, 0.5]])
    sides = {"G": torch.eye(4)[:1], "upper": torch.full((1,), 0.2)} if with_G else {}
    layer = Projection(HOLDERS[holder](A), activation="exp", **sides)
    layer(v, b)
    if way == "optimizer":
        if holder != "tensor":
            pytest.skip("an optimiser takes dense parameters")
        del layer.A
        layer.A = torch.nn.Parameter(A.clone())
        layer(v, b).square().sum().backward()
        torch.optim.SGD(layer.parameters(), lr=0.1).step()
    elif way == "state_dict":
        state = {name: x.clone() for name, x in layer.state_dict().items()}
        write_numbers(state["A"], "data")
        layer.load_state_dict(state)
    else:
        with torch.inference_mode(way == "inference"):
            write_numbers(layer.A, way)
    now = layer.A.detach()
    now = now.to_dense() if now.layout is not torch.strided else now
    assert not torch.equal(now, A)
    found = layer(v, b)
    assert_close(found @ now.mT, b)
    assert_close(found, project(v, now, b, activation="exp", **sides).z)


def test_matrices_prepared_in_inference_mode_serve_training():
    y = torch.full((3, 4), 0.25)
    for make in (as_given, csr, torch.Tensor.to_sparse):
        for G in (None, torch.eye(4)[:2]):
            with torch.inference_mode():
                ready = prepare(make(torch.ones(1, 4)), "exp", G=G)
            v = torch.randn(3, 4, requires_grad=True)
            upper = None if G is None else torch.full((2,), 0.3)
            solution = project(v, ready, torch.ones(3, 1), upper=upper)
            (g,) = torch.autograd.grad(solution.z.square().sum(), v, create_graph=True)
            g.square().sum().backward()
            taut.matched_loss(solution, y).backward()
            assert v.grad.isfinite().all()
            assert v.grad.abs().max() > 0


def test_active_is_what_holds_outputs():
    """1 at the lower bound, −1 at the upper one, whatever is written to the bounds later."""
    lower = torch.zeros(1, 2)
    solution = project(torch.tensor([[1.0, -1.0]]), lower=lower)
    lower.fill_(-5.0)
    assert solution.active.tolist() == [[0, 1]]
    b = torch.tensor([[1.0], [4.0]])
    found = project(
        torch.zeros(2, 2), torch.ones(1, 2), b, activation="sigmoid", on_failure="return"
    )
    b.fill_(1.0)
    assert found.status.tolist() == [Status.CONVERGED, Status.INFEASIBLE]
    assert found.radius.isnan().tolist() == [True, False]
    assert "asks for 4" in found.report()
