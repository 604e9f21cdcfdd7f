"""Settings of tracing with OpenTelemetry."""

from __future__ import annotations

from kvladder.schema import Settings


class OtelConfig(Settings, frozen=True, kw_only=True):
    """Spans of OpenTelemetry for what requests load and save. ``otel: true`` is short for it."""

    enabled: bool = False
    """True if spans are made; the process or the variables ``OTEL_*`` say where they go."""
