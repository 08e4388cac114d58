"""Jobs on ranks under FSDP2: ``fsdp_ranks.py "WHAT .." WORLD_SIZE FOLDER``."""

from __future__ import annotations

import ctypes
import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor
from torch.multiprocessing.spawn import start_processes
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import loft_hvd as loft
from loft_hvd.errors import ArgumentError, ArgumentTypeError, MismatchError
from loft_hvd.pipeline.selection import Scope
from loft_hvd.pipeline.weights import capped_weights
from loft_hvd.transport.local import LocalWorld

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
        return self.leave(h.mean(dim=1))  # type: ignore[no-any-return]  # a module's call


def make_mlp() -> torch.nn.Sequential:
    torch.manual_seed(11)
    return torch.nn.Sequential(
        torch.nn.Linear(24, 37), torch.nn.Tanh(), torch.nn.Linear(37, 19), torch.nn.Tanh(),
        torch.nn.Linear(19, 2),
    )  # fmt: skip  # the layers in a line


def make_transformer() -> torch.nn.Module:
    torch.manual_seed(11)
    return Transformer()


MODELS: dict[str, Callable[[], torch.nn.Module]] = {
    "mlp": make_mlp,
    "transformer": make_transformer,
}


def shard(model: torch.nn.Module, **options: Any) -> torch.nn.Module:
    """Shard a model: each of its blocks, and what is left."""
    # A transformer's blocks, or a Sequential's layers.
    for block in model.blocks if isinstance(model, Transformer) else model:  # type: ignore[attr-defined]
        if any(True for _ in block.parameters()):
            fully_shard(block, **options)
    fully_shard(model, **options)
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
    trimmed, robust = loft.TrimmedMean(1), loft.Robust(1)
    for name, make in MODELS.items():
        for what, spoil in SPOILT.items():
            found = []
            for rule, is_sharded in ((trimmed, False), (trimmed, True), (robust, True)):
                balancer = loft.Balancer(sum(sizes), policy=list(sizes))
                model = make()
                if is_sharded:
                    loft.fsdp_hook(shard(model), rule, balancer)
                else:
                    model = DistributedDataParallel(model)
                    model.register_comm_hook(None, loft.ddp_hook(rule, balancer))
                is_wrong = rank == world_size - 1
                train(model, drawn(balancer, sizes), spoil=spoil if is_wrong else honest)
                found.append(whole(model))
            assert all(bool(each.isfinite().all()) for each in found), f"{name}, {what}"
            apart = float((found[0] - found[1]).abs().max())
            assert torch.equal(*found[:2]), f"{name}, {what}: {apart:g} from the DDP hook"


def own_rows(
    model: torch.nn.Module, sizes: tuple[int, ...], num_passes: int, dtype: torch.dtype
) -> list[list[Tensor]]:
    """Return every rank's gradients, computed here, by rank and parameter."""
    rows = []
    for rank in range(len(sizes)):
        model.zero_grad()
        for step in range(num_passes):
            x, y = own_batch(step, sizes, rank)
            torch.nn.functional.mse_loss(model(x.to(dtype)).float(), y).backward()
        rows.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    return rows


