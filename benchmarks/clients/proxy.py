"""A proxy on loopback that records each request for tokens: what was asked, answered, and when.

Clients keep their answers in different forms, or not at all. The proxy sees all of them in the same
form, and measures the time to the first token of each request with the same clock.
"""

from __future__ import annotations

import hashlib
import http.client
import json
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self

PATHS = ("/v1/completions", "/v1/chat/completions")
ASKED = ("prompt", "messages", "max_tokens", "max_completion_tokens", "temperature", "ignore_eos")
"""The fields of a request that determine its answer, given that ``temperature`` is 0."""
HOP = {"connection", "keep-alive", "transfer-encoding", "content-length", "host"}
TIMEOUT_S = 600.0
BROKEN = 0
"""The status of an exchange whose answer is incomplete or an error."""


@dataclass(frozen=True, slots=True)
class Exchange:
    """One request for tokens and its answer."""

    asked: str
    """Digest of what was asked."""
    answer: str
    """Digest of the text and the reason of its end."""
    status: int
    first_s: float
    """Time until the first token."""
    total_s: float
    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Prompt tokens that came from a cache."""
    temperature: float | None = None

    @property
    def is_whole(self) -> bool:
        """Return whether the server answered without an error."""
        return self.status == 200


def digest_of(body: dict[str, Any]) -> str:
    """Return the digest of what a request asks for, without names and settings of the stream."""
    asked = {name: body[name] for name in ASKED if body.get(name) is not None}
    return _digest(json.dumps(asked, sort_keys=True))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


class Answer:
    """Collects an answer from the pieces of its body, streamed or whole."""

    def __init__(self, *, is_stream: bool) -> None:
        self._is_stream = is_stream
        self._rest = b""
        self._texts: list[str] = []
        self._ends: list[str] = []
        self._usage: dict[str, Any] = {}
        self.first_s: float | None = None
        """Time of the first piece that has a choice."""
        self.is_done = False
        """Whether the stream has said that it ends."""
        self.is_error = False
        """Whether the stream has an error in place of an answer."""

    def add(self, piece: bytes, now_s: float) -> None:
        """Take the next bytes of the body."""
        self._rest += piece
        if not self._is_stream:
            return
        *lines, self._rest = self._rest.split(b"\n")
        for line in lines:
            data = line.strip().removeprefix(b"data:").strip()
            if data == b"[DONE]":
                self.is_done = True
            elif line.startswith(b"data:"):
                self._take(json.loads(data), now_s)

    def end(self, now_s: float) -> None:
        """Take the end of the body."""
        if not self._is_stream and self._rest:
            self._take(json.loads(self._rest), now_s)

    def _take(self, event: dict[str, Any], now_s: float) -> None:
        for choice in event.get("choices") or ():
            if self.first_s is None:
                self.first_s = now_s
            said = choice.get("delta") or choice.get("message") or choice
            self._texts.append(said.get("text") or said.get("content") or "")
            self._ends.append(choice.get("finish_reason") or "")
        self._usage = event.get("usage") or self._usage
        self.is_error |= "error" in event

    @property
    def digest(self) -> str:
        """Digest of the whole text and of the reasons of its end."""
        return _digest("".join(self._texts) + "\0" + "".join(self._ends))

    @property
    def prompt_tokens(self) -> int:
        """Length of the prompt, as the server counts it."""
        return int(self._usage.get("prompt_tokens") or 0)

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens from a cache, as the server counts them."""
        details: dict[str, Any] = self._usage.get("prompt_tokens_details") or {}
        return int(details.get("cached_tokens") or 0)


class RecordingProxy:
    """A proxy before the server on a port of loopback; a context manager."""

    def __init__(self, port: int) -> None:
        self._server_port = port
        self._lock = threading.Lock()
        self._exchanges: list[Exchange] = []
        proxy = self

        class Handler(_Handler):
            owner = proxy

        self._http = _Server(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.05,))

    @property
    def url(self) -> str:
        """Address for clients."""
        return f"http://127.0.0.1:{self._http.server_address[1]}"

    def connect(self) -> http.client.HTTPConnection:
        """Return a new connection to the server."""
        return http.client.HTTPConnection("127.0.0.1", self._server_port, timeout=TIMEOUT_S)

    def keep(self, exchange: Exchange) -> None:
        """Record an exchange."""
        with self._lock:
            self._exchanges.append(exchange)

    def exchanges(self) -> list[Exchange]:
        """Return the recorded exchanges, in the order of their ends."""
        with self._lock:
            return [*self._exchanges]

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._http.shutdown()
        self._thread.join()
        self._http.server_close()


class _Server(ThreadingHTTPServer):
    """Serves each connection in a thread."""

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Report errors other than a client's leaving between two requests."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    """Passes one client's requests on."""

    owner: RecordingProxy
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base's name
        """Log nothing."""

    def _pass(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        is_recorded = self.command == "POST" and self.path.partition("?")[0] in PATHS
        begun = time.perf_counter()
        there = self.owner.connect()
        answer, is_whole = Answer(is_stream=False), False
        status = BROKEN
        try:
            headers = {k: v for k, v in self.headers.items() if k.lower() not in HOP}
            there.request(self.command, self.path, body or None, headers)
            response = there.getresponse()
            status = response.status
            kind = response.getheader("Content-Type") or ""
            answer = Answer(is_stream="event-stream" in kind)
            self.send_response(response.status)
            for name, value in response.getheaders():
                if name.lower() not in HOP | {"date", "server"}:
                    self.send_header(name, value)
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            for piece in _pieces(response):
                self.wfile.write(b"%x\r\n%b\r\n" % (len(piece), piece))
                if is_recorded and response.status == 200:
                    answer.add(piece, time.perf_counter() - begun)
            is_whole = True
        except (OSError, http.client.HTTPException):  # the client or the server has left
            self.close_connection = True
            if status == 200 and not answer.is_done:
                status = BROKEN
        finally:
            there.close()
            if is_recorded:
                status = BROKEN if answer.is_error else status
                self._record(json.loads(body), answer, status, begun)
        if is_whole:
            self._end_body()

    def _end_body(self) -> None:
        """End the answer, once it is recorded: so records are in the order that the client sees."""
        try:
            self.wfile.write(b"0\r\n\r\n")
        except OSError:
            self.close_connection = True

    def _record(self, body: dict[str, Any], answer: Answer, status: int, begun: float) -> None:
        total_s = time.perf_counter() - begun
        if status == 200:
            answer.end(total_s)
        first_s = total_s if answer.first_s is None else answer.first_s
        self.owner.keep(
            Exchange(
                asked=digest_of(body),
                answer=answer.digest,
                status=status,
                first_s=first_s,
                total_s=total_s,
                prompt_tokens=answer.prompt_tokens,
                cached_tokens=answer.cached_tokens,
                temperature=body.get("temperature"),
            )
        )

    do_GET = do_POST = _pass  # noqa: N815 - the base's names


def _pieces(response: http.client.HTTPResponse) -> Iterator[bytes]:
    """Yield the pieces of a body as they arrive."""
    while piece := response.read1(1 << 16):
        yield piece
