"""Tests how jobs on the backend "rcomm" wait, fail, end and are recorded."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from conftest import TIME_LIMIT

import rcomm.torch
from rcomm import _native, _programs

FOREVER = 10**6


def test_absent_rank_is_named_at_the_timeout(ranks, tmp_path, until):
    over = tmp_path / "over"

    def body(rank):
        dist.barrier()
        if rank == 1:
            return until(over.exists)
        group = dist.group.WORLD
        dist.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=1), group)
        with pytest.raises(dist.DistBackendError, match="Timed out waiting 1000ms") as raised:
            dist.all_reduce(torch.zeros(4))
        assert "rank 1" in str(raised.value)
        assert raised.value.kind == "Timeout"
        with pytest.raises(dist.DistBackendError, match="aborted before"):
            dist.barrier()
        over.write_text("")

    assert ranks(2, body).wait() == [0, 0]


def test_store_in_the_process_of_rank_0_is_recorded_with_that_rank(ranks, until):
    def body(rank):
        dist.barrier()
        world = dist.group.WORLD._rcomm_world

        def store_links():
            peers = json.loads(Path(world.dump()).read_text()).get("peers", [])
            return [peer.get("rank") for peer in peers if peer.get("store")]

        if rank == 1:
            assert until(store_links) == [0]
        else:
            assert store_links() == []
        dist.barrier()

    assert ranks(2, body).wait() == [0, 0]


def test_world_answers_while_another_thread_waits_in_it(ranks, tmp_path, until):
    go = tmp_path / "go"

    def body(rank):
        dist.barrier()
        world = dist.group.WORLD._rcomm_world
        if rank == 2:
            return until(go.exists)
        if rank == 1:
            until(go.exists)
            world.shrink([2])
            return
        thread = threading.Thread(target=world.shrink, args=([2],))
        thread.start()
        # The interpreter would stand still here if these calls waited for the thread.
        for _ in range(2_000):
            assert world.group() is not None
            time.sleep(0.0001)
        assert thread.is_alive()
        go.write_text("")
        thread.join()
        assert list(world.group().ranks) == [0, 1]

    assert ranks(3, body, timeout=20).wait() == [0, 0, 0]


def test_shrink_that_waits_too_long_has_the_text_of_a_timeout(ranks, tmp_path, until):
    over = tmp_path / "over"

    def body(rank):
        dist.barrier()
        if rank != 0:
            return until(over.exists)
        with pytest.raises(dist.DistBackendError, match="Timed out waiting 3000ms"):
            dist.group.WORLD._rcomm_world.shrink([2])
        over.write_text("")

    assert ranks(3, body, timeout=3).wait() == [0, 0, 0]


def test_wait_with_a_shorter_timeout_leaves_the_operation_pending(ranks, tmp_path, until):
    go = tmp_path / "go"

    def body(rank):
        tensor = torch.ones(4)
        if rank == 1:
            until(go.exists)
            dist.all_reduce(tensor)
        else:
            work = dist.all_reduce(tensor, async_op=True)
            with pytest.raises(dist.DistBackendError, match=" Timed out waiting 200ms "):
                work.wait(datetime.timedelta(milliseconds=200))
            assert not work.is_completed() and work.exception() is None
            go.write_text("")
            work.wait()
        assert tensor.tolist() == [2.0] * 4

    assert ranks(2, body).wait() == [0, 0]


@pytest.mark.parametrize("late", [0, 1])
def test_ranks_destroy_their_groups_at_different_times(ranks, tmp_path, until, late):
    """A rank that still writes a checkpoint does not make the others fail, as with gloo."""
    over = tmp_path / "over"

    def body(rank):
        dist.all_reduce(torch.ones(2))
        if rank == late:
            until(over.exists)
        dist.destroy_process_group()
        over.write_text("")

    job = ranks(2, body)
    assert job.wait() == [0, 0]
    assert list(job.rings.glob("*.ring")) == []


def test_groups_can_be_destroyed_and_made_again(ranks):
    def body(rank):
        for _ in range(3):
            pair = dist.new_group([1, 0])
            tensor = torch.ones(2)
            dist.all_reduce(tensor, group=pair)
            dist.destroy_process_group(pair)
            start = time.monotonic()
            dist.destroy_process_group()
            assert time.monotonic() - start < TIME_LIMIT / 2
            dist.init_process_group("rcomm")
        group = dist.group.WORLD
        dist.destroy_process_group()
        with pytest.raises(dist.DistBackendError, match="was shut down"):
            group.allreduce([torch.ones(2)])

    assert ranks(2, body).wait() == [0, 0]


def test_ring_in_own_memory_leaves_no_file_and_why_says_so(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for backend in ("gloo", "rcomm"):
        program = f"""
