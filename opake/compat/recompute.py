"""A layer that is run twice: once without a graph, and again where its gradient is wanted."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vjp, vmap
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import get_device_states, set_device_states
from transformers.utils import output_capturing

from opake._functorch import SYMBOLS as FUNCTORCH
from opake._functorch import apply
from opake.compat import autocast
from opake.errors import UnsupportedTransform

SYMBOLS = (
    *FUNCTORCH,
    *autocast.SYMBOLS,
    ("torch._C", "_functorch.is_functorch_wrapped_tensor", ()),
    ("torch.utils.checkpoint", "get_device_states", ()),
    ("torch.utils.checkpoint", "set_device_states", ("devices", "states", "device_type")),
    ("transformers.utils.output_capturing", "_active_collector.set", ()),
    ("transformers.utils.output_capturing", "_active_collector.reset", ()),
)


class Call:
    """One call of a layer, as a function of the tensors that a gradient may be wanted for.

    Those are its operands: all that a transform or autograd follows, among the arguments and among
    the parameters and buffers that the layer has right now. The others are kept as they are.
    """

    def __init__(
        self,
        layer: nn.Module,
        function: Callable[..., Any],
        args: Any,
        kwargs: Any,
        preserve_rng_state: bool,
    ) -> None:
        self._layer = layer
        self._function: Any = function
        given: Any = ((), {})
        if isinstance(function, functools.partial):
            self._function, given = function.func, (function.args, function.keywords)
        with _LOCK:
            state = _state(layer)
        self._names = tuple(state)
        self._leaves, self._spec = pytree.tree_flatten(([*state.values()], given, args, kwargs))
        self._surroundings = _Surroundings(layer, self._leaves, preserve_rng_state)
        self._records = _Records.active()

    def first(self) -> tuple[list[Any], Any]:
        """Run as it is; returns the leaves of output and records, and their structure."""
        _, (first, named), args, kwargs = pytree.tree_unflatten(self._leaves, self._spec)
        with _running(), _LOCK:
            output = self._function(*first, *args, **{**named, **kwargs})
        return pytree.tree_flatten((output, self._records and self._records.new()))

    def operands(self) -> list[Tensor]:
        """Return the operands."""
        return [leaf for leaf in self._leaves if _is_followed(leaf)]

    def take_operands(self) -> None:
        """Keep no operand: from now on, :meth:`__call__` is given them."""
        self._leaves = [_OPERAND if _is_followed(leaf) else leaf for leaf in self._leaves]

    def __call__(self, *operands: Tensor) -> tuple[Tensor, ...]:
        """Run again; returns the floating point leaves that :meth:`first` returned."""
        with ExitStack() as stack:
            stack.enter_context(_running())
            stack.enter_context(self._surroundings.restored())
            records = self._records and stack.enter_context(self._records.apart())
            output = self._run(operands)
            leaves = pytree.tree_leaves((output, records and records.new()))
        return tuple(leaf for leaf in leaves if is_float(leaf))

    def deliver(self, leaves: list[Any], spec: Any) -> Any:
        """Hand the records over to whoever collects them; returns the layer's own output."""
        output, records = pytree.tree_unflatten(leaves, spec)
        if self._records is not None:
            self._records.replace(records)
        return output

    def _run(self, operands: Sequence[Tensor]) -> Any:
        found = iter(operands)
        leaves = [next(found) if leaf is _OPERAND else leaf for leaf in self._leaves]
        state, (first, named), args, kwargs = pytree.tree_unflatten(leaves, self._spec)
        bound = _Bound(self._layer, self._function)
        with _LOCK:
            current = _state(self._layer)
            changed = {
                f"layer.{name}": x
                for name, x in zip(self._names, state, strict=True)
                if current.get(name) is not x
            }
            return functional_call(
                bound, changed, (*first, *args), {**named, **kwargs}, tie_weights=False
            )


# The recompute puts tensors into modules, where every thread that runs them would find them.
_LOCK = threading.RLock()


def _state(layer: nn.Module) -> dict[str, Tensor]:
    """Return what every module holds, once: a shared one would be filled and emptied twice.

    Tied parameters come under each of their names: what is tied in the call may not be in the
    module.
    """
    found: dict[str, Tensor] = {}
    for prefix, module in layer.named_modules():
        held = (*module._parameters.items(), *module._buffers.items())
        where = f"{prefix}." if prefix else ""
        found.update((where + name, x) for name, x in held if x is not None)
    return found


