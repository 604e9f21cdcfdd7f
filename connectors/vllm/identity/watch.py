"""The watch over a rank's weights and adapters: when they change, keys name others."""

from __future__ import annotations

import os
from dataclasses import replace

from kvladder.connectors.vllm.identity.adapters import Adapters
from kvladder.connectors.vllm.identity.loaded import Loaded
from kvladder.connectors.vllm.identity.seen import Seen, Wanted
from kvladder.notices import Notices

BLIND_STEPS_MAX = 1024
"""Maximum number of steps between attempts to read unreadable weights."""


class ModelWatch:
    """Digests the weights and adapters in one rank's memory, and reports their changes.

    Used by one thread, the worker's. It knows no jobs: the worker asks whether blocks may be
    copied under the keys of a step.
    """

    def __init__(self, notices: Notices) -> None:
        self._notices = notices
        self._weights: Loaded | None = None
        self._adapters = Adapters(None, notices)
        self._seen = Seen(0, b"", 0, 0)
        self._news = False
        self._blind = 0
        """Number of steps until unreadable weights are tried again; 0 if they could be read."""
        self._again = 0
        """The first step that may look at the weights without a new doubt."""

    @property
    def digest(self) -> bytes:
        """Digest of the weights as of the last look."""
        return self._seen.digest

    def start(self, weights: Loaded) -> None:
        """Look at the weights for the first time, and from now on at the adapters, too."""
        self._weights = weights
        self._adapters = Adapters(weights.loras, self._notices)
        self._seen = Seen(0, self._fingerprint(weights, turn=0), 0, 0)

    def close(self) -> None:
        """Stop looking at the weights. May be called again."""
        if self._weights is not None:
            self._weights.close()
            self._weights = None

    def look(self, turn: int, doubt: int) -> bool:
        """Digest the weights again if they may have changed, or if ``doubt`` is a new one.

        Returns whether they changed.
        """
        weights, seen = self._weights, self._seen
        if weights is None or (doubt <= seen.doubt and turn < self._again):
            return False
        if not (doubt > seen.doubt or self._blind or weights.touched()):
            return False
        digest = self._fingerprint(weights, turn=turn)
        changed = digest != seen.digest
        self._news = self._news or changed or doubt > seen.doubt
        self._seen = Seen(seen.changes + changed, digest, max(doubt, seen.doubt), turn)
        return changed

    def look_at_adapters(self, turn: int) -> set[int]:
        """Look which adapters vLLM has in memory now; return the numbers that changed."""
        return self._adapters.look(turn)

    def read_adapter(self, wanted: Wanted) -> None:
        """Let vLLM read an adapter, so that its digest is known; see :class:`Adapters`."""
        self._adapters.read(wanted)

    def stale(self, known: int | None) -> bool:
        """Return whether keys name other weights than those in memory, or these are unreadable.

        ``known`` is the number of changes that the keys take into account, None for all.
        """
        return self._blind > 0 or (known is not None and known != self._seen.changes)

    def fits(self, number: int, known: int) -> bool:
        """Return whether keys that know ``known`` changes of an adapter name the one in memory."""
        return known == self._adapters.changes(number)

    def take(self) -> Seen | None:
        """Return the news of weights and adapters since the last call; None if there is none."""
        adapters = self._adapters.take()
        news, self._news = self._news or bool(adapters), False
        return replace(self._seen, adapters=adapters) if news else None

    def _fingerprint(self, weights: Loaded, *, turn: int) -> bytes:
        """Return the digest of the weights; if they cannot be read, return a random one.

        Nothing is copied while they cannot be read. Each attempt is costly, so the number of steps
        before the next one doubles.
        """
        try:
            digest = weights.fingerprint()
        except Exception as error:  # noqa: BLE001 - an engine must outlive its cache
            self._notices.say(
                "weights", f"nothing is cached while the weights cannot be read: {error!r}"
            )
            self._blind = min(2 * self._blind or 1, BLIND_STEPS_MAX)
            digest = os.urandom(32)
        else:
            self._blind = 0
        self._again = turn + self._blind
        return digest
