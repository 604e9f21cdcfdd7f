"""``kvladder verify``: reads and checks each block of levels, and drops those that are damaged."""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Generator
from contextlib import closing
from pathlib import Path
from signal import SIGINT
from threading import Event
from typing import Any, Final, NamedTuple, Self

import click

from kvladder.cli.output import EXIT_SIGNAL, Failed, Result
from kvladder.cli.running.caches import RunningCache, caches
from kvladder.cli.running.glance import bytes_text
from kvladder.cli.tracing import size_of
from kvladder.config.stack import StackConfig, load_config
from kvladder.control.sockets import NotAnswering
from kvladder.errors import ConfigError
from kvladder.runtime import SystemClock
from kvladder.tiers.files.disk import Disk
from kvladder.tiers.files.options import FilesOptions
from kvladder.tiers.files.scrub import scrub_files
from kvladder.units import counted

BLOCKS: Final = 16
"""Blocks that one request has a cache read."""
RATE: Final = "200MB"
EXIT_DAMAGED: Final = 1
EXIT_UNREAD: Final = 3
RETRY_S: Final = 0.2
UNREAD_MAX: Final = 25
"""Most times in a row that nothing can be read at a place; then the check ends there."""
_RESUME: Final = re.compile(r"(.+):([0-9]+)")


class ScrubStep(NamedTuple):
    """What a step of a check found, and where the next one begins."""

    checked: int
    bytes: int
    damaged: int
    lost: int
    unread: int
    done: int
    total: int


def verify(
    target: str,
    *,
    level: str | None = None,
    rate: str = RATE,
    resume: str | None = None,
    token_file: Path | None = None,
) -> Result:
    """Read and check each block of the levels below host, and drop the damaged ones.

    Asks a running cache, or reads the directories of files of a stack whose engine does not run.
    Exits with 1 if a block was damaged, with 3 if some could not be read. After Ctrl-C, which exits
    with 130, --resume continues. Progress is shown on stderr.

    Parameters
    ----------
    target:
        check the cache of this control socket, http://HOST:PORT, or YAML file; or its files, if it
        does not run
    level:
        check only the level of this name
    rate:
        read at most so many bytes per second (default %(default)s)
    resume:
        continue at the point LEVEL:NUMBER, as an interrupted check printed it
    token_file:
        read the token that changes at a port need (http.token) from this file

    Raises
    ------
    ConfigError
        An argument is wrong, or nothing can be checked.
    """
    per_s = float(size_of(rate.removesuffix("/s"), "--rate"))
    first, start = _point(resume)
    sources = _sources(target, token_file)
    if level is not None:
        sources = _only(sources, level, "--level")
    if first:
        names = [one.level for one in _only(sources, first, "--resume")]
        sources = sources[[one.level for one in sources].index(names[0]) :]
    totals: dict[str, Counter[str]] = {}
    for source in sources:
        total = totals[source.name] = Counter(checked=0, bytes=0, damaged=0, lost=0, unread=0)
        begin = start if source.level == first else 0
        point = begin
        try:
            with ScrubPace(per_s, source.name) as pace, closing(source.steps(begin)) as steps:
                for step in steps:
                    total.update({name: getattr(step, name) for name in total})
                    point = step.done
                    pace.next(step)
        except KeyboardInterrupt as error:
            what = f"interrupted: --resume {source.level}:{point} continues"
            raise Failed(what, EXIT_SIGNAL + SIGINT, _result(totals)) from error
    result = _result(totals)
    bad = sum(one["damaged"] + one["lost"] for one in totals.values())
    unread = sum(one["unread"] for one in totals.values())
    if bad:
        what = f"{counted(bad, 'block')} damaged or lost, dropped: engines compute them again"
        raise Failed(what, EXIT_DAMAGED, result)
    if unread:
        what = f"{counted(unread, 'block')} could not be read"
        raise Failed(what, EXIT_UNREAD, result)
    return result


def _point(resume: str | None) -> tuple[str, int]:
    if resume is None:
        return "", 0
    found = _RESUME.fullmatch(resume)
    if found is None:
        hint = "expected LEVEL:NUMBER, as an interrupted check printed it"
        raise ConfigError(repr(resume), path="--resume", hint=hint)
    return found[1], int(found[2])


