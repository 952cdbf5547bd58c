"""What acts on the process: shared between scopes, and undone with the last of them."""

from __future__ import annotations

import importlib

from opake.engine import AttributePatch, stacks
from opake.engine.rebind import rebind
from opake.engine.shared import SharedPatch
from opake.engine.slots import attribute_slot
from opake.plan.step import ProcessConcern, Skip, Step, compat, compat_needs


def _first_order() -> Step | Skip:
    first_order = compat("first_order")
    transforms = importlib.import_module("torch._functorch.eager_transforms")
    stock = stacks.base(attribute_slot(transforms, "grad_and_value_impl"))
    clone = rebind(stock, {"_autograd_grad": first_order.autograd_grad})
    replacement = first_order.grad_and_value(stock, clone)
    patch = AttributePatch(transforms, "grad_and_value_impl", replacement)
    note = "process-wide; changes nothing outside torch.no_grad()"
    return Step([SharedPatch("first_order", patch)], patch.target, "global", 1, note)


FIRST_ORDER = ProcessConcern(_first_order, lambda: compat_needs("first_order"))
