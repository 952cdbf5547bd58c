"""``loss_only=True``: the loss of a causal model without its logits, by the model's own code."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import threading
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from opake import kernels
from opake.engine import AttributePatch, ForwardPatch, Patch
from opake.kernels._bounds import check_indices
from opake.plan import fused
from opake.plan.deferred import Deferred, Head
from opake.plan.guard import Guard
from opake.plan.modules import built_class
from opake.plan.step import Concern, Context, Skip, Step

_SLOT = fused.slot("head")
_TILE = 8192
"""Columns at a time where nobody says how many: with the rows at a time, 128 MiB of fp32."""


class _Site(NamedTuple):
    guard: Guard
    tile: int | None
    triton: bool


class _Active(threading.local):
    site: _Site | None = None
    heads: list[Head] = []  # noqa: RUF012  (replaced, never written)


_ACTIVE = _Active()

# ---- in the place of stock's


def _loss_only(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Run the model's own forward; where only the loss is asked for, its head is put off."""
    if "loss_only" not in kwargs:
        return wrapped(*args, **kwargs)
    kwargs = dict(kwargs)
    if not kwargs.pop("loss_only") or torch.compiler.is_compiling():
        return wrapped(*args, **kwargs)  # inductor needs the logits at one time at most itself
    outer = _ACTIVE.site, _ACTIVE.heads
    _ACTIVE.site, _ACTIVE.heads = vars(instance)[_SLOT], []
    try:
        return _finished(wrapped(*args, **kwargs))
    finally:
        _ACTIVE.site, _ACTIVE.heads = outer


def _finished(output: Any) -> Any:
    """Leave out the logits that the loss did without, and make the others."""
    if dataclasses.is_dataclass(output) and not isinstance(output, type):
        fields = {field.name: getattr(output, field.name) for field in dataclasses.fields(output)}
        changed = {n: _left(x) for n, x in fields.items() if isinstance(x, Deferred)}
        return dataclasses.replace(output, **changed) if changed else output
    if type(output) is tuple:
        return tuple(_left(x) for x in output)
    return _left(output)


def _left(x: Any) -> Any:
    if not isinstance(x, Deferred):
        return x
    return None if x._head.lost and not x._head.projected else x.real


