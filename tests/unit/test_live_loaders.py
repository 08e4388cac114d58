"""Plans that change while ranks train, with each way of loading, across breaks and restarts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import TensorDataset

import loft_hvd as loft
from loft_hvd.balance.batches import BatchQueue
from loft_hvd.balance.plan import Plan
from loft_hvd.errors import PlanError
from loft_hvd.transport.local import LocalTransport, run_ranks
from tests.support.live import Run

NUM_SAMPLES = 64 * 30
DATA = TensorDataset(torch.arange(NUM_SAMPLES))


def batches(kind: str, balancer: loft.Balancer, num_workers: int) -> tuple[Any, Any]:
    if kind == "loader":
        loader: Any = loft.DataLoader(DATA, balancer, num_workers=num_workers)
        return loader, loader
    sampler = loft.BatchSampler(DATA, balancer)
    return TorchDataLoader(DATA, batch_sampler=sampler, num_workers=num_workers), sampler


def first_uneven(sizes: list[tuple[int, ...]]) -> int:
    return next(step for step, of_step in enumerate(sizes) if of_step != (32, 32))


@pytest.mark.parametrize("kind", ["loader", "sampler"])
@pytest.mark.parametrize("after", [10, 20, 30])
def test_plans_come_when_they_should_and_samples_once_whatever_the_breaks(
    kind: str, after: int
) -> None:
    def work(transport: LocalTransport) -> tuple[list[tuple[int, ...]], list[list[int]]]:
        run = Run(transport)
        loader, batch_sampler = batches(kind, run.balancer, 0)
        epochs = []
        for epoch in range(90 // after):
            batch_sampler.set_epoch(epoch)
            seen: list[int] = []
            for (samples,) in loader:
                train = run.compute if kind == "loader" else run.step
                train(len(samples))
                seen += samples.tolist()
                if len(run.sizes) % after == 0:
                    break
            epochs.append(seen)
        return run.sizes, epochs

    (sizes, mine), (others_sizes, theirs) = run_ranks(2, work)
    assert sizes == others_sizes
    assert sizes[-1] == (48, 16)
    assert first_uneven(sizes) < 2 * 20 + 10, "plans wait for two intervals and their own arrival"
    for epoch in zip(mine, theirs, strict=True):
        assert len(set().union(*epoch)) == sum(map(len, epoch)) == 64 * after


def test_plans_change_in_order_although_loader_processes_draw_ahead() -> None:
    def work(transport: LocalTransport) -> list[tuple[int, ...]]:
        run = Run(transport)
        loader, _ = batches("sampler", run.balancer, 2)
        for _ in range(4):
            for i, (samples,) in enumerate(loader):
                run.step(len(samples))
                if i == 19:
                    break
        return run.sizes

    sizes, others_sizes = run_ranks(2, work)
    assert sizes == others_sizes
    assert sizes[-1] == (48, 16)


def train_in_turn(run: Run, kind: str, loaders: list[tuple[Any, Any]], until: list[int]) -> None:
    """Train on each loader up to the end of a step, epoch after epoch."""
    for (loader, batch_sampler), last in zip(loaders, until, strict=True):
        for _, (samples,) in epochs(loader, batch_sampler, 0):
            train = run.compute if kind == "loader" else run.step
            train(len(samples))
            if len(run.sizes) == last:
                break


@pytest.mark.parametrize("kind", ["loader", "sampler"])
def test_a_loader_that_draws_deeper_may_begin_while_a_plan_is_on_its_way(kind: str) -> None:
    def work(transport: LocalTransport) -> list[tuple[int, ...]]:
        run = Run(transport)
        loaders = [batches(kind, run.balancer, num_workers) for num_workers in (0, 2)]
        if kind == "sampler":  # nobody knows how deep torch's own loader draws
            run.balancer.expect_depth(2 * 2 + 1)
        # At step 40 rank 0 decides on a plan, which comes two steps later.
        train_in_turn(run, kind, loaders, [40, 60])
        return run.sizes

    sizes, others_sizes = run_ranks(2, work)
    assert sizes == others_sizes
    assert sizes[-1] == (48, 16)


@pytest.mark.parametrize("kind", ["loader", "sampler"])
def test_a_deeper_loader_that_nobody_knew_of_ends_the_job_with_the_way_out(kind: str) -> None:
    def work(transport: LocalTransport) -> None:
        run = Run(transport)
        train_in_turn(run, kind, [batches(kind, run.balancer, 0)], [40])
        train_in_turn(run, kind, [batches(kind, run.balancer, 2)], [60])

    way_out = r"Make every loft.DataLoader before .* balancer.expect_depth\(5\)"
    with pytest.raises(PlanError, match=f"starts at step 44, but steps up to 46 .*{way_out}"):
        run_ranks(2, work)


def test_how_deep_loaders_draw_stays_known_when_a_state_is_loaded() -> None:
    queue = BatchQueue()
    queue.expect_depth(9)
    queue.restart(next_step=5)
    assert queue.may_be_drawn == 4 + 9


def test_a_loader_of_the_script_s_own_follows_the_plan_in_force() -> None:
    def work(transport: LocalTransport) -> list[tuple[int, ...]]:
        run = Run(transport)
        for _ in range(80):
            run.step()
        assert run.balancer.plan.sizes == (48, 16)
        return run.sizes

    sizes, others_sizes = run_ranks(2, work)
    assert sizes == others_sizes
    assert (first_uneven(sizes), sizes[-1]) == (44, (48, 16))


@pytest.mark.parametrize("saved_at", [19, 20, 21, 39, 40, 41, 42, 43, 44, 50])
def test_a_run_that_was_saved_at_any_step_goes_on_planning(saved_at: int) -> None:
    def begin(transport: LocalTransport) -> str:
        run = Run(transport)
        for _ in range(saved_at):
            run.step()
        return json.dumps(run.balancer.state_dict())

    def go_on(transport: LocalTransport) -> list[tuple[int, ...]]:
        run = Run(transport, json.loads(state))
        assert run.balancer.next_step == saved_at
        for _ in range(70):
            run.step()
        assert run.balancer.next_step == saved_at + 70
        assert "not the planned size" not in run.balancer.explain()
        return run.sizes

    state = run_ranks(2, begin)[0]
    sizes, others_sizes = run_ranks(2, go_on)
    assert sizes == others_sizes
    assert sizes[-1] == (48, 16)
    assert sizes[0] == ((48, 16) if saved_at >= 44 else (32, 32))


@pytest.mark.parametrize("later", [[[1, 44, 40, 24]], [[1, 44, 48, 16], [2, 60, 40, 24]]])
def test_a_run_goes_on_planning_from_the_state_of_any_rank(later: list[list[int]]) -> None:
    def go_on(transport: LocalTransport) -> tuple[list[tuple[int, ...]], list[Plan]]:
        run = Run(transport, json.loads(json.dumps(state)))
        for _ in range(70):
            run.step()
        if transport.rank == 0:
            assert [made.plan for made in run.balancer._live.decisions()] == run.balancer.history
        return run.sizes, run.balancer.history

    state = run_ranks(2, lambda transport: Run(transport).balancer.state_dict())[1]
    state |= {"plans": [[0, 0, 32, 32], *later], "num_steps": 61, "next_step": 61}
    (sizes, history), others = run_ranks(2, go_on)
    assert (sizes, history) == others
    assert sizes[0] == (40, 24)
    assert sizes[-1] == (48, 16)


def test_a_state_of_any_rank_is_read_after_a_plan_that_was_sent_again() -> None:
    state: dict[str, Any] | None = None

    def train(transport: LocalTransport) -> tuple[dict[str, Any], int]:
        run = Run(transport, state)
        for _ in range(41):  # at 40 rank 0 decides on a plan, which has not come by 41
            run.step()
        return json.loads(json.dumps(run.balancer.state_dict())), len(run.balancer.history)

    num_plans = []
    for saved_by in (0, 1, 1):
        ranks = run_ranks(2, train)
        state = ranks[saved_by][0]
        num_plans.append([num for _, num in ranks])
    assert num_plans == [[1, 1], [2, 2], [2, 2]]


@pytest.mark.parametrize("kind", ["loader", "sampler"])
def test_a_resumed_loader_goes_on_at_the_step_of_its_plan(kind: str) -> None:
    def work(transport: LocalTransport) -> list[int]:
        seen: list[int] = []
        state: dict[str, Any] | None = None
        for until in (45, 90):  # the plan comes into force at 44
            run = Run(transport, None if state is None else state["balancer"])
            loader, batch_sampler = batches(kind, run.balancer, 0)
            if state is not None:
                batch_sampler.load_state_dict(state["data"])
            epoch = 0 if state is None else state["data"]["epoch"]
            for i, (samples,) in epochs(loader, batch_sampler, epoch):
                train = run.compute if kind == "loader" else run.step
                train(len(samples))
                seen += samples.tolist()
                num_trained = i
                if run.balancer.next_step == until:
                    break
            own = {} if kind == "loader" else {"num_trained": num_trained}
            state = {
                "balancer": json.loads(json.dumps(run.balancer.state_dict())),
                "data": batch_sampler.state_dict(**own),
            }
            assert run.sizes[-1] == (48, 16)
        assert set(run.sizes) == {(48, 16)}
        return seen

    mine, theirs = run_ranks(2, work)
    assert sorted(mine + theirs) == sorted(3 * list(range(NUM_SAMPLES)))


def epochs(loader: Any, batch_sampler: Any, epoch: int) -> Iterator[tuple[int, Any]]:
    """Yield batches with their number in the iteration, from 1, epoch after epoch."""
    while True:
        batch_sampler.set_epoch(epoch)
        yield from enumerate(loader, 1)
        epoch += 1


def test_the_dummy_batch_of_a_small_last_batch_is_as_large_as_can_be() -> None:
    def work(transport: LocalTransport) -> list[int]:
        balancer = loft.Balancer(16, [16, 0], min_batch=8, transport=transport)
        sampler = loft.BatchSampler(17, balancer)
        lengths = []
        for indices in sampler:
            with balancer.step(len(indices)):
                balancer.take_step()
            balancer.step_ended()
            lengths.append(len(indices))
        return lengths

    assert run_ranks(2, work) == [[16, 1], [8, 1]]
