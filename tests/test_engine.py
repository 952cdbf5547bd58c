"""What the engine promises about one slot, one set, and many of them at a time."""

from __future__ import annotations

import collections
import copy
import functools
import gc
import importlib
import logging
import os
import pickle
import sys
import threading
import time
import types
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from interrupts import Interrupter
from torch import nn

from opake.engine import (
    MISSING,
    AttributePatch,
    ForwardPatch,
    GlobalPatch,
    ItemPatch,
    LossPatch,
    Patch,
    PatchSet,
    RebindPatch,
    active,
    reclass,
    shared,
    stacks,
)
from opake.engine.shared import SharedPatch
from opake.errors import (
    AlreadyPatched,
    ForeignWrite,
    InvalidArgument,
    MissingTarget,
    OpakeError,
    RestoreError,
    RestoreWarning,
    UnpatchableTarget,
)


def double(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    return wrapped(*args, **kwargs) * 2


def plus_one(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    return wrapped(*args, **kwargs) + 1


def helper() -> int:
    return 1


def other_helper() -> int:
    return 10


class Scale(nn.Module):
    def __init__(self, factor: int = 3) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: int) -> int:
        return x * self.factor

    def shift(self, x: int) -> int:
        return x + helper()


class Wrapping(nn.Module):
    """Wraps the forward of every subclass, as transformers' checkpointing layers do."""

    def __init_subclass__(cls) -> None:
        inner = cls.forward

        @functools.wraps(inner)
        def forward(self: Any, x: int) -> Any:
            return inner(self, x) + 1000 * (type(self).forward is forward)

        cls.forward = forward  # type: ignore[method-assign]

    def forward(self, x: int) -> int:
        raise NotImplementedError


class Layer(Wrapping):
    def forward(self, x: int) -> int:
        return x


class Parent:
    inherited = "parent"
    size = 1

    def method(self) -> str:
        return "method"


class Child(Parent):
    size = 2

    @staticmethod
    def static() -> str:
        return "static"

    @classmethod
    def named(cls) -> str:
        return cls.__name__

    @property
    def area(self) -> int:
        return self.size**2


class Slotted:
    __slots__ = ("empty", "full")

    def __init__(self) -> None:
        self.full = "full"


class Registry(collections.abc.MutableMapping[str, Any]):
    """Shared keys on the class, its own on the instance: transformers' registries are like this."""

    shared: dict[str, Any] = {"sdpa": "shared sdpa"}  # noqa: RUF012

    def __init__(self) -> None:
        self.local: dict[str, Any] = {}

    def __getitem__(self, key: str) -> Any:
        return self.local[key] if key in self.local else self.shared[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self.local[key] = value

    def __delitem__(self, key: str) -> None:
        del self.local[key]

    def __iter__(self) -> Iterator[str]:
        return iter({**self.shared, **self.local})

    def __len__(self) -> int:
        return len({**self.shared, **self.local})


def contents(owner: Any) -> list[tuple[Any, int]]:
    """Return the keys of a namespace in order, with the identity of what they hold."""
    namespace = owner if isinstance(owner, collections.abc.Mapping) else vars(owner)
    return [(key, id(value)) for key, value in namespace.items()]


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    yield
    if active():  # a cycle that died holds them
        gc.collect()
    assert active() == []
    assert stacks._STACKS == {}
    assert shared._PIECES == {}
    assert shared._WATCHED == []


@pytest.fixture
def module() -> Iterator[Callable[..., types.ModuleType]]:
    """Make modules that are in ``sys.modules`` for the time of the test."""
    made: list[str] = []

    def make(name: str, **content: Any) -> types.ModuleType:
        new = types.ModuleType(f"opake_test_{name}")
        vars(new).update(content)
        sys.modules[new.__name__] = new
        made.append(new.__name__)
        return new

    yield make
    for name in made:
        del sys.modules[name]


# ---- one slot


ABSENT = [
    pytest.param(lambda: (Child, "inherited"), id="class"),
    pytest.param(lambda: (Child(), "size"), id="instance"),
    pytest.param(lambda: (types.ModuleType("empty"), "name"), id="module"),
    pytest.param(lambda: (Scale(), "forward"), id="nn.Module"),
    pytest.param(lambda: (Scale(), "brand_new"), id="nn.Module new"),
]


@pytest.mark.parametrize("make", ABSENT)
def test_absent_goes_back_to_absent(make: Any) -> None:
    owner, name = make()
    before = contents(owner)
    with PatchSet([AttributePatch(owner, name, "ours", create=True)]):
        assert vars(owner)[name] == "ours"
    assert contents(owner) == before
    assert name not in vars(owner)


@pytest.mark.parametrize("kind", [dict, collections.OrderedDict, collections.defaultdict])
def test_keys_keep_their_order(kind: Any) -> None:
    mapping = kind()
    mapping.update(a=1, b=2, c=3)
    if kind is collections.defaultdict:
        mapping.default_factory = list
    before = contents(mapping)
    new = ItemPatch(mapping, "new", 9, create=True)
    with PatchSet([ItemPatch(mapping, "a", 7), new, ItemPatch(mapping, "c", 8)]):
        assert list(mapping.items()) == [("a", 7), ("b", 2), ("c", 8), ("new", 9)]
    assert contents(mapping) == before


def test_reading_adds_nothing() -> None:
    mapping: Any = collections.defaultdict(list)
    with pytest.raises(MissingTarget, match=r"create=True"):
        PatchSet([ItemPatch(mapping, "key", 1)]).patch()
    assert mapping == {}

    class Lazy:
        @functools.cached_property
        def value(self) -> int:
            return 1

    lazy = Lazy()
    with PatchSet([AttributePatch(lazy, "value", 2)]):
        assert lazy.value == 2
    assert vars(lazy) == {}


@pytest.mark.parametrize("name", ["static", "named", "area", "size"])
def test_descriptors_are_stored_and_restored_raw(name: str) -> None:
    before, raw = contents(Child), vars(Child)[name]
    replacement = {
        "static": staticmethod(lambda: "patched"),
        "named": classmethod(lambda cls: f"patched {cls.__name__}"),
        "area": property(lambda self: -1),
        "size": 3,
    }[name]
    with PatchSet([AttributePatch(Child, name, replacement)]):
        assert vars(Child)[name] is replacement
        assert Child.static() == ("patched" if name == "static" else "static")
        assert Child.named() == ("patched Child" if name == "named" else "Child")
    assert vars(Child)[name] is raw
    assert contents(Child) == before


def test_writes_on_modules_are_raw() -> None:
    parent, child, weight = nn.Linear(2, 2), Scale(), nn.Parameter(nn.Linear(2, 2).weight.detach())
    registered = {name: dict(getattr(parent, name)) for name in ("_parameters", "_modules")}
    patches = [
        AttributePatch(parent, "extra", child, create=True),
        AttributePatch(parent, "weight", weight),
    ]
    with PatchSet(patches):
        assert parent.extra is child
        assert parent.weight is weight
        for name, content in registered.items():
            assert dict(getattr(parent, name)) == content
        assert list(parent.state_dict()) == ["weight", "bias"]
    assert parent.weight is registered["_parameters"]["weight"]
    assert not hasattr(parent, "extra")


def test_slots_of_instances() -> None:
    owner = Slotted()
    with PatchSet([AttributePatch(owner, "full", 1), AttributePatch(owner, "empty", 2)]):
        assert (owner.full, owner.empty) == (1, 2)
    assert owner.full == "full"
    assert not hasattr(owner, "empty")


def test_registry_that_shares_keys_on_its_class() -> None:
    registry = Registry()
    patches = [ItemPatch(registry, "sdpa", "ours"), ItemPatch(registry, "new", 1, create=True)]
    with PatchSet(patches):
        assert registry["sdpa"] == "ours"
        assert Registry()["sdpa"] == "shared sdpa"
    assert registry.local == {}
    registry["sdpa"] = "own"
    with PatchSet([ItemPatch(registry, "sdpa", "ours")]):
        assert registry["sdpa"] == "ours"
    assert registry.local == {"sdpa": "own"}


def test_chain_map_writes_to_its_first_mapping() -> None:
    first: dict[str, int] = {"a": 1}
    chain = collections.ChainMap(first, {"b": 2})
    with PatchSet([ItemPatch(chain, "b", 3), ItemPatch(chain, "a", 4)]):
        assert dict(chain) == {"a": 4, "b": 3}
    assert first == {"a": 1}
    with pytest.raises(MissingTarget):
        PatchSet([ItemPatch(chain, "c", 3)]).patch()


def test_mapping_that_makes_its_values_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPAKE_TEST", "before")
    monkeypatch.delenv("OPAKE_TEST_NEW", raising=False)
    patches = [
        ItemPatch(os.environ, "OPAKE_TEST", "inside"),
        ItemPatch(os.environ, "OPAKE_TEST_NEW", "inside", create=True),
    ]
    with PatchSet(patches):
        assert os.environ["OPAKE_TEST"] == os.environ["OPAKE_TEST_NEW"] == "inside"
    assert os.environ["OPAKE_TEST"] == "before"
    assert "OPAKE_TEST_NEW" not in os.environ


class Both(dict[str, int]):
    """A mapping whose attributes and keys have the same names."""


def test_an_attribute_and_a_key_of_one_name_are_two_slots() -> None:
    both = Both(x=1)
    vars(both)["x"] = 2
    with PatchSet([ItemPatch(both, "x", 10), AttributePatch(both, "x", 20)]):
        assert (both["x"], vars(both)["x"]) == (10, 20)
    assert (both["x"], vars(both)["x"]) == (1, 2)


def test_a_global_is_one_slot_however_it_is_named() -> None:
    owner = types.ModuleType("owner")
    vars(owner)["x"] = 0
    item = PatchSet([ItemPatch(vars(owner), "x", 1)]).patch()
    attribute = PatchSet([AttributePatch(owner, "x", 2)]).patch()
    item.unpatch()
    assert vars(owner)["x"] == 2
    attribute.unpatch()
    assert vars(owner)["x"] == 0


BAD = [
    pytest.param(lambda: AttributePatch(int, "real", 1), UnpatchableTarget, id="builtin type"),
    pytest.param(lambda: AttributePatch(3, "real", 1), UnpatchableTarget, id="builtin instance"),
    pytest.param(lambda: AttributePatch(Child(), "area", 1), UnpatchableTarget, id="property"),
    pytest.param(
        lambda: AttributePatch(Child, "__name__", "x"), UnpatchableTarget, id="type's own"
    ),
    pytest.param(
        lambda: AttributePatch(functools.partial(print), "func", 1),
        UnpatchableTarget,
        id="C member",
    ),
    pytest.param(lambda: AttributePatch(Slotted(), "other", 1), UnpatchableTarget, id="no dict"),
    pytest.param(lambda: AttributePatch(Child, 3, 1), UnpatchableTarget, id="name"),
    pytest.param(lambda: AttributePatch(Child, "size", MISSING), InvalidArgument, id="deletion"),
    pytest.param(lambda: AttributePatch(Child, "none", 1), MissingTarget, id="missing attribute"),
    pytest.param(lambda: ItemPatch({}, "none", 1), MissingTarget, id="missing key"),
    pytest.param(lambda: ItemPatch([1], 0, 1), UnpatchableTarget, id="no mapping"),
    pytest.param(lambda: ItemPatch({}, [], 1), UnpatchableTarget, id="key"),
    pytest.param(lambda: ForwardPatch(Child(), double), UnpatchableTarget, id="no nn.Module"),
    pytest.param(lambda: ForwardPatch(Scale(), 3), UnpatchableTarget, id="wrapper"),
    pytest.param(lambda: RebindPatch(Child(), {}), UnpatchableTarget, id="rebind of no nn.Module"),
    pytest.param(lambda: RebindPatch(Scale(), {"no": 1}), MissingTarget, id="rebind of nothing"),
    pytest.param(
        lambda: RebindPatch(Scale(), {"helper": 1}, slot="factor"),
        UnpatchableTarget,
        id="no method",
    ),
    pytest.param(lambda: GlobalPatch(Child, "size", helper), UnpatchableTarget, id="no module"),
    pytest.param(
        lambda: GlobalPatch(sys.modules[__name__], "helper", None), UnpatchableTarget, id="atom"
    ),
    pytest.param(
        lambda: GlobalPatch(sys.modules[__name__], "__doc__", helper),
        UnpatchableTarget,
        id="of atom",
    ),
    pytest.param(lambda: LossPatch(Slotted(), double), UnpatchableTarget, id="loss of no model"),
    pytest.param(lambda: "no patch", UnpatchableTarget, id="no patch"),
]


@pytest.mark.parametrize(("make", "error"), BAD)
def test_bad_input_is_refused_before_anything_is_written(make: Any, error: Any) -> None:
    probe, before = Probe(), contents(Child)
    with pytest.raises(error) as caught:
        PatchSet([probe, make()]).patch()
    assert isinstance(caught.value, OpakeError)
    assert probe.log == []
    assert contents(Child) == before


class Probe(Patch):
    """Notes what is called; raises where it is told to."""

    def __init__(self, log: list[str] | None = None, name: str = "probe", **errors: Any) -> None:
        self.log = [] if log is None else log
        self.name = name
        self.errors = errors

    def apply(self) -> None:
        self.log.append(f"apply {self.name}")
        if "apply" in self.errors:
            raise self.errors["apply"]

    def revert(self) -> str | None:
        self.log.append(f"revert {self.name}")
        error = self.errors.get("revert")
        if isinstance(error, list):
            error = error.pop() if error else None
        if error is not None:
            raise error
        return self.errors.get("note")


# ---- layers


@pytest.mark.parametrize(
    "order", [(0, 1, 2), (0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1), (2, 1, 0)]
)
def test_layers_leave_in_any_order(order: tuple[int, ...]) -> None:
    module, mapping = Scale(), {"key": "base"}
    before = contents(module), contents(mapping)
    wrappers = [double, plus_one, lambda w, i, a, k: w(*a, **k) ** 2]
    apply = [lambda x: x * 2, lambda x: x + 1, lambda x: x**2]
    sets = [
        PatchSet([ForwardPatch(module, wrapper), ItemPatch(mapping, "key", n)]).patch()
        for n, wrapper in enumerate(wrappers)
    ]
    live = [0, 1, 2]
    for leaving in (None, *order):
        if leaving is not None:
            sets[leaving].unpatch()
            live.remove(leaving)
        expected = 15
        for n in live:
            expected = apply[n](expected)
        assert module(5) == expected
        assert mapping["key"] == (live[-1] if live else "base")
    assert (contents(module), contents(mapping)) == before
    assert type(module) is Scale


def test_a_set_is_reusable_and_not_reentrant() -> None:
    patches = PatchSet([AttributePatch(Child, "size", 5)])
    for _ in range(2):
        with patches:
            assert Child.size == 5
            with pytest.raises(AlreadyPatched, match=r"test_engine\.py:\d+"):
                patches.patch()
            assert Child.size == 5
        assert Child.size == 2
    patches.unpatch()


@pytest.mark.parametrize("shared_patch", [False, True])
def test_two_live_sets_cannot_share_a_patch(shared_patch: bool) -> None:
    patch: Any = Probe()
    if shared_patch:
        patch = SharedPatch("shared between sets", patch)
    first, second = PatchSet([patch]), PatchSet([AttributePatch(Child, "size", 5), patch])
    with first:
        with pytest.raises(AlreadyPatched, match=r"test_engine\.py:\d+.*one live set"):
            second.patch()
        assert Child.size == 2
    with second:
        assert Child.size == 5
    with pytest.raises(InvalidArgument, match="twice"):
        first + first


def test_joined_sets_keep_their_order() -> None:
    log: list[str] = []
    one, two = (PatchSet([Probe(log, name)], strict=name == "two") for name in ("one", "two"))
    joined = one + two
    assert joined.strict
    with joined:
        assert len(joined) == 2
    assert log == ["apply one", "apply two", "revert two", "revert one"]
    with pytest.raises(TypeError):
        one + [two]  # noqa: RUF005


# ---- writes of somebody else


def test_a_foreign_write_refuses_entering() -> None:
    outer, inner = (PatchSet([AttributePatch(Child, "size", n)]) for n in (5, 6))
    outer.patch()
    Child.size = 9
    with pytest.raises(ForeignWrite, match=r"Child\.size was rewritten"):
        inner.patch()
    with pytest.warns(RestoreWarning):
        outer.unpatch()
    assert Child.size == 9
    Child.size = 2


def test_a_foreign_write_stays_and_is_told_once() -> None:
    mapping, module = {"a": 1, "b": 2}, Scale()
    patches = [
        ItemPatch(mapping, "a", 10),
        ItemPatch(mapping, "b", 20),
        ForwardPatch(module, double),
    ]
    whole = PatchSet(patches).patch()
    mapping["a"] = 100
    theirs = vars(module)["forward"] = lambda x: x
    with pytest.warns(RestoreWarning) as caught:
        whole.unpatch()
    assert mapping == {"a": 100, "b": 2}
    assert module.forward is theirs
    assert type(module) is Scale
    assert len(caught) == 1
    assert caught[0].filename == __file__
    text = str(caught[0].message)
    assert "['a']" in text
    assert ".forward" in text
    assert "['b']" not in text


def test_a_foreign_write_is_never_overwritten_while_other_layers_remain() -> None:
    mapping = {"key": "base"}
    sets = [PatchSet([ItemPatch(mapping, "key", n)]).patch() for n in range(3)]
    mapping["key"] = "theirs"
    with pytest.warns(RestoreWarning):
        sets[1].unpatch()
    for left in (sets[2], sets[0]):
        left.unpatch()  # any warning is an error: it was told
        assert mapping == {"key": "theirs"}


def test_a_foreign_write_that_is_undone_leaves_no_trace() -> None:
    mapping = {"key": "base"}
    with PatchSet([ItemPatch(mapping, "key", "ours")]):
        saved, mapping["key"] = mapping["key"], "theirs"
        mapping["key"] = saved
    assert mapping == {"key": "base"}


def test_a_foreign_write_that_is_undone_after_a_layer_left() -> None:
    mapping = {"key": "base"}
    lower, upper = (
        PatchSet([ItemPatch(mapping, "key", name)]).patch() for name in ("lower", "upper")
    )
    saved, mapping["key"] = mapping["key"], "theirs"
    with pytest.warns(RestoreWarning):
        upper.unpatch()
    mapping["key"] = saved  # what the upper set had put there
    lower.unpatch()
    assert mapping == {"key": "base"}


def test_somebody_else_may_restore_for_us() -> None:
    mapping = {"key": "base", "new": None}
    del mapping["new"]
    with PatchSet([ItemPatch(mapping, "key", 1), ItemPatch(mapping, "new", 1, create=True)]):
        mapping["key"] = "base"
        del mapping["new"]
    assert mapping == {"key": "base"}


def test_strict_raises_after_everything_else_is_restored() -> None:
    mapping = {"a": 1, "b": 2}
    patches = PatchSet([ItemPatch(mapping, "b", 20), ItemPatch(mapping, "a", 10)], strict=True)
    patches.patch()
    mapping["a"] = 100
    with pytest.raises(RestoreError, match=r"somebody else wrote(?s:.*)\['a'\]"):
        patches.unpatch()
    assert mapping == {"a": 100, "b": 2}
    assert not patches.applied


# ---- failures


class Stop(BaseException):
    """Not an Exception, like KeyboardInterrupt."""


@pytest.mark.parametrize("error", [ValueError("apply"), KeyboardInterrupt(), Stop(), SystemExit(1)])
@pytest.mark.parametrize("k", range(4))
def test_a_failure_in_patch_k_undoes_all_before(k: int, error: BaseException) -> None:
    module, mapping = Scale(), {"key": 1}
    before = contents(Child), contents(module), contents(mapping)
    patches: list[Patch] = [
        AttributePatch(Child, "size", 5),
        ForwardPatch(module, double),
        ItemPatch(mapping, "new", 2, create=True),
    ]
    probe = Probe(apply=error)
    patches.insert(k, probe)
    whole = PatchSet(patches)
    with pytest.raises(type(error)) as caught:
        whole.patch()
    assert caught.value is error
    assert (contents(Child), contents(module), contents(mapping)) == before
    assert type(module) is Scale
    assert not whole.applied
    assert probe.log == ["apply probe", "revert probe"]


def test_what_fails_while_rolling_back_rides_along() -> None:
    error = ValueError("apply")
    with pytest.raises(ValueError, match="apply") as caught:
        PatchSet([Probe(revert=OSError("disk")), Probe(apply=error)]).patch()
    assert any("OSError: disk" in note for note in caught.value.__notes__)


def test_every_slot_is_tried_and_one_error_tells_all() -> None:
    log: list[str] = []
    patches = PatchSet(
        [
            Probe(log, "a", revert=OSError("a is broken")),
            AttributePatch(Child, "size", 5),
            Probe(log, "b"),
            Probe(log, "c", revert=ValueError("c is broken")),
        ]
    )
    with pytest.raises(RestoreError, match=r"(?s)c is broken.*a is broken") as caught, patches:
        log.clear()
    assert isinstance(caught.value.__cause__, ValueError)
    assert log == ["revert c", "revert b", "revert a"]
    assert Child.size == 2
    assert not patches.applied


def test_the_error_of_the_body_gets_out(caplog: pytest.LogCaptureFixture) -> None:
    error = ValueError("body")
    broken = PatchSet([Probe(revert=OSError("disk"))])
    with pytest.raises(ValueError, match="body") as caught, broken:
        raise error
    assert caught.value is error
    assert any("OSError: disk" in note for note in error.__notes__)
    assert "disk" in caplog.text


def test_the_error_of_the_body_gets_out_where_warnings_are_errors() -> None:
    mapping, error = {"key": 1}, ValueError("body")
    with warnings.catch_warnings(), pytest.raises(ValueError, match="body"):  # noqa: PT012
        warnings.simplefilter("error")
        with PatchSet([ItemPatch(mapping, "key", 2)]):
            mapping["key"] = 3
            raise error
    assert any("['key']" in note for note in error.__notes__)


def test_an_interrupt_while_undoing_is_raised_after_the_rest_is_undone() -> None:
    log: list[str] = []
    once = Probe(log, "once", revert=[KeyboardInterrupt()])
    patches = PatchSet([AttributePatch(Child, "size", 5), once, Probe(log, "last")])
    patches.patch()
    log.clear()
    with pytest.raises(KeyboardInterrupt):
        patches.unpatch()
    assert log == ["revert last", "revert once", "revert once"]
    assert Child.size == 2
    assert not patches.applied


def test_a_revert_that_is_always_interrupted_is_given_up() -> None:
    patches = PatchSet([AttributePatch(Child, "size", 5), Probe(revert=Stop())])
    with pytest.raises(Stop) as caught, patches:
        pass
    assert any("could not restore" in note for note in caught.value.__notes__)
    assert Child.size == 2


def test_a_layer_leaves_though_the_one_above_cannot_be_rebuilt() -> None:
    class Fragile(ItemPatch):
        broken = False

        def build(self, below: Any) -> Any:
            if self.broken:
                raise OSError("cannot rebuild")
            return (self.value, below)

    mapping: dict[str, Any] = {"key": "base"}
    lower, patch = PatchSet([ItemPatch(mapping, "key", "lower")]), Fragile(mapping, "key", "upper")
    lower.patch()
    upper = PatchSet([patch]).patch()
    patch.broken = True
    with pytest.raises(RestoreError, match="cannot rebuild"):
        lower.unpatch()
    upper.unpatch()
    assert mapping == {"key": "base"}


class _InterruptAt(Interrupter):
    """The interrupter as a with block."""

    def __enter__(self) -> _InterruptAt:
        self.before = sys.gettrace()
        sys.settrace(self)
        return self

    def __exit__(self, *exc: object) -> None:
        sys.settrace(self.before)


def _a_set_of_everything(module: nn.Module, mapping: dict[str, int]) -> PatchSet:
    return PatchSet(
        [
            SharedPatch("interrupted", ItemPatch(mapping, "shared", 0, create=True)),
            AttributePatch(Child, "size", 5),
            ForwardPatch(module, double),
            ForwardPatch(module, plus_one),
            AttributePatch(module, "factor", 4),
            ItemPatch(mapping, "key", 2),
        ]
    )


@pytest.mark.parametrize("when", ["entering", "leaving"])
def test_ctrl_c_on_any_line(when: str) -> None:
    module, mapping = Scale(), {"key": 1}
    before = contents(Child), contents(module), contents(mapping)
    n, interrupted = 0, True
    while interrupted:
        n += 1
        patches, interrupted = _a_set_of_everything(module, mapping), False
        # The first line of __exit__ cannot be guarded by anything that runs after it.
        try:
            if when == "entering":
                with _InterruptAt(n):
                    patches.patch()
                patches.unpatch()
            else:
                with patches:
                    assert module(1) == 9
                    _InterruptAt(n + 1).__enter__()
                sys.settrace(None)
        except KeyboardInterrupt:
            interrupted = True
        finally:
            sys.settrace(None)
        assert not patches.applied, n
        assert (contents(Child), contents(module), contents(mapping)) == before, n
        assert type(module) is Scale, n
        assert (stacks._STACKS, shared._PIECES, shared._WATCHED) == ({}, {}, []), n
    assert n > 100  # or the lines were not traced
    free: list[bool] = []

    def try_lock() -> None:
        free.append(stacks.LOCK.acquire(timeout=5))
        stacks.LOCK.release()

    thread = threading.Thread(target=try_lock)
    thread.start()
    thread.join()
    assert free == [True]


# ---- globals


def original() -> str:
    return "original"


def replacement() -> str:
    return "replacement"


def test_global_patch_finds_copies_and_aliases(module: Any) -> None:
    home = module("home", fn=original, alias=original)
    user = module("user", fn=original, other=original, count=1)
    bystander = module("bystander", theirs=replacement, kept=[original])
    before = [contents(each) for each in (home, user, bystander)]
    stock = original
    with PatchSet([GlobalPatch(home, "fn", replacement)]) as patches:
        assert {home.fn, home.alias, user.fn, user.other} == {replacement}
        assert bystander.kept == [stock]  # a list is no namespace
        late = module("late", mine=home.fn)
        assert len(patches.diff()) >= 4
    assert late.mine is original
    assert bystander.theirs is replacement
    assert [contents(each) for each in (home, user, bystander)] == before


@pytest.mark.parametrize("first_out", [0, 1])
@pytest.mark.parametrize("same", [False, True])
def test_global_patches_layer(module: Any, first_out: int, same: bool) -> None:
    def second() -> str:
        return "second"

    values = [replacement, replacement if same else second]
    home, user = module("home", fn=original), module("user", fn=original)
    defining = module("defining", replacement=replacement, second=second)
    sets = [PatchSet([GlobalPatch(home, "fn", value)]) for value in values]
    sets[0].patch()
    early = module("early", fn=home.fn)
    sets[1].patch()
    late = module("late", fn=home.fn)
    assert {each.fn for each in (home, user, early, late)} == {values[1]}
    sets[first_out].unpatch()
    assert {each.fn for each in (home, user, early, late)} == {values[1 - first_out]}
    sets[1 - first_out].unpatch()
    assert {each.fn for each in (home, user, early, late)} == {original}
    assert (defining.replacement, defining.second) == (replacement, second)


def test_global_patch_lies_over_a_patch_of_one_copy(module: Any) -> None:
    home, user = module("home", fn=original), module("user", fn=original)
    single = PatchSet([AttributePatch(user, "fn", len)]).patch()
    swept = PatchSet([GlobalPatch(home, "fn", replacement)]).patch()
    assert user.fn is replacement
    single.unpatch()
    assert user.fn is replacement
    swept.unpatch()
    assert (home.fn, user.fn) == (original, original)


def test_global_patch_keeps_a_foreign_write(module: Any) -> None:
    home, user = module("home", fn=original), module("user", fn=original)
    with (
        pytest.warns(RestoreWarning, match=r"user\.fn"),
        PatchSet([GlobalPatch(home, "fn", replacement)]),
    ):
        user.fn = len
    assert (home.fn, user.fn) == (original, len)


# ---- forwards


def test_forward_patch_over_a_foreign_forward() -> None:
    module = Scale()
    theirs = vars(module)["forward"] = functools.partial(lambda x: x - 1)
    with PatchSet([ForwardPatch(module, double)]):
        assert module(5) == 8
    assert vars(module)["forward"] is theirs


def test_rebind_sees_private_globals() -> None:
    module, second = Scale(), Scale()
    with PatchSet([RebindPatch(module, {"helper": other_helper}, slot="shift")]):
        assert (module.shift(1), second.shift(1)) == (11, 2)
        assert copy.copy(module).shift(1) == 2
    assert module.shift(1) == 2
    assert "shift" not in vars(module)


def decorated(function: Any) -> Any:
    @functools.wraps(function)
    def outer(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs) + helper()

    return outer


class Decorated(nn.Module):
    @decorated
    def forward(self, x: int) -> int:
        return x + helper()


def test_rebind_goes_through_decorators_and_replaces_every_use() -> None:
    module = Decorated()
    with PatchSet([RebindPatch(module, {"helper": other_helper})]):
        assert module(1) == 21
        assert module.forward.__wrapped__(module, 1) == 11
    assert module(1) == 3


class ReadingLayer(Wrapping):
    def forward(self, x: int) -> int:
        return x + helper()


def test_rebind_over_a_patch_of_a_layer_that_wraps() -> None:
    layer = ReadingLayer()
    with PatchSet([ForwardPatch(layer, double)]):
        assert layer(1) == 1004
        with PatchSet([RebindPatch(layer, {"helper": other_helper})]):
            assert layer(1) == 1022
        assert layer(1) == 1004
    assert layer(1) == 1002


def test_functions_and_classes_are_the_same_at_re_entry() -> None:
    module, twin = Decorated(), Decorated()
    seen = []
    for target in (module, module, twin):
        with PatchSet(
            [ForwardPatch(target, double), RebindPatch(target, {"helper": other_helper})]
        ):
            assert target(1) == 42
            seen.append((type(target), target.forward.__func__))
    assert len(set(seen)) == 1
    local = PatchSet([ForwardPatch(module, lambda w, i, a, k: w(*a, **k))])  # no module's function
    seen = []
    for _ in range(2):
        with local:
            seen.append(module.forward.__func__)
    assert seen[0] is seen[1]


def test_the_cache_keeps_no_closure() -> None:
    class Big:
        pass

    module = Scale()

    def closure(big: Any) -> Any:
        return lambda wrapped, instance, args, kwargs: (wrapped(*args), big)

    wrapper = closure(Big())
    gone = weakref.ref(wrapper.__closure__[0].cell_contents)

    with PatchSet(
        [ForwardPatch(module, wrapper), RebindPatch(module, {"helper": wrapper}, slot="shift")]
    ):
        pass
    del wrapper
    gc.collect()
    assert gone() is None


# ---- copies


class Stateful(nn.Module):
    """Has copy methods of its own, of every kind."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = 3

    def forward(self, x: int) -> int:
        return x * self.factor


class GetState(Stateful):
    def __getstate__(self) -> Any:
        return {"nested": dict(vars(self))}

    def __setstate__(self, state: Any) -> None:
        vars(self).update(state["nested"])


class Reduce(Stateful):
    def __reduce__(self) -> Any:
        return _rebuild, (type(self), dict(vars(self)))


class NewArgs(Stateful):
    def __new__(cls, label: str = "default") -> Any:
        self = super().__new__(cls)
        object.__setattr__(self, "label", label)
        return self

    def __getnewargs__(self) -> tuple[str]:
        return (self.label,)


class NewKwargs(NewArgs):
    def __new__(cls, *, label: str = "default") -> Any:
        return super().__new__(cls, label)

    def __getnewargs_ex__(self) -> Any:
        return (), {"label": self.label}


class OwnCopies(Stateful):
    def __copy__(self) -> Any:
        return _rebuild(type(self), dict(vars(self)))

    def __deepcopy__(self, memo: Any) -> Any:
        return _rebuild(type(self), copy.deepcopy(dict(vars(self)), memo))


class WithSlots(Stateful):
    __slots__ = ("extra",)

    def __init__(self) -> None:
        super().__init__()
        object.__setattr__(self, "extra", [1])


def _rebuild(cls: type, state: dict[str, Any]) -> Any:
    made = cls.__new__(cls)
    vars(made).update(state)
    return made


COPIES = [
    (kind, how)
    for kind in (GetState, Reduce, NewArgs, NewKwargs, OwnCopies, WithSlots, Stateful)
    for how in ("copy", "deepcopy", "pickle 0", "pickle 2", "pickle 5")
    if kind is not NewKwargs or how != "pickle 0"  # which has no keywords for __new__
]


@pytest.mark.parametrize(("kind", "how"), COPIES)
def test_copies_are_stock_whatever_the_class_does(kind: Any, how: str) -> None:
    module = kind()
    make: Any = {
        "copy": copy.copy,
        "deepcopy": copy.deepcopy,
    }.get(how) or (lambda m: pickle.loads(pickle.dumps(m, protocol=int(how[-1]))))
    expected = make(module)
    with PatchSet([ForwardPatch(module, double), AttributePatch(module, "factor", 5)]):
        assert module(1) == 10
        made = make(module)
        assert type(made) is kind
        assert list(vars(made)) == list(vars(expected))
        assert made(1) == 3
    for name in ("extra", "label"):
        assert getattr(made, name, None) == getattr(expected, name, None)
    assert type(module) is kind


def test_a_dict_copied_by_hand_carries_no_stacks() -> None:
    module = Scale()
    with PatchSet([AttributePatch(module, "factor", 5)]):
        taken = copy.deepcopy(vars(module))
        pickle.dumps(vars(module))
    assert taken[reclass.KEY] is None
    vars(module).update(taken)
    with PatchSet([ForwardPatch(module, double)]):
        assert module(1) == 10
    assert type(module) is Scale


def test_a_failed_second_push_leaves_the_class_of_the_first() -> None:
    layer = Layer()
    assert layer(1) == 1001
    with PatchSet([ForwardPatch(layer, double)]):
        cls = type(layer)
        assert layer(1) == 1002
        for error in (OSError("late"), KeyboardInterrupt()):
            with pytest.raises(type(error)):
                PatchSet([ForwardPatch(layer, plus_one), Probe(apply=error)]).patch()
            assert type(layer) is cls
            assert layer(1) == 1002
        with PatchSet([ForwardPatch(layer, plus_one)]):
            assert type(layer) is not cls
            assert layer(1) == 1003
        assert type(layer) is cls
    assert layer(1) == 1001
    assert type(layer) is Layer
    assert "forward" not in vars(layer)


def test_a_wrapper_that_copied_our_attributes_is_not_taken_for_ours() -> None:
    layer = Layer()
    patches = PatchSet([ForwardPatch(layer, double)]).patch()
    ours = layer.forward

    @functools.wraps(ours)
    def theirs(self: Any, x: int) -> Any:
        return -layer_forward(self, x)

    layer_forward = Layer.forward
    layer.forward = types.MethodType(theirs, layer)
    with pytest.warns(RestoreWarning):
        patches.unpatch()
    with PatchSet([ForwardPatch(layer, plus_one)]):
        assert layer(1) == 1000 + 1 - 1
    assert layer(1) == -1001


# ---- shared pieces and lost handles


def test_shared_pieces_leave_with_their_last_holder() -> None:
    mapping = {"key": 1}

    def share() -> PatchSet:
        return PatchSet([SharedPatch("piece", ItemPatch(mapping, "key", 2))])

    one, two = share(), share()
    one.patch()
    two.patch()
    one.unpatch()
    assert mapping == {"key": 2}
    one.patch()
    two.unpatch()
    assert mapping == {"key": 2}
    one.unpatch()
    assert mapping == {"key": 1}


def test_a_shared_piece_that_fails_is_forgotten() -> None:
    bad = PatchSet([SharedPatch("fails", Probe(apply=OSError("no")))])
    for _ in range(2):
        with pytest.raises(OSError, match="no"):
            bad.patch()
    stuck = PatchSet([SharedPatch("stuck", Probe(revert=OSError("stuck")))])
    with pytest.raises(RestoreError, match="stuck"), stuck:
        pass
    with PatchSet([SharedPatch("stuck", Probe())]):
        pass


def test_a_lost_handle_keeps_the_patch_but_not_the_module() -> None:
    module, mapping = Scale(), {"key": 1, "shared": 1}
    PatchSet(
        [
            ForwardPatch(module, double),
            ItemPatch(mapping, "key", 2),
            SharedPatch("lost", ItemPatch(mapping, "shared", 2)),
        ]
    ).patch()
    gc.collect()
    assert module(1) == 6
    assert len(active()) == 1
    gone = weakref.ref(module)
    del module
    gc.collect()
    assert gone() is None
    assert active() == []
    assert mapping == {"key": 1, "shared": 1}


def test_a_lost_handle_without_modules_stays() -> None:
    PatchSet([AttributePatch(Child, "size", 5)]).patch()
    gc.collect()
    assert Child.size == 5
    (live,) = active()
    live.unpatch()
    assert Child.size == 2


def test_active_names_the_line() -> None:
    with PatchSet([Probe()]) as outer:
        line = sys._getframe().f_lineno - 1
        inner = PatchSet([Probe()]).patch()
        assert outer.opened_at == f"{__file__}:{line}"
        assert inner.opened_at == f"{__file__}:{line + 2}"
        assert set(map(id, active())) == {id(outer), id(inner)}
        inner.unpatch()
        assert active() == [outer]
    assert "not applied" in repr(outer)


# ---- decorators, generators, threads, processes


def test_decorator() -> None:
    @PatchSet([AttributePatch(Child, "size", 5)])
    def size() -> int:
        """The size."""
        return Child.size

    assert (size(), Child.size, size()) == (5, 2, 5)
    assert size.__doc__ == "The size."


async def coroutine() -> None: ...


async def async_generator() -> Any:
    yield


def generator() -> Any:
    yield


class Awaitable:
    async def __call__(self) -> None: ...


@pytest.mark.parametrize(
    "function",
    [coroutine, async_generator, generator, functools.partial(coroutine), Awaitable(), Child, 3],
    ids=lambda f: getattr(f, "__name__", type(f).__name__),
)
def test_decorator_refuses_what_returns_too_early(function: Any) -> None:
    with pytest.raises(UnpatchableTarget):
        PatchSet()(function)


def test_a_generator_that_is_closed_early() -> None:
    def steps() -> Iterator[int]:
        with PatchSet([AttributePatch(Child, "size", 5)]):
            yield Child.size
            yield Child.size

    running = steps()
    assert next(running) == 5
    running.close()
    assert Child.size == 2


def test_threads_hammer_one_module() -> None:
    module, mapping, errors = Scale(), {"key": 1}, []
    stop = threading.Event()

    def hammer(seed: int) -> None:
        try:
            for _ in range(150):
                patches = [ForwardPatch(module, double), ItemPatch(mapping, "key", seed)]
                with PatchSet(patches) as live:
                    assert live in active()
                    assert mapping["key"] != 1
        except BaseException as error:
            errors.append(error)

    def look() -> None:
        try:
            while not stop.is_set():
                assert copy.deepcopy(module)(1) == 3
                assert pickle.loads(pickle.dumps(module))(1) == 3
                assert module(1) % 3 == 0
        except BaseException as error:
            errors.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)  # let the threads meet
    # One set stays, so that the module keeps its class and looking at it is safe.
    try:
        with PatchSet([AttributePatch(module, "extra", 1, create=True)]):
            threads = [threading.Thread(target=hammer, args=(n,)) for n in range(2, 6)]
            watcher = threading.Thread(target=look)
            for thread in (watcher, *threads):
                thread.start()
            for thread in threads:
                thread.join()
            stop.set()
            watcher.join()
    finally:
        sys.setswitchinterval(interval)
    assert errors == []
    assert mapping == {"key": 1}
    assert type(module) is Scale
    assert reclass.KEY not in vars(module)


def test_other_threads_see_the_patch() -> None:
    module, seen = Scale(), []
    with PatchSet([ForwardPatch(module, double)]):
        thread = threading.Thread(target=lambda: seen.append(module(1)))
        thread.start()
        thread.join()
    assert seen == [6]


needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="the platform has no fork")


def in_a_child(body: Callable[[], bool], limit: float = 20) -> bool:
    """Run ``body`` in a forked child and return what it returned; a child that hangs is killed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python's own, about threads
        pid = os.fork()
    if pid == 0:
        try:
            os._exit(0 if body() else 1)
        finally:
            os._exit(2)
    end = time.monotonic() + limit
    while time.monotonic() < end:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status) == 0
        time.sleep(0.01)
    os.kill(pid, 9)
    os.waitpid(pid, 0)
    raise AssertionError("the child hangs")


@needs_fork
def test_a_forked_child_inherits_and_can_enter() -> None:
    module = Scale()

    def child() -> bool:
        inherited = module(1) == 6
        with PatchSet([ForwardPatch(module, plus_one)]):
            entered = module(1) == 7
        live.unpatch()
        return inherited and entered and module(1) == 3 and type(module) is Scale

    with PatchSet([ForwardPatch(module, double)]) as live:
        assert in_a_child(child)
        assert module(1) == 6


@needs_fork
def test_a_child_forked_while_another_thread_holds_the_lock() -> None:
    module, holding = Scale(), threading.Event()

    def hold() -> None:
        with stacks.LOCK:
            holding.set()
            time.sleep(0.2)

    def child() -> bool:
        with PatchSet([ForwardPatch(module, double)]):
            return module(1) == 6

    thread = threading.Thread(target=hold)
    thread.start()
    holding.wait()
    assert in_a_child(child)
    thread.join()
    with stacks.LOCK:  # and inside the lock
        assert in_a_child(child)
    assert module(1) == 3


# ---- seeing


def test_diff_and_explain() -> None:
    patches = PatchSet([AttributePatch(Child, "size", 5), ForwardPatch(Scale(), double)])
    assert str(patches.diff()) == "no slot is changed"
    assert [row.how for row in patches.explain()] == ["attribute", "forward"]
    with patches:
        size, forward = patches.diff()
        assert (size.before, size.after) == (2, 5)
        assert forward.before is MISSING
        assert "Child.size: 2 -> 5" in str(patches.diff())
    assert len(patches.diff()) == 0
    assert "<table>" in patches.explain()._repr_html_()


def test_one_debug_line_per_patch(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "opake"), PatchSet([AttributePatch(Child, "size", 5)]):
        pass
    assert [record.getMessage() for record in caplog.records] == [
        f"apply AttributePatch({Child.__module__}.Child.size)"
    ]


def test_missing_survives_copies() -> None:
    assert copy.deepcopy(MISSING) is MISSING
    assert pickle.loads(pickle.dumps(MISSING)) is MISSING
    assert importlib.import_module("opake.engine").MISSING is MISSING
