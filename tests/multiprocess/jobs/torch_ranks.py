"""Jobs on ``torch.distributed`` ranks: ``torch_ranks.py "WHAT .." WORLD_SIZE FOLDER``."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import start_processes
from torch.nn.parallel import DistributedDataParallel

import loft_hvd as loft
from loft_hvd.aggregation.reference import reference
from loft_hvd.pipeline.selection import Scope
from loft_hvd.transport.conformance import CHECKS
from loft_hvd.transport.local import run_ranks
from loft_hvd.transport.torch_distributed import TorchDistributedTransport
from tests.multiprocess.jobs.ddp_modes import MODES, check_bits, flat_grad
from tests.support.fingerprint import RULES, fingerprint, train
from tests.support.training import make_model

SIZES = (5, 1, 2, 4)


def conform(world_size: int) -> None:
    """Pass the conformance suite, and give the bits of local ranks."""
    for check in CHECKS.values():
        check(TorchDistributedTransport())
    for rule in RULES:
        local = run_ranks(world_size, partial(train, rule=rule, num_steps=20))
        mine = train(TorchDistributedTransport(), rule, num_steps=20)
        assert fingerprint(mine) == fingerprint(local[0]), rule
    wait_in_other_orders(dist.get_rank())


def wait_in_other_orders(rank: int) -> None:
    """Wait for two all-reduces, each rank for another one first."""
    for rule in (loft.Mean(), loft.Median()):
        ends = TorchDistributedTransport()
        handles = [
            loft.allreduce_async(torch.full((12,), float(at)), rule, name=f"{at}", transport=ends)
            for at in range(2)
        ]
        for at in (0, 1) if rank == 0 else (1, 0):
            assert torch.equal(handles[at].wait(20.0), torch.full((12,), float(at)))


def own_batch(rank: int, step: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(size, 6, generator=generator), torch.randn(size, 2, generator=generator)


def rows_of(
    model: torch.nn.Module, world_size: int, step: int, sizes: tuple[int, ...]
) -> np.ndarray:
    """Return every rank's gradient, computed here, [world_size, numel]."""
    rows = []
    for rank in range(world_size):
        model.zero_grad()
        x, y = own_batch(rank, step, sizes[rank])
        torch.nn.functional.mse_loss(model(x), y).backward()
        rows.append(flat_grad(model))
    return torch.stack(rows).double().numpy()


def ddp(world_size: int) -> None:
    """Train under DDP by each rule; its gradients equal the definition, step by step."""
    most = (world_size - 1) // 2
    for rule in (loft.Mean(), loft.Median(), loft.TrimmedMean(f=most), loft.Phocas(f=most)):
        for is_balanced in (False, True):
            check_ddp(world_size, rule, is_balanced)


def whole(world_size: int) -> None:
    """Train under DDP, and judge rows over the whole model, of which each bucket is a part."""
    for rule in (loft.Robust(1), loft.GeometricMedian(1)):
        for is_balanced in (False, True):
            check_ddp(world_size, rule, is_balanced, scope="model")


def check_ddp(
    world_size: int, rule: loft.Rule, is_balanced: bool, *, scope: Scope | None = None
) -> None:
    rank, sizes = dist.get_rank(), SIZES[:world_size] if is_balanced else (3,) * world_size
    balancer = loft.Balancer(sum(sizes), policy=list(sizes))
    assert balancer.world_size == world_size  # found by itself
    # Small buckets, so that there are several.
    model = DistributedDataParallel(make_model(), bucket_cap_mb=0.0003)
    model.register_comm_hook(
        None,
        loft.ddp_hook(
            rule,
            balancer if is_balanced else None,
            named_parameters=model.named_parameters(),
            scope=scope,
            worker_momentum=0.0,
        ),
    )
    twin = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        twin.load_state_dict(model.module.state_dict())
        expected = rows_of(twin, world_size, step, sizes)
        total, present = sum(sizes), len(sizes)
        if isinstance(rule, loft.Mean):
            wanted = (expected * np.array(sizes)[:, None] / total).sum(axis=0)
        else:
            capped = [min(size * present, 2 * total) for size in sizes]
            # In training a median takes no weights.
            used = None if rule.counts_weight else capped
            wanted = reference(expected, rule, weights=used)
        optimizer.zero_grad()
        x, y = own_batch(rank, step, sizes[rank])
        if is_balanced:
            with balancer.step(sizes[rank]):
                torch.nn.functional.mse_loss(model(x), y).backward()
        else:
            torch.nn.functional.mse_loss(model(x), y).backward()
        got = flat_grad(model)
        np.testing.assert_allclose(got.double().numpy(), wanted, rtol=1e-4, atol=1e-6)
        check_bits(got)
        optimizer.step()


def auto(world_size: int) -> None:
    """Train ranks that are alike: they are judged by their whole gradients until that is known."""
    rank, rule = dist.get_rank(), loft.Robust(1)
    model = DistributedDataParallel(make_model(), bucket_cap_mb=0.0003)
    model.register_comm_hook(None, loft.ddp_hook(rule, worker_momentum=0.0))
    is_whole = []
    for step in range(61):  # of which 50 are compared
        model.zero_grad()
        x, y = own_batch(rank, step, 3)
        torch.nn.functional.mse_loss(model(x), y).backward()
        twin = make_model()
        rows = []
        for other in range(world_size):
            twin.zero_grad()
            x, y = own_batch(other, step, 3)
            torch.nn.functional.mse_loss(twin(x), y).backward()
            rows.append(flat_grad(twin))
        got = flat_grad(model)
        check_bits(got)
        due = loft.aggregate(torch.stack(rows), rule.over_model)
        is_whole.append(torch.allclose(got, due, atol=1e-6))
    assert all(is_whole[:50]), is_whole
    # From then on by shards, which now and then all choose as the whole model does.
    assert not is_whole[50], is_whole
    assert sum(is_whole[50:]) < 3, is_whole


