"""A fixture for tests that start ranks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def rcomm_healthy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Records the ranks that the test starts as processes, and fails the test if something was wrong with them.

    Yields the folder of their rings. A job whose ranks all exit with code 0 leaves no rings. If rings are left, their
    report must find nothing wrong. The test fails as well if the rings do not show how the processes ended, as after a
    SIGKILL.
    """
    rings = tmp_path / "rings"
    monkeypatch.setenv("RCOMM_RECORD", "1")
    monkeypatch.setenv("RCOMM_RING_DIR", str(rings))
    monkeypatch.setenv("RCOMM_JOB", "test")
    yield rings
    if not any(rings.glob("*/*.ring")):
        return
    from ._analysis import analyze

    report = analyze(rings)
    if not report.healthy:
        pytest.fail(str(report), pytrace=False)
