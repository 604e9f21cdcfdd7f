"""The section ``http``: the port that serves health, metrics and a page."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable
from typing import Final

from kvladder.errors import ConfigError
from kvladder.schema import Address, Settings
from kvladder.secrets.file import Secrets

TOKEN_MIN: Final = 16
PORT_MAX: Final = 65535


def is_loopback(host: str) -> bool:
    """Return whether a host is certainly this machine alone."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def require_token(token: str, path: str) -> None:
    """Raise ConfigError if ``token`` cannot be sent in a header, or is easily guessed."""
    if len(token) < TOKEN_MIN or not token.isascii() or not token.isprintable() or " " in token:
        hint = "make one with: openssl rand -hex 16"
        what = f"expected at least {TOKEN_MIN} visible ASCII characters"
        raise ConfigError(what, path=path, hint=hint)


def port_of(port: int, instance: int, path: str) -> int:
    """Return the port of one of several engines; 0 stays any free port.

    Raises
    ------
    ConfigError
        That port does not exist.
    """
    own = port + instance if port else 0
    if own > PORT_MAX:
        hint = f"expected a port of at most {PORT_MAX - instance}"
        raise ConfigError(f"engine {instance} would listen at {own}", path=path, hint=hint)
    return own


class HttpConfig(Settings, frozen=True, kw_only=True):
    """A port that serves health, metrics and a page. ``http: HOST:PORT`` is short for it."""

    listen: Address | None = None
    """Host and port; further engines of one configuration take the next ports."""
    token: str = ""
    """Secret that clients need to change anything, such as to purge; ``${NAME}`` is a variable."""
    token_file: str = ""
    """File with the token in its first line. Tokens in further lines count, too. The file is read
    again when it has changed."""
    hosts: tuple[str, ...] = ()
    """Names, beside addresses and ``localhost``, under which clients may reach the port."""

    def __post_init__(self) -> None:
        if self.listen is None:
            if self.token or self.token_file or self.hosts:
                hint = "expected host:port, or leave the section out"
                raise ConfigError("missing", path="listen", hint=hint)
            return
        if self.token and self.token_file:
            raise ConfigError("both are set", path="token", hint="leave out one of them")
        if self.token:
            require_token(self.token, "token")
        host = self.listen.rpartition(":")[0].strip("[]")
        if not (self.token or self.token_file or is_loopback(host)):
            hint = "set http.token_file or http.token, or listen at 127.0.0.1"
            raise ConfigError(f"missing, for clients at {host}", path="token", hint=hint)

    @property
    def secret(self) -> str:
        """The newest token; empty if nothing may be changed.

        Raises
        ------
        ConfigError
            The file cannot be read, or holds no token.
        """
        return next(iter(self.secrets().lines()), "")

    def secrets(self, say: Callable[[str, str], object] = lambda _kind, _text: None) -> Secrets:
        """Return all tokens; ``say`` is told when they change. Raises as ``secret`` does."""
        where = "http.token_file"
        return Secrets(
            self.token, file=self.token_file, setting=where, require=require_token, say=say
        )

    def of(self, instance: int) -> str:
        """Return the address of one of several engines; ``listen`` is set."""
        host, _, port = (self.listen or "").rpartition(":")
        return f"{host}:{port_of(int(port), instance, 'http.listen')}"
