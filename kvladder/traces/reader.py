"""Reads traces in Mooncake's format: JSON lines, plain or gzip, one request a line.

Each line has ``timestamp`` (milliseconds), ``input_length`` and ``output_length`` (tokens), and
``hash_ids``: one id for each block of the prompt, which stands for the whole prefix up to there.
Ids are integers of any size, or text. A recording of ours may have three more: ``asked``, the
positions of the first block that the engine asked the cache for, and of the one after the last;
``output_hash_ids``, the ids of the blocks that it saved beyond the prompt; and ``order``, the
positions of its arrival, of the save of its prompt and of its end among those of all requests.
"""

from __future__ import annotations

import gzip
import json
import zlib
from array import array
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count, pairwise
from math import isfinite
from pathlib import Path
from typing import Any, Final, NamedTuple, cast

import msgspec

from kvladder.errors import ConfigError
from kvladder.schema import is_list, is_mapping

EXPECTED: Final = "expected a line of Mooncake's format: timestamp, input_length, hash_ids"
GZIP: Final = b"\x1f\x8b"
BLOCK_TOKENS: Final = 512
"""Tokens of a block in Mooncake's own traces."""
BLOCK_TOKENS_MAX: Final = 1 << 16
TOKENS_MAX: Final = 1 << 40
"""Largest length of a prompt or an answer that is believed."""
SHOWN_MAX: Final = 60
NO_LINE: Final = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""Errors of decoding a line that is wrong, or has numbers of more than 64 bits."""
_ASKED: Final = "expected two positions in hash_ids, such as [0, 3]"
_ORDER: Final = "expected three numbers, none less than the one before it, such as [7, 9, 12]"


class TraceError(ConfigError):
    """A trace cannot be read on; the message says file and line, what was found and expected."""


class TraceRequest(NamedTuple):
    """One request of a trace."""

    at_s: float
    """Time of its arrival, in seconds."""
    input_tokens: int
    output_tokens: int
    blocks: Sequence[int]
    """Numbers of its prompt's blocks; the same block has the same number in the whole trace."""
    asked: tuple[int, int] | None = None
    """Positions in ``blocks`` of the first that the engine asked the cache for, and of the one
    after the last; None if that is not known: then it asked for all."""
    answer: Sequence[int] = ()
    """Numbers of the blocks that the engine saved beyond the prompt."""
    order: tuple[int, int, int] | None = None
    """Positions of its arrival, of the save of its prompt and of its end among those of all
    requests; None if they are not known."""

    @property
    def wanted(self) -> Sequence[int]:
        """Numbers of the blocks that the engine asked the cache for."""
        return self.blocks if self.asked is None else self.blocks[slice(*self.asked)]

    @property
    def used(self) -> Sequence[int]:
        """Numbers of all its blocks, those of the answer last."""
        return [*self.blocks, *self.answer] if self.answer else self.blocks


@dataclass(frozen=True, slots=True)
class Trace:
    """The requests of a trace in the order of their arrival; blocks are numbered from 0."""

    name: str
    requests: Sequence[TraceRequest]
    unique: int
    """Number of different blocks."""
    block_tokens: int
    warnings: Sequence[str] = ()
    """Problems beyond which reading on was safe, one sentence each."""

    @property
    def blocks(self) -> int:
        """Number of blocks that all requests ask the cache for together."""
        return sum(len(one.wanted) for one in self.requests)

    @property
    def own(self) -> int:
        """Number of blocks that the engine had itself, as far as the trace tells."""
        return sum(one.asked[0] for one in self.requests if one.asked is not None)

    @property
    def overlaps(self) -> bool:
        """True if each request has its ``order``; then a replay keeps how they overlapped."""
        return all(one.order is not None for one in self.requests)

    @property
    def seconds(self) -> float:
        """Time from the first to the last arrival."""
        return self.requests[-1].at_s - self.requests[0].at_s


class _Line(msgspec.Struct):
    timestamp: float
    input_length: int
    hash_ids: list[int | str]
    output_length: int = -1
    asked: tuple[int, int] | None = None
    output_hash_ids: list[int | str] = []
    order: tuple[int, int, int] | None = None


