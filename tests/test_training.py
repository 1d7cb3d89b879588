"""`Projection.loss` is `solve`, `matched_loss` and `store`: value, gradients, memory, failures."""

import threading

import pytest
import torch
from torch.func import functional_call, grad, vmap
from torch.testing import assert_close

import taut
from tables import ALL, FEW, K, both_dtypes, few_activations, patchy, problem
from taut import FailureWarning, LagrangeMemory, Projection
from taut.activations import bounded, tempered

SAMPLES = 12  # of the memory
OF_LAYER, OF_CALL = ("A", "G"), ("b", "lower", "upper")

#: Arguments of `problem`: every kind of constraint, and shapes worth a test of their own.
GIVEN = {
    "equations": {},
    "one equation": {"I": 1},
    "more equations": {"n": 9, "I": 7, "K": 20},
    "redundant equations": {"I": 4, "regime": "redundant"},
    "equations mostly of zeros": {"I": 4, "matrix": patchy},
    "A per sample": {"own": True},
    "inequalities": {"kind": "inequalities"},
    "batch of one": {"n": 1},
    "unbatched": {"n": ()},
    "leading dimensions": {"n": (2, 3)},
    "empty batch": {"n": 0},
    "saturated": {"regime": "saturated"},
    "at the edge": {"regime": "at the edge"},
}
each_problem = pytest.mark.parametrize("given", GIVEN.values(), ids=GIVEN.keys())


class Step:
    """A layer with its memory, and the arguments of one training step."""

    def __init__(self, activation="sigmoid", dtype=torch.float64, **given):
        on_failure = given.pop("on_failure", "raise")
        found = problem(activation, dtype=dtype, **{"seed": 1} | given)
        self.v, self.y = found.v, found.y.to(dtype)
        sides = found.constraints.items()
        of_layer = {name: x for name, x in sides if name in OF_LAYER}
        self.sides = {name: x for name, x in sides if name in OF_CALL}
        self.layer = Projection(**of_layer, activation=found.activation, on_failure=on_failure)
        batch = self.v.shape[:-1]
        self.index = torch.randperm(SAMPLES)[: batch.numel()].reshape(batch)
        rows = sum(x.shape[-2] for x in of_layer.values())
        start = 0.1 * torch.randn(SAMPLES, rows)
        self.memories = [LagrangeMemory(SAMPLES, rows).to(dtype) for _ in range(2)]
        for memory in self.memories:
            memory.multipliers.copy_(start)

    def at_once(self, v, reduction="mean", **sides):
        memory = {"memory": self.memories[0], "index": self.index}
        return self.layer.loss(v, self.y, **{**self.sides, **sides}, **memory, reduction=reduction)

    def by_three(self, v, reduction="mean", **sides):
        memory, index = self.memories[1], self.index
        solution = self.layer.solve(v, **{**self.sides, **sides}, init=memory[index])
        loss = taut.matched_loss(solution, self.y, reduction)
        memory.store(index, solution)
        return loss

    def ways(self):
        return self.at_once, self.by_three

    def check(self, reduction="mean", scale=1.0):
        """Value, gradient and memory are those of the three calls, to rounding."""
        leaves = [self.v.clone().requires_grad_() for _ in range(2)]
        found, expected = (way(v, reduction) for way, v in zip(self.ways(), leaves, strict=True))
        g = torch.randn_like(expected)
        gradients = [
            torch.autograd.grad(loss, v, g)[0]
            for loss, v in zip((found, expected), leaves, strict=True)
        ]
        eps = torch.finfo(self.v.dtype).eps
        size = 1 + self.v.abs().nansum() + self.y.abs().sum()
        assert_close(found, expected, rtol=0, atol=scale * eps * size.item(), equal_nan=True)
        assert_close(*gradients, rtol=0, atol=4 * scale * eps)
        kept, wanted = (memory.multipliers for memory in self.memories)
        assert_close(kept, wanted, rtol=0, atol=100 * eps * (1 + wanted.abs().max().item()))


@both_dtypes
@each_problem
def test_it_is_the_three_calls(given, dtype):
    Step(**given, dtype=dtype).check()


