from collections.abc import Callable, Generator, Sequence
from datetime import timedelta
from os import PathLike
from pathlib import Path
from typing import Any

class Ring:
    def __init__(
        self,
        job: str,
        rank: int,
        world_size: int,
        *,
        attempt: int = 0,
        directory: str | PathLike[str] | None = None,
        entries: int | None = None,
        library_code: Sequence[str] = (),
    ) -> None: ...
    @property
    def path(self) -> Path | None: ...
    def group(
        self,
        name: str,
        description: str,
        ranks: Sequence[int],
        *,
        backend: str,
        timeout_ms: int = 0,
    ) -> GroupHooks: ...
    def sweep(self) -> None: ...
    def under_way(self) -> int: ...
    def deferred(self) -> int: ...
    def on_first_deferred(self, callback: Callable[[], object]) -> None: ...
    def waited(self, work: Any, has_returned: bool) -> None: ...
    def phase(self, name: str) -> None: ...
    def note_exception(self, exception: str) -> None: ...
    def step(self, step: int) -> None: ...
    def exits(self, closes: bool) -> None: ...
    def notes_termination(self) -> None: ...

class GroupHooks:
    def before(self, args: Any) -> None: ...
    def after(self, args: Any) -> None: ...
    def monitored_barrier(self, timeout_ms: int | None = None) -> None: ...
    def monitored_barrier_ended(self, passed: bool) -> None: ...
    def refused(self) -> None: ...
    def address(self) -> int: ...

def note_fork() -> None: ...

class StoreServer:
    def __init__(self, host: str, timeout: timedelta) -> None: ...
    @property
    def port(self) -> int: ...

class World:
    def __init__(
        self,
        rank: int,
        size: int,
        *,
        job: str,
        host: str | None = None,
        port: int = 0,
        prefix: str = "",
        server: StoreServer | None = None,
        store_is_external: bool = False,
        store_at_rank_0: bool = False,
        attempt: int = 0,
        timeout: timedelta,
        library_code: Sequence[str] = (),
    ) -> None: ...
    @property
    def path(self) -> Path | None: ...
    def group(self) -> Group: ...
    def shrink(self, excluding: list[int]) -> Group: ...
    def new_group(self, ranks: Sequence[int], name: str, timeout: timedelta) -> Group: ...
    def shutdown(self, within: timedelta) -> None: ...
    def abandon(self, exception: str) -> None: ...
    def is_open(self) -> bool: ...
    def phase(self, name: str) -> None: ...
    def step(self, step: int) -> None: ...
    def dump(self) -> str: ...

