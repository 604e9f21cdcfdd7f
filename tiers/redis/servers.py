"""Routing of commands to servers: to the only one, a Sentinel's master, or a cluster's nodes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Sequence
from itertools import chain
from typing import Any, TypeVar

from redis.crc import REDIS_CLUSTER_HASH_SLOTS, key_slot
from redis.exceptions import AskError

from kvladder.errors import TierError
from kvladder.tiers.redis.nodes import Closed, Entrance, Node, Unfit
from kvladder.tiers.redis.resp import Command, Reply, ReplyError, encode
from kvladder.tiers.redis.url import Address, RedisOptions

ROUNDS_MAX = 5
"""Most rounds of sending a command; a cluster may move its key, or a server may fail."""
HEAD_START_S = 0.05
"""Delay between asking one server and the next, where any of them may answer."""
SILENT_S = 1.0
"""Seconds for which a server that did not answer in time is not asked again."""
UNSERVED = TierError("no server of the cluster serves its slot")
ASKING = Command(b"", encode(b"ASKING"))
Outcome = Reply | TierError
"""Result of a command: its reply or an error. A server's error affects only its own commands."""
T = TypeVar("T")


class _Errand:
    """A batch of commands in flight, with their outcomes; commands are named by index."""

    def __init__(self, commands: Sequence[Command]) -> None:
        self.commands = commands
        self.slots = [key_slot(command.key) for command in commands]
        self.outcomes: list[Outcome] = [None] * len(commands)
        self.left: Sequence[int] = range(len(commands))
        """Commands to be sent, or sent again."""
        self.asked: dict[int, Address] = {}
        """Temporary server, by command, for keys in slots that are being moved (ASK)."""
        self.gone: set[Address] = set()
        """Servers that failed; this batch sends them nothing more."""


