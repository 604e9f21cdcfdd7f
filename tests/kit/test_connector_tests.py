"""The suite for connectors finds each kind of connector that breaks a rule."""

from __future__ import annotations

import os
import sys

import pytest

from kvladder.testing import ConnectorTests

BROKEN = '''
from dataclasses import replace

import numpy as np
import pytest
import torch

from kvladder import Layout, open_cache
from kvladder.connectors.inline import InlineConnector
from kvladder.gpu.copy.copier import Finished
from kvladder.policy.eviction import PRIORITY_MAX
from kvladder.testing import ConnectorEngine, ConnectorTests


class Engine(ConnectorEngine):
    def __init__(self, connector_class, stack, blocks):
        self.kv = torch.zeros(blocks, 2, 16, 64)
        layout = Layout(block_tokens=16, block_bytes=self.kv[0].nbytes)
        super().__init__(connector_class(open_cache(stack, layout=layout), self.kv))

    def write(self, block, data):
        self.kv[block].view(torch.uint8).numpy().reshape(-1)[:] = np.frombuffer(data, np.uint8)

    def read(self, block):
        return self.kv[block].numpy().tobytes()


class Broken(ConnectorTests):
    patience_s = 1.0
    engine_class = Engine
    connector_class = InlineConnector

    @pytest.fixture
    def make(self):
        return lambda stack, blocks: self.engine_class(self.connector_class, stack, blocks)


class TestSound(Broken):
    patience_s = 300.0


class WrongBytes(InlineConnector):
    """Loads the matched blocks in the wrong order."""

    def load(self, match, blocks, **options):
        return super().load(match, [*blocks][::-1], **options)


class Spills(InlineConnector):
    """Writes into a block beside those that it was given."""

    def load(self, match, blocks, **options):
        job = super().load(match, blocks, **options)
        self.kv[(max(blocks) + 1) % 32] += 1
        return job

    def __init__(self, manager, kv):
        super().__init__(manager, kv)
        self.kv = kv


class SaysLoaded(InlineConnector):
    """Reports a load that failed as if it had not."""

    def poll(self):
        ended = self._copier.poll()
        for one in ended:
            self._report(one)
        return [replace(one, ok=True) for one in ended]


class SaysSaved(InlineConnector):
    """Commits a save whose copy failed."""

    def poll(self):
        ended = [replace(one, ok=True) for one in self._copier.poll()]
        for one in ended:
            self._report(one)
        return ended


class CommitsEarly(InlineConnector):
    """Commits a save as soon as its copy begins, so its slots can be used again."""

    def _start(self, job):
        super()._start(job)
        if job.direction == "offload":
            self._report(Finished(job.id, True, 0, 0.0))


class FreesEarly(Engine):
    """Gives blocks to other requests while they are being saved."""

    def reusable(self, block):
        return True


class KeepsPins(InlineConnector):
    """Never releases what it has loaded."""

    def _report(self, finished):
        job = self._jobs.get(finished.id)
        if job is not None and job.job.direction == "onboard" and finished.ok:
            job.holds.release = lambda: None
        return super()._report(finished)


class NoFloors(InlineConnector):
    """Forgets what the blocks before were worth."""

    def save(self, *args, parent_floor=PRIORITY_MAX, **options):
        return super().save(*args, **options)


class NoPriorities(InlineConnector):
    """Ignores priorities."""

    def save(self, *args, priorities=None, **options):
        return super().save(*args, **options)


class SharesSalts(Engine):
    """Leaves the salt out of the names."""

    def keys(self, tokens, salt):
        return super().keys(tokens, "")


class FindsMore(Engine):
    """Names blocks by their own tokens, without those before."""

    def keys(self, tokens, salt):
        size = 16
        parts = [tokens[at : at + size] for at in range(0, len(tokens), size)]
        return [super(FindsMore, self).keys(part[-1:] * size, salt)[0] for part in parts]


class Misses(InlineConnector):
    """Saves, and finds only the half of it."""

    def match(self, keys, **options):
        return super().match(keys[: len(keys) // 2], **options)


class Waits(InlineConnector):
    """Waits for the tiers on the engine's thread."""

    def match(self, keys, **options):
        match = super().match(keys, **options)
        match.wait()
        return match


class ClosesFirst(Engine):
    """Closes the cache before the copies have ended."""

    def close(self):
        self.manager.close()
        self.connector.close()


class CopiesAgain(InlineConnector):
    """Copies blocks that are cached, too."""

    def save(self, keys, blocks, **options):
        self.match(keys).forget()
        return super().save(keys, blocks, **options)


class HostOnly(InlineConnector):
    """Reads no level below host."""

    def match(self, keys, **options):
        return super().match(keys, **{**options, "levels": ["host"]})


class FindsByIndex(Engine):
    """Promises what the index has, before the tier has answered."""

    def match(self, tokens, *, salt=""):
        self.promised = self.manager.lookup(self.keys(tokens, salt)).total
        return super().match(tokens, salt=salt)

    def found(self, match):
        return self.promised if match.done else None


for broken in [*InlineConnector.__subclasses__(), *Engine.__subclasses__()]:
    kind = "engine_class" if issubclass(broken, Engine) else "connector_class"
    name = f"Test{broken.__name__}"
    globals()[name] = type(name, (Broken,), {kind: broken, "__module__": __name__})
'''

