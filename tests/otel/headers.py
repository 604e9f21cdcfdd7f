"""The trace of a request, as it comes with the request."""

from __future__ import annotations

TRACE = 0x0AF7651916CD43DD8448EB211C80319C
PARENT = 0xB7AD6B7169203331
HEADERS = {"traceparent": f"00-{TRACE:032x}-{PARENT:016x}-01"}
UNSAMPLED = {"traceparent": f"00-{TRACE:032x}-{PARENT:016x}-00"}