class Servers:
    """Sends each command to the server that owns its key.

    Keys lie in slots: a cluster has many, any other setup has one. The owner of a slot is looked
    up when unknown. It is forgotten when its server fails, since another may have taken over.
    """

    def __init__(self, options: RedisOptions, entrance: Entrance) -> None:
        self._options = options
        self._entrance = entrance
        self._nodes: dict[Address, Node] = {}
        slots = REDIS_CLUSTER_HASH_SLOTS if options.cluster else 1
        self._owners: list[Address | None] = [None] * slots
        self._learning: asyncio.Task[None] | None = None
        self._silent: dict[Address, float] = {}
        """Time from which a server that did not answer in time may be asked again."""
        self._closed = False

    def run(
        self, commands: Sequence[Command], limit_s: float | None = None
    ) -> Coroutine[Any, Any, Sequence[Outcome]]:
        """Run commands, pipelined to each server, and return one outcome per command, in order.

        In a cluster, commands not answered within ``limit_s`` fail.
        """
        is_alone = not self._options.cluster
        return self._run_alone(commands) if is_alone else self._run_all(commands, limit_s)

    async def _run_all(
        self, commands: Sequence[Command], limit_s: float | None
    ) -> Sequence[Outcome]:
        """Run commands in a cluster, where each server has some of the keys."""
        now = asyncio.get_running_loop().time
        end_s = None if limit_s is None else now() + limit_s
        errand = _Errand(commands)
        for _ in range(ROUNDS_MAX):
            batches = await self._batches(errand)
            if len(batches) == 1:
                ((owner, batch),) = batches.items()
                await self._send(errand, owner, batch, end_s)
            else:
                async with asyncio.TaskGroup() as group:
                    for owner, batch in batches.items():
                        group.create_task(self._send(errand, owner, batch, end_s))
            errand.asked = {}
            errand.left = [
                i
                for owner, batch in batches.items()
                for i in batch
                if isinstance(errand.outcomes[i], Exception) and self._again(errand, i, owner)
            ]
            if not errand.left or self._closed or (end_s is not None and now() >= end_s):
                break
        return errand.outcomes

    async def _run_alone(self, commands: Sequence[Command]) -> Sequence[Outcome]:
        """Run commands on the one server that has all keys; retry once if its owner changed."""
        tried: Address | None = None
        outcomes: Sequence[Outcome] = []
        while True:
            owner = self._owners[0]
            try:
                if owner is None:
                    (owner,) = await self.addresses()
                if owner == tried:
                    return outcomes
                outcomes = await self._node(owner).exchange(commands)
                if not (self._options.sentinel and any(map(_is_read_only, outcomes))):
                    return outcomes
            except TierError as error:
                outcomes = [error] * len(commands)
            except asyncio.CancelledError:
                self._forget(owner)
                raise
            if tried is not None or owner is None:
                return outcomes
            self._forget(owner)  # another may be the master by now
            tried = owner

    async def _batches(self, errand: _Errand) -> dict[Address, list[int]]:
        """Group the remaining commands by server; a command without a server gets an error."""
        unserved = UNSERVED
        if any(self._owners[errand.slots[i]] is None for i in errand.left if i not in errand.asked):
            try:
                await self._learnt()
            except TierError as error:
                unserved = error
        batches: dict[Address, list[int]] = {}
        for i in errand.left:
            owner = errand.asked.get(i) or self._owners[errand.slots[i]]
            if owner is None:
                errand.outcomes[i] = unserved
            elif owner not in errand.gone:
                batches.setdefault(owner, []).append(i)
        return batches

    def _again(self, errand: _Errand, i: int, owner: Address) -> bool:
        """Return whether to send a command again, as its key moved or its server failed."""
        outcome = errand.outcomes[i]
        if not isinstance(outcome, ReplyError):
            if owner not in errand.gone:
                errand.gone.add(owner)
                self._forget(owner)
            return True
        if outcome.code not in {"MOVED", "ASK"}:
            return False
        try:
            move: Any = AskError(str(outcome).removeprefix(outcome.code).strip())
            there = _address(move.host, move.port, owner)
        except ValueError:
            return False
        if outcome.code == "ASK":
            errand.asked[i] = there
        else:
            self._owners[errand.slots[i]] = there
        return True

    def _forget(self, owner: Address | None) -> None:
        """Forget which slots a server owns, so that their owner is looked up again."""
        if owner is not None and owner in self._nodes:
            self._nodes[owner].drop_idle()
        self._owners = [None if known == owner else known for known in self._owners]

    async def _send(
        self, errand: _Errand, owner: Address, batch: Sequence[int], end_s: float | None
    ) -> None:
        """Send a server its batch and note the outcomes."""
        wanted = [errand.commands[i] for i in batch]
        if errand.asked:
            asking = (
                [ASKING, errand.commands[i]] if i in errand.asked else [errand.commands[i]]
                for i in batch
            )
            wanted = list(chain.from_iterable(asking))
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
        if errand.asked:
            replies = [r for r, one in zip(replies, wanted, strict=True) if one is not ASKING]
        for i, reply in zip(batch, replies, strict=True):
            errand.outcomes[i] = reply

    def _node(self, address: Address) -> Node:
        if asyncio.get_running_loop().time() < self._silent.get(address, 0.0):
            raise TierError(f"{address} did not answer in time")
        if self._closed:
            raise Closed
        if address not in self._nodes:
            self._nodes[address] = Node(self._entrance, address, self._options.connections)
        return self._nodes[address]

    # ---- owners of slots

    async def addresses(self) -> list[Address]:
        """Return the addresses of the servers that take writes.

        Raises
        ------
        TierError
            No server could tell, or none serves a slot.
        """
        if None in self._owners:  # e.g. the slots of a server that did not answer
            await self._learnt()
        owners = {owner for owner in self._owners if owner is not None}
        if not owners:
            raise TierError("no server of the cluster serves a slot")
        return sorted(owners)

    async def owners(self) -> list[Address | None]:
        """Look up anew which server owns each slot, None if none does; raise TierError if unknown.

        Slots that moved between two lookups may have hidden keys from a scan of all servers.
        """
        await self._learnt()
        return [*self._owners]

    async def _learnt(self) -> None:
        """Wait until the owners are looked up; the lookup continues if a waiter is cancelled."""
        if self._closed:
            raise Closed
        if self._learning is None or self._learning.done():
            self._learning = asyncio.create_task(self._learn(), name="kvladder-redis-slots")
            # retrieve the error, or asyncio would report it
            self._learning.add_done_callback(lambda task: task.cancelled() or task.exception())
        learning = self._learning
        await asyncio.wait({learning})
        if learning.cancelled():
            raise Closed
        learning.result()

    async def _learn(self) -> None:
        addresses, master = self._options.parsed.addresses, self._options.sentinel
        if self._options.cluster:
            known = dict.fromkeys([*addresses, *self._nodes])
            self._owners = await first(known, self._table)
        elif master:
            try:
                self._owners = [await first(addresses, self._entrance.master)]
            except TierError as error:
                raise TierError(f"no Sentinel knows a master {master!r}: {error}") from error
        else:
            self._owners = [addresses[0]]

    async def _table(self, address: Address) -> list[Address | None]:
        """Return the owner of each slot, as told by a node of the cluster."""
        told = await self._entrance.ask(address, b"CLUSTER", b"SLOTS")
        try:
            return _owners(told, address)
        except (TypeError, ValueError, AttributeError) as error:
            raise TierError(f"{address}: malformed reply about its slots") from error

    def close(self) -> None:
        """Break every connection."""
        self._closed = True
        if self._learning is not None:
            self._learning.cancel()
        for node in self._nodes.values():
            node.close()


