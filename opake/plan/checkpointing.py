"""Gradient checkpointing: the checkpoint functions of layers, and the hooks that go with them.

A model scope writes to the instances of its model. The process scope writes to the classes, for
models that are built, or told to checkpoint, inside it.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

from opake.engine import AttributePatch, ForwardPatch, Patch, stacks
from opake.engine.patch import SlotPatch
from opake.engine.reclass import stock_class
from opake.engine.slots import NamespaceSlot, attribute_slot
from opake.errors import RestoreError
from opake.families import Family
from opake.plan.modules import refuse_foreign_forward
from opake.plan.step import Concern, Context, Need, ProcessConcern, Skip, Step, compat, compat_needs

_LAYER = "GradientCheckpointingLayer"
_FUNCTION = "_gradient_checkpointing_func"
_ENABLE = "_set_gradient_checkpointing"
_HOOKS = "enable_input_require_grads"


def _of_model(context: Context) -> Step | Skip:
    checkpoint = compat("checkpoint")
    modules = context.all_modules
    layer_class: Any = getattr(importlib.import_module("transformers.modeling_layers"), _LAYER)
    layers = [module for module in modules if isinstance(module, layer_class)]
    if not layers:
        return Skip("the model has no layers that checkpoint")
    model_class = importlib.import_module("transformers.modeling_utils").PreTrainedModel
    models = [module for module in modules if isinstance(module, model_class)]
    embeddings = dict.fromkeys(e for model in models for e in checkpoint.input_embeddings(model))
    for embedding in embeddings:
        refuse_foreign_forward(embedding)
    functions = _Functions(layers, checkpoint.dispatch)
    patches: list[Patch] = [functions]
    patches += [ForwardPatch(model, functions.while_lifted, slot=_ENABLE) for model in models]
    patches += [ForwardPatch(e, checkpoint.without_requires_grad) for e in embeddings]
    names = dict.fromkeys(f"{stock_class(layer).__name__}.{_FUNCTION}" for layer in layers)
    note = "where checkpointing is enabled, before the scope or inside it"
    return Step(patches, ", ".join(names), functions.how, len(layers), note)


class _Functions(Patch):
    """Puts ``dispatch(layer, stock)`` over the checkpoint function of every layer that has one.

    The layers get theirs when checkpointing is enabled for the first time, which may be inside the
    scope: :meth:`while_lifted` wraps what enables it, so that what is written then lasts.
    """

    how = "attribute"

    def __init__(self, layers: Sequence[nn.Module], dispatch: Callable[..., Any]) -> None:
        self._layers = layers
        self._dispatch = dispatch
        self._live: list[_FunctionPatch] = []
        self._applied = False

    def _wanted(self) -> list[_FunctionPatch]:
        layers = [layer for layer in self._layers if _FUNCTION in vars(layer)]
        return [_FunctionPatch(layer, self._dispatch) for layer in layers]

    def check(self) -> None:
        for patch in self._wanted():
            patch.check()

    @stacks.locked
    def apply(self) -> None:
        self._applied = True
        for patch in self._wanted():
            self._live.append(patch)
            patch.apply()

    @stacks.locked
    def revert(self) -> str | None:
        self._applied = False
        return self._lift()

    def _lift(self) -> str | None:
        notes, failed = [], []
        while self._live:
            try:
                notes.append(self._live[-1].revert())
            except Exception as error:
                failed.append(f"{self._live[-1].target}: {error}")
            self._live.pop()
        if failed:
            raise RestoreError("; ".join(failed))
        return "; ".join(note for note in notes if note) or None

    def while_lifted(self, wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        """Run ``wrapped`` while the layers hold what they hold outside the scope."""
        with self._lifted():
            return wrapped(*args, **kwargs)

    @contextmanager
    def _lifted(self) -> Iterator[None]:
        with stacks.LOCK:
            self._lift()
            try:
                yield
            finally:
                if self._applied:
                    self.apply()

    @property
    def target(self) -> str:
        return f"{_LAYER}.{_FUNCTION}"

    def changes(self) -> list[tuple[str, Any, Any]]:
        return [row for patch in self._live for row in patch.changes()]


class _FunctionPatch(SlotPatch):
    how = "attribute"

    def __init__(self, layer: nn.Module, dispatch: Callable[..., Any]) -> None:
        # Not by attribute_slot: in the process scope, the class answers with a property that reads
        # this very place.
        super().__init__(NamespaceSlot(layer, _FUNCTION))
        self._dispatch = dispatch

    def build(self, below: Any) -> Any:
        return functools.partial(self._dispatch, self.slot.owner, below)


# ---- the process


def _of_process() -> Step | Skip:
    checkpoint = compat("checkpoint")
    layer_class = getattr(importlib.import_module("transformers.modeling_layers"), _LAYER)
    model_class = importlib.import_module("transformers.modeling_utils").PreTrainedModel
    function = AttributePatch(layer_class, _FUNCTION, checkpoint.CLASS_FUNCTION, create=True)
    note = "process-wide; changes nothing outside functorch transforms"
    patches: list[Patch] = [function, _HooksPatch(model_class, checkpoint)]
    return Step(patches, function.target, function.how, 1, note)


class _HooksPatch(AttributePatch):
    """Puts our hook ahead of those that ``enable_input_require_grads`` installs meanwhile."""

    def __init__(self, model_class: Any, checkpoint: Any) -> None:
        stock = stacks.base(attribute_slot(model_class, _HOOKS))
        handles: list[Any] = []

        @functools.wraps(stock)
        def enable_input_require_grads(self: Any) -> None:
            stock(self)
            for embedding in checkpoint.input_embeddings(self):
                hook = checkpoint.ignore_requires_grad
                if hook not in embedding._forward_hooks.values():
                    handles.append(embedding.register_forward_hook(hook, prepend=True))

        super().__init__(model_class, _HOOKS, enable_input_require_grads)
        self._handles = handles

    def revert(self) -> str | None:
        while self._handles:
            self._handles[-1].remove()
            self._handles.pop()
        return super().revert()


def _process_needs() -> list[Need]:
    return [
        ("transformers.modeling_layers", _LAYER, ()),
        ("transformers.modeling_utils", f"PreTrainedModel.{_HOOKS}", ()),
        ("transformers.modeling_utils", f"PreTrainedModel.{_ENABLE}", ()),
        *compat_needs("checkpoint", "recompute", "transforms"),
    ]


def _model_needs(family: Family) -> list[Need]:
    return _process_needs()


CHECKPOINTING = Concern(_of_model, _model_needs, any_model=True)
VMAP_CHECKPOINTING = ProcessConcern(_of_process, _process_needs, runtime_only=True)
