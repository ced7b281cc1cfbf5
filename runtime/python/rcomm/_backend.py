"""The backend "rcomm" of torch.distributed: ``init_process_group("rcomm")``.

PyTorch needs two objects for one group. PyTorch's Python functions call a ``ProcessGroup``, which here passes each
operation to Rust. PyTorch's C++ (the reducer of DDP, functional collectives) needs a ``Backend`` registered in that
group. Both share one ``_native.Group``.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import secrets
import socket
import sys
from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from . import _native, _world
from ._errors import first_line
from .torch import _job, _library_folders

NAME = "rcomm"

# The version of PyTorch on which the backend was tested. The backend calls private functions of PyTorch, which any
# other version may change.
_TESTED = "2.15"
# The variable with which a process uses the backend on another version.
_UNTESTED = "RCOMM_UNTESTED_TORCH"

# How long destroy_process_group() waits for operations under way. The rank that serves the store waits as long for the
# other ranks, which may destroy their groups later.
_DESTROY_WITHIN = timedelta(seconds=5)

# How long merge_remote_group() waits where the caller gives no time-out: PyTorch's own default.
_MERGE_WITHIN = timedelta(minutes=30)

# PyTorch's SHRINK_ABORT: pending operations are ended first.
_SHRINK_ABORT = 1

# Every operation by its name in `_native.Group`, with the other names by which versions of PyTorch call it.
_OPERATIONS = {
    "allreduce": (),
    "allreduce_coalesced": (),
    "broadcast": (),
    "reduce": (),
    "allgather": (),
    "all_gather_single": ("_allgather_base", "allgather_into_tensor", "all_gather_into_tensor"),
    "all_gather_single_coalesced": ("allgather_into_tensor_coalesced",),
    "allgather_coalesced": (),
    "gather": (),
    "gather_single": ("gather_into_tensor",),
    "scatter": (),
    "reduce_scatter": (),
    "reduce_scatter_single": ("_reduce_scatter_base", "reduce_scatter_tensor"),
    "reduce_scatter_single_coalesced": ("reduce_scatter_tensor_coalesced",),
    "all_to_all_single": ("alltoall_base",),
    "alltoall": (),
    "send": (),
    "recv": (),
    "recv_anysource": ("recvAnysource",),
    "barrier": (),
}
# The methods of `_native.Group` that return no Work, with the other names by which versions of PyTorch call them.
_OTHERS = {
    "monitored_barrier": ("monitoredBarrier",),
    "_get_sequence_number_for_group": (),
    "_add_ephemeral_timeout": (),
    "set_timeout": (),
}


class _Work(dist.Work):
    """The Work that PyTorch's C++ gets. Of a Work that is written in Python, C++ calls only `wait` and `get_future`."""

    def __init__(self, work: _native.Work) -> None:
        super().__init__()
        self._work = work

    def wait(self, timeout: timedelta | None = None) -> bool:
        return self._work.wait(timeout)

    def get_future(self) -> Any:
        return self._work.get_future()

    def is_completed(self) -> bool:
        return self._work.is_completed()

    def is_success(self) -> bool:
        return self._work.is_success()

    def exception(self) -> BaseException | None:
        return self._work.exception()

    def result(self) -> Any:
        return self._work.result()

    def source_rank(self) -> int:
        return self._work.source_rank()

    _source_rank = source_rank

    def synchronize(self) -> None:
        self._work.synchronize()


# PyTorch's C++ holds only the C++ half of a backend; the Python half lives as long as it is in this set.
_kept: set[Any] = set()


