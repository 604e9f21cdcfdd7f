"""Keys of the control channel: CURVE, as ZeroMQ has it. Each end knows whom it talks to."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import msgspec
import zmq

from kvladder.errors import ConfigError
from kvladder.schema import Settings, convert, load_yaml

Key = Annotated[str, msgspec.Meta(pattern=r"^[\x21-\x7e]{40}$", description="40 characters, Z85")]
HINT = "expected a file that kvladder serve --new-keys has made"


class KeyFile(Settings, frozen=True, kw_only=True):
    """A file with the keys of one end."""

    secret: Key
    """Its own."""
    peers: list[Key]
    """The public ones of those that it talks to: of a client the far end's, or the reverse."""

    @property
    def public(self) -> bytes:
        """Its own."""
        return zmq.curve_public(self.secret.encode())


def read_keys(path: str) -> KeyFile:
    """The keys in a file; raises ConfigError."""
    file = Path(path)
    try:
        if file.stat().st_mode & 0o077:
            raise ConfigError(
                f"{path} can be read by others", path="keys", hint=f"expected chmod 600 {path}"
            )
        keys = convert(load_yaml(file), KeyFile)
        _ = keys.public
    except (OSError, ValueError) as error:
        if isinstance(error, ConfigError) and error.path == "keys":
            raise
        # not what it says: it may quote a secret
        why = error.strerror if isinstance(error, OSError) else "not a file of keys"
        raise ConfigError(f"{path}: {why}", path="keys", hint=HINT) from None
    if not keys.peers:
        raise ConfigError(f"{path} names no peer", path="keys", hint=HINT)
    return keys


def make_keys(folder: Path) -> tuple[Path, Path]:
    """Write ``server.keys`` and ``client.keys`` into a folder; raises OSError if one is there.

    All clients of a server share the latter.
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
    """For a YAML file; there is neither a quote nor a backslash in Z85."""
    return key.decode()
