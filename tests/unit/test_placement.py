"""Placement: homes as users write them, and which ranks hold a sample."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

from loft_hvd.data.loader import DataLoader
from loft_hvd.data.placement import Placement, Where, check_placement
from loft_hvd.data.sampler import BatchSampler
from loft_hvd.errors import ArgumentTypeError, DataError
from tests.support.plans import FakePlans


def holders(placement: Placement, world_size: int) -> list[list[int]]:
    homes = placement.at(world_size)
    return [np.flatnonzero(homes.local.holders[row]).tolist() for row in homes.rows]


def test_sharded_gives_each_rank_an_equal_run_of_samples() -> None:
    assert holders(Placement.sharded(7, 3), 3) == [[0], [0], [0], [1], [1], [2], [2]]


def test_shards_of_nodes_are_local_to_all_ranks_of_the_node() -> None:
    placement = Placement.sharded(4, 4, nodes=["a", "a", "b", "b"])
    assert holders(placement, 4) == [[0, 1], [0, 1], [2, 3], [2, 3]]


@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_replicated_is_local_in_any_world(world_size: int) -> None:
    assert holders(Placement.replicated(2), world_size) == [list(range(world_size))] * 2


def test_from_function_takes_every_way_to_name_a_home() -> None:
    where = [1, [0, 2], "node:b", "shared:nfs", "everywhere", [0, "shared:nfs"], np.int64(2)]
    placement = Placement.from_function(lambda i: where[i], len(where), nodes=["a", "a", "b"])
    assert holders(placement, 3) == [[1], [0, 2], [2], [], [0, 1, 2], [0], [2]]


@pytest.mark.parametrize("where", [-1, [], "rack:3", [0, "nfs"], 1.5, None, [None]])
def test_a_home_that_is_none_is_refused(where: object) -> None:
    with pytest.raises(DataError, match="home"):
        Placement.from_function(lambda i: where, 1)  # type: ignore[arg-type,return-value]


def test_a_file_of_runs_places_samples_in_their_order(tmp_path: Path) -> None:
    homes = [[0], [1, "shared:nfs"], ["node:b"], [0], ["everywhere"]]
    runs = [{"count": n, "homes": h} for n, h in zip([2, 1, 1, 1, 1], homes, strict=True)]
    path = tmp_path / "placement.json"
    path.write_text(json.dumps({"nodes": ["a", "b"], "runs": runs}))
    read = Placement.from_json(path)
    where: list[int | str | list[int | str]] = [0, 0, [1, "shared:nfs"], "node:b", 0, "everywhere"]
    written = Placement.from_function(lambda i: where[i], len(where), nodes=["a", "b"])
    assert holders(read, 2) == holders(written, 2)
    assert read.nodes == written.nodes
    assert read.shared_sources(2) == written.shared_sources(2)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"runs": []}',
        '{"nodes": null, "runs": [{"count": 3}]}',
        '{"nodes": null, "runs": [{"count": -3, "homes": [0]}]}',
        '{"nodes": null, "runs": [{"count": 2.7, "homes": [0]}]}',
        '{"nodes": 5, "runs": []}',
        '{"nodes": null, "runs": [{"count": 2147483648, "homes": [0]}]}',  # one bit is wrong
    ],
)
def test_json_of_another_form_is_an_error_that_shows_the_form(tmp_path: Path, text: str) -> None:
    (tmp_path / "placement.json").write_text(text)
    with pytest.raises(DataError, match='"runs"'):
        Placement.from_json(tmp_path / "placement.json")


def test_subset_places_what_torch_subset_holds() -> None:
    placement = Placement.sharded(6, 3).with_strata(list("aabbcc")).subset([5, 0, 3])
    assert holders(placement, 3) == [[2], [0], [1]]
    assert placement.strata is not None
    assert placement.strata.tolist() == [2, 0, 1]


def test_a_home_outside_the_world_is_an_error_with_both_numbers() -> None:
    with pytest.raises(DataError, match="rank 3 holds samples, but world_size=3"):
        Placement.sharded(8, 4).at(3)


def test_nodes_of_another_world_are_an_error() -> None:
    with pytest.raises(DataError, match="4 ranks, but world_size=3"):
        Placement.sharded(8, 4, nodes=[0, 0, 1, 1]).at(3)


def test_a_home_on_an_unknown_node_is_an_error() -> None:
    with pytest.raises(DataError, match="give nodes="):
        Placement.from_function(lambda i: "node:a", 1).at(2)
    with pytest.raises(DataError, match="'shared:NAME' for what lies on a host without one"):
        Placement.from_function(lambda i: "node:a", 1, nodes=["b", "c"]).at(2)


@pytest.mark.parametrize(("num_labels", "cap"), [(3, 1.5), (4, 0.9), (4, float("inf"))])
def test_strata_need_a_label_a_sample_and_a_finite_cap_of_at_least_one(
    num_labels: int, cap: float
) -> None:
    with pytest.raises(DataError, match="with_strata"):
        Placement.replicated(4).with_strata([0] * num_labels, cap=cap)


def test_a_placement_must_have_the_length_of_the_data_set() -> None:
    with pytest.raises(DataError, match="places 4 samples, but the data set has 5"):
        check_placement(Placement.replicated(4), 5)
    with pytest.raises(ArgumentTypeError, match="give a loft_hvd"):
        check_placement([0, 1], 2)  # type: ignore[arg-type]


def test_shared_sources_are_those_of_most_remote_samples() -> None:
    homes: list[Where] = ["shared:a", "shared:b", ["shared:a", "shared:b"], 0]
    placement = Placement.from_function(lambda i: homes[0 if i < 6 else i % 4], 16)
    # Of 13 or 14 remote samples ranks read 8 from a and 2 from b, or 2 more from b than before.
    assert placement.shared_sources(3) == (0, 0, 0)
    only_b = placement.subset([i for i in range(16) if i % 4 == 1 and i >= 6])
    assert only_b.shared_sources(2) == (1, 1)


@pytest.mark.parametrize(
    "placement",
    [
        Placement.sharded(12, 3),
        Placement.replicated(12),
        Placement.from_function(lambda i: "shared:nfs" if i < 2 else 0, 12),
    ],
    ids=["sharded", "replicated", "mostly peers"],
)
def test_ranks_that_share_little_share_no_source(placement: Placement) -> None:
    assert placement.shared_sources(3)[1:] == (-1, -1)


def test_ranks_of_a_node_share_its_link_where_they_read_from_other_nodes() -> None:
    nodes = ("a", "a", "b", "c", "c")
    sharded = Placement.sharded(10, 5, nodes=nodes)
    assert sharded.shared_sources(5) == (0, 0, -1, 2, 2)  # rank 2 is alone on its node
    on_a = Placement.from_function(lambda i: ["node:a", "node:c"], 10, nodes=nodes)
    assert on_a.shared_sources(5) == (-1,) * 5  # nobody but rank 2 reads from elsewhere
    nfs = Placement.from_function(lambda i: "shared:nfs", 10, nodes=nodes)
    assert nfs.shared_sources(5) == (0,) * 5  # all wait for the server


def test_a_loader_tells_which_ranks_share_a_source() -> None:
    plans = FakePlans([4, 4])
    placement = Placement.from_function(lambda i: 0 if i < 4 else "shared:nfs", 16)
    next(iter(DataLoader(TensorDataset(torch.arange(16)), plans, placement=placement)))
    assert plans.source == (0, 0)
    plans = FakePlans([4, 4])
    next(iter(BatchSampler(16, plans, placement=placement)))
    assert plans.source == (0, 0)
