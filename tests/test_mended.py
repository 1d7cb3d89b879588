"""Laws that an older structure broke: of layers, of writes in place, of side effects."""

import copy
import gc
import pickle
import threading
import warnings
import weakref

import pytest
import torch
from torch.func import functional_call, grad, jacfwd, jacrev, vmap
from torch.nn.utils import parametrize
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

import taut
from tables import ROWS, K, apply, target
from taut.backends import cpu


@pytest.fixture
def problem():
    A, row = torch.randn(2, K), ROWS["sigmoid"]
    return torch.randn(7, K), A, apply(A, target(row, 7))


def test_a_used_layer_gives_A_its_gradient(problem):
    v, A, b = problem
    layer = taut.Projection(A, activation="sigmoid")

    def loss(a):
        return functional_call(layer, {"A": a}, (v, b)).square().sum()

    expected = grad(lambda a: taut.project(v, a, b, activation="sigmoid").z.square().sum())(A)
    assert_close(grad(loss)(A), expected)
    layer(v, b)
    assert_close(grad(loss)(A), expected)
    assert expected.abs().max() > 1e-3


class _Twice(torch.nn.Module):
    def forward(self, A):
        return 2 * A


@pytest.mark.parametrize("way", ["requires_grad_", "Parameter", "parametrize"])
def test_A_can_be_learned_through_a_layer(problem, way):
    v, A, b = problem
    layer = taut.Projection(A, activation="sigmoid")
    layer(v, b)
    scale = 1.0
    if way == "requires_grad_":
        leaf = layer.A.requires_grad_()
    else:
        del layer.A
        leaf = layer.A = torch.nn.Parameter(A.clone())
    if way == "parametrize":
        parametrize.register_parametrization(layer, "A", _Twice())
        leaf, scale = layer.parametrizations["A"].original, 2.0
    layer(v, scale * b).square().sum().backward()
    live = A.clone().requires_grad_()
    taut.project(v, scale * live, scale * b, activation="sigmoid").z.square().sum().backward()
    assert_close(leaf.grad, live.grad)


@pytest.mark.parametrize("which", ["v", "b"])
def test_a_write_between_solve_and_loss_is_noticed(problem, which):
    v, A, b = problem
    solution = taut.project(v, A, b, activation="sigmoid")
    {"v": v, "b": b}[which].add_(1.0)
    with pytest.raises(ValueError, match=f"{which} was changed in place after the solve"):
        taut.matched_loss(solution, torch.rand(7, K))


def test_a_buffer_may_be_used_again_after_the_loss(problem):
    v, A, b = problem
    v.requires_grad_()
    y = torch.rand(7, K)
    solution = taut.project(v, A, b, activation="sigmoid")
    z, loss = solution.z.detach().clone(), taut.matched_loss(solution, y, reduction="sum")
    b.zero_()
    loss.backward()
    assert_close(v.grad, z - y)


def test_structures_are_those_that_the_library_tells():
    """Two fields that change places in C change places in Python."""
    text = "Point:double x;const double * y;int64_t n;"
    swapped = cpu.structures("Point:int64_t n;const double * y;double x;")["Point"]
    assert cpu.structures(text)["Point"].x.offset == 0
    assert swapped.n.offset == 0 and swapped.x.offset == 16


@pytest.mark.skipif(cpu.variant() is None, reason="no kernel")
def test_what_is_prepared_can_be_forgotten(problem):
    v, A, b = problem
    prepared = taut.prepare(A, taut.activations.weighted("sigmoid", torch.rand(K) + 0.5))
    taut.project(v, prepared, b, on_failure="return")
    gone = weakref.ref(prepared.backend)
    del prepared
    gc.collect()
    assert gone() is None


def test_sparse_products_leave_the_filters_of_warnings_alone(problem):
    v, A, b = problem
    before = list(warnings.filters)
    sparse = A.to_sparse()
    solve = [
        threading.Thread(target=taut.project, args=(v, sparse, b), kwargs={"activation": "sigmoid"})
        for _ in range(8)
    ]
    for thread in solve:
        thread.start()
    for thread in solve:
        thread.join()
    assert list(warnings.filters) == before


def test_tensors_without_memory():
    zero = torch._efficientzerotensor(4, 3, dtype=torch.float64)
    z = taut.project(zero, torch.ones(1, 3), torch.ones(1), activation="exp").z
    assert_close(z, torch.full((4, 3), 1 / 3))


def test_a_layer_built_in_inference_mode_can_be_trained(problem):
    v, A, b = problem
    with torch.inference_mode():
        layer = taut.Projection(A, activation="sigmoid")
        layer(v, b)
    v.requires_grad_()
    layer(v, b).square().sum().backward()
    assert v.grad.abs().max() > 0


def test_two_threads_on_one_layer(problem):
    v, A, b = problem
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


def test_failures_under_vmap_raise(problem):
    v, A, b = problem
    with pytest.raises(taut.SolveError, match="7 of 7 samples"):
        vmap(lambda v, b: taut.project(v, A, b, activation="sigmoid").z)(v, b + 100)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")  # torch itself
def test_forward_and_reverse_jacobians_agree(problem):
    v, A, b = problem
    prepared = taut.prepare(A, "sigmoid")

    def z(v, b):
        return taut.project(v, prepared, b).z

    assert_close(vmap(jacfwd(z))(v, b), vmap(jacrev(z))(v, b), rtol=0, atol=1e-14)
    assert_close(vmap(jacfwd(z, argnums=1))(v, b), vmap(jacrev(z, argnums=1))(v, b))


def test_matched_loss_under_vmap(problem):
    v, A, b = problem
    y, prepared = torch.rand(7, K), taut.prepare(A, "sigmoid")

    def loss(v, b, y):
        return taut.matched_loss(taut.project(v, prepared, b), y)

    z = taut.project(v, A, b, activation="sigmoid").z
    assert_close(vmap(grad(loss))(v, b, y), z - y)
    whole = taut.matched_loss(taut.project(v, prepared, b), y, reduction="none")
    assert_close(vmap(loss)(v, b, y), whole)


def test_checkpoints_copies_and_pickles(problem):
    v, A, b = problem
    v.requires_grad_()
    layer = taut.Projection(A, activation="sigmoid")
    (plain,) = torch.autograd.grad(layer(v, b).square().sum(), v)
    z = checkpoint(layer, v, b, use_reentrant=False)
    assert_close(torch.autograd.grad(z.square().sum(), v)[0], plain)
    for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert_close(twin(v, b), layer(v, b), rtol=0, atol=0)
    prepared = pickle.loads(pickle.dumps(taut.prepare(A, "sigmoid")))
    assert_close(taut.project(v, prepared, b).z, layer(v, b), rtol=0, atol=1e-14)
