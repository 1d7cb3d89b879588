"""Backends: which one solves, and how fast. `backend_for` is the only dispatch."""

from taut.activations import Activation
from taut.activations.codes import codes
from taut.analysis import Basis
from taut.backends.base import Backend as Backend, Rules as Rules, Torch as Torch
from taut.backends.cpu import Cpu as Cpu, variant
from taut.backends.heavy import pull_stably as pull_stably
from taut.backends.one import EVERY as EVERY, One as One
from taut.backends.training import Step as Step, Trained as Trained, train as train
from taut.backends.within import CpuWithin as CpuWithin
from taut.systems import Known


def available() -> str:
    """Which backend solves on a CPU: "torch", or the variant of the compiled one.

    "cpu v2" is for any processor, "cpu v3" for AVX2, "cpu v4" for AVX-512.

    >>> available() in ("torch", "cpu v2", "cpu v3", "cpu v4")
    True
    """
    return "torch" if variant() is None else f"cpu {variant()}"


def backend_for(basis: Basis, activation: Activation) -> Backend:
    """The fastest backend that knows this A and this σ."""
    if Cpu.suits(basis) and codes(activation, basis.map.shape[1]) is not None:
        return Cpu(basis, activation)
    return Torch()


def backend_within(C: Basis, alone: Known, activation: Activation) -> Backend:
    """The same for inequalities or bounds, with what is known of the equations alone."""
    if CpuWithin.suits(C, alone) and codes(activation, C.map.shape[1]) is not None:
        return CpuWithin(C, alone, activation)
    return Torch()
