"""The torch.library operators: checked by torch itself, and under torch.compile."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from loft_hvd import aggregation as loft
from loft_hvd.aggregation import compute, ops
from tests.support.gradients import assert_same_bits, expected, hard_gradients


@pytest.mark.parametrize("weights", [None, [1, 2, 3]])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_opcheck_passes(weights: list[int] | None, dtype: torch.dtype) -> None:
    rows = list(torch.randn(3, 20).to(dtype))
    torch.library.opcheck(ops.aggregate, (rows, "median", weights))
    torch.library.opcheck(ops.aggregate_out, (rows, "mean", weights, torch.empty_like(rows[0])))


def test_operator_gives_the_bits_of_the_function() -> None:
    gradients = hard_gradients(5, 50, torch.float32, seed=1)
    result = torch.ops.loft_hvd.aggregate(list(gradients), "trimmed_mean:f=1")
    assert_same_bits(result, loft.trimmed_mean(gradients, f=1))


def test_aggregate_compiles_into_one_graph() -> None:
    def step(gradients: Tensor) -> Tensor:
        aggregated: Tensor = loft.trimmed_mean(gradients * 2, f=1, weights=[1, 2, 1, 1])
        return aggregated + 1

    gradients = torch.randn(4, 64)
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(gradients), step(gradients), rtol=0, atol=0)


def test_without_the_extension_plain_torch_runs_and_warns_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(compute, "extension", lambda: None)
    compute._warn_once.cache_clear()
    gradients = hard_gradients(7, 70_001, torch.float32, seed=2)
    rule = loft.TrimmedMean(2)
    with pytest.warns(RuntimeWarning, match="plain torch"):
        result = loft.aggregate(gradients, rule)
    assert_same_bits(result, expected(gradients, rule))
    weights = [1, 2, 3, 1, 2, 3, 1]
    heavy = loft.aggregate(gradients, rule, weights=weights)  # no second warning: it would raise
    assert_same_bits(heavy, expected(gradients, rule, weights=weights))
