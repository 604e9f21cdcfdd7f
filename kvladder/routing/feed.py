"""Follows one engine's KV events into an index: gaps filled by replay, silence bounded in time."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final, cast

import msgspec
import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from kvladder.publishing.wire import END, Hash
from kvladder.routing.index import Index

WHOLE_PREFIX: Final = frozenset({None, "full_attention", "mla_attention", "sink_full_attention"})
"""Kinds of vLLM's groups whose blocks say how long a prefix is; of a window only its end stays."""


MESSAGE_MAX: Final = 64 << 20
"""Bytes of one frame. A prompt of 10^6 tokens takes some 5 MB for each group of layers."""
WAITING_MAX: Final = 100
"""Messages that wait in this process; further ones wait at the engine."""
REFUSED: Final = (msgspec.MsgspecError, ValueError, TypeError, RecursionError)
"""What decoding a message, or telling the index of it, raises where it is no event."""
GROUPS_MAX: Final = 256
"""Groups of layers of one engine."""
NUMBER_MAX: Final = (1 << 63) - 2
"""The highest number of a message: one more is still a number."""


class EngineEvent(msgspec.Struct):
    """An event of vLLM's, SGLang's or kvladder's, as much of it as an index needs."""

    type: str
    block_hashes: list[Hash] = []
    parent_block_hash: Hash | None = None
    token_ids: list[int] = []
    block_size: int = 0
    medium: str | None = None
    lora_name: str | None = None
    cache_salt: str | None = None
    """Of SGLang; vLLM has it among the first block's extra keys."""
    extra_keys: list[list[Any] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    ownership: str | None = None

    @property
    def level(self) -> str:
        """Where the blocks are; a medium may have several levels."""
        medium = self.medium or "GPU"
        return medium if self.ownership is None else f"{medium}/{self.ownership}"

    @property
    def extra(self) -> Mapping[int, Sequence[Any]]:
        """What a block's content depends on beside tokens and adapter."""
        found: dict[int, list[Any]] = {}
        for number, keys in enumerate(self.extra_keys or ()):
            skipped = 1 if keys and self.lora_name is not None else 0
            if keys and len(keys) > skipped:
                found[number] = keys[skipped:]
        if self.cache_salt is not None and self.parent_block_hash is None:
            found[0] = [*found.get(0, ()), self.cache_salt]
        return found


class EngineEventBatch(msgspec.Struct, array_like=True):
    """One message; its events are decoded one by one, since one may be of a later version."""

    ts: float
    events: list[msgspec.Raw]


class Feed:
    """Follows one engine, which publishes over ZeroMQ as vLLM does.

    ``run`` it as a task for as long as the engine is there. When it is cancelled, the index has
    forgotten the engine.

    Parameters
    ----------
    engine:
        What matches call it; each rank of data parallelism is one, with addresses of its own.
    publish, replay:
        The addresses of its sockets. Without ``replay``, a gap makes the index forget the engine.
    replay_s:
        How long the whole of a replay may take.
    forget_s:
        How long an engine may be away until what it held is forgotten.
    message_max:
        How many bytes a frame of a message may have. An engine that sends a larger one is
        disconnected, and connected again when it has been forgotten.
    """

    def __init__(
        self,
        index: Index,
        engine: str,
        publish: str,
        *,
        replay: str | None = None,
        topic: str = "",
        replay_s: float = 10.0,
        forget_s: float = 30.0,
        message_max: int = MESSAGE_MAX,
    ) -> None:
        self.engine = engine
        self.counts = Counter[str]()
        """``batches`` that were taken in, ``gaps`` in their numbers, ``lost`` ones that no replay
        filled, ``restarts`` of the engine, ``refused`` events."""
        self.connected = asyncio.Event()
        """Set while its address answers, and what it held before is known."""
        self._index = index
        self._publish = publish
        self._replay = replay
        self._topic = topic.encode()
        self._replay_s = replay_s
        self._forget_s = forget_s
        self._message_max = message_max
        self._next = 0
        """The number of the next message."""
        self._last_s = 0.0
        """When the last one was sent, by the engine's clock."""
        self._skipped: set[int | None] = set()
        """Groups of layers that do not say how long a prefix is."""
        self._forgetting: asyncio.TimerHandle | None = None
        """Runs while it is away."""
        self._decode = msgspec.msgpack.Decoder(EngineEventBatch).decode
        self._event = msgspec.msgpack.Decoder(EngineEvent).decode

    async def run(self) -> None:
        """Follow it until this is cancelled."""
        self._context = zmq.asyncio.Context()
        self._socket = socket = cast("Any", self._context.socket(zmq.SUB))  # half of it is untyped
        socket.subscribe(self._topic)
        socket.rcvhwm = WAITING_MAX
        socket.maxmsgsize = self._message_max
        monitor = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        poller = zmq.asyncio.Poller()
        for one in (monitor, socket):
            poller.register(one, zmq.POLLIN)
        try:
            socket.connect(self._publish)
            while True:
                ready = dict(await poller.poll())
                if monitor in ready:  # before the messages of a new connection
                    said = await cast("Awaitable[Any]", recv_monitor_message(monitor))
                    await self._changed(there=said["event"] != zmq.EVENT_DISCONNECTED)
                elif socket in ready:
                    _, number, payload = self._frames(await socket.recv_multipart())
                    if number is not None:
                        await self._take(number, payload)
        finally:
            self._stay()
            self._index.forget(self.engine)
            socket.disable_monitor()
            self._context.destroy(linger=0)

    def _frames(self, frames: list[bytes]) -> tuple[bool, int | None, bytes]:
        """Return of a message whether it ends a replay, its number, if it has one, its payload."""
        sent, payload = frames[-2:] if len(frames) >= 3 else (b"", b"")
        if sent == END:
            return True, None, b""
        number = int.from_bytes(sent) if len(sent) == len(END) else NUMBER_MAX + 1
        if number <= NUMBER_MAX:
            return False, number, payload
        self.counts["refused"] += 1
        return False, None, b""

    async def _changed(self, *, there: bool) -> None:
        """It came, or came back, or went away."""
        self._stay()
        if there:
            await self._met()
            self.connected.set()
        else:
            self.connected.clear()
            loop = asyncio.get_running_loop()
            self._forgetting = loop.call_later(self._forget_s, self._give_up)

    def _give_up(self) -> None:
        """Forget the engine and reconnect; ZeroMQ does not after a message that is too large."""
        self._reset(0)
        with suppress(zmq.ZMQError):  # there is no connection to end
            self._socket.disconnect(self._publish)
        self._socket.connect(self._publish)

    def _stay(self) -> None:
        """What it held is not forgotten for its absence."""
        if self._forgetting is not None:
            self._forgetting.cancel()

    async def _met(self) -> None:
        """It is there, or there again: learn what it said meanwhile, if it is still the same."""
        if self._next and not await self._again(self._next - 1):
            self.counts["restarts"] += 1
            self._reset(0)
        if not self._next:
            await self._again(0)

    async def _take(self, number: int, payload: bytes) -> None:
        """A message came: number by number, or what is missing first."""
        if number < self._next and self._sent_s(payload) > self._last_s:
            self.counts["restarts"] += 1  # it begins to count again
            self._reset(0)
            await self._again(0)
        self._next = self._next or number  # nothing is known, so that nothing is missing
        if number > self._next:
            self.counts["gaps"] += 1
            await self._again(self._next)
        if number > self._next:
            self.counts["lost"] += number - self._next
            self._reset(number)
        if number == self._next:
            self._apply(number, payload)

    def _sent_s(self, payload: bytes) -> float:
        try:
            return self._decode(payload).ts
        except REFUSED:
            return 0.0

    def _reset(self, number: int) -> None:
        """What it holds is not known; the message of this number is the next."""
        self._index.forget(self.engine)
        self._next, self._last_s = number, 0.0

    async def _again(self, first: int) -> bool:
        """Have messages from a number on sent again, which may have been taken in already.

        Returns whether that of this number was among them, and is the one that was taken in.
        """
        if self._replay is None:
            return False
        same = False
        socket: Any = self._context.socket(zmq.DEALER)
        with socket, suppress(TimeoutError):
            socket.maxmsgsize = self._message_max
            socket.connect(self._replay)
            async with asyncio.timeout(self._replay_s):
                await socket.send_multipart([b"", first.to_bytes(8)])
                while True:
                    is_end, number, payload = self._frames(await socket.recv_multipart())
                    if is_end:
                        break
                    if number is None:
                        continue
                    if number == self._next - 1:
                        same = self._sent_s(payload) == self._last_s
                        if not same:
                            break
                    if not self._next and number:
                        self._next = number  # what came before it is not kept any more
                    if number == self._next:
                        self._apply(number, payload)
        return same

    def _apply(self, number: int, payload: bytes) -> None:
        """Tell the index; what it does not understand is counted, and the rest of it goes on."""
        self._next = number + 1
        self.counts["batches"] += 1
        try:
            batch = self._decode(payload)
        except REFUSED:
            self.counts["refused"] += 1
            return
        self._last_s = batch.ts
        for raw in batch.events:
            try:
                self._tell(self._event(raw))
            except REFUSED:
                self.counts["refused"] += 1

    def _tell(self, event: EngineEvent) -> None:
        if event.type == "AllBlocksCleared":
            self._index.forget(self.engine)
        elif event.type == "BlockStored":
            if event.kv_cache_spec_kind not in WHOLE_PREFIX:
                if len(self._skipped) == GROUPS_MAX:
                    raise ValueError(f"there are {GROUPS_MAX} groups of windows, expected no more")
                self._skipped.add(event.group_idx)
            if event.group_idx in self._skipped:
                return
            self._index.stored(
                self.engine,
                event.level,
                event.block_hashes,
                parent=event.parent_block_hash,
                tokens=event.token_ids,
                block_size=event.block_size,
                lora=event.lora_name,
                extra=event.extra,
            )
        elif event.type == "BlockRemoved":
            if event.group_idx not in self._skipped:
                self._index.removed(self.engine, event.level, event.block_hashes)
        else:
            raise ValueError(f"{event.type}: expected an event of vLLM's")
