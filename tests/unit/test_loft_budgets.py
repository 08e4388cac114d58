"""LOFT knows what ranks keep before it is measured, and says whose budget is worth enlarging."""

from __future__ import annotations

import re

import numpy as np
import pytest

import loft_hvd as loft
from loft_hvd.balance.controller import Controller
from loft_hvd.balance.interval import COLUMNS, COMPUTE, FETCH, LOCAL, REMOTE, SIZE, STALL, screen
from loft_hvd.balance.latency import Held, StepModel

LOCAL_S, REMOTE_S, COMPUTE_S = 1e-4, 4e-3, 1e-3
BATCH, WORLD = 120, 3


def measure(controller: Controller, local: np.ndarray, *, step: int) -> None:
    """Show an interval of a serial loader in which ``local`` samples were at hand."""
    sizes = np.array(controller.plan_at(step).sizes)
    local = np.minimum(local, sizes)
    rows = np.zeros((WORLD, len(COLUMNS)))
    rows[:, SIZE], rows[:, LOCAL], rows[:, REMOTE] = sizes, local, sizes - local
    rows[:, FETCH] = rows[:, STALL] = LOCAL_S * local + REMOTE_S * (sizes - local)
    rows[:, COMPUTE] = COMPUTE_S * sizes
    step_s = float((rows[:, FETCH] + rows[:, COMPUTE]).max())
    controller.observe(screen(rows, step=step, sizes=sizes.tolist(), step_s=step_s))
    controller.decide(step + 5)


def trained(policy: loft.Loft, local: tuple[int, ...], *, intervals: int = 4) -> Controller:
    controller = Controller(BATCH, WORLD, policy)
    for number in range(intervals):
        measure(controller, np.array(local), step=20 * (number + 1))
    return controller


def test_a_model_holds_at_least_what_ranks_are_known_to_keep() -> None:
    model = StepModel.build(3, hits=[10.0, np.inf, 5.0], hit_share=[1.0, 0.5, 1.0])
    holding = model.holding(np.array([30.0, 20.0, 0.0]))
    np.testing.assert_array_equal(holding.hits, [30.0, 20.0, 5.0])
    np.testing.assert_array_equal(holding.local(np.full(3, 40.0)), [30.0, 20.0, 5.0])


def test_what_a_loader_says_of_caches_is_known_before_it_is_measured() -> None:
    policy = loft.Loft()
    controller = trained(policy, (20, 5, 5))
    assert policy.fit is not None
    assert (policy.fit.model.hits < 25).all()
    policy.share_held(Held((0.5, 0.25, 0.25), 6000, 0.0))
    measure(controller, np.array([20, 5, 5]), step=100)
    np.testing.assert_allclose(policy.fit.model.hits, [60, 30, 30])


def test_what_was_said_of_another_world_is_left_out() -> None:
    policy = loft.Loft()
    policy.share_held(Held((0.5, 0.5), 6000, 0.0))
    trained(policy, (20, 5, 5))
    assert policy.fit is not None
    assert (policy.fit.model.hits < 25).all()
    assert not any("budget" in line for line in policy.explain())


def test_explain_says_what_a_larger_budget_would_save() -> None:
    """Rank 2 keeps a sixth of what it computes, the others all."""
    policy = loft.Loft()
    policy.share_held(Held((0.45, 0.45, 0.05), 6000, 2**20))
    controller = trained(policy, (54, 54, 6), intervals=8)
    (line,) = (each for each in policy.explain() if "budget" in each)
    found = re.search(
        r"rank (\d) keeps (\d+) of the (\d+) samples.* for (\d[\d,]*) samples, ([\d,.]+) MiB more "
        r"would make a step (\d+)% shorter",
        line,
    )
    assert found is not None, line
    rank, kept, size, num_more, size_mib, saved = (
        float(x.replace(",", "")) for x in found.groups()
    )
    assert (rank, kept) == (2, 6)
    assert size == controller.plan_at(10**6).sizes[2] or size > 6
    assert num_more == pytest.approx(size_mib)  # samples of one MiB
    # With all at hand the three ranks are equal: 40 samples a step each, of which it keeps 6.
    assert num_more == pytest.approx((40 - 6) / 120 * 6000, rel=0.1)
    sizes = np.array(policy._found[0])  # type: ignore[index]  # the best sizes known
    local = np.minimum(sizes, [54, 54, 6])
    now_s = (LOCAL_S * local + REMOTE_S * (sizes - local) + COMPUTE_S * sizes).max()
    then_s = (LOCAL_S + COMPUTE_S) * 40
    assert saved / 100 == pytest.approx(1 - then_s / now_s, abs=0.05)


def test_nobody_needs_a_larger_budget_who_keeps_all() -> None:
    policy = loft.Loft()
    policy.share_held(Held((0.4, 0.4, 0.4), 6000, 2**20))
    trained(policy, (48, 48, 48))
    assert not any("budget" in line for line in policy.explain())
