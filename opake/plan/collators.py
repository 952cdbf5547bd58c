"""Data collators that answer an empty draw: their classes' methods, for the process."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from opake.engine import AttributePatch, Patch, stacks
from opake.engine.slots import attribute_slot
from opake.plan.step import ProcessConcern, Step, compat, compat_needs


def _empty_batches() -> Step:
    collator = compat("collator")
    module = importlib.import_module(collator.MODULE)
    patches: list[Patch] = [_Forget(collator.forget)]
    for name in (*collator.LAYOUTS, collator.PACKING):
        owner = getattr(module, name, None)  # some are gone in newer versions
        for attribute in collator.METHODS if owner is not None else ():
            if attribute not in vars(owner):
                continue
            stock = stacks.base(attribute_slot(owner, attribute))
            packs = name == collator.PACKING
            value = collator.refuse(stock) if packs else collator.method(stock, name)
            patches.append(AttributePatch(owner, attribute, value))
    for name in collator.FUNCTIONS:
        stock = stacks.base(attribute_slot(module, name))
        patches.append(AttributePatch(module, name, collator.function(stock)))
    note = "process-wide; changes nothing but the batch of an empty list"
    return Step(
        patches, f"the data collators of {collator.MODULE}", "attribute", len(patches) - 1, note
    )


class _Forget(Patch):
    """Lets go of the batches that the collators have seen, when the scope ends."""

    how = "memory"
    process_wide = True

    def __init__(self, forget: Callable[[], Any]) -> None:
        self.forget = forget

    def apply(self) -> None:
        pass

    def revert(self) -> None:
        self.forget()


EMPTY_BATCHES = ProcessConcern(_empty_batches, lambda: compat_needs("collator"), runtime_only=True)
