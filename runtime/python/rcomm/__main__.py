"""``python -m rcomm build-hooks``: compiles the hooks in C++ for the installed PyTorch."""

from __future__ import annotations

import argparse
import sys


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m rcomm")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser(
        "build-hooks",
        help="compile the hooks in C++ for the installed PyTorch (needs a C++ compiler)",
        description="Compiles the hooks in C++ for the installed PyTorch, into the user's cache. Processes that record "
        "use them from then on; without them they use hooks in Python, which record the same and cost more.",
    )
    parser.parse_args()
    from . import _cpp

    try:
        path = _cpp.build()
    except _cpp.BuildError as error:
        print(f"rcomm: {error}", file=sys.stderr)
        return 2
    print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
