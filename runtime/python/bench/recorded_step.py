"""Measures what recording costs a training step: DDP on gloo, with and without hooks, in the same processes.

    python bench/recorded_step.py [--ranks 2] [--rounds 100] [--steps 2] [--width 1024] [--python]

A round is four short runs of training steps: with the hooks on the group, twice without, and with them; in the next
round the other way round. So what changes slowly, such as load, affects both halves of a round alike. One line is on the
time of the steps, another on the processor time of all ranks, which load affects less. Each shows the medians over the
rounds of both halves and of the rounds' ratios, the quartiles of the ratios, and the interval that holds their median
with 95 % confidence (by bootstrap). An interval that lies below +1 % shows that recording costs less than that. The
third line is what the recorder's own thread used, as the kernel counts it.

The hooks are those in C++ if they were built (`python -m rcomm build-hooks`); --python chooses those in Python.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any


def train(options: argparse.Namespace) -> None:
    import torch
    import torch.distributed as dist

    from rcomm import torch as recording

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(1)
    layers: list[torch.nn.Module] = []
    for _ in range(10):
        layers += [torch.nn.Linear(options.width, options.width), torch.nn.Tanh()]
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(*layers), bucket_cap_mb=4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    pg = dist.distributed_c10d._get_default_group()
    recorder = recording._recorder
    assert recorder is not None

    def switch(on: bool) -> None:
        if on:
            recorder.attach(pg, list(range(dist.get_world_size())))
        else:
            pg.unregister_pre_hook(recording._HOOK_ID)
            pg.unregister_post_hook(recording._HOOK_ID)

    def steps() -> tuple[float, float]:
        """Milliseconds a step, and of the processor time of this process."""
        dist.barrier()
        start, used = time.perf_counter(), time.process_time()
        for _ in range(options.steps):
            optimizer.zero_grad()
            model(torch.randn(4, options.width)).square().mean().backward()
            optimizer.step()
        took, used = time.perf_counter() - start, time.process_time() - used
        return took / options.steps * 1e3, used / options.steps * 1e3

    steps()
    round_ms: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
    attached, watched = True, _watcher_ms(recorder)
    for number in range(options.rounds):
        halves: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
        first = number % 2 == 0
        for on in (first, not first, not first, first):
            if on != attached:
                switch(on)
                attached = on
            halves[on].append(steps())
        for on, (before, after) in halves.items():
            round_ms[on].append(((before[0] + after[0]) / 2, (before[1] + after[1]) / 2))
    if not attached:
        switch(True)
    watched = (_watcher_ms(recorder) - watched) / (2 * options.rounds * options.steps)
    # Rank 0's times, and the processor times of all ranks.
    plain, recorded = torch.tensor(round_ms[False]), torch.tensor(round_ms[True])
    for times in (plain, recorded):
        used = times[:, 1].clone()
        dist.all_reduce(used)
        times[:, 1] = used
    watchers = torch.tensor(watched)
    dist.all_reduce(watchers)
    if rank == 0:
        kind = "C++" if recorder.native is not None else "Python"
        print(f"hooks in {kind}, {options.rounds} rounds, load {os.getloadavg()[0]:.1f}")
        for what, column in (("a step", 0), ("processor time of all ranks", 1)):
            off, on = plain[:, column].tolist(), recorded[:, column].tolist()
            ratios = [100 * (with_hooks / without - 1) for with_hooks, without in zip(on, off, strict=True)]
            quarter, middle, three_quarters = statistics.quantiles(ratios, n=4)
            low, high = _interval(ratios)
            print(
                f"{what}: plain {statistics.median(off):.2f} ms, recorded {statistics.median(on):.2f} ms; "
                f"recorded takes {middle:+.2f} % more "
                f"(quartiles {quarter:+.1f}, {three_quarters:+.1f}; 95 %: {low:+.2f} to {high:+.2f})"
            )
        used = statistics.median(recorded[:, 1].tolist())
        share = 100 * watchers.item() / used
        print(f"of it the recorder's own threads: {watchers.item():.3f} ms a step, {share:.2f} %", flush=True)
    dist.destroy_process_group()


def _watcher_ms(recorder: Any) -> float:
    """The processor time that the recorder's own thread has used, in milliseconds."""
    # The kernel knows the name of the thread in C++ only.
    of_python = None if recorder.watcher is None else str(recorder.watcher.native_id)
    used = 0
    for task in Path("/proc/self/task").iterdir():
        if task.name == of_python or (task / "comm").read_text() == "rcomm-watcher\n":
            used += int((task / "schedstat").read_text().split()[0])
    return used / 1e6


def _interval(values: list[float]) -> tuple[float, float]:
    """The interval that holds the median with 95 % confidence, from medians of values drawn with repetition."""
    chance = random.Random(1)
    medians = sorted(statistics.median(chance.choices(values, k=len(values))) for _ in range(2000))
    return medians[50], medians[-51]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--python", action="store_true", help="the hooks in Python, also if those in C++ were built")
    options = parser.parse_args()
    if "RANK" in os.environ:
        return train(options)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as rings:
        environment = dict(os.environ, RCOMM_RECORD="1", RCOMM_RING_DIR=rings, GLOO_SOCKET_IFNAME="lo")
        if options.python:
            environment["XDG_CACHE_HOME"] = rings
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        torchrun += ["--nproc-per-node", str(options.ranks), *sys.argv]
        subprocess.run(torchrun, env=environment, check=True)


if __name__ == "__main__":
    main()