class Group:
    @property
    def name(self) -> str: ...
    @property
    def ranks(self) -> list[int]: ...
    @property
    def timeout(self) -> timedelta: ...
    def rank(self) -> int: ...
    def size(self) -> int: ...
    def set_timeout(self, timeout: Any) -> None: ...
    def shrink(self, excluding: list[int]) -> Group: ...
    def allreduce(self, tensors: Any, opts: Any = None, timeout: Any = None, *, op: Any = None) -> Work: ...
    def allreduce_coalesced(
        self, tensors: Any, opts: Any = None, timeout: Any = None, *, op: Any = None
    ) -> Work: ...
    def broadcast(
        self, tensors: Any, opts: Any = None, timeout: Any = None, *, root: int | None = None
    ) -> Work: ...
    def reduce(
        self,
        tensors: Any,
        opts: Any = None,
        op: Any = None,
        timeout: Any = None,
        *,
        root: int | None = None,
    ) -> Work: ...
    def allgather(
        self, output_tensors: Any, input_tensors: Any, opts: Any = None, timeout: Any = None
    ) -> Work: ...
    def all_gather_single(self, output: Any, input: Any, opts: Any = None, timeout: Any = None) -> Work: ...
    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Work: ...
    def allgather_coalesced(self, output_lists: Any, input_list: Any, opts: Any = None) -> Work: ...
    def gather(
        self,
        output_tensors: Any,
        input_tensors: Any,
        opts: Any = None,
        timeout: Any = None,
        *,
        root: int | None = None,
    ) -> Work: ...
    def gather_single(self, output: Any, input: Any, opts: Any = None) -> Work: ...
    def scatter(
        self,
        output_tensors: Any,
        input_tensors: Any,
        opts: Any = None,
        timeout: Any = None,
        *,
        root: int | None = None,
    ) -> Work: ...
    def reduce_scatter(
        self,
        output_tensors: Any,
        input_tensors: Any,
        opts: Any = None,
        timeout: Any = None,
        *,
        op: Any = None,
    ) -> Work: ...
    def reduce_scatter_single(
        self, output: Any, input: Any, opts: Any = None, timeout: Any = None, *, op: Any = None
    ) -> Work: ...
    def reduce_scatter_single_coalesced(
        self, outputs: Any, inputs: Any, opts: Any = None, *, op: Any = None
    ) -> Work: ...
    def all_to_all_single(
        self,
        output: Any,
        input: Any,
        output_split_sizes: Sequence[int] = (),
        input_split_sizes: Sequence[int] = (),
        opts: Any = None,
        timeout: Any = None,
    ) -> Work: ...
    def alltoall(self, output_tensors: Any, input_tensors: Any, opts: Any = None) -> Work: ...
    def send(self, tensors: Any, dst_rank: int, tag: int = 0) -> Work: ...
    def recv(self, tensors: Any, src_rank: int, tag: int = 0) -> Work: ...
    def recv_anysource(self, tensors: Any, tag: int = 0) -> Work: ...
    def barrier(self, opts: Any = None, timeout: Any = None) -> Work: ...
    def monitored_barrier(self, timeout: Any = None, wait_all_ranks: bool = False) -> None: ...
    def start_coalescing(self) -> None: ...
    def end_coalescing(self) -> Work | None: ...
    def abort(self) -> None: ...
    def shutdown(self, within: timedelta) -> None: ...

class Work:
    def wait(self, timeout: timedelta | None = None) -> bool: ...
    def synchronize(self) -> None: ...
    def block_current_stream(self) -> None: ...
    def is_completed(self) -> bool: ...
    def is_success(self) -> bool: ...
    def exception(self) -> BaseException | None: ...
    def result(self) -> Any: ...
    def source_rank(self) -> int: ...
    def get_future(self) -> Any: ...
    @property
    def timeout(self) -> timedelta: ...

_Timeout = float | timedelta | None

class ArrayWorld:
    def __init__(
        self,
        *,
        rank: int | None = None,
        size: int | None = None,
        host: str | None = None,
        port: int = 0,
        timeout: timedelta | None = None,
        init_timeout: timedelta | None = None,
        job: str | None = None,
        join: bool = False,
        library_code: Sequence[str] = (),
    ) -> None: ...
    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def job(self) -> str: ...
    @property
    def group(self) -> ArrayGroup: ...
    @property
    def path(self) -> Path | None: ...
    @property
    def dump_dir(self) -> Path: ...
    @property
    def is_open(self) -> bool: ...
    def new_group(self, ranks: Sequence[int], *, name: str = "", timeout: _Timeout = None) -> ArrayGroup: ...
    def shrink(self, without: Sequence[int]) -> ArrayWorld: ...
    def grow(self, lost: Sequence[int], size: int) -> ArrayWorld: ...
    def phase(self, name: str) -> None: ...
    def step(self, number: int) -> None: ...
    def dump(self) -> str: ...
    def shutdown(self, *, timeout: _Timeout = None) -> None: ...
    def abandon(self, reason: str, *, is_exception: bool = False) -> None: ...

