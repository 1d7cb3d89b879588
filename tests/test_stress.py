"""Where plain Newton fails: large logits, targets at the ends of the range, gradients there."""

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

import taut
from measures import spread
from tables import SHORT, K as OUTPUTS, apply, target
from taut import Status

f64 = torch.float64


def _hard(activation, size, K, I, rows):
    """Logits up to ±size, and b from a target in the interior."""
    A = torch.randn(I, K, dtype=f64)
    v = size * (2 * torch.rand(rows, K, dtype=f64) - 1)
    u = torch.randn(rows, K, dtype=f64)
    return v, A, taut.activations.ACTIVATIONS[activation].sigma(u) @ A.mT


HARD = [("sigmoid", 60), ("tanh", 60), ("exp", 60), ("linear", 1e6), ("srlu", 100)]


@pytest.mark.parametrize(("activation", "size"), HARD)
@pytest.mark.parametrize(("K", "I"), [(100, 50), (60, 50), (20, 6)])
def test_large_logits_converge(activation, size, K, I):
    _converges(activation, size, K, I, rows=30)


@pytest.mark.slow
@pytest.mark.parametrize(("activation", "size"), HARD)
@pytest.mark.parametrize(("K", "I"), [(100, 50), (60, 50), (20, 6)])
def test_large_logits_converge_in_more_samples(activation, size, K, I):
    _converges(activation, size, K, I, rows=340)


def _converges(activation, size, K, I, rows):
    v, A, b = _hard(activation, size, K, I, rows)
    solution = taut.project(v, A, b, activation=activation, on_failure="return")
    assert int((~solution.converged).sum()) == 0
    assert int(solution.iterations.max()) <= 200
    scale = b.abs() + solution.z.abs() @ A.abs().mT
    spread = taut.activations.ACTIVATIONS[activation].slope(solution.u) * (
        solution.u.abs() + v.abs()
    )
    rounding = 1e-12 * scale + 1e-13 * spread @ A.abs().mT
    assert ((solution.z @ A.mT - b).abs() <= rounding).all()


@pytest.mark.parametrize("activation", ["sigmoid", "tanh", "exp"])
def test_targets_at_the_ends_have_finite_gradients(activation):
    v, A, _ = _hard(activation, 3.0, K=8, I=3, rows=6)
    lower, upper = taut.activations.ACTIVATIONS[activation].range.bounds(v)
    one_hot = torch.eye(8, dtype=f64)[:6]
    y = torch.where(one_hot > 0, upper if upper.isfinite() else torch.ones(()).to(v), lower)
    v.requires_grad_()
    solution = taut.project(v, A.abs(), y @ A.abs().mT, activation=activation, on_failure="return")
    assert solution.z.isfinite().all()
    (gradient,) = torch.autograd.grad(solution.z.square().sum(), v)
    assert gradient.isfinite().all()


def _problem(K=5, I=2, rows=3, size=1.0):
    v = size * torch.randn(rows, K, dtype=f64)
    A = torch.randn(I, K, dtype=f64)
    return v, A


def _checks(function, inputs):
    inputs = tuple(x.detach().clone().requires_grad_() for x in inputs)
    assert gradcheck(function, inputs, eps=1e-6, atol=1e-6, rtol=1e-4)
    assert gradgradcheck(function, inputs, eps=1e-6, atol=1e-5, rtol=1e-3)


def test_gradients_of_saturated_samples():
    v, A = _problem(size=12.0)
    y = torch.sigmoid(torch.randn(3, 5, dtype=f64))
    _checks(lambda v, b: taut.project(v, A, b, activation="sigmoid").z, (v, y @ A.mT))


@pytest.mark.parametrize("gap", [1e-2, 1e-3])
def test_gradients_near_the_edge_of_feasibility(gap):
    # Σz = 5 − gap with five sigmoids: every z is close to 1.
    v, _ = _problem()
    A, b = torch.ones(1, 5, dtype=f64), torch.full((3, 1), 5 - gap, dtype=f64)
    inputs = (v.clone().requires_grad_(), b.requires_grad_())
    # A step in b must stay well inside the gap.
    assert gradcheck(
        lambda v, b: taut.project(v, A, b, activation="sigmoid").z,
        inputs,
        eps=1e-4 * gap,
        atol=1e-6,
        rtol=1e-4,
    )


def test_gradients_of_z_with_redundant_rows():
    v, A = _problem()
    whole = torch.cat([A, A.sum(0, keepdim=True)])
    y = torch.sigmoid(torch.randn(3, 5, dtype=f64))
    free = y @ A.mT

    def z(v, b):
        # b stays consistent, as it must: the last entry is the sum of the others.
        b = torch.cat([b, b.sum(-1, keepdim=True)], -1)
        return taut.project(v, whole, b, activation="sigmoid").z

    _checks(z, (v, free))
    plain = taut.project(v, A, free, activation="sigmoid").z
    torch.testing.assert_close(z(v, free), plain, rtol=1e-12, atol=1e-12)


