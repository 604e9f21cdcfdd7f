"""A router in front of vLLM servers: a request goes to the one that has to compute least for it.

    python router.py --port 8000 \\
        --engine http://127.0.0.1:8001,tcp://127.0.0.1:5557,tcp://127.0.0.1:5558 \\
        --engine http://127.0.0.1:8002,tcp://127.0.0.1:5567,tcp://127.0.0.1:5568

Each engine is named by where it serves, where it publishes KV events and where it sends them again.
Prompts are token ids, or texts if ``--tokenizer`` names a folder with the model's tokenizer. Needs
``pip install kvladder[events] aiohttp``.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
from collections.abc import AsyncIterator
from typing import Any, NamedTuple

from aiohttp import ClientSession, ClientTimeout, web

from kvladder.routing import Index
from kvladder.routing.feed import Feed

BODY_BYTES_MAX = 256 << 20
"""Prompts are long, and pictures are sent within them."""
WAITS = ClientTimeout(total=None, sock_connect=30)
"""An answer takes as long as it takes."""


class Engine(NamedTuple):
    serves: str
    publishes: str
    replays: str


class Router:
    def __init__(
        self, engines: list[Engine], *, tokenizer: Any = None, blind: bool = False
    ) -> None:
        self.index = Index()
        self.waiting = {engine.serves: 0 for engine in engines}
        """Tokens that each engine has still to compute for prompts, as far as the router knows."""
        self._feeds = {
            e.serves: Feed(self.index, e.serves, e.publishes, replay=e.replays) for e in engines
        }
        self._tokenizer = tokenizer
        self._turns = itertools.cycle(self.waiting) if blind else None
        self._session: ClientSession

    async def run(self, _app: web.Application) -> AsyncIterator[None]:
        """Follow the engines while the application runs."""
        async with ClientSession(timeout=WAITS) as self._session, asyncio.TaskGroup() as tasks:
            following = [tasks.create_task(feed.run()) for feed in self._feeds.values()]
            yield
            for task in following:
                task.cancel()

    def choose(self, asked: dict[str, Any]) -> tuple[str, int]:
        """Where a request goes, and how many tokens will be computed for its prompt there."""
        prompt = asked.get("prompt")
        if isinstance(prompt, str) and self._tokenizer is not None:
            prompt = self._tokenizer.encode(prompt)
        if not isinstance(prompt, list) or not all(isinstance(token, int) for token in prompt):
            prompt = []
        if self._turns is not None:
            return next(self._turns), len(prompt)
        found = {m.engine: m.tokens for m in self.index.match(prompt, salt=asked.get("cache_salt"))}
        there = [e for e in self.waiting if self._feeds[e].connected.is_set()] or [*self.waiting]
        costs = {engine: len(prompt) - found.get(engine, 0) for engine in there}
        chosen = min(costs, key=lambda engine: costs[engine] + self.waiting[engine])
        self.waiting[chosen] = self.waiting.pop(chosen)  # the next one of equals is another
        return chosen, costs[chosen]

    async def complete(self, request: web.Request) -> web.StreamResponse:
        """Hand a request on, and what is answered back, as it comes."""
        asked = await request.json()
        engine, cost = self.choose(asked)
        self.waiting[engine] += cost
        try:
            async with self._session.post(f"{engine}{request.path}", json=asked) as answer:
                back = web.StreamResponse(status=answer.status)
                back.content_type = answer.content_type
                await back.prepare(request)
                async for part in answer.content.iter_any():
                    if cost:  # the prompt is computed once something is answered
                        self.waiting[engine] -= cost
                        cost = 0
                    await back.write(part)
                return back
        finally:
            self.waiting[engine] -= cost


def application(router: Router) -> web.Application:
    app = web.Application(client_max_size=BODY_BYTES_MAX)
    app.cleanup_ctx.append(router.run)
    app.router.add_post("/v1/completions", router.complete)
    return app


def main() -> None:
    parser = argparse.ArgumentParser(description="Route requests to vLLM servers.")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--engine", action="append", required=True, metavar="HTTP,EVENTS,REPLAY")
    parser.add_argument("--tokenizer", help="read the tokenizer from this folder")
    parser.add_argument("--blind", action="store_true", help="ignore caches and take turns")
    options = parser.parse_args()
    tokenizer = None
    if options.tokenizer:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(options.tokenizer)
    engines = [Engine(*text.split(",")) for text in options.engine]
    router = Router(engines, tokenizer=tokenizer, blind=options.blind)
    there = ", ".join(text.partition(",")[0] for text in options.engine)
    print(f"http://127.0.0.1:{options.port} routes requests to {there}", flush=True)
    web.run_app(application(router), host="127.0.0.1", port=options.port, print=None)


if __name__ == "__main__":
    main()