class _Operand:
    """Stands for an operand among the leaves of a call."""


_OPERAND = _Operand()


class _Bound(nn.Module):
    """A function as the forward of a module that holds the layer whose state it reads."""

    def __init__(self, layer: nn.Module, function: Callable[..., Any]) -> None:
        super().__init__()
        self.layer = layer
        vars(self)["function"] = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return vars(self)["function"](*args, **kwargs)


def is_float(leaf: Any) -> bool:
    """Tell whether ``leaf`` is a tensor that can have a gradient."""
    return isinstance(leaf, Tensor) and (leaf.is_floating_point() or leaf.is_complex())


def _is_followed(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and (
        leaf.requires_grad or torch._C._functorch.is_functorch_wrapped_tensor(leaf)
    )


# ---- the gradient


def join(call: Call, outputs: Sequence[Tensor], operands: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return ``outputs``, the floats of ``call``, with a gradient by ``operands``."""
    joined: tuple[Tensor, ...] = apply(_Join, call, len(outputs), *outputs, *operands)
    return joined


class _Join(torch.autograd.Function):
    """``(call, n, *outputs, *operands) -> outputs``."""

    @staticmethod
    def forward(call: Any, count: int, *tensors: Tensor) -> Any:
        # No views: torch refuses to write views that come from an autograd function in place.
        return tuple(x.detach() for x in tensors[:count])

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.call, ctx.count, *tensors = inputs
        ctx.save_for_backward(*tensors[ctx.count :])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        wanted = ctx.needs_input_grad[2 + ctx.count :]
        pullback = _Pullback(ctx.call, ctx.count, wanted)
        found = iter(apply(_Gradient, pullback, *grads, *ctx.saved_tensors))
        return *[None] * (2 + ctx.count), *(next(found) if wants else None for wants in wanted)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise UnsupportedTransform(
            "forward mode does not go through gradient checkpointing under a functorch transform; "
            "call model.gradient_checkpointing_disable()"
        )

    @staticmethod
    def vmap(info: Any, in_dims: Any, call: Any, count: int, *tensors: Tensor) -> Any:
        outputs, operands = in_dims[2 : 2 + count], in_dims[2 + count :]
        mapped = _mapped(call, info, operands, outputs)
        return apply(_Join, mapped, count, *tensors), outputs


class _Gradient(torch.autograd.Function):
    """``(pullback, *tensors) -> pullback(*tensors)``, which cannot be differentiated again."""

    @staticmethod
    def forward(pullback: Any, *tensors: Tensor) -> Any:
        return pullback(*tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise UnsupportedTransform(
            "a gradient that went through gradient checkpointing under a functorch transform "
            "cannot be differentiated again; call model.gradient_checkpointing_disable()"
        )

    @staticmethod
    def vmap(info: Any, in_dims: Any, pullback: Any, *tensors: Tensor) -> Any:
        mapped = _mapped(pullback, info, in_dims[1:], 0)
        return apply(_Gradient, mapped, *tensors), 0


class _Pullback:
    """``(*gradients of outputs, *operands) -> gradients of the operands that are wanted``."""

    def __init__(self, call: Any, count: int, wanted: Sequence[bool]) -> None:
        self._call, self._count, self._wanted = call, count, tuple(wanted)

    def __call__(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        grads, operands = tensors[: self._count], tensors[self._count :]

        def outputs(*chosen: Tensor) -> Any:
            found = iter(chosen)
            pairs = zip(operands, self._wanted, strict=True)
            return self._call(*(next(found) if wants else x for x, wants in pairs))

        chosen = [x for x, wants in zip(operands, self._wanted, strict=True) if wants]
        pull = vjp(outputs, *chosen)[1]
        found: tuple[Tensor, ...] = pull(grads, retain_graph=False)  # frees the layer on its way
        return found


def _mapped(function: Callable[..., Any], info: Any, in_dims: Any, out_dims: Any) -> Any:
    """Return ``function`` under a ``vmap`` like the one that ``info`` describes."""
    # The first argument is there to be mapped: random numbers may be all that differs.
    over = vmap(
        lambda _, *tensors: function(*tensors),
        in_dims=(0, *in_dims),
        out_dims=out_dims,
        randomness=info.randomness,
    )
    return lambda *tensors: over(torch.empty(info.batch_size), *tensors)


# ---- what the second run must find as it was in the first


_THREAD = threading.local()


def is_running() -> bool:
    """Tell whether a checkpointed layer runs: those inside it need no checkpoint of their own."""
    return getattr(_THREAD, "running", False)


@contextmanager
def _running() -> Iterator[None]:
    before, _THREAD.running = is_running(), True
    try:
        yield
    finally:
        _THREAD.running = before


class _Surroundings:
    """The states of autocast, of its layer norms, and of the random number generators."""

    def __init__(self, layer: nn.Module, leaves: Sequence[Any], preserve_rng_state: bool) -> None:
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        kinds = dict.fromkeys(["cpu", *(x.device.type for x in tensors)])
        self._autocast = [
            (kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))
            for kind in kinds
            if torch.amp.is_autocast_available(kind)
        ]
        self._wide_layer_norms = autocast.has_wide_layer_norms()
        self._kind = next((kind for kind in kinds if kind not in ("cpu", "meta")), None)
        self._cpu: Tensor | None = None
        self._devices: Any = []
        if preserve_rng_state:
            self._cpu = torch.get_rng_state()
            if self._kind is not None and not _captures(layer):
                self._devices, self._states = get_device_states(*tensors)

    @contextmanager
    def restored(self) -> Iterator[None]:
        with ExitStack() as stack:
            for kind, dtype, enabled in self._autocast:
                # What is cast here has no graph, and must not be found where one is wanted.
                stack.enter_context(torch.autocast(kind, dtype, enabled, cache_enabled=False))
            if self._wide_layer_norms:
                stack.enter_context(autocast.wide_layer_norms())
            if self._cpu is not None:
                kind = self._kind or "cuda"  # with no devices, any will do
                stack.enter_context(torch.random.fork_rng(self._devices, device_type=kind))
                torch.set_rng_state(self._cpu)
                if self._devices:
                    set_device_states(self._devices, self._states, device_type=kind)
            yield


def _captures(layer: nn.Module) -> bool:
    """Tell whether a CUDA graph is being captured, where random states cannot be read.

    Raises where the layer would draw random numbers then.
    """
    if not (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()):
        return False
    for module in layer.modules():
        is_dropout = isinstance(module, nn.modules.dropout._DropoutNd)
        active = [n for n, x in vars(module).items() if isinstance(x, float) and x > 0]
        if module.training and any(n == "p" if is_dropout else "dropout" in n for n in active):
            raise UnsupportedTransform(
                "dropout in a checkpointed layer cannot be drawn again in a CUDA graph; open the "
                "scope with dropout=True, or call model.gradient_checkpointing_disable()"
            )
    return True


class _Records:
    """What transformers' hooks collect inside a layer, such as router logits, for one call."""

    def __init__(self, collector: dict[str, Any]) -> None:
        self._collector = collector
        self._before = {k: len(v) for k, v in collector.items() if isinstance(v, list)}
        # Noted now: transformers takes some out before the backward comes.
        self._others = {k: v for k, v in collector.items() if k not in self._before}

    @classmethod
    def active(cls) -> _Records | None:
        collector = output_capturing._active_collector.get()
        return cls(collector) if collector else None

    def new(self) -> dict[str, list[Any]]:
        """Return what has come in since."""
        return {key: self._collector[key][n:] for key, n in self._before.items()}

    def replace(self, records: dict[str, list[Any]]) -> None:
        """Put ``records`` in the place of what has come in since."""
        for key, n in self._before.items():
            self._collector[key][n:] = records[key]

    @contextmanager
    def apart(self) -> Iterator[_Records]:
        """Collect elsewhere, as if as much had come in before as in the first run."""
        again = {**self._others, **{key: [None] * n for key, n in self._before.items()}}
        token = output_capturing._active_collector.set(again)
        try:
            yield _Records(again)
        finally:
            output_capturing._active_collector.reset(token)
