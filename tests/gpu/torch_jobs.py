#!/usr/bin/env python3
"""Jobs of an unchanged PyTorch over NCCL with the profiler plug-in, on real devices, each with one fault.

While a job hangs, the first line of rcomm-fr on the plug-in's rings must name the rank at fault. Once the others have
given up, on the dumps that PyTorch writes then, and on both together, it must accuse no other rank. A job without a
fault must leave no ring. Prints a table; exits with 1 if a line of it is wrong, and with 0 and a line that begins with
"skipped" if there is no PyTorch that sees a device.

    tests/gpu/torch_jobs.py                         all jobs of 4 ranks, two at a time
    tests/gpu/torch_jobs.py --ranks 8 kill freeze   two of them, with 8 ranks
    tests/gpu/torch_jobs.py --judge DIR             the table of the reports that an earlier run left in DIR

Ranks take the devices in turn; more ranks than devices take NCCL 2.30 or newer.
"""

import argparse
import concurrent.futures
import ctypes
import glob
import json
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

# What each fault is, the rank at fault, and the codes of findings that name it.
FAULTS = {
    "never": ("a rank never issues the operation", 2, {"E101", "E102"}),
    "launch": ("a rank issues it, and its device does not start it", 2, {"E101", "E102"}),
    "kill": ("a rank is killed", 2, {"E150"}),
    "freeze": ("a rank is stopped", 2, {"E151"}),
    "size": ("a rank has another number of elements", 1, {"E112"}),
    "group": ("a rank never issues an operation of a sub-group", 3, {"E101", "E102"}),
}
HEALTHY = "healthy"
# The reports on each job, by the file that holds them, and the heading of the table.
MOMENTS = {"hung": "while it hung", "after": "afterward", "dumps": "PyTorch's dumps", "both": "rings and dumps"}
# Seconds within which all ranks of a job must have begun.
BEGIN = 180
# Seconds within which a process that was killed must be gone: its device's work has to be torn down first.
GONE = 60
# The first NCCL that lets ranks share a device, as NCCL itself numbers it.
SHARES_DEVICES = 23000
# The ports that no job has had yet. The first differs between runs of this script.
PORTS = iter(range(20000 + os.getpid() % 8000, 30000))
PORTS_LOCK = threading.Lock()
# The verdicts that tell what a job hangs on.
DECIDED = {"stuck", "mismatch", "crashed", "slow"}


def first_error(report):
    """The first finding of a report, if it is an error."""
    findings = report.get("findings") or [{}]
    return findings[0] if findings[0].get("severity") == "error" else None


def judge(fault, moment, report):
    """Returns "right", "silent" (no rank is accused) or "WRONG"."""
    _, rank, codes = FAULTS[fault]
    finding = first_error(report)
    accused = finding["culprit_ranks"] if finding else []
    if not accused:
        return "silent"
    if accused != [rank]:
        return "WRONG"
    # After the end, the ends of the processes may be what the records show first.
    return "right" if moment != "hung" or finding["code"] in codes else "WRONG"


def apart(report):
    """The number of the plug-in's communicators with operations that are not joined with a group of PyTorch's."""
    groups = report.get("groups") or []
    names = [it["group"]["name"] for it in groups if it.get("last_seq") is not None]
    return sum(name.startswith("nccl-") for name in names)


def table(out, names):
    """Prints what the reports below `out` say of each job; returns the rows for a file, and whether all are right."""
    rows, good = [], True
    print(f"{'job':9}" + "".join(f"{heading:17}" for heading in MOMENTS.values()) + "first line")
    for name in names:
        row, line = {"job": name}, text_of(out / name / "why")
        if name == HEALTHY:
            row["hung"] = text_of(out / name / "state") or "none"
            good &= row["hung"] == "right"
        for moment in MOMENTS if name != HEALTHY else []:
            path = out / name / f"{moment}.json"
            try:
                report = json.loads(path.read_text())
            except (OSError, ValueError):
                row[moment] = "none"
                good &= moment != "hung"
                continue
            row[moment] = judge(name, moment, report)
            good &= row[moment] == "right" or (moment != "hung" and row[moment] == "silent")
            if moment == "both":
                row["apart"] = apart(report)
            finding = first_error(report)
            if moment == "hung" or row[moment] == "WRONG":
                line = finding["sentence"] if finding else report.get("verdict", "")
        row["sentence"] = line
        rows.append(row)
        print(f"{name:9}" + "".join(f"{row.get(moment, ''):17}" for moment in MOMENTS) + line)
    return rows, good


