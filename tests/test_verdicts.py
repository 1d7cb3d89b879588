"""Each Status is true and has its proof; neighbours never notice; a slice of the fuzzer."""

import math
from collections import Counter

import numpy as np
import pytest
import torch
from torch.testing import assert_close

import taut
from fuzzing.blocks import make_block
from fuzzing.checks import Answer, check_samples
from fuzzing.extremes import check_extremes
from fuzzing.laws import LABELS
from fuzzing.optimal import check_optimal
from fuzzing.runner import KINDS, reproducer, run_block
from fuzzing.tally import Tally
from fuzzing.tangents import check_tangents
from fuzzing.within import make_within
from measures import output_rounding
from tables import ALL, SEED, K, apply, both_dtypes, conditioned, margins, problem, target
from taut import SolveError, Status, is_certificate, project
from taut.certificate import support

# many solves: the shapes are checked elsewhere
pytestmark = pytest.mark.usefixtures("as_user")
FINITE = {name: activation for name, activation in ALL.items() if activation.range.bounded}
BAD = [math.nan, math.inf, -math.inf]


@pytest.mark.parametrize("value", BAD)
@pytest.mark.parametrize("which", [0, 1, 2], ids=["v", "A", "b"])
@pytest.mark.parametrize("name", ["exp", "sigmoid", "linear", "bounded each"])
def test_one_sample_with_a_nonfinite_number(name, which, value):
    activation = ALL[name]
    ends = activation.range.bounds(torch.zeros(K))
    if which == 0 and math.isinf(value) and ends[int(value > 0)].expand(K)[1].isfinite():
        value = math.nan  # v = ±inf at an end of the range holds an output: tests/test_rule.py
    clean = list(problem(activation, n=5, own=True))
    tensors = [x.clone() for x in clean]
    tensors[which][2].view(-1)[1] = value
    solution = project(*tensors, activation=activation, on_failure="return")
    keep = [0, 1, 3, 4]
    assert solution.status.tolist() == [0, 0, Status.NONFINITE, 0, 0]
    reference = project(*(x[keep] for x in clean), activation=activation)
    assert_close(solution.z[keep], reference.z, rtol=0, atol=1e-12)
    assert_close(solution.multipliers[keep], reference.multipliers, rtol=1e-9, atol=1e-10)
    assert not solution.converged[2]
    with pytest.raises(SolveError, match=r"1 NONFINITE \(sample 2\)"):
        project(*tensors, activation=activation)


@pytest.mark.parametrize("value", BAD)
def test_a_nonfinite_shared_A_fails_every_sample(value):
    v, A, b = torch.randn(3, K), torch.randn(2, K), torch.randn(2)
    A[0, 1] = value
    solution = project(v, A, b, on_failure="return")
    assert solution.status.tolist() == [Status.NONFINITE] * 3


@pytest.mark.parametrize("name", FINITE)
def test_infeasible_samples_are_proven(name):
    activation = FINITE[name]
    v, A, b = problem(activation, n=20)
    most = support(A[0], activation.range).sum()  # the largest a₁ᵀz there is
    b[5, 0], b[11, 0] = most + 1.0, most + 1e-3
    solution = project(v, A, b, activation=activation, on_failure="return")
    expected = [0] * 20
    expected[5] = expected[11] = Status.INFEASIBLE
    assert solution.status.tolist() == expected
    proof = is_certificate(solution.multipliers, A, b, activation)
    assert proof.tolist() == [i in (5, 11) for i in range(20)]
    assert bool((solution.residual[[5, 11]] > 1e-4).all())


@pytest.mark.parametrize("name", ["exp", "weighted exp"])
def test_positive_outputs_cannot_sum_to_less_than_nothing(name):
    activation = ALL[name]
    v, A, b = torch.randn(2, K), torch.ones(1, K), torch.tensor([[1.0], [-1.0]])
    solution = project(v, A, b, activation=activation, on_failure="return")
    assert solution.status.tolist() == [Status.CONVERGED, Status.INFEASIBLE]
    assert is_certificate(solution.multipliers[1], A, b[1], activation)


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
    b[:5] = apply(A[:5], torch.rand(5, K))
    b[-1] = 1 + A[-1].abs().sum(-1)
    solution = project(v, A, b, activation="sigmoid", on_failure="return")
    for i in range(30):
        found = scipy.linprog([0.0] * K, A_eq=A[i].numpy(), b_eq=b[i].numpy(), bounds=(0, 1))
        expected = Status.CONVERGED if found.status == 0 else Status.INFEASIBLE
        assert solution.status[i] == expected, f"sample {i}"
    assert set(solution.status.tolist()) == {Status.CONVERGED, Status.INFEASIBLE}


