"""Activations made from others: bounded, weighted, tempered, mixed; names; bad parameters."""

import copy
import math
import pickle
import re
from dataclasses import replace

import pytest
import torch
from torch.testing import assert_close

import taut
from tables import LOWER, TEMPERATURES, UPPER, WEIGHTS, K, both_dtypes, each_activation
from taut.activations import ACTIVATIONS, bounded, mixed, resolve, srlu, tempered, weighted

each_name = pytest.mark.parametrize("name", ACTIVATIONS)


def test_bounded_is_a_stretched_sigmoid():
    u = torch.randn(20, K)
    activation = bounded(LOWER, UPPER)
    assert_close(activation.sigma(u), LOWER + (UPPER - LOWER) * u.sigmoid())
    assert_close(activation.phi(u), LOWER * u + (UPPER - LOWER) * u.exp().log1p())
    assert_close(torch.as_tensor(activation.range.lower), LOWER)
    assert_close(torch.as_tensor(activation.range.upper), UPPER)


def test_bounded_zero_one_is_the_sigmoid():
    u = torch.randn(20)
    for name in ("sigma", "slope", "phi"):
        assert_close(getattr(bounded(0.0, 1.0), name)(u), getattr(ACTIVATIONS["sigmoid"], name)(u))


@each_name
def test_weighted_and_tempered_are_their_formulas(name):
    activation, u = ACTIVATIONS[name], torch.randn(20, K)
    assert_close(weighted(activation, WEIGHTS).sigma(u), WEIGHTS * activation.sigma(u))
    assert_close(weighted(activation, WEIGHTS).phi(u), WEIGHTS * activation.phi(u))
    assert_close(tempered(name, TEMPERATURES).sigma(u), activation.sigma(u / TEMPERATURES))
    assert_close(
        tempered(name, TEMPERATURES).phi(u), TEMPERATURES * activation.phi(u / TEMPERATURES)
    )


@each_name
def test_derived_activations_compose(name):
    """d·σ(u/τ) whichever comes first, and twice d is d²."""
    u = torch.randn(20, K)
    one = tempered(weighted(name, WEIGHTS), TEMPERATURES)
    other = weighted(tempered(name, TEMPERATURES), WEIGHTS)
    for f in ("sigma", "slope", "phi"):
        assert_close(getattr(one, f)(u), getattr(other, f)(u))
    twice = weighted(weighted(name, WEIGHTS), WEIGHTS)
    assert_close(twice.sigma(u), weighted(name, WEIGHTS**2).sigma(u))


def test_ranges_of_derived_activations():
    activation = weighted(bounded(-1.0, 2.0), 3.0)
    assert (activation.range.lower, activation.range.upper) == (-3.0, 6.0)
    assert weighted("exp", 2.0).range.upper == math.inf
    assert tempered("tanh", 2.0).range.lower == -1.0
    lower, upper = mixed(["exp", "tanh", "linear"]).range.bounds(torch.zeros(3))
    assert lower.tolist() == [0.0, -1.0, -math.inf]
    assert upper.tolist() == [math.inf, 1.0, math.inf]


MIXTURE = [
    "exp",
    bounded(-2.0, 1.0),
    weighted("sigmoid", 2.0),
    tempered(weighted(bounded(0.0, 2.0), 3.0), 0.5),
    "exp",
    srlu(2.0, 1.0),
    "linear",
    srlu(2.0, 1.0),
]


@pytest.mark.parametrize("function", ["sigma", "slope", "phi", "inverse", "psi"])
def test_mixed_is_each_activation_on_its_output(function):
    u = torch.randn(3, 4, len(MIXTURE))
    given = [resolve(a) for a in MIXTURE]
    x = u
    if function in ("inverse", "psi"):
        x = torch.stack([activation.sigma(u[..., k]) for k, activation in enumerate(given)], -1)
    each = torch.stack(
        [getattr(activation, function)(x[..., k]) for k, activation in enumerate(given)], -1
    )
    assert_close(getattr(mixed(MIXTURE), function)(x), each, rtol=1e-13, atol=1e-14)


