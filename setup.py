"""The compiled kernel, and the tags of the wheel; everything else is in pyproject.toml."""

import os
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

FOLDER = Path("src/taut/backends/csrc")
# Nobody reads errno or the floating-point flags; without them, roots and choices are vectors.
FLAGS = ["-O3", "-std=gnu11", "-Wno-psabi", "-fno-math-errno", "-fno-trapping-math"]
#: "kernel": fail where it cannot be compiled. "pure": leave it out. Else it is there if it can be.
ASKED = os.environ.get("TAUT_BUILD", "")
if ASKED not in ("", "kernel", "pure"):
    raise SystemExit(f'TAUT_BUILD must be "kernel", "pure" or nothing; got {ASKED!r}.')


class Kernel(build_ext):
    """A library that ctypes loads: it uses none of Python's symbols, and serves every Python."""

    def get_ext_filename(self, fullname: str) -> str:
        if sys.platform == "win32":
            return super().get_ext_filename(fullname)
        return f"{fullname.replace('.', os.sep)}.so"

    def run(self) -> None:
        super().run()
        for older in Path("src/taut").glob("_kernel.cpython-*.so") if self.inplace else ():
            older.unlink()  # it would be found first


class Wheel(bdist_wheel):
    """For every Python 3, on one platform, or on any without the kernel."""

    def get_tag(self) -> tuple[str, str, str]:
        *_, platform = super().get_tag()
        return "py3", "none", "any" if ASKED == "pure" else platform


kernel = Extension(
    "taut._kernel",
    sources=sorted(str(file) for file in FOLDER.glob("*.c")),
    depends=sorted(str(file) for file in FOLDER.glob("*.h")),
    extra_compile_args=[] if sys.platform == "win32" else FLAGS,
    # Without a compiler that knows GCC's vectors the package installs all the same.
    optional=ASKED != "kernel",
)
setup(
    ext_modules=[] if ASKED == "pure" else [kernel],
    cmdclass={"build_ext": Kernel, "bdist_wheel": Wheel},
)
