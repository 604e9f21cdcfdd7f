"""Starts real engines on the CPU, and asks them."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from kvladder.control.sockets import ask
from kvladder.testing.redisserver import free_ports
from tests.patience import PATIENCE_S, RUN_S, until
from tests.sglang.driver import answer, prompt

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
SGLANG = Path(os.environ.get("KVLADDER_SGLANG", Path(sys.prefix) / "sglang"))
"""SGLang and its requirements beside vLLM's packages; ``.ci/venv`` installs them there."""
COMPILED = SGLANG / "compiled" / sha256(str(SGLANG).encode()).hexdigest()[:8]
"""SGLang's hash. A process that finds it by another path compiles it again and delays others."""
PAGE = 64
ADMIN = "admin"
"""The key that a server requires to attach and detach its storage."""
SMALL = {
    "device": "cpu", "attention_backend": "torch_native", "sampling_backend": "pytorch",
    "disable_overlap_schedule": True, "skip_tokenizer_init": True, "page_size": PAGE,
    "max_total_tokens": 8192, "dtype": "float32", "random_seed": 1, "disable_cuda_graph": True,
    "mem_fraction_static": 0.2, "enable_hierarchical_cache": True, "hicache_ratio": 2,
    "hicache_mem_layout": "page_first_direct", "hicache_io_backend": "direct",
    "hicache_storage_backend": "dynamic", "served_model_name": "org/m",
    "enable_cache_report": True, "radix_cache_backend": "kvladder", "enable_metrics": True,
    "enable_priority_scheduling": True, "chunked_prefill_size": 512, "sleep_on_idle": True,
    "hicache_storage_prefetch_policy": "wait_complete", "log_level": "info",
}  # fmt: skip
OURS: dict[str, Any] = {
    "backend_name": "kvladder",
    "module_path": "kvladder.connectors.sglang",
    "class_name": "KVLadderStorage",
    "interface_v1": 1,
    "prefetch_threshold": PAGE,
}
PLUGINS = {
    "sglang.srt.plugins": "cpu = sgl_cpu:install",
    "kvladder.tiers": "hanging = hanging_files:HangingFiles",
}


def plugged(folder: Path) -> Path:
    """Return a folder that, on the path, makes the kit's plug-ins known."""
    info = folder / "kvladder_sglang_kit-0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: kvladder-sglang-kit\nVersion: 0\n")
    points = "".join(f"[{group}]\n{point}\n" for group, point in PLUGINS.items())
    (info / "entry_points.txt").write_text(points)
    return folder


def environment(folder: Path, **more: str) -> dict[str, str]:
    """Return the environment of a process with SGLang."""
    own = [
        SGLANG,
        HERE / "kit",
        folder / "plugged",
        ROOT,
        *os.environ.get("PYTHONPATH", "").split(":"),
    ]
    return {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join(str(path) for path in own if str(path)),
        "PYTHONWARNINGS": "ignore",
        "SGLANG_USE_CPU_ENGINE": "1",
        "OMP_NUM_THREADS": "1",  # several engines run at once, and threads that wait are busy
        "TORCH_EXTENSIONS_DIR": str(COMPILED),
        "HANGS": str(folder / "hangs"),
        **more,
    }


COMPILE = (
    "from array import array\n"
    "from sglang.srt.mem_cache.utils import get_hash_str\n"
    'get_hash_str(array("q", range(64)), None, page_size=64)\n'
)
"""SGLang's hash, which otherwise holds up its threads when it is first used."""


def run(folder: Path, *command: str) -> None:
    """Run something to its end in an engine's environment."""
    done = subprocess.run(
        [sys.executable, *command],
        env=environment(folder),
        capture_output=True,
        text=True,
        timeout=RUN_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]


def prepare(folder: Path) -> None:
    """Have a folder in which engines can be started."""
    plugged(folder / "plugged")
    COMPILED.mkdir(parents=True, exist_ok=True)
    # the name and the time of this folder change when SGLang is installed again
    source = [f"{path} {path.stat().st_mtime_ns}" for path in SGLANG.glob("sglang-*.dist-info")]
    with (COMPILED / "turn").open("a+") as turn:
        fcntl.flock(turn, fcntl.LOCK_EX)
        remove_abandoned(COMPILED)
        turn.seek(0)
        if turn.read().splitlines() == source:
            return
        run(folder, "-c", COMPILE)
        turn.truncate(0)
        turn.writelines(f"{line}\n" for line in source)


