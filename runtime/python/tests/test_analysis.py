"""Tests the analysis in Python: reports, their tables in Arrow's layout, and how the programs are found."""

from __future__ import annotations

import ctypes
import shutil
from pathlib import Path

import pytest

import rcomm
from rcomm import _native, _programs

# Records of real jobs.
DUMPS = Path(__file__).parents[3] / "tests" / "fixtures" / "dumps"


def test_report_keeps_its_text_when_the_records_are_gone(tmp_path):
    ring = _native.Ring("gone", 0, 2, directory=tmp_path, entries=64)
    report = rcomm.analyze(tmp_path / "gone")
    assert report.verdict.upper() in str(report)
    assert report._repr_html_()
    del ring
    shutil.rmtree(tmp_path / "gone")
    assert report.verdict.upper() in str(report)
    assert report._repr_html_() is None
    with pytest.raises(rcomm.AnalysisError):
        report.html()


class _Schema(ctypes.Structure):
    """ArrowSchema of Arrow's C data interface."""

    _fields_ = [  # noqa: RUF012
        ("format", ctypes.c_char_p),
        ("name", ctypes.c_char_p),
        ("metadata", ctypes.c_char_p),
        ("flags", ctypes.c_int64),
        ("n_children", ctypes.c_int64),
        ("children", ctypes.POINTER(ctypes.c_void_p)),
        ("dictionary", ctypes.c_void_p),
        ("release", ctypes.c_void_p),
        ("private_data", ctypes.c_void_p),
    ]


class _Array(ctypes.Structure):
    """ArrowArray of Arrow's C data interface."""

    _fields_ = [  # noqa: RUF012
        ("length", ctypes.c_int64),
        ("null_count", ctypes.c_int64),
        ("offset", ctypes.c_int64),
        ("n_buffers", ctypes.c_int64),
        ("n_children", ctypes.c_int64),
        ("buffers", ctypes.POINTER(ctypes.c_void_p)),
        ("children", ctypes.POINTER(ctypes.c_void_p)),
        ("dictionary", ctypes.c_void_p),
        ("release", ctypes.c_void_p),
        ("private_data", ctypes.c_void_p),
    ]


def _content(capsule: object, name: bytes) -> int:
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    return pointer(capsule, name)


def test_tables_of_a_report_are_read_through_arrows_interface():
    report = rcomm.analyze(DUMPS / "never-join-w4" / "pickle")
    entries = report.entries
    assert entries.name == "entries" and entries.columns[:2] == ["rank", "host"]
    columns = entries.to_dict()
    assert set(columns) == set(entries.columns)
    assert {len(values) for values in columns.values()} == {len(entries)}
    assert set(columns["rank"]) == {0, 1, 2, 3} and "all_reduce" in columns["op"]
    assert all(type(retired) is bool for retired in columns["retired"])
    # The column of ranks as a library with the interface reads it, from this process's memory.
    schema_capsule, array_capsule = entries.__arrow_c_array__()
    schema = _Schema.from_address(_content(schema_capsule, b"arrow_schema"))
    array = _Array.from_address(_content(array_capsule, b"arrow_array"))
    assert schema.format == b"+s" and schema.n_children == array.n_children == len(columns)
    assert array.length == len(entries)
    field, ranks = _Schema.from_address(schema.children[0]), _Array.from_address(array.children[0])
    assert (field.name, field.format) == (b"rank", b"l")
    values = ctypes.cast(ranks.buffers[1], ctypes.POINTER(ctypes.c_int64))
    assert values[ranks.offset : ranks.offset + ranks.length] == columns["rank"]
    assert _content(entries.__arrow_c_stream__(), b"arrow_array_stream")
    assert len(report.findings_table) == len(report.findings)
    assert report.findings_table.to_dict()["code"] == [finding.code for finding in report.findings]
    assert report.groups.to_dict()["size"] == [4] and len(report.collectives) > 0


def test_tables_of_a_report_are_taken_by_pyarrow():
    pyarrow = pytest.importorskip("pyarrow")
    entries = rcomm.analyze(DUMPS / "never-join-w4" / "pickle").entries
    taken = pyarrow.table(entries)
    assert taken.column_names == entries.columns and taken.num_rows == len(entries)
    rows, ranks = len(entries), entries.to_dict()["rank"]
    del entries
    assert taken["rank"].to_pylist() == ranks and len(ranks) == rows


def test_tables_of_a_report_are_taken_by_polars():
    polars = pytest.importorskip("polars")
    entries = rcomm.analyze(DUMPS / "never-join-w4" / "pickle").entries
    taken = polars.DataFrame(entries)
    assert taken.columns == entries.columns and taken["rank"].to_list() == entries.to_dict()["rank"]


def test_analysis_raises_its_errors_and_explain_describes_a_code(tmp_path):
    with pytest.raises(ValueError, match="either paths, or job="):
        rcomm.analyze()
    with pytest.raises(rcomm._analysis.AnalysisError, match="."):
        rcomm.analyze(tmp_path / "missing")
    assert "never" in rcomm.explain("E101")


def test_text_for_a_running_job_has_the_next_step():
    raw = {
        "frames": [{"rank": 2, "when": "last_seen", "name": "train", "filename": "a.py", "line": 13}],
        "problems": [{"sentence": "no rank has issued an operation for 14 s"}],
    }
    sentence, then = "rank 2 never came", "take its stack"
    finding = rcomm.Finding("E101", "not_joined", "error", 0.9, sentence, (2,), (0, 1), then, raw)
    lines = str(rcomm.Report("stuck", (finding,), 1, raw)).splitlines()
    assert lines == [
        "STUCK  rank 2 never came",
        "  rank 2, last_seen: train (a.py:13)",
        "  waiting: ranks 0, 1",
        "  next: take its stack",
    ]
    assert str(rcomm.Report("inconclusive", (), 2, raw)) == "INCONCLUSIVE  no rank has issued an operation for 14 s"


def test_program_beside_the_interpreter_is_found_unless_it_is_a_script(tmp_path, monkeypatch):
    for name, content in [("rcomm-fr", b"\x7fELF"), ("rcomm-top", b"#!/usr/bin/python")]:
        (tmp_path / name).write_bytes(content)
        (tmp_path / name).chmod(0o755)
    monkeypatch.setattr(_programs, "__file__", str(tmp_path / "package" / "_programs.py"))
    monkeypatch.setattr("sys.executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert _programs.find("rcomm-fr") == str(tmp_path / "rcomm-fr")
    with pytest.raises(FileNotFoundError, match="is the script of a Python package"):
        _programs.find("rcomm-top")
    with pytest.raises(FileNotFoundError, match="nor a program in PATH$"):
        _programs.find("rcomm-web")
