"""A cache with isolated tiers; their processes are killed and stopped at any time."""

from __future__ import annotations

import hashlib
import os
import re
import signal
import time
from contextlib import contextmanager, suppress
from itertools import count
from random import Random

import pytest

import kvladder
from kvladder.config.stack import load_config
from kvladder.errors import ConfigError
from kvladder.tiers.isolated.tier import IsolatedTier
from tests.patience import PATIENCE_S, until

LAYOUT = kvladder.Layout(block_tokens=4, block_bytes=8192)
TRIALS = 24
SLOTS = 128


def stack(*tiers):
    return {"arena": {"size": SLOTS * LAYOUT.block_bytes}, "tiers": [{"type": "host"}, *tiers]}


def files(path, **more):
    level = {"type": "files", "path": str(path), "capacity": "8 MiB", "when": "commit"}
    breaker = {"failures": 2, "retry": "100 ms", "retry_max": "200 ms"}
    return {**level, "isolate": True, "breaker": breaker, **more}


def keys(number, blocks=8):
    return [
        kvladder.BlockKey(hashlib.sha256(b"%d %d" % (number, n)).digest()) for n in range(blocks)
    ]


def data(cache, key):
    return hashlib.blake2b(key).digest() * (cache.layout.block_bytes // 64)


def save(cache, wanted):
    saving = cache.save(wanted)
    for index, slot in zip(saving.indices, saving.slots, strict=True):
        cache.arena.view(slot)[: cache.layout.block_bytes] = data(cache, wanted[index])
    saving.commit()


def load(cache, wanted, sources=None, strike=lambda: None):
    """Return how many blocks of a prefix arrive with the right bytes during such an event.

    Adds their sources to ``sources``.
    """
    fetch = cache.fetch(wanted, deadline_s=PATIENCE_S)
    strike()
    until(lambda: fetch.done)
    slots = list(fetch.slots)
    if sources is not None:
        sources += fetch.sources
    for key, slot in zip(wanted, slots, strict=False):
        assert cache.arena.view(slot)[: cache.layout.block_bytes] == data(cache, key)
    fetch.release()
    return len(slots)


def comes_back(cache, number):
    """Return whether the level below host stores blocks and serves them once host has lost them."""
    save(cache, keys(number))
    cache.flush(timeout_s=PATIENCE_S)
    save(cache, keys(number + 1000, blocks=SLOTS))  # host has no room for anything else
    sources: list[str] = []
    return load(cache, keys(number), sources) == 8 and "host" not in sources


def process(cache):
    """The process id of the first level below host; 0 while it is being started."""
    return cache.stats()["files"]["process"]


def another(process_of, but):
    """Return the level's process id once it is none of these."""
    pid = 0

    def has_come():
        nonlocal pid
        pid = process_of()
        return pid not in {0, *but}

    until(has_come)
    return pid


@contextmanager
def opened(fd):
    """Closes the descriptor of a process, which may be dead by then."""
    try:
        yield fd
    finally:
        os.close(fd)


def test_isolated_levels_store_load_and_recover_blocks(tmp_path):
    with kvladder.open_cache(
        stack(files(tmp_path, codecs=["zstd", "checksum"])), layout=LAYOUT
    ) as cache:
        save(cache, keys(0))
        assert cache.flush(timeout_s=PATIENCE_S)
        assert process(cache) not in {0, os.getpid()}
    with kvladder.open_cache(stack(files(tmp_path, isolate=False)), layout=LAYOUT) as cache:
        assert load(cache, keys(0)) == 8, "what a process stored is read without one, too"


@pytest.mark.slow
def test_the_death_of_a_tiers_process_costs_only_misses(tmp_path):
    random, killed = Random(7), set[int]()
    with kvladder.open_cache(
        stack(files(tmp_path, timeout="500 ms", abandon="200 ms")), layout=LAYOUT
    ) as cache:
        for trial in range(TRIALS):
            save(cache, keys(trial))
            pid = another(lambda: process(cache), but=killed)
            sent, after_s = random.choice([signal.SIGKILL, signal.SIGSTOP]), random.random() * 0.02
            with suppress(ProcessLookupError), opened(os.pidfd_open(pid)) as fd:
                time.sleep(after_s)
                signal.pidfd_send_signal(fd, sent)
                if sent == signal.SIGKILL:
                    killed.add(pid)
            save(cache, keys(trial + 1000))
            for number in random.sample(range(trial + 1), min(3, trial + 1)):
                load(cache, keys(number))
        numbers = count(5000)
        until(lambda: comes_back(cache, next(numbers)))  # it works again, and no slot is missing
        # some were stopped and met no call
        assert cache.stats()["files"]["process_ends"] >= len(killed) >= TRIALS // 4
        cache.check()


@pytest.mark.parametrize(
    ("settings", "path"),
    [
        ({"isolate": "maybe"}, "tiers[1].isolate"),
        ({"isolate": False, "abandon": "2 s"}, "tiers[1].abandon"),
        ({"abandon": "0 s"}, "tiers[1].abandon"),
    ],
)
def test_tiers_that_cannot_be_isolated_are_refused(settings, path):
    with pytest.raises(ConfigError) as refused:
        kvladder.open_cache(stack(files("/tmp/x", **settings)), layout=LAYOUT)
    assert refused.value.path == path


@pytest.mark.parametrize(
    ("level", "isolated"),
    [
        ({"type": "memory"}, False),
        ({"type": "memory", "isolate": True}, True),
        ({"type": "mooncake", "master": "127.0.0.1:1"}, True),
    ],
)
def test_describe_says_whether_a_level_is_isolated(level, isolated):
    config = load_config(stack({"capacity": "8 MiB", **level}))
    (told,) = re.findall(r"^  isolate +(\w+) ", config.describe(), re.MULTILINE)
    assert told == str(isolated)
    assert isinstance(config.levels[0].make_tier(), IsolatedTier) == isolated
