"""Simulated worlds find out what they are for: each fault below, put into the product, is found."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvladder.events import EventBuffer
from kvladder.policy.offload import OffloadRule
from kvladder.testing.fakes import FakeTier
from kvladder.tiers.base import ANYWHERE, NO_TERMS, Terms
from kvladder.tiers.ladder import gate as gates
from kvladder.tiers.ladder.endings import Alarm
from kvladder.tiers.ladder.gate import KINDS, Gate
from kvladder.tiers.ladder.host import HostLevel
from kvladder.tiers.ladder.index import LevelIndex
from kvladder.tiers.ladder.level import Level
from kvladder.tiers.ladder.loading.loader import Loader
from kvladder.tiers.ladder.places import Places
from kvladder.tiers.ladder.queue import Pending
from kvladder.tiers.ladder.stack import TierStack
from kvladder.tiers.ladder.writer import Writer
from tests.kit.knobs import Kind
from tests.kit.soak import run_world

WORLDS = 800


def nothing(*_: Any, **__: Any) -> None:
    pass


def after(cls: type, name: str, then: Callable[..., None]) -> Callable[..., Any]:
    """A method that does something wrong in addition."""
    method = getattr(cls, name)

    def wrapped(self: Any, *arguments: Any, **options: Any) -> Any:
        result = method(self, *arguments, **options)
        then(self, *arguments)
        return result

    return wrapped


_call, _unpin = Gate.call, Loader.unpin


def claimed(loader: Loader, keys: Any, slots: Any) -> None:
    loader._shared.arena.share(slots)
    _unpin(loader, keys, slots)


async def unclaimed(gate: Gate, *arguments: Any, slots: Any = (), **options: Any) -> Any:
    del slots
    return await _call(gate, *arguments, **options)


FAULTS: dict[str, tuple[type, str, Callable[..., Any]]] = {
    "damage is not noticed": (
        FakeTier,
        "_sound",
        lambda tier, item: tier._record(item) is not None,
    ),
    "a removal does not reach loads under way": (Loader, "recall", nothing),
    "a removal does not reach writes under way": (Writer, "recall", nothing),
    "thresholds are ignored": (OffloadRule, "admits", lambda *_: True),
    "what is loaded from is not pinned": (
        HostLevel,
        "pin",
        lambda host, slots: host._shared.arena.share(slots),
    ),
    "places are free while they are read": (
        Places,
        "give",
        lambda self, places: self._free.extend(places),
    ),
    "a place is not given back": (Places, "give", nothing),
    "a fetch keeps a claim": (
        Loader,
        "unpin",
        claimed,
    ),
    "a call has no claim of its own": (Gate, "call", unclaimed),
    "the writer never looks again": (Level, "wake", nothing),
    "events of evictions are lost": (EventBuffer, "removed", nothing),
    "a flush does nothing": (TierStack, "_flush_one", nothing),
}


OF_WISHES: dict[str, tuple[type, str, Any]] = {
    "wishes are forgotten on the way down": (
        Pending,
        "item",
        lambda pending, *a, _item=Pending.item, **k: _item(
            pending._replace(meta=pending.meta._replace(terms=NO_TERMS)), *a, **k
        ),
    ),
    "levels do not matter": (Terms, "levels", property(lambda _: ANYWHERE)),
    "nothing expires": (Alarm, "set", nothing),
    "a purge does not reach writes under way": (Writer, "recall_salted", nothing),
    "a purge does not reach saves": (TierStack, "_recall", nothing),
    "a purge spares some": (LevelIndex, "salted", lambda index, *_: ([], index.places)),
}


OF_SHARED: dict[str, tuple[type, str, Any]] = {
    "what a level gives up is gone for everybody": (Writer, "let_go", Writer.remove_later),
    "bytes that were of no use here are gone for everybody": (Level, "discard", Level.remove),
    "a removal does not reach others": (Writer, "remove_later", Writer.let_go),
}

_open, _said = Level.open, Gate._said


async def in_threads_of_all(level: Level, *arguments: Any, threads: Any, **options: Any) -> None:
    await _open(level, *arguments, threads=lambda _: threads("all"), **options)


async def as_it_is(work: Any) -> Any:
    return await work


def with_one_breaker(gate: Gate, *_: Any) -> None:
    gate.breakers = dict.fromkeys(KINDS, gate.breakers["put"])


def unguarded(gate: Gate, what: str, ask: Callable[[], Any], otherwise: Any) -> Any:
    return ask() if what == "spare" else _said(gate, what, ask, otherwise)


OF_UNRULY: dict[str, tuple[Any, str, Any]] = {
    "answers are taken as they are": (gates, "checked", lambda _kind, answer, _count: answer),
    "what a tier raises reaches the loop": (gates, "contained", as_it_is),
    "what a tier says at once may raise": (Gate, "_said", unguarded),
    "a success of one kind of call hides failures of another": (
        Gate,
        "__init__",
        after(Gate, "__init__", with_one_breaker),
    ),
    "all levels share their threads": (Level, "open", in_threads_of_all),
}
KINDS_OF: dict[str, Kind] = {
    **dict.fromkeys(FAULTS, "plain"),
    **dict.fromkeys(OF_WISHES, "wishing"),
    **dict.fromkeys(OF_SHARED, "shared"),
    **dict.fromkeys(OF_UNRULY, "unruly"),
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", KINDS_OF)
def test_a_fault_is_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*(FAULTS | OF_WISHES | OF_SHARED | OF_UNRULY)[fault])
    monkeypatch.setattr("kvladder.testing.sim.TURNS_TOTAL_MAX", 50_000)

    def run_worlds() -> None:
        for seed in range(WORLDS):
            run_world(seed, kind=KINDS_OF[fault])

    with pytest.raises((AssertionError, KeyError, SystemExit, KeyboardInterrupt)):
        run_worlds()
