"""Records what this process does in torch.distributed, and reports what the job waits for.

`record` attaches to every process group of this process, whatever its backend, and writes a ring that
``rcomm-top``, ``rcomm-web`` and ``rcomm-fr`` read while the process runs, and after it has died.
Recording does not raise into the job. It waits only at the end of the process, for about a second at most.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import logging
import os
import signal
import sys
import sysconfig
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from ._errors import first_line
from ._groups import backend_of, backends_of, name_of, timeout_of

if TYPE_CHECKING:
    from ._analysis import Report
    from ._dispatch import Dispatch
    from ._native import GroupHooks, Ring, World

__all__ = ["phase", "record", "recording", "step", "why", "why_on_signal"]

_log = logging.getLogger("rcomm")

# The number of the hooks: far above those of PyTorch's own hooks.
_HOOK_ID = 0x7263
_SWEEPS_PER_SECOND = 20
_IN_LOADER = "in next() of the data loader"
# The analysis knows this phase by its words.
_LEFT = "left its process groups"
# Exceptions by which a program ends without an error.
_NO_ERRORS = (GeneratorExit, StopIteration, SystemExit)
# How long a process that ends waits for operations that the program did not wait for, in seconds.
_END_TIME = 0.5


def record() -> None:
    """Records every process group of this process from now on, and those that it has already.

    Needs PyTorch 2.5 or later with torch.distributed; with another one, logs a warning and records nothing. A second
    call does nothing.
    ``RCOMM_JOB`` names the job (else torchrun's run id, Slurm's job and step, ``MASTER_ADDR-MASTER_PORT``, or "torch"),
    ``RCOMM_RING_DIR`` the folder of the rings (else ``/dev/shm/rcomm-UID``), ``RCOMM_RING_ENTRIES`` how many
    operations a ring holds (else 16,384).
    """
    global _recorder
    with _lock:
        if _recorder is not None:
            return
        import torch

        if not torch.distributed.is_available():
            _log.warning("rcomm records nothing: this PyTorch was built without torch.distributed")
            return
        from torch.distributed import distributed_c10d as c10d

        from . import _dispatch

        has_hooks = hasattr(c10d.ProcessGroup, "register_pre_hook") and hasattr(
            c10d, "_maybe_attach_flight_recorder"
        )
        if not has_hooks and not _dispatch.is_possible():
            _log.warning("rcomm cannot record PyTorch %s: it needs 2.5 or later", torch.__version__)
            return
        _recorder = _Recorder(c10d, has_hooks)
        if has_hooks:
            _recorder.install()
        else:
            _recorder.install_without_hooks()


def recording() -> str | None:
    """The file of this process's ring; None if nothing is recorded, or if the ring is in the process's own memory."""
    ring = _ring() or _own_world()
    return None if ring is None or ring.path is None else os.fspath(ring.path)


@contextlib.contextmanager
def phase(name: str) -> Iterator[None]:
    """Records `name`, cut to 104 bytes, as what the program does in this block; findings on this rank show it."""
    global _phase
    before, _phase = _phase, name
    _name_phase(name)
    try:
        yield
    finally:
        _phase = before
        _name_phase(before)


def step(number: int) -> None:
    """Records which step the training is in. Where the program never calls this, the step is the number of calls of
    ``step()`` of the optimizer that has most of them."""
    recorder = _recorder
    if recorder is not None:
        recorder.has_own_steps = True
    for target in _records():
        target.step(number)


def why() -> Report:
    """The report on all ranks of this job whose rings are on this host, as they are now.

    Made for a debugger: starts ``rcomm-fr`` and waits for its output, a few tenths of a second. `why_on_signal` prints
    the report on a signal. Raises RuntimeError if this process does not record, has no process group yet, or records
    into its own memory, and the errors of `rcomm.analyze`.
    """
    path = recording()
    if path is None:
        if (_ring() or _own_world()) is not None:
            raise RuntimeError(
                "this process records into its own memory, which no program can read: set RCOMM_RING_DIR to a folder"
            )
        if _recorder is not None:
            raise RuntimeError("this process has no process group yet, so nothing is recorded")
        raise RuntimeError("this process does not record: call rcomm.torch.record() first")
    from ._analysis import analyze

    return analyze(os.path.dirname(path), live=True)


def why_on_signal(number: int = signal.SIGUSR2) -> None:
    """Prints what `why` returns to standard error whenever this process gets the signal: ``kill -USR2 PID``.

    This works while the main thread waits in PyTorch, where a handler in Python would not run before the wait ends: the
    interpreter writes each signal into a pipe (``signal.set_wakeup_fd``), and a thread of this module reads the pipe.
    The thread needs the interpreter's lock, which PyTorch's waits give up.

    Replaces the signal's handler. May be called again for other signals. Raises ValueError outside of the main thread,
    OSError or ValueError for a number that takes no handler, and RuntimeError if another library, such as asyncio, has
    already called ``signal.set_wakeup_fd``.
    """
    global _why_pipe
    process, reads, writes = _why_pipe or (0, -1, -1)
    # A forked child has its parent's pipe, and not the thread that reads it.
    inherited, is_new = writes, process != os.getpid()
    if is_new:
        reads, writes = os.pipe()
        for end in (reads, writes):
            os.set_blocking(end, end == reads)
    try:
        before = signal.set_wakeup_fd(writes, warn_on_full_buffer=False)
        if before not in (-1, inherited):
            signal.set_wakeup_fd(before)
            raise RuntimeError("another library has called signal.set_wakeup_fd()")
        try:
            signal.signal(number, lambda *_: None)
        except BaseException:
            # Else the interpreter would write into whatever gets the number of the pipe that is closed below.
            signal.set_wakeup_fd(before, warn_on_full_buffer=False)
            raise
    except BaseException:
        if is_new:
            os.close(reads)
            os.close(writes)
        raise
    _why_numbers.add(number)
    if is_new:
        _why_pipe = (os.getpid(), reads, writes)
        threading.Thread(target=_answer_signals, args=(reads,), name="rcomm-why", daemon=True).start()


# The pipe into which the interpreter writes the signals of `why_on_signal`: the process that made it, and its two ends.
# And the numbers of these signals.
_why_pipe: tuple[int, int, int] | None = None
_why_numbers: set[int] = set()


def _answer_signals(reads: int) -> None:
    while numbers := os.read(reads, 512):
        # Other signals come through the same pipe.
        if not _why_numbers.isdisjoint(numbers):
            try:
                text = str(why())
            except Exception as error:
                text = f"rcomm: {error}"
            print(text, file=sys.stderr, flush=True)


_lock = threading.Lock()
_recorder: _Recorder | None = None


# The program's phase; empty outside of all phases.
_phase = ""


def _name_phase(name: str) -> None:
    recorder = _recorder
    if recorder is not None:
        recorder.phase = name
    for target in _records():
        target.phase(name)


def _own_world() -> World | None:
    """The world of the backend "rcomm", which records itself; None if this process has none."""
    backend = sys.modules.get("rcomm._backend")
    return None if backend is None else backend.world()


def _ring() -> Ring | None:
    recorder = _recorder
    return None if recorder is None else recorder.ring


def _records() -> list[Ring | World]:
    """The objects that record phases and steps: the recorder's ring, and the world of the backend "rcomm"."""
    return [target for target in (_ring(), _own_world()) if target is not None]


