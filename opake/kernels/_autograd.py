"""Making a kernel differentiable: autograd, every functorch transform, second order."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import peek_interpreter_stack
from torch.autograd import Function, forward_ad
from torch.func import vjp, vmap

from opake._functorch import alive, apply, in_front
from opake.kernels._guard import launchable
from opake.kernels._op import record

__all__ = ["Core", "Gradients", "fused_function", "transformed"]

Gradients = tuple[Tensor | None, ...]
Tensors = tuple[Tensor | None, ...]


@dataclass(frozen=True)
class Core:
    """A part of an operator that gives all its outputs from fewer, or other, tensors.

    Attributes:
        tensors: ``tensors(inputs, outputs)``: what is saved and differentiated.
        reference: ``reference(options, *tensors)``, the operator's outputs in plain PyTorch.
        wanted: ``wanted(wanted)``: of which of the tensors the gradient is needed.
        gradients: ``gradients(wanted, found, dtypes)``: those of the inputs from those.
    """

    tensors: Callable[[Any, Any], Tensors]
    reference: Callable[..., Any]
    wanted: Callable[[Any], tuple[bool, ...]]
    gradients: Callable[[Any, Any, Any], Gradients]


def fused_function(
    name: str,
    reference: Callable[..., Any],
    fwd: Callable[..., tuple[Any, ...]],
    bwd: Callable[..., Gradients],
    *,
    outputs: int = 1,
    saved: int = 0,
    rows: Sequence[int] = (),
    core: Core | None = None,
    keeps: Callable[[Any, tuple[bool, ...]], Sequence[bool]] | None = None,
    backend: str = "triton",
) -> Callable[..., Any]:
    """Return ``fused(options, *tensors)``, right under autograd and every functorch transform.

    Mapped dimensions come to the kernels as ``batch`` leading dimensions, of one size in all
    tensors (with stride 0 in those that are not mapped), and every result has them too. Where
    forward mode or a second derivative is asked for, or no kernel may read the tensors, plain
    PyTorch computes it.

    Args:
        name: of the operator, and of the autograd nodes.
        reference: ``reference(options, *tensors)`` for one example, in plain PyTorch: a tensor, or
            a tuple of ``outputs``.
        fwd: ``fwd(batch, options, *tensors)``, by kernel: the outputs, then ``saved`` tensors for
            the backward pass, which have no gradients.
        bwd: ``bwd(batch, options, wanted, grads, tensors, saved)``, by kernel: a gradient for every
            tensor that is wanted, of its shape and dtype, else None; what it leaves out is computed
            by plain PyTorch. A None among ``grads``, one for each output, stands for zeros.
        outputs: how many there are; one comes back as a tensor, more as a tuple.
        saved: how many tensors the backward pass needs beside its inputs.
        rows: positions of tensors whose leading dimensions are all computed alike. Where nothing
            else is mapped, mapped dimensions are more of those, not ``batch``.
        core: what the backward pass differentiates, where that is not the inputs.
        keeps: ``keeps(options, wanted)``: for every tensor, then for every saved one, whether the
            gradients that are wanted, or derivatives of those, need more than its shape and dtype.
            The memory of others is not kept, and what is in them is not to be read.
        backend: what ``fwd`` and ``bwd`` are recorded as.
    """
    simple = core.reference if core else reference
    several = outputs + saved > 1

    def launches(tensors: Sequence[Any]) -> bool:
        can = launchable(tensors)
        record(name, backend if can else "reference")
        return can

    class Backward(Function):
        @staticmethod
        def forward(batch: int, options: Any, wanted: tuple[bool, ...], *flat: Any) -> Gradients:
            grads, tensors, kept = _split(flat)
            if (saved and kept[0] is None) or not launches(flat):
                record(name, "reference")
                return _by_reference(simple, batch, options, wanted, grads, tensors)
            found = bwd(batch, options, wanted, grads, tensors, kept)
            missing = [want and g is None for want, g in zip(wanted, found, strict=True)]
            if True not in missing:
                return found
            others = _by_reference(simple, batch, options, missing, grads, tensors)
            return tuple(b if a is None else a for a, b in zip(found, others, strict=True))

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Gradients) -> None:
            ctx.static = inputs[:3]
            ctx.save_for_backward(*inputs[3:])

        @staticmethod
        def backward(ctx: Any, *cotangents: Tensor | None) -> Any:
            batch, options, wanted = ctx.static
            grads, tensors, kept = _split(ctx.saved_tensors)
            call = functools.partial(_by_reference, simple, batch, options, wanted)
            asked = [c for c, want in zip(cotangents, wanted, strict=True) if want]
            found = _double_backward(call, grads, tensors, asked)
            return (None, None, None, *found, *(None for _ in kept))

        @staticmethod
        def vmap(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> Any:
            batch, options, wanted, *flat = args
            flat = _all_in_front(info.batch_size, in_dims[3:], flat)
            found = apply(Backward, batch + 1, options, wanted, *flat)
            return found, tuple(None if x is None else 0 for x in found)

    class Forward(Function):
        @staticmethod
        def forward(batch: int, options: Any, *tensors: Any) -> Any:
            if launches(tensors):
                found = fwd(batch, options, *tensors)
                return found if several else found[0]
            out = _over_examples(reference, batch, options, tensors)(*tensors)
            out = out if outputs > 1 else (out,)
            return (*out, *(None for _ in range(saved))) if several else out[0]

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
            ctx.static = inputs[:2]
            if several:
                ctx.set_materialize_grads(False)
            tensors = inputs[2:]
            if core:
                ctx.dtypes = tuple(None if x is None else x.dtype for x in tensors)
                tensors = core.tensors(tensors, output)
            if saved:
                kept = output[outputs:]
                ctx.mark_non_differentiable(*(x for x in kept if x is not None))
                tensors = (*tensors, *kept)
            if keeps:
                wanted = tuple([x is not None and x.requires_grad for x in inputs[2:]])
                pairs = zip(tensors, keeps(inputs[1], wanted), strict=True)
                tensors = tuple([x if x is None or y else _shell(x) for x, y in pairs])
            ctx.save_for_backward(*tensors)

        @staticmethod
        def backward(ctx: Any, *grads: Tensor | None) -> Any:
            batch, options = ctx.static
            found = ctx.saved_tensors
            wanted, grads = ctx.needs_input_grad[2:], grads[:outputs]
            if grads[0] is None and all(g is None for g in grads):
                return (None, None, *(None for _ in wanted))
            asked = core.wanted(wanted) if core else wanted
            if forward_ad._current_level >= 0:
                record(name, "reference")
                tensors = found[: len(found) - saved]
                pulled = _by_reference(simple, batch, options, asked, grads, tensors)
            elif torch.is_grad_enabled() or transformed():
                pulled = apply(Backward, batch, options, asked, *grads, *found)
            else:  # what that comes to; this thread is often cold, and slow to get there
                pulled = Backward.forward(batch, options, asked, *grads, *found)
            if core:
                pulled = core.gradients(wanted, pulled, ctx.dtypes)
            return (None, None, *pulled)

        @staticmethod
        def vmap(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> Any:
            batch, options, *tensors = args
            dims = in_dims[2:]
            if all(dim is None or i in rows for i, dim in enumerate(dims)):
                # Behind the examples that are mapped further inside, in front of the rows.
                tensors = [
                    in_front(x, dim, info.batch_size, batch) if i in rows and x is not None else x
                    for i, (x, dim) in enumerate(zip(tensors, dims, strict=True))
                ]
                return apply(Forward, batch, options, *tensors), batch
            tensors = _all_in_front(info.batch_size, dims, tensors)
            return apply(Forward, batch + 1, options, *tensors), 0

    def _split(flat: Sequence[Any]) -> tuple[Tensors, Tensors, Tensors]:
        end = len(flat) - saved
        return tuple(flat[:outputs]), tuple(flat[outputs:end]), tuple(flat[end:])

    class Plain(Function):
        """``Forward`` where no transform is active: one call from C++ less, and no more checks."""

        @staticmethod
        def forward(ctx: Any, *args: Any) -> Any:
            found: Any = fwd(*args)
            if not several:
                (found,) = found
            Forward.setup_context(ctx, args, found)
            return found

        backward = Forward.backward

    for cls, suffix in ((Forward, ""), (Plain, ""), (Backward, "Backward")):
        cls.__name__ = cls.__qualname__ = f"{name}{suffix}"
    recorded: Any = super(Function, Plain).apply  # its own binds a signature first

    def fused(options: Any, *tensors: Tensor | None) -> Any:
        if torch.compiler.is_compiling() or transformed() or not launchable(tensors):
            found = apply(Forward, 0, options, *tensors)
        else:
            record(name, backend)
            if torch.is_grad_enabled() and _differentiable(tensors):
                found = recorded(0, options, *tensors)
            else:
                found = fwd(0, options, *tensors)
                found = found if several else found[0]
        if not saved:
            return found
        return found[:outputs] if outputs > 1 else found[0]

    return fused


def transformed() -> bool:
    """Tell whether a functorch transform or forward mode is active."""
    return peek_interpreter_stack() is not None or forward_ad._current_level >= 0


def _shell(x: Tensor) -> Tensor:
    """A tensor of that shape and dtype in the memory of one number."""
    if type(x) in _SHARED and not (
        transformed() or torch.is_inference_mode_enabled() or torch._C._len_torch_dispatch_stack()
    ):
        return _shared_shell(x.shape, x.dtype, x.device)
    return x.new_empty(()).expand(x.shape)


_SHARED = (Tensor, torch.nn.Parameter)


@functools.lru_cache(1024)
def _shared_shell(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.empty((), dtype=dtype, device=device).expand(shape)


def _differentiable(tensors: Sequence[Tensor | None]) -> bool:
    for x in tensors:  # noqa: SIM110  (a generator costs half a microsecond)
        if x is not None and x.requires_grad:
            return True
    return False


def _all_in_front(size: int, in_dims: Sequence[int | None], tensors: Sequence[Any]) -> list[Any]:
    """Move the mapped dimension of every tensor to the front, expanding what is not mapped."""
    pairs = zip(tensors, in_dims, strict=True)
    return [x if x is None else in_front(x, dim, size) for x, dim in pairs]


def _over_examples(
    reference: Callable[..., Any], batch: int, options: Any, tensors: Sequence[Tensor | None]
) -> Callable[..., Any]:
    """The reference, for tensors that have ``batch`` mapped dimensions in front."""
    function: Callable[..., Any] = functools.partial(reference, options)
    for _ in range(batch):
        function = vmap(function, tuple(None if x is None else 0 for x in tensors))
    return function


def _by_reference(
    reference: Callable[..., Any],
    batch: int,
    options: Any,
    wanted: Sequence[bool],
    grads: Sequence[Tensor | None],
    tensors: Sequence[Tensor | None],
) -> Gradients:
    """Return the wanted gradients by plain PyTorch, so that they can be differentiated again."""
    grads, tensors = _alive(grads), _alive(tensors)
    function = _over_examples(reference, batch, options, tensors)

    def of_wanted(*leaves: Tensor) -> Any:
        left = iter(leaves)
        pairs = zip(tensors, wanted, strict=True)
        return function(*(next(left) if want else x for x, want in pairs))

    leaves = [x for x, want in zip(tensors, wanted, strict=True) if want]
    out, pull = vjp(of_wanted, *leaves)  # type: ignore[misc]
    if isinstance(out, tuple):
        full = [torch.zeros_like(x) if g is None else g for x, g in zip(out, grads, strict=True)]
        pulled = iter(pull(tuple(full)))
    else:
        pulled = iter(pull(grads[0]))
    return tuple(next(pulled) if want else None for want in wanted)


def _double_backward(
    call: Callable[..., Gradients],
    grads: Sequence[Tensor | None],
    tensors: Sequence[Tensor | None],
    cotangents: Sequence[Tensor | None],
) -> Gradients:
    """Pull ``cotangents`` of the gradients that ``call(grads, tensors)`` returns back to both."""
    flat = _alive((*grads, *tensors))
    smooth = [x is not None and x.is_floating_point() for x in flat]

    def first_order(*leaves: Tensor) -> tuple[Tensor, ...]:
        left = iter(leaves)
        full = [next(left) if y else x for x, y in zip(flat, smooth, strict=True)]
        found = call(full[: len(grads)], full[len(grads) :])
        return tuple(g for g in found if g is not None)

    leaves = [x for x, y in zip(flat, smooth, strict=True) if y]
    out, pull = vjp(first_order, *leaves)  # type: ignore[misc]
    full = [torch.zeros_like(x) if c is None else c for x, c in zip(out, cotangents, strict=True)]
    pulled = iter(pull(tuple(full)))
    return tuple(next(pulled) if y else None for y in smooth)


def _alive(tensors: Sequence[Tensor | None]) -> list[Any]:
    return [x if x is None else alive(x) for x in tensors]
