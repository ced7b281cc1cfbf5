"""Tests what real ranks record, as the programs read it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from conftest import RecordedJob

import rcomm
from rcomm import _cpp, _native, _programs

FOREVER = 10**6


def dumps_by_rank(job, tmp_path: Path) -> dict[int, dict]:
    """Each rank's record as a dump."""
    dumps = tmp_path / f"dumps-{time.monotonic_ns()}"
    rings = sorted(map(str, job.rings.glob("*.ring")))
    fr = ["rcomm-fr", "dump", "--format", "json", "-o", str(dumps), *rings]
    subprocess.run(fr, executable=_programs.find(fr[0]), check=True, capture_output=True)
    loaded = [json.loads(path.read_text()) for path in dumps.rglob("*.json")]
    return {dump["rank"]: dump for dump in loaded}


def test_operations_are_recorded_with_their_tensors_groups_and_call_sites(job, tmp_path, until):
    go = tmp_path / "go"

    def body(rank):
        tensor = torch.zeros(4, 8)
        dist.all_reduce(tensor)
        line = sys._getframe().f_lineno - 1
        pair = dist.new_group([0, 1], group_desc="a pair")
        dist.broadcast(tensor.to(torch.float64), 1, group=pair)
        out = torch.zeros(8, dtype=torch.int64)
        dist.all_gather_into_tensor(out, torch.zeros(4, dtype=torch.int64))
        if rank == 0:
            dist.send(tensor, 1)
        else:
            dist.recv(tensor, 0)
        dist.reduce_scatter_tensor(torch.zeros(4), torch.zeros(8))
        dist.barrier()
        (tmp_path / f"line-{rank}").write_text(str(line))
        until(go.exists)

    started = job(2, body)

    def completed():
        if len(list(started.rings.glob("*.ring"))) < 2:
            return None
        dumps = dumps_by_rank(started, tmp_path)
        ops = [entry for dump in dumps.values() for entry in dump["entries"]]
        done = len(ops) >= 12 and all(entry["state"] == "completed" for entry in ops)
        return dumps if done else None

    dumps = until(completed)
    go.write_text("")
    assert started.wait() == [0, 0]
    assert sorted(dumps) == [0, 1]
    for rank, dump in dumps.items():
        all_ops = {entry["profiling_name"].split()[0]: entry for entry in dump["entries"]}
        first = all_ops["gloo:all_reduce"]
        assert first["input_sizes"] == [[4, 8]] and first["input_dtypes"] == ["Float"]
        assert first["collective_seq_id"] == 1 and not first["is_p2p"]
        frame = dump["frames"][dump["stacks"][first["stack"]][0]]
        line = int((tmp_path / f"line-{rank}").read_text())
        assert (frame["filename"], frame["line"], frame["name"]) == (__file__, line, "body")
        cast = all_ops["gloo:broadcast"]
        assert cast["root"] == 1 and cast["input_dtypes"] == ["Double"]
        assert cast["process_group"][1] == "a pair"
        assert dump["pg_config"][cast["process_group"][0]]["ranks"] == "[0, 1]"
        gathered = all_ops["gloo:_all_gather_base"]
        assert gathered["output_sizes"] == [[8]] and gathered["input_dtypes"] == ["Long"]
        message = all_ops["gloo:send" if rank == 0 else "gloo:recv"]
        assert message["is_p2p"] and message["p2p_seq_id"] == 1
        assert message["profiling_name"].split()[1] in ("0->1", "1<-0")
        assert "gloo:barrier" in all_ops
        assert dump["status"]["heartbeat_ns"] > 0


def test_rank_that_does_not_arrive_is_named_while_the_job_hangs(job):
    def body(rank):
        for _ in range(3):
            dist.all_reduce(torch.zeros(4))
        if rank == 1:
            with rcomm.torch.phase("looks at a picture"):
                time.sleep(FOREVER)
        dist.all_reduce(torch.zeros(4))

    started = job(3, body)
    report = started.stuck_report()
    assert report.culprit.culprit_ranks == (1,)
    assert report.exit_code == 1 and not report.healthy
    assert "rank 1 never issued all_reduce #4" in str(report)
    assert "looks at a picture" in report.culprit.sentence
    assert report.html().startswith("<!") and report._repr_html_()


