"""A whole cache in simulated time against a model: the actions of an engine and of tiers.

The served bytes must be those that the model allows; the cache may forget everything else.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from random import Random

from kvladder.arena import NO_SLOT, Slot
from kvladder.keys import BlockKey
from kvladder.manager import SetFetch
from kvladder.policy.eviction import PRIORITY_MIN, EvictionPolicy, PrioritizedLRU
from kvladder.testing.fakes import FakeStore, FakeTier
from kvladder.testing.shared import SharedFakeTier
from kvladder.testing.sim import SimLoop, SimThreads, inline_blocking, where
from kvladder.testing.stacks import LevelSpec, SimCache
from kvladder.testing.steps import misbehaviours, troubles
from kvladder.tiers.answers import KINDS
from kvladder.tiers.context import Blocking
from kvladder.tiers.ladder.calling.calls import BEHIND_CALLS_MAX
from kvladder.tiers.ladder.level import Level
from tests.kit.knobs import Knobs
from tests.kit.mirror import plain
from tests.kit.misses import Misses
from tests.kit.model import NOTHING, Model, Replay, Request, must_survive
from tests.kit.tenants import Claims, Others
from tests.kit.wishes import NO_WISHES, SALT, Purge, Wishes

BLOCK_BYTES = 64
DEADLINE_S = 3.0
DRAIN_S = 2000.0
"""Simulated seconds within which a healthy cache has nothing left to do."""


class World:
    """A cache over fake tiers, an engine that uses it, and the reference model of its answers.

    Every method is one step; ``check`` holds after each. ``trace`` lists the steps.
    """

    make_policy: Callable[[], EvictionPolicy] = staticmethod(PrioritizedLRU)

    def __init__(self, knobs: Knobs, seed: int) -> None:
        self.knobs = knobs
        self.random = Random(seed)
        self.trace: list[str] = []
        self.served: Counter[str] = Counter()
        """Blocks served, by level."""
        self.model = Model()
        self.claims = Claims()
        self._seed = seed
        self._stores = [FakeStore() for _ in knobs.levels]
        self._names = 0
        self._purge = Purge()
        self._condemned: set[BlockKey] = set()
        """Blocks that a user removed or purged at least once: they may leave shared tiers, too."""
        self._salted = {key for odd in range(1, 16, 2) for key in self.prompt(odd, 8)}
        self.requests: list[Request] = []
        self._open()

    def _open(self) -> None:
        self.misses = Misses()
        self.loop = SimLoop(self._seed)
        self.tiers = [
            (SharedFakeTier if level.shared else FakeTier)(
                store=store if level.durable or level.shared else None,
                durable=level.durable,
                checks=not level.coded,
                batch_max=level.batch_max,
                random=Random(self._seed + number),
                latency_s=0.001,
                mean_s=level.mean_s,
                patience=(
                    level.settings.calls.breaker.failures,
                    level.settings.calls.breaker.retry_s,
                ),
            )
            for number, (level, store) in enumerate(
                zip(self.knobs.levels, self._stores, strict=True)
            )
        ]
        for tier in self.tiers:
            if isinstance(tier, SharedFakeTier):
                tier.removable = self._condemned.__contains__
        specs = [
            LevelSpec(
                tier,
                level.rule,
                level.capacity_blocks,
                level.edged,
                shares=level.shares,
                policy=self.make_policy(),
            )
            for tier, level in zip(self.tiers, self.knobs.levels, strict=True)
        ]
        knobs = self.knobs
        self._troubled: set[int] = set()
        pools: dict[str, Blocking] = {}
        self._threads = pools.keys()

        def threads(name: str) -> Blocking:
            return pools.setdefault(name, SimThreads(1)) if knobs.unruly else inline_blocking

        opening = SimCache.open(
            *specs,
            slots=knobs.slots,
            host=knobs.host,
            reserve_blocks=knobs.reserve_blocks,
            fetch_blocks_max=knobs.fetch_blocks_max,
            threads=threads,
            shares=knobs.shares,
            policy=self.make_policy(),
        )
        self.cache = self.loop.run_until_complete(opening)
        self.manager = self.cache.manager
        self._events = Replay(self.cache)

    def note(self, text: str) -> None:
        """Add to the trace."""
        self.trace.append(f"{self.loop.time():.6f} {text}")

    # ---- actions of the engine

    def prompt(self, number: int, length: int) -> list[BlockKey]:
        """The keys of a prompt; many of them share a prefix."""
        path = [number & 1, number >> 1 & 1, number >> 2 & 3, 0, 0, 0, 0, 0][:length]
        return SimCache.keys(*path)

    def begin(
        self,
        number: int,
        length: int,
        priority: int | None = None,
        duration_s: float | None = None,
        wishes: Wishes = NO_WISHES,
        session: int | None = None,
    ) -> None:
        """A request arrives, its later blocks at a lower priority."""
        name = None if session is None else self.claims.name(session)
        keys = self.prompt(number, length)
        priorities = None
        if priority is not None:
            priorities = [max(0, priority - 5 * position) for position in range(length)]
        wishes = wishes.here(self.manager)
        lookup = self.manager.lookup(keys, levels=wishes.load)
        assert 0 <= lookup.host <= lookup.total <= length
        deadline_s = self.random.choice((0.0, 0.05, DEADLINE_S))
        self._names += 1
        request = Request(
            self._names,
            keys,
            priorities,
            duration_s,
            wishes,
            self.manager.fetch(keys, deadline_s=deadline_s, levels=wishes.load, session=name),
            self.loop.time() + deadline_s,
            dict(self.model.allowed),
            session=name,
        )
        self.misses.asked(request.fetch)
        self.claims.met(name, keys)
        self.requests.append(request)
        self.note(f"begin {request.name}: {number}/{length} at {priority}, {lookup}")

    def gather(self, numbers: Sequence[int]) -> None:
        """A set of blocks of these prompts is wanted, in no order and with holes."""
        prompts = [self.prompt(number, 8) for number in numbers]
        keys = self.random.sample([key for keys in prompts for key in keys], 4 * len(prompts))
        levels = self.random.choice((None, ["host"], ["level1"][: len(self.knobs.levels)]))
        here = self.manager.holding(keys, levels=levels)
        deadline_s = self.random.choice((0.0, 0.05, DEADLINE_S))
        fetch = self.manager.fetch_set(keys, deadline_s=deadline_s, levels=levels)
        assert {key for key, is_here in zip(keys, here, strict=True) if is_here} >= {*fetch.keys}
        self.misses.left_out(len({*keys}) - len(fetch.keys))
        self.misses.asked(fetch)
        self._names += 1
        until_s = self.loop.time() + deadline_s
        allowed = dict(self.model.allowed)
        self.requests.append(
            Request(self._names, [*fetch.keys], None, None, NO_WISHES, fetch, until_s, allowed)
        )
        self.claims.met(None, keys)
        self.note(f"gather {self._names}: {len(fetch.keys)} of {len(keys)}")

    def poll(self) -> None:
        """Let each request do its next step, in random order."""
        if self._purge.step():
            self.note("purged")
            self._removed([*self._salted])
        for request in self.random.sample(self.requests, len(self.requests)):
            if request.save is not None:
                self._end(request)
            elif request.fetch.done:
                self._loaded(request)
            else:
                assert self.loop.time() < request.deadline_s, "a load outlasts its deadline"

    def _loaded(self, request: Request) -> None:
        """The load has ended: check the bytes, compute the rest, begin to save it."""
        fetch = request.fetch
        count = fetch.blocks
        assert len(fetch.slots) == len(fetch.sources) == count <= len(request.keys)
        wishes = request.wishes
        assert wishes.load is None or set(fetch.sources) <= set(wishes.load), "another was read"
        for key, slot in zip(request.keys, fetch.slots, strict=False):
            if slot == NO_SLOT and isinstance(fetch, SetFetch):
                continue  # it did not arrive
            data = self._bytes(slot)
            right = request.expected.get(key, NOTHING) | self.model.may_be(key)
            assert data in right, f"request {request.name} got wrong bytes from {fetch.sources}"
            request.loaded[slot] = data
        self.served.update(fetch.sources)
        self.note(f"loaded {request.name}: {fetch.sources}")
        if isinstance(fetch, SetFetch):  # a caller that fetches a set saves nothing
            request.save = self.manager.save([])
            return
        priorities, durations = request.priorities, [request.duration_s] * len(request.keys)
        salt = SALT if request.keys[0] in self._salted else ""
        if self.knobs.shares.tenant is not None:
            salt = salt or "even"
        before = Others(self.cache, self.manager._digest(salt), request.keys)
        save = self.manager.save(
            request.keys,
            priorities=priorities,
            durations_s=durations,
            levels=wishes.store,
            ttl_s=wishes.ttl_s,
            salt=salt,
            session=request.session,
        )
        before.check()
        self.claims.met(request.session, request.keys)
        self.claims.brought(request.session, [request.keys[at] for at in save.indices])
        self.model.asked(request.keys, priorities)
        self.model.promises.offered(request.keys, wishes, self.loop.time())
        for index, slot in zip(save.indices, save.slots, strict=True):
            key = request.keys[index]
            assert slot not in request.loaded
            data = self.model.payload(key)
            self.cache.arena.view(slot)[:BLOCK_BYTES] = data
            request.filled[slot] = (key, self.model.versions[key], data)
        request.save = save

    def _end(self, request: Request) -> None:
        """The copies have ended: commit, or abort if they failed, and leave."""
        assert request.save is not None
        if self.random.random() < 0.9:
            request.save.commit()
            for key, version, data in request.filled.values():
                self.model.saved(key, version, data)
            self.note(f"commit {request.name}: {request.save.indices}")
        else:
            request.save.abort()
            self.note(f"abort {request.name}")
        request.fetch.release()
        self.requests.remove(request)
        if request.session is not None and not isinstance(request.fetch, SetFetch):
            with suppress(ValueError):  # another request has ended it since
                self.manager.sessions.use(request.session, [request.keys])
                self.claims.met(request.session, request.keys)

    def end_session(self, number: int) -> None:
        """End a session."""
        ended = self.claims.end(self.manager, number)
        for key in ended or ():
            self.model.floors.setdefault(key, set()).add(PRIORITY_MIN)
        self.note(f"end session {number}: {None if ended is None else len(ended)} blocks")

    def cancel(self, number: int) -> None:
        """Cancel a running request in any state."""
        if self.requests:
            request = self.requests.pop(number % len(self.requests))
            self.note(f"cancel {request.name}")
            request.fetch.release()
            if request.save is not None:
                request.save.abort()

    def forget(self, number: int) -> None:
        """The bytes that a running request loaded could not be used."""
        if self.requests:
            request = self.requests[number % len(self.requests)]
            if request.fetch.done:
                self.note(f"forget {request.name}")
                if request.save is not None:
                    request.save.abort()
                if not any(tier.shared for tier in self.tiers):  # others may find them usable
                    pairs = zip(request.keys, request.fetch.slots, strict=False)
                    self._removed([key for key, slot in pairs if slot != NO_SLOT])
                request.fetch.forget()
                self.requests.remove(request)

    def remove(self, number: int, length: int) -> None:
        """The user removes a prompt's blocks."""
        keys = self.prompt(number, length)
        self.note(f"remove {number}/{length}")
        self._condemned.update(keys)
        self.manager.remove(keys)
        self._removed(keys)

    def _removed(self, keys: Sequence[BlockKey]) -> None:
        """Forbid serving these blocks, except to requests that have pinned them."""
        for request in self.requests:
            for key, slot in zip(request.keys, request.fetch._slots, strict=False):
                if slot != NO_SLOT:
                    right = request.expected.get(key, NOTHING) | self.model.may_be(key)
                    request.expected[key] = right
        self.model.removed(keys)

    def clear(self) -> None:
        """The user removes everything."""
        self.note("clear")
        self._condemned.update(self.model.floors)
        self.manager.clear()
        self._removed([*self.model.floors])

    def purge(self) -> None:
        """The user begins to remove everything of one salt."""
        self.note("purge")
        self._condemned |= self._salted
        self._purge.begin(self.manager)

    def touch(self, number: int, length: int) -> None:
        """A prompt was used."""
        keys = self.prompt(number, length)
        self.manager.touch(keys)
        self.claims.met(None, keys)

    # ---- time and tiers

    def advance(self, seconds: float) -> None:
        """Advance time; 0 is one turn of the loop."""
        self.loop.run_until_complete(asyncio.sleep(seconds))

    def pause(self, seconds: float) -> None:
        """The process stands still, then what was due meanwhile happens, late."""
        self.note(f"pause {seconds:g} s")
        self.loop.pause(seconds)
        self.advance(0.01)

    def trouble(self, level: int, kind: int) -> None:
        """A tier gets into one kind of trouble, for one call or until it is healed."""
        if self.tiers:
            tier = self.tiers[level % len(self.tiers)]
            self._troubled.add(level % len(self.tiers))
            times = self.random.choice((1, None))
            after = self.random.random() < 0.5
            steps = troubles(times, after=after)
            if self.knobs.unruly:
                steps = misbehaviours(self.random, times, after=after) + steps
            step = steps[kind % len(steps)]
            tier.script.append(step)
            self.note(f"trouble at {level}: {type(step).__name__} times {times} after {after}")

    def heal(self, level: int) -> None:
        """Make a tier work again."""
        if self.tiers:
            self.note(f"heal {level}")
            self.tiers[level % len(self.tiers)].heal()

    def damage(self, level: int, *, lose: bool) -> None:
        """A tier loses blocks, or they change their bytes."""
        if self.tiers:
            tier = self.tiers[level % len(self.tiers)]
            keys = sorted(record.key for record in tier.records.values())
            chosen = self.random.sample(keys, len(keys) // 2)
            (tier.forget if lose else tier.corrupt)(*chosen)
            self.note(f"{'lose' if lose else 'corrupt'} {len(chosen)} blocks of {level}")

    def others(self, number: int, length: int) -> None:
        """Another engine puts a prompt's blocks into the tiers that it shares with this one."""
        for tier in self.tiers:
            if isinstance(tier, SharedFakeTier):
                tier.others_put(self.model.put_by_others(self.prompt(number, length)))

    def reopen(self, *, crash: bool) -> None:
        """End the process, cleanly or not, and begin another one."""
        self._end_requests(crash=crash)
        clean = not crash and not any(tier.script or tier.held for tier in self.tiers)
        levels = self.cache.levels
        clean &= all(level.client.open(kind) for level in levels for kind in KINDS)
        clean &= not any(level.abandoned for level in levels)
        self._purge.give_up()
        kept = must_survive(self.cache, self.loop.time())
        errors = self._errors()
        before = [store.copy() for store in self._stores]
        self._close(crash=crash)
        if crash:
            self._stores = before
        if self.knobs.shares.tenant is not None:  # blocks above a quota are not kept
            kept.clear()
        if not clean or self._errors() > errors:  # removals may not have reached the tiers
            kept.clear()
            self.model.left_in(self._stores)
        self._open()
        self.claims.restart()
        found = {key for level in self.cache.levels for key in level.index}
        assert kept <= found, f"{len(kept - found)} blocks did not survive a clean end"
        self.note(f"reopen {'after a crash' if crash else ''}: {len(found)} blocks")

    def _end_requests(self, *, crash: bool) -> None:
        """End all requests; those of a process that dies release nothing."""
        if crash:
            self._end_finalizers()
        for request in self.requests:
            if not crash:
                request.fetch.release()
                if request.save is not None:
                    request.save.abort()
        self.requests.clear()

    def _errors(self) -> int:
        return sum(level.stats.errors for level in self.cache.levels)

    def _close(self, *, crash: bool) -> None:
        self._require_rules_kept()
        if crash:
            self._kill()
        else:
            self.loop.run_until_complete(self.cache.aclose())
        left = sorted(map(where, asyncio.all_tasks(self.loop)))
        assert not left, f"left behind: {left}"
        self.loop.close()

    def _end_finalizers(self) -> None:
        """Have objects of the cache end without finalizers, as those of a dead process do."""
        self.cache.stack.shared.unreleased.close(0, 0)

    def _kill(self) -> None:
        for task in asyncio.all_tasks(self.loop):
            task.cancel()
        for tier in self.tiers:
            self.loop.run_until_complete(tier.aclose())
        self.advance(DRAIN_S)
        arena = self.cache.arena
        for slot in map(Slot, range(arena.slots)):  # a process takes its claims with it
            arena.release([slot] * arena.claims(slot))
        arena.close()

    def dispose(self) -> None:
        """Give back the world's real resources in any state."""
        self._end_finalizers()
        if not self.loop.is_closed():
            try:
                self._kill()
            finally:
                self.loop.close()

    def end(self) -> None:
        """Repair all tiers and let all work end; assert that nothing is left or lost."""
        for tier in self.tiers:
            tier.heal()
        while self.requests:
            self.advance(0.1)
            self.poll()
        self.advance(DRAIN_S)
        self.check()
        assert not self.cache.stack.pending, "still at work"
        for level in self.cache.stack._all_levels:
            assert not level.index.above, f"{level.name} has more of a salt than its quota"
        if self.knobs.unruly:  # one that hangs in its threads must not keep another from going on
            own = {level.name for level in self.cache.levels}
            own |= {f"{name}-codecs" for name in own}
            assert self._threads == own, "levels share threads"
        host = self.cache.stack.host.index
        assert self.cache.arena.free + len(host) == self.cache.arena.slots, "a slot is lost"
        for level, tier in zip(self.cache.levels, self.tiers, strict=True):
            assert level.places.taken == len(level.index), f"a place of {level.name} is lost"
            for key in level.index:
                record = tier.at(key, level.index.place(key) or 0)
                assert record is not None or tier.shared, "the index names what is not there"
        self._close(crash=False)

    # ---- invariants

    def _bytes(self, slot: Slot) -> bytes:
        return bytes(self.cache.arena.view(slot)[:BLOCK_BYTES])

    def check(self) -> None:
        """Every invariant, after every step."""
        self.manager.check()
        for request in self.requests:
            request.fetch.check()
        self._require_rules_kept()
        self._check_slots()
        host = self.cache.stack.host
        for key in host.index:
            place = host.index.place(key)
            assert place is not None
            assert self._bytes(Slot(place)) in self.model.may_be(key), "wrong bytes in host"
            self._check_floor(key, host.index.meta(place).floor, host.rule.min_priority)
            self.model.promises.check(key, "host", self.loop.time())
        for level, tier in zip(self.cache.levels, self.tiers, strict=True):
            self._check_level(level, tier)
        self._check_contained()
        self.misses.check(self.cache)
        self._replay()

    def _check_contained(self) -> None:
        """Nothing that a tier does kills a task, or makes a call to another tier fail."""
        levels = self.cache.levels
        for stats in (self.cache.stack.host.stats, *(level.stats for level in levels)):
            assert not stats.task_failures, "a task died"
        for number, level in enumerate(levels):
            at_once = level.settings.reads_max + 2
            assert level.client.behind <= BEHIND_CALLS_MAX + at_once, "too much is left behind"
            if number not in self._troubled and self.knobs.levels[number].mean_s <= 0.01:
                assert not level.stats.errors, f"a call to {level.name} failed, which is well"

    def _check_slots(self) -> None:
        """Assert that used slots keep their bytes and are given to no other user."""
        writing = [slot for request in self.requests for slot in request.filled]
        assert len(writing) == len(set(writing)), "a slot was given out twice"
        for request in self.requests:
            for slot, data in request.loaded.items():
                assert slot not in writing
                assert self._bytes(slot) == data, "a pinned slot was written into"
            for slot, (_, _, data) in request.filled.items():
                assert self._bytes(slot) == data, "a slot that is being saved was written into"

    def _check_level(self, level: Level, tier: FakeTier) -> None:
        for key in level.index:
            place = level.index.place(key)
            assert place is not None
            assert self.model.may_be(key), f"{level.name} has a block that was removed"
            self._check_floor(key, level.index.meta(place).floor, level.rule.min_priority)
            self.model.promises.check(key, level.name, self.loop.time())
            record = tier.at(key, place)
            if record is not None:
                assert plain(record) in self.model.may_be(key), f"wrong bytes in {level.name}"

    def _check_floor(self, key: BlockKey, floor: int, threshold: int) -> None:
        floors = self.model.floors[key] | self.knobs.guessed
        assert floor in floors
        assert max(floors) >= threshold, "a level has what it does not admit"

    def _replay(self) -> None:
        self._events.check()

    def _require_rules_kept(self) -> None:
        for tier in self.tiers:
            assert not tier.violations, tier.violations