def _is_read_only(outcome: Outcome) -> bool:
    """Return whether an outcome shows that the server is no longer the master."""
    return isinstance(outcome, ReplyError) and outcome.code == "READONLY"


def _address(host: str, port: int, teller: Address) -> Address:
    """Return an address told by ``teller``; without a host, the teller's own host is meant."""
    if not 0 < port < 1 << 16:
        raise ValueError(f"port {port}: expected 1 to 65535")
    return Address(host or teller.host, port)


def _owners(told: Any, teller: Address) -> list[Address | None]:
    """Return each slot's owner from a reply to CLUSTER SLOTS.

    Raises
    ------
    TypeError, ValueError, AttributeError
        The reply makes no sense.
    """
    owners: list[Address | None] = [None] * REDIS_CLUSTER_HASH_SLOTS
    for first, last, (host, port, *_), *_ in told:
        if not 0 <= first <= last < REDIS_CLUSTER_HASH_SLOTS:
            raise ValueError(
                f"slots {first} to {last}: expected 0 to {REDIS_CLUSTER_HASH_SLOTS - 1}"
            )
        owner = _address((host or b"").decode(), port, teller)
        owners[first : last + 1] = [owner] * (last + 1 - first)
    return owners


async def first(
    addresses: Iterable[Address], ask: Callable[[Address], Coroutine[Any, Any, T]]
) -> T:
    """Ask servers that may all know the answer, and return the first answer.

    Raises
    ------
    TierError
        No server answered. The error is ``Unfit`` if any server was, else it lists all failures.
    """

    async def later(number: int, address: Address) -> T:
        await asyncio.sleep(number * HEAD_START_S)
        return await ask(address)

    asking = [asyncio.create_task(later(*one)) for one in enumerate(addresses)]
    failures: list[TierError] = []
    try:
        for answer in asyncio.as_completed(asking):
            try:
                return await answer
            except TierError as error:
                failures.append(error)
    finally:
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)
    unfit = (failure for failure in failures if isinstance(failure, Unfit))
    raise next(unfit, TierError("; ".join(map(str, failures))))
