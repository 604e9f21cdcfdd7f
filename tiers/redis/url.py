"""The settings of a Redis tier: its servers, the login and the quotas."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, NamedTuple
from urllib.parse import unquote

import msgspec

from kvladder.errors import ConfigError
from kvladder.policy.eviction import PRIORITY_MAX, PRIORITY_MIN
from kvladder.schema import Settings
from kvladder.units import Duration, Size

PORT, SENTINEL_PORT = 6379, 26379
SCHEMES = ("redis", "rediss", "unix")


class Address(NamedTuple):
    """Address of a server: host and port, or the path of a Unix socket and 0."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.host}:{self.port}" if self.port else self.host


class Url(NamedTuple):
    """The parts of a URL."""

    tls: bool
    addresses: tuple[Address, ...]
    db: int
    username: str
    password: str

    def __repr__(self) -> str:
        """Return a text without the user and password, safe for messages and crash reports."""
        where = ",".join(map(str, self.addresses))
        return f"Url({where!r}, db={self.db}, tls={self.tls})"


def parse_url(url: str, *, port: int = PORT) -> Url:
    """Split a URL into its parts; commas separate several hosts.

    Raises
    ------
    ValueError
        The URL is invalid. The message does not quote it, since it may hold a password.
    """
    scheme, found, rest = url.partition("://")
    if not found or scheme not in SCHEMES:
        raise ValueError("the scheme is not redis://, rediss:// or unix://")
    rest, _, query = rest.partition("?")
    user, _, where = rest.rpartition("@")
    username, _, password = user.partition(":")
    if scheme == "unix":
        db = query.removeprefix("db=") if query else ""
        addresses = [Address(unquote(where), 0)]
        if not where.startswith("/"):
            raise ValueError("no absolute path after unix://")
    else:
        hosts, _, db = where.partition("/")
        if query:
            raise ValueError("a query (?...) is not supported: set options as keys of the tier")
        addresses = [_address(host, port) for host in hosts.split(",")]
    if db and not db.isdecimal():
        raise ValueError("the database is not a number")
    return Url(
        scheme == "rediss", tuple(addresses), int(db or 0), unquote(username), unquote(password)
    )


def _address(text: str, port: int) -> Address:
    host, colon, number = text.rpartition(":")
    if text.endswith("]") or not colon:
        host, number = text, ""
    host = host.removeprefix("[").removesuffix("]")
    if not host or (":" in host and "[" not in text):
        raise ValueError("a host is missing, or an IPv6 address without [ ]")
    if number and not (number.isdecimal() and 0 < int(number) < 1 << 16):
        raise ValueError("a port is not a number from 1 to 65535")
    return Address(host, int(number or port))


RECOUNT = Duration(3600)


class QuotaOptions(Settings, frozen=True, kw_only=True):
    """Limits on the bytes that blocks of all engines together take; see docs/how-to/redis.md."""

    namespace: Size | None = None
    """Largest number of bytes of a namespace: one model, layout and deployment."""
    tenant: Size | None = None
    """Largest number of bytes of each cache salt in the namespace."""
    recount: Duration = RECOUNT
    """Time between two recounts of the stored blocks, each by one of the engines."""

    def __post_init__(self) -> None:
        if self.namespace is None and self.tenant is None and self.recount != RECOUNT:
            hint = "set quota.namespace or quota.tenant"
            raise ConfigError("has no effect", path="recount", hint=hint)
        if self.namespace is not None and self.tenant is not None and self.tenant > self.namespace:
            hint = f"expected at most quota.namespace, {self.namespace}"
            raise ConfigError(str(self.tenant), path="tenant", hint=hint)