class CacheSource:
    """A level of a running cache."""

    def __init__(self, cache: RunningCache, level: str) -> None:
        self._cache = cache
        self.level = level
        self.name = f"{cache.name} {level}"

    def steps(self, start: int) -> Generator[ScrubStep]:
        """Yield what each step from a place on found."""
        at: int | None = start
        failures = 0
        while at is not None:
            body = {"level": self.level, "start": at, "blocks": BLOCKS}
            got = self._cache.ask("POST", "/verify", body, timeout_s=120.0)
            following, places = got["next"], got["places"]
            failures = failures + 1 if got["unread"] and not got["checked"] else 0
            if failures and failures < UNREAD_MAX:
                Event().wait(RETRY_S)
                continue
            if failures:
                following = None
            done = places if following is None else following
            damaged, lost, unread = got["damaged"], got["lost"], got["unread"]
            yield ScrubStep(got["checked"], got["bytes"], damaged, lost, unread, done, places)
            at = following


class FilesSource:
    """A level of files at rest."""

    def __init__(self, level: str, path: str) -> None:
        self.level = level
        self.name = f"{level} at {path}"
        self._path = Path(path)

    def steps(self, start: int) -> Generator[ScrubStep]:
        """Yield what each step from a number of blocks on found."""
        with closing(scrub_files(Disk(), self._path, start=start)) as found:
            for one in found:
                yield ScrubStep(one.checked, one.bytes, one.damaged, 0, 0, one.done, one.total)


Source = CacheSource | FilesSource


def _sources(target: str, token_file: Path | None) -> list[Source]:
    """Return the levels of running caches; those of files if none runs."""
    try:
        found: list[Source] = []
        failed: NotAnswering | None = None
        for cache in caches(target, token_file=token_file):
            try:
                names = [one["name"] for one in cache.status()["levels"]]
            except NotAnswering as error:  # left behind by a killed process
                failed = error
                continue
            found += [CacheSource(cache, name) for name in names[1:]]
        if not found and failed is not None:
            raise failed
    except ConfigError:
        at_rest = [] if "://" in target or Path(target).is_socket() else _files(target)
        if not at_rest:
            raise
        return at_rest
    if not found:
        raise ConfigError("no level below host, and host has no checksums", path=target)
    return found


def _files(target: str) -> list[Source]:
    config: StackConfig = load_config(Path(target))
    return [
        FilesSource(level.name, level.options.path)
        for level in config.levels
        if isinstance(level.options, FilesOptions)
    ]


def _only(sources: list[Source], level: str, flag: str) -> list[Source]:
    found = [one for one in sources if one.level == level]
    if not found:
        known = ", ".join(dict.fromkeys(one.level for one in sources))
        raise ConfigError(repr(level), path=flag, hint=f"expected one of {known}")
    return found


class ScrubPace:
    """Keeps a check below a rate, and shows a bar on standard error, if that is a terminal."""

    def __init__(self, per_s: float, name: str) -> None:
        self._per_s = per_s
        self._now = SystemClock().now
        self._due_s = self._now()
        is_shown = sys.stderr.isatty()
        bar: Any = click.progressbar(length=1, label=name, file=sys.stderr, show_pos=True)
        self._bar = bar if is_shown else None

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.__enter__()
        return self

    def __exit__(self, *told: Any) -> None:
        if self._bar is not None:
            self._bar.__exit__(*told)

    def next(self, step: ScrubStep) -> None:
        """Show a step, and wait until the next one may begin."""
        if self._bar is not None:
            self._bar.length = max(1, step.total)
            self._bar.update(step.done - self._bar.pos)
        now_s = self._now()
        self._due_s = max(self._due_s, now_s - 1.0) + step.bytes / self._per_s
        if self._due_s > now_s:
            Event().wait(self._due_s - now_s)


def _result(totals: dict[str, Counter[str]]) -> Result:
    lines = [
        f"{name}: {counted(total['checked'], 'block')} checked ({bytes_text(total['bytes'])}),"
        f" {total['damaged']} damaged, {total['lost']} lost"
        + (f", {total['unread']} unread" if total["unread"] else "")
        for name, total in totals.items()
    ]
    return Result("\n".join(lines), {name: dict(total) for name, total in totals.items()})
