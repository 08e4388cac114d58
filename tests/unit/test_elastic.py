"""Optimizer, balancer and elastic state when the number of ranks changes under them."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import TensorDataset
from torch.utils.hooks import RemovableHandle

import loft_hvd as loft
from loft_hvd.balance.plan import scale_sizes
from loft_hvd.errors import ArgumentError, MismatchError, PlanError, UsageError
from loft_hvd.pipeline.buckets import Bucket
from loft_hvd.transport.local import LocalTransport, run_ranks
from tests.support.worlds import Moving, Paired, elastic_job


class Rank:
    """What one rank holds: a parameter, its optimizer and balancer."""

    def __init__(self, end: LocalTransport) -> None:
        self.moving = Moving(end)
        self.weight = torch.nn.Parameter(torch.zeros(5))
        self.balancer = loft.Balancer(12, policy="uniform", transport=self.moving)
        self.optimizer = loft.DistributedOptimizer(
            torch.optim.SGD([self.weight], lr=1.0),
            [("weight", self.weight)],
            rule=loft.Mean(reproducible=True),
            balancer=self.balancer,
            transport=self.moving,
        )

    def step(self, value: float) -> Tensor:
        self.optimizer.zero_grad()
        with self.balancer.step(self.balancer.local_batch_size):
            (self.weight * value).sum().backward()
            self.optimizer.step()
        return self.weight.detach().clone()


def test_a_smaller_and_a_larger_world_reduce_over_the_ranks_there_are() -> None:
    ranks: dict[int, Rank] = {}

    def first(end: LocalTransport) -> Tensor:
        ranks[end.rank] = Rank(end)
        return ranks[end.rank].step(float(end.rank))

    assert [row.tolist() for row in run_ranks(3, first)] == [[-1.0] * 5] * 3

    def later(end: LocalTransport) -> Tensor:
        rank = ranks.get(end.rank)
        if rank is None:
            rank = Rank(end)  # joins: it agrees with the others here
        else:
            rank.moving.end = end
            rank.balancer.begin_world()
            rank.optimizer.begin_world()
        with torch.no_grad():  # the state that all ranks take from rank 0
            rank.weight.zero_()
        assert rank.balancer.local_batch_size == 12 // end.world_size
        before = rank.weight.detach().clone()
        return rank.step(float(end.rank)) - before

    assert [row.tolist() for row in run_ranks(2, later)] == [[-0.5] * 5] * 2
    assert [row.tolist() for row in run_ranks(4, later)] == [[-1.5] * 5] * 4


def test_a_world_that_changes_unnoticed_is_refused() -> None:
    ranks: dict[int, Rank] = {}

    def first(end: LocalTransport) -> None:
        ranks[end.rank] = Rank(end)

    run_ranks(3, first)

    def later(end: LocalTransport) -> None:
        ranks[end.rank].moving.end = end
        ranks[end.rank].step(1.0)

    with pytest.raises(UsageError, match=r"from 3 to 2 ranks .* loft\.elastic\.State"):
        run_ranks(2, later)


@pytest.fixture
def elastic() -> Iterator[None]:
    with elastic_job():
        yield


@pytest.mark.usefixtures("elastic")
def test_nodes_are_found_anew_while_a_rank_that_joins_still_makes_its_optimizer() -> None:
    """Three nodes of 2 ranks, five of 2, three of 1: TrimmedMean(f=1) over nodes' means."""
    ranks: dict[int, Paired] = {}

    def train(end: LocalTransport) -> tuple[float, int]:
        rank = ranks.get(end.rank) or ranks.setdefault(end.rank, Paired(end))
        rank.begin_world(end)
        return rank.gradient(4.0 * end.rank**2), rank.balancer.min_ranks

    # The means of pairs are 2, 26, 82, 170, 290.
    assert run_ranks(6, train, ranks_per_node=2) == [(26.0, 5)] * 6
    found = [
        (round(gradient, 4), least) for gradient, least in run_ranks(10, train, ranks_per_node=2)
    ]
    assert found == [(round((26 + 82 + 170) / 3, 4), 5)] * 10
    assert run_ranks(3, train, ranks_per_node=1) == [(4.0, 3)] * 3


