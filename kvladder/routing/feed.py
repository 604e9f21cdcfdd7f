"""Follows one engine's KV events into an index. Replay fills gaps; a lost engine is forgotten."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final, cast

import msgspec

from kvladder.errors import needed

with needed("events"):
    import zmq
    import zmq.asyncio
    from zmq.utils.monitor import recv_monitor_message

from kvladder.publishing.wire import END, TOO_OFTEN, Hash
from kvladder.routing.index import Index

WHOLE_PREFIX: Final = frozenset({None, "full_attention", "mla_attention", "sink_full_attention"})
"""Kinds of vLLM's groups that hold a prefix as a whole. Of a window only the end stays."""


MESSAGE_MAX: Final = 64 << 20
"""Highest size of one frame in bytes. A prompt of 10^6 tokens takes 5 MB per group of layers."""
WAITING_MAX: Final = 100
"""Highest number of messages queued in this process; further ones are queued at the engine."""
REFUSED: Final = (msgspec.MsgspecError, ValueError, TypeError, RecursionError)
"""Errors that an invalid message raises while it is decoded or told to the index."""
GROUPS_MAX: Final = 256
"""Highest number of skipped groups of layers of one engine."""
POSTPONED_S: Final = 1.0
"""Seconds until the feed repeats a request for a replay that was refused as too frequent."""
NUMBER_MAX: Final = (1 << 63) - 2
"""Highest number of a message, so that the next number still fits into 63 bits."""


class EngineEvent(msgspec.Struct):
    """An event of vLLM, SGLang or kvladder, with the fields that an index needs."""

    type: str
    block_hashes: list[Hash] = []
    parent_block_hash: Hash | None = None
    token_ids: list[int] = []
    block_size: int = 0
    medium: str | None = None
    lora_name: str | None = None
    cache_salt: str | None = None
    """Cache salt, set by SGLang only; vLLM puts it into the first block's extra keys."""
    extra_keys: list[list[Any] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    ownership: str | None = None

    @property
    def level(self) -> str:
        """Name of the level that holds the blocks; a medium may have several levels."""
        medium = self.medium or "GPU"
        return medium if self.ownership is None else f"{medium}/{self.ownership}"

    @property
    def extra(self) -> Mapping[int, Sequence[Any]]:
        """Further inputs of a block's content besides tokens and adapter, by its position."""
        found: dict[int, list[Any]] = {}
        for number, keys in enumerate(self.extra_keys or ()):
            # vLLM puts the adapter's name first; ``lora_name`` has it already.
            skipped = 1 if keys and self.lora_name is not None else 0
            if keys and len(keys) > skipped:
                found[number] = keys[skipped:]
        if self.cache_salt is not None and self.parent_block_hash is None:
            found[0] = [*found.get(0, ()), self.cache_salt]
        return found


class EngineEventBatch(msgspec.Struct, array_like=True):
    """One message. Its events are decoded one by one, as some may be of a later version."""

    ts: float
    events: list[msgspec.Raw]


class Feed:
    """Follows one engine that publishes over ZeroMQ as vLLM does.

    Start ``run`` as a task for as long as the engine exists. After its cancellation the index has
    forgotten the engine.

    Parameters
    ----------
    engine:
        Name of the engine in matches. Each rank of data parallelism is an engine of its own, with
        its own addresses.
    publish, replay:
        The addresses of its sockets. Without ``replay``, a gap makes the index forget the engine.
    replay_s:
        Timeout of a whole replay.
    forget_s:
        Seconds after which a disconnected engine is forgotten.
    message_max:
        Highest number of bytes in a frame. An engine that sends a larger one is disconnected. It is
        reconnected once it has been forgotten.
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
        """Counters: ``batches`` applied, ``gaps`` in their numbers, batches ``lost`` for good,
        ``restarts`` of the engine, ``refused`` messages and events, replays that the engine
        ``postponed`` because this address asks too often."""
        self.connected = asyncio.Event()
        """Set while the engine is connected and the replay of earlier messages is done."""
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
        """Time at which the last applied message was sent, by the engine's clock."""
        self._skipped: set[int | None] = set()
        """Groups of layers that do not hold whole prefixes; their events are ignored."""
        self._forgetting: asyncio.TimerHandle | None = None
        """Timer that forgets the engine; runs while it is disconnected."""
        self._decode = msgspec.msgpack.Decoder(EngineEventBatch).decode
        self._event = msgspec.msgpack.Decoder(EngineEvent).decode

    async def run(self) -> None:
        """Follow the engine until cancelled."""
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
        """Return whether a message ends a replay, its number (None if invalid) and its payload.

        Of a message that ends a replay it is the topic, which may say why nothing was replayed.
        """
        topic, sent, payload = frames[-3:] if len(frames) >= 3 else (b"", b"", b"")
        if sent == END:
            return True, None, topic
        number = int.from_bytes(sent) if len(sent) == len(END) else NUMBER_MAX + 1
        if number <= NUMBER_MAX:
            return False, number, payload
        self.counts["refused"] += 1
        return False, None, b""

    async def _changed(self, *, there: bool) -> None:
        """Handle a connection that was made (``there``) or lost."""
        self._stay()
        if there:
            await self._met()
            self.connected.set()
        else:
            self.connected.clear()
            loop = asyncio.get_running_loop()
            self._forgetting = loop.call_later(self._forget_s, self._give_up)

    def _give_up(self) -> None:
        """Forget the engine and reconnect. ZeroMQ does not do so after a message over the limit."""
        self._reset(0)
        with suppress(zmq.ZMQError):  # there may be no connection
            self._socket.disconnect(self._publish)
        self._socket.connect(self._publish)

    def _stay(self) -> None:
        """Cancel the timer that forgets the engine."""
        if self._forgetting is not None:
            self._forgetting.cancel()

    async def _met(self) -> None:
        """Replay missed messages after a connection; if the engine restarted, forget it first."""
        if self._next and not await self._again(self._next - 1):
            self.counts["restarts"] += 1
            self._reset(0)
        if not self._next:
            await self._again(0)

    async def _take(self, number: int, payload: bytes) -> None:
        """Apply a message; if earlier ones are missing, replay them first."""
        if number < self._next and self._sent_s(payload) > self._last_s:
            self.counts["restarts"] += 1  # a later message with a lower number: counting restarted
            self._reset(0)
            await self._again(0)
        self._next = self._next or number  # nothing is known yet: none is missing
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
        """Forget what the engine holds, and expect the message of this number next."""
        self._index.forget(self.engine)
        self._next, self._last_s = number, 0.0

    async def _again(self, first: int) -> bool:
        """Ask for a replay of the messages from ``first`` on, and apply those that are new.

        An engine that is asked too often is asked again a little later. Return whether the replay
        contained the message applied last, unchanged: then the engine has not restarted.
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
                    if is_end and payload == TOO_OFTEN:
                        self.counts["postponed"] += 1
                        await asyncio.sleep(POSTPONED_S)
                        await socket.send_multipart([b"", first.to_bytes(8)])
                        continue
                    if is_end:
                        break
                    if number is None:
                        continue
                    if number == self._next - 1:
                        same = self._sent_s(payload) == self._last_s
                        if not same:
                            break
                    if not self._next and number:
                        self._next = number  # earlier messages are no longer kept
                    if number == self._next:
                        self._apply(number, payload)
        return same

    def _apply(self, number: int, payload: bytes) -> None:
        """Tell the index the events of a message; count invalid ones and continue."""
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
                    raise ValueError(f"expected at most {GROUPS_MAX} groups with windows")
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
            raise ValueError(f"{event.type}: expected one of vLLM's events")
