"""docs/architecture.md names files that exist, and its ways stay as short as they are."""

from __future__ import annotations

import gc
import os
import re
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from types import FrameType

import pytest
import torch
from torch.utils.data import TensorDataset

import loft_hvd as loft
from loft_hvd._native import extension
from loft_hvd.transport.base import Abilities, Channel, Transport
from loft_hvd.transport.device import DeviceGroup
from loft_hvd.transport.local import LocalTransport, run_ranks
from loft_hvd.transport.mesh import open_mesh
from tests.support.files_run import FilesRun
from tests.support.plans import FakePlans
from tests.support.worlds import environment

HOME = Path(__file__).parents[2]
PAGE = (HOME / "docs/architecture.md").read_text(encoding="utf-8")
SECTIONS = dict(re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", PAGE, re.DOTALL | re.MULTILINE))
FILES = sorted(set(re.findall(r"`([\w/]+\.(?:py|h|cpp|cu|md))`", PAGE)))


def way(section: str) -> list[str]:
    """Return the files of a numbered list, in order."""
    return re.findall(r"^\d+\. `([\w/.]+)`", SECTIONS[section], re.MULTILINE)


def climbs(section: str) -> int:
    return len(re.findall(r"\*\*climb\*\*", SECTIONS[section]))


def beside(section: str) -> list[str]:
    text = SECTIONS[section].partition("Beside the way")[2]
    return re.findall(r"`([\w/]+\.\w+)`", text)


@pytest.mark.parametrize("name", FILES)
def test_file_that_the_page_names_exists(name: str) -> None:
    assert (HOME / name).is_file()


@pytest.mark.parametrize(
    ("section", "most_files", "most_climbs"),
    [
        ("A gradient", 16, 2),
        ("A stored sample", 9, 0),
        ("A batch size", 16, 99),
        ("A rank's failure", 14, 2),
    ],
)
def test_way_is_short(section: str, most_files: int, most_climbs: int) -> None:
    files = way(section)
    assert len(set(files)) == len(files)
    assert 0 < len(files) <= most_files
    assert climbs(section) <= most_climbs


def test_way_of_a_kernel_call_is_short() -> None:
    files = way("A kernel call")
    assert 0 < sum(name.startswith("loft_hvd/") for name in files) <= 5
    assert 0 < sum(name.startswith("csrc/") for name in files) <= 8


def test_new_rule_costs_six_files() -> None:
    assert 0 < len(way("A new rule")) <= 6


def test_kernel_call_passes_the_files_of_the_page() -> None:
    if extension() is None:
        pytest.skip("the C++ extension is not built")
    rows = torch.randn(5, 100)
    loft.median(rows)  # the first call loads the extension and reads the settings
    with FilesRun() as run:
        loft.median(rows, weights=[1, 2, 3, 4, 5])
    named = {name for name in way("A kernel call") if name.startswith("loft_hvd/")}
    assert named <= run
    assert run <= named | set(beside("A kernel call"))


def files_of_training(*, num_steps: int, policy: str | None) -> set[str]:
    """Return the files that three ranks, which are threads, pass in training steps."""
    gc.collect()  # trainings of other tests, whose hooks on all modules go with them
    runs: dict[int, set[str]] = {}

    def train(transport: Transport) -> None:
        model = torch.nn.Linear(4, 3)
        for parameter in model.parameters():  # threads share torch's random numbers
            torch.nn.init.ones_(parameter)
        balancer = policy and loft.Balancer(24, policy, interval=4, transport=transport)
        optimizer = loft.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1),
            named_parameters=model.named_parameters(),
            rule=loft.TrimmedMean(f=1),
            balancer=balancer or None,
            transport=transport,
        )
        dataset = TensorDataset(torch.ones(24 * num_steps, 4))
        batches = loft.DataLoader(dataset, balancer) if balancer else [dataset.tensors] * num_steps
        with FilesRun() as runs[transport.rank]:
            for (rows,) in batches:
                optimizer.zero_grad()
                model(rows).sum().backward()
                optimizer.step()

    run_ranks(3, train)
    return {name for run in runs.values() for name in run}


class OfOneHost(LocalTransport):
    """One rank's end of a world whose ranks may share memory, or have a process group."""

    def __init__(self, end: LocalTransport) -> None:
        super().__init__(end._world, end.rank)
        self.can = Abilities(world=(end._world, end.rank), open_group=self._open_group)

    def _open_group(self, channel: Channel, device: torch.device) -> DeviceGroup:
        mesh = open_mesh(channel, interface="lo")
        assert mesh is not None
        return DeviceGroup(mesh.group, device, mesh.close)


