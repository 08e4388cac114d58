"""Elastic jobs recover from ranks that are lost, and take in ranks that join."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

from tests.support.elastic import launch_elastic
from tests.support.launch import Finished
from tests.support.marks import long_first

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(160)]

JOB = "tests/multiprocess/jobs/elastic.py"
LEVELS_JOB = "tests/multiprocess/jobs/elastic_levels.py"
LIMIT_S = 20.0
NUM_STEPS = 48  # three epochs of 192 samples, 12 a step


TWO_NODES = ["localhost:2", "127.0.0.1:2"]


def run(folder: Path, what: str, **options: object) -> Finished:
    return launch_elastic(
        folder,
        [JOB, str(folder), what],
        **{  # type: ignore[arg-type]  # the options of launch_elastic
            "hosts": ["localhost:2", "127.0.0.1:1"],
            "num_ranks": 3,
            "min_ranks": 2,
            "timeout_s": 120.0,
            **options,
        },
    )


@pytest.mark.parametrize(
    ("what", "says"),
    [
        pytest.param(
            "kill",
            r"rank \d \(process \d+ on \S+\) has ended without a word",
            marks=pytest.mark.long,
        ),
        pytest.param(
            "kill:loft",
            r"rank \d \(process \d+ on \S+\) has ended without a word",
            marks=pytest.mark.whole,
        ),
        ("freeze", r"rank \d \(process \d+ on \S+\) is frozen"),
        pytest.param(
            "raise-averaged",
            r"rank \d .* has failed: RuntimeError: rank \d raises",
            marks=pytest.mark.long,
        ),
    ],
)
def test_the_job_recovers_from_a_lost_rank_and_names_it(
    what: str, says: str, tmp_path: Path
) -> None:
    done = run(tmp_path, what)
    assert re.search(says, done.output), done.output[-6000:]
    assert done.output.count(f"of 2 has finished at step {NUM_STEPS}") == 2, done.output[-6000:]
    assert "rank 0 of 2 goes on at step 8" in done.output
    fault_at = float((tmp_path / "fault").read_text().split()[0])
    recovered_at = float((tmp_path / "recovered").read_text())
    assert recovered_at - fault_at <= LIMIT_S


@pytest.mark.long
def test_a_model_that_differs_ends_the_job_instead_of_being_tried_again(tmp_path: Path) -> None:
    began = time.monotonic()
    done = run(tmp_path, "mismatch")
    assert done.returncode not in (0, None), done.output[-6000:]
    assert "MismatchError: DistributedOptimizer: parameter weight differs on ranks [" in (
        done.output
    )
    assert "has finished" not in done.output
    assert time.monotonic() - began < 60


@pytest.mark.long
def test_other_steps_end_the_job_instead_of_being_tried_again(tmp_path: Path) -> None:
    done = run(tmp_path, "astray")
    ended_at = time.time()
    assert done.returncode not in (0, None), done.output[-6000:]
    says = r"MismatchError: .*take other steps: ranks \[\d\] wait for 'astray' at \S+ in "
    assert len(re.findall(says, done.output)) == 3, done.output[-6000:]
    assert "has finished" not in done.output
    assert ended_at - float((tmp_path / "fault").read_text().split()[0]) <= LIMIT_S


@pytest.mark.long
@pytest.mark.parametrize(
    ("what", "num_ranks"),
    long_first([("join-sets", 3), ("join:loft", 2), ("join-averaged", 2), ("join", 2)], 2),
)
def test_a_rank_that_joins_late_takes_part(what: str, num_ranks: int, tmp_path: Path) -> None:
    hosts = [f"localhost:{num_ranks}"]

    def add_host(found: Path) -> None:
        until = time.monotonic() + 60
        while not (tmp_path / "recovered").exists() and time.monotonic() < until:
            time.sleep(0.2)  # until the first ranks train
        found.write_text("\n".join([*hosts, "127.0.0.1:1"]) + "\n")

    # A rank that joins imports torch while the others wait for it.
    done = run(tmp_path, what, hosts=hosts, num_ranks=num_ranks, during=add_host, gloo_timeout_s=40)
    done.succeeded()
    assert f"rank 0 of {num_ranks} goes on at step 0" in done.output
    later = rf"rank \d of {num_ranks + 1} goes on at step [1-9]\d*"
    assert len(re.findall(later, done.output)) == num_ranks + 1
    assert len(re.findall(rf"of {num_ranks + 1} has finished", done.output)) == num_ranks + 1


def run_levels(
    folder: Path, what: str, hosts: list[str], later: list[str] | None, num_ranks: int
) -> Finished:
    """Run ranks that reduce over nodes; once they train, give the job other hosts.

    Args:
        folder: takes marks, and the file of hosts.
        what: see the job.
        hosts: where it begins.
        later: the hosts there are once it trains, or None for the same.
        num_ranks: ranks of the world in which the job ends.
    """

    def change_hosts(found: Path) -> None:
        until = time.monotonic() + 60
        while not (folder / "trained").exists() and time.monotonic() < until:
            time.sleep(0.2)
        if later is not None:
            found.write_text("\n".join(later) + "\n")

    return launch_elastic(
        folder,
        [LEVELS_JOB, str(folder), what, str(num_ranks)],
        hosts=hosts,
        num_ranks=2 * len(hosts),
        min_ranks=2,
        timeout_s=120.0,
        gloo_timeout_s=10 if later is None else 40,
        during=change_hosts,
    )


@pytest.mark.long
@pytest.mark.parametrize(
    ("what", "hosts", "later", "num_ranks"),
    long_first(
        [
            ("join", TWO_NODES[:1], TWO_NODES, 4),
            ("leave", TWO_NODES, TWO_NODES[:1], 2),
            ("raise", TWO_NODES, None, 2),
        ],
        2,
    ),
)
def test_groups_follow_the_nodes_that_join_leave_or_fail(
    what: str, hosts: list[str], later: list[str] | None, num_ranks: int, tmp_path: Path
) -> None:
    """The job compares every gradient with a median over the nodes that there are."""
    done = run_levels(tmp_path, what, hosts, later, num_ranks)
    done.succeeded()
    nodes = r"\[\[0, 1\], \[2, 3\]\]" if num_ranks == 4 else r"\[\[0, 1\]\]"
    went_on = rf"rank \d of {num_ranks} goes on at step [1-9]\d*: {nodes}"
    assert len(re.findall(went_on, done.output)) == num_ranks, done.output[-6000:]
    assert done.output.count(f"of {num_ranks} has finished") == num_ranks


@pytest.mark.long
@pytest.mark.parametrize(
    ("what", "later", "says"),
    long_first(
        [
            (
                "uneven",
                ["localhost:2", "127.0.0.1:1"],
                r"their\w* are \[2, 1\] .* as many ranks on every",
            ),
            (
                "listed",
                TWO_NODES,
                r"over=\[\[0, 1\]\] must hold every rank from 0 to 3 once; over=.nodes",
            ),
        ]
    ),
)
def test_groups_that_do_not_fit_the_ranks_that_join_end_the_job_at_once(
    what: str, later: list[str], says: str, tmp_path: Path
) -> None:
    done = run_levels(tmp_path, what, TWO_NODES[:1], later, 4)
    assert done.returncode not in (0, None), done.output[-6000:]
    assert re.search(rf"ArgumentError: .*{says}", done.output), done.output[-6000:]
    assert "has finished" not in done.output


@pytest.mark.long
def test_a_killed_rank_ends_a_job_with_groups_instead_of_leaving_it_hanging(tmp_path: Path) -> None:
    """Horovod itself aborts the other ranks: see docs/failures.md."""
    done = run_levels(tmp_path, "kill", TWO_NODES, None, 2)
    ended_at = time.time()
    assert done.returncode not in (0, None), done.output[-6000:]
    assert re.search(r"has ended without a word|terminate called after", done.output)
    assert ended_at - float((tmp_path / "fault").read_text()) <= LIMIT_S
