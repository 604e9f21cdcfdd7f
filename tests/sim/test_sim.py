"""The simulated loop: time, order, and programs that can make no progress."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import threading
from collections.abc import AsyncIterator
from functools import partial
from random import Random

import pytest

from kvladder.replay.loop import RESOLUTION_S
from kvladder.testing.sim import (
    EPOCH_S,
    TURNS_MAX,
    Deadlock,
    InlineBlocking,
    Livelock,
    SimClock,
    SimLoop,
    inline_blocking,
    sim_run,
)


async def order_of(count: int) -> list[int]:
    """The order in which tasks that are ready at once take their turns, three each."""
    turns: list[int] = []

    async def work(number: int) -> None:
        for _ in range(3):
            turns.append(number)
            await asyncio.sleep(0)

    await asyncio.gather(*(work(number) for number in range(count)))
    return turns


# ---- time


def test_time_jumps_to_the_next_timer() -> None:
    async def wait() -> list[float]:
        loop = asyncio.get_running_loop()
        times = [loop.time()]
        for seconds in (0.1, 3600.0, 0.0, 1e6):
            await asyncio.sleep(seconds)
            times.append(loop.time())
        return times

    assert sim_run(wait()) == pytest.approx([0.0, 0.1, 3600.1, 3600.1, 1_003_600.1], abs=1e-6)


def test_time_stands_still_while_something_is_ready() -> None:
    async def work() -> float:
        for _ in range(100):
            await asyncio.sleep(0)
        return asyncio.get_running_loop().time()

    assert sim_run(work()) == 0.0


def test_timers_fire_in_order_and_not_early() -> None:
    async def wait() -> list[tuple[float, float]]:
        loop = asyncio.get_running_loop()
        fired: list[tuple[float, float]] = []

        async def sleep(seconds: float) -> None:
            due = loop.time() + seconds
            await asyncio.sleep(seconds)
            fired.append((due, loop.time()))

        delays = [1e9, 0.1 + 0.2, 0.3, 1e-12, 86_400.0 * 365, 5e-324]
        await asyncio.gather(*map(sleep, delays))
        return fired

    fired = sim_run(wait())
    assert len(fired) == 6
    assert all(now >= due - RESOLUTION_S for due, now in fired), "as on any loop"
    assert [now for _, now in fired] == sorted(now for _, now in fired)


def test_what_is_due_during_a_pause_runs_after_it_in_order() -> None:
    async def wait() -> list[tuple[float, float]]:
        loop = asyncio.get_running_loop()
        fired: list[tuple[float, float]] = []

        def fire(due: float) -> None:
            fired.append((due, loop.time()))

        for due in (2.0, 1.0, 5.0):
            loop.call_at(due, fire, due)
        assert isinstance(loop, SimLoop)
        loop.pause(3.0)
        await asyncio.sleep(4.0)
        return fired

    assert sim_run(wait()) == [(1.0, 3.0), (2.0, 3.0), (5.0, 5.0)]


def test_a_distant_timeout_still_fires() -> None:
    async def wait() -> float:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(1e8):
                await asyncio.Event().wait()
        return asyncio.get_running_loop().time()

    assert sim_run(wait()) == pytest.approx(1e8)


def test_the_clock_shows_the_loops_time() -> None:
    async def look() -> tuple[float, float]:
        clock = SimClock(asyncio.get_running_loop())
        await asyncio.sleep(5.0)
        return clock.now(), clock.wall()

    assert sim_run(look()) == (5.0, EPOCH_S + 5.0)


# ---- order


def test_the_same_seed_gives_the_same_order() -> None:
    assert sim_run(order_of(6), seed=3) == sim_run(order_of(6), seed=3)


def test_seeds_explore_different_orders() -> None:
    starts = {tuple(sim_run(order_of(3), seed=seed)[:3]) for seed in range(200)}
    assert {(0, 1, 2), (2, 1, 0), (1, 0, 2)} <= starts


def test_sets_of_tasks_have_the_same_order_in_each_run() -> None:
    async def cancelled() -> list[int]:
        ended: list[int] = []

        async def work(number: int) -> None:
            try:
                await asyncio.sleep(100.0)
            finally:
                ended.append(number)

        with contextlib.suppress(ExceptionGroup):
            async with asyncio.TaskGroup() as group:
                for number in range(8):
                    group.create_task(work(number))
                await asyncio.sleep(1.0)
                raise ValueError
        return ended

    kept: list[object] = []  # so that addresses differ from run to run
    runs: list[list[int]] = []
    for _ in range(20):
        runs.append(sim_run(cancelled(), 5))
        kept.append(bytearray(1000))
    assert {*map(tuple, runs)} == {tuple(runs[0])}
    assert sorted(runs[0]) == [*range(8)]


def test_callbacks_of_one_future_keep_their_order() -> None:
    async def wait() -> list[int]:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        called: list[int] = []
        for number in range(8):
            future.add_done_callback(partial(lambda number, _: called.append(number), number))
        future.set_result(None)
        await asyncio.sleep(1.0)
        return called

    for seed in range(20):
        assert sim_run(wait(), seed) == list(range(8))


def test_a_callback_that_was_cancelled_is_not_called() -> None:
    async def wait() -> list[str]:
        called: list[str] = []
        loop = asyncio.get_running_loop()
        loop.call_soon(called.append, "one")
        loop.call_soon(called.append, "two").cancel()
        loop.call_later(1.0, called.append, "three").cancel()
        await asyncio.sleep(2.0)
        return called

    assert sim_run(wait()) == ["one"]


def test_locks_semaphores_and_queues_work_in_any_order() -> None:
    async def work() -> int:
        lock, calls = asyncio.Lock(), asyncio.Semaphore(2)
        queue: asyncio.Queue[int] = asyncio.Queue(1)
        inside = most = 0

        async def produce(number: int) -> None:
            nonlocal inside, most
            async with calls:
                inside += 1
                most = max(most, inside)
                await asyncio.sleep(number % 3)
                inside -= 1
            async with lock:
                await queue.put(number)

        async with asyncio.TaskGroup() as tasks:
            for number in range(10):
                tasks.create_task(produce(number))
            got = sorted([await queue.get() for _ in range(10)])
        assert got == list(range(10))
        return most

    assert {sim_run(work(), seed) for seed in range(30)} == {2}


# ---- no progress


def test_a_wait_without_an_end_is_a_deadlock_that_says_where() -> None:
    async def inner() -> None:
        await asyncio.Event().wait()

    async def outer() -> None:
        task = asyncio.create_task(inner(), name="the waiter")
        await task

    with pytest.raises(Deadlock) as failure:
        sim_run(outer())
    lines = str(failure.value).splitlines()
    assert lines[0] == "nothing will ever happen again at 0 s:"
    (waiter,) = [line for line in lines if "the waiter: " in line]
    assert "inner > " in waiter
    assert "test_sim.py" in waiter
    assert waiter.endswith("in Event.wait")


def test_a_deadlock_in_an_async_generator_names_its_reader() -> None:
    async def values() -> AsyncIterator[int]:
        yield 1
        await asyncio.Event().wait()

    async def read() -> None:
        async for _ in values():
            pass

    with pytest.raises(Deadlock, match=r"test_sim\.py:\d+ in .*read$"):
        sim_run(read())


def test_polling_at_one_instant_is_a_livelock() -> None:
    async def poll() -> None:
        while True:  # noqa: ASYNC110
            await asyncio.sleep(0)

    with pytest.raises(Livelock, match=rf"{TURNS_MAX + 1} of them at 0 s:\n  .* in .*poll > "):
        sim_run(poll())


def test_polling_over_time_is_a_livelock_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvladder.testing.sim.TURNS_TOTAL_MAX", 5000)

    async def poll() -> None:
        while True:  # noqa: ASYNC110
            await asyncio.sleep(0.01)

    with pytest.raises(Livelock, match="5001 turns"):
        sim_run(poll())


@pytest.mark.slow
def test_much_work_at_one_instant_is_no_livelock() -> None:
    async def work() -> int:
        return len(await order_of(TURNS_MAX * 2 // 5))

    assert sim_run(work()) > TURNS_MAX


def test_each_run_counts_its_turns_from_zero() -> None:
    loop = SimLoop()
    for _ in range(3):
        for _ in range(TURNS_MAX // 2):
            loop.run_until_complete(asyncio.sleep(0))
    loop.close()


# ---- calls that a simulation refuses


async def test_threads_are_refused() -> None:
    with pytest.raises(RuntimeError, match="use run_blocking"):
        await asyncio.to_thread(print)


async def test_another_thread_may_not_call_in() -> None:
    loop = asyncio.get_running_loop()
    refused: list[str] = []

    def call() -> None:
        try:
            loop.call_soon_threadsafe(print)
        except RuntimeError as error:
            refused.append(str(error))

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    assert refused == ["another thread calls into a simulated loop"]


async def test_the_loops_own_thread_may_call_in() -> None:
    event = asyncio.Event()
    asyncio.get_running_loop().call_soon_threadsafe(event.set)
    await event.wait()


# ---- blocking functions


async def test_blocking_functions_run_on_the_loop_after_a_turn() -> None:
    here = threading.get_ident()
    turns = 0

    async def count() -> None:
        nonlocal turns
        while turns < 100:  # a busy one
            turns += 1
            await asyncio.sleep(0)

    counting = asyncio.create_task(count())
    assert await inline_blocking(threading.get_ident) == here
    assert asyncio.get_running_loop().time() == 0.0
    await counting


async def test_blocking_functions_may_take_their_time() -> None:
    slow = InlineBlocking(Random(1), mean_s=2.0)
    assert await slow(divmod, 7, 2) == (3, 1)
    assert 0.0 < asyncio.get_running_loop().time() < 20.0


async def test_a_blocking_function_that_was_cancelled_before_it_began_does_not_run() -> None:
    called: list[int] = []
    task = asyncio.ensure_future(InlineBlocking(Random(1), mean_s=2.0)(called.append, 1))
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait({task})
    assert not called
    with pytest.raises(ZeroDivisionError):
        await inline_blocking(divmod, 1, 0)


async def test_the_error_of_a_call_that_was_given_up_is_not_reported() -> None:
    said: list[str] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: said.append(context["message"]))

    async def fails_late() -> None:
        await asyncio.sleep(1.0)
        raise ValueError("late")

    call = asyncio.create_task(inline_blocking(fails_late))
    await asyncio.sleep(0.5)
    call.cancel()
    await asyncio.wait({call})
    assert call.cancelled()
    del call  # with its traceback, which holds the error
    gc.collect()
    assert said == []
