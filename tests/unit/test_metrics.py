"""Running averages over samples: unequal batches, sub-batches and padding on ranks as threads."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import loft_hvd as loft
from loft_hvd.errors import ArgumentError, ArgumentTypeError
from loft_hvd.transport.local import LocalTransport, LocalWorld, run_ranks

UNTYPED: Any = loft


def test_a_metric_is_an_average_over_samples_whatever_ranks_update() -> None:
    values = torch.arange(24.0) ** 2
    parts = [values[:13], values[13:20], values[20:]]

    def work(end: LocalTransport) -> tuple[float, float, float]:
        metric = loft.Metric("loss", transport=end)
        own = parts[end.rank]
        for part in own.split(4):  # 4, 2 and 1 sub-batches
            metric.update(part.mean(), len(part))
        half = float(metric.avg)
        metric.update(own)  # one value a sample, each once more
        metric.update(torch.tensor(1000.0), 8 if end.rank == 1 else 0)
        whole = float(metric.avg)
        return half, whole, float(metric.avg)  # nothing new

    expected = (2 * float(values.sum()) + 8000.0) / 56
    for half, whole, again in run_ranks(3, work):
        assert half == pytest.approx(float(values.mean()))
        assert whole == again == pytest.approx(expected)


def test_a_rank_that_never_updates_takes_part_in_every_reading() -> None:
    def work(end: LocalTransport) -> list[float]:
        metric = loft.Metric("loss", transport=end)
        read = [float(metric.avg)]  # of no sample
        for step in range(3):
            if end.rank != 1 and (end.rank == 0 or step != 1):  # rank 2 leaves one step out
                metric.update(step + 10.0 * end.rank, 2)
            read.append(float(metric.avg))
        return read

    for nothing, *read in run_ranks(3, work):
        assert math.isnan(nothing)
        assert read == [20 / 2, 21 / 3, 45 / 5]


def test_padding_and_empty_counts_are_left_out_though_they_are_nan() -> None:
    def work(end: LocalTransport) -> float:
        metric = loft.Metric("x", loader=SimpleNamespace(is_padding=end.rank == 1), transport=end)
        metric.update(math.nan if end.rank == 1 else 3.0)
        metric.update(math.nan, 0)
        return float(metric.avg)

    assert run_ranks(2, work) == [3.0, 3.0]


def test_a_metric_is_read_as_horovods_example_reads_its_own() -> None:
    metric = loft.Metric("x", transport=run_ranks(1, lambda end: end)[0])
    assert math.isnan(metric.avg)
    metric.update(torch.tensor(0.5, requires_grad=True))
    metric.update(torch.tensor(1.5, dtype=torch.bfloat16))
    assert (100.0 * metric.avg).item() == 100.0


@pytest.mark.parametrize(
    ("value", "count", "error", "says"),
    [
        (1.0, -1, ArgumentError, "Metric 'x': count=-1 must be >= 0"),
        (1.0, 0.5, ArgumentTypeError, "count=0.5 is of type float"),
        (torch.ones(3), 3, ArgumentError, r"count=3 is for one mean, but the value has shape \[3"),
    ],
)
def test_counts_that_are_none_are_refused(value: Any, count: Any, error: Any, says: str) -> None:
    with pytest.raises(error, match=says):
        UNTYPED.Metric("x").update(value, count)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(), (1,)], ids=str)
def test_an_average_is_what_was_given(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    def work(end: LocalTransport) -> tuple[Any, Any]:
        loss = torch.full(shape, 1.0 + end.rank, dtype=dtype, requires_grad=True)
        return loft.average(loss, 2 * end.rank, transport=end), loft.average(1.0, 1, transport=end)

    for mean, number in run_ranks(3, work):
        assert (mean.shape, mean.dtype, mean.requires_grad) == (shape, dtype, False)
        assert float(mean) == pytest.approx((2 * 2 + 3 * 4) / 6, rel=1e-2)
        assert isinstance(number, float)


def test_several_values_have_no_one_count() -> None:
    with pytest.raises(ArgumentError, match=r"shape \[4\]; give its mean"):
        loft.average(torch.ones(4), 4)


def test_a_value_without_samples_is_not_looked_at() -> None:
    def work(end: LocalTransport) -> float:
        own: Any = 3.0 if end.rank == 0 else [None, torch.ones(4)][end.rank - 1]
        mean: Any = loft.average(own, 2 * (end.rank == 0), transport=end)
        return float(torch.as_tensor(mean).flatten()[0])

    assert run_ranks(3, work) == [3.0] * 3


def test_a_mean_of_whole_numbers_is_no_whole_number() -> None:
    def work(end: LocalTransport) -> Any:
        return loft.average(torch.tensor(3 + end.rank), 1, transport=end)

    assert [(float(each), each.dtype) for each in run_ranks(2, work)] == [(3.5, torch.float32)] * 2


@pytest.mark.parametrize("value", [[1.0, 2.0], "0.3", None, {"loss": 1.0}])
def test_average_refuses_what_is_no_number(value: Any) -> None:
    with pytest.raises(ArgumentTypeError, match=r"average of 'metric': the value is of type"):
        loft.average(value, 2, transport=LocalWorld(1).transport(0))


@pytest.mark.parametrize("value", [1, 1.0, np.float32(1.0), np.int64(1), torch.tensor(1.0), True])
def test_average_takes_numbers_of_any_kind(value: Any) -> None:
    assert float(loft.average(value, 2, transport=LocalWorld(1).transport(0))) == 1.0
