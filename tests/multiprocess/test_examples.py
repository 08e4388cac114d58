"""The scripts in ``examples/`` that users copy do what their heads say."""

from __future__ import annotations

import re

import pytest

from tests.support.launch import ROOT, launch

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(200)]


def run(num_ranks: int, *arguments: str) -> str:
    return launch(num_ranks, ["-W", "error", *arguments], timeout_s=180).succeeded()


def torchrun(num_ranks: int, *arguments: str) -> str:
    return launch(num_ranks, arguments, launcher="torchrun", timeout_s=180).succeeded()


@pytest.mark.long
def test_report_only_names_the_rank_with_the_slow_disk() -> None:
    output = run(3, "examples/report_only.py", "--slow-disk", "2", "--epochs", "2")
    assert re.findall(r"rank (\d) is slow: (\w+)", output) == [("2", "fetch")], output


@pytest.mark.long
def test_fixed_sizes_trains_with_the_sizes_of_the_list() -> None:
    output = run(4, "examples/fixed_sizes.py", "--batch-sizes", "2,2,2,15", "--epochs", "2")
    assert "sizes [2, 2, 2, 15] of global_batch_size=21" in output
    losses = [float(loss) for loss in re.findall(r"loss (\d+\.\d+) over 1797 samples", output)]
    assert losses[1] < 0.5 * losses[0]


@pytest.mark.long
def test_unequal_cluster_gives_the_slow_rank_fewer_samples() -> None:
    output = run(3, "examples/unequal_cluster.py", "--slow", "2", "--epochs", "10")
    (*_, last) = re.findall(r"epoch \d+: .* sizes \[(\d+), (\d+), (\d+)\]", output)
    sizes = [int(size) for size in last]
    assert sum(sizes) == 96
    assert sizes[2] < 0.75 * min(sizes[:2]), output


@pytest.mark.long
def test_ddp_under_torchrun_leaves_the_faulty_rank_out() -> None:
    options = ["--batch-sizes", "16,16,8,4", "--faulty", "3", "--epochs", "2"]
    output = torchrun(4, "examples/ddp.py", *options)
    losses = [float(loss) for loss in re.findall(r"epoch \d: loss (\d+\.\d+)", output)]
    assert losses[-1] < 0.7 * losses[0], output
    assert re.search(r"^ +3 +\d.* in quarantine until step \d+$", output, re.MULTILINE), output


@pytest.mark.long
def test_fsdp_under_torchrun_leaves_the_faulty_rank_out() -> None:
    output = torchrun(4, "examples/fsdp.py", "--faulty", "3", "--epochs", "3")
    losses = [float(loss) for loss in re.findall(r"epoch \d: loss (\d+\.\d+)", output)]
    assert losses[-1] < 0.7 * losses[0], output
    assert re.search(r"^ +3 +\d.* in quarantine until step \d+$", output, re.MULTILINE), output


@pytest.mark.long
def test_ddp_under_torchrun_holds_passes_back() -> None:
    output = torchrun(2, "examples/ddp.py", "--batch-sizes", "24,8", "--passes", "2")
    losses = [float(loss) for loss in re.findall(r"epoch \d: loss (\d+\.\d+)", output)]
    assert losses[-1] < 0.5 * losses[0], output
    assert "of 2 workers nobody can say which one is off" in output


def test_every_example_is_listed() -> None:
    listed = (ROOT / "examples/README.md").read_text()
    for path in (ROOT / "examples").glob("*.py"):
        assert f"`{path.name}`" in listed, f"{path.name} is missing from examples/README.md"
