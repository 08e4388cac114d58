"""Time to a goal: a global batch that follows the gradients' noise, beside fixed ones.

    python -m benchmarks.auto_batch --exchange-ms 40
    python -m benchmarks.auto_batch --task text

The tasks are the digits, to 97 % of the test images, and text whose every character depends on the
two before it, for a transformer of one layer, to a loss of 1.9 (guessing: 2.77).

Four ranks, which are threads, train with ``DistributedOptimizer`` and ``loft.DataLoader``. What a
step takes is not measured but set: each rank has a clock that passes by its own speed, and waits
for the slowest. Everything else is real: gradients, exchanges, plans, learning rates.
"""

from __future__ import annotations

import argparse
import bisect
import copy
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import loft_hvd as loft
from loft_hvd.bench.attacked import load_digits
from loft_hvd.transport import waits
from loft_hvd.transport.local import LocalTransport, run_ranks

__all__ = ["TASKS", "Job", "Outcome", "Task", "time_to"]

# Seconds that pass on the clocks stand for milliseconds: what threads really take is nothing to it.
STEP_MS = 10.0  # of a rank, beside its samples
SAMPLE_MS = (0.25, 0.5, 1.0, 1.0)
SEEDS = range(5)
_LETTERS, _LENGTH, _WIDTH = 16, 32, 32  # of the text, of a sample, and of the transformer


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
    task: str = "digits"
    rule: str = "mean"
    attack: float = 1.0  # by which the last rank multiplies its loss
    optimizer: str = ""  # the task's own
    lr: float = 0.0  # likewise
    most_ms: float = 60_000.0
    interval: int = 10
    lr_scale: str | None = None
    exchange_ms: float = 10.0  # of a step, after the slowest rank


@dataclass(frozen=True)
class Outcome:
    """What came of it, on rank 0."""

    goal_ms: float  # until the goal was reached first; infinite where it never was
    best: float  # score of the run: an accuracy, or a loss below 0
    final: float  # of the last evaluations
    num_steps: int
    batches: list[tuple[int, int]]  # first step and global batch of each plan with a new one


class Transformer(nn.Module):
    """One layer of attention over characters."""

    def __init__(self) -> None:
        super().__init__()
        self.letters = nn.Embedding(_LETTERS, _WIDTH)
        self.places = nn.Parameter(torch.zeros(_LENGTH, _WIDTH))
        self.layer = nn.TransformerEncoderLayer(
            _WIDTH, 2, 2 * _WIDTH, dropout=0.0, batch_first=True, norm_first=True
        )
        self.out = nn.Linear(_WIDTH, _LETTERS)
        mask = nn.Transformer.generate_square_subsequent_mask(_LENGTH)
        self.register_buffer("mask", mask)

    def forward(self, text: Tensor) -> Tensor:
        """Return what may follow on each character, [samples, letters, length]."""
        hidden = self.letters(text) + self.places
        odds: Tensor = self.out(self.layer(hidden, src_mask=self.mask, is_causal=True))
        return odds.transpose(1, 2)


