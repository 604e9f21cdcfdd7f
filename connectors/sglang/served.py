"""What became of a request's prompt: tokens by level, the time that took, and why others miss."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from threading import Lock
from typing import Any, Final

from kvladder.keys import BlockKey
from kvladder.metrics import MissCause

PAGES_MAX: Final = 1 << 16
"""Largest number of watched pages; those of the requests that came last stay."""
OWN: Final = "device", "host", "storage"
"""Places that SGLang counts the cached tokens of a request by."""


@dataclass(slots=True)
class PromptReport:
    """What kvladder found and read for one prompt; each of SGLang's threads adds its part."""

    pages: Sequence[BlockKey]
    """Pages of keys and values of the prompt, from its start."""
    levels: Counter[str] = field(default_factory=Counter[str])
    """Pages that were read, by the level that served them."""
    waited_s: float = 0.0
    """Time that looking up and reading its pages took."""
    found: int = 0
    """Pages that a lookup found, from where SGLang asked on."""
    cause: MissCause | None = None
    """Why the page after these is not served; None if none was missing, or none was asked for."""

    def told(self, request: Any, page_tokens: int) -> dict[str, Any]:
        """Return plain data, with what SGLang itself counts of the request."""
        asked = len(self.pages) * page_tokens
        device, host, storage = (int(getattr(request, f"cached_tokens_{of}", 0)) for of in OWN)
        own = min(asked, device + host)
        served = min(asked - own, storage)
        missed = asked - own - served
        cause = self.cause or MissCause("", "unsearched" if not self.found else "late")
        return {
            "asked_tokens": asked,
            "engine_tokens": own,
            "served_tokens": served,
            "served_from": {name: pages * page_tokens for name, pages in self.levels.items()},
            "waited_s": round(self.waited_s, 6),
            "missed": [{"reason": cause.reason, "level": cause.level or None, "tokens": missed}]
            if missed
            else [],
        }


class WatchedPages:
    """The reports of requests that ask for one, by their pages. Any thread may call it.

    If several requests wait for the same pages, the one that came last has them in its report.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._reports: OrderedDict[BlockKey, PromptReport] = OrderedDict()

    def watch(self, report: PromptReport) -> None:
        """Note from now on what becomes of the report's pages."""
        with self._lock:
            for page in report.pages:
                self._reports[page] = report
                self._reports.move_to_end(page)
            while len(self._reports) > PAGES_MAX:
                self._reports.popitem(last=False)

    def end(self, report: PromptReport) -> None:
        """Note nothing more in a report."""
        with self._lock:
            for page in report.pages:
                if self._reports.get(page) is report:
                    del self._reports[page]

    def of(self, pages: Sequence[BlockKey]) -> PromptReport | None:
        """Return the report of a batch of pages; None if no request asks for one."""
        if not self._reports or not pages:
            return None
        with self._lock:
            return self._reports.get(pages[0])
