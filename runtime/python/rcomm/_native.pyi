from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from typing import Any

class Ring:
    def __init__(
        self,
        job: str,
        rank: int,
        world_size: int,
        *,
        attempt: int = 0,
        directory: str | PathLike[str] | None = None,
        entries: int | None = None,
        own_code: Sequence[str] = (),
    ) -> None: ...
    @property
    def path(self) -> Path | None: ...
    def group(
        self,
        name: str,
        description: str,
        ranks: Sequence[int],
        *,
        backend: str,
        timeout_ms: int = 0,
    ) -> GroupHooks: ...
    def sweep(self) -> None: ...
    def under_way(self) -> int: ...
    def waited(self, work: Any, well: bool) -> None: ...
    def phase(self, name: str) -> None: ...
    def step(self, step: int) -> None: ...
    def close(self) -> None: ...

class GroupHooks:
    def before(self, args: Any) -> None: ...
    def after(self, args: Any) -> None: ...
