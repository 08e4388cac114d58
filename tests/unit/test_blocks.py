"""Orders of data in shards: what is fixed for good, and what is refused."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from torch.utils.data import Dataset, Subset

import loft_hvd as loft
from loft_hvd.data.blocks import Arrangement, BlockShuffle, ShardOrder
from loft_hvd.data.draws import epoch_order
from loft_hvd.data.placement import Placement
from loft_hvd.data.sampler import BatchSampler
from loft_hvd.errors import ArgumentTypeError, DataError
from tests.support.plans import FakePlans


class Shelves(Dataset[int]):
    """Numbers in shards."""

    def __init__(self, shard_sizes: Any) -> None:
        self.shard_sizes = shard_sizes

    def __len__(self) -> int:
        return sum(self.shard_sizes)

    def __getitem__(self, index: int) -> int:
        return index


def shards(*sizes: int, **blocks: int) -> ShardOrder:
    return ShardOrder(np.array(sizes, np.int64), BlockShuffle(**blocks))


def order_of(sampler: BatchSampler) -> list[int]:
    return [index for batch in sampler for index in batch]


def test_the_order_of_known_seeds_is_fixed_for_good() -> None:
    # A run goes on from a checkpoint years later: these numbers never change.
    order = shards(5, 0, 3, 4, block=2, window=6).order(seed=7, epoch=3)
    assert order.tolist() == [4, 2, 3, 6, 7, 0, 1, 5, 8, 11, 9, 10]
    assert order.dtype == np.int32


@pytest.mark.parametrize("changed", [{"seed": 8}, {"epoch": 1}])
def test_seed_and_epoch_change_the_order(changed: dict[str, int]) -> None:
    known = {"seed": 7, "epoch": 0}
    some = shards(*[50] * 20)
    assert some.order(**known).tolist() != some.order(**known | changed).tolist()


def test_blocks_are_cut_at_other_places_in_other_epochs() -> None:
    some = shards(*[100] * 10, block=10, window=1000)
    begins = []
    for epoch in range(2):
        order = some.order(seed=0, epoch=epoch)
        begins.append(set(order[1:][np.diff(order) != 1].tolist()))
    assert len(begins[0] & begins[1]) < len(begins[0]) / 2


def test_many_blocks_and_windows_are_the_same_as_one_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    some = shards(*range(40), block=3, window=50)
    whole = some.order(seed=1, epoch=1).tolist()
    monkeypatch.setattr("loft_hvd.data.blocks._AT_ONCE", 7)
    assert some.order(seed=1, epoch=1).tolist() == whole


def test_longer_than_the_longest_shard_and_all_of_the_data_is_no_other_order() -> None:
    long, longest = (
        shards(30, 7, 40, block=block, window=window).order(seed=1, epoch=1).tolist()
        for block, window in ((40, 77), (10**30, 10**30))
    )
    assert long == longest


def test_a_window_as_long_as_the_data_mixes_all_of_it() -> None:
    order = shards(*[100] * 100, block=1, window=10**4).order(seed=0, epoch=0)
    quarter = order[:2500] // 100
    assert len(set(quarter.tolist())) == 100
    assert abs(int((order[:5000] < 5000).sum()) - 2500) < 200  # 8 standard deviations


def test_an_arrangement_keeps_shards_together_in_the_order_of_the_epoch() -> None:
    arrange = Arrangement(np.array([3, 3, 6, 9]), np.array([2, 0, 3, 1]))
    assert arrange(np.array([4, 8, 0, 5, 7, 2])).tolist() == [7, 8, 0, 2, 4, 5]


def test_a_shard_stays_with_its_ranks_through_a_window() -> None:
    sizes = [1000] * 16
    sampler = BatchSampler(Shelves(sizes), FakePlans([64, 64, 64, 64]), seed=3)
    read = np.zeros((4, 16), int)  # samples of each rank and shard
    for draw in sampler._batches.start(first_step=0)[1]:
        np.add.at(read, (draw.assignment.owners, draw.batch // 1000), 1)
    # Four shards are a quarter of the data: of a rank without shards of its own they were as much.
    share = np.sort(read)[:, -4:].sum() / read.sum()
    assert share > 0.7


@pytest.mark.parametrize(
    ("dataset", "shuffle", "num_reads", "num_shards"),
    [
        (1_000_000, True, 64.0, 226),
        (Shelves([1000] * 1000), True, 4.8, 15),
        (Shelves([1000] * 1000), BlockShuffle(block=64), 1.8, 5),
    ],
    ids=["single samples", "blocks of 16", "blocks of 64"],
)
def test_published_reads_of_a_batch(
    dataset: Any, shuffle: Any, num_reads: float, num_shards: int
) -> None:
    """The table of docs/data.md: reads of a rank's batch, and shards of a step."""
    sampler = BatchSampler(dataset, FakePlans([64] * 4, rank=1), shuffle=shuffle)
    reads, met = [], []
    for draw in itertools.islice(sampler._batches.start(first_step=0)[1], 400):
        mine = np.sort(draw.batch[draw.assignment.owners == 1])
        is_new = (np.diff(mine) != 1) | (np.diff(mine // 1000) != 0)
        reads.append(1 + is_new.sum())
        met.append(len(np.unique(draw.batch // 1000)))
    assert round(float(np.mean(reads)), 1) == num_reads
    assert round(np.mean(met)) == num_shards


@pytest.mark.parametrize(
    ("shuffle", "percent"),
    [(BlockShuffle(block=1), 96), (BlockShuffle(), 83), (BlockShuffle(block=64), 67)],
    ids=["single samples", "blocks of 16", "blocks of 64"],
)
def test_published_share_of_local_reads(shuffle: BlockShuffle, percent: int) -> None:
    """The table of docs/data.md: 64 files of 1,000 samples, dealt out to 4 ranks."""
    placement = Placement.from_function(lambda i: i // 1000 % 4, 64_000)
    dataset = Shelves([1000] * 64)
    sampler = BatchSampler(dataset, FakePlans([64] * 4), shuffle=shuffle, placement=placement)
    draws = sampler._batches.start(first_step=0)[1]
    local = sum(int(draw.assignment.local.sum()) for draw in draws)
    assert local / 640 == pytest.approx(percent, abs=1.0)


@pytest.mark.parametrize("shuffle", [True, 1, BlockShuffle()])
def test_data_in_shards_are_shuffled_in_blocks(shuffle: Any) -> None:
    dataset = Shelves([40] * 5)
    sampler = BatchSampler(dataset, FakePlans([8]), seed=2, shuffle=shuffle)
    by_blocks = shards(*[40] * 5).order(seed=2, epoch=0)
    assert [sorted(each) for each in sampler] == [
        sorted(by_blocks[at : at + 8].tolist()) for at in range(0, 200, 8)
    ]


def test_data_in_shards_without_shuffling_keep_their_order() -> None:
    sampler = BatchSampler(Shelves([3, 0, 5]), FakePlans([4]), shuffle=False)
    assert order_of(sampler) == list(range(8))


@pytest.mark.parametrize("shard_sizes", [None, [4, 4]])
def test_data_without_shards_keep_the_usual_order(shard_sizes: Any) -> None:
    class Plain(Shelves):
        def __len__(self) -> int:
            return 8

    dataset: Any = Plain(None) if shard_sizes is None else Subset(Shelves([4, 4]), range(8))
    sampler = BatchSampler(dataset, FakePlans([8]), seed=5)
    assert order_of(sampler) == epoch_order(8, seed=5, epoch=0).tolist()


def test_blocks_of_data_without_shards_are_refused() -> None:
    with pytest.raises(DataError, match=r"has no shard_sizes; give loft.TarShards"):
        BatchSampler(20, FakePlans([2, 2]), shuffle=BlockShuffle())


@pytest.mark.parametrize("sizes", [[3, 4], [[8]], [9, -1], [4.0, 4.0], 8])
def test_shards_that_are_not_those_of_the_data_are_refused(sizes: Any) -> None:
    class Wrong(Shelves):
        def __len__(self) -> int:
            return 8

    with pytest.raises(DataError, match="shard_sizes of the data set, a Wrong, must be"):
        BatchSampler(Wrong(sizes), FakePlans([2, 2]))


def test_relaxed_orders_of_data_in_shards_are_refused() -> None:
    with pytest.raises(DataError, match="drop relaxed=True"):
        loft.DataLoader(Shelves([4, 4]), FakePlans([2, 2]), relaxed=True)


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ({"block": 0}, DataError),
        ({"window": 0}, DataError),
        ({"block": 1.5}, ArgumentTypeError),
        ({"window": True}, ArgumentTypeError),
    ],
)
def test_blocks_that_cannot_be_are_refused(options: dict[str, Any], kind: type) -> None:
    with pytest.raises(kind, match=f"BlockShuffle: {next(iter(options))}="):
        BlockShuffle(**options)


@pytest.mark.parametrize(
    ("dataset", "shuffle"),
    [
        (Shelves([4, 16]), True),
        (Shelves([10, 10]), BlockShuffle(block=2)),
        (Shelves([10, 10]), BlockShuffle(window=5)),
        (20, True),
    ],
)
def test_a_state_of_other_shards_or_blocks_is_refused(dataset: Any, shuffle: Any) -> None:
    state = BatchSampler(Shelves([10, 10]), FakePlans([2, 2])).state_dict(num_trained=0)
    with pytest.raises(DataError, match="blocks is"):
        BatchSampler(dataset, FakePlans([2, 2]), shuffle=shuffle).load_state_dict(state)


def test_a_state_from_before_there_were_blocks_goes_on() -> None:
    state = BatchSampler(20, FakePlans([2, 2])).state_dict(num_trained=0)
    del state["blocks"]
    BatchSampler(20, FakePlans([2, 2])).load_state_dict(state)
