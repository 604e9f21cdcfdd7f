"""The process that fuzzes one target: ``python -m tests.fuzz.child TARGET FOLDER OPTION...``.

It goes on after an input failed, and writes the first input of each kind of failure to FOLDER,
with the traceback beside it. OPTIONs are those of libFuzzer.
"""

from __future__ import annotations

import hashlib
import sys
import traceback
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["kvladder"]):
    from tests.fuzz.target import TooLong, at_most
    from tests.fuzz.targets import TARGETS

LIMIT_S = 5
"""Processor time that an input may take."""
KINDS_MAX = 20
"""Most kinds of failures after which it ends."""


def main() -> None:
    """Fuzz until an option ends it."""
    name, folder = sys.argv.pop(1), Path(sys.argv.pop(1))
    target, kinds = TARGETS[name], set[str]()

    def one(data: bytes) -> None:
        try:
            with at_most(LIMIT_S):
                target.run(data)
        except BaseException as error:
            last = traceback.extract_tb(error.__traceback__)[-1]
            kind = f"{type(error).__name__} {last.filename}:{last.lineno}"
            if kind not in kinds:
                kinds.add(kind)
                path = folder / hashlib.sha256(data).hexdigest()[:16]
                path.write_bytes(data)
                path.with_suffix(".txt").write_text("".join(traceback.format_exception(error)))
            if not isinstance(error, Exception | TooLong) or len(kinds) > KINDS_MAX:
                raise

    atheris.Setup(sys.argv, one)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
