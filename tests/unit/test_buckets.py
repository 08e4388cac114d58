"""Layout of parameters in buckets, and of buckets in shards."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from loft_hvd.errors import ArgumentError, MismatchError
from loft_hvd.pipeline.buckets import (
    ParameterSpec,
    agree_on_order,
    lay_out,
    part_bounds,
    shard_numel,
)
from loft_hvd.transport.base import Channel, Lane, Work
from loft_hvd.transport.local import LocalTransport, run_ranks


def specs(numels: list[int], **options: object) -> list[ParameterSpec]:
    return [
        ParameterSpec(f"p{at}", (numel,), torch.float32, **options)  # type: ignore[arg-type]
        for at, numel in enumerate(numels)
    ]


@given(
    numels=st.lists(st.integers(0, 300), min_size=1, max_size=30), bucket_bytes=st.integers(1, 2000)
)
def test_every_parameter_has_one_slot_and_slots_touch(numels: list[int], bucket_bytes: int) -> None:
    buckets = lay_out(specs(numels), bucket_bytes=bucket_bytes)
    placed = [slot.parameter for bucket in buckets for slot in bucket.slots]
    assert sorted(placed) == list(range(len(numels)))
    for index, bucket in enumerate(buckets):
        assert bucket.index == index
        offset = 0
        for slot in bucket.slots:
            assert (slot.offset, slot.numel) == (offset, numels[slot.parameter])
            offset += slot.numel
        assert bucket.numel == offset
        assert bucket.numel * 4 <= bucket_bytes or sum(s.numel > 0 for s in bucket.slots) == 1


def test_the_last_parameters_come_first() -> None:
    buckets = lay_out(specs([10, 10, 10]), bucket_bytes=80)
    assert [[slot.name for slot in bucket.slots] for bucket in buckets] == [["p2", "p1"], ["p0"]]


def test_parameters_come_in_the_order_that_is_given() -> None:
    buckets = lay_out(specs([10, 10, 10]), bucket_bytes=80, order=[1, 2, 0])
    assert [[slot.name for slot in bucket.slots] for bucket in buckets] == [["p1", "p2"], ["p0"]]


def test_buckets_are_numbered_by_when_they_are_full() -> None:
    parameters = [*specs([4, 4]), ParameterSpec("other", (4,), torch.float64)]
    buckets = lay_out(parameters, bucket_bytes=80, order=[0, 2, 1])
    assert [[slot.name for slot in bucket.slots] for bucket in buckets] == [["other"], ["p0", "p1"]]


def test_rules_dtypes_and_groups_do_not_share_a_bucket() -> None:
    parameters = [
        ParameterSpec("a", (2,), torch.float32, rule=0),
        ParameterSpec("b", (2,), torch.float32, rule=1),
        ParameterSpec("c", (2,), torch.float64, rule=0),
        ParameterSpec("d", (2,), torch.bfloat16, rule=0),
        ParameterSpec("e", (2,), torch.float32, rule=0, group=0),
    ]
    names = [
        {slot.name for slot in bucket.slots} for bucket in lay_out(parameters, bucket_bytes=99)
    ]
    assert sorted(map(sorted, names)) == [["a", "d"], ["b"], ["c"], ["e"]]


def test_a_group_stays_together_whatever_its_size() -> None:
    (bucket,) = lay_out(specs([500, 500], group=3), bucket_bytes=16)
    assert bucket.numel == 1000


@pytest.mark.parametrize(
    ("mebibytes", "expected"),
    [
        ([1, 2, 1, 6, 9], [[4, 3], [2, 1, 0]]),  # 4 MiB at most
        ([1, 2, 2, 6, 8], [[4, 3, 2], [1, 0]]),
        ([0, 1, 7, 30], [[3], [2], [1, 0]]),  # of the last one alone
        ([5, 5], [[1, 0]]),  # what is ready last is no smaller
        ([1, 2, 4], [[2, 1, 0]]),  # too little is left to begin earlier
        ([0, 0, 20], [[2, 1, 0]]),
        ([40], [[0]]),
        ([0.25, 0.25, 1, 20], [[3], [2], [1, 0]]),  # and of these 512 KiB at most
        ([0.25, 0.5, 20], [[2], [1, 0]]),  # less than 1 MiB
        ([0.75, 1, 20], [[2], [1, 0]]),
        ([0.25, 0.25, 1, 4], [[3, 2, 1, 0]]),  # less than 8 MiB
    ],
    ids=str,
)
def test_what_is_ready_last_is_a_small_bucket(
    mebibytes: list[float], expected: list[list[int]]
) -> None:
    sizes = [round(number * 2**18) for number in mebibytes]  # values of 4 bytes
    buckets = lay_out(specs(sizes), bucket_bytes=32 << 20)
    assert [[slot.parameter for slot in bucket.slots] for bucket in buckets] == expected


def test_a_group_that_is_ready_last_is_not_cut() -> None:
    (whole,) = lay_out(specs([1 << 18, 8 << 18], group=0), bucket_bytes=32 << 20)
    assert [slot.parameter for slot in whole.slots] == [1, 0]


@given(
    sizes=st.lists(st.integers(0, 6), min_size=1, max_size=12),
    kinds=st.lists(st.integers(0, 2), min_size=12, max_size=12),
    order=st.permutations(range(12)),
)
def test_buckets_begin_in_the_order_in_which_they_are_ready(
    sizes: list[int], kinds: list[int], order: list[int]
) -> None:
    parameters = [
        ParameterSpec(f"p{at}", (size << 18,), torch.float32, rule=kinds[at])
        for at, size in enumerate(sizes)
    ]
    order = [each for each in order if each < len(sizes)]
    buckets = lay_out(parameters, bucket_bytes=16 << 20, order=order)
    placed = [[slot.parameter for slot in bucket.slots] for bucket in buckets]
    assert sorted(each for members in placed for each in members) == list(range(len(sizes)))
    ready = [max(order.index(each) for each in members) for members in placed]
    assert ready == sorted(ready)
    for kind in {kinds[at] for at in range(len(sizes))}:
        own = [bucket for bucket in buckets if bucket.rule == kind]
        assert all(bucket.numel <= 4 << 20 for bucket in own)
        # What is ready last is small, or one parameter that is larger than that.
        last = parameters[placed[own[-1].index][-1]]
        assert own[-1].numel < 2 << 20 or last.numel > 1 << 20


def test_bucket_bytes_must_be_positive() -> None:
    with pytest.raises(ArgumentError, match="bucket_bytes=0"):
        lay_out(specs([1]), bucket_bytes=0)


@given(numel=st.integers(0, 10**7), world_size=st.integers(1, 64))
def test_shards_cover_a_bucket_with_little_padding(numel: int, world_size: int) -> None:
    shard = shard_numel(numel, world_size)
    assert numel <= shard * world_size
    assert shard * world_size - numel < (16 + 1) * world_size


@given(
    numel=st.integers(0, 10**6),
    world_size=st.integers(1, 16),
    part_bytes=st.one_of(st.none(), st.integers(1, 10**6)),
)
def test_parts_touch_and_only_the_last_one_is_padded(
    numel: int, world_size: int, part_bytes: int | None
) -> None:
    bounds = part_bounds(numel, world_size, itemsize=4, part_bytes=part_bytes)
    assert bounds[0] == 0
    assert bounds[-2] <= numel <= bounds[-1]
    for begin, end in itertools.pairwise(bounds):
        assert (end - begin) % world_size == 0
        assert begin < end or numel == 0
        if part_bytes is None or numel * 4 < 2 * part_bytes:
            assert (begin, end) == (0, world_size * shard_numel(numel, world_size))
    for begin, end in itertools.pairwise(bounds[:-1]):
        assert (end - begin) * 4 >= (part_bytes or 0)


@pytest.mark.parametrize("arrived", [(2, 0, 1), (2, 1), ()])
def test_all_ranks_take_rank_0s_order_and_what_did_not_come_is_last(
    arrived: tuple[int, ...],
) -> None:
    def work(transport: LocalTransport) -> tuple[int, ...]:
        own = arrived if transport.rank == 0 else (1, 0, 2)
        return agree_on_order(Channel(transport, "loft", 30.0), own, 3)

    rest = [at for at in (2, 1, 0) if at not in arrived]
    assert run_ranks(3, work) == [(*arrived, *rest)] * 3


@pytest.mark.parametrize("told", [(0, 0, 1), (0, 1, 3), (-1, 0, 1)])
def test_an_order_that_is_none_is_refused_on_every_rank(told: tuple[int, ...]) -> None:
    class Telling(Lane):
        """Rank 0 tells another order than its own."""

        def broadcast(self, buffer: torch.Tensor, *, name: str) -> Work:
            if self.rank == 0:
                buffer.copy_(torch.tensor(told))
            return super().broadcast(buffer, name=name)

    def work(transport: LocalTransport) -> None:
        channel = Channel(Telling(transport), "loft", 30.0)
        with pytest.raises(MismatchError, match="is no order of this rank's 3 parameters"):
            agree_on_order(channel, (0, 1, 2), 3)

    run_ranks(2, work)
