"""Tests groups of the module rcomm on numpy's arrays, tensors and other memory, in real processes."""

from __future__ import annotations

import array
import asyncio
import ctypes
import functools
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import TIME_LIMIT, ArrayJob

import rcomm


@pytest.fixture
def ranks(start_job):
    """Starts jobs of ranks that join by `rcomm.init()`."""
    return functools.partial(start_job, ArrayJob)


def kinds():
    """Kinds of arrays: the name, how an array is made of values, and how its values are read."""
    yield "numpy", lambda values: np.array(values, np.float32), np.ndarray.tolist
    yield "torch", lambda values: torch.tensor(values), torch.Tensor.tolist
    yield "array", lambda values: array.array("f", values), array.array.tolist
    yield "ctypes", lambda values: (ctypes.c_float * len(values))(*values), list
    yield "memoryview", lambda values: memoryview(array.array("f", values)), memoryview.tolist


@pytest.mark.parametrize("kind", [kind for kind, _, _ in kinds()])
@pytest.mark.parametrize("wait", [True, False])
def test_operations_work_in_the_memory_of_any_array(ranks, kind, wait):
    make, read = next((make, read) for name, make, read in kinds() if name == kind)

    def body(world):
        group = world.group
        data = make([1.0 + group.rank, 2.0, 3.0, 4.0])

        def run(operation, *args, **kwargs):
            done = operation(*args, wait=wait, **kwargs)
            return done if wait else done.wait()

        assert run(group.all_reduce, data) is data
        assert read(data) == [6.0, 6.0, 9.0, 12.0]
        out = make([0.0] * 4)
        assert run(group.all_reduce, data, "max", out=out) is out
        assert read(out) == read(data) == [6.0, 6.0, 9.0, 12.0]
        own = make([float(group.rank)] * 2)
        whole = make([9.0] * 6)
        assert run(group.all_gather, own, out=whole) is whole
        assert read(whole) == [0.0, 0.0, 1.0, 1.0, 2.0, 2.0]
        part = make([0.0] * 2)
        run(group.reduce_scatter, whole, out=part)
        assert read(part) == [3.0 * group.rank] * 2
        run(group.all_to_all, make([float(group.rank)] * 3), out=(swapped := make([9.0] * 3)))
        assert read(swapped) == [0.0, 1.0, 2.0]
        assert run(group.broadcast, part, 2) is part
        assert read(part) == [6.0] * 2
        result = run(group.reduce, data, 1, rcomm.premul_sum(0.5))
        assert result is (data if group.rank == 1 else None)
        assert read(data) == ([9.0, 9.0, 13.5, 18.0] if group.rank == 1 else [6.0, 6.0, 9.0, 12.0])
        result = run(group.gather, own, 2, out=whole if group.rank == 2 else None)
        assert result is (whole if group.rank == 2 else None)
        run(group.scatter, whole if group.rank == 0 else None, 0, out=part)
        assert read(part) == [float(group.rank)] * 2
        run(group.barrier)
        if group.rank == 0:
            run(group.send, data, 1, tag=7)
        elif group.rank == 1:
            assert run(group.recv, out, rcomm.ANY, tag=7) == 0
            assert read(out) == [6.0, 6.0, 9.0, 12.0]
        run(group.all_reduce_coalesced, [data, part])
        assert read(part) == [3.0] * 2

    assert ranks(3, body).wait() == [0, 0, 0]


