"""The foreign clients: how each is installed, run, and read."""

from __future__ import annotations

import json
import os
import sys
from abc import ABC, abstractmethod
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.clients.inputs import BLOCK_TOKENS, MODEL
from benchmarks.foreign import into_environment
from kvladder.schema import is_mapping

PLACE = Path(os.environ.get("KVLADDER_CLIENTS", Path(sys.prefix) / "clients"))
"""Folder of the clients' environments."""
TRACE = "trace.jsonl"
HUB = "hf"
"""Hugging Face's folder, beside the model."""
AIPERF = "aiperf==0.13.0"
LMCACHE = "lmcache-cli==0.5.7rc3.dev0"
LMCACHE_FIGURES = ("successful_requests", "failed_requests", "p50_ttft_ms", "p99_ttft_ms")
WAYS = ("input", "output")


@dataclass(frozen=True, slots=True)
class Summary:
    """A client's own figures of one run."""

    completed: int
    failed: int
    p50_ms: float
    """Median time to the first token."""
    p99_ms: float
    tokens_per_s: float
    """Tokens of prompts and answers a second."""


class Unreadable(Exception):
    """Raised if a client left no results that can be read, with the reason."""


class Program(ABC):
    """A foreign client with one workload."""

    name: str
    workload: str

    @property
    def title(self) -> str:
        """Name of the client and its workload."""
        return f"{self.name} {self.workload}"

    def install(self) -> str:
        """Install the program into its own environment if needed; return its version."""
        return f"vllm {version('vllm')}"

    @abstractmethod
    def command(self, url: str, out: str) -> list[str]:
        """Return the command; it runs in the folder that has the model and the trace."""

    def environment(self, folder: Path) -> dict[str, str]:
        """Return the environment of the command, which runs in this folder."""
        kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        offline = {"HF_HOME": str(folder / HUB), "HF_HUB_OFFLINE": "1"}
        return kept | offline | {"PYTHONHASHSEED": "0", "VLLM_NO_USAGE_STATS": "1"}

    @abstractmethod
    def read(self, out: Path) -> Summary:
        """Return the figures in the client's result files.

        Raises
        ------
        Unreadable
            A file or a figure is missing.
        """


class VllmBench(Program):
    """``vllm bench serve`` of this environment's vLLM.

    With ``timed_trace`` the prompts depend on Python's seed of hashes, so it is fixed.
    """

    name = "vllm bench serve"

    def __init__(self, workload: str, *arguments: str) -> None:
        self.workload = workload
        self._arguments = arguments

    def command(self, url: str, out: str) -> list[str]:
        program = str(Path(sys.executable).with_name("vllm"))
        return [
            program, "bench", "serve", "--backend", "openai", "--base-url", url,
            "--endpoint", "/v1/completions", "--model", MODEL, "--tokenizer", MODEL,
            "--temperature", "0", "--seed", "0", "--disable-tqdm",
            "--metric-percentiles", "50,99", "--save-result",
            "--result-dir", out, "--result-filename", "result.json",
            "--dataset-name", self.workload, *self._arguments,
        ]  # fmt: skip

    def read(self, out: Path) -> Summary:
        found = _loaded(out / "result.json")
        names = ("completed", "failed", "p50_ttft_ms", "p99_ttft_ms", "total_token_throughput")
        return _summary(found, *names)


class Aiperf(Program):
    """``aiperf`` of NVIDIA Dynamo with a trace in Mooncake's format."""

    name = "aiperf"
    workload = "mooncake_trace"

    def install(self) -> str:
        into_environment(PLACE / "aiperf", [AIPERF])
        return AIPERF.replace("==", " ")

    def command(self, url: str, out: str) -> list[str]:
        return [
            str(PLACE / "aiperf" / "bin" / "aiperf"), "profile", "--model", MODEL,
            "--tokenizer", MODEL, "--url", url, "--endpoint-type", "chat", "--streaming",
            "--input-file", TRACE, "--custom-dataset-type", "mooncake_trace", "--fixed-schedule",
            "--isl-block-size", f"{BLOCK_TOKENS}", "--random-seed", "0",
            "--extra-inputs", "temperature:0", "--ui", "none", "--artifact-dir", out,
        ]  # fmt: skip

    def environment(self, folder: Path) -> dict[str, str]:
        cache = {"AIPERF_DATASET_MMAP_CACHE_DIR": str(folder / "aiperf")}  # else in the home
        return super().environment(folder) | cache

    def read(self, out: Path) -> Summary:
        found = _loaded(out / "profile_export_aiperf.json")
        flat = {
            "completed": _number(found, "request_count", "avg"),
            "failed": _number(found, "error_request_count", "avg", default=0),
            "p50": _number(found, "time_to_first_token", "p50"),
            "p99": _number(found, "time_to_first_token", "p99"),
            "tokens": _number(found, "total_token_throughput", "avg"),
        }
        return _summary(flat, *flat)


