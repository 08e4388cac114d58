"""GPUs read each other's memory: four ranks, which may share one GPU."""

from __future__ import annotations

import pytest
import torch

from tests.support.launch import launch

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")


@pytest.mark.gpu
@needs_cuda
@pytest.mark.timeout(300)
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_every_rule_dtype_and_scope_has_the_bits_of_the_cpu(num_ranks: int) -> None:
    job = ["-m", "tests.gpu.lanes", "bits", "--lane", "peer-memory"]
    done = launch(num_ranks, job, launcher="torchrun", timeout_s=280)
    assert f"{num_ranks} ranks on " in done.succeeded()