def _head(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Put off a projection for the loss, or let stock project."""
    site: _Site = vars(instance)[_SLOT]
    if torch.compiler.is_compiling() or _ACTIVE.site is not site:
        return wrapped(*args, **kwargs)
    why = _strange(wrapped, instance, args, kwargs)
    if why:
        return site.guard.stock(why, wrapped, args, kwargs)
    hidden, weight = args[0], instance.weight
    dtype = hidden.dtype
    if fused.autocasts(hidden):
        dtype = torch.get_autocast_dtype(hidden.device.type)
    project = functools.partial(wrapped, hidden)
    loss = functools.partial(_loss, site, weight, instance.bias)
    return Head(hidden, weight.shape[0], dtype, project, loss).logits


_PLAIN = (Tensor, nn.Parameter)


def _strange(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> str:
    why = fused.strange(wrapped, instance, args, kwargs)
    if why:
        return why
    hidden, weight, bias = args[0], instance.weight, instance.bias
    if fused.hooked(instance):
        return "the head has hooks"
    if type(weight) not in _PLAIN or type(hidden) not in _PLAIN:
        return f"an input is a {type(hidden if type(weight) in _PLAIN else weight).__name__}"
    dtypes = {x.dtype for x in (hidden, weight, bias) if x is not None}
    if len(dtypes) > 1 and not fused.autocasts(hidden):
        return "head and hidden states have several dtypes"
    if not all(dtype.is_floating_point for dtype in dtypes):
        return "a head of integers"
    return ""


def _loss(
    site: _Site,
    weight: Tensor,
    bias: Tensor | None,
    hidden: Tensor,
    target: Tensor,
    scale: float,
    softcap: float | None,
    **options: Any,
) -> Tensor:
    options |= {"logit_scale": scale, "softcap": softcap}
    target = target.to(hidden.device)
    check_indices("labels", target, weight.shape[0], options["ignore_index"])
    given = hidden, weight, target, bias
    if site.tile is not None:
        site.guard.fell_back[f"tiles of {site.tile} columns were asked for"] += 1
        return _tiled()(*given, tile=site.tile, **options)  # type: ignore[no-any-return]
    runs, why = False, "kernels=False"
    if site.triton:
        elements = site.guard.min_elements
        runs, why = kernels.should_run(_op(), *given, min_elements=elements, **options)
    if runs:
        site.guard.ran += 1
    else:
        site.guard.fell_back[why] += 1
    found: Tensor = (_op().fused if runs else _op().portable)(*given, **options)
    return found


@functools.cache
def _op() -> Any:
    found = kernels.find("linear_cross_entropy")
    assert found is not None
    return found


def _tiled() -> Any:
    module = importlib.import_module("opake.kernels.linear_cross_entropy")
    return module.tiled_linear_cross_entropy


# ---- which models fit


def _fused_linear_cross_entropy(context: Context) -> Step | Skip:
    if context.flags["chunked_linear_cross_entropy"]:
        return Skip("chunked_linear_cross_entropy takes its place")
    return _build(context, "fused_linear_cross_entropy", None)


def _chunked_linear_cross_entropy(context: Context) -> Step | Skip:
    asked = context.flags["chunked_linear_cross_entropy"]
    tile = _TILE if asked is True else int(asked)
    return _build(context, "chunked_linear_cross_entropy", tile)


def _build(context: Context, concern: str, tile: int | None) -> Step | Skip:
    site = _Site(Guard(context.flags.min_elements), tile, context.flags.triton)
    patches: list[Patch] = []
    targets: dict[str, None] = {}
    left: dict[str, None] = {}
    count = 0
    for model in _models(context):
        name, found = built_class(model).__name__, _linears(model)
        if isinstance(found, str):
            left[f"{name}: {found}"] = None
            continue
        for module, wrapper in ((model, _loss_only), *((head, _head) for head in found)):
            patches.append(AttributePatch(module, _SLOT, site, create=True))
            patches.append(ForwardPatch(module, wrapper))
        targets[f"{name}.forward"] = None
        count += 1
    if not patches:
        return Skip(f"left to HF: {'; '.join(left) or 'the model has no head'}")
    if site.triton:
        context.guards[concern] = site.guard
    note = "with loss_only=True"
    return Step(patches, ", ".join(targets), "forward", count, note, beneath=True)


def _models(context: Context) -> list[Any]:
    """Return the models that compute a loss from a head."""
    model_class = importlib.import_module("transformers.modeling_utils").PreTrainedModel
    found = [m for m in context.all_modules if isinstance(m, model_class)]
    return [m for m in found if "labels" in fused.parameters(built_class(m).forward)]


def _linears(model: Any) -> list[nn.Linear] | str:
    """Return the linear layers that a model's head consists of, or why it is left to stock."""
    why = fused.unlike_file(model)
    if why:
        return why
    try:
        head = model.get_output_embeddings()
    except NotImplementedError:
        head = None
    if head is None:
        return "no head"
    # PEFT's copies of a head are heads themselves.
    copies = built_class(head).__name__ == "ModulesToSaveWrapper"
    linears = [m for m in head.modules() if m is not head] if copies else [head]
    linears = [m for m in linears if not isinstance(m, (nn.ModuleDict, nn.ModuleList))]
    for module in linears:
        cls = built_class(module)
        if cls is not nn.Linear:
            return f"its head is {cls.__module__.partition('.')[0]}'s {cls.__name__}"
        why = fused.unlike_file(module)
        if why:
            return f"its head has {why}"
    return linears


FUSED_LINEAR_CROSS_ENTROPY = Concern(_fused_linear_cross_entropy)
CHUNKED_LINEAR_CROSS_ENTROPY = Concern(_chunked_linear_cross_entropy)
