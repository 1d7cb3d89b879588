"""The compiled kernel; everything else is in pyproject.toml."""

import sys
from pathlib import Path

from setuptools import Extension, setup

FOLDER = Path("src/taut/backends/csrc")
# Nobody reads errno or the floating-point flags; without them, roots and choices are vectors.
FLAGS = ["-O3", "-std=gnu11", "-Wno-psabi", "-fno-math-errno", "-fno-trapping-math"]
kernel = Extension(
    "taut._kernel",
    sources=sorted(str(file) for file in FOLDER.glob("*.c")),
    depends=sorted(str(file) for file in FOLDER.glob("*.h")),
    extra_compile_args=[] if sys.platform == "win32" else FLAGS,
    optional=True,  # without a compiler that knows GCC's vectors the package installs all the same
)
setup(ext_modules=[kernel])
