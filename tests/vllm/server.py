"""Real servers: ``vllm serve`` in its own process, asked over HTTP."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import sys
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvladder.testing.redisserver import free_ports
from tests.patience import PATIENCE_S, RUN_S, until
from tests.vllm.harness import BLOCK, Started, environment

SMALL = [
    "--skip-tokenizer-init",
    "--enforce-eager",
    "--dtype",
    "float32",
    "--block-size",
    f"{BLOCK}",
]
SMALL += ["--kv-cache-memory-bytes", f"{64 << 20}", "--max-model-len", "2048"]
"""The additional arguments that a tiny model on a CPU needs."""

TOKEN = "0123456789abcdef0123"
"""The token of kvladder's own port, of these tests alone."""

ENDING = re.compile(
    r"process\.cmdline\(\)(?s:.*)^psutil\.(ZombieProcess|NoSuchProcess): ", re.MULTILINE
)
"""The log line of the failure described in ``stop``."""


class Server(Started):
    """``vllm serve MODEL ...`` in a folder with ``MODEL``; ``env`` extends its environment."""

    fresh = False
    """Whether it shares nothing with other processes."""
    hints_port = 0
    """The HTTP port of kvladder itself, if the test sets one."""
    hints_sent = 0
    options: Sequence[str] = SMALL
    """The options of each of these servers."""

    def __init__(self, folder: Path, command: str, *more: str, **env: str) -> None:
        (self.port,) = free_ports(1)
        options = [*self.options, "--enable-prompt-tokens-details", "--port", str(self.port), *more]
        told = {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
            "VLLM_LOGGING_LEVEL": "INFO",
            **env,
        }
        words = shlex.split(f"{command} {' '.join(options)}".replace("\\\n", " "))
        installed = str(Path(sys.executable).with_name(words[0]))
        super().__init__(folder, [installed, *words[1:]], environment(**told), fresh=self.fresh)

    def ready(self) -> None:
        """Wait until it serves."""
        until(self._answers, every_s=0.5, within_s=RUN_S)

    def _answers(self) -> bool:
        """Return whether it has started."""
        assert self.process.poll() is None, self.log.read_text()[-6000:]
        try:
            self.get("health")
        except OSError:
            return False
        return True

    def get(self, path: str, body: Any = None, **headers: str) -> str:
        """Return its answer; raise OSError if there is none."""
        asked = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/{path}",
            data=None if body is None else json.dumps(body).encode(),
            headers={"Content-Type": "application/json", **headers},
        )
        with urllib.request.urlopen(asked, timeout=PATIENCE_S) as answer:
            text: str = answer.read().decode()
        return text

    def complete(
        self,
        prompt: Sequence[int],
        salt: str,
        *,
        tokens: int = 16,
        rank: int | None = None,
        headers: Mapping[str, str] | None = None,
        **params: Any,
    ) -> tuple[list[int], int]:
        """Return the answer to a prompt, and how many of its tokens came from a cache.

        ``rank`` selects the answering engine; ``headers`` are additional ones; ``params`` are
        kvladder's.
        """
        body = {
            "model": "MODEL",
            "prompt": prompt,
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            "cache_salt": salt,
            "kv_transfer_params": {"kvladder": params},
        }
        told = {} if rank is None else {"X-data-parallel-rank": str(rank)}
        answer = json.loads(self.get("v1/completions", body, **told, **(headers or {})))
        cached = (answer["usage"]["prompt_tokens_details"] or {}).get("cached_tokens") or 0
        return answer["choices"][0]["token_ids"], cached

    def hint(self, verb: str, **payload: Any) -> tuple[str, str, int]:
        """Send a hint to kvladder's own port; return outcome, reason and number of blocks."""
        action = {"action_id": "a", "action_type": verb, "action_version": "1", "payload": payload}
        self.hints_sent += 1
        body = {
            "protocol_version": "0.1",
            "message_id": f"{self.hints_sent}",
            "actions": [action],
        }
        asked = urllib.request.Request(
            f"http://127.0.0.1:{self.hints_port}/hints",
            data=json.dumps(body).encode(),
            headers={"Content-Type": "application/json", "Authorization": f"Bearer {TOKEN}"},
        )
        with urllib.request.urlopen(asked, timeout=PATIENCE_S) as answer:
            (told,) = json.load(answer)["hints"]
        return told["outcome"], told["why"], told["blocks"]

    def hints(self) -> dict[str, Any]:
        """Return the outcomes counted so far, and the number of fetches in flight."""
        url = f"http://127.0.0.1:{self.hints_port}/status"
        with urllib.request.urlopen(url, timeout=PATIENCE_S) as answer:
            found: dict[str, Any] = json.load(answer)["stats"]["hints"]
        return found

    def copies(self, key: str) -> dict[str, int]:
        """Return the priority of a block in each level that holds it; ``key`` in hexadecimal."""
        url = f"http://127.0.0.1:{self.hints_port}/blocks/{key}"
        asked = urllib.request.Request(url, headers={"Authorization": f"Bearer {TOKEN}"})
        with urllib.request.urlopen(asked, timeout=PATIENCE_S) as answer:
            found: list[dict[str, Any]] = json.load(answer)["copies"]
        return {one["level"]: one["priority"] for one in found}

    def counts(self, name: str, tier: str) -> list[float]:
        """One of kvladder's counters of a tier, of each engine."""
        line = rf'^vllm:kvladder_tier_{name}{{.*tier="{tier}".*}} (\S+)'
        return [float(value) for value in re.findall(line, self.get("metrics"), re.MULTILINE)]

    def running(self) -> float:
        """Requests that its engines compute just now."""
        found = re.findall(
            r"^vllm:num_requests_running{.*} (\S+)", self.get("metrics"), re.MULTILINE
        )
        return sum(float(value) for value in found)

    def lines(self, text: str) -> list[str]:
        """Lines of the log that have this text."""
        return [line for line in self.log.read_text().splitlines() if text in line]

    def stop(self) -> None:
        """Send SIGTERM, as service managers do, and wait until all of its processes have ended.

        vLLM then logs the command of the process that holds its port. It fails if that process, one
        of its own, is just ending; only this failure is accepted.
        """
        os.kill(self.process.pid, signal.SIGTERM)
        code = self.process.wait(PATIENCE_S)
        assert code == 0 or ENDING.search(self.log.read_text()), self.log.read_text()[-6000:]
        until(lambda: not self.alive(), every_s=0.1)


class FreshServer(Server):
    """A server that imports everything anew."""

    fresh = True
