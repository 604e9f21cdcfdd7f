"""Compares a real vLLM on CPU with kvladder, with vLLM's own offloading, and with neither.

Each engine has its own process. They run side by side and get their commands in turn, so a busy
machine slows all of them equally. The model is tiny and random, because only the connectors' cost
is compared.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from statistics import median, quantiles
from types import MappingProxyType
from typing import Any

import kvladder
from benchmarks.row import Row

HERE = Path(__file__).parent
ROUNDS = 7
PREFIX_TOKENS = 2048
REQUESTS = 16

Prompts = list[list[int]]


class Engine:
    """An engine in a child process.

    Parameters
    ----------
    model:
        Folder with the model.
    transfer:
        vLLM's settings of a connector; None for none.
    log:
        File for the engine's output.
    engine:
        Arguments of ``LLM`` that replace those of ``vllm_child.py``.
    variables:
        Environment variables beside those of this process.
    """

    def __init__(
        self,
        model: Path,
        transfer: dict[str, Any] | None,
        log: Path,
        *,
        engine: Mapping[str, Any] = MappingProxyType({}),
        variables: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        spec = {"model": str(model), "transfer": transfer, "engine": dict(engine)}
        env = (
            os.environ
            | variables
            | {
                "HF_HUB_OFFLINE": "1",
                "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
                "VLLM_LOGGING_LEVEL": "WARNING",
                "VLLM_NO_USAGE_STATS": "1",
                "PYTHONPATH": os.pathsep.join(
                    [str(Path(kvladder.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
                ).rstrip(os.pathsep),
            }
        )
        command = [sys.executable, str(HERE / "vllm_child.py"), json.dumps(spec)]
        with log.open("w") as stderr:
            self._process = subprocess.Popen(
                command,
                env=env,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
            )
        self._log = log

    def answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the engine ended:\n{self._log.read_text()[-3000:]}")
        return json.loads(line)

    def tell(self, name: str, **arguments: Any) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([name, arguments]) + "\n")
        self._process.stdin.flush()
        return self.answer()

    def run(self, prompts: Prompts, tokens: int) -> dict[str, Any]:
        found: dict[str, Any] = self.tell("run", prompts=prompts, tokens=tokens)
        return found

    def end(self) -> None:
        if self._process.poll() is None:
            self.tell("shutdown")
            assert self._process.stdin is not None
            self._process.stdin.close()
        self._process.wait(60)

    def kill(self) -> None:
        """End the process at once, if it still runs."""
        self._process.kill()
        self._process.wait()


def kvladder_with(stack: dict[str, Any]) -> dict[str, Any]:
    """Return vLLM's settings for our connector."""
    return {
        "kv_connector": "KVLadderConnector",
        "kv_connector_module_path": "kvladder.connectors.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": stack,
    }


def native_with(folder: Path) -> dict[str, Any]:
    """Return vLLM's settings for its own offloading with its tier of files."""
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "spec_name": "TieringCPUSpec",
            "spec_module_path": "benchmarks.vllm_native",
            "cpu_bytes_to_use": 64 << 20,
            "secondary_tiers": [{"type": "fs", "root_dir": str(folder)}],
        },
    }


def make_model(folder: Path, kind: str = "llama") -> Path:
    """Make a random model of a kind that ``tiny_model.py`` of the tests has; return its folder."""
    script = HERE.parent / "tests" / "vllm" / "tiny_model.py"
    command = [sys.executable, str(script), str(folder), "0", kind]
    subprocess.run(command, check=True, capture_output=True)
    return folder


def rows() -> Iterable[Row]:
    """Measure throughput without hits, steps while a tier hangs, and first tokens from files."""
    with tempfile.TemporaryDirectory(prefix="kvladder-bench-") as name:
        folder = Path(name)
        model = make_model(folder / "tiny")
        yield without_hits(model, folder, length=512)
        larger = make_model(folder / "larger", "llama_100m")
        yield without_hits(larger, folder, length=64)
        yield from hanging(model, folder)
        yield behind_a_slow_link(model, folder)
        yield from shared_prefix(model, folder)


def together(model: Path, folder: Path, **transfers: Any) -> dict[str, Engine]:
    """Yield started engines by name."""
    engines = {n: Engine(model, t, folder / f"{n}.log") for n, t in transfers.items()}
    for engine in engines.values():
        assert engine.answer() == "ready"
    return engines


def prompts_of(seed: int, count: int, length: int, prefix: list[int] | None = None) -> Prompts:
    """Return prompts that are new except for their shared prefix."""
    draw = random.Random(seed)
    return [[*(prefix or []), *draw.choices(range(3, 1000), k=length)] for _ in range(count)]


