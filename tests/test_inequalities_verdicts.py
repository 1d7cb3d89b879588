"""Verdicts under inequalities: HiGHS agrees, every proof is proven again, bad input is named."""

import copy
import pickle

import pytest
import torch
from scipy.optimize import linprog
from torch.testing import assert_close

import taut
from tables import K, apply, generator, problem
from taut import LagrangeHead, LagrangeMemory, Projection, Status, is_certificate, prepare, project

# many solves: the shapes are checked elsewhere
pytestmark = pytest.mark.usefixtures("as_user")


def drawn(name, n, stream):
    """Rows around a point, and sides that miss it: about half have no solution."""
    source, activation = generator(stream), taut.activations.resolve(name)
    outputs, I, M = 4, 1, 8

    def randn(*shape):
        return torch.randn(n, *shape, generator=source)

    A, G, y = randn(I, outputs), randn(M, outputs), activation.sigma(randn(outputs))
    b, c = apply(A, y), apply(G, y)
    size = y.std()
    c = c + 1.3 * size * randn(M)
    width = 2 * size * torch.rand(n, M, generator=source)
    lower, upper = c - width, c + width
    lower[:, 0::3], upper[:, 1::3] = -torch.inf, torch.inf
    return 2 * randn(outputs), A, b, G, lower, upper


def feasible_by_highs(activation, A, b, G, lower, upper):
    """The largest t with which every inequality, and the range, hold by t; at most 1."""
    least, most = (x.expand(A.shape[-1]) for x in activation.range.bounds(A))
    rows, sides = [], []
    for row, low, high in zip(G, lower, upper, strict=True):
        if low > -torch.inf:
            rows.append([*(-row).tolist(), 1.0])
            sides.append(-low.item())
        if high < torch.inf:
            rows.append([*row.tolist(), 1.0])
            sides.append(high.item())
    for k, (low, high) in enumerate(zip(least.tolist(), most.tolist(), strict=True)):
        unit = [float(k == j) for j in range(A.shape[-1])]
        if low > -torch.inf:
            rows.append([*(-x for x in unit), 1.0])
            sides.append(-low)
        if high < torch.inf:
            rows.append([*unit, 1.0])
            sides.append(high)
    equations = [[*row.tolist(), 0.0] for row in A]
    cost = [0.0] * A.shape[-1] + [-1.0]
    free = [(None, None)] * A.shape[-1] + [(None, 1.0)]
    found = linprog(cost, rows, sides, equations, b.tolist(), free, method="highs")
    return -found.fun


def agree(name, n, stream):
    activation = taut.activations.resolve(name)
    v, A, b, G, lower, upper = drawn(name, n, stream)
    sides = {"G": G, "lower": lower, "upper": upper}
    found = project(v, A, b, **sides, activation=name, on_failure="return")
    room = torch.tensor(
        [feasible_by_highs(activation, *x) for x in zip(A, b, G, lower, upper, strict=True)]
    )
    clear = room.abs() > 1e-7  # within its tolerance the linear program decides nothing
    assert clear.double().mean() > 0.95
    assert ((found.status == Status.CONVERGED) == (room > 0))[clear].all(), found.report()
    assert ((found.status == Status.INFEASIBLE) == (room < 0))[clear].all(), found.report()
    refuted = found.status == Status.INFEASIBLE
    assert (found.radius[refuted] >= 1e8).all()
    assert found.radius[~refuted].isnan().all()
    for i in refuted.nonzero().flatten().tolist():
        own = {name: x[i] for name, x in sides.items()}
        given = (found.multipliers[i], A[i], b[i], name)
        assert is_certificate(*given, **own, radius=found.radius[i].item())
    proofs = is_certificate(found.multipliers, A, b, name, **sides, radius=1e8)
    assert torch.equal(proofs, refuted)
    assert 0.15 < refuted.double().mean() < 0.9


@pytest.mark.parametrize("name", ["linear", "exp", "sigmoid", "tanh", "srlu"])
def test_verdicts_agree_with_a_linear_program(name):
    agree(name, 40, 40)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["linear", "exp", "sigmoid", "tanh", "srlu"])
def test_a_thousand_verdicts_agree_with_linear_programs(name):
    agree(name, 250, 41)


