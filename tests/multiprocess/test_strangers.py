"""Ten thousand hostile connections to a rank with 256 descriptors: training goes on as it was."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.launch import ROOT, launch

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(240)]

JOBS = "tests/multiprocess/jobs"


def train(folder: Path, what: str, *, num_bursts: int = 1) -> dict[str, Any]:
    """Run the job, with strangers unless it is to be calm; returns what rank 0 found."""
    folder.mkdir()
    flood = [sys.executable, f"{JOBS}/flood.py", str(folder), "10000", str(num_bursts)]
    strangers = subprocess.Popen(["true"] if what == "calm" else flood, cwd=ROOT)
    try:
        done = launch(2, [f"{JOBS}/strangers.py", str(folder), what], timeout_s=100)
    finally:
        strangers.terminate()
        strangers.wait(timeout=30)
    done.succeeded()
    line = re.search(r"found (\{.*\})", done.output)
    assert line is not None, done.output[-6000:]
    print(f"{what}: {line[1]}")  # noqa: T201 - pytest -rP shows it
    return dict(json.loads(line[1]))


@pytest.mark.long
def test_ten_thousand_strangers_change_no_bit_and_cost_little(tmp_path: Path) -> None:
    calm = train(tmp_path / "calm", "calm")
    opening = train(tmp_path / "opening", "opening")
    training = train(tmp_path / "training", "training", num_bursts=10)
    assert opening["digest"] == training["digest"] == calm["digest"]
    assert opening["start_s"] - calm["start_s"] <= 3.0
    assert min(training["num_flooded"], training["num_calm"]) >= 50
    assert training["flooded_ms"] / training["calm_ms"] <= 1.1
    assert max(opening["memory_mb"], training["memory_mb"]) - calm["memory_mb"] <= 20.0
