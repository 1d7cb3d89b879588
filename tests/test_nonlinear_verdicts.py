"""What CONVERGED promises of h(z) = 0 and what it does not; NOT_NEAREST, STUCK and their words."""

import pytest
import torch

import taut
from fuzzing.curves import EVERY, check_curves
from surfaces import FAMILIES, INFEASIBLE, norm, product
from tables import SEED
from taut import Status

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
RETURN = {"on_failure": "return"}


def names(solution):
    return [Status(s).name for s in solution.status.reshape(-1).tolist()]


def jacobian(given, z):
    """Of A and h, sample by sample."""
    h = given.family.h
    J = torch.func.vmap(torch.func.jacrev(lambda z, *p: h(z[None], *(x[None] for x in p))[0]))(
        z, *given.params
    )
    A = given.family.A
    return J if A is None else torch.cat([A.expand(len(z), *A.shape), J], -2)


@pytest.mark.parametrize("name", FAMILIES)
def test_converged_is_feasible_stationary_and_a_strict_minimum(name):
    """The equations of a solution, and the Hessian along the surface, in the plainest way."""
    given = FAMILIES[name].problem(5, 1.0, 300 + SEED)
    solution, ok = given.solve(), given.solve().converged
    assert int(ok.sum()) >= 4
    activation = taut.activations.resolve(given.family.activation)
    z, u, λ = (x[ok] for x in (solution.z, solution.u, solution.multipliers))
    part = given.take(ok)
    J, w = jacobian(part, z), activation.slope(u)
    size = (J.abs() @ (z.abs() + w * (1 + u.abs() + part.v.abs())).unsqueeze(-1)).squeeze(-1)
    c = part.family.h(z, *part.params)
    if part.b is not None:
        size = torch.cat([part.b.abs(), torch.zeros_like(c)], -1) + size
        c = torch.cat([z @ part.family.A.mT - part.b, c], -1)
    assert (c.abs() <= 2e-12 * size).all()
    pulled = (J.mT @ λ.unsqueeze(-1)).squeeze(-1)
    terms = part.v.abs() + u.abs() + (J.abs().mT @ λ.abs().unsqueeze(-1)).squeeze(-1)
    assert ((u - part.v - pulled).abs() * w.sqrt() <= 1e-8 * (1 + terms) * w.sqrt()).all()
    own = λ[:, λ.shape[-1] - part.family.h(z, *part.params).shape[-1] :]
    S = torch.func.vmap(
        torch.func.hessian(
            lambda z, l, *p: (l * part.family.h(z[None], *(x[None] for x in p))[0]).sum()
        )
    )(z, own, *part.params)
    r = w.sqrt()
    H = torch.eye(z.shape[-1]) - r.unsqueeze(-1) * S * r.unsqueeze(-2)
    for one, rows in zip(H, J * r.unsqueeze(-2), strict=True):
        _, s, Vh = torch.linalg.svd(rows)
        rank = int((s > 1e-9 * s[0]).sum())
        along = Vh[rank:]
        if len(along):
            assert torch.linalg.eigvalsh(along @ one @ along.mT)[0] > 0


@pytest.mark.parametrize("count", [3, pytest.param(60, marks=pytest.mark.slow)])
def test_a_slice_of_the_fuzzer(count):
    """Random h: what is CONVERGED is feasible, stationary, a strict minimum; by NumPy."""
    found = [check_curves(SEED, EVERY * n - 1) for n in range(1, count + 1)]
    assert [failures for failures, _ in found if failures] == []
    assert sum(names["nonlinear, CONVERGED"] for _, names in found) >= 2 * count


@pytest.mark.parametrize(
    "name",
    [x if i % 2 else pytest.param(x, marks=pytest.mark.slow) for i, x in enumerate(INFEASIBLE)],
)
def test_without_a_solution_nothing_converges(name):
    given = INFEASIBLE[name].problem(20, 1.0, 310 + SEED)
    found = names(given.solve())
    assert "CONVERGED" not in found
    assert found.count("STUCK") >= 15
    assert set(found) <= {"STUCK", "MAX_ITERATIONS"}


