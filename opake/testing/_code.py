"""A failing example in few numbers, and as Python that makes it again."""

from __future__ import annotations

import base64
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from opake.testing import _parity as parity
from opake.testing._parity import Key
from opake.testing._transforms import Example

__all__ = ["importable", "script", "simplified"]

_FEW = 64  # numbers that a reader may want to see; more are drawn again, or packed
_ALIGNED = 16  # elements: a view's offset matters to loads of at most 16 bytes


def simplified(
    example: Example, fails: Callable[[Example], bool]
) -> tuple[Example, dict[Key, str]]:
    """Exchange the numbers of each tensor for simpler ones while the example still fails.

    Returns the example and, for each of its tensors, the expression that makes it.
    """
    found: dict[Key, str] = {}
    for key, x in parity.tensors(example.call).items():
        found[key] = _expression(x, _literal(_flat(x)))
        for flat, code in _simpler(x):
            call = parity.replaced(example.call, {key: _laid_out(flat, x)})
            if fails(example._replace(call=call)):
                example, found[key] = example._replace(call=call), _expression(x, code)
                break
    return example, found


def _simpler(x: Tensor) -> Iterator[tuple[Tensor, str]]:
    """Other numbers for the memory under ``x``, and the code for them."""
    flat = _flat(x)
    n, where = len(flat), _keywords(x)
    if not n or x.dtype == torch.bool:
        return
    if not x.is_floating_point():
        yield torch.zeros_like(flat), f"torch.zeros({n}{where})"
        return
    yield torch.ones_like(flat), f"torch.ones({n}{where})"
    if n <= _FEW:
        for digits in (0, 1):
            rounded = flat.double().round(decimals=digits).to(x.dtype)
            yield rounded, _literal(rounded)
        return
    normal = torch.randn(n, generator=torch.Generator().manual_seed(0)).to(x.device, x.dtype)
    device = f"{str(x.device)!r}, " if x.device.type != "cpu" else ""
    code = f"torch.randn({n}, generator=torch.Generator().manual_seed(0)).to({device}{x.dtype})"
    yield normal, code


# ---- tensors


def _flat(x: Tensor) -> Tensor:
    """The memory that ``x`` lies in, from its last aligned element on, zero where x is not."""
    if not x.numel():
        return x.new_empty(0)
    x = x.detach()
    length = sum((size - 1) * step for size, step in zip(x.shape, x.stride(), strict=True)) + 1
    flat = x.new_zeros(_offset(x) + length)
    # Where elements share memory they are equal, so it does not matter which is copied last.
    shared = [0 if step == 0 else slice(None) for step in x.stride()]
    kept = [step for step in x.stride() if step]
    part = x[tuple(shared)]
    flat.as_strided(part.shape, kept, _offset(x)).copy_(part)
    return flat


def _offset(x: Tensor) -> int:
    return int(x.storage_offset()) % _ALIGNED


def _laid_out(flat: Tensor, x: Tensor) -> Tensor:
    if not x.numel():
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
    return flat.as_strided(x.shape, x.stride(), _offset(x))


def _expression(x: Tensor, flat: str) -> str:
    """Code for a tensor laid out as ``x`` over the memory that the code ``flat`` makes."""
    shape, stride = tuple(x.shape), tuple(x.stride())
    if not x.numel():
        if stride == torch.empty(shape, device="meta").stride():
            return f"torch.empty({shape}{_keywords(x)})"
        return f"torch.empty_strided({shape}, {stride}{_keywords(x)})"
    if not x.is_contiguous() or _offset(x):
        return f"{flat}.as_strided({shape}, {stride}, {_offset(x)})"
    if flat.startswith(("torch.ones(", "torch.zeros(")):
        name, _, rest = flat.partition(f"({x.numel()}")
        return f"{name}({shape}{rest}"
    if not shape and flat.startswith("torch.tensor("):
        return flat.replace("[", "").replace("]", "")
    return flat if x.dim() == 1 else f"{flat}.view({shape})"


def _literal(flat: Tensor) -> str:
    where = _keywords(flat, always=True)
    if len(flat) > 4 * _FEW:
        packed = base64.b64encode(zlib.compress(flat.cpu().view(torch.uint8).numpy().tobytes()))
        device = f".to({str(flat.device)!r})" if flat.device.type != "cpu" else ""
        unpacked = f"zlib.decompress(base64.b64decode({packed.decode()!r}))"
        return f"torch.frombuffer(bytearray({unpacked}), dtype={flat.dtype}){device}"
    return f"torch.tensor([{', '.join(_number(x) for x in flat)}]{where})"


