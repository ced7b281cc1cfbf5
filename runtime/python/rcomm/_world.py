"""`init`, by which a process joins a job; its open world, its phase and its step; what the interpreter's end does."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import os
import sys
import sysconfig
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from types import TracebackType
from typing import Any

from . import _native
from ._errors import Error, InvalidArgument, first_line

__all__ = ["ANY", "Group", "PremulSum", "Work", "World", "init", "phase", "premul_sum", "step"]

Group = _native.ArrayGroup
Work = _native.ArrayWork

ANY = None
"""The source of a receive from any rank."""


@dataclass(frozen=True)
class PremulSum:
    """A reduction: the sum, in which each rank's values are first multiplied by its factor."""

    factor: float


def premul_sum(factor: float) -> PremulSum:
    """The sum in which this rank's values are first multiplied by `factor`."""
    return PremulSum(factor)


class World:
    """One process's place in a job. As a context manager, the world is shut down at the end of the block. If the block
    raises, other than to exit with 0, the world is abandoned: the other ranks' errors give this rank's exception as the
    reason."""

    def __init__(self, native: _native.ArrayWorld) -> None:
        self._native = native

    @property
    def rank(self) -> int:
        """This process's rank."""
        return self._native.rank

    @property
    def size(self) -> int:
        """The number of ranks with which the job began, or which the last `grow` asked for."""
        return self._native.size

    @property
    def job(self) -> str:
        """The job's name."""
        return self._native.job

    @property
    def group(self) -> Group:
        """The group of all ranks that are left."""
        return self._native.group

    @property
    def path(self) -> str | None:
        """The file of this rank's ring; None if the ring is in the process's own memory."""
        path = self._native.path
        return None if path is None else os.fspath(path)

    @property
    def dump_dir(self) -> str:
        """The folder of this run's dumps, which the first dump makes."""
        return os.fspath(self._native.dump_dir)

    @property
    def is_open(self) -> bool:
        """Whether the world was neither shut down nor abandoned; False in a forked child."""
        return self._native.is_open

    def new_group(
        self, ranks: list[int], *, name: str = "", timeout: float | timedelta | None = None
    ) -> Group:
        """A group of these ranks, in this order. Exactly its members call this, all with the same list."""
        return self._native.new_group(list(ranks), name=name, timeout=timeout)

    def shrink(self, without: list[int]) -> World:
        """Goes on without these ranks, after they were lost: `group` is then the group of the remaining ranks, and
        groups with a lost member are aborted. All remaining ranks call this with the same list. Blocks until they have,
        for the world's time-out at most. Ranks keep their numbers in the world. Returns this world."""
        self._native.shrink(list(without))
        return self

    def grow(self, lost: list[int], size: int) -> World:
        """Makes this world anew with `size` ranks: the remaining processes keep their ranks, and processes that join
        (``rcomm.init(join=True)``, or ``RCOMM_JOIN=1``) take the other ranks below `size`. All remaining ranks call
        this with the same size and the same ranks in `lost`, which are those not excluded by `shrink` before. Blocks
        until all `size` ranks have come, for the `init_timeout` of `init` at most. `group` is then the group of all
        ranks; all other groups have ended, and `path` and `dump_dir` have changed. The processes that joined know
        nothing of the program's state. Returns this world.

        Raises `rcomm.InvalidArgument` for arguments that are wrong, `rcomm.Mismatch` if the ranks' arguments differ,
        and an `rcomm.Error` that names the ranks that did not come. The world is then as it was, and the remaining
        ranks may call `grow` again, or `shrink`."""
        self._native.grow(list(lost), size)
        if _phase:
            self._native.phase(_phase)
        return self

    def phase(self, name: str) -> contextlib.AbstractContextManager[None]:
        """Does the same as `rcomm.phase`."""
        return phase(name)

    def step(self, number: int) -> contextlib.AbstractContextManager[None]:
        """Does the same as `rcomm.step`."""
        return step(number)

    def dump(self) -> str:
        """Writes this rank's dump and returns the dump's path."""
        return self._native.dump()

    def shutdown(self, *, timeout: float | timedelta | None = None) -> None:
        """Waits for pending operations, then for the other ranks, each time for `timeout` at most (if not given, the
        world's time-out), and ends the world. All ranks call this. A second call does nothing."""
        _forget(self)
        self._native.shutdown(timeout=timeout)

    def abandon(self, reason: str) -> None:
        """Ends the world at once: what is pending fails, on the other ranks with this reason, and the ring stays."""
        _forget(self)
        self._native.abandon(reason)

    def _abandon_for(self, error: BaseException) -> None:
        _forget(self)
        self._native.abandon(first_line(error), is_exception=True)

    def __enter__(self) -> World:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None or isinstance(error, SystemExit) and not error.code:
            self.shutdown()
        elif self.is_open:
            self._abandon_for(error)

    def __repr__(self) -> str:
        return repr(self._native)


def open_world() -> World | None:
    """The world that `init` made; None if it was ended, or there was none."""
    world = _world
    return world if world is not None and world.is_open else None


