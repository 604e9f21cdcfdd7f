"""A receiver of OTLP over HTTP for tests; OpenTelemetry's own messages parse what it gets."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple, Self

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

from tests.patience import until


class Received(NamedTuple):
    """A span as it came over the wire."""

    name: str
    trace: str
    """Its trace, in hexadecimal digits."""
    id: str
    parent: str
    """Empty if it has none."""
    start_ns: int
    end_ns: int
    attributes: Mapping[str, Any]
    status: int
    """0 unset, 1 good, 2 an error."""
    links: tuple[str, ...]
    resource: Mapping[str, Any]


def _values(attributes: Any) -> dict[str, Any]:
    def value(one: Any) -> Any:
        kind = one.WhichOneof("value")
        found = getattr(one, kind)
        return [value(each) for each in found.values] if kind == "array_value" else found

    return {one.key: value(one.value) for one in attributes}


class Collector:
    """Listens on a free port of loopback while it is entered; ``spans`` are what came.

    ``answer`` is the status of its answers. While ``hangs`` is set, it does not answer at all.
    """

    def __init__(self) -> None:
        self.spans: list[Received] = []
        self.answer = 200
        self.requests = 0
        self.hangs = threading.Event()
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                collector.requests += 1
                while collector.hangs.is_set():
                    collector._stopping.wait(0.05)
                    if collector._stopping.is_set():
                        return
                if collector.answer == 200:
                    assert self.path == "/v1/traces", self.path
                    collector._take(ExportTraceServiceRequest.FromString(body))
                text = ExportTraceServiceResponse().SerializeToString()
                self.send_response(collector.answer)
                self.send_header("Content-Type", "application/x-protobuf")
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            def log_message(self, *_: object) -> None:
                pass

        self._stopping = threading.Event()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = False
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))

    @property
    def endpoint(self) -> str:
        """The base URL, for OTEL_EXPORTER_OTLP_ENDPOINT."""
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def _take(self, request: ExportTraceServiceRequest) -> None:
        for part in request.resource_spans:
            resource = _values(part.resource.attributes)
            for scope in part.scope_spans:
                for span in scope.spans:
                    self.spans.append(
                        Received(
                            span.name,
                            span.trace_id.hex(),
                            span.span_id.hex(),
                            span.parent_span_id.hex(),
                            span.start_time_unix_nano,
                            span.end_time_unix_nano,
                            _values(span.attributes),
                            span.status.code,
                            tuple(link.span_id.hex() for link in span.links),
                            resource,
                        )
                    )

    def named(self, name: str) -> list[Received]:
        """Return the spans of this name, in the order of their arrival."""
        return [span for span in [*self.spans] if span.name == name]

    def wait(self, *names: str) -> None:
        """Wait until there is at least one span of each name."""
        until(lambda: all(self.named(name) for name in names))

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def descendants(spans: list[Received], root: str) -> list[Received]:
    """Return the spans below the one with this id."""
    found = [span for span in spans if span.parent == root]
    return found + [below for span in found for below in descendants(spans, span.id)]
