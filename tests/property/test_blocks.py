"""Laws of data in shards: blocks inside windows, and each sample once whatever the sizes."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from loft_hvd.data.assign import count_local
from loft_hvd.data.blocks import BlockShuffle, ShardOrder
from loft_hvd.data.draws import Draw, EpochSettings
from loft_hvd.data.placement import Placement
from loft_hvd.data.sampler import GlobalBatches
from tests.support.placements import placements, sizes_of
from tests.support.plans import FakePlans

pytestmark = [
    pytest.mark.filterwarnings(f"ignore:{what}:UserWarning")
    for what in ("the last batch of the epoch", "an epoch has no step")
]
laws = settings(
    deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow], max_examples=100
)


@dataclass
class Case:
    shards: ShardOrder
    seed: int
    epoch: int
    placement: Placement
    plans: FakePlans

    @property
    def num_samples(self) -> int:
        return int(self.shards.sizes.sum())

    def order(self) -> list[int]:
        return [int(each) for each in self.shards.order(seed=self.seed, epoch=self.epoch)]

    def batches(self) -> GlobalBatches:
        options = EpochSettings(self.placement, self.shards, self.seed, False, False)
        batches = GlobalBatches(options, self.plans)
        batches.set_epoch(self.epoch)
        return batches

    def draws(self) -> list[Draw]:
        return list(self.batches().start(first_step=0)[1])

    def shard_of(self, samples: npt.ArrayLike) -> npt.NDArray[np.int64]:
        return np.searchsorted(np.cumsum(self.shards.sizes), samples, side="right")


@st.composite
def cases(draw: st.DrawFn) -> Case:
    sizes = draw(st.lists(st.integers(0, 60), max_size=30))
    blocks = BlockShuffle(draw(st.integers(1, 20)), draw(st.integers(1, 300)))
    world_size = draw(st.integers(1, 8))
    total = draw(st.integers(world_size, 96))
    return Case(
        ShardOrder(np.array(sizes, np.int64), blocks),
        seed=draw(st.integers(0, 2**40)),
        epoch=draw(st.integers(0, 5)),
        placement=draw(placements(sum(sizes), world_size)),
        plans=FakePlans(draw(sizes_of(world_size, total=total))),
    )


@laws
@given(case=cases())
def test_an_order_has_every_sample_once(case: Case) -> None:
    assert sorted(case.order()) == list(range(case.num_samples))


@laws
@given(case=cases())
def test_an_order_depends_on_seed_and_epoch_alone(case: Case) -> None:
    batches = case.batches()
    again = EpochSettings(
        Placement.replicated(case.num_samples), case.shards, case.seed, False, False
    )
    assert batches.settings.order(case.epoch).tolist() == again.order(case.epoch).tolist()
    assert case.order() == again.order(case.epoch).tolist()


@laws
@given(case=cases())
def test_samples_of_a_shard_are_in_one_window(case: Case) -> None:
    sizes, window = case.shards.sizes, case.shards.blocks.window
    most = window - 1 + sizes.max(initial=0)
    at = np.argsort(case.order())  # place of each sample
    for end, size in zip(np.cumsum(sizes), sizes, strict=True):
        if size:
            places = at[end - size : end]
            assert places.max() - places.min() < most


@laws
@given(case=cases())
def test_an_order_is_made_of_runs_of_neighbours(case: Case) -> None:
    order, block = np.array(case.order()), case.shards.blocks.block
    shards = case.shard_of(order)
    breaks = np.flatnonzero((np.diff(order) != 1) | (np.diff(shards) != 0))
    num_runs = len(breaks) + (len(order) > 0)
    # Two shorter blocks at most in a shard that is longer than one: where it begins and ends.
    sizes = case.shards.sizes
    most = np.where(sizes <= block, sizes > 0, -(-sizes // block) + 1).sum()
    assert num_runs <= most


@laws
@given(case=cases(), data=st.data())
def test_global_batches_do_not_depend_on_sizes_and_world(case: Case, data: st.DataObject) -> None:
    before = [draw.batch.tolist() for draw in case.draws()]
    total, world_size = case.plans.global_batch_size, data.draw(st.integers(1, 8))
    other = replace(
        case,
        placement=data.draw(placements(case.num_samples, world_size)),
        plans=FakePlans(data.draw(sizes_of(world_size, total=total))),
    )
    after = [draw.batch.tolist() for draw in other.draws()]
    assert after == before
    cut = [sorted(case.order()[at : at + total]) for at in range(0, case.num_samples, total)]
    assert [sorted(batch) for batch in before] == cut


@laws
@given(case=cases())
def test_every_sample_is_computed_once_by_the_sizes_of_the_plan(case: Case) -> None:
    batches = case.batches()
    computed: list[int] = []
    for draw in batches.start(first_step=0)[1]:
        for rank, size in enumerate(draw.step_sizes.sizes):
            if size:
                indices = draw.indices(rank, dummy_size=2, homes=batches.homes)
                assert len(indices) == size
                computed += indices
    assert sorted(computed) == list(range(case.num_samples))


@laws
@given(case=cases(), data=st.data())
def test_resuming_in_any_world_finishes_the_epoch_exactly_once(
    case: Case, data: st.DataObject
) -> None:
    draws = case.draws()
    stop = data.draw(st.integers(0, len(draws)))
    state = case.batches().state_dict(position=draws[stop - 1].position if stop else 0, step=stop)
    world_size = data.draw(st.integers(1, 8))
    total = data.draw(st.integers(world_size, 96))
    other = replace(
        case,
        placement=data.draw(placements(case.num_samples, world_size)),
        plans=FakePlans(data.draw(sizes_of(world_size, total=total))),
    ).batches()
    step = other.load_state_dict(state).step
    rest = list(other.start(first_step=step)[1])
    done = [sample for draw in draws[:stop] + rest for sample in draw.batch.tolist()]
    assert sorted(done) == list(range(case.num_samples))


@laws
@given(case=cases())
def test_a_shard_goes_to_few_ranks(case: Case) -> None:
    case.placement = Placement.replicated(case.num_samples)
    for draw in case.draws():
        shards = case.shard_of(draw.batch)
        pairs = set(zip(draw.assignment.owners.tolist(), shards.tolist(), strict=True))
        num_ranks = sum(size > 0 for size in draw.step_sizes.sizes)
        # A rank's samples are a run of the batch: each rank after the first splits one shard more.
        assert len(pairs) <= len(set(shards.tolist())) + num_ranks - 1
        assert len(list(itertools.groupby(shards.tolist()))) == len(set(shards.tolist()))


@laws
@given(case=cases())
def test_homes_come_before_shards(case: Case) -> None:
    homes = case.placement.at(case.plans.world_size)
    for draw in case.draws():
        counts = np.bincount(homes.rows[draw.batch], minlength=len(homes.local.holders))
        sizes = np.array(draw.step_sizes.sizes)
        most = count_local(counts[None], sizes, homes)[0]  # whatever the order of the batch
        assert draw.assignment.local.tolist() == most.tolist()