@pytest.mark.parametrize("name", ["linear", "sigmoid", "exp", "srlu"])
@both_dtypes
def test_contradicting_equations_are_inconsistent(name, dtype):
    activation = ALL[name]
    A = torch.tensor([[1.0, 1, 0, 0, 0], [0, 0, 1, 1, 0], [1, 1, 1, 1, 0]], dtype=dtype)
    b = apply(A, target(activation, 3, dtype=dtype))
    b[1, 2] += 0.1
    v = torch.randn(3, K, dtype=dtype)
    solution = project(v, A, b, activation=activation, on_failure="return")
    assert solution.status.tolist() == [0, Status.INCONSISTENT, 0]
    with pytest.raises(SolveError, match=r"1 INCONSISTENT \(sample 1\).*redundant equations"):
        project(v, A, b, activation=activation)
    for sparse in (A.to_sparse(), A.to_sparse_csr()):  # the same verdict, and no run-away
        found = project(v, sparse, b, activation=activation, on_failure="return")
        assert found.status.tolist() == [0, Status.INCONSISTENT, 0]
        beside = apply(A, found.z) - b
        assert_close(beside[1].abs().amax(), torch.tensor(0.1 / 3, dtype=dtype), rtol=1e-3, atol=0)
        assert_close(found.residual, beside.abs().amax(-1), rtol=0, atol=1e-6)
        size = found.multipliers[1].abs().amax()
        assert size < 10 * (1 + solution.multipliers[1].abs().amax())
        u = (v + apply(A.mT, found.multipliers))[1]
        assert_close(found.u[1], u, rtol=0, atol=100 * torch.finfo(dtype).eps * (1 + size))
        with pytest.raises(SolveError, match=r"In sample 1 equation \d asks for .* make it"):
            project(v, sparse, b, activation=activation)


@pytest.mark.parametrize("name", ["linear", "sigmoid"])
def test_a_zero_equation_with_a_demand_is_never_converged(name):
    A = torch.stack([torch.ones(K), torch.zeros(K)])
    b = torch.tensor([[1.0, 0.0], [1.0, 2.0]])
    solution = project(torch.randn(2, K), A, b, activation=name, on_failure="return")
    assert solution.status[0] == Status.CONVERGED
    assert solution.status[1] in (Status.INCONSISTENT, Status.INFEASIBLE)


def test_without_equations_nothing_is_proven():
    nothing = torch.zeros(2, 0)
    assert is_certificate(nothing, torch.zeros(0, K), nothing, "exp").tolist() == [False, False]


@pytest.mark.parametrize("name", ["linear", "exp", "sigmoid"])
def test_sparse_equations_of_any_size_that_contradict(name):
    """Rows 1e6 apart, and a row of zeros: the nearest b that does not contradict has a solution."""
    A = torch.tensor([[1e3, 1e3, 0, 0], [1e-3, 1e-3, 0, 0], [0, 0, 0, 0], [0, 0, 1, 1]])
    y = target(ALL[name], 3)[:, :4]
    b = apply(A, y)
    b[0, 1] *= 2
    b[1, 2] = 1e-3
    found = project(torch.randn(3, 4), A.to_sparse(), b, activation=name, on_failure="return")
    assert found.status.tolist() == [Status.INCONSISTENT, Status.INCONSISTENT, 0]
    assert found.z.abs().amax() < 5 * (1 + y.abs().amax())
    assert_close(found.residual[1], torch.tensor(1e-3), rtol=1e-6, atol=0)


def test_only_zeros_with_a_demand():
    solution = project(torch.zeros(2, K), torch.zeros(1, K), torch.ones(1), on_failure="return")
    assert not solution.converged.any()


@pytest.mark.parametrize("own", [False, True], ids=["shared", "own"])
def test_tall_contradiction(own):
    """I > K: five numbers cannot obey seven independent wishes, however alike."""
    for _ in range(2 if own else 100):
        A, b = torch.randn(*(50,) * own, 7, K), torch.randn(50, 7)
        solution = project(torch.randn(50, K), A, b, on_failure="return")
        assert (solution.status == Status.INCONSISTENT).all()


