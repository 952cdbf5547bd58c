"""Search for an example that fails, and say it in code."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import hypothesis
from hypothesis import HealthCheck, Phase, Verbosity, given, settings
from hypothesis import strategies as st
from hypothesis.errors import Flaky
from hypothesis.strategies import SearchStrategy

from opake.errors import InvalidArgument
from opake.kernels import Call
from opake.testing import _code as code
from opake.testing import _parity as parity
from opake.testing._parity import Function
from opake.testing._transforms import TRANSFORMS, Dims, Example, check, drawn

__all__ = ["Failure", "assert_vmap_parity", "failing", "program", "quiet", "search"]


class Failure(NamedTuple):
    """The smallest example found that fails, and how."""

    example: Example
    message: str


class _Wrong(Exception):
    pass


def search(
    examples: SearchStrategy[Example],
    fails: Callable[[Example], str],
    config: settings,
    seed: int | None = None,
) -> Failure | None:
    """Draw examples until one fails, and shrink it; ``fails`` returns ``""`` where none does."""
    last: list[Failure] = []

    @config
    @given(examples)
    def test(example: Example) -> None:
        message = fails(example)
        if message:
            last[:] = [Failure(example, message)]
            raise _Wrong

    try:
        (test if seed is None else hypothesis.seed(seed)(test))()
    except _Wrong:
        return last[0]
    except Flaky:
        if not last:
            raise
        example, message = last[0]
        return Failure(example, f"{message} (and not every time)")
    return None


def quiet(base: settings | None = None, **options: Any) -> settings:
    """Settings under which Hypothesis itself prints nothing and has no deadline."""
    phases = [p for p in (base or settings()).phases if p is not Phase.explain]
    return settings(
        base,
        deadline=None,
        report_multiple_bugs=False,
        phases=phases,
        verbosity=Verbosity.quiet,
        suppress_health_check=list(HealthCheck),
        **options,
    )


def failing(compare: Callable[[], Any]) -> str:
    """Say how a comparison fails, ``""`` if it does not."""
    try:
        compare()
    except AssertionError as error:
        return str(error) or "an assertion failed"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def assert_vmap_parity(
    fn: Function,
    reference: Function,
    *strategies: Any,
    kwargs: Mapping[str, Any] | None = None,
    in_dims: Sequence[Dims] | None = None,
    transforms: Sequence[str] = TRANSFORMS,
    tolerance: float = parity.FP32_BAR,
    max_examples: int | None = None,
    profile: str | None = None,
    seed: int | None = None,
) -> None:
    """Assert that ``fn`` computes what ``reference`` does, under every transform of torch.func.

    ``reference`` runs in fp64, one example at a time. Compared are outputs, gradients (for incoming
    gradients of any layout, and where some outputs are not used), ``vmap`` over any subset of the
    tensors at any dimension, nested, in chunks, before and after ``grad`` or ``vjp``, and
    ``jacrev`` where it is small; a second backward and a second run; and that neither inputs nor
    incoming gradients are written to. fp32 and fp64 have to be within ``tolerance`` of the largest
    number; half precision may be 1.05 times as far from fp64 as ``reference`` in that precision
    (RMS), and at most twice as far plus one ulp.

    Args:
        fn: the function to judge; returns a tensor or a tuple of tensors. Its floating-point
            tensors, the positional ones, are differentiated.
        reference: the same in plain, differentiable PyTorch.
        strategies: one for each positional argument, such as :func:`tensors`; anything that is
            no strategy is passed as it is.
        kwargs: keyword arguments, strategies or values.
        in_dims: the ``in_dims`` to choose from, as ``vmap`` takes them, one for each positional
            argument; by default any tensors are mapped, at any dimension.
        transforms: some of :data:`TRANSFORMS`.
        tolerance: largest error in fp32 and fp64, relative to the largest number.
        max_examples: how many examples to draw; by default as the profile says.
        profile: a Hypothesis profile; by default the one that is loaded.
        seed: of the search; by default another one each time, unless the profile is derandomised.

    Raises:
        AssertionError: they differ. The message ends in the smallest example found, as a program.
        InvalidArgument: a transform is unknown, or none is given, or no strategy.
    """
    if not strategies:
        raise InvalidArgument("no strategies are given; there is one for each argument of fn")
    if not transforms or not set(transforms) <= set(TRANSFORMS):
        raise InvalidArgument(f"transforms are some of {TRANSFORMS}; got {tuple(transforms)}")
    options: dict[str, Any] = {} if max_examples is None else {"max_examples": max_examples}
    if seed is not None:
        options |= {"derandomize": False, "database": None}
    config = quiet(settings.get_profile(profile) if profile else None, **options)

    @st.composite
    def examples(draw: st.DrawFn) -> Example:
        def value(x: Any) -> Any:
            return draw(x) if isinstance(x, SearchStrategy) else x

        args = tuple(map(value, strategies))
        call = Call(args, {name: value(x) for name, x in (kwargs or {}).items()})
        return drawn(lambda low, high: draw(st.integers(low, high)), call, transforms, in_dims)

    def fails(example: Example) -> str:
        return failing(lambda: check(fn, reference, example, bar=tolerance))

    failure = search(examples(), fails, config, seed)
    if failure is not None:
        head, names = _head(fn, reference)
        text = program(failure, fails, head, names, tolerance)
        raise AssertionError(text)


def program(
    failure: Failure,
    fails: Callable[[Example], str],
    head: Sequence[str],
    names: tuple[str, str],
    bar: float = parity.FP32_BAR,
    first: Sequence[str] = (),
) -> str:
    """What is wrong, and the smallest example that shows it, as a program."""
    example, expressions = code.simplified(failure.example, lambda x: bool(fails(x)))
    message = fails(example) or failure.message
    text = code.script(example, expressions, message, head=head, first=first, names=names, bar=bar)
    return f"{names[0]} differs from {names[1]}: {message}\n\nMinimal example:\n\n{text}\n"


def _head(fn: Function, reference: Function) -> tuple[list[str], tuple[str, str]]:
    lines, names = [], []
    for function, role in ((fn, "fn"), (reference, "reference")):
        line = code.importable(function)
        name = getattr(function, "__qualname__", repr(function))
        lines.append(line or f"# {role} is {name}")
        names.append(function.__name__ if line else role)
    return lines, (names[0], names[1])
