"""Prompts computed by one engine and answered by another, as in how-to/prefill-decode.md."""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvladder.testing.redisserver import RedisServer, free_ports
from tests.patience import PATIENCE_S, until
from tests.vllm.conftest import Start
from tests.vllm.harness import BLOCK, HERE, HITS, PROMPTS, connector, environment
from tests.vllm.server import Server
from tests.vllm.test_router import answer_of, posted
from tests.vllm.test_served import over

pytest.importorskip("nixl", reason="the extra nixl is not installed")
from tests.kit.served import Server as Cache

PAGE = HERE.parents[1] / "docs" / "how-to" / "prefill-decode.md"
PROXY = HERE.parents[1] / "examples" / "prefill_decode.py"
ALL = len(PROMPTS) * HITS
PROMPT = random.Random(17).choices(range(3, 1000), k=701)
SAID = 8
"""Tokens of an answer: enough to fill the prompt's last block."""
LATE = f"{PATIENCE_S} s"
TRIES = 20
"""Turns in which blocks are to be handed over at least once."""


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[Cache]:
    """``kvladder serve``, the tier that both engines have."""
    folder = tmp_path / "cache"
    folder.mkdir()
    with Cache(folder, block="256 KiB", arena="256 MiB") as cache:
        yield cache


def test_a_producer_hands_over_to_a_consumer_by_a_shared_tier(
    start: Start, cache: Cache, reference: list[list[int]]
) -> None:
    stack = over(cache.level())
    one = ["each", {"prompts": PROMPTS, "tokens": 1}]
    prefill = start(
        None, one, ["reset"], one, ["stats"], ["shutdown"],
        transfer=connector(stack) | {"kv_role": "kv_producer"},
    )  # fmt: skip
    first, _, again, counts, _ = prefill.finish()
    assert [said[0] for said in reference] == [said for (said,) in first["tokens"]]
    assert first["tokens"] == again["tokens"]
    assert first["external"] == again["external"] == 0
    assert counts["far"]["stored"] * BLOCK == ALL

    whole = ["each", {"prompts": PROMPTS}]
    new = [random.Random(9).choices(range(3, 1000), k=300)]
    others = ["each", {"prompts": new}]
    decode = start(
        None, whole, others, ["reset"], whole, others, ["stats"], ["shutdown"],
        transfer=connector(stack) | {"kv_role": "kv_consumer"},
    )  # fmt: skip
    said, fresh, _, later, still_fresh, counts, _ = decode.finish()
    assert said["tokens"] == later["tokens"] == reference
    assert said["external"] == later["external"] == ALL
    assert fresh["external"] == still_fresh["external"] == 0
    assert counts["far"]["stored"] == counts["copies"]["offload_bytes"] == 0


def shown(what: str) -> str:
    """Return the page's block for the engines beside NixlConnector, below this line."""
    section = PAGE.read_text().partition("\n## NixlConnector")[2].partition("\n## ")[0]
    return section.partition(f"\n# {what}\n")[2].partition("```")[0]


def command(role: str) -> str:
    """From the line that serves."""
    block = shown(role)
    return block[block.index("vllm serve") :].rstrip()


def patient(redis: RedisServer) -> dict[str, Any]:
    """The page's stack over this server, smaller, in which nothing that is late is given up."""
    stack: dict[str, Any] = yaml.safe_load(shown("stack.yaml of both"))
    small = {"capacity": "64 MiB", "timeout": LATE, "connect_timeout": LATE}
    (far,) = (tier for tier in stack["tiers"] if tier["type"] == "redis")
    far |= {"url": redis.url} | small
    return stack | {"arena": {"size": "64 MiB"}, "fetch": {"deadline": LATE}}


def serve(folder: Path, model: Path, role: str, core: int, port: int) -> Server:
    """Start a server on a core of its own: NIXL's threads wait by spinning."""
    where = folder / role
    where.mkdir()
    (where / "MODEL").symlink_to(model)
    (where / "stack.yaml").write_text((folder / "stack.yaml").read_text())
    told = {"VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1", "VLLM_NIXL_SIDE_CHANNEL_PORT": str(port)}
    return Server(where, command(role), VLLM_CPU_OMP_THREADS_BIND=str(core), **told)


def external(server: Server) -> int:
    """Return how many tokens its connectors have brought, as vLLM counts them."""
    line = r"^vllm:external_prefix_cache_hits_total{.*} (\S+)"
    return sum(int(float(n)) for n in re.findall(line, server.get("metrics"), re.MULTILINE))


@pytest.mark.alone
def test_nixlconnector_hands_over_and_kvladder_finds_common_prefixes(
    model: Path, tmp_path: Path, started: list[Server]
) -> None:
    """There are two turns: the second begins with the other engine's answer.

    On few cores NIXL's threads delay all work for seconds, so that its handshake may time out: the
    first turn is repeated until blocks were handed over.
    """
    with RedisServer(tmp_path) as redis:
        (tmp_path / "stack.yaml").write_text(yaml.safe_dump(patient(redis)))
        port, *ports = free_ports(3)
        each = zip(
            ("prefill", "decode"), cycle(sorted(os.sched_getaffinity(0))), ports, strict=False
        )
        started += [serve(tmp_path, model, *one) for one in each]
        prefill, decode = started
        for server in started:
            server.ready()
        with proxy(port, prefill, decode):
            right = decode.complete(PROMPT, "apart", tokens=SAID)[0]
            for salt in map(str, range(TRIES)):
                before = external(decode)
                said = turn(port, PROMPT, salt)
                assert (external(prefill), said) == (0, right)
                if external(decode) == before + len(PROMPT):
                    break
            else:
                raise AssertionError("nothing was handed over")
            salts = int(salt) + 2
            blocks = (len(PROMPT) + len(said) - 1) // BLOCK
            until(lambda: len(redis.run("KEYS", "kvladder:*{*")) == salts * blocks)
            longer = PROMPT + said + PROMPT[:100]
            again = turn(port, longer, salt)
            assert external(prefill) == BLOCK  # it has the prompt itself, not the other's answer
            assert again == decode.complete(longer, "others", tokens=SAID)[0]


@contextmanager
def proxy(port: int, prefill: Server, decode: Server) -> Generator[None]:
    """The example's, in front of both."""
    first, second = (f"http://127.0.0.1:{server.port}" for server in (prefill, decode))
    line = [sys.executable, str(PROXY), "--port", str(port), "--prefill", first, "--decode", second]
    process = subprocess.Popen(line, env=environment())
    try:
        yield
    finally:
        process.terminate()
        assert process.wait(PATIENCE_S) == 0


def turn(port: int, prompt: list[int], salt: str) -> list[int]:
    """Return the answer to a prompt, sent through the proxy."""
    body = {"max_tokens": SAID, "prompt": prompt, "cache_salt": salt}
    said: list[int] = answer_of(posted(port, body))["choices"][0]["token_ids"]
    return said
