"""The README's file and command, as they stand there: served, stopped, started again."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvladder.config.stack import SUMMARY_LINES_MAX
from kvladder.testing.redisserver import RedisServer, free_ports
from tests.kit.collector import Collector, Received, descendants
from tests.otel.headers import PARENT, TRACE
from tests.patience import until
from tests.vllm.harness import BLOCK, HERE
from tests.vllm.server import TOKEN, FreshServer, Server

README = HERE.parents[1] / "README.md"
TIME_TO_END = " --shutdown-timeout 30"
NOT_SHARED = "level 'nvme' is not shared: expected shared"
TOO_LOW = "no level takes these blocks at their priority"
PROMPT = random.Random(11).choices(range(3, 1000), k=700)
HITS = (len(PROMPT) - 1) // BLOCK * BLOCK
WHOLE = HITS // BLOCK
NAMED: dict[str, Any] = {"tokens": PROMPT, "salt": "a tenant"}
"""The whole blocks of the prompt, to hints."""
SPANS = ("lookup", "fetch", "read", "copy", "save")
SHARED = """
  - {{name: shared, type: redis, url: {}, capacity: 64 MiB, when: commit, min_priority: 90}}
"""
"""One more level, that both servers read."""
TRACED = {
    "VLLM_SERVER_DEV_MODE": "1",  # so that it can be told to forget its own blocks
    "KVLADDER__OTEL": "true",
    "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf",
    "OTEL_BSP_SCHEDULE_DELAY": "200",
}


def block_of(text: str, begins: str) -> str:
    """The block of the README's section on vLLM that has a line which begins so, from there on."""
    section = text.partition("\n## In vLLM\n")[2].partition("\n## ")[0]
    for found in re.finditer(r"^```\w*\n(.*?)^```", section, re.MULTILINE | re.DOTALL):
        at = re.search(rf"^{begins}", found[1], re.MULTILINE)
        if at is not None:
            return found[1][at.start() :].rstrip()
    raise AssertionError(f"the README has no {begins}")


def serve(
    kind: type[Server], folder: Path, command: str, when: str, *more: str, **env: str
) -> Server:
    """Start a server in a folder with ``stack.yaml``, reduced to fit this machine."""
    (port,) = free_ports(1)
    server = kind(
        folder,
        command,
        *more,
        KVLADDER__HTTP__LISTEN=f"127.0.0.1:{port}",
        KVLADDER__ARENA__SIZE="64 MiB",
        KVLADDER__FETCH__DEADLINE="10 m",
        KVLADDER__HTTP__TOKEN=TOKEN,
        KVLADDER__TIERS__NVME__PATH=str(folder / "kv"),
        KVLADDER__TIERS__NVME__CAPACITY="64 MiB",
        KVLADDER__TIERS__NVME__WHEN=when,
        **env,
    )
    server.hints_port = port
    return server


def require_its_trace(collector: Collector) -> None:
    """Check that a request's loads are in the trace that its HTTP header named."""
    lookup, fetch, read, copy, save = (f"kvladder.{name}" for name in SPANS)

    def below() -> list[Received]:
        return descendants([*collector.spans], f"{PARENT:016x}")

    wanted = {lookup, fetch, read, copy, save, "llm_request"}  # the last one is vLLM's
    until(lambda: {span.name for span in below()} >= wanted)
    found = below()
    assert {span.trace for span in found} == {f"{TRACE:032x}"}
    ids = {span.id: span.name for span in found}
    parents = {(span.name, ids.get(span.parent, "the request")) for span in found}
    assert parents >= {(lookup, "the request"), (fetch, lookup), (read, fetch), (copy, fetch)}
    assert (save, "the request") in parents
    (one,) = (span for span in found if span.name == lookup)
    assert one.attributes["gen_ai.usage.cache_read.input_tokens"] == HITS
    reads = [span.attributes for span in found if span.name == read]
    assert {told["kvladder.level"] for told in reads} == {"nvme"}
    assert sum(told["kvladder.block.found"] for told in reads) * BLOCK == HITS
    (one,) = (span for span in found if span.name == "llm_request")
    assert ids.get(one.parent) is None, "vLLM's own span is beside the lookup"


def require_few_lines(server: Server) -> None:
    """Check that vLLM prints kvladder's log lines, and that there are few."""
    own = [line for line in server.log.read_text().splitlines() if "[log.py:" in line]
    assert all(line.startswith("(EngineCore pid=") for line in own)
    assert "kvladder is ready" in own[0] + own[-1]
    assert 3 <= len(own) <= SUMMARY_LINES_MAX
    for _ in range(3):
        server.complete(PROMPT, "a third", session="chat")
    (told,) = server.lines("its kvladder parameters are ignored")
    assert told.startswith("(EngineCore pid=")
    assert "session 'chat' has ended" in told


def require_that_a_session_ends(server: Server) -> None:
    """Check that host gives up the blocks of an ended session."""
    own, whole = PROMPT[::-1], len(PROMPT) // BLOCK

    def held() -> float:
        server.complete(own[:BLOCK], "a guest", save=False)  # counters come with answers
        return sum(server.counts("blocks", "host"))

    until(lambda: held() >= 2 * whole)  # of the two salts before
    before = held()
    server.complete(own, "a guest", session="chat", pin_s=600)
    until(lambda: held() >= before + whole)
    server.complete(own[:BLOCK], "a guest", session="chat", end_session=True, prefetch=["chat"])
    until(lambda: held() <= before)


@pytest.fixture
def collector() -> Iterator[Collector]:
    with Collector() as collector:
        yield collector


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[RedisServer]:
    with RedisServer(tmp_path / "redis") as server:
        yield server


