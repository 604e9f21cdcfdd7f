"""``kvladder purge``: removes the blocks of a namespace or of one salt from every tier."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import closing, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from kvladder.cli.output import Result
from kvladder.cli.receipts import AtRest, TierAtRest
from kvladder.cli.receipts import verify as verified
from kvladder.config.settings import LevelConfig
from kvladder.config.stack import StackConfig, load_config
from kvladder.control.sockets import NobodyThere, ask, sockets
from kvladder.errors import ConfigError, TierError, refusal
from kvladder.forgetting.scope import PurgeScope
from kvladder.keys import KEY_BYTES, Namespace, salt_digest
from kvladder.schema import is_list, is_text, within
from kvladder.tiers.files.disk import Disk
from kvladder.tiers.files.options import FilesOptions
from kvladder.tiers.files.purge import purge_files
from kvladder.tiers.ladder.calling.client import PURGE_TIMEOUT_S
from kvladder.units import Duration, counted

BAR: Final = 30
SALT_BYTES_MAX: Final = 8192
WAIT_S: Final = 600.0
PREFIX_BYTES_MAX: Final = 12 << 20
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


class LevelWork(NamedTuple):
    """The purge of a level at rest."""

    level: LevelConfig
    purge: Callable[[], tuple[list[str], int, int]]
    """Purges it; returns lines, and the numbers of removed and of overwritten blocks."""


class Asked(NamedTuple):
    """What the arguments ask to purge."""

    space: Namespace | None
    salt: str | None
    scope: Mapping[str, Any]
    """Fields of a ``PurgeScope``."""

    @property
    def at_rest(self) -> bool:
        """True if the blocks can be told without a running cache."""
        return not {*self.scope} - {"salt", "all"}


def purge(
    config: Path,
    *,
    namespace: str | None = None,
    salt: str | None = None,
    salt_file: str | None = None,
    session: str | None = None,
    prefix: str | None = None,
    older_than: str | None = None,
    all_: bool = False,
    wait_s: float = WAIT_S,
    receipt: Path | None = None,
    verify: Path | None = None,
) -> Result:
    """Remove blocks from every tier and overwrite their bytes in files.

    Choose the blocks of a cache salt, a session, a prefix, an age, a namespace, or all. Running
    caches that answer at the configuration's control socket purge what they have open. Other
    directories that it names, and its servers if no cache runs, are purged directly. Exits with 2
    if the purge is not complete. Progress is shown on stderr.

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
    session:
        purge the blocks of this session's requests, also those that other requests use
    prefix:
        purge a prefix and all that descends from it; this file, - for standard input, has a JSON
        list of its tokens, or of its blocks' keys in hexadecimal
    older_than:
        purge what was saved longer ago, such as '30 d' or '12 h'
    all_:
        purge all blocks, regardless of owner
    wait_s:
        wait at most N seconds for a running cache (default %(default)g)
    receipt:
        write the signed receipt to this file; the section forget of the file enables receipts
    verify:
        check this receipt, and that no level has what it says is gone; purge nothing

    Raises
    ------
    Unfinished
        A running cache was not done in time.
    NotClean
        A receipt is not valid, or a level has blocks of it.
    ConfigError
        An argument is wrong, or a cache, a server or a disk failed to purge.
    """
    found = load_config(config)
    named = {"session": session, "prefix": prefix, "older_than": older_than}
    if verify is not None:
        text = verified(found, verify)
        return Result(text, {"checks": text.splitlines()})
    if salt_file is not None and salt is None:
        salt = read_salt(salt_file)
        salt_file = None
    asked = _asked(namespace, salt, salt_file, all_, named)
    return _purged(found, asked, wait_s, receipt)


def _asked(
    namespace: str | None,
    salt: str | None,
    salt_file: str | None,
    all_: bool,
    named: Mapping[str, str | None],
) -> Asked:
    """Return what the arguments ask, checked."""
    space = None if namespace is None else _space(namespace)
    if salt == "":
        raise ConfigError("empty", path="--salt", hint="use --all to purge all blocks")
    if salt is not None and not is_text(salt):
        raise ConfigError("not UTF-8 text", path="--salt", hint="no request can have this salt")
    chosen = {name: text for name, text in named.items() if text is not None}
    flags = [f"--{name.replace('_', '-')}" for name in chosen]
    if salt is None and salt_file is None and space is None and not all_ and not chosen:
        what = "choose what to purge: --salt, --salt-file, --session, --prefix, --older-than,"
        raise ConfigError(f"{what} --namespace or --all", path="purge")
    flags += ["--all"] if all_ else []
    both = (salt is not None) + (salt_file is not None)
    if len(flags) > 1 or both > 1 or (both and flags and flags != ["--prefix"]):
        every = ", ".join([*(["--salt, --salt-file"] if both else []), *(flags or ["--all"])])
        raise ConfigError("more than one is given", path=every, hint="use one of them")
    scope: dict[str, Any] = {} if salt is None else {"salt": salt}
    if "session" in chosen:
        scope["session"] = chosen["session"]
    elif "prefix" in chosen:
        scope |= read_prefix(chosen["prefix"])
    elif "older_than" in chosen:
        try:
            scope["older_than_s"] = float(Duration.parse(chosen["older_than"]))
        except ValueError as error:
            hint = f"expected {Duration.EXPECTED}"
            raise ConfigError(chosen["older_than"], path="--older-than", hint=hint) from error
    elif salt is None:
        scope["all"] = True
    return Asked(space, salt, scope)


def read_prefix(name: str) -> dict[str, Any]:
    """Return the tokens or the keys of a prefix from a file; ``-`` is standard input.

    Raises
    ------
    ConfigError
        The file cannot be read, or is no list of tokens or of keys.
    """
    where = "standard input" if name == "-" else name
    hint = "expected a JSON list of token ids, or of keys of 64 hexadecimal digits"
    try:
        with nullcontext(sys.stdin.buffer) if name == "-" else Path(name).open("rb") as file:
            found: object = msgspec.json.decode(file.read(PREFIX_BYTES_MAX))
    except OSError as error:
        what = f"{where} cannot be read: {error.strerror}"
        raise ConfigError(what, path="--prefix", hint=hint) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{where}: {error}", path="--prefix", hint=hint) from error
    field = "keys" if is_list(found) and found and isinstance(found[0], str) else "tokens"
    try:
        msgspec.convert({field: found}, PurgeScope)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{where}: {error}", path="--prefix", hint=hint) from error
    return {field: found}


def _purged(config: StackConfig, asked: Asked, wait_s: float, receipt: Path | None) -> Result:
    """Purge, and return lines about what was done."""
    if not 0 <= wait_s <= 86400:
        raise ConfigError(f"{wait_s:g}", path="--wait", hint="expected 0 to 86400 seconds")
    keeps = config.forget.path is not None
    if receipt is not None and not keeps:
        hint = "set forget.path and a key, and restart the engine"
        raise ConfigError("no receipts are configured", path="--receipt", hint=hint)
    # Running caches go first: only they can purge what they have open.
    receipts: list[Any] = []
    try:
        lines, processes = _running(config, asked, wait_s, receipts)
        if not processes and not asked.at_rest:
            hint = "start the engine: only a running cache can tell which blocks these are"
            raise ConfigError("no running cache answers", path="purge", hint=hint)
        work = _at_rest(config, asked.space, asked.salt, processes) if asked.at_rest else []
        kept = None
        if keeps and not processes and asked.space is not None:
            digest = b"" if asked.salt is None else salt_digest(asked.space, asked.salt)
            kept = AtRest(config, asked.space, digest, [one.level for one in work])
        lines += _done(work, kept, lines)
        if kept is not None:
            receipts.append(msgspec.to_builtins(kept.receipt))
            lines.append(f"receipt {kept.path}")
    finally:
        if receipt is not None and receipts:
            _write_receipt(receipt, receipts)
    return Result("\n".join(lines), {"done": lines, "receipts": receipts})


def _done(work: Sequence[LevelWork], kept: AtRest | None, before: Sequence[str]) -> list[str]:
    """Purge levels at rest, one after the other; note in the receipt which are done."""
    lines: list[str] = []
    failed: list[ConfigError] = []
    try:
        for one in work:
            try:
                said, blocks, erased = one.purge()
            except ConfigError as error:
                if kept is None:
                    raise _after([*before, *lines], error) from error
                kept.failed(one.level.name, str(error))
                failed.append(error)
                continue
            lines += said
            if kept is not None:
                kept.done(one.level.name, blocks, erased)
    finally:
        if kept is not None:
            kept.close()
    if failed and kept is not None:
        owed = f"the next engine of this deployment pays what is owed: receipt {kept.path}"
        raise _after([*before, *lines, owed], *failed)
    return lines


def _write_receipt(path: Path, receipts: Sequence[Any]) -> None:
    data = msgspec.json.encode(receipts[0] if len(receipts) == 1 else receipts)
    try:
        path.write_bytes(msgspec.json.format(data, indent=2) + b"\n")
    except OSError as error:
        hint = "expected a file that can be written; receipts are in forget.path, too"
        raise ConfigError(f"{path}: {error.strerror}", path="--receipt", hint=hint) from error


def _space(namespace: str) -> Namespace:
    with suppress(ValueError):
        space = Namespace(bytes.fromhex(namespace))
        if len(space) == KEY_BYTES:
            return space
    hint = f"expected {2 * KEY_BYTES} hexadecimal digits, as an engine prints them at start"
    raise ConfigError(repr(namespace), path="--namespace", hint=hint)


def _running(
    config: StackConfig, asked: Asked, wait_s: float, receipts: list[Any]
) -> tuple[list[str], set[str]]:
    """Ask every running cache to purge; a cache that fails does not stop the others.

    Return lines about what they did, and the ids of their processes and isolated tiers'. Both are
    empty if no cache runs. Append the receipts.
    """
    request: dict[str, Any] = {"command": "purge", "wait_s": wait_s, **asked.scope}
    if asked.space is not None:
        request["namespace"] = asked.space.hex()
    lines: list[str] = []
    processes: set[str] = set()
    failed: list[ConfigError] = []
    denied: list[str] = []
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
            if count := done["denied"][name]:
                denied.append(f"{path.name}: {name}: {counted(count, 'removal')} denied")
            lines.append(f"{path.name}: {name}: {counted(removed, 'block')} removed{also}")
        processes.update(map(str, done["processes"]))
        left += done["left"]
        if (kept := done.get("receipt")) is not None:
            receipts.append(kept)
            owing = [level["name"] for level in kept["levels"] if level["state"] == "owed"]
            state = f"owed by {', '.join(owing)}" if owing else "complete"
            lines.append(f"{path.name}: receipt {kept['id']}: {state}")
    if left and not denied:
        lines.append(f"{counted(left, 'removal or purge', 'removals or purges')} still in progress")
    if failed:
        raise _after(lines, *failed)
    if denied:
        hint = "its server lets this client only read; purge with a client that may remove blocks"
        raise Unfinished("; ".join([*lines, *denied]), path="purge", hint=hint)
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
) -> list[LevelWork]:
    """Return the work for each level; raise ConfigError before any if a level cannot be purged.

    If ``processes`` of caches run, they have purged servers and the directories that they hold.
    """
    work: list[LevelWork] = []
    for level in config.levels:
        if isinstance(level.options, FilesOptions):
            files = partial(_purge_files, level.name, level.options, space, salt, processes)
            work.append(LevelWork(level, files))
        elif level.make.shared and not processes:
            if space is None:
                hint = f"level {level.name} needs it: the 64 digits that an engine prints at start"
                raise ConfigError("missing", path="--namespace", hint=hint)
            digest = None if salt is None else salt_digest(space, salt)
            work.append(LevelWork(level, partial(_purge_shared, level, space, digest)))
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
) -> tuple[list[str], int, int]:
    path, bar = Path(options.path), _bar(name, "places")
    try:
        done = purge_files(Disk(), path, space=space, salt=salt, progress=bar, others=processes)
    except ConfigError as error:
        raise ConfigError(error.message, path=name, hint=error.hint) from error
    if not done and not processes:
        return [f"{name}: nothing is stored there"], 0, 0
    lines = [
        f"{name}: {counted(one.removed, 'block')} removed, {one.erased} overwritten,"
        f" in namespace {one.namespace}"
        for one in done
    ]
    return lines, sum(one.removed for one in done), sum(one.erased for one in done)


def _purge_shared(
    level: LevelConfig, space: Namespace, salt: bytes | None
) -> tuple[list[str], int, int]:
    with closing(TierAtRest(level, space)) as opened:
        purging = opened.tier.purge(salt, _bar(level.name, "keys"))
        try:
            removed = opened.runtime.call(purging, timeout_s=PURGE_TIMEOUT_S)
        except TierError as error:
            raise within(level.name, refusal(error, required=False)) from error
        except TimeoutError as error:
            what = f"no answer within {PURGE_TIMEOUT_S:g} s"
            raise ConfigError(what, path=level.name, hint="repeat the purge") from error
    return [f"{level.name}: {counted(removed, 'value')} removed"], removed, 0


def _bar(name: str, what: str) -> Callable[[int, int], None]:
    """Return a function that redraws one line of progress, if stderr is a terminal."""

    def draw(done: int, total: int) -> None:
        if sys.stderr.isatty():
            filled = BAR * done // max(1, total)
            end = "\n" if done >= total else ""
            bar = "#" * filled + "." * (BAR - filled)
            print(f"\r{name} [{bar}] {done}/{total} {what}", end=end, file=sys.stderr, flush=True)

    return draw