FINDS = {
    "WrongBytes": "what_was_saved_is_loaded_byte_for_byte[2]",
    "Spills": "what_was_saved_is_loaded_byte_for_byte[5]",
    "Misses": "what_was_saved_is_loaded_byte_for_byte[1]",
    "HostOnly": "blocks_come_back_from_a_cold_tier",
    "FindsMore": "a_miss_is_a_miss",
    "CopiesAgain": "saved_blocks_are_not_copied_again",
    "SharesSalts": "salts_share_nothing",
    "NoPriorities": "low_priorities_are_evicted_first",
    "NoFloors": "a_block_counts_no_more_than_its_prefix[pieces2]",
    "FindsByIndex": "a_damaged_block_ends_the_prefix",
    "SaysLoaded": "a_failed_load_leaves_no_loaded_block",
    "SaysSaved": "a_failed_save_is_not_found",
    "CommitsEarly": "a_save_in_flight_is_not_overwritten",
    "FreesEarly": "a_save_in_flight_is_not_overwritten",
    "KeepsPins": "released_blocks_can_be_evicted_and_found_ones_cannot",
    "Waits": "a_hanging_tier_holds_up_no_call",
    "ClosesFirst": "the_copies_end_before_the_cache",
}
"""The test that must find each fault."""

LONGEST = 2000
"""Characters of a line; pytest compares two blocks for minutes to show how they differ."""


@pytest.mark.slow
def test_each_broken_rule_is_found(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    monkeypatch.setenv("CI", "1")  # pytest shows whole values there
    path = pytester.makepyfile(BROKEN)
    wanted = [f"{path.name}::Test{name}::test_{test}" for name, test in FINDS.items()]
    options = ("-p", "kvladder.testing.plugin", "-p", "no:cacheprovider", "-q", "-rfE")
    result = pytester.runpytest_subprocess(*options, f"{path.name}::TestSound", *wanted)
    lines = result.outlines
    bad = {line.split(" - ")[0].split(" ", 1)[1] for line in lines if line.startswith("FAILED ")}
    assert bad == set(wanted), "\n".join(lines)
    assert max(map(len, lines)) < LONGEST, "the bytes of blocks are shown"


def test_every_test_of_the_suite_finds_a_fault() -> None:
    tests = {name.removeprefix("test_") for name in vars(ConnectorTests) if name[:5] == "test_"}
    assert tests == {test.split("[")[0] for test in FINDS.values()}