def test_rank_that_misses_a_monitored_barrier_is_named_while_the_others_wait_in_it(job):
    def body(rank):
        dist.monitored_barrier()
        if rank == 1:
            time.sleep(FOREVER)
        dist.monitored_barrier(timeout=timedelta(seconds=FOREVER))

    started = job(3, body)
    report = started.stuck_report()
    assert report.culprit.culprit_ranks == (1,)
    assert "rank 1 never issued monitored_barrier #2" in str(report)


def test_monitored_barrier_that_failed_is_recorded_as_failed(job, tmp_path):
    def body(rank):
        dist.all_reduce(torch.zeros(4))
        if rank == 0:
            with pytest.raises(RuntimeError, match="monitoredBarrier"):
                dist.monitored_barrier(timeout=timedelta(seconds=1))
        os._exit(0)

    started = job(2, body)
    assert started.wait() == [0, 0]
    last = dumps_by_rank(started, tmp_path)[0]["entries"][-1]
    assert last["profiling_name"] == "gloo:barrier"
    assert last.get("failed") and last["timeout_ms"] == 1000


def test_signal_prints_the_verdict_while_the_main_thread_waits_in_pytorch(job, tmp_path, until):
    stderr_file = tmp_path / "stderr_file"

    def body(rank):
        dist.all_reduce(torch.zeros(4))
        if rank == 1:
            time.sleep(FOREVER)
        # The verdict is printed to standard error.
        sys.stderr = stderr_file.open("w")
        rcomm.torch.why_on_signal()
        dist.all_reduce(torch.zeros(4))

    started = job(2, body)

    def answered():
        if stderr_file.exists():
            os.kill(started.pids[0], signal.SIGUSR2)
            time.sleep(0.2)
        return stderr_file.exists() and "rank 1 never issued all_reduce #2" in stderr_file.read_text()

    until(lambda: len(list(started.rings.glob("*.ring"))) == 2)
    until(lambda: all_reduces(started, tmp_path, 0) == 2)
    assert until(answered)


def test_signals_of_why_are_added_and_refused_ones_leave_other_libraries_alone():
    program = """
import asyncio, os, signal
import pytest
from rcomm.torch import why_on_signal

with pytest.raises(OSError):
    why_on_signal(signal.SIGKILL)
# Nothing writes into the pipe that the refused call has closed.
assert signal.set_wakeup_fd(-1) == -1
why_on_signal()
why_on_signal(signal.SIGUSR1)
own = signal.set_wakeup_fd(-1)
os.fstat(own)
with pytest.raises(OSError):
    why_on_signal(signal.SIGKILL)
other = os.pipe()[1]
os.set_blocking(other, False)
signal.set_wakeup_fd(other)
with pytest.raises(RuntimeError, match="another library"):
    why_on_signal()
assert signal.set_wakeup_fd(own) == other
child = os.fork()
if child == 0:
    # The thread that answers is the parent's.
    why_on_signal()
    assert signal.set_wakeup_fd(-1) != own
    os._exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
"""
    subprocess.run([sys.executable, "-c", program], timeout=300, check=True)


def all_reduces(job, tmp_path: Path, rank: int) -> int:
    """How many all_reduces a rank has issued."""
    ops = dumps_by_rank(job, tmp_path).get(rank, {"entries": []})["entries"]
    return sum(entry["profiling_name"].startswith("gloo:all_reduce") for entry in ops)


def test_killed_rank_is_named_after_its_death(job, until):
    def body(rank):
        dist.all_reduce(torch.zeros(4))
        if rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.all_reduce(torch.zeros(4))

    started = job(3, body)
    assert started.wait()[2] == -signal.SIGKILL
    report = rcomm.analyze(started.rings)
    assert report.culprit.culprit_ranks == (2,), str(report)


