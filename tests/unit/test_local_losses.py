"""Blocks of rows that a local world loses: as told, the same every time, and never too many."""

from __future__ import annotations

import random
import re
import time
from typing import Any

import pytest
import torch
from torch import Tensor

import loft_hvd as loft
from loft_hvd import config
from loft_hvd.errors import ArgumentError
from loft_hvd.transport.base import Brought, Channel, LossLimits, wait_for
from loft_hvd.transport.conformance import CHECKS
from loft_hvd.transport.datagram import BLOCK_BYTES, LossTolerant
from loft_hvd.transport.lanes import Needs, choose_lane
from loft_hvd.transport.local import Faults, LocalLane, LocalTransport, LocalWorld, run_ranks

BLOCK = BLOCK_BYTES // 4
NUM_BLOCKS = 50
SHARD = BLOCK * NUM_BLOCKS - 7  # the last block is short
ALL = (True,) * 5


def lane_of(end: LocalTransport, gather: LossTolerant | None = None) -> LocalLane:
    needs = Needs(gather=LossTolerant() if gather is None else gather)
    lane = choose_lane(Channel(end, "test"), needs)
    assert isinstance(lane, LocalLane)
    return lane


def bring(
    lane: LocalLane,
    limits: LossLimits,
    *,
    name: str = "x",
    dtype: torch.dtype = torch.float32,
    shard: int = SHARD,
) -> tuple[Tensor, Brought]:
    room = torch.zeros(lane.world_size, shard, dtype=dtype)
    sent = torch.full((lane.world_size * shard,), float(lane.rank), dtype=dtype)
    work, brought = lane.bring(sent, room, name=name, limits=limits)
    wait_for(work, what=name, timeout_s=10)
    return room, brought


def missing_of(brought: Brought, num_blocks: int = NUM_BLOCKS) -> Tensor:
    none = torch.zeros(len(brought.rows), num_blocks, dtype=torch.uint8)
    return none if brought.missing is None else brought.missing


def lost_by(faults: Faults, limits: LossLimits, **given: Any) -> Tensor:
    """Return what each owner misses, [owners, ranks, blocks], of ranks in a hurry or not."""

    def work(end: LocalTransport) -> Tensor:
        time.sleep(random.random() * 1e-3)  # they begin in another order each time
        return missing_of(bring(lane_of(end), limits, **given)[1])

    return torch.stack(run_ranks(len(limits.present), work, faults=faults))


@pytest.mark.parametrize("num_ranks", [2, 3, 5])
def test_all_but_rows_arrives_whatever_is_lost(num_ranks: int) -> None:
    def work(end: LocalTransport) -> None:
        for check in CHECKS.values():
            check(lane_of(end))

    run_ranks(num_ranks, work, faults=Faults(loss=1.0))


def test_the_same_blocks_are_lost_every_time_and_others_with_another_seed_or_name() -> None:
    limits = LossLimits(3, ALL)
    first = lost_by(Faults(seed=1, loss=0.3), limits)
    for _ in range(3):
        assert torch.equal(lost_by(Faults(seed=1, loss=0.3), limits), first)
    assert not torch.equal(lost_by(Faults(seed=2, loss=0.3), limits), first)
    assert not torch.equal(lost_by(Faults(seed=1, loss=0.3), limits, name="y"), first)


def test_exchanges_of_one_name_and_owners_lose_other_blocks() -> None:
    def work(end: LocalTransport) -> list[Tensor]:
        lane = lane_of(end)
        return [missing_of(bring(lane, LossLimits(3, ALL))[1]) for _ in range(3)]

    found = [each for owner in run_ranks(5, work, faults=Faults(loss=0.5)) for each in owner]
    assert len({each.numpy().tobytes() for each in found}) == len(found)


@pytest.mark.parametrize("loss", [0.0, 0.01, 0.1, 0.3])
def test_so_many_are_lost_as_told_and_none_of_the_owners_own(loss: float) -> None:
    lost = lost_by(Faults(loss=loss), LossLimits(4, ALL), shard=BLOCK * 1000).double()
    travelled = lost.sum(dim=2) / 1000
    assert travelled.diagonal().sum() == 0
    error = (loss * (1 - loss) / 20_000) ** 0.5
    assert abs(travelled.sum() / 20 - loss) <= 4 * error


@pytest.mark.parametrize("most", [0, 1, 2, 4])
@pytest.mark.parametrize("loss", [0.3, 1.0])
def test_no_block_lacks_more_rows_than_the_limits_allow(most: int, loss: float) -> None:
    lost = lost_by(Faults(loss=loss), LossLimits(most, ALL)).sum(dim=1)
    assert lost.max() == min(most, 4)
    if loss == 1.0:
        assert lost.min() == min(most, 4)


def test_where_not_all_may_be_lost_no_rank_is_favoured() -> None:
    lost = lost_by(Faults(loss=1.0), LossLimits(2, ALL), shard=BLOCK * 1000).double()
    for owner in range(5):
        others = [rank for rank in range(5) if rank != owner]
        assert lost[owner].sum(dim=1)[others].sub(500).abs().max() <= 4 * 1000**0.5 / 2


def test_absent_rows_lose_blocks_beside_those_that_count() -> None:
    present = (True, True, False, True, True)
    lost = lost_by(Faults(loss=1.0), LossLimits(1, present))
    assert lost[[0, 1, 3, 4], 2].all()
    counting = lost[:, [0, 1, 3, 4]].sum(dim=1)
    assert counting.min() == counting.max() == 1