@dataclass(slots=True)
class _Reading:
    """The state while a trace is read."""

    where: str = ""
    requests: list[TraceRequest] = field(default_factory=list[TraceRequest])
    numbers: dict[int | str, int] = field(default_factory=dict[int | str, int])
    """Number of each id, in the order of their first appearance."""
    parents: array[int] = field(default_factory=lambda: array("q"))
    seen: Counter[str] = field(default_factory=Counter[str])
    first: dict[str, str] = field(default_factory=dict[str, str])

    def warn(self, what: str) -> None:
        """Note a problem of the current line."""
        self.seen[what] += 1
        self.first.setdefault(what, self.where)

    @property
    def warnings(self) -> list[str]:
        """One sentence for each kind of problem."""
        return [
            f"{self.first[what]}: {what}" + (f" ({times} times)" if times > 1 else "")
            for what, times in self.seen.items()
        ]


_fast = msgspec.json.Decoder(_Line)


def read_trace(path: Path, *, block_tokens: int | None = None) -> Trace:
    """Read a trace, and the older files of the same recording beside it.

    Parameters
    ----------
    path:
        The file, plain or gzip.
    block_tokens:
        Tokens of a block; None finds out from the lengths of prompts.

    Raises
    ------
    TraceError
        The file cannot be read, a line is not of the format, or there is no request.
    """
    reading = _Reading()
    for part in _parts(path):
        _read(part, reading)
    requests = reading.requests
    if not requests:
        raise TraceError("no request", file=str(path), hint=f"{EXPECTED} and more of them")
    if any(a.at_s > b.at_s for a, b in pairwise(requests)):
        reading.where = str(path)
        reading.warn("the timestamps are not in order: the requests were sorted by them")
        requests.sort(key=lambda one: one.at_s)
    if not any(one.blocks for one in requests):
        raise TraceError("no request has a block", file=str(path), hint="expected hash_ids")
    reading.where = str(path)
    tokens = _tokens_of(reading) if block_tokens is None else block_tokens
    return Trace(str(path), requests, len(reading.numbers), tokens, tuple(reading.warnings))


def _parts(path: Path) -> list[Path]:
    """Return the files of a recording, oldest first; ``path.1`` is older than ``path``."""
    found = [path]
    for number in count(1):
        older = path.with_name(f"{path.name}.{number}")
        last, first = _ends(older)[1], _ends(found[-1])[0]
        if last is None or first is None or last > first:  # the end, or another recording
            return found[::-1]
        found.append(older)
    raise AssertionError("unreachable")


def _ends(path: Path) -> tuple[float | None, float | None]:
    """Return the first and the last timestamp of a plain file; None where it has none."""
    try:
        with path.open("rb") as file:
            lines = [file.readline()]
            size = file.seek(0, 2)
            for back in (1 << 16, 1 << 24, size):
                file.seek(max(0, size - back))
                lines = [lines[0], *file.read().splitlines()[-2:]]
                if len(lines) > 2:
                    break
    except OSError:
        return None, None
    times: list[float | None] = []
    for line in lines:
        try:
            times.append(_fast.decode(line).timestamp)
        except NO_LINE:
            times.append(None)
    return times[0], next((time for time in reversed(times) if time is not None), None)


def _read(path: Path, reading: _Reading) -> None:
    """Read all lines of one file."""
    number, pending = 0, b""
    for number, line in enumerate(_lines(path, reading), 1):
        reading.where = f"{path}:{number - 1}"
        if pending:
            _add(pending, reading, f"{path}:{number - 1}", last=False)
        pending = line
    if pending:
        _add(pending, reading, f"{path}:{number}", last=True)


def _lines(path: Path, reading: _Reading) -> Iterator[bytes]:
    """Yield the lines of a file; end early, with a warning, where gzip data are damaged."""
    try:
        with path.open("rb") as file:
            is_gzip = file.read(2) == GZIP
        with gzip.open(path, "rb") if is_gzip else path.open("rb") as file:
            try:
                yield from cast("Iterator[bytes]", file)
            except (EOFError, zlib.error, gzip.BadGzipFile) as error:
                reading.where = str(path)
                reading.warn(f"the gzip data end early ({error}): read up to there")
    except OSError as error:
        why = error.strerror or str(error)
        raise TraceError(why, file=str(path), hint="expected a readable trace") from error


