"""Stands in for ``sgl_kernel``, which the package index has for CUDA alone.

On a CPU without AMX none of its operations is called: imports must work, and calls raise.
"""


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*args, **kwargs):
        raise RuntimeError(f"sgl_kernel.{name} was called: there is no build of it for CPUs")

    return missing
