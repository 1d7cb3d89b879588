"""Failures are verdicts on single samples, with proofs; neighbours never notice."""

import math

import pytest
import torch
from torch.testing import assert_close

import taut
from tables import ROWS, SEED, K, apply, target
from taut import SolveError, Status, is_certificate, project
from taut.certificate import support

# many solves: the shapes are checked elsewhere
pytestmark = pytest.mark.usefixtures("as_user")
FINITE = {
    name: row for name, row in ROWS.items() if row.range.bounds(torch.zeros(K))[1].isfinite().all()
}
BAD = [math.nan, math.inf, -math.inf]


def batch(row, n=5):
    v, A = torch.randn(n, K), torch.randn(n, 2, K)
    return v, A, apply(A, target(row, n))


@pytest.mark.parametrize("value", BAD)
@pytest.mark.parametrize("which", [0, 1, 2], ids=["v", "A", "b"])
@pytest.mark.parametrize("name", ["exp", "sigmoid", "linear", "bounded each"])
def test_one_row_with_a_nonfinite_number(name, which, value):
    row = ROWS[name]
    clean = batch(row)
    tensors = [x.clone() for x in clean]
    tensors[which][2].view(-1)[1] = value
    solution = project(*tensors, activation=row, on_failure="return")
    keep = [0, 1, 3, 4]
    assert solution.status.tolist() == [0, 0, Status.NONFINITE, 0, 0]
    reference = project(*(x[keep] for x in clean), activation=row)
    assert_close(solution.z[keep], reference.z, rtol=0, atol=1e-12)
    assert_close(solution.multipliers[keep], reference.multipliers, rtol=1e-9, atol=1e-10)
    assert not solution.converged[2]
    with pytest.raises(SolveError, match=r"1 NONFINITE \(sample 2\)"):
        project(*tensors, activation=row)


@pytest.mark.parametrize("value", BAD)
def test_a_nonfinite_shared_A_fails_every_sample(value):
    v, A, b = torch.randn(3, K), torch.randn(2, K), torch.randn(2)
    A[0, 1] = value
    solution = project(v, A, b, on_failure="return")
    assert solution.status.tolist() == [Status.NONFINITE] * 3


def test_gradients_of_a_batch_with_a_bad_row():
    """The failed sample has zero gradient, the others theirs, and A the sum of theirs."""
    row = ROWS["sigmoid"]
    v, A, y = torch.randn(4, K), torch.randn(2, K), target(row, 4)
    b = apply(A, y)
    v[1, 0], b[2, 0] = math.nan, 1e3
    weights = torch.randn(4, K)

    def gradients(keep):
        inputs = [x.clone().requires_grad_() for x in (v[keep], A, b[keep])]
        solution = project(*inputs, activation=row, on_failure="return")
        ok = solution.converged
        return solution, torch.autograd.grad((solution.z * weights[keep])[ok].sum(), inputs)

    solution, whole = gradients([0, 1, 2, 3])
    _, good = gradients([0, 3])
    assert solution.status.tolist() == [0, Status.NONFINITE, Status.INFEASIBLE, 0]
    assert_close(whole[0][[0, 3]], good[0])
    assert_close(whole[1], good[1])
    assert_close(whole[2][[0, 3]], good[2])
    assert whole[0][[1, 2]].abs().max() == 0


@pytest.mark.parametrize("loss", ["z", "multipliers", "u", "matched"])
def test_a_failed_row_sends_no_nan_back(loss):
    """Also where the caller does not mask it: sum over everything, then backward."""
    row = ROWS["sigmoid"]
    v, A = torch.randn(4, K), torch.randn(2, K)
    b = apply(A, target(row, 4))
    b[2, 0] = 1e3
    inputs = [x.requires_grad_() for x in (v, A, b)]
    solution = project(*inputs, activation=row, on_failure="return")
    if loss == "matched":
        taut.matched_loss(solution, torch.rand(4, K)).backward()
    else:
        getattr(solution, loss).sum().backward()
    for x in inputs:
        assert x.grad.isfinite().all()
    assert bool((b.grad[2] == 0).all())
    assert v.grad[[0, 1, 3]].abs().min() > 0 or loss == "matched"