def spread(world_size: int) -> None:
    """Train ranks whose samples lie apart for good under a robust rule, which says so once."""
    model = DistributedDataParallel(make_model(), bucket_cap_mb=0.0003)
    model.register_comm_hook(None, loft.ddp_hook(loft.Median()))
    apart = 10.0 * (dist.get_rank() - 1)
    for step in range(54):  # DDP lays its buckets out anew after the first
        model.zero_grad()
        x, y = own_batch(dist.get_rank(), step, 3)
        torch.nn.functional.mse_loss(model(x), y + apart).backward()


def same_data(world_size: int) -> None:
    """Train with a sampler that two ranks have in common, under rules of each kind."""
    pair = [0, world_size - 1]
    f = (world_size - 1) // 4 or 1
    # The other rules: tests/unit/test_same_data.py.
    rules = [loft.Mean(), loft.Median(), loft.TrimmedMean(f), loft.Robust(f)]
    for rule in rules:
        for is_shared in (True, False):
            model = DistributedDataParallel(make_model(), bucket_cap_mb=0.0003)
            hook = loft.ddp_hook(rule, worker_momentum=0.0)
            model.register_comm_hook(None, hook)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
            reader = pair[0] if is_shared and dist.get_rank() in pair else dist.get_rank()
            for step in range(26):  # DDP lays its buckets out anew after the first
                optimizer.zero_grad()
                x, y = own_batch(reader, step, 4)
                torch.nn.functional.mse_loss(model(x), y).backward()
                optimizer.step()
            found = [list(group.ranks) for group in hook.report().same_data]
            assert found == ([pair] if is_shared else []), (rule, found)


def not_finite(world_size: int) -> None:
    """Spoil one rank's loss, activation or gradient in the first step, or in a later one."""
    rank, culprit = dist.get_rank(), world_size - 1
    for value in (torch.nan, torch.inf):
        for where, first in (("loss", "2."), ("activation", "0."), ("gradient", "0.weight")):
            for when in (1, 3):
                own = make_model()
                model = DistributedDataParallel(own, bucket_cap_mb=0.0003)
                hook = loft.ddp_hook(named_parameters=own.named_parameters())
                model.register_comm_hook(None, hook)
                for step in range(1, when + 1):
                    is_it = (rank, step) == (culprit, when)
                    model.zero_grad()
                    spoil(own, value if is_it else 0.0, where)
                    x, y = own_batch(rank, step, 4)
                    loss = torch.nn.functional.mse_loss(model(x), y)
                    (loss * (value if is_it and where == "loss" else 1.0)).backward()
                (found,) = hook.report().not_finite
                assert (found.step, found.ranks) == (when, (culprit,)), (where, value, found)
                assert found.parameter.startswith(first), (where, value, found)


def spoil(model: torch.nn.Module, value: float, where: str) -> None:
    """Add a value to the gradient of an activation, or of a weight, in the next pass."""
    layers = list(model.children())
    handles: list[torch.utils.hooks.RemovableHandle] = []

    def add(gradient: torch.Tensor) -> torch.Tensor:
        for handle in handles:
            handle.remove()
        gradient = gradient.clone()
        gradient.view(-1)[-1] += value
        return gradient

    def watch(_module: object, _given: object, made: torch.Tensor) -> None:
        made.register_hook(add)

    if where == "gradient":
        weight = layers[0].weight
        assert isinstance(weight, torch.Tensor)
        handles.append(weight.register_hook(add))
    elif where == "activation":
        handles.append(layers[0].register_forward_hook(watch))


def fail(what: str) -> Callable[[int], None]:
    def run(world_size: int) -> None:
        model = DistributedDataParallel(make_model())
        names = list(model.named_parameters())
        model.register_comm_hook(None, loft.ddp_hook(loft.Median(), named_parameters=names))
        for step in range(10):
            if step == 5 and dist.get_rank() == 1:
                print(f"fault at {time.time()}", flush=True)
                if what == "raise":
                    raise RuntimeError("rank 1 raises")
                os.kill(os.getpid(), signal.SIGKILL if what == "kill" else signal.SIGSTOP)
            model.zero_grad()
            model(own_batch(dist.get_rank(), step, 3)[0]).sum().backward()

    return run


def levels(world_size: int) -> None:
    """Reduce by a mean inside pairs of ranks and a median over the pairs, on groups of torch's."""
    rank = dist.get_rank()
    pairs = [[first, first + 1] for first in range(0, world_size, 2)]
    rows = torch.randn(world_size, 1003, generator=torch.Generator().manual_seed(5))
    weight = torch.nn.Parameter(torch.zeros(1003))
    optimizer = loft.DistributedOptimizer(
        torch.optim.SGD([weight], lr=0.1), rule=loft.Median(), over=pairs
    )
    for _ in range(3):
        optimizer.zero_grad()
        (weight * rows[rank]).sum().backward()
        optimizer.step()
        means = [loft.aggregate(rows[pair], loft.Mean(reproducible=True)) for pair in pairs]
        assert weight.grad is not None
        assert torch.equal(weight.grad, loft.median(torch.stack(means)))


JOBS: dict[str, Callable[[int], None]] = {
    "conform": conform,
    "ddp": ddp,
    "whole": whole,
    "auto": auto,
    "levels": levels,
    "spread": spread,
    "same_data": same_data,
    "not_finite": not_finite,
    "raise": fail("raise"),
    "kill": fail("kill"),
    "freeze": fail("freeze"),
    **MODES,
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
