"""Tests what the backend "rcomm" of torch.distributed refuses, and that its groups work afterwards."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from conftest import TIME_LIMIT
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import Shard, distribute_tensor

import rcomm
import rcomm.torch


def test_what_cannot_be_communicated_is_refused_by_name(ranks):
    def body(rank):
        with pytest.raises(ValueError, match="this one is on meta"):
            dist.all_reduce(torch.zeros(2, device="meta"))
        with pytest.raises(ValueError, match="torch.quint8"):
            dist.broadcast(torch.quantize_per_tensor(torch.zeros(2), 0.1, 0, torch.quint8), 0)
        # DLPack describes some of these as whole bytes.
        for packed in ("uint1", "int2", "int4", "uint4"):
            dtype = getattr(torch, packed, None)
            if dtype is not None:
                with pytest.raises(ValueError, match=f"elements of type torch.{packed}:"):
                    dist.all_reduce(torch.ones(2, dtype=torch.uint8).view(dtype))
        with pytest.raises(ValueError, match="torch.sparse_coo"):
            dist.broadcast(torch.zeros(2).to_sparse(), 0)
        with pytest.raises(ValueError, match="ReduceOp.SUM only"):
            dist.all_reduce(torch.zeros(2).to_sparse(), dist.ReduceOp.MAX)
        with pytest.raises(NotImplementedError, match="not defined for elements of type Float"):
            dist.all_reduce(torch.zeros(2), dist.ReduceOp.BXOR)
        ones = torch.ones(6)
        for overlapping in (ones[:1].expand(4), ones[:3, None].expand(3, 4), ones.as_strided((3, 2), (1, 1))):
            with pytest.raises(ValueError, match=r"may share memory.*clone\(\)"):
                dist.all_reduce(overlapping)
            with pytest.raises(ValueError, match="may share memory"):
                dist.recv(overlapping, 1 - rank)
        with pytest.raises(ValueError, match="may share memory"):
            dist.all_gather_into_tensor(ones[:1].expand(4), ones[:2])
        assert ones.tolist() == [1.0] * 6
        with pytest.raises(ValueError, match=r"splits -1, 5, .*are negative"):
            dist.all_to_all_single(torch.zeros(4), torch.zeros(4), [-1, 5], [2, 2])
        mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
        sharded = distribute_tensor(torch.ones(4), mesh, [Shard(0)])
        with FakeTensorMode():
            fake = torch.zeros(2)
        for wrapper in (sharded, fake, torch._efficientzerotensor(4)):
            with pytest.raises(ValueError, match=f"this {type(wrapper).__name__} has none"):
                dist.group.WORLD.allreduce([wrapper]).wait()
        pid = os.fork()
        if pid == 0:
            try:
                dist.all_reduce(torch.zeros(2))
            except dist.DistBackendError as error:
                os._exit(0 if "fork" in str(error) else 2)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        tensor = torch.ones(2)
        dist.all_reduce(tensor)
        assert tensor.tolist() == [2.0, 2.0]

    assert ranks(2, body).wait() == [0, 0]


def test_mixed_types_are_refused_where_parts_are_of_one_whole(ranks):
    def body(rank):
        group = dist.group.WORLD
        ints, floats = torch.ones(2, dtype=torch.int32), torch.ones(2)
        mixed = [ints.clone(), floats.clone()]
        calls = [
            lambda: group.allgather([mixed], [floats]),
            lambda: group.allgather([[floats.clone(), floats.clone()]], [ints]),
            lambda: group.reduce_scatter([floats.clone()], [mixed]),
            lambda: group.alltoall(mixed, [floats.clone(), floats.clone()]),
            lambda: group.all_gather_single(torch.zeros(4), ints),
            lambda: group.reduce_scatter_single(floats.clone(), torch.ones(4, dtype=torch.int32)),
        ]
        for call in calls:
            with pytest.raises(ValueError, match="Int"):
                call().wait()
        if rank == 0:
            with pytest.raises(ValueError, match="Int"):
                group.scatter([floats.clone()], [mixed], dist.ScatterOptions()).wait()
        # Here each tensor is reduced by itself.
        group.allreduce_coalesced(mixed).wait()
        assert [tensor.tolist() for tensor in mixed] == [[2, 2], [2.0, 2.0]]

    assert ranks(2, body).wait() == [0, 0]


def test_tensors_that_require_a_gradient_are_taken_as_gloo_takes_them(ranks):
    def body(rank):
        results = []
        for group in (dist.new_group(backend="gloo"), dist.group.WORLD):
            leaf = torch.full((2, 3), rank + 1.0, requires_grad=True)
            dist.all_reduce(leaf, group=group)
            computed = leaf * 2
            dist.broadcast(computed, 0, group=group)
            computed.sum().backward()
            results.append([leaf.tolist(), computed.tolist(), leaf.grad.tolist(), leaf.requires_grad])
        assert results[0] == results[1] and results[0][0] == [[3.0] * 3] * 2

    assert ranks(2, body).wait() == [0, 0]


def test_second_world_is_refused_and_the_first_one_works_afterwards(ranks):
    def body(rank):
        with pytest.raises(ValueError, match="twice"):
            dist.init_process_group("rcomm")
        with pytest.raises(rcomm.InvalidArgument, match="already joined the job by init_process_group"):
            rcomm.init()
        tensor = torch.ones(2)
        dist.all_reduce(tensor)
        assert tensor.tolist() == [2.0, 2.0]
        dist.destroy_process_group()
        with rcomm.init(rank=0, size=1) as world:
            with pytest.raises(RuntimeError, match=r"by rcomm\.init\(\): shut that world down"):
                dist.init_process_group("rcomm")
            assert world.group.all_reduce(torch.ones(2)).tolist() == [1.0, 1.0]

    assert ranks(2, body).wait() == [0, 0]


def run(program: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs a Python program in a process of its own."""
    environment = {**os.environ, **variables}
    command = [sys.executable, "-c", program]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TIME_LIMIT)


def test_versions_of_pytorch_that_were_never_tried_are_refused_by_name(tmp_path):
    program = """
import torch
torch.__version__ = "2.99.1+cpu"
torch.distributed.init_process_group("rcomm", init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
torch.distributed.destroy_process_group()
"""
    refused = run(program, RCOMM_RING_DIR=str(tmp_path))
    assert refused.returncode == 1
    last = refused.stderr.strip().splitlines()[-1]
    assert last.startswith("RuntimeError: rcomm: the backend was tested on PyTorch 2.15, and this is 2.99.1+cpu: "), last
    assert run(program, RCOMM_RING_DIR=str(tmp_path), RCOMM_UNTESTED_TORCH="1").returncode == 0


def test_pytorch_without_its_distributed_package_is_refused_by_name():
    program = """
import torch
del torch._C._c10d_init
assert not torch.distributed.is_available()
import rcomm.torch
rcomm.torch.record()
assert rcomm.torch.recording() is None
"""
    done = run(program)
    assert done.returncode == 0, done.stderr
    assert "this PyTorch was built without torch.distributed" in done.stderr