def test_killed_rank_is_told_from_ranks_that_sigterm_ended_afterward(job, tmp_path, until):
    ready = [tmp_path / f"ready-{rank}" for rank in range(3)]

    def body(rank):
        dist.all_reduce(torch.zeros(4))
        if rank == 2:
            until(lambda: all(file.exists() for file in ready[:2]))
            os.kill(os.getpid(), signal.SIGKILL)
        # Rank 1 sees that a peer is gone. Rank 0 does not, like a rank that a launcher ends before it can.
        if rank == 1:
            dist.all_reduce(torch.zeros(4), async_op=True)
        ready[rank].touch()
        time.sleep(FOREVER)

    started = job(3, body)
    assert os.waitpid(started.pids[2], 0)[1] == signal.SIGKILL
    for pid in started.pids[:2]:
        os.kill(pid, signal.SIGTERM)
    del started.pids[2]
    assert started.wait() == [-signal.SIGTERM] * 2
    report = rcomm.analyze(started.rings)
    assert report.verdict == "crashed" and report.culprit.culprit_ranks == (2,), str(report)
    exits = {rank: dump["status"].get("exit_code") for rank, dump in dumps_by_rank(started, tmp_path).items()}
    assert exits == {0: 128 + signal.SIGTERM, 1: 128 + signal.SIGTERM, 2: None}


def test_sigterm_is_not_recorded_for_a_program_that_handles_it_nor_for_a_forked_child(job, tmp_path, until):
    ready = [tmp_path / f"ready-{rank}" for rank in range(2)]

    def body(rank):
        dist.all_reduce(torch.zeros(4))
        if rank == 0:
            signal.signal(signal.SIGTERM, lambda *_: os._exit(7))
        else:
            pid = os.fork()
            if pid == 0:
                time.sleep(FOREVER)
            os.kill(pid, signal.SIGTERM)
            assert os.waitpid(pid, 0)[1] == signal.SIGTERM
        ready[rank].touch()
        if rank == 0:
            time.sleep(FOREVER)
        os._exit(0)

    started = job(2, body)
    until(lambda: all(file.exists() for file in ready))
    os.kill(started.pids[0], signal.SIGTERM)
    assert started.wait() == [7, 0]
    for dump in dumps_by_rank(started, tmp_path).values():
        assert "exit_code" not in dump["status"]


def test_uncaught_exception_is_recorded_as_the_phase(job, tmp_path):
    def body(rank):
        dist.all_reduce(torch.zeros(4))
        if rank == 1:
            raise ValueError("bad batch")
        dist.all_reduce(torch.zeros(4))

    started = job(2, body)
    assert started.wait() == [1, 1]
    dumps = dumps_by_rank(started, tmp_path)
    assert dumps[1]["status"]["phase"] == "raised ValueError: bad batch"
    assert dumps[0]["status"]["phase"].startswith("raised RuntimeError: ")
    # The operation that was under way when the peer ended has failed.
    assert dumps[0]["entries"][-1]["failed"] is True


def test_phase_that_the_program_names_is_not_taken_for_an_exception(job, tmp_path, until):
    def body(rank):
        dist.barrier()
        with rcomm.torch.phase("raised beds"):
            if rank == 0:
                dist.all_reduce(torch.zeros(4))
            time.sleep(FOREVER)

    started = job(2, body)

    def stuck():
        if len(list(started.rings.glob("*.ring"))) < 2:
            return None
        report = rcomm.analyze(started.rings, live=True, overdue=2)
        return report if report.verdict == "stuck" else None

    report = until(stuck)
    assert report.culprit.culprit_ranks == (1,), str(report)
    assert "phase ` raised beds`" in " ".join(str(report).split()), str(report)
    assert dumps_by_rank(started, tmp_path)[1]["status"]["phase"] == " raised beds"


@pytest.mark.parametrize("of_thread", ["printed", "given to sys.excepthook"])
def test_exception_in_a_thread_does_not_count_as_the_end_of_the_rank(job, of_thread):
    def body(rank):
        dist.all_reduce(torch.zeros(4))

        def fail():
            raise ValueError("bad batch")

        if of_thread != "printed":
            threading.excepthook = lambda args: sys.excepthook(*args[:3])
        thread = threading.Thread(target=fail)
        thread.start()
        thread.join()
        dist.all_reduce(torch.zeros(4))
        dist.destroy_process_group()

    started = job(2, body)
    assert started.wait() == [0, 0]
    # Rings of ranks that an exception has ended stay.
    assert not list(started.rings.glob("*.ring"))


