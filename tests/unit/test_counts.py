"""What ranks count in a step: training equals one process over all that is counted."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

import loft_hvd as loft
from loft_hvd.balance.plan import Counted
from loft_hvd.errors import ArgumentError, ArgumentTypeError, UsageError
from loft_hvd.pipeline.counts import StepCounts
from loft_hvd.pipeline.passes import Passes
from loft_hvd.pipeline.weights import capped_weights
from loft_hvd.transport.base import Channel
from loft_hvd.transport.local import LocalTransport, LocalWorld, run_ranks
from tests.support.ddp_buckets import backward
from tests.support.passes import Sizes

IGNORED = -100
LENGTH, NUM_CLASSES = 7, 5
SIZES = (96, 96, 48, 16)


def make_data(num_samples: int, *, empty: range = range(0)) -> TensorDataset:
    """Return texts of which a random part of the labels counts, and of some none."""
    random = torch.Generator().manual_seed(4)
    x = torch.randn(num_samples, LENGTH, 6, generator=random)
    labels = torch.randint(0, NUM_CLASSES, (num_samples, LENGTH), generator=random)
    kept = torch.rand(num_samples, 1, generator=random) ** 3  # some texts are long, most short
    labels[torch.rand(labels.shape, generator=random) > kept] = IGNORED
    labels[list(empty)] = IGNORED
    return TensorDataset(x, labels)


DATA = make_data(256 * 6 + 100)


def make_model() -> torch.nn.Module:
    model = torch.nn.Sequential(
        torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, NUM_CLASSES)
    )
    random = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.uniform_(-0.4, 0.4, generator=random)
    return model


def counted(labels: Tensor) -> int:
    return int((labels != IGNORED).sum())


def loss_of(model: torch.nn.Module, x: Tensor, labels: Tensor, reduction: str) -> Tensor:
    logits = model(x).flatten(0, 1)
    return cross_entropy(logits, labels.flatten(), ignore_index=IGNORED, reduction=reduction)


def train_alone(num_passes: int, *, num_steps: int, data: TensorDataset = DATA) -> list[Tensor]:
    """Train in one process: each step on the mean over all that is counted in it."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    balancer = loft.Balancer(sum(SIZES), transport=LocalWorld(1).transport(0))
    loader = iter(loft.DataLoader(data, balancer))
    for _ in range(num_steps):
        batches = [next(loader) for _ in range(num_passes)]
        total = sum(counted(labels) for _, labels in batches)
        optimizer.zero_grad()
        for x, labels in batches:
            (loss_of(model, x, labels, "sum") / total).backward()
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


def train(
    transport: LocalTransport,
    *,
    sizes: Sequence[int] = SIZES,
    num_passes: int = 1,
    num_steps: int = 3,
    is_sum: bool = False,
    rule: loft.Rule | None = None,
    data: TensorDataset = DATA,
    claim: Callable[[int], int] = lambda number: number,
    options: dict[str, Any] | None = None,
    **given: Any,
) -> list[Tensor]:
    """Train as a rank; ``claim`` says what it counts of so many."""
    balancer = loft.Balancer(sum(sizes), list(sizes), transport=transport, **given)
    model = make_model()
    momentum = 0.0 if options and options.get("worker_momentum") else 0.9
    optimizer = loft.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.5, momentum=momentum),
        model.named_parameters(),
        rule=rule,
        balancer=balancer,
        backward_passes_per_step=num_passes,
        transport=transport,
        bucket_bytes=128,
        **(options or {}),
    )
    loader = loft.DataLoader(data, balancer)
    batches = iter(loader)
    for _ in range(num_steps):
        optimizer.zero_grad()
        for _ in range(num_passes):
            batch = next(batches)
            for x, labels in batch if balancer.splits else [batch]:
                loss = loss_of(model, x, labels, "sum" if is_sum else "mean")
                balancer.count(claim(counted(labels)), is_sum=is_sum)
                (loss if is_sum else loss / num_passes).backward()
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