@pytest.mark.filterwarnings("ignore::taut.ConditionWarning")
@pytest.mark.parametrize("digits", [4, 6])
@pytest.mark.parametrize("name", ["tanh", "sigmoid", "bounded"])
def test_multipliers_of_saturated_outputs_give_z(name, digits):
    """A flat σ lets u move far under a z that does not: λ must not follow the wrong one."""
    activation, n = taut.activations.resolve(ALL[name]), 400
    given = problem(activation, n=n, I=3, K=3, matrix=conditioned(digits), own=True)
    A, v = given.A, 100 * (2 * torch.rand(n, 3) - 1)
    λ = torch.randn(n, 3) * 10 ** (3 * torch.rand(n, 1) - 1)
    b = apply(A, activation.sigma(v + apply(A.mT, λ)))
    found = project(v, A, b, activation=activation, on_failure="return")
    u, terms = v + apply(A.mT, found.multipliers), apply(A.mT.abs(), found.multipliers.abs())
    blur = 64 * 2.0**-52 * (v.abs() + terms)
    low, high = activation.sigma(u - blur), activation.sigma(u + blur)
    slack = 16 * output_rounding(activation, found.z)
    off = (found.z < low - slack) | (found.z > high + slack)
    assert found.converged.sum() > n / 2
    assert not off[found.converged & found.u.isfinite().all(-1)].any()


@pytest.mark.parametrize("value", [*BAD, 1e300])
def test_an_absurd_start_beside_held_outputs_is_no_start(value):
    A, b = torch.tensor([[1.0, 1, 0, 0], [0, 0, 1, -1]]), torch.tensor([2.0, 0.5])
    v, start = torch.tensor([0.3, -2.0, 0.1, 0.7]), torch.tensor([0.0, value])
    found = project(v, A, b, activation="tanh", init=start)  # z₁ = z₂ = 1
    assert_close(found.z, project(v, A, b, activation="tanh").z, rtol=0, atol=1e-14)


def test_what_is_returned_as_converged_is_solved():
    """Random problems, many of them hopeless: no verdict CONVERGED without A z = b."""
    for name in ("sigmoid", "exp", "tanh", "bounded each"):
        activation = ALL[name]
        v, A = 30 * torch.randn(50, K), torch.randn(50, 3, K)
        b = 3 * torch.randn(50, 3)
        solution = project(v, A, b, activation=activation, on_failure="return")
        error = (apply(A, solution.z) - b).abs()
        # what z inherits from the rounding of u = v + Aᵀλ, where λ is large
        terms = v.abs() + apply(A.abs().mT, solution.multipliers.abs())
        inherited = 1e-15 * apply(A.abs(), activation.slope(solution.u) * terms)
        allowed = 1e-12 * (1 + b.abs() + apply(A.abs(), solution.z.abs())) + inherited
        assert bool((error <= allowed)[solution.converged].all())
        infeasible = solution.status == Status.INFEASIBLE
        assert infeasible.any()
        assert is_certificate(solution.multipliers, A, b, activation)[infeasible].all()


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


# Proofs


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


@pytest.mark.parametrize("default", [torch.float32, torch.float64], ids=str)
def test_a_proof_holds_in_exact_arithmetic_among_denormals_and_the_largest_numbers(default):
    """Whatever torch's default dtype, in which a bound on what underflows would itself be 0."""
    torch.set_default_dtype(default)  # restored by a fixture
    looked_at = Counter()
    for number in range(40):
        failures, counts = check_extremes(SEED, number)
        assert not failures, f"block {number}: {failures}"
        looked_at += counts
    assert looked_at.total() > 100


def test_what_is_not_finite_proves_nothing():
    """Multipliers, and products: the supremum of what overflows is no number."""
    A, b = torch.tensor([[-1.7e308], [-1.7e308]]), torch.tensor([0.0, 1.0])
    assert not is_certificate(torch.ones(2), A, b, "tanh", upper=0.5)
    assert not is_certificate(torch.ones(2), A, b, "tanh")
    for value in BAD:
        multipliers = torch.tensor([1.0, value])
        A, b = torch.eye(2), torch.tensor([0.0, 5.0])
        assert not is_certificate(multipliers, A, b, "tanh")
        assert not is_certificate(multipliers, A, b, "tanh", upper=0.5)


def test_a_proof_reaches_no_further_than_the_numbers_it_is_of():
    """z = 2e303 is a solution here, as −5e-324·z is −1e-20."""
    torch.set_default_dtype(torch.float32)
    A, b = (torch.tensor(x, dtype=torch.float64) for x in ([[-5e-324]], [-1e-20]))
    assert not is_certificate([-1.0], A, b, "linear", lower=1.0)
    assert not is_certificate([-1.0], A, b, "linear", lower=1.0, radius=2.1e303)
    solution = project(-A.sign()[0], A, b, lower=1.0, on_failure="return")
    assert not (solution.radius > 2.02402e303)