class _Inner(c10d.Backend):
    """The backend that PyTorch's C++ calls."""

    supports_coalescing = False
    # True, set by `register`, where PyTorch lets `_create_shrunk` choose the shrunk group.
    supports_shrinking = False

    @property
    def supports_splitting(self) -> bool:
        """Whether `torch.distributed.split_group` may split the group: a `Group` can be split, and PyTorch's own
        process group, which holds this backend together with those of other devices, cannot."""
        return self._outer is None

    def __init__(self, group: _native.Group, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._group = group
        # The `Group` of this backend, if PyTorch's own process group holds this backend and not the `Group`.
        self._outer: Group | None = None
        # `Group._shrink` of this backend's group; None once that group was shut down.
        self._shrink: Callable[[list[int]], _Inner] | None = None
        _kept.add(self)

    def getBackendName(self) -> str:  # noqa: N802, PyTorch's name
        return NAME

    def name(self) -> str:
        return NAME

    def shutdown(self) -> None:
        """Shuts down the `Group`, unless PyTorch holds the `Group` and shuts it down itself."""
        outer, self._outer = self._outer, None
        if outer is not None:
            outer.shutdown()

    def abort(self) -> None:
        self._group.abort()

    def shrink(self, ranks_to_exclude: list[int], shrink_flags: int = 0, opts_override: Any = None) -> _Inner:
        """Makes a group without these ranks of this one, and returns its backend. PyTorch calls this in
        `torch.distributed.shrink_group`, which all remaining ranks call."""
        if shrink_flags & _SHRINK_ABORT:
            self._group.abort()
        if self._shrink is None:
            raise RuntimeError("rcomm: the process group was destroyed")
        return self._shrink(ranks_to_exclude)

    def start_coalescing(self) -> None:
        self._group.start_coalescing()

    def end_coalescing(self) -> _Work | None:
        work = self._group.end_coalescing()
        return None if work is None else _Work(work)

    _start_coalescing, _end_coalescing = start_coalescing, end_coalescing


def _delegate(name: str) -> Any:
    """A method of `_Inner` that starts this operation of `_native.Group` and wraps the Work for C++."""

    def operation(self: _Inner, *args: Any, **kwargs: Any) -> _Work:
        return _Work(getattr(self._group, name)(*args, **kwargs))

    operation.__name__ = name
    return operation


def _pass_on(name: str) -> Any:
    """A method of `_Inner` that calls this method of `_native.Group`."""

    def call(self: _Inner, *args: Any, **kwargs: Any) -> Any:
        return getattr(self._group, name)(*args, **kwargs)

    call.__name__ = name
    return call


for _names, _make in ((_OPERATIONS, _delegate), (_OTHERS, _pass_on)):
    for _name, _aliases in _names.items():
        for _alias in (_name, *_aliases):
            setattr(_Inner, _alias, _make(_name))


class Group(dist.ProcessGroup):
    """The group that PyTorch's Python calls. Its operations are the methods of ``_native.Group``."""

    supports_coalescing = False
    supports_splitting = False
    # PyTorch sets this if the program gave a device.
    bound_device_id = None

    def __init__(
        self, group: _native.Group, store: dist.Store, world: _native.World, owns_world: bool
    ) -> None:
        super().__init__(store, group.rank(), group.size())
        self._group = group
        self._rcomm_world = world
        self._owns_world = owns_world
        kind = dist.Backend.backend_type_map.get(NAME, dist.ProcessGroup.BackendType.CUSTOM)
        self._inner = _Inner(group, group.rank(), group.size())
        self._inner._shrink = self._shrink
        self._set_default_backend(kind)
        self._register_backend(torch.device("cpu"), kind, self._inner)
        # Set on the instance, so that a call reaches Rust without a Python function between.
        for names in (_OPERATIONS, _OTHERS):
            for name, aliases in names.items():
                for alias in (name, *aliases):
                    setattr(self, alias, getattr(group, name))
        self.rank, self.size = group.rank, group.size

    def getBackendName(self) -> str:  # noqa: N802, PyTorch's name
        return NAME

    def name(self) -> str:
        return NAME

    def _start_coalescing(self, device: torch.device) -> None:
        self._group.start_coalescing()

    def _end_coalescing(self, device: torch.device) -> _native.Work | None:
        return self._group.end_coalescing()

    def split_group(
        self,
        ranks: list[int],
        timeout: timedelta | None = None,
        opts: Any = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        device_types: Any = None,
    ) -> Group | None:
        """A group of these ranks of this group; None if this rank is not among them. PyTorch calls this on every member
        of this group; the members of one new group pass the same list."""
        if self.rank() not in ranks:
            return None
        members = [self._group.ranks[rank] for rank in ranks]
        name = str(group_name)
        made = self._rcomm_world.new_group(members, name, timeout or self._group.timeout)
        part = Group(made, dist.PrefixStore(f"{name}/", self.get_group_store()), self._rcomm_world, False)
        part._set_group_name(name)
        part._set_group_desc(group_desc or f"{self.group_desc}:split")
        return part

    def merge_remote_group(
        self,
        store: dist.Store,
        size: int,
        timeout: timedelta = _MERGE_WITHIN,
        group_name: str | None = None,
        group_desc: str | None = None,
    ) -> Group:
        """One group of the members of several groups that do not know each other, and may be of different jobs. All
        members of these groups call this with the same `size`, the number of all members together, and the same store,
        which no other merge uses. As in PyTorch, ranks are numbered in the order of their calls. The old groups stay
        open. Where the groups are of different jobs, the merged group is a job of its own in records.

        Blocks until `size` ranks have called this, for `timeout` at most, which is the time-out of the merged group,
        too. Raises a DistError if not all of them have called by then, ValueError if more ranks call or one calls
        twice, and RuntimeError once the process group was destroyed."""
        identity = _worlds.get(self._rcomm_world)
        if identity is None:
            raise RuntimeError("rcomm: the process group was destroyed")
        rank = store.add("mergeGroupRank", 1) - 1
        if rank >= size:
            raise ValueError(f"rcomm: more ranks have called merge_remote_group than the {size} that are to be merged")
        name = group_name or f"{self.group_name}:merge"
        member = {"world": identity, "rank": self._group.ranks[self._group.rank()], "name": name}
        store.set(f"rcomm/member/{rank}", json.dumps(member))
        keys = [f"rcomm/member/{one}" for one in range(size)]
        try:
            store.wait(keys, timeout)
        except dist.DistError as error:
            called = store.add("mergeGroupRank", 0)
            raise type(error)(
                f"rcomm: {called} of the {size} ranks that are to be merged have called merge_remote_group: {error}"
            ) from error
        members = [json.loads(one) for one in store.multi_get(keys)]
        numbers = [one["rank"] for one in members]
        if len({(one["world"], one["rank"]) for one in members}) != size:
            raise ValueError("rcomm: a rank is twice among those that are to be merged")
        is_one_world = all(one["world"] == identity for one in members)
        if is_one_world:
            # All members need the same name here; PyTorch's default differs with the old group.
            world, made = self._rcomm_world, self._rcomm_world.new_group(numbers, members[0]["name"], timeout)
        else:
            meeting = dist.PrefixStore("rcomm/merged", store)
            options = SimpleNamespace(store=meeting, group_rank=rank, group_size=size, timeout=timeout)
            world = _join(options, "merge")
            made = world.group()
        merged = Group(made, dist.PrefixStore(f"{name}/", store), world, not is_one_world)
        merged._set_group_name(name)
        merged._set_group_desc(group_desc or f"{self.group_desc}:merge")
        return merged

    def _shrink(self, ranks: list[int]) -> _Inner:
        """Makes a group without these ranks of this one, and returns its backend. If this group owns the world, the new
        group owns the world from now on. PyTorch then destroys this group."""
        lost = [self._group.ranks[rank] for rank in ranks]
        remaining = (self._rcomm_world if self._owns_world else self._group).shrink(lost)
        outer = Group(remaining, self.get_group_store(), self._rcomm_world, self._owns_world)
        self._owns_world = False
        outer._inner._outer = outer
        return outer._inner

    def abort(self) -> None:
        self._group.abort()

    def shutdown(self) -> None:
        """Waits for the operations under way, for a few seconds at most, and ends the group; the whole world if this
        group owns the world."""
        _kept.discard(self._inner)
        self._inner._shrink = None
        if self._owns_world:
            _worlds.pop(self._rcomm_world, None)
            self._rcomm_world.shutdown(_DESTROY_WITHIN)
        else:
            self._group.shutdown(_DESTROY_WITHIN)


# Worlds that were not destroyed, each with a text that is the same on all of the world's ranks and in no other world.
# `_default` is the newest world of all the job's ranks; new groups are made in it.
_worlds: dict[_native.World, str] = {}
_default: _native.World | None = None


def world() -> _native.World | None:
    """The world of this process's default group; None if that group has another backend or was destroyed."""
    return _default if _default is not None and _default.is_open() else None


def _create(opts: Any, options: Any) -> Group | _Inner:
    """Makes a group; where the group has several backends, and so PyTorch makes it, only a backend. PyTorch calls this
    for each group with the backend "rcomm"."""
    global _default
    ranks = list(opts.global_ranks_in_group)
    if not ranks:
        other = _world.open_world()
        if other is not None:
            raise RuntimeError(
                f"rcomm: this process is already rank {other.rank} of the job {other.job!r} by rcomm.init(): shut that "
                "world down first, or use its groups"
            )
        _default = made = _join(opts)
        group, owns = made.group(), True
    elif world() is not None:
        made, owns = world(), False
        # PyTorch renumbers the ranks of a default group that was shrunk.
        members = made.group().ranks
        group = made.new_group([members[rank] for rank in ranks], str(opts.group_id), opts.timeout)
    else:
        # The default group is of another backend: this group is a world of its own.
        made = _join(opts, ".".join(map(str, ranks[:8])))
        group, owns = made.group(), True
    outer = Group(group, opts.store, made, owns)
    if _is_one_of_several(getattr(opts, "process_group", None)):
        # PyTorch's own group has a backend for each device.
        outer._inner._outer = outer
        return outer._inner
    return outer


def _create_shrunk(
    of_torch: Callable[..., Any], backend: Any, ranks: list[int], metadata: Any, is_default: bool
) -> Any:
    """The group of a backend that `_Inner.shrink` returned, which is a `Group`. PyTorch's `of_torch` would hold the
    backend in a group of the type gloo, and C++ (the logger of DDP, at 2.15) would take the backend for a gloo one."""
    outer = backend._outer if isinstance(backend, _Inner) else None
    if outer is None:
        return of_torch(backend, ranks, metadata, is_default)
    backend._outer = None
    outer._set_group_name(metadata["new_group_name"])
    outer._set_group_desc("default:shrunken" if is_default else f"{metadata['original_group_name']}:shrunk")
    return outer


def _is_one_of_several(group: Any) -> bool:
    """Whether the group has another backend for some device, as in "cpu:rcomm,cuda:nccl"."""
    if group is None:
        return False
    # A local of the function of PyTorch that called `_create`, which passes it to no backend.
    config = sys._getframe(2).f_locals.get("backend_config")
    devices = getattr(config, "device_backend_map", None) or {}
    return len(set(devices.values())) > 1


def _join(opts: Any, suffix: str = "") -> _native.World:
    """Makes a world with the other ranks, which this process finds through PyTorch's store. `suffix` is appended to the
    job's name."""
    store, rank, size = opts.store, opts.group_rank, opts.group_size
    options = {
        "attempt": int(os.environ.get("TORCHELASTIC_RESTART_COUNT") or 0),
        "timeout": opts.timeout,
        "library_code": _library_folders(),
    }
    if size == 1:
        made = _native.World(rank, size, job=_name_job(suffix), **options)
        identity = secrets.token_hex(8)
    else:
        # How many worlds this rank has joined through this store; the same number on all ranks.
        times = store.add(f"rcomm/times/{rank}", 1)
        key = f"rcomm/meeting/{times}"
        if rank == 0:
            address, server = _store_address(store, opts.timeout)
            address["job"] = _name_job(suffix)
            store.set(key, json.dumps(address))
        else:
            store.wait([key], opts.timeout)
            address, server = json.loads(store.get(key)), None
        made = _native.World(rank, size, server=server, **address, **options)
        identity = address["prefix"]
    _worlds[made] = identity
    return made


def _store_address(
    store: dist.Store, timeout: timedelta
) -> tuple[dict[str, Any], _native.StoreServer | None]:
    """The address of the store by which the ranks find each other, as arguments of `_native.World`: that of PyTorch's
    TCPStore, if PyTorch has one; else that of a server which this rank starts, and which is returned as well."""
    prefix = f"rcomm-{secrets.token_hex(8)}"
    bottom = store
    while isinstance(bottom, dist.PrefixStore):
        bottom = bottom.underlying_store
    if isinstance(bottom, dist.TCPStore):
        address = {"host": bottom.host, "port": bottom.port, "prefix": prefix, "store_is_external": True}
        return address | {"store_at_rank_0": _serves_store(bottom.port)}, None
    # Ranks that share a file may be on several hosts: MASTER_ADDR or RCOMM_SOCKET_IFNAME then says where other ranks
    # reach this one. On one host, 127.0.0.1 is enough.
    host = os.environ.get("MASTER_ADDR") or (
        socket.gethostname() if os.environ.get("RCOMM_SOCKET_IFNAME") else "127.0.0.1"
    )
    server = _native.StoreServer(host, timeout)
    return {"host": host, "port": server.port, "prefix": prefix}, server


def _serves_store(port: int) -> bool:
    """Whether this process, and neither the launcher nor the process that started this one, serves PyTorch's store."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return False
    listening = set()
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError), open(f"/proc/self/net/{table}") as rows:
            for columns in map(str.split, list(rows)[1:]):
                # 0A is the state of a socket that listens.
                if columns[3] == "0A" and int(columns[1].rpartition(":")[2], 16) == port:
                    listening.add(f"socket:[{columns[9]}]")
    # A socket that the parent has too was inherited: the parent may be the one that serves.
    return bool(listening & _open_files_of("self")) and not listening & _open_files_of(os.getppid())


def _open_files_of(process: int | str) -> set[str]:
    """The open files of a process, as /proc names them (``socket:[INODE]``); empty if they may not be read."""
    files = set()
    with contextlib.suppress(OSError):
        for file in os.scandir(f"/proc/{process}/fd"):
            with contextlib.suppress(OSError):
                files.add(os.readlink(file.path))
    return files


def _name_job(suffix: str) -> str:
    """The job's name, with a suffix if one is given; a new name if neither the program's environment nor a launcher
    gives one."""
    name = _job()
    if name == "torch":
        name = f"torch-{os.getpid()}-{secrets.token_hex(4)}"
    return f"{name}-{suffix}" if suffix else name


def register() -> None:
    """Registers the backend. A second call does nothing. Raises RuntimeError with a version of PyTorch on which the
    backend was not tested."""
    if NAME.upper() in dist.Backend._plugins:
        return
    _check_version(torch.__version__)
    dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu"])
    create_shrunk = getattr(dist.distributed_c10d, "_create_shrunk_process_group", None)
    if create_shrunk is not None:
        dist.distributed_c10d._create_shrunk_process_group = functools.partial(_create_shrunk, create_shrunk)
        _Inner.supports_shrinking = True
    # This backend records its operations. PyTorch's recorder would see only the operations that PyTorch's C++ issues,
    # and takes 30 ms a group.
    getattr(dist.distributed_c10d, "_FR_SELF_RECORDING_BACKENDS", set()).add(NAME)


def _check_version(version: str) -> None:
    """Raises RuntimeError if the backend was not tested on this version of PyTorch, and the environment does not ask
    for it all the same."""
    if version.split(".")[:2] == _TESTED.split(".") or os.environ.get(_UNTESTED, "") not in ("", "0"):
        return
    raise RuntimeError(
        f"rcomm: the backend was tested on PyTorch {_TESTED}, and this is {version}: install torch=={_TESTED}.*, use "
        f"gloo, which RCOMM_RECORD=1 records, or set {_UNTESTED}=1 to try this version"
    )


def _end() -> None:
    """Ends the worlds that the program did not destroy, when the interpreter ends: with an exception's text as the
    reason if one has ended the program."""
    error = getattr(sys, "last_value", None)
    for made in list(_worlds):
        if error is None:
            with contextlib.suppress(Exception):
                made.shutdown(timedelta(seconds=1))
            continue
        made.abandon(first_line(error))


atexit.register(_end)
os.register_at_fork(after_in_child=_native.note_fork)
