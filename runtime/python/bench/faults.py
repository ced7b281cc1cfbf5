"""Measures how soon a command names a fault: real torchrun jobs on gloo, one fault each; the command is repeated.

    python bench/faults.py [--prepared nothing recorded server] [--faults kill sleep ...] [--patience 30]

The fault is in rank 2 of 4, in step 5. Seconds count from the moment at which rank 2 prints that the fault begins to
the end of the first run of the command whose output names rank 2 and the kind of fault. How the job was prepared
decides the command:

- `recorded`, with RCOMM_RECORD=1, and `server`, in which each rank called start_debug_server(): the command is
  `rcomm-top --once`, whose exit code has to be 1.
- `nothing`, an unchanged job: the command is `rcomm-fr collect --ask --analyze`, which has no record to judge. A line
  is right if it says where in the program rank 2 alone is, or in what state its process is. That needs py-spy.

Once a job that was not recorded has ended, the command is `rcomm-fr analyze LOG`: what torchrun and the ranks wrote.

The programs are those of the package, or else in PATH. At the end a table of the seconds is printed.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rcomm import _programs

_RANK = 2
_JOB = """
import os, signal, sys, time
from datetime import timedelta
import torch, torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

kind, server = sys.argv[1], sys.argv[2] == "server"
dist.init_process_group("gloo", timeout=timedelta(minutes=10))
rank = dist.get_rank()
if server:
    from torch.distributed.debug import start_debug_server
    start_debug_server(port=int(os.environ["DEBUG_PORT"]))
def is_faulty(step):
    is_here = rank == 2 and step == 5
    if is_here:
        print(f"FAULT {time.time():.3f}", flush=True)
    return is_here
