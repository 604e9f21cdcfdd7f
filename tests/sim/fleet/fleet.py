"""A fleet in simulated time: engines, cache servers, stores and a network, and what befalls them.

Every public method with a step's name is one step. ``check`` holds after each, ``finish`` at the
end: after the last fault everything answers, is used again, and nothing has leaked.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Any

from kvladder.keys import BlockKey, salt_digest
from kvladder.testing.sim import inline_blocking
from kvladder.tiers.base import Tier
from kvladder.tiers.label import LABEL_BYTES, told
from kvladder.tiers.redis.tier import RedisTier
from kvladder.tiers.redis.url import QuotaOptions, RedisOptions
from kvladder.units import Duration, Size
from tests.sim.fleet.engine import BLOCK_BYTES, Engine, MakeTier
from tests.sim.fleet.faults import FAULTS, trouble
from tests.sim.fleet.loop import FleetLoop
from tests.sim.fleet.model import ALONE, LENGTH, SALTS, FleetModel
from tests.sim.fleet.mooncake import Objects, SimMooncakeTier
from tests.sim.fleet.net import Net
from tests.sim.fleet.objects import Bucket, SimObjectTier
from tests.sim.fleet.purging import Purging
from tests.sim.fleet.redis import RedisCluster
from tests.sim.fleet.serving import Planes, Server, SimNixlTier

STORES = ("redis", "server", "object", "mooncake")
QUOTA = QuotaOptions(tenant=Size(12 * (LABEL_BYTES + BLOCK_BYTES)), recount=Duration(30))
DRAIN_S = 40.0
"""Simulated seconds within which a healthy fleet has nothing left to do."""
TRIES = 8
FIRST_AND_LONG = 6 * LENGTH - 1
"""The number of a request with the highest priority and the most blocks."""


@dataclass(frozen=True)
class FleetKnobs:
    """The shape of a fleet."""

    engines: int
    stores: tuple[str, ...]
    quota: bool

    @classmethod
    def draw(cls, random: Random) -> FleetKnobs:
        """Draw a shape: two or three engines over one or two stores."""
        stores = random.sample(STORES, random.choice((1, 2, 2, 3)))
        return cls(random.choice((2, 3)), tuple(stores), random.random() < 0.5)


class Fleet:
    """All machines of a run, the model of what they may answer, and the steps."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.knobs = FleetKnobs.draw(self.random)
        self.loop = FleetLoop(seed)
        self.net = self.loop.net = Net(self.loop, self._own("net"))
        self.model = FleetModel()
        self.trace: list[str] = []
        self.faults: Counter[str] = Counter()
        """Faults that had a target, by kind."""
        self.damaged: set[bytes] = set()
        """Keys of stored blocks whose bytes were changed."""
        self._right: dict[bytes, int] = {}
        """Stored blocks that were right when the model had forbidden so much."""
        self._due: list[tuple[float, Any]] = []
        self.purging = Purging(self.model, self.note)
        self.undone = 0
        """Removals that a fail-over of Redis took back."""
        self._open(seed)

    def _own(self, name: str) -> Random:
        """Return a source of random numbers that no other part draws from."""
        return Random(f"{self.random.getrandbits(32)} {name}")

    def _open(self, seed: int) -> None:
        loop, net, stores = self.loop, self.net, self.knobs.stores
        self.planes = Planes(loop, net)
        self.redis = RedisCluster(loop, net, self._undone) if "redis" in stores else None
        self.bucket = Bucket(loop, net, self._own("bucket")) if "object" in stores else None
        self.mooncake = Objects(loop, self._own("mooncake")) if "mooncake" in stores else None
        count = 2 if "server" in stores else 0
        names = [f"server{n}" for n in range(count)]
        random = self._own("servers")
        sizes = [random.choice((12, 40)) for _ in names]
        self.servers = [
            Server(self.planes, name, random, slots=size)
            for name, size in zip(names, sizes, strict=True)
        ]
        make: dict[str, MakeTier] = {
            "redis": self._redis_tier,
            "server": lambda: SimNixlTier(self.planes, names),
            "object": lambda: SimObjectTier(net),
            "mooncake": self._mooncake_tier,
        }
        if self.bucket is not None:
            self.bucket.start()
        for server in self.servers:
            server.start()
        self.engines = [
            Engine(
                loop,
                self.planes,
                number,
                self._own(f"engine{number}"),
                self.model,
                {name: make[name] for name in stores},
                {"mooncake": self._threads},
            )
            for number in range(self.knobs.engines)
        ]
        for engine in self.engines:
            engine.open()

    def _redis_tier(self) -> Tier:
        assert self.redis is not None
        quota = QUOTA if self.knobs.quota else QuotaOptions()
        url = f"redis://{self.redis.addresses}"
        return RedisTier(RedisOptions(url=url, cluster=True, quota=quota))

    def _mooncake_tier(self) -> Tier:
        assert self.mooncake is not None
        return SimMooncakeTier(self.mooncake)

    async def _threads(self, function: Any, /, *arguments: Any) -> Any:
        assert self.mooncake is not None
        return await inline_blocking(self.mooncake.thread, function, arguments)

    def _undone(self, name: bytes, value: bytes) -> None:
        """A fail-over of Redis brings a removed block back: no client can prevent that."""
        label = told(value[:LABEL_BYTES])
        if label is not None and self.model.comes_back(label.key, value[LABEL_BYTES:]):
            self.undone += 1

    def note(self, text: str) -> None:
        """Add to the trace."""
        self.trace.append(f"{self.loop.time():.4f} {text}")

    # ---- work of engines

    def _engine(self, number: int) -> Engine | None:
        """Return a running engine, or None."""
        engine = self.engines[number % len(self.engines)]
        return engine if engine.is_up else None

    def serve(self, a: int, b: int, c: int) -> None:
        """A request arrives at an engine."""
        self._serve(self._engine(a), SALTS[b % len(SALTS)], b, c)

    def serve_alone(self, a: int, b: int, c: int) -> None:
        """A request arrives with the salt that one engine uses."""
        self._serve(self._engine(0), ALONE, b, c)

    def _serve(self, engine: Engine | None, salt: str, b: int, c: int) -> None:
        if engine is None or engine.process is None or salt == self.purging.salt:
            return
        priority = (None, None, 0, 35, 60, 80)[c % 6]
        length, who = 1 + c // 6 % LENGTH, c // 36 % 6
        engine.process.run(engine.begin, salt, b // 3 % 8, length, priority, who)
        self.note(f"serve {engine.machine} {salt} {b} {c}")

    def cancel(self, a: int, b: int, c: int) -> None:
        """Cancel a request."""
        if (engine := self._engine(a)) is not None and engine.process is not None:
            engine.process.run(engine.cancel, b)

    def hint(self, a: int, b: int, c: int) -> None:
        """A hint arrives at an engine."""
        engine, salt = self._engine(a), SALTS[b % len(SALTS)]
        if engine is not None and engine.process is not None and salt != self.purging.salt:
            engine.process.run(engine.hint, salt, b // 3 % 8, 1 + c % LENGTH, c // 7)

    def end_session(self, a: int, b: int, c: int) -> None:
        """A session ends at an engine."""
        if (engine := self._engine(a)) is not None and engine.process is not None:
            engine.process.run(engine.end_session, SALTS[b % len(SALTS)], c % 3)

    def advance(self, a: int, b: int, c: int) -> None:
        """Time passes."""
        self._sleep((0.0, 0.001, 0.01, 0.05, 0.2, 0.5, 1.0, 3.0)[a % 8])

    def _sleep(self, seconds: float) -> None:
        self.loop.run_until_complete(asyncio.sleep(seconds))

    def new_weights(self, a: int, b: int, c: int) -> None:
        """All engines get other weights: the same prompts are other blocks from now on."""
        if self.purging.salt is None:
            self.model.weights += 1
            self.note("new weights")

    def upgrade(self, a: int, b: int, c: int) -> None:
        """One engine ends in order, and begins again with other settings."""
        engine = self.engines[a % len(self.engines)]
        hangs = self.mooncake is not None and self.mooncake.hanging  # only a kill ends such calls
        if engine.is_up and not hangs:
            self.note(f"upgrade {engine.machine}")
            self.purging.again(engine)
            engine.close()
            engine.open()

    # ---- purges

    def purge(self, a: int, b: int, c: int) -> None:
        """Requests of one salt end, and every engine purges it, now or when it runs again.

        One purge in three removes the salt's blocks by their keys instead.
        """
        if self.purging.salt is None:
            self.purging.begin(SALTS[1 + a % (len(SALTS) - 1)], self.engines, by_keys=b % 3 == 0)

    def purge_alone(self, a: int, b: int, c: int) -> None:
        """The one engine that uses its salt purges it, or removes its blocks by their keys.

        Before that it stores some, and in half of all cases it begins again and does not know them
        any more. In three of four cases a store has a fault then, mostly known to the engine.
        """
        if self.purging.salt is not None:
            return
        for number in range(3):
            self._serve(self._engine(0), ALONE, b + 3 * number, FIRST_AND_LONG)
        for _ in range(16):
            if not self.engines[0].is_busy:
                break
            self._let(0.25)
        if b // 2 % 2:
            self.upgrade(0, 0, 0)
        if b // 4 % 4:
            trouble(self, self.knobs.stores[c % len(self.knobs.stores)], a)
            for _ in range((0, 4, 8)[a % 3]):
                self._let(0.5)
        self.purging.begin(ALONE, self.engines[:1], by_keys=b % 2 == 0)

    def _let(self, seconds: float) -> None:
        """Let time pass, with all that a step's end does."""
        self._sleep(seconds)
        self.poll()
        self.check()

    def _check_purges(self) -> None:
        """Check that a purge of each store, which has a fault, ends well when the fault is over."""
        for number, _ in enumerate(self.knobs.stores):
            a, b = self.random.randrange(1 << 16), self.random.randrange(4) + 4
            self.purge_alone(a, b, number)
            for _ in range(120):
                if self.purging.salt is None:
                    break
                self._let(0.5)
            assert self.purging.salt is None, "a purge never ends, though the store works again"

    # ---- faults: a kind each, applied to one target

    def fault(self, kind: str, a: int, b: int, seconds: float) -> None:
        """Inject a fault; those that last end after ``seconds``, if nothing ends them before."""
        where = FAULTS[kind](self, a, b)
        if where is not None:
            undo, target = where
            self.faults[kind] += 1
            self.note(f"fault {kind} {target}")
            if undo is not None:
                self._due.append((self.loop.time() + seconds, undo))

    def mend(self, a: int, b: int, c: int) -> None:
        """One of the lasting faults ends early."""
        if self._due:
            _, undo = self._due.pop(a % len(self._due))
            undo()

    def _mend_due(self) -> None:
        now_s = self.loop.time()
        due = [undo for at_s, undo in self._due if at_s <= now_s]
        self._due = [one for one in self._due if one[0] > now_s]
        for undo in due:
            undo()

    def machines(self) -> list[str]:
        """Return the names of all machines."""
        found = [engine.machine for engine in self.engines]
        found += [server.machine for server in self.servers]
        found += [node.machine for node in self.redis.nodes] if self.redis is not None else []
        return found + (["bucket"] if self.bucket is not None else [])

    # ---- a step's end

    def poll(self) -> None:
        """Let requests, purges and repairs go on, and check what must always hold."""
        self._mend_due()
        for engine in self.engines:
            if not engine.disk.has_power:
                self._crash(engine, "drop")
            if engine.is_up:
                engine.poll()
        self.purging.go_on()

    def _crash(self, engine: Engine, mode: Any) -> None:
        self.purging.again(engine)
        engine.kill(mode)
        self._due.append((self.loop.time() + 2.0, partial(self._reopen, engine)))

    def _reopen(self, engine: Engine) -> None:
        if engine.process is None:
            engine.open()

    def check(self) -> None:
        """Check every invariant of every machine."""
        assert not self.loop.errors, self.loop.errors[0]
        for engine in self.engines:
            engine.check()
        for server in self.servers:
            server.check(self.model.forbidding, self._check_stored)
        self._check_stores()

    def _check_stores(self) -> None:
        if self.redis is not None:
            for machine, _, value in self.redis.blocks():
                self._check_stored(machine, value)
        if self.bucket is not None:
            for value in self.bucket.objects.values():
                self._check_stored("bucket", value)
        if self.mooncake is not None:
            for _, value in self.mooncake.held.values():
                self._check_stored("mooncake", value)

    def _check_stored(self, where: str, value: bytes) -> None:
        """Check a stored block, unless a test damaged it: its bytes, its salt, no purged one."""
        model = self.model
        if self._right.get(value) == model.forbidding:
            return
        label, data = told(value[:LABEL_BYTES]), value[LABEL_BYTES:]
        if label is None or label.key in self.damaged:
            return
        key = label.key
        if len(data) == BLOCK_BYTES:  # else a codec has changed it
            assert model.is_right(key, data), f"{where} has wrong bytes"
        assert model.may_be_held(key), f"{where} has a block that was purged"
        salt = model.salts[key]
        right = salt_digest(label.namespace, salt) if salt else b""
        assert label.facts.salt == right, f"{where} has a block under another salt"
        self._right[value] = model.forbidding

    # ---- the end

    def finish(self) -> None:
        """Repair everything: then everything answers, is used again, and nothing has leaked."""
        self.heal()
        for _ in range(400):
            if not any(engine.requests for engine in self.engines) and self.purging.salt is None:
                break
            self._let(0.25)
        assert not any(engine.requests for engine in self.engines), "a request never ends"
        assert self.purging.salt is None, "a purge never ends"
        self._sleep(DRAIN_S)
        self.poll()
        self.check()
        for engine in self.engines:
            engine.check_quiet()
        self._clear()
        self._check_used()
        for server in self.servers:
            counts = server.offers.counts()
            assert not counts["pinned"] + counts["granted"], f"{server.machine} holds slots"
            assert counts["sessions"] == len(self.engines), f"{server.machine} lost its clients"
        self._check_purges()  # last: its faults break connections, and it starts an engine again
        self.close()

    def heal(self) -> None:
        """End every fault."""
        for engine in self.engines:  # first: what follows lets engines run
            engine.disk.refuse = lambda _call, _path: 0
            engine.disk.capacity_bytes = engine.disk.crash_at = None
            engine.disk_late_s = 0.0
        for engine in self.engines:
            if not engine.disk.has_power:
                self._crash(engine, "drop")
        for _, undo in self._due:
            undo()
        self._due.clear()
        self.net.heal()
        if self.redis is not None:
            self.redis.heal()
        if self.bucket is not None:
            self.bucket.fault = ""
            self.bucket.start()
            assert self.bucket.process is not None
            self.bucket.process.hurry()
        if self.mooncake is not None:
            self.mooncake.heal()
        for server in self.servers:
            server.start()
            assert server.process is not None
            server.process.hurry()
        for engine in self.engines:
            engine.open()
            assert engine.process is not None
            engine.process.hurry()

    def _clear(self) -> None:
        """Forget every block on all engines, and check that no memory, disk or store has one."""
        keys = [*self.model.salts]
        self.model.purging(keys)
        for engine in self.engines:
            assert engine.process is not None
            engine.process.run(engine.manager.clear)
        for _ in range(400):
            self._sleep(0.1)
            if not any(engine.manager.removals for engine in self.engines):
                break
        else:
            raise AssertionError("a removal of everything never ends")
        self.model.purged(keys)
        self.damaged.clear()
        self.check()
        for engine in self.engines:
            held = engine.cache.stack.indexes.values()
            assert not any(map(len, held)), "a level is not empty"

    def _check_used(self) -> None:
        """Check that each store takes new blocks of one engine and gives them to another.

        Before, all slots of the Redis Cluster move: no fault, but clients are redirected.
        """
        if self.redis is not None:
            self.redis.rotate()
        names = ["files", *self.knobs.stores]
        for number, name in enumerate(names[1:], start=2):
            writer, reader = self.engines[0], self.engines[1]
            for attempt in range(TRIES):
                if self._is_shared(writer, reader, f"level{number}", attempt):
                    break
                self._sleep(5.0)
            else:
                raise AssertionError(f"{name} is not used again")

    def _is_shared(self, writer: Engine, reader: Engine, level: str, attempt: int) -> bool:
        """Save a new prompt at one engine, and fetch it at another one from one level."""
        self.model.weights += 1
        keys = self.model.prompt("", 0, 3)
        assert writer.process is not None
        assert reader.process is not None
        fetch = self._served(writer, keys, None)
        priorities, levels = [80] * len(keys), ["host", level]
        saving = partial(writer.manager.save, keys, priorities=priorities, levels=levels)
        save = writer.process.run(saving)
        for index, slot in zip(save.indices, save.slots, strict=True):
            data = self.model.payload(keys[index])
            writer.cache.arena.view(slot)[:BLOCK_BYTES] = data
            self.model.committed(keys[index], data)
        writer.process.run(save.commit)
        writer.process.run(fetch.release)
        self._sleep(3.0)
        self.check()
        fetch = self._served(reader, keys, [level])
        for key, slot in zip(keys, fetch.slots, strict=False):
            assert self.model.is_right(key, reader.bytes_of(slot)), "wrong bytes at the end"
        sources = fetch.sources
        reader.process.run(fetch.release)
        return {*sources} == {level}  # fewer than all if those that the level holds are worth more

    def _served(self, engine: Engine, keys: list[BlockKey], levels: list[str] | None) -> Any:
        assert engine.process is not None
        call = partial(engine.manager.fetch, keys, deadline_s=3.0, levels=levels)
        fetch = engine.process.run(call)
        for _ in range(400):
            if fetch.done:
                return fetch
            self._sleep(0.01)
        raise AssertionError("a fetch outlasts its deadline at the end")

    def close(self) -> None:
        """End every process in order; assert that none leaves anything behind."""
        for engine in self.engines:
            engine.close()
        for server in self.servers:
            server.close()
        assert not self.net.ends, "a connection is left"
        assert self.redis is None or not self.redis.sessions, "Redis has clients left"
        self._dispose()
        left = [task.get_name() for task in asyncio.all_tasks(self.loop)]
        assert not left, f"left behind: {sorted(left)}"
        assert not self.planes.every, "an agent is left"
        self.loop.close()

    def _dispose(self) -> None:
        if self.redis is not None:
            self.redis.close()
        if self.bucket is not None:
            self.bucket.kill()
        self._sleep(0.0)
        self._sleep(1.0)

    def dispose(self) -> None:
        """Give back the real resources of a fleet that failed."""
        if not self.loop.is_closed():
            self.purging.let_go()
            for engine in self.engines:
                engine.kill()
            for server in self.servers:
                server.kill()
            self._dispose()
            self.loop.close()
