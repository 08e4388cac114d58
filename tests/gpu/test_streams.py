"""Gradients that are computed on streams of a real GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import loft_hvd as loft
from loft_hvd.transport.local import LocalTransport, run_ranks
from tests.support.wrapped import wrap

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
_SLEEP_CYCLES = 50_000_000  # a choice: some 30 ms, in which a bucket would be long on its way


class Slow(torch.autograd.Function):
    """The same values, whose gradient takes its time on the GPU."""

    @staticmethod
    def forward(_: Any, values: Tensor) -> Tensor:
        return values.clone()

    @staticmethod
    def backward(_: Any, *grads: Tensor) -> Tensor:
        torch.cuda._sleep(_SLEEP_CYCLES)
        return grads[0] * 2


@pytest.mark.gpu
@needs_cuda
def test_a_bucket_waits_for_a_gradient_that_another_stream_computes() -> None:
    """The hook of the slow one comes first, and that of the bucket's last one is not behind it."""

    def work(transport: LocalTransport) -> list[float]:
        params = [torch.nn.Parameter(torch.zeros(1000, device="cuda")) for _ in range(2)]
        optimizer = wrap(params, transport, rule=loft.Mean())
        side, sums = torch.cuda.Stream(), []
        for _ in range(3):
            side.wait_stream(torch.cuda.current_stream())
            total = params[0].sum()
            with torch.cuda.stream(side):
                # Last, so that its backward pass is the first.
                slow: Tensor = Slow.apply(params[1])  # type: ignore[no-untyped-call]  # by torch
                total_slow = slow.sum()
            torch.cuda.current_stream().wait_stream(side)
            ((total + total_slow) * (transport.rank + 1)).backward()
            optimizer.synchronize()
            sums += [float(param.grad.sum()) for param in params if param.grad is not None]
            optimizer.zero_grad()
        return sums

    assert run_ranks(2, work) == [[1500.0, 3000.0] * 3] * 2
