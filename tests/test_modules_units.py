"""LagrangeMemory and LagrangeHead: multipliers that are kept, multipliers that are predicted."""

import copy
import pickle

import numpy as np
import pandas as pd
import pytest
import torch
from torch.testing import assert_close

import taut
from tables import K, apply, problem
from taut import LagrangeHead, LagrangeMemory, Projection, project


def layer_of():
    """A layer, and v and b for it."""
    v, A, b = problem("sigmoid")
    return Projection(A, activation="sigmoid"), v, b


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


def test_memory_has_a_state_dict():
    memory, twin = LagrangeMemory(4, 2), LagrangeMemory(4, 2).to(torch.float32)
    memory.multipliers.normal_()
    twin.load_state_dict(memory.state_dict())
    index = torch.arange(4)
    assert_close(twin[index], memory[index].float(), rtol=0, atol=0)
    for other in (copy.deepcopy(memory), pickle.loads(pickle.dumps(memory))):
        assert_close(other[index], memory[index], rtol=0, atol=0)


def test_memory_loads_the_state_dict_of_version_0_1():
    """There it was a module, alone or in a model, with the table as its buffer."""
    old = torch.nn.Module()
    old.memory = torch.nn.Module()
    old.memory.register_buffer("multipliers", torch.randn(4, 2))
    memory = LagrangeMemory(4, 2)
    memory.load_state_dict(old.memory.state_dict())
    assert_close(memory.multipliers, old.memory.multipliers, rtol=0, atol=0)
    new = torch.nn.Module()
    new.memory = memory
    with pytest.raises(RuntimeError, match=r"Unexpected key.*memory\.multipliers"):
        new.load_state_dict(old.state_dict())


def test_memory_is_no_part_of_a_model():
    """A model trained on 256 samples is loaded where there is none."""

    class Model(torch.nn.Module):
        def __init__(self, samples):
            super().__init__()
            self.net = torch.nn.Linear(3, K)
            self.memory = LagrangeMemory(samples, 2)

    trained, used = Model(256), Model(0)
    assert set(trained.state_dict()) == {"net.weight", "net.bias"}
    assert list(trained.buffers()) == []
    used.load_state_dict(trained.state_dict())
    assert trained.float().memory.multipliers.dtype == torch.float64


def test_memory_refuses_the_table_of_another_training_set():
    memory = LagrangeMemory(4, 2)
    with pytest.raises(ValueError, match=r"\(4, 2\).*got multipliers \(5, 2\).*Memory\(5, 2\)"):
        memory.load_state_dict(LagrangeMemory(5, 2).state_dict())
    with pytest.raises(ValueError, match=r"one entry, 'multipliers'; got \['net.weight'\]"):
        memory.load_state_dict({"net.weight": torch.zeros(4, 2)})
    assert repr(memory) == "LagrangeMemory(num_samples=4, num_constraints=2)"


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
    memory = LagrangeMemory(6, 2).to(torch.float32)
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
    with pytest.raises(TypeError, match=r"integers.*got slice\(0, 2, None\).*torch\.arange\(start"):
        memory[0:2]
    with pytest.raises(TypeError, match=r"integers.*got \['first'\]"):
        memory[["first"]]
    with pytest.raises(TypeError, match=r"integers; got torch\.complex"):
        memory[torch.tensor([1j])]
    with pytest.raises(TypeError, match=r"got array\(.*Torch says: .* byte order"):
        memory[np.arange(3).astype(">i8")]
    layer, v, b = layer_of()
    with pytest.raises(ValueError, match=r"index \(2,\) and multipliers \(6, 2\) do not belong"):
        memory.store(torch.arange(2), layer.solve(v, b))
    for wrong in (4, -1):  # and nothing is written
        with pytest.raises(IndexError, match=r"must lie in 0 … 3; got"):
            memory.store(torch.tensor([0, 1, 2, 3, 0, wrong]), layer.solve(v, b))
        assert not memory.multipliers.any()
    with pytest.raises(ValueError, match="must not be negative; got -1 samples, 2 constraints"):
        LagrangeMemory(-1, 2)


@pytest.mark.usefixtures("as_user")
def test_memory_takes_indices_of_any_kind():
    memory = LagrangeMemory(4, 2)
    memory.multipliers += torch.arange(4.0).unsqueeze(-1)
    turned = np.array([0, 2, 3])[::-1]
    for index in (turned, pd.Series([3, 2, 0], index=[7, 5, 6]), [3, 2, 0]):
        assert memory[index][:, 0].tolist() == [3, 2, 0]
    assert memory[[]].shape == (0, 2)


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
    _, A, b = problem("tanh")
    head = LagrangeHead(8, A, activation="tanh")
    v, multipliers = head(torch.randn(6, 8))
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
def test_head_takes_what_a_layer_takes():
    """Lists, integers, sparse matrices; and a sentence for what does not belong together."""
    torch.manual_seed(0)
    A, G = torch.ones(1, K), torch.eye(2, K)
    dense = LagrangeHead(8, A, G=G, lower=0.0)
    x, state = torch.randn(6, 8), dense.state_dict()
    expected = dense.predictor(*dense(x))
    for ways in ((A.tolist(), G.tolist()), (A.int(), G.int()), (A.to_sparse(), G.to_sparse_csr())):
        head = LagrangeHead(8, ways[0], G=ways[1], lower=[0.0, 0.0])
        rest = {name: value for name, value in state.items() if name not in ("A", "G")}
        head.load_state_dict(rest, strict=False)
        assert_close(head.predictor(*head(x)), expected)
    with pytest.raises(ValueError, match=r"a column for each output; got A \(1, 5\), G \(4, 4\)"):
        LagrangeHead(8, A, G=torch.eye(4), lower=0.0)
    with pytest.raises(TypeError, match=r"A is torch.float64 and G is torch.float32"):
        LagrangeHead(8, A, G=G.float(), lower=0.0)
    with pytest.raises(ValueError, match=r"lower must be a number or \(2,\).*got \(6, 2\)"):
        LagrangeHead(8, A, G=G, lower=torch.zeros(6, 2))
    with pytest.raises(TypeError, match="A must be a tensor, or a list or array of numbers"):
        LagrangeHead(8, "A")


@pytest.mark.usefixtures("as_user")
def test_head_refuses_an_A_per_sample():
    with pytest.raises(ValueError, match=r"one A for all samples, \(I, K\); got \(4, 2, 5\)"):
        LagrangeHead(8, torch.ones(4, 2, 5))
