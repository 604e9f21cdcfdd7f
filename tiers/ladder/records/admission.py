"""The link between a level's ``admit: adaptive`` and the levels above it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from kvladder.keys import BlockKey
from kvladder.policy.admission import AdaptiveAdmission
from kvladder.tiers.ladder.records.index import LevelIndex


class AdmissionGate:
    """Tells the admission of one level what happens above it.

    The stack's lock is held around every call.

    Parameters
    ----------
    hotter:
        Indexes of the levels above, hottest first.
    again:
        Has host offer blocks again that this level refused.
    blocks:
        The capacity that the admission was made for.
    """

    def __init__(
        self,
        admission: AdaptiveAdmission,
        hotter: Sequence[LevelIndex[Any]],
        again: Callable[[Sequence[BlockKey]], object],
        blocks: int,
    ) -> None:
        self.admission = admission
        self.blocks = blocks
        self._hotter = hotter
        self._again = again

    def requested(
        self, keys: Sequence[BlockKey], request: int, *, in_session: bool = False
    ) -> None:
        """Count a request; blocks that were refused may be worth a write now."""
        del request, in_session
        self.admission.requested(keys, self._above)
        self._again(keys)

    def _above(self, keys: Sequence[BlockKey]) -> list[bool]:
        rows = [map(index.__contains__, keys) for index in self._hotter]
        return [*map(any, zip(*rows, strict=True))]