import rcomm.torch, torch, torch.distributed as dist
if "{backend}" == "gloo":
    rcomm.torch.record()
    try:
        rcomm.torch.why()
    except RuntimeError as error:
        assert "has no process group yet" in str(error), error
    else:
        raise SystemExit("a verdict without a group")
dist.init_process_group("{backend}", init_method="file://{tmp_path}/{backend}", rank=0, world_size=1)
dist.all_reduce(torch.zeros(2))
assert rcomm.torch.recording() is None, rcomm.torch.recording()
try:
    rcomm.torch.why()
except RuntimeError as error:
    assert "into its own memory" in str(error), error
else:
    raise SystemExit("a verdict without a ring")
dist.destroy_process_group()
"""
        environment = {**os.environ, "RCOMM_RING_DIR": "memory", "GLOO_SOCKET_IFNAME": "lo"}
        ran = subprocess.run(
            [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=TIME_LIMIT
        )
        assert ran.returncode == 0, ran.stderr
    assert not (tmp_path / "memory").exists()


def test_job_is_recorded_without_rcomm_record_and_with_the_line_in_python(ranks, tmp_path):
    def body(rank):
        dist.all_reduce(torch.zeros(4, 8))
        if rank == 1:
            with rcomm.torch.phase("looks at a picture"):
                time.sleep(FOREVER)
        dist.all_reduce(torch.zeros(4))

    line = body.__code__.co_firstlineno + 1
    started = ranks(2, body)
    report = started.stuck_report()
    assert report.culprit.culprit_ranks == (1,)
    assert "rank 1 never issued all_reduce #2" in str(report)
    assert "looks at a picture" in report.culprit.sentence
    rings = sorted(map(str, started.rings.glob("*.ring")))
    out = tmp_path / "as-dumps"
    command = ["rcomm-fr", "dump", "--format", "json", "-o", str(out), *rings]
    subprocess.run(command, executable=_programs.find(command[0]), check=True, capture_output=True)
    for path in out.rglob("*.json"):
        dump = json.loads(path.read_text())
        first = dump["entries"][0]
        frame = dump["frames"][dump["stacks"][first["stack"]][0]]
        assert (frame["filename"], frame["line"], frame["name"]) == (__file__, line, "body")
        assert first["input_sizes"] == [[4, 8]]


def run_program(program: str, size: int, environment: dict[str, str], *arguments) -> tuple[list[int], list[str]]:
    """Runs a program once for each rank, its first argument. Returns their exit codes and what they wrote to stderr."""
    commands = [[sys.executable, "-c", program, str(rank), *map(str, arguments)] for rank in range(size)]
    started = [subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) for command in commands]
    errors = [process.communicate(timeout=300)[1] for process in started]
    return [process.returncode for process in started], errors


def test_exception_of_a_rank_reaches_the_others_and_its_ring(tmp_path):
    program = """
import sys, torch, torch.distributed as dist
rank = int(sys.argv[1])
store = dist.FileStore(sys.argv[2], 2)
dist.init_process_group("rcomm", rank=rank, world_size=2, store=store)
dist.barrier()
if rank == 1:
    raise ValueError("bad batch")
