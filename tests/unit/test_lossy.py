"""What the benchmark of losses simulates is what ranks compute."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import loft_hvd as loft
from benchmarks.lossy import reduce_lossy
from loft_hvd.transport.local import Faults, LocalTransport, run_ranks

NUM_RANKS, NUMEL = 5, 4810


@pytest.mark.parametrize("loss", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("rule", [loft.TrimmedMean(1), loft.Robust(1)], ids=str)
def test_the_simulation_has_the_results_of_a_job(
    rule: loft.Rule, loss: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw: Any = Faults.lost_blocks
    monkeypatch.setattr(Faults, "lost_blocks", lambda self, _, *a, **b: draw(self, "", *a, **b))
    rows = torch.randn(NUM_RANKS, NUMEL, generator=torch.Generator().manual_seed(0))

    def work(end: LocalTransport) -> Tensor:
        parameter = torch.nn.Parameter(torch.zeros(NUMEL))
        optimizer = loft.DistributedOptimizer(
            torch.optim.SGD([parameter], lr=1.0),
            rule=rule,
            scope="model" if rule.sees_rows else None,
            worker_momentum=0.0,
            transport=end,
            gather=loft.LossTolerant(critical=()),
        )
        parameter.backward(rows[end.rank])
        optimizer.step()
        assert parameter.grad is not None
        return parameter.grad

    faults = Faults(loss=loss)
    due = reduce_lossy(rows, rule, faults, exchange="")
    # Distances over the model are sums of owners' parts, here of whole rows: 9e-7 apart.
    most = 5e-6 if rule.sees_rows else 0.0
    for found in run_ranks(NUM_RANKS, work, faults=faults):
        torch.testing.assert_close(found, due, rtol=0, atol=most)
    if loss:
        whole = reduce_lossy(rows, rule, Faults(), exchange="")
        assert (due - whole).abs().max() > 0.01