def remove_abandoned(compiled: Path) -> None:
    """Remove PyTorch's locks of killed processes: all others would wait for ever."""
    abandoned = {lock.resolve() for lock in compiled.glob("*/lock")}
    for file in Path("/proc").glob("[0-9]*/fd/*") if abandoned else ():
        with suppress(OSError):  # it has ended, or its id belongs to another process
            abandoned.discard(file.readlink())
    for lock in abandoned:
        lock.unlink(missing_ok=True)


def make_model(folder: Path, path: Path, kind: str = "llama", *others: Path) -> Path:
    """Make a small random model, and others of its shape with other weights."""
    paths = map(str, others)
    run(folder, str(HERE.parent / "vllm" / "tiny_model.py"), str(path), "0", kind, *paths)
    return path


def make_two(folder: Path) -> list[Path]:
    """Make two models of one shape in one process, most of whose time is imports."""
    paths = [folder / f"model{seed}" for seed in range(2)]
    make_model(folder, paths[0], "llama", paths[1])
    return paths


class Answer(NamedTuple):
    """The result of a prompt."""

    ids: list[int]
    cached: int
    """Tokens that were not computed."""
    storage: int
    """The cached tokens that came from kvladder."""
    reason: str | None
    hints: Sequence[dict[str, Any]] = ()
    """The outcomes of its hints."""
    told: Mapping[str, Any] = MappingProxyType({})
    """What kvladder tells of a prompt with hints, in ``cached_tokens_details``."""


class Engine:
    """One engine and its processes; ``folder`` holds its log and its sockets."""

    def __init__(self, folder: Path, model: Path, extra: dict[str, Any], **settings: Any) -> None:
        self.folder = folder
        self.log = folder / f"engine-{len(list(folder.glob('engine-*.log')))}.log"
        given = {**SMALL, "model_path": str(model), **settings}
        given["hicache_storage_backend_extra_config"] = json.dumps({**OURS, **extra})
        self._begin([sys.executable, str(HERE / "driver.py"), json.dumps(given)])
        try:
            self._reply()
        except BaseException:
            self.end()
            raise

    def _begin(self, command: Sequence[str], *, replies: bool = True) -> None:
        """Start the process; its output lines are replies, or are logged."""
        self._ended = False
        with self.log.open("w") as log:
            self._process = subprocess.Popen(
                command,
                env=environment(self.folder),
                cwd=self.folder,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE if replies else log,
                stderr=log,
                text=True,
                start_new_session=True,
            )

    def _reply(self) -> Any:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("REPLY "):
                return json.loads(line.removeprefix("REPLY "))
        raise AssertionError(self.log.read_text()[-6000:])

    def do(self, name: str, **asked: Any) -> Any:
        """Have the driver do something."""
        assert self._process.stdin is not None
        print(json.dumps([name, asked]), file=self._process.stdin, flush=True)
        return self._reply()

    def generate(self, first: int, tokens: int, **options: Any) -> Answer:
        """Answer one prompt."""
        return Answer(**self.do("generate", first=first, tokens=tokens, **options))

    def again(self, first: int, tokens: int, **options: Any) -> Answer:
        """Answer a prompt with empty pools, so that cached tokens come from kvladder."""
        self.do("flush")
        return self.generate(first, tokens, **options)

    def memory(self) -> int:
        """Return the bytes that its processes hold in memory, except for files."""
        held = 0
        for path in Path("/proc").glob("[0-9]*"):
            with suppress(ProcessLookupError, FileNotFoundError):  # it has ended
                if os.getpgid(int(path.name)) == self._process.pid:
                    told = (path / "status").read_text()
                    held += sum(map(int, re.findall(r"Rss(?:Anon|Shmem):\s*(\d+)", told)))
        return held << 10

    def stats(self) -> dict[str, Any]:
        """Return kvladder's counters."""
        path = self.folder / "kv.sock"
        found: dict[str, Any] = ask(path, {"command": "stats"}, timeout_s=PATIENCE_S)
        return found

    def stored(self, level: str, blocks: int) -> None:
        """Wait until a level holds exactly this number of blocks."""

        def are_there() -> bool:
            held = self.stats()[level]["blocks"]
            assert held <= blocks, f"{level} has {held} blocks, expected {blocks}"
            return bool(held == blocks)

        until(are_there, every_s=0.1)

    def end(self) -> None:
        """Kill all its processes at once, as SGLang itself does; may be called again."""
        if not self._ended:
            self._ended = True
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.communicate()


