"""Recording on PyTorch 2.5 to 2.14, whose groups have no hooks.

In these versions every operation of every group, from Python or C++, runs through PyTorch's dispatcher as one of
the operators ``c10d::*``. For each of them but the monitored barrier, whose calls `rcomm.torch` records, this module
registers a kernel that runs before the backend's, notes the operation, and calls the next kernel. The dispatch key of
these kernels is BackendSelect, which is used whatever the tensors' devices, and under which PyTorch has no kernels of
these operators. A call into Python costs tens of microseconds, so the same kernels in C++ (`_hooks.cpp`) are used
instead if they were built.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ._native import GroupHooks

# Each operator's number in `c10d::HookOpName`, by which PyTorch 2.15 names it to hooks, and the names of its arguments:
# input, output, and root or peer. An empty tuple says that it has none; of several names, the first that exists counts.
_TENSORS = ("tensors",)
_OPERATORS: dict[str, tuple[int, tuple[str, ...], tuple[str, ...], tuple[str, ...]]] = {
    "send": (0, _TENSORS, (), ("dst",)),
    "recv_": (1, (), _TENSORS, ("src",)),
    "recv_any_source_": (1, (), _TENSORS, ()),
    "broadcast_": (2, _TENSORS, _TENSORS, ("root_rank",)),
    "allreduce_": (3, _TENSORS, _TENSORS, ()),
    "reduce_": (4, _TENSORS, _TENSORS, ("root_rank",)),
    "allgather_": (5, ("input_tensors",), ("output_tensors",), ()),
    "reduce_scatter_": (6, ("input_tensors",), ("output_tensors",), ()),
    "alltoall_": (7, ("input_tensors",), ("output_tensors",), ()),
    "barrier": (8, (), (), ()),
    "scatter_": (9, ("input_tensors",), ("output_tensors",), ("root_rank",)),
    "gather_": (10, ("input_tensors",), ("output_tensors",), ("root_rank",)),
    "gather_into_tensor_": (10, ("input_tensor",), ("output_tensor",), ("root_rank",)),
    "allreduce_coalesced_": (13, _TENSORS, _TENSORS, ()),
    "_allgather_base_": (14, ("input_tensor",), ("output_tensor",), ()),
    "allgather_coalesced_": (15, ("input_list",), ("output_lists",), ()),
    "allgather_into_tensor_coalesced_": (16, ("inputs",), ("outputs",), ()),
    "_reduce_scatter_base_": (17, ("input_tensor",), ("output_tensor",), ()),
    "reduce_scatter_tensor_coalesced_": (18, ("inputs",), ("outputs",), ()),
    "alltoall_base_": (19, ("input",), ("output",), ()),
}


def is_possible() -> bool:
    """Whether this PyTorch lets a kernel call the next one, as 2.5 and later do."""
    import torch

    return "with_keyset" in inspect.signature(torch.library.Library.impl).parameters


class _Call:
    """One operation, with the attributes of PyTorch 2.15's arguments to hooks."""

    __slots__ = ("input_tensors", "name", "output_tensors", "root", "work")

    def __init__(self, name: int, inputs: list[Any], outputs: list[Any], root: int) -> None:
        self.name = name
        self.input_tensors = inputs
        self.output_tensors = outputs
        self.root = root
        self.work: Any = None


class Dispatch:
    """The kernels of this process, and the groups that they record."""

    def __init__(self, c10d: Any) -> None:
        import torch

        self.torch = torch
        self.c10d = c10d
        self.hooks: weakref.WeakKeyDictionary[Any, GroupHooks] = weakref.WeakKeyDictionary()
        key = torch._C.DispatchKey.BackendSelect
        self.keys_after = torch._C._dispatch_keyset_full_after(key)
        self.library = torch.library.Library("c10d", "IMPL")
        for name in _OPERATORS:
            # A version may lack an operator.
            operator = getattr(torch.ops.c10d, name, None)
            if operator is not None:
                kernel = self.kernel(operator.default, name)
                self.library.impl(name, kernel, "BackendSelect", with_keyset=True)

    def attach(self, pg: Any, hooks: GroupHooks) -> None:
        """Records this group from now on."""
        self.hooks[pg] = hooks

    def end(self) -> None:
        """Removes the kernels: a call in C++ must not reach an interpreter that has ended."""
        self.hooks.clear()
        self.library._destroy()

    def kernel(self, operator: Any, name: str) -> Callable[..., Any]:
        """A kernel that records the calls of this operator in the groups attached, and calls the next kernel."""
        number, inputs, outputs, root = _OPERATORS[name]
        arguments = [argument.name for argument in operator._schema.arguments]
        group_index = arguments.index("process_group")

        def index_of(names: tuple[str, ...]) -> int | None:
            return next((arguments.index(known) for known in names if known in arguments), None)

        inputs_index, outputs_index, root_index = index_of(inputs), index_of(outputs), index_of(root)
        redispatch, unbox_group, unbox_work = operator.redispatch, self.c10d.ProcessGroup.unbox, self.c10d.Work.unbox

        def before(args: tuple[Any, ...]) -> tuple[GroupHooks, _Call] | None:
            hooks = self.hooks.get(unbox_group(args[group_index]))
            if hooks is None:
                return None
            call = _Call(
                number,
                [] if inputs_index is None else _flat(args[inputs_index]),
                [] if outputs_index is None else _flat(args[outputs_index]),
                -1 if root_index is None else args[root_index],
            )
            hooks.before(call)
            return hooks, call

        def after(hooks: GroupHooks, call: _Call, result: Any) -> None:
            work = result[-1] if isinstance(result, (tuple, list)) else result
            call.work = None if work is None else unbox_work(work)
            hooks.after(call)

        def recorded(keyset: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                noted = before(args)
            except Exception:  # No error of the recording may end the job.
                noted = None
            result = redispatch(keyset & self.keys_after, *args, **kwargs)
            if noted is not None:
                try:
                    after(*noted, result)
                except Exception:
                    pass
            return result

        return recorded


def _flat(tensors: Any) -> list[Any]:
    """The tensors of an argument, which is a tensor, a list of tensors, or a list of such lists."""
    if not isinstance(tensors, (list, tuple)):
        return [tensors]
    if tensors and isinstance(tensors[0], (list, tuple)):
        return [tensor for inner in tensors for tensor in inner]
    return list(tensors)
