"""An agent that calls tools, and tells the cache what it knows: its blocks are needed again soon.

    python agent.py --engine http://127.0.0.1:8000 \\
        --hints http://127.0.0.1:9480 --token-file /run/secrets/kvladder

Each turn sends the whole conversation. The request pins its blocks for as long as the tool may
take. Shortly before the tool returns, the agent has the blocks brought up to host memory, so that
the next turn finds them there. The last turn ends the session, which gives its blocks up.

The engine is a vLLM server with kvladder, or ``router.py`` in front of some, which passes hints on.
Prompts are token ids. The tool is a pause with a random result: put your own in its place.
"""

from __future__ import annotations

import argparse
import json
import random
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, NamedTuple
from urllib.request import Request, urlopen

LEAD_S = 0.2
"""Time before the tool is expected back at which the blocks are brought up."""
ANSWER_S = 600.0
"""Longest time that an answer may take."""


class Answer(NamedTuple):
    tokens: list[int]
    cached: int
    """Tokens of the prompt that came from a cache."""
    first_s: float
    """Time to the first token."""


def action(verb: str, **payload: Any) -> dict[str, Any]:
    """One action of an envelope."""
    return {"action_id": verb, "action_type": verb, "action_version": "1", "payload": payload}


def envelope(*actions: dict[str, Any]) -> dict[str, Any]:
    """Hints under an id of their own: one that is sent again is not done again."""
    return {"protocol_version": "0.1", "message_id": uuid.uuid4().hex, "actions": [*actions]}


class Engine:
    """A vLLM server, and the place that takes hints for its cache."""

    def __init__(self, url: str, model: str, *, hints: str = "", token: str = "") -> None:
        self._url, self._model, self._hints = url.rstrip("/"), model, hints.rstrip("/")
        self._token = token

    def ask(self, prompt: Sequence[int], *, salt: str, tokens: int, **params: Any) -> Answer:
        """Return the answer to a prompt; ``params`` are the request's ``kv_transfer_params``."""
        body = {
            "model": self._model, "prompt": [*prompt], "max_tokens": tokens, "temperature": 0,
            "ignore_eos": True, "return_token_ids": True, "cache_salt": salt, "stream": True,
            "stream_options": {"include_usage": True}, "kv_transfer_params": params,
        }  # fmt: skip
        begun_s, first_s, cached = time.monotonic(), 0.0, 0
        said: list[int] = []
        for part in self._parts(f"{self._url}/v1/completions", body):
            for choice in part["choices"]:
                first_s = first_s or time.monotonic() - begun_s
                said += choice.get("token_ids") or []
            details = (part.get("usage") or {}).get("prompt_tokens_details") or {}
            cached = details.get("cached_tokens") or cached
        return Answer(said, cached, first_s)

    def _parts(self, url: str, body: Any) -> Iterator[Any]:
        """Yield the parts of a streamed answer as they come."""
        with self._posted(url, body) as answer:
            for line in answer:
                data = line.decode().removeprefix("data: ").strip()
                if data and data != "[DONE]":
                    yield json.loads(data)

    def hint(self, *actions: dict[str, Any]) -> list[dict[str, Any]]:
        """Send hints without a request; return their outcomes."""
        with self._posted(f"{self._hints}/hints", envelope(*actions)) as answer:
            found: list[dict[str, Any]] = json.load(answer)["hints"]
        return found

    def _posted(self, url: str, body: Any) -> Any:
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {self._token}"}
        return urlopen(Request(url, json.dumps(body).encode(), headers), timeout=ANSWER_S)


class Agent:
    """A conversation that grows by answers and the results of tools.

    ``expects_s`` is how long the tool takes as a rule, and ``pin_s`` how long it may take.
    """

    def __init__(
        self, engine: Engine, prompt: Sequence[int], *, salt: str, expects_s: float, pin_s: float
    ) -> None:
        self._engine, self._salt = engine, salt
        self._expects_s, self._pin_s = expects_s, pin_s
        self._session = uuid.uuid4().hex
        self.prompt = [*prompt]

    def think(self, *, is_last: bool = False) -> Answer:
        """Take a turn. Its blocks are pinned until the tool is back, unless no tool follows."""
        wishes: dict[str, Any] = {"session": self._session}
        if is_last:
            answer = self._ask(kvladder=wishes | {"end_session": True})
        else:
            pin = envelope(action("pin", ttl_s=self._pin_s))
            answer = self._ask(kvladder=wishes, kv_hints=pin)
        self.prompt += answer.tokens
        return answer

    def _ask(self, **params: Any) -> Answer:
        return self._engine.ask(self.prompt, salt=self._salt, tokens=8, **params)

    def call(self, tool: Callable[[], Sequence[int]]) -> list[dict[str, Any]]:
        """Run a tool, and add its result; return the outcome of the prefetch on the way."""
        with ThreadPoolExecutor(1) as threads:
            running = threads.submit(tool)
            wait([running], timeout=max(0.0, self._expects_s - LEAD_S))
            known = {"session": self._session, "salt": self._salt}
            outcomes = self._engine.hint(action("prefetch", **known))
            self.prompt += running.result()
        return outcomes


def main() -> None:
    parser = argparse.ArgumentParser(description="Run an agent that calls tools.")
    parser.add_argument("--engine", required=True, metavar="URL", help="vLLM, or router.py")
    parser.add_argument(
        "--hints", required=True, metavar="URL", help="kvladder's port, or router.py"
    )
    parser.add_argument("--token-file", type=Path, required=True, help="has the token of that port")
    parser.add_argument("--model", default="MODEL")
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--tool-s", type=float, default=1.0, help="how long the tool takes")
    options = parser.parse_args()
    token = options.token_file.read_text().split()[0]
    engine = Engine(options.engine, options.model, hints=options.hints, token=token)
    draw = random.Random(7)

    def words(count: int) -> list[int]:
        return draw.choices(range(3, 1000), k=count)

    def tool() -> list[int]:
        time.sleep(options.tool_s)
        return words(120)

    agent = Agent(engine, words(500), salt="agents", expects_s=options.tool_s, pin_s=60.0)
    for turn in range(1, options.turns + 1):
        length, is_last = len(agent.prompt), turn == options.turns
        answer = agent.think(is_last=is_last)
        told = f"{answer.cached} of {length} tokens cached, first one after {answer.first_s:.3f} s"
        print(f"turn {turn}: {told}", flush=True)
        for one in [] if is_last else agent.call(tool):
            print(f"prefetch: {one['outcome']}, {one['blocks']} blocks {one['why']}", flush=True)


if __name__ == "__main__":
    main()
