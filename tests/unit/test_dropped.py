"""Batches of which a collate function drops samples: told, or weighed by what they really hold."""

from __future__ import annotations

import copy
import re
import warnings
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset, default_collate

import loft_hvd as loft
from loft_hvd.errors import ArgumentTypeError, PlanError, UsageError
from loft_hvd.transport.local import LocalTransport, LocalWorld, run_ranks
from tests.support.training import OPTIMIZERS, make_data, make_model, max_difference

MODEL = make_model().double()
DATA = TensorDataset(*(each.double() for each in make_data(90).tensors))
SIZES = [9, 5, 1]


def kept(samples: list[Any]) -> Any:
    """Drop a fifth of the samples, as where files are damaged."""
    good = [sample for sample in samples if sample[0][0] > -0.8]
    return default_collate(good) if good else [each[:0] for each in default_collate(samples)]


def train(transport: LocalTransport, sizes: list[int], *, weighs: bool = True) -> torch.nn.Module:
    balancer = loft.Balancer(sum(sizes), sizes, transport=transport)
    model = copy.deepcopy(MODEL)
    optimizer = loft.DistributedOptimizer(
        OPTIMIZERS["sgd"](model.parameters()),
        model.named_parameters(),
        balancer=balancer,
        transport=transport,
    )
    loader = loft.DataLoader(DATA, balancer, seed=3, collate_fn=kept)
    for epoch in range(3):
        loader.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            loss = (model(x) - y).square().mean() if len(x) else 0 * model(x).sum()
            (balancer.weigh(loss, len(x)) if weighs else loss).backward()
            optimizer.step()
    return model


def test_what_batches_really_hold_trains_as_one_process() -> None:
    alone = train(LocalWorld(1).transport(0), [15])
    for model in run_ranks(3, lambda transport: train(transport, SIZES)):
        assert max_difference(model, alone) < 1e-12
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        by_plan = run_ranks(3, lambda transport: train(transport, SIZES, weighs=False))
    assert max_difference(by_plan[0], alone) > 1e-3


def test_a_collate_function_that_drops_samples_is_told_of_once() -> None:
    with pytest.warns(UserWarning, match="collate_fn returned") as told:
        train(LocalWorld(1).transport(0), [15], weighs=False)
    (text,) = [str(each.message) for each in told if "collate_fn returned" in str(each.message)]
    assert re.match(r"rank 0: step \d was planned with 15 samples, and collate_fn returned", text)
    assert "balancer.weigh(loss, num_samples)" in text


@pytest.mark.parametrize("layout", ["time first", "two lengths", "no drops"])
def test_what_is_no_count_of_samples_is_not_taken_for_one(layout: str) -> None:
    def collate(samples: list[Any]) -> Any:
        x, y = default_collate(samples)
        if layout == "time first":
            return x[:, :2].T.contiguous()
        return (x[:-1], y) if layout == "two lengths" else {"x": x, "y": [y, {"again": y}]}

    balancer = loft.Balancer(15, transport=LocalWorld(1).transport(0))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in loft.DataLoader(DATA, balancer, collate_fn=collate):
            pass


@pytest.mark.parametrize(
    ("given", "error", "says"),
    [
        (16, PlanError, r"num_samples=16, and the sizes of step 0 are \[15\]"),
        (-1, PlanError, "num_samples=-1"),
        (2.0, ArgumentTypeError, "num_samples=2.0 must be a whole number"),
    ],
)
def test_a_count_that_cannot_be_is_refused(given: Any, error: Any, says: str) -> None:
    balancer = loft.Balancer(15, transport=LocalWorld(1).transport(0))
    next(iter(loft.DataLoader(DATA, balancer)))
    with pytest.raises(error, match=says):
        balancer.weigh(torch.tensor(1.0), given)


def test_a_count_of_a_batch_in_parts_is_refused() -> None:
    options = {"max_batch": 8, "micro_batches": True, "transport": LocalWorld(1).transport(0)}
    balancer = loft.Balancer(15, [15], **options)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="num_samples= is of a whole batch"):
        balancer.weigh(torch.tensor(1.0), 15)