def test_mixed_calls_each_kind_once():
    calls = []

    def counted(u):
        calls.append(u.shape)
        return u.exp()

    kind = replace(ACTIVATIONS["exp"], sigma=counted)
    given = [weighted(kind, 1.0 + k) if k % 2 else kind for k in range(1000)]
    mixed([*given, "tanh"]).sigma(torch.zeros(4, 1001))
    assert calls == [(4, 1000)]


@both_dtypes
@each_activation
def test_activations_keep_the_dtype(activation, dtype):
    """Parameters are held in float64; a float32 tensor must come back float32."""
    u = torch.randn(2, K, dtype=dtype)
    z = activation.sigma(u)
    for x in (
        z,
        activation.slope(u),
        activation.phi(u),
        activation.inverse(z),
        activation.psi(z),
        activation.bregman(z, z),
    ):
        assert x.dtype == dtype
        assert x.shape == (2, K)


@each_activation
def test_activations_survive_copying_and_pickling(activation):
    u = torch.randn(2, K)
    for twin in (copy.deepcopy(activation), pickle.loads(pickle.dumps(activation))):
        assert twin.name == activation.name
        assert_close(twin.sigma(u), activation.sigma(u), rtol=0, atol=0)
        assert_close(
            twin.psi(activation.sigma(u)), activation.psi(activation.sigma(u)), rtol=0, atol=0
        )


def test_a_new_activation_is_one_activation():
    """asinh, which is in no table: σ = asinh, φ its integral, ψ = cosh z."""
    activation = taut.Activation(
        name="asinh",
        sigma=torch.asinh,
        slope=lambda u: (1 + u.square()).rsqrt(),
        phi=lambda u: u * torch.asinh(u) - (1 + u.square()).sqrt(),
        inverse=torch.sinh,
        psi=torch.cosh,
        range=taut.Interval(-math.inf, math.inf),
    )
    v, A, y = torch.randn(6, K), torch.randn(2, K), torch.randn(6, K)
    solution = taut.project(v, A, y @ A.mT, activation=activation)
    assert_close(solution.z @ A.mT, y @ A.mT, rtol=0, atol=1e-12)
    loss = taut.matched_loss(solution, y @ torch.eye(K))
    assert loss > 0


def test_an_activation_does_not_change_with_the_tensor_it_was_made_of():
    lower = torch.zeros(3)
    activation = taut.activations.bounded(lower, torch.ones(3))
    before = taut.project(
        torch.zeros(2, 3), torch.ones(1, 3), torch.ones(1), activation=activation
    ).z
    lower.sub_(1.0)
    after = taut.project(
        torch.zeros(2, 3), torch.ones(1, 3), torch.ones(1), activation=activation
    ).z
    assert torch.equal(before, after)


# What makes no sense


def test_names_are_resolved():
    assert resolve("exp") is ACTIVATIONS["exp"]
    assert resolve(ACTIVATIONS["tanh"]) is ACTIVATIONS["tanh"]
    assert all(activation.name == name for name, activation in ACTIVATIONS.items())


@pytest.mark.parametrize(
    ("name", "nearest"), [("sigmoidal", "sigmoid"), ("Tanh", "tanh"), ("lin", "linear")]
)
def test_unknown_name_suggests_the_nearest(name, nearest):
    with pytest.raises(ValueError, match=f"unknown activation '{name}'.*Did you mean '{nearest}'"):
        resolve(name)
    with pytest.raises(ValueError, match="Known: exp, linear, sigmoid, srlu, tanh"):
        taut.project(torch.zeros(2), torch.ones(1, 2), torch.ones(1), activation=name)


def test_an_unknown_name_also_lists_what_functions_make():
    with pytest.raises(
        ValueError, match=r"taut\.activations makes others, by a call: (.*)\.$"
    ) as info:
        resolve("bounded")
    for name in re.findall(r"(\w+)\(", str(info.value)):
        assert callable(getattr(taut.activations, name))


def test_nothing_near_suggests_nothing():
    with pytest.raises(ValueError, match=r"unknown activation 'qqq'\. Known"):
        resolve("qqq")