@pytest.mark.parametrize(
    ("options", "typed", "told"),
    [([], "", "end\n"), ([], "1/0\n", "prompt\nend\n"), (["-i"], "", "prompt\n")],
)
def test_an_exception_at_a_prompt_does_not_end_the_program(tmp_path, options, typed, told):
    """`told` is what the hook takes an exception for: one typed at a prompt of `code`, and then the program's own."""
    script = tmp_path / "script.py"
    script.write_text(
        "import code, sys\nfrom rcomm import torch as recording\n"
        "file = open(sys.argv[1], 'a')\n"
        "sys.excepthook = lambda *_: print('prompt' if recording._is_at_prompt() else 'end', file=file, flush=True)\n"
        "if sys.argv[2:]:\n    code.interact()\n"
        "raise ValueError\n"
    )
    seen = tmp_path / "seen"
    command = [sys.executable, *options, str(script), str(seen), *(["prompt"] if typed else [])]
    subprocess.run(command, input=typed, text=True, capture_output=True, timeout=120)
    assert seen.read_text() == told


def test_ranks_that_destroy_their_groups_leave_no_ring_and_count_their_steps(job, tmp_path, until):
    go = tmp_path / "go"

    def body(rank):
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        data = torch.utils.data.DataLoader([torch.ones(4)] * 6, batch_size=2)
        for batch in data:
            optimizer.zero_grad()
            model(batch).sum().backward()
            optimizer.step()
        until(go.exists)
        dist.destroy_process_group()

    started = job(2, body)

    def stepped():
        rings = list(started.rings.glob("*.ring"))
        if len(rings) < 2:
            return False
        return all(dump["status"]["step"] == 3 for dump in dumps_by_rank(started, tmp_path).values())

    until(stepped)
    go.write_text("")
    assert started.wait() == [0, 0]
    assert not list(started.rings.glob("*.ring"))


def report_on_rank_1(job, tmp_path, until, body, code):
    """The text of the report that names rank 1 of three as the cause. `body` is given the rank and a function that
    returns once the processes of the other two have failed; rank 1 exits with `code` after that."""
    gone = [tmp_path / f"gone-{rank}" for rank in (0, 2)]
    started = job(3, lambda rank: body(rank, lambda: until(lambda: all(file.exists() for file in gone))))
    for file, pid in zip(gone, (started.pids[0], started.pids[2]), strict=True):
        assert os.waitpid(pid, 0)[1] != 0
        file.touch()
    started.pids[:] = [started.pids[1]]
    assert started.wait() == [code]
    report = rcomm.analyze(started.rings)
    assert report.verdict == "crashed" and report.culprit.culprit_ranks == (1,), str(report)
    return " ".join(str(report).split())


def test_rank_that_destroys_its_groups_one_step_early_is_named(job, tmp_path, until):
    def body(rank, until_others_failed):
        for _ in range(3 if rank == 1 else 4):
            dist.all_reduce(torch.zeros(4))
        dist.destroy_process_group()
        if rank == 1:
            until_others_failed()

    text = report_on_rank_1(job, tmp_path, until, body, 0)
    assert "never issued all_reduce #4" in text, text


def test_rank_that_destroys_its_groups_because_of_an_exception_is_named(job, tmp_path, until):
    def body(rank, until_others_failed):
        dist.all_reduce(torch.zeros(4))
        try:
            if rank == 1:
                raise ValueError("bad sample")
            dist.all_reduce(torch.zeros(4))
        finally:
            dist.destroy_process_group()
            if rank == 1:
                until_others_failed()

    text = report_on_rank_1(job, tmp_path, until, body, 1)
    assert "raised ValueError: bad sample" in text, text


def test_exit_of_a_program_is_no_exception_because_of_which_it_leaves(job, tmp_path):
    def body(rank):
        dist.all_reduce(torch.zeros(4))
        try:
            sys.exit(0)
        finally:
            dist.destroy_process_group()
            os.kill(os.getpid(), signal.SIGKILL)

    started = job(2, body)
    started.wait()
    phases = {dump["status"]["phase"] for dump in dumps_by_rank(started, tmp_path).values()}
    assert phases == {"left its process groups"}


