"""rcomm: collective communication that shows which rank of a job hangs, since when, and who waits for it.

``rcomm.init()`` joins a job and returns a `World`, whose groups have operations for arrays of numpy and of every
library with DLPack. ``torch.distributed.init_process_group("rcomm")`` needs no import. ``rcomm.torch.record()`` (or
``RCOMM_RECORD=1``) records what this process does in torch.distributed through other backends, and
``rcomm.analyze(...)`` reads records and returns a `Report`. Importing this module loads none of its submodules.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import torch as torch
    from ._analysis import AnalysisError as AnalysisError
    from ._analysis import Finding as Finding
    from ._analysis import Report as Report
    from ._analysis import analyze as analyze
    from ._analysis import diff as diff
    from ._analysis import explain as explain
    from ._analysis import query as query
    from ._errors import Aborted as Aborted
    from ._errors import Closed as Closed
    from ._errors import Error as Error
    from ._errors import InvalidArgument as InvalidArgument
    from ._errors import Mismatch as Mismatch
    from ._errors import PeerLost as PeerLost
    from ._errors import Timeout as Timeout
    from ._errors import Unsupported as Unsupported
    from ._native import Table as Table
    from ._world import ANY as ANY
    from ._world import Group as Group
    from ._world import PremulSum as PremulSum
    from ._world import Work as Work
    from ._world import World as World
    from ._world import init as init
    from ._world import phase as phase
    from ._world import premul_sum as premul_sum
    from ._world import step as step

__version__ = "0.1.0"

# The submodules and their public names. A submodule is imported when one of its names is first used.
_PLACES = {
    "._analysis": ("AnalysisError", "Finding", "Report", "analyze", "diff", "explain", "query"),
    "._errors": (
        "Aborted",
        "Closed",
        "Error",
        "InvalidArgument",
        "Mismatch",
        "PeerLost",
        "Timeout",
        "Unsupported",
    ),
    "._native": ("Table",),
    "._world": ("ANY", "Group", "PremulSum", "Work", "World", "init", "phase", "premul_sum", "step"),
}
_PLACE_OF = {name: place for place, names in _PLACES.items() for name in names}

__all__ = [*sorted(_PLACE_OF), "torch"]  # noqa: PLE0604


def __getattr__(name: str) -> Any:
    if name == "torch":
        return importlib.import_module(".torch", __name__)
    place = _PLACE_OF.get(name)
    if place is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(place, __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
