"""An exporter's process that follows orders in files instead of clients: no network, no NIXL."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import msgspec

from kvladder.children.spawn import run
from kvladder.errors import ConfigError, TierError
from kvladder.export.child import ServingStarted, attend
from kvladder.export.link import FarOffers, Serve
from tests.export.clients import Client, keys_of


@asynccontextmanager
async def serving(offers: FarOffers, told: Serve) -> AsyncGenerator[ServingStarted]:
    """Serve orders from the folder ``told.keys``: a file is a request, another file its answer."""
    folder = Path(told.keys)
    if (folder / "refuse").exists():
        raise ConfigError("in use", path="listen", hint="another port")
    if (folder / "die").exists():
        os.kill(os.getpid(), signal.SIGKILL)
    counts = {"requests": 0}
    working = asyncio.create_task(work(offers, folder, counts))
    try:
        yield ServingStarted(f"{told.listen}1", lambda: counts)
        (folder / "left").touch()
    finally:
        working.cancel()


async def work(offers: FarOffers, folder: Path, counts: dict[str, int]) -> None:
    client = Client(offers, session=os.getpid())
    while True:
        await asyncio.sleep(0.01)
        for request in sorted(folder.glob("*.ask")):  # noqa: ASYNC240 - a few files
            verb, numbers = msgspec.json.decode(request.read_bytes())
            request.unlink()
            counts["requests"] += 1
            answer = await done(client, verb, keys_of(*numbers))
            answered = request.with_suffix(".answer.new")
            answered.write_bytes(msgspec.json.encode(answer))
            answered.rename(request.with_suffix(".answer"))


async def done(client: Client, verb: str, keys: list[bytes]) -> object:
    match verb:
        case "hello":
            return await client.hello(len(keys) or 4000)
        case "get":
            return [found is not None for found in await client.get(keys)]
        case "pin":
            client.op += 1
            return [
                one is not None for one in await client.offers.pin(client.session, client.op, keys)
            ]
        case "wrong":
            try:
                await client.offers.have(client.session, ["no bytes"])  # type: ignore[list-item]
            except TierError as error:
                return repr(error)
            return "nothing was raised"
        case "remove":
            await client.offers.remove(client.session, keys)
            return None
        case "purge":
            return await client.offers.purge(client.session, None)
    return await getattr(client, verb)(keys)  # put, granted, has


if __name__ == "__main__":
    run(partial(attend, serving))
