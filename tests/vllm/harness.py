"""Starts engines in their own processes, and checks what they leave."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import kvladder
from kvladder.tiers.label import MAGIC
from tests.patience import PATIENCE_S, RUN_S, until
from tests.vllm.nursery import Child, Nursery

HERE = Path(__file__).parent
OURS = "KVLadderConnector"
BLOCK = 32
LAYERS = 4
"""The number of layers of the model in most tests."""
PROMPT_TOKENS = 900
PROMPTS = [random.Random(seed).choices(range(3, 1000), k=PROMPT_TOKENS) for seed in range(3)]
HITS = (PROMPT_TOKENS - 1) // BLOCK * BLOCK
"""Tokens of one prompt that can come from a cache."""


def newer_vllm() -> list[str]:
    """Return the path that precedes the installed vLLM when the tests run with another version."""
    listed = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    return [path for path in listed if path and (Path(path) / "vllm" / "__init__.py").exists()]


def environment(**more: str) -> dict[str, str]:
    """Return every engine's environment: no network, this process's kvladder, one process."""
    return os.environ | {
        "HF_HUB_OFFLINE": "1",
        "NUMBA_NUM_THREADS": "1",  # numba, which finds drafts, sets the threads of OpenMP again
        "OMP_NUM_THREADS": "1",  # several engines run at once, and threads that wait are busy
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        "PYTHONPATH": os.pathsep.join([str(Path(kvladder.__file__).parents[1]), *newer_vllm()]),
        **more,
    }


@cache
def nursery() -> Nursery:
    """Return the process that forks this process's engines; it ends with this process."""
    return Nursery(environment())


class Started:
    """A process, and all that it starts, in a session of their own."""

    process: subprocess.Popen[bytes] | Child

    def __init__(
        self, folder: Path, command: list[str], env: dict[str, str], *, fresh: bool = True
    ) -> None:
        """``command`` begins with a program or, unless it is to be ``fresh``, a Python file."""
        self.log = folder / "log"
        if not fresh:
            self.process = nursery().begin(command, folder, env, self.log)
            return
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                command,
                env=env,
                cwd=folder,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def alive(self) -> list[int]:
        """Return this process and its descendants that have not ended."""
        found: list[int] = []
        for stat in Path("/proc").glob("[0-9]*/stat"):
            with suppress(OSError):  # it has ended
                state, _, _, session, *_ = stat.read_text().rpartition(")")[2].split()
                if int(session) == self.process.pid and state != "Z":
                    found.append(int(stat.parent.name))
        return found

    def kill(self) -> None:
        """Kill all of them at once; a killed process ends a little later."""
        for pid in self.alive():
            with suppress(ProcessLookupError):
                os.kill(pid, 9)
        self.process.wait()
        until(lambda: not self.alive(), every_s=0.02)


def make(folder: Path, seed: int = 0, kind: str = "llama", script: str = "tiny_model.py") -> Path:
    """A tiny random model in a folder; other seeds are other weights of the same size."""
    model = folder / "model"
    command = [str(HERE / script), str(model), str(seed), kind]
    maker = Started(folder, command, environment(), fresh=False)
    assert maker.process.wait(PATIENCE_S) == 0, maker.log.read_text()
    return model


class Run(Started):
    """An engine process, forked from one with vLLM unless it is ``fresh`` or sees pictures."""

    def __init__(
        self, folder: Path, spec: dict[str, Any], env: dict[str, str], *, fresh: bool = False
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.results = folder / "results"
        (folder / "spec").write_text(json.dumps(spec))
        self.results.unlink(missing_ok=True)
        command = [str(HERE / "engine.py"), str(folder / "spec"), str(self.results)]
        if fresh or spec.get("pictures"):  # these are prepared before vLLM is imported
            super().__init__(folder, [sys.executable, *command], env)
        else:
            super().__init__(folder, command, env, fresh=False)

    def finish(self, busy_s: float = 0) -> list[Any]:
        """Return the result of each step once all have ended; ``busy_s`` is their intended time."""
        try:
            code = self.process.wait(RUN_S + busy_s)
        finally:
            self.kill()
        assert code == 0, f"{self.log.read_text()[-6000:]}"
        return self.so_far()

    def so_far(self) -> list[Any]:
        """The results of the steps that are over."""
        if not self.results.exists():
            return []
        return [json.loads(line) for line in self.results.read_text().splitlines()]


def shared_memory() -> set[str]:
    """Return the files in /dev/shm."""
    return {path.name for path in Path("/dev/shm").iterdir()}


def data_files(directory: Path) -> list[Path]:
    """The files that hold blocks, the largest first."""
    files = [path for path in directory.rglob("*") if path.is_file()]
    return sorted(files, key=lambda path: path.stat().st_size, reverse=True)


def stack(directory: Path, *, capacity: str = "64 MiB", **more: Any) -> dict[str, Any]:
    """The settings that the filled directory was made with, and more.

    They are patient: on a busy disk a first read takes longer than the default timeout.
    """
    files = {"type": "files", "path": str(directory), "when": "commit", "capacity": capacity}
    return {
        "arena": {"size": "64 MiB"},
        "tiers": [{"type": "host"}, {**files, "timeout": "10 m"}],
        "fetch": {"deadline": "10 m"},
        **more,
    }


def told(socket: Path) -> list[Any]:
    """Return a step that asks the engine's cache for its statistics, from outside."""
    arguments = ["stats", str(socket), "--json"]
    return ["call", {"function": "tests.vllm.operate:told", "arguments": arguments}]


def connector(extra: Any) -> dict[str, Any]:
    """Return vLLM's configuration of kvladder with these settings."""
    return {
        "kv_connector": OURS,
        "kv_connector_module_path": "kvladder.connectors.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": extra,
    }


def together(*connectors: dict[str, Any]) -> dict[str, Any]:
    """Return vLLM's configuration of several connectors, which are asked in this order."""
    return {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"connectors": list(connectors)},
    }


def stored_payloads(directory: Path) -> list[tuple[Path, int]]:
    """File and offset of the payload of every stored block."""
    page = 4096
    found: list[tuple[Path, int]] = []
    for path in data_files(directory):
        with path.open("rb") as stream:
            for offset in range(0, path.stat().st_size, page):
                stream.seek(offset)
                if stream.read(len(MAGIC)) == MAGIC:
                    found.append((path, offset + page))
    return found


def flip(path: Path, offset: int, *, count: int = 1, step: int = 1) -> None:
    """Invert a bit in each of ``count`` bytes."""
    with path.open("r+b") as stream:
        for position in range(offset, offset + count * step, step):
            stream.seek(position)
            byte = stream.read(1)[0]
            stream.seek(position)
            stream.write(bytes([byte ^ 0x40]))
