"""h and params as they are given: every check has its sentence, every way in gives the same z."""

import copy
import pickle
import subprocess
import sys

import pytest
import torch

import taut
from surfaces import FAMILIES, norm
from tables import SEED

V = torch.tensor([[1.0, 2.0, 3.0], [0.5, -1.0, 2.0]], dtype=torch.float64)
E = torch.tensor([[2.0], [1.0]], dtype=torch.float64)


class Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx, z):
        ctx.save_for_backward(z)
        return z**2

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, g):
        return 2 * g * ctx.saved_tensors[0]


class Old(torch.autograd.Function):
    """No rule for vmap, nor for torch.func: the solver makes copies of the samples instead."""

    @staticmethod
    def forward(ctx, z):
        ctx.save_for_backward(z)
        return z.square()

    @staticmethod
    def backward(ctx, g):
        return 2 * g * ctx.saved_tensors[0]


def in_place(z, e):
    return z.mul_(2).sum(-1, keepdim=True) - e


learnt = torch.tensor([1.0], dtype=torch.float64, requires_grad=True)
BAD = {
    "not a tensor": (lambda z, e: 3.0, TypeError, "h must return a tensor .*got float"),
    "one number a sample": (lambda z, e: z.sum(-1), ValueError, r"got \(2,\).*keepdim"),
    "of one sample": (lambda z, e: z[0], ValueError, r"got \(3,\).*torch.vmap"),
    "no equation": (lambda z, e: z[:, :0], ValueError, r"M ≥ 1.*got \(2, 0\)"),
    "samples inside": (lambda z, e: z.mT, ValueError, r"got \(3, 2\).*params"),
    "dtype": (lambda z, e: z.float(), TypeError, "numbers like z, torch.float64.*float32"),
    "detached": (lambda z, e: norm(z.detach(), e), ValueError, "does not depend on z"),
    "constant": (lambda z, e: e * 1, ValueError, "does not depend on z"),
    "in place": (in_place, ValueError, "in place.*clone"),
    "mixes": (
        lambda z, e: norm(z - z.mean(0), e),
        ValueError,
        "mixes samples: by autograd, h of other samples depends on z of sample",
    ),
    "mixes in secret": (
        lambda z, e: norm(z, e) - z.mean().detach(),
        ValueError,
        "mixes samples: for sample . it gives .* alone, and .* in the batch of 2",
    ),
    "random": (lambda z, e: norm(z, e) + torch.rand_like(e), ValueError, "mixes samples.*random"),
    "closure": (lambda z, e: norm(z, e) * learnt, ValueError, "closes over .*derivatives"),
    "columns apart": (lambda z, e: (norm(z, e), z), TypeError, r"got tuple. Try torch.cat"),
    "numbers apart": (lambda z, e: [z[:, 0]], TypeError, r"got list. Try torch.stack"),
    "another array": (
        lambda z, e: torch.from_numpy(z.numpy()).sum(-1, keepdim=True) - e,
        ValueError,
        "as autograd sees it.*numpy",
    ),
    "its batch": (
        lambda z, e: norm(z, E),
        ValueError,
        r"\(2, 1\) with all samples, .* and \(2, 1\) with 1 of 2 .*closes over .*params",
    ),
    "float32": (
        lambda z, e: z @ torch.ones(3, 1, dtype=torch.float32) - e,
        TypeError,
        r"a constant of torch.float32: with z \(2, 3\) and params \(2, 1\) .*W.to\(z.dtype\)",
    ),
    "device": (
        lambda z, e: norm(z, e) * torch.ones(2, 1, device="meta"),
        ValueError,
        r"all on cpu, and says .*meta.*W.to\(z.device\)",
    ),
    "too few arguments": (lambda z: norm(z, 1), TypeError, r"takes \(z\) and was .* 1 parameter: "),
    "too many": (
        lambda z, e, f: 0,
        TypeError,
        r"takes \(z, e, f\) and was .* 1 parameter: .*params",
    ),
    "once": (lambda z, e: Once.apply(z).sum(-1, keepdim=True) - e, TypeError, "twice diff"),
}


@pytest.mark.usefixtures("as_user")
@pytest.mark.parametrize("name", BAD)
def test_each_fault_of_h_has_its_sentence(name):
    h, error, words = BAD[name]
    with pytest.raises(error, match=f"(?s){words}"):
        taut.project(V, h=h, params=(E,))


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")  # torch itself
def test_h_that_a_transform_has_seen():
    """Of z alone nothing would show: the solve itself runs outside of transforms."""
    scaled = lambda v, s: taut.project(v, h=lambda z: norm(z, s)).z.sum()  # noqa: E731
    numbers = torch.ones(2)
    for call in (
        lambda: torch.func.grad(lambda s: scaled(V, s))(numbers[0]),
        lambda: torch.func.jvp(lambda s: scaled(V, s), (numbers[0],), (numbers[0],)),
        lambda: torch.vmap(scaled, (None, 0))(V, numbers),
        lambda: torch.vmap(scaled)(V, numbers),
        lambda: torch.func.vmap(torch.func.grad(scaled, 1))(V, numbers),
    ):
        with pytest.raises(ValueError, match=r"closes over .*vmap"):
            call()
    close(torch.vmap(lambda v: taut.project(v, h=lambda z: norm(z, 1)).z)(V).norm(dim=-1), numbers)


