"""Ways over the wire: between two ranks whole rows are exchanged, with the bits of shard owners."""

from __future__ import annotations

import time

import pytest
import torch
from torch import Tensor

import loft_hvd as loft
from loft_hvd.aggregation import fallback
from loft_hvd.pipeline.reduction import BucketReduction
from loft_hvd.pipeline.ring import ExchangeSpec, suits_two
from loft_hvd.pipeline.weights import PassWeights
from loft_hvd.transport.base import Lane
from loft_hvd.transport.local import LocalTransport, run_ranks
from tests.support.recording import RecordingTransport

RULES = [loft.Mean(reproducible=True), loft.Median(), loft.Median("lower"), loft.TrimmedMean(f=0)]
ODD = torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0, 0.0, 1e-45, 3.4e38, -3.4e38])


def row_of(rank: int, numel: int) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    row = torch.randn(numel, generator=generator)
    places = torch.randperm(numel, generator=generator)[: numel // 3]
    row[places] = ODD[torch.randint(len(ODD), (len(places),), generator=generator)]
    return row


def bits(tensor: Tensor) -> Tensor:
    return tensor.view(torch.int32)


def finish(reduction: BucketReduction) -> None:
    while not reduction.advance():
        time.sleep(1e-4)


def on_shard_owners(
    spec: ExchangeSpec, row: Tensor, weights: PassWeights, part_bytes: int | None
) -> Tensor:
    """Reduce a row in a bucket, which never goes the way of two ranks."""

    def pack(values: Tensor) -> PassWeights:
        values.copy_(row)
        return weights

    reduction = BucketReduction(spec, pack=pack, part_bytes=part_bytes)
    reduction.start()
    finish(reduction)
    return reduction.values.clone()


def between_two(
    spec: ExchangeSpec, row: Tensor, weights: PassWeights, part_bytes: int | None
) -> Tensor:
    """Reduce a row from tensor to tensor."""
    assert suits_two(spec.lane, spec.rule)
    reduction = BucketReduction(spec, pack=lambda _: weights, is_given=True, part_bytes=part_bytes)
    result = torch.empty_like(row)
    reduction.start(row, result)
    finish(reduction)
    return result


@pytest.mark.parametrize("part_bytes", [None, 1000])
@pytest.mark.parametrize("numel", [1, 2004, 2005])
@pytest.mark.parametrize("counts", [None, (3, 1)])
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_a_swap_gives_the_bits_of_shard_owners(
    rule: loft.Rule, counts: tuple[int, int] | None, numel: int, part_bytes: int | None
) -> None:
    weights = PassWeights(counts, (True, True), 1.0)

    def work(end: LocalTransport) -> list[Tensor]:
        row, transport = row_of(end.rank, numel), RecordingTransport(end)
        results = [
            reduce(
                ExchangeSpec(Lane(transport), reduce.__name__, numel, torch.float32, "cpu", rule),
                row,
                weights,
                part_bytes,
            )
            for reduce in (between_two, on_shard_owners)
        ]
        assert torch.equal(bits(row), bits(row_of(end.rank, numel)))
        ways = {name.split(".")[0]: name.split(".")[-1] for name in transport.names}
        assert ways == {"between_two": "swap", "on_shard_owners": "ag"}
        return results

    results = [result for pair in run_ranks(2, work) for result in pair]
    assert all(torch.equal(bits(result), bits(results[0])) for result in results)


def test_an_absent_row_is_never_read() -> None:
    def work(end: LocalTransport) -> Tensor:
        row = torch.full((9,), 2.0 if end.rank == 0 else float("nan"))
        present = [True, False]
        return loft.allreduce(row, loft.Median(), name="x", present=present, transport=end)

    for result in run_ranks(2, work):
        assert result.tolist() == [2.0] * 9


def test_one_exchange_sends_what_a_ring_sends() -> None:
    def work(end: LocalTransport) -> tuple[list[str], int]:
        recording = RecordingTransport(end)
        loft.allreduce(torch.ones(1000), loft.Median(), name="x", transport=recording)
        sent = recording.sent_bytes
        custom = loft.Custom(lambda rows: rows.mean(dim=0))
        loft.allreduce(torch.ones(1000), custom, name="y", transport=recording)
        return recording.names, sent

    for names, sent_bytes in run_ranks(2, work):
        assert names == ["x.agree", "x.swap", "y.agree", "y.a2a", "y.ag"]
        assert 4000 <= sent_bytes < 4100  # the agreement's few numbers beside


@pytest.mark.parametrize("weights", [None, [3, 1]])
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_without_the_extension_the_bits_are_the_same(
    rule: loft.Rule, weights: list[int] | None
) -> None:
    rows = [row_of(rank, 5000) for rank in range(2)]
    plain = torch.empty(5000)
    fallback.aggregate_rows(rows, rule, weights=weights, out=plain)
    compiled = loft.aggregate(rows, rule, weights=weights)
    assert torch.equal(plain.isnan(), compiled.isnan())  # a NaN's sign may differ
    is_number = ~plain.isnan()
    assert torch.equal(bits(plain)[is_number], bits(compiled)[is_number])
