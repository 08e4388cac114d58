"""Ranks with unequal batches train what meets other ranks in its backward pass, as one process.

``meets.py horovod`` (started by a launcher) or ``meets.py torch FOLDER`` (it starts 4 ranks, which
meet by a file there); and ``whole``. Synchronised batch norms work on GPUs alone, so each engine's
is stood in for by its law on the CPU, where its module applies it.
"""

from __future__ import annotations

import functools
import importlib
import re
import sys
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.multiprocessing.spawn import start_processes
from torch.nn.functional import cross_entropy, mse_loss, normalize
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

import loft_hvd as loft
from loft_hvd.errors import UsageError
from loft_hvd.transport.local import LocalWorld

NUM_STEPS = 50
SIZES = [[96, 96, 48, 16], [160, 80, 12, 4], [128, 96, 32, 0]]
IS_WHOLE = sys.argv[-1] == "whole"  # all sizes for each case, instead of one


class Engine(NamedTuple):
    """What the ranks' own exchanges go by."""

    name: str
    add: Callable[[Tensor], Tensor]  # over ranks
    gather: Callable[[Tensor, list[int]], Tensor]
    module: str  # that applies a synchronised batch norm
    function: str  # by this name


class SummedNorm(torch.autograd.Function):
    """What torch's and Horovod's autograd functions compute, by sums over ranks."""

    add: Callable[[Tensor], Tensor] = staticmethod(lambda value: value)

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, *others: Any) -> Any:
        running_mean, running_var, eps, momentum = others[:4]
        sums = SummedNorm.add(torch.cat([x.sum(0), (x * x).sum(0), x.new_tensor([len(x)])]))
        mean, square, count = (*sums[:-1].chunk(2), sums[-1])
        mean, square = mean / count, square / count
        var = square - mean * mean
        running_mean.lerp_(mean, momentum)
        running_var.lerp_(var * count / (count - 1), momentum)
        invstd = (var + eps).rsqrt()
        ctx.save_for_backward((x - mean) * invstd, weight, invstd, count)
        return (x - mean) * invstd * weight + bias

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        normed, weight, invstd, count = ctx.saved_tensors
        own = torch.stack([grad.sum(0), (grad * normed).sum(0)])
        total = SummedNorm.add(own.clone()) / count
        inner = (grad - total[0] - normed * total[1]) * invstd * weight
        return inner, own[1], own[0], *([None] * 6)


class SyncedNorm(torch.nn.BatchNorm1d):
    """Applies its engine's function as the engine's own module does on a GPU."""

    engine: Engine | None = None  # None: one process

    def forward(self, x: Tensor) -> Tensor:
        if self.engine is None or not self.training:
            return super().forward(x)
        module = importlib.import_module(self.engine.module)
        stats = self.running_mean, self.running_var, self.eps, self.momentum
        groups = (None, 4) if self.engine.name == "torch" else ()
        normed: Tensor = getattr(module, self.engine.function).apply(
            x, self.weight, self.bias, *stats, *groups
        )
        return normed


class Gathered(torch.autograd.Function):
    """Features of all ranks; gradients come back from all."""

    @staticmethod
    def forward(ctx: Any, features: Tensor, sizes: list[int], rank: int, engine: Engine) -> Any:
        ctx.place, ctx.engine = (sum(sizes[:rank]), sizes[rank]), engine
        return engine.gather(features, sizes)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return ctx.engine.add(grad.clone()).narrow(0, *ctx.place), None, None, None


def model_of(kind: str, engine: Engine | None) -> torch.nn.Module:
    torch.manual_seed(11)
    norm = SyncedNorm(16) if kind == "norm" else torch.nn.Identity()
    if isinstance(norm, SyncedNorm):
        norm.engine = engine
    layers = torch.nn.Linear(6, 16), norm, torch.nn.Tanh(), torch.nn.Linear(16, 4)
    return torch.nn.Sequential(*layers).double()


