"""The engine under any interleaving of what people do to it, against a model made of dicts.

The model of a slot is a base value and a list of layers; that of a set, the slots it holds. After
every step each slot holds what the model says, and when no set is left every namespace is the
one it was, by identity and key order, but for what somebody else wrote.
"""

from __future__ import annotations

import collections
import itertools
import sys
import types
import warnings
from collections.abc import Callable, Iterator, MutableMapping
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)
from interrupts import Interrupter
from torch import nn

from opake.engine import (
    AttributePatch,
    ForwardPatch,
    GlobalPatch,
    ItemPatch,
    Patch,
    PatchSet,
    active,
    shared,
    stacks,
)
from opake.engine.shared import SharedPatch
from opake.errors import AlreadyPatched, ForeignWrite, RestoreError, RestoreWarning


class Plain(MutableMapping[str, Any]):
    """A mapping that is no dict."""

    def __init__(self) -> None:
        self.items_: dict[str, Any] = {}

    def __getitem__(self, key: str) -> Any:
        return self.items_[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self.items_[key] = value

    def __delitem__(self, key: str) -> None:
        del self.items_[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.items_)

    def __len__(self) -> int:
        return len(self.items_)


class Linear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.factor = 1

    def forward(self, trace: tuple[str, ...]) -> tuple[str, ...]:
        return (*trace, "stock")


class Wrapping(nn.Module):
    """Wraps the forward of every subclass, as transformers' checkpointing layers do."""

    def __init_subclass__(cls) -> None:
        inner = cls.forward

        def forward(self: Any, trace: Any) -> Any:
            outermost = type(self).forward is forward
            return inner(self, (*trace, "wrapped") if outermost else trace)

        forward.__wrapped__ = inner  # type: ignore[attr-defined]
        cls.forward = forward  # type: ignore[method-assign]

    def forward(self, trace: tuple[str, ...]) -> tuple[str, ...]:
        raise NotImplementedError


class Layer(Wrapping):
    def forward(self, trace: tuple[str, ...]) -> tuple[str, ...]:
        return (*trace, "stock")


class Hit(BaseException):
    """An interrupt."""


class Bomb(Patch):
    """Raises where it is told to; the model knows it as a patch of nothing."""

    def __init__(self) -> None:
        self.on_apply: BaseException | None = None
        self.on_revert: BaseException | None = None

    def apply(self) -> None:
        if self.on_apply is not None:
            raise self.on_apply

    def revert(self) -> None:
        error, self.on_revert = self.on_revert, None
        if error is not None:
            raise error


class InterruptAt(Interrupter):
    """The interrupter around one call."""

    def hits(self, function: Callable[[], Any]) -> bool:
        before = sys.gettrace()
        sys.settrace(self)
        try:
            function()
        except KeyboardInterrupt:
            return True
        finally:
            sys.settrace(before)
        return False


class Place:
    """One slot: how to patch it, how to look at it, and what the model says it holds."""

    def __init__(self, owner: Any, key: str, *, item: bool = False) -> None:
        self.owner, self.key, self.item = owner, key, item
        self.base = self.read()
        self.layers: list[tuple[int, Any]] = []  # (set, value)
        self.foreign: list[Any] = []  # what somebody else wrote, while it is there
        self.told = False
        self.saved: Any = None  # what they found, and may put back
        self.stale: list[Any] = []  # what they put back after its set had left
        self.disturbed = False

    def read(self) -> Any:
        if self.item:
            return self.owner.get(self.key, ABSENT)
        if isinstance(self.owner, WithSlots):
            return getattr(self.owner, self.key, ABSENT)
        return vars(self.owner).get(self.key, ABSENT)

    def write(self, value: Any) -> None:
        if self.item:
            self.owner[self.key] = value
        elif isinstance(self.owner, type | WithSlots):
            setattr(self.owner, self.key, value)
        else:
            vars(self.owner)[self.key] = value

    def delete(self) -> None:
        if self.item:
            del self.owner[self.key]
        elif isinstance(self.owner, type | WithSlots):
            delattr(self.owner, self.key)
        else:
            del vars(self.owner)[self.key]

    def patch(self, value: Any) -> Patch:
        if self.item:
            return ItemPatch(self.owner, self.key, value, create=True)
        return AttributePatch(self.owner, self.key, value, create=True)

    @property
    def expected(self) -> Any:
        for written in (self.foreign, self.stale):
            if written:
                return written[-1]
        return self.layers[-1][1] if self.layers else self.base


ABSENT = object()
_NUMBERS = itertools.count()


class WithSlots:
    __slots__ = ("empty", "full")

    def __init__(self) -> None:
        self.full = 0


def marker(name: str) -> Callable[..., Any]:
    def wrapper(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        return (*wrapped(*args, **kwargs), name)

    return wrapper


def original() -> None: ...


class Engine(RuleBasedStateMachine):
    """Sets over a small zoo of owners."""

    @initialize()
    def build(self) -> None:
        class Base:
            inherited = "inherited"

        class Zoo(Base):
            first = 1
            static = staticmethod(len)
            of_class = classmethod(lambda cls: cls)
            prop = property(lambda self: 1)
            last = 2

        self.zoo, instance, slotted = Zoo, Zoo(), WithSlots()
        vars(instance).update(a=1, b=2)
        plain = Plain()
        mappings: list[Any] = [{}, collections.defaultdict(list), collections.OrderedDict(), plain]
        for mapping in mappings:
            mapping.update(a=1, b=2, c=3)
        self.home = types.ModuleType(f"opake_machine_home_{next(_NUMBERS)}")
        self.user = types.ModuleType(f"opake_machine_user_{next(_NUMBERS)}")
        vars(self.home).update(fn=original, alias=original, number=1)
        vars(self.user).update(copied=original)
        sys.modules.update({m.__name__: m for m in (self.home, self.user)})
        self.modules: list[Any] = [Linear(), Layer()]
        names = ["first", "static", "of_class", "prop", "inherited", "fresh"]
        self.places = [
            *(Place(Zoo, name) for name in names),
            *(Place(instance, name) for name in ("a", "last", "fresh")),
            *(Place(slotted, name) for name in ("full", "empty")),
            *(Place(m, key, item=True) for m in mappings for key in ("a", "c", "fresh")),
            *(Place(self.home, name) for name in ("number", "fresh")),
            *(Place(m, name) for m in self.modules for name in ("factor", "fresh")),
        ]
        self.owners = [Zoo, instance, *mappings, self.home, self.user, *self.modules]
        self.start = [self.contents(owner) for owner in self.owners]
        self.piece = Place({"piece": 0}, "piece", item=True)
        self.sets: dict[int, PatchSet] = {}
        self.values: dict[int, list[tuple[Place, Any]]] = {}
        self.chains: dict[int, list[tuple[Any, str]]] = {}
        self.bombs: dict[int, Bomb] = {}
        self.swaps: dict[int, Any] = {}
        self.sharing: set[int] = set()
        self.live: list[int] = []
        self.imports: list[str] = []

    @staticmethod
    def contents(owner: Any) -> list[tuple[Any, int]]:
        namespace = owner if isinstance(owner, MutableMapping) else vars(owner)
        return [(key, id(value)) for key, value in namespace.items()]

    # ---- rules

    @rule(data=st.data(), size=st.integers(0, 4), strict=st.booleans())
    def make(self, data: Any, size: int, strict: bool) -> None:
        """A new set: some slots, some forwards, perhaps a swept global, and a bomb in between."""
        number = next(_NUMBERS)
        chosen = data.draw(
            st.lists(st.sampled_from(self.places), max_size=size, unique_by=id), label="slots"
        )
        modules = data.draw(st.lists(st.sampled_from(self.modules), max_size=2), label="forwards")
        values = [(place, (number, place.key)) for place in chosen]
        chains = [(module, f"{number}.{n}") for n, module in enumerate(modules)]
        bomb = Bomb()
        patches = [place.patch(value) for place, value in values]
        patches += [ForwardPatch(module, marker(name)) for module, name in chains]
        if data.draw(st.booleans(), label="global"):
            self.swaps[number] = lambda: number
            patches.append(GlobalPatch(self.home, "fn", self.swaps[number]))
        if data.draw(st.booleans(), label="shared"):
            self.sharing.add(number)
            patches.append(SharedPatch(id(self), self.piece.patch("shared")))
        patches.insert(data.draw(st.integers(0, len(patches)), label="bomb"), bomb)
        self.sets[number] = PatchSet(patches, strict=strict)
        self.values[number], self.chains[number], self.bombs[number] = values, chains, bomb

    def idle(self) -> list[int]:
        return [number for number in self.sets if number not in self.live]

    def _apply(self, number: int) -> None:
        for place, value in self.values[number]:
            place.layers.append((number, value))
            place.stale.clear()
        if number in self.sharing and not self.sharing & set(self.live):
            self.piece.layers.append((0, "shared"))
        self.live.append(number)

    def _blocked(self, number: int) -> bool:
        return any(place.layers and place.foreign for place, _ in self.values[number])

    @precondition(lambda self: self.idle())
    @rule(data=st.data())
    def enter(self, data: Any) -> None:
        number = data.draw(st.sampled_from(self.idle()), label="set")
        if self._blocked(number):
            with pytest.raises(ForeignWrite):
                self.sets[number].patch()
            return
        for place, _ in self.values[number]:
            if not place.layers and place.foreign:  # theirs by now
                place.base, place.foreign = place.foreign[-1], []
        self.sets[number].patch()
        self._apply(number)

    @precondition(lambda self: self.idle())
    @rule(
        data=st.data(),
        error=st.sampled_from([ValueError("apply"), KeyboardInterrupt("apply"), Hit("apply")]),
    )
    def fail_to_enter(self, data: Any, error: BaseException) -> None:
        number = data.draw(st.sampled_from(self.idle()), label="set")
        if self._blocked(number):
            return
        self.bombs[number].on_apply = error
        with pytest.raises(type(error), match="apply"):
            self.sets[number].patch()
        self.bombs[number].on_apply = None

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def enter_twice(self, data: Any) -> None:
        number = data.draw(st.sampled_from(self.live), label="set")
        with pytest.raises(AlreadyPatched):
            self.sets[number].patch()
        joined = PatchSet([Bomb(), *self.sets[number].patches])
        with pytest.raises(AlreadyPatched):
            joined.patch()

    def _leave(self, number: int) -> bool:
        """Take the set out of the model; True where it has something to tell."""
        self.live.remove(number)
        tells = False
        if number in self.sharing and not self.sharing & set(self.live):
            self.piece.layers.clear()
        for place, value in reversed(self.values[number]):
            place.layers.remove((number, value))
            place.stale.clear()
            if place.foreign and not place.told:
                # Not told where what they wrote is what we would have put there.
                after = place.layers[-1][1] if place.layers else place.base
                if place.foreign[-1] is after:
                    if not place.layers:
                        place.foreign = []
                else:
                    tells = place.told = True
            if not place.layers and place.foreign:
                place.base, place.foreign, place.told = place.foreign[-1], [], False
        return tells

    def _leave_and_hear(self, number: int, leave: Callable[[], Any]) -> None:
        tells = self._leave(number)
        if tells and self.sets[number].strict:
            with pytest.raises(RestoreError, match="somebody else"):
                leave()
        elif tells:
            with pytest.warns(RestoreWarning) as caught:
                leave()
            assert len(caught) == 1
        else:
            leave()

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def leave(self, data: Any) -> None:
        number = data.draw(st.sampled_from(self.live), label="set")
        self._leave_and_hear(number, self.sets[number].unpatch)
        self.sets[number].unpatch()  # a second time does nothing

    @precondition(lambda self: self.live)
    @rule(data=st.data(), error=st.sampled_from([KeyboardInterrupt, Hit]))
    def leave_interrupted(self, data: Any, error: type[BaseException]) -> None:
        number = data.draw(st.sampled_from(self.live), label="set")
        self.bombs[number].on_revert = error("revert")
        self._leave(number)
        with pytest.raises(error, match="revert"):
            self.sets[number].unpatch()
        assert not self.sets[number].applied

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def leave_with_a_broken_patch(self, data: Any) -> None:
        number = data.draw(st.sampled_from(self.live), label="set")
        self.bombs[number].on_revert = OSError("broken")
        self._leave(number)
        with pytest.raises(RestoreError, match="broken"):
            self.sets[number].unpatch()

    @precondition(lambda self: self.idle())
    @rule(data=st.data(), how=st.sampled_from(["with", "decorator", "generator", "raise", "join"]))
    def pass_through(self, data: Any, how: str) -> None:
        """Enter and leave in one step."""
        number = data.draw(st.sampled_from(self.idle()), label="set")
        if any(place.foreign or place.stale for place, _ in self.values[number]):
            return
        patches = self.sets[number]
        inside = sum(place.expected is not ABSENT for place in self.places)
        if how == "join":
            more = [place.patch("joined") for place in data.draw(self._some_places())]
            more = [patch for patch in more if patch.slot.read() is not None]
            patches = patches + PatchSet(more)
        if how == "decorator":
            assert patches(lambda: patches.applied)()
        elif how == "generator":
            run = self._generator(patches)
            next(run)
            run.close()
        elif how == "raise":
            with pytest.raises(LookupError, match="body"), patches:
                raise LookupError("body")
        else:
            with patches:
                assert patches.applied
        assert not patches.applied
        assert inside == sum(place.expected is not ABSENT for place in self.places)

    def _some_places(self) -> Any:
        free = [place for place in self.places if not place.foreign and not place.stale]
        return st.lists(st.sampled_from(free), max_size=3) if free else st.just([])

    @staticmethod
    def _generator(patches: PatchSet) -> Iterator[int]:
        with patches:
            yield 1

    @precondition(lambda self: any(place.layers for place in self.places))
    @rule(data=st.data(), what=st.sampled_from(["new", "base", "delete", "undone"]))
    def write_from_outside(self, data: Any, what: str) -> None:
        places = [p for p in self.places if p.layers and not p.foreign and not p.stale]
        if not places:
            return
        place = data.draw(st.sampled_from(places), label="place")
        place.saved = place.read()
        theirs: Any = ("foreign", next(_NUMBERS))
        if what == "base" or what == "delete":
            theirs = place.base if what == "base" else ABSENT
        place.disturbed = True
        if theirs is ABSENT:
            place.delete()
        else:
            place.write(theirs)
        if what == "undone":
            place.write(place.saved)
        else:
            place.foreign.append(theirs)

    @precondition(lambda self: any(place.layers and place.foreign for place in self.places))
    @rule(data=st.data())
    def undo_from_outside(self, data: Any) -> None:
        """Put back what was there, though the set that had put it there may have left."""
        places = [place for place in self.places if place.layers and place.foreign]
        place = data.draw(st.sampled_from(places), label="place")
        place.write(place.saved)
        place.foreign.clear()
        place.told = False
        if place.saved is not place.expected:
            place.stale.append(place.saved)

    def _quiet(self, number: int) -> bool:
        """Tell whether a set meets nobody else, and sweeps no modules, which takes many lines."""
        return number not in self.swaps and not any(
            place.foreign or place.stale for place, _ in self.values[number]
        )

    @precondition(lambda self: any(map(self._quiet, self.idle())))
    @rule(data=st.data(), line=st.integers(1, 300))
    def interrupt_entering(self, data: Any, line: int) -> None:
        quiet = [number for number in self.idle() if self._quiet(number)]
        number = data.draw(st.sampled_from(quiet), label="set")
        if InterruptAt(line).hits(self.sets[number].patch):
            assert not self.sets[number].applied
        else:
            self._apply(number)

    @precondition(lambda self: any(map(self._quiet, self.live)))
    @rule(data=st.data(), line=st.integers(1, 300))
    def interrupt_leaving(self, data: Any, line: int) -> None:
        quiet = [number for number in self.live if self._quiet(number)]
        number = data.draw(st.sampled_from(quiet), label="set")
        InterruptAt(line).hits(lambda: self.sets[number].__exit__(None, None, None))
        self._leave(number)

    @precondition(lambda self: self.swaps.keys() & set(self.live))
    @rule()
    def import_late(self) -> None:
        """Somebody imports the replacement, or the original, by name."""
        name = f"late_{next(_NUMBERS)}"
        vars(self.user)[name] = vars(self.home)["fn"]
        self.imports.append(name)

    # ---- what holds at any time

    @invariant()
    def slots_hold_what_the_model_says(self) -> None:
        for place in (*self.places, self.piece):
            found, expected = place.read(), place.expected
            assert found is expected or found == expected, (place.owner, place.key)

    @invariant()
    def forwards_run_their_layers(self) -> None:
        for module in self.modules:
            layers = [name for n in self.live for m, name in self.chains[n] if m is module]
            start = ["wrapped"] if isinstance(module, Layer) else []
            assert list(module(())) == [*start, "stock", *layers]
            assert type(module).__name__ in ("Linear", "Layer")

    @invariant()
    def globals_follow(self) -> None:
        swaps = [self.swaps[n] for n in self.live if n in self.swaps]
        expected = swaps[-1] if swaps else original
        assert vars(self.home)["fn"] is vars(self.home)["alias"] is expected
        assert vars(self.user)["copied"] is expected
        for name in self.imports:
            assert vars(self.user)[name] is expected

    @invariant()
    def active_sets_are_the_live_ones(self) -> None:
        mine = {id(patches) for patches in self.sets.values()}
        live = {id(self.sets[number]) for number in self.live}
        assert {id(found) for found in active()} & mine == live

    def teardown(self) -> None:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", RestoreWarning)
                for number in list(self.live):
                    self._leave(number)
                    try:
                        self.sets[number].unpatch()
                    except RestoreError:
                        assert self.sets[number].strict
            self.slots_hold_what_the_model_says()
            self.forwards_run_their_layers()
            self.globals_follow()
            self._everything_is_as_it_was()
        finally:
            for module in (self.home, self.user):
                sys.modules.pop(module.__name__, None)

    def _everything_is_as_it_was(self) -> None:
        for owner, start in zip(self.owners, self.start, strict=True):
            theirs = {
                place.key for place in self.places if place.owner is owner and place.disturbed
            }
            theirs |= set(self.imports) if owner is self.user else set()
            now = self.contents(owner)
            assert [x for x in now if x[0] not in theirs] == [
                x for x in start if x[0] not in theirs
            ]
        for module, cls in zip(self.modules, (Linear, Layer), strict=True):
            assert type(module) is cls
        assert stacks._STACKS == {}
        assert shared._PIECES == {}
        assert shared._WATCHED == []


TestEngine = Engine.TestCase
