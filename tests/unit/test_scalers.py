"""A ``GradScaler`` over several ranks: torch's recipe is exact, and one scale is one on all."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

import loft_hvd as loft
from loft_hvd.errors import MismatchError, UsageError
from loft_hvd.optimizer import replicas
from loft_hvd.pipeline import scalers
from loft_hvd.transport.agreement import check_agreement
from loft_hvd.transport.local import LocalTransport, LocalWorld, run_ranks
from tests.support.training import make_data, make_model, max_difference
from tests.support.worlds import environment
from tests.unit.test_attach import HorovodLike

MODEL = make_model()  # one for all: threads share torch's random numbers
Step = Callable[[Any, torch.nn.Module, torch.amp.GradScaler], None]


def plain(optimizer: Any, _: torch.nn.Module, scaler: torch.amp.GradScaler) -> None:
    scaler.step(optimizer)


def clipped(optimizer: Any, model: torch.nn.Module, scaler: torch.amp.GradScaler) -> None:
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    scaler.step(optimizer)


def horovods(optimizer: Any, model: torch.nn.Module, scaler: torch.amp.GradScaler) -> None:
    if not hasattr(optimizer, "synchronize"):  # in one process
        clipped(optimizer, model, scaler)
        return
    optimizer.synchronize()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    with optimizer.skip_synchronize():
        scaler.step(optimizer)


def train(
    transport: LocalTransport | None,
    take_step: Step,
    *,
    num_steps: int = 12,
    overflow_on: int | None = None,
    fused: bool = False,
    **options: Any,
) -> torch.nn.Module:
    """Train with a scaler over ranks of unequal batches, or in this process without a transport.

    The loss of rank ``overflow_on`` is infinite at step 3; in one process that is the whole loss.
    """
    model = copy.deepcopy(MODEL)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.01, fused=fused)
    if transport is None:
        balancer = loft.Balancer(12, transport=LocalWorld(1).transport(0))
    else:
        balancer = loft.Balancer(12, [7, 3, 2], transport=transport)
        named = model.named_parameters()
        optimizer = loft.DistributedOptimizer(
            optimizer, named, balancer=balancer, transport=transport
        )
    rank = 0 if transport is None else transport.rank
    settings = {"init_scale": 1024.0, "growth_interval": 4} | options
    scaler = torch.amp.GradScaler("cpu", **settings)
    for step, (x, y) in enumerate(loft.DataLoader(make_data(12 * num_steps), balancer, seed=3)):
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(x), y)
        if step == 3 and overflow_on is not None and (transport is None or rank == overflow_on):
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        take_step(optimizer, model, scaler)
        scaler.update()
    return model


@pytest.mark.parametrize("take_step", [plain, clipped, horovods])
@pytest.mark.parametrize("fused", [False, True])
def test_recipes_for_a_scaler_equal_one_process(take_step: Step, fused: bool) -> None:
    alone = train(None, take_step, fused=fused)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        models = run_ranks(3, lambda end: train(end, take_step, fused=fused))
    assert max(max_difference(model, alone) for model in models) < 1e-6
    assert max_difference(alone, MODEL) > 0.01


@pytest.mark.every(2)
@pytest.mark.parametrize("take_step", [plain, clipped, horovods])
def test_an_infinity_on_one_rank_skips_the_step_on_all(take_step: Step) -> None:
    alone = train(None, take_step, overflow_on=0)
    models = run_ranks(3, lambda end: train(end, take_step, overflow_on=2))
    assert max(max_difference(model, alone) for model in models) < 1e-6


def test_after_a_skipped_step_one_without_the_scaler_reduces_again() -> None:
    def work(transport: LocalTransport) -> float:
        weight = torch.nn.Parameter(torch.zeros(1))
        sgd = torch.optim.SGD([weight], lr=1.0)
        optimizer = loft.DistributedOptimizer(sgd, [("w", weight)], transport=transport)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        scaler.scale((weight * float("inf")).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        (weight * float(transport.rank)).sum().backward()
        optimizer.step()
        return float(weight.detach())

    assert run_ranks(3, work) == [-1.0] * 3


@pytest.mark.parametrize(
    ("other", "told"),
    [
        ({"init_scale": 512.0}, r"on ranks \[1\]; here on rank \d it is (1024.0|512.0)"),
        ({"enabled": False}, r"on ranks \[1\]; here on rank \d it is (1024.0|none)"),
    ],
)
@pytest.mark.parametrize("take_step", [plain, clipped, horovods])
def test_another_scale_ends_the_first_step_with_it(
    take_step: Step, other: dict[str, Any], told: str
) -> None:
    def work(transport: LocalTransport) -> None:
        own = other if transport.rank == 1 else {}
        what = "unscaling gradients: the loss scale of torch.amp.GradScaler differs"
        with pytest.raises(MismatchError, match=f"{what} {told}.*scaler.load_state_dict"):
            train(transport, take_step, num_steps=1, **own)

    run_ranks(3, work)


def test_scales_that_part_later_are_named_before_the_copies(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(replicas, "_FEWEST_STEPS", 5)
    monkeypatch.setattr(replicas, "_MOST_STEPS", 5)

    def work(transport: LocalTransport) -> None:
        own: dict[str, Any] = {"growth_interval": 2} if transport.rank == 1 else {}
        with pytest.raises(MismatchError, match=r"the loss scale of .* differs on ranks \[1\]"):
            train(transport, plain, **own)

    run_ranks(3, work)


def test_a_scaler_is_compared_now_and_then_and_not_where_copies_may_differ(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(scalers, "_EVERY", 3)
    compared: list[int] = []

    def count(*args: Any, **more: Any) -> None:
        compared.append(1)
        check_agreement(*args, **more)

    monkeypatch.setattr(scalers, "check_agreement", count)

    def work(transport: LocalTransport) -> torch.nn.Module:
        return train(transport, plain, num_steps=7)

    run_ranks(3, work)
    # With the first look at copies, and at calls 1, 4, 7, 10 and 13: step() calls unscale_().
    assert len(compared) == 3 * (1 + 5)
    compared.clear()
    with environment(LOFT_HVD_COPIES="ignore"):
        run_ranks(3, work)
    assert not compared


def test_attach_refuses_a_scaler_before_the_reduction() -> None:
    def work(transport: LocalTransport) -> None:
        weight = torch.nn.Parameter(torch.ones(1))
        optimizer = HorovodLike([weight], lr=1.0)
        loft.attach(optimizer, loft.Balancer(12, "uniform", transport=transport))
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0 / (1 + transport.rank))
        scaler.scale(weight.sum()).backward()
        with pytest.raises(UsageError, match=r"attach: torch.amp.GradScaler.*synchronize\(\)"):
            scaler.step(optimizer)
        optimizer.synchronize()
        with pytest.raises(MismatchError, match=r"loss scale of torch\.amp\.GradScaler differs"):
            scaler.step(optimizer)

    run_ranks(2, work)


def test_attach_refuses_gradients_that_are_clipped_before_the_reduction() -> None:
    def work(transport: LocalTransport) -> None:
        weight = torch.nn.Parameter(torch.ones(1))
        optimizer = HorovodLike([weight], lr=1.0)
        optimizer._parameter_names = {weight: "w"}
        loft.attach(optimizer, loft.Balancer(12, "uniform", transport=transport))
        for is_clipped in (False, True):
            optimizer.zero_grad(set_to_none=False)
            weight.sum().backward()
            if is_clipped:
                torch.nn.utils.clip_grad_value_([weight], 0.5)
                with pytest.raises(UsageError, match="parameter 'w' was changed between"):
                    optimizer.step()
            else:
                optimizer.step()

    run_ranks(2, work)
