"""Of samples without a solution: which rows clash, what they ask for, and that it is true."""

import re

import pytest
import torch
from scipy.optimize import linprog

import taut
from tables import apply, generator
from taut import project
from taut.activations import bounded

# many solves: the shapes are checked elsewhere
pytestmark = pytest.mark.usefixtures("as_user")

SUM, HALVES = [[1.0, 1.0, 1.0]], [[1.0, 1.0, 0.0], [0.0, 1.0, 1.0]]
CHAIN = [[1.0, 0.0, 0.0], [-1.0, 1.0, 0.0], [0.0, -1.0, 1.0], [0.0, 0.0, 1.0]]
INF = torch.inf
#: What is asked, and what is said of it.
CLASHES = {
    "a row and an equation": (
        dict(A=SUM, b=[1.5], G=[[1.0, 1.0, 0.0]], lower=2.0, activation="exp"),
        "row 0 of G asks for at least 2; equation 0 and the range of 'exp' leave at most 1.5.",
    ),
    "an upper side": (
        dict(A=SUM, b=[1.5], G=[[1.0, 1.0, 1.0]], upper=1.0),
        "row 0 of G asks for at most 1; equation 0 leaves at least 1.5.",
    ),
    "rows in a chain": (
        dict(G=CHAIN, lower=[1.0, 1.0, 1.0, -INF], upper=[INF, INF, INF, 2.5]),
        "row 3 of G asks for at most 2.5; rows 0, 1 and 2 of G leave at least 3.",
    ),
    "a row alone": (
        dict(G=SUM, lower=4.0, activation="sigmoid"),
        "row 0 of G asks for at least 4; with 'sigmoid' it can be between 0 and 3 only.",
    ),
    "an equation and bounds": (
        dict(A=SUM, b=[3.0], upper=0.5),
        "equation 0 asks for 3; between its bounds it can be at most 1.5.",
    ),
    "equations and a bound": (
        dict(A=HALVES, b=[1.0, 3.0], lower=[0.0, -INF, -INF], upper=[INF, INF, 1.0]),
        "equation 1 asks for 3; equation 0, the upper bound of output 2 and the lower bound of "
        "output 0 leave at most 2.",
    ),
    "equations": (
        dict(A=HALVES, b=[0.1, 1.8], activation="sigmoid"),
        "equation 1 asks for 1.8; equation 0 and the range of 'sigmoid' leave at most 1.1.",
    ),
    "crossed sides": (
        dict(G=SUM, lower=2.0, upper=1.0),
        "the lower side of row 0 of G, 2, is above its upper one, 1.",
    ),
    "crossed bounds": (
        dict(lower=2.0, upper=[3.0, 1.0, 3.0]),
        "output 1 would have to be at least 2 and at most 1.",
    ),
    "a bound beyond the range": (
        dict(lower=2.0, activation="sigmoid"),
        "output 0 would have to be at least 2 and at most 1.",
    ),
    "contradictory equations": (
        dict(A=[*HALVES, [1.0, 2.0, 1.0]], b=[0.1, 1.8, 5.0]),
        "equation 2 asks for 5; equations 0 and 1 make it 1.9.",
    ),
    "an equation without outputs": (
        dict(A=[[1.0, 1.0, 1.0], [0.0, 0.0, 0.0]], b=[1.0, 2.0]),
        "equation 1 asks for 2; it has zeros only.",
    ),
}


@pytest.mark.parametrize("given, said", CLASHES.values(), ids=CLASHES.keys())
def test_it_is_said_what_clashes(given, said):
    with pytest.raises(taut.SolveError) as info:
        project(torch.zeros(3), **given)
    assert "Here " in str(info.value)
    assert said in str(info.value)
    many = project(torch.zeros(2, 3, 3), **given, on_failure="return").report()
    assert "In sample (0, 0) " in many
    assert said in many


def test_what_is_said_is_of_the_sample_named():
    """Another sample of the batch, with rows of its own, is not confused with it."""
    v, G = torch.zeros(2, 3), torch.tensor([SUM, [[1.0, 0.0, 0.0]]])
    found = project(v, G=G, lower=torch.tensor([[1.0], [2.0]]), upper=1.0, on_failure="return")
    assert "In sample 1 the lower side of row 0 of G, 2, is above" in found.report()
    found = project(v, G=G, lower=1.5, activation="sigmoid", on_failure="return")
    assert (
        "In sample 1 row 0 of G asks for at least 1.5; with 'sigmoid' it can be" in found.report()
    )