def require_from(server: Server, level: str, expected: list[int]) -> None:
    """Check that a level serves the whole prompt, since vLLM itself has forgotten it."""
    until(lambda: json.loads(server.get("reset_prefix_cache", {}))["success"])
    given = {"kvladder": {"report": True}}
    body = {"model": "MODEL", "prompt": PROMPT, "max_tokens": 16, "temperature": 0}
    body |= {"ignore_eos": True, "return_token_ids": True, "cache_salt": "a tenant"}
    answer = json.loads(server.get("v1/completions", body | {"kv_transfer_params": given}))
    assert answer["choices"][0]["token_ids"] == expected
    assert answer["kv_transfer_params"]["kvladder"]["served_from"] == {level: HITS}


def require_prefetched(server: Server, expected: list[int]) -> None:
    """Check that a hint brings a prompt up before its request, which is then served from host."""
    assert server.hint("retain", priority=60, **NAMED | {"salt": "nobody"})[0] == "missing"
    assert server.hint("prefetch", **NAMED) == ("accepted", "", WHOLE)
    until(lambda: server.hints()["in_flight"] == 0)
    require_from(server, "host", expected)


def require_verbs(server: Server, expected: list[int], redis: RedisServer) -> None:
    """Check that each verb moves or ranks the blocks of a prompt, and look at these afterwards."""
    assert server.hint("share", to="nvme", **NAMED)[:2] == ("rejected", NOT_SHARED)
    assert server.hint("share", **NAMED)[:2] == ("rejected", TOO_LOW)
    assert shared(redis) == []
    assert server.hint("retain", priority=95, **NAMED) == ("accepted", "", WHOLE)
    assert server.hint("share", **NAMED)[::2] == ("accepted", WHOLE)
    until(lambda: len(shared(redis)) == WHOLE)
    keys = shared(redis)

    def ranked(**levels: int) -> None:
        until(lambda: [server.copies(key) for key in keys] == [levels] * WHOLE)

    ranked(host=95, nvme=95, shared=95)
    assert server.hint("pin", ttl_s=60, **NAMED | {"salt": "nobody"})[0] == "missing"
    assert server.hint("pin", ttl_s=60, **NAMED) == ("accepted", "", WHOLE)
    ranked(host=100, nvme=100, shared=100)
    assert server.hint("demote", to="nvme", **NAMED)[::2] == ("accepted", WHOLE)
    ranked(nvme=100, shared=100)
    require_from(server, "nvme", expected)
    require_shared(server, expected)


def require_shared(server: Server, expected: list[int]) -> None:
    """Check that the shared level serves a prompt that this engine has nowhere else."""
    assert server.hint("demote", to="out", **NAMED)[::2] == ("accepted", WHOLE)
    require_from(server, "shared", expected)


def shared(redis: RedisServer) -> list[str]:
    """Return the keys of the blocks in a Redis, in hexadecimal."""
    return [re.findall(rb"{(\w+)}", name)[0].decode() for name in redis.run("KEYS", "kvladder:*{*")]


@pytest.mark.versions
def test_the_readmes_command_finds_its_blocks_after_a_stop(
    model: Path,
    tmp_path: Path,
    started: list[Server],
    collector: Collector,
    redis: RedisServer,
) -> None:
    """With both values of ``when``, side by side.

    The first of ``commit`` imports everything anew: it shares nothing with the one that follows.
    """
    text = README.read_text()
    command = block_of(text, "vllm serve MODEL")
    assert TIME_TO_END in command
    for when in ("commit", "evict"):
        folder = tmp_path / when
        folder.mkdir()
        (folder / "MODEL").symlink_to(model)
        (folder / "stack.yaml").write_text(block_of(text, "arena:"))
        kind = FreshServer if when == "commit" else Server
        started.append(serve(kind, folder, command, when))
    said = []
    for server in started:
        server.ready()
        said.append(server.complete(PROMPT, "a tenant", priority=80)[0])
        assert server.complete(PROMPT, "another") == (said[-1], 0)
        assert server.complete(PROMPT, "a tenant") == (said[-1], HITS)
        require_that_a_session_ends(server)
        require_few_lines(server)
        assert server.lines("is lost") == []
    for server in started:
        server.stop()
    hasty = command.replace(TIME_TO_END, "")
    to = "--otlp-traces-endpoint", f"{collector.endpoint}/v1/traces"
    for when in ("commit", "evict"):
        with (tmp_path / when / "stack.yaml").open("a") as file:
            file.write(SHARED.format(redis.url))
    again = [
        serve(Server, tmp_path / when, hasty, when, *to, **TRACED) for when in ("commit", "evict")
    ]
    started.extend(again)
    for server, expected, at_risk in zip(again, said, (0, 1), strict=True):
        server.ready()
        assert server.complete(PROMPT, "somebody else") == (expected, 0)
        if at_risk:
            require_prefetched(server, expected)
        else:
            headers = {"traceparent": f"00-{TRACE:032x}-{PARENT:016x}-01"}
            told = server.complete(PROMPT, "a tenant", headers=headers)
            assert told == (expected, HITS)
            require_its_trace(collector)
        # the last counters come with the step that ends the last copy, after the answer
        until(lambda: sum(server.counts("hit_blocks_total", "nvme")) * BLOCK == HITS)  # noqa: B023
        assert len(server.lines("has not passed on to nvme yet are lost")) == at_risk
        if at_risk:
            require_shared(server, expected)  # which the other engine has shared
        else:
            require_verbs(server, expected, redis)
    for server in again:
        server.stop()