def test_clashing_bounds_are_proven():
    v, A, b = torch.zeros(2), torch.ones(1, 2), torch.tensor([3.0])
    found = project(v, A, b, upper=1.0, on_failure="return")
    assert found.status == Status.INFEASIBLE
    assert is_certificate(found.multipliers, A, b, "linear", upper=1.0)
    assert not is_certificate(found.multipliers, A, b, "linear", upper=2.0)
    rows = project(v, A, b, G=torch.eye(2), upper=1.0, on_failure="return")
    assert rows.status == Status.INFEASIBLE
    assert is_certificate(
        rows.multipliers, A, b, "linear", G=torch.eye(2), upper=1.0, radius=rows.radius.item()
    )


def test_empty_bounds_need_no_multipliers_to_be_proven():
    none = torch.zeros(4, 0)
    assert is_certificate(none, None, None, "linear", lower=1.0, upper=0.0).tolist() == [True] * 4
    assert is_certificate(none[0], None, None, "sigmoid", lower=torch.tensor([0.0, 2.0]))
    assert not is_certificate(none, None, None, "sigmoid", lower=0.5).any()
    found = project(torch.zeros(2, 3), lower=2.0, activation="sigmoid", on_failure="return")
    proofs = is_certificate(found.multipliers, None, None, "sigmoid", lower=2.0)
    assert torch.equal(proofs, found.status == Status.INFEASIBLE)
    with pytest.raises(ValueError, match="one entry for each of the 0 rows"):
        is_certificate(torch.ones(2), None, None, "linear", lower=1.0)
    with pytest.raises(ValueError, match="needs A, G or bounds"):
        is_certificate(torch.ones(2), None, None, "linear")


def test_bounds_out_of_reach_are_proven():
    G = torch.tensor([[1.0, 0.0], [-2.0, 0.0], [1.0, 0.0]])
    lower, upper = torch.tensor([1.5, -torch.inf, 2.0]), torch.tensor([torch.inf, 5.0, torch.inf])
    found = project(
        torch.zeros(2), G=G, lower=lower, upper=upper, activation="sigmoid", on_failure="return"
    )
    assert found.status == Status.INFEASIBLE
    assert is_certificate(found.multipliers, None, None, "sigmoid", G=G, lower=lower, upper=upper)
    found = project(
        torch.zeros(2),
        G=torch.eye(2)[[0, 0]],
        lower=torch.tensor([1.0, -torch.inf]),
        upper=torch.tensor([torch.inf, 0.0]),
        on_failure="return",
    )
    assert found.status == Status.INFEASIBLE
    assert found.radius == torch.inf


def test_a_lower_side_above_the_upper_one_fails_alone():
    v, G = torch.randn(3, 2), torch.ones(1, 2)
    lower = torch.tensor([[0.0], [2.0], [0.0]])
    found = project(v, G=G, lower=lower, upper=1.0, on_failure="return")
    assert found.status.tolist() == [0, 2, 0]
    assert found.radius[1] == torch.inf
    found = project(v, lower=torch.tensor([0.0, 2.0]), upper=1.0, on_failure="return")
    assert (found.status == Status.INFEASIBLE).all()
    with pytest.raises(taut.SolveError, match="could not be projected on the constraints"):
        project(v, G=G, lower=lower, upper=1.0)


def test_what_is_not_finite_fails_alone():
    v, G = torch.randn(4, 2), torch.ones(1, 2)
    v[1, 0] = torch.nan
    upper = torch.tensor([[1.0], [1.0], [torch.nan], [torch.inf]])
    found = project(v, G=G, upper=upper, activation="exp", on_failure="return")
    assert found.status.tolist() == [0, 4, 4, 0]
    assert "of v" in found.report()
    assert_close(found.z[3], v[3].exp())
    found = project(v[:1], G=G * torch.nan, upper=1.0, on_failure="return")
    assert found.status.tolist() == [4]
    assert "A and G" in found.report()


def test_multipliers_that_run_away_are_never_a_solution():
    """Nearly parallel rows that leave no room, however little they clash."""
    G, upper = torch.ones(2, 2), torch.tensor([torch.inf, 1.0])
    for gap in (1e-3, 1e-6, 1e-9):
        lower = torch.tensor([1.0 + gap, -torch.inf])
        v = torch.randn(4, 2)
        found = project(v, G=G, lower=lower, upper=upper, activation="srlu", on_failure="return")
        assert (found.status == Status.INFEASIBLE).all()


# Prepared matrices, and layers


