"""A job that is killed in the middle of an epoch and goes on with another number of ranks.

``restart.py FOLDER KILL_AT``: trains one epoch from FOLDER's checkpoint, or from the start. Every
rank notes which samples each step holds, before it trains them; rank 0 saves a checkpoint after
every second step. At step KILL_AT (-1 for never) rank 1 kills itself.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import horovod.torch as hvd
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import loft_hvd as loft

NUM_SAMPLES, GLOBAL_BATCH, SAVE_EVERY = 1003, 48, 2


class Numbered(Dataset[tuple[Tensor, int]]):
    """Samples that know their number."""

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.full((4,), index / NUM_SAMPLES), index


def main() -> None:
    hvd.init()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    folder, kill_at = Path(sys.argv[1]), int(sys.argv[2])
    model = nn.Linear(4, 1)
    balancer = loft.Balancer(GLOBAL_BATCH, interval=3)
    loader = loft.DataLoader(Numbered(), balancer, num_workers=1, prefetch_factor=3)
    optimizer = loft.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9),
        named_parameters=model.named_parameters(),
        balancer=balancer,
    )
    loader.set_epoch(1)
    if (folder / "checkpoint.pt").exists():
        saved = torch.load(folder / "checkpoint.pt", weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        loader.load_state_dict(json.loads(saved["loader"]))
        balancer.load_state_dict(json.loads(saved["balancer"]))
    notes = (folder / f"ranks-{hvd.size()}-rank-{hvd.rank()}.jsonl").open("w")
    for x, numbers in loader:
        step = loader.step_sizes.step
        if step == kill_at and hvd.rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        held = [] if loader.is_padding else numbers.tolist()
        notes.write(json.dumps({"step": step, "held": held}) + "\n")
        notes.flush()
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        if hvd.rank() == 0 and step % SAVE_EVERY == 1:
            saved = {
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "loader": json.dumps(loader.state_dict()),
                "balancer": json.dumps(balancer.state_dict()),
            }
            torch.save(saved, folder / "new.pt")
            (folder / "new.pt").replace(folder / "checkpoint.pt")  # whole, or the one before
    print(f"rank {hvd.rank()} has finished the epoch")


if __name__ == "__main__":
    main()
