"""Graphs of torch.compile and torch.export. `test_graphs` of test_compiled.py runs these tests."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch._inductor import aoti_compile_and_package, aoti_load_package
from torch.testing import assert_close

import taut
from tables import SOLVERS, K, apply, patchy, problem
from taut import LagrangeMemory, Projection, Status, project
from taut.activations import ACTIVATIONS, bounded, sigmoid
from test_compiled import CONSTANT, Network, assert_same, each_kind, given
from test_derivatives_agree import CELLS, by_autograd, case, differences


def compiled(function, fullgraph=True, **options):
    return torch.compile(function, fullgraph=fullgraph, backend="aot_eager", **options)


# torch.compile


def training_step(layer, net, memory):
    def step(x, y, b, index):
        solution = layer.solve(net(x), b, init=memory[index])
        loss = taut.matched_loss(solution, y)
        memory.store(index, solution)
        return loss

    return step


def test_a_training_step_is_one_graph():
    _, A, _ = problem()
    net, memory = torch.nn.Linear(3, K), LagrangeMemory(20, 2)
    layer = Projection(A, activation="sigmoid")
    step = training_step(layer, net, memory)
    fast, tables, grads = compiled(step, dynamic=True), [], []
    batches = [(n, torch.randn(n, 3), torch.rand(n, K), torch.randperm(20)[:n]) for n in (6, 9, 6)]
    for function in (step, fast):
        memory.multipliers.zero_()
        net.zero_grad()
        for _, x, y, index in batches:
            function(x, y, apply(A, y), index).backward()
        tables.append(memory.multipliers.clone())
        grads.append(net.weight.grad.clone())
    assert_close(tables[0], tables[1], rtol=0, atol=1e-14)
    assert_close(grads[0], grads[1], rtol=0, atol=1e-15)
    assert tables[0].abs().max() > 0.1
    before, (_, x, y, index) = memory.multipliers.clone(), batches[0]
    for wrong in (-1, 20):  # a compiler would count −1 from the end
        with pytest.raises(Exception, match=r"out of range|must lie in|out of bounds"):
            fast(x, y, apply(A, y), index.clone().fill_(wrong))
    assert_close(memory.multipliers, before, rtol=0, atol=0)
    with pytest.raises(taut.SolveError, match="6 of 6 samples could not be projected"):
        fast(batches[0][1], batches[0][2], torch.full((6, 2), 1e3), batches[0][3])


def losses(layer, memory, index, sides):
    """`layer.loss` in a graph, and the three calls; each with what it leaves in the memory."""

    def at_once(v, y, b):
        return layer.loss(v, y, b, **sides, memory=memory, index=index, reduction="none")

    def by_three(v, y, b):
        solution = layer.solve(v, b, init=memory[index], **sides)
        memory.store(index, solution)
        return taut.matched_loss(solution, y, reduction="none")

    torch.compiler.reset()
    start = memory.multipliers.clone()
    for function in (compiled(at_once), by_three):
        memory.multipliers.copy_(start)
        yield function, memory.multipliers


@pytest.mark.filterwarnings("ignore::taut.FailureWarning")
@pytest.mark.parametrize("asked", ["v", "v and b"])
@each_kind
def test_the_loss_of_a_layer_is_one_graph(kind, asked):
    """Values, gradients and memory, and what a sample that fails leaves of them."""
    tensors, y = given(kind, "tanh")
    v, b = tensors.pop("v"), tensors.pop("b").detach()
    matrices = {k: tensors.pop(k).detach() for k in ("A", "G") if k in tensors}
    sides = {k: x.detach() for k, x in tensors.items()}
    b[2] = 1e3
    leaves = (v,) if asked == "v" else (v, b.requires_grad_())
    layer = Projection(**matrices, activation="tanh", on_failure="return")
    memory = LagrangeMemory(20, sum(x.shape[-2] for x in matrices.values())).to(torch.float64)
    memory.multipliers.normal_(0, 0.1)
    index, found = torch.randperm(20)[:6], []
    for function, table in losses(layer, memory, index, sides):
        loss = function(v, y, b)
        grads = torch.autograd.grad(loss.square().sum(), leaves)
        found.append([loss, table.clone(), *grads])
    assert_same(*found)
    assert (found[0][0] != 0).sum() == 5


def test_a_loss_is_one_op_where_only_v_gets_a_gradient():
    v, A, b = problem()
    layer, y, seen = Projection(A, activation="sigmoid", on_failure="return"), torch.rand(6, K), []

    def note(graph, inputs):
        seen.append(sorted({str(x.target) for x in graph.graph.nodes if "taut" in str(x.target)}))
        return graph.forward

    for side in (b, b.clone().requires_grad_()):
        torch.compile(lambda b: layer.loss(v, y, b), fullgraph=True, backend=note)(side)
    assert seen == [["taut.loss"], ["taut.matched_loss", "taut.solve"]]


def test_the_loss_of_a_layer_in_other_shapes():
    """And where the memory has another dtype, there is none, or something is wrong."""
    v, A, b = problem(n=(2, 3))
    y, index = torch.rand(2, 3, K), torch.randperm(20)[:6].reshape(2, 3)
    layer = Projection(A, activation="sigmoid")
    b = apply(A, y)
    for dtype in (torch.float64, torch.float32):
        memory = LagrangeMemory(20, 2).to(dtype)
        found = [(f(v, y, b), table.clone()) for f, table in losses(layer, memory, index, {})]
        assert_same(*found)
    expected = taut.matched_loss(layer.solve(v, b), y, "sum")
    alone = compiled(lambda y, b: layer.loss(v, y, b, reduction="sum"))
    assert_close(alone(y, b), expected, rtol=0, atol=1e-13)
    with pytest.raises(taut.SolveError, match="6 of 6 samples could not be projected"):
        alone(y, b + 1e3)
    with pytest.raises(ValueError, match=r"targets must lie in"):
        alone(y + 2, b)
    # Of what is raised while one graph is made, torch 2.6 says only that it was.
    in_parts = compiled(lambda y, **kept: layer.loss(v, y, b, **kept), fullgraph=False)
    with pytest.raises(ValueError, match=r"y must have the shape of solution.z, \(2, 3, 5\)"):
        in_parts(y[0])
    with pytest.raises(ValueError, match="index must say of each sample of the batch"):
        in_parts(y, memory=memory, index=index[0, 0])


@pytest.mark.filterwarnings("ignore::taut.FailureWarning")
@each_kind
def test_compiled_layers(kind):
    """In one graph, in which the solution is made, and from which it is returned."""
    tensors, y = given(kind, "tanh")
    v, b = tensors.pop("v"), tensors.pop("b")
    own = {name: x.detach() for name, x in tensors.items()}
    layer = Projection(**own, activation="tanh", on_failure="return")

    def f(v, b):
        solution = layer.solve(v, b)
        verdicts = solution.status == Status.CONVERGED, Status.INFEASIBLE != solution.status
        return solution, (solution.converged, solution.radius, *verdicts)

    (expected, asked), (found, answered) = f(v, b), compiled(f)(v, b)
    assert_close(answered, asked, equal_nan=True)
    assert asked[0].any()
    for name in ("z", "multipliers", "status", "active", "condition", "radius", "converged"):
        assert_close(getattr(found, name), getattr(expected, name), equal_nan=True)
    assert found.report() == expected.report()
    grads = [
        torch.autograd.grad(x.z.square().sum() + taut.matched_loss(x, y), (v, b))
        for x in (found, expected)
    ]
    assert_same(*grads)


def test_a_prepared_matrix_in_a_graph():
    v, A, b = problem("exp")
    prepared = taut.prepare(A, "exp")
    z = compiled(lambda v, b: project(v, prepared, b).z)(v, b)
    assert_close(z, project(v, prepared, b).z, rtol=0, atol=1e-14)


own = taut.Activation(
    "own", sigmoid.sigma, sigmoid.slope, sigmoid.phi, sigmoid.inverse, sigmoid.psi, sigmoid.range
)
FUNCTIONS = {
    "vmap": torch.func.vmap,
    "grad": lambda f: torch.func.grad(lambda *args: f(*args).sum()),
    "vmap of grad": lambda f: torch.func.vmap(torch.func.grad(f)),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_torch_func_in_a_graph(name):
    v, A, b = problem()
    y = torch.rand(6, K)

    def loss(v, b, y):
        return taut.matched_loss(project(v, A, b, activation="sigmoid"), y)

    function = FUNCTIONS[name](loss)
    assert_close(compiled(function)(v, b, y), function(v, b, y), rtol=0, atol=1e-14)


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")  # torch of itself
def test_forward_mode_in_a_graph_is_refused():
    v, A, b = problem()

    def tangent(v):
        return torch.func.jvp(lambda v: project(v, A, b, activation="sigmoid").z, (v,), (v,))[1]

    for fullgraph in (False, True):
        with pytest.raises(RuntimeError, match="first derivatives only, and no forward mode"):
            torch.compile(tangent, backend="aot_eager", fullgraph=fullgraph)(v)


#: Torch 2.6 writes {x!r} without quotes.
UNFIT = {
    "activation of one's own": (lambda A: {"A": A, "activation": own}, "own'? is made of Python"),
    "another solver": (
        lambda A: {
            "A": A,
            "activation": "sigmoid",
            "solver": SOLVERS["GradientDescent"][0],
        },
        "taut.Newton, and not GradientDescent",
    ),
    "sparse A": (lambda A: {"A": A.to_sparse(), "activation": "sigmoid"}, "a sparse matrix"),
}


@pytest.mark.filterwarnings("ignore::taut.FailureWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # torch hides it else
@pytest.mark.parametrize("name", UNFIT)
def test_what_a_graph_cannot_carry(name):
    """torch.compile runs it between two graphs; torch.export says why not."""
    v, A, b = problem(n=3, I=2, K=9, matrix=patchy, size=1.0, seed=3)
    make, words = UNFIT[name]
    layer = Projection(**make(A), on_failure="return")
    layer(v, b)  # warns, if it must, before a compiler looks on
    torch.compiler.reset()
    z = torch.compile(layer, backend="eager")(v, b)
    assert_close(z, layer(v, b), rtol=0, atol=1e-12)
    y = z.detach().flip(0)
    for loss in (layer.loss, lambda v, y, b: taut.matched_loss(layer.solve(v, b), y)):
        found = torch.compile(loss, backend="eager")(v.requires_grad_(), y, b)
        gradients = (torch.autograd.grad(x, v)[0] for x in (found, loss(v, y, b)))
        assert_close(*gradients, rtol=0, atol=1e-12)
    v = v.detach()
    for strict in (False, True):  # a NotImplementedError, or what a compiler makes of one
        with pytest.raises(RuntimeError, match=f"cannot be exported: .*{words}"):
            torch.export.export(layer, (v, b), strict=strict)


@pytest.mark.parametrize("layout", ["to_sparse", "to_sparse_csr"])
def test_a_sparse_matrix_breaks_the_graph(layout):
    """Around each call that is given one; with fullgraph it is an error."""
    v, A, b = problem(n=3, I=2, K=9, matrix=patchy, size=1.0, seed=3)
    sparse = getattr(A, layout)()

    def both(v, sparse):
        v = 2 * v
        return project(v, sparse, b, activation="tanh", on_failure="return").z + 1

    torch.compiler.reset()
    assert_close(torch.compile(both, backend="eager")(v, sparse), both(v, A), rtol=0, atol=1e-12)
    with pytest.raises(Exception, match=r"sparse Tensor|\bdisable\b"):
        compiled(both)(v, sparse)


def _tiers(cell):
    return () if cell[1:] == ("plain", "twins") else pytest.mark.slow


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # torch of itself
@pytest.mark.parametrize("cell", [pytest.param(x, marks=_tiers(x), id="-".join(x)) for x in CELLS])
def test_compiled_gradients_are_those_of_autograd(cell):
    """Whatever is held, clipped or dependent; h breaks the graph."""
    asked = case(*cell)

    def parts(*values):
        return asked.parts(*values)

    torch.compiler.reset()
    fast = compiled(parts, fullgraph=cell[0] != "nonlinear")
    assert not differences(asked, by_autograd(asked, fast), by_autograd(asked))


# torch.export


def test_an_exported_model_runs_in_another_process(tmp_path):
    """For any number of samples."""
    models = {
        "equations": Network("tanh"),
        "rows": Network(
            bounded(-torch.arange(1.0, 6.0), torch.arange(1.0, 6.0)), G=torch.eye(K)[:2], upper=1.0
        ),
        "bounds": Network("srlu", lower=-0.5),
    }
    x, sizes = torch.randn(7, 3), {"x": {0: torch.export.Dim.DYNAMIC}}
    for name, model in models.items():
        program = torch.export.export(model, (x[:4],), dynamic_shapes=sizes)
        torch.export.save(program, tmp_path / f"{name}.pt2")
    torch.save((x, {name: model(x) for name, model in models.items()}), tmp_path / "expected.pt")
    code = f"""