def shard_of(values: Tensor, rank: int, world_size: int) -> Tensor:
    """Return a rank's shard of a parameter, padded as those of all ranks."""
    length = -(-len(values) // world_size)
    padded = torch.cat(
        [values, values.new_zeros(length * world_size - len(values), *values.shape[1:])]
    )
    return padded[rank * length : (rank + 1) * length].reshape(-1)


def defined(
    rule: loft.Rule, rows: list[list[Tensor]], sizes: tuple[int, ...], *, is_model: bool
) -> list[Tensor]:
    """Return this rank's shards of gradients by the definition: a group is a layer."""
    world_size, rank = len(sizes), dist.get_rank()
    weights = None if rule.counts_weight else capped_weights(sizes)
    if is_model:
        whole_rows = torch.stack([torch.cat([p.reshape(-1) for p in row]) for row in rows])
        found = loft.aggregate(whole_rows, rule.over_model, weights=weights).split(
            [p.numel() for p in rows[0]]
        )
        return [
            shard_of(part.view(p.shape), rank, world_size)
            for part, p in zip(found, rows[0], strict=True)
        ]
    shards = []
    for at in range(0, len(rows[0]), 2):  # a weight and a bias
        parts = [[shard_of(p, rank, world_size) for p in row[at : at + 2]] for row in rows]
        reduced = loft.aggregate(
            torch.stack([torch.cat(each) for each in parts]), rule, weights=weights
        )
        shards += reduced.split([len(each) for each in parts[0]])
    return shards


RULES: list[tuple[loft.Rule, Scope]] = [
    (loft.Median(), "shard"),
    (loft.TrimmedMean(1), "shard"),
    (loft.Phocas(1), "shard"),
    (loft.Robust(1), "shard"),
    (loft.Robust(1), "model"),
]


def rules(world_size: int) -> None:
    """Gradients have the bits of the definition, with passes that add up and in 16 bits, too."""
    sizes = SIZES[:world_size]
    for rule, scope in RULES:
        for dtype in (torch.float32, torch.bfloat16):
            if scope == "model" and dtype == torch.bfloat16:
                continue
            for num_passes in (1, 3):
                check_rule(rule, scope, sizes, dtype, num_passes)
    # Sums, which FSDP2 divides itself: always of 16 bits, or as a script asks.
    check_rule(loft.TrimmedMean(1), "shard", sizes, torch.float16, 1)
    check_rule(loft.TrimmedMean(1), "shard", sizes, torch.float32, 1, divided_by=2.0)


def check_rule(
    rule: loft.Rule,
    scope: Scope,
    sizes: tuple[int, ...],
    dtype: torch.dtype,
    num_passes: int,
    *,
    divided_by: float | None = None,
) -> None:
    what = f"{rule}, {scope}, {dtype}, {num_passes} passes"
    balancer = loft.Balancer(sum(sizes), policy=list(sizes))
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype)
    model = shard(make_mlp(), mp_policy=policy)
    loft.fsdp_hook(model, rule, balancer, scope=scope, worker_momentum=0.0)
    factor = 1.0
    if divided_by is not None:
        factor = len(sizes) / divided_by
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(divided_by)
    batch_of = drawn(balancer, sizes)
    rows = own_rows(make_mlp().to(dtype), sizes, num_passes, dtype)
    expected = defined(rule, rows, sizes, is_model=scope == "model")
    for _ in range(3):  # memory is used again
        model.zero_grad()
        for step in range(num_passes):
            # FSDP2 gives the module this method.
            model.set_requires_gradient_sync(step + 1 == num_passes)  # type: ignore[operator]
            x, y = batch_of(step)
            torch.nn.functional.mse_loss(model(x).float(), y).backward()
        for parameter, wanted in zip(model.parameters(), expected, strict=True):
            assert isinstance(parameter.grad, DTensor)
            got = parameter.grad.to_local().reshape(-1)
            wanted = wanted[: len(got)].to(got.dtype) * factor
            if scope == "model":  # sums over coordinates are of other parts
                torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-6, msg=what)
            elif dtype == torch.float16:  # which holds few of a half's smallest bits
                torch.testing.assert_close(got, wanted, rtol=1e-3, atol=1e-6, msg=what)
            else:
                assert torch.equal(got, wanted), f"{what}: {(got - wanted).abs().max():g}"


