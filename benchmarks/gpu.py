"""Run tests and benchmarks on a machine with CUDA; ``make gpu`` runs this too.

Needs only Python: if a module that a part needs is missing, or the device, the part is skipped by
name. Results go to ``benchmarks/results/DATE-gpu-NAME.md`` and ``.json`` after each part. Exits
with 1 if a part failed, with 2 if no part ran.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import traceback
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from time import monotonic
from typing import Any

from benchmarks.machine import RESULTS, machine
from benchmarks.row import Row, markdown, plain

MINUTES = 4.5
"""Time limit for the parts of one call; a part that takes longer is ended."""
LIBRARY = ("msgspec", "yaml", "xxhash", "aiofiles", "click", "h11", "zstandard", "packaging")
"""Modules that a whole cache needs, beside NumPy."""
TESTS = (
    "pytest", "pytest_asyncio", "hypothesis", "cryptography", "redis", "transformers", *LIBRARY
)  # fmt: skip
"""Modules that the tests of pools and engines need."""


@dataclass(frozen=True, slots=True)
class Part:
    """A test or a measurement."""

    name: str
    where: tuple[str, str]
    """Module of this folder, imported only when the part runs, and a function in it."""
    call: int
    """The call of two that it belongs to: 1 has the tests and the copies, 2 the models."""
    needs: tuple[str, ...] = ()
    """Modules that it needs beside torch and NumPy."""
    dry: bool = False
    """True if it can be tried at a tiny size and without a device: then it takes ``dry``."""

    def run(self, *, dry: bool) -> Iterable[Row]:
        """Begin the part, and return its rows, each once it is measured."""
        module, function = self.where
        found: Callable[..., Iterable[Row]] = getattr(
            import_module(f"benchmarks.{module}"), function
        )
        return found(dry=True) if dry else found()


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of a part."""

    name: str
    state: str
    """"passed", or the reason why it was skipped or failed."""
    seconds: float


PARTS = (
    Part("order of copies against compute", ("gpu_parts", "order"), 1),
    Part("registering the arena", ("gpu_parts", "registering"), 1),
    Part("memory freed after a drain", ("gpu_parts", "freed"), 1),
    Part("two processes on one arena", ("gpu_arena", "two_processes"), 1, dry=True),
    Part("host time of copies", ("gpu_arena", "host_time"), 1, dry=True),
    Part("copies beside one pinned copy", ("gpu_parts", "copies"), 1),
    Part("small pages by a kernel", ("gpu_parts", "kernel"), 1, ("triton",)),
    Part("a load behind a save", ("gpu_parts", "latency"), 1),
    Part("sleep and wake of the allocator", ("gpu_vllm", "sleep"), 1, ("vllm",)),
    Part("tests of pools and engines", ("gpu_parts", "suite"), 1, TESTS),
    Part("generating beside copies", ("gpu_rows", "generating"), 2, dry=True),
    Part("attention by layout", ("gpu_vllm", "attention"), 2, ("vllm",)),
    Part("a real vLLM", ("gpu_vllm", "engines"), 2, ("vllm", *LIBRARY), dry=True),
    Part("first token from host", ("gpu_rows", "from_host"), 2, dry=True),
    Part("first token from files", ("gpu_rows", "from_files"), 2, LIBRARY, dry=True),
)
"""All parts in their order; the longest of each call last."""


def missing(part: Part, *, dry: bool = False) -> str:
    """Return the reason why a part cannot run here; "" if it can."""
    if dry and not part.dry:
        return "it needs a device"
    for name in ("torch", "numpy", *part.needs):
        if find_spec(name) is None:
            return f"there is no {name}"
    return "" if dry else _no_device()


def _no_device() -> str:
    """Return the reason why torch has no CUDA device; "" if it has one."""
    if find_spec("torch") is None:
        return "there is no torch"
    try:
        torch: Any = import_module("torch")
    except Exception as error:  # noqa: BLE001 - an installation may be broken in any way
        return f"torch cannot be imported: {error!r}"
    if not torch.cuda.is_available():
        return f"there is no CUDA device for torch {torch.__version__}"
    if torch.version.hip is not None:
        return "the device is of ROCm, which is not supported"
    return ""


class OutOfTimeError(BaseException):
    """The time for all parts of a call is over; no part catches it."""


@contextmanager
def _limited(seconds: float) -> Generator[None]:
    """Raise OutOfTimeError inside after so many seconds."""

    def end(number: int, frame: object) -> None:
        raise OutOfTimeError(f"it was ended after {seconds:.0f} s, at the end of this call's time")

    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 0.001))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