def text_of(path):
    """The text of a file; empty if there is none."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


def analyze(fr, paths):
    """The report of rcomm-fr as text; None if there is nothing to read, or it fails."""
    if not paths:
        return None
    command = [fr, "analyze", "--format", "json", *paths]
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=60)
    except subprocess.TimeoutExpired:
        return None
    return done.stdout.decode(errors="replace") if done.returncode in (0, 1, 2) and done.stdout else None


def is_free(port):
    """Whether no socket has the port."""
    with socket.socket() as it:
        # As PyTorch's store does: connections of a job that is over do not hold the port.
        it.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            it.bind(("", port))
        except OSError:
            return False
    return True


def free_port():
    """A port that no socket has, another one for each job.

    It is below the ports that the system gives to sockets of any port: one of those could be taken by another program
    before the job's rank 0 listens.
    """
    with PORTS_LOCK:
        port = next((port for port in PORTS if is_free(port)), None)
    if port is None:
        raise OSError("no port is left for a job")
    return port


class Job:
    """The processes of one job, with their files below a folder."""

    def __init__(self, options, name):
        self.options, self.name = options, name
        self.at = options.out / name
        # What an earlier run left there would be taken for this job's.
        shutil.rmtree(self.at, ignore_errors=True)
        self.rings = self.at / "rings"
        for folder in (self.rings, self.at / "dumps"):
            folder.mkdir(parents=True)
        port = free_port()
        self.processes = [self.start(rank, port) for rank in range(options.ranks)]

    def start(self, rank, port):
        options = self.options
        dumps = str(self.at / "dumps" / "rank_")
        variables = {
            "RANK": rank,
            "WORLD_SIZE": options.ranks,
            "LOCAL_RANK": rank,
            "LOCAL_WORLD_SIZE": options.ranks,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            "TORCHELASTIC_RUN_ID": f"torch-{self.name}",
            "NCCL_PROFILER_PLUGIN": options.plugin,
            "RCOMM_RING_DIR": self.rings,
            "TORCH_FR_BUFFER_SIZE": 2000,
            "TORCH_NCCL_TRACE_BUFFER_SIZE": 2000,
            "TORCH_NCCL_DUMP_ON_TIMEOUT": 1,
            "TORCH_FR_DUMP_TEMP_FILE": dumps,
            "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": dumps,
            "OMP_NUM_THREADS": 1,
            # NCCL's errors, for the logs.
            "NCCL_DEBUG": os.environ.get("NCCL_DEBUG", "WARN"),
        }
        if options.ranks > options.devices:
            variables["NCCL_MULTI_RANK_GPU_ENABLE"] = 1
        with open(self.at / f"log.{rank}", "wb") as log:
            return subprocess.Popen(
                [options.python, os.path.abspath(__file__), "--rank", self.name, "--timeout", str(options.timeout)],
                env={**os.environ, **{name: str(value) for name, value in variables.items()}},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def ring_files(self):
        return sorted(glob.glob(str(self.rings / "*" / "*.ring")))

    def have_begun(self):
        logs = [(self.at / f"log.{rank}").read_bytes() for rank in range(self.options.ranks)]
        return all(any(line.endswith(b"ready") for line in log.splitlines()) for log in logs)

    def has_ended(self, but=()):
        return all(it.poll() is not None for rank, it in enumerate(self.processes) if rank not in but)

    def within(self, seconds, condition):
        """Waits until the condition holds, but at most so many seconds. Returns whether it holds."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if condition():
                return True
            time.sleep(0.5)
        return condition()

    def keep(self, moment, text):
        if text is not None:
            (self.at / f"{moment}.json").write_text(text)

    def look(self):
        """Keeps the first report that has a verdict on the hang."""
        text = analyze(self.options.fr, self.ring_files())
        if text is None or json.loads(text).get("verdict") not in DECIDED:
            return False
        self.keep("hung", text)
        return True

    def explain(self, what):
        """Keeps why there is no report, with the last lines of the ranks' logs."""
        lines = [f"{what};"]
        for rank in range(self.options.ranks):
            last = text_of(self.at / f"log.{rank}").splitlines()[-3:]
            lines.append(f"rank {rank}: {' | '.join(last) or 'printed nothing'}")
        (self.at / "why").write_text("\n    ".join(lines) + "\n")

    def run(self):
        try:
            if self.name == HEALTHY:
                ended = self.within(BEGIN, self.has_ended)
                well = ended and all(it.returncode == 0 for it in self.processes)
                left = self.ring_files()
                state = "right" if well and not left else f"WRONG: {'rings are left' if well else 'a rank failed'}"
                (self.at / "state").write_text(state)
                if not well:
                    self.explain("not all ranks have ended well" if ended else f"it did not end in {BEGIN} s")
            elif not (self.within(BEGIN, lambda: self.have_begun() or self.has_ended()) and self.have_begun()):
                self.explain("a rank ended early" if self.has_ended() else f"not all ranks began in {BEGIN} s")
            else:
                if not self.within(self.options.timeout * 0.8, self.look):
                    rings = self.ring_files()
                    self.explain("rcomm-fr found no fault" if rings else "the plug-in made no ring")
                _, rank, _ = FAULTS[self.name]
                self.within(self.options.timeout + 60, lambda: self.has_ended(but=(rank,)))
                rings, dumps = self.ring_files(), sorted(glob.glob(str(self.at / "dumps" / "*")))
                self.keep("after", analyze(self.options.fr, rings))
                self.keep("dumps", analyze(self.options.fr, dumps))
                if rings and dumps:
                    self.keep("both", analyze(self.options.fr, rings + dumps))
        finally:
            for process in self.processes:
                if process.poll() is None:
                    process.kill()
            for process in self.processes:
                try:
                    process.wait(GONE)
                except subprocess.TimeoutExpired:
                    print(f"{self.name}: process {process.pid} was killed and is still there", file=sys.stderr)