def assert_equal(found: Sequence[Sequence[Tensor]], wanted: Sequence[Tensor]) -> None:
    for weights in found:
        for got, want in zip(weights, wanted, strict=True):
            torch.testing.assert_close(got, want, rtol=0, atol=1e-6)


@pytest.mark.parametrize("is_sum", [False, True], ids=["means", "sums"])
@pytest.mark.parametrize("num_passes", [1, 2, 3])
@pytest.mark.parametrize("rule", [loft.Mean(), loft.Mean(reproducible=True)], ids=str)
def test_unequal_ranks_train_as_one_process_on_all_that_is_counted(
    num_passes: int, is_sum: bool, rule: loft.Rule
) -> None:
    num_steps = 6 // num_passes
    wanted = train_alone(num_passes, num_steps=num_steps)
    found = run_ranks(
        4,
        lambda end: train(
            end, num_passes=num_passes, num_steps=num_steps, is_sum=is_sum, rule=rule, max_count=7
        ),
    )
    assert_equal(found, wanted)


@pytest.mark.parametrize("is_sum", [False, True], ids=["means", "sums"])
@pytest.mark.parametrize("num_passes", [1, 2])
def test_a_rank_that_is_alone_trains_on_all_that_is_counted(num_passes: int, is_sum: bool) -> None:
    def work(end: LocalTransport) -> list[Tensor]:
        return train(end, sizes=[256], num_passes=num_passes, is_sum=is_sum)

    assert_equal(run_ranks(1, work), train_alone(num_passes, num_steps=3))


@pytest.mark.parametrize("num_passes", [1, 2])
def test_micro_batches_are_counted_one_by_one(num_passes: int) -> None:
    found = run_ranks(
        4,
        lambda end: train(
            end, num_passes=num_passes, max_batch=[40, 96, 48, 5], micro_batches=True
        ),
    )
    assert_equal(found, train_alone(num_passes, num_steps=3))


def test_a_rank_with_nothing_to_count_has_no_part_in_the_step() -> None:
    # The mean over nothing is NaN, and so is its gradient.
    data, claims = make_data(256 * 6, empty=range(256 * 3)), []

    def note(number: int) -> int:
        claims.append(number)
        return number

    found = run_ranks(2, lambda end: train(end, sizes=(255, 1), data=data, claim=note))
    assert 0 in claims
    assert_equal(found, train_alone(1, num_steps=3, data=data))


def test_a_step_in_which_nothing_is_counted_leaves_the_weights() -> None:
    data = make_data(256 * 3, empty=range(256 * 3))
    for num_ranks, sizes in ((1, [256]), (4, SIZES)):

        def work(end: LocalTransport, sizes: Sequence[int] = sizes) -> list[Tensor]:
            return train(end, sizes=sizes, data=data, num_steps=2)

        assert_equal(
            run_ranks(num_ranks, work), [each.detach() for each in make_model().parameters()]
        )


@pytest.mark.parametrize("rule", [loft.TrimmedMean(1), loft.Robust(1)], ids=str)
@pytest.mark.parametrize("num_passes", [1, 2])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_a_rule_takes_sums_and_means_alike(
    rule: loft.Rule, num_passes: int, momentum: float
) -> None:
    def work(end: LocalTransport, is_sum: bool) -> list[Tensor]:
        options = {"worker_momentum": momentum, "scope": "shard" if rule.sees_rows else None}
        return train(end, num_passes=num_passes, rule=rule, is_sum=is_sum, options=options)

    of_means = run_ranks(4, lambda end: work(end, False))
    of_sums = run_ranks(4, lambda end: work(end, True))
    assert_equal(of_sums, of_means[0])
    moved = [
        (a - b).abs().max() for a, b in zip(of_means[0], make_model().parameters(), strict=True)
    ]
    assert max(moved) > 0.01


