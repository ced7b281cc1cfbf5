"""Groups of the module rcomm over numpy's arrays, tensors and other memory, in real processes."""

from __future__ import annotations

import array
import asyncio
import ctypes
import os
import signal
import subprocess
import sys
import time
import traceback

import numpy as np
import pytest
import torch
from conftest import TIME_LIMIT, Job

import rcomm


class ArrayJob(Job):
    """Ranks that have joined a job by `rcomm.init()`; `body` gets the world."""

    def __init__(self, rings, size, body, timeout: float = TIME_LIMIT, ends: bool = True):
        self.timeout, self.ends = timeout, ends
        super().__init__(rings, size, body)

    def _run_rank(self, rank, size, port, body):
        os.environ.update(
            RANK=str(rank),
            WORLD_SIZE=str(size),
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(port),
            RCOMM_JOB="job",
            RCOMM_RING_DIR=str(self.root),
            RCOMM_DUMP_DIR=str(self.root / "dumps"),
        )
        code = 1
        try:
            world = rcomm.init(timeout=self.timeout)
            body(world)
            if self.ends:
                world.shutdown()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)


@pytest.fixture
def ranks(tmp_path):
    jobs = []

    def start(size, body, **options):
        jobs.append(ArrayJob(tmp_path, size, body, **options))
        return jobs[-1]

    yield start
    for job in jobs:
        job.end()


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
        g = world.group
        x = make([1.0 + g.rank, 2.0, 3.0, 4.0])

        def run(operation, *args, **kwargs):
            done = operation(*args, wait=wait, **kwargs)
            return done if wait else done.wait()

        assert run(g.all_reduce, x) is x
        assert read(x) == [6.0, 6.0, 9.0, 12.0]
        out = make([0.0] * 4)
        assert run(g.all_reduce, x, "max", out=out) is out
        assert read(out) == read(x) == [6.0, 6.0, 9.0, 12.0]
        own = make([float(g.rank)] * 2)
        whole = make([9.0] * 6)
        assert run(g.all_gather, own, out=whole) is whole
        assert read(whole) == [0.0, 0.0, 1.0, 1.0, 2.0, 2.0]
        part = make([0.0] * 2)
        run(g.reduce_scatter, whole, out=part)
        assert read(part) == [3.0 * g.rank] * 2
        run(g.all_to_all, make([float(g.rank)] * 3), out=(swapped := make([9.0] * 3)))
        assert read(swapped) == [0.0, 1.0, 2.0]
        assert run(g.broadcast, part, 2) is part
        assert read(part) == [6.0] * 2
        result = run(g.reduce, x, 1, rcomm.premul_sum(0.5))
        assert result is (x if g.rank == 1 else None)
        assert read(x) == ([9.0, 9.0, 13.5, 18.0] if g.rank == 1 else [6.0, 6.0, 9.0, 12.0])
        result = run(g.gather, own, 2, out=whole if g.rank == 2 else None)
        assert result is (whole if g.rank == 2 else None)
        run(g.scatter, whole if g.rank == 0 else None, 0, out=part)
        assert read(part) == [float(g.rank)] * 2
        run(g.barrier)
        if g.rank == 0:
            run(g.send, x, 1, tag=7)
        elif g.rank == 1:
            assert run(g.recv, out, rcomm.ANY, tag=7) == 0
            assert read(out) == [6.0, 6.0, 9.0, 12.0]
        run(g.all_reduce_coalesced, [x, part])
        assert read(part) == [3.0] * 2

    assert ranks(3, body).wait() == [0, 0, 0]