def loss_of(
    kind: str, model: torch.nn.Module, x: Tensor, y: Tensor, gather: Callable[[Tensor], Any]
) -> Tensor:
    """Return the mean over these samples; ``gather`` gives all ranks' features and our first."""
    if kind == "norm":
        return mse_loss(model(x)[:, :2], y)
    ours = normalize(model(x))
    theirs: Tensor
    theirs, first = gather(normalize(model(x + 0.1 * y.sum(1, keepdim=True))))
    if len(theirs) == 0 or first is None:  # no samples of ours: only the others are met
        return (0 * theirs).sum() + (0 * ours).sum()
    return cross_entropy(ours @ theirs.T / 0.2, first + torch.arange(len(ours)))


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(5)
    # 5 batches of 256, and one of 40 that the rank of the smallest share may have no part in.
    x = torch.randn(1320, 6, generator=generator, dtype=torch.float64) * 2 + 1
    return TensorDataset(x, torch.sin(x[:, :2]))


def train(
    kind: str, loader: Any, model: torch.nn.Module, step: Callable[[Tensor, Tensor], None]
) -> list[Tensor]:
    done = 0
    for epoch in range(NUM_STEPS):
        loader.set_epoch(epoch)
        for x, y in loader:
            step(x, y)
            done += 1
            if done == NUM_STEPS:
                state = [e for e in model.state_dict().values() if e.is_floating_point()]
                whole = (e.full_tensor() if isinstance(e, DTensor) else e for e in state)
                return [each.detach().clone() for each in whole]
    raise AssertionError