@pytest.mark.parametrize("activation", ALL.values(), ids=ALL.keys())
def test_it_is_the_three_calls_whatever_the_activation(activation):
    Step(activation, n=7, I=3).check()


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_reductions(reduction):
    Step().check(reduction)


def test_bounds_on_z():
    step = Step("linear")
    step.sides |= {"lower": step.y.amin().item() - 0.1, "upper": step.y.amax(0) + 0.1}
    step.check()


def test_sparse_equations():
    step = Step(I=4, K=9, matrix=patchy)
    step.layer = Projection(step.layer.A.to_sparse(), activation="sigmoid")
    step.check()


def test_without_a_memory_it_starts_from_0():
    step = Step()
    v = step.v.requires_grad_()
    expected = taut.matched_loss(step.layer.solve(v, **step.sides), step.y)
    assert_close(step.layer.loss(v, step.y, **step.sides), expected, rtol=0, atol=1e-14)


def test_sides_of_the_layer():
    step = Step(n=())
    layer = Projection(step.layer.A, step.sides["b"], activation="sigmoid")
    assert_close(layer.loss(step.v, step.y), step.by_three(step.v), rtol=0, atol=1e-13)


def test_the_memory_warms_the_next_step_up():
    """What was stored is the solution: from there no step is left."""
    step = Step(n=9, I=3)
    step.at_once(step.v)
    again = step.layer.solve(step.v, **step.sides, init=step.memories[0][step.index])
    assert (again.iterations == 0).all()


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x.mT.contiguous().mT,  # other strides
        lambda x: torch.stack([x, x], -1)[..., 0],
        lambda x: x.unsqueeze(0).repeat(2, 1, 1)[1],
        torch.nn.Parameter,
    ],
    ids=["transposed", "every other number", "an offset", "parameter"],
)
def test_however_tensors_lie_in_memory(change):
    step, plain = Step(n=9, I=3), Step(n=9, I=3)
    step.index = plain.index
    expected = plain.by_three(plain.v)
    step.v, step.y, b = change(step.v), change(step.y), change(step.sides["b"])
    step.memories[0].multipliers.copy_(plain.memories[0].multipliers)
    assert_close(step.at_once(step.v, b=b.detach()), expected, rtol=0, atol=1e-13)
    kept, wanted = step.memories[0].multipliers, plain.memories[1].multipliers
    assert_close(kept, wanted, rtol=0, atol=1e-12)


def test_a_v_without_gradient_and_no_grad():
    step = Step()
    loss = step.at_once(step.v)
    assert not loss.requires_grad
    with torch.no_grad():
        again = step.at_once(step.v.clone().requires_grad_())
    assert not again.requires_grad
    assert_close(again, loss, rtol=0, atol=1e-13)
    with torch.inference_mode():
        assert_close(step.at_once(step.v), loss, rtol=0, atol=1e-13)


