"""Names the differences between two stacks, and says which of them need a restart."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

import msgspec

from kvladder.config.settings import LevelConfig, Sections
from kvladder.config.stack import StackConfig, text
from kvladder.errors import ConfigError
from kvladder.schema import is_secret, join, keys_of

NEEDS_RESTART: Final = {
    "arena.size": "the engine's workers have mapped the arena",
    "arena": "",
    "block": "it is part of the blocks' names",
    "control": "the control socket is made at the start",
    "events": "events are set up at the start",
    "export": "the export is set up at the start",
    "forget": "receipts are signed with the key of the start",
    "gpu": "the device's pools are laid out at the start",
    "http": "the port is opened at the start",
    "model": "it is part of the blocks' names",
    "otel": "spans are set up at the start",
    "record": "the recording is set up at the start",
    "shadow": "the shadow is set up at the start",
}
"""Sections and settings that cannot change, and why; an empty reason means that they can."""
SERVING: Final = frozenset(
    {
        "name", "min_priority", "min_hits", "ttl", "policy", "quota", "capacity", "when", "admit",
        "endurance", "timeout", "queue", "breaker",
    }
)  # fmt: skip
"""Settings of a level that can change while it serves."""
OPEN_WITH: Final = "the tier was opened with it: detach the level, then attach it again"


class Change(NamedTuple):
    """One difference between the running stack and the wanted one."""

    path: str
    """Where, with the level's name: ``tiers.nvme.capacity``."""
    what: str
    """What it was and what it is to be, without secrets."""

    def __str__(self) -> str:
        return f"{self.path}: {self.what}"


class Differences(NamedTuple):
    """The result of a comparison."""

    changes: list[Change]
    attached: list[str]
    """Names of levels that are new."""
    detached: list[str]
    """Names of levels that are gone."""


def compare(running: StackConfig, wanted: StackConfig) -> Differences:
    """Return what differs between two stacks.

    Raises
    ------
    ConfigError
        Some of it cannot change while serving. The message has each such setting, and the reason.
    """
    changes: list[Change] = []
    refused: list[str] = []
    for section in keys_of(Sections):
        before, after = getattr(running, section), getattr(wanted, section)
        for change in _changes(before, after, section):
            changes.append(change)
            whole = NEEDS_RESTART.get(section, "")
            why = NEEDS_RESTART.get(change.path, whole)
            if why:
                refused.append(f"{change}: {why}")
    old = {level.name: level for level in running.levels}
    new = {level.name: level for level in wanted.levels}
    changes += _level(running.host, wanted.host, refused)
    for name, level in old.items():
        if name in new:
            changes += _level(level, new[name], refused)
        else:
            changes.append(Change(f"tiers.{name}", "detached"))
    names = [running.host.name, *new]
    for at, (name, level) in enumerate(new.items()):
        if name not in old:
            changes.append(Change(f"tiers.{name}", f"{level.type}, attached below {names[at]}"))
    attached = [name for name in new if name not in old]
    detached = [name for name in old if name not in new]
    refused += _places(old, new, attached, detached)
    resized = [one.path for one in changes if one.path.endswith(".capacity")]
    if running.shadow.enabled and (attached or detached or resized):
        refused.append("tiers: the shadow measures the levels of the start")
    if refused:
        raise ConfigError(
            "; ".join(refused),
            path="cannot change while serving",
            hint="restart the engine with this stack, or leave these settings as they are",
        )
    return Differences(changes, attached, detached)


def _changes(before: Any, after: Any, path: str) -> Iterator[Change]:
    """Yield the differing settings of two sections of one type."""
    for field in msgspec.structs.fields(before):
        where, old, new = (
            join(path, field.encode_name),
            getattr(before, field.name),
            getattr(after, field.name),
        )
        is_section = isinstance(old, msgspec.Struct) and type(old) is type(new)
        if is_section and not is_secret(where):
            yield from _changes(old, new, where)
        elif old != new:
            what = f"{text(where, old)} -> {text(where, new)}"
            yield Change(where, "another secret" if is_secret(where) else what)


def _level(before: Any, after: Any, refused: list[str]) -> list[Change]:
    """Return the changes of one level; add those that are not possible to ``refused``."""
    path = f"tiers.{before.name}"
    if before.name != after.name:  # of host
        why = "events and statistics have this name"
        refused.append(f"{path}.name: {before.name} -> {after.name}: {why}")
        return []
    if before.type != after.type or getattr(before, "make", None) is not getattr(
        after, "make", None
    ):
        refused.append(f"{path}.type: {before.type} -> {after.type}: {OPEN_WITH}, in two steps")
        return []
    own = {field.encode_name: field for field in msgspec.structs.fields(after)}
    found: list[Change] = []
    for change in _settings(before, after, path, own):
        name = change.path.removeprefix(f"{path}.").partition(".")[0]
        is_own = name in own and own[name].name.startswith("own_")
        if name == "required":
            refused.append(f"{change}: only a start looks at it")
        elif name not in SERVING or is_own:
            refused.append(f"{change}: {OPEN_WITH}, in two steps")
        elif name == "capacity" and not _resizes(after):
            refused.append(f"{change}: a tier of this type cannot be resized while it is open")
        else:
            found.append(change)
    return found


def _settings(
    before: Any, after: Any, path: str, own: dict[str, msgspec.structs.FieldInfo]
) -> Iterator[Change]:
    """Yield the differing settings of two levels, which are structs of two classes."""
    for name, field in own.items():
        where = f"{path}.{name}"
        old, new = getattr(before, field.name, None), getattr(after, field.name)
        if name == "codecs":
            old, new = [one.identity for one in old or ()], [one.identity for one in new]
        if isinstance(old, msgspec.Struct) and type(old) is type(new) and not is_secret(where):
            yield from _changes(old, new, where)
        elif old != new:
            is_hidden = is_secret(where) or name == "codecs"
            what = f"{text(where, old)} -> {text(where, new)}"
            yield Change(where, "other settings" if is_hidden else what)


def _resizes(level: LevelConfig) -> bool:
    return level.make.shared or (level.make.resizes and not level.isolate)


def _places(
    old: dict[str, LevelConfig],
    new: dict[str, LevelConfig],
    attached: Sequence[str],
    detached: Sequence[str],
) -> Iterator[str]:
    """Yield why levels cannot stand where they are wanted."""
    staying = [name for name in old if name in new]
    if staying != (order := [name for name in new if name in old]):
        why = "levels that stay keep their order"
        yield f"tiers: {', '.join(staying)} -> {', '.join(order)}: {why}"
    held = {claim: name for name in detached for claim in claims(old[name])}
    for name in attached:
        for claim in claims(new[name]):
            if claim in held:
                what = f"tiers.{name}.{claim[0]}: {held[claim]} has it: detach that level first"
                yield f"{what}, in a change of its own"


def claims(level: LevelConfig) -> tuple[tuple[str, str], ...]:
    """Return the names of a level's medium, such as its directory, that no other may use."""
    found: tuple[tuple[str, str], ...] = getattr(level.options, "claims", ())
    return found


def identity(level: LevelConfig) -> str:
    """Return a name of a level's medium, the same when the level is attached again."""
    return f"{level.type} {claims(level) or level.name}"