@pytest.mark.parametrize(
    "options",
    [
        {"over": [(0, 1), (2, 3)]},
        {"gradient_predivide_factor": 2.0},
        {"audit": 1.0},
    ],
    ids=lambda options: next(iter(options)),
)
def test_other_options_bear_counts(options: dict[str, Any]) -> None:
    # Every text has as many labels, but one: no claim is cut, and no weight is capped.
    data = make_data(256 * 2)
    labels = torch.arange(LENGTH).expand(512, LENGTH) % NUM_CLASSES
    data.tensors[1].copy_(labels.masked_fill(torch.arange(LENGTH) > 3, IGNORED))
    data.tensors[1][:100, 0] = IGNORED
    rule = loft.Mean() if "gradient_predivide_factor" in options else loft.TrimmedMean(0)
    sizes = (72, 64, 60, 60)
    found = run_ranks(
        4, lambda end: train(end, sizes=sizes, num_steps=2, rule=rule, data=data, options=options)
    )
    assert_equal(found, train_alone(1, num_steps=2, data=data))


def test_sparse_gradients_are_weighed_by_what_is_counted() -> None:
    words, claims = torch.tensor([[0, 1], [1, 2], [3, 3]]), [4, 1, 2]

    def work(end: LocalTransport) -> Tensor:
        table = torch.nn.Embedding(5, 2, sparse=True)
        torch.nn.init.ones_(table.weight)
        balancer = loft.Balancer(6, transport=end)
        optimizer = loft.DistributedOptimizer(
            torch.optim.SGD(table.parameters(), lr=1.0),
            table.named_parameters(),
            balancer=balancer,
            transport=end,
        )
        for _ in range(2):  # in the first step nobody knows yet that they are sparse
            optimizer.zero_grad()
            with balancer.step(2):
                balancer.count(claims[end.rank])
                table(words[end.rank]).mean().backward()
            optimizer.step()
        return table.weight.detach()

    # Each rank's mean is over 4 values.
    parts = torch.zeros(5, 2)
    for row, claim in zip(words, claims, strict=True):
        parts.index_add_(0, row, torch.full((2, 2), claim / 4 / sum(claims)))
    for weight in run_ranks(3, work):
        torch.testing.assert_close(weight, 1 - 2 * parts)


def test_averages_over_time_are_those_of_one_process() -> None:
    # A mean of ranks' averages is torch's momentum buffer, times 1 - b at first.
    def work(end: LocalTransport) -> list[Tensor]:
        return train(end, num_steps=1, options={"worker_momentum": 0.9})

    assert_equal(run_ranks(4, work), train_alone(1, num_steps=1))


# Claims that are not believed.


def weights_of(rank: int, claim: float, *, rule: loft.Rule, **given: Any) -> list[list[Tensor]]:
    def work(end: LocalTransport) -> list[Tensor]:
        def lie(number: int) -> int:
            return int(number * claim) if end.rank == rank else number

        return train(end, rule=rule, claim=lie, **given)

    return run_ranks(4, work)


def test_a_claim_beyond_what_the_plan_can_hold_is_cut_and_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        lied = weights_of(3, 10.0, rule=loft.Mean(), max_count=LENGTH)
    told = [each.getMessage() for each in caplog.records if "max_count" in each.getMessage()]
    assert len(told) == 1
    assert "rank 3 counts" in told[0]
    assert "it has 16 samples, and max_count=7 of each: it is taken for 112" in told[0]
    # What it counts for is what it says, up to the cap: as if it had said so.
    honest = [p.detach() for p in make_model().parameters()]
    assert len({tuple(w.flatten().tolist()) for weights in lied for w in weights[:1]}) == 1
    assert all((a - b).abs().max() < 0.5 for a, b in zip(lied[0], honest, strict=True))


