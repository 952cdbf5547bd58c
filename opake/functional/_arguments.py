"""Checks of what the per-example helpers are given, made before anything is computed."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from numbers import Real
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from opake.errors import InvalidArgument, InvalidBatch


def check_call(
    caller: str, params: Any, batch: Any, chunk_size: Any, randomness: Any
) -> tuple[list[Tensor], list[Tensor], int]:
    """The leaves of ``params``, the leaves of ``batch`` and their common leading size."""
    _check_options(caller, chunk_size, randomness)
    return _param_leaves(caller, params), *_batch_leaves(caller, batch)


def _check_options(caller: str, chunk_size: Any, randomness: Any) -> None:
    if chunk_size is not None and (
        isinstance(chunk_size, bool) or not isinstance(chunk_size, int) or chunk_size < 1
    ):
        raise InvalidArgument(
            f"{caller}: chunk_size must be a positive int, or None for the whole batch at once; "
            f"found {chunk_size!r}"
        )
    if randomness not in ("different", "same", "error"):
        raise InvalidArgument(
            f"{caller}: randomness must be 'different' (every example draws its own), 'same' "
            f"(all share one draw) or 'error' (drawing is refused); found {randomness!r}"
        )


def _param_leaves(caller: str, params: Any) -> list[Tensor]:
    """The leaves of ``params``, or an error if one can have no gradient."""
    leaves = pytree.tree_leaves(params)
    for index, leaf in enumerate(leaves):
        if not isinstance(leaf, Tensor) or not leaf.is_floating_point():
            found = f"{leaf.dtype} tensor" if isinstance(leaf, Tensor) else type(leaf).__name__
            raise InvalidArgument(
                f"{caller}: params{_path(params, index)} is a {found}; every leaf must be a "
                "floating point tensor, so bind whatever is not trained into loss_fn"
            )
    if not leaves:
        raise InvalidArgument(
            f"{caller}: params holds no tensor; pass the dict that make_functional returns, or "
            "another pytree of tensors"
        )
    return leaves


def _batch_leaves(caller: str, batch: Any) -> tuple[list[Tensor], int]:
    """The leaves of ``batch`` and their common leading size, or `InvalidBatch`."""
    leaves = pytree.tree_leaves(batch)
    for index, leaf in enumerate(leaves):
        if not isinstance(leaf, Tensor):
            raise InvalidBatch(
                f"{caller}: batch{_path(batch, index)} is a {type(leaf).__name__}; every leaf "
                "must be a tensor with a leading batch dimension, so convert it, leave it out, or "
                "bind it into loss_fn"
            )
        if leaf.ndim == 0:
            raise InvalidBatch(
                f"{caller}: batch{_path(batch, index)} has no dimension; every leaf needs a "
                "leading batch dimension, so expand it to (B,) or bind it into loss_fn"
            )
    if not leaves:
        raise InvalidBatch(f"{caller}: batch holds no tensor, so the number of examples is unknown")
    if len({leaf.shape[0] for leaf in leaves}) > 1:
        sizes = ", ".join(f"batch{_path(batch, i)}: {x.shape[0]}" for i, x in enumerate(leaves))
        raise InvalidBatch(
            f"{caller}: the leaves of batch disagree on the number of examples ({sizes}); "
            "give every leaf the same leading size"
        )
    return leaves, leaves[0].shape[0]


def check_mask(caller: str, mask: Any, batch_size: int) -> None:
    """Raise unless ``mask`` is None or a bool tensor of shape (B,)."""
    if mask is None:
        return
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool or mask.shape != (batch_size,):
        is_tensor = isinstance(mask, Tensor)
        found = f"{mask.dtype} of shape {tuple(mask.shape)}" if is_tensor else repr(mask)
        raise InvalidArgument(
            f"{caller}: mask must be a bool tensor of shape ({batch_size},), True for the "
            f"examples that count; found {found}"
        )


def max_norm_value(caller: str, max_norm: Any, what: str = "max_norm") -> float:
    """``max_norm`` as a float, or an error if it is no positive number."""
    is_number = isinstance(max_norm, Real) and not isinstance(max_norm, bool)
    if not is_number or math.isnan(max_norm) or max_norm <= 0:
        raise InvalidArgument(
            f"{caller}: {what} must be a positive Python number (inf clips nothing), "
            f"found {max_norm!r}"
        )
    return float(max_norm)


def norm_groups(
    caller: str, params: Any, max_norm: Mapping[Any, Any]
) -> tuple[list[int], list[float]]:
    """For every parameter the index of the first pattern it matches; the norm of every pattern."""
    if not isinstance(params, dict) or not all(
        isinstance(name, str) and isinstance(leaf, Tensor) for name, leaf in params.items()
    ):
        raise InvalidArgument(
            f"{caller}: a max_norm per group matches parameter names, so params must be a flat "
            "dict of name to tensor, as make_functional returns it; pass one, or a single number"
        )
    patterns = [_compiled(caller, key) for key in max_norm]
    norms = [
        max_norm_value(caller, norm, f"max_norm[{pattern!r}]") for pattern, norm in max_norm.items()
    ]
    first = [next((i for i, p in enumerate(patterns) if p.search(name)), None) for name in params]
    unmatched = [repr(name) for name, index in zip(params, first, strict=True) if index is None]
    if unmatched:
        raise InvalidArgument(
            f"{caller}: no pattern of max_norm matches {', '.join(unmatched)}; "
            "add one, or a last '.*' for the rest"
        )
    return [index for index in first if index is not None], norms


def _compiled(caller: str, pattern: Any) -> re.Pattern[str]:
    try:
        if isinstance(pattern, str):
            return re.compile(pattern)
        problem = f"it is a {type(pattern).__name__}"
    except re.error as error:
        problem = str(error)
    raise InvalidArgument(
        f"{caller}: the key {pattern!r} of max_norm is no regular expression ({problem}); "
        "use a string that re.search accepts"
    )


def _path(tree: Any, index: int) -> str:
    """Where leaf ``index`` sits in ``tree``, such as ``['x'][0]``."""
    try:
        return pytree.keystr(pytree.tree_flatten_with_path(tree)[0][index][0])
    except ValueError:  # a node class registered without keys
        return f"<leaf {index}>"