import torch, taut
x, expected = torch.load({str(tmp_path / "expected.pt")!r})
for name, z in expected.items():
    model = torch.export.load({str(tmp_path)!r} + "/" + name + ".pt2").module()
    assert (model(x) - z).abs().max() < 1e-14, name
    assert model(x[:1]).shape == (1, 5)
print("as before")
"""
    command = [sys.executable, "-W", "ignore", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "as before", done.stderr


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torch of itself
def test_an_exported_model_by_aot_inductor(tmp_path):
    model, x = Network("sigmoid"), torch.randn(7, 3)
    sizes = {"x": {0: torch.export.Dim.DYNAMIC}}
    program = torch.export.export(model, (x[:4],), dynamic_shapes=sizes)
    file = str(tmp_path / "model.pt2")
    aoti_compile_and_package(program, package_path=file)
    with torch.no_grad():
        assert_close(aoti_load_package(file)(x), model(x), rtol=0, atol=1e-14)


# torch.onnx


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torch of itself
def test_the_newer_onnx_is_refused():
    """Also where its strict way of tracing, which reads the code, would go on."""
    pytest.importorskip("onnxscript")
    layer = Projection(torch.ones(1, K), activation="sigmoid")
    for model, inputs in (
        (Network("linear").eval(), (torch.randn(4, 3),)),
        (layer.eval(), (torch.randn(4, K), torch.ones(4, 1))),
    ):
        with pytest.raises(Exception, match=CONSTANT):
            torch.onnx.export(model, inputs, dynamo=True)


A = torch.linspace(0.1, 0.9, 24, dtype=torch.float64).reshape(3, 8).cos()
G = torch.eye(8, dtype=torch.float64)[:2]
CAPS = torch.full((2,), 0.6, dtype=torch.float64)
EXPORTED = {
    "b": {"A": A},
    "own b": {"A": A, "b": A.sum(-1) / 2},
    "bounds": {"A": A, "lower": 0.0},
    "bounds, own b": {"A": A, "b": A.sum(-1) / 2, "upper": torch.full((8,), 0.9).double()},
    "bounds alone": {"lower": 0.3, "upper": 0.6},
    "G": {"A": A, "G": G, "upper": CAPS},
    "G alone": {"G": G, "upper": CAPS},
}


@pytest.mark.parametrize("strict", [False, True], ids=["not strict", "strict"])
@pytest.mark.parametrize("name", EXPORTED)
def test_an_exported_layer_takes_batches_of_any_size(name, strict):
    """Also as many samples as there are equations, rows of G or outputs."""
    layer = Projection(**EXPORTED[name], activation="sigmoid")

    def data(n):
        v = torch.randn(n, 8)
        return (v, torch.full((n, 8), 0.5) @ A.mT) if name in ("b", "bounds", "G") else (v,)

    sizes = tuple({0: torch.export.Dim.DYNAMIC} for _ in data(1))
    program = torch.export.export(layer, data(7), dynamic_shapes=(*sizes,), strict=strict).module()
    for n in range(1, 10):
        assert_close(program(*data(n)).shape, torch.Size([n, 8]))
        given = data(n)
        assert_close(program(*given), layer(*given), rtol=0, atol=1e-13)


NUMBERS = {
    "upper": (lambda layer, v, b, x: layer(v, b, upper=x), (0.5, 0.6, 1)),
    "lower": (lambda layer, v, b, x: layer(v, b, lower=x), (0.1, 0.05, -1)),
    "both": (lambda layer, v, b, x: layer(v, b, lower=-x, upper=x / 2), (1.0, 1.2, 1)),
    "rows": (lambda _, v, b, x: project(v, G=G[:, :K], upper=x).z, (0.3, 0.26, 1)),
    "loss": (lambda layer, v, b, x: layer.loss(v, v.sigmoid(), b, upper=x), (0.5, 0.6, 1)),
}


@pytest.mark.filterwarnings("ignore::taut.FailureWarning")
@pytest.mark.parametrize("dynamic", [None, True], ids=str)
@pytest.mark.parametrize("name", NUMBERS)
def test_a_number_as_a_side_may_change(name, dynamic):
    """Floats, integers, and tensors without dimensions."""
    layer, v = Projection(torch.ones(1, K), activation="sigmoid"), torch.randn(3, K)
    function, numbers = NUMBERS[name]
    torch.compiler.reset()
    fast, b = compiled(function, dynamic=dynamic), torch.ones(3, 1)
    for x in (*numbers, torch.tensor(numbers[0])):
        assert_close(fast(layer, v, b, x), function(layer, v, b, x), rtol=0, atol=1e-13)


@pytest.mark.parametrize("dynamic", [None, True], ids=str)
def test_numbers_as_b_may_change(dynamic):
    layer, v = Projection(torch.ones(1, K), activation="sigmoid"), torch.randn(3, K)
    torch.compiler.reset()
    fast = compiled(lambda v, x: layer(v, [x]), dynamic=dynamic)
    for x in (1.0, 0.9, 1, 2, 1.5):
        assert_close(fast(v, x).sum(-1), torch.full((3,), float(x)), rtol=0, atol=1e-13)


@pytest.mark.parametrize("which", ["z", "multipliers", "u"])
def test_writes_to_a_solution_do_not_reach_its_loss(which):
    """There are no counters of writes in a graph: the loss has copies."""
    given = problem("sigmoid")
    v, A, b = given
    y, live = given.y, [x.requires_grad_() for x in (v, b)]

    def loss(v, b, written):
        solution = project(v, A, b, activation="sigmoid")
        with torch.no_grad():
            for name in written:
                getattr(solution, name).mul_(2.0)
        return taut.matched_loss(solution, y, "sum")

    right = loss(v, b, ())
    found = compiled(loss)(v, b, (which,))
    assert_close(found, right, rtol=0, atol=1e-13)
    expected = torch.autograd.grad(right, live)
    assert_close(torch.autograd.grad(found, live), expected, rtol=0, atol=1e-13)


# The document


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of Lightning: few workers, few batches
def test_the_document_runs(tmp_path, monkeypatch):
    """The blocks that need a compiler, or Lightning."""
    pytest.importorskip("pytorch_lightning")
    torch.set_default_dtype(torch.float32)
    monkeypatch.chdir(tmp_path)
    text = (Path(__file__).parent.parent / "docs/pytorch.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```py\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    source = "\n".join(blocks)
    assert len(blocks) == 3
    namespace = {"__name__": "document"}
    file = tmp_path / "document.py"  # where a compiler can read it
    file.write_text(source, encoding="utf-8")
    exec(compile(source, str(file), "exec"), namespace)
    memory = namespace["model"].memory.multipliers
    assert memory.abs().amin() > 0
    assert namespace["z"].shape == (5, 4)


# Inductor


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::taut.FailureWarning")
@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")  # torch of itself
@pytest.mark.parametrize("activation", ACTIVATIONS)
@each_kind
def test_by_inductor(activation, kind):
    tensors, y = given(kind, activation)
    names = list(tensors)

    def f(*values):
        solution = project(
            **dict(zip(names, values, strict=True)), activation=activation, on_failure="return"
        )
        return taut.matched_loss(solution, y) + solution.z.square().sum()

    torch.compiler.reset()
    fast = torch.compile(f, fullgraph=True)
    values = list(tensors.values())
    expected = torch.autograd.grad(f(*values), values, allow_unused=True)
    assert_same(torch.autograd.grad(fast(*values), values, allow_unused=True), expected)
