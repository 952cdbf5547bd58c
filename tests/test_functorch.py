"""``opake._functorch.apply`` gives what torch's ``Function.apply`` gives, under every transform."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from oracle import same_bits
from torch import Tensor
from torch.func import functional_call, grad, jacfwd, jacrev, jvp, vjp, vmap

from opake._functorch import apply

forward_mode = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")


def scaled(run: Callable[..., Any]) -> Any:
    """``(x, y, power) -> (x * y ** power, x + y, "note")`` whose rules call ``run``."""

    class Backward(torch.autograd.Function):
        @staticmethod
        def forward(g: Tensor, h: Tensor, x: Tensor, y: Tensor, power: int) -> Any:
            return g * y**power + h, g * x * power * y ** (power - 1) + h

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            *tensors, ctx.power = inputs
            ctx.save_for_backward(*tensors)

        @staticmethod
        def backward(ctx: Any, a: Tensor, b: Tensor) -> Any:
            g, _, x, y = ctx.saved_tensors
            p = ctx.power
            slope = p * y ** (p - 1)
            curve = p * (p - 1) * y ** (p - 2)
            return (
                a * y**p + b * x * slope,
                a + b,
                b * g * slope,
                a * g * slope + b * g * x * curve,
                None,
            )

        @staticmethod
        def vmap(info: Any, in_dims: Any, *args: Any) -> Any:
            return run(Backward, *front(info.batch_size, in_dims, args)), 0

    class Forward(torch.autograd.Function):
        @staticmethod
        def forward(x: Tensor, y: Tensor, power: int) -> Any:
            return x * y**power, x + y, "note"

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            *tensors, ctx.power = inputs
            ctx.save_for_backward(*tensors)
            ctx.save_for_forward(*tensors)

        @staticmethod
        def backward(ctx: Any, g: Tensor, h: Tensor, _: Any) -> Any:
            return *run(Backward, g, h, *ctx.saved_tensors, ctx.power), None

        @staticmethod
        def jvp(ctx: Any, dx: Tensor, dy: Tensor, _: Any) -> Any:
            x, y = ctx.saved_tensors
            p = ctx.power
            return dx * y**p + x * p * y ** (p - 1) * dy, dx + dy, None

        @staticmethod
        def vmap(info: Any, in_dims: Any, *args: Any) -> Any:
            return run(Forward, *front(info.batch_size, in_dims, args)), (0, 0, None)

    def call(x: Tensor, y: Tensor) -> Tensor:
        product, total, note = run(Forward, x, y, 3)
        assert note == "note"
        return product + 2 * total

    return call


def front(size: int, dims: Any, args: Any) -> list[Any]:
    moved = []
    for x, dim in zip(args, dims, strict=True):
        if not isinstance(x, Tensor):
            moved.append(x)
        else:
            moved.append(x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0))
    return moved


OURS = scaled(apply)
TORCHS = scaled(lambda function, *args: function.apply(*args))


def summed(f: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda x, y: f(x, y).square().sum()


both = (0, 1)
TRANSFORMS: dict[str, Callable[[Any], Callable[..., Any]]] = {
    "plain": lambda f: f,
    "grad": lambda f: grad(summed(f), both),
    "vmap": vmap,
    "vmap, one mapped": lambda f: vmap(f, (0, None)),
    "vmap of grad": lambda f: vmap(grad(summed(f), both)),
    "vmap of grad, one mapped": lambda f: vmap(grad(summed(f), both), (None, 0)),
    "vmap of grad, other dims": lambda f: vmap(grad(summed(f), both), (1, 0)),
    "vmap of grad, in chunks": lambda f: vmap(grad(summed(f), both), chunk_size=2),
    "grad of vmap": lambda f: grad(summed(vmap(f)), both),
    "vmap of vmap of grad": lambda f: vmap(vmap(grad(summed(f), both))),
    "vmap of grad of vmap": lambda f: vmap(grad(summed(vmap(f)), both)),
    "grad of grad": lambda f: grad(lambda x, y: grad(summed(f))(x, y).sum(), both),
    "vmap of grad of grad": lambda f: vmap(grad(lambda x, y: grad(summed(f))(x, y).sum(), both)),
    "jacrev": lambda f: jacrev(f, both),
    "vmap of jacrev": lambda f: vmap(jacrev(f, both)),
    "jacrev of jacrev": lambda f: jacrev(jacrev(summed(f))),
    "jacfwd": lambda f: jacfwd(f, both),
    "jvp": lambda f: lambda x, y: jvp(f, (x, y), (y, x)),
    "vmap of jvp": lambda f: vmap(lambda x, y: jvp(f, (x, y), (y, x))),
    "grad of jvp": lambda f: grad(lambda x, y: jvp(f, (x, y), (y, x))[1].sum(), both),
    "vjp after its transform has ended": lambda f: lambda x, y: vjp(f, x, y)[1](x),
}


@forward_mode
@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad])
def test_every_transform_gives_torchs_numbers(name: str, mode: Any) -> None:
    torch.manual_seed(0)
    x, y = torch.randn(2, 4, 4, dtype=torch.float64).unbind()
    with mode():
        assert same_bits(TRANSFORMS[name](OURS)(x, y), TRANSFORMS[name](TORCHS)(x, y))


@pytest.mark.parametrize("needs", list(itertools.product([True, False], repeat=2)))
@pytest.mark.parametrize("name", ["plain", "vmap", "vmap of grad", "grad of vmap", "jacrev"])
def test_autograd_beneath_the_transforms_is_torchs(name: str, needs: tuple[bool, bool]) -> None:
    torch.manual_seed(0)
    leaves = [
        x.requires_grad_(need) for x, need in zip(torch.randn(2, 4, 4).unbind(), needs, strict=True)
    ]

    def run(f: Any) -> list[Any]:
        outputs = TRANSFORMS[name](f)(*leaves)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        total = sum(x.square().sum() for x in outputs)
        wanted = [x for x in leaves if x.requires_grad]
        grads = torch.autograd.grad(total, wanted) if wanted else ()
        return [*outputs, *grads]

    assert same_bits(run(OURS), run(TORCHS))


def test_no_grad_inside_a_transform_is_seen() -> None:
    x, y = torch.randn(2, 4).unbind()

    def f(x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            return OURS(x, y)

    assert all((g == 0).all() for g in grad(summed(f), both)(x, y))


def test_an_exception_in_a_rule_leaves_the_transforms_in_order() -> None:
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(x: Tensor) -> Tensor:
            raise ZeroDivisionError

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None: ...

        @staticmethod
        def vmap(info: Any, in_dims: Any, x: Tensor) -> Any:
            return apply(Fails, x), 0

    def f(x: Tensor) -> Tensor:
        with pytest.raises(ZeroDivisionError):
            apply(Fails, x)
        return OURS(x, x).sum()

    x = torch.randn(3, 2)
    assert same_bits(vmap(grad(f))(x), vmap(grad(lambda x: TORCHS(x, x).sum()))(x))
    assert not torch._C._are_functorch_transforms_active()


def test_threads_have_transforms_of_their_own() -> None:
    x, y = torch.randn(2, 4, 4).unbind()
    expected = TRANSFORMS["vmap of grad"](TORCHS)(x, y)
    found: list[bool] = []

    def work() -> None:
        run = TRANSFORMS["vmap of grad"](OURS)
        found.extend(same_bits(run(x, y), expected) for _ in range(20))

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [True] * 60


def test_it_is_faster_than_torchs() -> None:
    x, y = torch.randn(2, 4, 4).unbind()

    def best(f: Any) -> float:
        run, times = TRANSFORMS["vmap of grad"](f), []
        for _ in range(30):
            start = time.process_time()
            run(x, y)
            times.append(time.process_time() - start)
        return min(times)

    # What both spend in vmap and grad counts too; 0.45 was measured.
    assert best(OURS) < 0.8 * best(TORCHS)


def test_parameters_swapped_in_by_functional_call() -> None:
    layer = torch.nn.Linear(3, 3, bias=False)
    x = torch.randn(4, 3)

    def loss(params: dict[str, Tensor], x: Tensor, f: Any) -> Tensor:
        return f(functional_call(layer, params, (x,)), params["weight"].sum(0)).sum()

    params = {"weight": layer.weight.detach()}
    found = vmap(grad(lambda p, x: loss(p, x, OURS)), (None, 0))(params, x)
    expected = vmap(grad(lambda p, x: loss(p, x, TORCHS)), (None, 0))(params, x)
    assert same_bits(found, expected)