def _number(x: Tensor) -> str:
    """The shortest decimal that is this number in its dtype."""
    value = x.item()
    if not x.is_floating_point():
        return repr(value)
    for digits in (1, 2, 3, 4, 6, 9, 17):
        text = f"{value:.{digits}g}"
        if value != value or torch.tensor(float(text), dtype=x.dtype).item() == value:
            break
    return "-0.0" if text == "-0" else text  # the literal -0 is an int, without its sign


def _keywords(x: Tensor, always: bool = False) -> str:
    text = f", dtype={x.dtype}" if always or x.dtype != torch.get_default_dtype() else ""
    return text + (f", device={str(x.device)!r}" if x.device.type != "cpu" else "")


# ---- the script


def importable(function: Any) -> str:
    """The statement that imports a function, ``""`` if there is none."""
    module, name = getattr(function, "__module__", ""), getattr(function, "__qualname__", "")
    if not module or module == "__main__" or not str(name).isidentifier():
        return ""
    found = getattr(sys.modules.get(module), name, None)
    return f"from {module} import {name}" if found is function else ""


def script(
    example: Example,
    expressions: dict[Key, str],
    message: str,
    *,
    head: Sequence[str],
    first: Sequence[str] = (),
    names: tuple[str, str] = ("fn", "reference"),
    bar: float = parity.FP32_BAR,
) -> str:
    """A program that makes the example, shows both results and raises the error again.

    Args:
        example: what fails.
        expressions: code for its tensors.
        message: what fails.
        head: the lines that define the two functions.
        first: lines before anything is imported.
        names: of the function and of its reference.
        bar: the tolerance.
    """
    call, transform, in_dims, chunk_size, seed = example
    args = [_value(x, (key,), expressions) for key, x in enumerate(call.args)]
    kwargs = [f'"{k}": {_value(x, (k,), expressions)}' for k, x in call.kwargs.items()]
    body = ["args = (", *(f"    {x}," for x in args), ")"]
    body += ["kwargs = {", *(f"    {x}," for x in kwargs), "}"] if kwargs else ["kwargs = {}"]
    options = [f'transform="{transform}"'] if transform != "none" else []
    options += [f"in_dims={in_dims!r}"] if in_dims else []
    options += [f"chunk_size={chunk_size}"] if chunk_size else []
    options += [f"seed={seed}"] if seed else []
    options += [f"tolerance={bar}"] if bar != parity.FP32_BAR else []
    shown = _calls(example, names)
    check = f"assert_parity({', '.join([*names, 'args', 'kwargs', *options])})"
    text = "\n".join([*body, *shown, check])
    imports = ["import base64", "import zlib", ""] if "zlib." in text else []
    imports += ["from math import inf, nan", ""] if "inf" in text or "nan" in text else []
    imports += ["import torch"]
    imports += ["from torch.func import vmap"] if "vmap(" in "".join(shown) else []
    comment = [f"# {line}" for line in message.splitlines()[:1]]
    imports += ["from opake.testing import assert_parity"]
    return "\n".join([*comment, *first, *imports, *head, "", text])


def _calls(example: Example, names: tuple[str, str]) -> list[str]:
    """Lines that print what the two functions return, wherever ``vmap`` takes it in one line."""
    call, _, in_dims, _, _ = example
    if any(isinstance(key, str) for level in in_dims for key in level):
        return []
    rest = ", **kwargs" if call.kwargs else ""
    lines = []
    for name in names:
        mapped = name
        for level in reversed(in_dims):
            dims = tuple(_dims(x, (i,), level) for i, x in enumerate(call.args))
            mapped = f"vmap({mapped}, in_dims={dims})"
        if in_dims and call.kwargs:
            mapped = mapped.replace(f"({name}, ", f"(lambda *x: {name}(*x, **kwargs), ", 1)
            lines.append(f'print("{name}", {mapped}(*args))')
        else:
            lines.append(f'print("{name}", {mapped}(*args{rest}))')
    return lines


def _dims(x: Any, path: tuple[int, ...], level: dict[Key, int]) -> Any:
    """What ``in_dims`` says of an argument: None for what is not mapped, and for all inside it."""
    if not isinstance(x, (tuple, list)):
        return level.get(_key(path))
    inner = [_dims(y, (*path, i), level) for i, y in enumerate(x)]
    return None if all(dim is None for dim in inner) else type(x)(inner)


def _key(path: tuple[Any, ...]) -> Any:
    return path if len(path) > 1 else path[0]


def _value(x: Any, path: tuple[Any, ...], expressions: dict[Key, str]) -> str:
    if isinstance(x, Tensor):
        return expressions.get(_key(path)) or _expression(x, _literal(_flat(x)))
    if isinstance(x, (tuple, list)):
        inner = ", ".join(_value(y, (*path, i), expressions) for i, y in enumerate(x))
        return f"[{inner}]" if isinstance(x, list) else f"({inner}{',' * (len(x) == 1)})"
    return f"{x}" if isinstance(x, torch.dtype) else repr(x)