def test_group_that_is_made_after_all_were_destroyed_ends_the_phase_of_leaving(job, tmp_path):
    def body(rank):
        dist.all_reduce(torch.zeros(4))
        dist.destroy_process_group()
        dist.init_process_group("gloo", init_method=f"file://{tmp_path}/again", rank=rank, world_size=2)
        dist.all_reduce(torch.zeros(4))
        os.kill(os.getpid(), signal.SIGKILL)

    started = job(2, body)
    started.wait()
    phases = {dump["status"].get("phase", "") for dump in dumps_by_rank(started, tmp_path).values()}
    assert phases == {""}


def test_data_loader_is_named_as_the_phase(job, tmp_path, until):
    class Stalls(torch.utils.data.Dataset):
        def __len__(self):
            return 8

        def __getitem__(self, index):
            if index == 4:
                time.sleep(FOREVER)
            return torch.ones(1)

    def body(rank):
        dist.barrier()
        for _ in torch.utils.data.DataLoader(Stalls(), batch_size=2):
            pass

    started = job(1, body)

    def phases():
        if not list(started.rings.glob("*.ring")):
            return None
        return [dump["status"]["phase"] for dump in dumps_by_rank(started, tmp_path).values()]

    until(lambda: phases() == ["in next() of the data loader"])


def test_refused_operation_is_recorded_as_failed_and_the_next_one_completes(job, tmp_path, until):
    go = tmp_path / "go"

    def body(rank):
        with pytest.raises(Exception, match="."):
            dist.all_gather([torch.zeros(4)], torch.zeros(4))  # too few outputs for two ranks
        dist.all_reduce(torch.zeros(4))
        until(go.exists)

    started = job(2, body)

    def once_completed():
        if len(list(started.rings.glob("*.ring"))) < 2:
            return None
        records = [dump["entries"] for dump in dumps_by_rank(started, tmp_path).values()]
        lasts = [(entries[-1]["profiling_name"], entries[-1]["state"]) for entries in records if entries]
        return records if lasts.count(("gloo:all_reduce", "completed")) == 2 else None

    records = until(once_completed)
    go.touch()
    assert started.wait() == [0, 0]
    for entries in records:
        assert all(entry.get("failed") for entry in entries[:-1])
        # A refused call is issued on no rank: the next call has its number.
        assert {entry["collective_seq_id"] for entry in entries} == {1}


def test_second_hook_does_not_end_a_refused_operation_for_one_that_could_not_be_read(tmp_path):
    ring = _native.Ring("job", 0, 1, directory=tmp_path, entries=64)
    hooks = ring.group("g", "", [0], backend="gloo")
    all_reduce = SimpleNamespace(name=3, root=-1, input_tensors=[torch.zeros(4)], output_tensors=[], work=None)
    unreadable = SimpleNamespace(name=3, root=-1, input_tensors=None, output_tensors=[], work=None)
    # PyTorch calls no second hook of an operation that it refuses.
    hooks.before(all_reduce)
    hooks.before(unreadable)
    hooks.after(unreadable)
    hooks.before(all_reduce)
    hooks.after(all_reduce)
    [dump] = dumps_by_rank(SimpleNamespace(rings=tmp_path / "job"), tmp_path).values()
    ends = [(entry["state"], entry.get("failed", False)) for entry in dump["entries"]]
    assert [failed for _, failed in ends] == [True, False], ends
    assert ends[1][0] == "completed", ends


def test_forked_child_of_a_rank_writes_nothing(job, tmp_path):
    def body(rank):
        dist.all_reduce(torch.zeros(4))
        pid = os.fork()
        if pid == 0:
            rcomm.torch.step(99)
            with rcomm.torch.phase("in the child"):
                pass
            os._exit(0)
        _, status = os.waitpid(pid, 0)
        assert status == 0
        dist.all_reduce(torch.zeros(4))
        os._exit(0)

    started = job(2, body)
    assert started.wait() == [0, 0]
    for dump in dumps_by_rank(started, tmp_path).values():
        assert dump["status"]["step"] == -1 and dump["status"]["phase"] == ""
        assert len(dump["entries"]) == 2


