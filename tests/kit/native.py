"""Builds the package's C modules for a test, with every warning an error."""

from __future__ import annotations

import importlib.util
import subprocess
import sysconfig
from pathlib import Path
from types import ModuleType

import pytest

FLAGS = ["-O1", "-Wall", "-Wextra", "-Wno-unused-parameter", "-Wno-cast-function-type", "-Werror"]


def built(source: Path, folder: Path, *flags: str) -> ModuleType:
    """Return the module of ``source``, built into ``folder``; skip the test without a compiler."""
    compiler = (sysconfig.get_config_var("CC") or "cc").split()
    include = sysconfig.get_path("include")
    if not source.exists() or not Path(include, "Python.h").exists():
        pytest.skip("the source or Python's headers are not here")
    target = folder / f"{source.stem}.so"
    command = [*compiler, "-shared", "-fPIC", *FLAGS, *flags, f"-I{include}", source, "-o", target]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip("no C compiler")
    assert done.returncode == 0, done.stderr
    spec = importlib.util.spec_from_file_location(source.stem, target)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