def test_prepared_matrices_are_those_matrices():
    given = problem("exp", kind="inequalities", n=5, I=1)
    A, b, G, lower, upper = given.constraints.values()
    right = given.solve()
    ready = prepare(A, "exp", G=G)
    for kept in (ready, copy.deepcopy(ready), pickle.loads(pickle.dumps(ready))):
        assert torch.equal(project(given.v, kept, b, lower=lower, upper=upper).z, right.z)
    alone = prepare(None, "exp", G=G)
    assert_close(
        project(given.v, alone, lower=lower, upper=upper).z,
        project(given.v, G=G, lower=lower, upper=upper, activation="exp").z,
    )
    most = given.y + 0.01
    assert_close(
        project(given.v, prepare(A, "exp"), b, upper=most).z,
        project(given.v, A, b, upper=most, activation="exp").z,
    )
    with pytest.raises(ValueError, match="has its G already"):
        project(given.v, ready, b, G=G, lower=lower)
    with pytest.raises(ValueError, match="G without a side"):
        project(given.v, ready, b)


@pytest.mark.parametrize("structure", ["plain", "boxes"])
def test_solutions_and_layers_are_copied(structure):
    given = problem("exp", kind="inequalities", structure=structure, n=4, I=1)
    sides = given.constraints
    if structure == "boxes":  # as bounds on z
        sides = {name: x for name, x in sides.items() if name != "G"}
    found = project(given.v, **sides, activation="exp")
    loss = taut.matched_loss(found, given.y)
    for twin in (copy.deepcopy(found), pickle.loads(pickle.dumps(found))):
        assert torch.equal(twin.z, found.z)
        assert torch.equal(twin.active, found.active)
        assert_close(taut.matched_loss(twin, given.y), loss)
    layer = Projection(**sides, activation="exp")
    right = layer(given.v)
    assert torch.equal(copy.deepcopy(layer)(given.v), right)
    assert torch.equal(pickle.loads(pickle.dumps(layer))(given.v), right)


def test_a_layer_with_sides():
    given = problem("sigmoid", kind="inequalities", n=5, I=1)
    A, b, G, lower, upper = given.constraints.values()
    right = given.solve()
    layer = Projection(A, G=G, activation="sigmoid")
    assert_close(layer(given.v, b, lower=lower, upper=upper), right.z)
    kept = Projection(A, G=G, lower=lower[0], upper=upper[0], activation="sigmoid")
    state = kept.state_dict()
    assert set(state) == {"A", "G", "lower", "upper"}
    lifted = kept.solve(given.v, b, lower=-torch.inf, upper=torch.inf)
    assert_close(lifted.z, project(given.v, A, b, activation="sigmoid").z)
    memory = LagrangeMemory(5, 1 + 3)
    index = torch.arange(5)
    memory.to(torch.float64).store(index, right)
    again = layer.solve(given.v, b, memory[index], lower=lower, upper=upper)
    assert_close(again.z, right.z)
    assert again.iterations.max() <= 1
    bounds = Projection(lower=0.0)
    assert torch.equal(bounds(given.v), given.v.clamp_min(0))
    assert "G=(3, 5)" in repr(layer)


def test_a_layer_notices_a_changed_G():
    G = torch.randn(2, K)
    layer = Projection(G=G, upper=0.0)
    v = torch.randn(3, K)
    layer(v)
    layer.G.mul_(-1)
    assert_close(layer(v), project(v, G=-G, upper=0.0).z)
    learned = layer.G.requires_grad_()
    layer(v).sum().backward()
    assert learned.grad.any()


def test_units_of_inequalities_have_one_sign():
    G, x = torch.randn(3, K), torch.randn(50, 8)
    lower = torch.tensor([0.0, -torch.inf, -1.0])
    upper = torch.tensor([torch.inf, 1.0, 1.0])
    head = LagrangeHead(8, torch.ones(1, K), "exp", G=G, lower=lower, upper=upper).double()
    v, multipliers = head(x)
    assert multipliers.shape == (50, 4)
    assert (multipliers[:, 1] > 0).all()
    assert (multipliers[:, 2] < 0).all()
    assert multipliers[:, 1:].abs().max() < 0.5  # nearly off, at the start
    C = torch.cat([torch.ones(1, K), G])
    assert_close(head.predictor(v, multipliers), v + multipliers @ C)
    twin = LagrangeHead(8, torch.ones(1, K), "exp", G=G, lower=0.0).double()
    assert (twin(x)[1][:, 1:] > 0).all()
    with pytest.raises(ValueError, match="no multipliers to predict"):
        LagrangeHead(8, torch.ones(1, K), lower=0.0)
    with pytest.raises(ValueError, match="G without a side"):
        LagrangeHead(8, torch.ones(1, K), G=G)


