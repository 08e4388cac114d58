"""A share beyond a rank's cap, computed in micro-batches: the same training, in less memory."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import TensorDataset

import loft_hvd as loft
from loft_hvd.balance.controller import Controller
from loft_hvd.balance.latency import StepModel
from loft_hvd.balance.memory import logged_caps
from loft_hvd.balance.plan import Bounds, StepSizes, count_micro
from loft_hvd.balance.search import SOLVERS
from loft_hvd.data.loader import DataLoader
from loft_hvd.errors import ArgumentError, ArgumentTypeError, PlanError, UsageError
from loft_hvd.transport.local import LocalTransport, LocalWorld, run_ranks
from tests.support.clusters import drive
from tests.support.plans import FakePlans

DATA = TensorDataset(torch.randn(203, 6, generator=torch.Generator().manual_seed(1)))


def make_model() -> torch.nn.Module:
    """Return the same weights on every thread."""
    model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Tanh(), torch.nn.Linear(5, 1))
    random = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.uniform_(-0.4, 0.4, generator=random)
    return model


def train(
    transport: LocalTransport,
    *,
    sizes: Sequence[int],
    caps: Sequence[int | None] | None,
    rule: loft.Rule | None = None,
    num_passes: int = 1,
    set_to_none: bool = True,
    kind: str = "loader",
    momentum: float = 0.0,
    weighs: bool = False,
) -> tuple[list[Tensor], int]:
    """Train 12 steps, into a second epoch; returns the weights, and the most samples of a pass."""
    balancer = loft.Balancer(
        sum(sizes), list(sizes), max_batch=caps, micro_batches=caps is not None, transport=transport
    )
    model = make_model()
    optimizer = loft.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.0 if momentum else 0.9),
        model.named_parameters(),
        rule=rule,
        worker_momentum=momentum,
        balancer=balancer,
        backward_passes_per_step=num_passes,
        transport=transport,
        bucket_bytes=64,
    )
    sampler = loft.BatchSampler(DATA, balancer, drop_last=num_passes > 1)
    own = TorchDataLoader(DATA, batch_sampler=sampler)
    loader: Any = (
        own if kind == "sampler" else loft.DataLoader(DATA, balancer, drop_last=num_passes > 1)
    )
    largest = num_steps = 0
    optimizer.zero_grad(set_to_none=set_to_none)
    for number, batch in enumerate(itertools.chain(*[loader] * 8)):
        if kind == "sampler":
            parts = [[x] for x in batch[0].split(balancer.micro_batch_sizes)]
        else:
            parts = batch if balancer.splits else [batch]
        for (x,) in parts:
            largest = max(largest, len(x))
            loss = model(x).square().mean()
            (balancer.weigh(loss) if weighs else loss).backward()
        if (number + 1) % num_passes == 0:
            optimizer.step()
            optimizer.zero_grad(set_to_none=set_to_none)
            num_steps += 1
        if num_steps == 12:
            break
    return [p.detach() for p in model.parameters()], largest


@pytest.mark.every(5)
@pytest.mark.parametrize(("num_passes", "set_to_none"), [(1, True), (2, False)])
@pytest.mark.parametrize(
    ("sizes", "caps", "rule"),
    [
        ([20], [6], loft.Mean()),
        ([9, 11], [4, None], loft.Mean()),
        ([10, 0, 7, 3], [4, 4, 3, 3], loft.Mean()),
        ([10, 0, 7, 3], [4, 4, 3, 3], loft.Mean(reproducible=True)),
        ([8, 5, 7], [3, 5, 2], loft.TrimmedMean(f=1)),
        ([8, 5, 7], [3, 5, 2], loft.Median()),
    ],
    ids=str,
)
def test_training_in_micro_batches_equals_training_without_caps(
    sizes: list[int], caps: list[int | None], rule: loft.Rule, set_to_none: bool, num_passes: int
) -> None:
    given: dict[str, Any] = {
        "sizes": sizes,
        "rule": rule,
        "set_to_none": set_to_none,
        "num_passes": num_passes,
    }
    whole = run_ranks(len(sizes), lambda transport: train(transport, caps=None, **given))
    split = run_ranks(len(sizes), lambda transport: train(transport, caps=caps, **given))
    for (weights, largest), (expected, _), cap in zip(split, whole, caps, strict=True):
        for got, want in zip(weights, expected, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
        assert cap is None or largest <= cap
    assert any(largest > (cap or 99) for (_, largest), cap in zip(whole, caps, strict=True))


@pytest.mark.every(3)
@pytest.mark.parametrize("num_passes", [1, 2])
@pytest.mark.parametrize(
    ("sizes", "caps", "rule", "momentum"),
    [
        ([10, 0, 7, 3], [4, 4, 3, 3], loft.Mean(), 0.0),
        ([10, 0, 7, 3], [4, 4, 3, 3], loft.Mean(), 0.9),
        ([8, 5, 7], [3, 5, 2], loft.TrimmedMean(f=1), 0.0),
        ([8, 5, 7], [3, 5, 2], loft.TrimmedMean(f=1), 0.9),
        ([9, 3, 4, 4], [3, 3, 2, 4], loft.Robust(f=1), 0.9),
    ],
    ids=str,
)
def test_a_loss_weighed_before_the_backward_pass_is_not_weighed_again(
    sizes: list[int],
    caps: list[int | None],
    rule: loft.Rule,
    momentum: float,
    num_passes: int,
) -> None:
    given: dict[str, Any] = {
        "sizes": sizes,
        "rule": rule,
        "num_passes": num_passes,
        "momentum": momentum,
    }
    plain = run_ranks(len(sizes), lambda transport: train(transport, caps=None, **given))
    for cut in (None, caps):
        found = run_ranks(
            len(sizes),
            lambda transport, cut=cut: train(transport, caps=cut, weighs=True, **given),  # type: ignore[misc]  # a default of its own
        )
        for (weights, _), (expected, _) in zip(found, plain, strict=True):
            for got, want in zip(weights, expected, strict=True):
                torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_a_loss_that_is_no_tensor_is_refused() -> None:
    balancer = loft.Balancer(4, transport=LocalWorld(1).transport(0))
    with pytest.raises(ArgumentTypeError, match="weigh: loss is a float, and must be a tensor"):
        balancer.weigh(0.5)  # type: ignore[arg-type]


def test_a_loader_of_the_scripts_own_splits_by_the_balancer() -> None:
    sizes, caps = [9, 11], [4, None]
    whole = run_ranks(2, lambda t: train(t, sizes=sizes, caps=None, kind="sampler"))
    split = run_ranks(2, lambda t: train(t, sizes=sizes, caps=caps, kind="sampler"))
    for (weights, largest), (expected, _), cap in zip(split, whole, caps, strict=True):
        for got, want in zip(weights, expected, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
        assert cap is None or largest == cap - 1  # 3, 3, 3


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("is_training", [True, False])
def test_a_loader_yields_lists_within_the_caps_and_every_sample_once(
    is_training: bool, num_workers: int
) -> None:
    caps, numbers, num_steps = (5, None, 2, 3), torch.arange(100), set()
    seen: list[int] = []
    for rank, cap in enumerate(caps):
        plans = FakePlans([12, 9, 2, 0], rank=rank, caps=caps)
        loader = DataLoader(
            TensorDataset(numbers), plans, train=is_training, num_workers=num_workers
        )
        batches = list(loader)
        num_steps.add(len(batches))
        for batch in batches:
            assert isinstance(batch, list)
            lengths = [len(x) for (x,) in batch]
            assert max(lengths) <= (cap or 9)
            assert max(lengths) - min(lengths) <= 1
        if rank < 3:
            seen += [int(number) for batch in batches for (x,) in batch for number in x]
    assert sorted(seen) == numbers.tolist()
    assert num_steps == {5}


@pytest.mark.parametrize("num_taken", [1, 4])
def test_a_step_without_all_its_micro_batches_is_an_error(num_taken: int) -> None:
    balancer = loft.Balancer(
        9, [9], max_batch=3, micro_batches=True, transport=LocalWorld(1).transport(0)
    )
    model = make_model()
    optimizer = loft.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1),
        balancer=balancer,
        transport=balancer._transport,
    )
    (x,) = next(iter(loft.DataLoader(DATA, balancer)))[0]

    def step() -> None:
        for _ in range(num_taken):
            model(x).square().mean().backward()
        optimizer.step()

    text = r"backward_passes_per_step=1 and rank 0 has micro-batches of \[\[3, 3, 3\]\] samples"
    with pytest.raises(UsageError, match=text):
        step()


def test_the_first_sizes_are_equal_though_a_cap_is_below_them() -> None:
    def sizes(transport: LocalTransport, micro_batches: bool) -> tuple[int, ...]:
        balancer = loft.Balancer(
            256, max_batch=[96, 96, 48, 16], micro_batches=micro_batches, transport=transport
        )
        return balancer.plan.sizes

    assert run_ranks(4, lambda t: sizes(t, False)) == [(96, 96, 48, 16)] * 4
    assert run_ranks(4, lambda t: sizes(t, True)) == [(64, 64, 64, 64)] * 4


def test_more_than_16_micro_batches_are_refused() -> None:
    with pytest.raises(PlanError, match="cap is 2 in up to 16 micro-batches"):
        loft.Balancer(
            33, [33], max_batch=2, micro_batches=True, transport=LocalWorld(1).transport(0)
        )


def test_micro_batches_are_asked_for_with_true_or_a_number() -> None:
    alone = LocalWorld(1).transport(0)
    with pytest.raises(ArgumentTypeError, match="micro_batches='4' must be True, False or a"):
        loft.Balancer(8, micro_batches="4", transport=alone)  # type: ignore[arg-type]
    for wrong in (0, 17):
        with pytest.raises(ArgumentError, match=f"micro_batches={wrong} must be from 1 to 16"):
            loft.Balancer(8, micro_batches=wrong, transport=alone)
    # Of samples that go by number, caps alone say how many micro-batches there are.
    balancer = loft.Balancer(8, max_batch=4, micro_batches=16, transport=alone)
    assert balancer.splits
    assert balancer.count_micro((8,)) == (2,)


def test_what_counts_the_passes_itself_refuses_micro_batches() -> None:
    alone = LocalWorld(1).transport(0)
    balancer = loft.Balancer(8, micro_batches=True, transport=alone)
    sgd: Any = torch.optim.SGD(make_model().parameters(), lr=0.1)
    sgd.synchronize = lambda: None
    with pytest.raises(ArgumentError, match=r"attach: .*loft.DistributedOptimizer"):
        loft.attach(sgd, balancer)
    with pytest.raises(ArgumentError, match=r"ddp_hook: .*loft.DistributedOptimizer"):
        loft.ddp_hook(balancer=balancer, transport=alone)


def test_full_memory_in_a_micro_batch_is_blamed_on_its_size(tmp_path: Path) -> None:
    balancer = loft.Balancer(
        30,
        [30],
        max_batch=10,
        micro_batches=True,
        log_dir=tmp_path,
        transport=LocalWorld(1).transport(0),
    )
    next(iter(loft.DataLoader(DATA, balancer)))
    note = balancer._memory.describe_failure(MemoryError("full"))
    assert note is not None
    assert "with a micro-batch of 10 samples" in note.text
    assert list(logged_caps(tmp_path).values()) == [5]  # half: none was finished before


def test_the_largest_batch_done_is_that_of_a_backward_pass() -> None:
    sizes = StepSizes(0, 0, (20, 9, 0), num_micro=count_micro((20, 9, 0), (8, None, 4)))
    assert [sizes.micro_sizes(rank) for rank in range(3)] == [(7, 7, 6), (9,), (0,)]


# The planner's side.

MODEL = StepModel.build(
    4,
    compute_fixed_s=[0.02, 0.05, 0.01, 0.0],
    compute_s=[0.001, 0.002, 0.001, 0.003],
    plateau_s=[0.0, 0.0, 0.04, 0.0],
    fetch_fixed_s=0.005,
    local_s=[0.0005, 0.0, 0.002, 0.001],
    overlap=[0.0, 0.5, 1.0, 1.0],
    pass_size=[16.0, np.inf, 7.0, 10.0],
)


def test_each_micro_batch_costs_its_fixed_part_and_its_plateau() -> None:
    x = np.array([33.0, 33.0, 33.0, 33.0])
    compute = [3 * 0.02 + 0.033, 0.05 + 0.066, 5 * 0.04, 0.099]
    assert MODEL.compute(x) == pytest.approx(compute)
    assert MODEL.compute(np.minimum(x, 7)) == pytest.approx([0.027, 0.064, 0.04, 0.021])


@pytest.mark.parametrize("low", [1, 12])
def test_curves_with_micro_batches_are_the_models_times(low: int) -> None:
    ends = np.full(4, float(low)), np.array([60.0, 60.0, 50.0, 5.0])
    curves = MODEL.curves(*ends)
    for size in range(low, 61):
        sizes = np.clip(float(size), ends[0], np.maximum(*ends))
        # A curve never falls: where a further micro-batch is cheaper, it waits for the model.
        so_far = np.max([MODEL.times(np.minimum(sizes, at)) for at in range(low, size + 1)], axis=0)
        assert curves.times(sizes) == pytest.approx(so_far)


@pytest.mark.parametrize("solver", ["grid", "exact"])
@pytest.mark.parametrize("seed", range(12))
def test_the_search_finds_the_best_sizes_with_micro_batches(solver: str, seed: int) -> None:
    random = np.random.default_rng(seed)
    model = StepModel.build(
        3,
        compute_fixed_s=random.uniform(0, 0.02, 3),
        compute_s=random.uniform(0.001, 0.004, 3),
        overlap=1.0,
        local_s=random.uniform(0, 0.002, 3),
        pass_size=random.integers(3, 12, 3).astype(float),
    )
    bounds = Bounds.of(3, floor=1, cap=28)
    splits = ((a, b, 30 - a - b) for a in range(1, 29) for b in range(1, 30 - a))
    best = min(model.step_s(sizes) for sizes in splits if max(sizes) <= 28)
    found = model.step_s(SOLVERS[solver](model, 30, bounds))
    assert found == pytest.approx(best, rel=1e-9 if solver == "exact" else 0.02)


@pytest.mark.parametrize("fixed_s", [0.0, 0.005, 0.05])
def test_plans_use_micro_batches_where_that_is_faster(fixed_s: float) -> None:
    caps = [96, 96, 48, 16]
    most = [min(256, 16 * cap) for cap in caps]
    model = StepModel.build(
        4, compute_fixed_s=fixed_s, compute_s=1e-3, pass_size=np.array(caps, np.float64)
    )
    best, capped = (
        model.step_s(SOLVERS["exact"](model, 256, Bounds.of(4, floor=2, cap=cap)))
        for cap in (most, caps)
    )
    controller = Controller(256, 4, max_batch=most, pass_caps=caps)
    sizes = drive(lambda _: model, controller, intervals=10, seed=1)[-1]
    assert model.step_s(sizes) <= 1.03 * best
    assert model.step_s(sizes) < (0.75 if fixed_s < 0.01 else 1.0) * capped
    if fixed_s == 0.05:  # a micro-batch more costs as much as 50 samples
        assert count_micro(sizes, caps) == (1, 1, 1, 2)
