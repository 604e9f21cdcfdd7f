"""What a measurement is of: a directory, or the URL of a server or store."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from kvladder.config.settings import LevelConfig
from kvladder.config.sources import PREFIX
from kvladder.config.stack import load_config
from kvladder.errors import ConfigError
from kvladder.schema import masked
from kvladder.tiers.object.options import SCHEMES as STORES
from kvladder.tiers.redis.url import SCHEMES as SERVERS

NAME = "bench"
EXPECTED = (
    "expected a directory, redis://host, s3://bucket/prefix, http://host:port/bucket,"
    " or host:port of kvladder serve"
)
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_ADDRESS = re.compile(r"(\[[0-9a-fA-F:]+\]|[A-Za-z0-9_.-]+):[0-9]{1,5}")


@dataclass(frozen=True)
class MediumTarget:
    """A medium to measure, and the settings of its tier."""

    shown: str
    """The argument, without a password."""
    settings: Mapping[str, Any]
    """Keys of the tier, with ``type``."""
    directory: Path | None = None
    """The directory, if it is one."""

    def level(self, capacity: int, codecs: object = ()) -> LevelConfig:
        """Return the level of a stack that has this tier.

        Raises
        ------
        ConfigError
            A setting is wrong, or a library is missing.
        """
        tier = {"name": NAME, "capacity": capacity, "codecs": codecs, **self.settings}
        if not codecs:
            del tier["codecs"]
        stack = {"arena": {"size": "1 MiB"}, "tiers": [{"type": "host"}, tier]}
        try:
            env = {name: value for name, value in os.environ.items() if PREFIX not in name}
            (level,) = load_config(stack, env=env).levels
        except ConfigError as error:
            raise self.explained(error) from error
        return level

    def explained(self, error: ConfigError) -> ConfigError:
        """Return an error of the tier's settings as one of the command's arguments."""
        key = error.path.removeprefix("tiers[1]").lstrip(".")
        if key.startswith("codecs"):
            return ConfigError(error.message, path="--codec", hint=error.hint)
        where = self.shown if key in {"", "url", "path", "servers"} else f"--settings: {key}"
        return ConfigError(error.message, path=where, hint=error.hint)


def target(given: str, settings: Mapping[str, Any]) -> MediumTarget:
    """Return what a directory or URL names, with further settings of its tier.

    Raises
    ------
    ConfigError
        It names nothing that can be measured.
    """
    found = _SCHEME.match(given)
    if found is None:
        return _unnamed(given, settings)
    scheme, shown = found[1].lower(), masked(given)
    if scheme in SERVERS:
        return MediumTarget(shown, {"type": "redis", "url": given, **settings})
    if scheme in STORES:
        return MediumTarget(shown, {"type": "object", "url": given, **settings})
    if scheme in {"http", "https"}:
        return _store(given, shown, settings)
    raise ConfigError(f"unknown scheme {scheme}://", path=shown, hint=EXPECTED)


def _store(given: str, shown: str, settings: Mapping[str, Any]) -> MediumTarget:
    """Return the S3 store at the URL of its server and bucket."""
    url = urlsplit(given)
    bucket = url.path.strip("/")
    if not url.hostname or not bucket or "@" in url.netloc or url.query:
        hint = "expected http://host:port/bucket; set credentials in the environment or --settings"
        raise ConfigError("names no bucket", path=shown, hint=hint)
    options: dict[str, Any] = {"endpoint": f"{url.scheme}://{url.netloc}"}
    options |= {"allow_http": True} if url.scheme == "http" else {}
    options |= settings.get("options", {})
    kept = {**settings, "options": options}
    return MediumTarget(shown, {"type": "object", "url": f"s3://{bucket}", **kept})


def _unnamed(given: str, settings: Mapping[str, Any]) -> MediumTarget:
    """Return a directory, or the server at an address."""
    path = Path(given)
    if path.is_dir():
        return MediumTarget(given, {"type": "files", "path": given, **settings}, path)
    if _ADDRESS.fullmatch(given) and not path.exists():
        if "keys" not in settings:
            hint = "expected --settings '{keys: CLIENT.KEYS}', the file that kvladder serve made"
            raise ConfigError("the keys of a client are missing", path=given, hint=hint)
        return MediumTarget(given, {"type": "nixl", "servers": [given], **settings})
    what = "is not a directory" if path.exists() else "no such directory"
    raise ConfigError(what, path=given, hint=EXPECTED)
