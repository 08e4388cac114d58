"""Unequal batches in sub-batches: what each of them does with other ranks is found, or is safe."""

from __future__ import annotations

import re

import pytest

from tests.support.launch import launch

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(120)]

JOB = "tests/multiprocess/jobs/sub_batches.py"
LIMIT_S = 20.0


@pytest.mark.long
def test_a_metric_of_the_engines_in_each_sub_batch_ends_with_both_places_named() -> None:
    done = launch(3, [JOB, "engine"], timeout_s=80)
    says = (
        r"ranks \[2\] wait for '[^']+' at sub_batches\.py:\d+ in main while ranks \[0, 1\] wait "
        r"outside of loft_hvd, in the engine's allreduce 'train_loss' at sub_batches\.py:\d+ in "
        r"update; .* use loft\.Metric"
    )
    done.failed(says, within_s=LIMIT_S)


@pytest.mark.long
def test_the_change_that_the_error_tells_makes_it_run() -> None:
    done = launch(3, [JOB, "loft"], timeout_s=80)
    done.succeeded()
    assert len(set(re.findall(r"loss [\d.]+, bits equal: True", done.output))) == 1, done.output
    assert "a step ends after 1 of backward_passes_per_step=3 backward passes" in done.output