def test_results_are_new_arrays_of_the_library_of_the_input(ranks):
    def body(world):
        g = world.group
        x = np.arange(6, dtype=np.int64).reshape(3, 2) + 10 * g.rank
        y = g.all_gather(x)
        assert isinstance(y, np.ndarray) and y.shape == (2, 3, 2) and y.dtype == np.int64
        assert (y[1] == np.arange(6).reshape(3, 2) + 10).all()
        t = g.all_gather(torch.full((2,), g.rank, dtype=torch.bfloat16))
        assert isinstance(t, torch.Tensor) and t.dtype == torch.bfloat16
        assert t.tolist() == [[0.0, 0.0], [1.0, 1.0]]
        assert g.reduce_scatter(np.ones((4, 2), np.complex64)).shape == (2, 2)
        # Rows that differ: rank 0 has one, rank 1 two.
        own = np.full((g.rank + 1, 2), g.rank, np.float16)
        assert g.all_gather(own, rows=[1, 2]).tolist() == [[0, 0], [1, 1], [1, 1]]
        gathered = g.gather(own, 1, rows=[1, 2])
        assert gathered is None if g.rank == 0 else gathered.tolist() == [[0, 0], [1, 1], [1, 1]]
        part = g.reduce_scatter(np.ones((3, 2)), rows=[1, 2])
        assert part.tolist() == [[2.0, 2.0]] * (g.rank + 1)
        whole = np.arange(6.0).reshape(3, 2) if g.rank == 1 else None
        out = None if g.rank == 1 else np.empty((1, 2))
        part = g.scatter(whole, 1, rows=[1, 2], out=out)
        assert part.tolist() == ([[0.0, 1.0]] if g.rank == 0 else [[2.0, 3.0], [4.0, 5.0]])
        # Rank r sends r + 1 rows to rank 0 and one to rank 1, and the ranks tell each other.
        rows = [g.rank + 1, 1]
        got = g.all_to_all(np.full((sum(rows), 1), g.rank), rows=rows)
        assert got.ravel().tolist() == ([0, 1, 1] if g.rank == 0 else [0, 1])
        assert g.all_to_all(np.arange(4).reshape(2, 2) + 10 * g.rank).tolist() == [
            [2 * g.rank, 2 * g.rank + 1],
            [10 + 2 * g.rank, 11 + 2 * g.rank],
        ]
        assert g.all_reduce(np.array(2.5)).item() == 5.0
        assert g.all_reduce(np.empty((0, 3))).shape == (0, 3)
        # An array that must not be written can be an input.
        frozen = np.ones(2)
        frozen.flags.writeable = False
        assert g.all_reduce(frozen, out=np.empty(2)).tolist() == [2.0, 2.0]
        assert g.all_gather(b"ab", out=bytearray(4)) == bytearray(b"abab")

    assert ranks(2, body).wait() == [0, 0]


def test_every_element_type_is_summed(ranks):
    names = "int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64 complex64 complex128"

    def body(world):
        for name in names.split():
            x = np.full(3, world.rank + 1, name)
            world.group.all_reduce(x)
            assert (x == 3).all(), name
        flags = np.array([world.rank == 1, False])
        world.group.all_reduce(flags, "max")
        assert flags.tolist() == [True, False]

    assert ranks(2, body).wait() == [0, 0]


def test_objects_travel_as_json_and_by_pickle_only_where_both_sides_ask(ranks):
    def body(world):
        g = world.group
        assert g.all_gather_object({"loss": 0.5, "rank": g.rank})[1] == {"loss": 0.5, "rank": 1}
        assert g.broadcast_object([1, "two", None] if g.rank == 0 else None) == [1, "two", None]
        assert g.gather_object(g.rank, 1) == (None if g.rank == 0 else [0, 1])
        assert g.scatter_object(["a", "b"] if g.rank == 1 else None, 1) == "ab"[g.rank]
        if g.rank == 0:
            g.send_object("hello", 1, tag=3)
        else:
            assert g.recv_object(0, tag=3) == "hello"
        assert g.all_gather_object({1, 2}, pickle=True) == [{1, 2}] * 2
        with pytest.raises(rcomm.InvalidArgument, match="set is not JSON"):
            g.all_gather_object({1, 2})
        with pytest.raises(ValueError, match=r"not JSON compliant"):
            g.all_gather_object(float("nan"))
        with pytest.raises(rcomm.InvalidArgument, match="rcomm.pickle"):
            g.all_gather_object({"rcomm.pickle": "gA=="})
        # Rank 1 does not ask for pickles, so it refuses rank 0's; the group is still usable.
        if g.rank == 0:
            assert g.all_gather_object({1, 2}, pickle=True) == [{1, 2}, 3]
        else:
            with pytest.raises(rcomm.InvalidArgument, match="did not pass pickle=True"):
                g.all_gather_object(3)
        g.barrier()

    assert ranks(2, body).wait() == [0, 0]


def test_works_are_awaited_and_report_their_operation_and_number(ranks, tmp_path, until):
    go = tmp_path / "go"

    def body(world):
        g = world.group
        g.barrier()
        x = np.ones(4)
        if g.rank == 1:
            until(go.exists)
            g.all_reduce(x)
        else:
            work = g.all_reduce(x, wait=False)
            assert not work.done() and work.exception() is None
            assert (work.op, work.seq, work.duration) == ("all_reduce", 2, None)
            with pytest.raises(rcomm.Timeout, match="has not ended after 10ms: it continues"):
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
                assert await work is x
                await ticking
                return ticks

            # The event loop ran while the operation did.
            assert asyncio.run(both()) > 0
            assert work.done() and work.wait() is x
            called = []
            work.add_done_callback(called.append)
            until(lambda: called == [work])
        assert x.tolist() == [2.0] * 4

    assert ranks(2, body).wait() == [0, 0]