class Checkpointed(torch.nn.Sequential):
    """Computes each layer again in the backward pass."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self:
            x = checkpoint(layer, x, use_reentrant=False)
        return x


def summed(world_size: int) -> None:
    """Passes whose batches differ in size, one without samples on a rank, add up exactly."""
    shape = (2, world_size // 2)
    replicated = {"mesh": init_device_mesh("cpu", shape, mesh_dim_names=("copies", "shards"))}
    offloaded = {"offload_policy": CPUOffloadPolicy(pin_memory=False)}
    kinds: list[tuple[int, type, dict[str, Any]]] = [
        (1, torch.nn.Sequential, {}),
        (2, Checkpointed, {}),
        (3, torch.nn.Sequential, offloaded),
        (2, torch.nn.Sequential, replicated),
    ]
    for num_passes, kind, options in kinds:
        alone = make_mlp()
        one = loft.Balancer(sum(SIZES), transport=LocalWorld(1).transport(0))
        train_on_loader(alone, one, num_passes)
        balancer = loft.Balancer(sum(SIZES), policy=list(SIZES))
        model = shard(kind(*make_mlp()), **options)
        loft.fsdp_hook(model, None, balancer)
        if num_passes == 1:
            model.compile(backend="eager")
        train_on_loader(model, balancer, num_passes)
        apart = float((whole(model) - whole(alone)).abs().max())
        assert apart <= 1e-6, f"{num_passes} passes, {kind.__name__}, {options}: {apart:g}"


def single(world_size: int) -> None:
    """A world of one trains as without the hook, and its balancer follows."""
    alone, one = make_mlp(), loft.Balancer(12, transport=LocalWorld(1).transport(0))
    train_on_loader(alone, one, 2)
    balancer = loft.Balancer(12)
    model = shard(make_mlp())
    loft.fsdp_hook(model, loft.Median(), balancer)
    train_on_loader(model, balancer, 2)
    apart = float((whole(model) - whole(alone)).abs().max())
    assert apart <= 1e-6, apart


def epochs_of(loader: loft.DataLoader) -> Iterator[Batch]:
    for epoch in itertools.count():
        loader.set_epoch(epoch)
        yield from loader


def train_on_loader(model: torch.nn.Module, balancer: loft.Balancer, num_passes: int) -> None:
    optimizer = adamw(model)
    # The last batch has 2 samples: other sizes than the plan's, and some ranks have none.
    x, y = whole_batch(0, 3 * balancer.global_batch_size + 2)
    loader = loft.DataLoader(torch.utils.data.TensorDataset(x, y), balancer, seed=3)
    source = epochs_of(loader)
    for _ in range(12):
        optimizer.zero_grad()
        for at in range(num_passes):
            if isinstance(model, FSDPModule):
                model.set_requires_gradient_sync(at + 1 == num_passes)
            x, y = next(source)
            torch.nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()


def watched(world_size: int) -> None:
    """A wrong rank is named, and put in quarantine; one that sends NaN into a mean is told."""
    sizes, rank = (4,) * world_size, dist.get_rank()
    model = shard(make_mlp())
    hook = loft.fsdp_hook(model, loft.TrimmedMean(1), quarantine=True)
    train(
        model,
        lambda step: own_batch(step, sizes, rank),
        spoil=SPOILT["sign flip x10"] if rank == 2 else honest,
    )
    report = hook.report()
    assert [worker.ranks for worker in report.workers] == [(r,) for r in range(world_size)]
    held = [each.ranks for each in report.workers if each.in_quarantine_until is not None]
    assert held == [(2,)], report
    assert not report.limits
    model = shard(make_mlp())  # ranks draw from different data: nobody is named for a distance
    hook = loft.fsdp_hook(model, loft.TrimmedMean(1))

    def of_a_kind(step: int) -> Batch:
        x, y = own_batch(0, sizes, rank)
        return x + 0.1 * own_batch(step, sizes, rank)[0], y

    train(model, of_a_kind, num_steps=NUM_STEPS + 1)
    assert "ranks draw from different data" in hook.report().limits, hook.report()
    model = shard(make_mlp())
    hook = loft.fsdp_hook(model)
    spoil = SPOILT["nan"] if rank == 1 else honest
    train(model, lambda step: own_batch(step, sizes, rank), num_steps=2, spoil=spoil)
    lost = hook.report().not_finite[0]
    assert (lost.step, lost.ranks) == (1, (1,)), lost
    assert lost.parameter in ("4.weight", "4.bias"), lost


def averaged(world_size: int) -> None:
    """Worker momentum gives what the DDP hook does, and goes on from what was saved."""
    sizes = SIZES[:world_size]
    for rule in (loft.Mean(), loft.TrimmedMean(1)):
        found = []
        for kind in ("ddp", "sharded", "resumed"):
            balancer = loft.Balancer(sum(sizes), policy=list(sizes))
            model: torch.nn.Module = make_mlp()
            if kind == "ddp":
                hook: Any = loft.ddp_hook(rule, balancer, worker_momentum=0.9)
                model = wrapped = DistributedDataParallel(model)
                wrapped.register_comm_hook(None, hook)
            else:
                hook = loft.fsdp_hook(shard(model), rule, balancer, worker_momentum=0.9)
            batch_of = drawn(balancer, sizes)
            train(model, batch_of, num_steps=10)
            if kind == "resumed":
                state, weights = hook.state_dict(), model.state_dict()
                model = make_mlp()
                hook = loft.fsdp_hook(shard(model), rule, balancer, worker_momentum=0.9)
                hook.load_state_dict(state)
                model.load_state_dict(weights)
            train(model, batch_of, num_steps=10)
            found.append(whole(model))
        apart = [float((found[0] - each).abs().max()) for each in found]
        assert max(apart) <= (1e-6 if isinstance(rule, loft.Mean) else 0.0), (rule, apart)


def fitted(world_size: int) -> None:
    """Sizes follow the ranks, whose waits inside FSDP2 are not taken for work."""
    rank, total = dist.get_rank(), 16 * world_size
    balancer = loft.Balancer(total, interval=8)
    model = shard(make_mlp())
    loft.fsdp_hook(model, None, balancer)
    loader = loft.DataLoader(torch.utils.data.TensorDataset(*whole_batch(0, 80 * total)), balancer)
    optimizer = adamw(model)
    for x, y in loader:
        optimizer.zero_grad()
        time.sleep(len(x) * (0.008 if rank == world_size - 1 else 0.002))
        torch.nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    sizes = balancer.plan.sizes
    if rank == 0:
        print(f"sizes {sizes}", flush=True)
    assert sizes[-1] < 0.6 * min(sizes[:-1]), sizes


def refused(world_size: int) -> None:
    """Refuse by name what has no rows of all ranks, and options that differ."""
    rank = dist.get_rank()
    with pytest.raises(MismatchError, match="fsdp_hook: option diagnostics differs on ranks"):
        loft.fsdp_hook(shard(make_mlp()), diagnostics=loft.Suspicion(every=1 + rank))
    halves = init_device_mesh("cpu", (world_size // 2, 2), mesh_dim_names=("copies", "shards"))
    replicated = make_mlp()
    fully_shard(replicated, mesh=halves)
    with pytest.raises(ArgumentError, match=r"has 2 replicas \(HSDP\).* no rank has the rows"):
        loft.fsdp_hook(replicated, loft.Median())
    taken = shard(make_mlp())
    loft.fsdp_hook(taken)
    with pytest.raises(ArgumentError, match=r"group 0 \(0.weight .. 0.bias\) has a hook already"):
        loft.fsdp_hook(taken)
    half = make_mlp()
    fully_shard(half, mesh=halves["shards"])
    with pytest.raises(ArgumentError, match=r"is sharded over the ranks \[\d, \d\] of 4"):
        loft.fsdp_hook(half)
    own_fsdp = FullyShardedDataParallel(make_mlp(), device_id=torch.device("cpu"))
    said = r"comes from FullyShardedDataParallel.*balancer\.weigh\(loss\)\.backward\(\) gives exact"
    with pytest.raises(ArgumentTypeError, match=f"fsdp_hook: the model {said}"):
        loft.fsdp_hook(own_fsdp)


def sent_bytes() -> int:
    """Return what ranks have sent each other so far, in a network of their own."""
    line = next(each for each in Path("/proc/net/dev").read_text().splitlines() if "lo:" in each)
    return int(line.replace(":", " ").split()[9])


def wire(world_size: int) -> None:
    """Count the bytes of a step, all ranks together, and those of plain FSDP2's."""
    rank = dist.get_rank()
    random = torch.Generator().manual_seed(rank)
    x, y = torch.randn(2, 256, generator=random), torch.randn(2, 256, generator=random)
    found: dict[str, int] = {}
    for name in ("plain", "mean", "trimmed mean"):
        torch.manual_seed(0)
        model = shard(torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(6))))
        if name != "plain":
            loft.fsdp_hook(model, loft.Mean() if name == "mean" else loft.TrimmedMean(1))
        train(model, lambda _: (x, y), num_steps=3)
        dist.barrier()
        before = sent_bytes()
        train(model, lambda _: (x, y), num_steps=20)
        dist.barrier()
        found[name] = (sent_bytes() - before) // 20
        dist.barrier()
    if rank == 0:
        shares = {name: count / found["plain"] for name, count in found.items()}
        print(f"bytes of a step: {found}, of plain FSDP2's: {shares}", flush=True)
    assert max(found.values()) <= 1.01 * found["plain"], found


