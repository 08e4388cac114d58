"""A global batch that follows the gradients' noise: chosen, planned, trained and gone on with."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

import loft_hvd as loft
from loft_hvd.balance.goodput import GradientNoise, adascale, candidates, efficiency, weigh
from loft_hvd.errors import ArgumentError, ArgumentTypeError
from loft_hvd.transport.local import LocalTransport, LocalWorld, run_ranks


def noise(scale: float, error: float = 0.0) -> GradientNoise:
    return GradientNoise(1.0, 0.0, scale, 0.0, error, 500)


def test_a_step_of_one_sample_of_noise_is_worth_as_much_as_its_samples() -> None:
    assert efficiency(math.inf, 1024, 64) == 1.0
    assert efficiency(1e9, 1024, 64) == pytest.approx(1.0)
    assert efficiency(0.0, 1024, 64) == pytest.approx(64 / 1024)  # a large batch brings nothing
    assert efficiency(500.0, 64, 64) == 1.0


@pytest.mark.parametrize(
    ("scale", "then_s", "share"),
    [
        (math.inf, 1.0, 1.0),  # twice the samples in the same time
        (math.inf, 2.0, 0.0),
        (100.0, 1.0, 2 * 200 / 300 - 1),
        (0.0, 1.0, 0.0),  # twice the samples, each worth half
    ],
)
def test_worth_is_samples_a_second_times_what_each_brings(
    scale: float, then_s: float, share: float
) -> None:
    found = weigh(noise(scale), 100, 200, now_s=1.0, then_s=then_s, error_s=0.0)
    assert found.share == pytest.approx(share)
    assert found.error == 0.0


def test_errors_of_noise_and_of_times_make_a_gain_less_sure() -> None:
    def sure(error: float, error_s: float) -> float:
        return weigh(noise(100.0, error), 100, 200, now_s=1.0, then_s=1.2, error_s=error_s).sure

    assert sure(0.0, 0.0) > sure(10.0, 0.0) > sure(100.0, 0.0)
    assert sure(0.0, 0.0) > sure(0.0, 0.1)


def test_candidates_are_within_limits_and_at_most_twice_or_half() -> None:
    assert candidates(100, 64, 1024) == [64, 71, 141, 200]
    assert candidates(64, 64, 1024) == [91, 128]
    assert candidates(1000, 64, 1024) == [500, 707, 1024]
    assert candidates(64, 64, 64) == []


@pytest.mark.parametrize("scale", [0.0, 1.0, 64.0, 1e4, math.inf])
def test_adascale_lies_between_one_and_the_ratio_of_batches(scale: float) -> None:
    assert adascale(64, 64, scale) == 1.0
    assert 1.0 <= adascale(256, 64, scale) <= 4.0
    assert adascale(256, 64, scale) <= adascale(512, 64, scale)
    if scale == 0.0:
        assert adascale(256, 64, scale) == 1.0
    if math.isinf(scale):
        assert adascale(256, 64, scale) == 4.0


def alone(*given: Any, **options: Any) -> loft.Balancer:
    return loft.Balancer(*given, transport=LocalWorld(1).transport(0), **options)


@pytest.mark.parametrize(
    ("given", "error", "says"),
    [
        ({}, ArgumentTypeError, "min_global=None must be a whole number"),
        ({"min_global": 64}, ArgumentTypeError, "max_global=None"),
        ({"min_global": 64, "max_global": 32}, ArgumentError, "in this order"),
        ({"min_global": 0, "max_global": 32}, ArgumentError, "must be >= 1"),
        (
            {"min_global": 8, "max_global": 32, "policy": "lbbsp-cpu"},
            ArgumentError,
            "does not go with",
        ),
        (
            {"min_global": 8, "max_global": 32, "lr_scale": "cubic"},
            ArgumentError,
            "lr_scale='cubic' is not known",
        ),
        ({"min_global": 8, "max_global": 32, "lr_scale": 2.0}, ArgumentTypeError, "lr_scale=2.0"),
        (
            {"min_global": 8, "max_global": 32, "on_resize": "keep_per_rank"},
            ArgumentError,
            "keep_per_rank",
        ),
    ],
)
def test_wrong_arguments_are_refused(
    given: dict[str, Any], error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says):
        alone("auto", **given)


def test_limits_and_rules_of_a_fixed_batch_are_refused() -> None:
    with pytest.raises(ArgumentError, match="leave them away"):
        alone(64, min_global=32)
    with pytest.raises(ArgumentError, match="this one is fixed"):
        alone(64, lr_scale="sqrt")


def test_horovods_own_optimizer_is_refused_as_it_shows_no_noise() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    optimizer.synchronize = lambda: None  # type: ignore[attr-defined]  # as Horovod's has
    with pytest.raises(ArgumentError, match="does not show it"):
        loft.attach(optimizer, alone("auto", min_global=8, max_global=32))


def test_noise_of_several_passes_a_step_is_shared_among_their_global_batches() -> None:
    of_one = noise(300.0, 30.0).of_passes(3)
    assert (of_one.scale, of_one.scale_error) == (100.0, 10.0)
    assert efficiency(of_one.scale, 64, 32) == pytest.approx(efficiency(300.0, 3 * 64, 3 * 32))


# Jobs: noise is told, times are those of a clock.


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


Scale = Callable[[int], float]  # of a step: the noise scale


def train(
    ends: LocalTransport,
    *,
    scale: Scale,
    num_steps: int,
    fixed_s: float = 100.0,
    sample_s: float = 1.0,
    state: dict[str, Any] | None = None,
    **options: Any,
) -> tuple[loft.Balancer, list[int], list[float]]:
    """Return the balancer, the global batch of each step and the learning rate of each."""
    clock = Clock()
    balancer = loft.Balancer(
        "auto",
        min_global=32,
        max_global=512,
        interval=6,
        transport=ends,
        clock=clock,
        **options,
    )
    if state is not None:
        balancer.load_state_dict(state)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    balancer.scale_lr(optimizer)
    rates: list[float] = []
    optimizer.register_step_pre_hook(
        lambda stepped, *_: rates.append(stepped.param_groups[0]["lr"])
    )
    totals = []
    for step in range(num_steps):
        size = balancer.local_batch_size
        totals.append(balancer.plan_at(balancer.next_step).global_batch_size)
        with balancer.step(size):
            balancer.take_step()
            clock.now += fixed_s + sample_s * size
            balancer.gradient_arrived(blocked_s=0.0)
        balancer.computing_ended()
        optimizer.step()
        assert optimizer.param_groups[0]["lr"] == 1.0
        balancer.note_noise(noise(scale(step)) if step > 12 else None)
        balancer.step_ended()
    return balancer, totals, rates


def run(world_size: int = 2, **options: Any) -> tuple[loft.Balancer, list[int], list[float]]:
    found = run_ranks(world_size, lambda ends: train(ends, **options))
    assert all(each[0].history == found[0][0].history for each in found)
    assert all(each[1:] == found[0][1:] for each in found)
    return found[0]


def test_the_global_batch_follows_the_noise_up_and_down() -> None:
    balancer, totals, rates = run(
        scale=lambda step: 20_000.0 if step < 150 else 40.0, num_steps=400
    )
    assert totals[:20] == [32] * 20
    assert max(totals) == totals[149] == 512
    assert totals[-1] <= 128
    assert all(later <= 2 * before for before, later in itertools.pairwise(totals))
    assert max(rates) == pytest.approx(adascale(512, 32, 20_000.0))
    assert rates[0] == 1.0
    assert "global batch" in balancer.explain()


def test_the_global_batch_stays_where_a_larger_one_brings_nothing() -> None:
    # A step takes time in proportion: after one trial it is as it was.
    _, totals, _ = run(scale=lambda _: 40.0, num_steps=200, fixed_s=0.1)
    assert totals[-1] == 32


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_run_goes_on_with_its_global_batch_among_as_many_ranks_and_others(
    world_size: int,
) -> None:
    balancer, totals, _ = run(scale=lambda _: 20_000.0, num_steps=100)
    assert totals[-1] > 64
    state = balancer.state_dict()
    newest = balancer.global_batch_size
    later, more, _ = run(world_size, scale=lambda _: 20_000.0, num_steps=100, state=state)
    assert more[0] == newest
    assert later.global_batch_size == 512


def test_a_new_world_goes_on_with_the_global_batch_and_the_noise() -> None:
    def work(ends: LocalTransport) -> tuple[int, int, GradientNoise | None]:
        balancer, _, _ = train(ends, scale=lambda _: 20_000.0, num_steps=60)
        before = balancer.global_batch_size
        if ends.rank == 1:  # as a rank that joins
            balancer._live.noise = None
        balancer.begin_world()
        return before, balancer.global_batch_size, balancer.noise

    found = run_ranks(2, work)
    assert found[0] == found[1]
    before, after, known = found[0]
    assert before == after > 64
    assert known == noise(20_000.0)


def test_a_rule_of_the_users_own_scales_the_learning_rate() -> None:
    _, totals, rates = run(
        scale=lambda _: 20_000.0, num_steps=120, lr_scale=lambda batch, base, _: batch + base
    )
    assert rates == [total + 32 for total in totals]


def test_the_learning_rate_is_that_of_the_samples_of_the_step() -> None:
    """An epoch's last batch is of 8 samples in place of 32."""

    def work(ends: LocalTransport) -> list[float]:
        balancer = loft.Balancer(
            "auto", min_global=32, max_global=64, transport=ends, lr_scale="linear"
        )
        weight, rates = torch.nn.Parameter(torch.zeros(1)), []
        own = torch.optim.SGD([weight], lr=1.0)
        optimizer = loft.DistributedOptimizer(own, balancer=balancer, transport=ends)
        own.register_step_pre_hook(lambda sgd, *_: rates.append(sgd.param_groups[0]["lr"]))
        for (x,) in loft.DataLoader(TensorDataset(torch.ones(72, 1)), balancer):
            optimizer.zero_grad()
            (weight * x).mean().backward()
            optimizer.step()
        return rates

    for rates in run_ranks(2, work):
        assert rates == [1.0, 1.0, 0.25]


