"""The example for Ray Train, under Ray's own trainer. ``make test-all`` brings Ray along."""

from __future__ import annotations

import importlib.util
import os
import re
from pathlib import Path

import pytest

from tests.support.launch import ROOT, launch

_RAY = importlib.util.find_spec("ray")
if _RAY is None or _RAY.origin is None:
    pytest.skip("no ray here; make test-all brings it", allow_module_level=True)

_ENV = {
    "RAY_USAGE_STATS_ENABLED": "0",  # nothing is told to Ray's makers
    "RAY_DEDUP_LOGS": "0",
    # Whole paths, as Ray's processes run in folders of their own.
    "PYTHONPATH": os.pathsep.join([str(ROOT), str(Path(_RAY.origin).resolve().parents[1])]),
}
_EPOCH = re.compile(r"epoch (\d): loss ([\d.]+)")


@pytest.mark.long
@pytest.mark.timeout(200)
def test_rays_trainer_survives_a_faulty_worker_and_names_it() -> None:
    script = ["examples/ray_train.py", "--sizes", "16", "16", "8", "--faulty", "2", "--epochs", "3"]
    output = launch(1, script, launcher="none", timeout_s=180, env=_ENV).succeeded()
    # Ray shows what a rank prints behind the name of its process, and twice.
    losses = {int(epoch): float(loss) for epoch, loss in _EPOCH.findall(output)}
    assert losses.keys() == {0, 1, 2}, output[-3000:]
    assert losses[2] < 0.5 * losses[0]
    named = re.findall(r"(?m) +(\d) +[\d.]+ .* STANDS OUT$", output)
    assert set(named) == {"2"}, output[-3000:]