@pytest.mark.usefixtures("as_user")
def test_is_certificate_takes_lists_and_refuses_what_does_not_belong_together():
    A, b = [[1, 1]], [3.0]
    assert is_certificate([1.0], A, b, "sigmoid")
    assert is_certificate([1.0], np.ones((1, 2)), b, "linear", upper=[1.0, 1.0])
    assert is_certificate([1.0, 0.0], A, b, "sigmoid", G=torch.eye(1, 2).to_sparse(), lower=0.1)
    assert is_certificate([[1.0]], A, b, "sigmoid", radius=[5.0]).tolist() == [True]
    wrong = [
        (([1.0, 1.0], A, b), {}, r"each of the 1 rows .* multipliers \(2,\), A \(1, 2\)"),
        ((1.0, A, b), {}, r"each of the 1 rows .* multipliers \(\)"),
        (([1.0], [1.0, 1.0], b), {}, r"A and G must be \(I, K\).* A \(2,\)"),
        (([1.0], A, [1.0, 2.0]), {}, r"b must have one entry for each equation.* b \(2,\)"),
        (([1.0] * 2, A, b), {"G": [[1.0]], "lower": 0.0}, r"A and G must be .* G \(1, 1\)"),
        (([1.0] * 2, A, b), {"G": A, "lower": [0.0] * 3}, r"per row of G.* lower \(3,\)"),
        (([1.0], A, b), {"upper": [0.0] * 3}, r"per output.* upper \(3,\)"),
        ((torch.ones(4, 1), A, torch.ones(3, 1)), {}, r"as many everywhere.* b \(3, 1\)"),
    ]
    for given, sides, message in wrong:
        with pytest.raises(ValueError, match=message):
            is_certificate(*given, "sigmoid", **sides)
    with pytest.raises(TypeError, match="A must be a tensor, or a list"):
        is_certificate([1.0], taut.prepare(torch.ones(1, 2)), b, "sigmoid")


def test_certificate_with_sparse_A():
    A, b = torch.ones(1, 2).to_sparse(), torch.tensor([3.0])
    assert taut.is_certificate(torch.tensor([1.0]), A, b, "sigmoid")
    solution = taut.project(torch.zeros(2), A, b, activation="sigmoid", on_failure="return")
    assert taut.is_certificate(solution.multipliers, A, b, "sigmoid")


def test_margins_that_contradict_each_other_are_not_solved():
    b = torch.ones(16)
    b[0] = 2.0  # the rows sum to 9, the columns to 8
    solution = taut.project(
        torch.zeros(64), margins(8, 8).to_sparse(), b, activation="exp", on_failure="return"
    )
    assert taut.Status(solution.status) is taut.Status.INCONSISTENT
    assert solution.z.max() < 1.0  # for the nearest b that does not contradict itself


# The fuzzer: many little blocks, every check, the same samples every time


def _run(label, blocks, kind="equations"):
    tally = Tally()
    for number in range(LABELS.index(label), blocks * len(LABELS), len(LABELS)):
        tally.merge(run_block(seed=SEED, number=number, most=32, kind=kind))
    assert tally.silent_wrong == 0 and not tally.checks, reproducer(tally.failures[0])
    return tally


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("label", LABELS)
def test_no_sample_is_wrong_in_silence(label, kind):
    assert _run(label, 2, kind).samples > 30


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("label", LABELS)
def test_no_sample_is_wrong_in_silence_in_more_blocks(label, kind):
    assert _run(label, 20, kind).samples > 300


@pytest.mark.parametrize(
    ("seed", "number", "samples"),
    [
        (5, 19, [12]),  # equations with a condition of 1e5, multipliers of 1e7
        (8, 92, [23, 50, 118, 226]),  # of 1e6
        (7, 12, [221]),  # the rounding of u is more than the rule allows
        (40, 54, [195]),  # and where ν is much larger than v
        (40, 157, [3, 86, 141]),  # outputs in kilograms and in tons
        (8, 36, [4]),  # a row of 1 beside one of 1e13
        (40, 27, [70]),  # sides that are a unit in the last place apart
    ],
)
def test_samples_at_the_rounding_of_u_converge(seed, number, samples):
    block = make_within(seed, number, 256)
    # Twice, since a sample alone has its G shared.
    found = block.project(block.take(np.array(samples + samples)))
    assert found.converged.all()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("seed", "number"),
    [
        (53, 33),  # a saturated output, whose slope is 1e-48 at both ends of the range
        (31, 45),  # rows that are nearly dependent, multipliers of 1e5
    ],
)
def test_corrections_of_z_are_within_the_rounding_of_u(seed, number):
    block = make_within(seed, number, 1024)
    solution = block.solve()
    failed = check_optimal(block, Answer.of(solution), solution)
    assert not any(mask.any() for mask in failed.values())