def without_hits(model: Path, folder: Path, *, length: int) -> Row:
    """Measure 8 new prompts of this length, with 48 generated tokens each."""
    files = folder / f"kv-{model.name}"
    stack = {"host": "256 MiB", "files": str(files), "capacity": "256 MiB"}
    engines = together(model, folder, none=None, ours=kvladder_with(stack))
    seconds: dict[str, list[float]] = {"none": [], "ours": []}
    steps: dict[str, list[float]] = {"none": [], "ours": []}
    for turn in range(ROUNDS + 1):
        for name, engine in engines.items():
            found = engine.run(prompts_of(turn, 8, length), 48)
            if turn:  # the first turn warms up
                seconds[name].append(found["seconds"])
                steps[name] += found["steps"][8:]
    for engine in engines.values():
        engine.end()
    tokens = 8 * (length + 48)
    none_ms, ours_ms = (median(steps[name]) * 1e3 for name in ("none", "ours"))
    return Row(
        name=f"engine throughput, no hits, {model.name} model",
        unit="tokens/s",
        limit=tokens / median(seconds["none"]),
        ours=tokens / median(seconds["ours"]),
        goal="ratio >= 0.99",
        note="every block is saved to host and files; the limit is vLLM without a connector;"
        f" its steps of 8 tokens take {none_ms:.2f} ms, ours {ours_ms:.2f}",
    )


def hanging(model: Path, folder: Path) -> Iterable[Row]:
    def stack(kind: str) -> dict[str, Any]:
        tiers = [
            {"type": "host"},
            {"type": kind, "capacity": "64 MiB", "when": "commit", "timeout": "500 ms"},
        ]
        return {"arena": {"size": "8 MiB"}, "fetch": {"deadline": "300 ms"}, "tiers": tiers}

    engines = together(
        model,
        folder,
        healthy=kvladder_with(stack("memory")),
        hanging=kvladder_with(stack("hanging")),
    )
    steps: dict[str, list[float]] = {"healthy": [], "hanging": []}
    for turn in range(ROUNDS + 1):
        for name, engine in engines.items():
            found = engine.run(prompts_of(turn, 4, 256), 48)["steps"]
            if turn:
                steps[name] += found
    for engine in engines.values():
        engine.end()
    cuts = {name: quantiles(found, n=100) for name, found in steps.items()}
    for percent in (50, 99):
        yield Row(
            name=f"engine step p{percent} while a tier hangs",
            unit="ms",
            limit=cuts["healthy"][percent - 1] * 1e3,
            ours=cuts["hanging"][percent - 1] * 1e3,
            goal="ratio about 1",
            note="the limit is the same stack with a healthy tier",
        )


def behind_a_slow_link(model: Path, folder: Path) -> Row:
    """Measure prompts, one at a time, from a tier so slow that computing is faster."""
    tiers = [{"type": "host"}, {"type": "slow", "capacity": "64 MiB", "when": "commit"}]
    stack = {"arena": {"size": "4 MiB"}, "tiers": tiers}  # for one prompt only
    engines = together(model, folder, none=None, ours=kvladder_with(stack))
    prompts = prompts_of(7, 3, 900)
    first: dict[str, list[float]] = {"none": [], "ours": []}
    for turn in range(len(prompts) + 2 + 3 * ROUNDS):
        for name, engine in engines.items():
            engine.tell("reset")
            first[name] += engine.run([prompts[turn % len(prompts)]], 2)["first"]
    for engine in engines.values():
        engine.end()
    none_s, ours_s = (median(first[name][len(prompts) + 2 :]) for name in ("none", "ours"))
    return Row(
        name="time to first token behind a slow tier",
        unit="ms",
        limit=none_s * 1e3,
        ours=ours_s * 1e3,
        goal="ratio <= 1.1",
        note="from the third request on that finds its blocks there; the limit is vLLM without a"
        " connector, whose heap may be given back in each step (decision 30)",
    )


def shared_prefix(model: Path, folder: Path) -> Iterable[Row]:
    prefix = random.Random(99).choices(range(3, 1000), k=PREFIX_TOKENS)
    stack = {"host": "64 MiB", "files": str(folder / "kv1"), "capacity": "256 MiB"}
    transfers = {"ours": kvladder_with(stack), "native": native_with(folder / "fs")}
    fillers = together(model, folder, **transfers)
    for engine in fillers.values():
        engine.run([prefix], 1)
        engine.run(prompts_of(5, 1, 64), 8)
        engine.tell("settle", seconds=2.0)
        engine.end()
    first: dict[str, list[float]] = {"ours": [], "native": [], "none": []}
    for turn in range(3):
        engines = together(model, folder, none=None, **transfers)
        for engine in engines.values():
            engine.run(prompts_of(50 + turn, 2, 64), 4)  # warms up; not in the files
        for name, engine in engines.items():
            found = engine.run(prompts_of(turn, REQUESTS, 16, prefix), 1)["first"]
            first[name] += found
            hits = engine.tell("hits")
            assert name == "none" or hits >= PREFIX_TOKENS // 2, f"{name}: {hits} tokens hit"
        for engine in engines.values():
            engine.end()
    for what, pick in (("median", median), ("last", max)):
        yield Row(
            name=f"time to first token, {REQUESTS} requests, {what}",
            unit="ms",
            peer=pick(first["native"]) * 1e3,
            ours=pick(first["ours"]) * 1e3,
            goal="ratio <= 1",
            note=f"they share {PREFIX_TOKENS} tokens that lie in files; without a cache"
            f" {pick(first['none']) * 1e3:,.0f} ms",
        )
