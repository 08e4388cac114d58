"""What a script has told an optimizer or a balancer holds in later worlds, or is missed aloud."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from torch import Tensor
from torch.utils.hooks import RemovableHandle

import loft_hvd as loft
from loft_hvd.balance.plan import scale_sizes
from loft_hvd.errors import UsageError
from loft_hvd.pipeline.buckets import Bucket
from loft_hvd.transport.local import LocalTransport, run_ranks
from tests.support.worlds import Paired, elastic_job

OVER = [None, "nodes"]


@pytest.fixture(autouse=True)
def elastic() -> Iterator[None]:
    with elastic_job():
        yield


def halve(bucket: Bucket, values: Tensor) -> None:
    values.mul_(0.5)


@pytest.mark.parametrize("over", OVER, ids=str)
def test_a_hook_from_before_the_first_world_runs_once_a_step_in_all_of_them(
    over: str | None,
) -> None:
    """Six ranks, eight, of which two join, six again; then the handles take it away."""
    ranks: dict[int, tuple[Paired, RemovableHandle]] = {}
    is_over = False

    def train(end: LocalTransport) -> list[float]:
        if end.rank not in ranks:
            rank = Paired(end, over)
            ranks[end.rank] = rank, rank.optimizer.register_outgoing_hook(halve)
        rank, handle = ranks[end.rank]
        if is_over:
            handle.remove()
        rank.begin_world(end)
        return [rank.gradient(8.0), rank.gradient(8.0)]

    for world_size in (6, 8, 6):
        assert run_ranks(world_size, train, ranks_per_node=2) == [[4.0, 4.0]] * world_size
    is_over = True
    assert run_ranks(6, train, ranks_per_node=2) == [[8.0, 8.0]] * 6


@pytest.mark.parametrize("over", OVER, ids=str)
def test_a_hook_that_every_world_registers_anew_runs_once_a_step(over: str | None) -> None:
    ranks: dict[int, Paired] = {}

    def train(end: LocalTransport) -> float:
        rank = ranks.get(end.rank) or ranks.setdefault(end.rank, Paired(end, over))
        rank.begin_world(end)
        rank.optimizer.register_outgoing_hook(halve)  # as the function of hvd.elastic.run does
        return rank.gradient(8.0)

    for world_size in (6, 8, 6):
        assert run_ranks(world_size, train, ranks_per_node=2) == [4.0] * world_size


def test_a_hook_may_take_itself_away() -> None:
    def train(end: LocalTransport) -> list[float]:
        rank = Paired(end, None)
        rank.begin_world(end)

        def halve_once(bucket: Bucket, values: Tensor) -> None:
            halve(bucket, values)
            handle.remove()

        handle = rank.optimizer.register_outgoing_hook(halve_once)
        rank.optimizer.register_outgoing_hook(halve)
        return [rank.gradient(8.0), rank.gradient(8.0)]

    assert run_ranks(3, train) == [[2.0, 4.0]] * 3


def test_an_attack_follows_the_rank_numbers_of_each_world() -> None:
    """Where the processes of ranks 0 and 1 change places, rank 1 still is the attacker."""
    processes: list[Paired] = []

    def make(end: LocalTransport) -> Paired:
        rank = Paired(end, None)
        loft.attacks.attach(rank.optimizer, loft.attacks.Scaled(10.0), ranks=[1])
        return rank

    processes += run_ranks(5, make)
    processes[:2] = processes[1::-1]

    def train(end: LocalTransport) -> float:
        rank = processes[end.rank]
        rank.begin_world(end)
        return rank.gradient([0.0, 1.0, 2.0, 3.0, 7.0][end.rank])

    # Rank 1 sends 10 instead of 1; the least and the greatest of the five are left out.
    assert run_ranks(5, train) == [4.0] * 5


def make_end_of_epoch(rank: Paired) -> tuple[int, ...] | None:
    """Return the sizes of a last batch of two samples, or None where it is skipped."""
    return scale_sizes(rank.balancer.plan.sizes, 2, min_ranks=rank.balancer.min_ranks)


def test_a_balancer_keeps_what_optimizers_of_its_world_need() -> None:
    def work(end: LocalTransport) -> tuple[int, object, float]:
        rank = Paired(end, None)
        rank.begin_world(end)
        return rank.balancer.min_ranks, make_end_of_epoch(rank), rank.gradient(2.0)

    assert run_ranks(5, work) == [(3, None, 2.0)] * 5


@pytest.mark.parametrize("num_worlds", [1, 2])
def test_an_optimizer_that_was_not_given_to_the_state_of_its_balancer_is_refused(
    num_worlds: int,
) -> None:
    says = rf"begun world {num_worlds}, .* still that of world 0: .* give both to the loft"

    def work(end: LocalTransport) -> float:
        rank = Paired(end, None)
        for _ in range(num_worlds):
            rank.balancer.begin_world()
        with pytest.raises(UsageError, match=says):
            rank.gradient(2.0)
        rank.balancer.begin_world()
        rank.optimizer.begin_world()
        return rank.gradient(2.0)

    assert run_ranks(5, work) == [2.0] * 5


def test_an_optimizer_that_is_made_within_a_world_takes_no_state() -> None:
    def work(end: LocalTransport) -> tuple[int, float]:
        rank = Paired(end, None)
        rank.balancer.begin_world()
        later = Paired(end, None, balancer=rank.balancer)
        return rank.balancer.min_ranks, later.gradient(2.0)

    assert run_ranks(5, work) == [(3, 2.0)] * 5


def test_a_balancer_that_was_not_given_to_the_state_of_its_optimizer_is_refused() -> None:
    ranks: dict[int, Paired] = {}

    def first(end: LocalTransport) -> None:
        ranks[end.rank] = Paired(end, None)
        ranks[end.rank].begin_world(end)

    run_ranks(6, first)
    refused: list[int] = []

    def later(end: LocalTransport) -> None:
        ranks[end.rank].moving.end = end
        with pytest.raises(UsageError, match=r"plans for 6 ranks, .* over 5: .* give both to"):
            ranks[end.rank].optimizer.begin_world()
        refused.append(end.rank)

    run_ranks(5, later)
    assert sorted(refused) == list(range(5))
