"""Runs jobs of real ranks for the tests. The ranks are forked, so that torch is imported once."""

from __future__ import annotations

import ctypes
import datetime
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

import pytest
import torch
import torch.distributed as dist

pytest_plugins = ["pytester"]

# The longest time, in s, that a test waits for something.
TIME_LIMIT = 120

# Whether PyTorch has hooks, as 2.15 and later do: the backend needs other parts of these versions, too.
HAS_HOOKS = hasattr(dist.ProcessGroup, "register_pre_hook")
collect_ignore = [] if HAS_HOOKS else ["test_backend.py", "test_backend_refuses.py"]

os.environ["GLOO_SOCKET_IFNAME"] = "lo"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Job:
    """Ranks that run `body(rank)`, each in a process of its own."""

    def __init__(
        self, rings: Path, size: int, body: Callable[[int], None], cache: Path | None = None
    ) -> None:
        self.cache = cache or rings / "no-cache"
        self.rings = rings / "job"
        self.root = rings
        self.pids: list[int] = []
        self.port = port = _free_port()
        sys.stdout.flush()
        for rank in range(size):
            pid = os.fork()
            if pid == 0:
                self._run_rank(rank, size, port, body)
            self.pids.append(pid)

    def _run_rank(self, rank: int, size: int, port: int, body: Callable[[int], None]) -> None:
        os.environ.update(
            RANK=str(rank),
            WORLD_SIZE=str(size),
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(port),
            RCOMM_JOB="job",
            RCOMM_RING_DIR=str(self.root),
            XDG_CACHE_HOME=str(self.cache),
        )
        code = 1
        try:
            import rcomm._cpp
            import rcomm.torch

            rcomm.torch.record()
            if self.cache.exists():
                assert rcomm._cpp.find() is not None
            dist.init_process_group("gloo")
            body(rank)
            code = 0
        except BaseException as error:
            traceback.print_exc()
            # The interpreter does the same with an exception that is not caught.
            sys.excepthook(type(error), error, error.__traceback__)
        finally:
            import rcomm.torch

            if rcomm.torch._recorder is not None:
                rcomm.torch._recorder.end()
            sys.stdout.flush()
            sys.stderr.flush()
            # Ends as the interpreter does, through the C library: `os._exit` would run none of its exit functions.
            ctypes.CDLL(None).exit(code)

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

    def end(self) -> None:
        """Kills the ranks that were not waited for."""
        for pid in self.pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        self.pids = []


class BackendJob(Job):
    """Ranks whose default group is of one backend; the program imports and sets nothing for the backend."""

    def __init__(self, rings: Path, size: int, body, backend: str = "rcomm", timeout: float = TIME_LIMIT):
        self.backend, self.timeout = backend, timeout
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
            dist.init_process_group(self.backend, timeout=datetime.timedelta(seconds=self.timeout))
            body(rank)
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
        jobs.append(BackendJob(tmp_path, size, body, **options))
        return jobs[-1]

    yield start
    for job in jobs:
        job.end()


@pytest.fixture(scope="session")
def native_hooks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache in which the hooks in C++ were built."""
    if shutil.which("c++") is None:
        pytest.skip("no C++ compiler: the hooks in C++ are not tested")
    cache = tmp_path_factory.mktemp("cache")
    build = [sys.executable, "-m", "rcomm", "build-hooks"]
    done = subprocess.run(
        build, env={**os.environ, "XDG_CACHE_HOME": str(cache)}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return cache


@pytest.fixture(params=["python", "c++"])
def job(
    request: pytest.FixtureRequest, tmp_path: Path
) -> Iterator[Callable[[int, Callable[[int], None]], Job]]:
    """Starts jobs, recorded by the hooks in Python and by those in C++."""
    cache = request.getfixturevalue("native_hooks") if request.param == "c++" else None
    jobs: list[Job] = []

    def start(size: int, body: Callable[[int], None]) -> Job:
        jobs.append(Job(tmp_path, size, body, cache))
        return jobs[-1]

    yield start
    for started in jobs:
        started.end()


@pytest.fixture
def until() -> Callable[[Callable[[], object]], object]:
    """Waits until a condition is true, and returns its value."""

    def wait(condition: Callable[[], object]) -> object:
        deadline = time.monotonic() + TIME_LIMIT
        while True:
            value = condition()
            if value:
                return value
            assert time.monotonic() < deadline, f"{condition} did not come true"
            time.sleep(0.05)

    return wait
