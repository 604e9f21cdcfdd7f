"""All fuzz targets, by name."""

from __future__ import annotations

from collections.abc import Mapping

from tests.fuzz import control, nixl, ranks, settings, stored, wires
from tests.fuzz.target import Target

TARGETS: Mapping[str, Target] = {
    **settings.TARGETS,
    **stored.TARGETS,
    **wires.TARGETS,
    **nixl.TARGETS,
    **control.TARGETS,
    **ranks.TARGETS,
}


def close() -> None:
    """Close what inputs of a target share, such as a loop."""
    wires.close()
    nixl.close()
    control.close()
    ranks.close()
