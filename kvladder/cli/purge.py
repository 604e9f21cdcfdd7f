"""``kvladder purge``: removes the blocks of a namespace or of one salt from every tier."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any, Final

from kvladder.arena import Arena
from kvladder.cli.output import Result
from kvladder.config.settings import LevelConfig
from kvladder.config.stack import StackConfig, load_config
from kvladder.control.sockets import NobodyThere, ask, sockets
from kvladder.errors import ConfigError, TierError, refusal
from kvladder.keys import KEY_BYTES, Namespace, salt_digest
from kvladder.layout import PAGE_BYTES, Layout
from kvladder.runtime import Runtime, SystemClock
from kvladder.schema import is_text, within
from kvladder.tiers.context import TierContext
from kvladder.tiers.files.disk import Disk
from kvladder.tiers.files.options import FilesOptions
from kvladder.tiers.files.purge import purge_files
from kvladder.units import counted

BAR: Final = 30
SALT_BYTES_MAX: Final = 8192
WAIT_S: Final = 600.0
MARGIN_S: Final = 30.0
"""Added to the requested wait to get the timeout of an answer."""


class Unfinished(ConfigError):
    """Requests no longer see the blocks, but tiers have not finished removing or purging them."""


def read_salt(name: str) -> str:
    """Return the cache salt that is the only line of a file; ``-`` is standard input.

    Raises
    ------
    ConfigError
        The file cannot be read, or is not one line of text.
    """
    where = "standard input" if name == "-" else name
    try:
        with nullcontext(sys.stdin.buffer) if name == "-" else Path(name).open("rb") as file:
            data = file.read(SALT_BYTES_MAX + 1)
        salt = data.decode().removesuffix("\n").removesuffix("\r")
    except OSError as error:
        wrong = f"{where} cannot be read: {error.strerror}"
        raise ConfigError(wrong, path="--salt-file", hint="expected a file, or -") from error
    except UnicodeDecodeError as error:
        hint = "no request can have this salt"
        raise ConfigError(f"{where} is not UTF-8 text", path="--salt-file", hint=hint) from error
    if not salt or len(data) > SALT_BYTES_MAX or "\n" in salt:
        what = "is empty" if not salt else "has more than one line, or is too long"
        hint = f"expected only the salt, at most {SALT_BYTES_MAX} bytes"
        raise ConfigError(f"{where} {what}", path="--salt-file", hint=hint)
    return salt


def purge(
    config: Path,
    *,
    namespace: str | None = None,
    salt: str | None = None,
    salt_file: str | None = None,
    all_: bool = False,
    wait_s: float = WAIT_S,
) -> Result:
    """Remove blocks from every tier and overwrite their bytes in files.

    Choose the blocks of a cache salt, those of a namespace, or all. Running caches that answer at
    the configuration's control socket purge what they have open. Other directories that it names,
    and its servers if no cache runs, are purged directly. Exits with 2 if the purge is not
    complete. Progress is shown on stderr.

    Parameters
    ----------
    config:
        read this YAML file
    namespace:
        purge this namespace: 64 hexadecimal digits, as an engine prints them at start (default: the
        running cache's, and in directories every namespace); required for servers
    salt:
        purge only blocks of requests with this cache salt; other users of this machine can read it
        in the list of processes
    salt_file:
        read the cache salt, the only line, from this file; - for standard input
    all_:
        purge all blocks, regardless of owner
    wait_s:
        wait at most N seconds for a running cache (default %(default)g)

    Raises
    ------
    Unfinished
        A running cache was not done in time.
    ConfigError
        An argument is wrong, or a cache, a server or a disk failed to purge.
    """
    space = None if namespace is None else _space(namespace)
    if salt == "":
        raise ConfigError("empty", path="--salt", hint="use --all to purge all blocks")
    if salt is None and salt_file is None and space is None and not all_:
        what = "choose what to purge: --salt, --salt-file, --namespace or --all"
        raise ConfigError(what, path="purge")
    if (salt is not None) + (salt_file is not None) + all_ > 1:
        hint = "use one of them"
        raise ConfigError("more than one is given", path="--salt, --salt-file, --all", hint=hint)
    if salt_file is not None:
        salt = read_salt(salt_file)
    if salt is not None and not is_text(salt):
        raise ConfigError("not UTF-8 text", path="--salt", hint="no request can have this salt")
    if not 0 <= wait_s <= 86400:
        raise ConfigError(f"{wait_s:g}", path="--wait", hint="expected 0 to 86400 seconds")
    # Running caches go first: only they can purge what they have open.
    found = load_config(config)
    lines, processes = _running(found, space, salt, wait_s)
    for purging in _at_rest(found, space, salt, processes):
        try:
            lines += purging()
        except ConfigError as error:
            raise _after(lines, error) from error
    return Result("\n".join(lines), {"done": lines})


def _space(namespace: str) -> Namespace:
    with suppress(ValueError):
        space = Namespace(bytes.fromhex(namespace))
        if len(space) == KEY_BYTES:
            return space
    hint = f"expected {2 * KEY_BYTES} hexadecimal digits, as an engine prints them at start"
    raise ConfigError(repr(namespace), path="--namespace", hint=hint)


def _running(
    config: StackConfig, space: Namespace | None, salt: str | None, wait_s: float
) -> tuple[list[str], set[str]]:
    """Ask every running cache to purge; a cache that fails does not stop the others.

    Return lines about what they did, and the ids of their processes and isolated tiers'. Both are
    empty if no cache runs.
    """
    request: dict[str, Any] = {"command": "purge", "wait_s": wait_s, "all": salt is None}
    if salt is not None:
        request["salt"] = salt
    if space is not None:
        request["namespace"] = space.hex()
    lines: list[str] = []
    processes: set[str] = set()
    failed: list[ConfigError] = []
    left = 0
    for path in sockets(config.control.path) if config.control.path is not None else ():
        try:
            done = ask(path, request, timeout_s=wait_s + MARGIN_S)
        except NobodyThere:
            continue  # left by a process that was killed
        except ConfigError as error:
            failed.append(error)
            continue
        for name, removed in done["removed"].items():
            also = f", {done['purged'][name]} purged from its tier" if done["purged"][name] else ""
            lines.append(f"{path.name}: {name}: {counted(removed, 'block')} removed{also}")
        processes.update(map(str, done["processes"]))
        left += done["left"]
    if left:
        lines.append(f"{counted(left, 'removal or purge', 'removals or purges')} still in progress")
    if failed:
        raise _after(lines, *failed)
    if left:
        hint = "kvladder stats shows how many removals remain; purge again to wait for them"
        raise Unfinished("; ".join(lines), path="purge", hint=hint)
    return lines, processes


def _after(lines: list[str], error: ConfigError, *others: ConfigError) -> ConfigError:
    """Return one error that joins these and says what was done in spite of them."""
    done = [f"already done: {'; '.join(lines)}"] if lines else []
    message = "; ".join([error.message, *map(str, others), *done])
    return ConfigError(message, path=error.path, hint=error.hint)


def _at_rest(
    config: StackConfig, space: Namespace | None, salt: str | None, processes: set[str]
) -> list[Callable[[], list[str]]]:
    """Return one call per level to purge; raise ConfigError before any if a level cannot be purged.

    If ``processes`` of caches run, they have purged servers and the directories that they hold.
    """
    work: list[Callable[[], list[str]]] = []
    for level in config.levels:
        if isinstance(level.options, FilesOptions):
            work.append(partial(_purge_files, level.name, level.options, space, salt, processes))
        elif level.make.shared and not processes:
            if space is None:
                hint = f"level {level.name} needs it: the 64 digits that an engine prints at start"
                raise ConfigError("missing", path="--namespace", hint=hint)
            digest = None if salt is None else salt_digest(space, salt)
            work.append(partial(_purge_shared, level, space, digest))
    if not work and not processes:
        hint = "no running cache was found, so there is nothing to purge"
        raise ConfigError("no tier keeps blocks after its engine ends", path="tiers", hint=hint)
    return work


def _purge_files(
    name: str,
    options: FilesOptions,
    space: Namespace | None,
    salt: str | None,
    processes: Collection[str],
) -> list[str]:
    path, bar = Path(options.path), _bar(name, "places")
    try:
        done = purge_files(Disk(), path, space=space, salt=salt, progress=bar, others=processes)
    except ConfigError as error:
        raise ConfigError(error.message, path=name, hint=error.hint) from error
    if not done and not processes:
        return [f"{name}: nothing is stored there"]
    return [
        f"{name}: {counted(one.removed, 'block')} removed, {one.erased} overwritten,"
        f" in namespace {one.namespace}"
        for one in done
    ]


def _purge_shared(level: LevelConfig, space: Namespace, salt: bytes | None) -> list[str]:
    layout = Layout(block_tokens=1, block_bytes=PAGE_BYTES)  # keys do not depend on it
    runtime, arena, tier = Runtime(), Arena.create(1, layout.slot_bytes), level.make_tier()
    run = runtime.threads(level.name)
    context = TierContext(arena, layout, space, 1, SystemClock(), run, required=True)
    try:
        runtime.call(tier.open(context))
        removed = runtime.call(tier.purge(salt, _bar(level.name, "keys")))
    except TierError as error:
        raise within(level.name, refusal(error, required=False)) from error
    except ConfigError as error:
        raise within(level.name, error) from error
    finally:
        runtime.call(tier.aclose())
        runtime.close()
        arena.close()
    return [f"{level.name}: {counted(removed, 'value')} removed"]


def _bar(name: str, what: str) -> Callable[[int, int], None]:
    """Return a function that redraws one line of progress, if stderr is a terminal."""

    def draw(done: int, total: int) -> None:
        if sys.stderr.isatty():
            filled = BAR * done // max(1, total)
            end = "\n" if done >= total else ""
            bar = "#" * filled + "." * (BAR - filled)
            print(f"\r{name} [{bar}] {done}/{total} {what}", end=end, file=sys.stderr, flush=True)

    return draw
