"""``kvladder change``, ``drain`` and ``warm``: change a cache while it serves."""

from __future__ import annotations

import http.client
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import msgspec

from kvladder.changing.warm import BLOCKS_MAX, traced
from kvladder.cli.output import Failed, Result
from kvladder.config.stack import load_config
from kvladder.control.sockets import NobodyThere, ask, sockets
from kvladder.errors import ConfigError
from kvladder.units import counted

EXIT_LEFT: Final = 3
"""The exit code if a drain could not write some of the blocks."""
MARGIN_S: Final = 30.0
STEP_S: Final = 0.5
"""Seconds between two lines of progress."""
PIECE: Final = 128
"""Blocks of one request to warm; more would not fit into its body."""
PEER_S: Final = 10.0
ANSWER_MAX: Final = 16 << 20
NO_ANSWER: Final = (
    OSError,
    ValueError,
    http.client.HTTPException,
    msgspec.MsgspecError,
    RecursionError,
)


class NotDone(ConfigError):
    """The time is over before the end."""


def change(
    config: Path,
    *,
    set_: str | None = None,
    dry_run: bool = False,
    save: bool = False,
    wait_s: float = 120,
) -> Result:
    """Apply a stack to the running caches that its control socket reaches.

    The whole file is checked as at a start. Then all of it is applied, or nothing. Prints each
    difference. Settings that need a restart are refused, with the reason.

    Parameters
    ----------
    config:
        YAML file with the stack as it is to be
    set_:
        change only these settings of the running stack, such as "tiers.nvme.capacity=1 TiB;
        fetch.deadline=3s", not the whole file
    dry_run:
        check, and print what would change
    save:
        write the result into the file that the engine was started with; it keeps its comments
    wait_s:
        wait at most N seconds for each cache (default %(default)g)

    Raises
    ------
    ConfigError
        A setting is wrong or needs a restart, a level did not open, or no cache runs.
    """
    request: dict[str, Any] = {"command": "change", "save": save}
    if set_ is None:
        request["stack"] = _text(config)
    else:
        request["set"] = dict(_settings(set_))
    paths = _running(config)
    for path in paths:  # none changes if one of them would refuse
        ask(path, request | {"dry_run": True}, timeout_s=wait_s + MARGIN_S)
    lines: list[str] = []
    answers: dict[str, Any] = {}
    for path in paths:
        try:
            done = ask(path, request | {"dry_run": dry_run}, timeout_s=wait_s + MARGIN_S)
        except ConfigError as error:
            already = f"; already done: {'; '.join(lines)}" if lines else ""
            raise ConfigError(error.message + already, path=error.path, hint=error.hint) from error
        answers[str(path)] = done
        would = "would change " if dry_run else ""
        lines += [f"{path.name}: {would}{one}" for one in done["changed"]]
        if not done["changed"]:
            lines.append(f"{path.name}: nothing differs")
        if done["saved"]:
            lines.append(f"{path.name}: saved to {done['saved']}")
    return Result("\n".join(lines), answers)


def _text(path: Path) -> str:
    load_config(path)  # its errors say where, before any cache is asked
    return path.read_text(encoding="utf-8")


def _settings(text: str) -> Iterator[tuple[str, str]]:
    """Yield path and value of each setting in ``a.b=1; c.d=2``."""
    for part in filter(None, map(str.strip, text.split(";"))):
        path, sign, value = part.partition("=")
        if not sign:
            hint = 'expected settings such as "tiers.nvme.capacity=1 TiB; fetch.deadline=3s"'
            raise ConfigError(repr(part), path="--set", hint=hint)
        yield path.strip(), value.strip()


def _running(config: Path) -> list[Path]:
    """Return the control sockets of the caches that run with this file."""
    where = load_config(config).control.path
    if where is None:
        hint = "add `control: PATH` and restart the engine"
        raise ConfigError("no control socket configured", path=str(config), hint=hint)
    found: list[Path] = []
    for path in sockets(where):
        try:
            ask(path, {"command": "status"})
        except NobodyThere:
            continue  # left by a process that was killed
        found.append(path)
    if not found:
        raise ConfigError(f"no cache listens at {where}", path=str(config), hint="start the engine")
    return found


def drain(
    config: Path, *, to: str | None = None, stop: bool = False, wait_s: float = 600
) -> Result:
    """Write down what only this engine has, before it ends; it takes no more blocks.

    Blocks of host memory go to the first level that outlives the engine. Prints how many are left,
    and why; exits with 3 if some could not be written. Requests are served as before, but nothing
    new is saved until ``--stop``.

    Parameters
    ----------
    config:
        YAML file of the running cache
    to:
        write the blocks of all private levels to this level, which other engines read
    stop:
        take blocks again
    wait_s:
        wait at most N seconds (default %(default)g)

    Raises
    ------
    ConfigError
        No level outlives the engine, no cache runs, or it was not done in time.
    """
    lines: list[str] = []
    answers: dict[str, Any] = {}
    for path in _running(config):
        done = ask(path, {"command": "drain", "to": to, "stop": stop})
        waited_s = 0.0
        while done["state"] == "draining" and waited_s < wait_s:
            _progress(path, done["looked_at"], done["blocks"])
            step_s = min(STEP_S, wait_s - waited_s)
            done = ask(path, {"command": "drain", "begin": False, "wait_s": step_s})
            waited_s += step_s
        answers[str(path)] = done
        reasons = ", ".join(f"{n} because {why}" for why, n in done["left"].items()) or "none"
        state = "takes blocks again" if stop else done["state"]
        lines.append(f"{path.name}: {state}; {counted(done['blocks'], 'block')} to write")
        lines.append(f"{path.name}: left: {reasons}")
        if done["state"] in {"draining", "stopped"} and not stop:
            raise NotDone("; ".join(lines), path="drain", hint="drain again to wait for the rest")
    result = Result("\n".join(lines), answers)
    if lost := sum(done["lost"] for done in answers.values()):
        what = f"{counted(lost, 'block')} could not be written: drain again before the engine ends"
        raise Failed(what, EXIT_LEFT, result)
    return result


