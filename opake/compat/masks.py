"""Attention masks whose construction does not look at the values of a padding mask.

Stock drops a padding mask that turns out to hide nothing, and looks for sequences packed into one
row. Both read tensor values, which a functorch transform does not allow, and would make a row's
computation depend on its neighbours.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import masking_utils

from opake.compat._versions import has_cache
from opake.compat.batchify import by_name
from opake.compat.transforms import transforms_active, unwrap
from opake.errors import PackedSequences

RECURRENT = "create_recurrent_attention_mask"
OF_EVERY_LAYER = "create_masks_for_generate"
PREPARE = "_preprocess_mask_arguments"
"""What the builders begin with; a model that calls it itself looks for packed sequences there."""

_OVERLAYS = ("or_mask_function", "and_mask_function", "block_sequence_ids")
"""With any of these, stock always makes a mask."""

_MASK_PARAMETERS = ("config", "inputs_embeds", "attention_mask", "position_ids")

SYMBOLS = (
    ("transformers.masking_utils", "ALL_MASK_ATTENTION_FUNCTIONS._global_mapping", ()),
    ("transformers.masking_utils", "sdpa_mask", ("attention_mask", "allow_is_causal_skip")),
    (
        "transformers.masking_utils",
        "create_causal_mask",
        (*_MASK_PARAMETERS, "allow_is_causal_skip"),
    ),
)


@functools.cache
def builder(modeling: str, name: str, sees_all: bool = False) -> Callable[..., Any]:
    """Return a replacement for the mask builder ``name``, as found in the module ``modeling``.

    Under a functorch transform a supplied padding mask is always materialised; without one, the
    ``is_causal`` fast path stays. Outside, the stock builder runs.

    Args:
        modeling: the module, dotted.
        name: what it calls the builder.
        sees_all: the attention is causal by its masks alone. Stock drops a mask that hides nothing,
            so that a row without padding sees everything; here such a row's mask allows it.
    """
    if name == RECURRENT:
        return _recurrent(modeling)
    if name == OF_EVERY_LAYER:
        return _of_every_layer(modeling, sees_all)
    module = importlib.import_module(modeling)
    names = tuple(inspect.signature(getattr(masking_utils, name)).parameters)
    skip = "allow_is_bidirectional_skip" if "bidirectional" in name else "allow_is_causal_skip"

    def build(*args: Any, **kwargs: Any) -> Any:
        stock = getattr(module, name)
        if not transforms_active():
            return stock(*args, **kwargs)
        call = by_name(names, args, kwargs)
        if call is None:
            return stock(*args, **kwargs)
        if call.get("attention_mask") is not None:
            if skip in names:
                call[skip] = False
            if sees_all and "or_mask_function" in names and _may_be_dropped(name, call):
                whole = call["attention_mask"].bool().all(-1)
                call["or_mask_function"] = lambda batch, head, query, key: whole[batch]
        elif not has_cache(call) and call.get("position_ids") is not None:
            refuse_packing(call["position_ids"])
            call["position_ids"] = None  # what is left of them needs no mask
        return stock(**call)

    build._opake_permanent = True  # type: ignore[attr-defined]
    return build


def _recurrent(modeling: str) -> Callable[..., Any]:
    """Return the same for the mask of recurrent layers: (B, S), 0 where they read nothing."""
    module = importlib.import_module(modeling)
    names = tuple(inspect.signature(masking_utils.create_recurrent_attention_mask).parameters)

    def build(*args: Any, **kwargs: Any) -> Any:
        call = by_name(names, args, kwargs) if transforms_active() else None
        if call is None:
            return getattr(module, RECURRENT)(*args, **kwargs)
        mask, length = call["attention_mask"], call["inputs_embeds"].shape[1]
        if mask is None or mask.ndim != 2 or length == 1:
            return None
        return mask[:, -length:]

    build._opake_permanent = True  # type: ignore[attr-defined]
    return build


def _may_be_dropped(name: str, call: Mapping[str, Any]) -> bool:
    """Tell whether stock drops this mask of a causal builder where it hides nothing."""
    mask, config = call["attention_mask"], call["config"]
    if mask.ndim != 2 or "bidirectional" in name or has_cache(call):
        return False
    if any(call.get(name) is not None for name in _OVERLAYS):
        return False
    size = config.sliding_window if "sliding" in name else None
    size = config.attention_chunk_size if "chunked" in name else size
    length = call["inputs_embeds"].shape[1]
    return mask.shape[1] == length and (size is None or length < size)


def _of_every_layer(modeling: str, sees_all: bool) -> Callable[..., Any]:
    """Return the same for what builds a mask for every kind of layer in the config."""
    module = importlib.import_module(modeling)
    names = tuple(inspect.signature(masking_utils.create_masks_for_generate).parameters)
    kinds = masking_utils.LAYER_PATTERN_TO_MASK_FUNCTION_MAPPING

    def build(*args: Any, **kwargs: Any) -> Any:
        call = by_name(names, args, kwargs) if transforms_active() else None
        config = call["config"].get_text_config() if call else None
        layers = set(getattr(config, "layer_types", ()))
        # Where it builds a single mask, or hands over what it was given, it is a builder itself.
        functions = {kind: kinds.get(kind) for kind in layers}
        if call is None or not all(inspect.isfunction(f) for f in functions.values()) or not layers:
            return getattr(module, OF_EVERY_LAYER)(*args, **kwargs)
        call["config"] = config
        home = masking_utils.__name__
        made = {kind: builder(home, f.__name__, sees_all) for kind, f in functions.items()}
        return {kind: build_one(**call) for kind, build_one in made.items()}

    build._opake_permanent = True  # type: ignore[attr-defined]
    return build


def refuse_packing(position_ids: Tensor) -> None:
    """Raise :class:`~opake.errors.PackedSequences` where stock would build a packed mask.

    On a GPU this waits for the device once. While a graph is compiled or captured there are no
    values to look at, and nothing is refused.
    """
    if torch.compiler.is_compiling() or (
        position_ids.is_cuda and torch.cuda.is_current_stream_capturing()
    ):
        return
    # The values lie under the transform's wrappers; stock's own test of them would raise there.
    if bool((unwrap(position_ids).diff(dim=-1) != 1).any()):
        raise PackedSequences(
            "position_ids restart or jump within a row, without an attention_mask: stock would "
            "read them as several sequences packed into one, which cannot run under a functorch "
            "transform; pass one sequence per row, or an attention_mask"
        )


def padding_warning(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> None:
    """Skip, under a functorch transform, the warning that looks for padding among the tokens."""
    if not transforms_active():
        wrapped(*args, **kwargs)


def sdpa_mask(*args: Any, **kwargs: Any) -> Any:
    """Build the mask of transformers' ``sdpa`` under our own key of its mask interface."""
    return masking_utils.sdpa_mask(*args, **kwargs)
