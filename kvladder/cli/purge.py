"""``kvladder purge``: remove a namespace's blocks, or those of one salt, from shared tiers."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final

from kvladder import registry
from kvladder.arena import Arena
from kvladder.config import load_config
from kvladder.errors import ConfigError, TierError
from kvladder.keys import KEY_BYTES, Namespace, salt_digest
from kvladder.layout import PAGE_BYTES, Layout
from kvladder.runtime import Runtime, SystemClock
from kvladder.settings import LevelConfig
from kvladder.tiers.base import TierContext

BAR: Final = 30


def purge(config: Path, *, namespace: str, salt: str | None = None) -> str:
    """Remove the blocks and say how many went; a progress line goes to the terminal's stderr.

    Parameters
    ----------
    config:
        The YAML file, which names the servers.
    namespace:
        64 hexadecimal digits, as an engine prints them when it starts.
    salt:
        Only the blocks of requests with this cache salt; None means all.

    Raises
    ------
    ConfigError
        Something of this is wrong, or a server did not do what it was asked.
    """
    try:
        space = Namespace(bytes.fromhex(namespace))
    except ValueError:
        space = Namespace(b"")
    if len(space) != KEY_BYTES:
        hint = f"expected {2 * KEY_BYTES} hexadecimal digits, as an engine prints them at start"
        raise ConfigError(repr(namespace), path="--namespace", hint=hint)
    if salt == "":
        raise ConfigError("empty", path="--salt", hint="leave it out to remove all")
    found = load_config(config)
    shared = [level for level in found.levels if registry.load("tiers", level.type).shared]
    if not shared:
        raise ConfigError("no tier is shared", path="tiers", hint="other tiers end with an engine")
    digest = None if salt is None else salt_digest(space, salt)
    return "\n".join(
        f"{level.name}: {_purge(level, space, digest)} values removed" for level in shared
    )


def _purge(level: LevelConfig, space: Namespace, salt: bytes | None) -> int:
    layout = Layout(block_tokens=1, block_bytes=PAGE_BYTES)  # keys do not depend on it
    runtime, arena, tier = Runtime(), Arena.create(1, layout.slot_bytes), level.make_tier()
    context = TierContext(arena, layout, space, 1, SystemClock(), runtime.run_blocking)
    try:
        runtime.call(tier.open(context))
        return runtime.call(tier.purge(salt, _bar(level.name)))
    except TierError as error:
        raise ConfigError(str(error), path=level.name) from error
    finally:
        runtime.call(tier.aclose())
        runtime.close()
        arena.close()


def _bar(name: str) -> Callable[[int, int], None]:
    """Draws how far it is, over and over in one line, if somebody sees it."""

    def draw(done: int, total: int) -> None:
        if sys.stderr.isatty():
            filled = BAR * done // max(1, total)
            end = "\n" if done >= total else ""
            bar = "#" * filled + "." * (BAR - filled)
            print(f"\r{name} [{bar}] {done}/{total} keys", end=end, file=sys.stderr, flush=True)

    return draw
