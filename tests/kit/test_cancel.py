"""Cancelling at the n-th suspension."""

from __future__ import annotations

import asyncio
from itertools import count

import pytest

from kvladder.testing.cancel import cancel_at


async def steps(seen: list[str], *, stubborn: bool = False) -> None:
    for number in range(3):
        try:
            await asyncio.sleep(number)
            seen.append(f"step {number}")
        except asyncio.CancelledError:
            seen.append(f"cancelled at {number}")
            if not stubborn:
                raise


async def test_work_is_cancelled_at_each_place_in_turn() -> None:
    found: list[list[str]] = []
    for suspension in count(1):
        seen: list[str] = []
        reached = await cancel_at(steps(seen), suspension)
        found.append(seen)
        if not reached:
            break
    assert found[0] == ["cancelled at 0"]
    assert found[1] == ["step 0", "cancelled at 1"]
    assert found[-1] == ["step 0", "step 1", "step 2"]


async def test_work_may_continue_after_a_cancellation() -> None:
    seen: list[str] = []
    assert await cancel_at(steps(seen, stubborn=True), 2)
    assert seen == ["step 0", "cancelled at 1", "step 2"]


async def test_errors_of_the_work_are_raised() -> None:
    async def fails() -> None:
        await asyncio.sleep(1)
        raise OSError("broken")

    with pytest.raises(OSError, match="broken"):
        await cancel_at(fails(), 9)


async def test_awaited_futures_are_cancelled_with_the_work() -> None:
    inner = asyncio.ensure_future(asyncio.sleep(100))

    async def waits() -> None:
        await inner

    assert await cancel_at(waits(), 1)
    assert inner.cancelled()
    assert asyncio.get_running_loop().time() == 0.0


async def test_polling_is_detected() -> None:
    work = steps([])
    with pytest.raises(AssertionError, match="the work may poll"):
        await cancel_at(work, 1001)
    work.close()