Told = Callable[[list[Row], list[Outcome]], None]


def _nothing(rows: list[Row], outcomes: list[Outcome]) -> None:
    """Write nothing down."""


def run(
    wanted: Sequence[Part], minutes: float, *, dry: bool = False, told: Told = _nothing
) -> tuple[list[Row], list[Outcome]]:
    """Run parts one after the other and print them; a failure does not stop the next.

    ``told`` is called after each part with all rows and outcomes so far.
    """
    rows: list[Row] = []
    outcomes: list[Outcome] = []
    end_s = monotonic() + 60 * minutes
    for part in wanted:
        begun_s = monotonic()
        why = missing(part, dry=dry) or ("" if begun_s < end_s else f"{minutes:g} minutes are over")
        state = f"skipped: {why}"
        if not why:
            print(f"{part.name} ...", flush=True)
            try:
                with _limited(end_s - begun_s):
                    for row in part.run(dry=dry):
                        rows.append(row)
                        print(plain([row]).partition("\n")[2], flush=True)
                state = "passed"
            except (Exception, OutOfTimeError) as error:  # noqa: BLE001 - the others still run
                traceback.print_exc()
                state = f"failed: {error!r}"
        outcomes.append(Outcome(part.name, state, monotonic() - begun_s))
        print(f"{part.name}: {state}", flush=True)
        told(rows, outcomes)
    return rows, outcomes


def main(argv: Sequence[str] | None = None) -> int:
    """Run the requested parts and write their results; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--only", action="append", metavar="TEXT", help="parts named like this")
    parser.add_argument("--part", type=int, choices=(1, 2), help="1: tests and copies, 2: models")
    parser.add_argument("--minutes", type=float, help=f"time limit; {MINUTES:g} for each half")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the results")
    parser.add_argument(
        "--dry", action="store_true", help="try the parts without a device, tiny: write nothing"
    )
    arguments = parser.parse_args(argv)
    wanted = [
        part
        for part in PARTS
        if arguments.part in (None, part.call)
        and (not arguments.only or any(text in part.name for text in arguments.only))
    ]
    if not wanted:
        names = ", ".join(part.name for part in PARTS)
        print(f"no part is named like {arguments.only}; there are: {names}", file=sys.stderr)
        return 2
    minutes: float | None = arguments.minutes
    if minutes is None:
        minutes = MINUTES * len({part.call for part in wanted})
    about = {**machine(), "device": _device()}
    print("\n".join(f"{name}: {value}" for name, value in about.items()), flush=True)
    path = _path(arguments.out, about, arguments.part)
    told: Told = _nothing if arguments.dry else partial(_write, path, about)
    _, outcomes = run(wanted, minutes, dry=arguments.dry, told=told)
    if not arguments.dry:
        print(f"written to {path}")
    return verdict(outcomes)


def verdict(outcomes: Iterable[Outcome]) -> int:
    """Return the exit code, and print what to do if no part ran."""
    states = {one.state.partition(":")[0] for one in outcomes}
    if states <= {"skipped"}:
        print(
            f"no part ran with {sys.executable}: set GPU_PYTHON to a Python whose torch sees a"
            " CUDA device, or choose other parts",
            file=sys.stderr,
        )
        return 2
    return int("failed" in states)


def _device() -> str:
    if why := _no_device():
        return f"none, {why}"
    torch: Any = import_module("torch")
    found = torch.cuda.get_device_properties(0)
    return f"{found.name}, {found.total_memory >> 30} GiB, torch {torch.__version__}"


def _path(folder: Path, about: dict[str, str], call: int | None) -> Path:
    """Return the file for the results of one call."""
    device = about["device"].partition(",")[0].lower().replace(" ", "-")
    half = "" if call is None else f"-part-{call}"
    return folder / f"{about['date'][:10]}-gpu-{device}{half}.md"


def _write(path: Path, about: dict[str, str], rows: list[Row], outcomes: list[Outcome]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    facts = "\n".join(f"- {name}: {value}" for name, value in about.items())
    ended = "\n".join(f"- {one.name}: {one.state} ({one.seconds:.0f} s)" for one in outcomes)
    path.write_text(f"# Measured {about['date']}\n\n{facts}\n\n{ended}\n\n{markdown(rows)}\n")
    told = {"about": about, "parts": [*map(asdict, outcomes)], "rows": [*map(asdict, rows)]}
    path.with_suffix(".json").write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
