"""The example for Ray Train, under Ray's own trainer. ``make test-all`` brings Ray along."""

from __future__ import annotations

import importlib.util
import re

import pytest

from tests.support.launch import launch

if importlib.util.find_spec("ray") is None:
    pytest.skip("no ray here; make test-all brings it", allow_module_level=True)

# Not over the network: what Ray would tell its makers.
_QUIET = {"RAY_USAGE_STATS_ENABLED": "0"}


@pytest.mark.long
@pytest.mark.timeout(200)
def test_rays_trainer_survives_a_faulty_worker_and_names_it() -> None:
    script = ["examples/ray_train.py", "--sizes", "16", "16", "8", "--faulty", "2", "--epochs", "3"]
    output = launch(1, script, launcher="none", timeout_s=180, env=_QUIET).succeeded()
    loss = re.search(r"^loss ([\d.]+)$", output, re.MULTILINE)
    assert loss is not None, output[-3000:]
    assert float(loss[1]) < 0.7  # after one epoch 1.3; ln 10 for one that learns nothing
    named = re.findall(r"^ +(\d) .* STANDS OUT$", output, re.MULTILINE)
    assert named == ["2"], output[-3000:]
