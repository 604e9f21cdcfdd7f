"""One engine of a fleet: a process with a cache, its disk, and the requests that it serves."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, TypeVar

from kvladder.arena import Slot
from kvladder.hints.executor import HintExecutor
from kvladder.hints.scopes import OwnRequest
from kvladder.keys import BlockKey
from kvladder.manager import Save
from kvladder.policy.offload import OffloadRule
from kvladder.policy.tenants import Limits, Shares
from kvladder.testing.sim import SimClock, inline_blocking
from kvladder.testing.stacks import LevelSpec, SimCache
from kvladder.tiers.base import Tier
from kvladder.tiers.codecs.base import ChecksumCodec
from kvladder.tiers.codecs.pipeline import PipelineSettings
from kvladder.tiers.context import Blocking
from kvladder.tiers.files.options import FilesOptions
from kvladder.tiers.files.tier import FilesTier
from kvladder.tiers.label import Ref
from kvladder.tiers.ladder.calling.breaker import BreakerSettings, CallSettings
from kvladder.tiers.ladder.definition import LevelSettings
from kvladder.tiers.ladder.loading.fetch import Fetch
from kvladder.units import Size
from tests.kit.disk import FakeDisk, InlinePool, Mode
from tests.kit.model import Replay
from tests.kit.removals import destroyed
from tests.sim.fleet.loop import FleetLoop, Process
from tests.sim.fleet.model import TIMEOUTS_S, FleetModel
from tests.sim.fleet.serving import Planes, release

T = TypeVar("T")

BLOCK_BYTES = 64
ROOT = Path("/disk/kv")
STRIDE = 8192
OPEN_S = 60.0
MakeTier = Callable[[], Tier]


@dataclass(eq=False)
class Request:
    """One request: loads a prefix, computes the rest, saves it."""

    name: int
    salt: str
    keys: list[BlockKey]
    priorities: list[int] | None
    session: str | None
    fetch: Fetch
    until_s: float
    loaded: dict[Slot, bytes] = field(default_factory=dict[Slot, bytes])
    save: Save | None = None
    filled: dict[Slot, tuple[BlockKey, bytes]] = field(
        default_factory=dict[Slot, tuple[BlockKey, bytes]]
    )


class LatePool(InlinePool):
    """Answers late, if the engine's disk is slow: perhaps exactly when a call's time is over."""

    def __init__(self, engine: Engine) -> None:
        super().__init__()
        self._engine = engine

    async def run_all(self, calls: Sequence[Callable[[], T]], *, urgent: bool = False) -> list[T]:
        results = await super().run_all(calls, urgent=urgent)
        if self._engine.disk_late_s:
            await asyncio.sleep(self._engine.disk_late_s)
        return results


class Engine:
    """An engine on a machine of its own. Between two lives only its disk is left.

    Parameters
    ----------
    shared:
        Makes each shared tier, by its name, in the order of the levels.
    threads:
        Runs the blocking calls of these tiers, where the fleet's own does not.
    """

    def __init__(
        self,
        loop: FleetLoop,
        planes: Planes,
        number: int,
        random: Random,
        model: FleetModel,
        shared: dict[str, MakeTier],
        threads: dict[str, Blocking],
    ) -> None:
        self.loop = loop
        self.planes = planes
        self.machine = f"engine{number}"
        self.random = random
        self.model = model
        self.shared = shared
        self.threads = threads
        self.disk = FakeDisk(Path("/disk"), ROOT, seed=random.randrange(1 << 30))
        self.is_disk_whole = True
        """False once written bytes were damaged: what finds that forgets the block."""
        self.disk_late_s = 0.0
        """Seconds after which each batch of calls to the disk is answered."""
        self.process: Process | None = None
        self.cache: SimCache
        self.requests: list[Request] = []
        self.sources: Counter[str] = Counter()
        self.lives = 0
        self._names = 0
        self._checked: tuple[Process, int, int] | None = None
        """What ran, and what the model forbade, when everything here was checked."""
        self._ended: Counter[int] = Counter()
        self._ended_calls: dict[asyncio.Task[Any], float] = {}
        """Abandoned calls that have ended, and when that was first seen."""

    @property
    def is_up(self) -> bool:
        """True if it runs and is not stopped."""
        return self.process is not None and not self.process.is_stopped

    @property
    def is_busy(self) -> bool:
        """True if a request is not over, or a level has still something to write or to remove."""
        return self.is_up and bool(self.requests or self.cache.stack.pending)

    # ---- opening and closing

    def _settings(self, codecs: tuple[Any, ...] = ()) -> LevelSettings:
        random = self.random
        breaker = BreakerSettings(random.choice((1, 3)), random.choice((1.0, 3.0)), 8.0)
        return LevelSettings(
            calls=CallSettings(timeout_s=random.choice(TIMEOUTS_S), breaker=breaker),
            queue_blocks=random.choice((2, 8, 64)),
            reads_max=random.choice((1, 4)),
            pipeline=PipelineSettings(codecs),
        )

    def _specs(self) -> list[LevelSpec]:
        """Draw the levels of this life: an upgrade brings other settings."""
        random = self.random
        files = FilesTier(
            FilesOptions(path=str(ROOT), segment=Size(4 * STRIDE)),
            disk=self.disk,
            pool=LatePool(self),
            log_slack_records=8,
            segments_min=2,
        )
        rule = OffloadRule(min_priority=0, when=random.choice(("evict", "commit")))
        specs = [LevelSpec(files, rule, random.choice((8, 24)), self._settings())]
        for name, make in self.shared.items():
            rule = OffloadRule(min_priority=random.choice((0, 35)), when="commit")
            room = random.choice((12, 64))
            coded = (ChecksumCodec(),) if random.random() < 0.2 and name != "server" else ()
            specs.append(LevelSpec(make(), rule, room, self._settings(coded)))
        return specs

    def open(self) -> None:
        """Start a process."""
        if self.process is not None:
            return
        self.lives += 1
        self.process = Process(self.machine, self.loop)
        opening = self.process.run(self.loop.create_task, self._open())
        self.loop.run_until_complete(opening)

    async def _open(self) -> None:
        random, slots = self.random, self.random.choice((8, 16, 24))
        names = ["files", *self.shared]
        rooms = {f"level{n}": name for n, name in enumerate(names, start=1)}

        def threads(name: str) -> Blocking:
            return self.threads.get(rooms.get(name, ""), inline_blocking)

        half = Shares(slots // 2, slots // 2, slots // 4)
        self.cache = await SimCache.open(
            *self._specs(),
            slots=slots,
            reserve_blocks=random.choice((3, 4)),
            fetch_blocks_max=random.choice((slots // 2, slots)),
            threads=threads,
            shares=half if random.random() < 0.3 else Shares(),
            limits=Limits(priority=80, pin_s=50.0),
        )
        shared = self.cache.stack.shared
        self.hints = HintExecutor.of(self.cache.manager)
        self.manager = self.cache.manager
        self._clock = shared.clock
        self.manager.take_events()  # those of the start: a listener asks then what is there
        self.events = Replay(self.cache)

    def jump(self, seconds: float) -> None:
        """Change the wall time of its machine."""
        clock = self._clock
        assert isinstance(clock, SimClock)
        clock._epoch_s += seconds

    def close(self) -> None:
        """End the process in order; assert that it leaves nothing behind."""
        if self.process is None:
            return
        process = self.process
        process.hurry()
        self.disk.crash_at = None
        for request in self.requests:
            process.run(self._leave, request)
        self.requests.clear()
        self.loop.run_until_complete(process.run(self.loop.create_task, self._aclose()))
        left = [task.get_name() for task in process.tasks]
        assert not left, f"{self.machine} leaves tasks behind: {sorted(left)}"
        assert not process.timers, f"{self.machine} leaves timers behind: {process.timers}"
        assert not self.hints.is_busy, f"{self.machine} leaves hints behind"
        assert not self.disk.open_fds, f"{self.machine} leaves files open"
        mine = [end for end in self.planes.net.ends if end.process is process]
        assert not mine, f"{self.machine} leaves connections behind"
        assert not self.planes.of(process), f"{self.machine} leaves agents behind"
        self._end(process)
        process.is_over = True

    async def _aclose(self) -> None:
        self.hints.close()
        await self.cache.aclose(flush_timeout_s=5.0)
        await asyncio.sleep(1.0)  # connections that are being given up end

    def _end(self, process: Process) -> None:
        self.planes.net.gone(process)
        self.planes.gone(process)
        process.is_alive = False
        self.process = None

    def kill(self, mode: Mode = "keep") -> None:
        """End the process at once; ``mode`` says what the machine's disk keeps of its writes."""
        if self.process is None:
            return
        process = self.process
        self._end(process)
        self.disk._on = False
        self.cache.stack.shared.unreleased.close(0, 0)
        process.die()
        if mode == "misdirect":
            self.model.may_come_back(destroyed(self.disk, partial(self.disk.crash, mode)))
        else:
            self.disk.crash(mode)
        self.is_disk_whole &= mode == "keep"
        release(self.cache.arena)
        self.requests.clear()

    # ---- requests

    def begin(self, salt: str, number: int, length: int, priority: int | None, who: int) -> None:
        """A request arrives."""
        keys = self.model.prompt(salt, number, length)
        priorities = None
        if priority is not None:
            priorities = [max(0, priority - 5 * position) for position in range(length)]
        session = None if who > 2 else f"{salt}-{who}-{self._ended[who]}"
        deadline_s = self.random.choice((0.0, 0.05, 3.0))
        fetch = self.manager.fetch(keys, deadline_s=deadline_s, salt=salt, session=session)
        self._names += 1
        until_s = self.loop.time() + deadline_s
        self.requests.append(Request(self._names, salt, keys, priorities, session, fetch, until_s))

    def poll(self) -> None:
        """Let each request do its next step."""
        assert self.process is not None
        if self.requests or self.hints.is_busy:
            self.process.run(self._poll, self.process)

    def _poll(self, process: Process) -> None:
        self.hints.poll()
        is_late = process.resumed_s + 1.0 > self.loop.time()  # it was stopped just now
        for request in [*self.requests]:
            if request.save is not None:
                self._finish(request)
            elif request.fetch.done:
                self._computed(request)
            elif not is_late:
                assert self.loop.time() < request.until_s + 0.001, "a load outlasts its deadline"

    def _computed(self, request: Request) -> None:
        """The load has ended: check the bytes, compute the rest, begin to save it."""
        fetch = request.fetch
        assert len(fetch.slots) == len(fetch.sources) == fetch.blocks <= len(request.keys)
        for key, slot in zip(request.keys, fetch.slots, strict=False):
            data = self.bytes_of(slot)
            assert self.model.is_right(key, data), f"wrong bytes from {fetch.sources}"
            request.loaded[slot] = data
        self.sources.update(fetch.sources)
        save = self.manager.save(
            request.keys,
            priorities=request.priorities,
            salt=request.salt,
            session=request.session,
            ttl_s=self.random.choice((None, None, None, None, 20.0)),
        )
        for index, slot in zip(save.indices, save.slots, strict=True):
            key = request.keys[index]
            data = self.model.payload(key)
            self.cache.arena.view(slot)[:BLOCK_BYTES] = data
            request.filled[slot] = key, data
        request.save = save

    def _finish(self, request: Request) -> None:
        """The copies have ended: commit, or abort if they failed, and leave."""
        assert request.save is not None
        if self.random.random() < 0.9:
            for key, data in request.filled.values():
                self.model.committed(key, data)
            request.save.commit()
        else:
            request.save.abort()
        request.fetch.release()
        self.requests.remove(request)
        if request.session is not None:
            with suppress(ValueError):  # another request has ended it since
                salt = request.salt
                self.manager.sessions.use(request.session, [request.keys], salt)

    def _leave(self, request: Request) -> None:
        request.fetch.release()
        if request.save is not None:
            request.save.abort()

    def cancel(self, number: int) -> None:
        """Cancel a request in any state."""
        if self.requests:
            self._leave(self.requests.pop(number % len(self.requests)))

    def cancel_all(self, salt: str) -> None:
        """Cancel the requests of one salt."""
        for request in [one for one in self.requests if one.salt == salt]:
            self.requests.remove(request)
            self._leave(request)

    def end_session(self, salt: str, who: int) -> None:
        """End a session."""
        with suppress(ValueError):
            self.manager.end_session(f"{salt}-{who}-{self._ended[who]}")
            self._ended[who] += 1

    def hint(self, salt: str, number: int, length: int, what: int) -> None:
        """Send a hint about a prompt."""
        keys = self.model.prompt(salt, number, length)
        verbs = ("pin", "retain", "prefetch", "demote", "share")
        payload: dict[str, Any] = {}
        verb = verbs[what % len(verbs)]
        if verb == "pin":
            payload["ttl_s"] = 20
        elif verb == "retain":
            payload["priority"] = (0, 35, 60)[what % 3]
        self._names += 1
        action = {"action_id": "a", "action_type": verb, "action_version": "1"}
        envelope = {"protocol_version": "0.1", "message_id": str(self._names)}
        body = {**envelope, "actions": [{**action, "payload": payload}]}
        request = OwnRequest(keys, salt)
        self.hints.apply(body, request=request, caller=salt)

    def begin_purge(self, salt: str) -> Generator[dict[str, int]]:
        """Begin to purge a salt; each step of the answer purges more."""
        assert self.process is not None
        stack, digest = self.cache.stack, self.manager._digest(salt)
        return self.process.run(stack.purge, digest)

    def begin_removal(self, salt: str) -> Generator[dict[str, int]]:
        """Remove the blocks of a salt by their keys, all in the first step of the answer."""
        self.manager.remove(self.model.of_salt(salt))
        yield {}

    def bytes_of(self, slot: Slot) -> bytes:
        """Return the bytes of a block in a slot."""
        return bytes(self.cache.arena.view(slot)[:BLOCK_BYTES])

    # ---- invariants

    def check(self) -> None:
        """Check everything that must hold in this process, if anything has changed."""
        if self.process is not None:
            now = self.process, self.process.turns, self.model.forbidding
            if now != self._checked:
                self.process.look(self._check)
                self._checked = now

    def _check(self) -> None:
        self.manager.check()
        writing = [slot for request in self.requests for slot in request.filled]
        assert len(writing) == len(set(writing)), "a slot was given out twice"
        for request in self.requests:
            request.fetch.check()
            for slot, data in request.loaded.items():
                assert slot not in writing, "a pinned slot was given out"
                assert self.bytes_of(slot) == data, "a pinned slot was written into"
            for slot, (_, data) in request.filled.items():
                assert self.bytes_of(slot) == data, "a slot was written into during a save"
        host = self.cache.stack.host
        for key in host.index:
            place = host.index.place(key)
            assert place is not None
            data = self.bytes_of(Slot(place))
            assert self.model.is_right(key, data), "wrong bytes in host"
        for level in self.cache.levels:
            assert len(level.index) <= level.capacity_blocks, f"{level.name} is too full"
            for key in level.index:
                assert self.model.may_be_held(key), f"{level.name} has a block that was purged"
        self._check_calls()
        for stats in (host.stats, *(level.stats for level in self.cache.levels)):
            assert not stats.task_failures, "a task died"
        self.events.check()

    def _check_calls(self) -> None:
        """Check that no abandoned call has ended without its level being told."""
        process, now_s = self.process, self.loop.time()
        assert process is not None
        calls = (call for level in self.cache.levels for call in level.client._behind)
        self._ended_calls = {
            call: self._ended_calls.get(call, now_s) for call in calls if call.done()
        }
        for since_s in self._ended_calls.values():
            is_late = process.is_stopped or since_s <= process.resumed_s
            assert is_late or now_s < since_s + 1.0, "the end of an abandoned call was not told"

    def check_quiet(self) -> None:
        """Check that nothing is pending and no slot is lost, after the last fault."""
        stack, arena = self.cache.stack, self.cache.arena
        assert not stack.pending, f"{self.machine} is still at work"
        assert arena.free + len(stack.host.index) == arena.slots, f"{self.machine} lost a slot"
        for level in self.cache.levels:
            assert level.places.taken == len(level.index), f"{level.name} lost a place"
        if self.is_disk_whole:
            self._check_files()

    def _check_files(self) -> None:
        """Check that the files have what the level says; no other process removes its blocks."""
        files = self.cache.levels[0]
        refs = [Ref(key, int(files.index.place(key) or 0)) for key in files.index]
        assert self.process is not None

        async def held() -> bool:
            return all(await files.tier.contains(refs))

        asked = self.process.run(self.loop.create_task, held())
        assert self.loop.run_until_complete(asked), f"{self.machine} counts on lost files"
