"""Tests the backend "rcomm" of torch.distributed in real processes, and compares it with gloo."""

from __future__ import annotations

import datetime
import json
import os
import signal
import time

import pytest
import torch
import torch.distributed as dist
from conftest import TIME_LIMIT


def every_operation(rank: int, size: int, group) -> dict[str, list[torch.Tensor]]:
    """The results of each operation on this rank, by its name."""
    tensor = (torch.arange(6, dtype=torch.float64) + 1) * (rank + 1)
    results: dict[str, list[torch.Tensor]] = {}
    for name in ("SUM", "PRODUCT", "MIN", "MAX"):
        result = tensor.clone()
        dist.all_reduce(result, getattr(dist.ReduceOp, name), group=group)
        results[f"all_reduce {name}"] = [result]
    for name in ("BAND", "BOR", "BXOR"):
        result = torch.tensor([rank + 1, 5 * rank + 2])
        dist.all_reduce(result, getattr(dist.ReduceOp, name), group=group)
        results[f"all_reduce {name}"] = [result]
    for dtype in (torch.float16, torch.bfloat16, torch.int8, torch.uint8, torch.int64):
        result = torch.tensor([rank + 1, 2], dtype=dtype)
        work = dist.all_reduce(result, group=group, async_op=True)
        assert work.wait() and work.is_completed() and work.is_success()
        results[f"all_reduce {dtype}"] = [result]
    result = tensor.clone().to(torch.complex64) * 1j
    dist.all_reduce(result, group=group)
    results["all_reduce complex"] = [result]
    result = tensor.clone()
    dist.broadcast(result, 1, group=group)
    results["broadcast"] = [result]
    result = tensor.clone()
    dist.reduce(result, 1, group=group)
    results["reduce"] = [result] if rank == 1 else []
    out = [torch.zeros(6, dtype=torch.float64) for _ in range(size)]
    dist.all_gather(out, tensor, group=group)
    results["all_gather"] = out
    whole = torch.zeros(6 * size, dtype=torch.float64)
    dist.all_gather_into_tensor(whole, tensor, group=group)
    results["all_gather_into_tensor"] = [whole]
    part = torch.zeros(6, dtype=torch.float64)
    dist.reduce_scatter_tensor(part, whole * (rank + 1), group=group)
    results["reduce_scatter_tensor"] = [part]
    part = torch.zeros(6, dtype=torch.float64)
    dist.reduce_scatter(part, [tensor + to for to in range(size)], group=group)
    results["reduce_scatter"] = [part]
    out = [torch.zeros(6, dtype=torch.float64) for _ in range(size)] if rank == 1 else None
    dist.gather(tensor, out, dst=1, group=group)
    results["gather"] = out or []
    part = torch.zeros(6, dtype=torch.float64)
    parts = [tensor + to for to in range(size)] if rank == 1 else None
    dist.scatter(part, parts, src=1, group=group)
    results["scatter"] = [part]
    out = torch.zeros(size, 2)
    dist.all_to_all_single(out, torch.full((size, 2), rank + 1.0), group=group)
    results["all_to_all_single"] = [out]
    sizes = [(rank + to) % 2 + 1 for to in range(size)]
    out = torch.zeros(sum(sizes))
    dist.all_to_all_single(out, torch.full((sum(sizes),), rank + 1.0), sizes, sizes, group=group)
    results["all_to_all_single, uneven"] = [out]
    if rank == 0:
        dist.send(tensor, 1, group=group, tag=3)
    elif rank == 1:
        result = torch.zeros(6, dtype=torch.float64)
        assert dist.recv(result, group=group, tag=3) == 0
        results["recv from any"] = [result]
    right, left = (rank + 1) % size, (rank - 1) % size
    result = torch.zeros(6, dtype=torch.float64)
    batch = [dist.P2POp(dist.irecv, result, left, group), dist.P2POp(dist.isend, tensor, right, group)]
    for work in dist.batch_isend_irecv(batch):
        work.wait()
    results["batch_isend_irecv"] = [result]
    result = torch.sparse_coo_tensor([[rank, 3]], [1.0, 2.0], (size + 4,))
    dist.all_reduce(result, group=group)
    results["sparse"] = [result.to_dense()]
    strided = torch.arange(12.0).reshape(3, 4).t() * (rank + 1)
    dist.all_reduce(strided, group=group)
    results["all_reduce, transposed"] = [strided]
    objects = [None] * size
    dist.all_gather_object(objects, {"rank": rank}, group=group)
    assert objects == [{"rank": other} for other in range(size)]
    dist.barrier(group=group)
    dist.monitored_barrier(group=group)
    future = dist.all_reduce(tensor.clone(), group=group, async_op=True).get_future()
    results["future"] = [future.then(lambda done: done.value()[0] * 2).wait()]
    return results