def init(
    *,
    rank: int | None = None,
    size: int | None = None,
    address: str | None = None,
    timeout: float | timedelta | None = None,
    init_timeout: float | timedelta | None = None,
    job: str | None = None,
    join: bool = False,
) -> World:
    """Joins the job that the launcher's environment describes (torchrun, Slurm, mpirun, rcomm-run), or the one at
    `address` (``"host:port"``) as rank `rank` of `size`. A job of one rank needs no address.

    In records the job has the name `job`, else that in ``RCOMM_JOB``, else the launcher's. `timeout` is the time-out of
    operations, in seconds; all other options are those of the environment (``RCOMM_*``). Blocks until all ranks have
    joined, for `init_timeout` at most. With `join` this process takes a place in a job that runs already, once the
    job's ranks call `World.grow`; the launcher's environment or the arguments then say which rank this process becomes.

    Raises `rcomm.Error` and its subclasses; `rcomm.InvalidArgument` also if this process already has an open world.
    """
    global _world
    if (rank is None) != (size is None):
        raise InvalidArgument("give both rank= and size=, or neither")
    if rank is None and address is not None:
        raise InvalidArgument(f"address={address!r} needs rank= and size=")
    host, port = None, 0
    if address is not None:
        host, _, number = address.rpartition(":")
        if not host or not number.isdecimal() or not 0 < int(number) < 65536:
            raise InvalidArgument(f"address={address!r} is not of the form host:port")
        host, port = host.strip("[]"), int(number)
    elif size is not None and size != 1:
        raise InvalidArgument(f"a job of {size} ranks needs address=")
    with _lock:
        made = open_world()
        if made is not None:
            raise InvalidArgument(
                f"this process is already rank {made.rank} of the job {made.job!r}: shut that world down first, or "
                "make groups in it with new_group()"
            )
        backend = sys.modules.get("rcomm._backend")
        if backend is not None and backend.world() is not None:
            raise InvalidArgument(
                'this process has already joined the job by init_process_group("rcomm"): use torch.distributed'
            )
        native = _native.ArrayWorld(
            rank=rank,
            size=size,
            host=host,
            port=port,
            timeout=_duration(timeout),
            init_timeout=_duration(init_timeout),
            job=job or os.environ.get("RCOMM_JOB") or None,
            join=join,
            library_code=_library_folders(),
        )
        _world = World(native)
        if _phase:
            native.phase(_phase)
        return _world


@contextlib.contextmanager
def phase(name: str) -> Iterator[None]:
    """Records `name`, cut to 104 bytes, as what the program does in this block; findings on this rank show it."""
    global _phase
    with contextlib.ExitStack() as stack:
        torch = sys.modules.get("rcomm.torch")
        if torch is not None:
            stack.enter_context(torch.phase(name))
        before, _phase = _phase, name
        _name_phase(name)
        try:
            yield
        finally:
            _phase = before
            _name_phase(before)


def step(number: int) -> contextlib.AbstractContextManager[None]:
    """Records which step the program is in from now on, not only in a ``with`` block of this call."""
    torch = sys.modules.get("rcomm.torch")
    if torch is not None:
        torch.step(number)
    world = open_world()
    if world is not None:
        world._native.step(number)
    return contextlib.nullcontext()


async def wait_for(work: Work) -> Any:
    """Waits for an operation without blocking the event loop, and returns its result."""
    loop = asyncio.get_running_loop()
    has_ended: asyncio.Future[None] = loop.create_future()

    def end() -> None:
        if not has_ended.done():
            has_ended.set_result(None)

    def notify(_: Work) -> None:
        # The loop may have been closed in the meantime: then no coroutine waits.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(end)

    work.add_done_callback(notify)
    await has_ended
    return work.wait()


_lock = threading.Lock()
_world: World | None = None
# The program's phase; empty outside of all phases.
_phase = ""


def _name_phase(name: str) -> None:
    world = open_world()
    if world is not None:
        world._native.phase(name)


def _forget(world: World) -> None:
    global _world
    if _world is world:
        _world = None


def _duration(timeout: float | timedelta | None) -> timedelta | None:
    if timeout is None or isinstance(timeout, timedelta):
        return timeout
    if not timeout > 0:
        raise InvalidArgument(f"the time-out is {timeout} s: it must be a positive number")
    return timedelta(seconds=min(timeout, 10**9))


def _library_folders() -> list[str]:
    """Folders and files whose code is not the program's: this package, and the parts of the standard library through
    which its functions are called."""
    package = os.path.dirname(os.path.abspath(__file__)) + os.sep
    standard = sysconfig.get_paths()["stdlib"]
    between = [os.path.join(standard, name) for name in ("contextlib.py", "threading.py", "asyncio")]
    return [package, *between]


def _end() -> None:
    """Ends a world that the program did not shut down, when the interpreter ends; abandons the world if an exception
    has ended the program."""
    world = open_world()
    if world is None:
        return
    error = getattr(sys, "last_value", None)
    if error is not None:
        world._abandon_for(error)
        return
    with contextlib.suppress(Error):
        world.shutdown(timeout=1.0)


atexit.register(_end)
os.register_at_fork(after_in_child=_native.note_fork)
