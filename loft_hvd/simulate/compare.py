"""LOFT against the other policies over many random clusters: the whole distribution."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from loft_hvd.simulate.draw import random_scenario
from loft_hvd.simulate.run import ORACLE, simulate

__all__ = ["PERCENTILES", "Comparison", "compare", "summarise", "summary_rows"]

PERCENTILES = (0, 5, 25, 50, 75, 95, 100)


@dataclass(frozen=True)
class Comparison:
    """One random cluster.

    Attributes:
        seed: of the cluster (``random_scenario``).
        world_size: number of ranks.
        mean_step_s: mean seconds of a step of each policy and of the oracle.
    """

    seed: int
    world_size: int
    mean_step_s: dict[str, float]

    def gain(self, rival: str) -> float:
        """Share of the rival's step that LOFT saves; below 0 where the rival is faster."""
        return 1.0 - self.mean_step_s["loft"] / self.mean_step_s[rival]

    @property
    def excess(self) -> float:
        """By how much LOFT's step is longer than the best policy's, as a share; >= 0."""
        real = [value for name, value in self.mean_step_s.items() if name != ORACLE]
        return self.mean_step_s["loft"] / min(real) - 1.0


def compare(seeds: Iterable[int], *, steps: int = 1000) -> Iterator[Comparison]:
    """Run every policy on the random cluster of each seed.

    Args:
        seeds: of the clusters.
        steps: length of each run.

    Yields:
        One comparison a seed, in order.
    """
    for seed in seeds:
        results = simulate(random_scenario(seed, steps=steps))
        means = {run.name: run.mean_s for run in results.runs}
        yield Comparison(seed, results.scenario.world_size, means)


def summarise(found: list[Comparison]) -> dict[str, Any]:
    """Return percentiles of the gain over each rival and the worst excess, JSON-able."""
    rivals = [name for name in found[0].mean_step_s if name != "loft"]
    return {
        "percentiles": list(PERCENTILES),
        "gain": {
            rival: np.percentile([each.gain(rival) for each in found], PERCENTILES).tolist()
            for rival in rivals
        },
        "worst_excess": max(each.excess for each in found),
        "clusters": [
            {"seed": each.seed, "world_size": each.world_size, "mean_step_s": each.mean_step_s}
            for each in found
        ],
    }


def summary_rows(summary: dict[str, Any]) -> list[list[str]]:
    """Return a table: what LOFT saves against each rival, percentiles in percent."""
    head = ["gain of loft over, %", *(f"p{place}" for place in summary["percentiles"])]
    body = [
        [rival, *(f"{100 * gain:.1f}" for gain in gains)]
        for rival, gains in summary["gain"].items()
    ]
    return [head, *body]
