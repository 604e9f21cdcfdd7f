"""What is compiled where there is a compiler; everything else is in pyproject.toml."""

from setuptools import Extension, setup

setup(ext_modules=[Extension("kvladder.gpu.tree._columns", ["gpu/tree/_columns.c"], optional=True)])
