"""Gradient checkpointing under functorch transforms, without saved-tensor hooks.

torch's checkpoint drops saved tensors by hooks, which functorch bans, and recomputes a layer with
the parameters that its module has by then: not those that ``functional_call`` put there. Here a
layer is a function of every tensor that gradients may be wanted for. Its forward records no graph;
an autograd function stands in for it, keeps those tensors, and differentiates the layer anew in
the backward, beneath the very transforms that the forward ran under.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from opake.compat import recompute
from opake.compat.recompute import is_float
from opake.compat.transforms import levels, needs_grad, transforms_active
from opake.errors import UnsupportedTransform

SYMBOLS = (
    ("torch._C", "_functorch.get_interpreter_stack", ()),
    ("torch._C", "_functorch.TransformType.Grad", ()),
    ("torch._C", "_functorch.TransformType.Vmap", ()),
    ("torch.utils.checkpoint", "checkpoint", ("function", "use_reentrant", "context_fn")),
)


# ---- what a layer finds as its checkpoint function


def dispatch(layer: nn.Module, stock: Any, function: Any, *args: Any, **kwargs: Any) -> Any:
    """Run a checkpointed call of ``layer``: by :func:`run` under a transform, else by ``stock``.

    Where ``stock``, what the layer has as its checkpoint function, is not torch's, it runs.
    """
    options = _torch_options(stock) if transforms_active() else None
    if options is None:
        return stock(function, *args, **kwargs)
    return run(layer, options, function, *args, **kwargs)


def _get(layer: nn.Module) -> Any:
    if _SLOT not in layer.__dict__:
        raise AttributeError(_SLOT)  # nn.Module then looks elsewhere, and words the error
    stock = layer.__dict__[_SLOT]
    return functools.partial(dispatch, layer, stock) if transforms_active() else stock


def _set(layer: nn.Module, value: Any) -> None:
    layer.__dict__[_SLOT] = value


def _delete(layer: nn.Module) -> None:
    if _SLOT not in layer.__dict__:
        raise AttributeError(_SLOT)
    del layer.__dict__[_SLOT]


_SLOT = "_gradient_checkpointing_func"

CLASS_FUNCTION = property(_get, _set, _delete)
"""``_gradient_checkpointing_func`` for a class of layers: :func:`dispatch` under a transform.

Outside one it is what the instance holds.
"""


def _torch_options(function: Any) -> dict[str, Any] | None:
    """Return the options of torch's checkpoint where ``function`` comes down to it, or None."""
    options: dict[str, Any] = {}
    while isinstance(function, functools.partial) and not function.args:
        options = {**function.keywords, **options}
        function = function.func
    # With offload=True, transformers calls it from a function of its own.
    offloads = getattr(function, "__module__", None) == "transformers.modeling_utils"
    return options if function is checkpoint or offloads else None


# ---- one checkpointed call


