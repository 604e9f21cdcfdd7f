"""Which server a command goes to: the only one, the one that Sentinels name, or a cluster's."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Sequence

from redis.crc import REDIS_CLUSTER_HASH_SLOTS, key_slot

from kvladder.errors import TierError
from kvladder.tiers.redis.nodes import Asking, Client, Closed, Command, Entrance, Node
from kvladder.tiers.redis.resp import Reply, ReplyError, Wire, encode
from kvladder.tiers.redis.url import Address, RedisOptions

ROUNDS_MAX = 5
"""How often a command is sent again because a cluster moved its key."""
SILENT_S = 1.0
"""How long a server that did not answer in time is not asked again."""
UNSERVED = "no server of the cluster serves its slot"
Outcome = Reply | TierError
"""What came of a command; an error of one server does not hide what the others say."""


class Servers(ABC):
    """Sends commands where they belong."""

    def __init__(self, options: RedisOptions, entrance: Entrance) -> None:
        self._options = options
        self._entrance = entrance

    @abstractmethod
    async def run(
        self, commands: Sequence[Command], limit_s: float | None = None
    ) -> Sequence[Outcome]:
        """One outcome per command, in their order; one pipelined batch per server.

        What one server of several has not answered after ``limit_s`` has failed.
        """

    @abstractmethod
    async def addresses(self) -> list[Address]:
        """Where the servers are that take writes.

        Raises
        ------
        TierError
            That cannot be found out.
        """

    @abstractmethod
    async def where(self, key: bytes) -> Address:
        """The server that has this key; raises as ``addresses`` does."""

    @abstractmethod
    def close(self) -> None:
        """Break every connection."""


class OneServer(Servers):
    """A standalone server, or the master that Sentinels name whenever a connection is made."""

    def __init__(self, options: RedisOptions, entrance: Entrance) -> None:
        super().__init__(options, entrance)
        self._node = Node(self._connect, options.connections)

    async def _connect(self) -> tuple[Wire, Client]:
        (address,) = await self.addresses()
        return await self._entrance.wire(address)

    async def addresses(self) -> list[Address]:
        if self._options.sentinel:
            return [await self._entrance.master()]
        return list(self._options.parsed.addresses)

    async def where(self, key: bytes) -> Address:
        return (await self.addresses())[0]

    async def run(
        self, commands: Sequence[Command], limit_s: float | None = None
    ) -> Sequence[Outcome]:
        del limit_s  # if it does not answer, nobody does
        try:
            replies = await self._node.exchange(commands)
            if self._options.sentinel and any(_says(reply, "READONLY") for reply in replies):
                self._node.drop_idle()  # it is the master no longer
                replies = await self._node.exchange(commands)
        except TierError as error:
            return [error] * len(commands)
        return replies

    def close(self) -> None:
        self._node.close()


class ClusterServers(Servers):
    """The primaries of a cluster; which of them has a slot is learnt from them, and learnt anew."""

    def __init__(self, options: RedisOptions, entrance: Entrance) -> None:
        super().__init__(options, entrance)
        self._nodes: dict[Address, Node] = {}
        self._owners: list[Address | None] = [None] * REDIS_CLUSTER_HASH_SLOTS
        self._asking = Asking()
        self._learning: asyncio.Task[None] | None = None
        self._silent: dict[Address, float] = {}
        """When to ask those again that did not answer in time."""
        self._closed = False

    async def run(
        self, commands: Sequence[Command], limit_s: float | None = None
    ) -> Sequence[Outcome]:
        end_s = None if limit_s is None else asyncio.get_running_loop().time() + limit_s
        outcomes: list[Outcome] = [TierError("its key is moved about")] * len(commands)
        slots = [key_slot(command.key) for command in commands]
        left: Sequence[int] = range(len(commands))
        asked: dict[int, Address] = {}
        lost: set[int] = set()
        for _ in range(ROUNDS_MAX):
            batches: dict[Address, list[int]] = {}
            unserved = TierError(UNSERVED)
            if any(self._owners[slots[i]] is None for i in left if i not in asked):
                try:
                    await self._learnt()
                except TierError as error:
                    unserved = error
            for i in left:
                owner = asked.get(i) or self._owners[slots[i]]
                if owner is None:
                    outcomes[i] = unserved
                else:
                    batches.setdefault(owner, []).append(i)
            await self._send(commands, batches, asked, outcomes, end_s)
            asked = {}
            left = [
                i
                for owner, batch in batches.items()
                for i in batch
                if self._again(i, slots[i], owner, outcomes[i], asked, lost)
            ]
            if not left or (end_s is not None and asyncio.get_running_loop().time() >= end_s):
                break
        return outcomes

    def _again(
        self,
        i: int,
        slot: int,
        owner: Address,
        outcome: Outcome,
        asked: dict[int, Address],
        lost: set[int],
    ) -> bool:
        """Whether to send a command again, because its key is elsewhere or its server gone."""
        if isinstance(outcome, TierError):
            if self._owners[slot] == owner:
                self._forget(owner)
            is_first = i not in lost
            lost.add(i)
            return is_first and not self._closed
        if isinstance(outcome, ReplyError) and outcome.code in {"MOVED", "ASK"}:
            host, _, port = str(outcome).split(" ")[2].rpartition(":")
            there = Address(host or owner.host, int(port))
            if outcome.code == "ASK":
                asked[i] = there
            else:
                self._owners[slot] = there
            return True
        return False

    def _forget(self, owner: Address) -> None:
        """Learn anew who has the slots of a server that does not answer."""
        self._owners = [None if known == owner else known for known in self._owners]

    async def _send(
        self,
        commands: Sequence[Command],
        batches: dict[Address, list[int]],
        asked: dict[int, Address],
        outcomes: list[Outcome],
        end_s: float | None,
    ) -> None:
        """Send each server its batch, all at once, and note the outcomes."""

        async def send(owner: Address, batch: list[int]) -> None:
            wanted: list[Command] = []
            for i in batch:
                if i in asked:
                    wanted.append(ASKING)
                wanted.append(commands[i])
            try:
                async with asyncio.timeout_at(end_s):
                    replies: Sequence[Outcome] = await self._node(owner).exchange(wanted)
            except TierError as error:
                replies = [error] * len(wanted)
            except TimeoutError:
                self._silent[owner] = asyncio.get_running_loop().time() + SILENT_S
                replies = [TierError(f"{owner} does not answer")] * len(wanted)
            except asyncio.CancelledError:
                self._forget(owner)
                raise
            answers = [r for r, command in zip(replies, wanted, strict=True) if command != ASKING]
            for i, answer in zip(batch, answers, strict=True):
                outcomes[i] = answer

        if len(batches) == 1:
            await send(*next(iter(batches.items())))
            return
        async with asyncio.TaskGroup() as group:
            for owner, batch in batches.items():
                group.create_task(send(owner, batch))

    def _node(self, address: Address) -> Node:
        if asyncio.get_running_loop().time() < self._silent.get(address, 0.0):
            raise TierError(f"{address} did not answer in time")
        node = self._nodes.get(address)
        if node is None:
            if self._closed:
                raise Closed
            node = Node(lambda: self._entrance.wire(address), self._options.connections)
            self._nodes[address] = node
        return node

    async def _learnt(self) -> None:
        """Wait until the owners are learnt anew, which goes on if whoever waits gives up."""
        if self._closed:
            raise Closed
        if self._learning is None:
            self._learning = asyncio.create_task(self._learn(), name="kvladder-redis-slots")
            self._learning.add_done_callback(self._has_learnt)
        learning = self._learning
        await asyncio.wait({learning})
        if learning.cancelled():
            raise Closed
        learning.result()

    def _has_learnt(self, learning: asyncio.Task[None]) -> None:
        self._learning = None
        if not learning.cancelled():
            learning.exception()  # seen: asyncio must not report it as lost

    async def _learn(self) -> None:
        """Ask the servers which of them serves which slots."""

        async def ask(address: Address) -> list[tuple[int, int, Address]]:
            ranges = await self._entrance.ask(address, "CLUSTER", "SLOTS")
            return [
                (first, last, Address((primary[0] or address.host.encode()).decode(), primary[1]))
                for first, last, primary, *_ in ranges
            ]

        known = dict.fromkeys([*self._nodes, *self._options.parsed.addresses])
        ranges = await self._asking.first(known, ask)
        self._owners = [None] * REDIS_CLUSTER_HASH_SLOTS
        for first, last, owner in ranges:
            self._owners[first : last + 1] = [owner] * (last + 1 - first)

    async def addresses(self) -> list[Address]:
        if None in self._owners:  # those of a server that did not answer are not known
            await self._learnt()
        owners = {owner for owner in self._owners if owner is not None}
        if not owners:
            raise TierError("no server of the cluster serves a slot")
        return sorted(owners)

    async def where(self, key: bytes) -> Address:
        slot = key_slot(key)
        if self._owners[slot] is None:
            await self._learnt()
        owner = self._owners[slot]
        if owner is None:
            raise TierError(UNSERVED)
        return owner

    def close(self) -> None:
        self._closed = True
        if self._learning is not None:
            self._learning.cancel()
        for node in self._nodes.values():
            node.close()


ASKING = Command(b"", encode(b"ASKING"))


def _says(outcome: Outcome, code: str) -> bool:
    return isinstance(outcome, ReplyError) and outcome.code == code
