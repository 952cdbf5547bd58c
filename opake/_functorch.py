"""``Function.apply`` under functorch, without what makes torch's own slow.

torch sends an autograd function through a higher-order operator that flattens pytrees at every
level and makes a new class for every call: half a millisecond a call, more than most kernels take.
Here the same steps run for functions whose arguments and outputs are flat, and whose classes live
for ever. Forward mode is left to torch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch._C import _functorch as functorch
from torch._functorch.autograd_function import VmapInfo
from torch._functorch.utils import enable_single_level_autograd_function
from torch.autograd import Function, forward_ad
from torch.autograd.forward_ad import _set_fwd_grad_enabled
from torch.autograd.function import _SingleLevelFunction

SYMBOLS = tuple(
    ("torch._C", f"_functorch.{name}", ())
    for name in (
        "CGradInterpreterPtr",
        "CVmapInterpreterPtr",
        "RandomnessType.Different",
        "TransformType.Grad",
        "TransformType.Vmap",
        "_add_batch_dim",
        "_unwrap_batched",
        "_unwrap_for_grad",
        "_wrap_for_grad",
        "peek_interpreter_stack",
        "pop_dynamic_layer_stack",
        "push_dynamic_layer_stack",
        "unwrap_if_dead",
    )
)

_RANDOMNESS = {
    functorch.RandomnessType.Error: "error",
    functorch.RandomnessType.Same: "same",
    functorch.RandomnessType.Different: "different",
}


def apply(function: type[Function], *args: Any) -> Any:
    """Return ``function.apply(*args)``.

    Args:
        function: an autograd function with ``setup_context`` and a ``vmap`` rule, of a module's
            top level.
        *args: all that its ``forward`` takes, tensors or not; no tensors inside of containers. Its
            output is a tensor, or a flat tuple of tensors and others.
    """
    if torch.compiler.is_compiling():
        return function.apply(*args)  # type: ignore[no-untyped-call]
    top = functorch.peek_interpreter_stack()
    if top is None:
        return _plainly(function, _all_alive(args))
    kind = top.key()
    if kind == functorch.TransformType.Grad:
        return _through_grad(function, top, _all_alive(args))
    if kind == functorch.TransformType.Vmap:
        return _through_vmap(function, top, _all_alive(args))
    return function.apply(*args)  # type: ignore[no-untyped-call]


def alive(x: Tensor) -> Tensor:
    """Return the tensor itself where the level that wrapped it has ended."""
    return functorch.unwrap_if_dead(x)


def in_front(x: Tensor, dim: int | None, size: int, of: int = 0) -> Tensor:
    """Return ``x`` with its mapped dimension in front, lazily repeated where it has none.

    In front ``of`` all dimensions, or of those from that one on.
    """
    if dim is None:
        shape = x.shape
        return x.unsqueeze(of).expand(*shape[:of], size, *shape[of:])
    return x if dim == of else x.movedim(dim, of)  # a view costs more than to ask


def _all_alive(args: Sequence[Any]) -> list[Any]:
    return [alive(x) if isinstance(x, Tensor) else x for x in args]


def _recorded(args: Sequence[Any]) -> bool:
    return torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in args)


def _plainly(function: type[Function], args: list[Any]) -> Any:
    """Apply outside of every transform; torch's own ``apply`` binds its signature at every call."""
    if _recorded(args) or forward_ad._current_level >= 0:
        return super(Function, function).apply(*args)  # type: ignore[misc]
    return function.forward(*args)


def _beneath(call: Callable[..., Any], *args: Any) -> Any:
    """Call without the innermost transform."""
    top = functorch.pop_dynamic_layer_stack()
    try:
        return call(*args)
    finally:
        functorch.push_dynamic_layer_stack(top)


def _through_grad(function: type[Function], top: Any, args: list[Any]) -> Any:
    level = functorch.CGradInterpreterPtr(top)
    args = [level.lift(x) if isinstance(x, Tensor) else x for x in args]
    if not _recorded(args):
        return _lowered(function, args)
    with enable_single_level_autograd_function():
        return _single_level(function).apply(*args)


@functools.cache
def _single_level(function: type[Function]) -> Any:
    """Return ``function`` for the one level of gradients that is innermost when it is applied."""

    def forward(*args: Any) -> Any:
        # Recording is off for this level alone.
        with torch.enable_grad(), _set_fwd_grad_enabled(True):
            return _lowered(function, args)

    methods = {
        "forward": staticmethod(forward),
        "setup_context": staticmethod(function.setup_context),
        "backward": staticmethod(function.backward),
    }
    return type(f"{function.__name__}Generated", (_SingleLevelFunction,), methods)


def _lowered(function: type[Function], args: Sequence[Any]) -> Any:
    """Apply beneath the innermost level of gradients, and wrap the outputs for it."""
    top = functorch.peek_interpreter_stack()  # held: what follows is a pointer into it
    level: Any = functorch.CGradInterpreterPtr(top)
    depth = level.level()
    inner = [functorch._unwrap_for_grad(x, depth) if isinstance(x, Tensor) else x for x in args]
    # The next level has the grad mode in which this one was entered, as in torch.
    with nullcontext() if level.prevGradMode() else torch.no_grad():
        output = _beneath(apply, function, *inner)
    return _map(output, lambda x: functorch._wrap_for_grad(x, depth))


def _through_vmap(function: type[Function], top: Any, args: list[Any]) -> Any:
    level = functorch.CVmapInterpreterPtr(top)
    depth = level.level()
    pairs = [
        functorch._unwrap_batched(x, depth) if isinstance(x, Tensor) else (x, None) for x in args
    ]
    dims = tuple(dim for _, dim in pairs)
    if all(dim is None for dim in dims):
        return _beneath(apply, function, *args)
    info = VmapInfo(level.batchSize(), _RANDOMNESS[level.randomness()])
    output, out_dims = _beneath(function.vmap, info, dims, *(x for x, _ in pairs))

    def wrapped(x: Tensor, dim: int | None) -> Tensor:
        return x if dim is None else functorch._add_batch_dim(x, dim, depth)

    if isinstance(output, Tensor):
        return wrapped(output, out_dims)
    if not isinstance(out_dims, tuple):
        out_dims = (out_dims,) * len(output)
    return tuple(
        wrapped(x, dim) if isinstance(x, Tensor) else x
        for x, dim in zip(output, out_dims, strict=True)
    )


def _map(output: Any, wrap: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(output, Tensor):
        return wrap(output)
    return tuple(wrap(x) if isinstance(x, Tensor) else x for x in output)