def run(
    layer: nn.Module,
    options: dict[str, Any],
    function: Callable[..., Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Run ``function(*args, **kwargs)``, which runs ``layer``, and keep none of its intermediates.

    Whatever ``use_reentrant`` says, gradients reach every parameter and every tensor among the
    arguments. Of torch's other options ``preserve_rng_state`` acts as there; those that are about
    saved-tensor hooks, and transformers' ``offload``, change nothing.

    Raises :class:`~opake.errors.UnsupportedTransform` under ``torch.compile``, forward mode and
    more than one level of gradients, with a ``context_fn``, and where a torch function in the layer
    reads a tensor that needs a gradient and is none of those named above, or a hook of somebody
    else could take a tensor out of it. Tensors that go straight into an autograd function are not
    looked at, and what a module keeps for itself carries no gradient.
    """
    if recompute.is_running() or not torch.is_grad_enabled():
        return function(*args, **kwargs)
    _refuse(options)
    _refuse_hooks(layer)
    call = recompute.Call(layer, function, args, kwargs, options.get("preserve_rng_state", True))
    operands = call.operands()
    reads = _Reads(layer, operands)
    with _without_graph(), reads:
        leaves, spec = call.first()
    outputs = [leaf for leaf in leaves if is_float(leaf)]
    if any(map(reads.loses, outputs)):
        reads.refuse()
    call.take_operands()
    joined = iter(recompute.join(call, outputs, operands))
    return call.deliver([next(joined) if is_float(leaf) else leaf for leaf in leaves], spec)


_HARMLESS = ("accelerate", "opake", "peft", "torch", "transformers")
"""Whose forward hooks take nothing out of a layer that a loss is made of, or hand it over to us."""


def _refuse_hooks(layer: nn.Module) -> None:
    for name, module in layer.named_modules():
        for hook in module._forward_hooks.values():
            owner = str(getattr(hook, "__module__", "") or type(hook).__module__)
            if owner.partition(".")[0] not in _HARMLESS:
                raise UnsupportedTransform(
                    f"a forward hook from {owner} on {type(layer).__qualname__}.{name} would see "
                    "tensors without a gradient, as this layer is checkpointed under a functorch "
                    "transform; remove it, or call model.gradient_checkpointing_disable()"
                )


def _refuse(options: dict[str, Any]) -> None:
    refuse_compile()
    types = torch._C._functorch.TransformType
    kinds = [level.key() for level in torch._C._functorch.get_interpreter_stack() or ()]
    if kinds.count(types.Grad) > 1 or any(k not in (types.Grad, types.Vmap) for k in kinds):
        raise UnsupportedTransform(
            "gradient checkpointing goes through one level of gradients, found "
            f"{' of '.join(kind.name.lower() for kind in kinds)}; for forward mode and higher "
            "order call model.gradient_checkpointing_disable()"
        )
    if "context_fn" in options:
        raise UnsupportedTransform(
            "gradient checkpointing with a context_fn (selective checkpointing) does not go "
            "through functorch transforms; enable it without one"
        )


def refuse_compile() -> None:
    """Raise :class:`~opake.errors.UnsupportedTransform` under ``torch.compile``."""
    if torch.compiler.is_compiling() or _runs_uncompiled():
        raise UnsupportedTransform(
            "gradient checkpointing under a functorch transform cannot be compiled; call "
            "model.gradient_checkpointing_disable(), or leave torch.compile out"
        )


def _runs_uncompiled() -> bool:
    """Tell whether dynamo gave up on a caller, runs it as it is, and compiles what that calls."""
    frames = sys.modules.get("torch._C._dynamo.eval_frame")
    callback = getattr(frames, "get_eval_frame_callback", None)
    return callback is not None and callable(callback())


# ---- the first run


@contextmanager
def _without_graph() -> Iterator[None]:
    # Autocast would keep what it casts here, and find it where a graph is wanted.
    cached = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        with torch.no_grad():
            yield
    finally:
        torch.set_autocast_cache_enabled(cached)


class _Reads(TorchFunctionMode):
    """Refuses what would lose a gradient: a tensor that needs one and is no operand."""

    def __init__(self, layer: nn.Module, operands: Sequence[Tensor]) -> None:
        super().__init__()
        self._layer = layer
        self._operands = set(map(id, operands))
        held = [level for operand in operands for level in levels(operand)]
        held += [level._base for level in held if level._base is not None]
        self._bases = {id(level): level for level in held}  # held: an identity can be taken again

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.is_grad_enabled() or not any(map(self.loses, _tensors((*args, *kwargs.values())))):
            return func(*args, **kwargs)
        args, kwargs = pytree.tree_map_only(Tensor, self._cut, (args, kwargs))
        with torch.enable_grad():
            output = func(*args, **kwargs)
        if any(map(needs_grad, _tensors((output,)))):
            self.refuse()
        return output

    def loses(self, tensor: Tensor) -> bool:
        """Tell whether a gradient by ``tensor`` would be lost."""
        return id(tensor) not in self._operands and any(
            level.requires_grad and not self._is_view(level) for level in levels(tensor)
        )

    def _is_view(self, tensor: Tensor) -> bool:
        """Tell whether ``tensor`` is a view of an operand that was made without a graph, as here.

        Such a view requires a gradient because its base does, and has none itself.
        """
        return tensor.grad_fn is None and id(tensor._base) in self._bases

    def refuse(self) -> None:
        raise UnsupportedTransform(
            f"{type(self._layer).__qualname__} reads a tensor that needs a gradient and is neither "
            "an argument nor a parameter of it, which checkpointing would lose; pass it as an "
            "argument, or call model.gradient_checkpointing_disable()"
        )

    def _cut(self, tensor: Tensor) -> Tensor:
        return tensor if self.loses(tensor) else tensor.detach()


def _tensors(values: Sequence[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, tuple | list):
            yield from _tensors(value)


# ---- the hook that makes embeddings require gradients


def without_requires_grad(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Let the forward hooks of an embedding call ``requires_grad_`` under a transform.

    Reentrant checkpointing needs such a hook. A transform does not allow the call, and follows
    what it differentiates by without it.
    """
    output = wrapped(*args, **kwargs)
    if instance._forward_hooks and transforms_active():
        ignore_requires_grad(instance, args, output)
    return output


def ignore_requires_grad(module: nn.Module, args: Any, output: Any) -> None:
    """The same as a forward hook, ahead of those."""
    if not transforms_active():
        return
    if any(map(_calls_requires_grad, module._forward_hooks.values())):
        refuse_compile()
    if isinstance(output, Tensor) and not torch.compiler.is_compiling():
        output.requires_grad_ = _ignore  # type: ignore[assignment,method-assign]


def _calls_requires_grad(hook: Any) -> bool:
    code = getattr(hook, "__code__", None)
    return code is not None and "requires_grad_" in code.co_names


def _ignore(requires_grad: bool = True) -> None:
    """Stands for ``Tensor.requires_grad_``; a hook that returns nothing leaves the output."""


def input_embeddings(model: Any) -> list[nn.Module]:
    """Return what such hooks sit on: the input embeddings of ``model``, inside wrappers too."""
    try:
        found = model.get_input_embeddings()
    except (NotImplementedError, AttributeError):
        return []
    if not isinstance(found, nn.Module):
        return []
    return [found, *(m for m in found.modules() if isinstance(m, nn.Embedding) and m is not found)]
