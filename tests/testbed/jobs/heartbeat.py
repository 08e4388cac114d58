"""A job of short steps, to cut its heartbeat: ``heartbeat.py FOLDER WHAT``.

It goes on until FOLDER/stop exists. Rank 0 writes to FOLDER/place where the heartbeat listens, once
all ranks train. With "hold" rank 1 holds the Python interpreter for 16 s at step 5, as some calls
do.
"""

from __future__ import annotations

import ctypes
import logging
import sys
import time
from pathlib import Path

import horovod.torch as hvd
import torch

import loft_hvd as loft
from loft_hvd.failures.handshake import Listener
from loft_hvd.failures.watched import heartbeat_of
from tests.support.training import make_data, make_model

NUM_STEPS = 3000
STEP_S = 0.1
HOLD_S = 16


def write_place(folder: Path) -> None:
    heartbeat = heartbeat_of("horovod.0")
    assert heartbeat is not None
    listener = heartbeat._connections._maker
    assert isinstance(listener, Listener)
    (address, port), *_ = listener.addresses
    (folder / "part").write_text(f"{address} {port}")
    (folder / "part").rename(folder / "place")


def main(folder: Path, what: str) -> None:
    hvd.init()
    logging.basicConfig(
        level=logging.INFO, format=f"rank {hvd.rank()} at %(created).2f %(message)s"
    )
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = make_model()
    optimizer = loft.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.05), model.named_parameters(), rule=loft.Median()
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    x, y = make_data(16).tensors
    for step in range(NUM_STEPS):
        stop = torch.tensor([float((folder / "stop").exists())])
        if loft.allreduce(stop, loft.Mean(), name="stop") > 0:  # seen by one: all stop
            break
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        time.sleep(STEP_S)
        if step == 5 and hvd.rank() == 0:
            write_place(folder)
        if step == 5 and hvd.rank() == 1 and what == "hold":
            print("holds the interpreter", flush=True)
            ctypes.PyDLL(None).sleep(HOLD_S)  # unlike CDLL, PyDLL keeps the interpreter's lock
    print(f"rank {hvd.rank()} has finished", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