def warm(
    config: Path,
    *,
    blocks: Path | None = None,
    trace: Path | None = None,
    peer: str | None = None,
    token_file: Path | None = None,
    count: int = 4096,
    wait_s: float = 600,
) -> Result:
    """Bring blocks into the host memory of an engine that has just started.

    The blocks come from its levels, shared ones and other caches included. Requests go first, and
    nothing that they brought is evicted.

    Parameters
    ----------
    config:
        YAML file of the running cache
    blocks:
        file with a block's name per line, as /hottest returns them; - for standard input
    trace:
        trace in Mooncake's format with names of blocks as hash_ids; the most frequent come first
    peer:
        URL of another cache's HTTP port: take the blocks that it used last
    token_file:
        file with the peer's token as its only line
    count:
        bring up at most N blocks (default %(default)s)
    wait_s:
        wait at most N seconds (default %(default)g)

    Raises
    ------
    ConfigError
        An argument is wrong, no cache runs, or it was not done in time.
    """
    if (blocks is not None) + (trace is not None) + (peer is not None) != 1:
        raise ConfigError("expected one of --blocks, --trace and --peer", path="warm")
    if not 1 <= count <= BLOCKS_MAX:
        raise ConfigError(str(count), path="--count", hint=f"expected 1 to {BLOCKS_MAX}")
    paths = _running(config)
    if peer is not None:
        names = _hottest(peer, token_file, count, paths)
    elif trace is not None:
        names = traced(iter(_lines(trace, "--trace")), str(trace))[:count]
    else:
        assert blocks is not None
        names = [line.strip() for line in _lines(blocks, "--blocks") if line.strip()][:count]
    found = {path: _warmed(path, names, wait_s) for path in paths}
    text = "\n".join(_told(path, total) for path, total in found.items())
    return Result(text, {str(path): total for path, total in found.items()})


def _warmed(path: Path, names: Sequence[str], wait_s: float) -> dict[str, int]:
    """Warm one cache in pieces, and return the counts of all of them."""
    total: dict[str, int] = dict.fromkeys(("brought", "here", "missing", "no_room"), 0)
    for start in range(0, len(names), PIECE):
        piece = names[start : start + PIECE]
        done = ask(path, {"command": "warm", "blocks": piece})
        while done["state"] == "warming" and wait_s > 0:
            step_s = min(STEP_S, wait_s)
            done = ask(path, {"command": "warm", "wait_s": step_s})
            wait_s -= step_s
        for name in total:
            total[name] += done[name]
        _progress(path, start + len(piece), len(names))
        if done["state"] != "done":
            ask(path, {"command": "warm", "stop": True})
            raise NotDone(_told(path, total), path="warm", hint="the time is over: warm again")
        if done["no_room"]:
            total["no_room"] += len(names) - start - len(piece)
            break
    return total


def _told(path: Path, total: dict[str, int]) -> str:
    return (
        f"{path.name}: {counted(total['brought'], 'block')} brought up, {total['here']} there"
        f" before, {total['missing']} missing, {total['no_room']} without room"
    )


def _lines(path: Path, argument: str) -> list[str]:
    try:
        if str(path) == "-":
            return sys.stdin.read().splitlines()
        return path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise ConfigError(f"{path}: {why}", path=argument, hint="expected a text file") from error


def _hottest(peer: str, token_file: Path | None, count: int, paths: Sequence[Path]) -> list[str]:
    """Ask another cache for the blocks that it used last; they must be of the same namespace."""
    url = urlsplit(peer)
    if url.scheme != "http" or not url.hostname:
        raise ConfigError(repr(peer), path="--peer", hint="expected http://HOST:PORT")
    token = _lines(token_file, "--token-file")[:1] if token_file is not None else []
    headers = {"Content-Type": "application/json"}
    headers |= {"Authorization": f"Bearer {token[0].strip()}"} if token else {}
    try:
        with closing(http.client.HTTPConnection(url.hostname, url.port, timeout=PEER_S)) as client:
            client.request("POST", "/hottest", msgspec.json.encode({"count": count}), headers)
            answer = client.getresponse()
            told = msgspec.json.decode(answer.read(ANSWER_MAX), type=dict[str, Any])
    except NO_ANSWER as error:
        hint = "expected the HTTP port of a running cache"
        raise ConfigError(f"no answer: {error}", path=f"--peer {peer}", hint=hint) from error
    if answer.status != http.client.OK:
        raise ConfigError(str(told.get("error")), path=f"--peer {peer}")
    for path in paths:
        own = ask(path, {"command": "status"})["namespace"]
        if told["namespace"] != own:
            hint = f"expected {own}: the same model, layout and salt"
            raise ConfigError(f"namespace {told['namespace']}", path=f"--peer {peer}", hint=hint)
    return list(told["blocks"])


def _progress(path: Path, done: int, total: int) -> None:
    """Redraw one line of progress, if stderr is a terminal."""
    if sys.stderr.isatty():
        end = "\n" if done >= total else ""
        print(f"\r{path.name}: {done}/{total} blocks", end=end, file=sys.stderr, flush=True)
