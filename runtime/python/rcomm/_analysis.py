"""Reading records: the reports of ``rcomm-fr`` and ``rcomm-top`` as Python values."""

from __future__ import annotations

import csv
import io
import json
import os
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from . import _programs

if TYPE_CHECKING:
    from ._native import Table

__all__ = ["AnalysisError", "Finding", "Report", "analyze", "diff", "explain", "query"]


class AnalysisError(RuntimeError):
    """No record could be read, ``rcomm-fr`` or ``rcomm-top`` failed or refused the call, or a report has no files. If
    one of the programs failed, the text is what it wrote to standard error."""


@dataclass(frozen=True)
class Finding:
    """One statement about the job."""

    code: str
    """The code, such as ``E101``, which `explain` describes."""
    name: str
    """The name, such as ``not_joined``."""
    severity: str
    """``error``, ``warning`` or ``note``."""
    confidence: float
    """How certain the finding is, from 0 to 1."""
    sentence: str
    """What was found."""
    culprit_ranks: tuple[int, ...]
    """The ranks at which the finding points, by their numbers in the world."""
    victim_ranks: tuple[int, ...]
    """The ranks that wait because of the culprits."""
    next: str
    """What to look at next; empty if the report does not say."""
    raw: dict[str, Any] = field(repr=False, compare=False)
    """The finding as the report holds it (``rcomm.report/1``)."""


@dataclass(frozen=True)
class Report:
    """What was found in the records of a job's ranks."""

    verdict: str
    """``healthy``, ``running``, ``slow``, ``stuck``, ``mismatch``, ``ended``, ``cancelled``, ``crashed`` or
    ``inconclusive``."""
    findings: tuple[Finding, ...]
    exit_code: int
    """0 if nothing is wrong; 1 if a finding is an error or a warning, or the job crashed; else 2, if the verdict is
    ``inconclusive``."""
    raw: dict[str, Any] = field(repr=False, compare=False)
    """The whole report (``rcomm.report/1``)."""
    _paths: tuple[str, ...] = field(default=(), repr=False, compare=False)
    _options: tuple[str, ...] = field(default=(), repr=False, compare=False)

    @property
    def healthy(self) -> bool:
        """Whether nothing is wrong, and enough was read to know that: the exit code is 0."""
        return self.exit_code == 0

    @property
    def culprit(self) -> Finding | None:
        """The first finding that names a rank at fault; None if no finding does."""
        return next((finding for finding in self.findings if finding.culprit_ranks), None)

    def __str__(self) -> str:
        if self._paths:
            text = _fr("analyze", *self._options, "--color", "never", *self._paths).stdout.rstrip()
            if text:
                return text
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        """The lines of the text where there are no files that ``rcomm-fr`` could read again: for a running job, and
        once the records are gone."""
        word = self.verdict.upper()
        if not self.findings:
            end = self.raw.get("end") or {}
            notes = [problem["sentence"] for problem in self.raw.get("problems", [])]
            yield "  ".join([word, *([end["sentence"]] if end else notes[:1])])
        for index, finding in enumerate(self.findings):
            yield f"{word if index == 0 else 'ALSO'}  {finding.sentence}"
            for frame in finding.raw.get("frames", [])[:4]:
                place = f"{frame['name']} ({frame['filename']}:{frame['line']})"
                yield f"  rank {frame['rank']}, {frame['when']}: {place}"
            victims = finding.victim_ranks
            if victims:
                ranks = ", ".join(map(str, victims[:16]))
                more = ", ..." if len(victims) > 16 else ""
                yield f"  waiting: {'ranks' if len(victims) > 1 else 'rank'} {ranks}{more}"
            if finding.next:
                yield f"  next: {finding.next}"

    def html(self) -> str:
        """The report as one HTML page that needs no other files. Runs ``rcomm-fr`` and waits for it.

        Raises AnalysisError if the records can no longer be read, and for the report of `analyze(job=...)`, which has
        no files; FileNotFoundError if ``rcomm-fr`` is missing.
        """
        if not self._paths:
            raise AnalysisError("a look at a running job has no page: analyze its rings or dumps")
        done = _fr("analyze", *self._options, "--format", "html", *self._paths)
        if not done.stdout:
            raise AnalysisError(_failure_text(done))
        return done.stdout

    def _repr_html_(self) -> str | None:
        try:
            return self.html()
        except AnalysisError:
            return None

    @property
    def entries(self) -> Table:
        """One row for each recorded operation: rank, group, operation, when and from which line it was issued, its end.

        ``rcomm-fr`` reads the four tables when one of them is first asked for; this report then keeps them.

        Raises AnalysisError if the records can no longer be read, and for the report of `analyze(job=...)`, which has
        no files: analyze the job's rings. Raises FileNotFoundError if ``rcomm-fr`` is missing.
        """
        return self._tables["entries"]

    @property
    def collectives(self) -> Table:
        """One row for each collective, joined over the ranks that recorded it. Raises the errors of `entries`."""
        return self._tables["collectives"]

    @property
    def groups(self) -> Table:
        """One row for each group. Raises the errors of `entries`."""
        return self._tables["groups"]

    @property
    def findings_table(self) -> Table:
        """One row for each finding. Raises the errors of `entries`."""
        return self._tables["findings"]

    @cached_property
    def _tables(self) -> dict[str, Table]:
        if not self._paths:
            raise AnalysisError("a look at a running job has no tables: analyze its rings or dumps")
        from ._native import read_tables

        done = _fr("analyze", *self._options, "--format", "columns", *self._paths)
        try:
            return {table.name: table for table in read_tables(done.stdout.encode())}
        except ValueError as error:
            raise AnalysisError(done.stderr.strip() or str(error)) from None


