"""Hooks in C++: building them for the installed PyTorch, and finding what was built."""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

_SOURCE = Path(__file__).with_name("_hooks.cpp")


class BuildError(RuntimeError):
    """The hooks could not be built; the text says why, with the compiler's first error if there is one."""


def library() -> Path:
    """The path that the hooks for the installed PyTorch and this version of rcomm have once they are built.

    The file is in ``$XDG_CACHE_HOME/rcomm`` or ``~/.cache/rcomm``. Its name has PyTorch's version and a digest of the
    source and of PyTorch's build, so that another PyTorch never loads these hooks.
    """
    import torch

    cache = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    built_for = f"{torch.__version__} {torch.version.git_version} {torch.__file__}"
    digest = hashlib.sha256(_SOURCE.read_bytes() + built_for.encode()).hexdigest()[:16]
    return Path(cache) / "rcomm" / f"hooks-{torch.__version__}-{digest}.so"


def find() -> Path | None:
    """The path of the hooks that were built; None if there are none, or if a user other than root and this one may
    write them."""
    path = library()
    for checked in (path.parent, path):
        try:
            status = checked.stat()
        except OSError:
            return None
        if status.st_uid not in (0, os.getuid()) or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            return None
    return path


def build() -> Path:
    """Compiles the hooks and returns their path; blocks for about half a minute. Raises BuildError."""
    import torch
    from torch.utils import cpp_extension

    from . import _dispatch

    has_hooks = hasattr(torch.distributed.ProcessGroup, "register_pre_hook")
    if not has_hooks and not _dispatch.is_possible():
        raise BuildError(f"rcomm cannot record PyTorch {torch.__version__}: it needs 2.5 or later")
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        raise BuildError("no C++ compiler: install g++, or name one in CXX")
    path = library()
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    libraries = Path(torch.__file__).parent / "lib"
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        made = Path(folder) / path.name
        command = [
            *compiler.split(),
            *("-std=c++20", "-O2", "-shared", "-fPIC", "-fvisibility=hidden", "-pthread"),
            f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
            "-DUSE_DISTRIBUTED",
            f"-DRCOMM_HOOKS={int(has_hooks)}",
            *(f"-isystem{include}" for include in cpp_extension.include_paths()),
            str(_SOURCE),
            f"-L{libraries}",
            *("-ltorch", "-ltorch_cpu", "-lc10", "-ldl"),
            *("-o", str(made)),
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            lines = [line for line in done.stderr.splitlines() if "error" in line] or [done.stderr]
            raise BuildError(f"{compiler} failed: {lines[0].strip()}")
        made.chmod(0o600)
        _try_loading(made)
        made.replace(path)
    return path


def _try_loading(made: Path) -> None:
    """Loads the library in another process, so that one that cannot be loaded never reaches a job."""
    load = "import sys, torch; torch.ops.load_library(sys.argv[1])"
    done = subprocess.run(
        [sys.executable, "-c", load, str(made)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "RCOMM_RECORD": "0"},
    )
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["the process died"])[-1]
        raise BuildError(f"the library was built, and cannot be loaded: {last}")
