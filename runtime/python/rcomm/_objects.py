"""Values other than arrays, as JSON; as pickles in JSON only where both sides ask for them."""

from __future__ import annotations

import base64
import json
import pickle
from typing import Any

from ._errors import InvalidArgument

# The key of the one-key object in which a pickled value travels.
_PICKLED = "rcomm.pickle"


def encode(value: Any, by_pickle: bool) -> str:
    """The value as JSON, or with `by_pickle` its pickle in a JSON object. Raises InvalidArgument for a value that JSON
    cannot hold, or that would be taken for a pickle."""
    if by_pickle:
        return json.dumps({_PICKLED: base64.b64encode(pickle.dumps(value)).decode("ascii")})
    if isinstance(value, dict) and set(value) == {_PICKLED}:
        raise InvalidArgument(f"a value whose one key is {_PICKLED!r} can be sent with pickle=True only")
    try:
        return json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        text = f"the value cannot be sent as JSON: {error}; pickle=True on all ranks sends what only pickle can"
        raise InvalidArgument(text) from error


def decode(text: str, by_pickle: bool) -> Any:
    """The value that another rank has sent. Raises InvalidArgument for a pickle, which can run any code, unless
    `by_pickle` is true."""
    value = json.loads(text)
    if not (isinstance(value, dict) and set(value) == {_PICKLED}):
        return value
    if not by_pickle:
        raise InvalidArgument("another rank sent a pickled value, and this rank did not pass pickle=True")
    return pickle.loads(base64.b64decode(value[_PICKLED]))
