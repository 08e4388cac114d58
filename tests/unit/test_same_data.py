"""Ranks on the same samples are named under every rule; others, however alike, are not."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import loft_hvd as loft
from loft_hvd.pipeline.gradients import sum_up
from loft_hvd.pipeline.suspicion.report import SuspicionReport
from loft_hvd.pipeline.suspicion.same_data import COMPARED_AFTER, Likeness, likeness
from loft_hvd.runlog import read_run_log
from loft_hvd.transport.local import LocalTransport, run_ranks
from tests.support.ddp_buckets import backward

NUM_SAMPLES, BATCH = 600, 12
Draw = Callable[[int, int], Sequence[int]]
"""Of a rank and a step: the samples of its batch."""

RULES: list[Callable[[int], loft.Rule]] = [
    lambda _: loft.Mean(),
    lambda _: loft.Mean(reproducible=True),
    lambda _: loft.Median(),
    lambda f: loft.TrimmedMean(f=f),
    lambda f: loft.MeanAroundMedian(f=f),
    lambda f: loft.Phocas(f=f),
    lambda f: loft.Robust(f=f),
    lambda f: loft.GeometricMedian(f=f),
    lambda f: loft.CentredClipping(f=f),
    lambda f: loft.MinimumDiameter(f=f),
    lambda f: loft.NNM(loft.TrimmedMean(f)),
    lambda _: loft.Custom(lambda rows: rows.mean(dim=0)),
]


def data(*, num_different: int = NUM_SAMPLES) -> tuple[Tensor, Tensor]:
    """Return a task of five classes; ``num_different`` samples come again and again."""
    random = torch.Generator().manual_seed(1)
    x = torch.randn(num_different, 20, generator=random)
    labels = (x @ torch.randn(20, 5, generator=random)).argmax(dim=1)
    again = torch.arange(NUM_SAMPLES) % num_different
    return x[again], labels[again]


def network(dropout: float = 0.0) -> torch.nn.Module:
    return torch.nn.Sequential(
        torch.nn.Linear(20, 24), torch.nn.ReLU(), Dropout(dropout), torch.nn.Linear(24, 5)
    )


class Dropout(torch.nn.Module):
    """Drops values by numbers of its own: ranks are threads, which share torch's."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p, self.random = p, torch.Generator()

    def forward(self, x: Tensor) -> Tensor:
        if not self.p:
            return x
        kept = torch.rand(x.shape, generator=self.random) >= self.p
        return x * kept / (1 - self.p)


def train(
    transport: LocalTransport,
    model: torch.nn.Module,
    draw: Draw,
    *,
    rule: loft.Rule | None = None,
    front: str = "optimizer",
    samples: tuple[Tensor, Tensor] | None = None,
    lr: float = 0.1,
    num_steps: int = COMPARED_AFTER + 1,
    **options: Any,
) -> SuspicionReport:
    """Train a copy of a model on what each rank draws, and return what is known of workers."""
    model = copy.deepcopy(model)
    for module in model.modules():
        if isinstance(module, Dropout):
            module.random.manual_seed(transport.rank)
    x, labels = data() if samples is None else samples
    own = torch.optim.SGD(model.parameters(), lr=lr)
    named = list(model.named_parameters())
    hook: Any = None
    optimizer: Any = own
    if front == "hook":
        hook = loft.ddp_hook(
            rule, transport=transport, named_parameters=named, worker_momentum=0.0, **options
        )
    else:
        optimizer = loft.DistributedOptimizer(
            own, named, rule=rule, transport=transport, worker_momentum=0.0, **options
        )
    for step in range(num_steps):
        optimizer.zero_grad()
        batch = list(draw(transport.rank, step))
        torch.nn.functional.cross_entropy(model(x[batch]), labels[batch]).backward()
        if hook is not None:
            parameters = [p for _, p in reversed(named)]
            given = {p: p.grad.flatten() for p in parameters if p.grad is not None}
            reduced = backward(hook, [parameters[:2], parameters[2:]], given)
            for parameter, gradient in reduced.items():
                parameter.grad = gradient.view_as(parameter)
        optimizer.step()
    report = hook.report() if hook is not None else optimizer.report()
    assert isinstance(report, SuspicionReport)
    return report