@pytest.mark.parametrize("name", FINITE)
def test_infeasible_rows_are_proven(name):
    row = FINITE[name]
    v, A = torch.randn(20, K), torch.randn(2, K)
    b = apply(A, target(row, 20))
    most = support(A[0], row.range).sum()  # the largest a₁ᵀz there is
    b[5, 0], b[11, 0] = most + 1.0, most + 1e-3
    solution = project(v, A, b, activation=row, on_failure="return")
    expected = [0] * 20
    expected[5] = expected[11] = Status.INFEASIBLE
    assert solution.status.tolist() == expected
    proof = is_certificate(solution.multipliers, A, b, row)
    assert proof.tolist() == [i in (5, 11) for i in range(20)]
    assert bool((solution.residual[[5, 11]] > 1e-4).all())


@pytest.mark.parametrize("name", ["exp", "weighted exp"])
def test_positive_outputs_cannot_sum_to_less_than_nothing(name):
    row = ROWS[name]
    v, A, b = torch.randn(2, K), torch.ones(1, K), torch.tensor([[1.0], [-1.0]])
    solution = project(v, A, b, activation=row, on_failure="return")
    assert solution.status.tolist() == [Status.CONVERGED, Status.INFEASIBLE]
    assert is_certificate(solution.multipliers[1], A, b[1], row)


def test_positive_outputs_sum_to_nothing_in_the_limit():
    """A total of 0, as in a table with an empty row: on the edge, and reached to rounding."""
    A = torch.tensor([[1.0, 1.0, 0.0, 0.0], [0.0, 0.0, 1.0, 1.0]])
    solution = project(torch.zeros(4), A, torch.tensor([1.0, 0.0]), activation="exp")
    assert_close(solution.z, torch.tensor([0.5, 0.5, 0.0, 0.0]), rtol=0, atol=1e-12)


@pytest.mark.parametrize("draw", range(3))
def test_verdicts_agree_with_linear_programming(draw):
    scipy = pytest.importorskip("scipy.optimize")
    torch.manual_seed(1000 * SEED + draw)
    v, A = torch.randn(30, K), torch.randn(30, 3, K)
    b = 1.2 * torch.randn(30, 3)
    solution = project(v, A, b, activation="sigmoid", on_failure="return")
    for i in range(30):
        found = scipy.linprog([0.0] * K, A_eq=A[i].numpy(), b_eq=b[i].numpy(), bounds=(0, 1))
        expected = Status.CONVERGED if found.status == 0 else Status.INFEASIBLE
        assert solution.status[i] == expected, f"sample {i}"
    assert set(solution.status.tolist()) == {Status.CONVERGED, Status.INFEASIBLE}


