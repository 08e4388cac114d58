"""Who withholds blocks of its own row gains nothing by it, in an exchange among ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import loft_hvd as loft
from loft_hvd.aggregation.rules import Rule
from loft_hvd.transport.datagram import LossTolerant
from loft_hvd.transport.local import Faults, LocalTransport, run_ranks
from tests.support.gradients import assert_same_bits

NUM_RANKS = 5


def reduced(rows: Tensor, rule: Rule, loss: Any, *, seed: int = 0) -> Tensor:
    def work(end: LocalTransport) -> Tensor:
        return loft.allreduce(
            rows[end.rank].clone(), rule, name="x", transport=end, gather=LossTolerant()
        )

    found = run_ranks(len(rows), work, faults=Faults(seed=seed, loss=loss))
    for each in found:
        assert_same_bits(each, found[0])
    return found[0]


@settings(max_examples=25)
@given(
    seed=st.integers(0, 10_000),
    withholder=st.integers(0, NUM_RANKS - 1),
    value=st.sampled_from([0.0, 1e30, -1e30, float("inf"), float("nan")]),
    others=st.sampled_from([0.0, 0.1, 1.0]),
    rule=st.sampled_from([loft.TrimmedMean(1), loft.Median(), loft.MeanAroundMedian(1)]),
)
def test_who_withholds_its_blocks_leaves_results_in_the_honest_range(
    seed: int, withholder: int, value: float, others: float, rule: Rule
) -> None:
    rows = torch.randn(NUM_RANKS, 4000, generator=torch.Generator().manual_seed(seed))
    rows[withholder] = value
    loss = {rank: 1.0 if rank == withholder else others for rank in range(NUM_RANKS)}
    result = reduced(rows, rule, loss, seed=seed)
    honest = torch.cat([rows[:withholder], rows[withholder + 1 :]])
    # A mean of values of the range may be a rounding outside it.
    assert (result >= honest.amin(dim=0) - 1e-6).all()
    assert (result <= honest.amax(dim=0) + 1e-6).all()


@pytest.mark.parametrize(
    "rule", [loft.TrimmedMean(1), loft.Median(), loft.Robust(1), loft.GeometricMedian(1)], ids=str
)
@pytest.mark.parametrize("withholder", [0, 3])
def test_what_is_withheld_says_nothing_at_other_owners(rule: Rule, withholder: int) -> None:
    numel = NUM_RANKS * 1600
    rows = torch.randn(NUM_RANKS, numel, generator=torch.Generator().manual_seed(0))
    found = []
    for value in (0.0, 5.0, -1e30, float("nan")):
        rows[withholder] = value
        found.append(reduced(rows, rule, {withholder: 1.0}).view(NUM_RANKS, -1))
    others = [rank for rank in range(NUM_RANKS) if rank != withholder]
    for each in found[1:]:
        assert_same_bits(each[others].view(-1), found[0][others].view(-1))
