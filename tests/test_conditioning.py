"""Rows that are nearly alike: right, or said to be beyond what the precision can tell."""

from pathlib import Path

import mpmath
import pytest
import torch
from torch.testing import assert_close

import taut

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
    most = effect_of_rounding(A, b.abs() + A.abs() @ solution.z.abs())
    error = (solution.multipliers - torch.tensor(CERTIFIED)).abs()
    assert (error <= most).all()
    assert ((solution.z - torch.tensor(CERTIFIED) @ A).abs() <= 1e-6).all()


def effect_of_rounding(A, size):
    """|(A Aᵀ)⁻¹| eps·size, from 60 digits: how far λ moves when every b moves by eps·size."""
    with mpmath.workdps(60):
        matrix = mpmath.matrix(A.tolist())
        inverse = (matrix * matrix.T) ** -1
        rows = range(len(size))
        gain = [[float(abs(inverse[i, j])) for j in rows] for i in rows]
    return torch.tensor(gain) @ size * torch.finfo(torch.float64).eps


def with_condition(rows, columns, condition):
    left = torch.linalg.qr(torch.randn(rows, rows)).Q
    right = torch.linalg.qr(torch.randn(columns, rows)).Q
    return left @ torch.diag(torch.logspace(0, -condition, rows)) @ right.T


@pytest.mark.filterwarnings("ignore::taut.ConditionWarning")
@pytest.mark.parametrize("activation", ["sigmoid", "exp", "linear"])
@pytest.mark.parametrize("digits", [2, 4, 6, 8])
def test_z_is_right_as_far_as_A_tells(activation, digits):
    row = taut.activations.resolve(activation)
    A, v = with_condition(5, 12, digits), torch.randn(20, 12)
    # A solution by construction: z = σ(v + Aᵀλ) for a λ of moderate effect.
    z = row.sigma(v + torch.randn(20, 5) @ torch.linalg.qr(A.T).Q.T)
    solution = taut.project(v, A, z @ A.T, activation=row)
    assert_close(solution.z, z, rtol=0, atol=1e-14 * 10**digits)


def test_rows_of_very_different_size():
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
