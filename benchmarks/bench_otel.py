"""What spans cost a request: switched off, beside the tree before there were any; and on.

A request loads 2,048 tokens from files and saves as many. Figures are processor time of the whole
process, its sending thread included. The processes take turns, so that all see the same machine.
Ratios are medians over the turns. The last row has the spans alone, without the noise of a cache.
Its limit is 1 % of the time to first token that ``2026-11-21-vllm.md`` has for such a request.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from time import process_time

from benchmarks.row import Row

ROOT = Path(__file__).resolve().parents[1]
FIRST_TOKEN_S = 0.062
TURNS = 40
REQUESTS = 8
BURSTS, BURST = 20, 100
"""Requests whose spans are made alone: few enough at once that all are sent."""
SINK = """
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
class Sink(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()
    def log_message(self, *_): pass
server = ThreadingHTTPServer(("127.0.0.1", 0), Sink)
print(server.server_address[1], flush=True)
server.serve_forever()
"""
WITHOUT, OFF, ON = "without", "off", "on"


def rows() -> Iterator[Row]:
    """Serve requests in turns: by the tree without spans, with them off, with them on."""
    with ExitStack() as undo:
        folder = Path(undo.enter_context(tempfile.TemporaryDirectory(dir=ROOT / "build")))
        sink = _started(undo, [sys.executable, "-c", SINK])
        assert sink.stdout is not None
        receiver = {
            "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{int(sink.stdout.readline())}"
        }
        trees = {OFF: ROOT, ON: ROOT}
        if (before := _before(folder)) is not None:
            trees = {WITHOUT: before, **trees}
        children = {
            name: _child(undo, tree, folder / f"kv-{name}", receiver, otel=name == ON)
            for name, tree in trees.items()
        }
        took: dict[str, list[float]] = {name: [] for name in children}
        for turn in range(TURNS):
            for name, child in children.items():
                seconds = _asked(child)
                if turn:  # the first one imports what is imported late
                    took[name].append(seconds)
        spans_s = _spans(receiver["OTEL_EXPORTER_OTLP_ENDPOINT"])
    note = "processor time of a request of 2,048 tokens, loaded from files, and saved"
    if WITHOUT in took:
        yield Row(
            name="otel, spans off",
            unit="ms",
            peer=median(took[WITHOUT]) * 1e3,
            ours=median(took[OFF]) * 1e3,
            ratio=_ratio(took[OFF], took[WITHOUT]),
            goal="ratio <= 1.01",
            note=f"peer: the tree before there were spans; {note}",
        )
    yield Row(
        name="otel, spans on",
        unit="ms",
        peer=median(took[OFF]) * 1e3,
        ours=median(took[ON]) * 1e3,
        ratio=_ratio(took[ON], took[OFF]),
        note=f"peer: off; every request is sampled; {note}",
    )
    yield Row(
        name="otel, the spans of a request: made, encoded and sent",
        unit="us",
        limit=FIRST_TOKEN_S / 100 * 1e6,
        ours=spans_s * 1e6,
        goal="ratio <= 1",
        note=f"6 spans, as a hit in vLLM has; limit: 1 % of {FIRST_TOKEN_S * 1e3:g} ms",
    )


def _ratio(ours: list[float], peer: list[float]) -> float:
    """Return the median of the ratios of turns."""
    return median(one / other for one, other in zip(ours, peer, strict=True))


def _spans(endpoint: str) -> float:
    """Return the processor seconds for the spans of a request, all threads included."""
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    from kvladder.otel.provider import SpanOutlet
    from kvladder.otel.tracer import OtelTracer
    from kvladder.runtime import SystemClock
    from kvladder.tiers.spans import ReadTiming, TierRead

    clock = SystemClock()
    provider = TracerProvider(shutdown_on_exit=False)
    exporter = OTLPSpanExporter(endpoint=f"{endpoint}/v1/traces")
    provider.add_span_processor(BatchSpanProcessor(exporter))
    outlet = SpanOutlet(provider, exporter, "")
    kinds = {"files": ("files", False)}
    tracer = OtelTracer(outlet, clock, kinds=kinds, block_bytes=32 << 10, version="0")

    def request() -> None:
        lookup = tracer.lookup({"traceparent": f"00-{1:032x}-{1:016x}-01"})
        fetch = tracer.fetch(lookup.headers, is_use=True)
        assert fetch is not None
        begun_s = clock.now()
        timing = ReadTiming(begun_s, begun_s)
        tracer.read([fetch], TierRead("files", timing, clock.now(), 128, 128, 0, "", False))
        fetch.answered(128, ["files"] * 128, ())
        lookup.ended(2048, 0, 2048, ())
        fetch.copied("onboard", 128, 4 << 20, begun_s, ok=True)
        save = tracer.save({"traceparent": f"00-{1:032x}-{1:016x}-01"}, 128)
        assert save is not None
        save.copied("offload", 128, 4 << 20, begun_s, ok=True)
        save.ended(committed=True)

    took_s: list[float] = []
    for _ in range(BURSTS):
        begun = process_time()
        for _ in range(BURST):
            request()
        provider.force_flush()
        took_s.append((process_time() - begun) / BURST)
    outlet.close()
    return median(took_s)


def _before(folder: Path) -> Path | None:
    """Unpack the tree before the commit that added spans; None without git's history."""
    told = ["git", "-C", str(ROOT), "log", "--diff-filter=A", "--format=%H", "--", "tiers/spans.py"]
    found = subprocess.run(told, capture_output=True, text=True, check=False).stdout.split()
    if not found:
        return None
    tree = folder / "before"
    tree.mkdir()
    command = ["git", "-C", str(ROOT), "archive", f"{found[-1]}^", "--format=tar"]
    archive = subprocess.run(command, capture_output=True, check=True).stdout
    subprocess.run(["tar", "-x", "-C", str(tree)], input=archive, check=True)
    for module in (*ROOT.glob("gpu/tree/*.so"), *ROOT.glob("policy/*.so")):
        shutil.copy(module, tree / module.relative_to(ROOT))
    return tree


def _child(
    undo: ExitStack, tree: Path, folder: Path, env: dict[str, str], *, otel: bool
) -> subprocess.Popen[str]:
    script = [sys.executable, "-W", "ignore", str(ROOT / "benchmarks" / "otel_child.py")]
    more = json.dumps({"otel": True} if otel else {})
    return _started(undo, [*script, str(folder), more], {"PYTHONPATH": str(tree), **env})


def _started(
    undo: ExitStack, command: list[str], env: dict[str, str] | None = None
) -> subprocess.Popen[str]:
    child = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **(env or {})},
    )
    undo.callback(child.wait)
    undo.callback(child.kill)
    return child


def _asked(child: subprocess.Popen[str]) -> float:
    """Have a child serve requests, and return the processor seconds of one."""
    assert child.stdin is not None
    assert child.stdout is not None
    child.stdin.write(f"{REQUESTS}\n")
    child.stdin.flush()
    return float(child.stdout.readline())
