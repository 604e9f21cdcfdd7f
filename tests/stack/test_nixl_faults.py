"""Engines over servers that are killed and stopped, and the other way round, in mid-transfer.

``KVLADDER_TRIALS`` says how often; a few dozen are enough to find what is wrong in most runs.
"""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from random import Random

import pytest

import kvladder
from tests.stack.test_isolated_levels import opened

for needed in ("zmq", "nixl_cu13"):
    pytest.importorskip(needed, reason="the extra nixl is not installed")

from tests.kit.far import Far  # noqa: E402

TRIALS = int(os.environ.get("KVLADDER_TRIALS", "12"))
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


def keys(number):
    return [
        kvladder.BlockKey(hashlib.sha256(b"%d %d" % (number, n)).digest()) for n in range(BLOCKS)
    ]


def data(key):
    return hashlib.blake2b(key, digest_size=64).digest() * (BLOCK_BYTES // 64)


def save(cache, number):
    wanted = keys(number)
    saving = cache.save(wanted)
    for index, slot in zip(saving.indices, saving.slots, strict=True):
        cache.arena.view(slot)[:] = data(wanted[index])
    saving.commit()


def load(cache, number, strike=lambda: None):
    """How many blocks of a prefix come, each of them right, if that happens meanwhile."""
    wanted = keys(number)
    fetch = cache.fetch(wanted, deadline_s=30.0)
    strike()
    while not fetch.done:
        time.sleep(0.001)
    slots = list(fetch.slots)
    for key, slot in zip(wanted, slots, strict=False):
        assert cache.arena.view(slot) == data(key)
    fetch.release()
    return len(slots)


def child(cache):
    """The process of the level; 0 while it is being started."""
    return cache.stats()["nixl"]["process"]


def recover(cache, far, number):
    """Save and load until what host has forgotten comes back."""
    for again in range(10_000):
        save(cache, number + again)
        cache.flush(timeout_s=10)
        for other in range(3):
            save(cache, 10**6 + other)  # host has room for nothing else
        if load(cache, number + again) == BLOCKS:
            return
    pytest.fail("it does not recover")


@pytest.mark.slow
@pytest.mark.crash
def test_no_death_in_mid_transfer_costs_more_than_misses(tmp_path):
    random = Random(11)
    with (
        Far(tmp_path, slots=160, block_bytes=BLOCK_BYTES) as far,
        kvladder.open_cache(stack(far), layout=LAYOUT) as cache,
    ):
        for trial in range(TRIALS):
            victim = random.choice(["server", "child"])
            sent = random.choice([signal.SIGKILL, signal.SIGSTOP])
            first = 100 * trial
            recover(cache, far, first)
            while not (pid := child(cache)):
                time.sleep(0.01)
            pid = far.process.pid if victim == "server" else pid

            def strike(pid=pid, sent=sent):
                time.sleep(random.random() * 0.03)
                with suppress(ProcessLookupError), opened(os.pidfd_open(pid)) as fd:
                    signal.pidfd_send_signal(fd, sent)

            if random.random() < 0.5:
                save(cache, first + 50)  # a put is under way, and the get finds it so
                strike()
            load(cache, first, strike)
            load(cache, first)
            if victim == "server" and sent == signal.SIGKILL:
                far.kill()
                far.start()
            elif victim == "server":
                far.process.send_signal(signal.SIGCONT)
            cache.check()
        recover(cache, far, 10**5)
        deadline_s = time.monotonic() + 60
        while far("counts")["granted"] or far("counts")["pinned"]:
            assert time.monotonic() < deadline_s
            time.sleep(0.05)


ENGINE = """
import itertools, os, sys
import kvladder
from tests.stack import test_nixl_faults as faults

class There:
    address, keys = sys.argv[1:]

with kvladder.open_cache(faults.stack(There), layout=faults.LAYOUT) as cache:
    print("ready", flush=True)
    for number in itertools.count(os.getpid() << 20):
        faults.save(cache, number)
        cache.flush(timeout_s=10)
        faults.load(cache, number)
"""


@pytest.mark.slow
@pytest.mark.crash
@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGSTOP])
def test_slots_of_an_engine_that_is_gone_come_back(tmp_path, sent):
    random = Random(5)
    with Far(tmp_path, slots=160, block_bytes=BLOCK_BYTES) as far:
        engines = []
        for _ in range(max(2, TRIALS // 6)):
            engine = subprocess.Popen(
                [sys.executable, "-c", ENGINE, far.address, far.keys],
                stdout=subprocess.PIPE,
                start_new_session=True,  # stopped with the process of its level
            )
            engines.append(engine)
            assert engine.stdout is not None
            assert engine.stdout.readline() == b"ready\n"
            time.sleep(0.2 + random.random() * 0.3)
            os.killpg(engine.pid, sent)
        while (held := far("counts"))["clients"] or held["granted"] or held["pinned"]:
            time.sleep(0.05)
        for engine in engines:
            os.killpg(engine.pid, signal.SIGKILL)
            engine.communicate()
        with kvladder.open_cache(stack(far), layout=LAYOUT) as cache:
            recover(cache, far, 0)
