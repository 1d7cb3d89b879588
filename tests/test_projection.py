"""taut.project: exact for every activation and every shape of problem."""

import pytest
import torch
from torch.testing import assert_close

import taut
from tables import (
    PROBLEMS,
    ROWS,
    SHORT,
    K,
    apply,
    output_rounding,
    relative_residual,
    scale,
    target,
)
from taut import Status

each_row = pytest.mark.parametrize("row", ROWS.values(), ids=ROWS.keys())
each_short = pytest.mark.parametrize("row", SHORT.values(), ids=SHORT.keys())
each_problem = pytest.mark.parametrize("problem", PROBLEMS, ids=[p.name for p in PROBLEMS])


def check(solution, v, A, b, row, tolerance):
    """Everything that is true of a converged solution."""
    assert solution.converged.all()
    assert relative_residual(A, b, solution.z) <= tolerance
    assert solution.z.dtype == solution.multipliers.dtype == solution.u.dtype == v.dtype
    assert solution.z.shape == solution.u.shape == v.shape
    assert solution.multipliers.shape == (*v.shape[:-1], A.shape[-2])
    assert solution.status.shape == solution.iterations.shape == v.shape[:-1]
    eps = torch.finfo(v.dtype).eps
    # u = v + Aᵀλ and z = σ(u), each to the rounding of its terms
    added = apply(A.mT, solution.multipliers)
    terms = v.abs() + apply(A.abs().mT, solution.multipliers.abs())
    assert bool(((v + added - solution.u).abs() <= 8 * eps * terms).all())
    error = (solution.z - row.sigma(solution.u)).abs()
    assert bool((error <= output_rounding(row, solution.z)).all())
    assert bool(row.range.contains(solution.z).all())
    measured = (apply(A, solution.z) - b).abs()
    if A.shape[-2]:
        error = (solution.residual - measured.amax(-1)).abs()
        assert bool((error <= 8 * eps * scale(A, b, solution.z).amax(-1)).all())


@each_problem
@each_short
def test_exact_in_float64(row, problem):
    v, A, b = problem.make(row)
    solution = taut.project(v, A, b, activation=row)
    check(solution, v, A, b, row, 1e-12)


@each_problem
@pytest.mark.parametrize("name", ["exp", "sigmoid", "srlu", "mixed of derived"])
def test_exact_in_float32(name, problem):
    row = SHORT[name]
    v, A, b = problem.make(row, torch.float32)
    solution = taut.project(v, A, b, activation=row)
    check(solution, v, A, b, row, 2e-6)


def logits_to_twenty(row, rows, dtype=torch.float64):
    v, A = 20 * (2 * torch.rand(50, K) - 1), torch.randn(50, rows, K)
    return v.to(dtype), A.to(dtype), apply(A, target(row, 50)).to(dtype)


@pytest.mark.parametrize("rows", [1, 3])
@each_row
def test_logits_to_twenty_in_float64(row, rows):
    v, A, b = logits_to_twenty(row, rows)
    check(taut.project(v, A, b, activation=row), v, A, b, row, 1e-12)


@pytest.mark.parametrize("rows", [1, 3])
def test_logits_to_twenty_in_float32(rows):
    missed = {}
    for name, row in ROWS.items():
        v, A, b = logits_to_twenty(row, rows, torch.float32)
        solution = taut.project(v, A, b, activation=row, on_failure="return")
        error = relative_residual(A, b, solution.z)
        if not (solution.converged.all() and error <= 2e-6):
            missed[name] = (int((~solution.converged).sum()), error)
    assert missed == {}


def test_exp_and_sigmoid_in_one_hard_problem():
    v = torch.tensor([17.66, -13.33, -9.633, 9.649, -7.291])
    A = torch.tensor(
        [
            [0.5142, 0.3104, 1.060, -1.006, 0.6843],
            [0.4210, 1.171, 0.5679, -0.7563, -1.138],
            [-0.5101, -0.4623, -0.1186, 0.8362, -0.4576],
        ]
    )
    b = torch.tensor([-2.222620964050293, -0.7274807691574097, 0.2617884874343872])
    row = ROWS["weighted mixed"]
    check(taut.project(v, A, b, activation=row), v, A, b, row, 1e-12)