def test_errors_of_h_say_what_it_was_called_with():
    with pytest.raises(RuntimeError) as error:
        taut.project(V.float(), h=lambda z: z @ torch.ones(4, 1))
    (note,) = error.value.__notes__
    assert "z (2, 3)" in note
    assert "torch.float64" in note


@pytest.mark.usefixtures("as_user")
def test_params_without_a_last_dimension():
    """(N,) beside (N, 1) makes (N, N), and it is right of one sample alone."""
    p = torch.tensor([2.0, 1.0, 3.0])
    v = torch.cat([V, V[:1]])
    h = lambda z, p: z.square().sum(-1, keepdim=True) - p  # noqa: E731
    with pytest.raises(
        ValueError, match=r"params\[0\] has one number for each sample, \(3,\).*unsq"
    ):
        taut.project(v, h=h, params=(p,))
    close(
        taut.project(v, h=h, params=(p.unsqueeze(-1),)).z[:1],
        taut.project(V[:1], h=h, params=(p[:1],)).z,
    )


A, B = torch.ones(1, 3, dtype=torch.float64), torch.ones(1, dtype=torch.float64)
WIDE = torch.ones(2, 501, dtype=torch.float64)
REFUSED = {
    "no function": (dict(h=3), TypeError, "h must be a function.*got int"),
    "params alone": (dict(A=A, b=B, params=(E,)), ValueError, "there is no h"),
    "one tensor": (dict(h=norm, params=E), TypeError, r"must be a tuple.*params=\(p,\)"),
    "other batch": (dict(h=norm, params=(E[:1],)), ValueError, r"batch dimensions of v, \(2,\)"),
    "other dtype": (dict(h=norm, params=(E.float(),)), TypeError, "float64.*params.0. is torch.fl"),
    "integers of bool": (dict(h=norm, params=(E > 0,)), TypeError, "real numbers; got torch.bool"),
    "A alone": (dict(A=A, h=norm, params=(E,)), ValueError, "A and b belong together"),
    "lower": (dict(h=norm, params=(E,), lower=0.0), NotImplementedError, "G, lower or upper.*exp"),
    "G": (dict(h=norm, params=(E,), G=A, upper=1.0), NotImplementedError, "one more output"),
    "descent": (
        dict(h=norm, params=(E,), solver=taut.GradientDescent()),
        TypeError,
        "linear equations only: use taut.Newton",
    ),
    "float32": (
        dict(h=norm, params=(E,), solver=taut.Newton(dtype=torch.float32)),
        ValueError,
        "solved in float64",
    ),
    "init": (dict(h=norm, params=(E,), init=torch.ones(2, 2)), ValueError, "1 multipliers.*got 2"),
    "init of others": (dict(h=norm, params=(E,), init=torch.ones(3, 1)), ValueError, r"\(3, 1\)"),
    "pair": (
        dict(h=norm, params=(E,), init=(torch.ones(2, 2), torch.ones(2, 1))),
        ValueError,
        r"\(2, 2\), \(2, 1\)",
    ),
    "h twice": (
        dict(A=taut.prepare(A, h=norm), b=B, h=norm, params=(E,)),
        ValueError,
        "has its h already",
    ),
    "sparse": (
        dict(v=WIDE, A=WIDE[:1].to_sparse(), b=B, h=norm, params=(E,)),
        NotImplementedError,
        "K = 500 outputs",
    ),
}


@pytest.mark.usefixtures("as_user")
@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_go_with_h_is_refused(name):
    given, error, words = REFUSED[name]
    with pytest.raises(error, match=f"(?s){words}"):
        taut.project(**{"v": V, **given})


@pytest.mark.usefixtures("as_user")
def test_modules_refuse_what_does_not_go_with_h():
    with pytest.raises(NotImplementedError, match="lower or upper"):
        taut.Projection(A, h=norm, upper=1.0)
    with pytest.raises(NotImplementedError, match="LagrangeHead knows no h"):
        taut.LagrangeHead(4, A, h=norm)
    with pytest.raises(ValueError, match="this layer has no h"):
        taut.Projection(A, B)(V, params=(E,))
    with pytest.raises(NotImplementedError, match="lower or upper"):
        taut.Projection(A, B, h=norm)(V, params=(E,), lower=0.0)
    with pytest.raises(ValueError, match="A and b belong together"):
        taut.Projection(A, h=norm)(V, params=(E,))
    for strict in (False, True):  # a NotImplementedError, or what a compiler makes of one
        with pytest.raises(RuntimeError, match="cannot be exported: h is a Python function"):
            torch.export.export(taut.Projection(h=norm), (V,), {"params": (E,)}, strict=strict)