@pytest.mark.usefixtures("elastic")
@pytest.mark.parametrize(
    ("over", "world_size", "per_node", "says"),
    [
        ("nodes", 4, 2, r"f counts groups, and there are 2 of 2 ranks each"),
        ([[0, 1], [2, 3], [4, 5]], 5, 1, r'from 0 to 4 once; over="nodes" follows the ranks there'),
        ("nodes", 5, 2, r"\[2, 2, 1\].* start as many ranks on every node \(elastic"),
    ],
)
def test_groups_that_do_not_fit_the_new_world_are_refused_on_every_rank(
    over: Any, world_size: int, per_node: int, says: str
) -> None:
    ranks: dict[int, Paired] = {}

    def first(end: LocalTransport) -> None:
        ranks[end.rank] = Paired(end, over)
        ranks[end.rank].begin_world(end)

    run_ranks(6, first, ranks_per_node=2)
    refused: list[int] = []

    def later(end: LocalTransport) -> None:
        with pytest.raises(ArgumentError, match=says):
            ranks[end.rank].begin_world(end)
        refused.append(end.rank)

    run_ranks(world_size, later, ranks_per_node=per_node)
    assert sorted(refused) == list(range(world_size))


@pytest.mark.usefixtures("elastic")
def test_groups_of_an_elastic_job_take_a_state_that_begins_its_worlds() -> None:
    def work(end: LocalTransport) -> None:
        rank = Paired(end)
        with pytest.raises(UsageError, match=r"over= in an elastic job: .* loft\.elastic\.State"):
            rank.gradient(1.0)

    run_ranks(6, work, ranks_per_node=2)


def test_a_list_of_sizes_does_not_fit_another_world() -> None:
    balancers: dict[int, tuple[Moving, loft.Balancer]] = {}

    def first(end: LocalTransport) -> None:
        moving = Moving(end)
        balancers[end.rank] = moving, loft.Balancer(12, policy=[6, 3, 3], transport=moving)

    run_ranks(3, first)

    def later(end: LocalTransport) -> None:
        moving, balancer = balancers[end.rank]
        moving.end = end
        balancer.begin_world()

    with pytest.raises(PlanError, match="world_size=2"):
        run_ranks(2, later)


@pytest.mark.usefixtures("elastic")
def test_ranks_that_join_with_other_options_are_named() -> None:
    def work(end: LocalTransport) -> None:
        balancer = loft.Balancer(24 if end.rank == 2 else 12, policy="uniform", transport=end)
        balancer.begin_world()

    with pytest.raises(MismatchError, match=r"global_batch_size differs on ranks \[2\]"):
        run_ranks(3, work)


@pytest.mark.usefixtures("elastic")
@pytest.mark.parametrize(
    ("on_resize", "totals"), [("keep_global", [12, 12, 12]), ("keep_per_rank", [12, 8, 20])]
)
def test_a_resize_keeps_the_global_batch_or_each_ranks_share(
    on_resize: str, totals: list[int]
) -> None:
    """From 3 ranks to 2 to 5; those that join are given the same arguments."""
    balancers: dict[int, tuple[Moving, loft.Balancer]] = {}

    def begin(end: LocalTransport) -> tuple[int, int]:
        if end.rank not in balancers:
            moving = Moving(end)
            made = loft.Balancer(12, policy="uniform", on_resize=on_resize, transport=moving)
            balancers[end.rank] = moving, made
        else:
            balancers[end.rank][0].end = end
        balancer = balancers[end.rank][1]
        balancer.begin_world()
        return balancer.global_batch_size, sum(balancer.plan.sizes)

    found = [run_ranks(world_size, begin) for world_size in (3, 2, 5)]
    assert found == [[(total, total)] * n for total, n in zip(totals, (3, 2, 5), strict=True)]


