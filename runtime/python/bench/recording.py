"""Measures what recording costs a job: one all_reduce of four floats on gloo with one rank, in microseconds.

    python bench/recording.py [--rounds 5] [--processor]

Each row is measured in separate processes; rounds alternate between the rows, so that load affects all of them. A row
shows the minimum and the median over all blocks of 200 calls, and the difference of the minimum from the first row's.
--processor measures the time for which the calling thread had a processor, which load disturbs less. Build the hooks in
C++ first (`python -m rcomm build-hooks`); without them their row is left out with a message.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import subprocess
import sys
import tempfile

_RANK = """
import sys, time, torch, torch.distributed as dist
dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
x = torch.zeros(4)
clock = getattr(time, sys.argv[1])
for block in range(101):
    start = clock()
    for _ in range(200):
        dist.all_reduce(x)
    if block:
        print((clock() - start) / 200 * 1e6)
dist.destroy_process_group()
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--processor", action="store_true")
    options = parser.parse_args()
    rounds, clock = options.rounds, "thread_time" if options.processor else "perf_counter"
    from rcomm import _cpp

    rows = {
        "plain": {"RCOMM_RECORD": "0"},
        "plain, PyTorch's own recorder off": {"RCOMM_RECORD": "0", "TORCH_FR_BUFFER_SIZE": "0"},
        "recorded, hooks in Python": {"RCOMM_RECORD": "1", "XDG_CACHE_HOME": "/nonexistent"},
        "recorded, hooks in C++": {"RCOMM_RECORD": "1"},
    }
    if _cpp.find() is None:
        print("left out: hooks in C++ (build them with `python -m rcomm build-hooks`)")
        del rows["recorded, hooks in C++"]
    took: dict[str, list[float]] = {name: [] for name in rows}
    with tempfile.TemporaryDirectory(dir="/dev/shm") as rings:
        for _ in range(rounds):
            for name, settings in rows.items():
                environment = {**os.environ, **settings, "RCOMM_RING_DIR": rings, "RCOMM_JOB": "bench"}
                command = [sys.executable, "-c", _RANK, clock]
                done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
                # Older versions of gloo print a line of their own.
                took[name] += map(float, re.findall(r"^[\d.]+$", done.stdout, re.MULTILINE))
    plain = min(took["plain"])
    print(f"{'':36}{'min':>8}{'median':>8}{'min - plain':>15}   load {os.getloadavg()[0]:.1f}")
    for name, times in took.items():
        fastest = min(times)
        print(f"{name:36}{fastest:8.2f}{statistics.median(times):8.2f}{fastest - plain:15.2f}")


if __name__ == "__main__":
    main()