def test_multipliers_of_redundant_rows_are_the_smallest():
    v, A = _problem()
    whole = torch.cat([A, A[:1]])
    y = torch.sigmoid(torch.randn(3, 5, dtype=f64))
    found = taut.project(v, whole, y @ whole.mT, activation="sigmoid").multipliers
    alone = taut.project(v, A, y @ A.mT, activation="sigmoid").multipliers
    torch.testing.assert_close(found[:, 0], found[:, 2])
    torch.testing.assert_close(found[:, 0] + found[:, 2], alone[:, 0])


def test_gradients_do_not_depend_on_the_start():
    v, A = _problem()
    y = torch.sigmoid(torch.randn(3, 5, dtype=f64))
    b = y @ A.mT
    start = taut.project(v, A, b, activation="sigmoid").multipliers.detach()

    def z(v, b, init):
        return taut.project(v, A, b, activation="sigmoid", init=init).z

    _checks(lambda v, b: z(v, b, start + 0.1), (v, b))
    gradients = []
    for init in (None, start, start + 5):
        x = v.clone().requires_grad_()
        gradients.append(torch.autograd.grad(z(x, b, init).square().sum(), x)[0])
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-11, atol=1e-13)
    torch.testing.assert_close(gradients[0], gradients[2], rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize(("K", "I"), [(30, 6), (60, 40)])
@pytest.mark.parametrize("activation", ["sigmoid", "exp"])
def test_threads_batch_and_place_do_not_matter(activation, K, I):
    v, A, b = _hard(activation, 5.0, K, I, rows=70)
    threads = torch.get_num_threads()
    whole = taut.project(v, A, b, activation=activation)
    try:
        torch.set_num_threads(2)
        other = taut.project(v, A, b, activation=activation)
    finally:
        torch.set_num_threads(threads)
    order = torch.randperm(70)
    moved = taut.project(v[order], A, b[order], activation=activation)
    part = taut.project(v[:9], A, b[:9], activation=activation)
    row = taut.activations.resolve(activation)
    for name, most in zip(("z", "multipliers"), spread(whole, v, A, b, row), strict=True):
        x = getattr(whole, name)
        assert ((getattr(other, name) - x).abs() <= most).all()
        assert ((getattr(moved, name) - x[order]).abs() <= most[order]).all()
        assert ((getattr(part, name) - x[:9]).abs() <= most[:9]).all()
    assert (whole.status == Status.CONVERGED).all()


@pytest.mark.parametrize("own", [False, True], ids=["shared A", "A per sample"])
@pytest.mark.parametrize("row", SHORT.values(), ids=SHORT)
def test_a_neighbour_that_fails_changes_nothing(row, own, monkeypatch):
    """Of the torch code: to rounding, since a BLAS may sum another batch in another order."""
    monkeypatch.setattr(taut.backends.cpu, "_library", None)
    v, A = 2 * torch.randn(30, OUTPUTS), torch.randn(*(30, 2) if own else (2,), OUTPUTS)
    b = apply(A, target(row, 30))
    whole = taut.project(v, A, b, activation=row)
    most, _ = spread(whole, v, A, b, row)
    v, b = v.clone(), b.clone()
    v[7], b[9], b[20] = torch.nan, torch.inf, 1e9
    disturbed = taut.project(v, A, b, activation=row, on_failure="return")
    others = [i for i in range(30) if i not in (7, 9, 20)]
    assert ((disturbed.z - whole.z).abs() <= most)[others].all()
    assert disturbed.converged[others].all()
    assert disturbed.status[7] == disturbed.status[9] == Status.NONFINITE


def test_a_line_with_a_neighbour_that_is_done(monkeypatch):
    """One slope for all samples, also when the first of them needs no step any more."""
    monkeypatch.setattr(taut.backends.cpu, "_library", None)
    row = taut.activations.tempered("linear", 0.1)
    v, A, b = _hard("linear", 3.0, K=8, I=3, rows=5)
    b[0] = row.sigma(v[0]) @ A.mT
    together = taut.project(v, A, b, activation=row)
    assert together.iterations.tolist() == [0, 1, 1, 1, 1]
    alone = taut.project(v[1:], A, b[1:], activation=row)
    most, _ = spread(alone, v[1:], A, b[1:], row)
    assert ((together.z[1:] - alone.z).abs() <= most).all()
