"""Threads for blocking calls, many at once: order, errors, cancellation and the end."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any

import pytest

from kvladder.errors import ClosedError
from kvladder.tiers.blocking import BlockingPool
from kvladder.tiers.files.threads import BufferedPool
from tests.patience import PATIENCE_S

pytestmark = pytest.mark.real


@pytest.fixture(params=[BlockingPool, BufferedPool])
async def pool(request: pytest.FixtureRequest) -> AsyncIterator[BlockingPool]:
    """One thread, so that there is an order."""
    pool: BlockingPool = request.param(1, "kvladder-test")
    yield pool
    assert await pool.aclose(lambda: None, timeout_s=PATIENCE_S)


def fail() -> int:
    raise OSError(5, "no")


def jobs(*jobs: Callable[[], int]) -> list[Callable[[], int]]:
    return list(jobs)


class Note:
    """A job that records its run."""

    def __init__(self, order: list[str], name: str) -> None:
        self.order, self.name = order, name

    def __call__(self) -> int:
        self.order.append(self.name)
        return 0


class Gate:
    """A job that signals its begin and ends on request."""

    def __init__(self) -> None:
        self.began = threading.Event()
        self.go = threading.Event()

    def __call__(self) -> int:
        self.began.set()
        assert self.go.wait(PATIENCE_S)
        return 0

    async def wait(self) -> None:
        assert await asyncio.to_thread(self.began.wait, PATIENCE_S)


async def test_results_have_the_order_of_the_jobs(pool: BlockingPool) -> None:
    assert await pool.run_all([partial(pow, n, 2) for n in range(20)]) == [n * n for n in range(20)]
    assert await pool.run_all([]) == []


async def test_reads_are_begun_before_writes_that_wait(pool: BlockingPool) -> None:
    gate, order = Gate(), list[str]()
    first = asyncio.create_task(pool.run_all([gate]))
    await gate.wait()
    write = asyncio.create_task(pool.run_all([Note(order, "write")] * 2))
    await asyncio.sleep(0.01)
    read = asyncio.create_task(pool.run_all([Note(order, "read")] * 2, urgent=True))
    await asyncio.sleep(0.01)
    gate.go.set()
    await asyncio.gather(first, write, read)
    assert order == ["read", "read", "write", "write"]


async def test_an_error_is_raised_once_all_jobs_have_ended(pool: BlockingPool) -> None:
    done: list[str] = []
    with pytest.raises(OSError, match="no"):
        await pool.run_all(jobs(fail, Note(done, "a"), Note(done, "b")))
    assert done == ["a", "b"]


async def test_a_cancellation_waits_for_running_jobs_and_drops_the_rest(
    pool: BlockingPool,
) -> None:
    gate, later = Gate(), list[str]()
    task = asyncio.create_task(pool.run_all(jobs(gate, Note(later, "later"))))
    await gate.wait()
    for _ in range(3):
        task.cancel()
        await asyncio.sleep(0.001)
        assert not task.done()
    gate.go.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert later == []


async def test_a_hanging_job_delays_no_other_once_it_is_abandoned(pool: BlockingPool) -> None:
    gates, order, stuck = [Gate(), Gate()], list[str](), list[asyncio.Task[Any]]()
    for gate in gates:
        stuck.append(asyncio.create_task(pool.run_all(jobs(gate, Note(order, "left out")))))
        await gate.wait()
        stuck[-1].cancel()
        await pool.run_all([Note(order, "served")])
        assert not any(call.done() for call in stuck)
    for gate, call in zip(gates, stuck, strict=True):
        gate.go.set()
        with pytest.raises(asyncio.CancelledError):
            await call
    await pool.run_all([Note(order, "served")])
    assert order == ["served"] * 3


async def test_the_thread_of_an_abandoned_job_serves_no_other(pool: BlockingPool) -> None:
    gate, first, second = Gate(), Gate(), Gate()
    stuck = asyncio.create_task(pool.run_all([gate]))
    await gate.wait()
    stuck.cancel()
    await pool.run_all([Note([], "served")])
    gate.go.set()
    with pytest.raises(asyncio.CancelledError):
        await stuck
    jobs = [asyncio.create_task(pool.run_all([one])) for one in (first, second)]
    await first.wait()
    await asyncio.sleep(0.05)
    both = second.began.is_set()
    for one in (first, second):
        one.go.set()
    await asyncio.gather(*jobs)
    assert not both, "there is one thread again"


@pytest.mark.parametrize("kind", [BlockingPool, BufferedPool])
async def test_the_last_call_comes_after_all_jobs(kind: type[BlockingPool]) -> None:
    pool, gate, order = kind(1, "kvladder-test"), Gate(), list[str]()
    job = asyncio.create_task(pool.run_all(jobs(gate, Note(order, "job"))))
    await gate.wait()
    closing = asyncio.create_task(pool.aclose(lambda: order.append("last"), timeout_s=PATIENCE_S))
    await asyncio.sleep(0.01)
    gate.go.set()
    assert await closing
    await job
    assert order == ["job", "last"]


@pytest.mark.parametrize("kind", [BlockingPool, BufferedPool])
async def test_a_hanging_job_is_abandoned_at_the_close(kind: type[BlockingPool]) -> None:
    pool, gate, last = kind(2, "kvladder-test"), Gate(), threading.Event()
    job = asyncio.create_task(pool.run_all([gate]))
    await gate.wait()
    assert not await pool.aclose(last.set, timeout_s=0.01)
    assert not last.is_set()
    with pytest.raises(ClosedError):
        await pool.run_all([Gate()])
    gate.go.set()
    assert await job == [0]
    assert await asyncio.to_thread(last.wait, PATIENCE_S)


async def test_all_threads_end_with_the_pool() -> None:
    other = BlockingPool(3, "kvladder-ends")
    assert await other.run_all([threading.get_ident] * 5)
    assert await other.aclose(lambda: None, timeout_s=PATIENCE_S)
    left = [t for t in threading.enumerate() if t.name.startswith("kvladder-ends")]
    for thread in left:  # the last of them is just telling that all have ended
        thread.join(PATIENCE_S)
    assert not any(thread.is_alive() for thread in left)
