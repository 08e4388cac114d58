"""One bucket's way: parts and memory, on ranks that are threads."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import loft_hvd as loft
from loft_hvd.transport.local import LocalTransport, run_ranks
from tests.support.wrapped import reduce_bucket


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("wire", loft.Compression)
def test_parts_do_not_change_a_bit(wire: loft.Compression, world_size: int) -> None:
    rule = loft.TrimmedMean(f=(world_size - 1) // 2)

    def work(end: LocalTransport) -> None:
        whole, _, transport = reduce_bucket(end, rule, wire=wire)
        assert len(set(transport.names)) == 2
        for part_bytes in (2500, 10_000):
            parts, reduction, transport = reduce_bucket(end, rule, wire=wire, part_bytes=part_bytes)
            assert len(set(transport.names)) == 2 * reduction.num_parts > 2
            assert torch.equal(parts, whole)

    run_ranks(world_size, work)


def middle_row(rows: Tensor) -> Tensor:
    return rows[1]


@pytest.mark.parametrize("rule", [loft.Custom(middle_row), loft.Robust(1)], ids=str)
def test_a_rule_that_sees_rows_sees_its_shard_whole(rule: loft.Rule) -> None:
    def work(end: LocalTransport) -> None:
        _, reduction, _ = reduce_bucket(end, rule, part_bytes=1000)
        assert reduction.num_parts == 1

    run_ranks(3, work)


@pytest.mark.parametrize("part_bytes", [1 << 30, 100_000])
@pytest.mark.parametrize("wire", loft.Compression)
@pytest.mark.parametrize("rule", [loft.Mean(), loft.Median()], ids=str)
def test_a_bucket_has_at_most_two_more_of_its_size(
    rule: loft.Rule, wire: loft.Compression, part_bytes: int
) -> None:
    def work(end: LocalTransport) -> None:
        _, reduction, _ = reduce_bucket(end, rule, numel=250_000, wire=wire, part_bytes=part_bytes)
        held = reduction.memory_bytes()
        assert 4 * 250_000 <= held <= 3 * 4 * 250_000
        # What docs/allreduce.md says, for buckets and rows that are padded to whole shards.
        padded = reduction.values.untyped_storage().nbytes()
        if rule == loft.Mean() and wire is loft.Compression.none:
            assert held == padded
        else:
            sent = 0 if wire is loft.Compression.none else padded // 2
            rows = sent or padded
            assert held == padded + sent + rows + rows // 3

    run_ranks(3, work)
