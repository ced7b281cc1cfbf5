"""The exceptions of `rcomm`'s operations. Each says in one sentence what happened, and which ranks are concerned."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ._analysis import Report

__all__ = ["Aborted", "Closed", "Error", "InvalidArgument", "Mismatch", "PeerLost", "Timeout", "Unsupported"]


class Error(RuntimeError):
    """The base of all errors. An error of this class itself is of a kind without a subclass, such as one of the store
    or the network: see `kind`."""

    kind: str = "Error"
    """The error's kind, by its name in Rust: ``Timeout``, ``Store``, ``Io`` and so on."""
    ranks: list[int] = []  # noqa: RUF012, set in instances
    """The ranks that the error is about, by their numbers in the world."""
    op: str | None = None
    """The operation that failed; None if the error is about no operation."""
    seq: int | None = None
    """The operation's sequence number in the group, if known."""
    group: str | None = None
    """The name of the operation's group, if known."""
    _records: str | os.PathLike[str] | None = None

    @property
    def call(self) -> str | None:
        """The operation, its number and its group; None if the error is about no operation."""
        if self.op is None:
            return None
        number = "" if self.seq is None else f" #{self.seq}"
        return f"{self.op}{number}" + ("" if self.group is None else f" on group {self.group}")

    def report(self) -> Report:
        """The verdict over the records of this job's ranks on this host, as they are now.

        Starts ``rcomm-fr`` and waits for its output, a few tenths of a second. Raises `rcomm.AnalysisError` if
        there are no records, as after a clean shutdown of the job, or for an error that belongs to no job; and
        FileNotFoundError if ``rcomm-fr`` is missing.
        """
        from ._analysis import AnalysisError, analyze

        if self._records is None:
            raise AnalysisError("this error belongs to no job that has records")
        return analyze(self._records, live=True)


class Timeout(Error, TimeoutError):
    """A deadline passed; `ranks` had not arrived."""


class PeerLost(Error, ConnectionError):
    """The connection to another rank broke, or that rank's process is gone. Or another rank, which the text names, has
    ended the group because of `ranks`: for instance at its own deadline, before that of this rank."""

    @property
    def rank(self) -> int | None:
        """The lost rank, by its number in the world; None if there are several, or none is named."""
        return self.ranks[0] if len(self.ranks) == 1 else None


class Mismatch(Error):
    """The ranks do not agree on what they called: `ranks` called something else than others."""


class Aborted(Error):
    """The group was ended, by this rank or another, or by an earlier error."""


class Closed(Error):
    """A world or group was used after it had ended, or a world, group or operation in a forked child."""


class InvalidArgument(Error, ValueError):
    """An argument is wrong: nothing was sent. Or another rank sent a pickle, and this rank did not pass
    ``pickle=True``. The group is usable."""


class Unsupported(Error, NotImplementedError):
    """The reduction is not defined for these elements, or the operation does not exist here. Nothing was sent."""


def first_line(error: BaseException) -> str:
    """The exception's type, and the first line of its text if it has one."""
    lines = str(error).strip().splitlines()
    return ": ".join([type(error).__name__, *lines[:1]])