@pytest.mark.parametrize("is_sum", [False, True], ids=["means", "sums"])
def test_a_cut_claim_weighs_the_rank_by_its_cap(is_sum: bool) -> None:
    """Of one step: gradients are those of claims at the cap."""

    def work(end: LocalTransport, factor: int, most: int) -> list[Tensor]:
        def claim(number: int) -> int:
            return factor * number if end.rank == 3 else number

        return train(end, num_steps=1, claim=claim, is_sum=is_sum, max_count=most)

    cut = run_ranks(4, lambda end: work(end, 1000, LENGTH))

    def at_cap(end: LocalTransport) -> list[Tensor]:
        return train(
            end, num_steps=1, claim=lambda number: 16 * LENGTH if end.rank == 3 else number
        )

    if not is_sum:  # a mean is the rank's mean gradient, whatever it claims
        assert_equal(cut, run_ranks(4, at_cap)[0])
    for weights in cut:
        assert all(bool(each.isfinite().all()) for each in weights)


def test_a_robust_rule_takes_no_claim_for_more_than_twice_the_median(
    caplog: pytest.LogCaptureFixture,
) -> None:
    rule = loft.TrimmedMean(1)
    with caplog.at_level(logging.WARNING):
        found = weights_of(1, 10.0, rule=rule, num_steps=10, data=make_data(256 * 12))
    told = [each.getMessage() for each in caplog.records if "rank 1 counts" in each.getMessage()]
    assert len(told) == 1
    assert "more than 2 times as much a sample as the median rank, 10 steps in a row" in told[0]
    # A thousand times weighs no more than ten times.
    assert_equal(weights_of(1, 1000.0, rule=rule, num_steps=10, data=make_data(256 * 12)), found[0])


def test_honest_ranks_are_not_told_of(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        weights_of(
            0, 1.0, rule=loft.TrimmedMean(1), num_steps=12, data=make_data(256 * 12), max_count=7
        )
    assert not [each for each in caplog.records if "counts" in each.getMessage()]


def test_rows_stay_as_long_as_gradients_are_whatever_a_rank_claims() -> None:
    def work(end: LocalTransport) -> list[float]:
        counts = StepCounts(Channel(end, "test"), most=None, tell=lambda rank, what: None)
        units = []
        for number in (3, 5000, 200):
            claim = 10**15 if end.rank == 2 else number + end.rank
            counts.add(Counted(claim, claim, True), num_samples=4, is_weighed=False)
            counts.send()
            assert counts.claims([4, 4, 4]) == (number, number + 1, 10**15)
            counts.clear()
            units.append(counts.unit)
        return units

    assert run_ranks(3, work) == [[4.0, 5001.0, 201.0]] * 3


@pytest.mark.parametrize(
    "rule", [loft.Mean(), loft.Mean(reproducible=True), loft.Median()], ids=str
)
def test_the_hook_of_ddp_weighs_by_what_is_counted(rule: loft.Rule) -> None:
    claims, steps = [(30, 3, 12), (0, 8, 8), (7, 7, 0)], 3
    grads = torch.randn(steps, 3, 5, generator=torch.Generator().manual_seed(2))

    def work(end: LocalTransport) -> list[Tensor]:
        counts = [Counted(row[end.rank], float(row[end.rank]), True) for row in claims]
        planned: Any = Sizes([(4, 4, 4)] * steps, counts=counts)
        hook = loft.ddp_hook(rule, planned, transport=end)
        parameter, found = torch.nn.Parameter(torch.zeros(5)), []
        for step in range(steps):
            own = grads[step, end.rank]
            own = own if claims[step][end.rank] else torch.full_like(own, torch.nan)
            found.append(backward(hook, [[parameter]], {parameter: own})[parameter].clone())
        return found

    for found in run_ranks(3, work):
        for step, got in enumerate(found):
            weights = torch.tensor(claims[step], dtype=torch.float32)
            if isinstance(rule, loft.Median):
                want = loft.median(grads[step][weights > 0])
            else:
                want = (weights / weights.sum()) @ grads[step]
            torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)


# What a script may do wrong.