def analyze(
    *paths: str | os.PathLike[str],
    job: str | None = None,
    ring_dir: str | os.PathLike[str] | None = None,
    live: bool = False,
    overdue: float | None = None,
    world_size: int | None = None,
) -> Report:
    """The report on the records at these paths, or on a job that runs on this host.

    A path is a file, a folder, an archive or a ring, as for ``rcomm-fr analyze``. ``live`` says that the job still
    runs: an operation that is pending for less than ``overdue`` seconds (default 5) is then no finding. ``overdue``
    implies ``live``. ``job`` names a job on this host instead, whose rings are below ``ring_dir`` if that is given.
    ``world_size`` is the number of the job's ranks, if the records do not show it. Blocks while ``rcomm-fr`` or
    ``rcomm-top`` runs.

    Raises AnalysisError if nothing can be read, ValueError if both paths and a job are given, or neither, and
    FileNotFoundError if the program is missing.
    """
    if bool(paths) == (job is not None):
        raise ValueError("give either paths, or job=")
    options: list[str] = []
    if overdue is not None:
        options += ["--overdue", f"{round(overdue * 1e6)}us"]
    if world_size is not None:
        options += ["--world-size", str(world_size)]
    if job is not None:
        if ring_dir is not None:
            options += ["--ring-dir", os.fspath(ring_dir)]
        return _report(_run("rcomm-top", "--once", "--json", "--job", job, *options))
    if live or overdue is not None:
        options.insert(0, "--snapshot")
    names = tuple(os.fspath(path) for path in paths)
    done = _fr("analyze", *options, "--format", "json", *names)
    return _report(done, names, tuple(options))


def query(sql: str, *paths: str | os.PathLike[str]) -> list[dict[str, str]]:
    """The rows of an SQL query over the tables of the records at these paths, all values as text.

    Raises AnalysisError if the records cannot be read, or if ``rcomm-fr`` refuses the query or was built without
    tables; FileNotFoundError if ``rcomm-fr`` is missing.
    """
    names = [os.fspath(path) for path in paths]
    done = _fr("query", sql, *names, "--format", "csv")
    if done.returncode != 0:
        raise AnalysisError(_failure_text(done))
    return list(csv.DictReader(io.StringIO(done.stdout)))


def diff(before: str | os.PathLike[str], after: str | os.PathLike[str]) -> dict[str, Any]:
    """What changed between two runs, or between two moments of one run (``rcomm.diff/1``).

    Raises AnalysisError if one of the two cannot be read, and FileNotFoundError if ``rcomm-fr`` is missing.
    """
    return _json(_fr("diff", "--format", "json", os.fspath(before), os.fspath(after)))


def explain(code: str) -> str:
    """What a finding's code means, what usually causes the finding, and what to do.

    Raises AnalysisError for an unknown code, and FileNotFoundError if ``rcomm-fr`` is missing.
    """
    done = _fr("explain", "--color", "never", code)
    if done.returncode != 0:
        raise AnalysisError(_failure_text(done))
    return done.stdout.rstrip()


def _fr(*arguments: str) -> subprocess.CompletedProcess[str]:
    return _run("rcomm-fr", *arguments)


def _run(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    # The program must not read from the job's terminal, which a debugger may use.
    return subprocess.run(
        [program, *arguments],
        executable=_programs.find(program),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
    )


def _failure_text(done: subprocess.CompletedProcess[str]) -> str:
    return done.stderr.strip() or f"{done.args[0]} ended with exit code {done.returncode}"


def _json(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    try:
        read = json.loads(done.stdout)
    except ValueError:
        raise AnalysisError(_failure_text(done)) from None
    if not isinstance(read, dict):
        raise AnalysisError(f"{done.args[0]} printed no JSON object")
    return read


def _report(
    done: subprocess.CompletedProcess[str],
    paths: tuple[str, ...] = (),
    options: tuple[str, ...] = (),
) -> Report:
    raw = _json(done)
    findings = tuple(_finding(finding) for finding in raw.get("findings", ()))
    return Report(str(raw.get("verdict", "")), findings, done.returncode, raw, paths, options)


def _finding(raw: dict[str, Any]) -> Finding:
    def ranks(key: str) -> tuple[int, ...]:
        given: Sequence[int] = raw.get(key) or ()
        return tuple(given)

    return Finding(
        code=raw["code"],
        name=raw["name"],
        severity=raw["severity"],
        confidence=raw["confidence"],
        sentence=raw["sentence"],
        culprit_ranks=ranks("culprit_ranks"),
        victim_ranks=ranks("victim_ranks"),
        next=raw.get("next") or "",
        raw=raw,
    )