def test_predicted_units_bound_the_matched_loss_from_above():
    """B(y‖σ(u)) + Σ|ν| slack(y) at any multipliers of the right signs, least at the solved ones."""
    given = problem("sigmoid", kind="inequalities", n=20, I=1)
    found = given.solve()
    right = taut.matched_loss(found, given.y, reduction="none")
    lower, upper = given.constraints["lower"], given.constraints["upper"]
    C = torch.cat([given.A, given.constraints["G"]])
    c = given.y @ given.constraints["G"].T
    for step in (0.0, 0.3, 3.0):
        multipliers = found.multipliers + step * torch.randn(20, 4)
        ν = multipliers[:, 1:]
        none = (ν > 0) & lower.isinf() | (ν < 0) & upper.isinf()
        multipliers[:, 1:] = ν.masked_fill(none, 0)
        ν = multipliers[:, 1:]
        slack = torch.where(ν > 0, c - lower, torch.where(ν < 0, upper - c, 0.0))
        u = given.v + multipliers @ C
        bound = taut.bregman_loss(u, given.y, "sigmoid", reduction="none")
        bound = bound + (ν.abs() * slack).sum(-1)
        assert (bound >= right - 1e-12 * (1 + right)).all()
        if step == 0:
            assert_close(bound, right, rtol=1e-10, atol=1e-12)


def test_reconciled_predictions_keep_inequalities_and_bounds():
    """The nearest point to y; one that is feasible stays; an output at an end stays there."""
    given = problem("exp", kind="inequalities", n=10, I=1)
    sides = given.constraints
    assert_close(taut.reconcile(given.y, **sides, activation="exp").z, given.y)
    y = given.y * (1 + 0.5 * torch.rand(10, K))
    found = taut.reconcile(y, **sides, activation="exp")
    assert_close(found.z, project(y.log(), **sides, activation="exp").z)
    y = torch.tensor([0.0, 3.0, 1.0])
    found = taut.reconcile(y, torch.ones(1, 3), torch.tensor([4.0]), upper=2.5, activation="exp")
    assert_close(found.z, torch.tensor([0.0, 2.5, 1.5]), rtol=1e-14, atol=0)


def test_the_radius_of_a_float32_proof_knows_the_ends_in_float64():
    """An end that float32 does not have, and a b that is rounded away from it."""
    end = -13.517360167266133
    activation = taut.activations.bounded(end, end)
    A, G = torch.ones(1, 1).float(), torch.full((1, 1), 0.000953899231).float()
    v, b, side = (torch.tensor([x]).float() for x in (0.0, end, end * G.item()))
    init = torch.tensor([0.1, -100.0]).float()
    sides = {"G": G, "lower": side, "upper": side}
    found = project(v, A, b, **sides, activation=activation, init=init, on_failure="return")
    assert found.status == Status.INFEASIBLE
    assert found.radius == torch.inf
    assert is_certificate(found.multipliers, A, b, activation, **sides)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_proof_goes_as_far_as_its_radius_says(dtype):
    """z₁ ≥ 1 and z₁ + ε z₂ ≤ −1 for ε down to a radius that the dtype does not have."""
    steps = 10 ** -torch.linspace(9, 39, 16)
    for ε in steps.to(dtype):
        G = torch.stack([torch.tensor([1, 0], dtype=dtype), torch.stack([torch.ones_like(ε), ε])])
        sides = {"lower": G.new_tensor([1, -torch.inf]), "upper": G.new_tensor([torch.inf, -1])}
        found = project(G.new_zeros(2), G=G, **sides, on_failure="return")
        assert found.status == Status.INFEASIBLE
        assert found.radius.isfinite()
        assert found.radius * ε.double() > 1.99 or found.radius == torch.finfo(dtype).max
        assert is_certificate(
            found.multipliers, None, None, "linear", G=G, **sides, radius=found.radius.item()
        )


@pytest.mark.parametrize("own", [False, True], ids=["one G", "one for each sample"])
@pytest.mark.parametrize("outputs", [1, 2])
def test_sides_below_the_smallest_normal_number_are_kept_by_the_rule(own, outputs):
    """Below it an output counts as that number, and not as a larger one."""
    v = torch.linspace(-640, -744, 27).unsqueeze(-1)
    G, upper = torch.ones(1, outputs), outputs / 2 * v.exp()
    G = G.expand(27, 1, outputs).clone() if own else G
    v = v.expand(-1, outputs)
    found = project(v, G=G, upper=upper, activation="exp", on_failure="return")
    size = upper + found.z.clamp_min(torch.finfo(v.dtype).tiny).sum(-1, keepdim=True)
    kept = found.z.sum(-1, keepdim=True) - upper <= 1e-12 * size
    assert (kept.squeeze(-1) | ~found.converged).all()
    assert found.converged[:7].all()
