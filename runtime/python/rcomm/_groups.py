"""What PyTorch tells of a process group: its backends and its time-out."""

from __future__ import annotations

import contextlib
from typing import Any


def backends_of(pg: Any) -> list[Any]:
    """The group's backends, in PyTorch's order of devices; a group written in Python may have none."""
    found = []
    for device in pg._device_types:
        with contextlib.suppress(Exception):
            found.append(pg._get_backend(device))
    return found


def name_of(backend: Any) -> str:
    """The name that a backend gives itself; empty if it gives none."""
    try:
        return str(backend.name())
    except Exception:
        return ""


def backend_of(pg: Any) -> str:
    """The backend's name; of several, that of the device which PyTorch names first."""
    return next(map(name_of, backends_of(pg)), "")


def timeout_of(pg: Any) -> int:
    """How long the group's operations may take, in ms; 0 if that is not known."""
    try:
        timeout = pg._get_backend(pg._device_types[0]).options._timeout
        return max(0, round(timeout.total_seconds() * 1000))
    except Exception:
        return 0
