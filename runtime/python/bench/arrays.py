"""Times `rcomm`'s own operations on numpy arrays: the cost of a call with one rank, and `all_reduce` between ranks.

With two ranks, also a message there and back.

    python bench/arrays.py                   # one rank: the cost of a call
    python bench/arrays.py --ranks 2 --sizes 8 65536 16777216

Prints the minimum and the median over blocks of calls, in microseconds a call; of each block, the slowest rank's.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import socket
import statistics
import time

import numpy as np

import rcomm


def block(call, repeat: int) -> float:
    """Microseconds for each of `repeat` calls."""
    start = time.perf_counter()
    for _ in range(repeat):
        call()
    return (time.perf_counter() - start) / repeat * 1e6


def there_and_back(group: rcomm.Group, x: np.ndarray) -> None:
    if group.rank == 0:
        group.send(x, 1)
        group.recv(x, 1)
    else:
        group.recv(x, 0)
        group.send(x, 0)


def rank_main(rank: int, options: argparse.Namespace, address: str | None, results) -> None:
    with rcomm.init(rank=rank, size=options.ranks, address=address, job=f"bench-{os.getppid()}") as world:
        group = world.group
        for size in options.sizes:
            x = np.ones(max(1, size // 4), np.float32)
            # Fewer calls of larger sizes, so that all blocks take about the same time.
            repeat = max(1, min(200, 2**24 // max(size, 1)))
            calls = {
                "blocking": lambda x=x: group.all_reduce(x, "max"),
                "wait=False": lambda x=x: group.all_reduce(x, "max", wait=False).wait(),
            }
            if options.ranks == 2:
                calls["there, back"] = lambda x=x: there_and_back(group, x)
            for name, call in calls.items():
                group.barrier()
                block(call, repeat)
                block_times = np.array([block(call, repeat) for _ in range(options.blocks)])
                group.all_reduce(block_times, "max")
                if rank == 0:
                    results.put((size, name, min(block_times), statistics.median(block_times)))
    if rank == 0:
        results.put(None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--sizes", type=int, nargs="+", default=[16])
    parser.add_argument("--blocks", type=int, default=100)
    options = parser.parse_args()
    address = None
    if options.ranks > 1:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{probe.getsockname()[1]}"
    context = multiprocessing.get_context("spawn")
    results = context.SimpleQueue()
    ranks = [
        context.Process(target=rank_main, args=(rank, options, address, results)) for rank in range(options.ranks)
    ]
    for process in ranks:
        process.start()
    print(f"{options.ranks} ranks, load {os.getloadavg()[0]:.1f}; microseconds")
    print(f"{'bytes':>10} {'':<11} {'min':>10} {'median':>10}")
    while (row := results.get()) is not None:
        size, name, least, median = row
        print(f"{size:>10} {name:<11} {least:>10.2f} {median:>10.2f}", flush=True)
    for process in ranks:
        process.join()


if __name__ == "__main__":
    main()
