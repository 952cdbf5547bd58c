"""The scopes: one model, or the process."""

from __future__ import annotations

import copy
import logging
import sys
import weakref
from collections.abc import Iterable
from types import TracebackType
from typing import Any

import torch
from torch import nn

from opake.engine import AttributePatch, Patch, PatchSet, Report, stacks
from opake.engine.slots import ClassSlot
from opake.errors import AlreadyPatched
from opake.flags import Flags, boolean, resolve
from opake.plan import Plan, find_model, plan_model, plan_runtime
from opake.plan.guard import remember, stats

logger = logging.getLogger("opake")


class Scope(PatchSet):
    """A planned set that can be entered again while it is live, where the plan is equal.

    The ``with`` blocks are counted and the last one out restores; :meth:`patch` is not counted.
    """

    def __init__(self, flags: Flags, *, strict: bool) -> None:
        plan = self._plan(flags)
        super().__init__(plan.patches, strict=strict)
        self._guards = plan.guards
        self.flags = flags
        self._report = plan.report
        self._blocks: set[object] = set()  # a token for every with block that holds this scope
        self._kept = False  # held by patch() too
        self._entered: list[tuple[Scope, object]] = []
        self._found: Scope | None = None  # the live scope that our patch() holds

    # What differs between a model and the process.
    def _plan(self, flags: Flags) -> Plan:
        raise NotImplementedError

    def _live(self) -> Scope | None:
        raise NotImplementedError

    def _announce(self) -> None:
        raise NotImplementedError

    def explain(self) -> Report:
        """Return a row for every concern: where it acts, how, and why not where it does not."""
        return self._report

    def patch(self) -> Scope:
        """Apply the plan, or return the live scope with the same plan."""
        live: Scope | None = None
        try:  # around everything: an interrupt may come when all is applied, before we return
            with stacks.LOCK:
                live = self._live() or self
                live._kept, self._found = True, live
                return live._apply()
        except BaseException as error:
            if live is not None:
                live._abandon(error)
            raise

    def unpatch(self) -> None:
        """Let go of what :meth:`patch` holds; a second call does nothing."""
        with stacks.LOCK:
            live, self._found = self._found, None
            if live is None:
                in_own_block = bool(self._entered) and not self._kept
                if self.applied and (in_own_block or not self._held):
                    self.drop()
            else:
                live._kept = False
                if not live._blocks:
                    live.drop()

    def drop(self) -> None:
        """Restore now, whoever still holds the scope."""
        self._kept, self._found = False, None
        self._blocks.clear()
        super().unpatch()

    def __enter__(self) -> Scope:
        live, token = None, object()
        try:
            with stacks.LOCK:
                live = self._live() or self
                self._entered.append((live, token))
                live._blocks.add(token)
                live.strict = live.strict or self.strict
                return live._apply()
        except BaseException as error:
            if live is not None:
                self._let_go(live, token)
                live._abandon(error)
            raise

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        live, token = self._entered[-1]
        try:
            self._let_go(live, token)
            if not live._held:
                live._leave(kind, error, trace)
        finally:  # an interrupt may have come before the first step
            self._let_go(live, token)
            if not live._held and live.applied:
                live._undo()

    @property
    def _held(self) -> bool:
        return self._kept or bool(self._blocks)

    def _let_go(self, live: Scope, token: object) -> None:
        with stacks.LOCK:
            live._blocks.discard(token)
            self._entered[:] = [entry for entry in self._entered if entry[1] is not token]

    def _leave(self, *exc: Any) -> None:
        PatchSet.__exit__(self, *exc)

    def _abandon(self, error: BaseException) -> None:
        """Undo what an interrupted :meth:`_apply` did, unless somebody else holds the scope."""
        with stacks.LOCK:
            if self._found is self and not self._blocks:
                self._kept, self._found = False, None
            if not self._held and self.applied:
                self._undo().note_on(error)

    def _apply(self) -> Scope:
        if self.applied:
            return self
        plan = self._plan(self.flags)  # the model may have changed since
        self.patches, self._report = tuple(plan.patches), plan.report
        PatchSet.patch(self)
        self._guards = plan.guards
        self._announce()
        on = [row for row in self._report if row.status == "on"]
        logger.info("%r: %d concerns, %d patches", self, len(on), len(self))
        return self

    def _conflict(self, live: Scope, what: str, remedy: str) -> AlreadyPatched:
        ours, theirs = self.flags, live.flags
        different = [c for c in ours.concerns if ours[c] != theirs[c]]
        return AlreadyPatched(
            f"{what} is patched already, by a scope with another plan (opened at "
            f"{live.opened_at}; they differ in {', '.join(different) or 'mode or min_elements'}); "
            f"{remedy}"
        )