@pytest.mark.parametrize("by_cost", [False, pytest.param(True, marks=pytest.mark.long)])
def test_a_stream_s_shares_follow_the_global_batch(by_cost: bool) -> None:
    """Gradients are mostly noise, and a step takes as long whatever its batch."""

    def work(ends: LocalTransport) -> list[tuple[int, int]]:
        clock = Clock()
        balancer = loft.Balancer(
            "auto", min_global=32, max_global=128, interval=6, transport=ends, clock=clock
        )
        weight = torch.nn.Parameter(torch.zeros(8))
        optimizer = loft.DistributedOptimizer(
            torch.optim.SGD([weight], lr=1e-3), balancer=balancer, transport=ends
        )
        random = torch.Generator().manual_seed(ends.rank)
        stream = (torch.randn(8, generator=random) + 0.05 for _ in range(20_000))
        cost = (lambda sample: 1 + int(sample[0] > 1)) if by_cost else None
        steps = []
        for batch in itertools.islice(loft.StreamLoader(stream, balancer, cost=cost), 150):
            optimizer.zero_grad()
            (weight * batch.mean(dim=0)).sum().backward()
            clock.now += 100.0
            optimizer.step()
            steps.append((len(batch), balancer.global_batch_size))
        return steps

    found = run_ranks(2, work)
    totals = [[total for _, total in steps] for steps in found]
    assert totals[0] == totals[1]
    assert totals[0][0] == 32
    assert totals[0][-1] == 128
    if not by_cost:
        sums = [sum(size for size, _ in of_step) for of_step in zip(*found, strict=True)]
        assert sums[0] == 32
        assert sums[-1] == 128
