"""Sizes while ranks are in quarantine, and their way back."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import loft_hvd as loft
from loft_hvd.balance.controller import Controller
from loft_hvd.balance.interval import COLUMNS, COMPUTE, SIZE, Interval
from loft_hvd.balance.plan import Bounds, QuarantineSizes, Sizes
from loft_hvd.balance.policy import Policy, Proposal
from loft_hvd.codec import decode, encode
from loft_hvd.transport.local import LocalTransport, run_ranks
from tests.support.clusters import observe

SIZES = (16, 24, 8, 16)


def bounds(cap: int = 64, grain: int = 1) -> Bounds:
    return Bounds.of(4, floor=2, cap=cap, grain=grain)


@pytest.mark.parametrize("grain", [1, 4])
@pytest.mark.parametrize("held", [(1,), (2, 3), (1, 2, 3)])
def test_held_ranks_get_nothing_and_the_others_all_of_it(held: tuple[int, ...], grain: int) -> None:
    quarantine = QuarantineSizes()
    quarantine.hold(held)
    sizes = quarantine.next_sizes(SIZES, bounds(grain=grain))
    assert sizes is not None
    assert sum(sizes) == sum(SIZES)
    assert [rank for rank, size in enumerate(sizes) if size == 0] == list(held)
    assert all(size % grain == 0 for size in sizes)


def test_sizes_go_back_when_nobody_is_held_any_more() -> None:
    quarantine = QuarantineSizes()
    quarantine.hold([1])
    held = quarantine.next_sizes(SIZES, bounds())
    assert held is not None
    assert quarantine.next_sizes(held, bounds()) is None  # nothing to change
    quarantine.hold([])
    assert quarantine.is_active
    assert quarantine.next_sizes(held, bounds()) == SIZES
    assert not quarantine.is_active


def test_sizes_stay_where_the_others_cannot_take_more() -> None:
    quarantine = QuarantineSizes()
    quarantine.hold([1])
    assert quarantine.next_sizes(SIZES, bounds(cap=24)) is None
    quarantine.hold([])
    assert quarantine.next_sizes(SIZES, bounds(cap=24)) is None
    assert not quarantine.is_active


def test_rank_0_keeps_its_samples() -> None:
    quarantine = QuarantineSizes()
    quarantine.hold([0])
    assert not quarantine.is_active


def test_a_run_that_goes_on_gives_samples_back() -> None:
    quarantine = QuarantineSizes()
    quarantine.hold([1])
    held = quarantine.next_sizes(SIZES, bounds())
    assert held is not None
    later = decode(QuarantineSizes, encode(quarantine), what="quarantine")
    assert later.next_sizes(held, bounds()) == SIZES


def test_a_controller_plans_by_policy_again_after_a_quarantine() -> None:
    controller = Controller(64, 4, "loft")
    rows = np.zeros((4, len(COLUMNS)))
    rows[:, SIZE] = 16
    rows[:, COMPUTE] = 0.1
    planned = []
    for interval in range(6):
        step = 20 * (interval + 1)
        if interval == 1:
            controller.quarantine.hold([3])
        if interval == 3:
            controller.quarantine.hold([])
        rows[:, SIZE] = controller.plan.sizes
        observe(controller, rows, step=step - 1, step_s=0.1)
        controller.decide(step)
        planned.append(controller.plan.sizes)
    assert planned[1][3] == planned[2][3] == 0
    assert planned[3] == planned[0]
    assert all(sum(sizes) == 64 for sizes in planned)
    assert [made.plan_id for made in controller.history] == list(range(len(controller.history)))


class Wanting(Policy):
    """Wants the same sizes at every interval."""

    name = "wanting"

    def propose(self, interval: Interval, *, first_step: int) -> Proposal | None:
        return Proposal((19, 19, 18, 8), "always")


def plan_next(controller: Controller, *, step: int, held: list[int]) -> Sizes:
    """Return the sizes in force from ``step`` on."""
    controller.quarantine.hold(held)
    observe(controller, np.zeros((4, len(COLUMNS))), step=step - 1, step_s=0.1)
    controller.decide(step)
    return controller.plan.sizes


def test_a_rank_that_was_let_in_again_keeps_its_samples_where_sizes_are_few() -> None:
    controller = Controller(64, 4, Wanting(), max_sizes=2)
    assert plan_next(controller, step=20, held=[3]) == (22, 21, 21, 0)
    assert plan_next(controller, step=40, held=[]) == (16,) * 4
    assert plan_next(controller, step=60, held=[]) == (16,) * 4


def test_what_a_rank_gets_back_after_a_quarantine_is_within_a_cap_found_since() -> None:
    first = Controller(64, 4, Wanting())
    assert plan_next(first, step=20, held=[3]) == (22, 21, 21, 0)
    second = Controller(64, 4, Wanting(), max_batch=[None, None, None, 10])
    second.load_state_dict(first.state_dict())
    assert plan_next(second, step=40, held=[]) == (18, 18, 18, 10)


def test_a_rank_in_quarantine_trains_on_nothing_until_it_is_let_in_again() -> None:
    def train(end: LocalTransport) -> list[tuple[int, ...]]:
        balancer = loft.Balancer(64, "loft", interval=5, transport=end)
        data = torch.utils.data.TensorDataset(torch.randn(4096, 3))
        loader = loft.DataLoader(data, balancer)
        weight = torch.nn.Parameter(torch.zeros(64))
        optimizer = loft.DistributedOptimizer(
            torch.optim.SGD([weight], lr=0.1),
            rule=loft.TrimmedMean(f=1),
            balancer=balancer,
            diagnostics=loft.Suspicion(interval=2, patience=4),
            quarantine=loft.Quarantine(probation=25),
            transport=end,
        )
        handle = loft.attacks.attach(optimizer, loft.attacks.NaN(), ranks=[2])
        sizes = []
        for step, (_x,) in enumerate(loader):
            if optimizer.report().workers[2].in_quarantine_until:
                handle.remove()  # mended while it was away
            optimizer.zero_grad()
            row = torch.randn(64, generator=torch.Generator().manual_seed(10 * step + end.rank))
            (weight * row).sum().backward()
            optimizer.step()
            sizes.append(balancer.plan.sizes)
        return sizes

    found = run_ranks(4, train)
    assert all(sizes == found[0] for sizes in found)
    held = [sizes[2] == 0 for sizes in found[0]]
    assert any(held)
    assert not held[-1]
    assert all(sum(sizes) == 64 for sizes in found[0])
