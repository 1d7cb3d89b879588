"""Projection, LagrangeMemory and LagrangeHead as modules: copies, files, dtypes, training."""

import copy
import io
import itertools
import pickle

import pytest
import torch
from torch.testing import assert_close

import taut
from tables import ROWS, SHORT, K, apply, target
from taut import LagrangeHead, LagrangeMemory, Newton, Projection, project

each_row = pytest.mark.parametrize("row", SHORT.values(), ids=SHORT.keys())


def layer_of(row=SHORT["sigmoid"], **options):
    A = torch.randn(2, K)
    b = apply(A, target(row, 6))
    return Projection(A, activation=row, **options), torch.randn(6, K), b


@each_row
def test_projection_is_project(row):
    layer, v, b = layer_of(row)
    expected = project(v, layer.A, b, activation=row)
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


@each_row
def test_projection_survives_copies_and_files(row):
    layer, v, b = layer_of(row)
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
    with pytest.raises(ValueError, match="one dtype"):
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
    b = apply(other, target(SHORT["sigmoid"], 6))
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
    x, y = torch.randn(6, 3), target(SHORT["sigmoid"], 6)
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


# LagrangeMemory


def test_memory_starts_at_zero_and_keeps():
    memory = LagrangeMemory(10, 2)
    layer, v, b = layer_of()
    index = torch.tensor([9, 0, 3, 4, 5, 6])
    assert len(memory) == 10
    assert_close(memory[index], torch.zeros(6, 2))
    solution = layer.solve(v, b, init=memory[index])
    memory.store(index, solution)
    assert_close(memory[index], solution.multipliers)
    assert_close(memory[torch.tensor([1, 2, 7, 8])], torch.zeros(4, 2))
    assert layer.solve(v, b, init=memory[index]).iterations.max() <= 1


def test_memory_is_in_the_state_dict():
    memory, twin = LagrangeMemory(4, 2), LagrangeMemory(4, 2)
    memory.multipliers.normal_()
    twin.load_state_dict(memory.state_dict())
    index = torch.arange(4)
    assert_close(twin[index], memory[index])
    assert_close(copy.deepcopy(memory)[index], memory[index])
    assert list(memory.parameters()) == []


def test_memory_carries_no_graph():
    memory = LagrangeMemory(6, 2)
    layer, v, b = layer_of()
    memory.store(torch.arange(6), layer.solve(v.requires_grad_(), b))
    assert not memory.multipliers.requires_grad


def test_memory_does_not_learn_from_failures():
    memory = LagrangeMemory(3, 1)
    memory.multipliers.fill_(7.0)
    b = torch.tensor([[1.0], [9.0], [float("nan")]])
    v, A = torch.zeros(3, 2), torch.ones(1, 2)
    solution = project(v, A, b, activation="sigmoid", on_failure="return")
    memory.store(torch.arange(3), solution)
    assert_close(memory[torch.tensor([1, 2])], torch.full((2, 1), 7.0))
    assert_close(memory[torch.tensor([0])], solution.multipliers[:1])


def test_memory_keeps_its_own_dtype():
    memory = LagrangeMemory(6, 2).float()
    layer, v, b = layer_of()
    memory.store(torch.arange(6), layer.solve(v, b))
    assert memory.multipliers.dtype == torch.float32
    assert layer.solve(v, b, init=memory[torch.arange(6)]).z.dtype == torch.float64


@pytest.mark.usefixtures("as_user")
def test_memory_refuses():
    memory = LagrangeMemory(4, 2)
    for index in (torch.tensor([4]), torch.tensor([-1])):
        with pytest.raises(IndexError, match=r"must lie in 0 … 3; got"):
            memory[index]
    with pytest.raises(TypeError, match=r"index must hold integers; got torch\.float64"):
        memory[torch.tensor([0.0])]
    with pytest.raises(TypeError, match=r"index must hold integers; got torch\.bool"):
        memory[torch.tensor([True, False, True, True])]
    layer, v, b = layer_of()
    with pytest.raises(ValueError, match=r"index \(2,\) and multipliers \(6, 2\) do not belong"):
        memory.store(torch.arange(2), layer.solve(v, b))
    with pytest.raises(ValueError, match="must not be negative; got -1 samples, 2 constraints"):
        LagrangeMemory(-1, 2)


def test_memory_of_an_empty_batch():
    memory = LagrangeMemory(4, 2)
    index = torch.zeros(0, dtype=torch.long)
    layer, v, b = layer_of()
    assert memory[index].shape == (0, 2)
    memory.store(index, layer.solve(v[:0], b[:0], init=memory[index]))
    assert_close(memory.multipliers, torch.zeros(4, 2))


# LagrangeHead


@pytest.mark.parametrize("batch", [(), (6,), (2, 3)], ids=str)
def test_head_predicts_v_and_multipliers(batch):
    A, x = torch.randn(2, K), torch.randn(*batch, 8)
    head = LagrangeHead(8, A, activation="sigmoid")
    v, multipliers = head(x)
    assert v.shape == (*batch, K)
    assert multipliers.shape == (*batch, 2)
    assert_close(head.predictor(v, multipliers), v + apply(A.mT, multipliers))


def test_head_trains_with_the_bregman_loss():
    head = LagrangeHead(8, torch.randn(2, K), activation="sigmoid")
    x, y = torch.randn(6, 8), torch.rand(6, K)
    optimizer = torch.optim.SGD(head.parameters(), lr=0.1)
    losses = []
    for _ in range(20):
        loss = taut.bregman_loss(head.predictor(*head(x)), y, head.activation)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert all(p.grad.abs().max() > 0 for p in head.parameters())
    assert not any(p is head.A for p in head.parameters())  # the paper's weights are fixed


def test_head_starts_an_exact_solve():
    A = torch.randn(2, K)
    head = LagrangeHead(8, A, activation="tanh")
    v, multipliers = head(torch.randn(6, 8))
    b = apply(A, target(ROWS["tanh"], 6))
    solution = project(v, A, b, activation="tanh", init=multipliers)
    assert_close(apply(A, solution.z), b, rtol=0, atol=1e-12)


def test_head_keeps_the_dtype_of_A_and_its_state():
    head = LagrangeHead(8, torch.randn(2, K, dtype=torch.float32))
    assert head(torch.randn(6, 8, dtype=torch.float32))[0].dtype == torch.float32
    twin = LagrangeHead(8, torch.zeros(2, K, dtype=torch.float32))
    twin.load_state_dict(head.state_dict())
    x = torch.randn(6, 8, dtype=torch.float32)
    for one, other in zip(twin(x), head(x), strict=True):
        assert_close(one, other)
    assert_close(twin.A, head.A)


@pytest.mark.usefixtures("as_user")
def test_head_refuses_an_A_per_sample():
    with pytest.raises(ValueError, match=r"one A for all samples, \(I, K\); got \(4, 2, 5\)"):
        LagrangeHead(8, torch.ones(4, 2, 5))
