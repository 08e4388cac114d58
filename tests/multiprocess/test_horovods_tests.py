"""What Horovod's own tests ask of its optimizer, asked of ours.

They are in Horovod's repository alone: ``HOROVOD_SOURCE`` names a folder with v0.28.1 of it.
"""

from __future__ import annotations

import pytest

from tests.support.converted import horovods_source
from tests.support.launch import launch

pytestmark = [pytest.mark.multiprocess, pytest.mark.long, pytest.mark.timeout(200)]

JOB = "tests/multiprocess/jobs/horovods_tests.py"
# All of test/parallel/test_torch.py that make a DistributedOptimizer without a GPU, but for
# test_optimizer_no_named_parameters, which reads a private attribute.
TESTS = (
    "test_broadcast_state",
    "test_broadcast_state_options",
    "test_broadcast_state_no_grad",
    "test_force_allreduce",
    "test_duplicate_names",
    "test_dynamic_requires_grad",
    "test_gradient_clipping",
    "test_synchronize_step_warning",
    "test_no_named_parameters",
    "test_missing_named_parameters",
    "test_sparse_embeddings",
    "test_optimizer_process_sets",
)


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("whose", ["theirs", "ours"])
def test_horovods_tests_of_its_optimizer_pass(whose: str, num_ranks: int) -> None:
    source = str(horovods_source())
    # Their models begin otherwise on every rank: they look at calls, not at results.
    env = {"LOFT_HVD_COPIES": "ignore"}
    done = launch(num_ranks, [JOB, source, whose, *TESTS], timeout_s=150, env=env)
    done.succeeded()
    for name in TESTS:
        assert done.output.count(f"{name}: passed") == num_ranks, done.output[-9000:]
