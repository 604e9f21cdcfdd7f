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
from typing import Final

import msgspec

from kvladder.connectors.listener import (
    UNREADABLE,
    InvalidMessage,
    LocalListener,
    PeerLine,
    abstract,
    connect,
)
from kvladder.connectors.trtllm.step import Meeting, RankHello
from kvladder.gpu.copy.copier import Finished
from kvladder.manager import CacheManager
from kvladder.notices import Notices

HELLO_MAX: Final = 1 << 20
"""Largest first message in bytes, of a process that has not told the secret yet."""
MESSAGE_MAX: Final = 16 << 20
"""Largest message of a rank in bytes: enough for some hundred thousand ended jobs."""

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
            self._lines = LocalListener(self.address, notices.say)
            self._lines.begin(self._hear)

    def report_to(self, manager: CacheManager) -> None:
        """Add what the ranks hold to a cache's statistics and description."""
        if self._lines is not None:
            manager.report("ranks", self._lines.counts, self._described)

    def _described(self) -> list[str]:
        assert self._lines is not None
        most = f"{MESSAGE_MAX >> 20} MiB, before its secret {HELLO_MAX >> 20} MiB"
        return [*self._lines.describe(), f"  a message has at most {most}"]

    @property
    def complete(self) -> bool:
        """True if all ranks are connected, with the tensors that they should have."""
        return len(self._here) == self._others

    def ended(self) -> list[Finished]:
        """Return the copies that ended on the other ranks since the last call."""
        return [self._ended.popleft() for _ in range(len(self._ended))]

    def _hear(self, line: PeerLine) -> None:
        try:
            hello = _hello(line.request(HELLO_MAX))
        except UNREADABLE as error:
            raise InvalidMessage(
                f"is not a rank of this engine, and was refused: {error}"
            ) from error
        rank = hello.rank
        if not self._admits(hello):
            return
        self._here.add(rank)
        try:
            while True:
                self._ended.extend(_ended(line.request(MESSAGE_MAX)))
        except UNREADABLE as error:
            what = f"sent an invalid message as rank {rank}, nothing more is cached: {error}"
            raise InvalidMessage(what) from error
        finally:
            self._here.discard(rank)  # an engine that loses a rank ends soon after

    def _admits(self, hello: RankHello) -> bool:
        """Return whether this is a rank of this engine that may copy; report why if not.

        Raises InvalidMessage if it is not a rank of this engine.
        """
        rank = hello.rank
        if not hmac.compare_digest(hello.secret, self.secret):
            raise InvalidMessage("does not know this engine's secret, and was refused")
        if not 1 <= rank <= self._others or rank in self._here:
            what = f"{rank}: it is connected already, or not from 1 to {self._others}"
            raise InvalidMessage(f"was refused as rank {what}")
        wrong = {
            name: value for name, value in hello.fields.items() if self._fields.get(name) != value
        }
        if wrong:
            what = ", ".join(f"{name} {value}" for name, value in sorted(wrong.items()))
            self._notices.say(
                "ranks", f"rank {rank} has other tensors than rank 0, nothing is cached: {what}"
            )
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
