"""Keys of the control channel: ZeroMQ's CURVE, by which each end authenticates the other."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec
import zmq

from kvladder.errors import ConfigError
from kvladder.schema import Settings, convert, load_yaml
from kvladder.secrets.file import FileReader

Key = Annotated[str, msgspec.Meta(pattern=r"^[\x21-\x7e]{40}$", description="40 characters, Z85")]
Space = Annotated[
    str, msgspec.Meta(pattern=r"\A[0-9a-f]{64}\Z", description="a namespace, 64 digits")
]
NAME_DIGITS = 8
HINT = "expected a file made by kvladder serve --new-keys"


class Rights(NamedTuple):
    """The namespaces that a client may read and write; None means all."""

    read: frozenset[bytes] | None = None
    write: frozenset[bytes] | None = None
    name: str = ""
    """Name of the client for operators: the tenant's, or the beginning of its key's digest."""

    def may_read(self, namespace: bytes) -> bool:
        """Return whether the client may read blocks of this namespace."""
        return self.read is None or namespace in self.read or self.may_write(namespace)

    def may_write(self, namespace: bytes) -> bool:
        """Return whether the client may put, remove and purge blocks of this namespace."""
        return self.write is None or namespace in self.write


ALL = Rights()


class Tenant(Settings, frozen=True, kw_only=True):
    """A group of a server's clients that may use only some namespaces."""

    name: str
    peers: list[Key]
    """Public keys of the clients."""
    read: tuple[Space, ...] = ()
    write: tuple[Space, ...] = ()
    """Namespaces that the clients may write, and also read."""

    @property
    def rights(self) -> Rights:
        """Rights of each of the clients."""
        read, write = (frozenset(map(bytes.fromhex, one)) for one in (self.read, self.write))
        return Rights(read, write, self.name)


def _key_name(key: str) -> str:
    """Return a short name of a public key."""
    return hashlib.sha256(key.encode()).hexdigest()[:NAME_DIGITS]


class KeyFile(Settings, frozen=True, kw_only=True):
    """The content of a key file of one end."""

    secret: Key
    """Secret key of this end."""
    peers: list[Key]
    """Public keys of the other ends: in a client's file the far end's key, in a server's file keys
    of clients that may use all namespaces."""
    tenants: tuple[Tenant, ...] = ()
    """In a server's file, the clients that may use only some namespaces."""

    def __post_init__(self) -> None:
        keys = [*self.peers, *(key for tenant in self.tenants for key in tenant.peers)]
        if len({*keys}) < len(keys):
            raise ValueError("a public key is listed twice")

    @property
    def rights(self) -> dict[str, Rights]:
        """Rights of each client of a server, by public key."""
        named = {key: one.rights for one in self.tenants for key in one.peers}
        return {**{key: ALL._replace(name=_key_name(key)) for key in self.peers}, **named}

    @property
    def public(self) -> bytes:
        """Public key of this end."""
        return zmq.curve_public(self.secret.encode())


def read_keys(path: str) -> KeyFile:
    """Read a key file.

    Raises
    ------
    ConfigError
        The file is missing, readable by others or not a key file, or it names no peer.
    """
    file = Path(path)
    try:
        if file.stat().st_mode & 0o077:
            raise ConfigError(
                f"other users have access to {path}", path="keys", hint=f"run chmod 600 {path}"
            )
        keys = convert(load_yaml(file), KeyFile)
        _ = keys.public
    except (OSError, ValueError) as error:
        if isinstance(error, ConfigError) and error.path == "keys":
            raise
        # leave out the error's own text: it may quote a secret
        why = error.strerror if isinstance(error, OSError) else "not a key file"
        raise ConfigError(f"{path}: {why}", path="keys", hint=HINT) from None
    if not keys.peers and not any(tenant.peers for tenant in keys.tenants):
        raise ConfigError(f"{path} lists no peer", path="keys", hint=HINT)
    return keys


class KeyRing:
    """The keys of one end, read again when their file has changed. ``keys`` are the current ones.

    While the file is wrong, the keys that it last had stay in effect.

    Parameters
    ----------
    path:
        The file's path.
    say:
        Called with a text when the file has changed, or is wrong.

    Raises
    ------
    ConfigError
        See ``read_keys``.
    """

    def __init__(self, path: str, say: Callable[[str], object]) -> None:
        self._path = path
        self._say = say
        self._reader = FileReader(partial(read_keys, path), say, "keys")

    @property
    def keys(self) -> KeyFile:
        """The current keys."""
        return self._reader.value

    def renew(self) -> bool:
        """Read the file again, which blocks; return whether the keys are others now."""
        is_other, _ = self._reader.renew()
        if is_other:
            self._say(f"the keys in {self._path} have changed, and the new ones are used")
        return is_other


def make_keys(folder: Path) -> tuple[Path, Path]:
    """Write ``server.keys`` and ``client.keys`` into a folder, and return their paths.

    All clients of a server share ``client.keys``. Raises OSError if one of the files exists.
    """
    (server, server_secret), (client, client_secret) = zmq.curve_keypair(), zmq.curve_keypair()
    folder.mkdir(parents=True, exist_ok=True)
    made: list[Path] = []
    for name, secret, peer in (
        ("server.keys", server_secret, client),
        ("client.keys", client_secret, server),
    ):
        made.append(folder / name)
        fd = os.open(made[-1], os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(fd, "w") as file:
            file.write(f'secret: "{_quoted(secret)}"\npeers: ["{_quoted(peer)}"]\n')
    return made[0], made[1]


def _quoted(key: bytes) -> str:
    """Return a key as text for a quoted YAML string; Z85 has no quote and no backslash."""
    return key.decode()
