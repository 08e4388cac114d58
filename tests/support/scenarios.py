"""Random scenarios beside those of ``simulate.compare``, for the balance tests."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from loft_hvd.simulate.scenario import Event, RankTraits, Scenario


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


KINDS = ("wave", "interference", "steal", "leak", "thermal", "cache", "flip", "mixed")


def rough_scenario(seed: int, *, steps: int = 1500) -> Scenario:
    """Draw 4 to 12 hosts that somebody else uses, too; what happens to them follows the seed.

    They wave with the day, are interfered with, lose time to others, leak, throttle, warm their
    caches, or change at once. Noise is 3, 5 or 10 % a step, with heavy tails for a quarter.
    """
    rng = np.random.default_rng([seed, 5151])
    world_size = int(rng.integers(4, 13))
    kind = KINDS[seed % len(KINDS)]
    spread = float(rng.choice([1.0, 2.0, 3.0]))
    compute_s = rng.uniform(1e-3, spread * 1e-3, world_size) * rng.choice([1.0, 2.0])
    link = float(np.exp(rng.uniform(np.log(40e6), np.log(400e6))))
    fixed_s = float(rng.uniform(0, 0.03))
    links = (link * rng.uniform(1, rng.choice([1.0, 3.0]), world_size)).tolist()
    ranks = RankTraits(
        compute_s=compute_s.tolist(),
        compute_fixed_s=fixed_s,
        remote_bytes_per_s=links,
        overlap=float(rng.choice([0.0, 0.5, 0.8, 1.0])),
        saturation=rng.uniform(0, 50, world_size).tolist() if rng.random() < 0.25 else 0.0,
    )
    sources: dict[str, float] = {}
    if kind == "steal":
        stolen, stolen_s = float(rng.choice([0.002, 0.005, 0.01])), float(rng.uniform(0.2, 0.8))
        ranks = replace(ranks, stall_probability=stolen, stall_s=stolen_s)
    if kind == "cache":
        kept = rng.choice([2560, 10240, 40960], world_size).tolist()
        ranks = replace(ranks, cache_samples=kept, local_share=0.0)
        if rng.random() < 0.5:
            ranks = replace(ranks, source="nfs", remote_latency_s=1e-4)
            sources = {"nfs": link * world_size / 2}
    events = _rough_events(kind, rng, world_size)
    if kind == "flip":
        ranks = replace(ranks, hiccup_probability=float(rng.choice([0.0, 1 / 300, 1 / 50])))
    return Scenario(
        name=f"rough {seed} {kind}",
        world_size=world_size,
        global_batch_size=64 * world_size,
        seed=seed,
        steps=steps,
        num_samples=40960 if kind == "cache" else 51200,
        aggregate_s=float(rng.uniform(0, 0.05)),
        noise=float(rng.choice([0.03, 0.05, 0.1])),
        noise_tail=float(rng.choice([0, 0, 0, 3])),
        policies=("uniform", "lbbsp-cpu", "lbbsp-gpu", "lbbsp-cpu:busy", "loft"),
        ranks=ranks,
        sources=sources,
        events=events,
    )


def _rough_events(kind: str, rng: np.random.Generator, world_size: int) -> tuple[Event, ...]:
    def some(most: int) -> tuple[int, ...]:
        num = int(rng.integers(1, most + 1))
        return tuple(rng.choice(world_size, size=num, replace=False).tolist())

    def part() -> str:
        return str(rng.choice(["compute", "both", "fetch"]))

    def one_of(*values: int) -> int:
        return int(rng.choice(values))

    found: list[Event] = []
    if kind in ("wave", "mixed"):
        for _ in range(one_of(1, 2)):
            period, begin = one_of(500, 1000, 2000), int(rng.integers(0, 400))
            factor = float(rng.uniform(1.3, 2.2))
            who = some(world_size // 2)
            found.append(Event("wave", who, part(), factor, from_step=begin, period_steps=period))
    if kind in ("interference", "steal", "mixed"):
        busy, quiet = one_of(20, 60, 150, 300), one_of(40, 150, 300, 600)
        seen = kind != "steal" and bool(rng.random() < 0.5)
        factor, who = float(rng.uniform(1.3, 2.5)), some(3)
        found.append(
            Event(
                "interference",
                who,
                part(),
                factor,
                busy_steps=busy,
                quiet_steps=quiet,
                is_visible=seen,
            )
        )
    if kind in ("leak", "thermal"):
        for _ in range(one_of(1, 2, 3)):
            begin, ramp = int(rng.integers(50, 900)), one_of(0, 100, 300, 600)
            end = begin + ramp + 400 if kind == "leak" or rng.random() < 0.5 else 0
            factor, who = float(rng.uniform(1.2, 3.0 if kind == "leak" else 2.0)), some(2)
            what = part() if kind == "leak" else "compute"
            found.append(
                Event("change", who, what, factor, from_step=begin, to_step=end, ramp_steps=ramp)
            )
    if kind == "flip":
        for what, end in (("compute", 0), ("fetch", 1200)):
            begin, factor = int(rng.integers(100, 1000)), float(rng.uniform(1.5, 3))
            found.append(Event("change", some(2), what, factor, from_step=begin, to_step=end))
    return tuple(found)
