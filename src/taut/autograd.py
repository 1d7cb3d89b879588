"""torch's private names, each once: what torch.func does to tensors, and cheap autograd calls."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from operator import attrgetter
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch._C._dynamo import eval_frame  # pyright: ignore
from torch._functorch.utils import enable_single_level_autograd_function
from torch.autograd import Function, forward_ad
from torch.autograd.graph import saved_tensors_hooks

_REQUIRES_GRAD = attrgetter("requires_grad")


def _always() -> bool:
    return True


#: Is a transform of torch.func (vmap, grad, jvp) under way? There is no public name for this.
#: Where torch has lost it, `is_transformed` of every tensor says the same, more slowly.
transforming: Callable[[], bool] = getattr(torch._C, "_are_functorch_transforms_active", _always)

#: Is torch.jit.trace at work, or the torch.onnx that is built on it?
recording: Callable[[], bool] = getattr(torch._C, "_is_tracing", torch.jit.is_tracing)


def check_recorded() -> None:
    """Refuse torch.onnx and torch.jit.trace: they would keep the numbers of one call."""
    if torch.jit.is_tracing() or _in_onnx():
        _refuse(
            "torch.onnx and torch.jit.trace cannot follow a solve, a loss or a memory of solves, "
            "and would write the numbers of this one input into the file as a constant. Use "
            "torch.export.export and torch.export.save, and `import taut` where the file is "
            "loaded; or export the network without its Projection, and call taut.project on its "
            "output."
        )


def check_followed() -> None:
    """The same for what begins with a look at numbers, and what compiled code may call."""
    if not torch.compiler.is_compiling() and recording():
        check_recorded()


def _in_onnx() -> bool:
    return torch.onnx.is_in_onnx_export()


def _refuse(sentence: str) -> None:
    raise NotImplementedError(sentence)


# As by torch.compiler.assume_constant_result, which would load the whole compiler: called while
# a graph is made, not read. Of an error it reads a compiler says that there is one, and no more.
for _called in (_in_onnx, _refuse):
    vars(_called)["_dynamo_marked_constant"] = True


def is_transformed(x: Any) -> bool:
    """Is x seen through torch.func, so that its numbers cannot be looked at?

    >>> is_transformed(torch.zeros(1))
    False
    """
    functorch = torch._C._functorch  # pyright: ignore
    return isinstance(x, Tensor) and (
        functorch.is_functorch_wrapped_tensor(x) or functorch.is_legacy_batchedtensor(x)
    )


def unseen(*matrices: Tensor | None) -> bool:
    """Is one of them seen through torch.func? One that torch.func cannot even hold is refused."""
    for x in matrices:
        if x is not None and x.layout is not torch.strided and not _held(x):
            instead = "to_dense" if x.layout is torch.sparse_coo else "to_sparse_coo"
            raise NotImplementedError(
                f"derivatives of torch.func cannot read a matrix in {x.layout}: pass "
                f"A.{instead}(), or prepare A before, taut.prepare(A, activation)."
            )
    return any(is_transformed(x) for x in matrices)


def _held(x: Tensor) -> bool:
    """Can torch.func hold this sparse x? torch 2.6 takes one by coordinates for a dense one."""
    try:
        return x.detach().layout is x.layout
    except RuntimeError:
        return False


def is_followed(x: Tensor) -> bool:
    """Is x mapped by vmap, or are derivatives taken in it, at any level of torch.func or none?

    What is made of plain tensors inside a transform is wrapped too, and yet plain.

    >>> is_followed(torch.zeros(1)), is_followed(torch.zeros(1, requires_grad=True))
    (False, True)
    """
    functorch = torch._C._functorch  # pyright: ignore
    while True:
        if x.requires_grad or functorch.is_batchedtensor(x) or is_dual(x):
            return True
        if not functorch.is_functorch_wrapped_tensor(x):
            return False
        x = functorch.get_unwrapped(x)


def is_dual(x: Tensor) -> bool:
    """Has x a tangent of forward-mode differentiation? A dual tensor has no `requires_grad`.

    >>> is_dual(torch.zeros(1))
    False
    """
    return forward_mode() and forward_ad.unpack_dual(x).tangent is not None


def forward_mode() -> bool:
    """Is forward-mode differentiation under way?

    >>> forward_mode()
    False
    """
    return forward_ad._current_level >= 0


def differentiable(inputs: tuple[Tensor, ...]) -> bool:
    """Does somebody ask for derivatives in one of these, in reverse or forward mode?

    >>> differentiable((torch.zeros(1), torch.zeros(1, requires_grad=True)))
    True
    """
    if torch.is_grad_enabled() and any(map(_REQUIRES_GRAD, inputs)):
        return True
    return forward_ad._current_level >= 0 and any(map(is_dual, inputs))


def direct(function: type[Function]) -> Callable[..., Any]:
    """`function.apply` for tensors that no transform has seen and no compiler follows.

    The public one binds a signature to its arguments for torch.func, which takes longer than a
    small solve.
    """
    return super(Function, function).apply  # pyright: ignore


def apply(function: type[Function], *args: Any) -> Any:
    """`function.apply(*args)`, `direct` where that will do."""
    if transforming() or any(map(is_transformed, args)):
        return function.apply(*args)
    return direct(function)(*args)


def differentiated(op: Callable[..., Any], setup: Any, backward: Any) -> Callable[..., Any]:
    """What autograd does with an `op`: `setup(ctx, inputs, output)` and `backward(ctx, *grads)`.

    `torch.library.register_autograd` does not follow torch.func, and drops tangents in silence.
    """

    def below(*args: Any) -> Any:
        with torch._C._AutoDispatchBelowAutograd():  # pyright: ignore
            return op(*args)

    def forward(ctx: Any, *args: Any) -> Any:
        found = below(*args)
        if setup is not None:
            setup(ctx, args, found)
        return tuple(found) if isinstance(found, list) else found

    def refuse(ctx: Any, *_: Any) -> Any:
        raise RuntimeError(
            "compiled code has first derivatives only, and no forward mode: call the function "
            "itself, without torch.compile or torch.export."
        )

    methods = {"forward": forward, "backward": backward or refuse, "jvp": refuse}
    made = type("Op", (Function,), {name: staticmethod(f) for name, f in methods.items()})

    def kernel(*args: Any) -> Any:
        asked = torch.is_grad_enabled() and any(getattr(x, "requires_grad", False) for x in args)
        if not (asked or forward_mode()):
            return op(*args)
        if not transforming():
            return direct(made)(*args)
        with enable_single_level_autograd_function():  # torch.func calls one level at a time
            return direct(made)(*args)

    return kernel


def apply_mapped(function: type[Function], *args: Any) -> Any:
    """`apply`; also under `is_grads_batched`, whose older vmap does not ask for rules itself."""
    old = torch._C._functorch.is_legacy_batchedtensor  # pyright: ignore
    mapped = [isinstance(x, Tensor) and old(x) for x in args]
    if not any(mapped):
        return apply(function, *args)
    level = torch._C._vmapmode_increment_nesting() - 1  # pyright: ignore
    torch._C._vmapmode_decrement_nesting()  # pyright: ignore
    flat = [
        torch._remove_batch_dim(x, level, 1, 0) if own else x  # pyright: ignore
        for x, own in zip(args, mapped, strict=True)
    ]
    info = SimpleNamespace(batch_size=flat[mapped.index(True)].shape[0])
    found, _ = function.vmap(info, tuple(0 if own else None for own in mapped), *flat)
    return tuple(torch._add_batch_dim(x, 0, level) for x in found)  # pyright: ignore


def exporting() -> bool:
    """Is torch.export at work?

    >>> exporting()
    False
    """
    if hasattr(torch.compiler, "is_exporting"):
        return torch.compiler.is_exporting()
    from torch.export import _trace  # torch 2.6 has no public name for it, nor loads this of itself

    return _trace._EXPORT_FLAGS is not None


def uncompiled(function: Callable[..., Any], reason: str) -> Callable[..., Any]:
    """`function`, run as it is between two graphs of torch.compile; torch.export has no between."""
    if exporting():
        _refuse(f"this solve cannot be exported: {reason}")
    # Not a decorator: it loads the whole compiler, which nobody needs before one is at work.
    return torch.compiler.disable(function)


def followed() -> bool:
    """Does torch.compile look at each function that is called from here?

    It does so between its graphs too, where `torch.compiler.is_compiling()` says no.

    >>> followed()
    False
    """
    # In this order: this very function may be looked at.
    return torch.compiler.is_compiling() or eval_frame.get_eval_frame_callback() is not None


def outside_inference() -> AbstractContextManager[Any]:
    """Turns inference mode off, where it is on: nothing can be differentiated in it.

    Not elsewhere: `torch.inference_mode(False)` makes transforms of torch.func blind.
    """
    if torch.is_inference_mode_enabled():
        return torch.inference_mode(False)
    return nullcontext()


#: The hooks that saved tensors go through here, or None.
_hooks: Callable[[bool], Any] = getattr(
    torch._C._autograd,  # pyright: ignore
    "_top_saved_tensors_default_hooks",
    lambda _: True,
)


def without_hooks() -> AbstractContextManager[Any]:
    """No hooks of the caller on tensors that are saved inside.

    torch.utils.checkpoint has them: it would run the caller's function again, solve and all, for
    each derivative of h in a solve.
    """
    if _hooks(True) is None:
        return nullcontext()
    return saved_tensors_hooks(_same, _same)


def _same(x: Any) -> Any:
    return x


def is_zero(x: Tensor) -> bool:
    """Is x one of torch's zeros without memory, as a derivative can be? They cannot be written to.

    >>> is_zero(torch.zeros(1))
    False
    """
    return x._is_zerotensor()


def lead(x: Tensor, dim: int | None, size: int) -> Tensor:
    """x with the mapped dimension of vmap in front, repeated where x is not mapped.

    >>> lead(torch.zeros(2), None, 3).shape
    torch.Size([3, 2])
    """
    return x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)
