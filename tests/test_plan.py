"""Which plans the kernel takes, and how it holds A."""

import torch
from torch.testing import assert_close

import taut
from taut import kernel, plan
from taut.activations import sigmoid
from taut.kernel import Kernel
from taut.rows import analyse

CHAIN = (torch.eye(9, 10) + torch.eye(9, 10).roll(1, dims=1)).double()


def test_too_many_rows_are_left_to_torch():
    rows = analyse(CHAIN, 1e-16)
    assert plan.make_plan(rows, sigmoid, 8) is None
    assert plan.make_plan(rows, sigmoid, 9) is not None


def test_the_limit_is_that_of_the_variant(monkeypatch):
    monkeypatch.setattr(kernel, "_library", "any")
    monkeypatch.setattr(kernel, "_MAX_ROWS", {"v2": 8, "v3": 9})
    for variant, taken in ("v2", False), ("v3", True):
        monkeypatch.setattr(kernel, "_variant", variant)
        assert (Kernel.of(analyse(CHAIN, 1e-16), sigmoid) is not None) == taken


def test_lists_of_non_zeros_are_made_only_where_they_are_short(monkeypatch):
    """They are as long as there are products of two non-zeros in one output: 8·4 + 2 here."""
    v, b = torch.randn(5, 10), torch.sigmoid(torch.randn(5, 10)) @ CHAIN.T
    found = []
    for most, listed in (34, True), (33, False):
        monkeypatch.setattr(plan, "_MAX_PRODUCTS", most)
        assert ("row_start" in plan.make_plan(analyse(CHAIN, 1e-16), sigmoid, 9).arrays) == listed
        found.append(taut.Projection(CHAIN, activation="sigmoid")(v, b))
    assert_close(*found, rtol=0, atol=1e-13)
