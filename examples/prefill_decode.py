"""A proxy in front of two vLLM servers: one computes prompts, the other the answers to them.

    python prefill_decode.py --port 8000 \\
        --prefill http://127.0.0.1:8100 --decode http://127.0.0.1:8200

What hands a prompt's blocks over is the engines' own affair: a NixlConnector, whose parameters the
proxy passes on, or a tier of kvladder's that both have. Where the first server fails, the second
computes the prompt, too. Needs ``pip install aiohttp``.
"""

from __future__ import annotations

import argparse
from collections.abc import AsyncIterator
from typing import Any

from aiohttp import ClientError, ClientSession, ClientTimeout, web

ONE_TOKEN = {"max_tokens": 1, "stream": False}
HANDED_ON = {"do_remote_decode": True, "do_remote_prefill": False}
BODY_BYTES_MAX = 256 << 20
"""Prompts are long, and pictures are sent within them."""
WAITS = ClientTimeout(total=None, sock_connect=30)
"""An answer takes as long as it takes."""


class Proxy:
    def __init__(self, prefill: str, decode: str) -> None:
        self._prefill = prefill
        self._decode = decode
        self._session: ClientSession

    async def run(self, _app: web.Application) -> AsyncIterator[None]:
        """Keep connections to both while the application runs."""
        async with ClientSession(timeout=WAITS) as self._session:
            yield

    async def prepare(self, path: str, asked: dict[str, Any]) -> dict[str, Any]:
        """Have the prompt computed; what the second server is told of where its blocks are."""
        said = asked.get("kv_transfer_params") or {}
        first = {**asked, **ONE_TOKEN, "kv_transfer_params": {**said, **HANDED_ON}}
        first.pop("stream_options", None)
        first.pop("min_tokens", None)
        if "max_completion_tokens" in first:
            first["max_completion_tokens"] = 1
        try:
            async with self._session.post(f"{self._prefill}{path}", json=first) as answer:
                answer.raise_for_status()
                told = await answer.json()
        except (ClientError, TimeoutError):
            return asked
        return {**asked, "kv_transfer_params": {**said, **(told.get("kv_transfer_params") or {})}}

    async def complete(self, request: web.Request) -> web.StreamResponse:
        """Hand a request to one server and the other, and what is answered back, as it comes."""
        second = await self.prepare(request.path, await request.json())
        async with self._session.post(f"{self._decode}{request.path}", json=second) as answer:
            back = web.StreamResponse(status=answer.status)
            back.content_type = answer.content_type
            await back.prepare(request)
            async for part in answer.content.iter_any():
                await back.write(part)
            return back


def application(proxy: Proxy) -> web.Application:
    app = web.Application(client_max_size=BODY_BYTES_MAX)
    app.cleanup_ctx.append(proxy.run)
    app.router.add_post("/v1/completions", proxy.complete)
    app.router.add_post("/v1/chat/completions", proxy.complete)
    return app


def main() -> None:
    parser = argparse.ArgumentParser(description="Prefill on one server, decode on another.")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--prefill", required=True, metavar="HTTP")
    parser.add_argument("--decode", required=True, metavar="HTTP")
    options = parser.parse_args()
    proxy = Proxy(options.prefill, options.decode)
    here = f"http://127.0.0.1:{options.port}"
    print(f"{here} prefills on {options.prefill}, decodes on {options.decode}", flush=True)
    web.run_app(application(proxy), host="127.0.0.1", port=options.port, print=None)


if __name__ == "__main__":
    main()