class _Recorder:
    """The recording of this process, which is installed once: how it learns of groups, operations and their ends."""

    def __init__(self, c10d: Any, has_hooks: bool) -> None:
        self.c10d = c10d
        # Whether this PyTorch has hooks, as 2.15 and later have.
        self.has_hooks = has_hooks
        self.ring: Ring | None = None
        # The hooks, and their addresses for C++, by the group's name and ranks.
        self.hooks: dict[tuple[str, tuple[int, ...]], GroupHooks] = {}
        self.addresses: dict[tuple[str, tuple[int, ...]], int] = {}
        self.groups: weakref.WeakKeyDictionary[Any, GroupHooks] = weakref.WeakKeyDictionary()
        # Backends that were logged as not recorded.
        self.logged_backends: set[str] = set()
        self.phase = ""
        # Whether the program has destroyed all its groups, and made none since.
        self.has_left = False
        # The text of the exception that is recorded as the reason why the program left its groups; empty if there is none.
        self.noted_error = ""
        # How many steps each optimizer has made, by its id.
        self.steps: dict[int, int] = {}
        # Whether the program reports its steps itself.
        self.has_own_steps = False
        self.watches_program = False
        # Whether an exception has ended the program.
        self.has_raised = False
        self.ended = threading.Event()
        self.watcher: threading.Thread | None = None
        # The operators of the hooks in C++; None if those are not used.
        self.native: Any = None
        # The kernels in Python, on a PyTorch without hooks; None if they are not used.
        self.dispatch: Dispatch | None = None
        # The functions that `watch_waits` was called with.
        self.wait_observers: list[Callable[[Any, bool], None]] = []

    def install(self) -> None:
        """Attaches to groups where PyTorch 2.15 and later attach their own recorder."""
        c10d = self.c10d
        attach = c10d._maybe_attach_flight_recorder

        @functools.wraps(attach)
        def attach_both(pg: Any, backend_config: Any, global_ranks: list[int]) -> Any:
            # PyTorch calls this once for every group that it made or split, before its first operation.
            done = attach(pg, backend_config, global_ranks)
            _quietly(self.attach, pg, global_ranks)
            return done

        c10d._maybe_attach_flight_recorder = attach_both
        self.attach_known()

    def install_without_hooks(self) -> None:
        """Attaches to groups where Python makes them, as PyTorch 2.5 to 2.14 needs."""
        c10d = self.c10d
        make = c10d._new_process_group_helper

        @functools.wraps(make)
        def make_and_attach(size: int, rank: int, ranks: list[int], *args: Any, **kwargs: Any) -> Any:
            made = make(size, rank, ranks, *args, **kwargs)
            # The caller's first operation on the group comes later. The default group is made with no ranks.
            pg = made[0] if isinstance(made, tuple) else made
            if isinstance(pg, c10d.ProcessGroup):
                _quietly(self.attach, pg, list(ranks) or list(range(size)))
            return made

        c10d._new_process_group_helper = make_and_attach
        split = getattr(c10d, "split_group", None)
        if split is not None:

            @functools.wraps(split)
            def split_and_attach(*args: Any, **kwargs: Any) -> Any:
                made = split(*args, **kwargs)
                _quietly(self.attach_known)
                return made

            # The package torch.distributed has the function by name, too.
            for module in (c10d, sys.modules.get("torch.distributed")):
                if getattr(module, "split_group", None) is split:
                    module.split_group = split_and_attach
        self.attach_known()

    def attach_known(self) -> None:
        """Attaches to those groups that this process has and that are not recorded yet."""
        c10d = self.c10d
        for pg, ranks in list(c10d._world.pg_group_ranks.items()):
            if isinstance(pg, c10d.ProcessGroup) and pg not in self.groups:
                _quietly(self.attach, pg, sorted(ranks, key=ranks.get))

    def attach(self, pg: Any, global_ranks: list[int]) -> None:
        """Attaches to one group of this process, unless the backend "rcomm" records the group or this process."""
        if hasattr(pg, "_rcomm_world") or self.is_recorded_by_backend(pg):
            self.watch_program()
            return
        ring = self.open(pg)
        if self.has_left:
            self.has_left, self.noted_error = False, ""
            ring.phase(self.phase)
        key = (pg.group_name, tuple(global_ranks))
        hooks = self.hooks.get(key)
        if hooks is None:
            # A group that is made again with its name and its ranks continues its sequence numbers, as it does on all
            # members.
            hooks = self.hooks[key] = ring.group(
                pg.group_name,
                pg.group_desc,
                list(global_ranks),
                backend=backend_of(pg),
                timeout_ms=timeout_of(pg),
            )
        self.groups[pg] = hooks
        # On a PyTorch without hooks, kernels record every group: those in C++ if they were built, else those in Python.
        if self.native is not None and (not self.has_hooks or self.is_builtin(pg)):
            # `address` is called once per group: each call keeps a reference to the end of the process.
            address = self.addresses.get(key) or self.addresses.setdefault(key, hooks.address())
            # Most programs have no operation that needs this.
            self.ring.on_first_deferred(lambda: self.watch_waits(self.native_waited, self.ring.deferred))
            self.native.attach(pg.boxed(), _HOOK_ID, address)
            return
        self.watch_waits(self.ring.waited)
        self.watch_works()
        if not self.has_hooks:
            if self.dispatch is None:
                from ._dispatch import Dispatch

                self.dispatch = Dispatch(self.c10d)
            self.dispatch.attach(pg, hooks)
            return
        pg.register_pre_hook(_HOOK_ID, hooks.before)
        pg.register_post_hook(_HOOK_ID, hooks.after)

    def is_recorded_by_backend(self, pg: Any) -> bool:
        """Whether the backend "rcomm" records this group, or this process: a second ring would be a second job. If so,
        logs once that groups of these other backends are not recorded."""
        names = {name_of(backend) for backend in backends_of(pg)}
        if "rcomm" not in names and _own_world() is None:
            return False
        others = ", ".join(sorted(names - {"rcomm", ""})) or "others"
        if others not in self.logged_backends:
            self.logged_backends.add(others)
            text = 'rcomm records what this process does through the backend "rcomm", and nothing of %s'
            _log.warning(text, others)
        return True

    def is_builtin(self, pg: Any) -> bool:
        """Whether PyTorch's own backends make the group's Works. Of a Work written in Python, the hooks in C++ would
        see only that a wait returned."""
        module_of_torch, backends = self.c10d.Work.__module__, backends_of(pg)
        return bool(backends) and all(type(backend).__module__ == module_of_torch for backend in backends)

    def open(self, pg: Any) -> Ring:
        """The ring of this rank, made with its first group, which has all ranks of the world."""
        if self.ring is not None:
            return self.ring
        from ._native import Ring

        self.ring = Ring(
            _job(),
            pg.rank(),
            pg.size(),
            attempt=int(os.environ.get("TORCHELASTIC_RESTART_COUNT") or 0),
            directory=os.environ.get("RCOMM_RING_DIR") or None,
            entries=int(os.environ.get("RCOMM_RING_ENTRIES") or 0) or None,
            library_code=_library_folders(),
        )
        if self.ring.path is None:
            _log.warning("rcomm records into this process's own memory, which no other can read")
        notes_termination = self.ring.notes_termination
        for install in (self.load_native, self.watch_barriers, self.watch_program, self.watch_end, notes_termination):
            _quietly(install)
        return self.ring

    def watch_program(self) -> None:
        """Records from now on when the program loads data, makes a step, or destroys its groups."""
        if not self.watches_program:
            self.watches_program = True
            self.watch_loader()
            self.watch_optimizers()
            self.watch_destroy()

    def load_native(self) -> None:
        """Takes the hooks in C++ if they were built for this PyTorch."""
        from . import _cpp, _native

        path = _cpp.find()
        if path is not None:
            import torch

            torch.ops.load_library(str(path))
            torch.ops.rcomm.open(_native.__file__)
            self.native = torch.ops.rcomm

    def native_waited(self, work: Any, has_returned: bool) -> None:
        """Tells the hooks in C++ that a wait returned or raised. They need this for deferred operations only."""
        self.native.waited(work.boxed(), has_returned)

    def watch_waits(self, observer: Callable[[Any, bool], None], is_needed: Callable[[], int] | None = None) -> None:
        """Calls `observer` with the Work when a wait for it has returned (with True) or raised (with False); if
        `is_needed` is given, only where it returns another number than 0 when the wait begins."""
        if observer in self.wait_observers:
            return
        self.wait_observers.append(observer)
        work = self.c10d.Work
        wait = work.wait

        @functools.wraps(wait)
        def wait_and_report(self: Any, timeout: timedelta | None = None) -> Any:
            if is_needed is not None and not is_needed():
                return wait(self) if timeout is None else wait(self, timeout)
            try:
                done = wait(self) if timeout is None else wait(self, timeout)
            except BaseException:
                observer(self, False)
                raise
            observer(self, True)
            return done

        work.wait = wait_and_report

    def watch_barriers(self) -> None:
        """Records monitored barriers, for which PyTorch calls no hook: their method blocks until they have ended."""
        groups = self.c10d.ProcessGroup
        barrier = groups.monitored_barrier

        @functools.wraps(barrier)
        def recorded(pg: Any, *args: Any, **kwargs: Any) -> Any:
            hooks = self.groups.get(pg)
            if hooks is None:
                return barrier(pg, *args, **kwargs)
            timeout = args[0] if args else kwargs.get("timeout")
            timeout_ms = max(0, round(timeout.total_seconds() * 1000)) if isinstance(timeout, timedelta) else None
            hooks.monitored_barrier(timeout_ms)
            passed = False
            try:
                done = barrier(pg, *args, **kwargs)
                passed = True
                return done
            finally:
                hooks.monitored_barrier_ended(passed)

        groups.monitored_barrier = recorded

    def watch_works(self) -> None:
        """Polls the operations under way on a thread, as the hooks in Python need."""
        if self.watcher is not None:
            return
        ring = self.ring

        def poll() -> None:
            while not self.ended.wait(1 / _SWEEPS_PER_SECOND):
                if ring.under_way():
                    ring.sweep()

        self.watcher = threading.Thread(target=poll, name="rcomm-watcher", daemon=True)
        self.watcher.start()

    def watch_loader(self) -> None:
        """Records a phase while the program waits for the next batch of a data loader."""
        from torch.utils.data.dataloader import _BaseDataLoaderIter as loader

        next_batch = loader.__next__

        @functools.wraps(next_batch)
        def next_in_phase(this: Any) -> Any:
            before = self.name_phase(_IN_LOADER)
            try:
                return next_batch(this)
            finally:
                self.name_phase(before)

        loader.__next__ = next_in_phase

    def watch_destroy(self) -> None:
        """Records a phase before the program destroys all its groups: the operations of other ranks may fail then."""
        c10d = self.c10d
        destroy = c10d.destroy_process_group

        @functools.wraps(destroy)
        def note_and_destroy(group: Any = None) -> None:
            if group is None or group is c10d.GroupMember.WORLD:
                _quietly(self.leave)
            destroy(group)

        # The package torch.distributed has the function by name, too.
        for module in (c10d, sys.modules.get("torch.distributed")):
            if getattr(module, "destroy_process_group", None) is destroy:
                module.destroy_process_group = note_and_destroy

    def leave(self) -> None:
        """Records that the program issues nothing more on its groups, or the exception because of which it leaves them:
        a program may destroy its groups in a `finally` clause."""
        if self.ring is None:
            return
        self.has_left = True
        error = sys.exc_info()[1]
        if error is None or isinstance(error, _NO_ERRORS):
            self.ring.phase(_LEFT)
        else:
            self.noted_error = first_line(error)
            self.ring.note_exception(self.noted_error)

    def watch_optimizers(self) -> None:
        """Counts the optimizers' steps, for programs that do not call `step`."""
        from torch.optim.optimizer import register_optimizer_step_post_hook

        def count(optimizer: Any, args: Any, kwargs: Any) -> None:
            if not self.has_own_steps:
                # Of several optimizers the one with the most steps counts.
                steps = self.steps.get(id(optimizer), 0) + 1
                self.steps[id(optimizer)] = steps
                if steps >= max(self.steps.values()):
                    for target in _records():
                        target.step(steps)

        register_optimizer_step_post_hook(count)

    def watch_end(self) -> None:
        """Records the end of the process, and the exception that ends the program if there is one."""
        hook = sys.excepthook

        def raised(kind: type[BaseException], error: BaseException, trace: Any) -> None:
            # Other threads end without the program, and a prompt goes on; both may call this hook as well.
            if threading.current_thread() is threading.main_thread() and not _is_at_prompt():
                _quietly(self.note_exception, error)
            hook(kind, error, trace)

        sys.excepthook = raised
        atexit.register(lambda: _quietly(self.end))

    def note_exception(self, error: BaseException) -> None:
        """Records the exception that ends the program, and that PyTorch refused the operation that raised it, if one
        did."""
        self.has_raised = True
        for hooks in self.hooks.values():
            hooks.refused()
        # The time at which the program left its groups because of this exception stays.
        text = first_line(error)
        if text != self.noted_error:
            self.ring.note_exception(text)

    def end(self) -> None:
        """Ends the recording when the interpreter ends. If no operation is under way and no exception has ended the
        program, the ring is closed once the process exits with 0, even if the program has not destroyed its groups."""
        self.ended.set()
        if self.watcher is not None:
            self.watcher.join(timeout=0.5)
        # A group may outlive the interpreter, and would then drop functions of an interpreter that is gone.
        if self.dispatch is not None:
            self.dispatch.end()
        for pg in list(self.groups) if self.has_hooks else ():
            pg.unregister_pre_hook(_HOOK_ID)
            pg.unregister_post_hook(_HOOK_ID)
        ring = self.ring
        if ring is None:
            return
        under_way = self.sweep()
        # An operation that the program did not wait for may end after its last line.
        deadline = time.monotonic() + _END_TIME
        while under_way and not self.has_raised and time.monotonic() < deadline:
            time.sleep(0.01)
            under_way = self.sweep()
        if self.native is not None:
            self.native.stop()
        if not under_way and not self.has_raised and not self.has_left:
            self.leave()
        elif under_way and not self.has_raised:
            noun = "operation" if under_way == 1 else "operations"
            ring.phase(f"ended with {under_way} {noun} under way")
        ring.exits(closes=not self.has_raised and not under_way)

    def sweep(self) -> int:
        """Polls the operations under way; returns how many have not ended."""
        under_way = 0
        for recorder in (self.ring, self.native):
            if recorder is not None:
                recorder.sweep()
                under_way += recorder.under_way()
        return under_way

    def name_phase(self, name: str) -> str:
        """Names a phase, and returns the one before."""
        before = self.phase
        _name_phase(name)
        return before