@pytest.mark.usefixtures("as_user")
def test_an_activation_that_is_neither_name_nor_activation():
    for given, named in (
        (
            torch.sigmoid,
            r"as 'sigmoid', or .*; got builtin_function_or_method 'sigmoid'\. taut\.ac",
        ),
        (bounded, r"as 'exp', or .*; got function 'bounded'\. .* by a call: bounded\(lower, upper"),
        ([0.0, 1.0], r"as '\w+', or a taut\.Activation; got list\."),
    ):
        with pytest.raises(TypeError, match=named):
            taut.project(torch.zeros(2), torch.ones(1, 2), torch.ones(1), activation=given)


@pytest.mark.usefixtures("as_user")
def test_whole_numbers_are_numbers():
    u = torch.randn(4)
    assert_close(bounded(0, 2).sigma(u), 2 * u.sigmoid())
    assert_close(weighted("exp", 2).sigma(u), 2 * u.exp())
    assert_close(tempered("exp", 2).sigma(u), (u / 2).exp())
    assert_close(bounded(torch.tensor(0), torch.tensor(2)).sigma(u), 2 * u.sigmoid())
    assert_close(srlu(2, 2).sigma(u), 2 * u)


@pytest.mark.parametrize(
    ("a", "b"), [(-1.0, 1.0), (1.0, -0.5), (0.0, 0.0), (math.nan, 1.0), (math.inf, 1.0)]
)
def test_srlu_that_is_not_convex(a, b):
    with pytest.raises(ValueError, match=rf"srlu needs a ≥ 0 and b ≥ 0.*a={a!r}, b={b!r}"):
        srlu(a, b)


INF, NAN = math.inf, math.nan
EMPTY_INTERVALS = [(2.0, 1.0), (NAN, 1.0), (0.0, NAN), (INF, INF), (-INF, -INF)]


@pytest.mark.parametrize(("lower", "upper"), EMPTY_INTERVALS)
def test_bounded_without_room(lower, upper):
    with pytest.raises(ValueError, match="lower ≤ upper everywhere; got lower="):
        bounded(lower, upper)


def test_bounded_without_room_in_one_output():
    with pytest.raises(ValueError, match="lower ≤ upper everywhere"):
        bounded(torch.tensor([0.0, 1.5]), torch.tensor([1.0, 1.0]))


def test_bounded_with_open_ends_is_an_exponential_from_the_other():
    u = torch.linspace(-3, 3, 7)
    assert_close(bounded(2.0, INF).sigma(u), 2 + u.exp())
    assert_close(bounded(-INF, 2.0).sigma(u), 2 - (-u).exp())
    assert_close(bounded(-INF, INF).sigma(u), u)
    each = bounded([0.0, 2.0, -INF, -INF], [1.0, INF, 2.0, INF])
    expected = [u.sigmoid(), 2 + u.exp(), 2 - (-u).exp(), u]
    assert_close(each.sigma(u.unsqueeze(-1).expand(7, 4)), torch.stack(expected, -1))


@pytest.mark.parametrize("ends", [(0.1, INF), (-INF, 0.1), (0.1, 0.3), (0.1, 0.1)])
def test_parameters_keep_their_digits_whatever_the_default_dtype(ends):
    torch.set_default_dtype(torch.float32)
    one, each = bounded(*ends), bounded(*([x, x] for x in ends))
    assert (one.range.lower, one.range.upper) == ends
    assert [x.tolist() for x in (each.range.lower, each.range.upper)] == [[x, x] for x in ends]
    u = torch.tensor([-750.0, 750.0], dtype=torch.float64)
    for end, z in zip(ends, one.sigma(u).tolist(), strict=True):
        assert z == pytest.approx(end, rel=1e-15) or abs(end) == INF