def test_ties_are_not_nearest():
    """The centre of a sphere, a point above the bottom of a parabola: a neighbour is as near."""
    centre = taut.project(torch.zeros(1, 3), h=norm, params=(torch.ones(1, 1),), **RETURN)
    assert names(centre) != ["CONVERGED"]
    v = torch.tensor([[0.0, 0.5], [0.0, 0.4]])
    solution = taut.project(v, h=lambda z: z[:, 1:] - z[:, :1] ** 2, **RETURN)
    assert names(solution) == ["NOT_NEAREST", "CONVERGED"]
    torch.testing.assert_close(solution.z[0], torch.zeros(2), atol=1e-9, rtol=0)


def test_gradients_of_what_is_not_nearest_are_zero():
    v = torch.tensor([[0.0, 0.5], [0.0, 0.4]], requires_grad=True)
    solution = taut.project(v, h=lambda z: z[:, 1:] - z[:, :1] ** 2, **RETURN)
    (g,) = torch.autograd.grad(solution.z.sum(), v, retain_graph=True)
    assert (g[0] == 0).all()
    assert (g[1] != 0).any()
    with pytest.warns(taut.FailureWarning, match="1 of 2 samples"):
        loss = taut.matched_loss(solution, torch.zeros(2, 2), reduction="none")
    assert loss[0] == 0


def test_words_of_the_verdicts():
    v = torch.tensor([[0.0, 0.5], [1.0, 2.0], [0.3, 0.1]])
    e = torch.tensor([[0.0], [0.0], [-1.0]])
    h = lambda z, e: z[:, 1:] ** 2 * (e < 0) + z[:, 1:] * (e >= 0) - z[:, :1] ** 2 * (1 + 2 * e) - e  # noqa: E731
    solution = taut.project(v, h=h, params=(e,), **RETURN)
    assert names(solution) == ["NOT_NEAREST", "CONVERGED", "STUCK"]
    report = solution.report()
    assert report.startswith("2 of 3 samples could not be projected on h(z) = 0.")
    assert "1 NOT_NEAREST (sample 0)" in report
    assert "a saddle, or one of several equally near" in report
    assert "1 STUCK (sample 2)" in report
    assert "this is no proof" in report
    with pytest.raises(taut.SolveError, match="STUCK") as error:
        taut.project(v, h=h, params=(e,))
    assert error.value.status.tolist() == solution.status.tolist()
    assert Status.STUCK == 5
    assert Status.NOT_NEAREST == 6


def test_proofs_about_A_are_kept():
    """INFEASIBLE and INCONSISTENT of A z = b alone, whatever h is."""
    v, A = torch.zeros(3, 2), torch.tensor([[1.0, 1.0], [2.0, 2.0]])
    b = torch.tensor([[-1.0, -2.0], [1.0, 3.0], [1.0, 2.0]])
    options = {"h": product, "params": (0.2 * torch.ones(3, 1),), "activation": "exp"}
    solution = taut.project(v, A, b, **options, **RETURN)
    assert names(solution)[:2] == ["INFEASIBLE", "INCONSISTENT"]
    proof = solution.multipliers[0]
    assert taut.is_certificate(proof[:2], A, b[0], "exp")
    assert proof[2] == 0
    assert solution.radius[0] == torch.inf
    assert solution.radius[1:].isnan().all()
    assert "A z = b alone has none" in solution.report() and "sides" not in solution.report()


def test_what_is_not_a_number():
    v = torch.tensor([[1.0, 2.0], [torch.nan, 1.0], [1.0, 1.0], [1.0, 0.7]])
    e = torch.tensor([[1.0], [1.0], [torch.inf], [2.0]])
    solution = taut.project(v, h=norm, params=(e,), **RETURN)
    assert names(solution) == ["CONVERGED", "NONFINITE", "NONFINITE", "CONVERGED"]
    assert "1 of the 8 entries of v, 1 of the 4 entries of params[0]" in solution.report()
    nowhere = taut.project(
        v[:1], h=lambda z: (z - 50).clamp(max=-1).log().sum(-1, keepdim=True), **RETURN
    )
    assert names(nowhere) == ["NONFINITE"]
    said = "All entries of v are finite; h, or a derivative of it, is not, wherever it was tried."
    assert said in nowhere.report()