class RedisOptions(Settings, frozen=True, kw_only=True):
    """The keys of a Redis tier; see docs/how-to/redis.md."""

    url: str
    """``redis://host:port/db``, ``rediss://`` for TLS or ``unix:///path``. For Sentinel and
    Cluster, several hosts may be given, separated by commas."""
    sentinel: str = ""
    """Name of the master. With it, the hosts of the URL are Sentinels, which tell its address."""
    cluster: bool = False
    """True if the hosts of the URL are nodes of a Redis Cluster."""
    username: str = ""
    """Name of an ACL user, instead of the one in the URL."""
    password: str = ""
    """Password of that user."""
    password_file: str = ""
    """File with that password in its first line. If a server refuses it, those in further lines are
    tried. The file is read again for each new connection."""
    sentinel_username: str = ""
    """Name of an ACL user of the Sentinels."""
    sentinel_password: str = ""
    """Password of that user."""
    ca: str = ""
    """File with the CA certificates that verify the servers; the system's if empty."""
    certificate: str = ""
    """File with the client certificate, for servers that ask for one."""
    certificate_key: str = ""
    """File with the key of that certificate."""
    connections: Annotated[int, msgspec.Meta(ge=1, le=64, description="a number from 1 to 64")] = 4
    """Largest number of connections to each server."""
    connect_timeout: Duration = Duration(2)
    """Time limit to connect and log in."""
    ttls: dict[str, Duration] = msgspec.field(default_factory=dict[str, Duration])
    """Lifetime of blocks on the server, by the lowest priority to which it applies."""
    quota: QuotaOptions = QuotaOptions()
    probe_timeout: Duration | None = None
    """Time limit for asking which blocks the servers have; by default the limit of any call."""
    probe_cache: Duration = Duration(1)
    """Time for which the answer that a block is absent stays valid."""

    def __post_init__(self) -> None:
        try:
            url = parse_url(self.url)
        except ValueError as error:
            hint = "expected redis://[user:password@]host[:port][/db], rediss:// or unix:///path"
            raise ConfigError(str(error), path="url", hint=hint) from None
        self._check_topology(url)
        if self.password_file and (self.password or url.password):
            what = "a password is set here and in another place"
            raise ConfigError(what, path="password_file", hint="set it in one place")
        if (self.username or self.password) and (url.username or url.password):
            what = "a user is set here and in the url"
            raise ConfigError(what, path="username", hint="set it in one place")
        for name in ("ca", "certificate", "certificate_key"):
            path: str = getattr(self, name)
            if path and not url.tls:
                raise ConfigError("has no effect", path=name, hint="expected a url with rediss://")
            if path and not Path(path).is_file():
                raise ConfigError(f"no such file: {path!r}", path=name)
        for least in self.ttls:
            if least not in map(str, range(PRIORITY_MIN, PRIORITY_MAX + 1)):
                hint = f"expected priorities in quotes, '{PRIORITY_MIN}' to '{PRIORITY_MAX}'"
                raise ConfigError(repr(least), path="ttls", hint=hint)
        if bool(self.certificate) != bool(self.certificate_key):
            missing = "certificate_key" if self.certificate else "certificate"
            raise ConfigError(
                "missing", path=missing, hint="set both certificate and certificate_key"
            )

    def _check_topology(self, url: Url) -> None:
        is_unix = url.addresses[0].port == 0
        if self.sentinel and self.cluster:
            hint = "leave one of them out"
            raise ConfigError("cannot be combined with sentinel", path="cluster", hint=hint)
        if (self.sentinel or self.cluster) and is_unix:
            path = "cluster" if self.cluster else "sentinel"
            raise ConfigError("needs hosts", path=path, hint="expected redis:// or rediss://")
        if self.cluster and url.db:
            raise ConfigError(
                "a cluster has only database 0", path="url", hint="leave the number out"
            )
        if len(url.addresses) > 1 and not (self.sentinel or self.cluster):
            hint = "set sentinel to the master's name, or cluster: true"
            raise ConfigError("several hosts, without sentinel or cluster", path="url", hint=hint)
        if (self.sentinel_username or self.sentinel_password) and not self.sentinel:
            raise ConfigError("has no effect", path="sentinel_password", hint="set sentinel")

    @property
    def parsed(self) -> Url:
        """The parts of the URL, with ``username`` and ``password`` in place of the URL's user."""
        url = parse_url(self.url, port=SENTINEL_PORT if self.sentinel else PORT)
        return url._replace(
            username=self.username or url.username, password=self.password or url.password
        )

    @property
    def claims(self) -> list[tuple[str, str]]:
        """Settings, and values of them, that no other level of a stack may have: each server with
        its database, without its user.
        """
        url, of = self.parsed, f"{self.sentinel} at " if self.sentinel else ""
        return [("url", f"{of}{address}/{url.db}") for address in url.addresses]

    def ttl_s(self, priority: int) -> float | None:
        """Return how long the server keeps a block of this priority; None means no limit."""
        found = max((int(least) for least in self.ttls if int(least) <= priority), default=None)
        return None if found is None else self.ttls[str(found)]