def _perceptron() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def load_text(num_samples: int = 3000) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Make text in which each character is drawn by the two before it; a tenth of it is for tests.

    Returns:
        Characters and those that follow on them, [samples, length]; the same for tests.
    """
    random = torch.Generator().manual_seed(0)
    odds = torch.randn(_LETTERS, _LETTERS, _LETTERS, generator=random)
    edges = (2.5 * odds).softmax(dim=-1).cumsum(dim=-1).tolist()
    text = [0, 1]
    for draw in torch.rand(num_samples * (_LENGTH + 1) - 2, generator=random).tolist():
        letter = bisect.bisect(edges[text[-2]][text[-1]], draw)
        text.append(min(letter, _LETTERS - 1))
    cut = torch.tensor(text).view(num_samples, _LENGTH + 1)
    shown, wanted, num_tests = cut[:, :-1], cut[:, 1:], num_samples // 10
    return shown[num_tests:], wanted[num_tests:], shown[:num_tests], wanted[:num_tests]


def _accuracy(outputs: Tensor, wanted: Tensor) -> float:
    return float((outputs.argmax(dim=1) == wanted).float().mean())


def _minus_loss(outputs: Tensor, wanted: Tensor) -> float:
    return -float(nn.functional.cross_entropy(outputs, wanted))


@dataclass(frozen=True)
class Task:
    """What is learnt, and when it is."""

    model: Callable[[], nn.Module]
    data: Callable[[], Sequence[Tensor]]
    score: Callable[[Tensor, Tensor], float]
    goal: float
    fixed: tuple[int, ...]  # global batches; the learning rate is that of the first
    optimizer: str
    lr: float


TASKS = {
    "digits": Task(_perceptron, load_digits, _accuracy, 0.97, (64, 256, 1024), "sgd", 0.1),
    "text": Task(Transformer, load_text, _minus_loss, -1.9, (16, 64, 256), "adam", 4e-3),
}


def _optimizer(job: Job, model: nn.Module) -> torch.optim.Optimizer:
    task = TASKS[job.task]
    times = 1.0 if job.batch == "auto" else int(job.batch) / task.fixed[0]
    lr = job.lr or task.lr
    if (job.optimizer or task.optimizer) == "adam":
        return torch.optim.Adam(model.parameters(), lr=lr * times**0.5)
    return torch.optim.SGD(model.parameters(), lr=lr * times, momentum=0.9)


def train(ends: LocalTransport, job: Job, model: nn.Module, data: Sequence[Tensor]) -> Outcome:
    """Train on one rank until the clock says so."""
    x, labels, test_x, test_labels = data
    model, clock, task = copy.deepcopy(model), Clock(), TASKS[job.task]
    limits: dict[str, Any] = {}
    if job.batch == "auto":
        limits = {"min_global": task.fixed[0], "max_global": task.fixed[-1]}
        limits["lr_scale"] = job.lr_scale
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
                    seen.append((clock.now, task.score(model(test_x), test_labels)))
    if ends.rank > 0:
        return Outcome(0.0, 0.0, 0.0, 0, [])
    goal = next((at for at, score in seen if score >= task.goal), float("inf"))
    last = [score for _, score in seen[-len(seen) // 10 :]]
    return Outcome(goal, max(score for _, score in seen), statistics.mean(last), num_steps, batches)


def time_to(job: Job) -> Outcome:
    """Run a job, and return what came of it."""
    torch.manual_seed(job.seed)
    model, data = TASKS[job.task].model(), TASKS[job.task].data()
    return run_ranks(len(SAMPLE_MS), lambda ends: train(ends, job, model, data), timeout_s=900)[0]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all jobs, and print a line each."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else "")
    parser.add_argument("--task", default="digits", choices=tuple(TASKS))
    parser.add_argument("--rule", default="mean")
    parser.add_argument("--attack", type=float, default=1.0)
    parser.add_argument("--optimizer", default="", choices=("", "sgd", "adam"))
    parser.add_argument("--lr", type=float, default=0.0)
    parser.add_argument("--lr-scale", default=None)
    parser.add_argument("--exchange-ms", type=float, default=10.0)
    parser.add_argument("--most-ms", type=float, default=20_000.0)
    parser.add_argument("--seeds", type=int, default=len(SEEDS))
    parser.add_argument("--batches", nargs="*", help="of a task: auto, and its fixed ones")
    asked = parser.parse_args(arguments)
    task = TASKS[asked.task]
    for seed in range(asked.seeds):
        for batch in asked.batches or ["auto", *map(str, task.fixed)]:
            job = Job(
                batch if batch == "auto" else int(batch),
                seed,
                task=asked.task,
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
                f"seed {seed} batch {batch:>5}: {found.goal_ms:8.0f} ms to {task.goal:g}, best "
                f"{found.best:.4f}, final {found.final:.4f}, {found.num_steps} steps, "
                f"{found.batches}",
                flush=True,
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
