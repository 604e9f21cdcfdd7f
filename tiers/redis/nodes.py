"""A server of a Redis tier: the login, and the connections to it."""

from __future__ import annotations

import asyncio
import re
import socket
import ssl
from collections.abc import Sequence
from contextlib import closing
from typing import Any

from kvladder.errors import ConfigError, TierError
from kvladder.secrets.file import Secrets
from kvladder.tiers.redis.resp import Command, Reply, ReplyError, Wire, encode
from kvladder.tiers.redis.url import Address, RedisOptions

OLDEST_HINT = "expected Redis 6.2, Valkey 7.2 or later"
KEEPALIVE = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 30),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
)
"""Socket options that detect a dead connection before it is used again."""


_REFUSAL = re.compile(r"(?:NOAUTH|WRONGPASS).*", re.DOTALL)
"""A refused login. A server that refuses it may send no other reply, not even to the mark."""
_UNSET_HINT = 'set {}: "${{REDIS_PASSWORD}}", which takes it from the environment'


class Unfit(TierError):
    """The server does not fit the settings. A retry is useless. ``wrong`` is the ConfigError."""

    def __init__(self, message: str, *, path: str = "url", hint: str) -> None:
        super().__init__(f"{message} ({hint})", temporary=False)
        self.wrong = ConfigError(message, path=path, hint=hint)


class Closed(TierError):
    """The tier was closed."""

    def __init__(self) -> None:
        super().__init__("the Redis tier is closed", temporary=False)


class Entrance:
    """Connects to servers and logs in."""

    def __init__(self, options: RedisOptions) -> None:
        self._options = options
        self._url = options.parsed
        self.limit_s = float(options.connect_timeout)
        """Time limit to connect and log in, and for each reply to ``ask`` and ``reply``."""
        self._passwords: Secrets | None = None
        self._sentinel_login = _login(options.sentinel_username, options.sentinel_password)

    def _logins(self) -> list[list[Command]]:
        """Return the logins to try at a server, one after the other.

        Raises
        ------
        Unfit
            The file of the password has never been right.
        """
        url, file, setting = self._url, self._options.password_file, "password_file"
        if self._passwords is None:
            try:
                self._passwords = Secrets(
                    url.password, file=file, setting=setting, require=_require
                )
            except ConfigError as error:
                raise Unfit(error.message, path=setting, hint=error.hint) from error
        return [_login(url.username, one, url.db) for one in self._passwords.lines() or ("",)]

    async def wire(self, address: Address, *, sentinel: bool = False) -> Wire:
        """Return a new connection for exchanges, logged in and with its database selected.

        Raises
        ------
        Unfit
            The server refuses the login, or does not support the protocol.
        TierError
            The server cannot be reached.
        """
        logins = [self._sentinel_login] if sentinel else self._logins()
        for login in logins[:-1]:
            try:
                return await self._wire(address, login, sentinel=sentinel)
            except Unfit as error:
                if error.wrong.path != "password":
                    raise
        return await self._wire(address, logins[-1], sentinel=sentinel)

    async def _wire(self, address: Address, login: Sequence[Command], *, sentinel: bool) -> Wire:
        """Return a new connection, see ``wire``, by one login."""
        wire = Wire(mark=b"PING" if sentinel else b"ECHO")
        try:
            async with asyncio.timeout(self.limit_s):
                await self._open(wire, address)
                replies = await wire.exchange(login)
            for reply in replies:
                if isinstance(reply, ReplyError):
                    wire.close()
                    raise reply
        except (OSError, ValueError, ReplyError) as error:  # ValueError: an invalid host name
            raise self._explained(error, address, sentinel=sentinel) from error
        wire.told = {**parse_info(replies[-1]), "id": str(pairs(replies[0]).get(b"id", 0))}
        return wire

    async def _open(self, wire: Wire, address: Address) -> None:
        """Connect; if this is cancelled, nothing stays open."""
        loop = asyncio.get_running_loop()
        if not address.port:
            await loop.create_unix_connection(lambda: wire, address.host)
            return
        if self._url.tls:
            # in two steps: if asyncio connects with TLS in one step and is cancelled, it does not
            # close the connection but waits for the server's goodbye
            context = self._context()
            transport, _ = await loop.create_connection(asyncio.Protocol, *address)
            host = address.host
            secure = await loop.start_tls(transport, wire, context, server_hostname=host)
            if secure is None:  # the connection was lost meanwhile
                raise ConnectionResetError("connection lost")
            wire.connection_made(secure)
        else:
            transport, _ = await loop.create_connection(lambda: wire, *address)
        taken = transport.get_extra_info("socket")
        for option in KEEPALIVE:
            taken.setsockopt(*option)

    def _context(self) -> ssl.SSLContext:
        """Return a new TLS context; not reused, since the certificate files may be replaced."""
        options, context = self._options, ssl.create_default_context()
        if options.ca:
            context.load_verify_locations(options.ca)
        if options.certificate:
            context.load_cert_chain(options.certificate, options.certificate_key)
        return context

    def _explained(self, error: Exception, address: Address, *, sentinel: bool) -> TierError:
        text = str(error)
        if isinstance(error, ssl.SSLError):
            hint = "expected a server with TLS, and in ca the certificates that verify it"
            return Unfit(f"{address}: {text}", path="url", hint=hint)
        refusal = _REFUSAL.search(text)
        if refusal is not None:
            own, path = self._options, "sentinel_password" if sentinel else "password"
            if not (own.sentinel_password if sentinel else own.password_file or self._url.password):
                what, hint = f"{address} requires a password, but none is set", _UNSET_HINT
                return Unfit(what, path=path, hint=hint.format(path))
            hint = "expected the right username and password"
            return Unfit(f"{address} refuses the login: {refusal[0]}", path=path, hint=hint)
        if "unknown command" in text.lower():
            if "echo" in text.lower():
                hint = "set sentinel to the master's name"
                return Unfit(f"{address} is a Sentinel: {text}", hint=hint)
            return Unfit(f"{address} is too old: {text}", hint=OLDEST_HINT)
        if isinstance(error, TimeoutError):
            text = f"no answer within {self.limit_s:g} s"
            text += "; does it speak TLS?" if self._url.tls else ""
        return TierError(f"{address}: {text}")

    async def ask(self, address: Address, *arguments: bytes | int, sentinel: bool = False) -> Any:
        """Return a server's reply to one command, sent over a new connection."""
        with closing(await self.wire(address, sentinel=sentinel)) as wire:
            return await self.reply(wire, *arguments)

    async def reply(self, wire: Wire, *arguments: bytes | int) -> Any:
        """Return the reply to one command; raise TierError if it is an error or comes too late."""
        name = str(arguments[0], "ascii") if isinstance(arguments[0], bytes) else ""
        try:
            async with asyncio.timeout(self.limit_s):
                (reply,) = await wire.exchange([Command(b"", encode(*arguments))])
        except TimeoutError as error:
            raise TierError(f"{name}: no answer in {self.limit_s:g} s") from error
        except OSError as error:
            raise TierError(f"{name}: {error}") from error
        if isinstance(reply, ReplyError):
            raise TierError(f"{name}: {reply}")
        return reply

    async def master(self, address: Address) -> Address:
        """Return the master's address as told by the Sentinel at ``address``."""
        name = self._options.sentinel.encode()
        told = pairs(await self.ask(address, b"SENTINEL", b"MASTER", name, sentinel=True))
        if b"_down" in told.get(b"flags", b""):
            raise TierError(f"{address}: the master is down")
        try:
            return Address(told[b"ip"].decode(), int(told[b"port"]))
        except (KeyError, ValueError, AttributeError) as error:
            raise TierError(f"{address}: malformed reply about the master") from error