class Touching(FilesRun):
    """Those files in which a function is given gradients, or what becomes of them."""

    def note(self, frame: FrameType, event: str, given: object) -> None:
        code = frame.f_code
        names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        for value in (frame.f_locals.get(name) for name in names):
            each = value if isinstance(value, list | tuple) else [value]
            if any(map(is_gradient, each)):
                super().note(frame, event, given)


def is_gradient(value: object) -> bool:
    is_tensor = isinstance(value, torch.Tensor) and not isinstance(value, torch.nn.Parameter)
    return is_tensor and value.numel() >= NUMEL / 7  # type: ignore[attr-defined]  # a shard's


NUMEL = 1200


def files_that_touch_a_gradient(rule: loft.Rule) -> set[str]:
    """Return the files that are given gradients in the third step of seven ranks on one host."""
    found: dict[int, set[str]] = {}

    def train(end: LocalTransport) -> None:
        model = torch.nn.Linear(40, 30, bias=False)
        torch.nn.init.ones_(model.weight)  # threads share torch's random numbers
        optimizer = loft.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1),
            model.named_parameters(),
            rule=rule,
            transport=OfOneHost(end),
        )
        run = Touching()
        run.prepare()
        for step in range(3):
            optimizer.zero_grad()
            loss = model(torch.full((8, 40), 1.0 + end.rank)).sum()
            if step < 2:
                loss.backward()
                optimizer.step()
                continue
            with run as found[end.rank]:
                loss.backward()
                optimizer.step()

    run_ranks(7, train)
    return {name for run in found.values() for name in run}


@pytest.mark.parametrize("lane", ["shared-memory", "device"])
def test_gradient_passes_the_files_of_the_page(lane: str) -> None:
    if extension() is None:
        pytest.skip("the C++ extension is not built")
    with environment(LOFT_HVD_LANE=lane):
        touched = files_that_touch_a_gradient(loft.Robust(2))
    named = {*way("A gradient"), *way("A kernel call"), *beside("A gradient")}
    others = {"loft_hvd/transport/device.py", "loft_hvd/transport/local.py"}
    assert touched <= named | others
    assert len(touched - {"loft_hvd/transport/local.py"}) <= 16
    run = files_of_training(num_steps=1, policy=None)
    known = named | {*beside("A kernel call"), "loft_hvd/transport/local.py"}
    assert run <= known


KNOWN = {name for section in SECTIONS for name in (*way(section), *beside(section))}


def test_batch_size_passes_the_files_of_the_page() -> None:
    run = files_of_training(num_steps=12, policy="loft")
    assert set(way("A batch size")) - run == {"loft_hvd/transport/horovod.py"}
    assert run <= KNOWN | {"loft_hvd/transport/local.py"}


def test_stored_sample_passes_the_files_of_the_page() -> None:
    pytest.importorskip("pyarrow.flight", reason="the extra [store] is not installed")
    runs: dict[int, set[str]] = {}

    def read(end: LocalTransport) -> None:
        plans = FakePlans((30, 10), rank=end.rank)
        dataset = TensorDataset(torch.arange(400.0))
        store = loft.SampleStore(dataset, memory_bytes=1 << 20, transport=end)
        loader = loft.DataLoader(store, plans, seed=3)
        with FilesRun() as runs[end.rank]:
            for epoch in range(3):
                loader.set_epoch(epoch)
                for _ in loader:
                    plans.next_step += 1
        store.close()

    run_ranks(2, read)
    run = {name for each in runs.values() for name in each}
    # The gate is in the process of a server.
    assert set(way("A stored sample")) - run <= {"loft_hvd/store/gate.py"}
    named = KNOWN | {"loft_hvd/transport/local.py"}
    assert run <= named


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("kill", "has ended without a word"),
        pytest.param("stop", "is frozen", marks=pytest.mark.long),
    ],
)
def test_failure_passes_the_files_of_the_page_names_its_rank_and_ends_every_process(
    how: str, says: str, tmp_path: Path
) -> None:
    job = subprocess.Popen(
        [sys.executable, "-m", "tests.support.files_run", str(tmp_path), how],
        cwd=HOME,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        ended, said = job.communicate(timeout=250)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(job.pid, signal.SIGKILL)
        job.communicate()
    assert ended == f"ended 1 {-signal.SIGKILL}\n", said  # a frozen one by rank 0
    named = rf"PeerError: bucket 0 .* rank 1 \(process \d+ on .*\) {says}"
    assert re.search(named, said), said
    run = set((tmp_path / "files").read_text(encoding="utf-8").split())
    assert {name for name in way("A rank's failure") if name.startswith("loft_hvd/")} <= run
    assert run <= KNOWN
