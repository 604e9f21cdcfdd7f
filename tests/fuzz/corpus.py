"""The inputs that are kept for each fuzz target: in files, beside the seeds of the target."""

from __future__ import annotations

from tests.kit.source import ROOT

CORPUS = ROOT / "tests" / "fuzz" / "corpus"
KEPT_BYTES_MAX = 60 << 10
"""Most bytes of the files of one target."""


def kept(name: str) -> list[bytes]:
    """Return the seeds of a target, and the inputs that are kept for it."""
    from tests.fuzz.targets import TARGETS  # not before libFuzzer follows imports

    files = sorted((CORPUS / name).glob("*"))
    return [*TARGETS[name].seeds(), *(path.read_bytes() for path in files)]