def _require(password: str, setting: str) -> None:
    if not password:
        raise ConfigError("a line is empty", path=setting, hint="expected a password in each line")


def _login(username: str, password: str, db: int = 0) -> list[Command]:
    """Return the first commands of a connection; a password alone is of the user ``default``."""
    user: list[bytes | int] = []
    if username or password:
        user = [b"AUTH", (username or "default").encode(), password.encode()]
    commands = [encode(b"HELLO", 3, *user, b"SETNAME", b"kvladder"), encode(b"INFO", b"server")]
    if db:
        commands.insert(1, encode(b"SELECT", db))
    return [Command(b"", command) for command in commands]


class Node:
    """The connections to one server. Each exchange has a connection to itself.

    After an exchange is cut short, the server may still be working on its commands. The next
    exchange therefore first tells the server to kill that connection.
    """

    def __init__(self, entrance: Entrance, address: Address, connections_max: int) -> None:
        self._entrance = entrance
        self._address = address
        self._gate = asyncio.Semaphore(connections_max)
        self._idle: list[Wire] = []
        self._busy: set[Wire] = set()
        self._orphans: list[Wire] = []
        self._closed = False

    async def exchange(self, commands: Sequence[Command]) -> list[Reply]:
        """Return the replies to ``commands``. A reused connection that is broken is replaced.

        Raises
        ------
        TierError
            The server cannot be reached, or broke the connection.
        """
        async with self._gate:
            while True:
                is_new = not self._idle
                wire = await self._connected() if is_new else self._idle.pop()
                self._busy.add(wire)
                orphans = list(self._orphans)
                kills = _kills(wire, orphans) if orphans else []
                try:
                    replies = await wire.exchange([*kills, *commands])
                except OSError as error:
                    self.drop_idle()
                    if is_new:
                        raise TierError(f"the connection broke: {error}") from error
                    continue
                finally:
                    self._busy.discard(wire)
                    if wire.unfinished_write:
                        self._orphans.append(wire)
                        self.drop_idle()
                    elif not wire.closed:
                        self._idle.append(wire)
                if orphans:  # killed, or gone with an earlier run of the server
                    self._orphans = [one for one in self._orphans if one not in orphans]
                return replies[len(kills) :]

    async def _connected(self) -> Wire:
        if self._closed:
            raise Closed
        wire = await self._entrance.wire(self._address)
        if self._closed:
            wire.close()
            raise Closed
        return wire

    def drop_idle(self) -> None:
        """Close the unused connections. If one connection broke, these may be broken, too."""
        for wire in self._idle:
            wire.close()
        self._idle.clear()

    def close(self) -> None:
        """Break every connection; exchanges in flight fail."""
        self._closed = True
        self.drop_idle()
        for wire in list(self._busy):
            wire.cut()


def _kills(wire: Wire, orphans: Sequence[Wire]) -> list[Command]:
    """Return the commands that make the server kill ``orphans`` and drop their work."""
    run = wire.told.get("run_id")  # a restarted server reuses the ids for other connections
    lost = [one.told["id"] for one in orphans if run and one.told.get("run_id") == run]
    return [Command(b"", encode(b"CLIENT", b"KILL", b"ID", n.encode())) for n in lost]


def parse_info(text: Any) -> dict[str, str]:
    """Return the fields of a reply to INFO; empty if the reply is not text."""
    if not isinstance(text, bytes):
        return {}
    rows = (line.partition(":") for line in text.decode(errors="replace").splitlines())
    return {name: value for name, found, value in rows if found}


def pairs(reply: Any) -> dict[Any, Any]:
    """Return a map from a server's reply; empty if the reply is not a map."""
    try:
        return dict(zip(reply[::2], reply[1::2], strict=True))
    except (TypeError, ValueError):
        return {}
