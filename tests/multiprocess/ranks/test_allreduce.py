"""``loft.allreduce`` against gathering every row and applying the float64 definition."""

from __future__ import annotations

import horovod.torch as hvd
import numpy as np
import pytest
import torch
from torch import Tensor

import loft_hvd as loft
from loft_hvd.aggregation.reference import reference
from loft_hvd.errors import AggregationError, ArgumentTypeError, MismatchError

NUMELS = (0, 1, 2, 7, 1023, 300_007)
MOST = 1_000_003
FAULTS = {
    "none": 0.0,
    "nan": float("nan"),
    "inf": float("inf"),
    "-inf": -float("inf"),
    "huge": 1e30,
}


needs_two_ranks = pytest.mark.skipif("hvd.size() == 1", reason="a world of one is the identity")


def row_of(rank: int, numel: int, fault: str) -> Tensor:
    """Return a rank's row; the last rank of three or more is the faulty one."""
    generator = torch.Generator().manual_seed(1000 * rank + numel)
    row = torch.randn(numel, generator=generator)
    if fault != "none" and rank == hvd.size() - 1 and hvd.size() >= 3:
        row[::2] = FAULTS[fault]
    return row


def rules() -> list[loft.Rule]:
    f = (hvd.size() - 1) // 2
    return [loft.Median(), loft.TrimmedMean(f=f), loft.Mean(reproducible=True)]


def assert_same_bits(tensor: Tensor) -> None:
    bits = tensor.contiguous().view(torch.int32).view(1, -1)
    if bits.numel():
        everyone = hvd.allgather(bits)
        assert bool((everyone == everyone[0]).all()), "ranks differ"


@pytest.mark.parametrize(
    ("numel", "fault"), [*((numel, fault) for numel in NUMELS for fault in FAULTS), (MOST, "nan")]
)
@pytest.mark.parametrize("kind", range(3))
def test_allreduce_equals_gather_then_reference(kind: int, numel: int, fault: str) -> None:
    rule = rules()[kind]
    result = loft.allreduce(row_of(hvd.rank(), numel, fault), rule, name=f"{kind}.{numel}.{fault}")
    rows = torch.stack([row_of(rank, numel, fault) for rank in range(hvd.size())])
    expected = reference(rows.numpy(), rule)
    np.testing.assert_allclose(result.double().numpy(), expected, rtol=1e-6, atol=1e-6)
    assert_same_bits(result)


@pytest.mark.parametrize("kind", range(3))
def test_weights_and_absent_rows_reach_the_rule(kind: int) -> None:
    size = hvd.size()
    rule = (loft.Median(), loft.TrimmedMean(f=0), loft.Mean())[kind]
    weights = [3 + 2 * rank for rank in range(size)]
    present = [size == 1 or rank != 0 for rank in range(size)]
    rows = torch.stack([row_of(rank, 501, "none") for rank in range(size)])
    mine = rows[hvd.rank()] if present[hvd.rank()] else torch.full((501,), float("nan"))
    result = loft.allreduce(mine, rule, name=f"weighted.{kind}", weights=weights, present=present)
    expected = reference(rows.numpy(), rule, weights=weights, present=present)
    np.testing.assert_allclose(result.double().numpy(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_dtype_and_shape_are_kept(dtype: torch.dtype) -> None:
    tensor = row_of(hvd.rank(), 6, "none").view(2, 3).to(dtype)
    result = loft.allreduce(tensor, loft.Median(), name=f"kept.{dtype}")
    assert (result.dtype, result.shape) == (dtype, tensor.shape)
    rows = torch.stack([row_of(rank, 6, "none").to(dtype).double() for rank in range(hvd.size())])
    expected = torch.from_numpy(reference(rows.numpy(), loft.Median())).view(2, 3).to(dtype)
    torch.testing.assert_close(result, expected)


def test_several_allreduces_may_be_in_flight() -> None:
    handles = [
        loft.allreduce_async(torch.full((5,), float(hvd.rank() + at)), name=f"flight.{at}")
        for at in range(4)
    ]
    middle = (hvd.size() - 1) / 2
    for at, handle in reversed(list(enumerate(handles))):
        torch.testing.assert_close(handle.wait(timeout_s=20), torch.full((5,), middle + at))


def test_input_is_not_changed() -> None:
    tensor = row_of(hvd.rank(), 33, "none")
    before = tensor.clone()
    loft.allreduce(tensor, loft.Median(), name="unchanged")
    assert torch.equal(tensor, before)


def test_integers_are_refused() -> None:
    with pytest.raises(ArgumentTypeError, match="floating point"):
        loft.allreduce(torch.arange(3), loft.Median(), name="integers")


@needs_two_ranks
def test_f_too_large_is_refused_with_the_way_out() -> None:
    way_out = "two rows cannot outvote" if hvd.size() == 2 else "use f <="
    with pytest.raises(AggregationError, match=way_out):
        loft.allreduce(torch.zeros(3), loft.TrimmedMean(f=hvd.size()), name="too.large")


@needs_two_ranks
@pytest.mark.parametrize("what", ["numel", "dtype", "rule"])
def test_ranks_that_disagree_are_named_on_every_rank(what: str) -> None:
    odd = hvd.size() - 1
    is_odd = hvd.rank() == odd
    tensor = torch.zeros(5 + (is_odd and what == "numel"))
    tensor = tensor.double() if is_odd and what == "dtype" else tensor
    rule = loft.Median(kind="lower") if is_odd and what == "rule" else loft.Median()
    with pytest.raises(MismatchError, match=rf"{what}.* differs on ranks \[{odd}\]"):
        loft.allreduce(tensor, rule, name=f"disagree.{what}")
    # The ranks are still in step.
    torch.testing.assert_close(
        loft.allreduce(torch.ones(3), loft.Median(), name=f"after.{what}"), torch.ones(3)
    )


def test_a_rule_from_elsewhere_runs_on_shard_owners() -> None:
    """Each rank has a function object of its own; its name is what must agree."""
    rule = loft.Custom(lambda rows: rows.amax(dim=0))
    tensor = row_of(hvd.rank(), 77, "none")
    rows = torch.stack([row_of(rank, 77, "none") for rank in range(hvd.size())])
    assert torch.equal(loft.allreduce(tensor, rule, name="custom"), rows.amax(dim=0))


def test_average_weighs_by_samples() -> None:
    count = hvd.rank()  # rank 0 has none
    result = loft.average(float("nan") if count == 0 else float(count), count)
    ranks = range(hvd.size())
    if hvd.size() == 1:
        assert np.isnan(result)
    else:
        assert result == pytest.approx(sum(r * r for r in ranks) / sum(ranks))
