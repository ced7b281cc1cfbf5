"""One rank of torch.distributed over gloo, measured by the program in collectives/.

gloo.py HOST PORT NAME, with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT in the environment. Speaks the protocol
that mpi.c describes.
"""

import os
import socket
import sys
import time

import torch
import torch.distributed as dist

MAX_COUNT = 16 << 20

rank = int(os.environ["RANK"])
ranks = int(os.environ["WORLD_SIZE"])
if os.environ.get("PEER_CORE"):
    os.sched_setaffinity(0, {int(os.environ["PEER_CORE"])})
torch.set_num_threads(1)
dist.init_process_group("gloo", rank=rank, world_size=ranks)
source = torch.zeros(MAX_COUNT)
target = torch.zeros(MAX_COUNT)


def operation(name, size):
    count = max(1, size // 4)
    part = max(1, count // ranks)
    if name == "all_reduce":
        whole = target[:count]
        return lambda: dist.all_reduce(whole)
    if name == "barrier":
        return dist.barrier
    if name == "broadcast":
        whole = target[:count]
        return lambda: dist.broadcast(whole, 0)
    if name == "all_gather":
        whole, own = target[: part * ranks], source[:part]
        return lambda: dist.all_gather_into_tensor(whole, own)
    if name == "reduce_scatter":
        whole, own = source[: part * ranks], target[:part]
        return lambda: dist.reduce_scatter_tensor(own, whole)
    if name == "all_to_all":
        sent, received = source[: part * ranks], target[: part * ranks]
        return lambda: dist.all_to_all_single(received, sent)
    if name == "send_recv":
        sent, received = source[:count], target[:count]

        def ping():
            dist.send(sent, 1)
            dist.recv(received, 1)

        def pong():
            dist.recv(received, 0)
            dist.send(sent, 0)

        return {0: ping, 1: pong}.get(rank, lambda: None)
    return None


control = socket.create_connection((sys.argv[1], int(sys.argv[2])))
control.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
control.sendall(f"{sys.argv[3]} {rank}\n".encode())
for line in control.makefile():
    name, size, count = line.split()
    call = operation(name, int(size))
    if call is None:
        control.sendall(b"unsupported\n")
        continue
    count = int(count)
    for _ in range(count // 8):
        call()
    dist.barrier()
    times = []
    last = time.perf_counter()
    for _ in range(count):
        call()
        now = time.perf_counter()
        times.append((now - last) * 1e6)
        last = now
    times.sort()
    answer = f"{times[count // 2]:.4f} {times[count * 99 // 100]:.4f} {times[0]:.4f}\n"
    control.sendall(answer.encode())
dist.destroy_process_group()
