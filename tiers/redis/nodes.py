"""A server of a Redis tier: how to get in, and the connections to it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence
from ssl import SSLError
from typing import Any, NamedTuple

import redis.asyncio as client
from redis.asyncio.sentinel import Sentinel
from redis.exceptions import AuthenticationError, RedisError, ResponseError

from kvladder.errors import TierError
from kvladder.tiers.redis.resp import Part, Reply, ReplyError, Target, Wire, encode
from kvladder.tiers.redis.url import Address, RedisOptions

OLDEST_HINT = "expected Redis 6.2, Valkey 7.2 or later"
STEP_BYTES = 1 << 20
"""Values are asked for in steps of so much: a server first copies all it was asked for, and memory
that is not in a cache costs it more than a wait."""


class Command(NamedTuple):
    """One command, with one reply."""

    key: bytes
    parts: bytes | Callable[[], Iterable[Part]]
    """What is sent, or what makes it, once more if it has to be sent again."""
    target: Target | None = None


class Client(NamedTuple):
    """Which connection this is to the server: what it takes to end it from another."""

    number: int
    process: str
    """The server's run, whose number it is: another one gives the same numbers to others."""


class Unfit(TierError):
    """A server that does not fit the settings: trying again is no use."""

    def __init__(self, message: str, *, path: str = "url", hint: str = "") -> None:
        self.path = path
        self.hint = hint
        super().__init__(f"{message} ({hint})" if hint else message, temporary=False)
        self.message = message


class Closed(TierError):
    """The tier was closed."""

    def __init__(self) -> None:
        super().__init__("the Redis tier is closed", temporary=False)


class Entrance:
    """Connects to servers and logs in, by means of redis-py."""

    def __init__(self, options: RedisOptions) -> None:
        self._options = options
        self._url = url = options.parsed
        self.limit_s = float(options.connect_timeout)
        """To connect and log in, and for the reply to a command of its own."""
        self._tls: dict[str, Any] = {}
        if url.tls:
            self._tls = {
                "ssl_ca_certs": options.ca or None,
                "ssl_certfile": options.certificate or None,
                "ssl_keyfile": options.certificate_key or None,
                "ssl_cert_reqs": "required",
                "ssl_check_hostname": True,
            }

    async def wire(self, address: Address) -> tuple[Wire, dict[str, str]]:
        """A new connection for exchanges, which is logged in and has chosen its database.

        And what the server says of itself.

        Raises
        ------
        Unfit
            The server does not let us in, or does not speak what we speak.
        TierError
            It cannot be reached.
        """
        arguments: dict[str, Any] = {"protocol": 3, "client_name": "kvladder", "db": self._url.db}
        if self._url.username or self._url.password:
            arguments |= {"username": self._url.username or None, "password": self._url.password}
        kind: Any = client.UnixDomainSocketConnection
        if address.port:
            kind = client.SSLConnection if self._url.tls else client.Connection
            arguments |= {"host": address.host, "port": address.port, **self._tls}
        else:
            arguments["path"] = address.host
        connection: Any = kind(**arguments)
        try:
            async with asyncio.timeout(self.limit_s):
                await connection.connect()
                await connection.send_command("INFO", "server")
                info = parse_info(await connection.read_response())
        except BaseException as error:
            if connection._writer is not None:  # at once: TLS would want to say goodbye, later
                connection._writer.transport.abort()
            await connection.disconnect(nowait=True)
            if isinstance(error, RedisError | OSError | ValueError):  # the latter of a host's name
                raise self._explained(error, address) from error
            raise
        # redis-py has nothing under way on it and is told that it has no connection any more
        wire = Wire()
        wire.take_over(connection._writer)
        connection._reader = connection._writer = None
        return wire, info

    def _explained(self, error: Exception, address: Address) -> TierError:
        causes = [error, error.__cause__, error.__context__]
        if any(isinstance(cause, SSLError) for cause in causes):
            hint = "a server that speaks TLS, and in ca the certificates that it is checked with"
            return Unfit(f"{address}: {error}", path="url", hint=f"expected {hint}")
        if isinstance(error, AuthenticationError) or "NOAUTH" in str(error):
            hint = "the right username and password"
            return Unfit(f"{address} does not let us in: {error}", path="password", hint=hint)
        if isinstance(error, ResponseError) and "unknown command" in str(error).lower():
            return Unfit(f"{address} is too old: {error}", hint=OLDEST_HINT)
        if isinstance(error, TimeoutError):
            what = f"{address}: no connection within {self.limit_s:g} s"
            return TierError(f"{what}; does it speak TLS?" if self._url.tls else what)
        return TierError(f"{address}: {error}")

    async def ask(self, address: Address, *arguments: bytes | int) -> Any:
        """The reply of a server to one command, over a connection of its own."""
        wire, _ = await self.wire(address)
        try:
            return await self.reply(wire, *arguments)
        finally:
            wire.abort()

    async def reply(self, wire: Wire, *arguments: bytes | int) -> Any:
        """The reply to one command; a TierError if that is an error, or does not come in time."""
        name = str(arguments[0], "ascii") if isinstance(arguments[0], bytes) else ""
        try:
            async with asyncio.timeout(self.limit_s):
                (reply,) = await exchange(wire, [Command(b"", encode(*arguments))])
        except TimeoutError as error:
            raise TierError(f"{name}: no answer in {self.limit_s:g} s") from error
        except OSError as error:
            raise TierError(f"{name}: {error}") from error
        if isinstance(reply, ReplyError):
            raise TierError(f"{name}: {reply}")
        return reply

    async def master(self, address: Address) -> Address:
        """Where the Sentinel at this address says that the master is."""
        options = self._options
        login = {"username": options.sentinel_username, "password": options.sentinel_password}
        arguments = {**self._tls, **{k: v for k, v in login.items() if v}}
        if self._url.tls:
            arguments["ssl"] = True
        make: Any = Sentinel
        sentinel = make([address], sentinel_kwargs=arguments)
        try:
            async with asyncio.timeout(self.limit_s):
                host, port = await sentinel.discover_master(options.sentinel)
        except TimeoutError as error:
            raise TierError(f"{address}: no answer within {self.limit_s:g} s") from error
        except (RedisError, OSError) as error:
            raise TierError(f"{address}: {error}") from error
        finally:
            for one in sentinel.sentinels:
                hang_up(one.connection_pool)
        return Address(str(host), int(port))


