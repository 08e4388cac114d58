"""A rank that lies about its times through the exchange itself: what it can cost, and what not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

import loft_hvd as loft
from loft_hvd.balance.batches import BatchQueue
from loft_hvd.balance.interval import SUM, SUMS, Head
from loft_hvd.balance.plan import Plan, StepSizes
from loft_hvd.errors import MismatchError
from loft_hvd.transport import waits
from loft_hvd.transport.base import Work
from loft_hvd.transport.local import LocalTransport, run_ranks
from tests.support.clock import Clock

Sums = npt.NDArray[np.float64]
Lie = Callable[[Sums, int], Sums]  # sums in the order of SUMS, number of the interval

NUM_INTERVALS, INTERVAL = 24, 6
EQUAL_S = 0.64


def scaled(factor: Callable[[int], float], **more: float) -> Lie:
    def lie(sums: Sums, number: int) -> Sums:
        for name in ("compute_s", "typical_compute_s"):
            sums[SUM[name]] *= factor(number)
        for name in ("busy_s2", "compute_spread_s2"):
            sums[SUM[name]] *= factor(number) ** 2
        for name, value in more.items():
            sums[SUM[name]] = value
        return sums

    return lie


def constant(sums: Sums, number: int) -> Sums:
    sums[SUM["compute_s"]] = sums[SUM["typical_compute_s"]] = 0.05 * sums[SUM["steps"]]
    return sums


LIES: dict[str, Lie] = {
    "half": scaled(lambda _: 0.5),
    "double": scaled(lambda _: 2.0),
    "constant": constant,
    "drifting": scaled(lambda number: 0.93**number),
    "a quarter and a pause": scaled(lambda _: 0.25, paused_s=1e6),
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


HEADS: dict[str, tuple[str, float]] = {  # a field of a report's head, and what is said
    "drawn_ahead nan": ("drawn_ahead", float("nan")),
    "drawn_ahead inf": ("drawn_ahead", float("inf")),
    "drawn_ahead -inf": ("drawn_ahead", float("-inf")),
    "drawn_ahead 1e300": ("drawn_ahead", 1e300),
    "drawn_ahead 1e7": ("drawn_ahead", 1e7),
    "drawn_ahead -7": ("drawn_ahead", -7.0),
    "next_interval nan": ("next_interval", float("nan")),
}


def honest(sums: Sums, number: int) -> Sums:
    return sums


class Lying:
    """One rank's end of a world, which alters the reports that the rank sends.

    Args:
        end: the true one.
        lie: what it makes of the rank's sums.
        head: field and value in the head of its reports, or None for the true ones.
    """

    def __init__(self, end: LocalTransport, lie: Lie, head: tuple[str, float] | None) -> None:
        self._end, self._lie, self._head = end, lie, head
        self._num_told = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._end, name)

    def allgather(self, send: Tensor, recv: Tensor, *, name: str) -> Work:
        return self._end.allgather(self._told(send, name), recv, name=name)

    def _told(self, send: Tensor, name: str) -> Tensor:
        if not name.endswith(".times"):
            return send
        row, first = send.numpy().copy(), len(Head._fields)
        row[first : first + len(SUMS)] = self._lie(row[first : first + len(SUMS)], self._num_told)
        if self._head is not None:
            row[Head._fields.index(self._head[0])] = self._head[1]
        self._num_told += 1
        return torch.from_numpy(row)


def train(
    lie: Lie, *, head: tuple[str, float] | None = None, slow: int | None = None
) -> tuple[Sums, str, Plan]:
    """Let rank 1 of four equal ranks lie.

    Args:
        lie: what rank 1 makes of its sums.
        head: field and value in the head of rank 1's reports, or None for the true ones.
        slow: a rank that takes twice as long for a sample.

    Returns:
        Seconds of a step in each interval, rank 0's words, and the newest plan.
    """

    def work(transport: LocalTransport) -> tuple[Sums, str, Plan]:
        clock = Clock()
        sample_s = np.array([0.02 if rank == slow else 0.01 for rank in range(4)])
        end: Any = Lying(transport, lie, head) if transport.rank == 1 else transport
        balancer = loft.Balancer(256, "loft", interval=INTERVAL, transport=end, clock=clock)
        steps = []
        for step in range(NUM_INTERVALS * INTERVAL):
            plan = balancer.plan_at(step)
            mine = plan.sizes[transport.rank]
            sizes = StepSizes(plan.plan_id, step, plan.sizes)
            balancer.begin_batch(sizes, fetch_s=0.0, stall_s=0.0, local=mine, remote=0)
            balancer.take_step()
            own_s = float(sample_s[transport.rank] * mine)
            clock.now += own_s
            balancer.gradient_arrived(blocked_s=0.0)
            balancer.computing_ended()
            steps.append(float(np.max(sample_s * plan.sizes)))
            clock.now += steps[-1] - own_s
            waits.add(steps[-1] - own_s)
            balancer.step_ended()
        step_s = np.array(steps).reshape(NUM_INTERVALS, INTERVAL).mean(axis=1)
        return step_s, balancer.explain(), balancer.plan

    return run_ranks(4, work)[0]


@pytest.mark.parametrize("name", LIES)
def test_a_lie_costs_an_interval_a_try_and_tries_become_rare(name: str) -> None:
    step_s, text, _ = train(LIES[name])
    is_worse = step_s > 1.02 * EQUAL_S
    assert step_s.max() <= 2 * EQUAL_S + 1e-9
    assert is_worse.sum() <= 6, step_s
    assert not is_worse[-4:].any(), step_s
    if name in IMPOSSIBLE:
        assert not is_worse.any()
        assert f"reports discarded ({IMPOSSIBLE[name]})" in text


@pytest.mark.parametrize("name", HEADS)
def test_a_lie_in_the_head_of_a_report_discards_it_and_the_others_are_planned_for(
    name: str,
) -> None:
    step_s, text, plan = train(honest, head=HEADS[name], slow=3)
    assert "rank 1: " in text
    assert "reports discarded (" in text
    assert 0 < plan.first_step < NUM_INTERVALS * INTERVAL
    assert plan.sizes[3] < 0.75 * plan.sizes[0]
    assert step_s[-4:].max() < 0.85 * step_s[0]


@pytest.mark.parametrize("field", ["num_steps", "plan_id"])
def test_a_step_or_plan_that_is_no_number_ends_training_and_names_the_rank(field: str) -> None:
    with pytest.raises(MismatchError, match=r"rank 1 is at step .*nan"):
        train(honest, head=(field, float("nan")))


def test_a_batch_in_other_numbers_of_passes_leaves_one_trail() -> None:
    queues = [BatchQueue(), BatchQueue()]
    for number, queue in enumerate(queues):
        for step in range(3):
            queue.begin(StepSizes(0, step, (8, 16), 77))
            for _ in range(1 + number):
                queue.take()
            queue.step_ended()
    assert queues[0].trail == queues[1].trail != 0


@pytest.mark.parametrize(
    "other", [(1, 5, (8, 16), 77), (0, 6, (8, 16), 77), (0, 5, (16, 8), 77), (0, 5, (8, 16), 78)]
)
def test_another_plan_step_sizes_or_samples_leave_another_trail(
    other: tuple[int, int, tuple[int, int], int],
) -> None:
    queues = [BatchQueue(), BatchQueue()]
    for queue, taken in zip(queues, ((0, 5, (8, 16), 77), other), strict=True):
        queue.begin(StepSizes(*taken))
        queue.take()
    assert queues[0].trail != queues[1].trail