def test_columns_of_a_tensor_are_reduced_and_no_others(ranks):
    # Gloo reduces as many elements of the memory behind the first one, whichever columns they are in.
    def body(rank):
        tensor = torch.ones(3, 4)
        dist.all_reduce(tensor[:, ::2].copy_(torch.full((3, 2), rank + 1.0)))
        assert tensor.tolist() == [[3.0, 1.0, 3.0, 1.0]] * 3
        dist.destroy_process_group()

    assert ranks(2, body).wait() == [0, 0]


@pytest.mark.parametrize("size", [2, 3])
def test_every_operation_gives_what_gloo_gives(ranks, size):
    def body(rank):
        gloo_results = every_operation(rank, size, dist.new_group(backend="gloo"))
        own_results = every_operation(rank, size, dist.group.WORLD)
        in_subgroup = every_operation(rank, size, dist.new_group(list(range(size))))
        assert gloo_results.keys() == own_results.keys() == in_subgroup.keys()
        for name, expected in gloo_results.items():
            for results in (own_results[name], in_subgroup[name]):
                assert len(results) == len(expected)
                assert all(torch.equal(result, wanted) for result, wanted in zip(results, expected)), name
        dist.destroy_process_group()

    assert ranks(size, body).wait() == [0] * size


def losses_of(tmp_path, ranks, backend, train):
    """Trains on two ranks over a backend; returns what `train` returns on each."""

    def body(rank):
        torch.manual_seed(1)
        torch.set_num_threads(1)
        (tmp_path / f"{backend}-{rank}.json").write_text(json.dumps(train(rank)))
        dist.destroy_process_group()

    assert ranks(2, body, backend=backend).wait() == [0, 0]
    return [json.loads((tmp_path / f"{backend}-{rank}.json").read_text()) for rank in range(2)]