def test_held_outputs_are_named():
    v = torch.tensor([[0.0, 0.0, 0.0], [0.0, -INF, 0.0]])
    A, b = torch.tensor([[0.0, 1.0, 0.0]]), torch.tensor([0.1])
    held = "Proven beside output 1, which is held at"
    for sides, end in (({}, "an end"), ({"upper": 2.0}, "a bound or an end")):
        found = project(v, A, b, **sides, activation="exp", on_failure="return")
        assert found.status.tolist() == [0, 2]
        assert "In sample 1 equation 0 asks for 0.1;" in found.report()
        assert f"{held} {end} of the range: v is infinite there." in found.report()


def test_sides_that_ask_for_infinity_are_named():
    v = torch.zeros(2, 3)
    found = project(v, lower=torch.tensor([0.0, INF, 0.0]), on_failure="return")
    assert "Not finite: 2 of the 6 entries of lower" in found.report()
    found = project(v, G=torch.eye(3), upper=-INF, on_failure="return")
    assert "Not finite: 6 of the 6 entries of b and upper" in found.report()


def least_or_most(activation, matrices, sides, names, row, sign):
    """sign·max{sign·row z} over what the sentence names."""
    end = tuple(x.item() if x.isfinite() else None for x in activation.range.bounds(row))
    ends = [end if "the range" in names else (None, None)] * len(row)
    rows, limits, equal, goal = [], [], [], []
    A, b = matrices["A"], sides["b"]
    for i in numbers(re.search(r"equations? ([\d, and]+)", names)):
        equal.append(A[i].tolist())
        goal.append(b[i].item())
    for i in numbers(re.search(r"rows? ([\d, and]+) of G", names)):
        for side, turn in ((sides["upper"][i], 1), (sides["lower"][i], -1)):
            if side.isfinite():
                rows.append((turn * matrices["G"][i]).tolist())
                limits.append(turn * side.item())
    found = linprog(
        (-sign * row).tolist(),
        rows or None,
        limits or None,
        equal or None,
        goal or None,
        ends,
        method="highs",
    )
    assert found.status in (0, 2), names
    return -sign * INF if found.status == 2 else -sign * found.fun  # 2: they leave nothing at all


def numbers(match):
    return [] if match is None else [int(x) for x in re.findall(r"\d+", match.group(1))]


@pytest.mark.parametrize("name", ["linear", "exp", "sigmoid", "tanh"])
def test_what_is_said_is_true(name):
    """What the others leave is no more than a linear program finds, and less than is asked."""
    source, activation = generator(50), taut.activations.resolve(name)
    told = 0
    for _ in range(30):
        G, A = torch.randn(6, 3, generator=source), torch.randn(1, 3, generator=source)
        y = activation.sigma(torch.randn(3, generator=source))
        lower = apply(G, y) + 2 * y.std() * torch.randn(6, generator=source)
        upper = (lower + 0.2).where(torch.arange(6) < 3, INF)
        sides = {"b": apply(A, y), "lower": lower, "upper": upper}
        found = project(
            torch.zeros(3), A, **sides, G=G, activation=name, on_failure="return"
        ).report()
        match = re.search(
            r"Here (row|equation) (\d+)(?: of G)? asks for (?:at \w+ )?(\S+); (.*) leaves? "
            r"at (most|least) (\S+)\.$",
            found,
        )
        if match is None:
            continue
        told += 1
        what, i, asked, names, limit, left = match.groups()
        sign = 1 if limit == "most" else -1
        row = (G if what == "row" else A)[int(i)]
        true = least_or_most(activation, {"A": A, "G": G}, sides, names, row, sign)
        assert sign * float(left) < sign * float(asked)
        assert sign * (true - float(left)) <= 1e-5 * (1 + abs(true))
    assert told > 5


def test_unlike_samples_of_a_verdict_are_told_apart():
    """However many have the same cause, the others are named; what is said of several, once."""
    A, high = torch.tensor([[1.0, 1.0, 1.0], [1.0, 0.0, 0.0]]), torch.inf
    asked, v = torch.tensor([1.0, 0.3]).repeat(100, 1), torch.zeros(100, 3)
    asked[:10, 0], asked[50, 0], asked[60, 0], v[60, 2] = 4.0, -1.0, 0.9, high
    asked[70] = torch.tensor([0.2, 0.9])
    said = project(v, A, asked, activation="sigmoid", on_failure="return").report()
    for sentence in (
        "In sample 0 equation 0 asks for 4; with 'sigmoid' it can be between 0 and 3 only.",
        "In sample 50 equation 0 asks for -1; with 'sigmoid' it can be between 0 and 3 only.",
        "In sample 60 equation 0 asks for 0.9; with 'sigmoid' it can be between 1 and 3 only.",
        "In sample 70 equation",
    ):
        assert said.count(sentence) == 1
    assert said.count("In sample") == 4
    v, asked = v.unflatten(0, (50, 2)), asked.unflatten(0, (50, 2))
    said = project(v, A, asked, activation="sigmoid", on_failure="return").report()
    assert "In sample (25, 0) equation 0 asks for -1" in said


