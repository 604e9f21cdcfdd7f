"""The suite for hints finds each kind of engine that breaks a rule of the protocol."""

from __future__ import annotations

import os
import sys

import pytest

from kvladder.testing import HintTests

BROKEN = '''
import time
from dataclasses import replace

import numpy as np
import pytest
import torch

from kvladder import Layout, open_cache
from kvladder.connectors.inline import InlineConnector
from kvladder.hints import ActionResult, HintExecutor
from kvladder.hints.protocol import read
from kvladder.testing import ConnectorEngine, HintedSample, HintTests, Served


class Plain(ConnectorEngine):
    def __init__(self, stack, blocks):
        self.kv = torch.zeros(blocks, 2, 16, 64)
        layout = Layout(block_tokens=16, block_bytes=self.kv[0].nbytes)
        super().__init__(InlineConnector(open_cache(stack, layout=layout), self.kv))

    def write(self, block, data):
        self.kv[block].view(torch.uint8).numpy().reshape(-1)[:] = np.frombuffer(data, np.uint8)

    def read(self, block):
        return self.kv[block].numpy().tobytes()


class Sound(HintedSample):
    def __init__(self, stack):
        super().__init__(Plain(stack, 8), block_tokens=16, blocks=range(8), patience_s=5.0)

    def each(self, envelope, change):
        """Change the actions of an envelope that are well-formed."""
        if not isinstance(envelope, dict) or "actions" not in envelope:
            return super().hint(envelope)
        actions = [change(dict(one)) for one in envelope["actions"]]
        return super().hint({**envelope, "actions": actions})


def claims(engine, envelope, verb, blocks=4):
    """Answer that a verb was done, and do nothing."""
    return [
        ActionResult(one.action_id, "accepted", "", blocks) for one in read(envelope).actions
        if one.action_type == verb
    ]


def ignoring(verb):
    class Ignoring(Sound):
        def hint(self, envelope):
            try:
                return claims(self, envelope, verb) or super().hint(envelope)
            except ValueError:
                return super().hint(envelope)
    return Ignoring


IgnoresPins, IgnoresRetain, NoPrefetch, KeepsHost, NoShare = map(
    ignoring, ("pin", "retain", "prefetch", "demote", "share"))


class PinsForGood(Sound):
    def hint(self, envelope):
        def change(one):
            if one["action_type"] == "pin":
                one["payload"] = {**one["payload"], "ttl_s": 1e6}
            return one
        return self.each(envelope, change)


class IgnoresBudget(Sound):
    def hint(self, envelope):
        def change(one):
            one["payload"] = {k: v for k, v in one["payload"].items() if k != "budget_blocks"}
            return one
        return self.each(envelope, change)


class DemotesForOut(Sound):
    def hint(self, envelope):
        def change(one):
            if one["payload"].get("to") == "out":
                one["payload"] = {**one["payload"], "to": "cold"}
            return one
        return self.each(envelope, change)


class LeaksSalts(Sound):
    """Looks for the blocks of any salt."""

    def hint(self, envelope):
        def change(one):
            if "salt" in one["payload"]:
                one["payload"] = {**one["payload"], "salt": "one"}
            return one
        return self.each(envelope, change)


class IgnoresLimits(Sound):
    def hint(self, envelope):
        return [one._replace(outcome="accepted", why="") if one.outcome == "clipped" else one
                for one in super().hint(envelope)]


class Waits(Sound):
    """Waits until prefetched blocks are there."""

    def hint(self, envelope):
        results = super().hint(envelope)
        end = time.monotonic() + 10.0
        while self.manager.stats()["hints"]["in_flight"] and time.monotonic() < end:
            time.sleep(0.01)
        return results


class TakesAll(Sound):
    """Keeps any number of hints for later."""

    def hint(self, envelope):
        return [one._replace(outcome="deferred") if one.outcome == "rejected" else one
                for one in super().hint(envelope)]


class Scribbles(Sound):
    """Overwrites bytes of host when it is to pin them."""

    def hint(self, envelope):
        results = super().hint(envelope)
        arena = self.manager.arena
        for slot in range(arena.slots):
            arena.view(slot)[:1] = b"x"
        return results


class DoesAgain(Sound):
    def hint(self, envelope):
        if isinstance(envelope, dict) and envelope.get("message_id") == "same":
            self.n = getattr(self, "n", 0) + 1
            envelope = {**envelope, "message_id": f"same {self.n}"}
        return super().hint(envelope)


class OneSpoilsAll(Sound):
    def hint(self, envelope):
        results = super().hint(envelope)
        if any(one.outcome == "rejected" for one in results):
            return [one._replace(outcome="rejected", why="another one is wrong") for one in results]
        return results


class Raises(Sound):
    def hint(self, envelope):
        read(envelope)
        return super().hint(envelope)


class AnswersSome(Sound):
    def hint(self, envelope):
        return super().hint(envelope)[:64]


class DropsRequestPins(Sound):
    """Answers the hints of requests to pin, and does not pin."""

    def serve(self, tokens, *, salt="", hints=None):
        if hints is None or hints["actions"][0]["action_type"] != "pin":
            return super().serve(tokens, salt=salt, hints=hints)
        served = super().serve(tokens, salt=salt)
        return Served(served.loaded, [ActionResult("a0", "accepted")])


class NeverEnds(Sound):
    """Answers that a request will be demoted, and forgets it."""

    def serve(self, tokens, *, salt="", hints=None):
        if hints is None or hints["actions"][0]["action_type"] != "demote":
            return super().serve(tokens, salt=salt, hints=hints)
        served = super().serve(tokens, salt=salt)
        return Served(served.loaded, [ActionResult("a0", "deferred")])


class AnyRequest(Sound):
    """Lets a request name the blocks of another salt."""

    def serve(self, tokens, *, salt="", hints=None):
        served = super().serve(tokens, salt=salt)
        return served if hints is None else Served(served.loaded, self.hint(hints))


class Base(HintTests):
    patience_s = 1.0
    engine_class = Sound

    @pytest.fixture
    def make(self):
        return self.engine_class


class TestSound(Base):
    patience_s = 300.0


for name, broken in list(globals().items()):
    if isinstance(broken, type) and issubclass(broken, Sound) and broken is not Sound:
        globals()[f"Test{name}"] = type(
            f"Test{name}", (Base,), {"engine_class": broken, "__module__": __name__})
'''

