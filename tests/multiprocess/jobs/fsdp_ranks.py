"""Jobs on ranks under FSDP2: ``fsdp_ranks.py "WHAT .." WORLD_SIZE FOLDER``."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.multiprocessing.spawn import start_processes
from torch.nn.parallel import DistributedDataParallel

import loft_hvd as loft
from loft_hvd.errors import ArgumentError, ArgumentTypeError, MismatchError

SIZES = (12, 8, 4, 1)
NUM_STEPS = 50
Batch = tuple[Tensor, Tensor]


class Transformer(torch.nn.Module):
    """Two layers, over sequences of 4 tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = torch.nn.Linear(6, 16)
        self.blocks = torch.nn.ModuleList(
            # Without biases: that of keys has a gradient of rounding errors alone, which AdamW
            # makes steps as long as any.
            torch.nn.TransformerEncoderLayer(16, 2, 24, dropout=0.0, batch_first=True, bias=False)
            for _ in range(2)
        )
        self.leave = torch.nn.Linear(16, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.enter(x.view(-1, 4, 6))
        for block in self.blocks:
            h = block(h)
        return self.leave(h.mean(dim=1))  # type: ignore[no-any-return]


def make_mlp() -> torch.nn.Module:
    torch.manual_seed(11)
    return torch.nn.Sequential(
        torch.nn.Linear(24, 37), torch.nn.Tanh(), torch.nn.Linear(37, 19), torch.nn.Tanh(),
        torch.nn.Linear(19, 2),
    )  # fmt: skip


def make_transformer() -> torch.nn.Module:
    torch.manual_seed(11)
    return Transformer()


MODELS = {"mlp": make_mlp, "transformer": make_transformer}


def shard(model: torch.nn.Module) -> torch.nn.Module:
    """Shard a model: each of its blocks, and what is left."""
    for block in model.blocks if isinstance(model, Transformer) else model:  # type: ignore[attr-defined]
        if any(True for _ in block.parameters()):
            fully_shard(block)
    fully_shard(model)
    return model


def whole_batch(step: int, size: int) -> Batch:
    random = torch.Generator().manual_seed(step)
    return torch.randn(size, 24, generator=random), torch.randn(size, 2, generator=random)


def own_batch(step: int, sizes: tuple[int, ...], rank: int) -> Batch:
    x, y = whole_batch(step, sum(sizes))
    begin = sum(sizes[:rank])
    return x[begin : begin + sizes[rank]], y[begin : begin + sizes[rank]]


def adamw(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.05)


def train(
    model: torch.nn.Module,
    batch_of: Callable[[int], Batch],
    *,
    num_steps: int = NUM_STEPS,
    spoil: Callable[[Tensor], Tensor] = lambda loss: loss,
) -> None:
    optimizer = adamw(model)
    for step in range(num_steps):
        optimizer.zero_grad()
        x, y = batch_of(step)
        spoil(torch.nn.functional.mse_loss(model(x), y)).backward()
        optimizer.step()


def whole(model: torch.nn.Module) -> Tensor:
    """Return all parameters, gathered, [numel]."""
    found = [
        each.full_tensor() if hasattr(each, "full_tensor") else each for each in model.parameters()
    ]
    return torch.cat([each.detach().reshape(-1) for each in found])


def drawn(balancer: loft.Balancer, sizes: tuple[int, ...]) -> Callable[[int], Batch]:
    """Return what gives this rank's batch of a step, as a loader of the script's own."""

    def batch_of(step: int) -> Batch:
        balancer.begin_own_batch()
        return own_batch(step, sizes, dist.get_rank())

    return batch_of


def exact(world_size: int) -> None:
    """Train on unequal batches as one process does on all of them."""
    sizes = SIZES[:world_size]
    for name, make in MODELS.items():
        alone = make()
        train(alone, lambda step: whole_batch(step, sum(sizes)))
        balancer = loft.Balancer(sum(sizes), policy=list(sizes))
        model = shard(make())
        loft.fsdp_hook(model, balancer=balancer)
        train(model, drawn(balancer, sizes))
        apart = float((whole(model) - whole(alone)).abs().max())
        moved = float((whole(make()) - whole(alone)).abs().max())
        assert moved > 1e-2, moved
        assert apart <= 1e-6, f"{name}: {apart:g} from one process"


def honest(loss: Tensor) -> Tensor:
    return loss


SPOILT: dict[str, Callable[[Tensor], Tensor]] = {
    "nan": lambda loss: loss * torch.nan,
    "1e30": lambda loss: loss * 1e30,
    "sign flip x10": lambda loss: loss * -10,
}


def attacked(world_size: int) -> None:
    """A wrong rank's gradients change nothing, and results have the bits of the DDP hook."""
    sizes, rank = SIZES[:world_size], dist.get_rank()
    for name, make in MODELS.items():
        for what, spoil in SPOILT.items():
            mine = spoil if rank == world_size - 1 else honest
            found = []
            for is_sharded in (False, True):
                balancer = loft.Balancer(sum(sizes), policy=list(sizes))
                model = make()
                if is_sharded:
                    loft.fsdp_hook(shard(model), loft.TrimmedMean(1), balancer)
                else:
                    model = DistributedDataParallel(model)
                    hook = loft.ddp_hook(loft.TrimmedMean(1), balancer)
                    model.register_comm_hook(None, hook)
                train(model, drawn(balancer, sizes), spoil=mine)
                found.append(whole(model))
            assert not bool(found[1].isnan().any()), f"{name}, {what}"
            apart = float((found[0] - found[1]).abs().max())
            assert torch.equal(*found), f"{name}, {what}: {apart:g} from the DDP hook"


def refused(world_size: int) -> None:
    """Refuse by name what has no rows of all ranks, and options that differ."""
    rank = dist.get_rank()
    with pytest.raises(ArgumentError, match=r"no module of the model is sharded; call torch's"):
        loft.fsdp_hook(make_mlp())
    with pytest.raises(ArgumentTypeError, match=r"rule='median' is of type str"):
        loft.fsdp_hook(shard(make_mlp()), "median")  # type: ignore[arg-type]  # the point
    with pytest.raises(ArgumentError, match=r'scope="auto" compares ranks by whole gradients'):
        loft.fsdp_hook(shard(make_mlp()), loft.Robust(1), scope="auto")
    with pytest.raises(ArgumentError, match=r"Balancer\(micro_batches=True\) ranks make different"):
        loft.fsdp_hook(shard(make_mlp()), None, loft.Balancer(8, micro_batches=True, max_batch=2))
    with pytest.raises(MismatchError, match="fsdp_hook: option diagnostics differs on ranks"):
        loft.fsdp_hook(shard(make_mlp()), diagnostics=loft.Suspicion(every=1 + rank))
    halves = init_device_mesh("cpu", (world_size // 2, 2), mesh_dim_names=("copies", "shards"))
    replicated = make_mlp()
    fully_shard(replicated, mesh=halves)
    with pytest.raises(ArgumentError, match=r"has 2 replicas \(HSDP\).* no rank has the rows"):
        loft.fsdp_hook(replicated, loft.Median())
    half = make_mlp()
    fully_shard(half, mesh=halves["shards"])
    with pytest.raises(ArgumentError, match=r"is sharded over the ranks \[\d, \d\] of 4"):
        loft.fsdp_hook(half)
    own_fsdp = FullyShardedDataParallel(make_mlp(), device_id=torch.device("cpu"))
    said = r"comes from FullyShardedDataParallel.*balancer\.weigh\(loss\)\.backward\(\) gives exact"
    with pytest.raises(ArgumentTypeError, match=f"fsdp_hook: the model {said}"):
        loft.fsdp_hook(own_fsdp)
    with pytest.raises(ArgumentTypeError, match=r"comes from DeepSpeedEngine.*balancer\.weigh"):
        loft.fsdp_hook(DeepSpeedEngine())


class DeepSpeedEngine(torch.nn.Module):
    """Stands for DeepSpeed's, which is told by its name."""


JOBS: dict[str, Callable[[int], None]] = {
    "exact": exact,
    "attacked": attacked,
    "refused": refused,
}


def work(rank: int, whats: str, world_size: int, folder: str) -> None:
    torch.set_num_threads(1)
    where = f"file://{Path(folder) / 'rendezvous'}"
    dist.init_process_group("gloo", init_method=where, rank=rank, world_size=world_size)
    try:
        for what in whats.split():
            JOBS[what](world_size)
        print(f"rank {rank} has finished", flush=True)
    except BaseException as error:  # said here, as a failing rank ends the others
        print(f"rank {rank}: {type(error).__name__}: {error}", flush=True)
        sys.excepthook(type(error), error, error.__traceback__)
        os._exit(1)
    dist.destroy_process_group()


if __name__ == "__main__":
    context = start_processes(
        work,
        args=(sys.argv[1], int(sys.argv[2]), sys.argv[3]),
        nprocs=int(sys.argv[2]),
        join=False,
        start_method="spawn",
    )
    while not context.join(grace_period=2.0):  # then what is left is killed
        pass
