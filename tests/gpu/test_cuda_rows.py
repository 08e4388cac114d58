"""CUDA kernels for rules that see rows give the bits of the definition, which plain torch computes.

The same tests run on the CPU's kernels to show that they work.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

import loft_hvd as loft
from loft_hvd.aggregation import compute, fallback
from loft_hvd.aggregation.distances import BLOCK, distance_sums
from loft_hvd.aggregation.mixing import Mix, MixedRule
from loft_hvd.aggregation.rules import Rule
from tests.gpu.test_cuda_kernels import DEVICES, captured, gpu
from tests.support.gradients import DTYPES, assert_same_bits, hard_gradients, rules_for

pytestmark = pytest.mark.parametrize("device", DEVICES)

# Every kernel and both sides of every limit between two of them.
ROWS = [1, 2, 3, 4, 5, 8, 9, 16, 17, 31, 32, 33, 64, 65, 128, 129]


def quiet_gradients(rows: int, numel: int, dtype: torch.dtype, *, seed: int) -> Tensor:
    """Return finite rows [rows, numel], of which the last one has a NaN where there are three."""
    random = torch.Generator().manual_seed(seed)
    values = torch.randn(rows, numel, generator=random).to(dtype)
    if rows >= 3 and numel:
        values[-1, numel // 2] = math.nan
    return values


def common_mix(rows: int, num_mixed: int, rule: Rule) -> Mix:
    """Return a mix with one weight a line, as of nearest neighbours."""
    draw = np.random.default_rng(num_mixed)
    matrix = (draw.random((num_mixed, rows)) < 0.75) / np.arange(1, num_mixed + 1)[:, None]
    matrix[:, 0] = 1 / np.arange(1, num_mixed + 1)
    return Mix(np.ones(rows), matrix, None, rule)


def any_mix(rows: int, num_mixed: int, rule: Rule, weights: list[int] | None, seed: int) -> Mix:
    """Return a mix with rows left out, lines of equal weights, and scales that are none."""
    draw = np.random.default_rng(seed)
    matrix = draw.uniform(-0.2, 1.2, (num_mixed, rows))
    matrix[draw.random(matrix.shape) < 0.25] = 0
    matrix[::2] = np.where(matrix[::2] != 0, 1 / rows, 0)
    matrix[-1] = 0
    scales = draw.choice([1.0, 1.0, 0.3, 0.0, 1e-60], rows)
    return Mix(scales, matrix, weights, rule)


def aggregate_mixed(rows: list[Tensor], mix: Mix, *, every: int = 0) -> tuple[Tensor, object]:
    """Aggregate by the kernels of the rows' device."""
    out = torch.full_like(rows[0], 7)
    decided = MixedRule(loft.Robust(0), mix)
    return out, compute.aggregate_rows(rows, decided, weights=None, out=out, diagnose_every=every)


def wanted_mixed(rows: Tensor, mix: Mix) -> Tensor:
    out = torch.empty_like(rows[0])
    fallback.aggregate_mixed(list(rows), mix, out=out)
    return out


def assert_mixes(gradients: Tensor, mix: Mix, device: str) -> None:
    """Mix on ``device`` and compare bit for bit with the definition."""
    found, _ = aggregate_mixed(list(gradients.to(device)), mix)
    assert_same_bits(found.cpu(), wanted_mixed(gradients, mix))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [*ROWS, 200])
def test_distances_have_the_bits_of_the_definition(
    device: str, rows: int, dtype: torch.dtype
) -> None:
    if device == "cpu" and rows not in (3, 17):
        pytest.skip("csrc/checks has the CPU's every row count")
    for numel in (0, 1, 255, 2049, 2 * BLOCK + 77):
        gradients = quiet_gradients(rows, numel, dtype, seed=numel)
        found = compute.measure_rows(list(gradients.to(device)))
        np.testing.assert_array_equal(found, distance_sums(list(gradients)))


@pytest.mark.parametrize("offset", [0, 1, 3])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_alignment_does_not_change_a_bit(device: str, dtype: torch.dtype, offset: int) -> None:
    gradients = quiet_gradients(8, 3001, dtype, seed=offset)
    wide = torch.nn.functional.pad(gradients, (offset, 2)).to(device)
    rows = list(wide[:, offset : offset + 3001])
    np.testing.assert_array_equal(compute.measure_rows(rows), distance_sums(list(gradients)))
    rule = loft.Robust(2)
    wanted = loft.aggregate(gradients, rule)
    assert_same_bits(loft.aggregate(rows, rule).cpu(), wanted)


