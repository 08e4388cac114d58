"""The generator of compare-exchange networks, and the proofs it refuses to go without."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest


def _load() -> ModuleType:
    path = Path(__file__).parents[2] / "csrc" / "networks" / "generate.py"
    spec = importlib.util.spec_from_file_location("loft_networks_generate", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


generate = _load()

# Minimum and maximum operations of the networks that are emitted today; a change must be meant.
SORT_COST = {2: 2, 3: 6, 4: 10, 8: 38, 16: 126, 24: 254, 32: 382, 64: 1086}
MEDIAN_COST = {2: 2, 3: 4, 4: 8, 5: 10, 8: 28, 9: 30, 16: 88, 17: 90, 32: 260, 64: 736}


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 8, 11, 16, 20, 25, 32, 64])
def test_sorting_networks_sort(rows: int) -> None:
    assert generate.sorts(generate.sorting_network(rows), range(rows), generate.proof(rows))


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 8, 11, 16, 20, 25, 32, 64])
def test_median_networks_find_the_middle(rows: int) -> None:
    network = generate.median_network(rows)
    assert generate.sorts(network, generate.middle(rows), generate.proof(rows))


@pytest.mark.parametrize("rows", [17, 20, 33, 64])
def test_window_networks_bring_their_ranks_to_their_places(rows: int) -> None:
    for start in generate.window_starts(rows):
        network = generate.window_network(rows, start)
        proof = generate.proof(rows)
        assert generate.sorts(network, range(start, rows - start), proof)
        assert start == 0 or not generate.sorts(network, range(rows), proof)


@pytest.mark.parametrize("rows", [8, 16, 20])
def test_another_order_of_independent_steps_does_the_same(rows: int) -> None:
    network = generate.sorting_network(rows)
    ordered = generate.in_few_registers(network, 4)
    assert ordered != network
    assert sorted(ordered) == sorted(network)
    assert generate.sorts(ordered, range(rows), generate.proof(rows))


@pytest.mark.parametrize("rows", [3, 7, 16, 24])
def test_a_network_without_one_of_its_steps_fails_the_proof(rows: int) -> None:
    network = generate.sorting_network(rows)
    for gone in (0, len(network) // 2, len(network) - 1):
        rest = network[:gone] + network[gone + 1 :]
        assert not generate.sorts(rest, range(rows), generate.proof(rows))


@pytest.mark.parametrize(("rows", "cost"), SORT_COST.items())
def test_sorting_networks_cost_what_they_did(rows: int, cost: int) -> None:
    assert generate.cost(generate.sorting_network(rows)) == cost


@pytest.mark.parametrize(("rows", "cost"), MEDIAN_COST.items())
def test_median_networks_cost_what_they_did(rows: int, cost: int) -> None:
    assert generate.cost(generate.median_network(rows)) == cost
