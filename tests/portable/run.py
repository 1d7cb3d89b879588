"""The kernel by other compilers, on another architecture, and under sanitizers.

    python tests/portable/run.py compilers|cross|sanitize

Nothing is written outside a temporary folder.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).resolve().parents[2]
HERE, CSRC = ROOT / "tests/portable", ROOT / "src/taut/backends/csrc"
KERNEL_TESTS = ("tests/test_backends.py", "tests/test_backends_cpu.py", "tests/test_laws.py")
KERNEL_TESTS += ("tests/test_backends_within.py", "tests/test_layouts.py")
FLAGS = ["-std=gnu11", "-Wno-psabi", "-fno-math-errno", "-fno-trapping-math"]  # as in setup.py
STRICT = ["-Wall", "-Wextra", "-Werror"]
SANITIZERS = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-g"]
#: What else is looked for, by compiler, sanitizer and threads: races, memory never written.
OTHERS = [("gcc", "thread", 4), ("clang", "memory", 1)]
VARIANTS = ("v2", "v3", "v4")
LACKING = 77  # what the harness says of a variant that the processor cannot run
PACKAGES = {
    "gcc": "gcc",
    "clang": "clang",
    "aarch64-linux-gnu-gcc": "gcc-aarch64-linux-gnu",
    "qemu-aarch64": "qemu-user",
}


def need(*tools: str) -> None:
    missing = [PACKAGES[tool] for tool in tools if shutil.which(tool) is None]
    if missing:
        sys.exit(f"This needs what is not installed: apt-get install {' '.join(missing)}")


def call(*words: object, accept: tuple[int, ...] = (0,), **environment: str) -> None:
    """Run a command; stop where it fails."""
    done = subprocess.run([str(w) for w in words], env=os.environ | environment, cwd=ROOT)
    if done.returncode not in accept:
        sys.exit(f"failed with {done.returncode}: {' '.join(str(w) for w in words)}")


def record(folder: Path) -> Path:
    call(sys.executable, HERE / "record.py", folder / "problems")
    return folder / "problems"


def harness(folder: Path, compiler: str, *flags: str) -> Path:
    print(f"== the harness by {compiler} {' '.join(flags)}", flush=True)
    sources = [HERE / "harness.c", *sorted(CSRC.glob("*.c"))]
    given = [*FLAGS, *STRICT, *flags, f"-I{CSRC}"]
    call(compiler, *given, *sources, "-o", folder / "harness", "-lm", "-pthread")
    return folder / "harness"


def package(folder: Path, compiler: str, *flags: str) -> Path:
    """A copy of the package with a kernel of its own."""
    source = folder / compiler / "src"
    shutil.copytree(ROOT / "src", source, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source.parent)
    told = " ".join([*STRICT, *flags])
    build = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
    given = os.environ | {"CC": compiler, "CFLAGS": told, "LDFLAGS": " ".join(flags)}
    subprocess.run(build, env=given, cwd=source.parent, check=True)
    if not list(source.glob("taut/**/*.so")):  # an optional extension fails without an error
        sys.exit(f"{compiler} could not compile the kernel.")
    return source


def tests(source: Path, **environment: str) -> None:
    environment |= {"PYTHONPATH": str(source), "OMP_NUM_THREADS": "1"}
    # Without a kernel its tests are skipped, and an installed taut has another one.
    check = "from taut.backends import cpu; assert cpu.variant(); print(cpu.__file__)"
    call(sys.executable, "-c", check, **environment)
    # A sanitizer ends the process: what it says must not be captured.
    pytest = [sys.executable, "-m", "pytest", "-q", "--capture=sys", "-p", "no:cacheprovider"]
    call(*pytest, *KERNEL_TESTS, **environment)


def compilers(folder: Path) -> None:
    need("gcc", "clang")
    problems = record(folder)
    for compiler in ("gcc", "clang"):
        made = harness(folder, compiler, "-O3")
        for variant in VARIANTS:
            call(made, problems, variant, accept=(0, LACKING))
    for compiler in ("gcc", "clang"):
        print(f"== the tests of the kernel by {compiler}", flush=True)
        tests(package(folder, compiler))


def cross(folder: Path) -> None:
    need("aarch64-linux-gnu-gcc", "qemu-aarch64")
    problems = record(folder)
    made = harness(folder, "aarch64-linux-gnu-gcc", "-O3", "-static")
    call("qemu-aarch64", made, problems, "v2")


def sanitize(folder: Path) -> None:
    need("gcc", "clang")
    problems = record(folder)
    made = harness(folder, "gcc", "-O1", *SANITIZERS)
    for variant in VARIANTS:
        call(made, problems, variant, "4", accept=(0, LACKING))
    for compiler, sanitizer, threads in OTHERS:
        made = harness(folder, compiler, "-O1", f"-fsanitize={sanitizer}", "-g")
        call(made, problems, "v2", threads)
    print("== the tests of the kernel, sanitized", flush=True)
    # Python itself is not sanitized, so the library comes first, and libstdc++ for torch with it.
    first = [
        subprocess.check_output(["gcc", f"-print-file-name={name}"], text=True).strip()
        for name in ("libasan.so", "libstdc++.so")
    ]
    # Python leaves memory to the end of the process; 99 is no exit code of pytest's.
    options = "detect_leaks=0:exitcode=99"
    source = package(folder, "gcc", *SANITIZERS)
    tests(source, LD_PRELOAD=" ".join(first), ASAN_OPTIONS=options, UBSAN_OPTIONS="exitcode=99")


if __name__ == "__main__":
    tasks = {task.__name__: task for task in (compilers, cross, sanitize)}
    if len(sys.argv) != 2 or sys.argv[1] not in tasks:
        sys.exit(f"run.py {'|'.join(tasks)}")
    with TemporaryDirectory() as temporary:
        tasks[sys.argv[1]](Path(temporary))
