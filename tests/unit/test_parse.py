"""Files of machines and jobs are checked: what is wrong is named, with the way out."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from loft_hvd.errors import ArgumentError, DataError
from loft_hvd.fleet.jobs import Fleet, Job
from loft_hvd.fleet.parse import read_cluster, read_jobs

CLUSTER = """
latency_s = 1e-4
[[racks]]
name = "left"
link_bytes_per_s = 1e9
[[hosts]]
name = "node-1"
slots = { A100 = 4, "CPU EPYC" = 2 }
link_bytes_per_s = 1.25e9
rack = "left"
price_per_hour = 3.5
[[hosts]]
name = "node-2.lab"
slots = { T4 = 1 }
link_bytes_per_s = 12.5e6
rack = "left"
[[data]]
name = "photos"
num_samples = 1000
sample_bytes = 1e5
homes = { node-1 = 6e7 }
"""
JOBS = """
[[jobs]]
name = "resnet"
command = ["python", "train.py"]
model_bytes = 1e8
global_batch_size = 256
epochs = 3
data = "photos"
rule = "trimmed_mean:f=1"
[jobs.models.A100]
compute_s = 1e-3
[jobs.models.T4]
compute_s = 4e-3
"""


def read(tmp_path: Path, cluster: str, jobs: str) -> tuple[Fleet, dict[str, Job]]:
    (tmp_path / "cluster.toml").write_text(cluster)
    (tmp_path / "jobs.toml").write_text(jobs)
    fleet = read_cluster(tmp_path / "cluster.toml")
    return fleet, read_jobs(tmp_path / "jobs.toml", fleet)


def test_files_are_read_whole(tmp_path: Path) -> None:
    fleet, jobs = read(tmp_path, CLUSTER, JOBS)
    assert [host.name for host in fleet.hosts] == ["node-1", "node-2.lab"]
    assert fleet.hosts[0].slots == {"A100": 4, "CPU EPYC": 2}
    assert fleet.data[0].share("node-1") == pytest.approx(0.6)
    assert jobs["resnet"].models["T4"].compute_s == 4e-3
    assert jobs["resnet"].num_steps(fleet.data[0]) == 3 * 3


@pytest.mark.parametrize(
    ("before", "after", "match"),
    [
        ("latency_s = 1e-4", "latency = 1", r"cluster.toml: cluster needs keys .*'latency'\] are"),
        (
            'name = "node-1"\n',
            "",
            r"cluster.hosts\[0\] needs keys .*'name'\] are missing; docs/plan",
        ),
        ("link_bytes_per_s = 12.5e6", "link_bytes_per_s = 0", r"hosts\[1\].link_bytes_per_s needs"),
        ("link_bytes_per_s = 12.5e6", "link_bytes_per_s = nan", r"link_bytes_per_s needs float 1"),
        ("price_per_hour = 3.5", "price_per_hour = -1", r"float 0 to 1e\+09, but got -1"),
        ("slots = { T4 = 1 }", "slots = { T4 = 1.5 }", r"slots\['T4'\] needs int, but got 1.5"),
        ("slots = { T4 = 1 }", "slots = {}", "slots must name a device class"),
        ('name = "node-2.lab"', 'name = "node-1"', "host 'node-1' stands twice"),
        ('name = "node-2.lab"', 'name = "a;rm -rf b"', "host 'a;rm -rf b' must be a host's name"),
        ('name = "node-2.lab"', 'name = "-a"', "must be a host's name"),
        ('rack = "left"\n[[data]]', 'rack = "up"\n[[data]]', r"in rack 'up', but .*\['left'\]"),
        ("{ node-1 = 6e7 }", "{ node-9 = 6e7 }", "home on host 'node-9', which is none of"),
        ("6e7", '6e7, "node-2.lab" = 5e7', "hold 1.10 times the 1e"),
        ("num_samples = 1000", "num_samples = 0", r"data\[0\].num_samples needs int 1 to"),
        ("[[hosts]]", "[[hosts", "not TOML"),
    ],
)
def test_a_wrong_cluster_is_refused(tmp_path: Path, before: str, after: str, match: str) -> None:
    assert before in CLUSTER
    with pytest.raises(ArgumentError, match=match):
        read(tmp_path, CLUSTER.replace(before, after, 1 if "name" not in before else -1), JOBS)


@pytest.mark.parametrize(
    ("before", "after", "match"),
    [
        ('data = "photos"', 'data = "films"', r"data='films', but .* has \['photos'\]; name one"),
        ('rule = "trimmed_mean:f=1"', 'rule = "best"', "rule 'best' is unknown"),
        ("epochs = 3", "epochs = 3\nsteps = 5", "steps=5 and epochs=3.0: give one"),
        ("epochs = 3", "", "steps=None and epochs=None: give one"),
        ('command = ["python", "train.py"]', "command = []", r"command=\[\] must be words"),
        ('command = ["python", "train.py"]', 'command = "python"', "command needs list, but got"),
        ('command = ["python", "train.py"]', 'command = ["a\\nb"]', "without line ends"),
        ('name = "resnet"', 'name = "ResNet$"', "job 'ResNet\\$' must be small letters"),
        ("epochs = 3", 'epochs = 3\nover = "racks"', "over='racks' must be one of"),
        ("epochs = 3", 'epochs = 3\nscope = "model"', "needs a rule that sees rows"),
        ("epochs = 3", "epochs = 3\nmin_workers = 5\nmax_workers = 4", "must be <= max_workers=4"),
        ("compute_s = 4e-3", "compute_s = inf", r"compute_s needs float 1e-12 to"),
        ("compute_s = 4e-3", "speed = 1", "'compute_s'\\] are missing"),
        ("[[jobs]]", "[[job]]", r"needs keys \['jobs'\], .*: \['job'\] are none"),
    ],
)
def test_a_wrong_job_is_refused(tmp_path: Path, before: str, after: str, match: str) -> None:
    assert before in JOBS
    with pytest.raises(ArgumentError, match=match):
        read(tmp_path, CLUSTER, JOBS.replace(before, after, 1))


def test_two_jobs_of_a_name_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="job 'resnet' stands twice"):
        read(tmp_path, CLUSTER, JOBS + JOBS)


def test_a_large_file_is_refused_at_once(tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text("# " + "x" * 50_000_000)
    began = time.process_time()
    with pytest.raises(ArgumentError, match="more than 1000000 bytes"):
        read_cluster(path)
    assert time.process_time() - began < 0.5


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"cluster file .*none.toml' cannot be read"):
        read_cluster(tmp_path / "none.toml")