def test_infeasible_in_every_batch_is_infeasible_alone():
    v, A, b = torch.randn(6, K), torch.ones(1, K), torch.tensor([[1.0], [9.0]] * 3)
    together = project(v, A, b, activation="sigmoid", on_failure="return")
    for i in range(6):
        alone = project(v[i], A, b[i], activation="sigmoid", on_failure="return")
        assert alone.status == together.status[i]
        assert_close(alone.z, together.z[i], rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("name", ["linear", "sigmoid", "exp", "srlu"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_contradicting_rows_are_inconsistent(name, dtype):
    row = ROWS[name]
    A = torch.tensor([[1.0, 1, 0, 0, 0], [0, 0, 1, 1, 0], [1, 1, 1, 1, 0]], dtype=dtype)
    b = apply(A, target(row, 3, dtype=dtype))
    b[1, 2] += 0.1
    v = torch.randn(3, K, dtype=dtype)
    solution = project(v, A, b, activation=row, on_failure="return")
    assert solution.status.tolist() == [0, Status.INCONSISTENT, 0]
    with pytest.raises(SolveError, match=r"1 INCONSISTENT \(sample 1\).*redundant equations"):
        project(v, A, b, activation=row)


@pytest.mark.parametrize("name", ["linear", "sigmoid"])
def test_a_zero_row_with_a_demand_is_never_converged(name):
    A = torch.stack([torch.ones(K), torch.zeros(K)])
    b = torch.tensor([[1.0, 0.0], [1.0, 2.0]])
    solution = project(torch.randn(2, K), A, b, activation=name, on_failure="return")
    assert solution.status[0] == Status.CONVERGED
    assert solution.status[1] in (Status.INCONSISTENT, Status.INFEASIBLE)


def test_only_zeros_with_a_demand():
    solution = project(torch.zeros(2, K), torch.zeros(1, K), torch.ones(1), on_failure="return")
    assert not solution.converged.any()


def test_tall_contradiction():
    """I > K: five numbers cannot obey seven independent wishes."""
    A, b = torch.randn(7, K), torch.randn(7)
    solution = project(torch.randn(2, K), A, b, on_failure="return")
    assert solution.status.tolist() == [Status.INCONSISTENT] * 2


def test_what_is_returned_as_converged_is_solved():
    """Random problems, many of them hopeless: no verdict CONVERGED without A z = b."""
    for name in ("sigmoid", "exp", "tanh", "bounded each"):
        row = ROWS[name]
        v, A = 30 * torch.randn(50, K), torch.randn(50, 3, K)
        b = 3 * torch.randn(50, 3)
        solution = project(v, A, b, activation=row, on_failure="return")
        error = (apply(A, solution.z) - b).abs()
        # what z inherits from the rounding of u = v + Aᵀλ, where λ is large
        terms = v.abs() + apply(A.abs().mT, solution.multipliers.abs())
        inherited = 1e-15 * apply(A.abs(), row.slope(solution.u) * terms)
        allowed = 1e-12 * (1 + b.abs() + apply(A.abs(), solution.z.abs())) + inherited
        assert bool((error <= allowed)[solution.converged].all())
        infeasible = solution.status == Status.INFEASIBLE
        assert infeasible.any()
        assert is_certificate(solution.multipliers, A, b, row)[infeasible].all()


def test_is_certificate_refuses_what_proves_nothing():
    A, b = torch.ones(1, 2), torch.tensor([3.0])
    assert is_certificate(torch.tensor([1.0]), A, b, "sigmoid")
    assert not is_certificate(torch.tensor([-1.0]), A, b, "sigmoid")
    assert not is_certificate(torch.tensor([0.0]), A, b, "sigmoid")
    assert not is_certificate(torch.tensor([math.nan]), A, b, "sigmoid")
    assert not is_certificate(torch.tensor([1.0]), A, b, "linear")
    assert not is_certificate(torch.tensor([1.0]), A, torch.tensor([2.0]), "sigmoid")  # the edge
    assert not is_certificate(torch.tensor([1.0]), A, torch.tensor([1.0]), "sigmoid")


def test_is_certificate_of_batches():
    A = torch.ones(1, 2)
    b = torch.tensor([[3.0], [1.0]])
    proof = is_certificate(torch.ones(2, 1), A, b, "sigmoid")
    assert proof.tolist() == [True, False]
    own = is_certificate(torch.ones(2, 1), torch.ones(2, 1, 2), b, "sigmoid")
    assert own.tolist() == [True, False]


@pytest.mark.parametrize("empty", [(0,), (3, 0)])
def test_an_empty_batch_never_fails(empty):
    solution = project(
        torch.zeros(*empty, K), torch.ones(1, K), torch.tensor([-5.0]), activation="exp"
    )
    assert solution.z.shape == (*empty, K)
    assert solution.converged.all()


def test_logits_that_overflow_are_not_fatal():
    """exp(1000) is inf, and softmax of it is not."""
    v = torch.tensor([[1000.0, 999.0, 0.0], [-1000.0, -999.0, -2000.0]])
    solution = project(v, torch.ones(1, 3), torch.ones(1), activation="exp")
    assert_close(solution.z, v.softmax(-1), rtol=0, atol=1e-12)
