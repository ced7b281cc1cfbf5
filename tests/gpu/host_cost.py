"""Measures the host's nanoseconds of PyTorch's all_reduce over NCCL on one rank, to compare with device_bench."""

import sys
import time

try:
    import torch
    import torch.distributed as dist
except ImportError as error:
    sys.exit(f"skipped: {error}")
if not torch.cuda.is_available():
    sys.exit("skipped: this PyTorch sees no CUDA device")

store = dist.HashStore()
dist.init_process_group("nccl", store=store, rank=0, world_size=1, device_id=torch.device("cuda:0"))
for size in (4 << 10, 64 << 10, 1 << 20, 16 << 20, 128 << 20):
    numbers = torch.zeros(size // 4, device="cuda:0")
    calls = max(50, min(2000, (20 << 30) // size))
    best = float("inf")
    for _ in range(3):
        for _ in range(20):
            dist.all_reduce(numbers, async_op=True)
        torch.cuda.synchronize()
        begun = time.perf_counter_ns()
        for _ in range(calls):
            work = dist.all_reduce(numbers, async_op=True)
        host = time.perf_counter_ns() - begun
        work.wait()
        torch.cuda.synchronize()
        best = min(best, host / calls)
    print(f"PyTorch {torch.__version__}: {size:>10} bytes: host {best:8.0f} ns")
dist.destroy_process_group()