def test_results_are_new_arrays_of_the_library_of_the_input(ranks):
    def body(world):
        group = world.group
        data = np.arange(6, dtype=np.int64).reshape(3, 2) + 10 * group.rank
        joined = group.all_gather(data)
        assert isinstance(joined, np.ndarray) and joined.shape == (2, 3, 2) and joined.dtype == np.int64
        assert (joined[1] == np.arange(6).reshape(3, 2) + 10).all()
        gathered_tensor = group.all_gather(torch.full((2,), group.rank, dtype=torch.bfloat16))
        assert isinstance(gathered_tensor, torch.Tensor) and gathered_tensor.dtype == torch.bfloat16
        assert gathered_tensor.tolist() == [[0.0, 0.0], [1.0, 1.0]]
        assert group.reduce_scatter(np.ones((4, 2), np.complex64)).shape == (2, 2)
        # Rows that differ: rank 0 has one, rank 1 two.
        own = np.full((group.rank + 1, 2), group.rank, np.float16)
        assert group.all_gather(own, rows=[1, 2]).tolist() == [[0, 0], [1, 1], [1, 1]]
        gathered = group.gather(own, 1, rows=[1, 2])
        assert gathered is None if group.rank == 0 else gathered.tolist() == [[0, 0], [1, 1], [1, 1]]
        part = group.reduce_scatter(np.ones((3, 2)), rows=[1, 2])
        assert part.tolist() == [[2.0, 2.0]] * (group.rank + 1)
        whole = np.arange(6.0).reshape(3, 2) if group.rank == 1 else None
        out = None if group.rank == 1 else np.empty((1, 2))
        part = group.scatter(whole, 1, rows=[1, 2], out=out)
        assert part.tolist() == ([[0.0, 1.0]] if group.rank == 0 else [[2.0, 3.0], [4.0, 5.0]])
        # Rank r sends r + 1 rows to rank 0 and one to rank 1, and the ranks tell each other.
        rows = [group.rank + 1, 1]
        received = group.all_to_all(np.full((sum(rows), 1), group.rank), rows=rows)
        assert received.ravel().tolist() == ([0, 1, 1] if group.rank == 0 else [0, 1])
        assert group.all_to_all(np.arange(4).reshape(2, 2) + 10 * group.rank).tolist() == [
            [2 * group.rank, 2 * group.rank + 1],
            [10 + 2 * group.rank, 11 + 2 * group.rank],
        ]
        assert group.all_reduce(np.array(2.5)).item() == 5.0
        assert group.all_reduce(np.empty((0, 3))).shape == (0, 3)
        # An array that must not be written can be an input.
        frozen = np.ones(2)
        frozen.flags.writeable = False
        assert group.all_reduce(frozen, out=np.empty(2)).tolist() == [2.0, 2.0]
        assert group.all_gather(b"ab", out=bytearray(4)) == bytearray(b"abab")

    assert ranks(2, body).wait() == [0, 0]


def test_every_element_type_is_summed(ranks):
    names = "int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64 complex64 complex128"

    def body(world):
        for name in names.split():
            values = np.full(3, world.rank + 1, name)
            world.group.all_reduce(values)
            assert (values == 3).all(), name
        flags = np.array([world.rank == 1, False])
        world.group.all_reduce(flags, "max")
        assert flags.tolist() == [True, False]

    assert ranks(2, body).wait() == [0, 0]


def test_objects_travel_as_json_and_by_pickle_only_where_both_sides_ask(ranks):
    def body(world):
        group = world.group
        assert group.all_gather_object({"loss": 0.5, "rank": group.rank})[1] == {"loss": 0.5, "rank": 1}
        assert group.broadcast_object([1, "two", None] if group.rank == 0 else None) == [1, "two", None]
        assert group.gather_object(group.rank, 1) == (None if group.rank == 0 else [0, 1])
        assert group.scatter_object(["a", "b"] if group.rank == 1 else None, 1) == "ab"[group.rank]
        if group.rank == 0:
            group.send_object("hello", 1, tag=3)
        else:
            assert group.recv_object(0, tag=3) == "hello"
        assert group.all_gather_object({1, 2}, pickle=True) == [{1, 2}] * 2
        with pytest.raises(rcomm.InvalidArgument, match="set is not JSON"):
            group.all_gather_object({1, 2})
        with pytest.raises(ValueError, match=r"not JSON compliant"):
            group.all_gather_object(float("nan"))
        with pytest.raises(rcomm.InvalidArgument, match="rcomm.pickle"):
            group.all_gather_object({"rcomm.pickle": "gA=="})
        # Rank 1 does not ask for pickles, so it refuses rank 0's; the group is still usable.
        if group.rank == 0:
            assert group.all_gather_object({1, 2}, pickle=True) == [{1, 2}, 3]
        else:
            with pytest.raises(rcomm.InvalidArgument, match="did not pass pickle=True"):
                group.all_gather_object(3)
        group.barrier()

    assert ranks(2, body).wait() == [0, 0]


