"""One request's lookup in the cache: the search, what vLLM was told, and the loads."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Final

from kvladder.connectors.vllm.requests.find import Find
from kvladder.gpu.copy.copier import JobId
from kvladder.metrics import Missed


class LookupState(Enum):
    """What the cache does for a request; ``README.md`` says which call leads to which state."""

    IDLE = "idle"
    """Nothing is searched for, found or loaded."""
    SEARCHING = "searching"
    """A search pins blocks, or waits for them. vLLM has no answer from it."""
    FOUND = "found"
    """vLLM was told how many tokens the search has found, and may load them."""
    NOTHING = "nothing"
    """vLLM was told that nothing was found."""
    LOADING = "loading"
    """Copies fill the request's blocks."""
    COMPUTES = "computes"
    """A load failed. Nothing is searched for or loaded any more; saves continue."""


_IDLE, _SEARCHING, _FOUND = LookupState.IDLE, LookupState.SEARCHING, LookupState.FOUND
_NOTHING, _LOADING, _COMPUTES = LookupState.NOTHING, LookupState.LOADING, LookupState.COMPUTES

NEXT: Final[Mapping[LookupState, frozenset[LookupState]]] = {
    _IDLE: frozenset({_SEARCHING, _NOTHING, _COMPUTES}),
    _SEARCHING: frozenset({_IDLE, _FOUND, _LOADING}),
    _FOUND: frozenset({_IDLE, _FOUND, _LOADING}),
    _NOTHING: frozenset({_IDLE, _SEARCHING, _COMPUTES}),
    _LOADING: frozenset({_IDLE, _COMPUTES}),
    _COMPUTES: frozenset({_COMPUTES}),
}
"""The states that may follow each state."""


class RequestLookup:
    """The lookup of one request; ``state`` says which of the other attributes are in use."""

    def __init__(self) -> None:
        self.state = LookupState.IDLE
        self.find: Find | None = None
        """The search, while SEARCHING and FOUND."""
        self.answer: tuple[int, int] | None = None
        """Number of tokens that vLLM had itself, and number of further tokens that were found.

        It is there while FOUND and NOTHING. While SEARCHING there may be one that says "nothing",
        for another number of vLLM's own tokens: it still holds if vLLM asks for that again.
        """
        self.loading: set[JobId] = set()
        """The copies in flight that fill the request's blocks, one for each group.

        They are there while LOADING. While COMPUTES, copies of other groups than the failed one
        may still be in flight, so this set is no part of the state.
        """
        self.pins = 0
        """Number of blocks that ``find`` pins, as last counted."""
        self.unasked = 0
        """Number of tokens that the last search found in no level."""
        self.missed: tuple[Missed, ...] = ()
        """Why the last search got less than the levels had, if it did."""

    def _become(self, state: LookupState) -> None:
        assert state in NEXT[self.state], f"a lookup goes from {self.state} to {state}"
        self.state = state

    def search(self, find: Find) -> None:
        """Keep a search that has just begun."""
        self._become(_SEARCHING)
        self.find, self.unasked, self.missed = find, find.unasked, ()

    def tell(self, own: int, found: int) -> None:
        """Record the answer that vLLM gets: ``found`` tokens after its ``own`` ones."""
        self._become(_FOUND if found else _NOTHING)
        self.answer = (own, found)

    def drop(self) -> None:
        """Release the search and forget the answer, which was about it; keep loads and failures."""
        if self.find is not None:
            self.find.release()
            self.find = None
        self.answer = None
        if self.state not in (_IDLE, _LOADING, _COMPUTES):
            self._become(_IDLE)

    def take(self) -> Find:
        """Return the search, whose blocks are loaded now."""
        self.answer, find, self.find = None, self.find, None
        assert find is not None, f"nothing was found to be loaded: {self.state}"
        self._become(_LOADING)
        return find

    def begun(self) -> None:
        """Record that all copies of a load were begun; there may be none."""
        if not self.loading:
            self._become(_IDLE)

    def fail(self) -> None:
        """Load nothing any more."""
        self.answer = None
        self._become(_COMPUTES)

    def ended(self, job_id: JobId, *, ok: bool) -> bool:
        """Record the end of a copy; return whether it was one of this lookup's and failed."""
        if job_id not in self.loading:
            return False
        self.loading.discard(job_id)
        if not ok:
            self.fail()
        elif not self.loading and self.state is _LOADING:
            self._become(_IDLE)
        return not ok

    def check(self) -> None:
        """Assert that the attributes are those of the state; for tests."""
        assert (self.find is not None) == (self.state in (_SEARCHING, _FOUND)), self.state
        found = None if self.answer is None else self.answer[1]
        if self.state is _FOUND:
            assert found
        elif self.state is _NOTHING:
            assert found == 0
        else:
            assert found is None or (found == 0 and self.state is _SEARCHING), self.state
        assert bool(self.loading) <= (self.state in (_LOADING, _COMPUTES)), self.state
        assert self.loading or self.state is not _LOADING
        assert self.pins == 0 or self.find is not None