def train_with(model, rank):
    """Trains for eight steps; returns the losses of this rank, to the last bit."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for step in range(8):
        torch.manual_seed(100 * step + rank)
        optimizer.zero_grad()
        loss = model(torch.randn(4, 32)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item().hex())
    return losses


def network():
    layers = [torch.nn.Linear(32, 64), torch.nn.Tanh(), torch.nn.Linear(64, 32), torch.nn.Linear(32, 1)]
    return torch.nn.Sequential(*layers)


def test_ddp_trains_to_the_same_bits_as_on_gloo(ranks, tmp_path):
    def train(rank):
        return train_with(torch.nn.parallel.DistributedDataParallel(network()), rank)

    ours = losses_of(tmp_path, ranks, "rcomm", train)
    assert ours == losses_of(tmp_path, ranks, "gloo", train)
    assert ours[0] != ours[1]


def test_fsdp2_trains_to_the_same_bits_as_on_gloo(ranks, tmp_path):
    def train(rank):
        from torch.distributed.fsdp import fully_shard

        mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
        model = network()
        for layer in model:
            fully_shard(layer, mesh=mesh)
        return train_with(fully_shard(model, mesh=mesh), rank)

    assert losses_of(tmp_path, ranks, "rcomm", train) == losses_of(tmp_path, ranks, "gloo", train)


@pytest.mark.parametrize("backend", ["rcomm", "cpu:rcomm,cuda:gloo"])
def test_apis_above_the_groups_give_the_right_results(ranks, backend):
    """Functional collectives, DTensor, tensor parallelism and coalescing call groups from C++."""

    def body(rank):
        import torch.distributed._functional_collectives as funcol
        from torch.distributed.tensor import Replicate, Shard, distribute_tensor
        from torch.distributed.tensor.parallel import (
            ColwiseParallel,
            RowwiseParallel,
            parallelize_module,
        )

        world = dist.group.WORLD
        tensor = torch.ones(4) * (rank + 1)
        assert funcol.all_reduce(tensor, "sum", world).tolist() == [3.0] * 4
        assert funcol.broadcast(tensor, 1, world).tolist() == [2.0] * 4
        assert funcol.all_gather_single(tensor, 0, world).tolist() == [1.0] * 4 + [2.0] * 4
        half = funcol.reduce_scatter_single(tensor, "sum", 0, world)
        assert half.tolist() == [3.0] * 2
        assert funcol.all_to_all_single(tensor, None, None, world).tolist() == [1.0] * 2 + [2.0] * 2
        several = funcol.all_reduce_coalesced([tensor, 2 * tensor], "sum", world)
        assert [reduced.tolist() for reduced in several] == [[3.0] * 4, [6.0] * 4]
        parts = [tensor.clone() for _ in range(3)]
        cpu = torch.device("cpu")
        with dist._coalescing_manager(device=cpu, async_ops=True) as block:
            for part in parts:
                dist.all_reduce(part)
        block.wait()
        assert all(part.tolist() == [3.0] * 4 for part in parts)
        mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
        whole = torch.arange(16.0).reshape(4, 4)
        split = distribute_tensor(whole, mesh, [Shard(0)])
        assert torch.equal(split.full_tensor(), whole)
        product = split @ split.redistribute(mesh, [Replicate()])
        assert torch.equal(product.full_tensor(), whole @ whole)
        torch.manual_seed(0)
        layers = [torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 8)]
        model, batch = torch.nn.Sequential(*layers), torch.randn(3, 8)
        expected = model(batch)
        plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        output = parallelize_module(model, mesh, plan)(batch)
        assert torch.allclose(output, expected, atol=1e-5)
        dist.destroy_process_group()

    assert ranks(2, body, backend=backend).wait() == [0, 0]


def test_meshes_of_several_dimensions_and_split_groups_have_the_right_members(ranks):
    def body(rank):
        from torch.distributed.tensor import Replicate, Shard, distribute_tensor

        mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        tensor = torch.full((2,), float(rank))
        dist.all_reduce(tensor, group=mesh.get_group("tp"))
        assert tensor.tolist() == [1.0, 1.0] if rank < 2 else [5.0, 5.0]
        whole = torch.arange(32.0).reshape(4, 8)
        placed = distribute_tensor(whole, mesh, [Shard(0), Shard(1)])
        assert placed.to_local().shape == (2, 4)
        moved = placed.redistribute(mesh, [Replicate(), Shard(0)])
        assert torch.equal(moved.to_local(), whole[2 * (rank % 2) :][:2])
        assert torch.equal((placed + 1).full_tensor(), whole + 1)
        halves = [[2, 0], [1, 3]]
        half = dist.split_group(split_ranks=halves, group_desc="half")
        members = halves[rank % 2]
        assert dist.get_process_group_ranks(half) == members and half.group_desc == "half"
        gathered = [torch.zeros(1) for _ in members]
        dist.all_gather(gathered, torch.tensor([float(rank)]), group=half)
        assert [int(part) for part in gathered] == members
        pair = dist.split_group(half, [[1, 0]], timeout=datetime.timedelta(seconds=50))
        assert dist.get_process_group_ranks(pair) == members[::-1]
        dist.barrier(group=pair)
        middle = dist.split_group(split_ranks=[[1, 2]])
        assert (middle != dist.GroupMember.NON_GROUP_MEMBER) == (rank in (1, 2))
        dist.destroy_process_group(half)
        dist.destroy_process_group()

    assert ranks(4, body).wait() == [0] * 4


def test_pipelines_train_to_the_gradients_of_the_whole_model(ranks):
    def body(rank):
        from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

        torch.manual_seed(0)
        layers = [torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh()) for _ in range(2)]
        batch, target = torch.randn(12, 8), torch.randn(12, 8)

        def loss(output, wanted):
            return (output - wanted).square().sum()

        for schedule in (ScheduleGPipe, Schedule1F1B):
            for layer in layers:
                layer.zero_grad()
            parts = zip(batch.chunk(4), target.chunk(4), strict=True)
            sum(loss(layers[1](layers[0](inputs)), wanted) for inputs, wanted in parts).backward()
            expected = layers[rank][0].weight.grad.clone()
            layers[rank].zero_grad()
            stage = PipelineStage(layers[rank], rank, 2, torch.device("cpu"))
            run = schedule(stage, n_microbatches=4, loss_fn=loss, scale_grads=False)
            run.step(batch) if rank == 0 else run.step(target=target)
            assert torch.allclose(layers[rank][0].weight.grad, expected, atol=1e-5)
        dist.destroy_process_group()

    assert ranks(2, body).wait() == [0, 0]


def test_compiled_programs_issue_collectives(ranks):
    def body(rank):
        import torch.distributed._functional_collectives as funcol

        @torch.compile(backend="aot_eager", fullgraph=True)
        def step(tensor):
            reduced = funcol.all_reduce(tensor * 2, "sum", dist.group.WORLD)
            gathered = funcol.all_gather_single(reduced + 1, 0, dist.group.WORLD)
            return funcol.reduce_scatter_single(gathered, "sum", 0, dist.group.WORLD) - tensor

        tensor = torch.full((4,), rank + 1.0)
        assert step(tensor).tolist() == [14.0 - tensor[0].item()] * 4
        dist.destroy_process_group()

    assert ranks(2, body).wait() == [0, 0]


def test_hooks_of_ddp_may_wait_inside_of_futures(ranks):
    def body(rank):
        from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64))
        state = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2)
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        for _ in range(5):
            model(torch.randn(2, 64) + rank).sum().backward()
        # After the last step both ranks hold the same gradients.
        gradient = model.module.weight.grad.clone()
        both = [torch.empty_like(gradient) for _ in range(2)]
        dist.all_gather(both, gradient)
        assert torch.equal(*both)

    assert ranks(2, body).wait() == [0, 0]


def test_sizes_that_differ_are_an_error_with_both_sizes_on_both_ranks(ranks):
    def body(rank):
        with pytest.raises(dist.DistBackendError) as raised:
            dist.all_reduce(torch.zeros(4 + rank))
        assert "4 Float" in str(raised.value) and "5 Float" in str(raised.value)

    assert ranks(2, body).wait() == [0, 0]


def test_killed_peer_is_named_at_once(ranks):
    def body(rank):
        dist.barrier()
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(dist.DistError, match="rank 1 is gone"):
            dist.all_reduce(torch.zeros(4))

    start = time.monotonic()
    assert ranks(2, body).wait() == [0, -signal.SIGKILL]
    assert time.monotonic() - start < TIME_LIMIT / 2


def merged(rank: int, pg, store, size: int, **options) -> list[int]:
    """Merges groups, and runs an operation in the result. Returns the numbers that its ranks gave as `rank`, sorted."""
    whole = pg.merge_remote_group(store, size, datetime.timedelta(seconds=TIME_LIMIT), **options)
    assert whole.size() == size
    numbers = [torch.zeros(1) for _ in range(size)]
    whole.allgather([numbers], [torch.tensor([float(rank)])]).wait()
    assert numbers[whole.rank()].item() == rank
    whole.shutdown()
    return sorted(int(one) for one in numbers)


def test_groups_that_do_not_know_each_other_are_merged(ranks):
    def body(rank):
        pair = [dist.new_group(members) for members in ([0, 2], [1, 3])][rank % 2]
        store = dist.PrefixStore("merge", dist.distributed_c10d._get_default_store())
        assert merged(rank, pair, store, 4) == [0, 1, 2, 3]
        dist.all_reduce(torch.zeros(2), group=pair)
        if rank == 0:
            with pytest.raises(ValueError, match="more ranks have called"):
                pair.merge_remote_group(store, 4, datetime.timedelta(seconds=1))
            late = dist.PrefixStore("late", store)
            with pytest.raises(dist.DistError, match="1 of the 4 ranks"):
                pair.merge_remote_group(late, 4, datetime.timedelta(seconds=1))
        dist.barrier()
        dist.destroy_process_group()

    assert ranks(4, body).wait() == [0] * 4


def test_groups_of_different_jobs_are_merged(ranks):
    def body(rank):
        store = dist.distributed_c10d._get_default_store()
        dist.destroy_process_group()
        job = dist.PrefixStore(f"job {rank // 2}", store)
        dist.init_process_group("rcomm", store=job, rank=rank % 2, world_size=2)
        both = dist.PrefixStore("both", store)
        assert merged(rank, dist.group.WORLD, both, 4, group_name="both") == [0, 1, 2, 3]
        x = torch.tensor([float(rank)])
        dist.all_reduce(x)
        assert x.item() == (1 if rank < 2 else 5)
        dist.destroy_process_group()

    assert ranks(4, body).wait() == [0] * 4


def test_remaining_ranks_go_on_in_a_shrunk_group(ranks):
    def body(rank):
        tensor = torch.full((4,), float(rank))
        dist.all_reduce(tensor)
        part = dist.new_group([1, 2, 3])
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(dist.DistError, match="rank 1"):
            dist.all_reduce(tensor)
        dist.shrink_group([1], shrink_flags=dist.distributed_c10d.SHRINK_ABORT)
        # PyTorch numbers the ranks anew, from 0 without gaps.
        new = {0: 0, 2: 1, 3: 2}[rank]
        assert (dist.get_rank(), dist.get_world_size()) == (new, 3)
        for _ in range(2):
            tensor = torch.tensor([float(rank)])
            dist.all_reduce(tensor)
            assert tensor.item() == 5
        pair = dist.new_group([1, 2])
        if new:
            tensor = torch.tensor([float(rank)])
            dist.broadcast(tensor, 2, group=pair)
            assert tensor.item() == 3
            smaller = dist.shrink_group([0], group=pair) if new == 2 else None
            if smaller is not None:
                tensor = torch.tensor([7.0])
                dist.all_reduce(tensor, group=smaller)
                assert tensor.item() == 7
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 2))
        model(torch.ones(1, 3)).sum().backward()
        dist.barrier()
        dist.destroy_process_group()
        del part

    codes = ranks(4, body).wait()
    assert codes == [0, -signal.SIGKILL, 0, 0]


def test_views_of_negatives_send_their_values(ranks):
    def body(rank):
        negatives = torch.tensor([1 + 2j, 3 + 4j]).conj().imag
        assert negatives.is_neg()
        received = torch.zeros(2)
        dist.broadcast(negatives if rank == 0 else received, 0)
        assert rank == 0 or received.tolist() == [-2.0, -4.0]
        dist.all_reduce(negatives, dist.ReduceOp.PRODUCT)
        assert negatives.tolist() == [4.0, 16.0]
        # A view of one element is in row-major order whatever its stride is.
        single = torch.tensor([1 + 2j]).conj().imag
        assert single.is_neg() and single.is_contiguous()
        dist.all_reduce(single)
        assert single.tolist() == [-4.0]

    assert ranks(2, body).wait() == [0, 0]
