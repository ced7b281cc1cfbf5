"""Measures the backend "rcomm" beside gloo in one go: everything that this folder has for it.

    python runtime/python/bench/backend.py [--rounds N]

The cost of a call, collectives on free and on shared cores, training steps of a smaller and a larger model, what
PyTorch builds on groups, and PyTorch's own tests of backends (suite.py), which take most of the time. Ends with 1 if a
part fails: if losses or results on the two backends differ in one bit, among other reasons.
"""

from __future__ import annotations

import argparse
import pathlib
import subprocess
import sys

PARTS = [
    ["arrays.py"],
    ["collectives.py", "--ranks", "1,2,4"],
    ["collectives.py", "--ranks", "2,4", "--busy", "2"],
    ["training.py"],
    ["training.py", "--width", "2048"],
    ["parallel.py"],
    ["suite.py"],
]
# These repeat nothing.
ONCE = ("arrays.py", "suite.py")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=9, help="rounds of each measurement")
    args = parser.parse_args()
    folder = pathlib.Path(__file__).parent
    failed = []
    for part in PARTS:
        print(f"\n# {' '.join(part)}", flush=True)
        rounds = [] if part[0] in ONCE else ["--rounds", str(args.rounds)]
        if subprocess.run([sys.executable, folder / part[0], *part[1:], *rounds], check=False).returncode:
            failed.append(" ".join(part))
    if failed:
        sys.exit(f"failed: {'; '.join(failed)}")


if __name__ == "__main__":
    main()
