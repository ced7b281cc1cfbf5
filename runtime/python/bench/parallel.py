"""Times what PyTorch builds on groups, on the backend "rcomm" and on gloo, in turn, in the same processes.

    python runtime/python/bench/parallel.py [--rounds N]

Each part runs on four ranks, a mesh of 2 x 2: a DTensor that is made whole and sharded again; an all_reduce in each
dimension of a DeviceMesh; a training step of a model with tensor parallelism in one dimension and data parallelism in
the other; a step of a pipeline of four stages. A line shows the best, median and worst round of each backend in
milliseconds a step, as rank 0 measured them. The run fails if the results on the two backends differ in one bit.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from collectives import BACKENDS, free_port, run_ranks
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

RANKS = 4
# The side of the square matrices: 1 MiB of float32 each.
WIDTH = 512
STEPS_OF_A_ROUND = 5

# A step of a part; returns tensors that must be the same on both backends.
Step = Callable[[], list[torch.Tensor]]


def dtensor(mesh: DeviceMesh, world: dist.ProcessGroup) -> Step:
    """Makes a tensor that both dimensions shard whole, and shards it in another way."""
    whole = torch.arange(float(WIDTH * WIDTH)).reshape(WIDTH, WIDTH)
    sharded = distribute_tensor(whole, mesh, [Shard(0), Shard(1)])

    def step() -> list[torch.Tensor]:
        replicated = sharded.redistribute(mesh, [Replicate(), Replicate()])
        return [replicated.redistribute(mesh, [Shard(1), Shard(0)]).to_local(), replicated.to_local()]

    return step


def device_mesh(mesh: DeviceMesh, world: dist.ProcessGroup) -> Step:
    """Reduces a tensor in each dimension of the mesh."""

    def step() -> list[torch.Tensor]:
        tensor = torch.full((WIDTH * WIDTH,), float(dist.get_rank() + 1))
        for dimension in ("dp", "tp"):
            dist.all_reduce(tensor, group=mesh.get_group(dimension))
        return [tensor]

    return step


def tensor_parallel(mesh: DeviceMesh, world: dist.ProcessGroup) -> Step:
    """Trains two layers that are split in one dimension; the other one averages the gradients."""
    torch.manual_seed(1)
    layers = [torch.nn.Linear(WIDTH, 2 * WIDTH), torch.nn.ReLU(), torch.nn.Linear(2 * WIDTH, WIDTH)]
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    model = parallelize_module(torch.nn.Sequential(*layers), mesh["tp"], plan)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, foreach=False)
    data = torch.Generator().manual_seed(mesh.get_local_rank("dp"))

    def step() -> list[torch.Tensor]:
        optimizer.zero_grad()
        loss = model(torch.randn(16, WIDTH, generator=data)).square().mean()
        loss.backward()
        for parameter in model.parameters():
            gradient = parameter.grad.to_local()
            dist.all_reduce(gradient, group=mesh.get_group("dp"))
            gradient /= mesh.size(0)
        optimizer.step()
        return [loss.detach()]

    return step


def pipeline(mesh: DeviceMesh, world: dist.ProcessGroup) -> Step:
    """Trains four stages, one on each rank, on eight microbatches."""
    rank = dist.get_rank()
    torch.manual_seed(rank)
    layer = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh())
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.01)
    stage = PipelineStage(layer, rank, RANKS, torch.device("cpu"), group=world)
    schedule = Schedule1F1B(stage, n_microbatches=8, loss_fn=lambda output, wanted: (output - wanted).square().mean())
    data = torch.Generator().manual_seed(1)

    def step() -> list[torch.Tensor]:
        optimizer.zero_grad()
        batch, wanted = (torch.randn(64, WIDTH, generator=data) for _ in range(2))
        losses: list[torch.Tensor] = []
        arguments = [batch] if rank == 0 else []
        options = {"target": wanted, "losses": losses} if rank == RANKS - 1 else {}
        schedule.step(*arguments, **options)
        optimizer.step()
        return [loss.detach() for loss in losses] + [layer[0].weight.detach().clone()]

    return step


def mesh_on(backend: str) -> tuple[DeviceMesh, dist.ProcessGroup]:
    """A mesh of groups of this backend, and a group of all ranks."""
    ranks = torch.arange(RANKS).reshape(2, 2)
    own: dict[str, dist.ProcessGroup] = {}
    for dimension, lists in (("dp", ranks.t().tolist()), ("tp", ranks.tolist())):
        for members in lists:
            group = dist.new_group(members, backend=backend)
            if dist.get_rank() in members:
                own[dimension] = group
    groups = [own["dp"], own["tp"]]
    mesh = DeviceMesh.from_group(groups, "cpu", mesh=ranks, mesh_dim_names=("dp", "tp"))
    return mesh, dist.new_group(backend=backend)


def rank_main(rank: int, port: int, args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    init_method = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("rcomm", init_method=init_method, rank=rank, world_size=RANKS)
    meshes = {name: mesh_on(name) for name in BACKENDS}
    for make in (dtensor, device_mesh, tensor_parallel, pipeline):
        steps = {name: make(*meshes[name]) for name in BACKENDS}
        times: dict[str, list[float]] = {name: [] for name in BACKENDS}
        # The first round is not counted: groups connect, and pipelines exchange shapes.
        for number in range(args.rounds + 1):
            results = {}
            for name, step in steps.items():
                dist.barrier()
                start = time.perf_counter()
                for _ in range(STEPS_OF_A_ROUND):
                    results[name] = step()
                times[name].append(1e3 * (time.perf_counter() - start) / STEPS_OF_A_ROUND)
            if not all(map(torch.equal, *(results[name] for name in BACKENDS))):
                sys.exit(f"{make.__name__}: rank {rank} has different results in round {number}")
        if rank == 0:
            for name in BACKENDS:
                took = times[name][1:]
                spread = f"{min(took):9.2f} {statistics.median(took):9.2f} {max(took):9.2f}"
                print(f"{make.__name__:16} {name:6}{spread}", flush=True)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    print(f"{RANKS} ranks, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    print("                           best    median     worst   ms a step", flush=True)
    port = free_port()
    codes = run_ranks(RANKS, lambda rank: rank_main(rank, port, args))
    print(f"load at the end {os.getloadavg()[0]:.1f}")
    sys.exit(max(map(abs, codes)))


if __name__ == "__main__":
    main()
