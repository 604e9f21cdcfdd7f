"""Engines of an earlier version and of this one on the same far ends, in turns and at once.

``python -m tests.upgrade.turns --out FILE`` builds two earlier versions from their commits, and
writes what each engine found to ``benchmarks/results/FILE``. It exits with 1 if a block is wrong,
or if something is lost that ``docs/how-to/upgrade.md`` does not say.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.machine import RESULTS, machine
from benchmarks.stopping import exit_on_sigterm
from kvladder.testing.redisserver import RedisServer
from tests.kit.mooncake import PROGRAM, Mooncake
from tests.upgrade.elder import OLDER, PREVIOUS, THIS, Engine, ServerOf, Version
from tests.upgrade.stored import CLEARED

BLOCKS = 12
"""The number of blocks that each turn saves."""
TURNS = 6
AT_ONCE = 8
"""The number of saves of each of two engines that run at once."""

ABOUT = f"""\
Each engine loads all blocks that were saved before it, and saves {BLOCKS}. Each is a new process,
so the blocks come from the level below host memory.
"""


class Turn(NamedTuple):
    """What one engine found of the blocks that others saved before."""

    medium: str
    who: str
    own: tuple[int, int]
    """Blocks of its own version: found, and saved before."""
    other: tuple[int, int]
    wrong: int
    error: str = ""
    """Why it did not start."""
    expected: bool = True
    """Whether the page on upgrades says so."""


def stack_of(level: Mapping[str, Any]) -> dict[str, Any]:
    """Return a stack of host memory and one level."""
    below = {"name": "below", "capacity": "64 MiB", "when": "commit", **level}
    return {"arena": {"size": "16 MiB"}, "tiers": [{"type": "host"}, below]}


class Ledger:
    """Counts what engines find of what others saved, and whether that is expected."""

    def __init__(self, medium: str) -> None:
        self._medium = medium
        self.saved: list[tuple[str, Version]] = []

    def save(self, engine: Engine) -> None:
        """Save the next prefix."""
        name = f"{self._medium} {len(self.saved)}"
        assert engine("save", name, BLOCKS) == BLOCKS
        self.saved.append((name, engine.version))

    def load(self, engine: Engine, what: str = "") -> Turn:
        """Load all that was saved before."""
        found, saved, wrong = {True: 0, False: 0}, {True: 0, False: 0}, 0
        for name, version in self.saved:
            is_own = version == engine.version
            came, bad = engine("load", name, BLOCKS)
            found[is_own], saved[is_own] = found[is_own] + came, saved[is_own] + BLOCKS
            wrong += bad
        share = all(version.same_formats for _, version in self.saved)
        share = share and engine.version.same_formats
        expected = not wrong and found[True] == saved[True]
        expected = expected and found[False] == (saved[False] if share else 0)
        who = f"{engine.version.name}{what}"
        own, other = (found[True], saved[True]), (found[False], saved[False])
        return Turn(self._medium, who, own, other, wrong, expected=expected)


def in_turns(
    medium: str,
    folder: Path,
    level: Mapping[str, Any],
    versions: tuple[Version, Version],
    *,
    block_bytes: int = 4096,
) -> Iterator[Turn]:
    """Run engines of two versions one after the other; each loads all, and saves some."""
    ledger = Ledger(medium)
    for _, version in zip(range(TURNS), cycle(versions), strict=False):
        with Engine(version, folder, stack_of(level), block_bytes=block_bytes) as engine:
            yield ledger.load(engine)
            ledger.save(engine)


def at_once(
    medium: str, folder: Path, level: Mapping[str, Any], versions: tuple[Version, Version]
) -> Iterator[Turn]:
    """Run engines of two versions at the same time."""
    ledger = Ledger(f"{medium}, at once")
    with ExitStack() as undo:
        both = [
            undo.enter_context(Engine(version, folder, stack_of(level))) for version in versions
        ]
        for _ in range(AT_ONCE):
            for engine in both:
                ledger.save(engine)
        for engine in both:
            yield ledger.load(engine)


def over_server(folder: Path, versions: tuple[Version, Version]) -> Iterator[Turn]:
    """Run engines of two versions over a server of each, which is replaced by the other."""
    place = folder / "served"
    with ServerOf(versions[0], folder, place) as server:
        ledger = Ledger("kvladder serve")
        level = server.level(name="below")
        for served_by in (versions[0], versions[1], versions[0]):
            if ledger.saved:
                assert server.stop() == 0
                server.become(served_by, folder)
            for version in versions:
                with Engine(version, folder, stack_of(level)) as engine:
                    yield ledger.load(engine, f", server of {served_by.name}")
                    ledger.save(engine)


def older_files(folder: Path) -> Iterator[Turn]:
    """Give a directory of older formats to this version, and back."""
    level = {"type": "files", "path": str(folder / "older-files")}
    ledger = Ledger("files")
    for _ in range(2):
        with Engine(OLDER, folder, stack_of(level)) as engine:
            yield ledger.load(engine)
            ledger.save(engine)
    log = folder / "engine.log"
    before = len(log.read_text())
    with Engine(THIS, folder, stack_of(level)) as engine:
        told = log.read_text()[before:]
        turn = ledger.load(engine)
        cleared = told.count(CLEARED) == 1
        yield turn._replace(
            who=f"{turn.who}; it clears the directory and says so",
            expected=turn.expected and cleared,
        )
        ledger.save(engine)
    engine = Engine(OLDER, folder, stack_of(level))
    is_refused = "META is of format" in engine.error
    yield Turn("files", OLDER.name, (0, 0), (0, 0), 0, engine.error, is_refused)


def turns(folder: Path) -> Iterator[Turn]:
    """Yield each turn of all media."""
    with RedisServer(folder / "redis") as redis:
        for number, versions in enumerate(((PREVIOUS, THIS), (OLDER, THIS))):
            level = {"type": "redis", "url": f"{redis.url}/{number}"}
            yield from in_turns("Redis", folder, level, versions)
            yield from at_once("Redis", folder, level, versions)
    files = {"type": "files", "path": str(folder / "files")}
    yield from in_turns("files", folder, files, (PREVIOUS, THIS))
    yield from older_files(folder)
    bucket = folder / "bucket"
    bucket.mkdir()
    objects = {"type": "object", "url": f"file://{bucket}"}
    yield from in_turns("object", folder, objects, (PREVIOUS, THIS), block_bytes=256 << 10)
    yield from over_server(folder, (PREVIOUS, THIS))
    if PROGRAM.exists():
        (folder / "mooncake").mkdir()
        with Mooncake(folder / "mooncake") as store:
            level = {"type": "mooncake", "master": store.master}
            yield from in_turns("Mooncake", folder, level, (PREVIOUS, THIS))


def told(found: list[Turn], about: Mapping[str, str]) -> str:
    """Return the page of a result."""
    facts = "\n".join(f"- {name}: {value}" for name, value in about.items())
    lines = [
        f"# Upgrades of {about['date'][:10]}: engines of two versions on the same far ends\n",
        facts,
        (
            f"- earlier versions: commit {PREVIOUS.commit} of {PREVIOUS.name}, which has today's"
            f" formats; commit {OLDER.commit} of {OLDER.name}, whose blocks have no labels"
        ),
        "",
        ABOUT,
        "| far end | engine | of its version | of the other | wrong | as documented |",
        "| --- | --- | ---: | ---: | ---: | --- |",
    ]
    for one in found:
        who = f"{one.who}: refuses to start" if one.error else one.who
        counts = (f"{found} of {saved}" for found, saved in (one.own, one.other))
        expected = "yes" if one.expected else "**no**"
        lines.append(f"| {one.medium} | {who} | {' | '.join(counts)} | {one.wrong} | {expected} |")
    return "\n".join([*lines, ""])


def main() -> int:
    """Run all turns and print their page."""
    parser = argparse.ArgumentParser(prog="python -m tests.upgrade.turns", description=__doc__)
    parser.add_argument("--out", metavar="FILE", help="write to benchmarks/results/FILE as well")
    arguments = parser.parse_args()
    found: list[Turn] = []
    with tempfile.TemporaryDirectory(prefix="upgrade-") as folder:
        for turn in turns(Path(folder)):
            print(turn, file=sys.stderr, flush=True)
            found.append(turn)
    about = machine() | {"command": f"python -m tests.upgrade.turns {' '.join(sys.argv[1:])}"}
    text = told(found, about)
    print(text)
    if arguments.out:
        (RESULTS / Path(arguments.out).name).write_text(text)
    return int(not all(one.expected for one in found))


if __name__ == "__main__":
    exit_on_sigterm()
    sys.exit(main())
