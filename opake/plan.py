"""Flags, a family and a model make a list of patches, or a skip with its reason.

The only module that sees engine, compat and families together. Planning changes nothing.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from opake import families, symbols
from opake.engine import (
    AttributePatch,
    ForwardPatch,
    ItemPatch,
    Patch,
    RebindPatch,
    Report,
    Row,
    stacks,
)
from opake.engine.patchset import caller_depth
from opake.engine.rebind import rebind
from opake.engine.reclass import is_stock, stock_class, table
from opake.engine.shared import SharedPatch
from opake.engine.slots import attribute_slot
from opake.engine.splice import MARK
from opake.errors import (
    ForeignWrite,
    NotAModel,
    UnsupportedAttention,
    UnsupportedModel,
    UnsupportedTransformers,
)
from opake.families import Family
from opake.flags import CONCERNS, PROCESS_WIDE, Flags
from opake.symbols import Symbol


@dataclass
class Plan:
    """What a scope would do: its patches, and a row for every concern."""

    patches: list[Patch] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)

    @property
    def report(self) -> Report:
        return Report(self.rows)


@dataclass(frozen=True)
class Skip:
    """Why a concern that is on does nothing here."""

    reason: str


@dataclass(frozen=True)
class Step:
    """The patches of one concern, and what its row says about them."""

    patches: list[Patch]
    target: str
    how: str
    count: int
    note: str = ""


@dataclass(frozen=True)
class Context:
    """What the builders look at."""

    model: nn.Module
    inner: Any
    family: Family

    @functools.cached_property
    def _all(self) -> list[nn.Module]:
        return list(self.inner.modules())

    def modules(self, class_name: str) -> list[nn.Module]:
        """Return the modules of the family's class of that name, subclasses included."""
        cls = symbols.resolve(self.family.module, class_name)
        return [module for module in self._all if isinstance(module, cls)]


Builder = Callable[[Context], Step | Skip]


# ---- the model


def find_model(model: Any) -> Any:
    """Return the transformers model inside ``model`` (PEFT, compiled, sharded), or None."""
    if not isinstance(model, nn.Module):
        raise NotAModel(
            f"expected a transformers model or an nn.Module, found {type(model).__qualname__}"
        )
    utils = importlib.import_module("transformers.modeling_utils")
    if isinstance(model, utils.PreTrainedModel):
        return model
    found = [m for m in model.modules() if isinstance(m, utils.PreTrainedModel)]
    if not found:
        return None
    inside = {id(module) for module in found[0].modules()}
    strangers = [type(m).__qualname__ for m in found if id(m) not in inside]
    if strangers:
        raise NotAModel(
            f"{type(model).__qualname__} holds several models ({type(found[0]).__qualname__}, "
            f"{', '.join(strangers)}); open one scope for each"
        )
    return found[0]


def plan_model(model: nn.Module, flags: Flags) -> Plan:
    """Plan a model scope. Raises what entering it would raise."""
    inner = find_model(model)
    family = _family(model, inner, flags)
    if inner is None or family is None:
        reason = "no transformers model" if inner is None else "unknown model_type"
        symbols.verify(symbol for symbol in _first_order_symbols() if flags["first_order"])
        bare = Context(model, inner, Family("", "", ""))

        def build(concern: str) -> Step | Skip:
            return _build(concern, bare) if concern in _NO_FAMILY else Skip(reason)

        return _collect(flags, build)
    _refuse_attention(inner, flags)
    symbols.verify(_symbols(family, flags))
    context = Context(model, inner, family)
    return _collect(flags, lambda concern: _build(concern, context))


def plan_runtime(flags: Flags) -> Plan:
    """Plan the process scope: the concerns that need no model."""
    symbols.verify(symbol for symbol in _first_order_symbols() if flags["first_order"])

    def build(concern: str) -> Step | Skip:
        if concern not in PROCESS_WIDE:
            return Skip("needs a model: use opake.patched(model)")
        return _first_order() if concern == "first_order" else Skip(_LATER)

    return _collect(flags, build)


def _collect(flags: Flags, build: Callable[[str], Step | Skip]) -> Plan:
    plan = Plan()
    for concern in CONCERNS:
        if flags[concern] is False:
            plan.rows.append(Row(concern, "-", "-", 0, "off"))
            continue
        step = build(concern)
        if isinstance(step, Skip):
            plan.rows.append(Row(concern, "-", "-", 0, "skipped", step.reason))
        else:
            plan.patches += step.patches
            plan.rows.append(Row(concern, step.target, step.how, step.count, "on", step.note))
    return plan


def _build(concern: str, context: Context) -> Step | Skip:
    builder = BUILDERS.get(concern)
    return builder(context) if builder is not None else Skip(_LATER)