@pytest.mark.usefixtures("elastic")
@pytest.mark.parametrize("on_resize", ["keep_global", "keep_per_rank"])
def test_every_sample_is_trained_once_though_the_world_changes_twice_in_an_epoch(
    on_resize: str,
) -> None:
    """Three ranks take 4 steps, two go on for 5, five end the epoch."""
    ranks: dict[int, tuple[Moving, loft.Balancer, loft.DataLoader]] = {}
    states: list[Any] = []
    held: list[int] = []
    totals: list[int] = []

    def go_on(end: LocalTransport, num_steps: int) -> tuple[list[int], Any]:
        if end.rank not in ranks:
            moving = Moving(end)
            made = loft.Balancer(12, "uniform", on_resize=on_resize, transport=moving)
            loader = loft.DataLoader(TensorDataset(torch.arange(203)), made, seed=4)
            ranks[end.rank] = moving, made, loader
        moving, balancer, loader = ranks[end.rank]
        moving.end = end
        balancer.begin_world()
        loader.set_epoch(2)
        if states:
            loader.load_state_dict(states[-1])
        mine: list[int] = []
        for number, (x,) in enumerate(loader, start=1):
            balancer.take_step()
            balancer.step_ended()
            mine += [] if loader.is_padding else x.tolist()
            if number == num_steps:
                break
        if end.rank == 0:
            totals.append(balancer.global_batch_size)
        return mine, loader.state_dict()

    for world_size, num_steps in ((3, 4), (2, 5), (5, 999)):
        found = run_ranks(world_size, partial(go_on, num_steps=num_steps))
        after = [state for _, state in found]
        assert all(state == after[0] for state in after)
        states.append(after[0])
        held += [sample for mine, _ in found for sample in mine]
    assert sorted(held) == list(range(203))
    assert totals == ([12, 12, 12] if on_resize == "keep_global" else [12, 8, 20])


# What a script has told an optimizer or a balancer holds in later worlds, or is missed aloud.

OVER = [None, "nodes"]


def halve(bucket: Bucket, values: Tensor) -> None:
    values.mul_(0.5)


@pytest.mark.usefixtures("elastic")
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


@pytest.mark.usefixtures("elastic")
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


@pytest.mark.usefixtures("elastic")
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


@pytest.mark.usefixtures("elastic")
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


@pytest.mark.usefixtures("elastic")
def test_a_balancer_keeps_what_optimizers_of_its_world_need() -> None:
    def work(end: LocalTransport) -> tuple[int, object, float]:
        rank = Paired(end, None)
        rank.begin_world(end)
        return rank.balancer.min_ranks, make_end_of_epoch(rank), rank.gradient(2.0)

    assert run_ranks(5, work) == [(3, None, 2.0)] * 5


@pytest.mark.usefixtures("elastic")
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
            rank.optimizer.step()  # no gradient: nothing of this world is left on the wire
        rank.balancer.begin_world()
        rank.optimizer.begin_world()
        return rank.gradient(2.0)

    assert run_ranks(5, work) == [2.0] * 5


@pytest.mark.usefixtures("elastic")
def test_an_optimizer_that_is_made_within_a_world_takes_no_state() -> None:
    def work(end: LocalTransport) -> tuple[int, float]:
        rank = Paired(end, None)
        rank.balancer.begin_world()
        later = Paired(end, None, balancer=rank.balancer)
        return rank.balancer.min_ranks, later.gradient(2.0)

    assert run_ranks(5, work) == [(3, 2.0)] * 5


@pytest.mark.usefixtures("elastic")
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


# The state of hvd.elastic.run.


class Fake:
    """An object with a state, that notes when it is made to fit a new world."""

    def __init__(self, name: str, calls: list[str]) -> None:
        self.name, self.calls, self.value = name, calls, 0

    def begin_world(self) -> None:
        self.calls.append(self.name)

    def state_dict(self) -> dict[str, int]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.value = state["value"]


