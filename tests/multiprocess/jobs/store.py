"""Training on a sample store: ``store.py FOLDER FIRST LAST WORKERS KILLED_SERVER KILLED_RANK``.

It trains epochs FIRST to LAST - 1. Plans change all the time. After the first of them the store's
server of rank KILLED_SERVER is killed, and in the middle of the last one KILLED_RANK itself (-1:
none). State is saved into FOLDER after each epoch, and goes on from there. Rank 0 prints "found"
and a JSON object: how far the result is from training in one process, and hit shares by epoch.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import horovod.torch as hvd
import torch

import loft_hvd as loft
from tests.support.plans import Wandering
from tests.support.training import OPTIMIZERS, make_data, make_model, max_difference, train_alone

GLOBAL_BATCH, NUM_SAMPLES = 24, 960  # 40 steps an epoch


def main(folder: Path, first: int, last: int, num_workers: int, killed: int, dying: int) -> None:
    hvd.init()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = make_model()
    balancer = loft.Balancer(GLOBAL_BATCH, Wandering(GLOBAL_BATCH), interval=7)
    optimizer = loft.DistributedOptimizer(
        OPTIMIZERS["sgd"](model.parameters()), model.named_parameters(), balancer=balancer
    )
    if first:
        state = torch.load(folder / "state.pt")
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    store = loft.SampleStore(
        make_data(NUM_SAMPLES), memory_bytes=1 << 16, disk_bytes=1 << 20, folder=folder
    )
    loader = loft.DataLoader(store, balancer, seed=3, num_workers=num_workers)
    shares, before = [], dict(store.counters)
    for epoch in range(first, last):
        loader.set_epoch(epoch)
        for step, (x, y) in enumerate(loader):
            if epoch == last - 1 and dying == hvd.rank() and step == len(loader) // 2:
                os.kill(os.getpid(), signal.SIGKILL)
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
        read = {name: count - before[name] for name, count in store.counters.items()}
        before = dict(store.counters)
        counts = torch.tensor([read["own"], read["peer"], read["source"]])
        own, peer, source = hvd.allreduce(counts, op=hvd.Sum, name=f"read.{epoch}").tolist()
        shares.append((own / NUM_SAMPLES, peer / NUM_SAMPLES, source / NUM_SAMPLES))
        if epoch == first and killed == hvd.rank():
            assert store._server is not None
            os.kill(store._server.process.pid, signal.SIGKILL)
        if hvd.rank() == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(state, folder / "state.new")
            (folder / "state.new").rename(folder / "state.pt")
    if hvd.rank() == 0:
        alone = train_alone(
            make_data(NUM_SAMPLES), OPTIMIZERS["sgd"],
            global_batch_size=GLOBAL_BATCH, num_steps=last * NUM_SAMPLES // GLOBAL_BATCH,
        )  # fmt: skip
        found = {"difference": max_difference(model, alone), "shares": shares}
        print("found", json.dumps(found), flush=True)
    hvd.allreduce(torch.zeros(1), name="end")  # a server ends when nobody needs it
    store.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *(int(text) for text in sys.argv[2:7]))
