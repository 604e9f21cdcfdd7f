"""Files whose calls wait, or some of which fail, as long as the file that ``HANGS`` names exists.

It is empty, or says which share of the calls fails.
"""

from __future__ import annotations

import asyncio
import os
import pathlib
import random
from contextlib import suppress

from kvladder.tiers.files.tier import FilesTier


def told():
    """What the file says; raises FileNotFoundError if there is none."""
    return pathlib.Path(os.environ["HANGS"]).read_text()


class HangingFiles(FilesTier):
    """See above."""

    async def _hang(self):
        with suppress(FileNotFoundError):
            while not (share := told()):  # noqa: ASYNC110 - a test of another process writes it
                await asyncio.sleep(0.05)
            if random.random() < float(share):
                raise OSError("it fails")

    async def get(self, reads):
        await self._hang()
        return await super().get(reads)

    async def put(self, writes):
        await self._hang()
        return await super().put(writes)
