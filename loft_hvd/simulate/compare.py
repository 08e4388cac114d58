"""LOFT against the other policies over many random clusters: the whole distribution."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from loft_hvd.simulate.scenario import Event, RankTraits, Scenario
from loft_hvd.simulate.simulation import ORACLE, simulate

__all__ = [
    "PERCENTILES",
    "Comparison",
    "compare",
    "random_scenario",
    "summarise",
    "summary_rows",
]

PERCENTILES = (0, 5, 25, 50, 75, 95, 100)


def random_scenario(seed: int, *, steps: int = 1000) -> Scenario:
    """Draw a cluster of 4 to 12 ranks with 5 % noise; half of them change during the run.

    Computing differs up to 4:1, links up to 20:1. A third of the clusters is serial, a third
    prefetches fully, a third overlaps in part; a third has devices that saturate, a fifth reads
    from one shared source, a fifth has memory caps. The noise of a fifth has heavy tails, and in
    another fifth one step in 300 of a rank is a hiccup.
    """
    rng = np.random.default_rng([seed, 4242])  # apart from the scenario's own draws of the seed
    # The order of draws is part of what a seed means: docs/balance.md prints figures by seed.
    world_size = int(rng.integers(4, 13))
    # Some clusters hold nearly all samples on their ranks, others a fifth.
    share = rng.dirichlet(np.ones(world_size)) * rng.uniform(0.2, 1.0)
    spread = float(rng.choice([1.0, 2.0, 4.0]))
    is_shared = rng.random() < 0.2
    has_caps = rng.random() < 0.2
    caps = rng.integers(70, 160, world_size).tolist()
    saturates = rng.random() < 1 / 3
    link = float(np.exp(rng.uniform(np.log(10e6), np.log(200e6))))
    link_spread = float(rng.choice([1.0, 4.0, 20.0]))
    ranks = RankTraits(
        compute_s=rng.uniform(1e-3, spread * 1e-3, world_size).tolist(),
        compute_fixed_s=float(rng.uniform(0, 0.02)),
        saturation=(rng.uniform(0, 60, world_size) * saturates).tolist(),
        remote_bytes_per_s=(link * rng.uniform(1, link_spread, world_size)).tolist(),
        remote_latency_s=2e-4,
        overlap=[0.0, 1.0, float(rng.uniform(0.2, 0.8))][seed % 3],
        local_share=share.tolist(),
        source="store" if is_shared else "",
        hiccup_probability=1 / 300 if seed % 5 == 3 else 0.0,
    )
    return Scenario(
        name=f"random {seed}",
        world_size=world_size,
        global_batch_size=64 * world_size,
        seed=seed,
        steps=steps,
        aggregate_s=float(rng.uniform(0, 0.05)),
        noise=0.05,
        noise_tail=2.5 if seed % 5 == 4 else 0.0,
        max_batch=caps if has_caps else 0,
        policies=("uniform", "lbbsp-cpu", "lbbsp-gpu", "lbbsp-cpu:busy", "loft"),
        ranks=ranks,
        sources={"store": link * world_size / 2} if is_shared else {},
        events=_draw_events(rng, world_size, steps) if seed % 2 else (),
    )


def _draw_events(rng: np.random.Generator, world_size: int, steps: int) -> tuple[Event, ...]:
    rank = int(rng.integers(world_size))
    factor = float(rng.uniform(1.3, 3.0))
    part = str(rng.choice(["fetch", "compute", "both"]))
    kind = str(rng.choice(["change", "wave", "interference"]))
    return (
        Event(
            kind,
            (rank,),
            part=part,
            factor=factor,
            from_step=int(rng.integers(steps // 10, steps // 3)),
            ramp_steps=int(rng.choice([0, steps // 5])),
            period_steps=steps,
            busy_steps=steps // 10,
            quiet_steps=steps // 5,
        ),
    )


@dataclass(frozen=True)
class Comparison:
    """One random cluster."""

    seed: int  # of the cluster (``random_scenario``)
    world_size: int
    mean_step_s: dict[str, float]  # of each policy and of the oracle

    def gain(self, rival: str) -> float:
        """Share of the rival's step that LOFT saves; below 0 where the rival is faster."""
        return 1.0 - self.mean_step_s["loft"] / self.mean_step_s[rival]

    @property
    def excess(self) -> float:
        """By how much LOFT's step is longer than the best policy's, as a share; >= 0."""
        real = [value for name, value in self.mean_step_s.items() if name != ORACLE]
        return self.mean_step_s["loft"] / min(real) - 1.0


def compare(seeds: Iterable[int], *, steps: int = 1000) -> Iterator[Comparison]:
    """Run every policy on the random cluster of each seed, in order."""
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
