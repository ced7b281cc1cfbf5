"""Runs `rcomm-fr collect --ask` on a job that torchrun started and that hangs."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import HAS_HOOKS, _free_port

from rcomm import _programs

PROGRAM = """
import os, sys, time, torch, torch.distributed as dist
dist.init_process_group("gloo")
if sys.argv[1] == "server":
    from torch.distributed.debug import start_debug_server
    start_debug_server(port=int(sys.argv[2]))
dist.all_reduce(torch.zeros(4))
def lost():
    open(sys.argv[3], "w").close()
    time.sleep(10**6)
if dist.get_rank() == 1:
    lost()
dist.all_reduce(torch.zeros(4))
"""


@pytest.mark.parametrize("prepared", ["nothing", "recorded", "server"])
def test_running_job_is_asked_for_its_records(tmp_path: Path, until, prepared: str):
    if prepared == "server" and not HAS_HOOKS:
        pytest.skip("this PyTorch has no debug server")
    if prepared == "server":
        pytest.importorskip("tabulate", reason="PyTorch's debug server needs it")
    program, hangs, archive = tmp_path / "train.py", tmp_path / "hangs", tmp_path / "job.rcap"
    program.write_text(PROGRAM)
    job = f"collect-{os.getpid()}-{prepared}"
    environment = dict(
        os.environ,
        RCOMM_RECORD="1" if prepared == "recorded" else "0",
        RCOMM_JOB=job,
        RCOMM_RING_DIR=str(tmp_path / "rings"),
        GLOO_SOCKET_IFNAME="lo",
    )
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    torchrun += ["--master-addr", "127.0.0.1", "--master-port", str(_free_port())]
    arguments = [str(program), prepared, str(_free_port()), str(hangs)]
    started = subprocess.Popen([*torchrun, *arguments], env=environment)
    ask = ["rcomm-fr", "collect", "--ask", "--analyze", "--job", job, "-o", str(archive)]
    # The programs read the environment of the ranks, not their own.
    plain = {name: value for name, value in environment.items() if not name.startswith("RCOMM_")}

    def answer() -> str:
        done = subprocess.run(ask, executable=_programs.find(ask[0]), env=plain, capture_output=True, text=True)
        # A report's lines are wrapped at the width of a page.
        output = " ".join((done.stdout + done.stderr).split())
        # The answer is right once rank 1 is overdue, after five seconds.
        is_right = done.returncode == 1 and "rank 1 never issued all_reduce #2" in output
        return output if is_right or prepared == "nothing" else ""

    try:
        until(hangs.exists)
        output = until(answer)
    finally:
        # torchrun ends its ranks.
        started.send_signal(signal.SIGTERM)
        started.wait(timeout=300)
    if prepared == "nothing":
        assert "rank 1: process" in output and "is alive" in output and "no worker server" in output
        assert "was started without TORCH_NCCL_DEBUG_INFO_PIPE_FILE" in output
    if prepared == "server":
        assert f"rank 1 is now in lost ({program}:" in output
    if prepared != "nothing" and any(map(shutil.which, ("py-spy", "eu-stack", "gdb"))):
        # A sandbox may forbid tracing; the output then says so.
        assert "rank 1 is, below Python, in" in output or "native stack of rank 1: " in output