class ModelScope(Scope):
    """What :func:`patched` returns."""

    def __init__(self, model: nn.Module, flags: Flags, *, strict: bool = False) -> None:
        self.model = model
        self._inner = _patched_part(model)
        super().__init__(flags, strict=strict)

    def _plan(self, flags: Flags) -> Plan:
        plan = plan_model(self.model, flags)
        if plan.patches and not any(_is_owned_by_a_module(patch) for patch in plan.patches):
            # A live scope is held by what it patched: here nothing else would die with the model.
            plan.patches.append(AttributePatch(self._inner, "_opake_scope", True, create=True))
        return plan

    def _anchor(self) -> None:
        if self.patches:
            super()._anchor()

    def _live(self) -> Scope | None:
        live = _live_scope(self._inner)
        if live is not None and live.flags != self.flags:
            raise self._conflict(live, "the model", "leave it first, or call opake.unpatch(model)")
        return live

    def _announce(self) -> None:
        _SCOPES[id(self._inner)] = self
        remember(self._inner, self._guards)

    def __deepcopy__(self, memo: dict[int, Any]) -> ModelScope:
        """Return a scope of the copied model, not applied: copies come out stock."""
        return ModelScope(copy.deepcopy(self.model, memo), self.flags, strict=self.strict)

    def __repr__(self) -> str:
        name = type(self.model).__qualname__
        state = f"applied at {self.opened_at}" if self.applied else "not applied"
        return f"<opake.patched({name}): {len(self)} patches, {state}>"


class RuntimeScope(Scope):
    """What :func:`runtime` returns."""

    _current: RuntimeScope | None = None

    def __init__(self, flags: Flags, *, reset_compile: bool, strict: bool = False) -> None:
        self.reset_compile = reset_compile
        super().__init__(flags, strict=strict)

    def _plan(self, flags: Flags) -> Plan:
        return plan_runtime(flags)

    def _live(self) -> Scope | None:
        live = RuntimeScope._current
        if live is None or not live.applied:
            return None
        if live.flags != self.flags:
            raise self._conflict(live, "the process", "leave it first")
        return live

    def _announce(self) -> None:
        RuntimeScope._current = self
        self._reset()

    def drop(self) -> None:
        """Restore now, whoever still holds the scope."""
        applied = self.applied
        super().drop()
        if applied:
            self._reset()

    def _reset(self) -> None:
        # dynamo does not guard class attributes: what it compiled before would go stale.
        wrote_class = any(isinstance(getattr(p, "slot", None), ClassSlot) for p in self.patches)
        if self.reset_compile and wrote_class and "torch._dynamo" in sys.modules:
            logger.info("a class attribute was written: torch.compiler.reset()")
            torch.compiler.reset()

    def __deepcopy__(self, memo: dict[int, Any]) -> RuntimeScope:
        return RuntimeScope(self.flags, reset_compile=self.reset_compile, strict=self.strict)

    def __repr__(self) -> str:
        state = f"applied at {self.opened_at}" if self.applied else "not applied"
        return f"<opake.runtime(): {len(self)} patches, {state}>"


_SCOPES: weakref.WeakValueDictionary[int, ModelScope] = weakref.WeakValueDictionary()


def _patched_part(model: nn.Module) -> nn.Module:
    """Return what a scope is known by: the transformers model inside ``model``, or ``model``."""
    inner: nn.Module | None = find_model(model)
    return model if inner is None else inner