def _add(line: bytes, reading: _Reading, where: str, *, last: bool) -> None:
    """Add the request of a line; the last line may be cut."""
    reading.where = where
    text = line.strip(b" \t\r\n\0")
    if not text:
        reading.warn("an empty line was skipped")
        return
    try:
        try:
            found = _fast.decode(text)
        except NO_LINE:
            found = _slowly(text, where)
    except _Cut as error:
        if not last:
            raise TraceError(str(error), file=where, hint=EXPECTED) from error
        reading.warn("the last line is cut: it was skipped")
        return
    _check_values(found, where)
    if found.output_length < 0:
        reading.warn("no output_length: 0 is taken")
    numbers = _numbered([*found.hash_ids, *found.output_hash_ids], reading)
    end = len(found.hash_ids)
    prompt, answer = numbers[:end], numbers[end:]
    output = max(0, found.output_length)
    at_s, length = found.timestamp / 1000, found.input_length
    reading.requests.append(
        TraceRequest(at_s, length, output, prompt, found.asked, answer, found.order)
    )


class _Cut(Exception):
    """A line is not JSON, as the last one of a file that was cut."""


def _slowly(text: bytes, where: str) -> _Line:
    """Read one line and say exactly what is wrong with it."""
    try:
        found: Any = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _Cut(f"not JSON: {_shown(text.decode(errors='replace'))}") from error
    if not is_mapping(found):
        raise TraceError(f"{_kind(found)}, not an object", file=where, hint=EXPECTED)
    entry = found
    missing = [name for name in ("timestamp", "input_length", "hash_ids") if name not in entry]
    if missing:
        what = f"no {missing[0]}, but {_shown(', '.join(entry))}"
        raise TraceError(what, file=where, hint=EXPECTED)
    for name in ("timestamp", "input_length", "output_length"):
        value: Any = entry.get(name, 0)
        if isinstance(value, bool) or not isinstance(value, int | float):
            what = f"{name}: {_kind(value)} {_shown(value)}"
            raise TraceError(what, file=where, hint="expected a number")
        if name != "timestamp" and value != (isfinite(value) and int(value)):
            hint = "expected a whole number of tokens"
            raise TraceError(f"{name}: {_shown(value)}", file=where, hint=hint)
    ids, more = (_ids(entry, name, where) for name in ("hash_ids", "output_hash_ids"))
    output = int(entry["output_length"]) if "output_length" in entry else -1
    asked = _whole(entry, "asked", 2, _ASKED, where)
    order = _whole(entry, "order", 3, _ORDER, where)
    return _Line(entry["timestamp"], int(entry["input_length"]), ids, output, asked, more, order)


def _ids(entry: Mapping[str, Any], name: str, where: str) -> list[int | str]:
    """Return a list of ids, empty if there is none."""
    ids: Any = entry.get(name, [])
    if not is_list(ids):
        what = f"{name}: {_kind(ids)} {_shown(ids)}"
        raise TraceError(what, file=where, hint="expected a list of ids")
    for at, one in enumerate(ids):
        if isinstance(one, bool) or not isinstance(one, int | str):
            what = f"{name}[{at}]: {_kind(one)} {_shown(one)}"
            raise TraceError(what, file=where, hint="expected a number or text, and no hole")
    return cast("list[int | str]", ids)


def _whole(entry: Mapping[str, Any], name: str, count: int, hint: str, where: str) -> Any:
    """Return so many whole numbers as a tuple; None if the entry has none of that name."""
    if name not in entry:
        return None
    value: Any = entry[name]
    if not is_list(value) or [type(one) for one in value] != [int] * count:
        raise TraceError(f"{name}: {_shown(value)}", file=where, hint=hint)
    return tuple(value)


