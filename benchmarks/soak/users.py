"""Users of the engines, whose answers are compared, and a thread that follows the counters."""

from __future__ import annotations

import json
import os
import shlex
import signal
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from http.client import HTTPException
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from benchmarks.soak.stage import BLOCK_TOKENS, Stage
from kvladder.errors import ConfigError
from tests.vllm.harness import connector
from tests.vllm.server import Server

PROMPT_BLOCKS = 4
TOKENS = 8
"""Tokens of each answer."""
SALT = "a user"
LAG_MAX = 110
"""Prompts of the last so many are asked again: they are spread over all levels."""
NEW_EVERY_S = 1.2
PAUSE_S = 0.15
"""The pause of each user after an answer, so that the machine is not busy all the time."""
SAMPLE_S = 0.25


class SoakServer(Server):
    """A vLLM whose own prefix cache holds eight prompts only, so that kvladder is asked."""

    options = (
        *("--skip-tokenizer-init", "--enforce-eager", "--dtype", "float32"),
        *("--block-size", f"{BLOCK_TOKENS}", "--kv-cache-memory-bytes", f"{8 << 20}"),
        *("--max-model-len", "512", "--prefix-caching-hash-algo", "sha256_cbor"),
    )

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to all of its processes: idle ones of vLLM wait by spinning."""
        for pid in self.alive():
            with suppress(ProcessLookupError):
                os.kill(pid, number)


def server(folder: Path, name: str, model: Path, stack: dict[str, Any] | None) -> SoakServer:
    """Start vLLM, alone or with kvladder below it; also again, after it was killed."""
    place = folder / name
    place.mkdir(exist_ok=True)
    if not (place / "MODEL").exists():
        (place / "MODEL").symlink_to(model)
    if stack is None:
        return SoakServer(place, "vllm serve MODEL", "--no-enable-prefix-caching")
    transfer = shlex.quote(json.dumps(connector(stack)))
    return SoakServer(place, f"vllm serve MODEL --kv-transfer-config {transfer}")


class Known(NamedTuple):
    """A prompt, and vLLM's own answer to it."""

    prompt: list[int]
    answer: list[int]


class Asked(NamedTuple):
    """A request to an engine, and its time."""

    engine: str
    begun_s: float
    took_s: float
    cached_tokens: int


class Teller:
    """Makes prompts, and asks vLLM alone for the answers; it is stopped in between."""

    def __init__(self, alone: SoakServer, random: Random) -> None:
        self._alone, self._random = alone, random
        self.known: list[Known] = []
        self.took_s: list[float] = []
        """The time that vLLM alone took for each prompt, in this run."""

    def more(self) -> None:
        """Add a prompt."""
        length = PROMPT_BLOCKS * BLOCK_TOKENS + 1
        prompt = self._random.choices(range(3, 1000), k=length)
        self._alone.signal(signal.SIGCONT)
        begun_s = time.monotonic()
        answer, _ = self._alone.complete(prompt, SALT, tokens=TOKENS)
        self.took_s.append(time.monotonic() - begun_s)
        self._alone.signal(signal.SIGSTOP)
        self.known.append(Known(prompt, answer))

    def one(self, random: Random) -> Known:
        """Return one of the last prompts."""
        return random.choice(self.known[-LAG_MAX:])


