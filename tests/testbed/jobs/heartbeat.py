"""A job of short steps, to cut its heartbeat or links: ``heartbeat.py FOLDER WHAT``.

It goes on until FOLDER/stop exists. Rank 0 writes to FOLDER/place where the heartbeat listens, once
all ranks train. With "hold" rank 1 holds the Python interpreter for 16 s at step 5, as some calls
do. With "torch" ranks train under DDP, on ``torch.distributed``, with "attached" by Horovod's own
optimizer, else by ours. With "tolerant" and "torch-tolerant" rows travel by datagrams.
"""

from __future__ import annotations

import ctypes
import logging
import os
import sys
import time
from pathlib import Path

import horovod.torch as hvd
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import loft_hvd as loft
from loft_hvd.failures.handshake import Listener
from loft_hvd.failures.watched import heartbeat_of
from tests.support.training import make_data, make_model

NUM_STEPS = 3000
STEP_S = 0.1
HOLD_S = 16


def write_place(folder: Path, world: str) -> None:
    heartbeat = heartbeat_of(world)
    assert heartbeat is not None
    listener = heartbeat._connections._maker
    assert isinstance(listener, Listener)
    (address, port), *_ = listener.addresses
    (folder / "part").write_text(f"{address} {port}")
    (folder / "part").rename(folder / "place")


def begin(folder: Path, what: str) -> int:
    """Join the ranks; returns this one's number."""
    if not what.startswith("torch"):
        hvd.init()
        return int(hvd.rank())
    rank, size = (int(os.environ[f"HOROVOD_{name}"]) for name in ("RANK", "SIZE"))
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=size)
    return rank


def make_training(what: str) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    gather = loft.LossTolerant() if what.endswith("tolerant") else None
    if what.startswith("torch"):
        wrapped = DistributedDataParallel(model)
        wrapped.register_comm_hook(None, loft.ddp_hook(loft.Median(), gather=gather))
        return wrapped, optimizer
    if what == "attached":
        theirs = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
        loft.attach(theirs, loft.Balancer(16 * hvd.size(), "report"))
        return model, theirs
    ours = loft.DistributedOptimizer(
        optimizer, model.named_parameters(), rule=loft.Median(), gather=gather
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    return model, ours


def main(folder: Path, what: str) -> None:
    rank = begin(folder, what)
    logging.basicConfig(level=logging.INFO, format=f"rank {rank} at %(created).2f %(message)s")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, optimizer = make_training(what)
    x, y = make_data(16).tensors
    for step in range(NUM_STEPS):
        stop = torch.tensor([float((folder / "stop").exists())])
        if loft.allreduce(stop, loft.Mean(), name="stop") > 0:  # seen by one: all stop
            break
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        time.sleep(STEP_S)
        if step == 5 and rank == 0:
            write_place(folder, "torch.0.1.2" if what.startswith("torch") else "horovod.0")
        if step == 5 and rank == 1 and what == "hold":
            print("holds the interpreter", flush=True)
            ctypes.PyDLL(None).sleep(HOLD_S)  # unlike CDLL, PyDLL keeps the interpreter's lock
    print(f"rank {rank} has finished", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
