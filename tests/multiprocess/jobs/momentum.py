"""Worker momentum over processes: `momentum.py train FOLDER FIRST LAST`, or `memory BY`.

"train" makes the steps from FIRST to LAST, goes on from what it finds in the folder, and compares
the parameters with torch's momentum of the weighted mean. "memory" trains a large layer with
momentum by "worker" or "sgd", and says how much memory that took.
"""

from __future__ import annotations

import resource
import sys
from pathlib import Path

import horovod.torch as hvd
import torch
from torch import Tensor

import loft_hvd as loft

B, LR = 0.9, 0.01
# Samples of ranks before and after the resume; then rank 1 has none. The total stays.
RESUMED_AT, SIZES = 60, ((5, 3), (8, 0))
NUM_PASSES = 2
NUM_VALUES = 20_000_000


def make_model() -> torch.nn.Module:
    torch.manual_seed(7)
    return torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 2))


def loss_of(model: torch.nn.Module, step: int, at: int, rank: int, size: int) -> Tensor:
    """Return the loss of a rank's batch, which every rank can compute."""
    random = torch.Generator().manual_seed(1000 * step + 10 * at + rank)
    x = torch.randn(max(size, 1), 6, generator=random)
    return torch.nn.functional.mse_loss(model(x), torch.sin(2 * x[:, :2]))


def sizes_of(step: int) -> tuple[int, ...]:
    return SIZES[step >= RESUMED_AT]


def train_alone(num_steps: int) -> torch.nn.Module:
    """Train with torch's momentum and the exactly weighted mean of all ranks' gradients."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=B)
    for step in range(num_steps):
        optimizer.zero_grad()
        for at in range(NUM_PASSES):
            sizes = sizes_of(step)
            for rank, size in enumerate(sizes):
                if size:
                    (loss_of(model, step, at, rank, size) * size / sum(sizes)).backward()
        optimizer.step()
    return model


def train(folder: Path, first: int, last: int) -> None:
    rank, kept = hvd.rank(), folder / f"rank-{hvd.rank()}.pt"
    model = make_model()
    sizes = sizes_of(first)
    balancer = loft.Balancer(sum(sizes), list(sizes))
    optimizer = loft.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=LR),
        model.named_parameters(),
        balancer=balancer,
        worker_momentum=B,
        backward_passes_per_step=NUM_PASSES,
    )
    if first:
        state = torch.load(kept, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    for step in range(first, last):
        optimizer.param_groups[0]["lr"] = LR * (1 - B ** (step + 1)) / (1 - B)
        optimizer.zero_grad()
        for at in range(NUM_PASSES):
            with balancer.step(sizes[rank] or balancer.min_batch):
                loss_of(model, step, at, rank, sizes[rank]).backward()
        optimizer.step()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, kept)
    pairs = zip(model.parameters(), train_alone(last).parameters(), strict=True)
    most = max(float((a - b).detach().abs().max()) for a, b in pairs)
    print(f"rank {rank} is {most:.2e} away after {last} steps", flush=True)


def memory(by: str) -> None:
    torch.manual_seed(1)
    weight = torch.nn.Parameter(torch.zeros(NUM_VALUES))
    own, theirs = (B, 0.0) if by == "sgd" else (0.0, B)
    optimizer = loft.DistributedOptimizer(
        torch.optim.SGD([weight], lr=LR, momentum=own, foreach=False), worker_momentum=theirs
    )
    for _ in range(4):
        optimizer.zero_grad()
        (weight * 2.0).sum().backward()
        optimizer.step()
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(f"rank {hvd.rank()} took {most} bytes by {by}", flush=True)


def main() -> None:
    hvd.init()
    torch.set_num_threads(1)
    if sys.argv[1] == "memory":
        memory(sys.argv[2])
    else:
        train(Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
    hvd.shutdown()


if __name__ == "__main__":
    main()
