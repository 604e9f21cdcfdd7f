"""Simulated worlds find the faults that they are made for: each one below, planted, is found."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvladder.errors import TierError
from kvladder.export.server import ServerOffers
from kvladder.export.session import Session
from kvladder.policy.offload import OffloadRule
from kvladder.policy.sessions import Sessions
from kvladder.policy.tenants import Tenants
from kvladder.tiers import label as labels
from kvladder.tiers.base import Tier
from kvladder.tiers.ladder import level as levels
from kvladder.tiers.ladder.base_level import EventBuffer, Expiry
from kvladder.tiers.ladder.calling import calls
from kvladder.tiers.ladder.calling.calls import CallOutcome, GuardedCalls
from kvladder.tiers.ladder.calling.client import TierClient
from kvladder.tiers.ladder.host import HostLevel
from kvladder.tiers.ladder.level import Level
from kvladder.tiers.ladder.loading import reads
from kvladder.tiers.ladder.loading.grow import FetchGrower
from kvladder.tiers.ladder.loading.loader import Loader
from kvladder.tiers.ladder.records.index import LevelIndex
from kvladder.tiers.ladder.records.places import PlaceAllocator
from kvladder.tiers.ladder.records.terms import ANYWHERE, NO_TERMS, Terms
from kvladder.tiers.ladder.stack import TierStack
from kvladder.tiers.ladder.writing.late import LateWrites
from kvladder.tiers.ladder.writing.transit import WritesInFlight, WriteState, facts_of
from kvladder.tiers.ladder.writing.writer import Writer
from kvladder.tiers.nixl.line import Connection, Line
from kvladder.tiers.nixl.tier import NixlTier
from kvladder.tiers.object.tier import ObjectTier
from kvladder.tiers.redis.servers import Servers
from kvladder.tiers.redis.tier import RedisTier
from tests.kit.knobs import Kind
from tests.kit.soak import run_world
from tests.sim.fleet import plan

WORLDS = 800
FIRST = {
    "a flush does nothing": 80,
    "a removal does not reach loads under way": 103,
    "a removal ends with the time of a write": 118,
    "a success of one kind of call hides failures of another": 234,
    "bytes that were of no use here are gone for everybody": 47,
    "wishes are forgotten on the way down": 56,
}
"""The worlds that found these faults when this was written, late; the others follow."""
FLEETS = 40


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


_call, _unpin = TierClient.call, FetchGrower.unpin
_recall, _remove_later = Level.recall, Level.remove_later
_abandon = WritesInFlight.abandon


def claimed(grower: FetchGrower, keys: Any, slots: Any) -> None:
    grower._shared.arena.share(slots)
    _unpin(grower, keys, slots)


async def unclaimed(client: TierClient, *arguments: Any, slots: Any = (), **options: Any) -> Any:
    del slots
    return await _call(client, *arguments, **options)


def not_those_of(level: Level, keys: Any, salt: Any = None) -> set[Any]:
    return _recall(level, keys, salt) if salt else set()


def as_if_nobody_wished(level: Level, items: Any) -> None:
    (Level._free if level.tier.shared else _remove_later)(level, items)


def not_of_a_salt(level: Level, keys: Any, salt: Any = None) -> set[Any]:
    return set() if salt else _recall(level, keys, salt)


def as_if_not_removed(in_flight: WritesInFlight, keys: Any) -> None:
    keys = [*keys]
    _abandon(in_flight, keys)
    for key in keys:
        in_flight.abandoned[key].state = WriteState.ABANDONED


FAULTS: dict[str, tuple[Any, str, Callable[..., Any]]] = {
    "damage is not noticed": (labels, "xxh3_128_digest", lambda _: bytes(16)),
    "a removal does not reach loads under way": (Loader, "recall", nothing),
    "reads keep the state in which they began": (reads, "become", nothing),
    "a removal does not reach writes under way": (Level, "recall", not_those_of),
    "thresholds are ignored": (OffloadRule, "admits", lambda *_: True),
    "what is loaded from is not pinned": (
        HostLevel,
        "pin",
        lambda host, slots: host.shared.arena.share(slots),
    ),
    "places are free while they are read": (
        PlaceAllocator,
        "give",
        lambda self, places: self._free.extend(places),
    ),
    "a place is not given back": (PlaceAllocator, "give", nothing),
    "a fetch keeps a claim": (
        FetchGrower,
        "unpin",
        claimed,
    ),
    "a call has no claim of its own": (TierClient, "call", unclaimed),
    "the writer never looks again": (Writer, "wake", nothing),
    "events of evictions are lost": (EventBuffer, "removed", nothing),
    "a flush does nothing": (TierStack, "_flush_some", nothing),
}


_rank = Tenants._rank


def never_lowered(tenants: Tenants, salt: bytes, place: int, priority: int) -> None:
    _rank(tenants, salt, place, priority)


OF_TENANTS: dict[str, tuple[type, str, Any]] = {
    "others give way to a salt above its quota": (
        HostLevel,
        "_within_quota",
        lambda _host, count, *_: count,
    ),
    "raised blocks have no limit": (Tenants, "_rank", never_lowered),
    "a session ends with what others use": (Sessions, "met", nothing),
    "a session ends with what it found": (
        Sessions,
        "met",
        lambda sessions, name, keys: sessions.brought(name, keys) if name else None,
    ),
}


OF_WISHES: dict[str, tuple[Any, str, Any]] = {
    "wishes are forgotten on the way down": (
        levels,
        "facts_of",
        lambda meta, **k: facts_of(meta._replace(terms=NO_TERMS), **k),
    ),
    "levels do not matter": (Terms, "levels", property(lambda _: ANYWHERE)),
    "nothing expires": (Expiry, "set", nothing),
    "a purge does not reach writes under way": (Level, "recall", not_of_a_salt),
    "a purge does not reach saves": (TierStack, "_recall", lambda *_: iter(())),
    "a purge spares some": (LevelIndex, "salted", lambda index, *_: ([], index.places)),
}


OF_SHARED: dict[str, tuple[type, str, Any]] = {
    "what a level gives up is gone for everybody": (Level, "_let_go", Level.remove_later),
    "bytes that were of no use here are gone for everybody": (Level, "discard", Level.remove),
    "a removal ends with the time of a write": (WritesInFlight, "abandon", as_if_not_removed),
    "a removal does not reach others": (Level, "remove_later", as_if_nobody_wished),
}

_prepare, _said = TierClient.prepare, TierClient._said


def in_threads_of_all(client: TierClient, layout: Any, namespace: Any, threads: Any) -> Any:
    return _prepare(client, layout, namespace, lambda _: threads("all"))


async def as_it_is(work: Any) -> Any:
    return await work


def with_one_breaker(client: TierClient, *_: Any) -> None:
    client.breakers = dict.fromkeys(client.breakers, client.breakers["put"])


def unguarded(client: TierClient, what: str, ask: Callable[[], Any], otherwise: Any) -> Any:
    return ask() if what == "spare" else _said(client, what, ask, otherwise)


OF_UNRULY: dict[str, tuple[Any, str, Any]] = {
    "answers are taken as they are": (calls, "checked", lambda _kind, answer, _count: answer),
    "what a tier raises reaches the loop": (calls, "contained", as_it_is),
    "what a tier says at once may raise": (TierClient, "_said", unguarded),
    "a success of one kind of call hides failures of another": (
        TierClient,
        "__init__",
        after(TierClient, "__init__", with_one_breaker),
    ),
    "all levels share their threads": (TierClient, "prepare", in_threads_of_all),
}
KINDS_OF: dict[str, Kind] = {
    **dict.fromkeys(FAULTS, "plain"),
    **dict.fromkeys(OF_WISHES, "wishing"),
    **dict.fromkeys(OF_SHARED, "shared"),
    **dict.fromkeys(OF_UNRULY, "unruly"),
    **dict.fromkeys(OF_TENANTS, "tenants"),
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", KINDS_OF)
def test_a_fault_is_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*(FAULTS | OF_WISHES | OF_SHARED | OF_UNRULY | OF_TENANTS)[fault])
    monkeypatch.setattr("kvladder.testing.sim.TURNS_TOTAL_MAX", 50_000)

    def run_worlds() -> None:
        for seed in (FIRST.get(fault, 0), *range(WORLDS)):
            run_world(seed, kind=KINDS_OF[fault])

    with pytest.raises((AssertionError, KeyError, SystemExit, KeyboardInterrupt)):
        run_worlds()


async def at_once(*_: Any) -> None:
    pass


async def once(line: Line) -> None:
    """Connect, and do nothing when the connection breaks."""
    connection = Connection(line._client, line._dial)
    try:
        await connection.open()
        line._here = connection
        line._tried.set()
        await connection.closed
    finally:
        connection.close()
        line._tried.set()


def unfenced(session: Session) -> None:
    session._over = True
    session._pump.close(TierError("the session is over"))


_close = Connection.close


def without_its_end(connection: Connection) -> None:
    if connection._plane is not None:
        connection._plane.destroy = nothing  # type: ignore[method-assign]
    _close(connection)


_publish = Level._publish


def all_of_it(level: Level, blocks: Any, results: Any) -> int:
    return _publish(level, blocks, [True] * len(results))


async def of_those_there(tier: NixlTier, salt: bytes | None, progress: Any) -> int:
    return sum([await line.here.purge(salt) for line in tier._up()])


def forgiving(cls: type[Tier], name: str) -> tuple[type[Tier], str, Any]:
    """A fault: a call of a tier that fails counts as done."""
    method = getattr(cls, name)

    async def wrapped(tier: Tier, *arguments: Any) -> int:
        try:
            return int(await method(tier, *arguments) or 0)
        except TierError:
            return 0

    return cls, name, wrapped


_guarded = GuardedCalls.call


async def untold_at_the_end(
    client: GuardedCalls, kind: Any, operation: Any, late: Any, **how: Any
) -> CallOutcome:
    outcome = await _guarded(client, kind, operation, late, **how)
    limit_s = how.get("timeout_s") or client.settings.timeout_s
    if outcome.quiet and outcome.took_s >= limit_s and not client._closing:
        return CallOutcome(None, quiet=False, took_s=limit_s, error="timeout")
    return outcome


OF_FLEETS: dict[str, tuple[Any, str, Any]] = {
    "a put that was refused counts as stored": (Level, "_publish", all_of_it),
    "an aborted operation does not wait for its end": (Connection, "_give_up", at_once),
    "a session ends without its fence": (Session, "fence", unfenced),
    "a connection leaves its agent": (Connection, "close", without_its_end),
    "a client that has gone keeps its slots": (ServerOffers, "gone", at_once),
    "a broken line is not connected again": (Line, "_run", once),
    "redirections are not followed": (Servers, "_again", lambda *_: False),
    "a purge leaves out cache servers that are away": (NixlTier, "purge", of_those_there),
    "a purge of Redis that fails in part is done": forgiving(RedisTier, "_purge"),
    "a removal by keys that fails is done (Redis)": forgiving(RedisTier, "remove"),
    "a removal by keys that fails is done (cache server)": forgiving(NixlTier, "remove"),
    "a removal by keys that fails is done (object store)": forgiving(ObjectTier, "remove"),
    "a call that ends at the moment of its timeout is not told": (
        GuardedCalls,
        "call",
        untold_at_the_end,
    ),
}
FIRST_FLEETS = {
    "a purge leaves out cache servers that are away": 8,
    "a purge of Redis that fails in part is done": 9,
    "a removal by keys that fails is done (object store)": 4,
    "a put that was refused counts as stored": 14,
    "an aborted operation does not wait for its end": 17,
    "a call that ends at the moment of its timeout is not told": 12,
}
"""The first fleets that found these faults when this was written; the others follow."""


@pytest.mark.slow
@pytest.mark.parametrize("fault", OF_FLEETS)
def test_fleets_find_a_fault(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*OF_FLEETS[fault])

    def run_fleets() -> None:
        for seed in (FIRST_FLEETS.get(fault, 0), *range(FLEETS)):
            plan.run(seed, plan.drawn(seed))

    with pytest.raises(plan.Failed):
        run_fleets()


@pytest.mark.slow
def test_a_kept_fleet_finds_that_a_failed_put_is_carried_out_late(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(LateWrites, "add", nothing)
    with pytest.raises(plan.Failed, match="bucket has wrong bytes"):
        plan.run(160, plan.kept(160))
