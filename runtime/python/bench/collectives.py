"""Times all_reduce through torch.distributed on the backend "rcomm" and on gloo, in turn, in the same processes.

    python runtime/python/bench/collectives.py [--ranks 1,2,4] [--most BYTES] [--rounds N] [--busy N] [--bind] [--json FILE]

For each number of ranks and size, a round times some calls on gloo and then as many on rcomm. A line shows the minimum
and the median over the rounds in microseconds a call, as rank 0 measured them, and the ratios of the medians and of
the minimums (over 1: rcomm is faster). The load of the machine is printed before and after: on busy cores the ratios
are more reliable than the times. With `--busy`, that many further processes compute without pause. With `--bind`, each
rank runs on one processor only: ranks that wake each other may else share one while others are in use.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import multiprocessing
import os
import socket
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist

SIZES = [8, 1 << 10, 64 << 10, 1 << 20, 16 << 20, 64 << 20]
BACKENDS = ("gloo", "rcomm")
# How many seconds all rounds of one measurement should take together, for each backend.
SECONDS_PER_MEASUREMENT = 1.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def blocking(x: torch.Tensor, group: dist.ProcessGroup) -> None:
    dist.all_reduce(x, group=group)


def issued(x: torch.Tensor, group: dist.ProcessGroup) -> None:
    dist.all_reduce(x, group=group, async_op=True).wait()


def seconds(call: Callable[[], None], times: int) -> float:
    start = time.perf_counter()
    for _ in range(times):
        call()
    return (time.perf_counter() - start) / times


def measure(groups: dict, x: torch.Tensor, call: Callable, rounds: int) -> dict[str, list[float]]:
    """Seconds a call, by backend and round."""
    # All ranks must make the same number of calls: the slowest decides.
    longest = torch.tensor([max(seconds(lambda: call(x, group), 3) for group in groups.values())])
    dist.all_reduce(longest, dist.ReduceOp.MAX)
    calls = min(1000, max(1, int(SECONDS_PER_MEASUREMENT / rounds / longest.item())))
    measured: dict[str, list[float]] = {name: [] for name in groups}
    for _ in range(rounds):
        for name, group in groups.items():
            x.zero_()
            dist.barrier(group)
            measured[name].append(seconds(lambda: call(x, group), calls))
    return measured


def rank_main(rank: int, ranks: int, port: int, args: argparse.Namespace, out: int) -> None:
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if args.bind:
        processors = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {processors[rank % len(processors)]})
    init_method = f"tcp://127.0.0.1:{port}"
    limit = datetime.timedelta(minutes=10)
    dist.init_process_group("rcomm", init_method=init_method, rank=rank, world_size=ranks, timeout=limit)
    groups = {"gloo": dist.new_group(backend="gloo"), "rcomm": dist.group.WORLD}
    rows = []
    for size in SIZES:
        if size > args.most or (ranks == 1 and size > 8):
            continue
        x = torch.zeros(size // 4)
        for call in (blocking, issued):
            measured = measure(groups, x, call, args.rounds)
            row = {"ranks": ranks, "bytes": size, "call": call.__name__}
            for name in BACKENDS:
                row[name] = [1e6 * value for value in measured[name]]
            rows.append(row)
            if rank == 0:
                print(line(row), flush=True)
    if rank == 0:
        os.write(out, json.dumps(rows).encode() + b"\n")
    dist.destroy_process_group()


def line(row: dict) -> str:
    best = [min(row[name]) for name in BACKENDS]
    median = [statistics.median(row[name]) for name in BACKENDS]
    times = "".join(f"{fastest:12.1f} {middle:12.1f}" for fastest, middle in zip(best, median))
    ratio = median[0] / median[1]
    return f"{row['ranks']:5} {row['bytes']:10} {row['call']:9}{times} {ratio:8.2f} {best[0] / best[1]:8.2f}"


def run_ranks(ranks: int, main_of: Callable[[int], None]) -> list[int]:
    """Runs each rank in a forked process, and returns their exit codes."""
    sys.stdout.flush()
    pids = []
    for rank in range(ranks):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                main_of(rank)
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                os._exit(code)
        pids.append(pid)
    return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]


def compute() -> None:
    while True:
        pass


@contextlib.contextmanager
def busy_processes(count: int) -> Iterator[None]:
    """Lets this many processes compute meanwhile."""
    processes = [multiprocessing.Process(target=compute, daemon=True) for _ in range(count)]
    for process in processes:
        process.start()
    try:
        yield
    finally:
        for process in processes:
            process.kill()


def run(ranks: int, args: argparse.Namespace) -> list[dict]:
    port = free_port()
    with tempfile.TemporaryFile() as results:
        with busy_processes(args.busy):
            codes = run_ranks(ranks, lambda rank: rank_main(rank, ranks, port, args, results.fileno()))
        if any(codes):
            sys.exit(f"ranks ended with {codes}")
        results.seek(0)
        return json.load(results)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--ranks", default="1,2,4", help="numbers of ranks, separated by commas")
    parser.add_argument("--most", type=int, default=SIZES[-1], help="the largest size in bytes")
    parser.add_argument("--rounds", type=int, default=9, help="rounds of each measurement")
    parser.add_argument("--busy", type=int, default=0, help="further processes, which compute meanwhile")
    parser.add_argument("--bind", action="store_true", help="bind each rank to a processor")
    parser.add_argument("--json", help="the file to which the times of all rounds are written")
    args = parser.parse_args()
    print(f"torch {torch.__version__}, {os.cpu_count()} cores, {args.busy} busy processes, load {os.getloadavg()[0]:.1f}")
    print("ranks      bytes call         gloo best       median   rcomm best       median   median     best")
    rows = [row for ranks in args.ranks.split(",") for row in run(int(ranks), args)]
    print(f"load at the end {os.getloadavg()[0]:.1f}")
    if args.json:
        with open(args.json, "w") as file:
            json.dump(rows, file)


if __name__ == "__main__":
    main()
