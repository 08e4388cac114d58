"""CUDA kernels give the bits of the definition; the same tests run on the CPU to show they work.

Only tests of what a CPU does not have (streams, devices, graphs) are for a GPU alone.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import loft_hvd as loft
from loft_hvd._native import extension
from loft_hvd.aggregation import compute, fallback, ops
from loft_hvd.aggregation.rules import Rule
from tests.gpu.each_kernel import apart
from tests.support.gradients import (
    DTYPES,
    assert_same_bits,
    expected,
    hard_gradients,
    rules_for,
)

MODULE = extension()
WHY_NOT = (
    "no CUDA device here"
    if not torch.cuda.is_available()
    else "the extension was built without CUDA kernels: LOFT_HVD_CUDA=1 make setup"
    if MODULE is None or not MODULE.has_cuda
    else ""
)
gpu = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT or "there is one")
if WHY_NOT and os.environ.get("EXPECT_CUDA"):  # where skipping would hide that nothing was tested
    raise RuntimeError(WHY_NOT)
DEVICES = ["cpu", pytest.param("cuda", marks=[gpu, pytest.mark.gpu])]
pytestmark = pytest.mark.parametrize("device", DEVICES)

# Every kernel and both sides of every limit between two of them.
ROWS = [*range(1, 18), 23, 24, 25, 31, 32, 33, 48, 49, 63, 64, 65, 66, 97, 128, 129, 300]
SOME_ROWS = [1, 2, 5, 8, 9, 16, 17, 32, 33, 64, 65, 129]


def assert_aggregates(
    gradients: Tensor, rule: Rule, device: str, weights: list[int] | None = None
) -> None:
    """Aggregate on ``device`` and compare bit for bit with the definition."""
    wanted = expected(gradients, rule, weights=weights)
    # Rows of a matrix, which are not aligned where their length is odd, and rows that are.
    for rows in (gradients.to(device), apart(gradients, device)):
        result = loft.aggregate(rows, rule, weights=weights)
        assert result.device.type == device
        assert_same_bits(result.cpu(), wanted)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", ROWS)
def test_every_rule_gives_the_bits_of_the_definition(
    device: str, rows: int, dtype: torch.dtype
) -> None:
    if device == "cpu" and rows not in (1, 4, 17, 65):
        pytest.skip("tests/unit has the CPU's every row count")
    gradients = hard_gradients(rows, 77, dtype, seed=rows)
    for rule in rules_for(rows):
        assert_aggregates(gradients, rule, device)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", SOME_ROWS)
def test_weighted_rules_give_the_bits_of_the_definition(
    device: str, rows: int, dtype: torch.dtype
) -> None:
    if device == "cpu" and rows not in (2, 9):
        pytest.skip("tests/unit has the CPU's weighted rules")
    gradients = hard_gradients(rows, 77, dtype, seed=rows)
    weights = [1 + (7 * row) % 5 for row in range(rows)]
    for rule in rules_for(rows):
        assert_aggregates(gradients, rule, device, weights)


@pytest.mark.parametrize("numel", [0, 1, 7, 31, 33, 127, 129, 1023, 100_003])
@pytest.mark.parametrize("rows", [3, 8, 32, 70, 140])
def test_every_length_is_aggregated_to_its_last_value(device: str, rows: int, numel: int) -> None:
    if device == "cpu" and numel > 1023:
        pytest.skip("tests/unit has the CPU's long rows")
    gradients = hard_gradients(rows, numel, torch.float32, seed=numel)
    for rule in (loft.Median(), loft.TrimmedMean(1)):
        assert_aggregates(gradients, rule, device)


@pytest.mark.parametrize("offset", [0, 1, 2, 3, 4])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_alignment_and_neighbours_do_not_change_a_bit(
    device: str, dtype: torch.dtype, offset: int
) -> None:
    gradients = hard_gradients(8, 301, dtype, seed=offset)
    wide = torch.nn.functional.pad(gradients, (offset, 3)).to(device)
    rule = loft.TrimmedMean(2)
    whole = torch.full((301 + offset + 5,), 7.0, dtype=dtype, device=device)
    out = whole[offset : offset + 301]
    loft.aggregate(wide[:, offset : offset + 301], rule, out=out)
    assert_same_bits(out.cpu(), expected(gradients, rule))
    assert bool((whole[:offset] == 7).all() and (whole[offset + 301 :] == 7).all())


def test_order_of_the_rows_does_not_change_a_bit(device: str) -> None:
    gradients = hard_gradients(21, 500, torch.float32, seed=4).to(device)
    weights = [1 + row % 4 for row in range(21)]
    order = torch.randperm(21, generator=torch.Generator().manual_seed(1)).tolist()
    for rule in (loft.Median(), loft.TrimmedMean(5), loft.MeanAroundMedian(4), loft.Phocas(6)):
        wanted = loft.aggregate(gradients, rule, weights=weights)
        moved = loft.aggregate(gradients[order], rule, weights=[weights[row] for row in order])
        assert_same_bits(moved.cpu(), wanted.cpu())


def test_absent_rows_are_as_if_deleted(device: str) -> None:
    gradients = hard_gradients(6, 99, torch.float32, seed=5).to(device)
    present = torch.tensor([[1, 1], [0, 1], [1, 0], [1, 1], [1, 1], [1, 1]], dtype=torch.bool)
    result = loft.median(gradients, present=present)
    wanted = expected(gradients.cpu(), loft.Median(), present=present.numpy())
    assert_same_bits(result.cpu(), wanted)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_plain_torch_gives_the_same_bits(device: str, dtype: torch.dtype) -> None:
    gradients = hard_gradients(9, 400, dtype, seed=6)
    for rule in rules_for(9):
        out = torch.empty(400, dtype=dtype, device=device)
        fallback.aggregate_rows(list(gradients.to(device)), rule, weights=None, out=out)
        assert_same_bits(out.cpu(), expected(gradients, rule))


@pytest.mark.parametrize("is_weighted", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [1, 2, 5, 16, 40, 65, 128, 200])  # a number of every kernel
def test_diagnostics_say_the_same_on_every_device(
    device: str, rows: int, dtype: torch.dtype, is_weighted: bool
) -> None:
    if device == "cpu" and rows not in (5, 65):
        pytest.skip("csrc/checks has the CPU's every row count")
    gradients = hard_gradients(rows, 2 * fallback.BLOCK + 7233, dtype, seed=7)
    weights = [1 + row % 3 for row in range(rows)] if is_weighted else None
    for rule in (loft.Median(), loft.TrimmedMean((rows - 1) // 3), loft.Phocas((rows - 1) // 4)):
        result, found = loft.diagnose(apart(gradients, device), rule, weights=weights, every=2)
        assert_same_bits(result.cpu(), loft.aggregate(gradients, rule, weights=weights))
        seen, outside, non_finite, squared = fallback.diagnose_rows(
            list(gradients), rule, weights=weights, out=result.cpu(), every=2
        )
        assert list(found.num_seen) == [seen] * rows
        assert list(found.num_outside) == outside
        assert list(found.num_non_finite) == non_finite
        assert list(found.squared_distance) == pytest.approx(squared, rel=1e-10)


@pytest.mark.parametrize("weights", [None, [1, 2, 3]])
def test_operators_pass_opcheck(device: str, weights: list[int] | None) -> None:
    rows = list(torch.randn(3, 20, device=device))
    torch.library.opcheck(ops.aggregate, (rows, "median", weights))
    torch.library.opcheck(ops.aggregate_out, (rows, "phocas:f=1", weights, rows[0].clone()))


def test_aggregate_compiles_into_one_graph(device: str) -> None:
    def step(gradients: Tensor) -> Tensor:
        aggregated: Tensor = loft.trimmed_mean(gradients * 2, f=1)
        return aggregated + 1

    gradients = torch.randn(4, 64, generator=torch.Generator().manual_seed(8)).to(device)
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(gradients), step(gradients), rtol=0, atol=0)


@gpu
@pytest.mark.gpu
def test_work_is_queued_on_the_callers_stream(device: str) -> None:
    if device == "cpu":
        pytest.skip("a CPU has no streams")
    gradients = hard_gradients(8, 1_000_003, torch.float32, seed=9)
    late, stream = torch.zeros_like(gradients, device=device), torch.cuda.Stream()
    source = gradients.to(device)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        late.copy_(source)
        result = loft.median(late)  # on another stream it would see zeros
    stream.synchronize()
    assert_same_bits(result.cpu(), loft.median(gradients))


def captured(call: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """Return a graph of what a call does on the GPU."""
    call()  # loads the kernel, which a capture may not
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):  # a wait for the device inside would raise
        call()
    return graph


@gpu
@pytest.mark.gpu
def test_aggregation_is_captured_into_a_graph_and_replayed(device: str) -> None:
    if device == "cpu":
        pytest.skip("a CPU has no graphs")
    gradients = hard_gradients(8, 10_007, torch.float32, seed=10)
    rows, out = torch.zeros(8, 10_007, device=device), torch.empty(10_007, device=device)
    graph = captured(lambda: loft.trimmed_mean(rows, f=2, out=out))
    rows.copy_(gradients)
    graph.replay()
    assert_same_bits(out.cpu(), loft.trimmed_mean(gradients, f=2))


@gpu
@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_the_rows_device_is_used_and_the_current_one_is_put_back(device: str) -> None:
    if device == "cpu":
        pytest.skip("a CPU is one device")
    gradients = hard_gradients(5, 1_001, torch.float32, seed=11)
    with torch.cuda.device(0):
        result = loft.median(gradients.to("cuda:1"))
        assert torch.cuda.current_device() == 0
    assert result.device.index == 1
    assert_same_bits(result.cpu(), loft.median(gradients))


@gpu
@pytest.mark.gpu
@pytest.mark.long
def test_coordinates_beyond_two_to_the_31_are_addressed(device: str) -> None:
    if device == "cpu":
        pytest.skip("tests/unit has the CPU's long rows")
    row = torch.zeros(2**31 + 77, dtype=torch.float16, device=device)
    row[-3:] = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float16)
    row[2**31 - 1] = 5
    result = loft.median([row, row, row])
    assert result[-3:].tolist() == [1, 2, 3]
    assert float(result[2**31 - 1]) == 5
    assert int(result.count_nonzero()) == 4


def test_missing_cuda_kernels_are_said_once(device: str) -> None:
    if device != "cpu":
        pytest.skip("the CUDA kernels are there")
    compute.warn_once.cache_clear()
    with pytest.warns(RuntimeWarning, match="LOFT_HVD_CUDA=1"):
        compute.warn_once(compute.NO_CUDA)
    compute.warn_once(compute.NO_CUDA)  # no second warning: it would raise
