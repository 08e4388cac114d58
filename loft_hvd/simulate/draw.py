"""Random scenarios from a seed: the population over which the policies are compared."""

from __future__ import annotations

import numpy as np

from loft_hvd.simulate.scenario import Event, Ranks, Scenario

__all__ = ["random_scenario"]


def random_scenario(seed: int, *, steps: int = 1000) -> Scenario:
    """Draw a cluster of 4 to 12 ranks with 5 % noise; half of them change during the run.

    Computing differs up to 4:1, links up to 20:1. A third of the clusters is serial, a third
    prefetches fully, a third overlaps in part; a third has devices that saturate, a fifth reads
    from one shared source, a fifth has memory caps.
    """
    rng = np.random.default_rng([seed, 4242])
    world_size = int(rng.integers(4, 13))
    share = rng.dirichlet(np.ones(world_size)) * rng.uniform(0.2, 1.0)
    spread = float(rng.choice([1.0, 2.0, 4.0]))
    is_shared = rng.random() < 0.2
    has_caps = rng.random() < 0.2
    caps = rng.integers(70, 160, world_size).tolist()
    saturates = rng.random() < 1 / 3
    link = float(np.exp(rng.uniform(np.log(10e6), np.log(200e6))))
    link_spread = float(rng.choice([1.0, 4.0, 20.0]))
    ranks = Ranks(
        compute_s=rng.uniform(1e-3, spread * 1e-3, world_size).tolist(),
        compute_fixed_s=float(rng.uniform(0, 0.02)),
        saturation=(rng.uniform(0, 60, world_size) * saturates).tolist(),
        remote_bytes_per_s=(link * rng.uniform(1, link_spread, world_size)).tolist(),
        remote_latency_s=2e-4,
        overlap=[0.0, 1.0, float(rng.uniform(0.2, 0.8))][seed % 3],
        local_share=share.tolist(),
        source="store" if is_shared else "",
    )
    return Scenario(
        name=f"random {seed}",
        world_size=world_size,
        global_batch_size=64 * world_size,
        seed=seed,
        steps=steps,
        aggregate_s=float(rng.uniform(0, 0.05)),
        noise=0.05,
        max_batch=caps if has_caps else 0,
        policies=("uniform", "lbbsp-cpu", "lbbsp-gpu", "loft"),
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