class Server(Engine):
    """A server started by the command of docs/how-to/sglang.md, and used over HTTP.

    ``model`` replaces the word in capitals; the arguments that a CPU needs and ``more`` follow.
    """

    def __init__(self, folder: Path, model: Path, **more: Any) -> None:  # no super: another way in
        self.folder = folder
        self.log = folder / "server.log"
        (port,) = free_ports(1)
        self._url = f"http://127.0.0.1:{port}"
        documented = [str(model) if one == "MODEL" else one for one in documented_command()]
        needed = {name: value for name, value in SMALL.items() if flag(name) not in documented}
        needed |= {"port": port, "admin_api_key": ADMIN, **more}
        self._begin([*documented, *flags(needed)], replies=False)
        try:
            until(self._answers, every_s=0.1, within_s=RUN_S)
        except BaseException:
            self.end()
            raise

    def _answers(self) -> bool:
        """Return whether it has started."""
        assert self._process.poll() is None, self.log.read_text()[-6000:]
        try:
            self._ask("GET", "/health")
        except OSError:
            return False
        return True

    def _ask(self, method: str, path: str, told: dict[str, Any] | None = None) -> bytes:
        """Return its answer; raise OSError if it is an error, or the server does not listen yet."""
        request = Request(
            self._url + path,
            data=None if told is None else json.dumps(told).encode(),
            headers={"Content-Type": "application/json", "Authorization": f"Bearer {ADMIN}"},
            method=method,
        )
        with urlopen(request, timeout=PATIENCE_S) as reply:
            found: bytes = reply.read()
            return found

    def do(self, name: str, **asked: Any) -> Any:
        """Execute a command of the driver over HTTP."""
        return getattr(self, f"_{name}")(**asked)

    def _generate(self, first: int, tokens: int, **options: Any) -> dict[str, Any]:
        sampling = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}
        told = {"input_ids": prompt(first, tokens), "sampling_params": sampling, **options}
        return answer(json.loads(self._ask("POST", "/generate", told)))

    def _flush(self) -> None:
        until(lambda: self._patiently("POST", "/flush_cache") == "")

    def _update(self, path: str) -> str:
        return self._patiently("POST", "/update_weights_from_disk", {"model_path": path})

    def _detach(self) -> str:
        return self._patiently("DELETE", "/hicache/storage-backend")

    def _attach(self, extra: dict[str, Any]) -> str:
        told = {
            "hicache_storage_backend": "dynamic",
            "hicache_storage_backend_extra_config_json": json.dumps(extra),
        }
        return self._patiently("PUT", "/hicache/storage-backend", told)

    def _patiently(self, method: str, path: str, told: dict[str, Any] | None = None) -> str:
        """Why it did not do something, once nothing runs any more; empty if it did."""
        why = ""

        def is_over() -> bool:
            nonlocal why
            try:
                self._ask(method, path, told)
            except HTTPError as error:
                why = error.read().decode()
                return "idle" not in why.lower() and "running" not in why
            why = ""
            return True

        until(is_over, every_s=0.1)
        return why


def documented_command() -> list[str]:
    """The command of docs/how-to/sglang.md that starts a server, with this Python."""
    page = (ROOT / "docs" / "how-to" / "sglang.md").read_text()
    [block] = [text for text in page.split("```") if "sglang.launch_server" in text]
    words = shlex.split(block[block.index("python -m") :].replace("\\\n", " "))
    return [sys.executable, *words[1:]]


def flag(name: str) -> str:
    """Return the command-line name of a setting of SGLang."""
    return "--" + name.replace("_", "-")


def flags(given: dict[str, Any]) -> list[str]:
    """Return settings as command-line arguments; True becomes a switch."""
    words: list[str] = []
    for name, value in given.items():
        several = value if isinstance(value, list) else [] if value is True else [value]
        words += [flag(name), *map(str, several)]
    return words