@each_row
def test_projection_is_the_nearest_point(row):
    """B(·‖σ(v)) rises in every feasible direction, and its gradient is in the span of the rows."""
    v, A = torch.randn(K), torch.randn(2, K)
    b = apply(A, target(row))
    z = taut.project(v, A, b, activation=row).z
    start = row.sigma(v)
    nearest = row.bregman(z, start).sum()
    null = torch.linalg.svd(A).Vh[2:]
    for direction in [*null, *-null]:
        step = 1e-3 * direction
        lower, upper = row.range.bounds(z)
        room = torch.minimum(z - lower, upper - z).min().item()
        moved = z + step * min(1.0, 100 * room)
        assert row.bregman(moved, start).sum() > nearest
    assert_close(apply(null, row.inverse(z) - v), torch.zeros(K - 2), rtol=0, atol=1e-10)


@each_row
def test_redundant_rows_change_nothing(row):
    v, A = torch.randn(6, K), torch.randn(2, K)
    b = apply(A, target(row, 6))
    mix = torch.randn(3, 2)
    more, demands = torch.cat([A, mix @ A]), torch.cat([b, b @ mix.mT], -1)
    one = taut.project(v, A, b, activation=row)
    other = taut.project(v, more, demands, activation=row)
    assert_close(other.z, one.z, rtol=1e-11, atol=1e-12)
    assert_close(other.multipliers @ more, one.multipliers @ A, rtol=1e-9, atol=1e-10)
    # of all multipliers that do it, the smallest
    smallest = (torch.linalg.pinv(more.mT) @ (one.multipliers @ A).mT).mT
    assert_close(other.multipliers, smallest, rtol=1e-8, atol=1e-9)


def test_b_for_all_samples():
    v, A, b = torch.randn(2, 3, K), torch.randn(2, K), torch.tensor([0.5, -0.5])
    shared = taut.project(v, A, b, activation="tanh")
    each = taut.project(v, A, b.expand(2, 3, 2), activation="tanh")
    assert_close(shared.z, each.z)


def test_non_contiguous_and_expanded_tensors():
    row = ROWS["sigmoid"]
    v = torch.randn(K, 6).mT
    A = torch.randn(K, 2).mT
    b = apply(A, target(row)).expand(6, 2)
    assert not v.is_contiguous() and not A.is_contiguous() and not b.is_contiguous()
    solution = taut.project(v, A, b, activation=row)
    plain = taut.project(v.contiguous(), A.contiguous(), b.contiguous(), activation=row)
    assert_close(solution.z, plain.z, rtol=0, atol=1e-13)
    own = torch.randn(6, K, 2).mT
    demands = apply(own, target(row, 6))
    check(taut.project(v, own, demands, activation=row), v, own, demands, row, 1e-12)