FINDS = {
    "IgnoresPins": "pinned_blocks_outlast_newer_ones",
    "PinsForGood": "a_pin_ends_with_its_time",
    "IgnoresRetain": "retained_blocks_are_evicted_by_priority",
    "NoPrefetch": "prefetched_blocks_are_read_before_their_request",
    "IgnoresBudget": "a_budget_bounds_a_prefetch",
    "KeepsHost": "demoted_blocks_leave_host_for_the_level",
    "DemotesForOut": "blocks_that_are_demoted_out_are_forgotten",
    "NoShare": "shared_blocks_are_found_by_another_engine",
    "LeaksSalts": "no_verb_reaches_another_salt[retain]",
    "IgnoresLimits": "limits_hold",
    "Waits": "a_hint_waits_for_no_tier",
    "TakesAll": "a_flood_is_bounded",
    "Scribbles": "random_hints_change_no_byte",
    "DoesAgain": "a_repeated_message_is_not_done_again",
    "OneSpoilsAll": "a_wrong_action_is_refused_alone[wrong1]",
    "Raises": "what_is_no_envelope_is_rejected[{]",
    "AnswersSome": "actions_beyond_the_limit_are_rejected",
    "DropsRequestPins": "a_request_is_pinned_by_its_own_hint",
    "NeverEnds": "a_request_leaves_host_when_it_has_finished",
    "AnyRequest": "a_requests_hints_reach_only_its_salt",
}
"""The test that must find each fault."""


@pytest.mark.slow
def test_each_broken_rule_is_found(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    path = pytester.makepyfile(BROKEN)
    wanted = [f"{path.name}::Test{name}::test_{test}" for name, test in FINDS.items()]
    options = ("-p", "kvladder.testing.plugin", "-p", "no:cacheprovider", "-q", "-rfE")
    sound = [f"{path.name}::TestSound::test_{test}" for test in FINDS.values()]
    result = pytester.runpytest_subprocess(*options, *sound, *wanted)
    lines = result.outlines
    bad = {line.split(" - ")[0].split(" ", 1)[1] for line in lines if line.startswith("FAILED ")}
    assert bad == set(wanted), "\n".join(lines)


def test_every_test_of_the_suite_finds_a_fault() -> None:
    tests = {name.removeprefix("test_") for name in vars(HintTests) if name[:5] == "test_"}
    assert tests == {test.split("[")[0] for test in FINDS.values()}
