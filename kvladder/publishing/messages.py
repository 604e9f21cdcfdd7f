"""Turns an announcer's events into events on the wire; consecutive blocks share one event."""

from __future__ import annotations

from collections.abc import Sequence

from kvladder.events import Removed, Stored
from kvladder.keys import BlockKey
from kvladder.publishing.announcer import Announcer
from kvladder.publishing.device import DEVICE, MEDIUM, Known, OnDevice
from kvladder.publishing.wire import BlockRemoved, BlockStored, Hash
from kvladder.tiers.ladder import Holdings, Ladder


class Messages:
    """Turns the events of a ladder, and of a device above it, into vLLM's. One thread calls it.

    Blocks that the device's pool knows are told with tokens, parent, adapter and extra keys.
    Others are told with their hash only.
    """

    def __init__(self, ladder: Ladder, block_tokens: int, device: OnDevice | None = None) -> None:
        self._tokens = block_tokens if device is None else device.block_tokens
        self._device = device
        self._known: dict[BlockKey, Known] = {} if device is None else device.known
        self._ladder = ladder
        (host, medium), *_ = ladder.media.items()
        self._where: dict[str, tuple[str, str | None]] = {host: (medium, None)}
        self._look()
        above: dict[str, Holdings] = {}
        if device is not None:
            self._where[DEVICE] = (MEDIUM, None)
            above[DEVICE] = device
        self._announcer = Announcer(ladder, above=above, order=lambda: list(self._known))

    def _look(self) -> None:
        """Note the media of the levels as they are now; levels that are gone stay known."""
        _, *below = self._ladder.media.items()
        self._where.update((name, (medium, name)) for name, medium in below)

    @property
    def pending(self) -> bool:
        """True if the next ``take`` may return something even without new events."""
        return self._announcer.pending

    def repeat(self) -> None:
        """Tell everything again in the next calls; listeners were told to clear everything."""
        self._announcer.repeat()

    def take(self) -> list[BlockStored | BlockRemoved]:
        """Return the events to be sent now, in order."""
        if self._device is not None:
            learnt = self._device.learnt
            self._announcer.retell([learnt.popleft() for _ in range(len(learnt))])
            if self._device.renamed:
                self._device.renamed = False
                self._announcer.renew()
        found: list[BlockStored | BlockRemoved] = []
        for event in self._announcer.take():
            if event.level not in self._where:  # it was attached since
                self._look()
            if isinstance(event, Removed):
                found.append(self._removed(event))
            else:
                found += self._stored(event)
        return found

    def _removed(self, event: Removed) -> BlockRemoved:
        medium, level = self._where[event.level]
        hashes: list[Hash] = [*event.keys]
        return BlockRemoved(hashes, medium, level)

    def _stored(self, event: Stored) -> list[BlockStored]:
        """Return an event for each run of blocks that follow each other or have unknown content."""
        runs: list[list[tuple[BlockKey, Known | None]]] = []
        for key in event.keys:
            known = self._known.get(key)
            last = runs[-1][-1] if runs else None
            if last is not None and (
                last[1] is None if known is None else last[1] and known.parent == last[0]
            ):
                runs[-1].append((key, known))
            else:
                runs.append([(key, known)])
        return [self._block_stored(event.level, run) for run in runs]

    def _block_stored(
        self, level: str, run: Sequence[tuple[BlockKey, Known | None]]
    ) -> BlockStored:
        """Return the event of a run. Either all of its blocks have known content, or none."""
        medium, name = self._where[level]
        hashes: list[Hash] = [key for key, _ in run]
        known = [one for _, one in run if one is not None]
        if not known:
            return BlockStored(hashes, None, [], self._tokens, None, medium, None, name)
        extra = [one.extra or None for one in known]
        return BlockStored(
            hashes,
            known[0].parent,
            [token for one in known for token in one.tokens],
            self._tokens,
            None,
            medium,
            known[0].lora or None,
            name,
            extra if any(extra) else None,
        )
