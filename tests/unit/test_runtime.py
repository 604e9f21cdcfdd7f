"""The loop thread and the threads for blocking calls live on, whatever is done to them."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import msgspec
import pytest

import kvladder
from kvladder.config import registry
from kvladder.errors import ClosedError
from kvladder.runtime import THREADS, BlockingPool, Runtime
from kvladder.tiers.context import TierContext
from kvladder.tiers.ladder import lifecycle
from kvladder.tiers.memory import MemoryTier
from tests.patience import PATIENCE_S, until

LAYOUT = kvladder.Layout(block_tokens=4, block_bytes=4096, fields={"model": "m"})


@pytest.fixture
def runtime() -> Iterator[Runtime]:
    runtime = Runtime()
    yield runtime
    runtime.close()


async def nothing() -> str:
    return "alive"


# ---- the loop


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt, ValueError])
@pytest.mark.parametrize("way", ["task", "callback"])
def test_the_loop_survives_errors_of_callbacks_and_tasks(
    runtime: Runtime, error: type[BaseException], way: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def raising() -> None:
        raise error("scripted")

    def fail() -> None:
        if way == "callback":
            raise error("scripted")
        tasks.append(asyncio.get_running_loop().create_task(raising()))

    tasks: list[asyncio.Task[None]] = []
    for _ in range(3):
        runtime.post(fail)
    assert runtime.call(nothing(), timeout_s=PATIENCE_S) == "alive"
    tasks.clear()  # an error that is not awaited is reported when it is forgotten
    assert runtime.call(nothing(), timeout_s=PATIENCE_S) == "alive"
    assert runtime.faults >= 3
    assert len(caplog.messages) == 1, "the rate is bounded"
    assert error.__name__ in caplog.messages[0]


def test_the_loop_continues_after_a_stop(runtime: Runtime) -> None:
    runtime.post(lambda: asyncio.get_running_loop().stop())
    assert runtime.call(nothing(), timeout_s=PATIENCE_S) == "alive"
    assert runtime.faults == 1


def test_closing_abandons_a_task_that_ignores_cancellation() -> None:
    runtime, free = Runtime(), threading.Event()

    async def deaf() -> None:
        while not free.is_set():
            with suppress(asyncio.CancelledError):
                await asyncio.sleep(0.01)

    tasks: list[asyncio.Task[None]] = []
    runtime.post(lambda: tasks.append(asyncio.get_running_loop().create_task(deaf())))
    runtime.call(nothing())
    runtime.close(timeout_s=0.1)
    assert tasks
    with pytest.raises(ClosedError):
        runtime.call(nothing())


# ---- threads


@pytest.mark.real
async def test_threads_are_begun_when_they_are_needed() -> None:
    pool = BlockingPool(THREADS, "test")

    def running() -> int:
        return len([one for one in threading.enumerate() if one.name.startswith("test")])

    assert running() == 0
    for _ in range(20):
        await pool.run(lambda: None)
    assert 0 < running() <= THREADS
    gate = threading.Barrier(THREADS)
    await asyncio.gather(*[pool.run(gate.wait) for _ in range(2 * THREADS)])
    assert running() == THREADS
    pool.close(timeout_s=PATIENCE_S)
    with pytest.raises(ClosedError):
        await pool.run(lambda: None)


@pytest.mark.real
async def test_hanging_calls_delay_no_other_once_they_are_abandoned() -> None:
    pool, free = BlockingPool(2, "test"), threading.Event()
    begun: list[int] = []

    def hang(number: int) -> None:
        begun.append(number)
        free.wait()

    stuck = [asyncio.ensure_future(pool.run(hang, number)) for number in range(4)]
    while len(begun) < 2:  # noqa: ASYNC110 - threads set no event
        await asyncio.sleep(0.001)
    for call in stuck[2:]:
        call.cancel()
    await asyncio.wait(stuck[2:])
    assert begun == [0, 1], "what had not begun does not begin"
    for call in stuck[:2]:
        call.cancel()
    assert await pool.run(lambda: "served") == "served"
    assert not any(call.done() for call in stuck[:2]), "cancellation waits for their threads"
    free.set()
    await asyncio.wait(stuck)
    assert all(call.cancelled() for call in stuck)
    assert await pool.run(lambda: "served") == "served"
    pool.close(timeout_s=PATIENCE_S)


@pytest.mark.real
@pytest.mark.parametrize("error", [StopIteration, SystemExit, GeneratorExit, OSError])
async def test_errors_of_a_blocking_function_are_raised(error: type[BaseException]) -> None:
    def fail() -> None:
        raise error("scripted")

    pool = BlockingPool(1, "test")
    with pytest.raises((error, RuntimeError), match="scripted"):
        await pool.run(fail)
    assert await pool.run(lambda: 1) == 1
    pool.close(timeout_s=PATIENCE_S)


class Held:
    """What a call returns, or holds while it fails."""


@pytest.mark.real
@pytest.mark.parametrize("end", ["returns", "is given up", "fails"])
async def test_what_a_call_has_made_goes_with_its_last_user(end: str) -> None:
    """It does not wait for the collection of cycles: it may be an agent, with its sockets."""
    made: list[weakref.ref[Held]] = []
    begun, let_go = threading.Event(), threading.Event()

    def make() -> Held:
        held = Held()
        made.append(weakref.ref(held))
        begun.set()
        assert let_go.wait(PATIENCE_S)
        if end == "fails":
            raise OSError("scripted")
        return held

    async def user() -> None:
        with suppress(OSError):
            await pool.run(make)

    pool = BlockingPool(1, "test")
    gc.disable()
    try:
        using = asyncio.create_task(user())
        while not begun.is_set():  # noqa: ASYNC110 - the thread knows of no loop
            await asyncio.sleep(0.001)
        if end == "is given up":
            using.cancel()
            await asyncio.sleep(0.001)
        let_go.set()
        await asyncio.wait({using})
        del using
        pool.close(timeout_s=PATIENCE_S)
        assert made[0]() is None
    finally:
        gc.enable()


# ---- a whole cache


class Rogue(MemoryTier):
    """Follows its class attribute."""

    class Options(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
        pass

    deed = ""

    def __init__(self, options: Options | None = None) -> None:
        super().__init__()

    async def open(self, context: TierContext) -> None:
        await super().open(context)
        if self.deed == "exit at open":
            raise SystemExit(3)
        if self.deed == "hang at open":
            await asyncio.Event().wait()

    async def put(self, writes: Any) -> Any:
        if self.deed == "exit beside the call":
            self.task = asyncio.create_task(self._exit())
        return await super().put(writes)

    async def _exit(self) -> None:
        raise SystemExit(3)


def open_rogue(deed: str, monkeypatch: pytest.MonkeyPatch) -> kvladder.CacheManager:
    monkeypatch.setattr(Rogue, "deed", deed)
    monkeypatch.setitem(registry._registered, ("tiers", "rogue"), Rogue)
    level = {"type": "rogue", "capacity": "1 MiB", "when": "commit", "timeout": "100 ms"}
    stack = {"arena": {"size": "1 MiB"}, "tiers": [{"type": "host"}, level]}
    return kvladder.open_cache(stack, layout=LAYOUT)


def keys(first: int, count: int) -> list[kvladder.BlockKey]:
    return [kvladder.BlockKey(bytes([number]) * 32) for number in range(first, first + count)]


def test_a_cache_starts_without_a_tier_that_exits(monkeypatch: pytest.MonkeyPatch) -> None:
    with open_rogue("exit at open", monkeypatch) as cache:
        assert cache.stats()["rogue"]["left_out"] == 1
        assert "rogue is left out: it failed to open: " in cache.describe()
        cache.save(keys(0, 4)).commit()
        assert cache.lookup(keys(0, 4)) == (4, 4)


def test_a_cache_closes_though_a_tier_hangs_in_its_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lifecycle, "OPEN_TIMEOUT_S", 0.05)
    with open_rogue("hang at open", monkeypatch) as cache:
        assert cache.stats()["rogue"]["left_out"] == 1


def test_the_exit_of_a_tiers_own_task_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    with open_rogue("exit beside the call", monkeypatch) as cache:
        cache.save(keys(0, 4)).commit()
        until(lambda: cache.stats()["rogue"]["stored"] == 4)
        assert cache.stats()["loop"]["faults"] == 1
