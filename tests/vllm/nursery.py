"""Processes with vLLM in them, forked from one that has imported it: most of an engine's start.

``python nursery.py`` reads a line of JSON for each new process: its ``command`` (a Python file and
its arguments), its folder, environment and log. It answers with ``begun PID``, and later
``over PID CODE``, the code as ``subprocess.Popen.returncode`` gives it.

Half of the time of a short engine would be spent on the imported objects, which are of no use to it
at its end: vLLM collects garbage as it shuts down, and Python takes all modules apart. So these
objects stay frozen in a child, and a child that ends without an error skips the second.

Nothing of kvladder is imported before the fork. Unlike processes that are started afresh, siblings
share the addresses of imported modules and the seed of ``hash``. Their own children are forked as
well, as vLLM does where there are GPUs.
"""

from __future__ import annotations

import atexit
import gc
import json
import multiprocessing
import os
import runpy
import select
import subprocess
import sys
import threading
import warnings
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

REGISTRY = "vllm.model_executor.models.registry"
IMPORTED = (
    "vllm",
    "vllm.entrypoints.llm",
    "vllm.entrypoints.openai.api_server",
    "vllm.model_executor.layers.quantization.online.base",
    "vllm.model_executor.models.llama",
    "vllm.v1.engine.core",
    "vllm.v1.sample.sampler",
    "vllm.v1.worker.cpu_worker",
)


class Child:
    """A process of a nursery, with the parts of ``subprocess.Popen`` that tests use."""

    def __init__(self, nursery: Nursery, pid: int) -> None:
        self._nursery = nursery
        self.pid = pid

    def poll(self) -> int | None:
        """Return its exit code, None while it runs."""
        while self.pid not in self._nursery.codes and self._nursery.listen(0):
            pass
        return self._nursery.codes.get(self.pid)

    def wait(self, timeout: float | None = None) -> int:
        """Return its exit code once it has ended; TimeoutExpired after this many silent seconds."""
        while self.pid not in self._nursery.codes:
            if not self._nursery.listen(timeout):
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0)
        return self._nursery.codes[self.pid]


class Nursery:
    """The process that forks, as its callers see it."""

    def __init__(self, env: Mapping[str, str]) -> None:
        self.codes: dict[int, int] = {}
        self._begun: list[int] = []
        self._rest = b""
        self._process = subprocess.Popen(
            [sys.executable, __file__], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )

    def begin(self, command: list[str], folder: Path, env: Mapping[str, str], log: Path) -> Child:
        """Run a Python file in its own process and session."""
        given = {"command": command, "folder": str(folder), "env": dict(env), "log": str(log)}
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(given).encode() + b"\n")
        self._process.stdin.flush()
        while not self._begun:
            self.listen(None)
        return Child(self, self._begun.pop())

    def listen(self, timeout_s: float | None) -> bool:
        """Read its next line; return whether one came in time."""
        assert self._process.stdout is not None
        said = self._process.stdout.fileno()
        if not select.select([said], [], [], timeout_s)[0]:
            return False
        read = os.read(said, 1 << 16)
        assert read, "the nursery has ended"
        *lines, self._rest = (self._rest + read).split(b"\n")
        for what, pid, *code in map(bytes.split, lines):
            if what == b"begun":
                self._begun.append(int(pid))
            else:
                self.codes[int(pid)] = int(code[0])
        return True


def become(given: dict[str, Any], told: int, *closed: int) -> None:
    """Leave the nursery: the child runs in its own session, folder and log."""
    os.setsid()
    os.write(told, f"begun {os.getpid()}\n".encode())  # not sooner: it is found by its session
    for descriptor in (told, *closed):
        os.close(descriptor)
    os.chdir(given["folder"])
    os.environ.update(given["env"])  # beside the variables that vLLM has set on import
    out = os.open(given["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (out, 1), (out, 2)):
        os.dup2(source, target)
    os.close(out)
    os.close(nothing)
    sys.argv = given["command"]
    # vLLM unfreezes all objects as it shuts down, and visits them: the nursery's are many.
    gc.unfreeze = lambda: None
    context = multiprocessing.get_context
    multiprocessing.get_context = lambda method=None: context(  # type: ignore[assignment]
        "fork" if method == "spawn" else method
    )


def end(code: int) -> None:
    """End this process as Python does, but for taking its modules apart."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def run(path: str) -> int:
    """Run a Python file as a program; return its exit code unless it raises an error."""
    try:
        runpy.run_path(path, run_name="__main__")
    except SystemExit as told:
        if not isinstance(told.code, int | None):
            raise
        return told.code or 0
    return 0


def main() -> None:
    """Run the nursery until its input ends, or in a child the file that it was given."""
    told = os.dup(1)
    os.dup2(2, 1)  # output of imports is no answer
    for name in IMPORTED:
        import_module(name)
    # Each engine would look for these kernels in all modules.
    platform = sys.modules["vllm.platforms"].current_platform
    with warnings.catch_warnings(action="ignore"):
        platform.register_triton_kernel_overrides()
    type(platform).register_triton_kernel_overrides = classmethod(lambda _: None)
    assert len(list(Path("/proc/self/task").iterdir())) == 1, "a fork would lose threads"
    # Otherwise vLLM inspects each kind of model in a new process, to keep CUDA out of its own.
    sys.modules[REGISTRY].__dict__["_run_in_subprocess"] = lambda look: look()
    gc.freeze()  # otherwise each collection of each child visits all imported objects
    sys.stdout.flush()  # otherwise each child has it in its log
    running: dict[int, int] = {}
    while True:
        ready, _, _ = select.select([0, *running], [], [])
        for ended in running.keys() & set(ready):
            pid, status = os.waitpid(running.pop(ended), 0)
            os.close(ended)
            os.write(told, f"over {pid} {os.waitstatus_to_exitcode(status)}\n".encode())
        if 0 not in ready:
            continue
        line = sys.stdin.readline()
        if not line:
            return
        pid = os.fork()
        if not pid:
            become(json.loads(line), told, *running)
            end(run(sys.argv[0]))
        running[os.pidfd_open(pid)] = pid


if __name__ == "__main__":
    main()
