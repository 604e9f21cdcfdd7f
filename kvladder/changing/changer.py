"""Applies another stack to a cache that serves: whole, or not at all."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any, Final, cast

import msgspec

from kvladder.arena import Slot
from kvladder.changing.differences import Change, Differences, compare, identity
from kvladder.changing.text import edited, replace_text
from kvladder.config.levels import call_settings, level_definition, named_layout
from kvladder.config.registry import finder
from kvladder.config.settings import LevelConfig
from kvladder.config.stack import StackConfig, load_config
from kvladder.errors import ConfigError, TierError, refusal
from kvladder.layout import Layout
from kvladder.manager import CacheManager
from kvladder.runtime import Runtime
from kvladder.schema import parsed, within
from kvladder.tiers.base import Tier
from kvladder.tiers.codecs.pipeline import PipelineSettings, told_apart
from kvladder.tiers.ladder.changing.attaching import LevelAttacher
from kvladder.tiers.ladder.changing.tuning import HostTuning, LevelTuner, LevelTuning, Tuning
from kvladder.tiers.ladder.lifecycle import LevelLifecycle
from kvladder.tiers.ladder.stack import TierStack

FLUSH_S: Final = 30.0
"""Seconds that a detached level gets to write what is queued for it."""
CLOSE_S: Final = 25.0
"""Seconds that closing waits for a change in progress."""


class Busy(ConfigError):
    """Another change is in progress."""


@dataclass(frozen=True, kw_only=True)
class StackChange:
    """A change that was checked and can be carried out."""

    running: StackConfig
    """The stack that it was compared with."""
    wanted: StackConfig
    text: str
    """The text of the wanted stack."""
    found: Differences
    save: Path | None
    """The file that gets the text."""

    @property
    def changes(self) -> Sequence[Change]:
        """Differences from the running stack."""
        return self.found.changes


@dataclass(eq=False)
class _Progress:
    """The part of a change that is done, and that can be undone."""

    attached: dict[str, LevelLifecycle] = field(default_factory=dict[str, LevelLifecycle])
    """Levels that are open now, by the identity of their media."""
    grown: list[tuple[LevelLifecycle, int]] = field(
        default_factory=list[tuple[LevelLifecycle, int]]
    )
    """Levels whose tiers are ready for more blocks, and their capacities before."""
    scratch: dict[str, list[Slot]] = field(default_factory=dict[str, list[Slot]])


class StackChanger:
    """Changes the stack of a running cache, one change at a time; see ``plan`` and ``carry_out``.

    Parameters
    ----------
    config:
        The settings that the cache runs with.
    layout:
        The engine's layout, without the fields that the settings add.
    runtime:
        Owns the loop that moves the cache's bytes.
    require:
        Raises ConfigError if a setting has no effect in this cache.
    make_tier:
        Makes the tier of a level.
    changed:
        Is told of the new settings, on the cache's loop.
    """

    def __init__(
        self,
        manager: CacheManager,
        stack: TierStack,
        config: StackConfig,
        layout: Layout,
        runtime: Runtime,
        *,
        require: Callable[[StackConfig], object] = lambda _: None,
        make_tier: Callable[[LevelConfig], Tier] = LevelConfig.make_tier,
        changed: Callable[[StackConfig], object] = lambda _: None,
    ) -> None:
        self.config = config
        self._manager = manager
        self._stack = stack
        self._layout = layout
        self._runtime = runtime
        self._require = require
        self._make_tier = make_tier
        self._changed = changed
        self._text: str | None = None
        """The text of the running stack if it was changed since the start."""
        self._tuner = LevelTuner(stack)
        self._attacher = LevelAttacher(stack, layout, manager.namespace, runtime.threads)
        self._scratch: dict[str, list[Slot]] = {}
        """Slots that attached levels use to encode, by name; a level from the start has its own."""
        self._running: asyncio.Task[None] | None = None
        self._closed = False

    # ---- what is to be changed

    def plan(
        self, *, text: str | None = None, settings: Mapping[str, str] | None = None, save: bool
    ) -> StackChange:
        """Check a whole stack as a start would, and return what differs from the running one.

        Nothing changes. ``text`` is the YAML of the stack; None takes the running one's.
        ``settings`` are single settings to change in it, by path. ``save`` writes the result into
        the file that the cache was started with.

        Raises
        ------
        ConfigError
            A setting is wrong, or cannot change while serving.
        """
        source = self.config.source
        is_base = text is None
        base = self._base() if text is None else text
        if is_base:
            self._require_same(base)
        for path, value in (settings or {}).items():
            base = edited(base, path, value)
        if save and not source.file:
            hint = "leave out save: the engine was given its settings as a mapping"
            raise ConfigError("there is no file to save to", path="save", hint=hint)
        wanted = self._load(base)
        return StackChange(
            running=self.config,
            wanted=wanted,
            text=base,
            found=self._compare(wanted),
            save=Path(source.file) if save else None,
        )

    def _base(self) -> str:
        """Return the text of the running stack, as far as it is known."""
        if self._text is not None:
            return self._text
        source = self.config.source
        if not source.file:
            return msgspec.yaml.encode(source.given).decode()
        try:
            return Path(source.file).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            hint = "send the whole stack"
            raise ConfigError(str(error), path=source.file, hint=hint) from error

    def _load(self, text: str) -> StackConfig:
        source = self.config.source
        given = parsed(text, source.file or "stack")
        if not isinstance(given, Mapping) or not given:
            hint = "expected arena: and tiers:"
            raise ConfigError("the configuration is no mapping", path=source.file, hint=hint)
        wanted = load_config(
            cast("Mapping[str, Any]", given), overrides=source.overrides, file=source.file
        )
        wanted.check(self._layout)
        self._require(wanted)
        return wanted

    def _require_same(self, base: str) -> None:
        """Raise ConfigError if the file is not the stack that runs."""
        try:
            found = compare(self.config, self._load(base)).changes
            what = "; ".join(map(str, found))
        except ConfigError as error:
            found, what = [], str(error)
        if what:
            hint = "apply the file first, or send the whole stack"
            raise ConfigError(
                f"it is not the stack that runs: {what}",
                path=self.config.source.file or "stack",
                hint=hint,
            )

    def _compare(self, wanted: StackConfig) -> Differences:
        found = compare(self.config, wanted)
        before, after = named_layout(self.config, self._layout), named_layout(wanted, self._layout)
        if before.fields != after.fields:
            what = "lossy codecs would change, and with them the names of all blocks"
            hint = "restart the engine with this stack"
            raise ConfigError(what, path="cannot change while serving", hint=hint)
        return found

    # ---- carrying it out

    async def carry_out(self, plan: StackChange) -> None:
        """Make the changes of a plan; on the cache's loop.

        Whatever fails, fails before any block is concerned, and is undone. Returns when all blocks
        are in line with the new settings.

        Raises
        ------
        Busy
            Another change is in progress, or the cache closes.
        ConfigError
            A level did not open or grow, or the file cannot be written; nothing has changed.
        """
        if self._running is not None or self._closed:
            what = "the cache closes" if self._closed else "another change is in progress"
            raise Busy(what, path="change", hint="try again when it has ended")
        if plan.running is not self.config:
            hint = "look at its settings, and ask again"
            raise Busy("the stack has changed since this change was checked", hint=hint)
        self._running = asyncio.current_task()
        try:
            await self._carry_out(plan)
        finally:
            self._running = None

    def _say(self, plan: StackChange) -> None:
        """Log what changed. A level that a client attached may receive all blocks."""
        say, types = (
            self._stack.shared.notices.say,
            {one.name: one.type for one in plan.wanted.levels},
        )
        if plan.found.attached:
            names = ", ".join(f"{name} ({types[name]})" for name in plan.found.attached)
            say("attached", f"levels were attached while serving, and may get all blocks: {names}")
        say("changed", f"the stack changed while serving: {'; '.join(map(str, plan.changes))}")

    async def _carry_out(self, plan: StackChange) -> None:
        done = _Progress()
        try:
            await self._prepare(plan, done)
            if plan.save is not None:
                await self._runtime.threads("change")(replace_text, plan.save, plan.text)
        except BaseException:
            await asyncio.shield(self._undo(done))
            raise
        tunings = self._tunings(plan.wanted, done)
        gone = {one.level.name: one for one in self._stack.lifecycles}
        gone = {name: gone[name] for name in plan.found.detached}
        with self._stack.lock:
            for lifecycle, tuning in tunings:
                level = self._stack.host if lifecycle is None else lifecycle.level
                self._tuner.set(level, tuning)
            self._stack.rejoin([*self._stack.lifecycles])
            self._adjust(plan.wanted)
        old = {level.name: level for level in self.config.levels}
        self.config, self._text = plan.wanted, plan.text
        self._scratch.update(done.scratch)
        ends = [self._detach(one, identity(old[name])) for name, one in gone.items()]
        follows = [self._tuner.follow(lifecycle, tuning) for lifecycle, tuning in tunings]
        results = await asyncio.gather(*ends, *follows, return_exceptions=True)
        self._changed(plan.wanted)
        self._say(plan)
        for error in results:
            if isinstance(error, BaseException):
                raise error

    async def _prepare(self, plan: StackChange, done: _Progress) -> None:
        """Do all that may fail: open new levels, and have tiers prepare for more blocks."""
        wanted = plan.wanted
        with wanted.source.explained():
            for number, level in enumerate(wanted.levels):
                if level.name in plan.found.attached:
                    try:
                        await self._attach(wanted, level, number, done)
                    except ConfigError as error:  # it lacks its place in the stack
                        raise within(f"tiers[{number + 1}]", error) from error
            for number, level in enumerate(wanted.levels):
                if level.name not in plan.found.attached:
                    await self._grow(level, number, done)

    async def _attach(
        self, wanted: StackConfig, level: LevelConfig, number: int, done: _Progress
    ) -> None:
        """Open a new level below the level that stands above it in the wanted stack."""
        above = wanted.tiers[number].name
        names = [self._stack.host.name, *(one.level.name for one in self._stack.lifecycles)]
        codecs = level.make_codecs()
        pipeline = PipelineSettings(codecs, finder(self._layout, self._manager.namespace))
        count = level.scratch_blocks(self._layout)
        scratch = self._stack.lease(count)
        done.scratch[level.name] = scratch
        if len(scratch) < count:
            what = f"its codecs need {count} slots of the arena, and {len(scratch)} are free now"
            raise ConfigError(what, path="codecs", hint="try again later, or restart the engine")
        slots = self._stack.shared.arena.slots
        spec = level_definition(
            wanted, level, self._layout, slots, pipeline, scratch, self._make_tier(level)
        )
        done.attached[identity(level)] = await self._attacher.attach(
            replace(spec, required=True), names.index(above), identity(level)
        )

    async def _grow(self, level: LevelConfig, number: int, done: _Progress) -> None:
        (lifecycle,) = [o for o in self._stack.lifecycles if o.level.name == level.name]
        before, after = lifecycle.level.capacity_blocks, level.capacity_blocks(self._layout)
        where = f"tiers[{number + 1}].capacity"
        if after != before and lifecycle.level.client.absent:
            raise ConfigError("the level is left out now", path=where, hint="wait until it is open")
        if after <= before:
            return
        try:
            await self._tuner.grow(lifecycle.level, after)
        except TierError as error:
            raise within(where, refusal(error, required=False)) from error
        done.grown.append((lifecycle, before))

    async def _undo(self, done: _Progress) -> None:
        """Take back what was prepared."""
        for lifecycle, before in done.grown:
            with suppress(TierError):  # it only keeps room that is not used
                await self._tuner.grow(lifecycle.level, before)
        for medium, lifecycle in done.attached.items():
            await self._attacher.detach(lifecycle, medium, flush_s=0.0)
        for slots in done.scratch.values():
            self._stack.give_back(slots)

    async def _detach(self, lifecycle: LevelLifecycle, medium: str) -> None:
        await self._attacher.detach(lifecycle, medium, flush_s=FLUSH_S)
        if not lifecycle.level.client.behind:  # or a call may still use them
            self._stack.give_back(self._scratch.pop(lifecycle.level.name, []))

    def _tunings(
        self, wanted: StackConfig, done: _Progress
    ) -> list[tuple[LevelLifecycle | None, Tuning]]:
        """Return the settings of each level that stays, with None for host."""
        arena, layout = self._stack.shared.arena, self._layout
        host = HostTuning(
            rule=wanted.host.rule,
            shares=wanted.shares(wanted.host, arena.slots, layout.slot_bytes),
            policy=self._new_policy(wanted.host, self.config.host),
            reserve_blocks=wanted.arena.reserve.of(arena.slots),
        )
        found: list[tuple[LevelLifecycle | None, Tuning]] = [(None, host)]
        configs = {level.name: level for level in wanted.levels}
        before = {level.name: level for level in self.config.levels}
        for lifecycle in self._stack.lifecycles:
            name = lifecycle.level.name
            if name not in configs or lifecycle in done.attached.values():
                continue
            config, blocks = configs[name], configs[name].capacity_blocks(layout)
            tuning = LevelTuning(
                rule=config.rule,
                shares=wanted.shares(config, blocks, config.block_bytes(layout)),
                policy=self._new_policy(config, before[name]),
                capacity_blocks=blocks,
                queue_blocks=max(1, config.queue.of(arena.slots)),
                calls=call_settings(config),
                endurance_bytes=config.endurance_bytes,
            )
            found.append((lifecycle, tuning))
        return found

    def _new_policy(self, wanted: Any, before: Any) -> Any:
        """Return a policy to take over; one that was told the capacity is replaced with it."""
        is_told = self._stack.indexes[before.name].is_told
        is_resized = getattr(wanted, "capacity_bytes", 0) != getattr(before, "capacity_bytes", 0)
        if wanted.policy != before.policy or (is_told and is_resized):
            return wanted.make_policy()
        return None

    def _adjust(self, wanted: StackConfig) -> None:
        """Give the manager and the loader the settings that concern no level; lock held."""
        manager, stack, fetch = self._manager, self._stack, wanted.fetch
        manager.fetch_deadline_s = fetch.deadline_s
        manager.limits = wanted.limits.of_requests
        stack.loader.limit(max(1, fetch.budget.of(stack.shared.arena.slots)))
        if fetch.when != self.config.fetch.when:
            stack.worth.decide(always=fetch.when == "always")
        used = (one.level.settings.pipeline.codecs for one in stack.lifecycles)
        manager.kinds = told_apart(self._layout, chain.from_iterable(used))

    def close(self) -> None:
        """Cancel a change in progress, and wait until it has ended or was undone."""
        self._closed = True

        async def ending() -> None:
            if self._running is not None:
                self._running.cancel()
                await asyncio.wait({self._running}, timeout=CLOSE_S)

        with suppress(TimeoutError, ConfigError):
            self._runtime.call(ending(), timeout_s=CLOSE_S + 1)
