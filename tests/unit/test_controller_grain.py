"""Adaptive plans with a grain and tight limits: always legal, and never the end of training."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from loft_hvd.balance.controller import Controller
from loft_hvd.balance.interval import COLUMNS, COMPUTE, LOCAL, SIZE, Interval
from loft_hvd.balance.policy import Policy, Proposal
from loft_hvd.errors import PlanError
from tests.support.clusters import observe


def go_through(
    controller: Controller, seconds_per_sample: npt.NDArray[np.float64], *, seed: int
) -> None:
    """Let a controller plan for ranks that only compute; every plan must be legal."""
    rng = np.random.default_rng(seed)
    bounds, total = controller.task.bounds, controller.task.global_batch_size
    for number in range(20):
        sizes = np.array(controller.plan.sizes)
        assert sizes.sum() == total
        assert (sizes <= bounds.cap).all()
        assert (sizes >= bounds.floor).all()
        assert (sizes % bounds.grain != 0).sum() <= 1
        rows = np.zeros((len(sizes), len(COLUMNS)))
        rows[:, SIZE] = rows[:, LOCAL] = sizes
        rows[:, COMPUTE] = sizes * seconds_per_sample * rng.normal(1, 0.03, len(sizes))
        observe(controller, rows, step=20 * number + 19, step_s=float(rows[:, COMPUTE].max()))
        controller.decide(20 * number + 20)
        assert "no new plan" not in controller.explain(), controller.explain()


@pytest.mark.parametrize(
    ("total", "slowdown", "caps"),
    [
        (128, (2, 1), [72, 71]),
        (256, (2, 1, 1, 1), 70),
        (256, (1, 1, 1, 12), None),
        (100, (2, 1, 1, 1), [None, 30, 30, 30]),
    ],
)
def test_a_rank_that_stays_slowest_is_relieved_by_whole_grains(
    total: int, slowdown: tuple[int, ...], caps: int | list[int | None] | None
) -> None:
    controller = Controller(total, len(slowdown), grain=8, max_batch=caps)
    go_through(controller, np.array(slowdown) * 1e-3, seed=0)


@pytest.mark.parametrize("seed", range(14))
def test_plans_are_legal_with_any_grain_and_caps(seed: int) -> None:
    rng = np.random.default_rng(seed)
    world_size, grain = int(rng.integers(2, 9)), int(rng.choice([2, 3, 8]))
    total = int(rng.integers(grain * world_size, 8 * grain * world_size))
    share = total // world_size // grain * grain + grain
    room = rng.integers(0, 2 * grain, world_size)
    caps = [int(share + extra) if extra % 3 else None for extra in room]
    controller = Controller(total, world_size, grain=grain, min_batch=1, max_batch=caps)
    go_through(controller, rng.uniform(1e-3, 6e-3, world_size), seed=seed)


class Helpless(Policy):
    """A policy that finds no legal sizes."""

    name = "helpless"

    def propose(self, interval: Interval, *, first_step: int) -> Proposal | None:
        raise PlanError("caps [3, 3] hold 6 samples")


def test_a_policy_that_finds_no_sizes_leaves_the_plan_and_says_so() -> None:
    controller = Controller(8, 2, Helpless())
    rows = np.zeros((2, len(COLUMNS)))
    rows[:, [SIZE, LOCAL]] = 4.0
    rows[:, COMPUTE] = 1.0
    observe(controller, rows, step=19, step_s=1.0)
    assert controller.decide(20) is None
    assert controller.plan.sizes == (4, 4)
    assert "no new plan at step 20, sizes stay: caps [3, 3]" in controller.explain()
