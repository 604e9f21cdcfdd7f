"""vLLM alone, and vLLM with kvladder below it."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import sys
from pathlib import Path

from benchmarks.clients.inputs import BLOCK_TOKENS, MODEL, TOKENS_MAX
from tests.patience import until
from tests.vllm.harness import connector
from tests.vllm.server import FreshServer

OPTIONS = (
    "--enforce-eager", "--dtype", "float32", "--block-size", f"{BLOCK_TOKENS}",
    "--kv-cache-memory-bytes", f"{64 << 20}", "--max-model-len", f"{TOKENS_MAX}",
    "--generation-config", "vllm", "--enable-force-include-usage",
    "--prefix-caching-hash-algo", "sha256_cbor",
)  # fmt: skip
"""The device holds 3,640 tokens, so each client asks for more than fits there."""
ALONE, OURS = "alone", "kvladder"


class BenchServer(FreshServer):
    """A server with the small model; ``folder`` has it."""

    options = OPTIONS

    def __init__(self, folder: Path, name: str, *more: str) -> None:
        self.name = name
        place = folder / name
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir()
        (place / MODEL).symlink_to(folder / MODEL)
        super().__init__(place, f"vllm serve {MODEL}", *more, VLLM_SERVER_DEV_MODE="1")

    def reset(self) -> None:
        """Drop vLLM's own prefix cache, once no copy holds its blocks; kvladder keeps its own."""
        until(lambda: json.loads(self.get("reset_prefix_cache", {}))["success"], every_s=0.1)

    def freeze(self) -> None:
        """Stop all of its processes: idle ones of vLLM wait by spinning."""
        for pid in self.alive():
            os.kill(pid, signal.SIGSTOP)

    def thaw(self) -> None:
        """Let its processes go on."""
        for pid in self.alive():
            os.kill(pid, signal.SIGCONT)


def started(folder: Path) -> dict[str, BenchServer]:
    """Return both servers once they serve; they are started one after the other."""
    servers: dict[str, BenchServer] = {}
    stack = {"host": "64 MiB", "files": str(folder / "kv"), "capacity": "1 GiB"}
    transfer = shlex.quote(json.dumps(connector(stack)))
    try:
        for name, more in ((ALONE, ()), (OURS, ("--kv-transfer-config", transfer))):
            print(f"starting vLLM, {name}", file=sys.stderr, flush=True)
            servers[name] = BenchServer(folder, name, *more)
            servers[name].ready()
            servers[name].freeze()
    except BaseException:
        end(servers)
        raise
    return servers


def end(servers: dict[str, BenchServer]) -> None:
    """End servers and all processes that they started, by their process ids."""
    for server in servers.values():
        server.thaw()
        try:
            server.stop()
        finally:
            server.kill()
