"""Rotary position embedding of queries and keys, both in one launch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from opake.errors import InvalidArgument, InvalidType
from opake.kernels._autograd import Gradients, fused_function
from opake.kernels._bounds import check_indices
from opake.kernels._examples import Call, Draw, Shape
from opake.kernels._op import Op, register
from opake.kernels._rope import ROTATE, Options, rotate, table_gradients, turned

# ---- reference


def rope_reference(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    interleaved: bool = False,
    position_ids: Tensor | None = None,
    unsqueeze_dim: int = 1,
    rotary_dim: int | None = None,
) -> tuple[Tensor, Tensor]:
    """``x * cos + turned(x) * sin`` of the first ``rotary_dim`` columns, in plain PyTorch."""
    width = _rotated(q.shape[-1], cos.shape[-1], rotary_dim)
    cos, sin = (_per_token(x, position_ids) for x in (cos, sin))
    if cos.shape[-1] != width:
        cos, sin = (_both(x, interleaved) for x in (cos, sin))
    heads = -3 if unsqueeze_dim == 1 else -2
    cos, sin = cos.unsqueeze(heads), sin.unsqueeze(heads)

    def rotated(x: Tensor) -> Tensor:
        turning = x[..., :width]
        out = turning * cos + turned(turning, interleaved) * sin
        return out if width == x.shape[-1] else torch.cat((out, x[..., width:]), -1)

    return rotated(q), rotated(k)


def _both(table: Tensor, interleaved: bool) -> Tensor:
    """Every angle's number at both columns that it turns."""
    if interleaved:
        return torch.stack((table, table), -1).flatten(-2)
    return torch.cat((table, table), -1)


def _per_token(table: Tensor, position_ids: Tensor | None) -> Tensor:
    """The rows of ``table`` that ``position_ids`` name, NaN where there is none on a GPU."""
    if position_ids is None:
        return table
    ids, rows = position_ids, table.shape[-2]
    if ids.device.type == "cpu":
        # Unlike indexing, which counts negative numbers from the end, this raises IndexError.
        every = torch.arange(rows, device=ids.device)[:, None]
        known, ids = None, F.embedding(ids, every).squeeze(-1)
    elif not rows:
        return table.new_full((*ids.shape, table.shape[-1]), torch.nan)
    else:
        known = (ids >= 0) & (ids < rows)
        ids = ids.clamp(0, rows - 1)
    if table.dim() == 2:
        found = table[ids]
    elif ids.dim() == 1:
        found = table[:, ids]
    else:
        found = table[torch.arange(table.shape[0], device=ids.device)[:, None], ids]
    return found if known is None else torch.where(known[..., None], found, torch.nan)


# ---- kernels


def _fwd(
    batch: int,
    options: Options,
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    position_ids: Tensor | None,
) -> tuple[Tensor, ...]:
    table = torch.promote_types(cos.dtype, sin.dtype)
    dtypes = torch.promote_types(q.dtype, table), torch.promote_types(k.dtype, table)
    tables = cos, sin, position_ids
    return rotate(batch, options, q, k, tables, dtypes, back=False)  # type: ignore[return-value]


def _bwd(
    batch: int,
    options: Options,
    wanted: tuple[bool, ...],
    grads: tuple[Tensor | None, ...],
    tensors: tuple[Any, ...],
    saved: tuple[Tensor, ...],
) -> Gradients:
    *inputs, cos, sin, position_ids = tensors
    asked = [i for i in (0, 1) if wanted[i] and grads[i] is not None]
    found: list[Tensor | None] = [None, None]
    if asked:
        first, last = asked[0], asked[-1]
        second = grads[last] if len(asked) == 2 else None
        dtypes = inputs[first].dtype, inputs[last].dtype
        tables = cos, sin, position_ids
        x = grads[first]
        assert x is not None
        turned = rotate(batch, options, x, second, tables, dtypes, back=True)
        for i, y in zip(asked, turned, strict=False):
            found[i] = y
    for i in (0, 1):
        if wanted[i] and found[i] is None:
            found[i] = torch.zeros_like(inputs[i])
    if not (wanted[2] or wanted[3]):
        return (*found, None, None, None)
    both = table_gradients(batch, options, grads, tensors)
    return (*found, *(g if want else None for g, want in zip(both, wanted[2:4], strict=True)), None)


# ---- autograd and functorch


def _reference(options: Options, *tensors: Any) -> tuple[Tensor, Tensor]:
    *inputs, position_ids = tensors
    return rope_reference(
        *inputs,
        interleaved=options.interleaved,
        position_ids=position_ids,
        unsqueeze_dim=options.unsqueeze_dim,
        rotary_dim=options.width,
    )