def test_works_are_awaited_and_report_their_operation_and_number(ranks, tmp_path, until):
    go = tmp_path / "go"

    def body(world):
        group = world.group
        group.barrier()
        data = np.ones(4)
        if group.rank == 1:
            until(go.exists)
            group.all_reduce(data)
        else:
            work = group.all_reduce(data, wait=False)
            assert not work.done() and work.exception() is None
            assert (work.op, work.seq, work.duration) == ("all_reduce", 2, None)
            with pytest.raises(rcomm.Timeout, match="has not ended after 10 ms: it continues"):
                work.wait(0.01)

            async def both():
                ticks = 0

                async def tick():
                    nonlocal ticks
                    while not work.done():
                        ticks += 1
                        go.write_text("")
                        await asyncio.sleep(0.001)

                ticking = asyncio.ensure_future(tick())
                assert await work is data
                await ticking
                return ticks

            # The event loop ran while the operation did.
            assert asyncio.run(both()) > 0
            assert work.done() and work.wait() is data
            called = []
            work.add_done_callback(called.append)
            until(lambda: called == [work])
        assert data.tolist() == [2.0] * 4

    assert ranks(2, body).wait() == [0, 0]


def test_groups_are_made_split_and_ended(ranks):
    def body(world):
        group = world.group
        assert (group.rank, group.size, group.ranks, group.timeout) == (world.rank, 3, [0, 1, 2], TIME_LIMIT)
        pair = world.new_group([2, 0], name="pair") if group.rank != 1 else None
        if pair is not None:
            assert (pair.name, pair.ranks, pair.rank) == ("pair", [2, 0], 0 if group.rank == 2 else 1)
            assert pair.all_reduce(np.array([group.rank])).tolist() == [2]
            pair.destroy()
            with pytest.raises(rcomm.Closed):
                pair.barrier()
        part = group.split(group.rank % 2, key=-group.rank, name="half", timeout=7)
        assert part.ranks == ([1] if group.rank == 1 else [2, 0]) and part.timeout == 7.0
        assert group.split(0 if group.rank == 2 else None) is None or group.rank == 2
        part.timeout = 9
        assert part.timeout == 9.0
        group.monitored_barrier(all=True)
        with rcomm.step(3), rcomm.phase("evaluation"):
            path = world.dump()
        assert '"phase":"evaluation"' in open(path).read().replace(" ", "")

    assert ranks(3, body).wait() == [0, 0, 0]


def test_mismatch_names_the_call_and_the_ranks(ranks):
    def body(world):
        with pytest.raises(rcomm.Mismatch) as raised:
            world.group.all_reduce(np.zeros(4 + world.rank, np.float32))
        error = raised.value
        assert "4 Float" in str(error) and "5 Float" in str(error)
        assert error.kind == "Mismatch" and error.ranks and error.call.startswith("all_reduce #1")
        assert isinstance(error, RuntimeError)
        assert error.report().verdict == "mismatch"
        world.abandon("the test is over")

    assert ranks(2, body, ends=False).wait() == [0, 0]


def test_lost_peer_is_named_and_the_others_go_on_without_it(ranks):
    def body(world):
        world.group.barrier()
        if world.rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(rcomm.Error) as raised:
            for _ in range(2):
                world.group.all_reduce(np.zeros(4))
        assert "rank 2" in str(raised.value)
        if isinstance(raised.value, rcomm.PeerLost):
            assert raised.value.rank == 2 and isinstance(raised.value, ConnectionError)
        absent = world.group.find_absent(TIME_LIMIT / 4 if world.rank else 1.0)
        assert absent == [2]
        assert world.shrink(without=absent) is world
        assert world.group.ranks == [0, 1]
        assert world.group.all_reduce(np.ones(2)).tolist() == [2.0, 2.0]
        with pytest.raises(rcomm.Error):
            world.abandon("the test is over")
            world.group.barrier()

    assert ranks(3, body, ends=False).wait() == [0, 0, -signal.SIGKILL]


def test_processes_join_in_place_of_lost_ranks_and_beyond(ranks, until):
    def joined(world):
        assert world.size == 4 and world.group.ranks == [0, 1, 2, 3]
        assert world.group.all_reduce(np.ones(2)).tolist() == [4.0, 4.0]
        with rcomm.phase("evaluation"), rcomm.step(17):
            dump = world.dump()
        assert dump.startswith(world.dump_dir) and os.path.exists(dump)

    def mapped_files():
        lines = Path("/proc/self/maps").read_text().splitlines()
        return {line.split()[4] for line in lines}

    def body(world):
        world.group.barrier()
        if world.rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        first, ring = world.group, world.path
        inode = str(os.stat(ring).st_ino)
        absent = first.find_absent(TIME_LIMIT / 4 if world.rank else 1.0)
        assert absent == [2]
        with pytest.raises(rcomm.InvalidArgument, match=f"rank {world.rank} lists itself as lost"):
            world.grow([world.rank], 4)
        assert world.grow(absent, 4) is world
        assert world.path != ring
        with pytest.raises(rcomm.Error):
            first.barrier()
        # Only the old group keeps the old ring in this process's memory.
        assert inode in mapped_files()
        del first
        until(lambda: inode not in mapped_files())
        joined(world)

    job = ranks(3, body)
    for rank in [2, 3]:
        job.start(rank, 4, joined, join=True)
    assert job.wait() == [0, 0, -signal.SIGKILL, 0, 0]