class ArrayGroup:
    """An ordered set of ranks that call operations together (`rcomm.Group`).

    Arrays are in the host's memory, in row-major order; operations work in their memory. With ``wait=False`` an
    operation returns a `Work` at once: until the operation has ended, arrays must not be changed, nor results read.
    ``timeout`` is in seconds; without it the group's own time-out counts. Where the parts of the ranks differ, `rows`
    lists how many rows (the extent of the first dimension) each part has.
    """

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def name(self) -> str: ...
    @property
    def ranks(self) -> list[int]: ...
    @property
    def timeout(self) -> float: ...
    @timeout.setter
    def timeout(self, timeout: float | timedelta) -> None: ...
    def all_reduce(
        self, x: Any, op: Any = "sum", *, out: Any = None, timeout: _Timeout = None, wait: bool = True
    ) -> Any:
        """Every rank's `x` (with `out`: `out`, and `x` is unchanged) ends as the reduction of all ranks' arrays."""

    def all_reduce_coalesced(
        self, xs: Sequence[Any], op: Any = "sum", *, timeout: _Timeout = None, wait: bool = True
    ) -> Any:
        """Does what `all_reduce` does, to several arrays of any types, as one operation."""

    def reduce(
        self,
        x: Any,
        root: int = 0,
        op: Any = "sum",
        *,
        out: Any = None,
        timeout: _Timeout = None,
        wait: bool = True,
    ) -> Any:
        """The root's `x` (or `out`) ends as the reduction of all arrays, and is returned; other ranks get None."""

    def broadcast(self, x: Any, root: int = 0, *, timeout: _Timeout = None, wait: bool = True) -> Any:
        """Every rank's `x` ends as a copy of the root's `x`."""

    def all_gather(
        self,
        x: Any,
        *,
        out: Any = None,
        rows: Sequence[int] | None = None,
        timeout: _Timeout = None,
        wait: bool = True,
    ) -> Any:
        """The arrays of all ranks in one, of shape ``(size, *x.shape)``; with `rows`, joined by rows."""

    def gather(
        self,
        x: Any,
        root: int = 0,
        *,
        out: Any = None,
        rows: Sequence[int] | None = None,
        timeout: _Timeout = None,
        wait: bool = True,
    ) -> Any:
        """Returns on the root what `all_gather` returns; None elsewhere. All ranks give `rows`, or none does."""

    def scatter(
        self,
        x: Any = None,
        root: int = 0,
        *,
        out: Any = None,
        rows: Sequence[int] | None = None,
        timeout: _Timeout = None,
        wait: bool = True,
    ) -> Any:
        """This rank's part of the root's array, in `out`, which only the root may leave out. All ranks give `rows`, or
        none does."""

    def reduce_scatter(
        self,
        x: Any,
        op: Any = "sum",
        *,
        out: Any = None,
        rows: Sequence[int] | None = None,
        timeout: _Timeout = None,
        wait: bool = True,
    ) -> Any:
        """This rank's part of the reduction of all ranks' arrays."""

    def all_to_all(
        self,
        x: Any,
        *,
        out: Any = None,
        rows: Sequence[int] | None = None,
        rows_out: Sequence[int] | None = None,
        timeout: _Timeout = None,
        wait: bool = True,
    ) -> Any:
        """Part r of `x` goes to rank r, and the parts for this rank are returned, by rank.

        `rows` are those of the parts of `x`, `rows_out` those of the parts that are returned. Without `rows_out` the
        ranks first tell each other how many rows they send, which blocks even with ``wait=False``.
        """

    def barrier(self, *, timeout: _Timeout = None, wait: bool = True) -> Any: ...
    def monitored_barrier(self, *, timeout: _Timeout = None, all: bool = False) -> None:
        """A barrier whose error names the first rank that did not arrive, or all; the group stays usable."""

    def send(
        self, x: Any, to: int, *, tag: int = 0, timeout: _Timeout = None, wait: bool = True
    ) -> Any: ...
    def recv(
        self, x: Any, source: int | None = None, *, tag: int = 0, timeout: _Timeout = None, wait: bool = True
    ) -> Any:
        """Receives into `x`, from any rank if no source is given; returns the sender's rank in the group."""

    def broadcast_object(
        self, value: Any = None, root: int = 0, *, pickle: bool = False, timeout: _Timeout = None
    ) -> Any: ...
    def all_gather_object(
        self, value: Any, *, pickle: bool = False, timeout: _Timeout = None
    ) -> list[Any]: ...
    def gather_object(
        self, value: Any, root: int = 0, *, pickle: bool = False, timeout: _Timeout = None
    ) -> list[Any] | None: ...
    def scatter_object(
        self,
        values: Sequence[Any] | None = None,
        root: int = 0,
        *,
        pickle: bool = False,
        timeout: _Timeout = None,
    ) -> Any: ...
    def send_object(
        self, value: Any, to: int, *, tag: int = 0, pickle: bool = False, timeout: _Timeout = None
    ) -> None: ...
    def recv_object(
        self, source: int, *, tag: int = 0, pickle: bool = False, timeout: _Timeout = None
    ) -> Any: ...
    def split(
        self, color: int | None, key: int = 0, *, name: str = "", timeout: _Timeout = None
    ) -> ArrayGroup | None:
        """A group of the members with this color, ordered by key; None for a member without a color."""

    def shrink(self, without: Sequence[int], *, timeout: _Timeout = None) -> ArrayGroup:
        """A group without these ranks of the world. All remaining members call this with the same list."""

    def find_absent(self, within: float = 5.0) -> list[int]:
        """The members that do not call this function within so many seconds, by their numbers in the world; the same
        list on all members that call it."""

    def abort(self, reason: str) -> None:
        """Makes pending operations fail soon, and later ones at once, on all members."""

    def destroy(self, *, timeout: _Timeout = None) -> None:
        """Waits for pending operations, and refuses later ones."""

