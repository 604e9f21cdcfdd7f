"""Stands in for torchvision, which has no build for a CPU's torch of any version.

vLLM and Transformers import names from it for models that read pictures. Every name exists, and
every call raises. Pillow processes the pictures, see ``pictures.py``.
"""

import enum
import importlib.abc
import importlib.machinery
import sys
import types
from typing import Any

__version__ = "0.28.0"


class Mode(enum.Enum):
    """The ways to resize pictures."""

    NEAREST = "nearest"
    NEAREST_EXACT = "nearest-exact"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    LANCZOS = "lanczos"
    BOX = "box"
    HAMMING = "hamming"


class Stub(types.ModuleType):
    """A module in which every name is a class, if it begins with a capital, or a function."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        found: Any
        if name == "InterpolationMode":
            found = Mode
        elif name[0].isupper():
            found = type(name, (), {"__getattr__": lambda self, key: key})
        else:
            found = self._raise
        setattr(self, name, found)
        return found

    def _raise(self, *args: Any, **kwargs: Any) -> None:
        raise RuntimeError(f"{self.__name__} is not there")


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Makes a stub of every module below this one."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        if fullname.startswith("torchvision."):
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> types.ModuleType:
        module = Stub(spec.name)
        module.__path__ = []
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        """There is nothing in it."""


sys.meta_path.append(Finder())
