"""Announces an exporter: keeps its entry on the roster as long as it serves clients."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import asynccontextmanager, suppress

from kvladder.errors import ConfigError, TierError
from kvladder.export.link import FarOffers, Serve
from kvladder.tiers.nixl.curve import KeyRing
from kvladder.tiers.nixl.roster import BEAT_S, Entry, Roster, run_of

LEAVE_S = 1.0
"""Timeout for removing the entry; clients are disconnected afterwards."""


class RosterAnnouncer:
    """Keeps an entry on a roster, in the list of the current public key.

    Parameters
    ----------
    say:
        Called with the reason why clients do not find the exporter.
    """

    def __init__(
        self,
        roster: Roster,
        name: str,
        entry: Entry,
        say: Callable[[str], object],
    ) -> None:
        self._roster = roster
        self._name = name
        self._entry = entry
        self._say = say
        self._public = ""
        """Public key of the list that has the entry."""
        self._why = ""

    def gauges(self) -> dict[str, int]:
        """Return ``announced``: 1 if clients can find the exporter, else 0."""
        return {"announced": int(bool(self._public) and not self._why)}

    async def beat(self) -> None:
        """Write or renew the entry; raise ConfigError if Redis refuses the login."""
        try:
            before, self._public = self._public, self._roster.public
            is_new = before != self._public
            is_there = await self._roster.announce(self._name, self._entry, first=is_new)
            if is_new and before:
                await self._roster.leave(self._name, self._entry.run, before)
            self._failed("" if is_there else f"another cache has taken its name, {self._name}")
        except TierError as error:
            self._failed(str(error))

    def _failed(self, why: str) -> None:
        if why and not self._why:
            self._say(f"new clients cannot find this cache: {why}: it will retry")
        self._why = why

    async def run(self) -> None:
        """Renew the entry until cancelled."""
        while True:
            await asyncio.sleep(BEAT_S)
            try:
                await self.beat()
            except ConfigError as error:  # an earlier login worked, so this may pass
                self._failed(str(error))

    async def leave(self) -> None:
        """Remove the entry."""
        with suppress(TierError, ConfigError, TimeoutError):  # otherwise the entry expires
            async with asyncio.timeout(LEAVE_S):
                await self._roster.leave(self._name, self._entry.run)


@asynccontextmanager
async def announced(
    offers: FarOffers, told: Serve, address: str, ring: KeyRing
) -> AsyncGenerator[Callable[[], Mapping[str, int]]]:
    """Announce what is served at ``address`` while the context lasts; yield a reader of its gauges.

    ``ring`` has the keys of what is served, as they are at each time.

    Raises
    ------
    ConfigError
        Redis refuses the login.
    """
    if not told.roster:
        yield dict[str, int]
        return
    reached = f"{told.host}:{address.rpartition(':')[2]}"
    entry = Entry(
        address=reached,
        run=run_of(offers.arena),
        writable=offers.writable,
        block_bytes=offers.block_bytes_max,
        namespace=told.namespace.hex(),
    )
    roster = Roster(told.roster, lambda: [ring.keys.public.decode()])
    announcer = RosterAnnouncer(roster, told.name or reached, entry, offers.say)
    running: asyncio.Task[None] | None = None
    try:
        await announcer.beat()
        running = asyncio.create_task(announcer.run(), name="kvladder-announcer")
        yield announcer.gauges
    finally:
        if running is not None:
            running.cancel()
            await asyncio.wait({running})
            await announcer.leave()
        await roster.aclose()