def run_job(options, name):
    """Runs one job, and says so once it is over."""
    began = time.monotonic()
    try:
        Job(options, name).run()
    except Exception as error:
        # The table must have the other jobs nevertheless.
        (options.out / name / "why").write_text(f"the script failed: {error!r}\n")
    print(f"{name}: over after {time.monotonic() - began:.0f} s", flush=True)


def rank_of_job(fault, timeout):
    """Runs one rank of a PyTorch job over NCCL, which knows nothing of rcomm."""
    import datetime

    # The rank must not outlive the script, which may be ended by a signal: PR_SET_PDEATHSIG of prctl(2).
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    # A rank that aborts leaves no file with its memory.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    import torch
    import torch.distributed as dist

    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    patience = datetime.timedelta(seconds=timeout)
    dist.init_process_group("nccl", timeout=patience)
    # A sub-group does not have the time-out of the whole group by itself.
    pairs = [dist.new_group([first, first + 1], timeout=patience) for first in range(0, size - 1, 2)]
    pair = pairs[rank // 2] if rank // 2 < len(pairs) else None
    part = torch.ones(1 << 16, device=device)
    whole = torch.empty(2 << 16, device=device)

    def gather():
        if pair is not None:
            dist.all_gather_into_tensor(whole, part, group=pair)

    for _ in range(200 if fault == HEALTHY else 8):
        part.fill_(1)
        dist.all_reduce(part)
        gather()
    torch.cuda.synchronize()
    print("ready", flush=True)
    if fault == HEALTHY:
        dist.destroy_process_group()
        return
    is_at_fault = rank == FAULTS[fault][1]
    # Longer than the others wait.
    hold = timeout + 60
    if is_at_fault and fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if is_at_fault and fault == "freeze":
        os.kill(os.getpid(), signal.SIGSTOP)
    if is_at_fault and fault in ("never", "group"):
        time.sleep(hold)
        os._exit(0)
    if is_at_fault and fault == "launch":
        torch.cuda._sleep(int(2e9 * hold))
    if fault == "group":
        gather()
    dist.all_reduce(part[:1000] if is_at_fault and fault == "size" else part)
    torch.cuda.synchronize()
    # A rank with fewer elements may be done; it waits as the others do.
    time.sleep(hold)
    os._exit(0)


# Prints the number of devices, PyTorch's version, and that of the NCCL that is loaded with it (0 = not found).
# `torch.cuda.nccl.version` would be that of the headers that PyTorch was built with.
PROBE = """
import ctypes, torch
version = ctypes.c_int(0)
try:
    ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(version))
except (OSError, AttributeError):
    pass
print(torch.cuda.device_count(), torch.__version__, version.value)
"""


def devices_of(python):
    """The number of devices that a Python's PyTorch sees, the version of its NCCL, and a sentence with both."""
    try:
        done = subprocess.run([python, "-c", PROBE], stdout=subprocess.PIPE, stderr=subprocess.PIPE, timeout=300)
    except (OSError, subprocess.TimeoutExpired) as error:
        return 0, 0, str(error)
    if done.returncode != 0:
        last = done.stderr.decode(errors="replace").strip().splitlines()
        return 0, 0, last[-1] if last else f"{python} failed"
    words = done.stdout.decode(errors="replace").split()[-3:]
    if len(words) != 3 or not (words[0].isdigit() and words[2].isdigit()):
        return 0, 0, f"{python} printed {' '.join(words) or 'nothing'}"
    number, version, nccl = words
    return int(number), int(nccl), f"PyTorch {version} with NCCL {nccl} sees {number} devices"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [*FAULTS, HEALTHY]
    lines = [f"{name} ({about})" for name, (about, _, _) in FAULTS.items()]
    parser.add_argument("jobs", nargs="*", metavar="JOB", help=f"default: all of {', '.join(lines)}, {HEALTHY}")
    parser.add_argument("--ranks", type=int, default=4, help="ranks of each job, at least 4 (default %(default)s)")
    parser.add_argument("--at-once", type=int, default=2, help="jobs at a time (default %(default)s)")
    parser.add_argument("--timeout", type=int, default=20, help="PyTorch's time-out, s (default %(default)s)")
    parser.add_argument("--fr", help="rcomm-fr (default: in PATH, beside this script, or built in target/release)")
    parser.add_argument("--plugin", help="the plug-in (default: as `rcomm-fr nccl-plugin` prints it)")
    parser.add_argument("--python", default=sys.executable, help="a Python with PyTorch (default %(default)s)")
    parser.add_argument("--out", type=Path, help="where reports, rings and logs go (default: a temporary folder)")
    parser.add_argument("--json", type=Path, help="a file for the table")
    parser.add_argument("--judge", type=Path, metavar="DIR", help="judge the reports of an earlier run in DIR alone")
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        return rank_of_job(options.rank, options.timeout)
    unknown = [name for name in options.jobs if name not in names]
    if unknown or options.ranks < 4 or options.at_once < 1:
        parser.error(f"unknown jobs: {' '.join(unknown)}" if unknown else "--ranks is at least 4, --at-once at least 1")
    if options.judge:
        options.jobs = options.jobs or [name for name in names if (options.judge / name).is_dir()]
        if not options.jobs:
            parser.error(f"{options.judge} has no reports of a run")
        options.out = options.judge
    else:
        options.jobs = options.jobs or names
        run(parser, options)
    rows, good = table(options.out, options.jobs)
    if options.json:
        options.json.write_text(json.dumps({"jobs": rows, "ranks": options.ranks}, indent=2) + "\n")
    return 0 if good else 1


def run(parser, options):
    """Runs the jobs, whose reports are then below `options.out`."""
    options.devices, nccl, why = devices_of(options.python)
    if options.devices == 0:
        print(f"skipped: no device for PyTorch over NCCL: {why}", file=sys.stderr)
        sys.exit(0)
    if 0 < nccl < SHARES_DEVICES and options.ranks > options.devices:
        print(f"skipped: {options.ranks} ranks cannot share devices before NCCL 2.30: {why}", file=sys.stderr)
        sys.exit(0)
    here = Path(__file__).resolve().parent
    places = [here / "rcomm-fr", here / "bin" / "rcomm-fr", here.parent.parent / "target/release/rcomm-fr"]
    options.fr = options.fr or shutil.which("rcomm-fr") or next((str(it) for it in places if it.is_file()), None)
    if options.fr is None:
        parser.error("there is no rcomm-fr: name it with --fr")
    if options.plugin is None:
        asked = subprocess.run([options.fr, "nccl-plugin"], stdout=subprocess.PIPE)
        if asked.returncode != 0:
            parser.error("rcomm-fr finds no plug-in: name it with --plugin")
        options.plugin = asked.stdout.decode().strip()
    options.plugin = os.path.abspath(options.plugin)
    try:
        # NCCL would go on without a plug-in that it cannot load.
        ctypes.CDLL(options.plugin)
    except OSError as error:
        parser.error(f"the plug-in cannot be loaded: {error}")
    options.out = (options.out or Path(tempfile.mkdtemp(prefix="rcomm-torch-jobs-"))).resolve()
    print(f"{why}; {options.ranks} ranks; files in {options.out}", flush=True)
    with concurrent.futures.ThreadPoolExecutor(options.at_once) as pool:
        list(pool.map(lambda name: run_job(options, name), options.jobs))


if __name__ == "__main__":
    sys.exit(main())