def test_inputs_are_left_alone():
    row = ROWS["exp"]
    v, A = torch.randn(6, K), torch.randn(2, K)
    b, init = apply(A, target(row, 6)), torch.randn(6, 2)
    before = [x.clone() for x in (v, A, b, init)]
    solution = taut.project(v, A, b, activation=row, init=init)
    solution.z.add_(1.0)
    for x, y in zip((v, A, b, init), before, strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("name", ["linear", "exp", "sigmoid"])
def test_outputs_share_no_memory_with_inputs(name):
    """Also where nothing had to be done: no rows to obey, or z = v already."""
    v = torch.randn(4, K)
    b = ROWS[name].sigma(v).sum(-1, keepdim=True)
    solution = taut.project(v, torch.ones(1, K), b, activation=name)
    assert solution.iterations.max() == 0
    before = v.clone()
    solution.u.add_(1.0)
    solution.z.add_(1.0)
    assert torch.equal(v, before)


def test_large_batches_and_many_rows():
    row = ROWS["sigmoid"]
    A = torch.randn(30, 60)
    v, y = 5 * torch.randn(40, 60), torch.rand(40, 60)
    solution = taut.project(v, A, y @ A.mT, activation=row)
    assert relative_residual(A, y @ A.mT, solution.z) < 1e-12


def test_one_hot_targets_are_reached_in_the_limit():
    """b only reachable at the end of the range: λ → ∞, and A z = b to rounding all the same."""
    A = torch.randn(3, K)
    y = torch.eye(K)[:4]
    solution = taut.project(torch.randn(4, K), A, y @ A.mT, activation="sigmoid")
    assert relative_residual(A, y @ A.mT, solution.z) < 1e-12


# Bad input: every message quotes what it received


def raises(match, v, A, b, error=ValueError, **options):
    with pytest.raises(error, match=match):
        taut.project(v, A, b, **options)


T = torch.ones
SHAPES = {
    "A has other columns": ((4, 5), (2, 3), (2,), r"one column for each of the K = 5.*A \(2, 3\)"),
    "A is transposed": ((4, 5), (5, 2), (2,), r"A \(5, 2\).*Is A transposed\?"),
    "A of another batch": ((4, 5), (3, 2, 5), (4, 2), r"batch dimensions of v, \(4,\).*A \(3, 2"),
    "A batched, v not": ((5,), (3, 2, 5), (2,), r"batch dimensions of v, \(\).*A \(3, 2, 5\)"),
    "b of other rows": ((4, 5), (2, 5), (4, 3), r"\(4, 2\), an entry per row.*b \(4, 3\)"),
    "b of another batch": ((4, 5), (2, 5), (3, 2), r"b must be.*b \(3, 2\)"),
    "b batched, v not": ((5,), (2, 5), (3, 2), r"b must be.*b \(3, 2\)"),
    "v is a number": ((), (2, 5), (2,), r"v must be \(\*batch, K\).*v \(\)"),
    "A is a vector": ((5,), (5,), (1,), r"A \(I, K\) or.*A \(5,\)"),
    "b is a number": ((5,), (1, 5), (), r"b \(\*batch, I\).*b \(\)"),
    "A without columns": ((4, 0), (2, 0), (2,), r"no outputs \(K = 0\).*A \(2, 0\)"),
}


@pytest.mark.usefixtures("as_user")
@pytest.mark.parametrize("name", SHAPES)
def test_wrong_shapes_are_quoted(name):
    v, A, b, match = SHAPES[name]
    raises(match, T(v), T(A), T(b))


@pytest.mark.usefixtures("as_user")
@pytest.mark.parametrize("shape", [(3,), (3, 2), (4, 3)])
def test_wrong_init_is_quoted(shape):
    match = rf"init must be.*= \(4, 2\); got \({shape[0]}"
    raises(match, T(4, 5), T(2, 5), T(2), init=T(shape))


DTYPES = [torch.float16, torch.bfloat16, torch.int64, torch.complex128, torch.bool]


@pytest.mark.usefixtures("as_user")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("which", [0, 1, 2])
def test_wrong_dtypes_are_named(which, dtype):
    tensors = [T(4, 5), T(2, 5), T(4, 2)]
    tensors[which] = tensors[which].to(dtype)
    raises(rf"{'vAb'[which]} has dtype {dtype}; taut works in torch.float32 or", *tensors)


@pytest.mark.usefixtures("as_user")
def test_dtypes_must_agree():
    match = r"one dtype; got torch.float32, torch.float64 and torch.float64"
    raises(match, T(4, 5).float(), T(2, 5), T(2))


@pytest.mark.usefixtures("as_user")
def test_devices_must_agree():
    raises("on one device; got v on cpu, A on meta", T(4, 5), T(2, 5, device="meta"), T(2))


@pytest.mark.usefixtures("as_user")
@pytest.mark.parametrize("which", [0, 1, 2])
def test_lists_are_not_tensors(which):
    tensors = [T(5), T(2, 5), T(2)]
    tensors[which] = tensors[which].tolist()
    raises(rf"{'vAb'[which]} must be a torch.Tensor; got list", *tensors, error=TypeError)


@pytest.mark.usefixtures("as_user")
def test_on_failure_has_two_values():
    raises('on_failure must be "raise" or "return"; got', T(5), T(2, 5), T(2), on_failure="ignore")


@pytest.mark.usefixtures("as_user")
def test_sparse_A_works_or_says_that_it_does_not():
    A = torch.eye(2, 5).to_sparse()
    v, b = torch.randn(3, 5), torch.rand(3, 2)
    try:
        solution = taut.project(v, A, b)
    except (ValueError, TypeError, NotImplementedError) as error:
        assert "sparse" in str(error)
    else:
        assert_close(solution.z[:, :2], b)


def test_status_of_all_that_converge_is_zero():
    solution = taut.project(torch.randn(3, K), torch.randn(2, K), torch.randn(2))
    assert solution.status.tolist() == [Status.CONVERGED] * 3


def test_a_prepared_A_is_A():
    v, A, b = torch.randn(4, 3), torch.ones(1, 3), torch.ones(1)
    prepared = taut.prepare(A, "exp")
    z = taut.project(v, A, b, activation="exp").z
    assert_close(taut.project(v, prepared, b).z, z, rtol=0, atol=1e-14)
    assert_close(taut.project(v, prepared, b, activation="exp").z, z, rtol=0, atol=1e-14)
    with pytest.raises(ValueError, match="this A was prepared for 'exp'; got activation='tanh'"):
        taut.project(v, prepared, b, activation="tanh")
    A[0, 0] = 5.0
    with pytest.raises(ValueError, match="A was changed in place after it was prepared"):
        taut.project(v, prepared, b)
    with pytest.raises(ValueError, match=r"A requires a gradient.*taut\.Projection"):
        taut.prepare(A.requires_grad_(), "exp")