@pytest.mark.parametrize("is_weighted", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", ROWS)
def test_mixed_rows_have_the_bits_of_the_definition(
    device: str, rows: int, dtype: torch.dtype, is_weighted: bool
) -> None:
    if device == "cpu" and rows != 5:
        pytest.skip("csrc/checks has the CPU's every row count")
    gradients = hard_gradients(rows, 777, dtype, seed=rows)
    for num_mixed in sorted({1, (rows + 1) // 2, rows}):
        weights = [1 + row % 3 for row in range(num_mixed)] if is_weighted else None
        for rule in rules_for(num_mixed):
            mix = any_mix(rows, num_mixed, rule, weights, seed=num_mixed)
            assert_mixes(gradients, mix, device)


@pytest.mark.parametrize("is_finite", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", ROWS)
def test_rows_mixed_by_a_common_weight_have_the_bits_of_the_definition(
    device: str, rows: int, dtype: torch.dtype, is_finite: bool
) -> None:
    if device == "cpu" and rows != 5:
        pytest.skip("csrc/checks has the CPU's every row count")
    gradients = hard_gradients(rows, 777, dtype, seed=rows)
    if is_finite:
        gradients = torch.where(gradients.isfinite(), gradients, -torch.zeros_like(gradients))
    for num_mixed in sorted({1, (rows + 1) // 2, rows}):
        for rule in rules_for(num_mixed):
            assert_mixes(gradients, common_mix(rows, num_mixed, rule), device)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "text",
    [
        "robust:f=2",
        "bucketing:size=2+median",
        "arc+nnm+trimmed_mean:f=1",
        "bucketing:size=2+trimmed_mean:f=1",
        "multi_krum:f=2",
        "geometric_median:f=2",
        "centred_clipping:f=2",
        "caf:f=2",
        "principal_axis:f=2",
        "bulyan:f=1",
        "minimum_diameter:f=2",
        "clip:norm=2+phocas:f=1",
    ],
)
def test_a_rule_gives_the_same_bits_on_every_device(
    device: str, text: str, dtype: torch.dtype
) -> None:
    gradients = quiet_gradients(9, 4099, dtype, seed=3)
    rule = loft.parse_rule(text)
    for weights in (None, [1, 2, 3, 1, 2, 3, 1, 2, 3]):
        found = loft.aggregate(gradients.to(device), rule, weights=weights)
        assert_same_bits(found.cpu(), loft.aggregate(gradients, rule, weights=weights))


def test_absent_rows_are_as_if_deleted(device: str) -> None:
    gradients = quiet_gradients(8, 5001, torch.float32, seed=5).to(device)
    present = [True, True, False, True, True, True, True, True]
    result = loft.aggregate(gradients, loft.Robust(1), present=present)
    left = torch.cat([gradients[:2], gradients[3:]])
    assert_same_bits(result.cpu(), loft.aggregate(left, loft.Robust(1)).cpu())


@pytest.mark.parametrize("rows", [4, 9, 20, 40])
def test_diagnostics_of_mixed_rows_say_the_same_on_every_device(device: str, rows: int) -> None:
    gradients = quiet_gradients(rows, 2 * BLOCK + 7233, torch.float32, seed=7)
    result, found = loft.diagnose(gradients.to(device), loft.Robust(1), every=2)
    wanted, said = loft.diagnose(gradients, loft.Robust(1), every=2)
    assert_same_bits(result.cpu(), wanted)
    assert found.num_seen == said.num_seen
    assert found.num_outside == said.num_outside == (0,) * rows
    assert found.num_non_finite == said.num_non_finite
    assert found.squared_distance == pytest.approx(said.squared_distance, rel=1e-10)


@gpu
@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")  # torch's, as nothing was captured
def test_mixes_of_many_rows_are_refused_inside_a_graph(device: str) -> None:
    if device == "cpu":
        pytest.skip("a CPU has no graphs")
    rows, out = torch.zeros(40, 99, device=device), torch.empty(99, device=device)
    sums = compute.measure_rows(list(quiet_gradients(40, 99, torch.float32, seed=1)))
    decided = compute.decide(loft.Robust(9), sums, None, precision=torch.float32)
    with pytest.raises(ValueError, match=r"CUDA graph, which takes up to 32 rows"):
        captured(lambda: compute.aggregate_rows(list(rows), decided, weights=None, out=out))


@gpu
@pytest.mark.gpu
def test_a_decided_mix_is_captured_into_a_graph_and_replayed(device: str) -> None:
    if device == "cpu":
        pytest.skip("a CPU has no graphs")
    gradients = quiet_gradients(8, 10_007, torch.float32, seed=10)
    rule = loft.Robust(2)
    sums = compute.measure_rows(list(gradients))
    decided = compute.decide(rule, sums, None, precision=torch.float32)
    rows, out = torch.zeros(8, 10_007, device=device), torch.empty(10_007, device=device)
    graph = captured(lambda: compute.aggregate_rows(list(rows), decided, weights=None, out=out))
    rows.copy_(gradients)
    graph.replay()
    assert_same_bits(out.cpu(), loft.aggregate(gradients, rule))
