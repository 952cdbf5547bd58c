"""What a model's own modules say about their family."""

from __future__ import annotations

import importlib
import re
import sys
import types
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from torch import nn

from opake import symbols
from opake.engine.splice import contents
from opake.errors import UnsupportedModel
from opake.families import Family

_BUILDER = re.compile(r"create_\w+_mask")
_DISPATCH = "ALL_ATTENTION_FUNCTIONS"
_SDPA = "scaled_dot_product_attention"
_SOFTMAX = {"softmax", "Softmax"}
_PRODUCTS = {"matmul", "bmm", "baddbmm", "einsum"}
_Read = dict[type, list["_Function"]]


class _Function(NamedTuple):
    """A function that ``forward`` runs: where it is defined, and the names that it reads."""

    owner: Any
    method: str
    names: frozenset[str]


class _Builds(NamedTuple):
    """A method that calls builders of masks."""

    owner: Any
    method: str
    masks: tuple[str, ...]


def deduce(model: nn.Module) -> Family:
    """Return the family that the code of the modules of ``model`` shows.

    What is read is which names the functions look up, through their decorators. Raises
    :class:`~opake.errors.UnsupportedModel` with the reason where that does not tell.
    """
    config: Any = model.config
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModel("it is an encoder-decoder model")
    classes = dict.fromkeys(type(module) for module in model.modules())
    read = {cls: _functions(cls) for cls in classes if _is_theirs(cls)}
    base = _base(model, read)
    attention = _where(read, {_DISPATCH})
    own_sdpa = [cls for cls in _where(read, {_SDPA}) if cls not in attention]
    if not attention and not own_sdpa:
        products = _where(read, _PRODUCTS)
        attention = [cls for cls in _where(read, _SOFTMAX) if cls in products]
        if not attention and any("attention" in cls.__name__.lower() for cls in read):
            raise UnsupportedModel(
                f"its attention neither looks up {_DISPATCH}, nor calls torch's SDPA, nor takes a "
                "softmax itself"
            )
    home = base.owner.__module__
    for cls in (base.owner, *attention, *own_sdpa):
        _require_name(cls, home)
    return Family(
        module=home,
        base=base.owner.__name__,
        attention=tuple(cls.__name__ for cls in attention),
        masks=base.masks,
        masks_in=base.method,
        own_sdpa=tuple(cls.__name__ for cls in own_sdpa),
        cache="use_cache" in symbols.parameters(base.owner.forward),
    )


def _base(model: Any, read: _Read) -> _Builds:
    found = [*dict.fromkeys(x for functions in read.values() for x in _builds(functions))]
    if not found:
        through = _through_a_function(read)
        if through:
            raise UnsupportedModel(through)
        # Masks of its own make, or none: those may be fit for vmap as they are.
        return _Builds(type(model.base_model), "forward", ())
    if len({builds.owner for builds in found}) > 1:
        names = " and ".join(dict.fromkeys(builds.owner.__name__ for builds in found))
        raise UnsupportedModel(f"several of its modules build masks: {names}")
    if len(found) > 1:
        names = " and ".join(builds.method for builds in found)
        raise UnsupportedModel(f"{found[0].owner.__name__} builds masks in two methods: {names}")
    return found[0]


def _builds(functions: Iterable[_Function]) -> Iterator[_Builds]:
    masking = importlib.import_module("transformers.masking_utils")
    for owner, method, names in functions:
        space = _space(owner)
        masks = [x for x in names if _BUILDER.fullmatch(x) and x in space and hasattr(masking, x)]
        if masks:
            yield _Builds(owner, method, tuple(sorted(masks)))


def _through_a_function(read: _Read) -> str:
    """Say which function of a module calls builders, if one does."""
    for owner, method, names in (x for functions in read.values() for x in functions):
        for name in sorted(names):
            function = _space(owner).get(name)
            is_function = isinstance(function, types.FunctionType)
            if is_function and any(map(_BUILDER.fullmatch, _names(function))):
                where = f"{owner.__name__}.{method}"
                return f"{where} reaches the mask builders through the function {name}"
    return ""


def _where(read: _Read, wanted: set[str]) -> list[Any]:
    """Return the classes that define a ``forward`` which reads a wanted name, or calls one."""
    return [
        *dict.fromkeys(
            owner if method == "forward" else _owners(cls, "forward")[0]
            for cls, functions in read.items()
            for owner, method, names in functions
            if names & wanted
        )
    ]


def _require_name(cls: type, home: str) -> None:
    if getattr(sys.modules.get(home), cls.__name__, None) is not cls:
        where = f"{cls.__module__}.{cls.__qualname__}"
        raise UnsupportedModel(f"{where} cannot be found as {cls.__name__} in the module {home}")


def _is_theirs(cls: type) -> bool:
    """Tell whether a class is a modeling file's, not one of torch's layers."""
    return not cls.__module__.startswith("torch.")


def _space(owner: type) -> dict[str, Any]:
    """Return the globals of the module that defines a class."""
    return vars(sys.modules[owner.__module__]) if owner.__module__ in sys.modules else {}


def _owners(cls: type, method: str) -> list[type]:
    """Return the classes in which ``cls`` and then ``super()`` find ``method``."""
    return [base for base in cls.__mro__ if method in vars(base)]


def _functions(cls: type) -> list[_Function]:
    """Return ``forward`` and the methods that it calls in turn."""
    stock = importlib.import_module("transformers.modeling_utils").PreTrainedModel
    found: list[_Function] = []
    seen: set[str] = set()
    todo = ["forward"]
    while todo:
        method = todo.pop()
        if method in seen:
            continue
        seen.add(method)
        for owner in _owners(cls, method):
            function = vars(owner)[method]
            function = getattr(function, "__func__", function)
            if not isinstance(function, types.FunctionType):
                break
            names = frozenset(_names(function))
            found.append(_Function(owner, method, names))
            # What every model inherits builds no masks and attends to nothing.
            todo += [name for name in names if not hasattr(stock, name)]
            if "super" not in names:
                break
    return found


def _names(function: Any) -> set[str]:
    """Return the names that a function reads, and those that its decorators do."""
    return {name for code in _codes(function) for name in code.co_names}


def _codes(function: Any) -> Iterable[types.CodeType]:
    seen: set[int] = set()
    todo = [function]
    while todo:
        item = todo.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, types.CodeType):
            yield item
            todo += item.co_consts
        elif isinstance(item, types.FunctionType):
            todo += [item.__code__, *map(contents, item.__closure__ or ())]
            todo.append(getattr(item, "__wrapped__", None))
