"""Computing is timed by the device where the host only queues it."""

from __future__ import annotations

import pytest
import torch

from loft_hvd.balance.stopwatch import make_device_clock

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")


def test_a_cpu_needs_no_clock_of_its_own() -> None:
    assert make_device_clock(torch.device("cpu")) is None


@pytest.mark.gpu
@needs_cuda
def test_the_span_of_queued_work_is_the_devices_time() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    clock = make_device_clock(device)
    assert clock is not None
    matrix = torch.randn(4096, 4096, device=device)
    torch.cuda.synchronize(device)
    clock.arrived()
    for _ in range(50):
        matrix = matrix @ matrix * 1e-4
    clock.gradient()
    span = clock.take()
    assert span is not None
    torch.cuda.synchronize(device)
    assert span.is_over
    # 50 products of 4096 x 4096 are 6.9 TFLOP: no device does them in a millisecond.
    assert 1e-3 < span.seconds < 60
