"""A request's lookup changes its state only as its README says."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from kvladder.connectors.vllm.groups import VllmGroup, VllmGroups
from kvladder.connectors.vllm.requests.lookup import NEXT, LookupState, RequestLookup
from kvladder.connectors.vllm.requests.state import BESIDE, RequestState
from kvladder.gpu.copy.copier import JobId
from tests.kit.source import ROOT

PAGE = ROOT / "connectors" / "vllm" / "README.md"


class FakeFind:
    """A search that has found something."""

    unasked = 3

    def __init__(self) -> None:
        self.released = False

    def release(self) -> None:
        self.released = True


def search(lookup: RequestLookup) -> None:
    find: Any = FakeFind()
    lookup.search(find)


def load(lookup: RequestLookup, jobs: int) -> None:
    lookup.take()
    lookup.loading.update(map(JobId, range(jobs)))
    lookup.begun()


def end(lookup: RequestLookup, *, ok: bool) -> None:
    lookup.ended(min(lookup.loading, default=JobId(-1)), ok=ok)


CALLS: dict[str, Callable[[RequestLookup], object]] = {
    "search": search,
    "found": lambda one: one.tell(8, 16),
    "found for other tokens": lambda one: one.tell(16, 8),
    "nothing": lambda one: one.tell(8, 0),
    "drop": RequestLookup.drop,
    "load of two groups": lambda one: load(one, 2),
    "load of nothing": lambda one: load(one, 0),
    "copied": lambda one: end(one, ok=True),
    "copy fails": lambda one: end(one, ok=False),
    "fail": RequestLookup.fail,
}


class Recorded(RequestLookup):
    """A lookup that records its steps."""

    steps: ClassVar[set[tuple[LookupState, LookupState]]] = set()

    def _become(self, state: LookupState) -> None:
        before = self.state
        super()._become(state)
        self.steps.add((before, state))


def lookup_after(names: tuple[str, ...]) -> RequestLookup:
    lookup = Recorded()
    for name in names:
        CALLS[name](lookup)
    return lookup


def test_every_order_of_calls_keeps_to_the_states() -> None:
    """All orders of up to five calls; a call that a state forbids is an error.

    Each step that is allowed occurs in one of them.
    """
    Recorded.steps.clear()
    orders: list[tuple[str, ...]] = [()]
    for _ in range(5):
        longer: list[tuple[str, ...]] = []
        for order in orders:
            for name, call in CALLS.items():
                lookup = lookup_after(order)
                try:
                    call(lookup)
                except AssertionError:
                    continue
                lookup.check()
                longer.append((*order, name))
        orders = longer
    assert Recorded.steps == {(one, other) for one, others in NEXT.items() for other in others}


def rows(head: str) -> dict[str, list[str]]:
    """The cells of the README's table that begins with ``head``, by state."""
    if not PAGE.is_file():
        pytest.skip("a wheel has no README")
    lines = PAGE.read_text(encoding="utf-8").partition(head + "\n")[2].split("\n\n")[0]
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines.splitlines()[1:]]
    return {state: rest for state, *rest in cells}


def test_the_readme_has_the_steps_of_the_code() -> None:
    found = rows("| state | `find` | `answer` | `loading` | then |")
    told = {state: frozenset(cells[-1].split(", ")) for state, cells in found.items()}
    assert told == {one.name: frozenset(o.name for o in NEXT[one]) for one in LookupState}


def test_the_readme_has_the_flags_beside_each_state() -> None:
    found = rows("| state | begun | apart | adapter None |")
    assert {state: tuple(cells) for state, cells in found.items()} == {
        one.name: BESIDE[one] for one in LookupState
    }


def test_an_answer_is_dropped_with_the_search_that_it_is_about() -> None:
    lookup = lookup_after(("search", "found"))
    find: Any = lookup.find
    lookup.drop()
    assert (find.released, lookup.find, lookup.answer) == (True, None, None)


def test_a_failed_copy_lasts_and_the_other_groups_copies_still_end() -> None:
    lookup = lookup_after(("search", "found", "load of two groups"))
    assert lookup.ended(JobId(0), ok=False)
    assert (lookup.state, lookup.loading) == (LookupState.COMPUTES, {JobId(1)})
    assert not lookup.ended(JobId(1), ok=True)
    assert not lookup.ended(JobId(7), ok=False), "a copy of another request"
    lookup.drop()
    assert lookup.state is LookupState.COMPUTES


@pytest.mark.parametrize("state", LookupState)
def test_flags_that_a_state_excludes_are_noticed(state: LookupState) -> None:
    order = {
        LookupState.IDLE: (),
        LookupState.SEARCHING: ("search",),
        LookupState.FOUND: ("search", "found"),
        LookupState.NOTHING: ("nothing",),
        LookupState.LOADING: ("search", "found", "load of two groups"),
        LookupState.COMPUTES: ("fail",),
    }[state]
    groups = VllmGroups([VllmGroup(0, "full", 4, 1)])
    for begun in (False, True):
        for apart in (False, True):
            for adapter in (b"", None):
                one = RequestState(SimpleNamespace(), groups, adapter, lookup=lookup_after(order))
                one.begun, one.apart = begun, apart
                begins, _, unknown = BESIDE[state]
                right = begun or begins == "may"
                right &= adapter is not None or {"may": True, "if apart": apart}.get(unknown, False)
                if right:
                    one.check()
                    continue
                with pytest.raises(AssertionError):
                    one.check()
