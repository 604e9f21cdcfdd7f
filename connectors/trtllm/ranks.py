"""How the ranks of one engine meet: over a socket of the process that owns the cache.

TensorRT-LLM carries metadata from rank 0 to the others, and back only which requests are over.
Whether a block may be named is decided by the copies of all ranks, so they tell it here.
Messages are MessagePack: what a stranger sends is refused, and never run. A stranger may be root in
another container, where containers share a network, since they then share these sockets' names.
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
"""Bytes of one message: some hundred thousand jobs that ended."""

_encode: Final = msgspec.msgpack.Encoder().encode
_hello: Final = msgspec.msgpack.Decoder(RankHello).decode
_ended: Final = msgspec.msgpack.Decoder(list[Finished]).decode


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
        self.secret = os.urandom(16)
        """What they show there."""
        self._lines: LocalListener | None = None
        if others:
            self._lines = LocalListener(self.address, self._say)
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
        assert self._lines is not None
        try:
            hello = _hello(connection.recv_bytes(MESSAGE_MAX))
        except msgspec.MsgspecError as error:
            self._say(f"a process that is no rank of this engine was turned away: {error}")
            return
        rank = hello.rank
        if not self._admits(hello):
            return
        self._here.add(rank)
        try:
            while self._lines.heard(connection):
                self._ended.extend(_ended(connection.recv_bytes(MESSAGE_MAX)))
        except msgspec.MsgspecError as error:
            self._say(f"rank {rank} sent what is no message, nothing more is cached: {error}")
        finally:
            self._here.discard(rank)  # and with it the engine, in a moment

    def _admits(self, hello: RankHello) -> bool:
        """Return whether this is a rank of this engine that may copy; say why if it may not."""
        rank = hello.rank
        if not hmac.compare_digest(hello.secret, self.secret):
            self._say("a process that does not know this engine's secret was turned away")
            return False
        if not 1 <= rank <= self._others or rank in self._here:
            self._say(f"rank {rank} was turned away: it is here already, or there is none such")
            return False
        wrong = {
            name: value for name, value in hello.fields.items() if self._fields.get(name) != value
        }
        if wrong:
            what = ", ".join(f"{name} {value}" for name, value in sorted(wrong.items()))
            self._say(f"rank {rank} has other tensors, nothing is cached: {what}")
        return not wrong

    def close(self) -> None:
        """Hear nobody any more; may be called again."""
        if self._lines is not None:
            self._lines.close()


class Rank:
    """One of the others, as itself. Belongs to the thread that copies."""

    def __init__(self, meeting: Meeting, rank: int, fields: Mapping[str, str]) -> None:
        self._connection = connect(meeting.address)
        hello = RankHello(rank, meeting.secret, dict(fields))
        self._connection.send_bytes(_encode(hello))

    def tell(self, ended: Sequence[Finished]) -> None:
        """These copies are over here."""
        with suppress(OSError):  # rank 0 is gone, and the engine with it
            self._connection.send_bytes(_encode(list(ended)))

    def close(self) -> None:
        self._connection.close()
