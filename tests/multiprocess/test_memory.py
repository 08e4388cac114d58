"""A rank that runs out of memory is named everywhere, and the next run gives it less."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from loft_hvd.balance.memory import logged_caps
from tests.support.launch import launch

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(200)]

JOB = "tests/multiprocess/jobs/memory.py"
HOLDS = 20


@pytest.mark.long
def test_out_of_memory_names_rank_and_size_everywhere_and_is_remembered(tmp_path: Path) -> None:
    env = {"LOFT_HVD_LOG_DIR": str(tmp_path)}
    failed = launch(3, [JOB], timeout_s=60, env=env)
    assert failed.returncode not in (0, None), failed.output[-4000:]
    says = r"rank 1 ran out of memory with a batch of (\d+) samples"
    sizes = re.findall(says, failed.output)
    assert sizes, failed.output[-6000:]
    assert int(sizes[0]) > HOLDS
    for rank in range(3):  # a PeerError, or Horovod's error with a note
        assert re.search(rf"\[{rank}\]<stderr>:.*{says}", failed.output), failed.output[-6000:]
    assert list(logged_caps(tmp_path).values()) == [16]  # the largest batch it had finished
    again = launch(3, [JOB], timeout_s=60, env=env)
    again.succeeded()
    assert again.output.count("has finished; rank 1 had 16 samples at most") == 3


@pytest.mark.long
def test_a_probe_before_training_finds_what_the_device_holds(tmp_path: Path) -> None:
    done = launch(3, [JOB, "probe"], timeout_s=60, env={"LOFT_HVD_LOG_DIR": str(tmp_path)})
    done.succeeded()
    assert done.output.count("has probed (44, 20, 44)") == 3
    assert done.output.count("has finished; rank 1 had 20 samples at most") == 3
    assert sorted(logged_caps(tmp_path).values()) == [20, 44, 44]
