"""``fsdp_hook``: models that FSDP2 shards over ranks, against one process and the DDP hook."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from tests.support.launch import launch
from tests.support.marks import long_first

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(190)]

JOB = "tests/multiprocess/jobs/fsdp_ranks.py"
long = pytest.mark.long


@pytest.mark.long
@pytest.mark.parametrize("lane", long_first(["device", "mesh", "auto"], 2))
def test_gradients_have_the_bits_of_the_definition(lane: str, tmp_path: Path) -> None:
    env = {"LOFT_HVD_LANE": lane}
    done = launch(1, [JOB, "rules", "4", str(tmp_path)], launcher="none", timeout_s=180, env=env)
    done.succeeded(4)


@pytest.mark.long
@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("ip") is None, reason="needs root and ip")
@pytest.mark.parametrize("lane", long_first(["device", "mesh", "auto"]))
def test_no_more_travels_than_under_plain_fsdp2(lane: str, tmp_path: Path) -> None:
    env = {"LOFT_HVD_LANE": lane}
    done = launch(1, [JOB, "wire", "4", str(tmp_path)], launcher="none", timeout_s=120, env=env)
    done.succeeded(4)


@pytest.mark.parametrize(
    ("whats", "num_ranks"),
    [
        ("exact refused", 4),
        pytest.param("attacked averaged", 4, marks=long),
        pytest.param("summed watched", 4, marks=long),
        pytest.param("fitted", 4, marks=long),
        pytest.param("single", 1, marks=long),
    ],
)
def test_sharded_ranks(whats: str, num_ranks: int, tmp_path: Path) -> None:
    """Ranks pass one job after the other in one process group."""
    done = launch(1, [JOB, whats, str(num_ranks), str(tmp_path)], launcher="none", timeout_s=180)
    done.succeeded(num_ranks)
    assert "ranks meet in the backward pass" not in done.output, done.output[-6000:]


@pytest.mark.long
@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("kill", r"rank 1 .*has ended without a word"),
        ("freeze", r"rank 1 .* is frozen"),
        ("raise", r"rank 1 .*has failed: RuntimeError: rank 1"),
    ],
)
def test_a_rank_that_fails_while_others_wait_inside_fsdp2_is_named(
    what: str, says: str, tmp_path: Path
) -> None:
    done = launch(1, [JOB, what, "3", str(tmp_path)], launcher="none", timeout_s=60)
    done.failed(says, within_s=20.0)