class Users:
    """Threads that ask engines known prompts and compare the answers; a context manager."""

    def __init__(
        self, engines: dict[str, SoakServer], teller: Teller, *, each: int, seed: int
    ) -> None:
        self.asked: list[Asked] = []
        self.wrong: list[tuple[str, float]] = []
        """The engine and the time of each answer that differs."""
        self.failed: list[tuple[str, float, str]] = []
        """The engine, the time and the error of each failed request."""
        self.cut = 0
        """Number of requests that failed because their engine was killed."""
        self._engines = engines
        self._away: set[str] = set()
        self._teller = teller
        self._ending, self._may_ask = threading.Event(), threading.Event()
        self._in_flight, self._lock = 0, threading.Lock()
        names = [name for name in engines for _ in range(each)]
        self._threads = [
            threading.Thread(target=self._run, args=(name, Random(seed + number)))
            for number, name in enumerate(names)
        ]
        self._threads.append(threading.Thread(target=self._tell))

    def __enter__(self) -> Users:
        self._may_ask.set()
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.set()
        self._may_ask.set()
        for thread in self._threads:
            thread.join()

    def pause(self) -> None:
        """Let no request begin, and wait until none is in flight."""
        self._may_ask.clear()
        while self._in_flight:
            time.sleep(0.02)

    def resume(self) -> None:
        """Let requests begin again."""
        self._may_ask.set()

    def leave(self, engine: str) -> None:
        """Ask an engine nothing more, as it will be killed; its requests in flight may fail."""
        self._away.add(engine)

    def come_back(self, engine: str) -> None:
        """Ask an engine again."""
        self._away.discard(engine)

    def _begin(self) -> bool:
        """Wait until requests may begin, and count one; return False at the end of all."""
        while not self._ending.is_set():
            self._may_ask.wait()
            with self._lock:
                if self._may_ask.is_set():
                    self._in_flight += 1
                    return True
        return False

    def _end(self) -> None:
        with self._lock:
            self._in_flight -= 1

    def _tell(self) -> None:
        while not self._ending.wait(NEW_EVERY_S) and self._begin():
            try:
                self._teller.more()
            except OSError as error:
                self.failed.append(("alone", time.monotonic(), str(error)))
            finally:
                self._end()

    def _run(self, name: str, random: Random) -> None:
        while not self._ending.wait(PAUSE_S * 2 * random.random()) and self._begin():
            if name in self._away:
                self._end()
                continue
            known, begun_s = self._teller.one(random), time.monotonic()
            try:
                answer, cached = self._engines[name].complete(known.prompt, SALT, tokens=TOKENS)
            except (OSError, HTTPException, ValueError) as error:
                if name in self._away:
                    self.cut += 1
                else:
                    self.failed.append((name, time.monotonic(), str(error)))
            else:
                self.asked.append(Asked(name, begun_s, time.monotonic() - begun_s, cached))
                if answer != known.answer:
                    self.wrong.append((name, begun_s))
            finally:
                self._end()


class Sample(NamedTuple):
    """The counters of one engine's levels at a moment."""

    time_s: float
    levels: dict[str, tuple[int, int]]
    """Blocks stored in each level and served from it."""
    errors: dict[str, int]
    damaged: dict[str, int]


class Watcher:
    """A thread that samples the counters of all engines; a context manager."""

    def __init__(self, stage: Stage, engines: Sequence[str]) -> None:
        self._stage = stage
        self.samples: dict[str, list[Sample]] = {name: [] for name in engines}
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Watcher:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ending.wait(SAMPLE_S):
            for name, samples in self.samples.items():
                with suppress(ConfigError):  # a busy machine may answer later than the limit
                    samples.append(self.sample(name))

    def sample(self, engine: str) -> Sample:
        """Return the counters now."""
        begun_s, stats = time.monotonic(), self._stage.stats(engine)
        names = self._stage.levels
        levels = {name: (stats[name]["stored"], stats[name]["hits"]) for name in names}
        errors = {name: stats[name]["errors"] for name in names}
        damaged = {name: stats[name]["corrupt"] + stats[name]["foreign"] for name in names}
        return Sample(begun_s, levels, errors, damaged)

    def none(self) -> Sample:
        """Return the counters of an engine that has just started."""
        levels = self._stage.levels
        none = dict.fromkeys(levels, 0)
        return Sample(time.monotonic(), dict.fromkeys(levels, (0, 0)), none, none)

    def anew(self, engine: str) -> None:
        """Forget the samples of an engine that was killed: its counters begin at 0 again."""
        self.samples[engine] = [self.none()]

    def again_s(
        self, level: str, since_s: float, within_s: float, *, is_stored: bool = False
    ) -> float | None:
        """Return when all engines had stored blocks in a level and got blocks from it, since then.

        With ``is_stored``, return when they had stored blocks. None if that does not happen within
        the time.
        """
        while time.monotonic() < since_s + within_s:
            times = [
                self._again_s(samples, level, since_s, 1 if is_stored else 2)
                for samples in self.samples.values()
            ]
            if None not in times:
                return max(one for one in times if one is not None)
            time.sleep(SAMPLE_S)
        return None

    @staticmethod
    def _again_s(
        samples: Sequence[Sample], level: str, since_s: float, counters: int
    ) -> float | None:
        before = [one for one in samples if one.time_s <= since_s][-1].levels[level]
        for one in samples:
            both = [*zip(one.levels[level], before, strict=True)][:counters]
            if one.time_s > since_s and all(now > then for now, then in both):
                return one.time_s
        return None
