"""Runs PyTorch's own tests of distributed backends on the backend "rcomm" and on gloo.

    python runtime/python/bench/suite.py [--start fork,spawn] [--tests REGEX]

The tests come from the installed PyTorch and are listed in suite.txt; they need the package expecttest. The ranks of a
test are forked, or start as fresh processes (spawn). Prints how many tests passed on each backend, and each one that
did not, with its reason. Ends with 1 if a test did not pass on rcomm; gloo has no all_to_all of lists, and fails those.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import time

from collectives import BACKENDS

FOLDER = pathlib.Path(__file__).parent
# Seconds for one test, after which the suite ends its ranks.
TIME_LIMIT = 180


def listed(pattern: str) -> list[tuple[int, str, str]]:
    """The listed tests that match: number of ranks, backend that the test is for, name."""
    lines = (line.split() for line in (FOLDER / "suite.txt").read_text().splitlines() if not line.startswith("#"))
    return [(int(ranks), meant, name) for ranks, meant, name in lines if re.search(pattern, name)]


def run(backend: str, start: str, ranks: int, meant: str, names: list[str]) -> dict[str, str]:
    """Runs tests one after another; returns why each that did not pass did not."""
    with tempfile.TemporaryDirectory(prefix="suite-") as place:
        results = pathlib.Path(place) / "results"
        environment = {
            **os.environ,
            "BACKEND": backend,
            "SUITE_MEANT": meant,
            "SUITE_START": start,
            "SUITE_RESULTS": str(results),
            "WORLD_SIZE": str(ranks),
            "TEMP_DIR": place,
            "INIT_METHOD": f"file://{place}/shared_init_file",
            "DISTRIBUTED_TESTS_DEFAULT_TIMEOUT": str(TIME_LIMIT),
            "OMP_NUM_THREADS": "1",
        }
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
        for folder in ("barrier", "test_dir", "init_dir"):
            (pathlib.Path(place) / folder).mkdir()
        results.touch()
        log = pathlib.Path(place) / "log"
        command = [sys.executable, FOLDER / "suite_tests.py", *names]
        limit = TIME_LIMIT * (len(names) + 1)
        with log.open("w") as file:
            try:
                done = subprocess.run(command, env=environment, stdout=file, stderr=file, timeout=limit, check=False)
                ended = f"the tests ended with {done.returncode}"
            except subprocess.TimeoutExpired:
                ended = f"no end after {limit} s"
        reasons = dict(json.loads(line) for line in results.read_text().splitlines())
        if len(reasons) < len(names):
            print(log.read_text(errors="replace")[-4000:], file=sys.stderr)
    return {name: reason for name in names if (reason := reasons.get(name, ended))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--start", default="fork,spawn", help="how ranks start: fork, spawn or both")
    parser.add_argument("--tests", default="", metavar="REGEX", help="only tests whose name matches")
    args = parser.parse_args()
    tests = listed(args.tests)
    if not tests:
        parser.error(f"no listed test matches {args.tests!r}")
    failed = False
    print(f"load {os.getloadavg()[0]:.1f}\nstart  ranks suite of   tests" + "".join(f"{name:>8}" for name in BACKENDS))
    for start in args.start.split(","):
        for (ranks, meant), group in itertools.groupby(tests, key=lambda test: test[:2]):
            names = [name for _, _, name in group]
            began = time.monotonic()
            reasons = {backend: run(backend, start, ranks, meant, names) for backend in BACKENDS}
            counts = "".join(f"{len(names) - len(reasons[backend]):8}" for backend in BACKENDS)
            took = f"{time.monotonic() - began:.0f} s"
            print(f"{start:6} {ranks:5} {meant:8} {len(names):6}{counts}   {took}", flush=True)
            for backend in BACKENDS:
                for name, reason in reasons[backend].items():
                    print(f"    {backend}: {name}: {reason}", flush=True)
            failed = failed or bool(reasons["rcomm"])
    print(f"load at the end {os.getloadavg()[0]:.1f}")
    sys.exit(failed)


if __name__ == "__main__":
    main()
