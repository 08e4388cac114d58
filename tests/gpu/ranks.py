"""Training over ranks on the GPUs that are here; without one, on the CPU.

    torchrun --nproc-per-node 3 -m tests.gpu.ranks ddp
    torchrun --nproc-per-node 1 -m tests.gpu.ranks ddp-nccl
    horovodrun --gloo -np 3 python -m tests.gpu.ranks horovod

Rank r computes on GPU r modulo their number. With batches of unequal sizes the mean must end where
training in one process does, to 1e-5, with torch's momentum too where ranks send averages, and a
robust rule with the same bits on every rank.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

import loft_hvd as loft
from loft_hvd.aggregation.rules import Rule
from loft_hvd.pipeline.selection import Scope
from tests.support.training import OPTIMIZERS, make_data, make_model, max_difference, train_alone

SIZES = (24, 12, 6, 6)
NUM_STEPS = 40
MOST_APART = 1e-5  # a goal: over ranks as in one process
MOMENTUM, LR = 0.9, 0.02

Gather = Callable[[Tensor], Tensor]  # a rank's row of any length to [world_size, length]


@dataclass(frozen=True)
class Case:
    """How gradients are reduced."""

    rule: Rule
    scope: Scope | None = None
    worker_momentum: float = 0.0

    def make_optimizer(self, parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
        """Return torch's part; ranks that send averages have no momentum in it."""
        make = plain_sgd if self.worker_momentum else OPTIMIZERS["sgd"]
        return make(parameters)

    def make_data(self, global_batch_size: int) -> TensorDataset:
        """Return data of several epochs."""
        # Averages go by samples, torch's momentum by steps: they agree where batches are whole.
        return make_data(12 * global_batch_size if self.worker_momentum else 500)


def plain_sgd(
    parameters: Iterable[torch.nn.Parameter], *, momentum: float = 0.0
) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=LR, momentum=momentum)


def on_ddp(case: Case, device: torch.device, sizes: tuple[int, ...]) -> torch.nn.Module:
    """Train with DistributedDataParallel and the hook."""
    balancer = loft.Balancer(sum(sizes), policy=list(sizes))
    model = DistributedDataParallel(make_model().to(device))
    hook = loft.ddp_hook(
        case.rule, balancer, scope=case.scope, worker_momentum=case.worker_momentum
    )
    model.register_comm_hook(None, hook)
    train(case, model, case.make_optimizer(model.parameters()), balancer, device)
    return model.module  # type: ignore[no-any-return]


def on_horovod(case: Case, device: torch.device, sizes: tuple[int, ...]) -> torch.nn.Module:
    """Train with Horovod and the optimizer around torch's."""
    balancer = loft.Balancer(sum(sizes), policy=list(sizes))
    model = make_model().to(device)
    optimizer = loft.DistributedOptimizer(
        case.make_optimizer(model.parameters()),
        named_parameters=model.named_parameters(),
        rule=case.rule,
        balancer=balancer,
        scope=case.scope,
        worker_momentum=case.worker_momentum,
    )
    train(case, model, optimizer, balancer, device)
    return model


def train(
    case: Case,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    balancer: loft.Balancer,
    device: torch.device,
) -> None:
    loader = loft.DataLoader(case.make_data(balancer.global_batch_size), balancer, seed=3)
    b, done = case.worker_momentum, 0
    for epoch in itertools.count():
        loader.set_epoch(epoch)
        for x, y in loader:
            torch.nn.functional.mse_loss(model(x.to(device)), y.to(device)).backward()
            if b:  # the lr with which averages make the steps of torch's momentum (docs/rules.md)
                optimizer.param_groups[0]["lr"] = LR * (1 - b ** (done + 1)) / (1 - b)
            optimizer.step()
            optimizer.zero_grad()
            done += 1
            if done == NUM_STEPS:
                return


def check(
    way: Callable[[Case, torch.device, tuple[int, ...]], torch.nn.Module],
    gather: Gather,
    *,
    rank: int,
    num_ranks: int,
) -> None:
    """Train by the mean and by robust rules, and compare."""
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    sizes = tuple(itertools.islice(itertools.cycle(SIZES), num_ranks))
    apart = {}
    for momentum in (0.0, MOMENTUM):
        case = Case(loft.Mean(), worker_momentum=momentum)
        with_momentum = functools.partial(plain_sgd, momentum=momentum)
        make_optimizer = with_momentum if momentum else OPTIMIZERS["sgd"]
        data, total = case.make_data(sum(sizes)), sum(sizes)
        alone = train_alone(data, make_optimizer, global_batch_size=total, num_steps=NUM_STEPS)
        apart[momentum] = max_difference(alone, way(case, device, sizes).cpu())
        said = f"rank {rank}: {apart[momentum]:g} from training in one process by {case}"
        assert apart[momentum] <= MOST_APART, said
    f = 1 if num_ranks > 2 else 0
    for case in (
        Case(loft.TrimmedMean(f)),
        Case(loft.Robust(f), worker_momentum=MOMENTUM),
        Case(loft.Robust(f), scope="model"),
        Case(loft.GeometricMedian(f), scope="model", worker_momentum=MOMENTUM),
    ):
        trained = way(case, device, sizes)
        moved = max_difference(make_model(), trained.cpu())
        assert moved > 1e-2, f"nothing was trained by {case}"
        bits = torch.cat([each.detach().cpu().view(-1) for each in trained.parameters()])
        rows = gather(bits.view(torch.int32))
        assert bool((rows == rows[0]).all()), f"rank {rank}: ranks ended with other bits by {case}"
    if rank == 0:
        where = torch.cuda.get_device_name(device) if device.type == "cuda" else "the CPU"
        mean, averaged = apart.values()
        said = f"{num_ranks} ranks on {where}: {mean:.1e} from training alone, equal bits"
        said += f"; {averaged:.1e} with averages"
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