@pytest.fixture
def calls() -> list[str]:
    return []


def make_state(calls: list[str]) -> loft.elastic.State:
    pytest.importorskip("horovod.torch")
    model = torch.nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.5)
    return loft.elastic.State(
        model, optimizer, balancer=Fake("balancer", calls), loader=Fake("loader", calls), epoch=3
    )


@pytest.fixture
def state(calls: list[str]) -> loft.elastic.State:
    return make_state(calls)


def test_restore_goes_back_to_the_last_commit(state: loft.elastic.State) -> None:
    state.model.weight.data.fill_(2.0)
    state.epoch, state.loader.value = 4, 40
    state.save()
    state.model.weight.data.fill_(9.0)
    state.epoch, state.loader.value = 5, 50
    state.restore()
    assert (state.model.weight.item(), state.epoch, state.loader.value) == (2.0, 4, 40)
    state.model.weight.data.fill_(9.0)
    state.restore()  # what was kept is not changed by what was restored from it
    assert state.model.weight.item() == 2.0


def test_the_heartbeat_is_asked_who_is_behind_an_engines_error_before_its_world_ends(
    state: loft.elastic.State, monkeypatch: pytest.MonkeyPatch
) -> None:
    explained: list[BaseException] = []
    ranks = SimpleNamespace(explain=explained.append)
    monkeypatch.setattr("loft_hvd.elastic.HorovodTransport", lambda: ranks)
    state.restore()
    assert explained == []
    lost = RuntimeError("in a call of the script's own")
    try:
        raise lost
    except RuntimeError:
        state.restore()
    assert explained == [lost]


def test_a_restore_of_the_scripts_own_is_no_failure_of_the_engine(
    state: loft.elastic.State, monkeypatch: pytest.MonkeyPatch
) -> None:
    class HorovodInternalError(RuntimeError):  # by its name Horovod's
        pass

    told: list[BaseException] = []
    heartbeat = SimpleNamespace(explain=told.append)
    monkeypatch.setattr("loft_hvd.transport.horovod.heartbeat_of", lambda _: heartbeat)
    for error in (ValueError("of the script"), lost := HorovodInternalError("of the engine")):
        try:
            raise error
        except (ValueError, HorovodInternalError):
            state.restore()
    assert told == [lost]


def test_sync_takes_rank_0s_state_in_a_fixed_order(
    calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Hvd:
        """Rank 0 has epoch 7 and a loader at 70."""

        def broadcast_parameters(self, params: dict[str, Tensor], root_rank: int) -> None:
            params["weight"].fill_(7.0)

        def broadcast_optimizer_state(self, optimizer: Any, root_rank: int) -> None:
            calls.append("optimizer state")

        def broadcast_object(self, value: dict[str, Any], root_rank: int, name: str) -> Any:
            return value | {"epoch": 7, "loader": {"value": 70}}

    class NoHeartbeat:
        def open_heartbeat(self) -> None:
            calls.append("heartbeat")

    monkeypatch.setattr("loft_hvd.elastic.HorovodTransport", NoHeartbeat)
    monkeypatch.setattr("loft_hvd.elastic.horovod_module", Hvd)
    state = make_state(calls)
    state.sync()
    assert calls == ["heartbeat", "balancer", "loader", "optimizer state"]
    assert (state.model.weight.item(), state.epoch, state.loader.value) == (7.0, 7, 70)
    state.restore()
    assert state.epoch == 7  # a sync is a commit too


def test_fields_are_checked(state: loft.elastic.State) -> None:
    with pytest.raises(AttributeError, match=r"no field 'epochs'; give it as State\("):
        _ = state.epochs
    with pytest.raises(AttributeError, match="does not keep 'best'"):
        state.best = 1
    with pytest.raises(ArgumentError, match=r"\['commit', 'sync'\] are names of its own"):
        loft.elastic.State(sync=1, commit=2)
