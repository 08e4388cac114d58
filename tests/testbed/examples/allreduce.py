"""Where each rank runs, how long an all-reduce takes, and a loop of the CPU.

testbed run python tests/testbed/examples/allreduce.py MEGABYTES
"""

from __future__ import annotations

import socket
import statistics
import sys
import time

import horovod.torch as hvd
import torch

torch.set_num_threads(1)
hvd.init()
rank, world_size = hvd.rank(), hvd.size()
summed = hvd.allreduce(torch.full((4,), float(rank)), op=hvd.Sum)
print(
    f"rank {rank}/{world_size} local {hvd.local_rank()}/{hvd.local_size()} on "
    f"{socket.gethostname()} sum {summed.tolist()}",
    flush=True,
)
megabytes = float(sys.argv[1]) if len(sys.argv) > 1 else 4.0
tensor = torch.randn(int(megabytes * 1e6 / 4))
hvd.allreduce(tensor, name="warm")
times_s = []
for _ in range(5):
    hvd.barrier()
    began = time.perf_counter()
    hvd.allreduce(tensor, name="timed")
    times_s.append(time.perf_counter() - began)
if rank == 0:
    print(f"allreduce {megabytes} MB median {statistics.median(times_s) * 1e3:.1f} ms", flush=True)
matrix = torch.randn(256, 256)
hvd.barrier()
began = time.perf_counter()
for _ in range(400):
    matrix @ matrix
print(f"rank {rank} cpu loop {time.perf_counter() - began:.3f} s wall", flush=True)
hvd.barrier()
