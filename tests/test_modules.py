"""Projection as a module: copies, files, dtypes, an A that changes or is learned, threads."""

import copy
import io
import itertools
import pickle
import threading

import pytest
import torch
from torch.nn.utils import parametrize
from torch.testing import assert_close

import taut
from tables import K, apply, few_activations, patchy, problem, target
from taut import Newton, Projection, project
from taut.activations import sigmoid


def layer_of(activation="sigmoid", **options):
    """A layer, and v and b for it."""
    v, A, b = problem(activation)
    return Projection(A, activation=activation, **options), v, b


@few_activations
def test_projection_is_project(activation):
    layer, v, b = layer_of(activation)
    expected = project(v, layer.A, b, activation=activation)
    assert_close(layer(v, b), expected.z, rtol=0, atol=0)
    solution = layer.solve(v, b, init=torch.zeros(6, 2))
    assert_close(solution.multipliers, expected.multipliers, rtol=0, atol=0)
    assert layer.solve(v, b, init=expected.multipliers).iterations.max() <= 1


def test_projection_has_a_b_of_its_own():
    A, v = torch.randn(2, K), torch.randn(6, K)
    layer = Projection(A, torch.zeros(2))
    assert_close(layer(v), project(v, A, torch.zeros(2)).z)
    assert_close(layer(v, torch.ones(2)), project(v, A, torch.ones(2)).z)
    with pytest.raises(ValueError, match=r"no b of its own: pass one, layer\(v, b\)"):
        Projection(A)(v)


def test_projection_with_an_A_per_sample():
    A, v = torch.randn(6, 2, K), torch.randn(6, K)
    assert_close(Projection(A, torch.zeros(6, 2))(v), project(v, A, torch.zeros(6, 2)).z)


def test_projection_copies_what_it_is_given():
    A = torch.randn(2, K)
    layer = Projection(A)
    before = layer.A.clone()
    A.zero_()
    assert_close(layer.A, before)


def test_projection_passes_its_options_on():
    layer, v, b = layer_of(solver=Newton(max_iterations=0), on_failure="return")
    assert not layer.solve(v, b).converged.any()
    layer, v, b = layer_of(solver=Newton(max_iterations=0))
    with pytest.raises(taut.SolveError, match="MAX_ITERATIONS"):
        layer(v, b)
    with pytest.raises(ValueError, match="Did you mean 'sigmoid'"):
        Projection(torch.ones(1, K), activation="sigmoidd")


@few_activations
def test_projection_survives_copies_and_files(activation):
    layer, v, b = layer_of(activation)
    z = layer(v, b)  # what it has worked out about A must not get in the way
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    twins = [
        copy.deepcopy(layer),
        pickle.loads(pickle.dumps(layer)),
        torch.load(file, weights_only=False),
    ]
    for twin in twins:
        assert_close(twin(v, b), z, rtol=0, atol=0)
        twin.A.zero_()
    assert_close(layer(v, b), z, rtol=0, atol=0)


def test_projection_state_dict_round_trip():
    A, v = torch.randn(2, K), torch.randn(6, K)
    layer = Projection(A, torch.zeros(2), activation="tanh")
    other = Projection(torch.ones(2, K), torch.ones(2), activation="tanh")
    other(v * 0 + 0.1, apply(other.A, torch.full((K,), 0.2)))
    other.load_state_dict(layer.state_dict())
    assert set(layer.state_dict()) == {"A", "b"}
    assert_close(other(v), layer(v), rtol=0, atol=0)
    assert set(Projection(A).state_dict()) == {"A"}
    assert list(layer.parameters()) == []


def test_projection_follows_its_dtype():
    layer, v, b = layer_of()
    z = layer(v, b)
    layer.to(torch.float32)
    assert layer(v.float(), b.float()).dtype == torch.float32
    assert_close(layer(v.float(), b.float()).double(), z, rtol=0, atol=1e-5)
    with pytest.raises(TypeError, match=r"v is torch.float64 and A is torch.float32"):
        layer(v, b)
    assert_close(layer.double()(v, b), z, rtol=0, atol=1e-6)


def test_projection_sees_a_changed_A():
    """What it keeps of A is worked out anew when A is changed, in place or not."""
    layer, v, b = layer_of()
    layer(v, b)
    layer.A.mul_(2)
    assert_close(layer(v, 2 * b), project(v, layer.A, 2 * b, activation="sigmoid").z)
    layer.A = torch.cat([layer.A, layer.A.sum(0, keepdim=True)])
    more = torch.cat([2 * b, 2 * b.sum(-1, keepdim=True)], -1)
    assert_close(layer(v, more), project(v, layer.A, more, activation="sigmoid").z)


