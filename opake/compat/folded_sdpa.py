"""Scaled dot product attention that runs once for all examples of a functorch transform.

Functorch takes torch's attention apart, or runs its backward example by example. Here the mapped
dimension is folded into the batch, and torch's own operator runs once, forward and backward, on
whichever backend it chooses for that batch.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch._functorch.pyfunctorch import VmapInterpreter, retrieve_all_functorch_interpreters
from torch.autograd import forward_ad
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks
from torch.nn import functional as F

from opake._functorch import SYMBOLS as FUNCTORCH
from opake._functorch import apply, in_front
from opake.compat.autocast import autocast
from opake.compat.transforms import needs_grad, unwrap
from opake.errors import UnsupportedAttention

_HOOKS = "_autograd._saved_tensors_hooks"

SYMBOLS = (
    *FUNCTORCH,
    ("torch", "_scaled_dot_product_attention_math", ()),
    ("torch._C", f"{_HOOKS}_enable", ()),
    ("torch._C", f"{_HOOKS}_disable", ()),
    ("torch._C", f"{_HOOKS}_get_disabled_error_message", ()),
    ("torch._C", "_functorch.maybe_get_level", ()),
    ("torch._functorch.pyfunctorch", "VmapInterpreter.randomness", ()),
    ("torch._functorch.pyfunctorch", "retrieve_all_functorch_interpreters", ()),
    ("torch.autograd.forward_ad", "_current_level", ()),
)


def folded_sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Run ``F.scaled_dot_product_attention`` under functorch transforms, as one fused call.

    Shapes as there: (B, heads, S, head_dim), and any mask that broadcasts to (B, heads, S, S).
    Forward mode and second order are plain math. Dropout is drawn as vmap's ``randomness`` says:
    ``"different"`` in the fused call, for every row of the folded batch; ``"same"`` in plain math,
    which gives every example what a loop would that is seeded anew before each; ``"error"``
    raises functorch's RuntimeError. A second derivative through a fused dropout raises
    :class:`~opake.errors.UnsupportedAttention`.
    """
    # Under functorch, autocast does not reach SDPA: rotary embedding left q and k in fp32.
    inputs = tuple(None if x is None else autocast(x) for x in (query, key, value, attn_mask))
    needed = tuple(x is not None and needs_grad(x) for x in inputs)
    if any(needed):
        inputs = tuple(None if x is None else _savable(x) for x in inputs)
    call = _Call(dropout_p, is_causal, scale, enable_gqa, needed)
    if forward_ad._current_level >= 0 or (dropout_p > 0 and not _draws_per_example(inputs)):
        return _plain(inputs, call)
    output: Tensor = apply(_Forward, *inputs, call)[0]
    return output


@dataclass(frozen=True)
class _Call:
    """The arguments that are no tensors, and which of the four tensors need a gradient."""

    dropout_p: float
    is_causal: bool
    scale: float | None
    enable_gqa: bool
    needs_grad: tuple[bool, ...]


def _savable(tensor: Tensor) -> Tensor:
    """Return a copy of a tensor that was made in inference mode, which no graph can save."""
    if not unwrap(tensor).is_inference():
        return tensor
    with torch.inference_mode(False):
        return tensor.clone()


def _draws_per_example(inputs: Sequence[Tensor | None]) -> bool:
    """Tell whether the rows of the folded batch are the draws that every ``vmap`` asks for."""
    functorch = torch._C._functorch
    folded = set()
    for tensor in inputs:
        while tensor is not None and functorch.is_functorch_wrapped_tensor(tensor):
            if functorch.is_batchedtensor(tensor):
                folded.add(functorch.maybe_get_level(tensor))
            tensor = functorch.get_unwrapped(tensor)
    levels = [i for i in retrieve_all_functorch_interpreters() if isinstance(i, VmapInterpreter)]
    return all(i.level() in folded and i.randomness() == "different" for i in levels)


# ---- torch's operator, its graph, and plain math


