"""Making a kernel differentiable: autograd, every functorch transform, second order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.autograd import Function, forward_ad
from torch.func import vjp

from opake._functorch import alive, apply, in_front
from opake.kernels._op import record
from opake.kernels._triton import launchable

__all__ = ["all_in_front", "double_backward", "elementwise_function", "pull_back"]

Gradients = tuple[Tensor | None, ...]


def elementwise_function(
    name: str,
    reference: Callable[..., Tensor],
    fwd: Callable[..., Tensor],
    bwd: Callable[..., Gradients],
) -> Callable[..., Tensor]:
    """Return a differentiable function of tensors whose examples may be computed side by side.

    A mapped dimension becomes one more leading dimension of a single launch. Where forward mode or
    a second derivative is asked for, or no kernel may read the tensors, plain PyTorch computes it.

    Args:
        name: of the operator, and of the autograd nodes.
        reference: the same function in plain PyTorch.
        fwd: ``fwd(*inputs)`` by kernel.
        bwd: ``bwd(grad, *inputs, *wanted)`` by kernel, None where a gradient is not wanted.
    """

    def launches(*tensors: Tensor) -> bool:
        can = launchable(*tensors)
        record(name, "triton" if can else "reference")
        return can

    class Backward(Function):
        @staticmethod
        def forward(*args: Any) -> Gradients:
            count = len(args) // 2 + 1
            grad, *inputs = args[:count]
            if launches(grad, *inputs):
                return bwd(*args)
            return pull_back(reference, grad, inputs, args[count:])

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Gradients) -> None:
            count = len(inputs) // 2 + 1
            ctx.wanted = inputs[count:]
            ctx.save_for_backward(*inputs[:count])

        @staticmethod
        def backward(ctx: Any, *cotangents: Tensor | None) -> Any:
            grad, *inputs = ctx.saved_tensors
            found = double_backward(reference, grad, inputs, ctx.wanted, cotangents)
            return (*found, *(None for _ in inputs))

        @staticmethod
        def vmap(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> Any:
            found = apply(Backward, *all_in_front(info.batch_size, in_dims, *args))
            return found, tuple(None if x is None else 0 for x in found)

    class Forward(Function):
        @staticmethod
        def forward(*inputs: Tensor) -> Tensor:
            return fwd(*inputs) if launches(*inputs) else reference(*inputs)

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            ctx.save_for_backward(*inputs)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Any:
            inputs, wanted = ctx.saved_tensors, ctx.needs_input_grad
            if forward_ad._current_level >= 0:
                record(name, "reference")
                return pull_back(reference, grad, inputs, wanted)
            return apply(Backward, grad, *inputs, *wanted)

        @staticmethod
        def vmap(info: Any, in_dims: tuple[int | None, ...], *inputs: Tensor) -> Any:
            return apply(Forward, *all_in_front(info.batch_size, in_dims, *inputs)), 0

    Forward.__name__ = Forward.__qualname__ = name
    Backward.__name__ = Backward.__qualname__ = f"{name}Backward"

    def fused(*inputs: Tensor) -> Tensor:
        result: Tensor = apply(Forward, *inputs)
        return result

    return fused


def all_in_front(batch_size: int, in_dims: Sequence[int | None], *args: Any) -> list[Any]:
    """Move the mapped dimension of every tensor to the front, expanding what is not mapped."""
    pairs = zip(args, in_dims, strict=True)
    return [in_front(x, dim, batch_size) if isinstance(x, Tensor) else x for x, dim in pairs]


def pull_back(
    reference: Callable[..., Tensor],
    grad: Tensor,
    inputs: Sequence[Tensor],
    wanted: Sequence[bool],
) -> Gradients:
    """Return the wanted gradients by plain PyTorch, so that they can be differentiated again."""
    _, pull = vjp(reference, *map(alive, inputs))  # type: ignore[misc]
    return tuple(g if want else None for g, want in zip(pull(grad), wanted, strict=True))


def double_backward(
    reference: Callable[..., Tensor],
    grad: Tensor,
    inputs: Sequence[Tensor],
    wanted: Sequence[bool],
    cotangents: Sequence[Tensor | None],
) -> Gradients:
    """Pull ``cotangents`` of the wanted gradients back to ``(grad, *inputs)``."""

    def first_order(grad: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
        return tuple(g for g in pull_back(reference, grad, inputs, wanted) if g is not None)

    _, pull = vjp(first_order, alive(grad), *map(alive, inputs))  # type: ignore[misc]
    return tuple(pull(tuple(c for c, want in zip(cotangents, wanted, strict=True) if want)))
