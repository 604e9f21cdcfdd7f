"""The connection of an engine's ranks to rank 0's process, which owns the cache, over a socket.

TensorRT-LLM sends metadata from rank 0 to the others, but only the ids of finished requests back.
A block may be published only when the copies of all ranks have ended, so the ranks report them
here. Messages are MessagePack, so a stranger's message may be refused but is never executed.
Containers that share a network also share the names of these sockets: a stranger may be root in
another container.
"""

from __future__ import annotations

import hmac
import os
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Final

import msgspec

from kvladder.connectors.listener import LocalListener, abstract, connect
from kvladder.connectors.trtllm.step import Meeting, RankHello
from kvladder.gpu.copy.copier import Finished
from kvladder.notices import Notices

MESSAGE_MAX: Final = 16 << 20
"""Largest message in bytes: enough for some hundred thousand ended jobs."""

_encode: Final = msgspec.msgpack.Encoder().encode
_hello: Final = msgspec.msgpack.Decoder(RankHello).decode
_ended: Final = msgspec.msgpack.Decoder(list[Finished]).decode


class Ranks:
    """The other ranks, as rank 0 knows them.

    Each rank is served by a thread, which ends with the rank's process or with ``close``.

    Parameters
    ----------
    others:
        Number of other ranks.
    fields:
        Description of tensors that each rank's own must equal.
    """

    def __init__(self, others: int, fields: Mapping[str, str], notices: Notices) -> None:
        self._others = others
        self._fields = dict(fields)
        self._notices = notices
        self._here: set[int] = set()
        self._ended: deque[Finished] = deque()
        self.address = abstract(os.urandom(16).hex())
        """Address of the socket."""
        self.secret = os.urandom(16)
        """Secret that a rank must send first."""
        self._lines: LocalListener | None = None
        if others:
            self._lines = LocalListener(self.address, self._say)
            self._lines.begin(self._hear)

    def _say(self, text: str) -> None:
        self._notices.say("ranks", text)

    @property
    def complete(self) -> bool:
        """True if all ranks are connected, with the tensors that they should have."""
        return len(self._here) == self._others

    def ended(self) -> list[Finished]:
        """Return the copies that ended on the other ranks since the last call."""
        return [self._ended.popleft() for _ in range(len(self._ended))]

    def _hear(self, connection: Connection) -> None:
        assert self._lines is not None
        try:
            hello = _hello(connection.recv_bytes(MESSAGE_MAX))
        except msgspec.MsgspecError as error:
            self._say(f"a process that is not a rank of this engine was refused: {error}")
            return
        rank = hello.rank
        if not self._admits(hello):
            return
        self._here.add(rank)
        try:
            while self._lines.heard(connection):
                self._ended.extend(_ended(connection.recv_bytes(MESSAGE_MAX)))
        except msgspec.MsgspecError as error:
            self._say(f"rank {rank} sent an invalid message, nothing more is cached: {error}")
        finally:
            self._here.discard(rank)  # an engine that loses a rank ends soon after

    def _admits(self, hello: RankHello) -> bool:
        """Return whether this is a rank of this engine that may copy; report why if not."""
        rank = hello.rank
        if not hmac.compare_digest(hello.secret, self.secret):
            self._say("a process that does not know this engine's secret was refused")
            return False
        if not 1 <= rank <= self._others or rank in self._here:
            self._say(
                f"rank {rank} was refused: it is connected already, or not from 1 to {self._others}"
            )
            return False
        wrong = {
            name: value for name, value in hello.fields.items() if self._fields.get(name) != value
        }
        if wrong:
            what = ", ".join(f"{name} {value}" for name, value in sorted(wrong.items()))
            self._say(f"rank {rank} has other tensors than rank 0, nothing is cached: {what}")
        return not wrong

    def close(self) -> None:
        """Disconnect all ranks. May be called again."""
        if self._lines is not None:
            self._lines.close()


class Rank:
    """The connection of another rank to rank 0. Belongs to the thread that copies."""

    def __init__(self, meeting: Meeting, rank: int, fields: Mapping[str, str]) -> None:
        self._connection = connect(meeting.address)
        hello = RankHello(rank, meeting.secret, dict(fields))
        self._connection.send_bytes(_encode(hello))

    def tell(self, ended: Sequence[Finished]) -> None:
        """Report copies that have ended on this rank."""
        with suppress(OSError):  # rank 0 is gone, and the engine with it
            self._connection.send_bytes(_encode(list(ended)))

    def close(self) -> None:
        self._connection.close()
