"""A real SGLang with kvladder below it, beside SGLang's own file back end.

``python examples/demo_sglang.py`` (or ``make demo-sglang``) needs no GPU and no network. It makes
small random models, and starts SGLang on the CPU with one storage and then with the other. Each
row asks one prompt of 1,500 tokens: how many of them came from the storage, and whether the answer
is the one that was computed. The exit code is 0 only if every claim about kvladder holds.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from kvladder.layout import align  # noqa: E402
from kvladder.tiers.files.header import HEADER_BYTES  # noqa: E402
from tests.patience import until  # noqa: E402
from tests.sglang.engine import PAGE, Answer, Engine, make_two, prepare  # noqa: E402

TOKENS = 1500
CACHEABLE = (TOKENS - 1) // PAGE * PAGE
"""One token is always computed, and a page is cached when it is full."""
PAGES = CACHEABLE // PAGE
PAGE_BYTES = 4 * 2 * PAGE * 4 * 32 * 4
FIRST, DAMAGED, WHILE_HUNG = 1, 2, 3
"""Prompts, by their first numbers."""
RUNS = (
    "cold prompt", "pools flushed", "another salt", "tier hangs", "new process", "flipped bits",
    "other weights",
)  # fmt: skip


class Kvladder:
    """Our storage: an arena of 48 slots, and files."""

    name = "kvladder"

    def __init__(self, folder: Path) -> None:
        self.files = folder / "kv"
        self.settings: dict[str, Any] = {}
        self.extra: dict[str, Any] = {
            "control": {"path": str(folder / "kv.sock")},
            "arena": {"size": "12 MiB"},
            "fetch": {"deadline": "4 s"},
            "tiers": [
                {"name": "host", "type": "host"},
                {
                    "name": "files", "type": "hanging", "path": str(self.files),
                    "capacity": "1 GiB", "when": "commit", "timeout": "1 m",
                },
            ],
        }  # fmt: skip

    def pages(self, engine: Engine) -> int:
        """Return the number of pages."""
        return int(engine.stats()["files"]["blocks"])

    def damage(self) -> None:
        """Flip a bit in the middle of each page of the second prompt."""
        stride = align(PAGE_BYTES) + HEADER_BYTES
        [segment] = sorted(self.files.glob("*/seg-00000"))
        with segment.open("r+b") as held:
            for page in range(PAGES, 2 * PAGES):
                flip(held, page * stride + stride // 2 + 3)


class SGLangFiles:
    """SGLang's own file back end."""

    name = "SGLang's files"

    def __init__(self, folder: Path) -> None:
        self.files = folder / "hicache"
        self.settings = {"hicache_storage_backend": "file", "radix_cache_backend": None}
        self.extra = {"file_storage_path": str(self.files)}

    def pages(self, engine: Engine) -> int:
        """Return the number of pages."""
        return len(list(self.files.glob("*.bin")))

    def damage(self) -> None:
        """Flip a bit in the middle of each page of the second prompt."""
        written = sorted(self.files.glob("*.bin"), key=lambda path: path.stat().st_mtime_ns)
        for path in written[PAGES : 2 * PAGES]:
            with path.open("r+b") as held:
                flip(held, path.stat().st_size // 2 + 3)


def flip(held: Any, place: int) -> None:
    """Invert one bit of the exponent of a number."""
    held.seek(place)
    byte = held.read(1)[0]
    held.seek(place)
    held.write(bytes([byte ^ 0x40]))


class Demo:
    """The runs with one storage, and what they showed."""

    def __init__(
        self, folder: Path, models: Sequence[Path], storage: Kvladder | SGLangFiles
    ) -> None:
        self.folder = folder
        self.models = models
        self.storage = storage
        self.model = folder / "model"
        self.found: dict[str, Answer] = {}
        self.said: dict[str, Sequence[int]] = {}
        """What the answers have to be."""

    def start(self, what: str) -> Engine:
        say(f"{self.storage.name}: {what}")
        return Engine(self.folder, self.model, self.storage.extra, **self.storage.settings)

    def stored(self, engine: Engine, pages: int) -> None:
        """Wait until so many are kept."""
        until(lambda: self.storage.pages(engine) >= pages, every_s=0.1)

    def row(self, name: str, found: Answer, said: Answer) -> None:
        self.found[name], self.said[name] = found, said.ids

    def show(self) -> None:
        """Every run, in three engines."""
        shutil.copytree(self.models[0], self.model)
        engine = self.start("a cold prompt, then the same again")
        cold = engine.generate(FIRST, TOKENS)
        self.row("cold prompt", cold, cold)
        self.stored(engine, PAGES)
        self.row("pools flushed", engine.again(FIRST, TOKENS), cold)
        second = engine.generate(DAMAGED, TOKENS)
        self.stored(engine, 2 * PAGES)
        self.row("another salt", engine.again(FIRST, TOKENS, cache_salt="another"), cold)
        if isinstance(self.storage, Kvladder):
            self.hang(engine, cold)
        engine.end()
        self.storage.damage()
        engine = self.start("a new process; some stored pages are damaged")
        self.row("new process", engine.generate(FIRST, TOKENS), cold)
        self.row("flipped bits", engine.generate(DAMAGED, TOKENS), second)
        engine.end()
        shutil.rmtree(self.model)
        shutil.copytree(self.models[1], self.model)
        engine = self.start("other weights under the same path")
        other = engine.generate(FIRST, TOKENS)
        engine.do("detach")
        self.row("other weights", other, engine.again(FIRST, TOKENS))
        engine.end()

    def hang(self, engine: Engine, cold: Answer) -> None:
        """Requests go on while every call of the tier waits."""
        hangs = self.folder / "hangs"
        hangs.touch()
        engine.again(WHILE_HUNG, TOKENS)
        self.row("tier hangs", engine.generate(FIRST, TOKENS), cold)
        hangs.unlink()

    def cells(self, run: str) -> tuple[str, str]:
        """Tokens that came from the storage, and whether the answer is right."""
        if run not in self.found:
            return "-", "-"
        found = self.found[run]
        return str(found.storage), "yes" if found.ids == self.said[run] else "NO"


def say(text: str) -> None:
    print(f"{time.monotonic() - BEGUN:5.0f} s  {text}", flush=True)


BEGUN = time.monotonic()


def claims(ours: Demo) -> dict[str, bool]:
    """Return each claim about kvladder and whether it held."""
    stored = {run: found.storage for run, found in ours.found.items()}
    return {
        "every answer equals the computed one": all(
            ours.found[run].ids == ours.said[run] for run in RUNS
        ),
        "a flushed engine and a new process load the whole prompt from kvladder": (
            stored["pools flushed"] == stored["new process"] == CACHEABLE
        ),
        "no damaged page is served": stored["flipped bits"] == 0,
        "other salts and other weights share no pages": (
            stored["another salt"] == stored["other weights"] == 0
        ),
    }


def shown(storage: type[Kvladder | SGLangFiles], models: Sequence[Path]) -> Demo:
    """All of it, with one storage and two models of one shape."""
    with tempfile.TemporaryDirectory(prefix="kvladder-demo-") as place:
        folder = Path(place)
        say(f"{storage.name}: preparing the folder")
        prepare(folder)
        demo = Demo(folder, models, storage(folder))
        demo.show()
        return demo


def main() -> int:
    with (
        tempfile.TemporaryDirectory(prefix="kvladder-demo-") as place,
        ThreadPoolExecutor() as pool,
    ):
        say("making two models")
        folder = Path(place)
        models = make_two(folder)
        # side by side: most of it is the start of engines
        demos = [*pool.map(shown, (Kvladder, SGLangFiles), (models, models))]
    print(f"\n{TOKENS} prompt tokens; {CACHEABLE} of them can come from a storage\n")
    print(f"{'':16}{'kvladder':>16}{'right':>8}{SGLangFiles.name:>20}{'right':>8}")
    for run in RUNS:
        (ours, right), (theirs, theirs_right) = (demo.cells(run) for demo in demos)
        print(f"{run:16}{ours:>16}{right:>8}{theirs:>20}{theirs_right:>8}")
    print()
    found = claims(demos[0])
    for text, holds in found.items():
        print(f"{'ok  ' if holds else 'FAIL'}  {text}")
    return 0 if all(found.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
