"""Records what requests ask: one line a request, in Mooncake's format, written by a thread.

An id is 53 bits of a hash of the block's key, keyed by random bytes that exist only in this
process: it says nothing about tokens, cannot be linked to a key or to another recording, needs no
table, and fits the numbers of JSON readers that use doubles.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Final, Literal, NamedTuple

import msgspec

from kvladder.keys import BlockKey
from kvladder.traces.files import TraceFiles

EVENTS_MAX: Final = 4096
"""Largest number of events that wait for the thread; further ones are dropped and counted."""
BLOCKS_MAX: Final = 1 << 18
"""Largest number of blocks in these events, and in the requests that have not finished."""
OPEN_MAX: Final = 4096
"""Largest number of requests that have not finished; beyond it the oldest is written as it is."""
CLOSE_S: Final = 5.0
"""Time for which closing waits for the thread, which a disk may hold up."""
ID_BITS: Final = 53
_encode: Final = msgspec.json.Encoder().encode

Kind = Literal["asked", "arrived", "saved", "finished"]
Keys = Sequence[BlockKey]
Asked = tuple[int, int]
"""Positions of the first block that is asked for, and of the one after the last."""


class _RecordEvent(NamedTuple):
    kind: Kind
    at_s: float
    request: Hashable
    keys: Keys = ()
    tokens: int = 0
    asked: Asked | None = None
    answer: Keys = ()


@dataclass(slots=True)
class _OpenLine:
    """A request that is not written yet."""

    at_s: float
    keys: Keys
    input_tokens: int
    number: int
    """Position of its arrival among the arrivals, saves and ends of all requests."""
    saved: int | None = None
    """Position of the save of its prompt; None if that was not told."""
    ended: int | None = None
    """Position of its end."""
    output_tokens: int = 0
    asked: Asked | None = None
    answer: Keys = ()
    is_over: bool = False


@dataclass(slots=True)
class RecordCounts:
    """Counters of a recording."""

    requests: int = 0
    """Requests written."""
    bytes: int = 0
    dropped: int = 0
    """Requests left out because the thread or the disk did not keep up, or a line is too long."""
    unnamed: int = 0
    """Requests left out because their blocks have no names."""
    failures: int = 0
    """Writes that failed."""

    def as_dict(self) -> dict[str, int]:
        """Return the numbers by name."""
        return {name: getattr(self, name) for name in self.__slots__}


class Recorder:
    """Takes what an engine's threads tell and writes it from a thread of its own.

    ``asked`` is for lookups without a request's name: the same keys again, with no save between,
    are the same request, looked up once more. ``arrived`` and ``finished`` are for connectors that
    know requests; from the first ``arrived`` on, ``asked`` does nothing. None of them waits.

    Parameters
    ----------
    now:
        The clock, monotonic seconds.
    say:
        Takes the kind and the text of a warning.
    block_tokens:
        Tokens of a block, for lookups that do not say how many tokens the prompt has.
    """

    def __init__(
        self,
        files: TraceFiles,
        *,
        now: Callable[[], float],
        say: Callable[[str, str], object],
        block_tokens: int,
    ) -> None:
        self.counts = RecordCounts()
        self._files = files
        self._now = now
        self._say = say
        self._tokens = block_tokens
        self._secret = os.urandom(32)
        self._begun_s = now()
        self._last: Keys = ()
        self._names_requests = False
        self._ready = threading.Condition()
        self._events: deque[_RecordEvent] = deque()
        self._blocks = 0
        """Number of blocks in ``_events``."""
        self._happened = 0
        """Number of arrivals, saves and ends so far."""
        self._closing = False
        self._open: OrderedDict[Hashable, _OpenLine] = OrderedDict()
        self._open_blocks = 0
        self._is_ill = False
        """True after a write failed, until one succeeds: it is said once."""
        self._thread = threading.Thread(target=self._work, name="kvladder-record", daemon=True)
        self._thread.start()

    # ---- for the engine's threads

    def asked(self, keys: Keys) -> None:
        """Record a lookup of a prompt's blocks."""
        if not self._names_requests and keys and keys != self._last:
            self._last = keys
            self._put(_RecordEvent("asked", self._now(), None, keys, len(keys) * self._tokens))

    def saves(self) -> None:
        """Note that blocks are saved: the next lookup is another request's."""
        self._last = ()

    def arrived(self, request: Hashable, keys: Keys, tokens: int) -> None:
        """Record a request when it arrives; later calls for it, before it has finished, do nothing.

        ``keys`` are empty as long as its blocks have no names; ``tokens`` is its prompt's length.
        """
        self._names_requests = True
        self._put(_RecordEvent("arrived", self._now(), request, keys, tokens))

    def saved(self, request: Hashable) -> None:
        """Record that the save of a request's whole prompt has begun; once for each request."""
        self._put(_RecordEvent("saved", self._now(), request))

    def finished(
        self,
        request: Hashable,
        keys: Keys,
        output_tokens: int,
        *,
        asked: Asked | None = None,
        answer: Keys = (),
    ) -> None:
        """Record that a request has finished; ``keys`` count if it had none when it arrived.

        ``asked`` are the positions of the first of its prompt's blocks that the cache was asked
        for, and of the one after the last; None if it is not known. ``answer`` are the blocks that
        were saved beyond the prompt.
        """
        now_s = self._now()
        self._put(_RecordEvent("finished", now_s, request, keys, output_tokens, asked, answer))

    def _put(self, event: _RecordEvent) -> None:
        blocks = len(event.keys) + len(event.answer)
        with self._ready:
            is_full = len(self._events) >= EVENTS_MAX or self._blocks + blocks > BLOCKS_MAX
            if self._closing or is_full:
                self.counts.dropped += event.kind in ("asked", "arrived")
                return
            self._blocks += blocks
            self._events.append(event)
            self._ready.notify()

    def stats(self) -> dict[str, Any]:
        """Return the counters."""
        return self.counts.as_dict()

    def close(self) -> None:
        """Write what has been told, requests that have not finished too, and end the thread."""
        with self._ready:
            self._closing = True
            self._ready.notify()
        self._thread.join(CLOSE_S)
        if self._thread.is_alive():
            self._say("record", f"{self._files.path} does not answer: the recording is cut")

    # ---- the thread

    def _work(self) -> None:
        while True:
            with self._ready:
                while not self._events and not self._closing:
                    self._ready.wait()
                events = list(self._events)
                self._events.clear()
                self._blocks = 0
                is_last = self._closing
            for event in events:
                self._take(event)
                self._write_finished()
            if is_last:
                break
        for line in self._open.values():
            self._write(line)
        self._open.clear()
        self._files.close()

    def _take(self, event: _RecordEvent) -> None:
        if event.kind == "asked":
            self._begin(object(), event).is_over = True
        elif event.kind == "arrived":
            if event.request not in self._open:
                self._begin(event.request, event)
        elif (line := self._open.get(event.request)) is None:
            return
        elif event.kind == "saved":
            line.saved = self._next() if line.saved is None else line.saved
        else:
            line.output_tokens, line.is_over, line.ended = event.tokens, True, self._next()
            line.asked, line.answer = event.asked, event.answer
            self._open_blocks += len(event.answer)
            if not line.keys:
                line.keys = event.keys
                self._open_blocks += len(event.keys)

    def _begin(self, request: Hashable, event: _RecordEvent) -> _OpenLine:
        line = _OpenLine(event.at_s, event.keys, event.tokens, self._next())
        self._open[request] = line
        self._open_blocks += len(line.keys)
        return line

    def _next(self) -> int:
        self._happened += 1
        return self._happened

    def _write_finished(self) -> None:
        """Write requests in the order of their arrival, as far as the oldest have finished."""
        while self._open:
            request, line = next(iter(self._open.items()))
            is_crowded = len(self._open) > OPEN_MAX or self._open_blocks > BLOCKS_MAX
            if not line.is_over and not is_crowded:
                return
            del self._open[request]
            self._open_blocks -= len(line.keys) + len(line.answer)
            self._write(line)

    def _write(self, line: _OpenLine) -> None:
        if not line.keys and line.input_tokens >= self._tokens:
            self.counts.unnamed += 1
            return
        text = _encode(self._as_line(line)) + b"\n"
        try:
            is_written = self._files.write(text)
        except OSError as error:
            self.counts.failures += 1
            self.counts.dropped += 1
            if not self._is_ill:
                why = error.strerror or str(error)
                what = f"requests are not recorded: {self._files.path}: {why}"
                self._say("record", f"{what}; serving does not depend on it")
            self._is_ill = True
            return
        self._is_ill = False
        self.counts.dropped += not is_written
        self.counts.requests += is_written
        self.counts.bytes += len(text) * is_written

    def _as_line(self, line: _OpenLine) -> dict[str, Any]:
        found: dict[str, Any] = {
            "timestamp": int((line.at_s - self._begun_s) * 1000),
            "input_length": line.input_tokens,
            "output_length": line.output_tokens,
            "hash_ids": [self._id(key) for key in line.keys],
        }
        if line.asked is not None:  # of a prompt that goes on with its answer, there may be more
            found["asked"] = [min(at, len(line.keys)) for at in line.asked]
        if self._names_requests:
            ended = self._next() if line.ended is None else line.ended
            found["order"] = [line.number, ended if line.saved is None else line.saved, ended]
        if line.answer:
            found["output_hash_ids"] = [self._id(key) for key in line.answer]
        return found

    def _id(self, key: BlockKey) -> int:
        digest = blake2b(key, digest_size=8, key=self._secret).digest()
        return int.from_bytes(digest) >> (64 - ID_BITS)
