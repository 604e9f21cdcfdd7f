"""The roster: a list in a Redis where far ends announce themselves and clients find them."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any, Final, cast

import msgspec

from kvladder.arena import Arena
from kvladder.errors import ConfigError, TierError
from kvladder.schema import Address, masked
from kvladder.tiers.nixl.messages import VERSION

TTL_S: Final = 10.0
"""Seconds for which an announcement lasts unless renewed."""
BEAT_S: Final = 3.0
FOLLOW_S: Final = 2.0
"""Seconds between two reads by a client."""
LIMIT_S: Final = 2.0
"""Time limit for one exchange with the Redis."""
KEPT_S: Final = 24 * 3600
"""Seconds after the last announcement until the Redis deletes the list."""
ENTRIES_MAX: Final = 1024
ENTRY_BYTES_MAX: Final = 1024
NAME: Final = r"[A-Za-z0-9\[][A-Za-z0-9_.:%\[\]-]{0,199}"
URL_HINT: Final = "expected redis://[user:password@]host[:port][/db], rediss:// or unix:///path"

Name = Annotated[str, msgspec.Meta(pattern=rf"\A{NAME}\Z")]


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """The announcement of a far end; JSON in the Redis."""

    address: Annotated[Address, msgspec.Meta(max_length=300)]
    """Host and port for clients."""
    run: Annotated[str, msgspec.Meta(max_length=200)]
    """Identity of the cache, see ``run_of``; an earlier cache may have had the same name."""
    writable: bool
    """True if the far end takes blocks; False if clients may only read its own."""
    block_bytes: Annotated[int, msgspec.Meta(gt=0)]
    """Length of the longest block that the far end takes."""
    namespace: str = ""
    """Namespace of an engine, in hexadecimal, the only one of its blocks; empty for a server."""
    version: int = VERSION
    """Version of the protocol that the far end speaks."""
    until_s: float = 0.0
    """Time at which the announcement ends unless renewed, by the clock of the Redis."""


_entry: Final = msgspec.json.Decoder(Entry)


def entries(raw: Mapping[bytes, bytes]) -> dict[str, Entry]:
    """Return the valid announcements of a list, by name; others are left out."""
    found: dict[str, Entry] = {}
    for field, value in raw.items():
        with suppress(msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            name = msgspec.convert(field.decode(), Name)
            if len(value) <= ENTRY_BYTES_MAX:
                found[name] = _entry.decode(value)
    return found


def require_url(url: str) -> None:
    """Raise ConfigError unless ``url`` is a valid URL of a Redis; the message does not quote it."""
    try:
        _connect(url).connection_pool.make_connection()
    except ConfigError:
        raise
    except (ValueError, TypeError):  # their texts may quote a password
        raise ConfigError("not the URL of a Redis", path="roster", hint=URL_HINT) from None


def run_of(arena: Arena) -> str:
    """Return a cache's unique identity, the same in each process that maps its arena."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    file = os.fstat(arena.handle.fd)
    return f"{boot}:{file.st_dev}:{file.st_ino}"


def _connect(url: str) -> Any:
    """Return a Redis client that makes no retries."""
    try:
        from redis.asyncio import Redis
        from redis.asyncio.retry import Retry
        from redis.backoff import NoBackoff
    except ModuleNotFoundError as error:
        hint = "install kvladder[redis]"
        raise ConfigError(f"needs the package redis: {error}", path="roster", hint=hint) from error

    once = Retry(NoBackoff(), 0)
    client = cast("Any", Redis)  # redis-py's types leave half of it open
    return client.from_url(url, retry=once, socket_connect_timeout=LIMIT_S, socket_timeout=LIMIT_S)


