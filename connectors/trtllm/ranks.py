"""How the ranks of one engine meet: over a socket of the process that owns the cache.

TensorRT-LLM carries metadata from rank 0 to the others, and back only which requests are over.
Whether a block may be named is decided by the copies of all ranks, so they tell it here.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from pickle import UnpicklingError

from kvladder.connectors.lines import GONE, Lines, abstract, connect
from kvladder.connectors.trtllm.step import Hello, Meeting
from kvladder.gpu.copy.copier import Finished
from kvladder.notices import Notices


class Ranks:
    """The other ranks, as rank 0 knows them. Their threads end with their processes, or ``close``.

    Parameters
    ----------
    others:
        How many there are.
    fields:
        What each of them has to say of its tensors.
    """

    def __init__(self, others: int, fields: Mapping[str, str], notices: Notices) -> None:
        self._others = others
        self._fields = dict(fields)
        self._notices = notices
        self._here: set[int] = set()
        self._ended: deque[Finished] = deque()
        self.address = abstract(os.urandom(16).hex())
        """Where they come."""
        self._lines: Lines | None = None
        if others:
            self._lines = Lines(self.address, self._say)
            self._lines.begin(self._hear)

    def _say(self, text: str) -> None:
        self._notices.say("ranks", text)

    @property
    def complete(self) -> bool:
        """Whether all are here, and have the tensors that they should have."""
        return len(self._here) == self._others

    def ended(self) -> list[Finished]:
        """What ended on them since the last call."""
        return [self._ended.popleft() for _ in range(len(self._ended))]

    def _hear(self, connection: Connection) -> None:
        rank = 0
        assert self._lines is not None
        with suppress(*GONE, UnpicklingError):
            hello: Hello = connection.recv()
            rank = hello.rank
            wrong = {
                name: value
                for name, value in hello.fields.items()
                if self._fields.get(name) != value
            }
            if wrong:
                what = ", ".join(f"{name} {value}" for name, value in sorted(wrong.items()))
                self._say(f"rank {rank} has other tensors, nothing is cached: {what}")
                return
            self._here.add(rank)
            while self._lines.heard(connection):
                self._ended.extend(connection.recv())
        self._here.discard(rank)  # and with it the engine, in a moment

    def close(self) -> None:
        """Hear nobody any more; may be called again."""
        if self._lines is not None:
            self._lines.close()


class Rank:
    """One of the others, as itself. Belongs to the thread that copies."""

    def __init__(self, meeting: Meeting, hello: Hello) -> None:
        self._connection = connect(meeting.address)
        self._connection.send(hello)

    def tell(self, ended: Sequence[Finished]) -> None:
        """These copies are over here."""
        with suppress(OSError):  # rank 0 is gone, and the engine with it
            self._connection.send(list(ended))

    def close(self) -> None:
        self._connection.close()
