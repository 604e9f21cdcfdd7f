"""A world with a stack that changes between the steps, and in the middle of everything."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import replace
from random import Random

from kvladder.errors import ConfigError, TierError
from kvladder.events import Overflow, Stored
from kvladder.keys import BlockKey
from kvladder.policy.adaptive import Adaptive
from kvladder.policy.eviction import PRIORITY_DEFAULT, EvictionPolicy, PrioritizedLRU
from kvladder.policy.offload import OffloadRule
from kvladder.policy.tenants import NO_SHARES, Shares
from kvladder.testing.fakes import FakeStore, FakeTier
from kvladder.testing.shared import SharedFakeTier
from kvladder.testing.sim import inline_blocking
from kvladder.testing.stacks import LAYOUT
from kvladder.tiers.ladder.changing.attaching import LevelAttacher
from kvladder.tiers.ladder.changing.tuning import HostTuning, LevelTuner, LevelTuning, Tuning
from kvladder.tiers.ladder.definition import LevelDefinition, LevelSettings
from kvladder.tiers.ladder.level import Level
from kvladder.tiers.ladder.lifecycle import LevelLifecycle
from tests.kit.mirror import plain
from tests.kit.world import World

LEVELS_MAX = 4
THRESHOLDS = (0, 20, 35, 50, 80)


class ChangingWorld(World):
    """A world in which one change at a time is in progress; requests and faults go on meanwhile."""

    def _open(self) -> None:
        self._known: list[FakeTier] = []
        super()._open()
        self._change: asyncio.Task[None] | None = None
        self._named = 0
        self._changed = False
        self._thresholds = {level.rule.min_priority for level in self.knobs.levels}
        self._apart: list[tuple[str, FakeStore, bool]] = []
        """Detached media that keep their blocks: identity, store, and whether they are shared."""
        self._media = {f"level{n}": (f"level{n}", s) for n, s in enumerate(self._stores, 1)}
        self._tuner = LevelTuner(self.cache.stack)
        space = LAYOUT.namespace()
        self._attacher = LevelAttacher(self.cache.stack, LAYOUT, space, lambda _: inline_blocking)

    @property
    def tiers(self) -> list[FakeTier]:
        """The tiers of the levels as they are now."""
        if not hasattr(self, "cache") or self._known is None:
            return self._known
        found = [level.tier for level in self.cache.levels]
        assert all(isinstance(tier, FakeTier) for tier in found)
        return found  # type: ignore[return-value]

    @tiers.setter
    def tiers(self, tiers: list[FakeTier]) -> None:
        self._known = [*tiers]
        self.__dict__.pop("cache", None)

    # ---- changes

    def change(self) -> None:
        """Begin a change of any kind, unless one is in progress."""
        if self._change is not None and not self._change.done():
            return
        self._end_change()
        lifecycles = [*self.cache.stack.lifecycles]
        kinds = ["host"] + ["tune"] * 3 * bool(lifecycles) + ["detach"] * bool(lifecycles)
        kinds += ["attach"] * (2 if len(lifecycles) < LEVELS_MAX else 0)
        kind = self.random.choice(kinds)
        chosen = self.random.choice(lifecycles) if lifecycles else None
        self._changed = True

        async def changing() -> None:
            if kind == "attach":
                await self._attach()
            elif kind == "host" or chosen is None:
                await self._tune_host()
            elif kind == "detach":
                await self._detach(chosen)
            else:
                await self._tune(chosen)

        self._change = self.loop.create_task(changing(), name="change")
        self.note(f"change: {kind} {'' if chosen is None else chosen.level.name}")

    def _end_change(self) -> None:
        if self._change is not None and self._change.done() and not self._change.cancelled():
            self._change.result()

    @property
    def _changing(self) -> bool:
        return self._change is not None and not self._change.done()

    def _rule(self, rule: OffloadRule, *, host: bool = False) -> OffloadRule:
        least = self.random.choice(THRESHOLDS[:3] if host else THRESHOLDS)
        self._thresholds.add(least)
        ttl_s = self.random.choice((rule.ttl_s, None, 30.0))
        when = rule.when if host else self.random.choice(("evict", "commit"))
        return replace(rule, min_priority=least, ttl_s=ttl_s, when=when, admit="all")

    def _shares(self, blocks: int) -> Shares:
        if self.knobs.shares == NO_SHARES:
            return NO_SHARES
        part = self.random.choice((1, 2, 4))
        few = max(1, blocks // part)
        return Shares(few, few, max(1, few // 2))

    def _policy(self) -> EvictionPolicy | None:
        return self.random.choice((None, None, PrioritizedLRU(), Adaptive()))

    async def _tune_host(self) -> None:
        host = self.cache.stack.host
        tuning = HostTuning(
            rule=self._rule(host.rule, host=True),
            shares=self._shares(self.knobs.slots),
            policy=self._policy(),
            reserve_blocks=self.random.choice((0, 1, self.knobs.slots // 2)),
        )
        await self._apply(None, tuning)

    async def _tune(self, lifecycle: LevelLifecycle) -> None:
        level = lifecycle.level
        blocks = max(level.batch_max, self.random.choice((1, 2, 5, 20, level.capacity_blocks)))
        tuning = LevelTuning(
            rule=self._rule(level.rule),
            shares=self._shares(blocks),
            policy=self._policy(),
            capacity_blocks=blocks,
            queue_blocks=self.random.choice((1, 2, 8)),
            calls=level.client.settings,
            endurance_bytes=None,
        )
        if blocks > level.capacity_blocks:
            try:
                await self._tuner.grow(level, blocks)
            except TierError:
                return
        if lifecycle in self.cache.stack.lifecycles:
            await self._apply(lifecycle, tuning)

    async def _apply(self, lifecycle: LevelLifecycle | None, tuning: Tuning) -> None:
        stack = self.cache.stack
        level = stack.host if lifecycle is None else lifecycle.level
        with stack.lock:
            self._tuner.set(level, tuning)
            stack.rejoin([*stack.lifecycles])
        await self._tuner.follow(lifecycle, tuning)

    async def _attach(self) -> None:
        self._named += 1
        name = f"more{self._named}"
        shared, store, medium = False, FakeStore(), name
        if self._apart and self.random.random() < 0.7:
            medium, store, shared = self._apart.pop()
        kind = SharedFakeTier if shared else FakeTier
        tier = kind(
            store=store,
            durable=not shared and (medium != name or self.random.random() < 0.5),
            batch_max=self.random.choice((1, 4)),
            random=Random(self._named),
            latency_s=0.001,
            mean_s=0.01,
        )
        if isinstance(tier, SharedFakeTier):
            tier.removable = self._condemned.__contains__
        self._media[name] = (medium, store)
        spec = LevelDefinition(
            name=name,
            tier=tier,
            rule=self._rule(OffloadRule()),
            capacity_blocks=tier.batch_max * self.random.choice((1, 5)),
            policy=PrioritizedLRU(),
            settings=LevelSettings(queue_blocks=self.random.choice((1, 8))),
            required=True,
            shares=self._shares(8),
        )
        position = self.random.randint(0, len(self.cache.levels))
        try:
            await self._attacher.attach(spec, position, medium)
        except ConfigError:  # it did not open: as before
            assert name not in self.cache.stack.indexes
            self._note_apart(tier, name)

    async def _detach(self, lifecycle: LevelLifecycle) -> None:
        medium, _ = self._media[lifecycle.level.name]
        flush_s = self.random.choice((0.0, 0.5, 30.0))
        await self._attacher.detach(lifecycle, medium, flush_s=flush_s)
        tier = lifecycle.level.tier
        assert isinstance(tier, FakeTier)
        assert not tier.violations, tier.violations
        self._note_apart(tier, lifecycle.level.name)

    def _note_apart(self, tier: FakeTier, name: str) -> None:
        medium, store = self._media[name]
        if tier.durable or tier.shared:
            self._apart.append((medium, store, tier.shared))

    # ---- the end of a process

    def _close(self, *, crash: bool) -> None:
        if self._change is not None and not crash:
            self._change.cancel()
            self.loop.run_until_complete(asyncio.wait({self._change}))
        super()._close(crash=crash)

    def reopen(self, *, crash: bool) -> None:
        """End the process; the next one has the levels of the start again."""
        if not self._changed:
            super().reopen(crash=crash)
            return
        self._end_requests(crash=crash)
        self._purge.give_up()
        before = [store.copy() for store in self._stores]
        self._close(crash=crash)
        if crash:
            self._stores = before
        self.model.left_in(self._stores)  # removals do not reach a medium that is detached
        self._open()
        self.claims.restart()
        self.note("reopen with the levels of the start")

    def end(self) -> None:
        """Let a change end first."""
        for tier in self.tiers:
            tier.heal()
        while self._changing:
            self.advance(1.0)
            for tier in self.tiers:
                tier.heal()
        self._end_change()
        super().end()

    # ---- invariants

    def _check_contained(self) -> None:
        levels: list[Level] = self.cache.levels
        for stats in (self.cache.stack.host.stats, *(level.stats for level in levels)):
            assert not stats.task_failures, "a task died"

    def _check_level(self, level: Level, tier: FakeTier) -> None:
        for key in level.index:
            place = level.index.place(key)
            assert place is not None
            assert self.model.may_be(key), f"{level.name} has a block that was removed"
            self._check_floor(key, level.index.meta(place).floor, level.rule.min_priority)
            record = tier.at(key, place)
            if record is not None:
                assert plain(record) in self.model.may_be(key), f"wrong bytes in {level.name}"

    def _check_floor(self, key: BlockKey, floor: int, threshold: int) -> None:
        guessed = {max(PRIORITY_DEFAULT, least) for least in self._thresholds}
        floors = self.model.floors[key] | self.knobs.guessed | guessed
        assert floor in floors
        if not self._changing:  # one that is in progress has not evicted all of them yet
            assert floor >= threshold, "a level has what it does not admit"

    def _replay(self) -> None:
        """The events give the index of each level, and of none that is gone."""
        held = self._events._held
        for event in self.manager.take_events():
            assert not isinstance(event, Overflow)
            keys, own = set(event.keys), held.setdefault(event.level, set())
            if isinstance(event, Stored):
                assert not own & keys
                own |= keys
            else:
                assert own >= keys
                own -= keys
        indexes = self._events._indexes()
        for name, own in held.items():
            if name in indexes or not self._changing:
                assert own == indexes.get(name, set()), name
        assert indexes.keys() <= held.keys() | {name for name, own in indexes.items() if not own}

    def dispose(self) -> None:
        with suppress(Exception):
            if self._change is not None:
                self._change.cancel()
        super().dispose()