def _family(model: nn.Module, inner: Any, flags: Flags) -> Family | None:
    if inner is None:
        if flags.compat:
            raise NotAModel(
                f"no transformers model in {type(model).__qualname__}; pass compat=False if it "
                "is vmap-safe as it is"
            )
        return None
    model_type = inner.config.model_type
    family = families.find(model_type)
    if family is not None:
        return family
    message = (
        f"model_type {model_type!r} belongs to no family; supported are "
        f"{', '.join(families.supported())}; add one by opake.register_family({model_type!r}, "
        "opake.Family(...))"
    )
    if flags.compat:
        raise UnsupportedModel(f"{message}, or pass compat=False")
    warnings.warn(f"no model concern is patched: {message}", stacklevel=caller_depth())
    return None


def _refuse_attention(inner: Any, flags: Flags) -> None:
    used = inner.config._attn_implementation
    if (flags["sdpa"] or flags["eager_attention"]) and used not in ("sdpa", "eager"):
        raise UnsupportedAttention(
            f"attn_implementation={used!r} cannot run under functorch; load the model with "
            'attn_implementation="sdpa", or call model.set_attn_implementation("sdpa")'
        )


# ---- upstream

_MASKING = "transformers.masking_utils"
_MASKED = ("inputs_embeds", "attention_mask")


@functools.cache
def _symbols(family: Family, flags: Flags) -> tuple[Symbol, ...]:
    """Return what the concerns that are on need from upstream."""
    wanted: list[Symbol] = []

    def need(concern: str, found: Iterable[tuple[str, str, tuple[str, ...]]]) -> None:
        if flags[concern]:
            wanted.extend(Symbol(module, name, p, concern) for module, name, p in found)

    forward = ("input_ids", "attention_mask", "position_ids", "inputs_embeds", "use_cache")
    base = [
        (family.module, family.base, ()),
        (family.module, f"{family.base}.forward", (*forward, "cache|past_key_values")),
    ]
    for concern in ("batchify", "kv_cache", "vmap_masking"):
        need(concern, base)
        need(concern, _compat("transforms").SYMBOLS)
    need("sdpa", [(family.module, family.attention, ())])
    need("sdpa", _modules_symbols("attention", "config_view", "masks"))
    need("vmap_masking", _modules_symbols("masks"))
    for name in family.masks:
        need("vmap_masking", [(family.module, name, ()), (_MASKING, name, _MASKED)])
    return (*wanted, *(s for s in _first_order_symbols() if flags["first_order"]))


def _modules_symbols(*names: str) -> list[Any]:
    found: list[Any] = []
    for name in names:
        found.extend(_compat(name).SYMBOLS)
    return found


def _first_order_symbols() -> list[Symbol]:
    return [
        Symbol(module, name, parameters, "first_order")
        for module, name, parameters in _compat("first_order").SYMBOLS
    ]


def _compat(name: str) -> Any:
    try:
        return importlib.import_module(f"opake.compat.{name}")
    except ImportError as error:
        raise UnsupportedTransformers(
            f"opake.compat.{name} cannot be imported with the installed transformers: {error}"
        ) from error


# ---- the concerns


def _sdpa(context: Context) -> Step | Skip:
    if context.inner.config._attn_implementation != "sdpa":
        return Skip("attention runs on eager")
    attention, masks, view = _compat("attention"), _compat("masks"), _compat("config_view")
    keys = _register(attention.SDPA, attention.sdpa, masks.sdpa_mask)
    modules = context.modules(context.family.attention)
    views: dict[int, Any] = {}
    patches: list[Patch] = []
    for module in modules:
        config = stacks.base(attribute_slot(module, "config"))
        if id(config) not in views:
            views[id(config)] = view.attention_view(config, attention.SDPA)
        patches.append(AttributePatch(module, "config", views[id(config)]))
    switches: list[Patch] = [_ViewSwitch(made, view.switch) for made in views.values()]
    target = f"{context.family.attention}.config"
    return Step([*keys, *switches, *patches], target, "registry", len(modules))


def _register(key: str, attention: Any, mask: Any) -> list[Patch]:
    utils = importlib.import_module("transformers.modeling_utils")
    masking = importlib.import_module(_MASKING)
    mappings = {
        "attention": (utils.ALL_ATTENTION_FUNCTIONS._global_mapping, attention),
        "mask": (masking.ALL_MASK_ATTENTION_FUNCTIONS._global_mapping, mask),
    }
    return [
        SharedPatch((kind, key), ItemPatch(mapping, key, value, create=True))
        for kind, (mapping, value) in mappings.items()
    ]


class _ViewSwitch(Patch):
    """Lets a config view answer with our key while the scope lasts."""

    how = "view"

    def __init__(self, view: Any, switch: Callable[[Any, bool], None]) -> None:
        self.view = view
        self.switch = switch  # held: nothing can be imported while the interpreter exits

    def apply(self) -> None:
        self.switch(self.view, True)

    def revert(self) -> None:
        self.switch(self.view, False)


