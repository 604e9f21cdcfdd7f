"""``kvladder top``: a running cache at a glance, in a terminal."""

from __future__ import annotations

import sys
from contextlib import suppress
from io import StringIO
from shutil import get_terminal_size
from threading import Event
from typing import TYPE_CHECKING, Any, Final

from kvladder.cli.output import Result, Results
from kvladder.cli.running.caches import RunningCache, caches
from kvladder.cli.running.glance import Glance, Watch
from kvladder.control.sockets import NotAnswering
from kvladder.errors import ConfigError

if TYPE_CHECKING:  # rich is an extra
    from rich.console import RenderableType

EVERY_S: Final = 1.0
EVERY_S_MAX: Final = 3600.0
WIDTH_MIN: Final = 20
WIDTH_MAX: Final = 120


def top(
    target: str, *, every_s: float = EVERY_S, once: bool = False, json: bool = False
) -> Results | Result:
    """Show a running cache in the terminal: the same at a glance as its page.

    Shows the ladder as it fills, hits and speed by level, queues, breakers, drops and misses by
    reason, and the last notices. Ctrl-C ends it. Needs kvladder[top].

    Parameters
    ----------
    target:
        show the cache of this control socket, http://HOST:PORT, or YAML file
    every_s:
        refresh every N seconds (default %(default)g)
    once:
        print one picture, with rates of one such interval, as text; also if the output is a pipe

    Raises
    ------
    ConfigError
        No cache runs there, it does not answer, or rich is missing.
    """
    if not 0 < every_s <= EVERY_S_MAX:
        hint = f"expected more than 0 and at most {EVERY_S_MAX:g} seconds"
        raise ConfigError(f"{every_s:g}", path="--every", hint=hint)
    if not json:
        _require_rich()
    found = {one.name: (one, Watch(one.name)) for one in caches(target)}
    if once or not (json or sys.stdout.isatty()):
        return _once(list(found.values()), every_s, drawn=not json)
    return _live(list(found.values()), every_s, drawn=not json)


Watched = tuple[RunningCache, Watch]


def _require_rich() -> None:
    try:
        import rich as rich
    except ModuleNotFoundError as error:
        hint = "install kvladder[top]"
        raise ConfigError(f"rich is missing: {error}", path="top", hint=hint) from error


def _looked(found: list[Watched]) -> list[Glance]:
    """Return a glance at each cache that answers; NotAnswering if none does."""
    glances: list[Glance] = []
    failed: NotAnswering | None = None
    for cache, watch in found:
        try:
            glances.append(watch.look(cache.status()))
        except NotAnswering as error:  # left behind by a killed process, perhaps
            failed = error
    if not glances and failed is not None:
        raise failed
    return glances


def _once(found: list[Watched], every_s: float, *, drawn: bool) -> Result:
    _looked(found)
    Event().wait(every_s)
    glances = _looked(found)
    return Result(text_of(glances) if drawn else "", _data(glances))


def _live(found: list[Watched], every_s: float, *, drawn: bool) -> Results:
    """Show glances until Ctrl-C; yield those that are to be printed as JSON."""
    glances = _looked(found)
    with suppress(KeyboardInterrupt):
        if drawn:
            _screen(found, glances, every_s)
        while not drawn:
            yield Result("", _data(glances))
            Event().wait(every_s)
            glances = _looked(found)


def _screen(found: list[Watched], glances: list[Glance], every_s: float) -> None:
    """Redraw the screen of the terminal until Ctrl-C; then the terminal is as it was."""
    from rich.console import Console, Group
    from rich.live import Live
    from rich.text import Text

    console = Console()
    with Live(console=console, screen=True, auto_refresh=False) as live:
        trouble = ""
        while True:
            parts = drawn_of(glances, console.width)
            if trouble:
                parts.insert(0, Text(trouble, "bold red"))
            live.update(Group(*parts), refresh=True)
            Event().wait(every_s)
            try:
                glances, trouble = _looked(found), ""
            except NotAnswering as error:
                trouble = f"not connected, trying again: {error}"


def drawn_of(glances: list[Glance], width: int) -> list[RenderableType]:
    """Return the picture of each cache."""
    from kvladder.cli.running.picture import picture

    return [picture(one, width) for one in glances]


def text_of(glances: list[Glance]) -> str:
    """Return the pictures as text without colours, as wide as the terminal or 80 columns."""
    from rich.console import Console

    width = max(WIDTH_MIN, min(WIDTH_MAX, get_terminal_size().columns))
    console = Console(file=StringIO(), width=width, color_system=None, legacy_windows=False)
    for one in drawn_of(glances, width):
        console.print(one)
    written = console.file
    assert isinstance(written, StringIO)
    return "\n".join(line.rstrip() for line in written.getvalue().splitlines())


def _data(glances: list[Glance]) -> dict[str, Any]:
    """Return the glances as plain data, by where each cache was asked."""
    return {
        one.name: {**one._asdict(), "levels": [level._asdict() for level in one.levels]}
        for one in glances
    }
