"""Measures what recording costs a training step: DDP on gloo, with and without hooks, in the same processes.

    python bench/recorded_step.py [--ranks 2] [--rounds 30] [--steps 4] [--width 1024]

In each round all ranks train some steps with the hooks on the group, and as many without; which comes first alternates.
One line is on the time of the steps, another on the processor time of all ranks, which load affects less. Each shows the
median round of each half, and the median and the quartiles of the rounds' ratios: load that changes from round to round
affects both halves of a round. The hooks are those in C++ if they were built
(`python -m rcomm build-hooks`); --python chooses those in Python.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time


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
    attached = True
    for number in range(options.rounds):
        for on in (number % 2 == 0, number % 2 != 0):
            if on != attached:
                switch(on)
                attached = on
            round_ms[on].append(steps())
    if not attached:
        switch(True)
    # Rank 0's times, and the processor times of all ranks.
    plain, recorded = torch.tensor(round_ms[False]), torch.tensor(round_ms[True])
    for times in (plain, recorded):
        used = times[:, 1].clone()
        dist.all_reduce(used)
        times[:, 1] = used
    if rank == 0:
        kind = "C++" if recorder.native is not None else "Python"
        print(f"hooks in {kind}, load {os.getloadavg()[0]:.1f}")
        for what, column in (("a step", 0), ("processor time of all ranks", 1)):
            off, on = plain[:, column].tolist(), recorded[:, column].tolist()
            ratios = [100 * (with_hooks / without - 1) for with_hooks, without in zip(on, off, strict=True)]
            low, middle, high = statistics.quantiles(ratios, n=4)
            print(
                f"{what}: plain {statistics.median(off):.1f} ms, recorded {statistics.median(on):.1f} ms; "
                f"recorded takes {middle:+.1f} % more (quartiles {low:+.1f}, {high:+.1f})",
                flush=True,
            )
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--steps", type=int, default=4)
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
