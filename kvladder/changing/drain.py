"""Drains a cache before its engine ends: writes down what only this engine has."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from math import inf
from typing import Any, Final, Literal

from kvladder.errors import ConfigError
from kvladder.keys import BlockKey
from kvladder.lock import STEP
from kvladder.manager import SET_MAX, CacheManager
from kvladder.tiers.ladder.level import Level
from kvladder.tiers.ladder.stack import TierStack

POLL_S: Final = 0.01
PASSES: Final = 2
"""How often a block is offered: a write may fail once."""
State = Literal["off", "draining", "done", "stopped"]


class Drain:
    """Stops a cache from taking blocks, and writes down those that no other engine could find.

    Loads work as before. Its methods run on the cache's loop. Without a level to write to, blocks
    that only host holds go to the first level that outlives the engine and admits them. With one,
    the blocks of all other private levels go there, too: it is shared, so that other engines read
    it, and may be another cache (the tier ``nixl``).
    """

    def __init__(self, manager: CacheManager, stack: TierStack) -> None:
        self._manager = manager
        self._stack = stack
        self.state: State = "off"
        self._target = ""
        self._total = 0
        self._seen = 0
        self._left: Counter[str] = Counter()
        self._lost = 0
        self._task: asyncio.Task[None] | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return the progress: blocks to write, blocks looked at, and why blocks are left.

        ``lost`` is the number of those left that another drain might write.
        """
        return {
            "state": self.state,
            "to": self._target,
            "blocks": self._total,
            "looked_at": self._seen,
            "left": dict(self._left),
            "lost": self._lost,
        }

    async def begin(self, to: str | None) -> None:
        """Take no more blocks, and begin to write down; ``to`` is a level's name.

        A drain in progress goes on if it has the same target.

        Raises
        ------
        ConfigError
            There is no such level, or none that outlives the engine; nothing has changed.
        """
        targets = self._targets(to)
        if self._task is not None and not self._task.done():
            if self._target == (to or ""):
                return
            await self.stop()
        self._target, self._total, self._seen, self._lost = to or "", 0, 0, 0
        self._left.clear()
        self._stack.draining, self.state = True, "draining"
        self._task = asyncio.create_task(self._run(targets), name="kvladder-drain")

    def _targets(self, to: str | None) -> list[Level]:
        lasting = [level for level in self._stack.levels if level.outlives]
        if to is None:
            if not lasting:
                hint = "name a level that outlives this engine, or attach one"
                raise ConfigError("no level outlives the engine", path="drain", hint=hint)
            return lasting
        found = [level for level in lasting if level.name == to]
        if not found:
            names = ", ".join(level.name for level in lasting)
            hint = f"expected one of: {names}" if names else "no level outlives this engine"
            raise ConfigError(f"{to!r} is no level to drain to", path="drain.to", hint=hint)
        return found

    async def wait(self, within_s: float) -> None:
        """Wait until the drain has ended, or for ``within_s`` seconds."""
        if self._task is not None:
            await asyncio.wait({self._task}, timeout=within_s)

    async def stop(self) -> None:
        """Take blocks again; a drain in progress ends where it is."""
        was_draining = self._task is not None and not self._task.done()
        if self._task is not None and was_draining:
            self._task.cancel()
            await asyncio.wait({self._task})
        self._stack.draining = False
        self.state = "stopped" if was_draining else "off"

    async def _run(self, targets: Sequence[Level]) -> None:
        try:
            for _ in range(PASSES):
                sources = self._sources(targets)
                wanted = [key for part in self._missing(sources, targets) for key in part]
                self._total, self._seen = max(self._total, len(wanted)), 0
                for start in range(0, len(wanted), SET_MAX):
                    await self._write(wanted[start : start + SET_MAX], sources, targets)
                    self._seen += len(wanted[start : start + SET_MAX])
                await self._flushed(targets)
            self._count_left(targets)
            self.state = "done"
        except BaseException:
            self.state = "stopped"
            raise

    def _sources(self, targets: Sequence[Level]) -> list[str]:
        """Return the names of the levels whose blocks would be lost."""
        kept = {level.name for level in targets}
        below = [level for level in self._stack.levels if not level.tier.shared]
        return [self._stack.host.name, *(lv.name for lv in below if lv.name not in kept)]

    def _missing(
        self, sources: Sequence[str], targets: Sequence[Level]
    ) -> Iterator[list[BlockKey]]:
        """Yield, in steps, the blocks of the sources that no target holds, each once."""
        seen: set[BlockKey] = set()
        indexes = self._stack.indexes
        for name in sources:
            index = indexes[name]
            for start in range(0, index.places, STEP):
                with self._stack.lock:
                    held = index.held(start, start + STEP)
                    part = [
                        key
                        for key in held
                        if key not in seen and not any(level.holds(key) for level in targets)
                    ]
                seen.update(part)
                yield part

    async def _write(
        self, keys: Sequence[BlockKey], sources: Sequence[str], targets: Sequence[Level]
    ) -> None:
        """Bring some blocks into host's slots, and queue them at the targets."""
        step = min([STEP, *(level.settings.queue_blocks for level in targets)])
        for start in range(0, len(keys), step):
            part = keys[start : start + step]
            fetch = self._manager.fetch_set(part, deadline_s=60.0, levels=sources)
            try:
                while not fetch.done:  # noqa: ASYNC110 - a fetch is asked, as by an engine
                    await asyncio.sleep(POLL_S)
                await self._flushed(targets)  # so that the queues have room
                found = {k: s for k, s in zip(fetch.keys, fetch.slots, strict=True) if s >= 0}
                with self._stack.lock:
                    for key, slot in found.items():
                        self._offer(key, slot, targets)
            finally:
                fetch.release()

    def _offer(self, key: BlockKey, slot: Any, targets: Sequence[Level]) -> None:
        meta = self._stack.meta(key)
        if meta is None:  # it was removed meanwhile
            return
        for level in targets:
            if level.admits(meta):
                level.offer([key], [slot], [meta])
                return

    async def _flushed(self, targets: Sequence[Level]) -> None:
        for lifecycle in self._stack.lifecycles:
            if lifecycle.level in targets:
                limit_s = 4 * lifecycle.level.client.settings.timeout_s
                with suppress(TimeoutError):
                    await asyncio.wait_for(lifecycle.drain(erased=True), limit_s)

    def _count_left(self, targets: Sequence[Level]) -> None:
        """Count the blocks that are still nowhere else, by reason."""
        for part in self._missing(self._sources(targets), targets):
            with self._stack.lock:
                for key in part:
                    meta = self._stack.meta(key)
                    if meta is None:
                        continue
                    is_lost = True
                    if not any(level.writable for level in targets):
                        why = "the level takes no writes now"
                    elif meta.terms.expires_s != inf and not meta.terms.last(self._stack.clock):
                        continue
                    elif not any(level.admits(meta) for level in targets):
                        why, is_lost = "the level's rules exclude them", False
                    else:
                        why = "they could not be read or written"
                    self._left[why] += 1
                    self._lost += is_lost

    def close(self) -> None:
        """End with the cache, which flushes by itself."""
        if self._task is not None:
            self._task.cancel()
