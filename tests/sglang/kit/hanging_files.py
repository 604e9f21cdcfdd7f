"""A files tier with calls that wait or fail while the file named by ``HANGS`` exists.

The file is empty, or holds the share of calls that fail.
"""

from __future__ import annotations

import asyncio
import os
import pathlib
import random
from contextlib import suppress

from kvladder.tiers.files.tier import FilesTier


def told():
    """Return the content of the file; raise FileNotFoundError if there is none."""
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
