"""Status, Solution and SolveError: what they say, and that it helps."""

import pickle
import warnings

import pytest
import torch
from torch.testing import assert_close

import taut
from tables import K
from taut import Solution, SolveError, Status
from taut.outcome import explain


def test_statuses_are_the_contract():
    names = "CONVERGED MAX_ITERATIONS INFEASIBLE INCONSISTENT NONFINITE STUCK NOT_NEAREST".split()
    assert [status.name for status in Status] == names
    assert Status.CONVERGED == 0


@pytest.mark.parametrize("status", Status)
def test_every_status_has_a_message_of_its_own(status):
    assert len(status.message) > 20
    assert [other.message for other in Status].count(status.message) == 1


@pytest.mark.parametrize(
    ("status", "advice"),
    [
        (Status.MAX_ITERATIONS, "max_iterations"),
        (Status.INFEASIBLE, "is_certificate"),
        (Status.INCONSISTENT, "redundant"),
        (Status.NONFINITE, "NaN or inf"),
    ],
)
def test_messages_say_what_to_try(status, advice):
    assert advice in status.message


def test_status_of_a_tensor():
    assert Status(torch.tensor(3)) is Status.INCONSISTENT
    assert Status(torch.tensor([2])) is Status.INFEASIBLE
    with pytest.raises(ValueError, match="99"):
        Status(99)
    with pytest.raises(ValueError, match="not a valid Status"):
        Status(torch.tensor([0, 1]))


def solve(**kwargs):
    b = torch.tensor([[1.0], [5.0], [float("nan")], [1.5]])
    v, A = torch.zeros(4, 2), torch.ones(1, 2)
    return taut.project(v, A, b, activation="sigmoid", **kwargs)


def test_error_names_the_samples_and_the_cause():
    with pytest.raises(SolveError, match="2 of 4 samples could not be projected") as info:
        solve()
    message = str(info.value)
    assert "1 INFEASIBLE (sample 1)" in message
    assert "1 NONFINITE (sample 2)" in message
    assert Status.INFEASIBLE.message in message
    assert Status.NONFINITE.message in message
    assert Status.CONVERGED.message not in message
    assert 'on_failure="return"' in message
    assert info.value.status.tolist() == [0, 2, 4, 0]
    assert info.value.residual.shape == (4,)


def test_error_is_picklable():
    with pytest.raises(SolveError) as info:
        solve()
    twin = pickle.loads(pickle.dumps(info.value))
    assert str(twin) == str(info.value)
    assert_close(twin.status, info.value.status)


def test_error_of_a_single_sample_has_no_index():
    with pytest.raises(SolveError, match="1 of 1 samples") as info:
        taut.project(torch.zeros(2), torch.ones(1, 2), torch.tensor([5.0]), activation="sigmoid")
    assert "(sample" not in str(info.value)
    assert info.value.status.shape == ()


def test_error_names_samples_by_all_batch_indices():
    b = torch.ones(2, 3, 1)
    b[1, 2] = 9.0
    with pytest.raises(SolveError, match=r"\(sample \(1, 2\)\)"):
        taut.project(torch.zeros(2, 3, 2), torch.ones(1, 2), b, activation="sigmoid")


def test_error_names_only_the_first_of_many():
    status = torch.full((100,), int(Status.INFEASIBLE))
    message = explain(status, torch.ones(100), lambda verdict, samples: {})
    assert "100 of 100" in message
    assert "(sample 0, 1, 2, 3, 4, …)" in message


def test_error_says_which_input_is_not_finite():
    v, A, b = torch.zeros(3, K), torch.ones(1, K), torch.ones(3, 1)
    v[1, 0], b[2] = torch.nan, torch.inf
    given = f"1 of the {3 * K} entries of v, 1 of the 3 entries of b"
    with pytest.raises(SolveError, match=f"2 NONFINITE .sample 1, 2.*Not finite: {given}"):
        taut.project(v, A, b)
    solution = taut.project(v, A, b, on_failure="return")
    assert given in solution.report()
    A[0, 1] = torch.nan
    with pytest.raises(SolveError, match=f"Not finite: .*1 of the {K} entries of A"):
        taut.project(torch.zeros(3, K), A, torch.ones(3, 1))


def test_report_without_failures():
    solution = taut.project(torch.zeros(3, K), torch.ones(1, K), torch.ones(1))
    assert solution.report() == "All 3 samples satisfy A z = b."


def test_error_is_a_runtime_error():
    assert issubclass(SolveError, RuntimeError)


def test_solution_is_frozen_and_complete():
    solution = taut.project(torch.randn(4, K), torch.ones(1, K), torch.ones(4, 1))
    assert isinstance(solution, Solution)
    assert solution.z.shape == solution.u.shape == (4, K)
    assert solution.multipliers.shape == (4, 1)
    for x in (solution.residual, solution.iterations, solution.status, solution.converged):
        assert x.shape == (4,)
    assert solution.converged.dtype == torch.bool
    assert not solution.iterations.is_floating_point()
    assert not solution.status.is_floating_point()
    with pytest.raises(AttributeError, match="z"):
        solution.z = torch.zeros(4, K)


def test_residual_is_measured_at_this_very_z():
    solution = solve(on_failure="return")
    at = [0, 1, 3]
    b = torch.tensor([[1.0], [5.0], [1.5]])
    measured = (solution.z[at].sum(-1, keepdim=True) - b).abs().amax(-1)
    assert_close(solution.residual[at], measured, rtol=0, atol=1e-15)


def test_repr_counts():
    text = repr(solve(on_failure="return"))
    assert "z=(4, 2)" in text
    assert "2 CONVERGED" in text
    assert "1 INFEASIBLE" in text
    empty = taut.project(torch.zeros(0, 2), torch.ones(1, 2), torch.ones(1))
    assert "empty" in repr(empty)


def _ill_conditioned(v, A, b):
    return taut.project(v, torch.cat([A, A + 1e-8 * torch.eye(1, 3).double()]), torch.cat([b, b]))


def _returns_failures(v, A, b):
    layer = taut.Projection(A, activation="sigmoid", on_failure="return")
    return torch.nn.Sequential(torch.nn.Identity(), Fixed(layer, 5 * b))(v)


def _learns_from_failures(v, A, b):
    solution = taut.project(v, A, 5 * b, activation="sigmoid", on_failure="return")
    return taut.matched_loss(solution, torch.full_like(v, 0.5))


def _bad_targets(v, A, b):
    return taut.Projection(A).loss(v, v, b)


class Fixed(torch.nn.Module):
    """A layer and its b, to be called by torch."""

    def __init__(self, layer, b):
        super().__init__()
        self.layer, self.b = layer, b

    def forward(self, v):
        return self.layer(v, self.b)


WARNED = (_ill_conditioned, _returns_failures, _learns_from_failures, _bad_targets)


@pytest.mark.parametrize("call", WARNED)
@pytest.mark.usefixtures("as_user")
def test_a_warning_points_at_the_line_of_the_user(call):
    v, A, b = torch.zeros(3).double(), torch.ones(1, 3).double(), torch.ones(1).double()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call(v, A, b)
    assert [warning.filename for warning in caught] == [__file__]
