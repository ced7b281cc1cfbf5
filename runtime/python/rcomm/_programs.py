"""The programs of rcomm, as console scripts and for this package itself."""

from __future__ import annotations

import os
import shutil
import sys
from typing import NoReturn


def find(name: str) -> str:
    """The file of a program: the one in this package, else the one in PATH.

    The file must be started with ``name`` as its zeroth argument (``executable`` of ``subprocess``): one file has all
    programs of the package, and runs the one by whose name it is started. Raises FileNotFoundError if the program is in
    neither place.
    """
    packaged = os.path.join(os.path.dirname(os.path.abspath(__file__)), "bin", "rcomm")
    if os.access(packaged, os.X_OK):
        return packaged
    # The console script of this package has the same name, and would only call this function again.
    scripts = os.path.realpath(os.path.dirname(sys.executable))
    skipped = ""
    for folder in os.environ.get("PATH", "").split(os.pathsep):
        found = shutil.which(name, path=folder) if folder else None
        if found is None:
            continue
        if os.path.realpath(folder) != scripts or not _is_script(found):
            return found
        skipped = f" ({found} is the script of a Python package, which needs the program)"
    raise FileNotFoundError(
        f"{name} is neither in this package ({packaged}) nor a program in PATH{skipped}"
    )


def _is_script(path: str) -> bool:
    with open(path, "rb") as file:
        return file.read(2) == b"#!"


def _become(name: str) -> NoReturn:
    """Replaces this process by the program, with the same arguments; exits with 2 if the program is missing."""
    try:
        program = find(name)
    except FileNotFoundError as error:
        print(f"{name}: {error}", file=sys.stderr)
        sys.exit(2)
    os.execv(program, [name, *sys.argv[1:]])


def fr() -> NoReturn:
    _become("rcomm-fr")


def top() -> NoReturn:
    _become("rcomm-top")


def web() -> NoReturn:
    _become("rcomm-web")


def run() -> NoReturn:
    _become("rcomm-run")


def bench() -> NoReturn:
    _become("rcomm-bench")