def test_other_threads_run_while_a_world_is_dropped(ranks, tmp_path, until, monkeypatch):
    # How long rank 0, which has the store, waits at most for the end of rank 1.
    monkeypatch.setenv("RCOMM_STATUS_WAIT_MS", str(TIME_LIMIT * 1000 // 4))
    failed, over = tmp_path / "failed", tmp_path / "over"

    def body(world):
        world.group.barrier()
        if world.rank == 1:
            with pytest.raises(rcomm.Error):
                world.group.barrier()
            failed.write_text("")
            until(over.exists)
            return world.abandon("the other thread of rank 0 has run")
        order = []

        def end_rank_1():
            until(failed.exists)
            order.append("ran")
            over.write_text("")

        thread = threading.Thread(target=end_rank_1)
        thread.start()
        rcomm._world._forget(world)
        world._native = None
        order.append("dropped")
        thread.join()
        assert order == ["ran", "dropped"]

    assert ranks(2, body, ends=False).wait() == [0, 0]


def test_absent_rank_is_named_at_the_timeout_and_by_the_report(ranks, tmp_path, until):
    over = tmp_path / "over"

    def body(world):
        world.group.barrier()
        if world.rank == 1:
            with rcomm.phase("looks at a picture"):
                return until(over.exists)
        with pytest.raises(rcomm.Timeout, match="rank 1") as raised:
            world.group.all_reduce(np.zeros(4), timeout=0.5)
        assert isinstance(raised.value, TimeoutError) and raised.value.ranks == [1]
        report = raised.value.report()
        assert report.verdict == "stuck" and report.culprit.culprit_ranks == (1,)
        assert "looks at a picture" in str(report)
        with pytest.raises(rcomm.Aborted, match="all_reduce"):
            world.group.barrier()
        over.write_text("")

    assert ranks(2, body, ends=False).wait() == [0, 0]


def test_what_cannot_be_communicated_is_refused_by_name(ranks):
    def body(world):
        group = world.group
        matrix = np.zeros((4, 4))
        frozen = np.zeros(2)
        frozen.flags.writeable = False
        refused = [
            ("row-major", lambda: group.all_reduce(matrix[:, ::2])),
            ("row-major", lambda: group.all_reduce(matrix.T[:2])),
            ("may only be read", lambda: group.all_reduce(frozen)),
            ("may only be read", lambda: group.all_reduce(b"abc")),
            ("buffer protocol", lambda: group.all_reduce([1.0, 2.0])),
            ("buffer protocol", lambda: group.all_reduce(None)),
            ("require", lambda: group.all_reduce(torch.zeros(2, requires_grad=True))),
            ("torch.Tensor cannot be used", lambda: group.all_reduce(torch.zeros(2).to_sparse())),
            ("torch.Tensor", lambda: group.all_reduce(torch.zeros(2, device="meta"))),
            ("numpy.ndarray", lambda: group.all_reduce(np.array(["text"]))),
            ("does not hold 2 parts", lambda: group.all_gather(np.zeros(2), out=np.zeros(4, np.float32))),
            ("overlap", lambda: group.all_to_all(frozen_pair := np.zeros(4), out=frozen_pair)),
            ("does not know the reduction .median", lambda: group.all_reduce(np.zeros(2), "median")),
            ("omit out=", lambda: group.all_reduce(matrix, out=matrix)),
            ("premul_sum", lambda: group.all_reduce(np.zeros(2), 3)),
            ("root 5", lambda: group.broadcast(np.zeros(2), 5)),
            ("one is needed for each rank", lambda: group.all_gather(np.zeros((2, 2)), rows=[4])),
            ("needs rows=", lambda: group.all_to_all(np.zeros(2), rows_out=[1, 1])),
            ("give out=", lambda: group.reduce_scatter(np.zeros(3))),
            ("must be a number that is not negative", lambda: group.barrier(timeout=-1.0)),
            ("this rank itself", lambda: group.send(np.zeros(2), group.rank)),
            ("is not in a group", lambda: group.recv(np.zeros(2), 7)),
            ("give both", lambda: rcomm.init(rank=0)),
            ("is already rank", lambda: rcomm.init()),
            ("is already rank", lambda: rcomm.init(rank=0, size=1)),
        ]
        for match, call in refused:
            with pytest.raises(rcomm.InvalidArgument, match=match):
                call()
        with pytest.raises(rcomm.Unsupported, match="not defined for elements of type Float"):
            group.all_reduce(np.zeros(2, np.float32), "bxor")
        with pytest.raises(TypeError):
            group.broadcast(np.zeros(2), "zero")
        work = group.all_reduce(np.zeros(2), wait=False)
        pid = os.fork()
        if pid == 0:
            calls = [lambda: group.all_reduce(np.zeros(2)), work.wait, lambda: world.group, world.dump]
            for call in calls:
                try:
                    call()
                except rcomm.Closed as error:
                    if "fork" not in str(error):
                        os._exit(2)
                else:
                    os._exit(3)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        work.wait()
        # Nothing was sent by what was refused: the group works.
        assert group.all_reduce(np.ones(2)).tolist() == [2.0, 2.0]
        world.shutdown()
        world.shutdown()
        with pytest.raises(rcomm.Closed):
            world.new_group([world.rank])
        with pytest.raises(rcomm.Closed):
            group.barrier()

    assert ranks(2, body).wait() == [0, 0]


def test_an_exception_in_the_block_of_a_world_reaches_the_others(ranks):
    def body(world):
        if world.rank == 1:
            with pytest.raises(ZeroDivisionError), world:
                world.group.barrier()
                1 / 0  # noqa: B018
            return
        world.group.barrier()
        with pytest.raises(rcomm.Error, match="raised ZeroDivisionError"):
            world.group.all_reduce(np.zeros(2))
        world.abandon("the test is over")

    assert ranks(2, body, ends=False).wait() == [0, 0]


@pytest.mark.parametrize("method", ["new_group", "shrink"])
def test_dump_and_abandon_do_not_wait_for_a_thread_that_waits_for_ranks(ranks, tmp_path, until, method):
    over = tmp_path / "over"

    def body(world):
        if world.rank != 1:
            # Rank 1 waits for rank 0, which does not call the method.
            until(over.exists)
            return
        arguments = {"new_group": [0, 1], "shrink": [2]}
        waiter = threading.Thread(target=getattr(world, method), args=(arguments[method],), daemon=True)
        waiter.start()

        def waits():
            frame = sys._current_frames().get(waiter.ident)
            return frame and frame.f_code.co_name == method

        until(waits)
        began = time.monotonic()
        for _ in range(10):
            world.dump()
        world.abandon("the test is over")
        took = time.monotonic() - began
        assert took < TIME_LIMIT / 4 and waiter.is_alive()
        with pytest.raises(rcomm.Error):
            world.dump()
        over.touch()

    assert ranks(3, body, ends=False).wait() == [0, 0, 0]


@pytest.mark.parametrize("how", ["shutdown", "with", "nothing"])
def test_process_without_a_launcher_ends_with_0_and_leaves_no_ring(tmp_path, how):
    program = f"""
import sys
import rcomm
def work(world):
    data = bytearray(b"abc")
    world.group.all_reduce(data, wait=False).wait()
    world.group.all_reduce(data, wait=False)
    assert data == b"abc"
world = rcomm.init(rank=0, size=1, job="alone")
assert (world.rank, world.size, world.job) == (0, 1, "alone")
if {how!r} == "with":
    with world:
        work(world)
else:
    work(world)
    if {how!r} == "shutdown":
        world.shutdown()
assert not {{"numpy", "torch"}} & set(sys.modules)
"""
    environment = dict(os.environ, RCOMM_RING_DIR=str(tmp_path))
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, timeout=300, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert list(tmp_path.rglob("*.ring")) == []


def test_job_is_recorded_with_the_line_in_python(ranks):
    def body(world):
        world.group.all_reduce(np.zeros(4))
        if world.rank == 1:
            with rcomm.phase("looks at a picture"):
                time.sleep(10**6)
        world.group.all_reduce(np.zeros(4))

    line = body.__code__.co_firstlineno + 1
    started = ranks(2, body)
    report = started.stuck_report()
    assert report.culprit.culprit_ranks == (1,)
    assert "rank 1 never issued all_reduce #2" in str(report)
    assert f"test_arrays.py:{line}" in str(report)
    assert "looks at a picture" in report.culprit.sentence