def _live_scope(inner: Any) -> ModelScope | None:
    scope = _SCOPES.get(id(inner))
    if scope is not None and scope.applied and scope._inner is inner:
        return scope
    return None


def _is_owned_by_a_module(patch: Patch) -> bool:
    return isinstance(getattr(getattr(patch, "slot", None), "owner", None), nn.Module)


def patched(
    model: nn.Module,
    *,
    compat: bool = True,
    performance: bool = True,
    kernels: bool | Iterable[str] | None = None,
    peft: bool = True,
    mode: str = "train",
    min_elements: int | None = None,
    strict: bool = False,
    **concerns: Any,
) -> ModelScope:
    """Plan the patches of one model; ``with`` or :meth:`~ModelScope.patch` applies them.

    Args:
        model: a transformers model, also inside PEFT, ``torch.compile`` or FSDP2.
        compat: make it work under ``vmap(grad(...))``.
        performance: save memory on any device.
        kernels: run on the fused Triton kernels where there is a GPU, or on those that are named
            (``["swiglu"]``); None is ``performance``.
        peft: fuse adapters; accepted, and shown as skipped by :meth:`~PatchSet.explain`.
        mode: ``"infer"`` leaves out what only training has.
        min_elements: from how many elements kernels run: 0 always, None as measured.
        strict: raise after leaving if somebody else wrote over a patch, instead of warning.
        **concerns: single concerns, beating their umbrella (``kv_cache=False``). ``dropout=True``
            sets every dropout probability to 0 inside.

    Returns:
        A scope. Entering it again with an equal plan is counted, and the last exit restores.

    Raises:
        UnknownFlag: a keyword that is no flag, with the nearest one.
        NotAModel, UnsupportedModel, UnsupportedAttention, UnsupportedTransformers, ForeignWrite:
            before anything is touched.
        AlreadyPatched: on entering, where the model is live with another plan.
    """
    flags = resolve(
        compat=compat,
        performance=performance,
        kernels=kernels,
        peft=peft,
        mode=mode,
        min_elements=min_elements,
        **concerns,
    )
    with stacks.LOCK:
        return ModelScope(model, flags, strict=boolean("strict", strict))


def patch(model: nn.Module, **flags: Any) -> Scope:
    """Patch ``model`` until :func:`unpatch`; takes the flags of :func:`patched`.

    Where the model is live with an equal plan (a notebook cell run again), returns that scope.
    """
    return patched(model, **flags).patch()


def unpatch(model: nn.Module) -> None:
    """Restore ``model`` now, without its handle. Does nothing where it is not patched."""
    with stacks.LOCK:
        scope = _live_scope(_patched_part(model))
        if scope is not None:
            scope.drop()


def runtime(
    *,
    compat: bool = True,
    performance: bool = True,
    reset_compile: bool = True,
    strict: bool = False,
    **concerns: Any,
) -> RuntimeScope:
    """Plan the process-wide patches that need no model.

    Args:
        compat, performance, **concerns: as in :func:`patched`; model concerns have no effect.
        reset_compile: call ``torch.compiler.reset()`` on enter and exit where a class attribute
            was written and dynamo is loaded.
        strict: as in :func:`patched`.
    """
    flags = resolve(compat=compat, performance=performance, **concerns)
    reset = boolean("reset_compile", reset_compile)
    with stacks.LOCK:
        return RuntimeScope(flags, reset_compile=reset, strict=boolean("strict", strict))


def is_runtime_patched() -> bool:
    """Tell whether a :func:`runtime` scope is live."""
    live = RuntimeScope._current
    return live is not None and live.applied


def guard_stats(model: nn.Module) -> dict[str, dict[str, Any]]:
    """Return how often the kernels ran in the scope that was opened last for ``model``.

    ``{concern: {"ran": n, "fell_back": {reason: n}}}``, counted by calls; empty where no kernel
    is on. Calls inside ``torch.compile`` run stock code, which inductor fuses, and are not counted.
    """
    return stats(_patched_part(model))


def check(model: nn.Module, **flags: Any) -> Report:
    """Return the rows of ``patched(model, **flags).explain()``; raises what it would raise."""
    return patched(model, **flags).explain()