class Roster:
    """Lists of far ends in a Redis, a hash for each public key: one field for each, by name.

    Invalid entries are ignored. All calls raise TierError if the Redis does not answer, and
    ConfigError if it refuses the login.

    Parameters
    ----------
    url:
        URL of the Redis, as redis-py understands it. No message shows its user.
    publics:
        Returns the public keys of the far ends as they are now; the first is that of an announcing
        far end. A forged announcement gains nothing, since clients talk only to a far end that has
        such a key.
    """

    def __init__(self, url: str, publics: Callable[[], Sequence[str]]) -> None:
        self.where = masked(url)
        self.ignored = 0
        """Number of invalid entries at the last read."""
        self._publics = publics
        self._redis = _connect(url)

    @property
    def public(self) -> str:
        """The public key under which a far end announces itself now."""
        return self._publics()[0]

    @contextmanager
    def _explained(self) -> Generator[None]:
        """Turn errors of the Redis into TierError or ConfigError, without secrets in the text."""
        from redis.exceptions import (
            AuthenticationError,
            AuthorizationError,
            NoPermissionError,
            RedisError,
        )

        try:
            yield
        except (AuthenticationError, AuthorizationError, NoPermissionError) as error:
            what = f"{self.where} denies access: {error}"
            hint = "expected a user, with its password, that may use keys kvladder:far-ends:*"
            raise ConfigError(what, path="roster", hint=hint) from None
        except TimeoutError:
            raise TierError(f"{self.where}: no answer within {LIMIT_S:g} s") from None
        except (RedisError, OSError) as error:
            raise TierError(f"{self.where}: {error}") from None

    async def _all(self, public: str) -> tuple[float, dict[str, Entry], int]:
        """Return the Redis's time and a list's valid entries, including expired ones.

        Also returns the number of its invalid entries.
        """
        with self._explained():
            async with asyncio.timeout(LIMIT_S):
                async with self._redis.pipeline(transaction=False) as asked:
                    asked.time().hlen(_key(public))
                    (seconds, micros), count = await asked.execute()
                if count > ENTRIES_MAX:
                    raise TierError(
                        f"{self.where}: {count} far ends, expected {ENTRIES_MAX} or fewer"
                    )
                raw: Mapping[bytes, bytes] = await self._redis.hgetall(_key(public))
        found = entries(raw)
        return seconds + micros / 1e6, found, len(raw) - len(found)

    async def read(self) -> dict[str, Entry]:
        """Return the entries of the far ends that are alive, by name.

        A far end that has changed its key may be on two lists: its latest entry counts.
        """
        alive: dict[str, Entry] = {}
        ignored = 0
        for public in dict.fromkeys(self._publics()):
            now_s, found, invalid = await self._all(public)
            ignored += invalid
            for name, one in found.items():
                if one.until_s > max(now_s, alive[name].until_s if name in alive else 0.0):
                    alive[name] = one
        self.ignored = ignored
        return {name: alive[name] for name in sorted(alive)}

    async def announce(self, name: str, entry: Entry, *, first: bool = False) -> bool:
        """Announce a far end for ``TTL_S`` from now; return False if another cache has its name.

        With ``first``, for the first announcement of a run, take the name in any case: its holder
        may be an earlier run of the same cache. Also removes expired entries.
        """
        key = _key(self.public)
        now_s, found, _ = await self._all(self.public)
        other = found.get(name)
        if not first and other and other.run != entry.run and other.until_s > now_s:
            return False
        dead = [one for one, said in found.items() if said.until_s < now_s]
        said = msgspec.structs.replace(entry, until_s=now_s + TTL_S)
        with self._explained():
            async with (
                asyncio.timeout(LIMIT_S),
                self._redis.pipeline(transaction=True) as told,
            ):
                if dead:
                    told.hdel(key, *dead)
                told.hset(key, name, msgspec.json.encode(said))
                told.expire(key, KEPT_S)
                await told.execute()
        return True

    async def leave(self, name: str, run: str, public: str = "") -> None:
        """Remove the announcement under ``name`` if it is still of this ``run``.

        ``public`` is the key of the list, by default the current one.
        """
        key = public or self.public
        _, found, _ = await self._all(key)
        if name in found and found[name].run == run:
            with self._explained():
                async with asyncio.timeout(LIMIT_S):
                    await self._redis.hdel(_key(key), name)

    async def aclose(self) -> None:
        """Close the connections to the Redis."""
        with suppress(OSError):
            await self._redis.aclose()


def _key(public: str) -> str:
    """Return the key of the hash of far ends with a public key."""
    return f"kvladder:far-ends:{public}"


async def listed(url: str, publics: Sequence[str]) -> dict[str, Entry]:
    """Read the roster once, over a new connection; raises as ``Roster.read``."""
    roster = Roster(url, lambda: publics)
    try:
        return await roster.read()
    finally:
        await roster.aclose()
