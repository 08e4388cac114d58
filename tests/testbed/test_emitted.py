"""Lines that ``loft-hvd plan`` prints start ranks where the plan has them, with its sizes."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

import pytest

from loft_hvd.fleet.emit import emit, first_sizes
from loft_hvd.fleet.jobs import DeviceModel, Fleet, Host, Job
from loft_hvd.fleet.place import Choice
from loft_hvd.fleet.rate import predict
from loft_hvd.fleet.run import JobPlan
from loft_hvd.fleet.traffic import HostRanks, Layout
from tests.support.launch import ROOT
from tests.testbed.hosts import Testbed

pytestmark = [pytest.mark.multiprocess, pytest.mark.long, pytest.mark.timeout(200)]

SCRIPT = ROOT / "tests/testbed/jobs/placed.py"


@pytest.mark.parametrize("kind", ["horovodrun", "mpirun"])
def test_ranks_and_sizes_are_those_of_the_plan(testbed: Testbed, tmp_path: Path, kind: str) -> None:
    testbed.up(3)
    # host2 comes first: its rack does.
    slots = [
        ("host2", "CPU fast", 1, "a"),
        ("host0", "CPU slow", 2, "b"),
        ("host1", "CPU fast", 1, "b"),
    ]
    parts = [
        HostRanks(Host(name, {device: count}, 1e9, rack=rack), device, count)
        for name, device, count, rack in slots
    ]
    words = ["env", f"PYTHONPATH={ROOT}", "OMP_NUM_THREADS=1", sys.executable, str(SCRIPT)]
    models = {"CPU fast": DeviceModel(1e-3), "CPU slow": DeviceModel(2e-3)}
    job = Job("job", words, 4e6, 24, models, steps=1)
    fleet = Fleet([part.host for part in parts])
    best = predict(fleet, job, Layout.of(parts))
    plan = JobPlan(fleet, job, Choice(best, (), (), {}), None)
    file = tmp_path / "sizes.json"
    file.write_text(first_sizes(plan))
    line = shlex.split(emit(plan, kind, sizes=str(file)))
    root = ["env", "OMPI_ALLOW_RUN_AS_ROOT=1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1"]
    told = testbed.tell("exec", "host2", *root, *line, timeout_s=150)
    found = sorted(re.findall(r"placed (\d) on (\w+) from ([\d,]+)", told))
    assert found == [
        (str(rank), host, "8,4,4,8")
        for rank, host in enumerate(["host2", "host0", "host0", "host1"])
    ]
