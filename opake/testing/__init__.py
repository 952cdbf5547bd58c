"""Compare a fused function with plain PyTorch, under every transform of torch.func.

Needs Hypothesis: ``pip install opake[testing]``. Everything but :func:`assert_parity`, which
compares one example, draws with it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from opake.testing._assert import assert_vmap_parity as assert_vmap_parity
    from opake.testing._strategies import STRIDES as STRIDES
    from opake.testing._strategies import dtypes as dtypes
    from opake.testing._strategies import shapes as shapes
    from opake.testing._strategies import shared_shapes as shared_shapes
    from opake.testing._strategies import tensors as tensors
    from opake.testing._transforms import TRANSFORMS as TRANSFORMS
    from opake.testing._transforms import assert_parity as assert_parity

_WHERE = {
    "TRANSFORMS": "_transforms",
    "assert_parity": "_transforms",
    "assert_vmap_parity": "_assert",
    **dict.fromkeys(("STRIDES", "dtypes", "shapes", "shared_shapes", "tensors"), "_strategies"),
}

__all__ = [
    "STRIDES",
    "TRANSFORMS",
    "assert_parity",
    "assert_vmap_parity",
    "dtypes",
    "shapes",
    "shared_shapes",
    "tensors",
]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        value = getattr(importlib.import_module(f"{__name__}.{_WHERE[name]}"), name)
    except ModuleNotFoundError as error:
        if error.name != "hypothesis":
            raise
        raise ImportError(
            f"opake.testing.{name} needs Hypothesis: pip install opake[testing]", name="hypothesis"
        ) from error
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