# The ways in


FAMILY = FAMILIES["distillation/mixed"]


@pytest.fixture
def given():
    return FAMILY.problem(5, 0.3, 200 + SEED)


def close(one, other, tolerance=1e-12):
    torch.testing.assert_close(one, other, atol=tolerance, rtol=tolerance)


def test_every_way_gives_the_same_z(given):
    right = given.solve(on_failure="raise")
    activation, params = FAMILY.activation, given.params
    layer = taut.Projection(FAMILY.A, h=FAMILY.h, activation=activation)
    prepared = taut.prepare(FAMILY.A, activation, h=FAMILY.h)
    ways = {
        "layer": layer(given.v, given.b, params=params),
        "copied layer": copy.deepcopy(layer)(given.v, given.b, params=params),
        "pickled layer": pickle.loads(pickle.dumps(layer))(given.v, given.b, params=params),
        "prepared": taut.project(given.v, prepared, given.b, params=params).z,
        "pickled": taut.project(
            given.v, pickle.loads(pickle.dumps(prepared)), given.b, params=params
        ).z,
        "list of params": taut.project(
            given.v,
            FAMILY.A,
            given.b,
            h=FAMILY.h,
            params=[p.tolist() for p in params],
            activation=activation,
        ).z,
        "not contiguous": given.solve(given.v.mT.contiguous().mT).z,
        "sparse A": taut.project(
            given.v,
            FAMILY.A.to_sparse(),
            given.b,
            h=FAMILY.h,
            params=params,
            activation=activation,
        ).z,
        "reconcile": taut.reconcile(
            taut.activations.resolve(activation).sigma(given.v),
            FAMILY.A,
            given.b,
            h=FAMILY.h,
            params=params,
            activation=activation,
        ).z,
    }
    for name, z in ways.items():
        torch.testing.assert_close(
            z, right.z, atol=1e-11, rtol=1e-11, msg=lambda m, n=name: f"{n}: {m}"
        )
    assert "h=distillation" in repr(layer)
    with torch.inference_mode():
        close(given.solve(given.v + 0).z, right.z)


@pytest.mark.parametrize("batch", [(), (1,), (2, 2), (0,), (2, 0)])
def test_batch_dimensions(batch):
    n = torch.Size(batch).numel()
    given = FAMILY.problem(max(n, 1), 0.3, 210 + SEED)
    flat = given.solve(on_failure="raise")
    v, b, p = (x[:n].reshape(*batch, x.shape[-1]) for x in (given.v, given.b, *given.params))
    options = {"h": FAMILY.h, "params": (p,), "activation": FAMILY.activation}
    solution = taut.project(v, FAMILY.A, b, **options)
    assert solution.z.shape == v.shape
    assert solution.multipliers.shape == (*batch, 6)
    assert solution.status.shape == batch
    close(solution.z.reshape(n, v.shape[-1]), flat.z[:n], 1e-11)
    v = v.clone().requires_grad_()
    taut.project(v, FAMILY.A, b, **options).z.sum().backward()
    assert v.grad.shape == v.shape


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_other_dtypes_are_solved_in_float64(dtype, given):
    """z is float32, and satisfies the equations as far as that goes."""
    v, b, (p,) = given.v.to(dtype), given.b.to(dtype), given.params
    p, single = p.to(dtype), torch.float32
    A = FAMILY.A.to(dtype)
    options = {"h": FAMILY.h, "activation": FAMILY.activation}
    solution = taut.project(v, A, b, params=(p,), **options)
    assert solution.z.dtype == solution.multipliers.dtype == single
    right = taut.project(v.double(), FAMILY.A, b.double(), params=(p.double(),), **options)
    close(solution.z, right.z.to(single), 4e-7)
    assert solution.residual.max() < 1e-5
    v = v.to(single).requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        z = taut.project(v, A.to(single), b.to(single), params=(p.to(single),), **options).z
        assert z.dtype == single
        z.square().sum().backward()
    assert bool(v.grad.isfinite().all())


def test_functions_without_rules_for_batches():
    v = torch.randn(6, 9)
    one = taut.project(v, h=lambda z: Old.apply(z).sum(-1, keepdim=True) - 1)
    other = taut.project(v, h=lambda z: norm(z, 1))
    close(one.z, other.z)
    v = v.requires_grad_()
    z = taut.project(v, h=lambda z: Old.apply(z).sum(-1, keepdim=True) - 1).z
    right = taut.project(v, h=lambda z: norm(z, 1)).z
    close(*(torch.autograd.grad(x[:, 0].sum(), v)[0] for x in (z, right)))


