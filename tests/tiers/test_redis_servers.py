"""The server of each command, among servers that fail, hang and send nonsense; in virtual time."""

from __future__ import annotations

import asyncio
from itertools import count

import pytest
from redis.crc import key_slot

from kvladder.errors import TierError
from kvladder.tiers.redis.resp import Command, ReplyError, encode
from kvladder.tiers.redis.servers import HEAD_START_S, SILENT_S, Servers
from kvladder.tiers.redis.url import Address, RedisOptions

pytestmark = pytest.mark.slow

LIMIT_S = 4.0
SLOTS = 16384
NAMES = [b"{%d}" % number for number in range(24)]
ONE, TWO, THREE, FOUR = (Address("here", port) for port in (1, 2, 3, 4))


class World:
    """Servers and their addresses; connections take no time, and each reply names its server.

    A key of a cluster is on the server that owns its slot; others answer with its address.
    """

    limit_s = 20.0

    def __init__(self, *addresses):
        share = -(-SLOTS // len(addresses))
        self.owners = [addresses[slot // share] for slot in range(SLOTS)]
        self.silent = set()
        self.refusing = set()
        self.says = {}
        """Replies to a key in place of its value."""
        self.table = None
        """The reply to a request for the slots."""
        self.asked = []
        """The commands that servers were sent, each with its server."""
        self.learnt = []
        """The servers asked for the owners of slots."""
        self.masters = {}
        """The master according to each Sentinel."""
        self.runs = {}
        """The names of runs of servers that were started again."""
        self._ids = count()

    async def _reached(self, address):
        if address in self.refusing:
            raise TierError(f"{address} refuses")
        if address in self.silent:
            await asyncio.get_running_loop().create_future()

    async def wire(self, address):
        await self._reached(address)
        run = self.runs.get(address, str(address))
        return Wire(self, address, {"run_id": run, "id": str(next(self._ids))})

    async def ask(self, address, *arguments):
        assert arguments == (b"CLUSTER", b"SLOTS")
        self.learnt.append(address)
        await self._reached(address)
        if self.table is not None:
            return self.table
        return [
            [slot, slot, [owner.host.encode(), owner.port, b"id", []]]
            for slot, owner in enumerate(self.owners)
        ]

    async def master(self, address):
        self.learnt.append(address)
        await self._reached(address)
        return self.masters[address]

    def said(self, address, name):
        """Return a server's reply to a command for a key."""
        if (address, name) in self.says:
            return ReplyError(self.says[address, name])
        owner = self.owners[key_slot(name)]
        if owner != address and not self.masters:
            return ReplyError(f"MOVED {key_slot(name)} {owner.host}:{owner.port}")
        return str(address).encode()


class Wire:
    """A connection to one of the servers."""

    closed = unfinished_write = False

    def __init__(self, world, address, told):
        self.world = world
        self.address = address
        self.told = told

    async def exchange(self, commands):
        sent = [command.parts.split(b"\r\n") for command in commands]
        named = [(words[2], words[4] if len(words) > 4 else b"") for words in sent]
        self.world.asked += [(self.address, *words) for words in named]
        try:
            await self.world._reached(self.address)
        except BaseException:
            self.closed = self.unfinished_write = True
            raise
        return [
            b"OK" if what == b"ASKING" else self.world.said(self.address, name)
            for what, name in named
        ]

    def close(self):
        self.closed = True

    cut = close


def commands(names=NAMES):
    return [Command(name, encode(b"GET", name)) for name in names]


def servers_of(world, *addresses, **settings):
    url = "redis://" + ",".join(map(str, addresses))
    return Servers(RedisOptions(url=url, **settings), world)


def owned(world, address):
    """The keys that a server has."""
    return [name for name in NAMES if world.owners[key_slot(name)] == address]


def brought(outcomes):
    """The names of those that were answered."""
    return [
        name for name, outcome in zip(NAMES, outcomes, strict=True) if isinstance(outcome, bytes)
    ]


@pytest.fixture
def world():
    return World(ONE, TWO, THREE)


@pytest.mark.slow
async def test_each_command_goes_to_the_owner_of_its_slot(world):
    servers = servers_of(world, ONE, cluster=True)
    outcomes = await servers.run(commands())
    assert outcomes == [str(world.owners[key_slot(name)]).encode() for name in NAMES]
    assert await servers.addresses() == [ONE, TWO, THREE]
    assert world.learnt == [ONE]
    assert len(world.asked) == len(NAMES)


@pytest.mark.parametrize(
    "reply",
    [
        "MOVED",
        "MOVED 1",
        "MOVED 1 here",
        "MOVED 1 here:",
        "MOVED 1 here:there",
        "MOVED 1 here:0",
        "MOVED 1 here:70000",
        "MOVED x here:2",
        "MOVED 1 here:2 there:3",
        "ASK",
        "ASK 1 here:port",
        "ASK 1",
    ],
)
async def test_an_invalid_redirection_costs_only_its_own_block(world, reply):
    servers = servers_of(world, ONE, cluster=True)
    first, *others = NAMES
    world.says[world.owners[key_slot(first)], first] = reply
    outcomes = await servers.run(commands())
    assert brought(outcomes) == others
    assert isinstance(outcomes[0], ReplyError)


@pytest.mark.parametrize(
    "table",
    [
        b"OK",
        7,
        None,
        [1],
        [[0, 16384, [b"here", 1]]],
        [[5, 2, [b"here", 1]]],
        [[0, 1, b""]],
        [[0, 1, [7, 1]]],
        [[0, 1, [b"here", 0]]],
        [[0, 1, [b"\xff", 1]]],
        [[b"0", b"1", [b"here", 1]]],
    ],
)
async def test_an_invalid_table_of_slots_is_a_failure_of_its_server(world, table):
    world.table = table if table is not None else [None]
    servers = servers_of(world, ONE, cluster=True)
    outcomes = await servers.run(commands())
    assert {type(outcome) for outcome in outcomes} == {TierError}
    assert "here:1" in str(outcomes[0])
    world.table = None
    assert brought(await servers.run(commands())) == NAMES


async def test_slots_that_moved_are_followed_and_remembered(world):
    servers = servers_of(world, ONE, cluster=True)
    await servers.run(commands())
    world.owners = [FOUR if owner == TWO else owner for owner in world.owners]
    assert brought(await servers.run(commands())) == NAMES
    before = len(world.asked)
    assert brought(await servers.run(commands())) == NAMES
    assert len(world.asked) == before + len(NAMES)
    assert world.learnt == [ONE]


async def test_a_migrating_key_is_asked_for_at_its_destination(world):
    servers = servers_of(world, ONE, cluster=True)
    name = owned(world, TWO)[0]
    world.says[TWO, name] = f"ASK {key_slot(name)} here:4"
    world.says[FOUR, name] = "TRYAGAIN"
    for _ in range(2):
        world.asked.clear()
        await servers.run(commands([name]))
        assert world.asked == [(TWO, b"GET", name), (FOUR, b"ASKING", b""), (FOUR, b"GET", name)]


async def test_redirections_in_a_circle_end(world):
    servers = servers_of(world, ONE, cluster=True)
    name = owned(world, ONE)[0]
    world.says[ONE, name] = f"MOVED {key_slot(name)} here:2"
    world.says[TWO, name] = f"MOVED {key_slot(name)} :1"
    world.says[Address("here", 1), name] = world.says[ONE, name]
    (outcome,) = await servers.run(commands([name]))
    assert isinstance(outcome, ReplyError)


async def test_a_silent_node_costs_its_own_blocks_and_the_time_of_one_call(world):
    servers = servers_of(world, ONE, cluster=True)
    await servers.run(commands())
    world.silent.add(TWO)
    now = asyncio.get_running_loop().time
    began_s = now()
    outcomes = await servers.run(commands(), LIMIT_S)
    assert now() - began_s == LIMIT_S
    others = [name for name in NAMES if name not in owned(world, TWO)]
    assert brought(outcomes) == others
    world.asked.clear()
    assert brought(await servers.run(commands(), LIMIT_S)) == others
    assert now() - began_s == LIMIT_S, "it is not waited for again"
    assert TWO not in {address for address, *_ in world.asked}
    world.silent.clear()
    await asyncio.sleep(SILENT_S)
    assert brought(await servers.run(commands(), LIMIT_S)) == NAMES


async def test_a_node_that_hangs_longer_than_any_call_is_replaced(world):
    servers = servers_of(world, TWO, ONE, cluster=True)
    await servers.run(commands())
    world.silent.add(TWO)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(LIMIT_S / 2):  # as a level gives up
            await servers.run(commands(), LIMIT_S)
    world.owners = [FOUR if owner == TWO else owner for owner in world.owners]
    world.learnt.clear()
    assert brought(await servers.run(commands(), LIMIT_S)) == NAMES
    assert ONE in world.learnt, "whoever is asked first may be the one that is silent"
    assert await servers.addresses() == [ONE, THREE, FOUR]


async def test_a_silent_node_is_not_waited_for_when_others_know_the_slots(world):
    servers = servers_of(world, ONE, TWO, THREE, cluster=True)
    world.silent.add(ONE)
    world.owners = [TWO] * SLOTS
    began_s = asyncio.get_running_loop().time()
    assert brought(await servers.run(commands(), LIMIT_S)) == NAMES
    assert asyncio.get_running_loop().time() - began_s == HEAD_START_S


async def test_slots_learnt_too_late_for_a_call_serve_the_next(world):
    servers = servers_of(world, ONE, TWO, cluster=True)
    world.silent.add(ONE)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(HEAD_START_S / 2):
            await servers.run(commands())
    world.silent.clear()
    await asyncio.sleep(HEAD_START_S)
    assert brought(await servers.run(commands())) == NAMES
    assert world.learnt == [ONE, TWO]


async def test_a_failure_is_tried_again_only_with_another(world):
    servers = servers_of(world, ONE, cluster=True)
    await servers.run(commands())
    world.refusing.add(TWO)
    servers._nodes[TWO].drop_idle()
    outcomes = await servers.run(commands())
    assert brought(outcomes) == [name for name in NAMES if name not in owned(world, TWO)]
    assert len(world.learnt) == 2
    world.owners = [FOUR if owner == TWO else owner for owner in world.owners]
    assert brought(await servers.run(commands())) == NAMES


@pytest.mark.parametrize("trouble", ["refusing", "silent", "read-only"])
async def test_the_master_that_sentinels_name_takes_over(world, trouble):
    sentinels = [Address("there", port) for port in (7, 8)]
    world.masters = dict.fromkeys(sentinels, ONE)
    servers = servers_of(world, *sentinels, sentinel="kv")
    assert brought(await servers.run(commands())) == NAMES
    assert world.learnt == sentinels[:1]
    world.masters = dict.fromkeys(sentinels, TWO)
    if trouble == "read-only":
        world.says |= {(ONE, name): "READONLY You can't write" for name in NAMES}
    else:
        getattr(world, trouble).add(ONE)
    if trouble == "silent":
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(LIMIT_S):
                await servers.run(commands(), LIMIT_S)
    outcomes = await servers.run(commands())
    assert set(outcomes) == {str(TWO).encode()}
    assert await servers.addresses() == [TWO]


async def test_sentinels_without_an_answer_are_an_error(world):
    world.masters = {ONE: TWO}
    world.refusing.add(ONE)
    servers = servers_of(world, ONE, sentinel="kv")
    (outcome,) = await servers.run(commands(NAMES[:1]))
    assert "no Sentinel knows a master 'kv'" in str(outcome)
    with pytest.raises(TierError, match="refuses"):
        await servers.addresses()


async def abandoned(world):
    """Return servers; one was silent until a call was abandoned, and answers again."""
    world.owners = [ONE] * SLOTS
    servers = servers_of(world, ONE)
    assert brought(await servers.run(commands(), LIMIT_S)) == NAMES
    world.silent.add(ONE)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(2 * LIMIT_S):
            await servers.run(commands(), LIMIT_S)
    world.silent.clear()
    return servers


async def test_a_single_server_is_waited_for_as_long_as_the_call_lasts(world):
    servers = await abandoned(world)
    assert brought(await servers.run(commands(), LIMIT_S)) == NAMES
    kills = [words for words in world.asked if words[1] == b"CLIENT"]
    assert kills == [(ONE, b"CLIENT", b"KILL")], "what was left behind must not come back"


async def test_numbers_of_connections_from_before_a_restart_are_not_used(world):
    """A server that was started again gives them to other clients."""
    servers = await abandoned(world)
    world.runs[ONE] = "the next run"
    assert brought(await servers.run(commands(), LIMIT_S)) == NAMES
    assert b"CLIENT" not in [words[1] for words in world.asked]


async def test_calls_that_wait_for_slots_fail_when_the_servers_are_closed(world):
    servers = servers_of(world, ONE, cluster=True)
    world.silent.add(ONE)
    running = asyncio.create_task(servers.run(commands()))
    await asyncio.sleep(1)
    servers.close()
    outcomes = await running
    assert "closed" in str(outcomes[0])
    assert "closed" in str((await servers.run(commands()))[0])
