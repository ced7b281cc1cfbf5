"""Runs jobs of real ranks for the tests. The ranks are forked, so that torch is imported once."""

from __future__ import annotations

import ctypes
import datetime
import functools
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest
import torch.distributed as dist

import rcomm.torch
from rcomm import _cpp

pytest_plugins = ["pytester"]

_Value = TypeVar("_Value")

# The longest time, in s, that a test waits for something.
TIME_LIMIT = 120

# Whether PyTorch has hooks, as 2.15 and later do: the backend needs other parts of these versions, too.
HAS_HOOKS = hasattr(dist.ProcessGroup, "register_pre_hook")
collect_ignore_glob = [] if HAS_HOOKS else ["test_backend*.py"]

os.environ["GLOO_SOCKET_IFNAME"] = "lo"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _wait_until(condition: Callable[[], _Value | None]) -> _Value:
    deadline = time.monotonic() + TIME_LIMIT
    while True:
        value = condition()
        if value:
            return value
        assert time.monotonic() < deadline, f"{condition} did not come true"
        time.sleep(0.05)


class Job:
    """Ranks that run `body`, each in a process of its own. A subclass decides how they join the job."""

    def __init__(self, root: Path, size: int, body: Callable[..., object]) -> None:
        self.root, self.rings = root, root / "job"
        self.port = _free_port()
        self.pids: list[int] = []
        for rank in range(size):
            self.start(rank, size, body)

    def start(self, rank: int, size: int, body: Callable[..., object], **options: object) -> None:
        """Starts the process of a rank; `options` are those of `join_and_run`."""
        sys.stdout.flush()
        pid = os.fork()
        if pid == 0:
            self._live(rank, size, body, options)
        self.pids.append(pid)

    def _live(self, rank: int, size: int, body: Callable[..., object], options: dict[str, object]) -> None:
        os.environ.update(
            RANK=str(rank),
            WORLD_SIZE=str(size),
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(self.port),
            RCOMM_JOB=self.rings.name,
            RCOMM_RING_DIR=str(self.root),
            RCOMM_DUMP_DIR=str(self.root / "dumps"),
        )
        code = 1
        try:
            self.join_and_run(rank, body, **options)
            code = 0
        except BaseException as error:
            self.fail(error)
        finally:
            self.exit(code)

    def join_and_run(self, rank: int, body: Callable[..., object]) -> None:
        """Runs in the process of a rank: joins the job, and runs `body`."""
        raise NotImplementedError

    def fail(self, error: BaseException) -> None:
        """Runs in the process of a rank that an exception ends."""
        traceback.print_exception(error)

    def exit(self, code: int) -> None:
        """Ends the process of a rank."""
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)

    def wait(self) -> list[int]:
        """Waits for all ranks. Returns their exit codes; minus the signal's number for one that was killed."""
        deadline = time.monotonic() + TIME_LIMIT
        codes = []
        for pid in self.pids:
            while True:
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    codes.append(os.waitstatus_to_exitcode(status))
                    break
                assert time.monotonic() < deadline, f"process {pid} still runs"
                time.sleep(0.02)
        self.pids = []
        return codes

    def stuck_report(self) -> rcomm.Report:
        """Waits until the rings of all ranks show that the job is stuck. Returns the report on them."""

        def report() -> rcomm.Report | None:
            if len(list(self.rings.glob("*.ring"))) < len(self.pids):
                return None
            report = rcomm.analyze(self.rings, overdue=0.5)
            return report if report.verdict == "stuck" else None

        return _wait_until(report)

    def end(self) -> None:
        """Kills the ranks that were not waited for."""
        for pid in self.pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        self.pids = []


class RecordedJob(Job):
    """Ranks on gloo that are recorded, by the hooks in C++ if `cache` has them. `body` gets the rank."""

    def __init__(self, root: Path, size: int, body: Callable[[int], object], cache: Path | None = None) -> None:
        self.cache = cache or root / "no-cache"
        super().__init__(root, size, body)

    def join_and_run(self, rank: int, body: Callable[[int], object]) -> None:
        os.environ["XDG_CACHE_HOME"] = str(self.cache)
        rcomm.torch.record()
        if self.cache.exists():
            assert _cpp.find() is not None
        dist.init_process_group("gloo")
        body(rank)

    def fail(self, error: BaseException) -> None:
        # The interpreter does the same with an exception that is not caught.
        sys.excepthook(type(error), error, error.__traceback__)

    def exit(self, code: int) -> None:
        if rcomm.torch._recorder is not None:
            rcomm.torch._recorder.end()
        sys.stdout.flush()
        sys.stderr.flush()
        # Ends as the interpreter does, through the C library: `os._exit` would run none of its exit functions.
        ctypes.CDLL(None).exit(code)


class BackendJob(Job):
    """Ranks whose default group is of a backend, which PyTorch finds by its name. `body` gets the rank."""

    def __init__(
        self,
        root: Path,
        size: int,
        body: Callable[[int], object],
        backend: str = "rcomm",
        timeout: float = TIME_LIMIT,
    ) -> None:
        self.backend, self.timeout = backend, timeout
        super().__init__(root, size, body)

    def join_and_run(self, rank: int, body: Callable[[int], object]) -> None:
        dist.init_process_group(self.backend, timeout=datetime.timedelta(seconds=self.timeout))
        body(rank)


class ArrayJob(Job):
    """Ranks that join by `rcomm.init()`. `body` gets the world, which is shut down after it if `ends`."""

    def __init__(
        self,
        root: Path,
        size: int,
        body: Callable[[rcomm.World], object],
        timeout: float = TIME_LIMIT,
        ends: bool = True,
    ) -> None:
        self.timeout, self.ends = timeout, ends
        super().__init__(root, size, body)

    def join_and_run(self, rank: int, body: Callable[[rcomm.World], object], join: bool = False) -> None:
        world = rcomm.init(timeout=self.timeout, join=join)
        body(world)
        if self.ends:
            world.shutdown()


@pytest.fixture
def start_job(tmp_path: Path) -> Iterator[Callable[..., Job]]:
    """Starts jobs of the class that it is given, whose ranks end with the test."""
    jobs: list[Job] = []

    def start(kind: type[Job], size: int, body: Callable[..., object], **options: object) -> Job:
        jobs.append(kind(tmp_path, size, body, **options))
        return jobs[-1]

    yield start
    for started in jobs:
        started.end()


@pytest.fixture
def ranks(start_job: Callable[..., Job]) -> Callable[..., Job]:
    """Starts jobs on the backend "rcomm"."""
    return functools.partial(start_job, BackendJob)


@pytest.fixture(scope="session")
def native_hooks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache in which the hooks in C++ were built."""
    if shutil.which("c++") is None:
        pytest.skip("no C++ compiler: the hooks in C++ are not tested")
    cache = tmp_path_factory.mktemp("cache")
    build = [sys.executable, "-m", "rcomm", "build-hooks"]
    done = subprocess.run(build, env={**os.environ, "XDG_CACHE_HOME": str(cache)}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return cache


@pytest.fixture(params=["python", "c++"])
def job(request: pytest.FixtureRequest, start_job: Callable[..., Job]) -> Callable[..., Job]:
    """Starts jobs on gloo, recorded by the hooks in Python and by those in C++."""
    cache = request.getfixturevalue("native_hooks") if request.param == "c++" else None
    return functools.partial(start_job, RecordedJob, cache=cache)


@pytest.fixture
def until() -> Callable[[Callable[[], object]], object]:
    """Waits until a condition is true, and returns its value."""
    return _wait_until