class Data(Dataset):
    def __len__(self): return 10**6
    def __getitem__(self, i):
        if kind == "loader" and is_faulty(i // 8): time.sleep(10**6)
        return torch.ones(64), torch.ones(1)
torch.manual_seed(0)
layers = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 1))
model = torch.nn.parallel.DistributedDataParallel(layers, bucket_cap_mb=0.1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step, (x, y) in enumerate(DataLoader(Data(), batch_size=8)):
    own = torch.full((1024,), 1.0)
    if kind not in ("healthy", "loader") and is_faulty(step):
        if kind == "sleep": time.sleep(10**6)
        if kind == "kill": os.kill(os.getpid(), signal.SIGKILL)
        if kind == "stop": os.kill(os.getpid(), signal.SIGSTOP)
        if kind == "raise": raise ValueError("bad batch")
        if kind == "size": own = own[:512].clone()
        if kind == "dtype": own = own.double()
        if kind == "skip": own = None
        if kind == "op":
            dist.broadcast(own, 2)
            own = None
    (model(x) - y).pow(2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    if own is not None: dist.all_reduce(own)
    time.sleep(0.02)
"""

# What a right answer on an unchanged job holds: where rank 2 alone is in the program, or that its process, and no
# other, has ended or is stopped.
_STATE = r": process \d+ (has ended|is alive: a signal has stopped it)"
_UNPREPARED = rf"now:? +rank {_RANK} in |rank {_RANK}{_STATE}"
_OTHERS = rf"rank [^{_RANK}]{_STATE}"
# The verdict and its first finding, with the phase of the rank at fault at its end, take about this many words.
_FIRST_WORDS = 60
# What the first lines of a right answer hold, besides the rank.
_FAULTS = {
    "sleep": r"never issued",
    "loader": r"never issued.*data loader|never issued",
    "stop": r"never issued|stopped|frozen",
    "kill": r"is gone|SIGKILL",
    "raise": r"raised ValueError|is gone|ended",
    "skip": r"MISMATCH|never issued",
    "op": r"MISMATCH",
    "size": r"MISMATCH",
    "dtype": r"MISMATCH",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prepared", nargs="+", default=["nothing", "recorded", "server"])
    parser.add_argument("--faults", nargs="+", default=list(_FAULTS), choices=list(_FAULTS))
    parser.add_argument("--patience", type=float, default=30.0, help="seconds from the fault")
    options = parser.parse_args()
    # A run that is terminated ends its job, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    print(f"load {os.getloadavg()[0]:.1f}\n{'prepared':10}{'fault':8}{'seconds':>8}  the command, and its first line")
    table: dict[str, dict[str, str]] = {fault: {} for fault in options.faults}
    for prepared in options.prepared:
        for fault in options.faults:
            with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
                seconds, command, line = run(prepared, fault, Path(folder), options.patience)
            shown = f"{seconds:.1f}" if seconds is not None else "-"
            table[fault][prepared] = shown
            print(f"{prepared:10}{fault:8}{shown:>8}  {command}: {line}", flush=True)
    print(f"\nload {os.getloadavg()[0]:.1f}\n| the fault of rank {_RANK} | {' | '.join(options.prepared)} |")
    print("|---" * (1 + len(options.prepared)) + "|")
    for fault, row in table.items():
        print(f"| {fault} | {' | '.join(row[prepared] for prepared in options.prepared)} |")


def run(prepared: str, fault: str, folder: Path, patience: float) -> tuple[float | None, str, str]:
    """The seconds to the first right answer, or None; the command; the first lines of that answer, or the last."""
    job = f"faults-{os.getpid()}-{fault}"
    program = folder / "train.py"
    program.write_text(_JOB)
    environment = dict(
        os.environ,
        OMP_NUM_THREADS="1",
        GLOO_SOCKET_IFNAME="lo",
        DEBUG_PORT=str(_free_port()),
        RCOMM_RECORD="1" if prepared == "recorded" else "0",
        RCOMM_JOB=job,
        RCOMM_RING_DIR=str(folder / "rings"),
    )
    port = _free_port()
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "4"]
    torchrun += ["--master-addr", "127.0.0.1", "--master-port", str(port)]
    log = folder / "log"
    with log.open("w") as output:
        launcher = subprocess.Popen(
            [*torchrun, str(program), fault, prepared],
            env=environment,
            stdout=output,
            stderr=output,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
    # The folder keeps rings of other jobs out: on a node with one job the command needs no options.
    source = {"recorded": ["--ring-dir", str(folder / "rings")], "server": ["--store", f"127.0.0.1:{port}"]}
    if prepared == "nothing":
        archive = ["-o", str(folder / "job.rcap"), "--job", job]
        command = ["rcomm-fr", "collect", "--ask", "--analyze", *archive]
    else:
        command = ["rcomm-top", "--once", *source[prepared]]
    # With RCOMM_RING_DIR in its environment the command would read those rings only.
    plain = {name: value for name, value in environment.items() if name != "RCOMM_RING_DIR"}
    shown = "rcomm-fr collect --ask --analyze" if prepared == "nothing" else "rcomm-top --once"
    answer = "the job did not get to its fault"
    try:
        fault_time = None
        deadline = time.monotonic() + 120
        while fault_time is None and time.monotonic() < deadline:
            found = re.search(r"FAULT ([\d.]+)", log.read_text())
            fault_time = float(found[1]) if found else None
            time.sleep(0.02)
        while fault_time is not None and time.time() < fault_time + patience:
            reads_log = prepared != "recorded" and launcher.poll() is not None
            if reads_log:
                command, shown = ["rcomm-fr", "analyze", str(log)], "rcomm-fr analyze LOG"
            done = subprocess.run(command, executable=_programs.find(command[0]), env=plain, capture_output=True, text=True)
            if prepared == "nothing" and not reads_log:
                output = done.stderr + done.stdout
                found = re.search(f"^.*?({_UNPREPARED}).*$", output, re.MULTILINE)
                answer = found[0] if found else " ".join(output.split()[:40])
                is_right = found is not None and re.search(_OTHERS, output) is None
            else:
                answer = " ".join(done.stdout.split()[:_FIRST_WORDS])
                found = re.search(_FAULTS[fault], answer) and re.search(rf"rank {_RANK}\b", answer)
                is_right = found is not None and done.returncode == 1
            if is_right:
                return time.time() - fault_time, shown, answer
            time.sleep(0.1)
        return None, shown, answer
    finally:
        # A stopped rank gets the signal, too.
        for pid in _session(launcher.pid):
            os.kill(pid, signal.SIGKILL)
        launcher.wait()


def _session(leader: int) -> list[int]:
    """The processes that torchrun launched, and torchrun itself."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = entry.read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue
        parents[int(entry.parent.name)] = int(fields[1])
    found = [leader]
    for pid in found:
        found += [child for child, parent in parents.items() if parent == pid]
    return [pid for pid in found if Path(f"/proc/{pid}").exists()]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


if __name__ == "__main__":
    main()