class ArrayWork:
    """An operation in progress (`rcomm.Work`); in a coroutine, ``await work``."""

    def wait(self, timeout: _Timeout = None) -> Any:
        """Waits for the operation's end, at most `timeout` seconds if that is given, and returns what the blocking call
        returns.

        Raises the operation's error; or `rcomm.Timeout` once `timeout` has passed, and the operation continues.
        """

    def done(self) -> bool:
        """Whether the operation has ended, with or without an error."""

    def exception(self) -> BaseException | None:
        """The exception that `wait` raises; None if there is none so far."""

    def add_done_callback(self, callback: Any) -> None:
        """Calls `callback` with this Work, on another thread, when the operation has ended; soon, if it already has."""

    def __await__(self) -> Generator[Any, None, Any]: ...
    @property
    def op(self) -> str: ...
    @property
    def seq(self) -> int: ...
    @property
    def duration(self) -> float | None:
        """How many seconds the operation ran; None before its end, after an error, or if that was not measured."""

class Table:
    """One table of a report (`rcomm.Table`), in Arrow's layout.

    Libraries with Arrow's PyCapsule interface take a table without a copy: ``polars.DataFrame(table)``,
    ``pyarrow.table(table)``, ``pandas.DataFrame.from_arrow(table)``. What they make of the table may outlive it.
    """

    @property
    def name(self) -> str: ...
    @property
    def columns(self) -> list[str]: ...
    def __len__(self) -> int: ...
    def to_dict(self) -> dict[str, list[int | float | bool | str | None]]:
        """The columns as lists, by name; None where nothing was recorded."""

    def __arrow_c_schema__(self) -> Any: ...
    def __arrow_c_array__(self, requested_schema: Any = None) -> tuple[Any, Any]: ...
    def __arrow_c_stream__(self, requested_schema: Any = None) -> Any: ...

def read_tables(text: bytes) -> list[Table]:
    """The tables in the output of ``rcomm-fr analyze --format columns``. Raises ValueError for any other text."""
