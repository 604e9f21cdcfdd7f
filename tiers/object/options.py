"""The settings of an object store tier: its URL, credentials and limits."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, TypeAlias
from urllib.parse import urlsplit

import msgspec

from kvladder.errors import ConfigError
from kvladder.schema import Settings
from kvladder.units import Duration

Value: TypeAlias = str | bool | int

SCHEMES = ("s3", "gs", "az", "file")
_CLIENT = {
    "allow_http", "allow_invalid_certificates", "connect_timeout", "http1_only", "http2_only",
    "pool_idle_timeout", "pool_max_idle_per_host", "proxy_ca_certificate", "proxy_excludes",
    "proxy_url", "randomize_addresses", "read_timeout", "root_certificate", "timeout", "user_agent",
}  # fmt: skip
"""Those of obstore's options that concern connections; obstore takes them in another argument."""
_VENDOR = re.compile("^(aws|google|azure)_")


class ObjectOptions(Settings, frozen=True, kw_only=True):
    """The keys of an object store tier; see docs/how-to/object.md."""

    url: str
    """``s3://bucket/prefix``, ``gs://bucket/prefix``, ``az://account/container/prefix``, or
    ``file:///folder``."""
    options: dict[str, Value] = msgspec.field(default_factory=dict[str, Value])
    """Options of obstore by name, e.g. region and endpoint."""
    requests: Annotated[int, msgspec.Meta(ge=1, le=256, description="a number from 1 to 256")] = 32
    """Largest number of concurrent transfers of blocks."""
    probe_timeout: Duration | None = None
    """Time limit for asking which blocks the store has; by default the limit of any call."""
    probe_cache: Duration = Duration(5)
    """Time for which the answer that a block is absent stays valid."""

    def __post_init__(self) -> None:
        hint = "expected s3://bucket/prefix, gs://bucket, az://account/container or file:///folder"
        try:
            url = urlsplit(self.url)
        except ValueError as error:
            raise ConfigError(str(error), path="url", hint=hint) from None
        # the message does not quote the URL, which may hold a secret
        if "@" in url.netloc or url.query or url.fragment:
            wrong = "has a user or a query (?...)"
            keys = "set credentials in the environment, or in options"
            raise ConfigError(wrong, path="url", hint=keys)
        is_file = url.scheme == "file"
        if url.scheme not in SCHEMES or is_file == bool(url.netloc):
            raise ConfigError("not the URL of an object store", path="url", hint=hint)
        if url.scheme in {"az", "file"} and not url.path.strip("/"):
            raise ConfigError("incomplete", path="url", hint=hint)
        if is_file and self.options:
            raise ConfigError("have no effect on a folder", path="options", hint="leave them out")

    @property
    def claims(self) -> list[tuple[str, str]]:
        """Settings, and values of them, that no other level of a stack may have: the URL."""
        return [("url", self.url.rstrip("/"))]

    def split(self) -> tuple[Mapping[str, Value], Mapping[str, Value]]:
        """Return the options for the store, and those for its connections."""
        client = {key: _VENDOR.sub("", key.lower()) for key in self.options}
        return (
            {key: self.options[key] for key, name in client.items() if name not in _CLIENT},
            {name: self.options[key] for key, name in client.items() if name in _CLIENT},
        )
