"""The order of work in the pump of a data plane."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kvladder.errors import TierError
from kvladder.tiers.nixl.pump import Pump


class Plane:
    """A plane in which posted work ends with the next poll."""

    def __init__(self, log):
        self.log = log
        self.is_broken = False

    def write(self, own, far, lengths):
        if self.is_broken:
            raise TierError("disconnected")
        self.log.append(f"post {own[0]}")
        return own[0]

    def ended(self, posted):
        self.log.append(f"end {posted}")
        return True

    def progress(self):
        return False


@pytest.fixture
def log():
    return []


def pump_over(plane: Any, log: Any) -> Pump:
    return Pump(plane, log.append, lambda: None)


async def test_the_end_of_a_write_is_seen_before_the_next_one_is_posted(log):
    pump = pump_over(Plane(log), log)
    await asyncio.gather(*(pump.write([n], [n], [1]) for n in range(3)))
    assert log == ["post 0", "end 0", "post 1", "end 1", "post 2", "end 2"]


@pytest.mark.real  # in the order of the calls
async def test_a_write_is_not_delayed_by_the_next_one(log):
    pump, loop = pump_over(Plane(log), log), asyncio.get_running_loop()
    first = pump.write([0], [0], [1])
    loop.call_soon(log.append, "whoever asked goes on")
    await asyncio.gather(first, pump.write([1], [1], [1]))
    assert log[0] == "post 0"


async def test_a_write_that_cannot_be_posted_fails(log):
    plane = Plane(log)
    pump = pump_over(plane, log)
    plane.is_broken = True
    with pytest.raises(TierError, match="disconnected"):
        await pump.write([0], [0], [1])
    assert [str(error) for error in log] == ["disconnected"]


async def test_a_write_not_posted_before_the_end_of_the_plane_fails_and_is_never_posted(log):
    pump = pump_over(Plane(log), log)
    writing = pump.write([0], [0], [1])
    pump.close(TierError("it is over"))
    with pytest.raises(TierError, match="over"):
        await writing
    await asyncio.sleep(0)
    assert log == []