def hang_up(pool: Any) -> None:
    """End the connections of a pool of redis-py's at once: to wait for that may be cancelled."""
    for connection in [*pool._available_connections, *pool._in_use_connections]:
        if connection._writer is not None:
            connection._writer.transport.abort()
        connection._reader = connection._writer = None


class Node:
    """The connections to one server: each exchange has one for itself.

    An exchange that is cut short leaves a connection on which the server may still have work; it
    is told to drop that before it is told anything else.
    """

    def __init__(self, entrance: Entrance, address: Address, connections_max: int) -> None:
        self._entrance = entrance
        self._address = address
        self._gate = asyncio.Semaphore(connections_max)
        self._idle: list[tuple[Wire, Client]] = []
        self._busy: set[Wire] = set()
        self._orphans: list[Client] = []
        self._closed = False

    async def exchange(self, commands: Sequence[Command]) -> list[Reply]:
        """The replies to ``commands``; a connection that turns out to be broken is replaced once.

        Raises
        ------
        TierError
            The server cannot be reached, or broke the connection.
        """
        async with self._gate:
            while True:
                is_new = not self._idle
                wire, client = await self._connected() if is_new else self._idle.pop()
                self._busy.add(wire)
                orphans = list(self._orphans)
                kills = [
                    Command(b"", encode(b"CLIENT", b"KILL", b"ID", orphan.number))
                    for orphan in orphans
                    if orphan.process and orphan.process == client.process
                ]
                try:
                    replies = await exchange(wire, [*kills, *commands])
                except OSError as error:
                    self.drop_idle()
                    if is_new:
                        raise TierError(f"the connection broke: {error}") from error
                    continue
                finally:
                    self._busy.discard(wire)
                    if wire.unfinished_write:
                        self._orphans.append(client)
                        self.drop_idle()
                    elif not wire.closed:
                        self._idle.append((wire, client))
                # those of a process that is gone have gone with it
                self._orphans = [orphan for orphan in self._orphans if orphan not in orphans]
                return replies[len(kills) :]

    async def _connected(self) -> tuple[Wire, Client]:
        """A new connection, and what the server knows it by."""
        if self._closed:
            raise Closed
        wire, info = await self._entrance.wire(self._address)
        try:
            number: int = await self._entrance.reply(wire, b"CLIENT", b"ID")
        except BaseException:
            wire.abort()
            raise
        if self._closed:
            wire.abort()
            raise Closed
        return wire, Client(number, info.get("run_id", ""))

    def drop_idle(self) -> None:
        """Close the connections that nobody uses: others would be found broken as well."""
        for wire, _ in self._idle:
            wire.abort()
        self._idle.clear()

    def close(self) -> None:
        """Break every connection; exchanges under way fail."""
        self._closed = True
        self.drop_idle()
        for wire in list(self._busy):
            wire.cut()


def parse_info(text: Any) -> dict[str, str]:
    """The fields of what INFO replied; none if that is no text."""
    if not isinstance(text, bytes):
        return {}
    rows = (line.partition(":") for line in text.decode(errors="replace").splitlines())
    return {name: value for name, found, value in rows if found}


async def exchange(wire: Wire, commands: Sequence[Command]) -> list[Reply]:
    """The replies to commands, at least one, over a wire of one's own."""
    return await wire.exchange(_paced(commands), [command.target for command in commands])


def _paced(commands: Sequence[Command]) -> Iterator[Part | int]:
    """The parts of all commands, and how many replies are to have begun before more is sent."""
    first = wanted = 0
    for index, command in enumerate(commands):
        if wanted >= STEP_BYTES:
            if first:
                yield first + 1  # those of the step before are all here
            first, wanted = index, 0
        if command.target is not None:
            wanted += len(command.target.head) + len(command.target.body)
        if isinstance(command.parts, bytes):
            yield command.parts
        else:
            yield from command.parts()
