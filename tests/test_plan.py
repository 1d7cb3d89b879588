"""Which plans the kernel takes, and how it holds A."""

import torch
from torch.testing import assert_close

import taut
from taut.activations import sigmoid
from taut.analysis import analyse
from taut.backends import Cpu, cpu, plan

CHAIN = (torch.eye(9, 10) + torch.eye(9, 10).roll(1, dims=1)).double()


def test_the_limit_is_that_of_the_variant(monkeypatch):
    monkeypatch.setattr(cpu, "_library", "any")
    monkeypatch.setattr(cpu, "_MOST", {"v2": 8, "v3": 9})
    for variant, taken in ("v2", False), ("v3", True):
        monkeypatch.setattr(cpu, "_variant", variant)
        assert Cpu.suits(analyse(CHAIN, 1e-16)) == taken


def test_lists_of_non_zeros_are_made_only_where_they_are_short(monkeypatch):
    """They are as long as there are products of two non-zeros in one output: 8·4 + 2 here."""
    v, b = torch.randn(5, 10), torch.sigmoid(torch.randn(5, 10)) @ CHAIN.T
    found = []
    for most, listed in (34, True), (33, False):
        monkeypatch.setattr(plan, "_MAX_PRODUCTS", most)
        assert ("row_start" in plan.make_plan(analyse(CHAIN, 1e-16), sigmoid).arrays) == listed
        found.append(taut.Projection(CHAIN, activation="sigmoid")(v, b))
    assert_close(*found, rtol=0, atol=1e-13)