def test_critical_blocks_arrive_of_every_row() -> None:
    """Values 2 of shard 1 and the last of shard 3: blocks 0 and 49."""
    spans = ((SHARD + 2, SHARD + 3), (4 * SHARD - 1, 4 * SHARD))
    lost = lost_by(Faults(loss=1.0), LossLimits(4, ALL, spans)).sum(dim=1)
    assert lost[1].tolist() == [0, *[4] * (NUM_BLOCKS - 1)]
    assert lost[3].tolist() == [*[4] * (NUM_BLOCKS - 1), 0]
    assert lost[0].min() == 4


def test_losses_may_be_those_of_single_ranks() -> None:
    lost = lost_by(Faults(loss={1: 1.0, 3: 0.5}), LossLimits(4, ALL), shard=BLOCK * 1000)
    assert lost[:, [0, 2, 4]].sum() == 0
    assert lost[[0, 2, 3, 4], 1].all()
    assert abs(lost[[0, 1, 2, 4], 3].double().mean() - 0.5) <= 4 * 0.5 / 4000**0.5


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str
)
def test_what_is_lost_is_no_number_and_all_else_is_what_was_sent(dtype: torch.dtype) -> None:
    def work(end: LocalTransport) -> None:
        room, brought = bring(lane_of(end), LossLimits(4, ALL), dtype=dtype)
        block = BLOCK_BYTES // dtype.itemsize
        assert brought.block_numel == block
        missing = missing_of(brought, -(-SHARD // block)).bool()
        assert missing.any()
        is_lost = missing.repeat_interleave(block, dim=1)[:, :SHARD]
        assert torch.equal(room.isnan(), is_lost)
        sent = torch.arange(5.0).to(dtype).unsqueeze(1).expand_as(room)
        assert torch.equal(room[~is_lost], sent[~is_lost])

    run_ranks(5, work, faults=Faults(loss=0.3))


def test_parts_of_the_ranks_lose_blocks_of_their_own() -> None:
    def work(end: LocalTransport) -> tuple[list[int], Tensor]:
        part = lane_of(end).subset([(0, 2, 4), (1, 3)])
        assert isinstance(part, LocalLane)
        room, brought = bring(part, LossLimits(2, (True,) * part.world_size))
        return room.nan_to_num(-1).amax(dim=1).tolist(), missing_of(brought)

    found = run_ranks(5, work, faults=Faults(loss={4: 1.0}))
    assert [rows for rows, _ in found] == [[0, 1, -1], [0, 1], [0, 1, -1], [0, 1], [0, 1, 2]]
    assert [int(lost.sum()) for _, lost in found] == [NUM_BLOCKS, 0, NUM_BLOCKS, 0, 0]


def test_a_reliable_gather_loses_nothing() -> None:
    def work(end: LocalTransport) -> bool:
        lane = lane_of(end, LossTolerant(reliable=True))
        return not lane.loses and bring(lane, LossLimits(4, ALL))[1].missing is None

    assert run_ranks(5, work, faults=Faults(loss=1.0)) == [True] * 5


@pytest.mark.parametrize("wanted", ["auto", "datagram", "engine"])
def test_only_who_asks_for_the_gather_has_this_lane(
    wanted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOFT_HVD_LANE", wanted)
    config.config.cache_clear()

    def work(end: LocalTransport) -> list[str]:
        channel = Channel(end, "test")
        asked = [Needs(), Needs(gather=LossTolerant()), Needs("cuda:0", gather=LossTolerant())]
        return [choose_lane(channel, needs).name for needs in asked]

    due = "the engine's own" if wanted == "engine" else "local"
    try:
        found = run_ranks(2, work)
    finally:
        monkeypatch.undo()
        config.config.cache_clear()
    assert found == [["the engine's own", due, "the engine's own"]] * 2
    alone = choose_lane(Channel(LocalWorld(1).transport(0), "alone"), Needs(gather=LossTolerant()))
    assert alone.name == "the engine's own"


@pytest.mark.parametrize(
    ("loss", "told"),
    [
        (-0.1, "loss=-0.1 must be a share of blocks"),
        (1.1, ">= 0 and <= 1, or one by rank"),
        (float("nan"), "loss=nan"),
        ({0: 2.0}, "loss={0: 2.0}"),
        ({5: 0.1}, "ranks [5] are not >= 0 and < 5"),
    ],
)
def test_losses_that_are_no_shares_are_refused(loss: Any, told: str) -> None:
    with pytest.raises(ArgumentError, match=re.escape(told)):
        LocalWorld(5, Faults(loss=loss))


def test_a_users_all_reduce_loses_what_it_is_told() -> None:
    def work(end: LocalTransport) -> Tensor:
        row = torch.randn(5 * SHARD, generator=torch.Generator().manual_seed(end.rank))
        gather = LossTolerant()
        return loft.allreduce(row, loft.Median(), name="x", transport=end, gather=gather)

    whole = run_ranks(5, work)
    lossy = run_ranks(5, work, faults=Faults(loss=0.2))
    for result in lossy:
        assert torch.equal(result, lossy[0])
    # A median of five changes where one that was lost is filled with that of the other four.
    assert 0.3 < (lossy[0] != whole[0]).double().mean() < 0.7
