"""torch.compile and torch.export: ops that do what eager calls do; what a graph cannot carry."""

import io
import subprocess
import sys
import threading
import warnings
from pathlib import Path

import pytest
import torch
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

import taut
from tables import ALL, SHAPES, K, apply, each_activation, problem, shared_or_own
from taut import Projection, compiled as ops, project
from taut.activations import exp, sigmoid
from taut.activations.codes import spelled
from taut.compiled import Memo

pytestmark = [
    pytest.mark.usefixtures("as_user"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning"),  # torch of itself
]


def by_ops(v, A=None, b=None, G=None, lower=None, upper=None, activation="linear", fail=False):
    """`project`, as a compiler would see it."""
    chosen = taut.activations.resolve(activation)
    return ops.project(v, A, b, (G, lower, upper), chosen, taut.Newton(), None, fail)


def loss_by_ops(solution, y):
    flat = y.reshape(-1, y.shape[-1])
    return ops.matched_loss(solution, flat).reshape(solution.status.shape).mean()


def eagerly(v, *args, fail=False, **options):
    return project(v, *args, **options, on_failure="raise" if fail else "return")


#: What is constrained: the sides beside A z = b.
SIDES = {
    "equations": lambda n: {},
    "rows": lambda n: {"G": torch.randn(3, K), "lower": -torch.rand(n, 3), "upper": 0.7},
    "own rows": lambda n: {"G": torch.randn(n, 3, K), "upper": torch.rand(3)},
    "bounds": lambda n: {"lower": torch.full((K,), -0.4), "upper": torch.full((n, K), 0.8)},
}
each_kind = pytest.mark.parametrize("kind", SIDES)


def given(kind, activation="sigmoid", own=False, n=6):
    """Inputs by name, and targets; they are shifted so that about half of the sides are active."""
    found = problem(activation, n=n, own=own)
    sides, y = SIDES[kind](n), found.y
    if kind == "bounds":
        sides = {name: x * (y.max() - y.min()) + y.mean() for name, x in sides.items()}
    elif "G" in sides:
        at = apply(sides["G"], y)
        sides = {
            k: x if k == "G" else at + 0.3 * torch.rand_like(at) * (1 if k == "upper" else -1)
            for k, x in sides.items()
        }
    tensors = {"v": found.v, **found.constraints, **sides}
    return {name: x.detach().clone().requires_grad_() for name, x in tensors.items()}, y


def everything(tensors, activation, y, solve=eagerly, loss_of=taut.matched_loss):
    """Each field of the solution, its matched loss, and the gradients of both."""
    solution = solve(**tensors, activation=activation)
    value = solution.z.square().sum() + solution.u.sin().sum() + solution.multipliers.cos().sum()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", taut.FailureWarning)
        loss = loss_of(solution, y)
    grads = torch.autograd.grad(value, [*tensors.values()], retain_graph=True, allow_unused=True)
    more = torch.autograd.grad(loss, [*tensors.values()], allow_unused=True)
    assert all(x is None or x.isfinite().all() for x in (*grads, *more))
    fields = (solution.z, solution.multipliers, solution.u, solution.residual, solution.status)
    return [*(x.nan_to_num(7.0) for x in fields), loss, *grads, *more]


def assert_same(found, expected):
    for one, other in zip(found, expected, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            # Entries of a gradient are sums that may cancel: they have the rounding of the largest.
            size = other.detach().abs().max().item() if other.numel() else 0.0
            assert_close(one, other, rtol=1e-12, atol=1e-12 * max(1.0, size))


@each_activation
@each_kind
def test_the_ops_do_what_eager_calls_do(activation, kind):
    tensors, y = given(kind, activation)
    expected = everything(tensors, activation, y)
    assert_same(everything(tensors, activation, y, by_ops, loss_by_ops), expected)
    assert (expected[4] == 0).any()


@each_kind
def test_the_ops_with_an_A_per_sample(kind):
    tensors, y = given(kind, own=True)
    assert_same(
        everything(tensors, "sigmoid", y, by_ops, loss_by_ops), everything(tensors, "sigmoid", y)
    )


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_the_ops_in_every_shape(shape):
    v, A, b = problem(**shape)
    tensors = {k: x.requires_grad_() for k, x in {"v": v, "A": A, "b": b}.items()}
    y = torch.rand_like(v)
    if v.numel():
        assert_same(
            everything(tensors, "sigmoid", y, by_ops, loss_by_ops),
            everything(tensors, "sigmoid", y),
        )
    else:
        assert by_ops(v, A, b).z.shape == v.shape


@pytest.mark.parametrize("name", ["opposite ends", "infeasible", "not finite", "held"])
def test_the_ops_where_samples_fail_or_are_held(name):
    tensors, y = given("equations", "exp")
    v, b = tensors["v"].detach().clone(), tensors["b"].detach().clone()
    if name == "held":
        v[2, 1] = -torch.inf
    else:
        b[1] = {"opposite ends": -1.0, "infeasible": 1e9, "not finite": torch.nan}[name]
    tensors |= {"v": v.requires_grad_(), "b": b.requires_grad_()}
    assert_same(everything(tensors, "exp", y, by_ops, loss_by_ops), everything(tensors, "exp", y))


@pytest.mark.parametrize("name", ["linear", "srlu", "exp", "mixed"])
def test_the_ops_where_bounds_hold_outputs(name):
    activation = ALL[name]
    tensors, y = given("bounds", activation)
    v = tensors["v"].detach().clone()
    v[2, 1], v[4, 0], v[4, 3] = -torch.inf, torch.inf, -torch.inf
    tensors["v"] = v.requires_grad_()
    expected = everything(tensors, activation, y)
    assert_same(everything(tensors, activation, y, by_ops, loss_by_ops), expected)
    assert (expected[4][[2, 4]] <= taut.Status.INFEASIBLE).all() and (expected[4] == 0).any()


def test_what_ops_raise_and_warn_of():
    v, A, b = problem()
    with pytest.raises(taut.SolveError, match="6 of 6 samples") as error:
        by_ops(v, A, b + 100, activation="sigmoid", fail=True)
    assert error.value.status.tolist() == [2] * 6
    with pytest.raises(ValueError, match="targets must lie in"):
        loss_by_ops(by_ops(v, A, b, activation="sigmoid"), v + 9)
    with pytest.warns(taut.FailureWarning, match="6 of 6 samples were not solved"):
        loss_by_ops(by_ops(v, A, b + 100, activation="sigmoid"), torch.rand(6, K))
    v.requires_grad_()
    (g,) = torch.autograd.grad(by_ops(v, A, b).z.square().sum(), v, create_graph=True)
    with pytest.raises(RuntimeError, match="compiled code has first derivatives only"):
        g.sum().backward()
    with pytest.raises(RuntimeError, match="and no forward mode"):
        torch.func.jvp(lambda v: by_ops(v, A, b).z, (v.detach(),), (v.detach(),))


#: Of each op, the arguments that get gradients.
LEAVES = {
    "solve": (3, 4, 5),
    "solve_backward": (),
    "matched_loss": (3, 4, 5),
    "matched_loss_backward": (),
    "loss": (3,),
}


@pytest.mark.filterwarnings("ignore::taut.FailureWarning")
@each_kind
@shared_or_own
def test_opcheck(kind, own):
    """torch's own look at the ops: what they alias, their shapes, gradients, and graphs of them."""
    if kind == "own rows" or (own and kind == "rows"):
        pytest.skip("the same op")
    tensors, y = given(kind, own=own)
    calls = {}

    class Noting(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            calls.setdefault(func, args)
            return func(*args, **(kwargs or {}))

    with Noting():
        everything(tensors, "sigmoid", y, by_ops, loss_by_ops)
        solved = by_ops(**tensors, activation="sigmoid")
        plain = [x.detach() if isinstance(x, torch.Tensor) else x for x in ops.arguments(solved)]
        plain[3].requires_grad_()
        rules = None, 200, "float64", False
        torch.ops.taut.loss(*plain, None, *rules, y.reshape(plain[3].shape))[0].sum().backward()
    found = {f.name().split("::")[1]: args for f, args in calls.items() if "taut" in f.name()}
    assert set(found) == {f"{name}_numbers" for name in LEAVES}
    for name, leaves in LEAVES.items():
        args = [
            x.detach().clone().requires_grad_(i in leaves) if isinstance(x, torch.Tensor) else x
            for i, x in enumerate(found[f"{name}_numbers"])
        ]
        torch.library.opcheck(getattr(torch.ops.taut, name).default, tuple(args))
        plain = [x.detach() if isinstance(x, torch.Tensor) else x for x in args]
        torch.library.opcheck(getattr(torch.ops.taut, f"{name}_numbers").default, tuple(plain))


# torch.func on the ops


@each_kind
def test_gradients_of_ops_by_torch_func(kind):
    tensors, y = given(kind)
    names, values = list(tensors), [x.detach() for x in tensors.values()]

    def loss(solve, loss_of):
        def f(*values):
            solution = solve(**dict(zip(names, values, strict=True)), activation="sigmoid")
            return loss_of(solution, y) + solution.z.square().sum()

        with warnings.catch_warnings():
            warnings.simplefilter("ignore", taut.FailureWarning)
            return torch.func.grad(f, argnums=tuple(range(len(values))))(*values)

    assert_same(loss(by_ops, loss_by_ops), loss(eagerly, taut.matched_loss))


@pytest.mark.filterwarnings("ignore::taut.FailureWarning")
@pytest.mark.parametrize("shared", [True, False], ids=["shared A", "mapped A"])
@each_kind
def test_ops_under_vmap(kind, shared):
    """And the ops of their gradients: that in a matrix for all is of each mapped batch alone."""
    batches = [given(kind)[0] for _ in range(3)]
    y, names = torch.rand(3, 6, K), list(batches[0])
    one_for_all = [x for x in ("A", "G") if shared and x in names]
    values = [
        batches[0][x].detach()
        if x in one_for_all
        else torch.stack([b[x].detach() for b in batches])
        for x in names
    ]

    def f(y, *values):
        solution = by_ops(**dict(zip(names, values, strict=True)), activation="sigmoid")
        settings = ops.arguments(solution)
        found = solution.multipliers, solution.u, solution.status
        g = torch.ones_like(solution.z)
        needs = [x is not None for x in settings[3:]]
        dx = torch.ops.taut.solve_backward(*settings, *found, g, None, 2 * g, needs)
        dl = torch.ops.taut.matched_loss_backward(
            *settings, solution.z, *found, y, g[..., 0], [True, *needs]
        )
        solved = (solution.status == 0).unsqueeze(-1)  # nothing is promised of another z
        z = solution.z.where(solved, 0)
        return z, solution.status, loss_by_ops(solution, y), *dx, *dl

    dims = [None if x in one_for_all else 0 for x in names]
    mapped = torch.vmap(f, in_dims=(0, *dims))(y, *values)
    for i in range(3):
        each = [x if d is None else x[i] for x, d in zip(values, dims, strict=True)]
        assert_same([x[i] for x in mapped], f(y[i], *each))


# torch.onnx


class Network(torch.nn.Module):
    def __init__(self, activation, **sides):
        super().__init__()
        self.net = torch.nn.Linear(3, K)
        A = torch.randn(2, K)  # z = 1/2 satisfies the equations
        self.layer = Projection(A, A.sum(-1) / 2, activation=activation, **sides)

    def forward(self, x):
        return self.layer(self.net(x))


CONSTANT = r"as a constant\. Use torch\.export\.export"


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the older exporter
def test_onnx_and_traces_are_refused():
    """They would write the numbers of one solve as a constant."""
    used, x = Network("exp", G=torch.eye(K)[:1], upper=9.0), torch.randn(4, 3)
    used(x)
    for model in (Network("linear"), used):
        with pytest.raises(NotImplementedError, match=CONSTANT):
            torch.jit.trace(model, (x,))
        with pytest.raises(NotImplementedError, match=CONSTANT):
            torch.onnx.export(model, (x,), io.BytesIO(), dynamo=False)


A = torch.tensor([[1, 1, 0, 0], [0, 1, 1, 1]], dtype=torch.float64)
Y = torch.linspace(0.1, 0.9, 8, dtype=torch.float64).reshape(2, 4)
LAYER, MEMORY = Projection(A, activation="sigmoid"), taut.LagrangeMemory(9, 2).to(A.dtype)
HEAD = taut.LagrangeHead(4, A, "sigmoid").requires_grad_(False)
SOLVED, INDEX = LAYER.solve(torch.zeros_like(Y), Y @ A.T), torch.arange(2)
#: Each public call on tensors, as a function of v: those that solve nothing, and all others.
TRACED = {
    "LagrangeHead": lambda v: torch.cat(HEAD(v), -1),
    "LagrangeHead.predictor": lambda v: HEAD.predictor(v, v[:, :2]),
}
REFUSED = {
    "project": lambda v: project(v, A, Y @ A.T, activation="sigmoid").z,
    "project, bounds": lambda v: project(v, lower=0.0).z,
    "project, h": lambda v: project(v, h=lambda z: z.square().sum(-1, keepdim=True) - 1).z,
    "project, prepared": lambda v: project(v, taut.prepare(A), Y @ A.T).z,
    "reconcile": lambda v: taut.reconcile(v.sigmoid(), A, Y @ A.T, activation="sigmoid").z,
    "layer": lambda v: LAYER(v, Y @ A.T),
    "layer.solve": lambda v: LAYER.solve(v, Y @ A.T).z,
    "layer.loss": lambda v: LAYER.loss(v, Y, Y @ A.T),
    "layer.loss of its targets": lambda v: LAYER.loss(Y, v.sigmoid(), Y @ A.T),
    "layer.loss, memory": lambda v: LAYER.loss(v, Y, Y @ A.T, memory=MEMORY, index=INDEX),
    "matched_loss": lambda v: taut.matched_loss(SOLVED, v.sigmoid()),
    "bregman_loss": lambda v: taut.bregman_loss(v, Y, "sigmoid"),
    "memory": lambda v: v[:, :2] + MEMORY[INDEX],
    "memory.store": lambda v: MEMORY.store(INDEX, SOLVED) or v,
    "is_certificate": lambda v: taut.is_certificate(v, A.T, Y.mean(0), "sigmoid"),
}


@pytest.mark.parametrize("call", REFUSED.values(), ids=REFUSED)
def test_no_call_is_recorded_as_a_constant(call):
    with pytest.raises(NotImplementedError, match=CONSTANT):
        torch.jit.trace(call, (torch.randn(2, 4),), check_trace=False)


@pytest.mark.parametrize("call", TRACED.values(), ids=TRACED)
def test_what_solves_nothing_is_recorded_rightly(call):
    """For other inputs than the one it was recorded with."""
    recorded, v = torch.jit.trace(call, (torch.randn(2, 4),)), torch.randn(2, 4)
    assert_close(recorded(v), call(v), rtol=0, atol=0)


# The memo


def test_the_memo_is_bounded_and_compares_numbers():
    memo, text = Memo(entries=5, numbers=100), spelled(sigmoid)
    matrices = [torch.randn(1 + i % 3, 4) for i in range(30)]
    for C in matrices:
        assert_close(memo.prepared(*text, C, None).A, C)
        assert len(memo) <= 5
    kept = memo.prepared(*text, matrices[-1], None)
    assert memo.prepared(*text, matrices[-1].clone(), None) is kept
    matrices[-1].add_(1)
    assert_close(memo.prepared(*text, matrices[-1], None).A, matrices[-1])
    assert memo.prepared(*spelled(exp), matrices[-1], None).activation is exp
    large = memo.prepared(*text, torch.randn(30, 4), None)
    assert len(memo) == 1
    assert large.A.shape == (30, 4)


def test_the_memo_among_threads():
    memo, wrong = Memo(entries=3, numbers=1000), []
    matrices = [torch.randn(2, 4) for _ in range(6)]

    def look(start):
        for i in range(60):
            C = matrices[(start + i * 7) % 6]
            if not torch.equal(memo.prepared(*spelled(sigmoid), C, None).A, C):
                wrong.append(C)

    threads = [threading.Thread(target=look, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert len(memo) <= 3


@pytest.mark.parametrize("tier", ["not slow", pytest.param("slow", marks=pytest.mark.slow)])
def test_graphs(tier):
    """tests/graphs.py, without the shape checks of this test run: a compiler cannot follow them."""
    graphs = Path(__file__).parent / "graphs.py"
    command = [sys.executable, "-m", "pytest", "-q", "-o", "addopts=", "-m", tier, str(graphs)]
    done = subprocess.run([*command, "-p", "no:cacheprovider"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout
