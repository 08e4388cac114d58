"""Public bug reports that take real ranks; ``tests/reports.md`` has their sources and verdicts."""

from __future__ import annotations

import re

import pytest

from tests.support.launch import launch

pytestmark = [pytest.mark.multiprocess, pytest.mark.long, pytest.mark.timeout(120)]

JOB = "tests/multiprocess/jobs/reports.py"


def test_a_rank_that_validates_alone_is_waited_for_and_not_named() -> None:
    """huggingface/accelerate#3861; then horovod/horovod#1346 with Horovod's own optimizer."""
    done = launch(3, [JOB, "horovod", "validates", "attached"], timeout_s=90)
    output = done.succeeded(3)
    clipped = r"attached: the gradient of parameter '2\.bias' was changed between loss\.backward"
    assert len(re.findall(clipped, output)) == 3, output[-6000:]
    assert output.count("trained 30 steps") == 3, output[-6000:]
    assert not re.search(r"is silent|frozen|PeerError", output), output[-6000:]


@pytest.mark.parametrize(
    ("case", "whom"), [("stops", r"rank 1\b|ranks \[1\]"), ("uneven", r"rank [12]\b|ranks \[1")]
)
def test_a_rank_that_ends_before_the_others_is_named(case: str, whom: str) -> None:
    """Lightning-AI/pytorch-lightning#379 and horovod/horovod#3980."""
    done = launch(3, [JOB, "horovod", case], timeout_s=90)
    assert done.returncode not in (0, None), done.output[-6000:]
    assert "has finished" not in done.output
    told = [line for line in done.output.splitlines() if "Error" in line]
    assert any(re.search(whom, line) for line in told), done.output[-6000:]
    faults = [float(at) for at in re.findall(r"fault at ([\d.]+)", done.output)]
    assert done.ended_at - max(faults) <= 20.0, done.output[-6000:]


def test_under_ddp_scales_and_splits_are_named_and_unused_parameters_left_alone() -> None:
    """pytorch/pytorch#136009, Lightning-AI/pytorch-lightning#7728, pytorch/pytorch#28294."""
    job = [JOB, "torch", "unused", "scale", "split"]
    output = launch(2, job, launcher="torchrun", timeout_s=90).succeeded(2)
    off = [float(each) for each in re.findall(r"unused: off by ([\d.e+-]+)", output)]
    assert len(off) == 2, output[-6000:]
    assert max(off) < 1e-6
    scale = r"scale: unscaling gradients: the loss scale of torch.amp.GradScaler differs on ranks "
    assert len(re.findall(scale, output)) == 2, output[-6000:]
    split = r"split: ddp_hook, step 1: the batch trained on .*? differs on ranks "
    assert len(re.findall(split, output)) == 2, output[-6000:]
