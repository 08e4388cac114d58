"""A reduce-scatter by a rule: what owners keep, what travels, what waits for the whole model."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import loft_hvd as loft
from loft_hvd.errors import UsageError
from loft_hvd.pipeline.buckets import Bucket, Slot
from loft_hvd.pipeline.ring import run_rule
from loft_hvd.pipeline.scatter import ScatterExchanges
from loft_hvd.pipeline.weights import PassWeights
from loft_hvd.transport.base import Channel
from loft_hvd.transport.local import LocalTransport, run_ranks
from tests.support.recording import RecordingTransport

NUMELS = (4 * 33, 4 * 200, 4)  # of buckets: a longer one after a shorter one, and of a value each
WEIGHTS = PassWeights((3, 2, 1, 2), (True,) * 4, 1.0)


def bucket(at: int) -> Bucket:
    slots = (Slot(at, f"p{at}", 0, NUMELS[at], (NUMELS[at],)),)
    return Bucket(at, torch.float32, "cpu", 0, slots)


def row(step: int, at: int, rank: int) -> Tensor:
    random = torch.Generator().manual_seed(100 * step + 10 * at + rank)
    return torch.randn(NUMELS[at], generator=random)


def reduce_steps(end: LocalTransport, rule: loft.Rule, *, is_model: bool) -> list[list[Tensor]]:
    """Reduce all buckets in each of three steps, and return this rank's shards of the results."""
    channel = Channel(end, "scatter", 20.0)
    exchanges = ScatterExchanges(channel, rule, device="cpu", run=run_rule, is_model=is_model)
    found = []
    for step in range(3):
        results = [torch.full((numel // 4,), torch.nan) for numel in NUMELS]
        # In the second step one has no gradient.
        for at in (0, 1, 2) if step != 1 else (0, 2):
            given = row(step, at, end.rank)
            assert exchanges.memory_to_send(bucket(at)) is None
            exchanges.start(bucket(at), given, results[at], WEIGHTS)
        exchanges.finish()
        found.append(results)
    return found


@pytest.mark.parametrize(
    "rule", [loft.Mean(), loft.Median(), loft.TrimmedMean(1), loft.Robust(1)], ids=str
)
def test_owners_keep_the_rules_result_of_their_shards(rule: loft.Rule) -> None:
    found = run_ranks(4, lambda end: reduce_steps(end, rule, is_model=False))
    for rank, steps in enumerate(found):
        for step, results in enumerate(steps):
            for at, result in enumerate(results):
                rows = torch.stack([row(step, at, r).view(4, -1)[rank] for r in range(4)])
                wanted = loft.aggregate(rows, rule, weights=WEIGHTS.weights)
                if step == 1 and at == 1:
                    wanted = torch.full_like(wanted, torch.nan)
                assert torch.equal(result.nan_to_num(7.0), wanted.nan_to_num(7.0)), (step, at)


def test_tables_of_all_buckets_decide_with_scope_model() -> None:
    rule = loft.Robust(1)
    found = run_ranks(4, lambda end: reduce_steps(end, rule, is_model=True))
    for step in range(3):
        ats = (0, 1, 2) if step != 1 else (0, 2)
        rows = torch.stack([torch.cat([row(step, at, r) for at in ats]) for r in range(4)])
        wanted = loft.aggregate(rows, rule.over_model, weights=WEIGHTS.weights)
        for at, part in zip(ats, wanted.split([NUMELS[at] for at in ats]), strict=True):
            got = torch.cat([found[rank][step][at] for rank in range(4)])
            torch.testing.assert_close(got, part, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("rule", [loft.Mean(), loft.TrimmedMean(1), loft.Robust(1)], ids=str)
def test_a_reduce_scatters_bytes_travel(rule: loft.Rule) -> None:
    def work(end: LocalTransport) -> int:
        transport = RecordingTransport(end)
        reduce_steps(transport, rule, is_model=False)
        return transport.sent_bytes

    # Three quarters of what a rank has go to others, in each step; the second lacks a bucket.
    values = 3 * sum(NUMELS) - NUMELS[1]
    for sent in run_ranks(4, work):
        assert sent == values * 3 // 4 * 4


def test_a_result_that_is_needed_at_once_does_not_wait_for_the_model() -> None:
    def work(end: LocalTransport) -> str:
        channel = Channel(end, "scatter", 20.0)
        exchanges = ScatterExchanges(
            channel, loft.Robust(1), device="cpu", run=run_rule, is_model=True
        )
        values, result = torch.zeros(NUMELS[0]), torch.zeros(NUMELS[0] // 4)
        with pytest.raises(UsageError) as caught:
            exchanges.start(bucket(0), values, result, WEIGHTS, why_at_once="it is cast")
        return str(caught.value)

    for said in run_ranks(4, work):
        assert said == (
            'bucket 0 (p0): scope="model" has its result at the end of the backward pass, but it '
            'is needed before: it is cast; use scope="shard"'
        )
