"""The tracer provider: that of the process, or one that sends to the environment's collector.

Spans are handed to the provider, which batches and sends them in a thread of its own. Its queue is
bounded: if the collector does not keep up, spans are lost, and no request waits.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Mapping
from typing import Final

from opentelemetry import trace
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter

from kvladder.errors import ConfigError

logger = logging.getLogger("kvladder")

ENDPOINTS: Final = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
PROTOCOLS: Final = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
FLUSH_S: Final = 2.0
"""Time that closing waits for the last spans to be sent."""
ABORT_S: Final = 2.0
"""Time that closing then waits for the sending thread to give up."""


class SpanOutlet:
    """The provider that takes the spans; ``close`` ends it if this cache made it.

    Parameters
    ----------
    own:
        The exporter if this cache made the provider, else None: then its owner flushes it.
    where:
        Receiver of the spans, for people.
    """

    def __init__(
        self, provider: trace.TracerProvider, own: SpanExporter | None, where: str
    ) -> None:
        self.provider = provider
        self.where = where
        self._own = own

    def close(self) -> None:
        """Send what is left, for ``FLUSH_S`` at most; later spans are lost. May be called again."""
        provider, exporter = self.provider, self._own
        if exporter is None or not isinstance(provider, TracerProvider):
            return
        self._own = None
        # the SDK itself would wait for the collector up to 30 s
        ending = threading.Thread(target=provider.shutdown, name="kvladder-otel", daemon=True)
        ending.start()
        ending.join(FLUSH_S)
        if ending.is_alive():
            logger.warning("otel: the last spans were not taken and are lost: %s", self.where)
            exporter.shutdown()
            ending.join(ABORT_S)


def open_outlet(env: Mapping[str, str] | None = None) -> SpanOutlet:
    """Return the process's provider, or a new one for the collector that ``env`` names.

    None for ``env`` stands for the process's environment. The new provider does not become the
    process's.

    Raises
    ------
    ConfigError
        There is neither, or the exporter for the protocol is not installed.
    """
    env = os.environ if env is None else env
    found = trace.get_tracer_provider()
    if not isinstance(found, trace.ProxyTracerProvider):
        return SpanOutlet(found, None, "spans go to the process's tracer provider")
    endpoint = next((env[name] for name in ENDPOINTS if env.get(name)), "")
    if not endpoint:
        what = "no receiver of spans: this process has no tracer provider, and no endpoint is set"
        hint = f"set {ENDPOINTS[1]}, such as http://127.0.0.1:4318, or leave otel out"
        raise ConfigError(what, path="otel", hint=hint)
    protocol = next((env[name] for name in PROTOCOLS if env.get(name)), "http/protobuf")
    exporter = _exporter(protocol)
    resource = Resource.create(None if env.get("OTEL_SERVICE_NAME") else {SERVICE_NAME: "kvladder"})
    # without the SDK's own end at exit, which waits for the collector
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return SpanOutlet(provider, exporter, f"spans go to {endpoint}, by {protocol}")


def _exporter(protocol: str) -> SpanExporter:
    """Return an exporter that reads the other variables ``OTEL_EXPORTER_OTLP_*`` itself."""
    try:
        if protocol == "http/protobuf":
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

            return OTLPSpanExporter()
        if protocol == "grpc":
            from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import (
                OTLPSpanExporter as GrpcSpanExporter,
            )

            return GrpcSpanExporter()
    except ImportError as error:
        package = f"opentelemetry-exporter-otlp-proto-{protocol.partition('/')[0]}"
        raise ConfigError(f"needs {package}: {error}", path="otel", hint="install it") from error
    what = f"{PROTOCOLS[1]} is {protocol!r}"
    raise ConfigError(what, path="otel", hint="expected http/protobuf or grpc")