def test_entry_point_does_nothing_unless_asked_and_is_fast():
    look = (
        "import time, sys; from rcomm import _autoload; begun = time.perf_counter();"
        "_autoload.torch_backend(); print(time.perf_counter() - begun);"
        "assert 'torch' not in sys.modules and 'rcomm.torch' not in sys.modules"
    )
    environment = {key: value for key, value in os.environ.items() if key != "RCOMM_RECORD"}
    command = [sys.executable, "-c", look]
    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    assert float(done.stdout) < 0.001


def test_fixture_fails_a_test_whose_ranks_died(pytester):
    pytester.makepyfile(
        ranks="""
        import os, sys, time, torch, torch.distributed as dist

        rank, store, end = int(sys.argv[1]), sys.argv[2], sys.argv[3]
        dist.init_process_group("gloo", rank=rank, world_size=2, store=dist.FileStore(store, 2))
        dist.all_reduce(torch.zeros(2))
        if end != "well" and rank == 1:
            os.kill(os.getpid(), 9)
        if end == "dies between":
            # The other rank waits for nothing, and is killed in turn.
            time.sleep(600)
        dist.all_reduce(torch.zeros(2))
        dist.destroy_process_group()
        """,
        test_ranks="""
        import subprocess, sys
        import pytest

        @pytest.mark.parametrize("end", ["well", "dies", "dies between"])
        def test_ranks(rcomm_healthy, tmp_path, end):
            ranks = [
                subprocess.Popen([sys.executable, "ranks.py", str(rank), tmp_path / "store", end])
                for rank in range(2)
            ]
            codes = [ranks[1].wait()]
            if end == "dies between":
                ranks[0].kill()
            codes.append(ranks[0].wait())
            assert codes == [0, 0] or end != "well"
            assert any(rcomm_healthy.glob("*/*.ring")) == (end != "well")
        """,
    )
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider")
    result.assert_outcomes(passed=3, errors=2)
    # In the third test no operation was pending when the processes were killed.
    result.stdout.fnmatch_lines(["*the process of rank 1 is gone*"])


def test_hooks_in_cpp_watch_waits_only_once_an_operation_needs_it(start_job, native_hooks, tmp_path):
    def body(rank):
        work = dist.distributed_c10d.Work
        plain = work.wait
        dist.all_reduce(torch.zeros(4))
        assert work.wait is plain
        dist.reduce_scatter_tensor(torch.zeros(4), torch.zeros(8))
        assert work.wait is not plain
        watching = work.wait
        dist.reduce_scatter_tensor(torch.zeros(4), torch.zeros(8))
        assert work.wait is watching
        os._exit(0)

    started = start_job(RecordedJob, 2, body, cache=native_hooks)
    assert started.wait() == [0, 0]
    for dump in dumps_by_rank(started, tmp_path).values():
        states = [entry["state"] for entry in dump["entries"] if "reduce_scatter" in entry["profiling_name"]]
        # The waits have shown the ends.
        assert states == ["completed", "completed"]


def test_operation_that_was_waited_for_in_cpp_is_not_left_pending(job, tmp_path):
    def body(rank):
        from torch.distributed import _functional_collectives as functional

        for _ in range(3):
            part = functional.reduce_scatter_tensor(torch.ones(8), "sum", 0, dist.group.WORLD)
            assert functional.wait_tensor(part).tolist() == [2.0] * 4
            dist.all_reduce(torch.zeros(4))
        os._exit(0)

    started = job(2, body)
    assert started.wait() == [0, 0]
    for dump in dumps_by_rank(started, tmp_path).values():
        ops = [(entry["profiling_name"], entry["retired"]) for entry in dump["entries"]]
        scattered = [retired for name, retired in ops if "reduce_scatter" in name]
        # An all_reduce that is seen to end ends the reduce_scatters before it. The last one may not be seen to end.
        assert len(scattered) == 3 and all(scattered[:2]), ops