def _eager(context: Context) -> Step | Skip:
    if context.inner.config._attn_implementation != "eager":
        return Skip("attention runs on sdpa")
    count = len(context.modules(context.family.attention))
    note = "works under functorch as it is"
    return Step([], "eager_attention_forward", "stock", count, note)


def _masking(context: Context) -> Step | Skip:
    masks = _compat("masks")
    module_name = context.family.module
    replacements = {name: masks.builder(module_name, name) for name in context.family.masks}
    patches: list[Patch] = []
    for module in context.modules(context.family.base):
        # Under accelerate's hook, the forward that builds the masks is the one the hook kept.
        slot = "_old_forward" if "_old_forward" in vars(module) else "forward"
        if slot == "forward" and "forward" not in vars(module):
            rebind(_stock_forward(module), replacements)  # raises where the names are not read
        patches.append(RebindPatch(module, replacements, slot=slot))
    target = f"{context.family.base}.forward: {', '.join(context.family.masks)}"
    return Step(patches, target, "rebind", len(patches))


def _kv_cache(context: Context) -> Step | Skip:
    wrapper = _compat("kv_cache").without_cache
    modules = context.modules(context.family.base)
    patches: list[Patch] = [ForwardPatch(m, wrapper(_positional(m))) for m in modules]
    return Step(patches, f"{context.family.base}.forward", "forward", len(patches))


def _batchify(context: Context) -> Step | Skip:
    wrapper = _compat("batchify").batchify
    base = context.modules(context.family.base)
    heads = [] if context.inner in base else [context.inner]
    for module in (*base, *heads):
        _refuse_foreign_forward(module)
    patches: list[Patch] = [ForwardPatch(m, wrapper(_positional(m))) for m in (*base, *heads)]
    names = dict.fromkeys(stock_class(module).__name__ for module in (*heads, *base))
    return Step(patches, f"{', '.join(names)}.forward", "forward", len(patches))


def _first_order(context: Context | None = None) -> Step | Skip:
    first_order = _compat("first_order")
    transforms = importlib.import_module("torch._functorch.eager_transforms")
    stock = stacks.base(attribute_slot(transforms, "grad_and_value_impl"))
    clone = rebind(stock, {"_autograd_grad": first_order.autograd_grad})
    replacement = first_order.grad_and_value(stock, clone)
    patch = AttributePatch(transforms, "grad_and_value_impl", replacement)
    note = "process-wide; changes nothing outside torch.no_grad()"
    return Step([SharedPatch("first_order", patch)], patch.target, "global", 1, note)


def _dropout(context: Context) -> Step | Skip:
    patches: list[Patch] = []
    for module in context.model.modules():
        is_dropout = isinstance(module, nn.modules.dropout._DropoutNd)
        for name, value in vars(module).items():
            if isinstance(value, float) and (name == "p" if is_dropout else "dropout" in name):
                patches.append(AttributePatch(module, name, 0.0))
    if not patches:
        return Skip("the model has no dropout")
    return Step(patches, "dropout probabilities", "attribute", len(patches))


_LATER = "not in this release"
_NO_FAMILY = ("first_order", "dropout")

BUILDERS: dict[str, Builder] = {
    "eager_attention": _eager,
    "sdpa": _sdpa,
    "batchify": _batchify,
    "vmap_masking": _masking,
    "first_order": _first_order,
    "kv_cache": _kv_cache,
    "dropout": _dropout,
}


# ---- looking at modules


@functools.cache
def _names(forward: Any) -> tuple[str, ...]:
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    found = inspect.signature(forward).parameters.values()
    return tuple(p.name for p in found if p.kind in kinds)[1:]


def _stock_forward(module: nn.Module) -> Any:
    return stock_class(module).forward  # type: ignore[attr-defined]


def _positional(module: nn.Module) -> tuple[str, ...]:
    # A subclass's forward(*args, **kwargs) takes what its base takes.
    named = (_names(cls.forward) for cls in stock_class(module).__mro__ if hasattr(cls, "forward"))
    return next(filter(None, named), ())


def _refuse_foreign_forward(module: nn.Module) -> None:
    forward = vars(module).get("forward")
    if forward is None or "forward" in table(module):
        return
    function = getattr(forward, "func", getattr(forward, "__func__", forward))
    if is_stock(module, forward):
        return
    known = ("_hf_hook", "_old_forward", "_original_forward")
    if any(name in vars(module) for name in known) or hasattr(function, MARK):
        return
    owner = f"{getattr(function, '__module__', '?')}.{getattr(function, '__qualname__', function)}"
    raise ForeignWrite(
        f"{stock_class(module).__qualname__} instance has a forward of its own already, from "
        f"{owner}: undo that first, or open the scope before it is put there"
    )
