"""Query, key and value of an attention whose three projections are LoRA layers, in one operator.

The attention's own code runs. Whichever projection it calls first computes all three, and the other
two hand out their part when they are called with the very same tensor.
"""

from __future__ import annotations

import functools
import inspect
import threading
from typing import Any

import torch
from torch import Tensor, nn

from opake import kernels
from opake.engine import ForwardPatch
from opake.plan import fused, lora
from opake.plan.fused import Found
from opake.plan.modules import built_class
from opake.plan.step import Concern, Context, Skip, Step

_SLOT = fused.slot("lora_qkv")
_NAMES = (("q_proj", "k_proj", "v_proj"), ("query", "key", "value"))


def _lora_qkv(context: Context) -> Step | Skip:
    absent = "no attention has adapters on query, key and value"
    return fused.build(context, "lora_qkv", _examine, absent)


def _examine(module: nn.Module) -> Found | str | None:
    names = next((n for n in _NAMES if all(module._modules.get(x) is not None for x in n)), None)
    why = None if names is None else lora.unfit_parts(module, names)
    if names is None or why is None:
        return None
    cls = built_class(module)
    why = why or fused.unlike_file(module)
    if why:
        return why
    layers = [module._modules[name] for name in names]
    if len({*layers}) < 3 or not _projects(module, cls, names):
        return f"{cls.__name__} does not project one input three times"
    patches = [ForwardPatch(layer, _take) for layer in layers if layer is not None]
    target = f"{cls.__name__}: {', '.join(names)}"
    return Found(names, [ForwardPatch(module, _announce), *patches], target)


# ---- does the attention call all three on what it is given?


class _Anything:
    """Whatever is done with it gives itself."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self

    def __getattr__(self, name: str) -> Any:
        return self

    def __iter__(self) -> Any:
        return iter((self, self))  # a cosine and a sine

    __getitem__ = __add__ = __radd__ = __mul__ = __rmul__ = __call__

    @classmethod
    def __torch_function__(cls, *args: Any, **kwargs: Any) -> Any:
        return cls()


class _Done(Exception):
    pass


def _projects(module: Any, cls: Any, names: tuple[str, ...]) -> bool:
    """Run the ``forward`` of a class up to the last of three projections, on no numbers."""
    layers = module._modules
    x = torch.empty(1, 2, layers[names[0]].in_features, device="meta")
    calls: list[tuple[str, bool]] = []

    def project(name: str, *args: Any, **kwargs: Any) -> Tensor:
        calls.append((name, len(args) == 1 and args[0] is x and not kwargs))
        if {called for called, _ in calls} == {*names}:
            raise _Done
        return torch.empty(1, 2, layers[name].out_features, device="meta")

    made = cls.__new__(cls)
    nn.Module.__init__(made)
    own = {
        n: v for n, v in vars(module).items() if n[0] != "_" and n not in ("forward", "training")
    }
    vars(made).update(own)
    for name in (*layers, *module._parameters, *module._buffers):
        stub = functools.partial(project, name) if name in names else _Anything()
        made._modules[name] = stub
    try:
        with torch.no_grad():
            cls.forward(made, x, *_others(cls.forward))
    except _Done:
        return len(calls) == 3 and all(same for _, same in calls) and not x._version
    except Exception:  # it does something else with its parts first
        return False
    return False


def _others(forward: Any) -> list[Any]:
    """Return something for every argument that has to be there besides the first."""
    given = [*inspect.signature(forward).parameters.values()][2:]
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    needed = [p for p in given if p.kind in kinds and p.default is inspect.Parameter.empty]
    return [None if "mask" in p.name else _Anything() for p in needed]


# ---- in the place of stock's


class _Group:
    """What the projections of one call of an attention share."""

    def __init__(self, instance: Any) -> None:
        self.site: fused.Site = vars(instance)[_SLOT]
        self.layers = [instance._modules[name] for name in self.site.formula]
        self.x: Any = None
        self.version = 0
        self.parts: dict[int, Tensor] | None = None  # by layer; None until there are some

    def compute(self, x: Any) -> None:
        """Compute all three, where they can be."""
        self.parts = {}
        if self.site.guard.few(_OP(), x, fused.widened(x, None)):
            return
        found = self._read(x)
        if isinstance(found, str):
            self.site.guard.fell_back[found] += 1
            return
        parts = self.site.guard.run(_OP(), (x, *found), {}, lambda *_: None, ())
        if parts is not None:
            self.x, self.version = x, _version(x)
            self.parts = {id(y): part for y, part in zip(self.layers, parts, strict=True)}

    def _read(self, x: Any) -> list[lora.Layer] | str:
        if fused.globally_hooked():
            return lora.HOOKED
        if not all(lora.is_whole(layer, lora.run_layer, _take) for layer in self.layers):
            return lora.HOOKED
        found = list[lora.Layer]()
        for layer in self.layers:
            this = lora.read(layer, x)
            if isinstance(this, str):
                return this
            found.append(this)
        return found if any(layer[1] for layer in found) else lora.NO_ADAPTER


class _Current(threading.local):
    group: _Group | None = None


_CURRENT = _Current()


def _announce(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Let the projections of an attention know of each other while it runs."""
    if torch.compiler.is_compiling():
        return wrapped(*args, **kwargs)
    outer = _CURRENT.group
    try:
        _CURRENT.group = _Group(instance)
        return wrapped(*args, **kwargs)
    finally:
        _CURRENT.group = outer


def _take(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Return what a projection has of its group; by itself where there is none."""
    if torch.compiler.is_compiling():
        return wrapped(*args, **kwargs)
    group = _CURRENT.group
    if group is None or not any(instance is layer for layer in group.layers):
        return wrapped(*args, **kwargs)
    if group.parts is None and len(args) == 1 and not kwargs:
        group.compute(args[0])
    if not group.parts:
        return wrapped(*args, **kwargs)
    same = len(args) == 1 and args[0] is group.x and not kwargs
    if same and id(instance) in group.parts and _version(group.x) == group.version:
        return group.parts.pop(id(instance))
    why = "a projection has another input, or one more"
    return group.site.guard.stock(why, wrapped, args, kwargs)


def _version(x: Tensor) -> int:
    return 0 if x.is_inference() else x._version


@functools.cache
def _OP() -> Any:  # noqa: N802
    return kernels.find("lora_qkv")


LORA_QKV = Concern(_lora_qkv)
