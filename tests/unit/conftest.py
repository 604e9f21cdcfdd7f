"""Configurations for the tests of how they are read."""

from __future__ import annotations

from typing import ClassVar

import msgspec
import pytest

from kvladder.config import registry
from kvladder.config.stack import load_config
from kvladder.errors import ConfigError
from kvladder.tiers.memory import MemoryTier
from kvladder.units import Duration


@pytest.fixture
def load(tmp_path):
    """Load a YAML text as a file, in an empty environment."""

    def loading(text, *, env=None, overrides=None):
        path = tmp_path / "stack.yaml"
        path.write_text(text)
        return load_config(path, env=env or {}, overrides=overrides)

    return loading


@pytest.fixture
def refusal(load):
    """The error that a YAML text, or a mapping, gives."""

    def refusing(source, **arguments):
        read = load if isinstance(source, str) else load_config
        with pytest.raises(ConfigError) as got:
            read(source, **{"env": {}, **arguments})
        return got.value

    return refusing


class RemoteOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options as a plug-in declares them."""

    url: str
    retries: int = 2
    linger_s: Duration = msgspec.field(name="linger", default=Duration(1))
    password: str = ""

    def __post_init__(self):
        if self.retries > 9:
            raise ValueError("at most 9 retries")
        if self.url == "nowhere":
            raise ConfigError("leads nowhere", path="url", hint="somewhere")


class Remote(MemoryTier):
    """A third party's tier with its own settings."""

    Options: ClassVar = RemoteOptions
    batch_max = 8
    overhead_bytes = 4096

    def __init__(self, options):
        super().__init__()
        self.options = options


@pytest.fixture
def remote(monkeypatch):
    """A third party's tier, registered."""
    monkeypatch.setitem(registry._registered, ("tiers", "remote"), Remote)
    return Remote
