"""Connecting to a real server, cut off wherever it waits: no socket stays open."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from kvladder.testing.cancel import cancel_at
from kvladder.testing.redisserver import RedisServer, certificates
from kvladder.tiers.redis.nodes import Entrance
from kvladder.tiers.redis.url import RedisOptions
from tests.tiers.redistests import PATIENT

pytestmark = [pytest.mark.slow, pytest.mark.real]
TURNS = 2
"""Turns of the loop in which closed sockets are closed: fewer than a farewell over TLS takes."""


@pytest.fixture(scope="module", params=["plain", "unix", "tls", "sentinel", "sentinel with tls"])
def options(request, tmp_path_factory):
    folder, kind = tmp_path_factory.mktemp("redis"), request.param
    tls = certificates(folder / "tls") if "tls" in kind else None
    settings: dict[str, Any] = {"ca": str(tls / "ca.crt")} if tls else {}
    mode = "--sentinel" if "sentinel" in kind else ""
    with RedisServer(folder, tls=tls, mode=mode) as server:
        if mode:
            server.run("SENTINEL", "MONITOR", "kv", "127.0.0.1", server.port, 1)
            settings["sentinel"] = "kv"
        url = f"unix://{server.path}" if kind == "unix" else server.url
        yield RedisOptions(url=url, connect_timeout=PATIENT, **settings)


async def connected(options):
    """Connect, and end it again, as a tier does; of Sentinels, hear where the master is."""
    entrance, (address,) = Entrance(options), options.parsed.addresses
    if options.sentinel:
        assert (await entrance.master(address)).port == address.port
        return
    (await entrance.wire(address)).close()


def sockets():
    """Return the number of sockets of this process."""
    found = 0
    for one in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # that of the folder itself
            found += str(one.readlink()).startswith("socket:")
    return found


@pytest.mark.parametrize("late", [False, True])
async def test_a_connection_cancelled_during_its_setup_leaves_no_socket_open(options, late):
    await connected(options)
    await asyncio.sleep(0)
    before = sockets()
    for suspension in count(1):
        reached = await cancel_at(connected(options), suspension, late=late)
        for _ in range(TURNS):
            await asyncio.sleep(0)
        assert sockets() == before, f"cut off where it waits for the {suspension}th time"
        if not reached:
            break
    assert suspension > 2
