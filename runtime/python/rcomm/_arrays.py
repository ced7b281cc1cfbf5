"""Reads arrays that have no DLPack, and makes arrays for results. Imports numpy only to make a numpy array."""

from __future__ import annotations

import ctypes
import sys
from typing import Any

from ._errors import InvalidArgument

# DLPack's type codes by the format letters of Python's module struct.
_KINDS = {
    **dict.fromkeys("bhilqn", 0),
    **dict.fromkeys("BHILQN", 1),
    **dict.fromkeys("efd", 2),
    "?": 6,
}


def view(array: Any, writable: bool) -> tuple[int, int, int, tuple[int, ...], Any]:
    """The memory of an object with Python's buffer protocol; that of a copy if the object may only be read.

    Returns the memory's address, DLPack's type code of its elements, their number of bits, the shape, and the object
    that keeps the memory. Raises InvalidArgument if the object has no buffer protocol, is not in row-major order, or
    has elements that rcomm cannot communicate; and if it is to be `writable` and may only be read.
    """
    kind = type(array).__qualname__
    try:
        seen = memoryview(array)
    except TypeError:
        raise InvalidArgument(f"rcomm takes arrays with DLPack or Python's buffer protocol, not {kind}") from None
    code = _KINDS.get(seen.format.lstrip("@=<"))
    if code is None:
        raise InvalidArgument(f"this {kind} has elements of format {seen.format!r}, which rcomm cannot communicate")
    if not seen.c_contiguous:
        raise InvalidArgument(f"this {kind} is not in row-major order without gaps: pass a contiguous copy")
    if seen.readonly and writable:
        raise InvalidArgument(f"this {kind} may only be read, and the operation writes it")
    memory = ctypes.c_char * seen.nbytes
    kept = memory.from_buffer_copy(seen) if seen.readonly else memory.from_buffer(seen)
    return ctypes.addressof(kept), code, 8 * seen.itemsize, tuple(seen.shape or ()), kept


def empty(like: Any, shape: tuple[int, ...]) -> Any:
    """A new array of this shape with the element type of `like`: a tensor if `like` is one, else a numpy array.

    Raises InvalidArgument if numpy is needed and missing.
    """
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(like, torch.Tensor):
        return torch.empty(shape, dtype=like.dtype)
    try:
        import numpy
    except ImportError:
        kind = type(like).__qualname__
        raise InvalidArgument(f"rcomm cannot make an array like this {kind} without numpy: give out=") from None
    if not isinstance(like, (numpy.ndarray, numpy.generic)):
        like = numpy.from_dlpack(like) if hasattr(like, "__dlpack__") else numpy.asarray(like)
    return numpy.empty(shape, like.dtype)