def test_function_of_one_sample_by_vmap():
    one = taut.project(V, h=torch.vmap(lambda z, e: z.square().sum()[None] - e), params=(E,))
    close(one.z, taut.project(V, h=norm, params=(E,)).z)


def test_starts(given):
    """Multipliers, a solution, a pair; what is not a number, or absurd, is no start."""
    right = given.solve(on_failure="raise")
    again = given.solve(init=right)
    assert again.iterations.max() <= 2
    for init in (right, (right.u, right.multipliers), right.multipliers, right.multipliers[0]):
        close(given.solve(init=init, on_failure="raise").z, right.z, 1e-10)
    spoilt = right.multipliers.clone()
    spoilt[0, 0], spoilt[1] = torch.nan, 1e30
    close(given.solve(init=spoilt, on_failure="raise").z, right.z, 1e-10)
    far = torch.full_like(right.u, torch.inf)
    close(given.solve(init=(far, spoilt), on_failure="raise").z, right.z, 1e-10)


def test_a_pair_starts_linear_equations_too():
    v, b = torch.randn(4, 3), torch.ones(1)
    solution = taut.project(v, A, b, activation="exp")
    pair = solution.u, solution.multipliers
    assert bool((taut.project(v, A, b, activation="exp", init=pair).z == solution.z).all())


def test_memory_of_multipliers(given):
    layer = taut.Projection(FAMILY.A, h=FAMILY.h, activation=FAMILY.activation)
    memory, index = taut.LagrangeMemory(9, 6).to(torch.float64), torch.tensor([3, 1, 8, 0, 5])
    cold = layer.solve(given.v, given.b, memory[index], params=given.params)
    memory.store(index, cold)
    close(memory[index], cold.multipliers)
    warm = layer.solve(given.v, given.b, memory[index], params=given.params)
    assert warm.iterations.sum() <= cold.iterations.sum()
    close(warm.z, cold.z, 1e-10)
    v = given.v.clone().requires_grad_()
    options = {"params": given.params, "memory": memory, "index": index, "reduction": "sum"}
    memory.multipliers.fill_(3.0)  # the loss keeps them, and does not start from them
    layer.loss(v, given.z, given.b, **options).backward()
    close(v.grad, cold.z - given.z, 1e-13)
    close(memory[index], cold.multipliers, 1e-13)


def test_layer_without_A():
    layer = taut.Projection(h=norm)
    close(layer(V, params=(E,)), E.sqrt() * V / V.norm(dim=-1, keepdim=True))
    prepared = taut.prepare(h=norm)
    close(taut.project(V, prepared, params=(E,)).z, layer(V, params=(E,)))
    assert taut.Projection(h=norm).state_dict() == {}


def test_outputs_held_at_an_end_stay_there():
    """v = −inf, and a sum that leaves one output nothing."""
    v = torch.tensor([[-torch.inf, 0.5, 0.2], [0.1, -0.3, 0.4]])
    solution = taut.project(v, h=norm, params=(torch.ones(2, 1),), activation="exp")
    assert solution.z[0, 0] == 0
    assert solution.u[0, 0] == -torch.inf
    assert solution.residual.max() < 1e-14
    two = taut.project(v[0, 1:], h=norm, params=(torch.ones(1),), activation="exp")
    close(solution.z[0, 1:], two.z)
    forced = torch.tensor([[1.0, 0.0, 0.0]])
    held = taut.project(
        v[1:], forced, torch.zeros(1), h=norm, params=(torch.ones(1, 1),), activation="exp"
    )
    assert held.z[0, 0] == 0
    assert held.residual.max() < 1e-14
    y = torch.tensor([[0.0, 0.6, 0.9]])
    assert taut.reconcile(y, h=norm, params=(torch.ones(1, 1),), activation="exp").z[0, 0] == 0


def test_h_under_torch_compile():
    """In a process of its own: the shape checks of the test run are not for torch.compile."""
    code = """
import torch, taut
layer = taut.Projection(h=lambda z, e: z.square().sum(-1, keepdim=True) - e)
v, e = torch.randn(4, 3, requires_grad=True), torch.ones(4, 1)
z = torch.compile(lambda v: 2 * layer(v, params=(e,)), backend="eager")(v)
(own,) = torch.autograd.grad(z.square().sum(), v, retain_graph=True)
(right,) = torch.autograd.grad((2 * layer(v, params=(e,))).square().sum(), v)
print(float((z - 2 * layer(v, params=(e,))).abs().max()) < 1e-6, bool((own == right).all()))
"""
    command = [sys.executable, "-W", "ignore", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "True True", done.stderr