@few_activations
def test_gradients_of_all_inputs(activation):
    """A that is a Parameter, b and y get theirs, as from the three calls."""
    step = Step(activation)
    layer = step.layer = Projection(torch.nn.Parameter(step.layer.A), activation=activation)
    gradients = []
    for way in step.ways():
        b, step.y = (x.detach().clone().requires_grad_() for x in (step.sides["b"], step.y))
        v = step.v.clone().requires_grad_()
        gradients.append(torch.autograd.grad(way(v, b=b), (v, layer.A, b, step.y)))
    for found, expected in zip(*gradients, strict=True):
        assert_close(found, expected, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("activation", FEW.values(), ids=FEW.keys())
def test_second_derivatives(activation):
    step = Step(activation, n=3)
    step.memories[0].multipliers.zero_()  # checked from one start, which is not written to
    table = step.memories[0].multipliers.clone()

    def loss(v, reduction="mean"):
        step.memories[0].multipliers.copy_(table)
        return step.at_once(v, reduction)

    v = step.v.clone().requires_grad_()
    assert torch.autograd.gradcheck(loss, v)
    assert torch.autograd.gradgradcheck(loss, v, atol=1e-6)
    assert torch.autograd.gradgradcheck(lambda v: loss(v, "none"), v, atol=1e-6)


def test_second_derivatives_pass_to_b():
    step = Step()
    v, b = step.v.requires_grad_(), step.sides["b"].clone().requires_grad_()
    found = []
    for way in step.ways():
        (g,) = torch.autograd.grad(way(v, b=b), v, create_graph=True)
        found.append(torch.autograd.grad(g.square().sum(), (v, b)))
    assert_close(found[0], found[1], rtol=1e-11, atol=1e-13)


def test_backward_twice():
    step = Step()
    v = step.v.requires_grad_()
    loss = step.at_once(v)
    (first,) = torch.autograd.grad(loss, v, retain_graph=True)
    (second,) = torch.autograd.grad(3 * loss, v)
    assert_close(second, 3 * first, rtol=1e-14, atol=0)


def test_transforms():
    """A memory cannot be written to inside them; without one they see the three calls."""
    step = Step(n=4)
    layer, y, b = step.layer, step.y, step.sides["b"]
    each = vmap(lambda v, y, b: layer.loss(v, y, b))(step.v, y, b)
    expected = taut.matched_loss(layer.solve(step.v, b), y, "none")
    assert_close(each, expected, rtol=0, atol=1e-13)
    g = vmap(grad(lambda v, y, b: layer.loss(v, y, b)))(step.v, y, b)
    assert_close(g, layer(step.v, b) - y, rtol=0, atol=1e-13)
    other = {"A": 2 * layer.A}

    def loss(b):
        return functional_call(layer, other, (step.v, 2 * b))

    assert_close(loss(b), layer(step.v, b), rtol=0, atol=1e-13)


def test_under_autocast_and_in_half_precision():
    step = Step(dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = step.at_once(step.v)
    assert_close(found, step.by_three(step.v))
    half = step.v.bfloat16().requires_grad_()
    loss = step.at_once(half)
    loss.backward()
    assert loss.dtype is torch.float32 and half.grad.dtype is torch.bfloat16
    assert_close(loss, step.by_three(half.detach()))


@both_dtypes
def test_a_memory_of_another_dtype(dtype):
    step = Step(dtype=dtype)
    other = torch.float32 if dtype is torch.float64 else torch.float64
    step.memories = [memory.to(other) for memory in step.memories]
    v = step.v.clone().requires_grad_()
    found, expected = (way(v) for way in step.ways())
    assert_close(found, expected)
    assert step.memories[0].multipliers.dtype is other
    kept, wanted = (memory.multipliers for memory in step.memories)
    assert_close(kept, wanted, rtol=0, atol=2e-6)


def test_a_sample_that_comes_twice_starts_both_times_from_what_was_there():
    step = Step(n=6)
    step.index = torch.tensor([3, 1, 3, 0, 3, 1])
    found, expected = (way(step.v, "none") for way in step.ways())
    assert_close(found, expected, rtol=0, atol=1e-13)
    left = step.memories[0].multipliers
    assert_close(left[0], step.memories[1].multipliers[0], rtol=0, atol=1e-12)
    several = step.layer.solve(step.v, **step.sides).multipliers[[0, 2, 4]]
    assert ((left[3] - several).abs().amax(-1) < 1e-12).any()  # one of them


REGIMES = ("infeasible", "inconsistent", "not finite")


@both_dtypes
@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_samples_that_fail_add_nothing_and_are_not_kept(regime, dtype, reduction):
    step = Step(regime=regime, dtype=dtype, n=8, I=3, on_failure="return")
    before = step.memories[0].multipliers.clone()
    with pytest.warns(FailureWarning, match="4 of 8 samples were not solved"):
        step.check(reduction)
    after = step.memories[0].multipliers
    assert torch.equal(after[step.index[1::2]], before[step.index[1::2]])
    assert not torch.equal(after[step.index[::2]], before[step.index[::2]])


@pytest.mark.parametrize("regime", REGIMES)
def test_a_failure_raises_and_leaves_the_memory_alone(regime):
    step = Step(regime=regime, n=8, I=3)
    before = step.memories[0].multipliers.clone()
    with pytest.raises(taut.SolveError, match="4 of 8 samples") as error:
        step.at_once(step.v)
    with pytest.raises(taut.SolveError) as expected:
        step.by_three(step.v)
    assert str(error.value) == str(expected.value)
    assert torch.equal(step.memories[0].multipliers, before)


def test_undecided_samples_are_kept():
    step = Step("exp", n=5, on_failure="return", size=6.0)
    step.layer.solver = taut.Newton(max_iterations=1)
    step.check()
    solution = step.layer.solve(step.v, **step.sides)
    assert (solution.status == taut.Status.MAX_ITERATIONS).any()


@pytest.mark.usefixtures("as_user")
def test_refusals():
    step = Step(n=6)
    v, y, b, memory = step.v, step.y, step.sides["b"], step.memories[0]
    before, index = memory.multipliers.clone(), step.index
    both = {"memory": memory, "index": index}
    with pytest.raises(TypeError, match="memory and index belong together"):
        step.layer.loss(v, y, b, memory=memory)
    with pytest.raises(TypeError, match="pass memory as well"):
        step.layer.loss(v, y, b, index=index)
    with pytest.raises(ValueError, match=r"y must have the shape of .*\(6, 5\); got \(6, 4\)"):
        step.layer.loss(v, y[:, :4], b, **both)
    with pytest.raises(ValueError, match="this Projection has no b"):
        step.layer.loss(v, y, **both)
    with pytest.raises(ValueError, match='must be "mean", "sum" or "none"; got \'max\''):
        step.layer.loss(v, y, b, **both, reduction="max")
    with pytest.raises(IndexError, match=r"must lie in 0 … 11; got 0 … 12"):
        bad = torch.tensor([0, 1, 2, 3, 4, 12])
        step.layer.loss(v, y, b, memory=memory, index=bad)
    with pytest.raises(IndexError, match=r"must lie in 0 … 11; got -1 … 4"):
        bad = torch.tensor([0, 1, 2, 3, 4, -1])
        step.layer.loss(v, y, b, memory=memory, index=bad)
    with pytest.raises(ValueError, match=r"index must say of each sample .*\(6,\); got \(5,\)"):
        step.layer.loss(v, y, b, memory=memory, index=index[:5])
    with pytest.raises(ValueError, match=r"memory has 3 multipliers .* layer 2 constraints"):
        step.layer.loss(v, y, b, memory=LagrangeMemory(SAMPLES, 3), index=index)
    with pytest.raises(TypeError, match=r"memory must be a taut.LagrangeMemory; got Tensor"):
        step.layer.loss(v, y, b, memory=memory.multipliers, index=index)
    with pytest.raises(TypeError, match=r"index must hold integers; got torch.float32"):
        step.layer.loss(v, y, b, memory=memory, index=index.float())
    with pytest.raises(TypeError, match=r"v is torch.float64 and b is torch.float32"):
        step.layer.loss(v, y, b.float(), **both)
    assert torch.equal(memory.multipliers, before)


@pytest.mark.parametrize(
    ("worst", "said"),
    [(torch.nan, "be numbers; got nan in"), (-0.1, "lie in .* in"), (1.5, "lie in .* in")],
    ids=str,
)
def test_a_target_outside_the_range_leaves_the_memory_alone(worst, said):
    step = Step(n=6)
    before, step.y = step.memories[0].multipliers.clone(), step.y.clone()
    step.y[2, 1] = worst
    for reduction in ("mean", "none"):
        with pytest.raises(ValueError, match=f"targets must {said} ?sample 2"):
            step.at_once(step.v, reduction)
    assert torch.equal(step.memories[0].multipliers, before)


BEYOND = [("exp", -0.1), ("exp", -1e-9), ("exp", torch.inf), ("sigmoid", -1e-30), ("tanh", 1.5)]
BEYOND += [(bounded(0.0, torch.inf), -0.1), (tempered("exp", 2.0), -0.1), ("linear", torch.inf)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("activation, worst", BEYOND, ids=[str(i) for i in range(len(BEYOND))])
def test_a_target_outside_any_range_is_refused(activation, worst, dtype):
    layer = Projection(torch.ones(1, 3, dtype=dtype), activation=activation)
    y = torch.tensor([[0.2, 0.3, 0.5], [0.2, worst, 0.5]], dtype=dtype)
    with pytest.raises(ValueError, match=r"targets must (lie in|be finite).*in sample 1"):
        layer.loss(torch.zeros_like(y), y, torch.ones(2, 1, dtype=dtype))


def test_a_target_far_above_z_has_its_loss():
    """In float32 the logarithm of y/z fits, and its product with y/z does not."""
    layer, y = (
        Projection(torch.ones(1, 3).float(), activation="exp"),
        torch.full((1, 3), 100.0).float(),
    )
    v, b = torch.tensor([[-85.0, 0.0, 0.0]]).float(), y.sum(-1, keepdim=True)
    assert_close(layer.loss(v, y, b), taut.matched_loss(layer.solve(v, b), y))


@pytest.mark.parametrize("learned", ["A", "b"])
def test_learned_constraints_are_told_another_loss(learned):
    """Each step has other numbers, and the warning has none: it is shown once."""
    A, b = torch.ones(1, 3), torch.full((4, 1), 1.5)
    v, y = torch.zeros(4, 3), torch.rand(4, 3) / 4
    if learned == "A":
        A = torch.nn.Parameter(A)
    else:
        b.requires_grad_()
    with pytest.warns(FailureWarning, match=r"is learned, .*bregman_loss"):
        Projection(A, activation="sigmoid").loss(v, y, b)


def test_integers_and_lists_as_targets():
    layer, v = Projection(torch.ones(1, 3), activation="exp"), torch.zeros(2, 3)
    y, b = [[0, 0, 1], [1, 0, 0]], torch.ones(2, 1)
    expected = layer.loss(v, torch.tensor(y).float(), b)
    assert_close(layer.loss(v, y, b), expected)
    assert_close(layer.loss(v, torch.tensor(y), b), expected)


def test_a_buffer_may_be_used_again_before_the_backward_pass():
    step = Step()
    leaf = step.v.clone().requires_grad_()
    v = leaf * 1.0
    loss = step.at_once(v)
    with torch.no_grad():
        v.zero_()
    loss.backward()
    expected = (step.layer(step.v, **step.sides) - step.y) / len(v)
    assert_close(leaf.grad, expected, rtol=0, atol=1e-14)


def test_two_threads_on_one_layer_and_memory():
    step = Step(n=6, I=3)
    expected = step.by_three(step.v)
    found = []

    def work():
        for _ in range(20):
            found.append(step.at_once(step.v))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 80
    assert_close(torch.stack(found), expected.expand(80), rtol=0, atol=1e-12)


def test_a_network_trains_with_it():
    """As with the three calls, and down to a small part of the first loss."""
    torch.manual_seed(0)
    x, A = torch.randn(SAMPLES, 3), torch.randn(2, K)
    y = torch.sigmoid(x @ torch.randn(3, K))
    losses = {}
    for way in ("at once", "three calls"):
        torch.manual_seed(1)
        net = torch.nn.Linear(3, K)
        optimizer = torch.optim.Adam(net.parameters(), lr=0.1)
        layer, memory = Projection(A, activation="sigmoid"), LagrangeMemory(SAMPLES, 2)
        losses[way] = []
        for _ in range(40):
            for index in torch.arange(SAMPLES).split(5):
                v, b = net(x[index]), y[index] @ A.T
                if way == "at once":
                    loss = layer.loss(v, y[index], b, memory=memory, index=index)
                else:
                    solution = layer.solve(v, b, init=memory[index])
                    loss = taut.matched_loss(solution, y[index])
                    memory.store(index, solution)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses[way].append(loss.item())
    found, expected = (torch.tensor(x) for x in losses.values())
    assert_close(found, expected, rtol=1e-3, atol=1e-5)
    assert found[-1] < 0.05 * found[0]