def fails_with(text: str, *, num_passes: int, calls: Callable[[Any, int, Tensor], Any]) -> None:
    def work(end: LocalTransport) -> None:
        balancer = loft.Balancer(8, transport=end)
        weight = torch.nn.Parameter(torch.ones(2))
        optimizer = loft.DistributedOptimizer(
            torch.optim.SGD([weight], lr=0.1),
            [("weight", weight)],
            balancer=balancer,
            backward_passes_per_step=num_passes,
            transport=end,
        )
        for _ in range(2):
            for at in range(num_passes):
                with balancer.step(balancer.local_batch_size):
                    loss = calls(balancer, at, weight.sum())
                    loss.backward()
            optimizer.step()

    with pytest.raises(UsageError, match=text):
        run_ranks(2, work)


def test_passes_are_all_counted_or_none_is() -> None:
    def first_alone(balancer: Any, at: int, loss: Tensor) -> Tensor:
        if at == 0:
            balancer.count(3)
        return loss

    def mixed(balancer: Any, at: int, loss: Tensor) -> Tensor:
        balancer.count(3, is_sum=at == 0)
        return loss

    def both(balancer: Any, at: int, loss: Tensor) -> Tensor:
        balancer.count(3)
        weighed: Tensor = balancer.weigh(loss)
        return weighed

    fails_with(
        r"has no balancer.count\(n\), and those before it had one", num_passes=2, calls=first_alone
    )
    fails_with("means in one backward pass and sums in another", num_passes=2, calls=mixed)
    fails_with("both say what one loss weighs", num_passes=1, calls=both)


@pytest.mark.parametrize("number", [1.5, "3", True, None, torch.tensor(2.5), torch.tensor([1, 2])])
def test_only_whole_numbers_are_counted(number: Any) -> None:
    balancer = loft.Balancer(8, transport=LocalWorld(1).transport(0))
    with pytest.raises(ArgumentTypeError, match="must be a whole number"):
        balancer.count(number)
    for wrong in (-1, 2**60):
        with pytest.raises(ArgumentError, match=r"must be >= 0 and <= 9007199254740992"):
            balancer.count(wrong)
    with pytest.raises(ArgumentError, match=r"max_count=0 must be >= 1"):
        loft.Balancer(8, transport=LocalWorld(1).transport(0), max_count=0)


def test_large_counts_become_weights_that_kernels_take() -> None:
    weights = capped_weights([10**12, 3 * 10**12, 1, 0])
    assert weights is not None
    assert sum(weights) < 2**30
    assert weights[3] == 0 < weights[2]
    # 3 of 4 * 10**12 is above twice the mean of the three present ones, 8/3 of 10**12.
    assert math.isclose(weights[1] / weights[0], 8 / 3, rel_tol=1e-6)


def test_who_counts_nothing_is_a_row_of_zeros_where_the_rule_needs_as_many() -> None:
    grads = torch.randn(3, 5, generator=torch.Generator().manual_seed(3))

    def work(end: LocalTransport) -> Tensor:
        claim = (30, 0, 12)[end.rank]

        planned: Any = Sizes([(4, 4, 4)], counts=[Counted(claim, float(claim), True)])
        planned.min_ranks = 3
        hook = loft.ddp_hook(loft.TrimmedMean(1), planned, transport=end)
        parameter = torch.nn.Parameter(torch.zeros(5))
        own = grads[end.rank] if claim else torch.full((5,), torch.nan)
        return backward(hook, [[parameter]], {parameter: own})[parameter].clone()

    rows = torch.stack([grads[0], torch.zeros(5), grads[2]])
    for found in run_ranks(3, work):
        torch.testing.assert_close(found, rows.median(dim=0).values, rtol=1e-6, atol=1e-6)


def test_a_rank_that_is_passed_over_counts_nothing() -> None:
    class Passed(Sizes):
        def pass_over(self) -> None:
            """Take part without a batch."""

    planned = Passed([(4,), (0,)], counts=[Counted(6, 6.0, True), None])
    passes = Passes(planned, Channel(LocalWorld(1).transport(0), "passed"))
    passes.begin(0)
    passes.step_reduced()
    passes.pass_over()
    assert passes.row_scale(loft.Mean(), is_sum=False) == 0.0
