"""What a solve asks of a device: operations, and reads by the host, which wait for all of them.

    python benchmarks/device.py

Without a device it counts on the CPU what a device would be asked for. With one (CUDA, MPS, XPU) it
also measures. Send its output back with the name of the device: no GPU has seen this code yet.
"""

import time
from collections import Counter

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import taut
from taut.solvers import base

READS = ("_local_scalar_dense", "nonzero", "equal", "masked_select", "_unique2")  # and `base.look`
K, I, N = 64, 8, 256


class Count(TorchDispatchMode):
    """Operations and reads of everything called within."""

    def __init__(self) -> None:
        super().__init__()
        self.operations, self.reads = 0, Counter()
        self.look = base.look

    def __enter__(self):
        def look(*numbers):  # on the CPU it is no operation
            self.reads["look"] += 1
            return self.look(*numbers)

        base.look = look
        return super().__enter__()

    def __exit__(self, *error) -> None:
        base.look = self.look
        super().__exit__(*error)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.operations += 1
        name = func.name().removeprefix("aten::").split(".")[0]
        masks = name == "index" and any(x is not None and x.dtype == torch.bool for x in args[1])
        if name in READS or masks:
            self.reads[name] += 1
        return func(*args, **(kwargs or {}))


def given(activation: str, device: torch.device, dtype: torch.dtype):
    source = torch.Generator().manual_seed(0)

    def randn(*shape):
        return torch.randn(*shape, generator=source).to(device, dtype)

    A, v = randn(I, K), randn(N, K)
    return v, A, taut.activations.resolve(activation).sigma(randn(N, K)) @ A.T


def devices() -> list[torch.device]:
    names = [
        n
        for n in ("cuda", "mps", "xpu")
        if getattr(torch, n, None) and getattr(torch, n).is_available()
    ]
    return [torch.device(name) for name in names]


def main() -> None:
    base.on_host = lambda x: False  # as on a device
    for device in devices() or [torch.device("cpu")]:
        dtype = torch.float32 if device.type == "mps" else torch.float64
        solver = taut.Newton(dtype=dtype)
        for activation in ("sigmoid", "exp"):
            v, A, b = given(activation, device, dtype)
            v.requires_grad_()
            prepared = taut.prepare(A, activation)
            object.__setattr__(prepared, "backend", taut.backends.Torch())  # as on a device

            def solve(v=v, prepared=prepared, b=b, solver=solver):
                return taut.project(v, prepared, b, solver=solver, on_failure="return")

            solution = solve()
            with Count() as forward:
                solution = solve()
            with Count() as backward:
                solution.z.square().sum().backward()
            print(f"{device.type} {activation} ({K}, {I}), N = {N}, {solution}")
            iterations, reads = int(solution.iterations.max()), sum(forward.reads.values())
            print(
                f"  {iterations} iterations, {forward.operations} operations, {reads} reads", end=""
            )
            reads = sum(backward.reads.values())
            print(f" {dict(forward.reads)}; backward {backward.operations} and {reads}")
            if device.type != "cpu":
                times = []
                for _ in range(20):
                    start = time.perf_counter()
                    solve().z.square().sum().backward()
                    getattr(torch, device.type).synchronize()
                    times.append(time.perf_counter() - start)
                print(f"  {1e3 * min(times):.2f} ms, forward and backward")


if __name__ == "__main__":
    main()