class LmcacheBench(Program):
    """``lmcache bench engine``, from the package with LMCache's command alone.

    Only its pre-releases have ``kv-tier-pressure``. Its tokenizers are those of this environment's
    Transformers.
    """

    name = "lmcache bench engine"

    def __init__(self, workload: str, *arguments: str) -> None:
        self.workload = workload
        self._arguments = arguments

    def install(self) -> str:
        into_environment(PLACE / "lmcache", [LMCACHE, f"transformers=={version('transformers')}"])
        return LMCACHE.replace("==", " ")

    def command(self, url: str, out: str) -> list[str]:
        return [
            str(PLACE / "lmcache" / "bin" / "lmcache"), "bench", "engine", "--engine-url", url,
            "--model", MODEL, "--workload", self.workload, *self._arguments,
            "--seed", "0", "--no-interactive", "--json", "-q", "--output-dir", out,
        ]  # fmt: skip

    def environment(self, folder: Path) -> dict[str, str]:
        return super().environment(folder) | {"OPENAI_API_KEY": "x", "LMCACHE_TRACK_USAGE": "false"}

    def read(self, out: Path) -> Summary:
        found = _loaded(out / "bench_summary.json")
        asked, answered = (_number(found, "results", f"{way}_throughput") for way in WAYS)
        flat = {name: _number(found, "results", name) for name in LMCACHE_FIGURES}
        return _summary({**flat, "tokens": asked + answered}, *LMCACHE_FIGURES, "tokens")


def _loaded(path: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise Unreadable(f"{path.name}: {error}") from error
    return found


def _number(found: dict[str, Any], *path: str, default: float | None = None) -> float:
    """Return the number at a path of names."""
    value: Any = found
    for name in path:
        value = value.get(name) if is_mapping(value) else None
    value = default if value is None else value
    if not isinstance(value, int | float):
        raise Unreadable(f"no number {'.'.join(path)}")
    return float(value)


def _summary(found: dict[str, Any], *names: str) -> Summary:
    """Return the summary whose fields have these names, in order."""
    completed, failed, p50, p99, tokens = (_number(found, name) for name in names)
    return Summary(int(completed), int(failed), p50, p99, tokens)


PROGRAMS: tuple[Program, ...] = (
    VllmBench(
        "timed_trace", "--dataset-path", TRACE, "--num-prompts", "24",
        "--timed-trace-chunk-hash-size", f"{BLOCK_TOKENS}",
        "--timed-trace-sec-multiplier", "0.001",
        "--timed-trace-label-timestamp", "timestamp",
        "--timed-trace-label-input-length", "input_length",
        "--timed-trace-label-output-length", "output_length",
        "--timed-trace-label-hash-ids", "hash_ids",
    ),
    VllmBench(
        "prefix_repetition", "--num-prompts", "24", "--max-concurrency", "1",
        "--prefix-repetition-prefix-len", "512", "--prefix-repetition-suffix-len", "64",
        "--prefix-repetition-num-prefixes", "12", "--prefix-repetition-output-len", "8",
        "--ignore-eos",
    ),
    Aiperf(),
    LmcacheBench(
        "multi-round-chat", "--tokens-per-gb-kvcache", "4800", "--kv-cache-volume", "1",
        "--mrc-shared-prompt-length", "100", "--mrc-chat-history-length", "500",
        "--mrc-user-input-length", "16", "--mrc-output-length", "8", "--mrc-qps", "2",
        "--mrc-duration", "12",
    ),
    LmcacheBench(
        "kv-tier-pressure", "--tokens-per-gb-kvcache", "3640", "--ktp-pool-size", "12",
        "--ktp-docs-per-request", "1", "--ktp-context-length", "600",
        "--ktp-system-prompt-length", "64", "--ktp-num-requests", "24",
        "--ktp-num-inflight-requests", "1", "--ktp-max-output-length", "8",
    ),
)  # fmt: skip