def _keeps(options: Options, wanted: tuple[bool, ...]) -> list[bool]:
    tables = any(wanted[2:])
    return [tables, tables, True, True, True]


_kernels = fused_function("rope", _reference, _fwd, _bwd, outputs=2, keeps=_keeps)


def _fused(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    interleaved: bool = False,
    position_ids: Tensor | None = None,
    unsqueeze_dim: int = 1,
    rotary_dim: int | None = None,
) -> tuple[Tensor, Tensor]:
    width = _rotated(q.shape[-1], cos.shape[-1], rotary_dim)
    options = Options(width, bool(interleaved), unsqueeze_dim)
    result: tuple[Tensor, Tensor] = _kernels(options, q, k, cos, sin, position_ids)
    return result


# ---- public


def rope(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    interleaved: bool = False,
    position_ids: Tensor | None = None,
    unsqueeze_dim: int = 1,
    rotary_dim: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Rotate pairs of columns, ``(a cos - b sin, b cos + a sin)`` (Su et al. 2021, "RoFormer").

    The first ``R`` of ``D`` columns are rotated and the others copied. The tables are ``R`` wide,
    laid out as the columns, or ``R/2``, a number for each pair. Which of the two cannot always be
    seen: without ``rotary_dim``, ``R`` is ``2W`` where that is ``D`` or where ``W`` is odd, and
    ``W`` otherwise. So tables of half the angles need ``rotary_dim`` where a part of the columns is
    rotated, and full tables need it where that part is half of them.

    Args:
        q: (B, Hq, S, D), or (B, S, Hq, D) with ``unsqueeze_dim=2``, in any memory order.
        k: (B, Hk, S, D), or (B, S, Hk, D).
        cos: (S, W), (1, S, W) or (B, S, W); with ``position_ids`` any number of rows for S.
        sin: as ``cos``.
        interleaved: pair columns ``2i`` and ``2i + 1`` instead of ``i`` and ``i + R/2``.
        position_ids: (S,), (1, S) or (B, S), int32 or int64: the tables' row for every token.
        unsqueeze_dim: the dimension of the heads, 1 or 2.
        rotary_dim: ``R``.

    Returns:
        q and k rotated, in the dtype that torch promotes each and the tables to, computed in fp32
        and rounded once, and in the memory order that each had. Tables that are trained get their
        gradient in plain PyTorch.

    Raises:
        InvalidArgument: shapes that do not fit together.
        InvalidType: an argument that is no tensor, or positions that are no int32 or int64.
        IndexError: a position without a row, on the CPU; on a GPU that token becomes NaN.
    """
    width = _checked(q, k, cos, sin, interleaved, position_ids, unsqueeze_dim, rotary_dim)
    result: tuple[Tensor, Tensor] = ROPE(
        q,
        k,
        cos,
        sin,
        interleaved=interleaved,
        position_ids=position_ids,
        unsqueeze_dim=unsqueeze_dim,
        rotary_dim=width,
    )
    return result


def _checked(
    q: Any,
    k: Any,
    cos: Any,
    sin: Any,
    interleaved: Any,
    position_ids: Any,
    unsqueeze_dim: Any,
    rotary_dim: Any,
) -> int:
    """Return how many columns are rotated."""
    for name, x in (("q", q), ("k", k), ("cos", cos), ("sin", sin)):
        if not isinstance(x, Tensor):
            raise InvalidType(f"{name} must be a tensor, got {type(x).__name__}")
    if not isinstance(interleaved, bool):
        raise InvalidType(f"interleaved is a bool; found {type(interleaved).__name__}")
    if unsqueeze_dim not in (1, 2):
        raise InvalidArgument(f"unsqueeze_dim must be 1 or 2, got {unsqueeze_dim!r}")
    shapes = [tuple(x.shape) for x in (q, k, cos, sin)]
    heads = unsqueeze_dim
    if q.dim() != 4 or k.dim() != 4 or _but(shapes[0], heads) != _but(shapes[1], heads):
        raise InvalidArgument(
            f"q and k must have four dimensions, all but the heads' (unsqueeze_dim={heads}) "
            f"equal, got {shapes[0]} and {shapes[1]}"
        )
    examples, tokens, columns = _but(shapes[0], heads)
    rows = cos.shape[-2] if position_ids is not None and cos.dim() > 1 else tokens
    table = shapes[2]
    fits = table[-2:-1] == (rows,) and (len(table) == 2 or table[0] == 1 or table[0] == examples)
    if shapes[3] != table or len(table) not in (2, 3) or not fits:
        raise InvalidArgument(
            f"cos and sin must be (S, W), (1, S, W) or (B, S, W) for B={examples} and S={tokens}, "
            f"got {table} and {shapes[3]}"
        )
    if position_ids is not None:
        if not isinstance(position_ids, Tensor) or position_ids.dtype not in _INTEGERS:
            kind = getattr(position_ids, "dtype", type(position_ids).__name__)
            raise InvalidType(f"position_ids must be an int32 or int64 tensor, got {kind}")
        shape = tuple(position_ids.shape)
        fits = shape[-1:] == (tokens,) and (
            len(shape) == 1 or shape[0] == 1 or shape[0] == examples
        )
        if len(shape) not in (1, 2) or not fits:
            raise InvalidArgument(
                f"position_ids must be (S,), (1, S) or (B, S) for B={examples} and S={tokens}, "
                f"got {tuple(position_ids.shape)}"
            )
        check_indices("position_ids", position_ids, table[-2])
    return _rotated(columns, table[-1], rotary_dim)


_INTEGERS = (torch.int32, torch.int64)


def _but(shape: tuple[int, ...], dim: int) -> tuple[int, ...]:
    return shape[:dim] + shape[dim + 1 :]


def _rotated(columns: int, table: int, rotary_dim: int | None) -> int:
    """How many columns are rotated by tables of that width."""
    width = rotary_dim
    if isinstance(width, float):
        raise InvalidType(f"rotary_dim is an int or None; found {width!r}")
    if width is None:
        width = 2 * table if table % 2 or 2 * table == columns else table
    if width > columns or width % 2 or (table != width and table != width // 2):
        raise InvalidArgument(
            f"tables of width {table} do not rotate {width} of {columns} columns: that must be an "
            f"even number, and the tables as wide or half as wide"
        )
    return width


# ---- registration


def _fits(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, **options: Any) -> str:
    if not all(x.is_floating_point() for x in (q, k, cos, sin)):
        return "integers are promoted by the reference"
    return ""


def _examples(draw: Draw) -> Call:
    examples, tokens = draw.integer(0, 3), draw.integer(0, 5)
    heads = draw.integer(1, 5), draw.integer(0, 3)
    columns = draw.choice([4, 2, 6, 16, 20, 0])
    rotated = draw.choice([columns, columns, min(columns, 4), 2 * (columns // 4)])
    table = draw.choice([rotated // 2, rotated])
    unsqueeze_dim = draw.choice([1, 2])
    options: dict[str, Any] = {"interleaved": draw.choice([False, True])}
    options |= {"unsqueeze_dim": unsqueeze_dim, "rotary_dim": rotated}
    rows = tokens
    if draw.integer(0, 1):
        rows = draw.integer(1, 7)
        shape = draw.choice([[tokens], [1, tokens], [examples, tokens]])
        options["position_ids"] = draw.indices(shape, rows)

    def many(heads: int) -> Tensor:
        outer = (heads, tokens) if unsqueeze_dim == 1 else (tokens, heads)
        return draw.tensor([examples, *outer, columns], draw.dtype())

    shape = draw.choice([[rows, table], [1, rows, table], [examples, rows, table]])
    cos, sin = (draw.tensor(shape, draw.dtype()) for _ in "cs")
    return Call((many(heads[0]), many(heads[1]), cos, sin), options)


def _shape(batch: int, tokens: int, heads: int, kv_heads: int, columns: int) -> Shape:
    def make(device: str, dtype: torch.dtype) -> Call:
        def projected(heads: int) -> Tensor:
            x = torch.randn(batch, tokens, heads, columns, device=device, dtype=dtype)
            return x.transpose(1, 2)

        steps = torch.arange(0, columns, 2, device=device) / columns
        angles = torch.arange(tokens, device=device)[:, None] * 10000.0**-steps
        angles = torch.cat((angles, angles), -1)[None]
        tables = angles.cos().to(dtype), angles.sin().to(dtype)
        return Call((projected(heads), projected(kv_heads), *tables))

    # Both passes read and write q and k; the tables are shared by all heads and examples.
    elements = 2 * batch * tokens * (heads + kv_heads) * columns
    label = f"{batch}x{tokens} {heads}/{kv_heads}x{columns}"
    return Shape(label, make, forward=elements, backward=elements)


ROPE = register(
    Op(
        name="rope",
        function=rope,
        reference=rope_reference,
        fused=_fused,
        fits=_fits,
        examples=_examples,
        benchmarks=(_shape(4, 2048, 32, 8, 128), _shape(4, 2048, 14, 2, 64)),
        launches=(ROTATE,),
    )
)
