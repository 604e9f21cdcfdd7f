"""The example's router in front of two real servers: more of the prompts is found than in turns.

The example's agent then works through the router, and its hints reach the engine with its blocks.
"""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import Request, urlopen

import pytest

from kvladder.testing.redisserver import free_ports
from tests.patience import PATIENCE_S
from tests.vllm.harness import BLOCK, HERE, environment
from tests.vllm.server import TOKEN, Server

ROUTER = HERE.parents[1] / "examples" / "router.py"
AGENT = ROUTER.with_name("agent.py")
COMMAND = (
    "vllm serve MODEL --kv-transfer-config"
    """ '{"kv_connector": "KVLadderConnector", "kv_role": "kv_both","""
    """ "kv_connector_extra_config": {"config": "stack.yaml"}}'"""
)
STACK = "arena: {size: 64 MiB}\ntiers:\n  - {type: host}\n"


def serve(folder: Path, name: str, model: Path) -> tuple[Server, str]:
    """Return a server that publishes its blocks, and the router's arguments for it."""
    where = folder / name
    where.mkdir()
    (where / "MODEL").symlink_to(model)
    (where / "stack.yaml").write_text(STACK)
    events = {name: f"ipc://{where}/{name}" for name in ("events", "replay")}
    config = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": events["events"],
        "replay_endpoint": events["replay"],
    }
    (port,) = free_ports(1)
    own = f"127.0.0.1:{port}"
    port_of = {"KVLADDER__HTTP__LISTEN": own, "KVLADDER__HTTP__TOKEN": TOKEN}
    server = Server(where, COMMAND, "--kv-events-config", f"'{json.dumps(config)}'", **port_of)
    server.hints_port = port
    serves = f"http://127.0.0.1:{server.port}"
    return server, f"{serves},{events['events']},{events['replay']},http://{own}"


@pytest.fixture
def routers() -> Iterator[list[subprocess.Popen[bytes]]]:
    begun: list[subprocess.Popen[bytes]] = []
    yield begun
    for process in begun:
        process.terminate()
        assert process.wait(PATIENCE_S) == 0


def route(engines: list[str], *more: str) -> tuple[int, subprocess.Popen[bytes]]:
    """Start the example by the command in its first lines."""
    (port,) = free_ports(1)
    named = [part for engine in engines for part in ("--engine", engine)]
    line = [sys.executable, str(ROUTER), "--port", str(port), *named, *more]
    return port, subprocess.Popen(line, env=environment())


def ask(port: int, prompt: list[int], salt: str) -> tuple[list[int], int]:
    """Return the answer to a prompt, and how many of its tokens were found."""
    told = answer_of(posted(port, {"prompt": prompt, "max_tokens": 4, "cache_salt": salt}))
    cached = (told["usage"]["prompt_tokens_details"] or {}).get("cached_tokens") or 0
    return told["choices"][0]["token_ids"], cached


def posted(port: int, body: dict[str, Any]) -> Request:
    """A request for the likeliest tokens."""
    always = {"model": "MODEL", "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    url = f"http://127.0.0.1:{port}/v1/completions"
    text = json.dumps(always | body).encode()
    return Request(url, text, {"Content-Type": "application/json"})


def answer_of(asked: Request) -> dict[str, Any]:
    """Return the answer, once the router has started."""
    end = time.monotonic() + PATIENCE_S
    while True:
        try:
            with urlopen(asked, timeout=PATIENCE_S) as answer:
                return dict(json.loads(answer.read()))
        except URLError as error:
            if not isinstance(error.reason, ConnectionRefusedError) or time.monotonic() > end:
                raise
            time.sleep(0.1)


def conversations(port: int, salt: str) -> tuple[list[list[int]], int]:
    """Five that grow turn by turn; answers, and how many tokens of prompts were found."""
    chance = random.Random(5)
    told = [chance.choices(range(3, 1000), k=10 * BLOCK) for _ in range(5)]
    answers, found = [], 0
    for _ in range(3):
        for prompt in told:
            answer, cached = ask(port, prompt, salt)
            answers.append(answer)
            found += cached
            prompt += [*answer, *chance.choices(range(3, 1000), k=3 * BLOCK)]
            time.sleep(0.3)  # people read; and events arrive
    return answers, found


def require_that_an_agents_hints_arrive(
    folder: Path, port: int, servers: tuple[Server, ...]
) -> None:
    """Run the example's agent; the engine that serves its session gets its hints, and no other."""
    (folder / "token").write_text(TOKEN)
    router = f"http://127.0.0.1:{port}"
    line = [sys.executable, str(AGENT), "--engine", router, "--hints", router]
    line += ["--token-file", str(folder / "token"), "--turns", "3", "--tool-s", "0.3"]
    done = subprocess.run(line, env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    lines = [re.sub(r"after [\d.]+ s", "after a time", turn) for turn in done.stdout.splitlines()]
    first, second = (length // BLOCK for length in (500 + 8, 500 + 128 + 8))
    assert lines == [
        "turn 1: 0 of 500 tokens cached, first one after a time",
        f"prefetch: accepted, {first} blocks ",
        f"turn 2: {first * BLOCK} of 628 tokens cached, first one after a time",
        f"prefetch: accepted, {second} blocks ",
        f"turn 3: {second * BLOCK} of 756 tokens cached, first one after a time",
    ]
    own, *others = sorted((server.hints() for server in servers), key=len, reverse=True)
    assert own == {"pin": {"accepted": 2}, "prefetch": {"accepted": 2}, "in_flight": 0}
    assert others == [{"in_flight": 0}]


def test_a_router_with_an_index_finds_more_than_round_robin(
    model: Path, tmp_path: Path, started: list[Server], routers: list[subprocess.Popen[bytes]]
) -> None:
    servers, engines = zip(*(serve(tmp_path, name, model) for name in "ab"), strict=True)
    started.extend(servers)
    for server in servers:
        server.ready()
    results, port = {}, 0
    for salt, more in (("turns", ["--blind"]), ("index", [])):
        port, process = route(list(engines), *more)
        routers.append(process)
        results[salt] = conversations(port, salt)
    (said, in_turns), (again, by_index) = results["turns"], results["index"]
    assert said == again
    whole = 5 * (10 + 13) * BLOCK  # of the second and third turns, the tokens of the turns before
    assert in_turns < 0.6 * whole
    assert by_index == whole
    require_that_an_agents_hints_arrive(tmp_path, port, servers)
    for server in servers:
        server.stop()
