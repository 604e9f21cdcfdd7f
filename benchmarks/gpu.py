"""Run tests and benchmarks on a machine with CUDA; ``make gpu`` runs this too.

Needs only torch and NumPy. If a part needs more and it is missing, the part says so.
Results go to ``benchmarks/results/DATE-gpu-NAME.md`` and ``.json``. Exits with 1 if a part failed.
"""

from __future__ import annotations

import argparse
import json
import sys
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from time import monotonic
from typing import Any

from benchmarks.__main__ import RESULTS, machine
from benchmarks.row import Row, markdown, plain

MINUTES = 9.0
"""Time limit for all parts; parts that would begin later are skipped."""


@dataclass(frozen=True, slots=True)
class Part:
    """A test or a measurement."""

    name: str
    run: Callable[[], Iterable[Row]]
    needs: tuple[str, ...] = ()
    """Modules that it needs beside torch and a device."""
    dry: bool = False
    """True if it is only tried, at a tiny size and without a device."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of a part."""

    name: str
    state: str
    """"passed", or the reason why it was skipped or failed."""
    seconds: float


NAMES = {
    "order of copies against compute": "order",
    "registering the arena": "registering",
    "sleep during saves": "sleep",
    "tests of pools and engines": "suite",
    "copies beside one pinned copy": "copies",
    "small pages by a kernel": "kernel",
    "a load behind a save": "latency",
}
"""Function in ``gpu_parts`` of each part, the tests first."""
MODELS = {"generating beside saves": "decoding", "the first token of a model": "first_token"}
"""Function in ``gpu_rows`` of each part, the longest last."""
NEEDS = {
    "tests of pools and engines": ("pytest", "hypothesis", "transformers"),
    "small pages by a kernel": ("triton",),
    "the first token of a model": ("msgspec", "xxhash"),
}


def parts(*, dry: bool = False) -> list[Part]:
    """Return all parts, or those that can be tried; torch is imported only when a part runs."""

    def of(module: str, function: str, **options: bool) -> Callable[[], Iterable[Row]]:
        def run() -> Iterable[Row]:
            rows: Iterable[Row] = getattr(import_module(module), function)(**options)
            return rows

        return run

    models = [
        Part(name, of("benchmarks.gpu_rows", function, dry=dry), NEEDS.get(name, ()), dry)
        for name, function in MODELS.items()
    ]
    if dry:
        return models
    others = [
        Part(name, of("benchmarks.gpu_parts", function), NEEDS.get(name, ()))
        for name, function in NAMES.items()
    ]
    return others + models


def missing(part: Part) -> str:
    """Return the reason why a part cannot run here; "" if it can."""
    for name in ("torch", "numpy", *part.needs):
        if find_spec(name) is None:
            return f"there is no {name}"
    if part.dry:
        return ""
    import torch

    return "" if torch.cuda.is_available() else "there is no CUDA device"


def run(wanted: Sequence[Part], minutes: float) -> tuple[list[Row], list[Outcome]]:
    """Run parts one after the other and print them; a failure does not stop the next."""
    rows: list[Row] = []
    outcomes: list[Outcome] = []
    end_s = monotonic() + 60 * minutes
    for part in wanted:
        begun_s = monotonic()
        why = missing(part) or ("" if begun_s < end_s else f"{minutes:g} minutes are over")
        state = f"skipped: {why}"
        if not why:
            print(f"{part.name} ...", flush=True)
            try:
                for row in part.run():
                    rows.append(row)
                    print(plain([row]).partition("\n")[2], flush=True)
                state = "passed"
            except Exception as error:  # noqa: BLE001 - the others still run
                traceback.print_exc()
                state = f"failed: {error!r}"
        outcomes.append(Outcome(part.name, state, monotonic() - begun_s))
        print(f"{part.name}: {state}", flush=True)
    return rows, outcomes


def main(argv: Sequence[str] | None = None) -> int:
    """Run the requested parts and write their results; return 1 if a part failed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--only", action="append", metavar="TEXT", help="parts named like this")
    parser.add_argument("--minutes", type=float, default=MINUTES, help="skip what begins later")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the results")
    parser.add_argument(
        "--dry", action="store_true", help="only try the rows of models, tiny: write nothing down"
    )
    arguments = parser.parse_args(argv)
    wanted = [
        part
        for part in parts(dry=arguments.dry)
        if not arguments.only or any(text in part.name for text in arguments.only)
    ]
    about = {**machine(), "device": _device()}
    rows, outcomes = run(wanted, arguments.minutes)
    if not arguments.dry:
        _write(arguments.out, about, rows, outcomes)
    return int(any(one.state.startswith("failed") for one in outcomes))


def _device() -> str:
    if find_spec("torch") is None:
        return "none"
    import torch

    if not torch.cuda.is_available():
        return "none"
    cuda: Any = torch.cuda  # its annotations are incomplete
    found = cuda.get_device_properties(0)
    return f"{found.name}, {found.total_memory >> 30} GiB, torch {torch.__version__}"


def _write(folder: Path, about: dict[str, str], rows: list[Row], outcomes: list[Outcome]) -> None:
    device = about["device"].partition(",")[0].lower().replace(" ", "-")
    path = folder / f"{about['date'][:10]}-gpu-{device}.md"
    folder.mkdir(parents=True, exist_ok=True)
    facts = "\n".join(f"- {name}: {value}" for name, value in about.items())
    ended = "\n".join(f"- {one.name}: {one.state} ({one.seconds:.0f} s)" for one in outcomes)
    path.write_text(f"# Measured {about['date']}\n\n{facts}\n\n{ended}\n\n{markdown(rows)}\n")
    told = {"about": about, "parts": [*map(asdict, outcomes)], "rows": [*map(asdict, rows)]}
    path.with_suffix(".json").write_text(json.dumps(told, indent=1) + "\n")
    print(f"written to {path}")


if __name__ == "__main__":
    sys.exit(main())
