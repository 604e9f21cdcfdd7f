"""The README's file and command, as they stand there: served, stopped, started again."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import socket
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvladder.config import SUMMARY_LINES_MAX
from tests.patience import PATIENCE_S
from tests.vllm.harness import HERE, Started, environment

README = HERE.parents[1] / "README.md"
TIME_TO_END = " --shutdown-timeout 30"
BLOCK = 32
PROMPT = random.Random(11).choices(range(3, 1000), k=700)
HITS = (len(PROMPT) - 1) // BLOCK * BLOCK
SMALL = [
    "--skip-tokenizer-init",
    "--enforce-eager",
    "--dtype",
    "float32",
    "--block-size",
    f"{BLOCK}",
]
SMALL += ["--kv-cache-memory-bytes", f"{64 << 20}", "--max-model-len", "2048"]
"""What a tiny model on a CPU needs beside the README's command."""


def block_of(text: str, begins: str) -> str:
    """The block of the README's section on vLLM that has a line which begins so, from there on."""
    section = text.partition("\n## In vLLM\n")[2].partition("\n## ")[0]
    for found in re.finditer(r"^```\w*\n(.*?)^```", section, re.MULTILINE | re.DOTALL):
        at = re.search(rf"^{begins}", found[1], re.MULTILINE)
        if at is not None:
            return found[1][at.start() :].rstrip()
    raise AssertionError(f"the README has no {begins}")


class Server(Started):
    """``vllm serve`` in a folder with ``stack.yaml`` and ``MODEL``."""

    def __init__(self, folder: Path, command: str, when: str) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        more = [*SMALL, "--enable-prompt-tokens-details", "--port", str(self.port)]
        env = environment(
            PATH=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            VLLM_ENABLE_V1_MULTIPROCESSING="1",
            VLLM_LOGGING_LEVEL="INFO",
            KVLADDER__ARENA__SIZE="64 MiB",
            KVLADDER__FETCH__DEADLINE="10 m",
            KVLADDER__TIERS__NVME__PATH=str(folder / "kv"),
            KVLADDER__TIERS__NVME__CAPACITY="64 MiB",
            KVLADDER__TIERS__NVME__WHEN=when,
        )
        super().__init__(folder, ["bash", "-c", f"exec {command} {' '.join(more)}"], env)

    def ready(self) -> None:
        """Wait until it serves."""
        end = time.monotonic() + PATIENCE_S
        while True:
            assert self.process.poll() is None, self.log.read_text()[-6000:]
            assert time.monotonic() < end, self.log.read_text()[-6000:]
            try:
                self.get("health")
                return
            except OSError:
                time.sleep(0.5)

    def get(self, path: str, body: Any = None) -> str:
        asked = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/{path}",
            data=None if body is None else json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(asked, timeout=PATIENCE_S) as answer:
            text: str = answer.read().decode()
        return text

    def complete(self, salt: str, **params: Any) -> tuple[list[int], int]:
        """What is said after the prompt, and how many of its tokens came from a cache."""
        body = {
            "model": "MODEL",
            "prompt": PROMPT,
            "max_tokens": 16,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            "cache_salt": salt,
            "kv_transfer_params": {"kvladder": params},
        }
        answer = json.loads(self.get("v1/completions", body))
        cached = (answer["usage"]["prompt_tokens_details"] or {}).get("cached_tokens") or 0
        return answer["choices"][0]["token_ids"], cached

    def hits(self, tier: str) -> float:
        """Blocks that a tier served."""
        name = rf'^vllm:kvladder_tier_hit_blocks_total{{.*tier="{tier}"}} (\S+)'
        return sum(float(value) for value in re.findall(name, self.get("metrics"), re.MULTILINE))

    def lines(self, text: str) -> list[str]:
        """Lines of the log that have this text."""
        return [line for line in self.log.read_text().splitlines() if text in line]

    def stop(self) -> None:
        """Send SIGTERM, as service managers do, and wait until nothing of it is left."""
        self.process.send_signal(signal.SIGTERM)
        assert self.process.wait(PATIENCE_S) == 0, self.log.read_text()[-6000:]
        end = time.monotonic() + PATIENCE_S
        while self.alive():
            assert time.monotonic() < end
            time.sleep(0.1)


@pytest.fixture
def started() -> Iterator[list[Server]]:
    """Servers that the test started, for it to add to."""
    servers: list[Server] = []
    yield servers
    for server in servers:
        server.kill()


def require_few_lines(server: Server) -> None:
    """What kvladder said is printed by vLLM, and is not much."""
    own = [line for line in server.log.read_text().splitlines() if "[vllm_log.py:" in line]
    assert all(line.startswith("(EngineCore pid=") for line in own)
    assert "kvladder is ready" in own[0] + own[-1]
    assert 3 <= len(own) <= SUMMARY_LINES_MAX
    for _ in range(3):
        server.complete("a third", priority=1000)
    (told,) = server.lines("its kvladder parameters are ignored")
    assert told.startswith("(EngineCore pid=")


@pytest.mark.versions
def test_what_the_readme_says_is_found_again_after_a_stop(
    model: Path, tmp_path: Path, started: list[Server]
) -> None:
    """With both values of ``when``, side by side."""
    text = README.read_text()
    command = block_of(text, "vllm serve MODEL")
    assert TIME_TO_END in command
    for when in ("commit", "evict"):
        folder = tmp_path / when
        folder.mkdir()
        (folder / "MODEL").symlink_to(model)
        (folder / "stack.yaml").write_text(block_of(text, "arena:"))
        started.append(Server(folder, command, when))
    said = []
    for server in started:
        server.ready()
        said.append(server.complete("a tenant", priority=80)[0])
        assert server.complete("another") == (said[-1], 0)
        assert server.complete("a tenant") == (said[-1], HITS)
        require_few_lines(server)
        assert server.lines("is lost") == []
    for server in started:
        server.stop()
    hasty = command.replace(TIME_TO_END, "")
    again = [Server(tmp_path / when, hasty, when) for when in ("commit", "evict")]
    started.extend(again)
    for server, expected, at_risk in zip(again, said, (0, 1), strict=True):
        server.ready()
        assert server.complete("somebody else") == (expected, 0)
        assert server.complete("a tenant") == (expected, HITS)
        assert server.hits("nvme") * BLOCK == HITS
        assert len(server.lines("has not handed to nvme yet is lost")) == at_risk
    for server in again:
        server.stop()
