"""The sum of sparse tensors over all ranks."""

from __future__ import annotations

from typing import Any

import torch


def all_reduce(group: Any, tensor: torch.Tensor, op: str) -> Any:
    """Sums a sparse COO tensor in place. Blocks, even if the call is asynchronous; returns a Work that has ended.

    Raises ValueError for another layout, for another reduction than the sum, and if the ranks' tensors differ in shape
    or in the number of sparse dimensions.
    """
    if tensor.layout != torch.sparse_coo:
        raise ValueError(f"rcomm sums sparse tensors of layout torch.sparse_coo, not {tensor.layout}")
    if op != "sum":
        raise ValueError(f"rcomm reduces sparse tensors by ReduceOp.SUM only, not by {op}")
    coalesced = tensor.detach().coalesce()
    indices, values = coalesced.indices().contiguous(), coalesced.values().contiguous()
    size = group.size()
    # The ranks exchange their shapes before indices and values, so that all of them see a difference and raise.
    extents = [*tensor.shape[: tensor.sparse_dim()], *values.shape[1:]]
    described = torch.tensor([indices.shape[1], tensor.sparse_dim(), len(extents), *extents])
    lengths = torch.empty(size, dtype=torch.int64)
    group.all_gather_single(lengths, torch.tensor([len(described)])).wait()
    all_described = [torch.empty(int(length), dtype=torch.int64) for length in lengths]
    group.allgather([all_described], [described]).wait()
    for rank, other in enumerate(all_described):
        if other[1:].tolist() != described[1:].tolist():
            raise ValueError(
                f"rcomm: rank {rank} of the group sums a sparse tensor of shape {other[3:].tolist()} with "
                f"{int(other[1])} sparse dimensions, this rank one of shape {extents} with {tensor.sparse_dim()}"
            )
    counts = [int(other[0]) for other in all_described]
    all_indices = [torch.empty((count, tensor.sparse_dim()), dtype=torch.int64) for count in counts]
    all_values = [torch.empty((count, *values.shape[1:]), dtype=values.dtype) for count in counts]
    group.allgather([all_indices], [indices.t().contiguous()]).wait()
    work = group.allgather([all_values], [values])
    work.wait()
    summed = torch.sparse_coo_tensor(
        torch.cat(all_indices).t(), torch.cat(all_values), tensor.shape
    ).coalesce()
    with torch.no_grad():
        tensor.copy_(summed)
    return work
