"""A fetch changes its state as the ladder's README says, and releases each pin once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from kvladder.arena import NO_SLOT, Slot
from kvladder.keys import BlockKey
from kvladder.metrics import MissCause, Missed
from kvladder.tiers.ladder.loading.fetch import Fetch, FetchState, SetFetch
from tests.kit.source import ROOT

pytestmark = pytest.mark.slow

PAGE = ROOT / "tiers" / "ladder" / "README.md"
DEADLINE_S = 10.0
KEYS = [BlockKey(bytes([n]) * 32) for n in range(16)]
KINDS: list[type[Fetch]] = [Fetch, SetFetch]


class Trial:
    """A fetch between a loader and an engine that call it in any order."""

    def __init__(self, kind: type[Fetch], steps: set[tuple[FetchState, FetchState]]) -> None:
        self.now_s = 0.0
        self.pinned: list[Slot] = []
        self._next = 0

        class Recorded(kind):  # type: ignore[valid-type, misc]
            def __setattr__(self, name: str, value: Any) -> None:
                if name == "_state" and "_state" in vars(self) and self._state is not value:
                    steps.add((self._state, value))
                super().__setattr__(name, value)

        unreleased = SimpleNamespace(lost=(), add=self._lose)
        clock = SimpleNamespace(now=lambda: self.now_s)
        shared: Any = SimpleNamespace(lock=threading.RLock(), clock=clock, unreleased=unreleased)
        stack: Any = self
        self.fetch: Fetch = Recorded(KEYS, stack=stack, shared=shared, deadline_s=DEADLINE_S)
        self.kind = kind

    def _lose(self, kind: str, give_back: Callable[[], object]) -> None:
        raise AssertionError(f"a {kind} was lost")

    # ---- calls of a fetch

    def unpin(self, keys: Sequence[BlockKey], slots: Sequence[Slot]) -> None:
        del keys
        for slot in slots:
            if slot != NO_SLOT:
                self.pinned.remove(slot)  # raises if it was given back before

    def late(self, levels: Sequence[str]) -> None:
        assert levels

    def discard(self, keys: Sequence[BlockKey]) -> None:
        del keys

    def missed(self, keys: Sequence[BlockKey], first: int, cause: MissCause) -> tuple[Missed, ...]:
        assert not self.fetch.missed, "the blocks were counted before"
        return (Missed(*cause, len(keys) - first),)

    # ---- calls of the loader and the engine

    def _pin(self) -> Slot:
        self._next += 1
        self.pinned.append(Slot(self._next))
        return self.pinned[-1]

    def _waited(self) -> int | None:
        waited = range(self.fetch.length)
        return next((index for index in waited if self.fetch.waits_for([index])), None)

    def ask(self) -> None:
        self.fetch.ask(asking=True)

    def stop(self) -> None:
        self.fetch.ask(asking=False)

    def find(self) -> None:
        if self.fetch.asking:
            self.fetch.fill([self._pin()], "host")

    def begin(self) -> None:
        if self.fetch.asking:
            self.fetch.extend([NO_SLOT], ["files"])

    def arrive(self) -> None:
        index = self._waited()
        if index is not None:
            self.fetch.arrived([index], [self._pin()], "files")

    def fail(self) -> None:
        index = self._waited()
        if index is not None:
            was_asking = self.fetch.asking
            self.fetch.failed(index, MissCause("files", "lost"))
            assert self.fetch.asking == (was_asking and self.kind is SetFetch)

    def wait(self) -> None:
        self.fetch.wait(0.0)

    def poll(self) -> None:
        before = self.fetch.done
        assert before <= self.fetch.done, "a final answer stays final"

    def expire(self) -> None:
        self.now_s = DEADLINE_S
        assert self.fetch.done

    def release(self) -> None:
        self.fetch.release()

    def forget(self) -> None:
        self.fetch.forget()


CALLS = [
    Trial.ask, Trial.stop, Trial.find, Trial.begin, Trial.arrive, Trial.fail, Trial.wait,
    Trial.poll, Trial.expire, Trial.release, Trial.forget,
]  # fmt: skip


def expected() -> set[tuple[FetchState, FetchState]]:
    """The steps of the README's table."""
    if not PAGE.is_file():
        pytest.skip("a wheel has no README")
    lines = PAGE.read_text(encoding="utf-8").partition("## States of a fetch")[2].splitlines()
    table = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if "|" in line]
    found = {row[0]: [name for name in row[-1].split(", ") if name] for row in table[2:6]}
    assert list(found) == ["PENDING", "ASKING", "ANSWERED", "RELEASED"]
    return {(FetchState[one], FetchState[other]) for one in found for other in found[one]}


@pytest.mark.parametrize("kind", KINDS)
def test_every_order_of_calls_keeps_to_the_states(kind: type[Fetch]) -> None:
    """All orders of four calls, between the first read and a release."""
    steps = set[tuple[FetchState, FetchState]]()
    orders: list[tuple[Callable[[Trial], None], ...]] = [()]
    for _ in range(4):
        orders = [(*order, call) for order in orders for call in CALLS]
    for order in orders:
        trial = Trial(kind, steps)
        for call in (Trial.ask, Trial.find, Trial.begin, *order, Trial.release):
            call(trial)
            trial.fetch.check()
        assert not trial.pinned, "a block stays pinned"
        assert trial.fetch.done
    assert steps == expected()


@pytest.mark.parametrize("kind", KINDS)
def test_a_final_answer_stays_final_if_the_loader_still_asks(kind: type[Fetch]) -> None:
    trial = Trial(kind, set())
    trial.ask()
    trial.find()
    trial.expire()
    trial.ask()
    assert not trial.fetch.asking
    assert (trial.fetch.done, trial.fetch.blocks) == (True, 1)
    trial.release()
    trial.ask()
    assert not trial.fetch.asking
    trial.release()
    assert trial.fetch.done
