"""Random scenarios beside those of ``simulate.compare``, for the balance tests."""

from __future__ import annotations

import numpy as np

from loft_hvd.simulate.scenario import RankTraits, Scenario


def hiccup_scenario(seed: int, *, steps: int = 4000) -> Scenario:
    """Draw a relative of ``hiccups.toml``: 4 to 12 ranks that never change, but for hiccups.

    One step of a rank in 100 to 1,000 takes 3 to 20 times as long. A third of the clusters has
    equal ranks, the others compute up to 4:1.
    """
    rng = np.random.default_rng([seed, 4343])
    world_size = int(rng.integers(4, 13))
    is_equal = seed % 3 == 0
    ranks = RankTraits(
        compute_s=rng.uniform(1e-3, 1e-3 if is_equal else 4e-3, world_size).tolist(),
        compute_fixed_s=0.01,
        hiccup_probability=float(np.exp(rng.uniform(np.log(1e-3), np.log(1e-2)))),
        hiccup_factor=float(np.exp(rng.uniform(np.log(3.0), np.log(20.0)))),
    )
    return Scenario(
        name=f"hiccups {seed}",
        world_size=world_size,
        global_batch_size=64 * world_size,
        seed=seed,
        steps=steps,
        aggregate_s=0.02,
        noise=0.05,
        policies=("uniform", "lbbsp-cpu", "lbbsp-gpu", "lbbsp-cpu:busy", "loft"),
        ranks=ranks,
    )


def wide_scenario(seed: int, *, steps: int = 400) -> Scenario:
    """Draw a steady cluster of 8 to 128 ranks: computing up to 1, 2 or 4:1, 3 to 15 % noise."""
    rng = np.random.default_rng([seed, 4444])
    world_size = int(2 ** rng.uniform(3, 7))
    spread = float(rng.choice([1.25, 2.0, 4.0]))
    ranks = RankTraits(
        compute_s=rng.uniform(1e-3, spread * 1e-3, world_size).tolist(),
        compute_fixed_s=float(rng.uniform(0, 0.02)),
        remote_bytes_per_s=float(rng.uniform(100e6, 500e6)),
        overlap=[0.0, 1.0, float(rng.uniform(0.2, 0.8))][seed % 3],
        local_share=1.0,
    )
    return Scenario(
        name=f"wide {seed}",
        world_size=world_size,
        global_batch_size=64 * world_size,
        seed=seed,
        steps=steps,
        aggregate_s=float(rng.uniform(0, 0.05)),
        noise=float(rng.uniform(0.03, 0.15)),
        noise_tail=2.5 if seed % 4 == 3 else 0.0,
        policies=("uniform", "loft"),
        ranks=ranks,
    )