def honest(rank: int, step: int, *, num_samples: int = NUM_SAMPLES) -> Sequence[int]:
    """Draw a batch of a rank's own."""
    random = np.random.default_rng([rank, step])
    return list(random.integers(num_samples, size=BATCH).tolist())


def twins(one: int, other: int) -> Draw:
    """Let one rank draw what another one does."""
    return lambda rank, step: honest(one if rank == other else rank, step)


def named(world_size: int, draw: Draw, dropout: float = 0.0, **options: Any) -> list[list[int]]:
    """Return who is said to read the same data, which every rank says alike."""
    torch.manual_seed(0)
    model = network(dropout)
    reports = run_ranks(world_size, lambda ends: train(ends, model, draw, **options))
    assert all(report.same_data == reports[0].same_data for report in reports)
    return [list(group.ranks) for group in reports[0].same_data]


@pytest.mark.every(5)
@pytest.mark.parametrize("front", ["optimizer", "hook"])
@pytest.mark.parametrize("world_size", [3, pytest.param(8, marks=pytest.mark.long)])
@pytest.mark.parametrize("rule", RULES, ids=lambda make: type(make(1)).__name__)
def test_two_ranks_on_the_same_data_are_named_as_a_pair_under_every_rule(
    rule: Callable[[int], loft.Rule], world_size: int, front: str
) -> None:
    f = 1 if world_size == 3 else 2
    pair = [0, 2] if world_size == 3 else [1, 6]
    assert named(world_size, twins(*pair), rule=rule(f), front=front) == [pair]