class _Graph:
    """torch's own graph of one call, without the tensors that it needs for its backward.

    Those are kept by the transforms' graphs, which free them as early as they would anything
    else, and let saved-tensor hooks see them.
    """

    def __init__(self, output: GradientEdge, leaves: list[Tensor], slots: list[Tensor]) -> None:
        self._output = output
        self._leaves = leaves
        self._slots = slots
        self._lock = threading.Lock()  # threads may share a pullback

    def backward(self, grad: Tensor, saved: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
        """Return the gradient of every leaf; None where an empty batch left no path to it."""
        with self._lock:
            self._slots[:] = saved
            try:
                return torch.autograd.grad(
                    [self._output], self._leaves, [grad], retain_graph=True, allow_unused=True
                )
            finally:
                self._slots.clear()


@dataclass(frozen=True)
class _State:
    """What one fused call leaves for its backward, out of the transforms' sight."""

    call: _Call
    graph: _Graph | None = None
    saved: tuple[Tensor, ...] = ()


@contextmanager
def _hooks_allowed() -> Iterator[None]:
    """Lift functorch's ban on saved-tensor hooks, for tensors that lie beneath its levels."""
    autograd = torch._C._autograd
    message = autograd._saved_tensors_hooks_get_disabled_error_message()
    autograd._saved_tensors_hooks_enable()
    try:
        yield
    finally:
        if message is not None:
            autograd._saved_tensors_hooks_disable(message)


def _fused(inputs: Sequence[Tensor | None], call: _Call) -> tuple[Tensor, _State]:
    """Run torch's operator on plain tensors."""
    slots: list[Tensor] = []

    def save(tensor: Tensor) -> int:
        slots.append(tensor.detach())
        return len(slots) - 1

    # Records a graph under no_grad, and under inference_mode too.
    with (
        torch.inference_mode(False),
        _hooks_allowed(),
        saved_tensors_hooks(save, slots.__getitem__),
    ):
        pairs = zip(inputs, call.needs_grad, strict=True)
        detached = [None if x is None else _detached(x, needs) for x, needs in pairs]
        output: Tensor = _attend(F.scaled_dot_product_attention, detached, call)
    if not output.requires_grad:
        return output, _State(call)
    leaves = [x for x in detached if x is not None and x.requires_grad]
    state = _State(call, _Graph(get_gradient_edge(output), leaves, slots), tuple(slots))
    slots.clear()
    for leaf in leaves:
        leaf.data = leaf.new_empty(0)  # the graph ends in the leaf; its values are in `saved`
    return output.detach(), state


def _detached(tensor: Tensor, needs_grad: bool) -> Tensor:
    if needs_grad and tensor.is_inference():  # such a tensor can be part of no graph
        tensor = tensor.clone()
    return tensor.detach().requires_grad_(needs_grad)


def _attend(operator: Any, inputs: Sequence[Tensor | None], call: _Call) -> Any:
    options = {"scale": call.scale, "enable_gqa": call.enable_gqa}
    return operator(*inputs, call.dropout_p, call.is_causal, **options)


def _plain(inputs: Sequence[Any], call: _Call) -> Tensor:
    """Run attention as matrix products and a softmax, which every transform can take apart."""
    query, key, value, mask = inputs
    sees = None
    if mask is not None:
        zero, hidden = query.new_zeros(()), query.new_full((), -math.inf)
        visible = mask if mask.dtype == torch.bool else mask != -math.inf
        # Rows that see nothing are zero. A second derivative of their softmax would be NaN.
        sees = visible.any(-1, keepdim=True)
        if mask.dtype == torch.bool:  # the operator would add it as it is
            mask = torch.where(mask, zero, hidden)
        mask = torch.where(sees, mask, zero)
    without = replace(call, dropout_p=0.0)
    attend = torch._scaled_dot_product_attention_math
    output, probabilities = _attend(attend, (query, key, value, mask), without)
    if call.dropout_p > 0:  # the operator's own dropout crashes under some nested transforms
        value = value.repeat_interleave(query.shape[-3] // value.shape[-3], -3)
        output = F.dropout(probabilities, call.dropout_p) @ value
    return output if sees is None else torch.where(sees, output, zero)


def _plain_backward(
    grad: Tensor, inputs: Sequence[Tensor | None], call: _Call
) -> tuple[Tensor | None, ...]:
    """Return the gradients of :func:`_plain`, None where none is needed."""

    def attend(*wanted: Tensor) -> Tensor:
        return _plain(_merged(wanted, inputs, call), call)

    grads = torch.func.vjp(attend, *_wanted(inputs, call))[1](grad)
    return _merged(grads, _NONE, call)


def _wanted(tensors: Sequence[Tensor | None], call: _Call) -> tuple[Tensor, ...]:
    """Return those of the four tensors that need a gradient."""
    return tuple(x for x, needs in zip(tensors, call.needs_grad, strict=True) if needs)  # type: ignore[misc]


def _merged(
    wanted: Sequence[Tensor], others: Sequence[Tensor | None], call: _Call
) -> tuple[Tensor | None, ...]:
    """Put ``wanted``, of the tensors that need a gradient, in their places among ``others``."""
    found = iter(wanted)
    pairs = zip(others, call.needs_grad, strict=True)
    return tuple(next(found) if needs else other for other, needs in pairs)


_NONE = (None,) * 4


# ---- the mapped dimension


def _fold(x: Tensor, batch: int) -> Tensor:
    """Fold (N, b, ...) into (N * batch, ...), b being 1 or ``batch``."""
    return x.expand(-1, batch, *x.shape[2:]).flatten(0, 1)


def _unfold(x: Tensor, size: int, batch: int) -> Tensor:
    return x.view(size, batch, *x.shape[1:])


def _fold_inputs(
    inputs: Sequence[Tensor | None], dims: Sequence[int | None], size: int, call: _Call
) -> tuple[list[Tensor | None], int]:
    """Fold the mapped dimension of the operator's inputs; returns its batch size besides."""
    pairs = zip(inputs, dims, strict=True)
    fronts = [None if x is None else in_front(x, dim, size) for x, dim in pairs]
    whole = [None if x is None else _with_batch(x) for x in fronts]
    sizes = {x.shape[1] for x in whole if x is not None}
    batch = next(iter(sizes - {1}), 1)  # anything but one size besides 1 is refused by torch
    folded = [None if x is None else _fold(x, batch) for x in whole[:3]]
    mask = whole[3]
    if mask is None:
        return [*folded, None], batch
    if dims[3] is None and not call.needs_grad[3] and mask.shape[1] == 1:
        return [*folded, mask[0]], batch  # one for all: the operator broadcasts it
    return [*folded, _fold(mask, batch)], batch


def _with_batch(x: Tensor) -> Tensor:
    """Give a mask (N, S, S) the dimensions that it left to broadcasting."""
    return x.reshape(len(x), *(1,) * (5 - x.ndim), *x.shape[1:])


def _unfold_grad(grad: Tensor, like: Tensor, dim: int | None, size: int, batch: int) -> Tensor:
    """Return the gradient (N, *shape) by an input, which may have been broadcast, per example."""
    shape = list(like.shape)
    if dim is not None:
        del shape[dim]
    whole = (size, *(1,) * (4 - len(shape)), *shape)
    return _unfold(grad, size, batch).sum_to_size(whole).reshape(size, *shape)


class _Forward(torch.autograd.Function):
    """``(query, key, value, mask, call) -> (output, state)``."""

    @staticmethod
    def forward(*args: Any) -> Any:
        *inputs, call = args
        return _fused(inputs, call)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        *tensors, _ = inputs
        state = output[1]
        ctx.save_for_backward(*tensors, *state.saved)
        ctx.state = replace(state, saved=())

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Any) -> Any:
        query, key, value, mask, *saved = ctx.saved_tensors  # a checkpoint unpacks them once
        inputs, call = (query, key, value, mask), ctx.state.call
        if forward_ad._current_level >= 0:
            _refuse_dropout(call)
            return *_plain_backward(grad, inputs, call), None
        state = replace(ctx.state, saved=tuple(saved))
        return *apply(_Backward, grad, *inputs, state), None

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> Any:
        *inputs, call = args
        inputs, batch = _fold_inputs(inputs, in_dims[:4], info.batch_size, call)
        output, state = apply(_Forward, *inputs, call)
        return (_unfold(output, info.batch_size, batch), state), (0, None)


class _Backward(torch.autograd.Function):
    """``(grad, query, key, value, mask, state) -> four gradients, None where none is needed``.

    The inputs of the operator are there to be differentiated by, and to tell which mapped
    dimensions the state is folded from.
    """

    @staticmethod
    def forward(grad: Tensor, *args: Any) -> Any:
        *inputs, state = args
        call = state.call
        grads = state.graph.backward(grad, [unwrap(x) for x in state.saved])
        pairs = zip(grads, _wanted(inputs, call), strict=True)
        return _merged([torch.zeros_like(x) if g is None else g for g, x in pairs], _NONE, call)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        *tensors, state = inputs
        ctx.save_for_backward(*tensors)
        ctx.call = state.call

    @staticmethod
    def backward(ctx: Any, *seconds: Tensor | None) -> Any:
        grad, *inputs = ctx.saved_tensors
        call = ctx.call
        _refuse_dropout(call)

        def first(grad: Tensor, *wanted: Tensor) -> tuple[Tensor, ...]:
            return _wanted(_plain_backward(grad, _merged(wanted, inputs, call), call), call)

        pullback = torch.func.vjp(first, grad, *_wanted(inputs, call))[1]
        by_grad, *grads = pullback(_wanted(seconds, call))
        return by_grad, *_merged(grads, _NONE, call), None

    @staticmethod
    def vmap(info: Any, in_dims: Any, grad: Tensor, *args: Any) -> Any:
        *inputs, state = args
        size, dims = info.batch_size, in_dims[1:5]
        grad = in_front(grad, in_dims[0], size)
        if dims == _NONE:  # several gradients of one output
            rows = [apply(_Backward, row, *args) for row in grad]
            columns = zip(*rows, strict=True)
            grads = tuple(None if column[0] is None else torch.stack(column) for column in columns)
        else:
            folded, batch = _fold_inputs(inputs, dims, size, state.call)
            found = apply(_Backward, _fold(grad, batch), *folded, state)
            grads = tuple(
                None if x is None else _unfold_grad(x, like, dim, size, batch)
                for x, like, dim in zip(found, inputs, dims, strict=True)
            )
        return grads, tuple(None if x is None else 0 for x in grads)


def _refuse_dropout(call: _Call) -> None:
    if call.dropout_p > 0:
        raise UnsupportedAttention(
            "attention with dropout cannot be differentiated twice under a functorch transform: "
            'call model.eval(), open the scope with dropout=True, or use randomness="same"'
        )
