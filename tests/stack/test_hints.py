"""The five verbs of the hint protocol, with an outcome for each action, over simulated levels."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

import msgspec
import pytest
import pytest_asyncio

from kvladder.hints import ActionResult, HintExecutor
from kvladder.hints.executor import MESSAGES_MAX
from kvladder.hints.fetches import PREFETCHES_MAX, WAITING_MAX
from kvladder.hints.protocol import ACTIONS_MAX
from kvladder.hints.requests import begin
from kvladder.hints.scopes import OwnRequest
from kvladder.keys import BlockKey
from kvladder.lock import STEP
from kvladder.policy.eviction import PRIORITY_DEFAULT
from kvladder.policy.offload import OffloadRule
from kvladder.policy.tenants import Limits, Shares
from kvladder.testing.engines.hinted import hint_envelope
from kvladder.testing.fakes import FakeStore, FakeTier
from kvladder.testing.shared import SharedFakeTier
from kvladder.testing.stacks import LevelSpec, SimCache
from kvladder.tiers.ladder.upkeep.commands import StackCommands
from tests.stack.caches import cache_of, flushed

PROMPT = SimCache.keys(*range(1, 7))
OTHER = SimCache.keys(*range(11, 17))
SALT = "a tenant"


def hex_of(keys: Sequence[BlockKey]) -> list[str]:
    return [key.hex() for key in keys]


def envelope(*actions: dict[str, Any], message: str = "m", version: str = "0.1") -> dict[str, Any]:
    return hint_envelope(*actions, message=message, version=version)


def outcomes(results: Sequence[ActionResult]) -> list[str]:
    return [result.outcome for result in results]


class Told:
    """A cache, and what applies hints to it, with a new message id each time."""

    def __init__(self, cache: SimCache) -> None:
        self.cache = cache
        self.hints = HintExecutor(cache.manager)
        self._sent = 0

    def tell(self, request: OwnRequest | None = None, /, **action: Any) -> ActionResult:
        self._sent += 1
        sent = envelope(action, message=str(self._sent))
        (result,) = self.hints.apply(sent, request=request)
        return result

    def where(self, keys: Sequence[BlockKey]) -> list[str | None]:
        with self.cache.stack.lock:
            return [self.cache.stack.where(key) for key in keys]

    async def until_fetched(self) -> None:
        while self.hints.counts()["in_flight"]:
            self.hints.poll()
            await asyncio.sleep(0.01)
        await self.cache.settle()


@pytest_asyncio.fixture
async def told() -> AsyncIterator[Told]:
    """Host with 8 slots above a private level and a shared one, which takes what is offered."""
    shared = SharedFakeTier(store=FakeStore())
    levels = (LevelSpec(FakeTier()), LevelSpec(shared, OffloadRule(min_priority=90)))
    limits = Limits(priority=95, pin_s=60.0)
    async with cache_of(*levels, slots=8, reserve_blocks=2, limits=limits) as cache:
        made = Told(cache)
        yield made
        made.hints.close()


async def test_pinned_blocks_outlast_newer_ones_until_their_time_ends(told: Told) -> None:
    told.cache.save(PROMPT[:4], salt=SALT)
    request = OwnRequest(PROMPT[:4], SALT)
    assert told.tell(request, do="pin", ttl_s=30) == ("a0", "clipped", "priority 95 for 30 s", 4)
    await told.cache.settle()
    for first in range(20, 30):
        told.cache.save(SimCache.keys(first, first, first))
        await told.cache.settle()
    assert told.where(PROMPT[:4]) == ["host"] * 4
    await asyncio.sleep(31)
    for first in range(40, 50):
        told.cache.save(SimCache.keys(first, first, first))
        await told.cache.settle()
    assert "host" not in told.where(PROMPT[:4])


async def test_a_pin_is_clipped_to_the_operators_limits(told: Told) -> None:
    told.cache.save(PROMPT[:2])
    result = told.tell(do="pin", keys=hex_of(PROMPT[:2]), ttl_s=3600)
    assert result == ("a0", "clipped", "priority 95 for 60 s", 2)


async def test_a_pin_beyond_the_part_of_raised_blocks_keeps_the_prompts_head_and_says_so() -> None:
    async with cache_of(slots=16, shares=Shares(raised=8, raised_tenant=4)) as cache:
        told, index = Told(cache), cache.stack.host.index
        cache.save(PROMPT, salt=SALT)
        found = told.tell(OwnRequest(PROMPT, SALT), do="pin", ttl_s=30)
        assert (found.outcome, found.blocks) == ("clipped", 6)
        assert found.why.startswith("2 blocks beyond the part that limits.raised")
        assert [index.priority(index.place(key) or 0) for key in PROMPT] == [100] * 4 + [35] * 2
        assert told.tell(OwnRequest(PROMPT[:4], SALT), do="pin", ttl_s=30).outcome == "accepted"
        cache.save(OTHER[:2], salt=SALT)
        assert told.tell(OwnRequest(OTHER[:2], SALT), do="pin", ttl_s=30).outcome == "accepted"
        ranks = [index.priority(index.place(key) or 0) for key in [*PROMPT, *OTHER[:2]]]
        assert ranks == [100] * 2 + [35] * 4 + [100] * 2, "what was pinned last stays"
        cache.manager.check()


async def test_a_prefix_that_is_pinned_is_given_up_from_its_end() -> None:
    async with cache_of(LevelSpec(FakeTier()), slots=8, reserve_blocks=2) as cache:
        told = Told(cache)
        for keys in (PROMPT[:4], OTHER[:3]):
            cache.save(keys, salt=SALT)
            assert told.tell(OwnRequest(keys, SALT), do="pin", ttl_s=30).outcome == "accepted"
            await cache.settle()
        cache.save(SimCache.keys(21, 22, 23), salt=SALT, priorities=[100] * 3)
        await cache.settle()
        host = [where == "host" for where in told.where(PROMPT[:4])]
        assert host == sorted(host, reverse=True)
        assert host[0]
        assert not all(host)


async def test_a_pin_of_many_blocks_is_done_in_steps_with_the_same_outcome() -> None:
    long = SimCache.keys(*range(2 * STEP + 5))
    async with cache_of(slots=256, shares=Shares(raised=100)) as cache:
        told, index = Told(cache), cache.stack.host.index
        cache.save(long, salt=SALT)
        found = told.tell(OwnRequest([*long, *OTHER], SALT), do="pin", ttl_s=30)
        assert (found.outcome, found.blocks) == ("clipped", len(long))
        assert found.why.startswith(f"{len(long) - 100} blocks beyond")
        ranks = [index.priority(index.place(key) or 0) for key in long]
        assert ranks == [100] * 100 + [35] * (len(long) - 100)
        cache.manager.check()


async def test_retained_blocks_get_the_priority_that_is_asked_for(told: Told) -> None:
    told.cache.save(PROMPT[:3])
    assert told.tell(do="retain", keys=hex_of(PROMPT[:3]), priority=70, ttl_s=9).blocks == 3
    with told.cache.stack.lock:
        metas = [told.cache.stack.meta(key) for key in PROMPT[:3]]
    assert [meta.priority for meta in metas if meta is not None] == [70, 70, 70]


@pytest.mark.parametrize(
    "action",
    [
        {"do": "pin", "ttl_s": 5},
        {"do": "retain", "priority": 1},
        {"do": "prefetch"},
        {"do": "demote"},
        {"do": "demote", "to": "out"},
        {"do": "share"},
    ],
)
async def test_no_verb_reaches_blocks_of_another_salt(told: Told, action: dict[str, Any]) -> None:
    told.cache.save(PROMPT, salt=SALT)
    if action["do"] == "prefetch":  # a fetch of keys changes no block's place or rank
        return
    before = told.where(PROMPT)
    for salt in ("", "another tenant"):
        result = told.tell(keys=hex_of(PROMPT), salt=salt, **action)
        assert result.outcome == "missing"
    result = told.tell(OwnRequest(PROMPT, "mine"), salt=SALT, **action)
    assert result.outcome == "rejected"
    with told.cache.stack.lock:
        metas = [told.cache.stack.meta(key) for key in PROMPT]
    assert [meta and meta.priority for meta in metas] == [PRIORITY_DEFAULT] * len(PROMPT)
    assert told.where(PROMPT) == before


async def test_prefetched_blocks_are_in_host_before_their_request_comes() -> None:
    store = await flushed(tuple(range(1, 7)))
    async with cache_of(LevelSpec(FakeTier(store=store, durable=True)), slots=8) as cache:
        told = Told(cache)
        result = told.tell(do="prefetch", keys=hex_of(PROMPT), budget_blocks=4)
        assert result == ("a0", "clipped", "to 4 blocks", 4)
        await told.until_fetched()
        assert told.where(PROMPT) == ["host"] * 4 + ["level1"] * 2
        assert told.tell(do="prefetch", keys=hex_of(OTHER)).outcome == "missing"


async def test_a_prefetch_that_has_to_ask_a_shared_level_says_so() -> None:
    tier = SharedFakeTier()
    async with cache_of(LevelSpec(tier), slots=8) as cache:
        told = Told(cache)
        cache.save(PROMPT[:2])
        tier.others_put({key: cache.payload(key) for key in PROMPT[2:4]})
        why = "a shared level has to be asked about 4 blocks"
        assert told.tell(OwnRequest(PROMPT), do="prefetch") == ("a0", "deferred", why, 2)
        await told.until_fetched()
        assert told.where(PROMPT[:4]) == ["host"] * 4
        again = told.tell(OwnRequest(PROMPT[:4]), do="prefetch")
        assert again == ("a0", "accepted", "", 4)
        await told.until_fetched()


async def test_a_prefetch_that_is_cancelled_gives_its_slots_back() -> None:
    store = await flushed(tuple(range(1, 7)))
    tier = FakeTier(store=store, durable=True, latency_s=5.0)
    async with cache_of(LevelSpec(tier), slots=8) as cache:
        told = Told(cache)
        assert told.tell(do="prefetch", keys=hex_of(PROMPT)).outcome == "accepted"
        assert told.tell(do="prefetch", cancels="1") == ("a0", "accepted", "", len(PROMPT))
        assert told.tell(do="prefetch", cancels="1").outcome == "missing"
        assert told.hints.counts()["in_flight"] == 0
        await asyncio.sleep(10)


async def test_prefetches_beyond_the_limit_wait_and_then_are_rejected(told: Told) -> None:
    told.cache.save(PROMPT[:1])
    found = [told.tell(do="prefetch", keys=hex_of(PROMPT[:1])) for _ in range(PREFETCHES_MAX)]
    assert {one.outcome for one in found} == {"accepted"}
    found = [told.tell(do="prefetch", keys=hex_of(PROMPT[:1])) for _ in range(WAITING_MAX)]
    assert {one.outcome for one in found} == {"deferred"}
    assert told.tell(do="prefetch", keys=hex_of(PROMPT[:1])).outcome == "rejected"
    await told.until_fetched()
    assert told.tell(do="prefetch", keys=hex_of(PROMPT[:1])).outcome == "accepted"
    await told.until_fetched()


@pytest.mark.parametrize("to", [None, "level1"])
async def test_demoted_blocks_leave_host_for_a_level(told: Told, to: str | None) -> None:
    told.cache.save(PROMPT)
    asked = {"to": to} if to else {}
    result = told.tell(do="demote", keys=hex_of(PROMPT[2:]), **asked)
    assert result == ("a0", "accepted", "", 4)
    await told.cache.settle()
    assert told.where(PROMPT) == ["host"] * 2 + ["level1"] * 4
    assert await told.cache.load(PROMPT) == ["host"] * 2 + ["level1"] * 4


async def test_blocks_demoted_out_are_forgotten(told: Told) -> None:
    told.cache.save(PROMPT)
    assert told.tell(do="demote", keys=hex_of(PROMPT), to="out").outcome == "accepted"
    assert told.where(PROMPT) == [None] * len(PROMPT)


async def test_a_level_that_does_not_take_blocks_refuses_them(told: Told) -> None:
    told.cache.save(PROMPT[:2])
    result = told.tell(do="demote", keys=hex_of(PROMPT[:2]), to="level2")
    assert result.outcome == "rejected"
    assert "level2" in told.tell(do="demote", keys=hex_of(PROMPT), to="attic").why
    assert told.where(PROMPT[:2]) == ["host"] * 2


async def test_shared_blocks_are_found_by_another_engine() -> None:
    store = FakeStore()
    async with cache_of(LevelSpec(SharedFakeTier(store=store)), slots=8) as cache:
        told = Told(cache)
        cache.save(PROMPT, salt=SALT)
        assert told.tell(OwnRequest(PROMPT, SALT), do="share") == ("a0", "accepted", "", 6)
        await cache.settle()
        assert told.where(PROMPT) == ["host"] * 6
    async with cache_of(LevelSpec(SharedFakeTier(store=store)), slots=8) as other:
        assert await other.load(PROMPT) == ["level1"] * 6


async def test_blocks_that_only_a_private_tier_holds_are_brought_up_and_shared() -> None:
    private, store = await flushed(tuple(range(1, 7))), FakeStore()
    levels = (
        LevelSpec(FakeTier(store=private, durable=True)),
        LevelSpec(SharedFakeTier(store=store)),
    )
    async with cache_of(*levels, slots=8) as cache:
        told = Told(cache)
        assert told.tell(do="share", keys=hex_of(PROMPT)).outcome == "deferred"
        await told.until_fetched()
    async with cache_of(LevelSpec(SharedFakeTier(store=store)), slots=8) as other:
        assert await other.load(PROMPT) == ["level1"] * 6


def finished(told: Told, keys: Sequence[BlockKey], **action: Any) -> None:
    """Let a request with this action about its own blocks finish."""
    hints = begin(told.hints, envelope(action), salt="")
    assert outcomes(hints.results) == ["deferred"]
    hints.finish(told.hints, [keys], "")


async def test_a_finished_request_drops_each_of_its_blocks_once(told: Told) -> None:
    told.cache.save(PROMPT[:4])
    finished(told, PROMPT, do="demote", to="out")
    assert told.where(PROMPT[:4]) == [None] * 4
    told.cache.save(PROMPT)  # the last two were on their way, the others are another request's
    await asyncio.sleep(2)
    told.hints.poll()
    assert told.where(PROMPT) == ["host"] * 4 + [None] * 2


async def test_blocks_that_are_never_saved_are_looked_for_seldom_and_not_for_ever(
    told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[int] = []
    demote = told.cache.manager.commands.demote

    def counted(keys: Sequence[BlockKey], salt: bytes, level: str | None) -> Any:
        tried.append(len(keys))
        return demote(keys, salt, level)

    monkeypatch.setattr(told.cache.manager.commands, "demote", counted)
    finished(told, PROMPT, do="demote")
    for _ in range(10_000):  # an engine's steps, 10 ms each
        told.hints.poll()
        told.hints.poll()
        await asyncio.sleep(0.01)
    assert tried == [len(PROMPT)] * len(tried)
    assert 10 < len(tried) < 50


async def test_an_order_for_a_level_that_is_gone_is_given_up(
    told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    told.cache.save(PROMPT[:4])
    hints = begin(told.hints, envelope({"do": "share"}), salt="")
    monkeypatch.setattr(StackCommands, "shared_levels", [])
    hints.finish(told.hints, [PROMPT], "")
    assert not told.hints._late.is_busy
    assert told.tell(do="share", keys=hex_of(PROMPT)).outcome == "rejected"
    assert told.where(PROMPT[:4]) == ["host"] * 4


async def test_the_loop_ends_fetches_and_late_orders_by_itself(told: Told) -> None:
    told.cache.save(PROMPT[:4])
    finished(told, PROMPT, do="demote", to="level1")
    await told.cache.settle()
    assert told.tell(do="prefetch", keys=hex_of(PROMPT[:4])).outcome == "accepted"
    told.cache.save(PROMPT[4:])
    await asyncio.sleep(2)
    assert told.hints.counts()["in_flight"] == 0
    assert told.where(PROMPT[4:]) == ["level1"] * 2


@pytest.mark.parametrize("salt", ["", "another tenant"])
async def test_no_verb_tells_of_a_session_of_another_salt(told: Told, salt: str) -> None:
    told.cache.save(PROMPT, salt=SALT, session="chat")
    told.cache.manager.sessions.use("chat", [PROMPT], SALT)
    own, other = OwnRequest(PROMPT, SALT), OwnRequest(OTHER, salt)
    assert told.tell(own, do="prefetch", session="chat").blocks == len(PROMPT)
    for action in ({"do": "prefetch"}, {"do": "pin", "ttl_s": 5}, {"do": "demote"}):
        unknown = told.tell(other, session="no such chat", **action)
        assert told.tell(other, session="chat", **action) == unknown
        assert unknown.outcome == "missing"
    assert told.tell(do="prefetch", session="chat", salt=salt).outcome == "missing"


async def test_a_session_names_the_blocks_of_its_last_request(told: Told) -> None:
    told.cache.save(PROMPT, session="chat")
    told.cache.manager.sessions.use("chat", [PROMPT])
    assert told.tell(do="demote", session="chat").blocks == len(PROMPT)
    assert told.tell(do="demote", session="no such chat").outcome == "missing"
    assert told.tell(do="demote", session="chat", salt=SALT).outcome == "missing"


async def test_a_message_that_is_sent_again_is_not_done_again(told: Told) -> None:
    told.cache.save(PROMPT[:4])
    sent = envelope({"do": "demote", "keys": hex_of(PROMPT[:4])})
    first = told.hints.apply(sent)
    told.cache.save(PROMPT[:4])
    await told.cache.settle()
    before = told.where(PROMPT[:4])
    assert told.hints.apply(sent) == first
    assert told.where(PROMPT[:4]) == before
    other = envelope({"do": "share", "keys": hex_of(PROMPT[:4])})
    (result,) = told.hints.apply(other)
    assert (result.outcome, "used for other actions" in result.why) == ("rejected", True)
    assert outcomes(told.hints.apply(sent, caller="another tenant")) != ["rejected"]


@pytest.mark.parametrize(
    ("sent", "expected"),
    [
        (b"\xff", "not an envelope"),
        (b"{", "not an envelope"),
        ("[]", "not an envelope"),
        (None, "not an envelope"),
        ({"protocol_version": "0.1"}, "message_id"),
        (b"[" * 100_000, "not an envelope"),
        (envelope(message=""), "expected 1 to 256"),
        (envelope(message="x" * 1000), "expected 1 to 256"),
    ],
)
async def test_what_is_no_envelope_has_one_outcome(told: Told, sent: object, expected: str) -> None:
    (result,) = told.hints.apply(sent)
    assert (result.outcome, expected in result.why) == ("rejected", True)


@pytest.mark.parametrize(
    ("action", "expected"),
    [
        ({"do": "evict"}, "expected one of pin, retain, prefetch, demote, share"),
        ({"do": "pin"}, "missing required field `ttl_s`"),
        ({"do": "pin", "ttl_s": -1}, "`$.ttl_s`"),
        ({"do": "pin", "ttl_s": "1"}, "`$.ttl_s`"),
        ({"do": "pin", "ttl_s": 1, "ttl": 1}, "unknown field `ttl`"),
        ({"do": "retain", "priority": 101}, "`$.priority`"),
        ({"do": "demote", "keys": ["ab"]}, "`$.keys[0]`"),
        ({"do": "demote", "tokens": [-1]}, "`$.tokens[0]`"),
        ({"do": "demote", "tokens": [1]}, "expected a session or keys"),
        ({"do": "demote", "tokens": [1], "session": "s"}, "expected one of them"),
        ({"do": "share"}, "no whole block"),
    ],
)
async def test_a_wrong_action_is_refused_alone(
    told: Told, action: dict[str, Any], expected: str
) -> None:
    told.cache.save(PROMPT[:2])
    right = {"do": "retain", "priority": 20, "keys": hex_of(PROMPT[:2])}
    wrong, done = told.hints.apply(envelope(action, right))
    assert wrong.outcome in ("rejected", "missing")
    assert expected in wrong.why
    assert done.outcome == "accepted"


async def test_unknown_versions_are_refused(told: Told) -> None:
    results = told.hints.apply(envelope({"do": "share"}, {"do": "share"}, version="7"))
    assert outcomes(results) == ["rejected", "rejected"]
    sent = envelope({"do": "share"})
    sent["actions"][0]["action_version"] = "2"
    (result,) = told.hints.apply(sent)
    assert "expected 1" in result.why


async def test_actions_and_remembered_messages_are_bounded(told: Told) -> None:
    many = [{"do": "demote", "keys": []}] * (ACTIONS_MAX + 10)
    results = told.hints.apply(json.dumps(envelope(*many)))
    assert outcomes(results) == ["missing"] * ACTIONS_MAX + ["rejected"] * 10
    for number in range(MESSAGES_MAX + 50):
        told.hints.apply(envelope(message=f"message {number}"))
    assert len(told.hints._results) == MESSAGES_MAX


async def test_engines_own_objects_are_understood(told: Told) -> None:
    class Action(msgspec.Struct, frozen=True):
        action_id: str
        action_type: str
        action_version: str
        payload: dict[str, Any]

    class Envelope(msgspec.Struct, frozen=True):
        protocol_version: str
        message_id: str
        actions: list[Action]

    told.cache.save(PROMPT)
    action = Action("a", "Retain", "1", {"priority": 20})
    request = OwnRequest(PROMPT, "")
    (result,) = told.hints.apply(Envelope("0.1", "m", [action]), request=request)
    assert result == ("a", "accepted", "", len(PROMPT))
    assert told.hints.counts() == {"retain": {"accepted": 1}, "in_flight": 0}


async def test_outcomes_are_counted_in_the_statistics(told: Told) -> None:
    told.cache.save(PROMPT)
    told.tell(do="retain", priority=20, keys=hex_of(PROMPT))
    told.tell(do="fly", keys=hex_of(PROMPT))
    told.tell(do="share", keys=hex_of(OTHER))
    expected = {"retain": {"accepted": 1}, "share": {"missing": 1}, "unknown": {"rejected": 1}}
    assert told.cache.manager.stats()["hints"] == {**expected, "in_flight": 0}
