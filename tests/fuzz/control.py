"""A fuzz target of what a running cache is asked over its control socket."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterable
from functools import cache
from http import HTTPStatus
from pathlib import Path

import msgspec

import kvladder
from kvladder.control.sockets import UnixConnection
from kvladder.testing.stacks import SimCache
from tests.fuzz.target import Input, Target

PATHS = ("/verify", "/evict", "/blocks/", "/purge", "/hottest", "/warm", "/drain", "/receipt")
"""Without ``/change``, which may name any path of this machine: targets ``yaml`` and ``edit``."""
KEYS = SimCache.keys(*range(8))
EXPECTED = {200, 400, 404, 405, 409, 411, 413, 414, 503}
ANSWER_S = 30.0


class Running:
    """A real cache with some blocks in host memory and in files."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="kvladder-fuzz-"))
        files = {"type": "files", "path": str(self.folder / "kv"), "capacity": "512 KiB"}
        source = {
            "arena": {"size": "128 KiB"},
            "control": {"path": str(self.folder / "control")},
            "tiers": [{"type": "host"}, {**files, "when": "commit"}],
        }
        layout = kvladder.Layout(block_tokens=16, block_bytes=4096, fields={"model": "m"})
        self.cache = kvladder.open_cache(source, layout=layout)

    def save(self) -> None:
        """Store the blocks again, if requests have removed them."""
        self.cache.save(KEYS, salt="a").commit()

    def ask(self, method: str, path: str, body: bytes) -> tuple[int, bytes]:
        """Send a request; return the status of the answer, and its body."""
        client = UnixConnection(self.folder / "control", ANSWER_S)
        try:
            client.request(method, path, body, {"Content-Type": "application/json"})
            answer = client.getresponse()
            return answer.status, answer.read()
        finally:
            client.close()

    def close(self) -> None:
        """Close the cache, and remove its files."""
        self.cache.close()
        shutil.rmtree(self.folder, ignore_errors=True)


@cache
def _running() -> Running:
    return Running()


def close() -> None:
    """Close the cache that all inputs share."""
    if _running.cache_info().currsize:
        _running().close()
        _running.cache_clear()


def ask(data: bytes) -> None:
    """Send requests: each gets JSON, and the cache stays consistent."""
    running = _running()
    running.save()
    for frame in Input(data).frames():
        given = Input(frame)
        path = PATHS[given.number(len(PATHS))]
        method, body = ("GET", b"") if path == "/blocks/" else ("POST", given.rest)
        if path == "/blocks/":
            path += "".join(map(_safe, given.rest))
        status, answer = running.ask(method, path, body)
        assert status in EXPECTED, f"{status} {HTTPStatus(status).phrase}: {answer!r}"
        told = msgspec.json.decode(answer)
        assert status == HTTPStatus.OK or told["error"], told
    running.cache.check()


def _safe(byte: int) -> str:
    """Return a byte as it stands in a request's line."""
    return chr(byte) if 0x21 <= byte < 0x7F and byte not in b"?#%" else f"%{byte:02x}"


def _requests() -> Iterable[bytes]:
    names = [key.hex() for key in KEYS]
    bodies: list[tuple[int, object]] = [
        (0, {"level": "files", "start": 0, "blocks": 3}),
        (1, {"level": "host", "keys": names[:2]}),
        (1, {"level": "files", "count": 2}),
        (3, {"salt": "a", "wait_s": 0.5}),
        (3, {"all": True, "wait_s": 0.0}),
        (3, {"keys": names[:1], "namespace": "00" * 16}),
        (4, {"count": 5}),
        (5, {"blocks": names[:1], "wait_s": 0.1}),
        (5, {"stop": True}),
        (6, {"to": "files", "wait_s": 0.1}),
        (6, {"stop": True, "begin": False}),
        (7, {"receipt": {}}),
    ]
    yield from (_framed((number, msgspec.json.encode(body))) for number, body in bodies)
    yield _framed((2, names[0].encode()), (2, b"zz"))
    yield _framed(*((number, msgspec.json.encode(body)) for number, body in bodies[:5]))


def _framed(*requests: tuple[int, bytes]) -> bytes:
    made = [bytes([number]) + body for number, body in requests]
    return b"".join(len(one).to_bytes(2, "little") + one for one in made)


TARGETS = {
    "control": Target(
        "what a running cache is asked over its control socket",
        ask,
        _requests,
        (b'"level":', b'"host"', b'"files"', b'"start":', b'"blocks":', b'"count":', b'"keys":',
         b'"salt":', b'"wait_s":', b'"namespace":', b"18446744073709551615", b"9223372036854775808",
         b"-1", b"1e308", b"null", KEYS[0].hex().encode()),
    ),
}  # fmt: skip
