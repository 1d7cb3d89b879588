"""The fast tests as other processors would run them: `make portable`.

Which code a BLAS, torch and the kernel run is chosen by the processor, and can be chosen by
environment variables. A promise that holds in all of these holds by construction, not by luck.
"""

import argparse
import os
import subprocess
import sys
import time

VARIANTS = ("v2", "v3", "v4")
MACHINES: dict[str, dict[str, str]] = {
    "this one": {},
    "another one": {"MKL_CBWR": "COMPATIBLE", "ATEN_CPU_CAPABILITY": "avx2", "TAUT_KERNEL": "0"},
    **{f"MKL_CBWR={x}": {"MKL_CBWR": x} for x in ("COMPATIBLE", "AVX2", "AVX512")},
    **{f"ATEN_CPU_CAPABILITY={x}": {"ATEN_CPU_CAPABILITY": x} for x in ("default", "avx2")},
    **{f"TAUT_KERNEL={x}": {"TAUT_KERNEL": x} for x in (*VARIANTS, "0")},
    # More threads than cores must sleep while they wait, or a test of a second takes minutes.
    **{
        f"{x} threads": {
            "TAUT_TEST_THREADS": x,
            "OMP_NUM_THREADS": x,
            "OMP_WAIT_POLICY": "passive",
        }
        for x in ("2", "4")
    },
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", help="machines whose name contains this")
    parser.add_argument("tests", nargs="*", help="passed on to pytest, after --")
    options = parser.parse_args()
    os.environ.pop("TAUT_KERNEL", None)
    from taut.backends.cpu import variant  # what the processor can run, not what was forced

    failed, newest = [], variant()
    if options.only and not any(options.only in name for name in MACHINES):
        parser.error(f"no machine has {options.only!r} in its name; known: {', '.join(MACHINES)}")
    for name, changes in MACHINES.items():
        if options.only and options.only not in name:
            continue
        wanted = changes.get("TAUT_KERNEL", "0")
        if wanted in VARIANTS and (newest is None or wanted > newest):
            print(f"== {name}: skipped, this processor or build has {newest or 'no kernel'}")
            continue
        print(f"== {name}", flush=True)
        start = time.monotonic()
        environment = {**os.environ, "OMP_NUM_THREADS": "1", **changes}
        command = [sys.executable, "-m", "pytest", "-q", *options.tests]
        code = subprocess.run(command, env=environment).returncode
        print(f"== {name}: {'failed' if code else 'passed'}, {time.monotonic() - start:.0f} s")
        failed += [name] if code else []
    print(f"== {len(failed)} failed" + "".join(f"\n   {name}" for name in failed))
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