def test_projection_sees_an_A_changed_behind_the_back_of_autograd():
    """Writing to `.data` leaves no trace in the version counter."""
    layer, v, b = layer_of()
    layer(v, b)
    other = torch.randn(2, K)
    layer.A.data.copy_(other)
    b = apply(other, target(sigmoid, 6))
    assert_close(layer(v, b), project(v, other, b, activation="sigmoid").z, rtol=0, atol=1e-10)


def test_projection_without_gradients():
    layer, v, b = layer_of()
    v.requires_grad_()
    z = layer(v, b)
    with torch.no_grad():
        assert not layer(v, b).requires_grad
    with torch.inference_mode():
        assert_close(layer(v, b), z.detach())
        inside = Projection(layer.A, activation="sigmoid")
        assert_close(inside(v, b), z.detach())
    assert z.requires_grad
    (g,) = torch.autograd.grad(layer(v, b).sum(), v)
    assert g.isfinite().all()


def test_inference_first_then_training():
    layer, v, b = layer_of()
    with torch.inference_mode():
        layer(v, b)
    v = v.clone().requires_grad_()
    layer(v, b).square().sum().backward()
    assert v.grad.abs().max() > 0


def test_projection_in_a_network_trains():
    layer, _, b = layer_of()
    net = torch.nn.Linear(3, K)
    x, y = torch.randn(6, 3), target(sigmoid, 6)
    b = apply(layer.A, y)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    losses = []
    for _ in range(20):
        loss = taut.matched_loss(layer.solve(net(x), b), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]
    assert all(b < a + 1e-9 for a, b in itertools.pairwise(losses))


def test_repr_says_what_it_is():
    layer, _, _ = layer_of()
    assert "A=(2, 5)" in repr(layer)
    assert "'sigmoid'" in repr(layer)
    assert "Newton(" in repr(layer)


class Twice(torch.nn.Module):
    def forward(self, A):
        return 2 * A


@pytest.mark.parametrize("way", ["requires_grad_", "Parameter", "parametrize"])
def test_A_can_be_learned_through_a_layer(way):
    v, A, b = problem(n=7)
    layer = taut.Projection(A, activation="sigmoid")
    layer(v, b)
    scale = 1.0
    if way == "requires_grad_":
        leaf = layer.A.requires_grad_()
    else:
        del layer.A
        leaf = layer.A = torch.nn.Parameter(A.clone())
    if way == "parametrize":
        parametrize.register_parametrization(layer, "A", Twice())
        leaf, scale = layer.parametrizations["A"].original, 2.0
    layer(v, scale * b).square().sum().backward()
    live = A.clone().requires_grad_()
    taut.project(v, scale * live, scale * b, activation="sigmoid").z.square().sum().backward()
    assert_close(leaf.grad, live.grad)


def test_a_layer_learns_parameters_only():
    A, live = torch.ones(1, 3), torch.zeros(1, 3, requires_grad=True)
    for name, given in (("A", {"A": 2 * live}), ("lower", {"A": A, "lower": live[0]})):
        with pytest.raises(ValueError, match=f"^{name} requires a gradient.*nn.Parameter.{name}"):
            taut.Projection(**given, activation="sigmoid")


def test_a_layer_built_in_inference_mode_can_be_trained():
    v, A, b = problem(n=7)
    with torch.inference_mode():
        layer = taut.Projection(A, activation="sigmoid")
        layer(v, b)
    v.requires_grad_()
    layer(v, b).square().sum().backward()
    assert v.grad.abs().max() > 0


def test_two_threads_on_one_layer():
    v, A, b = problem(n=7)
    expected = taut.project(v, A, b, activation="sigmoid").z
    layer, found = taut.Projection(A, activation="sigmoid"), []
    threads = [threading.Thread(target=lambda: found.append(layer(v, b))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    for z in found:
        assert_close(z, expected, rtol=0, atol=1e-13)


def test_what_is_prepared_survives_pickling():
    v, A, b = problem()
    prepared = pickle.loads(pickle.dumps(taut.prepare(A, "sigmoid")))
    z = Projection(A, activation="sigmoid")(v, b)
    assert_close(project(v, prepared, b).z, z, rtol=0, atol=1e-14)


def test_a_layer_with_sparse_A():
    v, dense, b = problem(n=3, I=4, K=9, matrix=patchy)
    layer = taut.Projection(dense.to_sparse(), activation="sigmoid")
    expected = taut.project(v, dense, b, activation="sigmoid").z
    assert_close(pickle.loads(pickle.dumps(copy.deepcopy(layer)))(v, b), expected)
    other = taut.Projection(torch.ones(4, 9).to_sparse(), activation="sigmoid")
    other.load_state_dict(layer.state_dict())
    assert_close(other(v, b), expected)
    assert_close(layer.float()(v.float(), b.float()), expected.float(), rtol=0, atol=1e-6)