@pytest.mark.parametrize("sample", [183, 229])
def test_the_multiplier_of_a_row_between_outputs_that_stand_still_does_not_run_away(sample):
    """They have equal bounds, which satisfy the equation; beside it are others to be solved."""
    block = make_within(31, 264, 1024)
    found = block.project(block.one(sample))
    assert found.converged.all()
    assert (found.multipliers.abs() < 100).all()


@pytest.mark.parametrize(("number", "sample"), [(188, 765), (198, 958)])
def test_a_sample_without_a_solution_has_a_residual(number, sample):
    """Also where σ(v) overflows."""
    block = make_within(31, number, 1024)
    found = block.project(block.one(sample))
    assert found.status == Status.INFEASIBLE
    assert found.residual.isfinite()


def test_a_start_at_which_the_outputs_overflow_is_given_up():
    block = make_within(8, 108, 256)
    assert block.project(block.one(123)).status != Status.NONFINITE


def test_a_block_is_the_same_every_time():
    one, two = make_block(3, 11, 16), make_block(3, 11, 16)
    for name in ("v", "A", "b", "target"):
        np.testing.assert_array_equal(getattr(one, name), getattr(two, name))


@pytest.mark.parametrize(
    ("spoil", "check"),
    [
        (lambda a: a.z.__iadd__(1e-6), "CONVERGED: A z = b"),
        (lambda a: a.multipliers.__iadd__(1e-6), "CONVERGED: z = σ(v + Aᵀλ)"),
        (lambda a: a.residual.__iadd__(1e-6), "the residual reported is that of z"),
        (lambda a: a.status.fill(2), "INFEASIBLE: the multipliers are a certificate"),
        (lambda a: a.status.fill(3), "INCONSISTENT: b is not in the range of A"),
        (lambda a: a.status.fill(0), "a sample with NaN or inf is called NONFINITE"),
    ],
)
def test_the_checks_notice_what_they_are_for(spoil, check):
    block = make_block(0, 1, 64)  # linear, float64: nothing to be found wrong
    answer = Answer.of(block.solve())
    assert not any(mask.any() for mask in check_samples(block, answer).values())
    spoil(answer)
    assert check_samples(block, answer)[check].any()


SIGNS = "CONVERGED: multipliers have the sign of a side that is there"


@pytest.mark.parametrize(
    ("spoil", "check"),
    [
        (lambda a: a.z.__iadd__(1e-6), "CONVERGED: every side is kept by the rule"),
        (lambda a: a.z.__iadd__(1e-6), "CONVERGED: a row with a multiplier is at its side"),
        (lambda a: a.multipliers.__iadd__(1e-6), "CONVERGED: z = clip(σ(v + Aᵀλ + Gᵀν))"),
        (lambda a: a.multipliers.__imul__(-1), SIGNS),
        (lambda a: a.residual.__iadd__(1e-6), "the residual reported is that of z"),
        (lambda a: a.status.fill(2), "INFEASIBLE: the multipliers are a certificate"),
        (lambda a: a.status.fill(3), "INCONSISTENT is not said of what has a solution"),
        (lambda a: a.status.fill(0), "NONFINITE is said of what is not finite"),
    ],
)
def test_the_checks_of_inequalities_notice_what_they_are_for(spoil, check):
    block = make_within(0, 82, 64)  # linear, float64, rows
    solution = block.solve()
    answer = Answer.of(solution)
    assert not any(mask.any() for mask in check_optimal(block, answer, solution).values())
    spoil(answer)
    assert check_optimal(block, answer, solution)[check].any()


def test_wrong_gradients_of_inequalities_are_noticed(monkeypatch):
    block = make_within(0, 82, 64)
    assert not check_tangents(block)[0]
    project = taut.project

    def wrong(*args, **options):
        given = {**options, "v": options["v"] + 1e-6 * (options["v"] - options["v"].detach())}
        return project(*args, **given)

    monkeypatch.setattr(taut, "project", wrong)
    assert any("∂v" in check for _, check in check_tangents(block)[0])
