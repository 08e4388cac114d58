"""A rank that lies about its times through the exchange itself: what it can cost, and what not."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest

import loft_hvd as loft
from loft_hvd.balance.explain import TIME_FIELDS
from loft_hvd.balance.plan import StepSizes
from loft_hvd.transport.local import LocalTransport, run_ranks

Sums = npt.NDArray[np.float64]
Lie = Callable[[Sums, int], Sums]  # sums in the order of TIME_FIELDS, number of the interval

COMPUTE, SQUARES, PAUSED, STEPS = (
    TIME_FIELDS.index(name) for name in ("compute_s", "busy_s2", "paused_s", "steps")
)
NUM_INTERVALS, INTERVAL = 24, 6
EQUAL_S = 0.64


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def scaled(factor: Callable[[int], float], **more: float) -> Lie:
    def lie(sums: Sums, number: int) -> Sums:
        sums[COMPUTE] *= factor(number)
        sums[SQUARES] *= factor(number) ** 2
        for name, value in more.items():
            sums[TIME_FIELDS.index(name)] = value
        return sums

    return lie


def constant(sums: Sums, number: int) -> Sums:
    sums[COMPUTE] = 0.05 * sums[STEPS]
    return sums


LIES: dict[str, Lie] = {
    "half": scaled(lambda _: 0.5),
    "double": scaled(lambda _: 2.0),
    "constant": constant,
    "drifting": scaled(lambda number: 0.93**number),
    "a quarter and a pause": scaled(lambda _: 0.25, paused_s=1e6),
    "a quarter and a wait": scaled(lambda _: 0.25, paused_s=1e6, held_s=1e6),
    "by turns": scaled(lambda number: 100.0 if number % 4 == 0 else 0.25),
    "not a number": scaled(lambda _: float("nan")),
    "negative": scaled(lambda _: -1.0),
    "no number of steps": scaled(lambda _: 0.25, steps=float("nan")),
}
IMPOSSIBLE = {
    "not a number": "not finite",
    "negative": "negative",
    "no number of steps": "not finite",
}


def train(lie: Lie) -> tuple[Sums, str]:
    """Let rank 1 of four equal ranks lie; returns the step of each interval, in seconds."""

    def work(transport: LocalTransport) -> tuple[Sums, str]:
        clock = Clock()
        balancer = loft.Balancer(256, "loft", interval=INTERVAL, transport=transport, clock=clock)
        if transport.rank == 1:
            timer = balancer._loop.timer
            honest = timer.take
            timer.take = lambda: lie(honest(), balancer._loop.num_steps // INTERVAL)  # type: ignore[method-assign] # the lie
        steps = []
        for step in range(NUM_INTERVALS * INTERVAL):
            plan = balancer.plan_at(step)
            mine = plan.sizes[transport.rank]
            sizes = StepSizes(plan.plan_id, step, plan.sizes)
            balancer.begin_batch(sizes, fetch_s=0.0, stall_s=0.0, local=mine, remote=0)
            balancer.take_step()
            clock.now += 0.01 * mine
            balancer.gradient_arrived(blocked_s=0.0)
            balancer.computing_ended()
            steps.append(0.01 * max(plan.sizes))
            clock.now += steps[-1] - 0.01 * mine
            balancer.step_ended(waited_s=steps[-1] - 0.01 * mine)
        return np.array(steps).reshape(NUM_INTERVALS, INTERVAL).mean(axis=1), balancer.explain()

    return run_ranks(4, work)[0]


@pytest.mark.parametrize("name", LIES)
def test_a_lie_costs_an_interval_a_try_and_tries_become_rare(name: str) -> None:
    step_s, text = train(LIES[name])
    is_worse = step_s > 1.02 * EQUAL_S
    assert step_s.max() <= 2 * EQUAL_S + 1e-9
    assert is_worse.sum() <= 6, step_s
    assert not is_worse[-4:].any(), step_s
    if name in IMPOSSIBLE:
        assert not is_worse.any()
        assert f"reports discarded ({IMPOSSIBLE[name]})" in text
