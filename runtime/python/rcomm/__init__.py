"""rcomm: which rank of a job hangs, since when, and who waits for it.

``rcomm.torch.record()`` (or ``RCOMM_RECORD=1``) records what this process does in torch.distributed,
``rcomm.analyze(...)`` reads records and gives a `Report`. Importing this module loads nothing else.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import torch as torch
    from ._analysis import Finding as Finding
    from ._analysis import Report as Report
    from ._analysis import analyze as analyze
    from ._analysis import diff as diff
    from ._analysis import explain as explain
    from ._analysis import query as query

__all__ = ["Finding", "Report", "analyze", "diff", "explain", "query", "torch"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name == "torch":
        return importlib.import_module(".torch", __name__)
    if name in __all__:
        return getattr(importlib.import_module("._analysis", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
