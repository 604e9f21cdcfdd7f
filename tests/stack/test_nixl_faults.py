"""Engines over servers that are killed and stopped in mid-transfer, and the other way round.

``KVLADDER_TRIALS`` sets the number; ``python -m tests.kit.trials 200`` prints the times.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from contextlib import suppress
from importlib.util import find_spec
from itertools import count
from random import Random

import pytest

import kvladder
from tests.patience import until
from tests.stack.test_isolated_levels import another, keys, load, opened, save

for needed in ("zmq", "nixl_cu13"):
    pytest.importorskip(needed, reason="the extra nixl is not installed")

from tests.kit.far import Far  # noqa: E402
from tests.kit.lanes import run  # noqa: E402
from tests.kit.trials import ALL_LANES, NIXL_LANES, told  # noqa: E402

TRIALS = int(os.environ.get("KVLADDER_TRIALS", "48"))
PARTS = 4
"""Trials wait for most of their time: some may run beside others."""
ENGINE_TRIALS = 8
BLOCK_BYTES = 1 << 20
BLOCKS = 16
LAYOUT = kvladder.Layout(block_tokens=4, block_bytes=BLOCK_BYTES)
TIMEOUT_S = 2.0


def stack(far):
    breaker = {"failures": 3, "retry": "100 ms", "retry_max": "200 ms"}
    level = {
        "type": "nixl", "servers": [far.address], "keys": far.keys, "capacity": "1 GiB",
        "when": "commit", "timeout": f"{TIMEOUT_S} s", "breaker": breaker,
    }  # fmt: skip
    return {"arena": {"size": "40 MiB"}, "tiers": [{"type": "host"}, level]}


def child(cache):
    """The process of the level; 0 while it is being started."""
    return cache.stats()["nixl"]["process"]


def recover(cache, number):
    """Save and load until blocks that host has evicted are read back."""
    numbers = count(number)

    def comes_back():
        again = keys(next(numbers), BLOCKS)
        save(cache, again)
        cache.flush(timeout_s=10)
        for other in range(3):
            save(cache, keys(10**6 + other, BLOCKS))  # host has no room for anything else
        return load(cache, again) == BLOCKS

    until(comes_back)


@pytest.mark.slow
@pytest.mark.crash
def test_a_death_in_mid_transfer_costs_only_misses(tmp_path):
    random = Random(11)
    with (
        Far(tmp_path, slots=160, block_bytes=BLOCK_BYTES) as far,
        kvladder.open_cache(stack(far), layout=LAYOUT) as cache,
    ):
        for trial in range(ENGINE_TRIALS):
            victim = random.choice(["server", "child"])
            sent = random.choice([signal.SIGKILL, signal.SIGSTOP])
            first = 100 * trial
            recover(cache, first)
            pid = another(lambda: child(cache), but=())
            pid = far.process.pid if victim == "server" else pid

            def strike(pid=pid, sent=sent):
                time.sleep(random.random() * 0.03)
                with suppress(ProcessLookupError), opened(os.pidfd_open(pid)) as fd:
                    signal.pidfd_send_signal(fd, sent)

            if random.random() < 0.5:
                save(cache, keys(first + 50, BLOCKS))  # the get runs while a put is in flight
                strike()
            load(cache, keys(first, BLOCKS), strike=strike)
            load(cache, keys(first, BLOCKS))
            if victim == "server" and sent == signal.SIGKILL:
                far.kill()
                far.start()
            elif victim == "server":
                far.process.send_signal(signal.SIGCONT)
            cache.check()
        recover(cache, 10**5)
        until(lambda: not (far("counts")["granted"] or far("counts")["pinned"]))


@pytest.mark.slow
@pytest.mark.crash
@pytest.mark.parametrize("seed", range(PARTS))
def test_a_death_in_mid_transfer_costs_only_its_calls(tmp_path, seed):
    """Kills servers, clients and processes of tiers, over NIXL and Mooncake."""
    lanes = NIXL_LANES if find_spec("mooncake") is None else ALL_LANES
    trials = len(range(seed, TRIALS, PARTS))
    figures = asyncio.run(run(tmp_path, trials, lanes, seed=seed))
    assert figures.trials.total() == trials
    figures.check()
    print(told(figures))