dist.all_reduce(torch.zeros(2))
"""
    environment = dict(os.environ, RCOMM_RING_DIR=str(tmp_path / "rings"), RCOMM_JOB="job")
    environment["RCOMM_DUMP_DIR"] = str(tmp_path / "dumps")
    errors = run_program(program, 2, environment, tmp_path / "store")[1]
    assert "ValueError: bad batch" in errors[1]
    assert "raised ValueError: bad batch" in errors[0] and "rank 1" in errors[0], errors[0]
    report = rcomm.analyze(tmp_path / "rings" / "job")
    assert "bad batch" in str(report)


def test_store_that_rank_0_serves_refuses_clients_without_the_secret(monkeypatch):
    monkeypatch.delenv("RCOMM_STORE", raising=False)
    server = _native.StoreServer("127.0.0.1", datetime.timedelta(seconds=TIME_LIMIT))
    # PyTorch's greeting, and a request to set "/k".
    greeting = b"\x00\xce\xf7\x85\x3c" + b"\x01\x02" + bytes(7) + b"/k\x01" + bytes(7) + b"v"
    with socket.create_connection(("127.0.0.1", server.port), timeout=TIME_LIMIT) as client:
        client.sendall(greeting)
        reply = b""
        with contextlib.suppress(ConnectionResetError):
            while part := client.recv(4096):
                reply += part
    assert b"rcomm refuses" in reply


@pytest.mark.parametrize("backend", ["rcomm", "cpu:rcomm,cuda:gloo"])
def test_job_with_rcomm_record_is_recorded_once(tmp_path, backend):
    program = """
import os, sys, torch, torch.distributed as dist
rank, store, backend = int(sys.argv[1]), dist.FileStore(sys.argv[2], 3), sys.argv[3]
dist.init_process_group(backend, rank=rank, world_size=3, store=store)
gloo_group = dist.new_group([1, 2], backend="gloo")
for _ in range(4):
    dist.all_reduce(torch.zeros(2))
if rank > 0:
    dist.all_reduce(torch.zeros(2), group=gloo_group)
import rcomm.torch
assert rcomm.torch._recorder is not None and rcomm.torch._recorder.ring is None
assert rcomm.torch.recording().endswith(f"{rank}.0.ring")
dist.barrier()
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters())
for batch in torch.utils.data.DataLoader([torch.ones(2)] * 6, batch_size=2):
    model(batch).sum().backward()
    optimizer.step()
class Ends(torch.utils.data.Dataset):
    def __len__(self):
        return 1
    def __getitem__(self, index):
        os._exit(0)
next(iter(torch.utils.data.DataLoader(Ends())))
"""
    names = ("RCOMM_", "MASTER_", "SLURM_", "TORCHELASTIC_")
    environment = {key: value for key, value in os.environ.items() if not key.startswith(names)}
    environment.update(RCOMM_RECORD="1", RCOMM_RING_DIR=str(tmp_path / "rings"))
    codes, errors = run_program(program, 3, environment, tmp_path / "store", backend)
    assert codes == [0] * 3, errors
    # One line is logged for all groups of gloo.
    assert all(text.count("and nothing of gloo") == 1 for text in errors[1:]), errors
    (folder,) = (tmp_path / "rings").glob("*/")
    rings = sorted(map(str, folder.glob("*.ring")))
    assert len(rings) == 3
    out = tmp_path / "as-dumps"
    command = ["rcomm-fr", "dump", "--format", "json", "-o", str(out), *rings]
    subprocess.run(command, executable=_programs.find(command[0]), check=True, capture_output=True)
    dumps = [json.loads(path.read_text()) for path in out.rglob("*.json")]
    assert sorted(dump["rank"] for dump in dumps) == [0, 1, 2]
    for dump in dumps:
        ops = [entry["profiling_name"].split(":")[1].split()[0] for entry in dump["entries"]]
        assert ops == ["all_reduce"] * 4 + ["barrier"]
        status = dump["status"]
        assert (status["step"], status["phase"]) == (3, "in next() of the data loader")


@pytest.mark.parametrize("destroys", [True, False])
def test_process_that_imports_only_torch_exits_with_0_and_prints_nothing(tmp_path, destroys):
    program = f"""
import torch, torch.distributed as dist
dist.init_process_group("rcomm", rank=0, world_size=1, store=dist.HashStore())
assert "rcomm.torch" in __import__("sys").modules
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
model(torch.ones(2)).sum().backward()
dist.all_reduce(torch.zeros(2), async_op=True)
if {destroys}:
    dist.destroy_process_group()
"""
    environment = dict(os.environ, RCOMM_RING_DIR=str(tmp_path))
    done = subprocess.run([sys.executable, "-c", program], env=environment, timeout=300, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
