"""Every way to give inequalities and bounds, and what is said of those that are none."""

import numpy as np
import pytest
import torch
from torch.testing import assert_close

import taut
from tables import K, problem
from taut import project

# many solves: the shapes are checked elsewhere
pytestmark = pytest.mark.usefixtures("as_user")

#: Sides of two rows for three samples, each written in several ways.
SIDES = {
    "a number": (-0.1, [-0.1, -0.1]),
    "a whole number": (0, [0.0, 0.0]),
    "a tensor of one number": (torch.tensor(-0.25).double(), [-0.25, -0.25]),
    "a list": ([-0.1, -torch.inf], [-0.1, -torch.inf]),
    "an array": (np.array([0.1, -0.3]), [0.1, -0.3]),
    "for all samples": (torch.tensor([0.5, -0.25]).double(), [0.5, -0.25]),
    "for each sample": (torch.tensor([[0.5, -0.25]] * 3).double(), [0.5, -0.25]),
}


@pytest.mark.parametrize("given, meant", SIDES.values(), ids=SIDES.keys())
def test_sides_are_given_in_many_ways(given, meant):
    v, G = torch.randn(3, K), torch.randn(2, K)
    right = project(v, G=G, lower=torch.tensor([meant] * 3)).z
    assert torch.equal(project(v, G=G, lower=given).z, right)
    assert torch.equal(project(v, G=G.tolist(), lower=given).z, right)
    assert torch.equal(taut.Projection(G=G, lower=given)(v), right)
    assert torch.equal(taut.Projection(G=G)(v, lower=given), right)
    whole = torch.full((2,), torch.inf)
    assert torch.equal(project(v, G=G, lower=given, upper=whole).z, right)


def test_a_side_that_samples_share_gets_the_sum_of_their_gradients():
    v, G, seed = torch.randn(6, K), torch.randn(2, K), torch.randn(6, K)

    def gradient(side):
        side = side.clone().requires_grad_()
        z = project(v, G=G, lower=side, activation="srlu").z
        return torch.autograd.grad((z * seed).sum(), side)[0]

    each = gradient(torch.full((6, 2), 0.5))
    assert each.any(0).all()
    assert_close(gradient(torch.full((2,), 0.5)), each.sum(0))
    assert_close(gradient(torch.tensor(0.5)), each.sum())


@pytest.mark.parametrize("rows", [0, 1], ids=["no rows", "a row of zeros"])
def test_rows_that_ask_for_nothing(rows):
    v, A, b = torch.randn(4, K), torch.randn(1, K), torch.randn(4, 1)
    G = torch.zeros(rows, K)
    assert torch.equal(project(v, G=G, lower=-1.0, upper=0.0).z, v)
    found = project(v, A, b, G=G, lower=-1.0, upper=0.0, activation="sigmoid", on_failure="return")
    alone = project(v, A, b, activation="sigmoid", on_failure="return")
    assert torch.equal(found.z, alone.z)
    assert torch.equal(found.status, alone.status)
    if rows:
        asked = project(v, G=G, lower=1.0, on_failure="return")
        assert (asked.status == taut.Status.INFEASIBLE).all()
        assert taut.is_certificate(asked.multipliers, None, None, "linear", G=G, lower=1.0).all()


def test_one_output():
    v = torch.tensor([[-1.0], [0.5], [2.0]])
    assert project(v, G=torch.tensor([[2.0]]), lower=0.0, upper=2.0).z.flatten().tolist() == [
        0.0,
        0.5,
        1.0,
    ]
    found = project(v, torch.ones(1, 1), torch.ones(1), upper=0.5, on_failure="return")
    assert (found.status == taut.Status.INFEASIBLE).all()


def test_layout_mode_and_precision_of_what_is_given():
    given = problem("exp", kind="inequalities", n=6, I=1)
    right = given.solve().z
    A, b, G, lower, upper = given.constraints.values()
    turned = [x.mT.contiguous().mT for x in (given.v, b, G, lower, upper)]
    v, b_, G_, lower_, upper_ = turned
    assert not v.is_contiguous()
    options = {"activation": "exp"}
    assert_close(project(v, A, b_, G=G_, lower=lower_, upper=upper_, **options).z, right)
    with torch.inference_mode():
        assert torch.equal(given.solve().z, right)
    single = {name: x.float() for name, x in given.constraints.items()}
    full = project(given.v.float(), **single, **options).z
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(project(given.v.float(), **single, **options).z, full)
    half = project(given.v.half(), lower=torch.ones(K).half(), **options).z
    assert half.dtype is torch.float32
    wide = given.v.half().double()
    assert torch.equal(half == 1, wide <= 0)
    assert_close(half.double(), wide.exp().clamp_min(1), rtol=2e-7, atol=0)


BAD = {
    "nothing": (dict(), "no constraints"),
    "A without b": (dict(A=torch.ones(1, 3), lower=0.0), "needs b as well, an entry for each row"),
    "A alone": (dict(A=torch.ones(1, 3)), r"A and b belong together.*project\(v, A, b\)"),
    "b without A": (dict(b=torch.ones(1), lower=0.0), "A and b belong together.*there is no A"),
    "G without a side": (dict(G=torch.ones(1, 3)), "G without a side"),
    "G of another width": (dict(G=torch.ones(1, 4), lower=0.0), "G must have one column"),
    "transposed G": (dict(G=torch.ones(3, 1), lower=0.0), "Is G transposed"),
    "sides of another length": (
        dict(G=torch.ones(2, 3), lower=torch.zeros(3)),
        r"lower must be a number, \(2,\).*row of G",
    ),
    "bounds of another length": (dict(upper=torch.zeros(2)), "per output"),
    "a G for each of other samples": (
        dict(G=torch.ones(5, 1, 3), lower=0.0),
        r"batch dimensions.*",
    ),
    "a row alone": (dict(G=torch.ones(3), lower=0.0), "G .I, K."),
    "sides of other samples": (
        dict(G=torch.ones(1, 3), upper=torch.zeros(5, 1)),
        r"\(\*batch, 1\) = \(4, 1\)",
    ),
    "a start of another length": (
        dict(G=torch.ones(2, 3), lower=0.0, init=torch.zeros(3)),
        "init must have 2 multipliers",
    ),
}


@pytest.mark.parametrize("given, message", BAD.values(), ids=BAD.keys())
def test_bad_input_is_named(given, message):
    with pytest.raises(ValueError, match=message):
        project(torch.zeros(4, 3, dtype=torch.float32), **given)


def test_what_cannot_be_says_so():
    v = torch.zeros(2, 3)
    with pytest.raises(TypeError, match=r"equations only: use taut\.Newton"):
        project(v, G=torch.ones(1, 3), lower=0.0, solver=taut.GradientDescent())
    with pytest.raises(TypeError, match=r"lower is torch\.float32"):
        project(v, lower=torch.zeros(3, dtype=torch.float32))
