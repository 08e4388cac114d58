"""A real device's memory: filled, told from other errors, and probed."""

from __future__ import annotations

import pytest
import torch

from loft_hvd.balance.memory import try_batches

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")


@pytest.mark.gpu
@needs_cuda
def test_probing_finds_what_the_device_holds_and_leaves_it_free() -> None:
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    sample_bytes = free // 40

    def step(num_samples: int) -> None:
        torch.empty(num_samples * sample_bytes, dtype=torch.uint8, device="cuda")

    probed = try_batches(step, limit=500, grain=1, headroom=0.0)
    assert probed.error is None
    assert 36 <= probed.cap <= 40
    assert torch.cuda.mem_get_info()[0] > 0.9 * free
