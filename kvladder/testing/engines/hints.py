"""The conformance suite for engines that obey hints, as tests to inherit."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from random import Random
from threading import Event, Timer
from typing import Any, Final

import pytest

from kvladder.config import registry
from kvladder.hints import ActionResult
from kvladder.hints.protocol import ACTIONS_MAX, OUTCOMES
from kvladder.layout import align
from kvladder.testing.engines.faults import Cold
from kvladder.testing.engines.hinted import EVERY_S, HintedEngine, Served, hint_envelope

MakeHinted = Callable[[Mapping[str, Any]], HintedEngine]
COLD: Final = "suite-hints-cold"
SHARED: Final = "suite-hints-shared"
SLOTS: Final = 16
BLOCKS: Final = 4
"""Blocks of a prompt: four prompts fill host."""
FLOOD: Final = 2_000
ACTIONS: Final = 60
"""Number of random actions."""
VERBS: Final[Mapping[str, Mapping[str, Any]]] = {
    "pin": {"ttl_s": 60.0},
    "retain": {"priority": 50},
    "prefetch": {},
    "demote": {},
    "share": {},
}
"""The verbs, each with what its payload needs."""


class HintFixtures:
    """Fixtures of ``HintTests``, and the attributes that a subclass may override."""

    block_tokens = 16
    """Tokens of a block."""
    block_bytes = 8192
    """Bytes of a slot in the arena."""
    carries_hints = True
    """False if requests of the engine bring no hints, so that they come without a request only."""
    patience_s = 300.0
    """Time to wait for an event before the test fails."""

    @pytest.fixture
    def make(self) -> MakeHinted:
        """Return a function that makes an engine over a stack; must be overridden."""
        raise NotImplementedError("give the class a fixture `make` that returns a function")

    @pytest.fixture
    def cold(self, monkeypatch: pytest.MonkeyPatch) -> Cold:
        """Return the control of the cold tier, which belongs to the engine alone."""
        return _registered(Cold(), COLD, monkeypatch)

    @pytest.fixture
    def shared(self, monkeypatch: pytest.MonkeyPatch) -> Cold:
        """Return the control of the tier that engines share."""
        return _registered(Cold(is_shared=True), SHARED, monkeypatch)

    @pytest.fixture
    def opened(self, make: MakeHinted, cold: Cold, shared: Cold) -> Iterator[OpenedHinted]:
        """Yield what opens engines; close them after the test, and check what they leave."""
        opened = OpenedHinted(make, self)
        yield opened
        cold.heal()
        shared.heal()
        opened.close()

    @pytest.fixture
    def alone(self, opened: OpenedHinted) -> HintDriver:
        """Return an engine over host alone."""
        return opened.engine()

    @pytest.fixture
    def engine(self, opened: OpenedHinted) -> HintDriver:
        """Return an engine over host and the cold tier, which gets each block at once."""
        return opened.engine(COLD)


def _registered(cold: Cold, name: str, monkeypatch: pytest.MonkeyPatch) -> Cold:
    registered = registry._registered  # pyright: ignore[reportPrivateUsage]
    monkeypatch.setitem(registered, ("tiers", name), cold.tier_class)
    return cold


class OpenedHinted:
    """Opens engines of a test, and closes them."""

    def __init__(self, make: MakeHinted, limits: HintFixtures) -> None:
        self._make = make
        self._limits = limits
        self._engines: list[HintedEngine] = []

    def engine(self, *below: str, **more: Any) -> HintDriver:
        """Open an engine over host and tiers of these types; ``more`` are sections of its stack."""
        slot_bytes = align(self._limits.block_bytes)
        tiers: list[dict[str, Any]] = [{"name": "host", "type": "host", "min_priority": 0}]
        for kind in below:
            level: dict[str, Any] = {
                "name": "cold" if kind == COLD else "shared",
                "type": kind,
                "when": "commit",
            }
            level |= {"capacity": f"{128 * slot_bytes} B", "min_priority": 0, "timeout": "1 h"}
            if kind == SHARED:
                level |= {"when": "evict"}
            tiers.append(level)
        stack = {
            "model": {"fingerprint": "suite"},
            "arena": {"size": f"{SLOTS * slot_bytes} B", "reserve": "0%"},
            "fetch": {"when": "always", "deadline": "1 h"},
            "tiers": tiers,
            **more,
        }
        engine = self._make(stack)
        self._engines.append(engine)
        return HintDriver(engine, self._limits)

    def close(self) -> None:
        """Close all engines, with what is still in flight."""
        while self._engines:
            engine = self._engines.pop()
            engine.manager.check()
            engine.close()
            arena = engine.manager.arena
            assert arena.free == arena.slots, "a slot is still claimed"


class HintDriver:
    """Sends an engine requests and hints."""

    def __init__(self, engine: HintedEngine, limits: HintFixtures) -> None:
        self.engine = engine
        self.block_tokens = limits.block_tokens
        self._patience_s = limits.patience_s
        self._sent = 0

    def prompt(self, number: int) -> list[int]:
        """Return the tokens of a prompt of ``BLOCKS`` blocks; others begin with other tokens."""
        return [number + 3, *Random(number).choices(range(3, 99), k=BLOCKS * self.block_tokens - 1)]

    def envelope(self, *actions: Mapping[str, Any], message: str | None = None) -> dict[str, Any]:
        """Return an envelope; each action says its verb as ``do``, and its payload."""
        self._sent += 1
        named = f"message {self._sent}" if message is None else message
        return hint_envelope(*actions, message=named)

    def serve(self, number: int, *actions: Mapping[str, Any], salt: str = "") -> Served:
        """Serve a prompt, with these hints if there are any."""
        hints = self.envelope(*actions) if actions else None
        return self.engine.serve(self.prompt(number), salt=salt, hints=hints)

    def act(self, verb: str, number: int, **payload: Any) -> ActionResult:
        """Send one action about a prompt; return its outcome."""
        action = {"do": verb, "tokens": self.prompt(number), **payload}
        (result,) = self.engine.hint(self.envelope(action))
        return result

    def until(self, holds: Callable[[], object], what: str) -> None:
        """Wait until ``holds`` is true."""
        end = time.monotonic() + self._patience_s
        while not holds():
            assert time.monotonic() < end, what
            Event().wait(EVERY_S)

    def fetched(self) -> None:
        """Wait until no fetch for a hint is in flight."""
        manager = self.engine.manager
        self.until(lambda: not manager.stats()["hints"]["in_flight"], "a prefetch never ended")
        self.until(manager.idle, "a write never ended")

    @property
    def free(self) -> int:
        """Number of free slots of the arena."""
        return self.engine.manager.arena.free


class HintTests(HintFixtures):
    """Conformance tests. Inherit, name the class ``Test...`` and define a fixture ``make``.

    ``make`` returns a function of a stack, which opens the stack and returns a
    :class:`HintedEngine` over it. Around a connector that passes :class:`ConnectorTests`, that is a
    :class:`HintedSample`.
    """

    # ---- the verbs

    def test_pinned_blocks_outlast_newer_ones(self, alone: HintDriver) -> None:
        alone.serve(1)
        assert alone.act("pin", 1, ttl_s=3600)[1:] == ("accepted", "", BLOCKS)
        for other in range(2, 8):
            alone.serve(other)
        assert alone.serve(1).loaded == BLOCKS, "pinned blocks were evicted"

    def test_a_pin_ends_with_its_time(self, alone: HintDriver) -> None:
        alone.serve(1)
        alone.act("pin", 1, ttl_s=0.05)
        Event().wait(0.1)
        for other in range(2, 8):
            alone.serve(other)
        assert alone.serve(1).loaded == 0, "blocks are pinned for longer than was asked for"

    def test_retained_blocks_are_evicted_by_priority(self, alone: HintDriver) -> None:
        for number in range(1, 5):
            alone.serve(number)
        assert alone.act("retain", 4, priority=1).outcome == "accepted"
        alone.serve(5)
        assert alone.serve(1).loaded == BLOCKS, "a block was evicted before one of lower priority"

    def test_prefetched_blocks_are_read_before_their_request(
        self, engine: HintDriver, cold: Cold
    ) -> None:
        for number in range(1, 6):
            engine.serve(number)
        assert engine.act("prefetch", 1)[1:] == ("accepted", "", BLOCKS)
        engine.fetched()
        reads = cold.reads
        assert engine.serve(1).loaded == BLOCKS
        assert cold.reads == reads, "the request still read blocks that were to be prefetched"

    def test_a_budget_bounds_a_prefetch(self, engine: HintDriver, cold: Cold) -> None:
        for number in range(1, 6):
            engine.serve(number)
        reads = cold.reads
        result = engine.act("prefetch", 1, budget_blocks=BLOCKS - 2)
        assert (result.outcome, result.blocks) == ("clipped", BLOCKS - 2)
        engine.fetched()
        assert cold.reads == reads + BLOCKS - 2, "more blocks were read than the budget allows"

    def test_demoted_blocks_leave_host_for_the_level(self, engine: HintDriver) -> None:
        engine.serve(1)
        before = engine.free
        assert engine.act("demote", 1, to="cold")[1:] == ("accepted", "", BLOCKS)
        engine.until(lambda: engine.free == before + BLOCKS, "demoted blocks stay in host")
        assert engine.serve(1).loaded == BLOCKS, "demoted blocks are lost"

    def test_blocks_that_are_demoted_out_are_forgotten(
        self, engine: HintDriver, cold: Cold
    ) -> None:
        engine.serve(1)
        assert engine.act("demote", 1, to="out").outcome == "accepted"
        assert engine.serve(1).loaded == 0, "blocks that were demoted out are found"

    def test_shared_blocks_are_found_by_another_engine(
        self, opened: OpenedHinted, shared: Cold
    ) -> None:
        engine = opened.engine(SHARED)
        engine.serve(1)
        result = engine.act("share", 1)
        assert result.outcome == "accepted"
        engine.until(lambda: len(shared.keys) == result.blocks, "shared blocks are not written")
        opened.close()
        assert opened.engine(SHARED).serve(1).loaded == BLOCKS

    # ---- what hints must not do

    @pytest.mark.parametrize("verb", list(VERBS))
    def test_no_verb_reaches_another_salt(
        self, opened: OpenedHinted, cold: Cold, shared: Cold, verb: str
    ) -> None:
        engine = opened.engine(*((COLD, SHARED) if verb == "share" else (COLD,)))
        engine.serve(1, salt="one")
        before = engine.free
        for salt in ("two", ""):
            result = engine.act(verb, 1, salt=salt, **VERBS[verb])
            assert result.outcome == "missing", "a hint found blocks of another salt"
        engine.fetched()
        assert engine.free == before
        assert not shared.keys
        assert engine.serve(1, salt="one").loaded == BLOCKS

    def test_limits_hold(self, opened: OpenedHinted) -> None:
        engine = opened.engine(limits={"priority": 60, "pin": "10 m"})
        engine.serve(1)
        result = engine.act("pin", 1, ttl_s=86400.0)
        assert (result.outcome, bool(result.why)) == ("clipped", True), "limits are exceeded"

    def test_a_hint_waits_for_no_tier(self, engine: HintDriver, cold: Cold) -> None:
        for number in range(1, 6):
            engine.serve(number)
        cold.hang()
        end = Timer(self.patience_s, cold.heal)
        end.start()
        try:
            for verb, needed in VERBS.items():
                engine.act(verb, 1, **needed)
            assert not end.finished.is_set(), "a hint waited for the tier"
        finally:
            end.cancel()
            end.join()

    def test_a_flood_is_bounded(self, engine: HintDriver, cold: Cold) -> None:
        for number in range(1, 6):
            engine.serve(number)
        cold.hang()
        outcomes = {engine.act("prefetch", 1).outcome for _ in range(FLOOD)}
        assert "rejected" in outcomes, "the engine takes any number of prefetches"
        cold.heal()
        engine.fetched()
        result = engine.act("prefetch", 1)
        asks = result.outcome == "deferred" and "a shared level has to be asked" in result.why
        assert asks or result.outcome == "accepted", "the engine has not recovered"
        engine.fetched()

    def test_random_hints_change_no_byte(self, opened: OpenedHinted) -> None:
        random = Random(7)
        engine = opened.engine(COLD, SHARED, limits={"priority": 80, "pin": "1 s"})
        for _ in range(ACTIONS):
            number, salt = random.randrange(1, 6), random.choice(["", "one", "two"])
            match random.randrange(10):
                case 0 | 1 | 2:
                    engine.serve(number, salt=salt)
                case 3 if salt:
                    for _ in engine.engine.manager.purge(salt):
                        pass
                    assert engine.serve(number, salt=salt).loaded == 0, "purged blocks come back"
                case 4 if not random.randrange(4):
                    opened.close()
                    engine = opened.engine(COLD, SHARED, limits={"priority": 80, "pin": "1 s"})
                case _:
                    self._hint_at_random(engine, random, number, salt)
            engine.engine.manager.check()
        for number in range(1, 6):
            for salt in ("", "one", "two"):
                engine.serve(number, salt=salt)

    @staticmethod
    def _hint_at_random(engine: HintDriver, random: Random, number: int, salt: str) -> None:
        """Send one to three random actions, and check the form of their outcomes."""
        actions: list[dict[str, Any]] = []
        for _ in range(random.randrange(1, 4)):
            verb = random.choice([*VERBS, "demote", "fly"])
            payload: dict[str, Any] = {**VERBS.get(verb, {}), "tokens": engine.prompt(number)}
            if verb == "pin":
                payload["ttl_s"] = random.choice([0.001, 0.1, 60.0])
            if verb == "retain":
                payload["priority"] = random.choice([0, 35, 70, 100, 101])
            if verb == "demote":
                payload |= random.choice([{}, {"to": "cold"}, {"to": "out"}, {"to": "attic"}])
            actions.append({"do": verb, "salt": salt, **payload})
        results = engine.engine.hint(engine.envelope(*actions))
        assert [one.action_id for one in results] == [f"a{n}" for n in range(len(actions))]
        assert all(one.outcome in OUTCOMES for one in results)

    # ---- envelopes

    def test_a_repeated_message_is_not_done_again(self, alone: HintDriver) -> None:
        alone.serve(1)
        action = {"do": "demote", "to": "out", "tokens": alone.prompt(1)}
        first = alone.engine.hint(alone.envelope(action, message="same"))
        alone.serve(1)
        assert alone.engine.hint(alone.envelope(action, message="same")) == first
        assert alone.serve(1).loaded == BLOCKS, "a repeated message was done again"

    @pytest.mark.parametrize(
        "wrong",
        [
            {"do": "fly"},
            {"do": "pin"},
            {"do": "pin", "ttl_s": -1.0},
            {"do": "retain", "priority": 101},
            {"do": "demote", "keys": ["ab"]},
            {"do": "demote", "to": "attic"},
            {"do": "prefetch", "budget": 1},
        ],
    )
    def test_a_wrong_action_is_refused_alone(
        self, alone: HintDriver, wrong: Mapping[str, Any]
    ) -> None:
        alone.serve(1)
        tokens = {} if "keys" in wrong else {"tokens": alone.prompt(1)}
        right = {"do": "retain", "priority": 50, "tokens": alone.prompt(1)}
        refused, done = alone.engine.hint(alone.envelope({**wrong, **tokens}, right))
        assert (refused.outcome, bool(refused.why)) == ("rejected", True)
        assert (done.action_id, done.outcome, done.blocks) == ("a1", "accepted", BLOCKS)

    @pytest.mark.parametrize(
        "sent", [b"{", b"\xff", "[]", None, {"message_id": 3}, {"protocol_version": "0.1"}]
    )
    def test_what_is_no_envelope_is_rejected(self, alone: HintDriver, sent: object) -> None:
        (result,) = alone.engine.hint(sent)
        assert (result.outcome, bool(result.why)) == ("rejected", True)

    def test_actions_beyond_the_limit_are_rejected(self, alone: HintDriver) -> None:
        many = [{"do": "demote", "tokens": [3]}] * (ACTIONS_MAX + 5)
        results = alone.engine.hint(alone.envelope(*many))
        assert [one.outcome for one in results[-5:]] == ["rejected"] * 5
        assert len(results) == len(many)

    # ---- hints that come with a request

    def test_a_request_is_pinned_by_its_own_hint(self, alone: HintDriver) -> None:
        if self.carries_hints:
            (result,) = alone.serve(1, {"do": "pin", "ttl_s": 3600.0}).results
            assert result.outcome == "accepted"
            for other in range(2, 8):
                alone.serve(other)
            assert alone.serve(1).loaded == BLOCKS, "the blocks of a pinned request were evicted"

    def test_a_request_leaves_host_when_it_has_finished(self, engine: HintDriver) -> None:
        if self.carries_hints:
            before = engine.free
            (result,) = engine.serve(1, {"do": "demote", "to": "cold"}).results
            assert result.outcome == "deferred"
            engine.until(lambda: engine.free == before, "the blocks of the request stay in host")
            assert engine.serve(1).loaded == BLOCKS

    def test_a_requests_hints_reach_only_its_salt(self, alone: HintDriver) -> None:
        if self.carries_hints:
            alone.serve(1, salt="one")
            named = {"tokens": alone.prompt(1), "salt": "one"}
            results = alone.serve(2, {"do": "demote", "to": "out", **named}, salt="two").results
            assert [one.outcome for one in results] == ["rejected"]
            assert alone.serve(1, salt="one").loaded == BLOCKS
