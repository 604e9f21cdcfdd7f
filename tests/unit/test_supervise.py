"""A supervised task is restarted after any error, and ends when it is cancelled."""

from __future__ import annotations

import asyncio

import pytest

from kvladder.tiers.ladder.calling.breaker import PAUSE_S, supervised

ERRORS = (ZeroDivisionError, asyncio.CancelledError, BaseException)


@pytest.mark.parametrize("error", ERRORS)
async def test_work_that_dies_is_restarted_after_a_pause(error: type[BaseException]) -> None:
    loop = asyncio.get_running_loop()
    began: list[float] = []
    died: list[BaseException] = []

    async def work() -> None:
        began.append(loop.time())
        if len(began) < 3:
            raise error

    first = loop.time()
    await supervised(work, died.append)
    assert [type(one) for one in died] == [error] * 2
    assert began == pytest.approx([first, first + PAUSE_S, first + 2 * PAUSE_S])


@pytest.mark.parametrize("working", [False, True])
async def test_supervised_work_ends_when_it_is_cancelled(working: bool) -> None:
    died: list[BaseException] = []

    async def work() -> None:
        if not working:
            raise ZeroDivisionError
        await asyncio.Event().wait()

    task = asyncio.create_task(supervised(work, died.append))
    await asyncio.sleep(PAUSE_S / 2)
    task.cancel()
    await asyncio.wait({task})
    assert task.cancelled()
    assert len(died) == (0 if working else 1)
