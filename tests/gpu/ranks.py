"""Training over ranks on the GPUs that are here; without one, on the CPU.

    torchrun --nproc-per-node 3 -m tests.gpu.ranks ddp
    torchrun --nproc-per-node 1 -m tests.gpu.ranks ddp-nccl
    horovodrun --gloo -np 3 python -m tests.gpu.ranks horovod

Rank r computes on GPU r modulo their number. With batches of unequal sizes the mean must end where
training in one process does, to 1e-5, and a robust rule with the same bits on every rank.
"""

from __future__ import annotations

import importlib
import itertools
import os
import sys
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import loft_hvd as loft
from loft_hvd.aggregation.rules import Rule
from tests.support.training import OPTIMIZERS, make_data, make_model, max_difference, train_alone

SIZES = (24, 12, 6, 6)
NUM_STEPS = 40
MOST_APART = 1e-5  # a goal: over ranks as in one process

Gather = Callable[[Tensor], Tensor]  # a rank's row of any length to [world_size, length]


def on_ddp(rule: Rule, device: torch.device, sizes: tuple[int, ...]) -> torch.nn.Module:
    """Train with DistributedDataParallel and the hook."""
    balancer = loft.Balancer(sum(sizes), policy=list(sizes))
    model = DistributedDataParallel(make_model().to(device))
    model.register_comm_hook(None, loft.ddp_hook(rule, balancer))
    train(model, OPTIMIZERS["sgd"](model.parameters()), balancer, device)
    return model.module  # type: ignore[no-any-return]


def on_horovod(rule: Rule, device: torch.device, sizes: tuple[int, ...]) -> torch.nn.Module:
    """Train with Horovod and the optimizer around torch's."""
    balancer = loft.Balancer(sum(sizes), policy=list(sizes))
    model = make_model().to(device)
    inner = OPTIMIZERS["sgd"](model.parameters())
    optimizer = loft.DistributedOptimizer(
        inner, named_parameters=model.named_parameters(), rule=rule, balancer=balancer
    )
    train(model, optimizer, balancer, device)
    return model


def train(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    balancer: loft.Balancer,
    device: torch.device,
) -> None:
    loader = loft.DataLoader(make_data(500), balancer, seed=3)
    done = 0
    for epoch in itertools.count():
        loader.set_epoch(epoch)
        for x, y in loader:
            torch.nn.functional.mse_loss(model(x.to(device)), y.to(device)).backward()
            optimizer.step()
            optimizer.zero_grad()
            done += 1
            if done == NUM_STEPS:
                return


def check(
    way: Callable[[Rule, torch.device, tuple[int, ...]], torch.nn.Module],
    gather: Gather,
    *,
    rank: int,
    num_ranks: int,
) -> None:
    """Train by the mean and by a robust rule, and compare."""
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    sizes = tuple(itertools.islice(itertools.cycle(SIZES), num_ranks))
    alone = train_alone(
        make_data(500), OPTIMIZERS["sgd"], global_batch_size=sum(sizes), num_steps=NUM_STEPS
    )
    apart = max_difference(alone, way(loft.Mean(), device, sizes).cpu())
    assert apart <= MOST_APART, f"rank {rank}: {apart:g} from training in one process"
    rule = loft.TrimmedMean(f=1 if num_ranks > 2 else 0)
    trained = way(rule, device, sizes)
    moved = max_difference(make_model(), trained.cpu())
    assert moved > 1e-2, "nothing was trained"
    bits = torch.cat([each.detach().cpu().view(-1) for each in trained.parameters()])
    rows = gather(bits.view(torch.int32))
    assert bool((rows == rows[0]).all()), f"rank {rank}: ranks ended with other bits"
    if rank == 0:
        where = torch.cuda.get_device_name(device) if device.type == "cuda" else "the CPU"
        said = f"{num_ranks} ranks on {where}: {apart:.1e} from training alone, equal bits"
        print(said)  # noqa: T201 - a script that reports


def run_ddp(backend: str) -> None:
    """Check DDP on a backend of torch."""
    dist.init_process_group(backend)
    carrier = "cuda" if backend == "nccl" else "cpu"

    def gather(row: Tensor) -> Tensor:
        rows = [torch.empty_like(row, device=carrier) for _ in range(dist.get_world_size())]
        dist.all_gather(rows, row.to(carrier))
        return torch.stack(rows).cpu()

    rank = dist.get_rank()
    if backend == "nccl":
        torch.cuda.set_device(rank % torch.cuda.device_count())
    check(on_ddp, gather, rank=rank, num_ranks=dist.get_world_size())
    dist.destroy_process_group()


def run_horovod() -> None:
    """Check Horovod, with whatever it was built for."""
    hvd = importlib.import_module("horovod.torch")
    hvd.init()
    if os.environ.get("EXPECT_NCCL") and not hvd.nccl_built():
        raise SystemExit("Horovod was built without NCCL")

    def gather(row: Tensor) -> Tensor:
        rows: Tensor = hvd.allgather(row.view(1, -1), name="bits")
        return rows

    check(on_horovod, gather, rank=hvd.rank(), num_ranks=hvd.size())
    hvd.shutdown()


if __name__ == "__main__":
    torch.set_num_threads(1)
    ways = {
        "ddp": lambda: run_ddp("gloo"),
        "ddp-nccl": lambda: run_ddp("nccl"),
        "horovod": run_horovod,
    }
    if len(sys.argv) != 2 or sys.argv[1] not in ways:
        raise SystemExit(f"tests.gpu.ranks: give one of {', '.join(ways)}")
    ways[sys.argv[1]]()
