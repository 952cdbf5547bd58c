"""What operators are tested and timed on, drawn or declared, without a test library."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Call(NamedTuple):
    """Arguments of an operator. Floating-point tensors among ``args`` can be differentiated."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any] = {}  # noqa: RUF012  (a NamedTuple's default; never written)


@dataclass(frozen=True)
class Shape:
    """A benchmark's input and what bounds its time.

    Attributes:
        label: names it in the results.
        make: ``make(device, dtype)`` returns fresh, random arguments.
        forward: elements that the forward pass must read and write at least once.
        backward: the same for the backward pass alone.
        forward_flops: floating-point operations of its products of matrices.
        backward_flops: the same for the backward pass alone.
        frozen: tensors that are not trained there, by position, or by the way to one in a tuple:
            ``(1, 0)`` is the first of the second argument.
    """

    label: str
    make: Callable[[str, torch.dtype], Call]
    forward: int
    backward: int
    forward_flops: int = 0
    backward_flops: int = 0
    frozen: tuple[int | tuple[int, ...], ...] = ()


class Draw:
    """Draws examples from ``integer(low, high)``, both inclusive, the one source of randomness."""

    def __init__(
        self,
        integer: Callable[[int, int], int],
        device: str = "cpu",
        dtypes: Sequence[torch.dtype] = (torch.float32,),
    ) -> None:
        self.integer = integer
        self.device = device
        self.dtypes = tuple(dtypes)

    def choice(self, options: Sequence[Any]) -> Any:
        """Choose one of ``options``; the first is the simplest."""
        return options[self.integer(0, len(options) - 1)]

    def dtype(self) -> torch.dtype:
        """Choose a dtype."""
        dtype: torch.dtype = self.choice(self.dtypes)
        return dtype

    def shape(self, *, min_dims: int = 0, max_dims: int = 4, max_elements: int = 2048) -> list[int]:
        """Draw a shape, sizes of zero and one included."""
        shape: list[int] = []
        room = max_elements
        for _ in range(self.integer(min_dims, max_dims)):
            size = self.integer(0, 9) if self.integer(0, 3) else self.integer(0, room)
            shape.append(min(size, room))
            room //= max(shape[-1], 1)
        return shape

    def tensor(
        self,
        shape: Sequence[int],
        dtype: torch.dtype,
        scales: Sequence[float] = (1.0, 8.0, 0.01, 100.0),
    ) -> Tensor:
        """Draw a tensor of normal numbers: contiguous, permuted, sliced, strided or expanded."""
        generator = torch.Generator().manual_seed(self.integer(0, 2**31 - 1))
        scale = self.choice(scales)

        def normal(sizes: Sequence[int]) -> Tensor:
            values: Tensor = torch.randn(tuple(sizes), generator=generator) * scale
            return values.to(self.device, dtype)

        return self._laid_out(shape, normal, dtype)

    def indices(
        self,
        shape: Sequence[int],
        high: int,
        *,
        low: int = 0,
        dtypes: Sequence[torch.dtype] = (torch.int64, torch.int32),
    ) -> Tensor:
        """Draw whole numbers from ``low`` to ``high`` - 1, laid out as :meth:`tensor` does."""
        dtype = self.choice(dtypes)
        generator = torch.Generator().manual_seed(self.integer(0, 2**31 - 1))

        def whole(sizes: Sequence[int]) -> Tensor:
            values = torch.randint(low, max(high, low + 1), tuple(sizes), generator=generator)
            return values.to(self.device, dtype)

        return self._laid_out(shape, whole, dtype)

    def _laid_out(
        self, shape: Sequence[int], filled: Callable[[Sequence[int]], Tensor], dtype: torch.dtype
    ) -> Tensor:
        def make(sizes: Sequence[int]) -> Tensor:
            if self.device == "meta":  # of any size, then, as there are no numbers
                return torch.empty(tuple(sizes), dtype=dtype, device="meta")
            return filled(sizes)

        layout = self.choice(["contiguous", "permuted", "sliced", "strided", "offset", "expanded"])
        sizes = list(shape)
        if not sizes or layout == "contiguous":
            return make(sizes)
        axis = self.integer(0, len(sizes) - 1)
        if layout == "permuted":
            return make([sizes[axis], *sizes[:axis], *sizes[axis + 1 :]]).movedim(0, axis)
        if layout == "sliced":
            return make([*sizes[:-1], 2 * sizes[-1]])[..., sizes[-1] :]
        if layout == "strided":
            sizes[axis] *= 2
            return make(sizes)[(slice(None),) * axis + (slice(None, None, 2),)]
        if layout == "offset":
            size = torch.Size(sizes).numel()
            return make([size + 1])[1:].view(sizes)
        sizes[axis] = 1
        return make(sizes).expand(tuple(shape))
