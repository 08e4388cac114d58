"""Measured tables: what is read, what is refused, and the cluster that is made of them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from loft_hvd.errors import ArgumentError
from loft_hvd.simulate.curves import read_table, shipped_tables
from loft_hvd.simulate.scenario import RankTraits, Scenario
from loft_hvd.simulate.simulation import simulate

HEAD = "local_batch_size,compute_s\n"


def cluster(*curves: str, steps: int = 20) -> Scenario:
    ranks = RankTraits(curve=list(curves), local_share=1.0, local_bytes_per_s=1e15)
    return Scenario("measured", len(curves), 64, steps=steps, policies=("uniform",), ranks=ranks)


def test_between_batches_lie_straight_lines_and_beyond_them_no_free_samples(
    tmp_path: Path,
) -> None:
    path = tmp_path / "mine.csv"
    path.write_text(HEAD + "10,0.2\n20,0.1\n40,0.3\n")
    seconds = read_table(path).at(np.array([5.0, 10.0, 15.0, 30.0, 40.0, 80.0]))
    assert seconds == pytest.approx([0.2, 0.2, 0.15, 0.2, 0.3, 0.6])


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("batch,seconds\n1,2\n", "must name the columns local_batch_size, compute_s"),
        (HEAD, "must have rows"),
        (HEAD + "1,soon\n", "line 2: could not convert .*soon"),
        (HEAD + "1\n", "line 2"),
        (HEAD + "1,nan\n", "finite numbers > 0"),
        (HEAD + "2,0.1\n1,0.2\n", "must rise"),
    ],
)
def test_a_table_that_is_none_is_refused(text: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / "wrong.csv"
    path.write_text(text)
    with pytest.raises(ArgumentError, match=says):
        read_table(path)


def test_a_cluster_of_shipped_tables_takes_what_they_say() -> None:
    assert len(shipped_tables()) == 12
    results = simulate(cluster("imagenet-a100", "imagenet-t4"))
    # 32 samples each: between 28 and 40 on the T4.
    slowest = 0.20689 + (0.25226 - 0.20689) * 4 / 12
    assert results.run("uniform").mean_s == pytest.approx(slowest, rel=1e-4)
    assert results.run("oracle").mean_s < slowest


def test_ranks_without_a_table_beside_others_with_one_are_refused() -> None:
    with pytest.raises(ArgumentError, match="must name a table for every rank, or for none"):
        simulate(cluster("imagenet-a100", ""))
