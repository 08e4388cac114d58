"""A placement's shared sources, from the data set through a loader and the balancer to LOFT."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import TensorDataset

import loft_hvd as loft
from loft_hvd.balance.latency import StepModel
from loft_hvd.errors import DataError, PlanError
from loft_hvd.transport.local import LocalTransport, run_ranks
from tests.support.worlds import Moving, elastic_job

INTERVAL = 5


def train(balancer: loft.Balancer, placement: loft.Placement, kind: str = "loader") -> None:
    """Train an epoch on batches of a data set that is placed so."""
    data = TensorDataset(torch.arange(len(placement)))
    loader: Any = loft.DataLoader(data, balancer, placement=placement)
    if kind == "sampler":
        sampler = loft.BatchSampler(data, balancer, placement=placement)
        loader = TorchDataLoader(data, batch_sampler=sampler)
    for (samples,) in loader:
        with balancer.step(len(samples)) if kind == "sampler" else nullcontext():
            balancer.take_step()
            balancer.gradient_arrived(blocked_s=0.0)
            balancer.computing_ended()
            balancer.step_ended()
    balancer.explain()  # waits for what rank 0 makes of the last interval


def model_of(policy: loft.Loft) -> StepModel:
    assert policy.fit is not None
    return policy.fit.model


def half_on_two_ranks() -> loft.Placement:
    """Two ranks lack most of what a store serves, two others also much that those hold.

    Ranks 0 to 3 hold 50, 50, 4 and 4 samples, and 60 are in the store. Rank 0 reads 118 samples
    from elsewhere, more than half of them from the store; rank 2 reads 164, of which 60 are less.
    """
    homes: list[int | str] = [0] * 50 + [1] * 50 + [2] * 4 + [3] * 4 + ["shared:store"] * 60
    return loft.Placement.from_function(homes.__getitem__, len(homes))


@pytest.mark.parametrize("kind", ["loader", "sampler"])
def test_what_a_placement_says_is_shared_reaches_lofts_model(kind: str) -> None:
    policies = [loft.Loft() for _ in range(4)]

    def work(transport: LocalTransport) -> None:
        policy = policies[transport.rank]
        balancer = loft.Balancer(16, policy, interval=INTERVAL, transport=transport)
        train(balancer, half_on_two_ranks(), kind)

    run_ranks(4, work)
    model = model_of(policies[0])
    assert model.source.tolist() == [0, 0, -1, -1]
    assert model.shared_s[2:].tolist() == [0.0, 0.0]


class World:
    """The ranks of an elastic job, whose number changes."""

    def __init__(self, placement: loft.Placement, source: list[int] | None = None) -> None:
        self.placement = placement
        self.policies = [loft.Loft(source=source) for _ in range(4)]
        self.ranks: dict[int, tuple[Moving, loft.Balancer]] = {}

    def train(self, world_size: int) -> list[int]:
        """Train an epoch with so many ranks; returns the sources in the model of rank 0."""
        run_ranks(world_size, self._train)
        found: list[int] = model_of(self.policies[0]).source.tolist()
        return found

    def _train(self, end: LocalTransport) -> None:
        if end.rank not in self.ranks:
            moving, policy = Moving(end), self.policies[end.rank]
            made = loft.Balancer(12, policy, interval=INTERVAL, transport=moving)
            self.ranks[end.rank] = moving, made
        moving, balancer = self.ranks[end.rank]
        moving.end = end
        balancer.begin_world()
        train(balancer, self.placement)


def stored() -> loft.Placement:
    """All samples in one of two stores: whoever reads shares one, in a world of any size."""
    return loft.Placement.from_function(lambda index: ["shared:a", "shared:b"], 240)


def test_an_elastic_world_of_another_size_shares_sources_anew() -> None:
    with elastic_job():
        world = World(stored())
        assert world.train(3) == [0, 1, 0]
        assert world.train(2) == [0, 1]
        assert world.train(4) == [0, 1, 0, 1]


@pytest.mark.parametrize("world_size", [2, 4])
def test_an_elastic_world_that_the_users_sources_do_not_fit_is_refused(world_size: int) -> None:
    with elastic_job():
        world = World(stored(), source=[1, 1, 0])
        assert world.train(3) == [1, 1, 0]
        says = rf"source=\[1, 1, 0\] has 3 entries, but world_size={world_size}; give one a rank"
        with pytest.raises(PlanError, match=says):
            world.train(world_size)


def test_an_elastic_world_without_a_rank_that_holds_samples_is_refused() -> None:
    with elastic_job():
        world = World(loft.Placement.from_function(lambda index: [index % 3, "shared:a"], 240))
        world.train(3)
        with pytest.raises(DataError, match="rank 2 holds samples, but world_size=2; build the"):
            world.train(2)
