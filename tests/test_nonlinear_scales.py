"""h(z) = 0 in any unit: v, z and h ten times as large, or a million times, are solved alike."""

import pytest
import torch

import taut
from surfaces import INFEASIBLE, norm, products
from tables import SEED, generator
from taut import Status
from taut.activations import linear, mixed, tempered, weighted

POWERS = (-12, -9, -6, -3, 3, 6, 9, 12)
SAMPLES, OUTPUTS = 8, 6


def randn(stream, *shape):
    return torch.randn(*shape, generator=generator(stream))


def _quadrics(z, c):
    """Quadratic forms beside linear ones: c₀ has the unit of z, and turns these into squares."""
    place = torch.arange(1.0, OUTPUTS + 1)
    Q = torch.cos(place.unsqueeze(-1) * place + torch.arange(2.0)[:, None, None])
    a = torch.sin(place * torch.tensor([[1.7], [2.3]]))
    return torch.einsum("nj,ijk,nk->ni", z, Q, z) + c[:, :1] * (z @ a.mT - c[:, 1:])


def _quadrics_of(z):
    unit = torch.ones(len(z), 1)
    return torch.cat([unit, _quadrics(z, torch.cat([unit, torch.zeros(len(z), 2)], -1))], -1)


# Each is homogeneous in z and its params together: h, and params that make z a solution.
HOMOGENEOUS = {
    "sphere": (lambda z, r: norm(z, r**2), lambda z: z.norm(dim=-1, keepdim=True)),
    "sphere over its radius": (
        lambda z, r: norm(z, r**2) / r,
        lambda z: z.norm(dim=-1, keepdim=True),
    ),
    "products": (
        lambda z, c: products(z, c * c.abs()),
        lambda z: products(z, 0.0).abs().sqrt() * products(z, 0.0).sign(),
    ),
    "quadrics": (_quadrics, _quadrics_of),
    "quartic": (
        lambda z, r: z.pow(4).sum(-1, keepdim=True) - r**4,
        lambda z: z.pow(4).sum(-1, keepdim=True) ** 0.25,
    ),
    "no solution": (lambda z, r: norm(z, -(r**2)), lambda z: z.norm(dim=-1, keepdim=True)),
}
LINES = {
    "linear": linear,
    "weighted": weighted("linear", 30.0),
    "mixed": mixed(["linear", weighted("linear", 0.2), tempered("linear", 5.0)] * 2),
}
POINTS = {"near": 0.3, "far": 3.0, "on the surface": 0.0}
CASES = [(name, point) for name in HOMOGENEOUS for point in POINTS if name != "no solution"]
SLOW = [pytest.param("no solution", point, marks=pytest.mark.slow) for point in POINTS]


def drawn(name, activation, noise, stream):
    """h, v and params; σ is a line, so that v scales with z."""
    h, params = HOMOGENEOUS[name]
    z = randn(stream, SAMPLES, OUTPUTS)
    return h, activation.inverse(z) + noise * randn(stream + 1, SAMPLES, OUTPUTS), params(z)


@pytest.mark.parametrize(("name", "point"), CASES + SLOW)
def test_a_power_of_ten_changes_no_status(name, point):
    """Of v and params together, and of h alone; z is the same in its unit."""
    h, v, p = drawn(name, linear, POINTS[point], 600 + SEED)
    options = {"on_failure": "return"}
    right = taut.project(v, h=h, params=(p,), **options)
    assert bool(right.converged.all()) == (name != "no solution")
    for k in POWERS:
        t = 10.0**k
        for solution, unit in (
            (taut.project(t * v, h=h, params=(t * p,), **options), t),
            (taut.project(v, h=lambda z, p, t=t: t * h(z, p), params=(p,), **options), 1.0),
        ):
            assert solution.status.tolist() == right.status.tolist()
            if name != "no solution":
                torch.testing.assert_close(solution.z / unit, right.z, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("geometry", LINES)
def test_a_power_of_ten_changes_no_status_of_any_line(geometry):
    activation = LINES[geometry]
    h, v, p = drawn("quadrics", activation, 0.3, 610 + SEED)
    options = {"h": h, "activation": activation, "on_failure": "return"}
    right = taut.project(v, params=(p,), **options)
    assert right.converged.float().mean() >= 0.9
    for t in (1e-12, 1e-6, 1e6, 1e12):
        solution = taut.project(t * v, params=(t * p,), **options)
        assert solution.status.tolist() == right.status.tolist()


@pytest.mark.parametrize(
    "name",
    [x if i == 1 else pytest.param(x, marks=pytest.mark.slow) for i, x in enumerate(INFEASIBLE)],
)
def test_h_in_another_unit_changes_no_verdict(name):
    """Whatever the activation: an equation may be in watts or in megawatts."""
    family = INFEASIBLE[name]
    given = family.problem(4, 0.3, 620 + SEED)
    right = given.solve()
    assert not right.converged.any()
    for t in (1e-12, 1e12):
        other = taut.project(
            given.v,
            family.A,
            given.b,
            h=lambda z, *p, t=t: t * family.h(z, *p),
            params=given.params,
            activation=family.activation,
            on_failure="return",
        )
        assert other.status.tolist() == right.status.tolist()


@pytest.mark.parametrize("power", [3, 6, 9])
def test_large_numbers_near_a_solution(power):
    """The radius is in watts, and v is right to eight digits."""
    r = 10.0**power
    unit = torch.nn.functional.normalize(randn(630 + SEED, 500, 3), dim=-1)
    v = r * unit * (1 + 1e-8 * randn(631 + SEED, 500, 1))
    solution = taut.project(v, h=lambda z: norm(z, r**2) / r)
    torch.testing.assert_close(solution.z, r * unit, atol=0, rtol=1e-13)


@pytest.mark.parametrize("power", [0, -3, -6, -9, -12])
def test_small_numbers_beside_constants_in_h(power):
    """exp(z) − 1 is rounded beside 1, however small z is: that c is 0 to rounding all the same."""
    v = 10.0**power * randn(640 + SEED, 100, 4)

    def h(z):
        waves = z[:, 0].cos() - 1 + z[:, 1] + 0.3 * z[:, 2].sinh()
        return torch.stack([z.exp().sum(-1) - 4, waves], -1)

    solution = taut.project(v, h=h)
    assert solution.residual.max() < 1e-13
    assert (solution.z.abs() <= 10 * v.abs().amax(-1, keepdim=True) + 1e-15).all()


def test_a_start_far_from_v_is_taken_where_numbers_are_large():
    """v = 0 says nothing of the unit."""
    r = 1e12
    v, start = torch.zeros(1, 2), torch.tensor([[r, 0.0]])
    h = lambda z: (z[:, :1] - r) * (z[:, 1:2] + r)  # noqa: E731
    solution = taut.project(v, h=h, init=(start, torch.zeros(1, 1)))
    torch.testing.assert_close(solution.z, start, atol=1e-2, rtol=1e-13)


def test_one_large_sample_among_small_ones():
    """Each is judged by its own numbers."""
    size = torch.tensor([1.0, 1e9, 1e-9, 1.0]).unsqueeze(-1)
    v = size * (1 + randn(650 + SEED, 4, 3))
    whole = taut.project(v, h=lambda z, r: norm(z, r**2), params=(size,))
    right = size * v / v.norm(dim=-1, keepdim=True)
    torch.testing.assert_close(whole.z / size, right / size, atol=1e-13, rtol=0)
    assert whole.status.tolist() == [Status.CONVERGED] * 4
