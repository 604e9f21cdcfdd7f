"""Plants faults: text in a function's source is replaced, so that a test can look for it."""

from __future__ import annotations
import __future__

import inspect
import sys
import textwrap
from typing import Any, NamedTuple

import pytest


class Fault(NamedTuple):
    """A fault: the function that it is in, and the text that it replaces."""

    owner: Any
    """The function's class or module."""
    name: str
    old: str
    new: str


def plant(fault: Fault, patch: pytest.MonkeyPatch) -> None:
    """Put a fault into a function; the text that it replaces must be there once."""
    function = getattr(fault.owner, fault.name)
    source = textwrap.dedent(inspect.getsource(function))
    assert source.count(fault.old) == 1, f"{fault.name}: {fault.old!r} is not there once"
    code = compile(
        source.replace(fault.old, fault.new),
        f"<fault in {fault.name}>",
        "exec",
        flags=__future__.annotations.compiler_flag,
        dont_inherit=True,
    )
    made: dict[str, Any] = {}
    exec(code, vars(sys.modules[function.__module__]), made)
    patch.setattr(fault.owner, fault.name, made[fault.name])
