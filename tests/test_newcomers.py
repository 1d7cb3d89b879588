"""The first things that people try, each as they would write it."""

import io

import pytest
import torch
from torch import nn

import taut

pytestmark = pytest.mark.usefixtures("as_user")


@pytest.fixture(autouse=True)
def _default_dtype():
    """A user's default, not the float64 of the other tests."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    yield
    torch.set_default_dtype(before)


def test_constrain_the_output_of_an_existing_network():
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    total = taut.Projection([[1, 1, 1, 1]], [1], activation="exp")
    z = nn.Sequential(net, total)(torch.randn(32, 8))
    assert (z > 0).all()
    assert (z.sum(-1) - 1).abs().max() < 1e-6


def test_three_budget_shares_of_at_most_0_6():
    shares = taut.Projection([[1, 1, 1]], [1], activation=taut.activations.bounded(0, 0.6))
    z = shares(5 * torch.randn(100, 3))
    assert ((z >= 0) & (z <= 0.6)).all()
    assert (z.sum(-1) - 1).abs().max() < 1e-6


def test_reconcile_a_hierarchy_with_many_zeros():
    """Regions, products and totals of counts: 58 % of the cells are 0, and stay 0."""
    K = 12
    leaves = torch.poisson(3 * torch.rand(2000, K)) * (torch.rand(2000, K) < 0.5)
    leaves[:, 0] += 1  # no empty total
    S = torch.zeros(4, K)
    S[0], S[1, :6], S[2, 6:], S[3, ::2] = 1, 1, 1, 1
    A = torch.cat([S, -torch.eye(4)], dim=1)
    noisy = torch.cat([leaves, leaves @ S.T], dim=1)
    noisy = noisy * (1 + 0.2 * torch.rand_like(noisy))
    assert (noisy == 0).float().mean() > 0.3
    solution = taut.reconcile(noisy, A, torch.zeros(4), activation="exp")
    assert (solution.z @ A.T).abs().max() < 1e-4
    assert (solution.z[noisy == 0] == 0).all()
    assert (solution.z[noisy > 0] > 0).all()


def test_a_mass_balance_with_b_from_the_inputs():
    """A y = B x + c, known at prediction because x is."""
    A, B, c = torch.tensor([[1.0, -1, 0], [0, 1, 1]]), torch.rand(2, 4), torch.tensor([0.5, 2.0])
    x = torch.rand(20, 4)
    net, layer = nn.Linear(4, 3), taut.Projection(A)
    b = x @ B.T + c
    z = layer(net(x), b)
    assert (z @ A.T - b).abs().max() < 1e-5


def test_train_under_autocast():
    net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4))
    layer, optimizer = taut.Projection([[1, 1, 1, 1]], [1], activation="exp"), None
    x, y = torch.randn(64, 8), torch.softmax(torch.randn(64, 4), -1)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    losses = []
    for _ in range(20):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            solution = layer.solve(net(x))
            loss = taut.matched_loss(solution, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert solution.z.dtype == torch.float32
    assert solution.residual.max() < 1e-6
    assert losses[-1] < losses[0]


def test_save_load_and_predict_with_a_memory():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.net, self.memory = nn.Linear(8, 4), taut.LagrangeMemory(64, 1)
            self.layer = taut.Projection([[1, 1, 1, 1]], [2], activation="sigmoid")

    model, x = Model(), torch.randn(64, 8)
    index = torch.arange(64)
    solution = model.layer.solve(model.net(x), init=model.memory[index])
    model.memory.store(index, solution)
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "memory": model.memory.state_dict()}, file)
    file.seek(0)
    again, saved = Model(), torch.load(file, weights_only=True)
    again.load_state_dict(saved["model"])
    again.memory.load_state_dict(saved["memory"])
    with torch.inference_mode():
        z = again.layer.solve(again.net(x), init=again.memory[index]).z
    assert torch.equal(again.memory.multipliers, solution.multipliers)
    assert (z - solution.z).abs().max() < 1e-6


def test_find_out_why_a_sample_is_infeasible():
    layer = taut.Projection([[1, 1, 1]], activation="sigmoid", on_failure="return")
    solution = layer.solve(torch.zeros(3, 3), torch.tensor([[1.0], [4.0], [2.0]]))
    assert solution.converged.tolist() == [True, False, True]
    assert "In sample 1 equation 0 asks for 4" in solution.report()
    assert "between 0 and 3" in solution.report()


def test_a_geometry_for_each_output():
    """A price (positive), a share (0 to 1) and a balance (any sign)."""
    activation = taut.activations.mixed(["exp", "sigmoid", "linear"])
    z = taut.project(torch.randn(10, 3), [[1, 2, 1]], [3], activation=activation).z
    assert (z[:, 0] > 0).all()
    assert ((z[:, 1] > 0) & (z[:, 1] < 1)).all()
    assert (z @ torch.tensor([1.0, 2, 1]) - 3).abs().max() < 1e-5


def test_a_batch_of_batches():
    z = taut.project(torch.randn(4, 5, 6, 3), [[1, 1, 1]], [1], activation="exp").z
    assert z.shape == (4, 5, 6, 3)
    assert (z.sum(-1) - 1).abs().max() < 1e-6


def test_learn_A_together_with_the_network():
    layer = taut.Projection(nn.Parameter(torch.tensor([[0.5, 1.5, 1.0]])), [1.0], activation="exp")
    optimizer = torch.optim.Adam(layer.parameters(), lr=0.05)
    v = torch.randn(64, 3)
    y = taut.project(v, [[1, 1, 1]], [1], activation="exp").z
    for _ in range(100):
        optimizer.zero_grad()
        loss = (layer(v) - y).square().sum(-1).mean()
        loss.backward()
        optimizer.step()
    assert loss < 1e-3


def test_an_A_that_becomes_a_parameter_later():
    layer = taut.Projection([[1, 1, 1]], [1.0], activation="exp")
    del layer.A
    layer.A = nn.Parameter(torch.ones(1, 3))
    layer(torch.zeros(2, 3)).square().sum().backward()
    assert layer.A.grad is not None


def test_an_array_keeps_its_precision():
    layer = taut.Projection(torch.tensor([[0.1, 0.2, 0.3]], dtype=torch.float64).numpy(), [1.0])
    assert layer.A.dtype == torch.float64
    assert layer(torch.zeros(3, dtype=torch.float64)).dtype == torch.float64


def test_start_from_the_last_solution():
    layer = taut.Projection([[1, 2, 3]], [2.0], activation="exp")
    v = torch.randn(8, 3)
    solution = layer.solve(v)
    again = layer.solve(v, init=solution)
    assert (again.iterations <= solution.iterations).all()
    assert (again.z - solution.z).abs().max() < 1e-6


def test_a_report_of_predictions_counts_zeros_as_zeros():
    y = [[0.0, 1, 2], [1, 0, 2], [-1, 1, 2]]
    solution = taut.reconcile(y, [[1, 1, -1]], [0], activation="exp", on_failure="return")
    assert "1 of the 9 entries of v" in solution.report()
