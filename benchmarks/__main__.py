"""Run all benchmarks, or those that --only names, and print a table of the results."""

from __future__ import annotations

import argparse
import json
import sys
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import Any

from benchmarks.machine import HERE, RESULTS, machine
from benchmarks.row import Row, markdown, plain
from benchmarks.stopping import exit_on_sigterm
from kvladder.report.charts import runs_page
from kvladder.report.page import write

Rows = Callable[[], Iterable[Row]]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; return 1 if a benchmark failed, 2 if the given name is unknown."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument(
        "--only", action="append", metavar="NAME", help="only bench_NAME.py; may be repeated"
    )
    parser.add_argument(
        "--out",
        metavar="FILE",
        help="write the table to benchmarks/results/FILE, and JSON",
    )
    parser.add_argument("--report", metavar="FILE", help="draw this run and earlier ones")
    arguments = parser.parse_args(argv)
    known = names()
    wanted = arguments.only or known
    unknown = [name for name in wanted if name not in known]
    if unknown:
        print(f"no benchmark {', '.join(unknown)}; there are: {', '.join(known)}", file=sys.stderr)
        return 2
    about = machine()
    print("\n".join(f"{name}: {value}" for name, value in about.items()), flush=True)
    rows, failed = measure(wanted)
    print(f"\n{plain(rows)}")
    if arguments.out:
        RESULTS.mkdir(exist_ok=True)
        out = RESULTS / Path(arguments.out).name
        facts = "\n".join(f"- {name}: {value}" for name, value in about.items())
        out.write_text(f"# Measured {about['date']}\n\n{facts}\n\n{markdown(rows)}\n")
        out.with_suffix(".json").write_text(json.dumps(run_data(about, rows), indent=1) + "\n")
        print(f"\nwritten to {out}")
    if arguments.report and rows:
        write(Path(arguments.report), runs_page(runs(run_data(about, rows))))
        print(f"\ndrawn in {arguments.report}")
    for name in failed:
        print(f"benchmark {name} failed", file=sys.stderr)
    return 1 if failed else 0


def run_data(about: dict[str, str], rows: Iterable[Row]) -> dict[str, Any]:
    """Return a run as plain data."""
    return {"about": about, "rows": [asdict(row) for row in rows]}


def runs(last: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the runs that results/ has as JSON, the oldest first, and then this one."""
    found = [json.loads(path.read_text()) for path in RESULTS.glob("*.json")]
    kept = [one for one in found if "rows" in one and one["about"]["date"] < last["about"]["date"]]
    return [*sorted(kept, key=lambda one: str(one["about"]["date"])), last]


def names() -> list[str]:
    """Return the names of all benchmarks."""
    return sorted(path.stem.removeprefix("bench_") for path in HERE.glob("bench_*.py"))


def measure(wanted: Iterable[str]) -> tuple[list[Row], list[str]]:
    """Run benchmarks one by one; return their rows, and the names of the failed ones."""
    rows: list[Row] = []
    failed: list[str] = []
    for name in wanted:
        print(f"\n{name}", flush=True)
        try:
            run: Rows = import_module(f"benchmarks.bench_{name}").rows
            for row in run():
                rows.append(row)
                print(plain([row]).partition("\n")[2], flush=True)
        except Exception:  # noqa: BLE001 - the others are still measured
            traceback.print_exc()
            failed.append(name)
    return rows, failed


if __name__ == "__main__":
    exit_on_sigterm()
    sys.exit(main())