def enter_own_network() -> None:
    """Leave the machine's network for one with a loopback alone, where nobody else sends."""
    if ctypes.CDLL(None, use_errno=True).unshare(0x40000000) != 0:  # CLONE_NEWNET
        raise OSError(ctypes.get_errno(), "unshare")
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)


def fail(what: str) -> Callable[[int], None]:
    """Return a job in which rank 1 fails, while the others wait for it inside FSDP2."""

    def run(world_size: int) -> None:
        model, rank = shard(make_mlp()), dist.get_rank()
        loft.fsdp_hook(model, loft.Median())
        train(model, lambda step: own_batch(step, (3,) * world_size, rank), num_steps=3)
        if rank == 1:
            print(f"fault at {time.time()}", flush=True)
            if what == "raise":
                raise RuntimeError("rank 1 raises")
            os.kill(os.getpid(), signal.SIGKILL if what == "kill" else signal.SIGSTOP)
        train(model, lambda step: own_batch(step, (3,) * world_size, rank), num_steps=3)

    return run


JOBS: dict[str, Callable[[int], None]] = {
    "exact": exact,
    "fitted": fitted,
    "attacked": attacked,
    "averaged": averaged,
    "refused": refused,
    "rules": rules,
    "single": single,
    "summed": summed,
    "watched": watched,
    "wire": wire,
    "raise": fail("raise"),
    "kill": fail("kill"),
    "freeze": fail("freeze"),
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
    if "wire" in sys.argv[1].split():
        enter_own_network()
    context = start_processes(
        work,
        args=(sys.argv[1], int(sys.argv[2]), sys.argv[3]),
        nprocs=int(sys.argv[2]),
        join=False,
        start_method="spawn",
    )
    while not context.join(grace_period=2.0):  # then what is left is killed
        pass
