"""Make docs/pictures/top.svg, a picture of ``kvladder top``: ``python .ci/top.py``.

A cache with files, and with a Redis that is not there, serves random prompts for some seconds; rich
draws what ``kvladder top`` would show then. The numbers differ at each run, so no test compares the
picture.
"""

from __future__ import annotations

import io
import random
import re
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.console import Console
from rich.terminal_theme import MONOKAI

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # not an installed kvladder
from kvladder import KeyScheme, Layout, open_cache
from kvladder.cli.running.caches import RunningCache
from kvladder.cli.running.glance import Glance, Watch
from kvladder.cli.running.top import drawn_of

PICTURE = Path(__file__).resolve().parents[1] / "docs" / "pictures" / "top.svg"
WIDTH = 84
SECONDS = 12.0
BLOCK_BYTES = 256 << 10


def serve(folder: Path) -> Glance:
    """Save and fetch prompts of a skewed choice; return the last glance."""
    where, watch = RunningCache(str(folder / "kv.sock")), Watch("/run/kvladder.sock")
    stack = {
        "arena": {"size": "32 MiB"},
        "control": where.name,
        "shadow": True,
        "tiers": [
            {"type": "host"},
            {
                "type": "files", "name": "nvme", "path": str(folder / "kv"),
                "capacity": "256 MiB", "when": "commit",
            },
            {"type": "redis", "name": "shared", "url": "redis://127.0.0.1:1", "capacity": "1 GiB"},
        ],
    }  # fmt: skip
    layout = Layout(block_tokens=16, block_bytes=BLOCK_BYTES, fields={"model": "demo"})
    draw, until_s, seen_s = random.Random(7), time.monotonic() + SECONDS, 0.0
    with open_cache(stack, layout=layout) as cache:
        scheme = KeyScheme(cache.namespace, block_tokens=16)
        found = watch.look(where.status())
        while time.monotonic() < until_s:
            prompt = int(draw.paretovariate(0.6)) % 90
            keys = scheme.chain(range(prompt * 1000, prompt * 1000 + 16 * 12))
            fetch = cache.fetch(keys)
            while not fetch.done:
                time.sleep(0.001)
            fetch.release()
            cache.save(keys).commit()
            time.sleep(0.01)
            if time.monotonic() - seen_s > 0.5:
                seen_s = time.monotonic()
                found = watch.look(where.status())
    return found


def main() -> int:
    """Write the picture."""
    with TemporaryDirectory() as name:
        found = serve(Path(name))
    console = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True)
    console.print(*drawn_of([found], WIDTH))
    drawn = console.export_svg(title="kvladder top stack.yaml", theme=MONOKAI)
    drawn = re.sub(r"<!--.*?-->\s*", "", drawn)
    fonts = re.compile(r"@font-face \{.*?\}\s*", re.DOTALL)  # the site loads nothing from elsewhere
    drawn = fonts.sub("", drawn).replace("Fira Code", "ui-monospace")
    PICTURE.write_text("\n".join(line.rstrip() for line in drawn.splitlines()) + "\n", "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