@pytest.mark.parametrize("world_size", [2, 4])
def test_a_sampler_that_is_forgotten_on_all_ranks_is_asked_for_first(
    world_size: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    every = list(range(world_size))
    draw: Draw = lambda _, step: honest(0, step)  # noqa: E731 - shorter than a function
    with caplog.at_level(logging.WARNING):
        assert named(world_size, draw, log_dir=tmp_path) == [every]
    (line,) = [line for line in caplog.messages if "same data" in line]
    who = "both ranks" if world_size == 2 else "all 4 ranks"
    assert line.startswith(f"do {who} read the same data? In the first 24 steps their gradients ")
    assert "were equal in 23. A sampler may be forgotten" in line
    (path,) = tmp_path.iterdir()
    (entry,) = [entry for entry in read_run_log(path) if entry["kind"] == "same_data"]
    assert [group["ranks"] for group in entry["groups"]] == [every]


def test_the_report_asks_before_anything_else() -> None:
    torch.manual_seed(0)
    model = network()
    report = run_ranks(3, lambda ends: train(ends, model, twins(0, 2), rule=loft.Median()))[0]
    assert str(report).startswith("do ranks 0 and 2 read the same data? ")
    assert "suspicion" in str(report)


@pytest.mark.parametrize("world_size", [3, 8])
def test_ranks_that_drop_out_other_values_of_the_same_samples_are_named(world_size: int) -> None:
    assert named(world_size, twins(0, 2), dropout=0.1) == [[0, 2]]


def test_nobody_asks_where_nobody_is_to_be_watched() -> None:
    assert named(3, twins(0, 2), diagnostics=False) == []


HONEST: dict[str, dict[str, Any]] = {
    "usual": {},
    "high learning rate": {"lr": 2.0},
    "tiny data set": {"draw": lambda rank, step: honest(rank, step, num_samples=8)},
    "two samples": {"draw": lambda rank, step: honest(rank, step, num_samples=2)[:1]},
    "each sample 20 times": {"samples": data(num_different=30)},
    "the same now and then": {"draw": lambda rank, step: honest(rank if step % 3 else 0, step)},
    "no learning": {"lr": 0.0},
    "dropout": {"dropout": 0.3},
}


@pytest.mark.parametrize("world_size", [2, 3, pytest.param(8, marks=pytest.mark.long)])
@pytest.mark.parametrize("case", HONEST)
def test_nobody_is_named_in_an_honest_run(case: str, world_size: int) -> None:
    assert named(world_size, **({"draw": honest} | HONEST[case])) == []


@pytest.mark.parametrize("world_size", [4, 8])
def test_ranks_of_the_same_class_are_not_taken_for_ranks_on_the_same_data(world_size: int) -> None:
    """Two ranks have each class: they are alike, and far from the others, in every step."""
    x, labels = data()
    order = labels.argsort(stable=True)

    def draw(rank: int, step: int) -> Sequence[int]:
        own = order.chunk(world_size // 2)[rank // 2]
        return own[torch.tensor(honest(rank, step, num_samples=len(own)))].tolist()

    assert named(world_size, draw, samples=(x, labels), lr=0.5) == []


def test_a_loss_that_is_mostly_a_penalty_makes_nobody_alike() -> None:
    def watch(transport: LocalTransport) -> SuspicionReport:
        weight = torch.nn.Parameter(torch.ones(1000))
        optimizer = loft.DistributedOptimizer(
            torch.optim.SGD([weight], lr=1e-3), [("weight", weight)], transport=transport
        )
        for step in range(COMPARED_AFTER + 1):
            optimizer.zero_grad()
            own = weight[(7 * step + transport.rank) % 1000]  # one value of 1000 sees data
            ((weight**2).sum() + 0.1 * own).backward()
            optimizer.step()
        return optimizer.report()

    assert not run_ranks(3, watch)[0].same_data


def test_steps_with_other_numbers_of_samples_are_not_compared() -> None:
    random = np.random.default_rng(0)
    sums = random.standard_normal((2, 24, 61))
    sums[1] = sums[0]
    samples = np.full((2, 24), 8.0)
    assert likeness(samples, sums, 1) == Likeness(0, 23)
    samples[1, :10] = 4.0
    assert likeness(samples, sums, 1) == Likeness(0, 14)
    samples[1, :20] = 4.0
    assert likeness(samples, sums, 1) == Likeness(1)


@pytest.mark.parametrize("lost", [np.nan, np.inf, 0.0])
def test_steps_that_are_lost_are_left_out(lost: float) -> None:
    sums = np.random.default_rng(0).standard_normal((3, 24, 61))
    sums[2] = sums[0]
    sums[:, 3:9] = lost
    found = likeness(np.ones((3, 24)), sums, 2)
    assert found == Likeness(0, found.num_equal)
    assert 15 <= found.num_equal <= 17
    sums[:] = lost
    assert likeness(np.ones((3, 24)), sums, 2) == Likeness(2)


@pytest.mark.parametrize("shape", [(), (60,), (61,), (7, 61, 3), (4000,)])
def test_sums_are_over_every_value_whatever_its_place(shape: tuple[int, ...]) -> None:
    gradient = torch.zeros(shape)
    flat = gradient.view(-1)
    for at in {0, flat.numel() // 2, flat.numel() - 1}:
        flat.zero_()
        flat[at] = 1.0
        sums = sum_up(gradient, 61)
        assert sums is not None
        assert sums.tolist() == [float(each == at % 61) for each in range(61)]


def test_a_sparse_gradient_is_summed_as_it_is() -> None:
    table = torch.nn.Embedding(1000, 61, sparse=True)
    table(torch.tensor([3, 900])).sum().backward()
    assert table.weight.grad is not None
    sums = sum_up(table.weight.grad, 61)
    assert sums is not None
    assert sums.tolist() == [2.0] * 61
