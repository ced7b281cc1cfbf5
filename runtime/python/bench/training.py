"""Times training steps of DDP and FSDP2 on the backend "rcomm" and on gloo, in turn, in the same processes.

    python runtime/python/bench/training.py [--ranks N] [--rounds N] [--steps N] [--width N]

Each round trains a model for some steps on gloo, and a second one from the same seed on the same data on rcomm. A line
shows the best, median and worst round of each in milliseconds a step, as rank 0 measured them. The run fails if the
losses of the two differ in one bit.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time

import torch
import torch.distributed as dist
from collectives import BACKENDS, free_port, run_ranks


def network(width: int) -> torch.nn.Sequential:
    torch.manual_seed(1)
    layers: list[torch.nn.Module] = []
    for _ in range(10):
        layers += [torch.nn.Linear(width, width), torch.nn.Tanh()]
    return torch.nn.Sequential(*layers)


def ddp(width: int, backend: str, group: dist.ProcessGroup) -> torch.nn.Module:
    return torch.nn.parallel.DistributedDataParallel(network(width), process_group=group)


def fsdp2(width: int, backend: str, group: dist.ProcessGroup) -> torch.nn.Module:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    mesh = DeviceMesh.from_group(group, "cpu")
    model = network(width)
    for layer in model:
        if isinstance(layer, torch.nn.Linear):
            fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


class Training:
    """A model with its optimizer, its data and the losses so far."""

    def __init__(self, model: torch.nn.Module, width: int, rank: int) -> None:
        self.model, self.width = model, width
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        self.random = torch.Generator().manual_seed(rank)
        self.losses: list[str] = []

    def step(self) -> None:
        self.optimizer.zero_grad()
        loss = self.model(torch.randn(4, self.width, generator=self.random)).square().mean()
        loss.backward()
        self.optimizer.step()
        self.losses.append(loss.item().hex())


def rank_main(rank: int, port: int, args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    init_method = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("rcomm", init_method=init_method, rank=rank, world_size=args.ranks)
    groups = {name: dist.new_group(backend=name) for name in BACKENDS}
    for make in (ddp, fsdp2):
        trainings = {
            name: Training(make(args.width, name, group), args.width, rank)
            for name, group in groups.items()
        }
        times: dict[str, list[float]] = {name: [] for name in groups}
        for training in trainings.values():
            training.step()
        for _ in range(args.rounds):
            for name, training in trainings.items():
                dist.barrier()
                start = time.perf_counter()
                for _ in range(args.steps):
                    training.step()
                times[name].append(1e3 * (time.perf_counter() - start) / args.steps)
        gloo_losses, rcomm_losses = (trainings[name].losses for name in BACKENDS)
        if gloo_losses != rcomm_losses:
            sys.exit(f"{make.__name__}: the losses differ: {gloo_losses} and {rcomm_losses}")
        if rank == 0:
            for name in BACKENDS:
                took = times[name]
                spread = f"{min(took):9.1f} {statistics.median(took):9.1f} {max(took):9.1f}"
                print(f"{make.__name__:6} {name:6}{spread}", flush=True)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=3, help="steps of a round")
    parser.add_argument("--width", type=int, default=1024, help="10 layers of WIDTH x WIDTH parameters")
    args = parser.parse_args()
    parameters = sum(parameter.numel() for parameter in network(args.width).parameters())
    load = os.getloadavg()[0]
    print(f"{args.ranks} ranks, {parameters} parameters, {os.cpu_count()} cores, load {load:.1f}")
    print("                 best    median     worst   ms a step")
    sys.stdout.flush()
    port = free_port()
    codes = run_ranks(args.ranks, lambda rank: rank_main(rank, port, args))
    print(f"load at the end {os.getloadavg()[0]:.1f}")
    sys.exit(max(map(abs, codes)))


if __name__ == "__main__":
    main()