def test_rows_with_one_entry_are_read_as_bounds():
    """As on the page about choosing: bounds on z beside other rows are rows of the identity."""
    v, A, caps = torch.zeros(4), torch.ones(1, 4), dict(lower=0.0, upper=0.2)
    for G in (torch.eye(4), torch.cat([torch.eye(4), torch.rand(2, 4)])):
        said = project(v, A, torch.ones(1), G=G, **caps, on_failure="return").report()
        assert "equation 0 asks for 1; between its bounds it can be between 0 and 0.8 only." in said
    G = -2 * torch.eye(4)  # z between -0.1 and 0
    said = project(v, A, torch.ones(1), G=G, **caps, on_failure="return").report()
    assert "equation 0 asks for 1; between its bounds it can be between -0.4 and 0 only." in said


def report(v, A=None, b=None, **options):
    """Of one sample, in float64."""
    v, A, b = (None if x is None else torch.tensor(x, dtype=torch.float64) for x in (v, A, b))
    for name in ("G", "lower", "upper"):
        if isinstance(options.get(name), list):
            options[name] = torch.tensor(options[name], dtype=torch.float64)
    return project(v, A, b, **options, on_failure="return").report()


ZEROS, ONES = [0.0] * 3, [[1.0] * 3]


def test_one_row_is_never_several():
    """However little it asks too much; and with zeros only it can be 0."""
    said = report(ZEROS, ONES, [3 * (1 + 1e-10)], activation="sigmoid")
    assert "equation 0 asks for 3.0000000003; with 'sigmoid' it can be between 0 and 3 only" in said
    said = report(ZEROS, G=[ZEROS], lower=1.0, activation="sigmoid")
    assert "row 0 of G asks for at least 1; with 'sigmoid' it can be 0 only." in said


@pytest.mark.parametrize("G", [[ZEROS], ONES], ids=["zeros", "ones"])
def test_rows_of_G_are_no_equations(G):
    said = report(ZEROS, 2 * ONES, [1.0, 2.0], G=G, upper=100.0)
    assert "equation 1 asks for 2; equation 0 makes it 1." in said


def test_numbers_have_the_digits_that_tell_them_apart():
    said = report(ZEROS, ONES, [3000000.5], activation=bounded(0.0, 1e6))
    assert "equation 0 asks for 3000000.5; with 'bounded' it can be between 0 and 3000000" in said
    said = report(ZEROS, G=ONES, lower=2.0, upper=2 - 1e-9)
    assert "the lower side of row 0 of G, 2, is above its upper one, 1.999999999." in said


def test_an_output_that_v_holds_has_no_bound():
    chain = [[1.0, 1.0, 1.0, 0.0], [0.0, 1.0, 1.0, 1.0]]
    said = report([-INF, 0.0, 0.0, 0.0], chain, [0.9, 0.1], activation="exp")
    assert "equation 0, the place of output 0 and the range of 'exp' leave at least 0.9." in said
    said = report(ZEROS, [[1.0, 1.0, 0.0]], [5.0], lower=[-INF, -INF, 0.2], activation="sigmoid")
    assert "with 'sigmoid' it can be between 0 and 2 only" in said  # not between its bounds


def test_a_proof_with_a_radius_says_so():
    """z = (−1.5e10, 1.5e10) would do."""
    said = report([0.0, 0.0], G=[[1.0, 1.0], [1.0, 1 + 1e-10]], lower=[-INF, 1], upper=[0, INF])
    assert "The proof holds for |z| up to 1.0e+10 only, the radius of is_certificate." in said
    assert "The proof" not in report(ZEROS, ONES, [4.0], activation="sigmoid")


def test_the_proof_beside_h_is_that_of_the_equations():
    v, A, b = torch.zeros(2, 3), torch.tensor(ONES), torch.tensor([[4.0], [5.0]])
    found = project(v, A, b, h=lambda z: z[:, :1] - 0.2, activation="sigmoid", on_failure="return")
    said = found.report()
    assert said.count("A z = b alone has none: multipliers[…, :1] prove it. In sample 0 eq") == 1
    assert taut.is_certificate(found.multipliers[:, :1], A, b, "sigmoid").all()