def test_operations_whose_end_cannot_be_seen_are_not_pending_for_good(job, tmp_path):
    # Three more operations than are remembered for a group (`MAX_DEFERRED` in src/hooks.rs).
    count = 1_024 + 3

    def body(rank):
        from torch.distributed import _functional_collectives as functional

        for _ in range(count):
            part = functional.reduce_scatter_tensor(torch.ones(8), "sum", 0, dist.group.WORLD)
            functional.wait_tensor(part)
        os._exit(0)

    started = job(2, body)
    assert started.wait() == [0, 0]
    for dump in dumps_by_rank(started, tmp_path).values():
        retired = [entry["retired"] for entry in dump["entries"] if "reduce_scatter" in entry["profiling_name"]]
        assert len(retired) == count and all(retired[:3])


def test_hooks_in_cpp_run_if_they_were_built(job, tmp_path):
    def body(rank):
        dist.all_reduce(torch.zeros(4))
        recorder = rcomm.torch._recorder
        mode = "python" if recorder.native is None else "c++"
        assert (recorder.watcher is None) == (mode == "c++")
        (tmp_path / f"mode-{rank}").write_text(mode)

    started = job(2, body)
    assert started.wait() == [0, 0]
    expected = "c++" if started.cache.exists() else "python"
    assert {(tmp_path / f"mode-{rank}").read_text() for rank in range(2)} == {expected}


def test_hooks_that_others_may_write_are_not_loaded(native_hooks, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(native_hooks))
    built = _cpp.find()
    assert built is not None
    for writable in (built, built.parent):
        before = writable.stat().st_mode
        writable.chmod(0o777)
        assert _cpp.find() is None
        writable.chmod(before)
    assert _cpp.find() == built


def test_failing_compiler_raises_a_build_error(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", "false")
    with pytest.raises(_cpp.BuildError, match="false failed"):
        _cpp.build()
    assert not list(tmp_path.rglob("*.so"))


def test_code_with_which_a_process_exits_is_reported(tmp_path):
    program = """
import sys, torch, torch.distributed as dist, rcomm.torch
rcomm.torch.record()
dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
dist.all_reduce(torch.zeros(2))
dist.destroy_process_group()
sys.exit(3)
"""
    environment = dict(os.environ, RCOMM_RECORD="1", RCOMM_RING_DIR=str(tmp_path), RCOMM_JOB="job")
    done = subprocess.run([sys.executable, "-c", program], env=environment, timeout=300)
    assert done.returncode == 3
    report = rcomm.analyze(tmp_path / "job")
    assert report.verdict == "crashed" and "exited with code 3" in str(report), str(report)


@pytest.mark.parametrize("hooks", ["python", "c++"])
@pytest.mark.parametrize("destroys", [True, False])
def test_process_that_exits_with_0_leaves_no_ring(request, tmp_path, destroys, hooks):
    program = f"""
import torch, torch.distributed as dist
dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
model(torch.ones(2)).sum().backward()
dist.all_reduce(torch.zeros(2), async_op=True)
if {destroys}:
    dist.destroy_process_group()
"""
    environment = dict(os.environ, RCOMM_RECORD="1", RCOMM_RING_DIR=str(tmp_path), RCOMM_JOB="job")
    cache = request.getfixturevalue("native_hooks") if hooks == "c++" else tmp_path / "no-cache"
    environment["XDG_CACHE_HOME"] = str(cache)
    done = subprocess.run([sys.executable, "-c", program], env=environment, timeout=300)
    assert done.returncode == 0
    assert not list(tmp_path.glob("job/*.ring"))


def test_oldest_rings_of_dead_jobs_are_removed_when_a_ring_is_made(tmp_path):
    program = f"""
import os
from rcomm import _native
rings = [_native.Ring(f"dead{{n}}", 0, 1, directory={str(tmp_path)!r}, entries=64) for n in range(40)]
os._exit(0)
"""
    subprocess.run([sys.executable, "-c", program], timeout=300, check=True)
    assert len(list(tmp_path.iterdir())) == 40
    ring = _native.Ring("alive", 0, 1, directory=tmp_path, entries=64)
    assert ring.path.exists()
    # The default of docs/CONFIGURATION.md.
    assert len(list(tmp_path.iterdir())) == 32 + 1