def test_a_bad_sample_does_not_touch_its_neighbours():
    v = torch.randn(4, 3)
    v[1] = torch.nan
    e = torch.tensor([[1.0], [1.0], [-1.0], [2.0]])
    good = [0, 3]
    whole, alone = v.clone().requires_grad_(), v[good].clone().requires_grad_()
    one = taut.project(whole, h=norm, params=(e,), **RETURN)
    other = taut.project(alone, h=norm, params=(e[good],))
    torch.testing.assert_close(one.z[good], other.z, atol=1e-14, rtol=0)
    (g,) = torch.autograd.grad(one.z[good].sin().sum(), whole)
    (right,) = torch.autograd.grad(other.z.sin().sum(), alone)
    torch.testing.assert_close(g[good], right, atol=1e-13, rtol=0)
    assert (g[[1, 2]] == 0).all()


def test_h_that_is_not_defined_everywhere():
    """A trial where h is not a number is refused: log z of linear outputs."""
    v = torch.tensor([[0.1, 0.2], [3.0, 0.5], [0.05, 6.0]])
    solution = taut.project(v, h=lambda z: z.log().sum(-1, keepdim=True), **RETURN)
    assert names(solution) == ["CONVERGED"] * 3
    assert solution.residual.max() < 1e-12


def test_few_iterations_leave_a_sample_undecided():
    solver = taut.Newton(max_iterations=1)
    v, e = torch.tensor([[3.0, 0.1]]), torch.ones(1, 1)
    solution = taut.project(v, h=norm, params=(e,), solver=solver, **RETURN)
    assert names(solution) == ["MAX_ITERATIONS"]
    assert "the search is local" in solution.report()
    loose = taut.project(v, h=norm, params=(e,), solver=taut.Newton(tol=1e-6))
    assert loose.residual.item() < 1e-5


def test_local_minimum_is_not_the_nearest_of_all():
    """CONVERGED does not promise it: z₀z₁ = 1 from the branch of (−1, −1)."""
    v, start = torch.tensor([[0.5, 0.5]]), torch.tensor([[-1.0, -1.0]])
    h = lambda z: z[:, :1] * z[:, 1:] - 1  # noqa: E731
    far = taut.project(v, h=h, init=(start, torch.zeros(1, 1)))
    near = taut.project(v, h=h)
    torch.testing.assert_close(far.z, start, atol=1e-12, rtol=0)
    torch.testing.assert_close(near.z, -start, atol=1e-12, rtol=0)
    y = torch.ones(1, 2)
    # ℓ < 0 proves that y is nearer than z.
    with pytest.warns(taut.FailureWarning, match=r"loss of 1 of 1 samples is below 0.*init="):
        assert taut.matched_loss(far, y).item() == pytest.approx(-2.0, abs=1e-12)
    assert taut.matched_loss(far, y).item() < 0  # said once
    assert taut.matched_loss(near, y).item() == pytest.approx(0.0, abs=1e-12)


def test_start_at_the_target_never_ends_farther_than_it():
    """Loss ≥ 0 from init = (u(y), 0), for a y that satisfies the equations."""
    for name in ("quartic/linear", "product/linear", "simplex, squares/exp"):
        given = FAMILIES[name].problem(30, 3.0, 320 + SEED)
        activation = taut.activations.resolve(given.family.activation)
        rows = given.solve().multipliers.shape[-1]
        start = activation.inverse(given.z), torch.zeros(30, rows)
        solution = given.solve(init=start)
        ok = solution.converged
        assert ok.float().mean() > 0.9
        options = {"h": given.family.h, "activation": activation}
        part = given.take(ok)
        own = taut.project(
            part.v,
            given.family.A,
            part.b,
            params=part.params,
            init=(solution.u[ok], solution.multipliers[ok]),
            **options,
        )
        loss = taut.matched_loss(own, part.z, reduction="none")
        assert (loss >= -1e-10 * (1 + part.v.square().sum(-1))).all()
