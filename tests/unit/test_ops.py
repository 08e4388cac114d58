"""The torch.library operators: checked by torch itself, and under torch.compile."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

import loft_hvd as loft
from loft_hvd.aggregation import compute, ops
from loft_hvd.errors import AggregationError, ArgumentError
from tests.support.gradients import assert_same_bits, expected, hard_gradients


@pytest.mark.parametrize("weights", [None, [1, 2, 3]])
@pytest.mark.parametrize(
    ("dtype", "rule"),
    [
        (torch.float32, "median"),
        (torch.bfloat16, "trimmed_mean:f=1"),
        (torch.float16, "phocas:f=1"),
        (torch.float64, "mean"),
    ],
)
def test_opcheck_passes(weights: list[int] | None, dtype: torch.dtype, rule: str) -> None:
    rows = list(torch.randn(3, 20, generator=torch.Generator().manual_seed(1)).to(dtype))
    torch.library.opcheck(ops.aggregate, (rows, rule, weights))
    torch.library.opcheck(ops.aggregate_out, (rows, rule, weights, torch.empty_like(rows[0])))


def test_fake_tensors_have_the_shape_and_dtype_of_the_result() -> None:
    with FakeTensorMode():
        rows = [torch.empty(7, dtype=torch.bfloat16, device="cuda") for _ in range(3)]
        result = torch.ops.loft_hvd.aggregate(rows, "median", [1, 2, 3])
        assert isinstance(result, FakeTensor)
        assert (result.shape, result.dtype, result.device.type) == ((7,), torch.bfloat16, "cuda")
        out = torch.empty(7, dtype=torch.bfloat16, device="cuda")
        assert torch.ops.loft_hvd.aggregate_out(rows, "median", None, out) is None


def test_operator_gives_the_bits_of_the_function() -> None:
    gradients = hard_gradients(5, 50, torch.float32, seed=1)
    result = torch.ops.loft_hvd.aggregate(list(gradients), "trimmed_mean:f=1")
    assert_same_bits(result, loft.trimmed_mean(gradients, f=1))


@pytest.mark.parametrize("rule", ["mean", "median", "trimmed_mean:f=1"])
@pytest.mark.parametrize(
    ("weights", "match"),
    [
        ([1, 0, 1], "weight 0 of row 1 must be >= 1.*the rows that count"),
        ([1, 0, 2], "weight 0 of row 1"),
        ([2, -2, 2], "weight -2 of row 1"),
        ([0, 0, 0], "weight 0 of row 0"),
        ([1, 1], "weights has 2 values, but there are 3 rows"),
        ([2**31, 1, 1], "exact"),
    ],
)
def test_operator_refuses_weights_that_do_not_count(
    rule: str, weights: list[int], match: str
) -> None:
    rows = [torch.full((2,), value) for value in (1.0, 100.0, 3.0)]
    with pytest.raises(ArgumentError, match=match):
        torch.ops.loft_hvd.aggregate(rows, rule, weights)
    out = torch.full((2,), 7.0)
    with pytest.raises(ArgumentError, match=match):
        torch.ops.loft_hvd.aggregate_out(rows, rule, weights, out)
    assert out.tolist() == [7.0, 7.0]


def test_operator_without_rows_says_so() -> None:
    with pytest.raises(AggregationError, match="no rows"):
        torch.ops.loft_hvd.aggregate([], "mean")
    with pytest.raises(AggregationError, match="no rows"):
        torch.ops.loft_hvd.aggregate_out([], "mean", None, torch.ones(3))


@pytest.mark.parametrize("weights", [[1, 1, 1], [4, 4, 4], [1]])
def test_weights_are_dropped_where_all_are_equal(weights: list[int]) -> None:
    assert compute.reduce_weights(weights) is None


def test_weights_are_divided_by_what_divides_them_all() -> None:
    assert compute.reduce_weights([4, 6, 2]) == [2, 3, 1]


def test_aggregate_compiles_into_one_graph() -> None:
    def step(gradients: Tensor) -> Tensor:
        aggregated: Tensor = loft.trimmed_mean(gradients * 2, f=1, weights=[1, 2, 1, 1])
        return aggregated + 1

    gradients = torch.randn(4, 64)
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(gradients), step(gradients), rtol=0, atol=0)


@pytest.mark.parametrize(
    "rule", [loft.Mean(), loft.Median(), loft.MeanAroundMedian(1), loft.Phocas(1)], ids=str
)
def test_every_rule_out_and_presence_compile_into_one_graph(rule: loft.Rule) -> None:
    def step(gradients: Tensor, out: Tensor) -> Tensor:
        loft.aggregate(gradients, rule, present=[True, False, True, True, True], out=out)
        return out * 2

    gradients = hard_gradients(5, 50, torch.float32, seed=3)
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    out, wanted = torch.empty(50), torch.empty(50)
    assert_same_bits(compiled(gradients, out), step(gradients, wanted))
    assert_same_bits(out, wanted)


def test_new_lengths_compile_without_a_graph_each() -> None:
    graphs: list[object] = []

    def count(module: torch.fx.GraphModule, inputs: object) -> object:
        del inputs
        graphs.append(module)
        return module.forward

    compiled = torch.compile(lambda g: loft.median(g) + 1, fullgraph=True, backend=count)
    for numel in (16, 33, 70, 101):
        gradients = hard_gradients(4, numel, torch.float32, seed=numel)
        assert_same_bits(compiled(gradients), loft.median(gradients) + 1)
    assert len(graphs) <= 2  # one of the first length, one of any


def test_without_the_extension_plain_torch_runs_and_warns_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(compute, "extension", lambda: None)
    compute.warn_once.cache_clear()
    gradients = hard_gradients(7, 70_001, torch.float32, seed=2)
    rule = loft.TrimmedMean(2)
    with pytest.warns(RuntimeWarning, match="plain torch"):
        result = loft.aggregate(gradients, rule)
    assert_same_bits(result, expected(gradients, rule))
    weights = [1, 2, 3, 1, 2, 3, 1]
    heavy = loft.aggregate(gradients, rule, weights=weights)  # no second warning: it would raise
    assert_same_bits(heavy, expected(gradients, rule, weights=weights))
