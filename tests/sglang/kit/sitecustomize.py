"""Runs in each process of an engine: provides modules that SGLang imports and does not use.

There is no wheel of torchvision for this torch; IPython is for notebooks, soundfile for sound. A
caller that only looks for a module (transformers, by ``importlib.util.find_spec``) finds none.
"""

import importlib.abc
import importlib.machinery
import sys
import types

ABSENT = {"torchvision", "IPython", "soundfile"}
FRAMES = 6
"""How many frames up the importing module is searched: import's own frames lie between."""


class Inert(types.ModuleType):
    """A module with members that raise when they are called."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)

        def missing(*args, **kwargs):
            raise RuntimeError(f"{self.__name__}.{name} was called: it is a stand-in")

        return missing


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds them for ``import``."""

    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] not in ABSENT:
            return None
        frame: types.FrameType | None = sys._getframe(1)
        for _ in range(FRAMES):
            if frame is None:
                break
            if frame.f_code.co_filename == "<frozen importlib.util>":
                return None
            frame = frame.f_back
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec):
        return Inert(spec.name)

    def exec_module(self, module):
        module.__path__ = []


sys.meta_path.append(Finder())
