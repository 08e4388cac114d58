"""Parameters without a gradient on any rank: left alone, as by an optimizer in one process."""

from __future__ import annotations

import copy
import itertools
import logging
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import loft_hvd as loft
from loft_hvd.pipeline.unused import Unused
from loft_hvd.transport.base import Channel
from loft_hvd.transport.local import LocalTransport, LocalWorld, run_ranks
from tests.support.recording import RecordingTransport
from tests.support.training import make_data, max_difference

NUM_STEPS = 9
Uses = Callable[[int, int], bool]  # (step, rank): whether the loss needs the second head


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 2), nn.Linear(8, 2)

    def forward(self, x: Tensor, *, both: bool) -> Any:
        hidden = torch.tanh(self.body(x))
        return self.first(hidden) + (self.second(hidden) if both else 0)


torch.manual_seed(2)
MODEL = Heads()  # one for all: threads share torch's random numbers


def train(
    transport: LocalTransport | None,
    uses: Uses,
    *,
    make: Callable[[Any], torch.optim.Optimizer],
    sizes: Sequence[int] = (7, 3, 2),
    rule: loft.Rule | None = None,
) -> Heads:
    model = copy.deepcopy(MODEL)
    optimizer = make(model.parameters())
    if transport is None:
        balancer = loft.Balancer(12, transport=LocalWorld(1).transport(0))
    else:
        balancer = loft.Balancer(12, list(sizes), transport=transport)
        named = model.named_parameters()
        optimizer = loft.DistributedOptimizer(
            optimizer, named, balancer=balancer, rule=rule, transport=transport
        )
    rank = 0 if transport is None else transport.rank
    for step, (x, y) in enumerate(loft.DataLoader(make_data(12 * NUM_STEPS), balancer, seed=3)):
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(x, both=uses(step, rank)), y).backward()
        optimizer.step()
    return model


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=0.1)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1)


@pytest.mark.parametrize("make", [sgd, adamw])
@pytest.mark.parametrize(
    "uses",
    [
        lambda step, rank: False,
        lambda step, rank: step >= 4,
        lambda step, rank: step % 3 == 1,
    ],
    ids=["never", "later", "now and then"],
)
def test_what_no_rank_uses_is_left_alone(make: Any, uses: Uses) -> None:
    alone = train(None, uses, make=make)
    for model in run_ranks(3, lambda end: train(end, uses, make=make)):
        assert max_difference(model, alone) < 1e-6


@pytest.mark.parametrize("rule", [loft.Median(), loft.Robust(1)], ids=str)
def test_under_a_rule_too(rule: loft.Rule) -> None:
    def decaying(parameters: Any) -> torch.optim.Optimizer:  # Robust brings momentum of its own
        return torch.optim.SGD(parameters, lr=0.05, weight_decay=0.1)

    models = run_ranks(3, lambda end: train(end, lambda *_: False, make=decaying, rule=rule))
    for model in models:
        assert max_difference(model.second, MODEL.second) == 0.0
        assert max_difference(model.first, models[0].first) == 0.0
        assert max_difference(model.first, MODEL.first) > 0.0


def test_what_one_rank_uses_is_averaged_with_zeros() -> None:
    """Its samples are a part of the global batch, whose others have no gradient there."""

    def work(transport: LocalTransport) -> list[float]:
        one, other = (nn.Parameter(torch.zeros(1)) for _ in range(2))
        named = [("one", one), ("other", other)]
        inner = torch.optim.SGD([one, other], lr=1.0, weight_decay=0.5)
        optimizer = loft.DistributedOptimizer(inner, named, transport=transport)
        for step in range(3):
            optimizer.zero_grad()
            loss = one.sum()
            if transport.rank == 2 and step != 1:
                loss = loss + 3 * other.sum()
            loss.backward()
            optimizer.step()
            assert (other.grad is None) == (step == 1)
        return other.tolist()

    # -1 in the first step, left alone in the second, and -1 + 0.5 * 1 in the third.
    assert run_ranks(3, work) == [[-1.5]] * 3


@pytest.mark.parametrize("rule", [loft.Mean(), loft.Median()], ids=str)
def test_an_average_over_time_goes_on_without_a_gradient(rule: loft.Rule) -> None:
    def work(transport: LocalTransport) -> list[float]:
        one, other = (nn.Parameter(torch.zeros(1)) for _ in range(2))
        named = [("one", one), ("other", other)]
        inner = torch.optim.SGD([one, other], lr=1.0)
        optimizer = loft.DistributedOptimizer(
            inner, named, rule=rule, worker_momentum=0.5, transport=transport
        )
        places = []
        for step in range(4):
            optimizer.zero_grad()
            loss = one.sum() if step % 2 else one.sum() + 3 * other.sum()
            loss.backward()
            optimizer.step()
            places.append(other.item())
        return places

    first, *later = run_ranks(3, work)
    assert later == [first] * 2
    assert all(after < before for before, after in itertools.pairwise([0.0, *first])), first


def test_a_rank_without_samples_uses_nothing() -> None:
    def uses(_: int, rank: int) -> bool:
        return rank == 2  # which has a dummy batch

    models = run_ranks(3, lambda end: train(end, uses, make=sgd, sizes=(8, 4, 0)))
    alone = train(None, lambda *_: False, make=sgd)
    for model in models:
        assert max_difference(model, alone) < 1e-6


def test_a_gradient_that_goes_later_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "loft_hvd.pipeline.unused"):
        run_ranks(3, lambda end: train(end, lambda step, _: step == 0, make=sgd))
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 3
    for rank, text in enumerate(sorted(told)):
        assert text.startswith(f"rank {rank}: parameter 'second.weight' has no gradient in this")


def test_ranks_ask_each_other_only_about_what_one_of_them_lacked() -> None:
    def work(transport: LocalTransport) -> tuple[int, list[frozenset[int]], int]:
        ends = RecordingTransport(transport)
        everywhere = (True, True)
        whole = Unused(Channel(ends, "whole"), "abc")
        for _ in range(4):
            assert whole.agree([True] * 3, everywhere) == frozenset()
        num_first = len(ends.names)
        partly = Unused(Channel(ends, "partly"), "abc")
        found = [
            partly.agree(has, everywhere)
            for has in ([True, transport.rank == 0, False], [True, False, True], [True] * 3)
        ]
        # Only the first rank has samples.
        found.append(partly.agree([True, transport.rank == 1, True], (True, False)))
        return num_first, found, len(ends.names) - num_first

    for num_first, found, num_more in run_ranks(2, work):
        assert (num_first, num_more) == (1, 4)
        assert found == [{2}, {1}, frozenset(), {1}]
