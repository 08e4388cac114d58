"""Time to an accuracy on the digits: a global batch that follows the noise, beside fixed ones.

    python -m benchmarks.auto_batch --exchange-ms 40

Four ranks, which are threads, train with ``DistributedOptimizer`` and ``loft.DataLoader``. What a
step takes is not measured but set: each rank has a clock that passes by its own speed, and waits
for the slowest. Everything else is real: gradients, exchanges, plans, learning rates.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import loft_hvd as loft
from loft_hvd.bench.attacked import load_digits
from loft_hvd.transport import waits
from loft_hvd.transport.local import LocalTransport, run_ranks

__all__ = ["Job", "Outcome", "time_to"]

# Seconds that pass on the clocks stand for milliseconds: what threads really take is nothing to it.
STEP_MS = 10.0  # of a rank, beside its samples
SAMPLE_MS = (0.25, 0.5, 1.0, 1.0)
FIXED = (64, 256, 1024)
BASE = 64  # of which the learning rate is
GOAL = 0.97
SEEDS = range(5)


class Clock:
    """A rank's seconds, which pass when told."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass(frozen=True)
class Job:
    """What is trained, and how."""

    batch: int | str  # samples of a step, or "auto"
    seed: int
    rule: str = "mean"
    attack: float = 1.0  # by which the last rank multiplies its loss
    optimizer: str = "sgd"
    lr: float = 0.1
    most_ms: float = 60_000.0
    interval: int = 10
    lr_scale: str | None = None
    exchange_ms: float = 10.0  # of a step, after the slowest rank


@dataclass(frozen=True)
class Outcome:
    """What came of it, on rank 0."""

    goal_ms: float  # until the accuracy was reached first; infinite where it never was
    best: float  # accuracy of the run
    final: float  # of the last evaluations
    num_steps: int
    batches: list[tuple[int, int]]  # first step and global batch of each plan with a new one


def _model(hidden: int = 64) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, hidden), nn.ReLU(), nn.Linear(hidden, 10))


def _optimizer(job: Job, model: nn.Module) -> torch.optim.Optimizer:
    times = 1.0 if job.batch == "auto" else int(job.batch) / BASE
    if job.optimizer == "adam":
        return torch.optim.Adam(model.parameters(), lr=job.lr * times**0.5)
    return torch.optim.SGD(model.parameters(), lr=job.lr * times, momentum=0.9)


def train(ends: LocalTransport, job: Job, model: nn.Module, data: Sequence[Tensor]) -> Outcome:
    """Train on one rank until the clock says so."""
    x, labels, test_x, test_labels = data
    model, clock = copy.deepcopy(model), Clock()
    limits: dict[str, Any] = {}
    if job.batch == "auto":
        limits = {"min_global": BASE, "max_global": FIXED[-1], "lr_scale": job.lr_scale}
    balancer = loft.Balancer(
        job.batch,  # type: ignore[arg-type]  # "auto" or a number
        interval=job.interval,
        transport=ends,
        clock=clock,
        **limits,
    )
    loader = loft.DataLoader(TensorDataset(x, labels), balancer, seed=job.seed)
    own = _optimizer(job, model)
    optimizer = loft.DistributedOptimizer(
        own,
        model.named_parameters(),
        rule=loft.parse_rule(job.rule),
        balancer=balancer,
        transport=ends,
        worker_momentum=0.0,
    )

    def passes(sizes: Sequence[int]) -> list[float]:
        pairs = zip(sizes, SAMPLE_MS, strict=True)
        return [STEP_MS + each_ms * max(size, balancer.min_batch) for size, each_ms in pairs]

    def met(*_: Any) -> None:
        took = passes(loader.step_sizes.sizes)
        waited = max(took) - took[ends.rank] + job.exchange_ms
        clock.now += waited
        waits.add(waited)

    own.register_step_pre_hook(met)  # once gradients are reduced
    seen: list[tuple[float, float]] = []
    batches: list[tuple[int, int]] = []
    num_steps = epoch = 0
    while clock.now < job.most_ms:
        loader.set_epoch(epoch)
        epoch += 1
        for inputs, wanted in loader:
            total = balancer.global_batch_size
            if not batches or batches[-1][1] != total:
                batches.append((num_steps, total))
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(inputs), wanted)
            clock.now += passes(loader.step_sizes.sizes)[ends.rank]
            (loss * (job.attack if ends.rank == ends.world_size - 1 else 1.0)).backward()
            optimizer.step()
            num_steps += 1
            if ends.rank == 0:
                with torch.no_grad():
                    right = (model(test_x).argmax(dim=1) == test_labels).float().mean()
                seen.append((clock.now, float(right)))
    if ends.rank > 0:
        return Outcome(0.0, 0.0, 0.0, 0, [])
    goal = next((at for at, right in seen if right >= GOAL), float("inf"))
    last = [right for _, right in seen[-len(seen) // 10 :]]
    return Outcome(goal, max(right for _, right in seen), statistics.mean(last), num_steps, batches)


def time_to(job: Job) -> Outcome:
    """Run a job, and return what came of it."""
    torch.manual_seed(job.seed)
    model, data = _model(), load_digits()
    return run_ranks(len(SAMPLE_MS), lambda ends: train(ends, job, model, data), timeout_s=900)[0]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all jobs, and print a line each."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else "")
    parser.add_argument("--rule", default="mean")
    parser.add_argument("--attack", type=float, default=1.0)
    parser.add_argument("--optimizer", default="sgd", choices=("sgd", "adam"))
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--lr-scale", default=None)
    parser.add_argument("--exchange-ms", type=float, default=10.0)
    parser.add_argument("--most-ms", type=float, default=20_000.0)
    parser.add_argument("--seeds", type=int, default=len(SEEDS))
    parser.add_argument("--batches", nargs="*", default=["auto", *map(str, FIXED)])
    asked = parser.parse_args(arguments)
    for seed in range(asked.seeds):
        for batch in asked.batches:
            job = Job(
                batch if batch == "auto" else int(batch),
                seed,
                rule=asked.rule,
                attack=asked.attack,
                optimizer=asked.optimizer,
                lr=asked.lr,
                most_ms=asked.most_ms,
                lr_scale=asked.lr_scale,
                exchange_ms=asked.exchange_ms,
            )
            found = time_to(job)
            print(  # noqa: T201 - a command's output
                f"seed {seed} batch {batch:>5}: {found.goal_ms:8.0f} ms to {GOAL:.0%}, best "
                f"{found.best:.2%}, final {found.final:.2%}, {found.num_steps} steps, "
                f"{found.batches}",
                flush=True,
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