def test_bounded_by_one_number_is_fixed():
    """A generator that is off: the others meet the equations."""
    activation = bounded([0.0, 2.0, 0.0], [5.0, 2.0, 5.0])
    v = torch.randn(6, 3, requires_grad=True)
    A, b = torch.ones(1, 3), torch.full((6, 1), 7.0)
    solution = taut.project(v, A, b, activation=activation)
    assert (solution.z[:, 1] == 2).all()
    others = taut.project(v[:, [0, 2]], A[:, :2], b - 2, activation=bounded(0.0, 5.0))
    assert_close(solution.z[:, [0, 2]], others.z)
    (g,) = torch.autograd.grad(solution.z[:, 0].sum(), v, retain_graph=True)
    assert (g[:, 1] == 0).all()
    y = torch.tensor([3.0, 2.0, 2.0]).expand(6, 3)
    loss = taut.matched_loss(solution, y)
    assert_close(loss, taut.matched_loss(others, y[:, [0, 2]]))


def test_an_equation_of_fixed_outputs_alone():
    activation = bounded([1.0, 2.0, 0.0], [1.0, 2.0, 5.0])
    A = torch.tensor([[1.0, 1.0, 0.0], [0.0, 1.0, 1.0]])
    v = torch.randn(4, 3, requires_grad=True)
    solution = taut.project(v, A, torch.tensor([3.0, 4.0]), activation=activation)
    assert_close(solution.z, torch.tensor([1.0, 2.0, 2.0]).expand(4, 3))
    (g,) = torch.autograd.grad(solution.z.sum(), v)
    assert (g == 0).all()
    off = taut.project(v, A, torch.tensor([3.5, 4.0]), activation=activation, on_failure="return")
    assert (off.status == taut.Status.INFEASIBLE).all()


@pytest.mark.parametrize("value", [0.0, -1.0, INF, NAN, torch.tensor([1.0, 0.0])], ids=str)
def test_weights_and_temperatures_are_positive(value):
    with pytest.raises(ValueError, match="weights must be positive and finite everywhere"):
        weighted("exp", value)
    with pytest.raises(ValueError, match="temperature must be positive and finite everywhere"):
        tempered("exp", value)


@pytest.mark.usefixtures("as_user")
def test_parameters_are_numbers_or_one_per_output():
    with pytest.raises(ValueError, match=r"weights must be a number or a \(K,\) tensor; got \(2, "):
        weighted("exp", torch.ones(2, 2))
    with pytest.raises(ValueError, match=r"upper must be a number or a \(K,\) tensor"):
        bounded(0.0, torch.ones(2, 2))


def test_parameters_have_no_gradient_and_say_so():
    with pytest.raises(ValueError, match=r"temperature requires a gradient.*temperature\.detach"):
        tempered("exp", torch.ones(2, requires_grad=True))


@pytest.mark.parametrize("given", [[], "exp"], ids=["none", "a name"])
def test_mixed_needs_an_activation_per_output(given):
    with pytest.raises(ValueError, match="mixed needs one activation for each output"):
        mixed(given)


@pytest.mark.parametrize(
    "activation", [bounded(LOWER, UPPER), mixed(["exp", "tanh"])], ids=["a", "b"]
)
def test_mixed_takes_activations_of_one_output(activation):
    with pytest.raises(ValueError, match="mixed: the activation of output 1 is itself one for"):
        mixed(["exp", activation])


def test_mixed_of_another_size():
    activation = mixed(["exp", "tanh"])
    with pytest.raises(ValueError, match=r"has 2 outputs; got a tensor of shape \(3,\)"):
        activation.sigma(torch.zeros(3))
    with pytest.raises(ValueError, match="has parameters for 2 outputs, but A has K = 3"):
        taut.project(torch.zeros(4, 3), torch.ones(1, 3), torch.ones(1), activation=activation)


@pytest.mark.usefixtures("as_user")
@pytest.mark.parametrize(
    "activation",
    [weighted("exp", torch.ones(2)), bounded(torch.zeros(2), torch.ones(2))],
    ids=["weighted", "bounded"],
)
def test_parameters_of_another_size_quote_the_shapes(activation):
    """Not torch's own words about tensor a and tensor b."""
    with pytest.raises(ValueError, match=r"2.*\(1, 3\)"):
        taut.project(torch.zeros(4, 3), torch.ones(1, 3), torch.ones(1), activation=activation)
