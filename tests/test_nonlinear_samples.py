"""h(z) = 0 of a batch is that of its samples: second derivatives shared or not, h that mixes them.

And nothing outside of a solve is touched: warnings, random numbers, hooks of checkpoints.
"""

import subprocess
import sys
import warnings

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import taut
from surfaces import FAMILIES, norm
from tables import SEED, generator


def randn(stream, *shape):
    return torch.randn(*shape, generator=generator(stream))


def contrasts(outputs):
    """Directions with rational relations between their entries, along which samples may differ."""
    w = torch.zeros(5, outputs)
    w[0, 4:8] = torch.tensor([1.0, -1.0, -1.0, 1.0])
    w[1, :4] = torch.tensor([1.0, -1.0, -1.0, 1.0])
    w[2, 1:4] = torch.tensor([1.0, -2.0, 1.0])
    w[3] = torch.arange(outputs) % 2 * 2.0 - 1
    w[4, :2] = torch.tensor([1.0, -1.0])
    return w


# Second derivatives


@pytest.mark.parametrize("row", range(5))
@pytest.mark.parametrize("outputs", [8, 12])
def test_gradients_of_a_batch_are_those_of_its_samples(outputs, row):
    """Second derivatives are shared where they are the same, and they differ along a contrast."""
    w = contrasts(outputs)[row]
    h = lambda z: norm(z, 8.0) + (z @ w).pow(3).unsqueeze(-1)  # noqa: E731
    v = (1 + 0.3 * randn(700 + SEED, 6, outputs)).requires_grad_()
    g = randn(701 + SEED, 6, outputs)
    solution = taut.project(v, h=h)
    (found,) = torch.autograd.grad((g * solution.z).sum(), v)
    for i in range(6):
        leaf = v.detach()[i : i + 1].requires_grad_()
        start = solution.u.detach()[i : i + 1], solution.multipliers.detach()[i : i + 1]
        (right,) = torch.autograd.grad((g[i] * taut.project(leaf, h=h, init=start).z).sum(), leaf)
        torch.testing.assert_close(found[i : i + 1], right, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("row", [0, 1, 2, 4])  # those that leave an output free
def test_a_crest_is_no_minimum_in_a_batch_either(row):
    """A sample at a local maximum beside one whose second derivatives are another's."""
    outputs = 8
    w = contrasts(outputs)[row]
    free = int((w == 0).nonzero()[0])
    h = lambda z: z[:, free : free + 1] - 3 * torch.cos(z @ w).unsqueeze(-1)  # noqa: E731
    v = torch.zeros(2, outputs)
    v[0] = 0.5 * torch.pi * w / w.square().sum()
    v[1, free] = -1.0
    u, multipliers = v.clone(), torch.zeros(2, 1)
    u[1, free], multipliers[1] = 3.0, 4.0
    both = taut.project(v, h=h, init=(u, multipliers), on_failure="return")
    one = taut.project(v[1:], h=h, init=(u[1:], multipliers[1:]), on_failure="return")
    assert both.status[1] == one.status[0]
    assert (both.z[1] - v[1]).norm() == pytest.approx((one.z[0] - v[1]).norm().item(), abs=1e-8)


def test_second_derivatives_in_units_that_differ():
    """What differs is 1e-16 of its neighbours, and in the units of its outputs it is 1."""
    unit = 10.0 ** torch.tensor([8.0, -8, 8, -8, 8, -8, 8, 8])
    activation = taut.activations.weighted("linear", unit**2)
    e = torch.linspace(0.5, 2.0, 6).unsqueeze(-1)

    def h(z, e):
        x = z / unit
        return norm(x[:, :7], 9.0) + e * x[:, 7:].square() + 0.1 * x[:, 1:2] * x[:, 7:]

    z = unit * (1 + 0.3 * randn(710 + SEED, 6, 8))
    v = activation.inverse(z).requires_grad_()
    g = randn(711 + SEED, 6, 8) / unit
    z = taut.project(v, h=h, params=(e,), activation=activation).z
    (found,) = torch.autograd.grad((g * z).sum(), v)
    for i in range(6):
        leaf = v.detach()[i : i + 1].requires_grad_()
        z = taut.project(leaf, h=h, params=(e[i : i + 1],), activation=activation).z
        (right,) = torch.autograd.grad((g[i] * z).sum(), leaf)
        apart = ((found[i] - right[0]) / unit).abs()
        assert (apart <= 1e-9 * (right[0] / unit).abs().amax()).all()


# Samples that see each other


def mixing(z):
    """Products of the first two, less a little of what all samples have."""
    return z[:, :1] * z[:, 1:2] - 2 - 1e-3 * z[:, 2:].mean()


MIXED = {
    "mean": mixing,
    "mean, unseen by autograd": lambda z: z[:, :1] * z[:, 1:2] - z[:, 2:].mean().detach(),
    "softmax": lambda z: z.softmax(0)[:, :1] - 0.3,
    "running sum": lambda z: norm(z.cumsum(0), 1.0),
    "the sample before": lambda z: norm(z, 1.0) - 1e-3 * z.roll(1, 0)[:, :1],
    "the first sample": lambda z: norm(z - 0.5 * z[:1], 1.0),
    "batch norm": lambda z: norm(torch.nn.functional.batch_norm(z, None, None, training=True), 1.0),
    "its place": lambda z: norm(z, 1.0 + 0.1 * torch.arange(len(z)).unsqueeze(-1)),
    "dropout": lambda z: norm(torch.nn.functional.dropout(z), 1.0),
}


@pytest.mark.usefixtures("as_user")
@pytest.mark.parametrize("large", [1.0, 1e5])
@pytest.mark.parametrize("count", [2, 3, 20])
@pytest.mark.parametrize("name", MIXED)
def test_h_that_mixes_samples_is_refused(name, count, large):
    """However large the numbers of the first sample are beside those of the others."""
    v = 1 + torch.rand(count, 3, generator=generator(720 + SEED))
    v[0, :2] *= large
    if name == "softmax" and large > 1:
        v[0, :2] = 1.5  # of a number that large nothing is left of the others
    with pytest.raises(ValueError, match="h mixes samples"):
        taut.project(v, h=MIXED[name])


@pytest.mark.parametrize("power", [-6, 0, 3, 6])
def test_samples_by_themselves_are_never_refused(power):
    """At a solution h is the rounding of terms that are far larger; sums may differ in order."""
    W = randn(730 + SEED, 3, 100)
    h = lambda z, c: z.square() @ W.mT - c  # noqa: E731
    z = 10.0**power * torch.rand(64, 100, generator=generator(731 + SEED))
    c = h(z, torch.zeros(64, 3))
    for _ in range(5):
        assert bool(taut.project(z, h=h, params=(c,)).converged.all())


# What is outside


class Warns(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return x * x

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, g):
        warnings.warn("an old name", FutureWarning, stacklevel=2)
        return 2 * ctx.saved_tensors[0] * g


def test_a_warning_of_h_is_a_warning():
    with pytest.warns(FutureWarning, match="an old name"):
        z = taut.project(
            torch.tensor([[3.0, 4.0]]), h=lambda z: Warns.apply(z).sum(-1, keepdim=True) - 1
        ).z
    torch.testing.assert_close(z, torch.tensor([[0.6, 0.8]]))


def test_threads_leave_the_filters_of_warnings_alone():
    """In a process of its own, where a broken one does no harm."""
    code = """
import threading, warnings, torch, taut
once = lambda: taut.project(torch.randn(4, 3), h=lambda z: z.square().sum(-1, keepdim=True) - 1)
once()
before = list(warnings.filters)
def work():
    for _ in range(15):
        once()
threads = [threading.Thread(target=work) for _ in range(4)]
[t.start() for t in threads]
seen = []
while any(t.is_alive() for t in threads):
    seen.append(warnings.filters[0])
[t.join() for t in threads]
print(warnings.filters == before, all(x == before[0] for x in seen))
"""
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "True True", done.stderr


@pytest.mark.usefixtures("as_user")  # beartype draws random numbers
def test_random_numbers_are_left_alone():
    """Those of torch and of Python."""
    import random

    given = FAMILIES["quadratic/linear"].problem(20, 0.3, 740 + SEED)
    torch.manual_seed(3)
    random.seed(3)
    right = torch.rand(3), random.random()
    torch.manual_seed(3)
    random.seed(3)
    solution = given.solve()
    assert (torch.rand(3) == right[0]).all()
    assert random.random() == right[1]
    assert (given.solve().z == solution.z).all()  # what is drawn decides no number


A = torch.tensor([[1.0, 2.0, -1.0, 0.5]], dtype=torch.float64)


def layers():
    one, e = torch.ones(5, 1, dtype=torch.float64), 2 * torch.ones(5, 1, dtype=torch.float64)

    def loss(v, w):
        solution = taut.project(v * w, h=norm, params=(e * w[0],))
        return taut.matched_loss(solution, torch.ones(5, 4))

    def inside(v, w):
        x = v.detach().requires_grad_()
        with torch.enable_grad():
            z = taut.project(x, h=norm, params=(e,)).z.sin().sum()
        return torch.autograd.grad(z, x)[0] * v * w

    return {
        "h": lambda v, w: taut.project(v * w, h=norm, params=(e * w[0],)).z,
        "h beside A": lambda v, w: taut.project(v * w, A, one * w[1], h=norm, params=(9 * e,)).z,
        "A": lambda v, w: taut.project(v * w, A, one * w[1]).z,
        "G": lambda v, w: taut.project(v * w, G=A, upper=-one * w[1]).z,
        "bounds": lambda v, w: taut.project(v * w, A, one * w[1], lower=-0.3 * w).z,
        "loss": loss,
        "gradient inside": inside,
        "checkpoint inside": lambda v, w: checkpoint(
            lambda v, w: taut.project(v * w, h=norm, params=(e * w[0],)).z,
            v,
            w,
            use_reentrant=False,
        ),
    }


@pytest.mark.usefixtures("as_user")
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", layers())
def test_checkpoints_have_the_plain_gradients(name, reentrant):
    layer, found = layers()[name], []
    for call in (layer, lambda v, w: checkpoint(layer, v, w, use_reentrant=reentrant)):
        v = randn(750 + SEED, 5, 4).requires_grad_()
        w = torch.tensor([1.1, 0.9, 1.2, 0.8], requires_grad=True)
        y = call(v, w)
        y.square().sum().backward()
        found.append((y.detach(), v.grad, w.grad))
    for own, right in zip(*found, strict=True):
        torch.testing.assert_close(own, right, atol=1e-13, rtol=1e-13)


def test_hooks_of_the_caller_see_no_tensor_of_the_solve():
    seen = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: seen.append(x) or x, lambda x: x):
        v = randn(760 + SEED, 5, 4).requires_grad_()
        z = taut.project(v, h=norm, params=(torch.ones(5, 1),)).z
    assert 0 < len(seen) <= 8
    z.sum().backward()


def test_absolute_values():
    """Second derivatives are 0 but at the kinks, and torch has zeros without memory for them."""
    v = torch.tensor([[1.5, 2.0], [-3.0, 2.5], [0.9, -0.4]]).requires_grad_()
    z = taut.project(v, h=lambda z: z.abs().sum(-1, keepdim=True) - 1).z
    sign = v.detach().sign()
    right = v.detach() - sign * (v.detach().abs().sum(-1, keepdim=True) - 1) / 2
    torch.testing.assert_close(z, right, atol=1e-14, rtol=0)
    (g,) = torch.autograd.grad(z[:, 0].sum(), v)
    torch.testing.assert_close(g, torch.stack([0.5 + 0 * sign[:, 0], -0.5 * sign.prod(-1)], -1))