def test_groups_are_made_split_and_ended(ranks):
    def body(world):
        g = world.group
        assert (g.rank, g.size, g.ranks, g.timeout) == (world.rank, 3, [0, 1, 2], TIME_LIMIT)
        pair = world.new_group([2, 0], name="pair") if g.rank != 1 else None
        if pair is not None:
            assert (pair.name, pair.ranks, pair.rank) == ("pair", [2, 0], 0 if g.rank == 2 else 1)
            assert pair.all_reduce(np.array([g.rank])).tolist() == [2]
            pair.destroy()
            with pytest.raises(rcomm.Closed):
                pair.barrier()
        part = g.split(g.rank % 2, key=-g.rank, name="half", timeout=7)
        assert part.ranks == ([1] if g.rank == 1 else [2, 0]) and part.timeout == 7.0
        assert g.split(0 if g.rank == 2 else None) is None or g.rank == 2
        part.timeout = 9
        assert part.timeout == 9.0
        g.monitored_barrier(all=True)
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
        g = world.group
        x = np.zeros((4, 4))
        frozen = np.zeros(2)
        frozen.flags.writeable = False
        refused = [
            ("row-major", lambda: g.all_reduce(x[:, ::2])),
            ("row-major", lambda: g.all_reduce(x.T[:2])),
            ("may only be read", lambda: g.all_reduce(frozen)),
            ("may only be read", lambda: g.all_reduce(b"abc")),
            ("buffer protocol", lambda: g.all_reduce([1.0, 2.0])),
            ("buffer protocol", lambda: g.all_reduce(None)),
            ("require", lambda: g.all_reduce(torch.zeros(2, requires_grad=True))),
            ("torch.Tensor cannot be used", lambda: g.all_reduce(torch.zeros(2).to_sparse())),
            ("torch.Tensor", lambda: g.all_reduce(torch.zeros(2, device="meta"))),
            ("numpy.ndarray", lambda: g.all_reduce(np.array(["text"]))),
            ("does not hold 2 parts", lambda: g.all_gather(np.zeros(2), out=np.zeros(4, np.float32))),
            ("overlap", lambda: g.all_to_all(frozen_pair := np.zeros(4), out=frozen_pair)),
            ("does not know the reduction .median", lambda: g.all_reduce(np.zeros(2), "median")),
            ("omit out=", lambda: g.all_reduce(x, out=x)),
            ("premul_sum", lambda: g.all_reduce(np.zeros(2), 3)),
            ("root 5", lambda: g.broadcast(np.zeros(2), 5)),
            ("one is needed for each rank", lambda: g.all_gather(np.zeros((2, 2)), rows=[4])),
            ("needs rows=", lambda: g.all_to_all(np.zeros(2), rows_out=[1, 1])),
            ("give out=", lambda: g.reduce_scatter(np.zeros(3))),
            ("must not be negative", lambda: g.barrier(timeout=-1.0)),
            ("this rank itself", lambda: g.send(np.zeros(2), g.rank)),
            ("is not in a group", lambda: g.recv(np.zeros(2), 7)),
            ("give both", lambda: rcomm.init(rank=0)),
            ("is already rank", lambda: rcomm.init()),
            ("is already rank", lambda: rcomm.init(rank=0, size=1)),
        ]
        for match, call in refused:
            with pytest.raises(rcomm.InvalidArgument, match=match):
                call()
        with pytest.raises(rcomm.Unsupported, match="not defined for elements of type Float"):
            g.all_reduce(np.zeros(2, np.float32), "bxor")
        with pytest.raises(TypeError):
            g.broadcast(np.zeros(2), "zero")
        work = g.all_reduce(np.zeros(2), wait=False)
        pid = os.fork()
        if pid == 0:
            calls = [lambda: g.all_reduce(np.zeros(2)), work.wait, lambda: world.group, world.dump]
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
        assert g.all_reduce(np.ones(2)).tolist() == [2.0, 2.0]
        world.shutdown()
        world.shutdown()
        with pytest.raises(rcomm.Closed):
            world.new_group([world.rank])
        with pytest.raises(rcomm.Closed):
            g.barrier()

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


def test_job_is_recorded_with_the_line_in_python(ranks, until):
    def body(world):
        world.group.all_reduce(np.zeros(4))
        if world.rank == 1:
            with rcomm.phase("looks at a picture"):
                time.sleep(10**6)
        world.group.all_reduce(np.zeros(4))

    line = body.__code__.co_firstlineno + 1
    started = ranks(2, body)

    def stuck_report():
        if len(list(started.rings.glob("*.ring"))) < 2:
            return None
        report = rcomm.analyze(started.rings, overdue=0.5)
        return report if report.verdict == "stuck" else None

    report = until(stuck_report)
    assert report.culprit.culprit_ranks == (1,)
    assert "rank 1 never issued all_reduce #2" in str(report)
    assert f"test_arrays.py:{line}" in str(report)
    assert "looks at a picture" in report.culprit.sentence
