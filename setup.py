"""The compiled kernel; everything else is in pyproject.toml."""

import sys

from setuptools import Extension, setup

# Without a compiler that knows GCC's vectors the package installs all the same: `optional`.
flags = [] if sys.platform == "win32" else ["-O3", "-std=gnu11", "-Wno-psabi"]
sources = {"sources": ["src/taut/csrc/kernel.c"], "depends": ["src/taut/csrc"]}
setup(ext_modules=[Extension("taut._kernel", extra_compile_args=flags, optional=True, **sources)])