def _check_values(found: _Line, where: str) -> None:
    """Raise TraceError if a number is out of its range."""
    if not (isfinite(found.timestamp) and abs(found.timestamp) < TOKENS_MAX):
        hint = "expected milliseconds"
        raise TraceError(f"timestamp: {_shown(found.timestamp)}", file=where, hint=hint)
    if not 0 <= found.input_length <= TOKENS_MAX:
        hint = "expected a number of tokens, 0 or more"
        raise TraceError(f"input_length: {_shown(found.input_length)}", file=where, hint=hint)
    if not -1 <= found.output_length <= TOKENS_MAX:
        hint = "expected a number of tokens, 0 or more"
        raise TraceError(f"output_length: {_shown(found.output_length)}", file=where, hint=hint)
    if found.asked is not None and not 0 <= found.asked[0] <= found.asked[1] <= len(found.hash_ids):
        what = f"asked: {_shown([*found.asked])} of {len(found.hash_ids)} hash_ids"
        raise TraceError(what, file=where, hint=_ASKED)
    if found.order is not None and [*found.order] != sorted(found.order):
        raise TraceError(f"order: {[*found.order]}", file=where, hint=_ORDER)


def _numbered(ids: Sequence[int | str], reading: _Reading) -> array[int]:
    """Return the numbers of a request's blocks; leave out what follows an id that is repeated."""
    numbers, parents = reading.numbers, reading.parents
    found, parent = array("i"), -1
    for one in ids:
        number = numbers.setdefault(one, len(numbers))
        if number == len(parents):
            parents.append(parent)
        elif parents[number] != parent:
            if number in found:
                reading.warn("an id stands twice in one request: the rest of it was left out")
                break
            reading.warn("an id follows different ids: ids have to stand for whole prefixes")
        found.append(number)
        parent = number
    return found


def _tokens_of(reading: _Reading) -> int:
    """Return the tokens of a block that agree with most lengths; blocks may be filled in part."""
    ranges: Counter[tuple[int, int]] = Counter()
    for one in reading.requests:
        if blocks := len(one.blocks):
            # the last block is whole or filled in part, or the rest has no block
            least = one.input_tokens // (blocks + 1) + 1
            most = (one.input_tokens - 1) // (blocks - 1) if blocks > 1 else BLOCK_TOKENS_MAX
            ranges[least, most] += 1
    votes = Counter[int]()
    for size in (1 << power for power in range(17)):
        votes[size] = sum(n for (least, most), n in ranges.items() if least <= size <= most)
    if max(votes.values()) < sum(ranges.values()):  # some other number may agree with more
        votes |= _agreeing(ranges)
    best = max(votes.values(), default=0)
    if not best:
        found = f"no number agrees with the lengths, so {BLOCK_TOKENS} is taken"
        reading.warn(f"{found}: give --block-tokens if it is another number")
    if votes[BLOCK_TOKENS] == best:
        return BLOCK_TOKENS
    chosen = max(size for size, n in votes.items() if n == best)
    if best < sum(ranges.values()):
        found = f"blocks of {chosen} tokens agree with {best} of {sum(ranges.values())} requests"
        reading.warn(f"{found}: give --block-tokens if it is another number")
    return chosen


def _agreeing(ranges: Counter[tuple[int, int]]) -> Counter[int]:
    """Return the roundest number that lies in most of the ranges, and in how many it lies."""
    changes = Counter[int]()
    for (least, most), n in ranges.items():
        if least <= most:
            changes[least] += n
            changes[most + 1] -= n
    held = best = 0
    first = last = 1
    points = sorted(changes)
    for at, after in pairwise(points):
        held += changes[at]
        if held > best:
            best, first, last = held, at, after - 1
    powers = (last.bit_length() - bit for bit in range(last.bit_length() + 1))
    return Counter({next(n for p in powers if (n := last >> p << p) >= first): best})


def _kind(value: object) -> str:
    names = {"dict": "an object", "list": "a list", "str": "text", "bool": "true or false"}
    return "null" if value is None else names.get(type(value).__name__, "a number")


def _shown(value: object) -> str:
    said = str(value)
    return said if len(said) <= SHOWN_MAX else f"{said[:SHOWN_MAX]}..."
