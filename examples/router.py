"""A router in front of vLLM servers: a request goes to the one that has to compute least for it.

    python router.py --port 8000 \\
        --engine http://127.0.0.1:8001,tcp://127.0.0.1:5557,tcp://127.0.0.1:5558 \\
        --engine http://127.0.0.1:8002,tcp://127.0.0.1:5567,tcp://127.0.0.1:5568

Each engine is named by where it serves, where it publishes KV events and where it sends them again.
A fourth address is kvladder's own port: then hints that come to the router at ``/hints`` go on to
the engine that served their session last, or that has most of their tokens.
Prompts are token ids, or texts if ``--tokenizer`` names a folder with the model's tokenizer. Needs
``pip install kvladder[events] aiohttp``.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
from collections import OrderedDict
from collections.abc import AsyncIterator
from typing import Any, NamedTuple

from aiohttp import ClientSession, ClientTimeout, web

from kvladder.routing import Index
from kvladder.routing.feed import Feed

BODY_BYTES_MAX = 256 << 20
"""Prompts are long, and pictures are sent within them."""
WAITS = ClientTimeout(total=None, sock_connect=30)
"""An answer takes as long as it takes."""
SESSIONS_MAX = 10_000
"""Sessions whose engines are known; those used last stay."""
UNKNOWN = {"outcome": "missing", "why": "no engine is known to have these blocks", "blocks": 0}


class Engine(NamedTuple):
    serves: str
    publishes: str
    replays: str
    hints: str = ""


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
        self._hints = {e.serves: e.hints for e in engines}
        self.sessions: OrderedDict[str, str] = OrderedDict()
        """The engine of each session's last request."""
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
        self._note(asked, engine)
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

    def _note(self, asked: dict[str, Any], engine: str) -> None:
        """Remember where a session's blocks are from now on."""
        session = ((asked.get("kv_transfer_params") or {}).get("kvladder") or {}).get("session")
        if isinstance(session, str):
            self.sessions[session] = engine
            self.sessions.move_to_end(session)
            if len(self.sessions) > SESSIONS_MAX:
                self.sessions.popitem(last=False)

    def whose(self, payload: dict[str, Any]) -> str | None:
        """The engine that a hint is for; None if none is known to have its blocks."""
        if isinstance(payload.get("session"), str):
            return self.sessions.get(payload["session"])
        found = self.index.match(payload.get("tokens") or [], salt=payload.get("salt"))
        return found[0].engine if found else None

    async def hint(self, request: web.Request) -> web.StreamResponse:
        """Hand each action to the engine that it is for, with the sender's token."""
        sent = await request.json()
        parts: dict[str, list[int]] = {}
        try:
            outcomes: list[Any] = [{"action_id": a["action_id"]} | UNKNOWN for a in sent["actions"]]
            for number, action in enumerate(sent["actions"]):
                parts.setdefault(self.whose(action["payload"]) or "", []).append(number)
        except (KeyError, TypeError, AttributeError):
            why = "not an envelope of hints: expected actions, each with an action_id and a payload"
            return web.json_response({"error": why}, status=400)
        token = {"Authorization": request.headers.get("Authorization", "")}
        for engine, numbers in parts.items():
            url = self._hints.get(engine)
            if not url:
                continue
            part = sent | {"actions": [sent["actions"][number] for number in numbers]}
            async with self._session.post(f"{url}/hints", json=part, headers=token) as answer:
                if answer.status != 200:
                    return web.Response(
                        body=await answer.read(),
                        status=answer.status,
                        content_type=answer.content_type,
                    )
                told = (await answer.json())["hints"]
            for number, outcome in zip(numbers, told, strict=True):
                outcomes[number] = outcome
        return web.json_response({"hints": outcomes})


def application(router: Router) -> web.Application:
    app = web.Application(client_max_size=BODY_BYTES_MAX)
    app.cleanup_ctx.append(router.run)
    app.router.add_post("/v1/completions", router.complete)
    app.router.add_post("/hints", router.hint)
    return app


def main() -> None:
    parser = argparse.ArgumentParser(description="Route requests to vLLM servers.")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument(
        "--engine", action="append", required=True, metavar="HTTP,EVENTS,REPLAY[,HINTS]"
    )
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