@functools.cache
def alone(kind: str, drops: bool) -> list[Tensor]:
    balancer = loft.Balancer(256, transport=LocalWorld(1).transport(0))
    model = model_of(kind, None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    def step(x: Tensor, y: Tensor) -> None:
        optimizer.zero_grad()
        loss_of(kind, model, x, y, lambda each: (each, 0)).backward()
        optimizer.step()

    return train(kind, loft.DataLoader(data(), balancer, seed=3, drop_last=drops), model, step)


def drops_last(kind: str, engine: Engine) -> bool:
    """Say whether a small last batch is left out: Horovod's norm takes no rank without samples."""
    return kind == "norm" and engine.name == "horovod"


def together(kind: str, front: str, sizes: list[int], engine: Engine, *, weighs: bool) -> Any:
    balancer = loft.Balancer(256, sizes)
    rank, model = balancer.rank, model_of(kind, engine)
    called: torch.nn.Module = model
    if front == "fsdp":
        fully_shard(model, mesh=init_device_mesh("cpu", (4,)))
    made: Any = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    if front == "optimizer":
        made = loft.DistributedOptimizer(made, rule=loft.Mean(), balancer=balancer)
    elif front == "attach":
        hvd = importlib.import_module("horovod.torch")
        made = hvd.DistributedOptimizer(made, model.named_parameters())
        loft.attach(made, balancer)
    elif front != "fsdp":
        called = DistributedDataParallel(model, find_unused_parameters=False)
        if front == "hook":  # else DDP's own mean, with losses weighed
            called.register_comm_hook(None, loft.ddp_hook(loft.Mean(), balancer=balancer))
    loader = loft.DataLoader(data(), balancer, seed=3, drop_last=drops_last(kind, engine))

    def gather(features: Tensor) -> tuple[Tensor, int | None]:
        own, now = features[:0] if loader.is_padding else features, list(loader.step_sizes.sizes)
        gathered = Gathered.apply(own, now, rank, engine)  # type: ignore[no-untyped-call]
        return gathered, None if loader.is_padding else sum(now[:rank])

    def step(x: Tensor, y: Tensor) -> None:
        made.zero_grad()
        loss = loss_of(kind, called, x, y, gather)
        (balancer.weigh(loss) if weighs else loss).backward()
        made.step()

    return train(kind, loader, model, step)


CASES = [  # front ends weigh by themselves where a norm alone meets other ranks
    *(("norm", front, False) for front in ("optimizer", "attach", "hook")),
    *(("norm", front, True) for front in ("optimizer", "hook", "plain", "fsdp")),
    *(("contrast", front, True) for front in ("optimizer", "attach", "hook", "plain", "fsdp")),
]


def run(engine: Engine, fronts: tuple[str, ...], rank: int, sizes_of: list[list[int]]) -> None:
    stand_in(engine)
    every = [case for case in CASES if case[1] in fronts]
    for at, (kind, front, weighs) in enumerate(every):
        for sizes in sizes_of if IS_WHOLE else [sizes_of[at % len(sizes_of)]]:
            with warnings.catch_warnings(record=True) as told:
                got = together(kind, front, sizes, engine, weighs=weighs)
            assert not any("ranks meet in the" in str(each.message) for each in told)
            pairs = list(zip(got, alone(kind, drops_last(kind, engine)), strict=True))
            off = max(float((one - other).abs().max()) for one, other in pairs)
            if rank == 0:
                print(f"{kind} {front} {'weighed' if weighs else ''} {sizes}: off {off:.1e}")
            assert off < 1e-9, (kind, front, weighs, sizes, off)
    # What the law is worth: without weighing the loss a small rank's samples count for more.
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        got = together("contrast", fronts[0], SIZES[1], engine, weighs=False)
    (said,) = [str(each.message) for each in told if "ranks meet in the" in str(each.message)]
    assert re.search(rf"^rank {rank}: .*meets.py:\d+, and the sizes of step 0 are \[160,", said), (
        said
    )
    off = max(
        float((a - b).abs().max()) for a, b in zip(got, alone("contrast", False), strict=True)
    )
    assert off > 1e-3, off
    print("has finished", flush=True)


def stand_in(engine: Engine) -> None:
    SummedNorm.add = staticmethod(engine.add)
    setattr(importlib.import_module(engine.module), engine.function, SummedNorm)


def with_horovod() -> None:
    hvd = importlib.import_module("horovod.torch")
    hvd.init()
    engine = Engine(
        "horovod",
        add=lambda value: hvd.allreduce(value, op=hvd.Sum, name="meets.add"),
        gather=lambda features, _: hvd.allgather(features, name="meets.gather"),
        module="horovod.torch.sync_batch_norm",
        function="_SyncBatchNorm",
    )
    refused_where_a_rank_has_none(engine)
    run(engine, ("optimizer", "attach"), hvd.rank(), SIZES[:2])


def refused_where_a_rank_has_none(engine: Engine) -> None:
    """Horovod's norm makes statistics of an empty batch that spoil everybody's."""
    stand_in(engine)
    with pytest.raises(UsageError, match="takes no rank without samples"):
        together("norm", "optimizer", SIZES[-1], engine, weighs=False)


def with_torch(rank: int, folder: str) -> None:
    def add(value: Tensor) -> Tensor:
        dist.all_reduce(value)
        return value

    def gather(features: Tensor, sizes: list[int]) -> Tensor:
        padded = features.new_zeros(max(sizes), features.shape[1])
        padded[: len(features)] = features.detach()
        parts = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(parts, padded)
        return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])

    engine = Engine("torch", add, gather, "torch.nn.modules.batchnorm", "sync_batch_norm")
    torch.set_num_threads(1)
    where = f"file://{folder}/rendezvous"
    dist.init_process_group("gloo", init_method=where, rank=rank, world_size=4)
    run(engine, ("hook", "optimizer", "plain", "fsdp"), rank, SIZES)
    dist.destroy_process_group()


if __name__ == "__main__":
    if sys.argv[1] == "horovod":
        with_horovod()
    else:
        start_processes(with_torch, (sys.argv[2],), nprocs=4, start_method="spawn")
