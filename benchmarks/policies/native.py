"""The level of ``level.py`` with the adaptive policy in C: the same calls, compiled on demand.

A trace at one size takes less than a second, where the calls from Python take half a minute.
"""

from __future__ import annotations

import subprocess
import sysconfig
from array import array
from collections.abc import Sequence
from functools import cache
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.policies.traces import Prompt
from kvladder.keys import BlockKey
from kvladder.policy.eviction import PRIORITY_DEFAULT

SOURCE = Path(__file__).with_name("_level.c")
FLAGS = ("-O2", "-shared", "-fPIC", "-ffp-contract=off")
"""As the package is built, so that both add numbers in the same order."""


@cache
def _module() -> Any:
    with TemporaryDirectory(prefix="kvladder-level-") as folder:
        target = Path(folder) / "_level.so"
        include = f"-I{sysconfig.get_path('include')}"
        command = ["gcc", *FLAGS, include, str(SOURCE), "-o", str(target), "-lm"]
        subprocess.run(command, check=True)
        spec = spec_from_file_location("_level", target)
        assert spec is not None
        assert spec.loader is not None
        module = module_from_spec(spec)
        spec.loader.exec_module(module)
        return module


class NativeLevel:
    """Serves prompts block by block from so many places, as ``Level`` does with ``whole=False``."""

    def __init__(self, size: int, keys: Sequence[BlockKey]) -> None:
        self.keys = keys
        self._level = _module().Level(size, keys)

    @property
    def rule(self) -> int:
        """Number of the rule that orders the blocks now."""
        return int(self._level.rule())

    def keep(self, rule: int) -> None:
        """Order by one rule from now on, whatever the shadows say."""
        self._level.keep(rule)

    def request(
        self,
        prompt: Prompt,
        *,
        whole: bool = False,
        in_session: bool = False,
        priority: int = PRIORITY_DEFAULT,
    ) -> int:
        """Serve a prompt; return how many leading blocks were there."""
        assert not whole, "block by block alone"
        return int(self._level.request(array("i", prompt), in_session, priority))

    def rank(self, blocks: Sequence[int], priority: int) -> None:
        """Change the priority of those that are held, the tail first."""
        self._level.rank(array("i", blocks), priority)