def _is_at_prompt() -> bool:
    """Whether the exception for which `sys.excepthook` is called leaves the program at a prompt: its own one, that of
    `python -i`, or one it has opened with the module `code`. Not whether there has been one: `sys.ps1` stays set."""
    main = sys.modules.get("__main__")
    if sys.flags.interactive or sys.flags.inspect or (hasattr(sys, "ps1") and not hasattr(main, "__file__")):
        return True
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__", "").partition(".")[0] in ("code", "_pyrepl"):
            return True
        frame = frame.f_back
    return False


def _quietly(act: Callable[..., object], *args: object) -> None:
    """Calls a part of the recording; an error in it is logged and not raised."""
    try:
        act(*args)
    except Exception as error:
        _log.warning("rcomm: %s: %s", getattr(act, "__name__", act), error)


def _job() -> str:
    """The job's name, from the environment as `record` describes."""
    env = os.environ
    torchrun = env.get("TORCHELASTIC_RUN_ID")
    slurm = ".".join(env[key] for key in ("SLURM_JOB_ID", "SLURM_STEP_ID") if env.get(key))
    master = "-".join(env[key] for key in ("MASTER_ADDR", "MASTER_PORT") if env.get(key))
    # "none" is what torchrun sets when it was given no id.
    name = env.get("RCOMM_JOB") or (torchrun if torchrun != "none" else None)
    return name or slurm or master or "torch"


def _library_folders() -> list[str]:
    """Folders and files whose code is not the program's: PyTorch, this package, and the parts of the standard library
    through which their functions are called."""
    import torch

    of_torch = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
    package = os.path.dirname(os.path.abspath(__file__)) + os.sep
    standard = sysconfig.get_paths()["stdlib"]
    between = [os.path.join(standard, name) for name in ("contextlib.py", "threading.py")]
    return [of_torch, package, *between]
