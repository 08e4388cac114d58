"""Hypothesis strategies for placements, plans and sizes."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import strategies as st

from loft_hvd.data.placement import Placement


@st.composite
def sizes_of(draw: st.DrawFn, world_size: int, *, total: int) -> tuple[int, ...]:
    """Any sizes >= 0 that add up to ``total``."""
    cuts = sorted(draw(st.integers(0, total)) for _ in range(world_size - 1))
    return tuple(b - a for a, b in itertools.pairwise([0, *cuts, total]))


@st.composite
def placements(draw: st.DrawFn, num_samples: int, world_size: int) -> Placement:
    """Shards, nodes, replicas, nested homes, shared sources, or random overlapping sets."""
    kind = draw(st.sampled_from(["replicated", "sharded", "nodes", "nested", "sets", "sets"]))
    if kind == "replicated":
        return Placement.replicated(num_samples)
    if kind == "sharded":
        return Placement.sharded(num_samples, world_size)
    if kind == "nodes":
        nodes = [rank // 2 for rank in range(world_size)]
        return Placement.sharded(num_samples, world_size, nodes=nodes)
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    sets: list[list[int | str]] = [["shared:nfs"], ["everywhere"]]
    if kind == "nested":
        sets += [["node:0"], ["node:0"], ["everywhere"], [0]]
    for _ in range(world_size if kind == "sets" else 0):
        width = min(int(rng.integers(1, 4)), world_size)
        sets.append(rng.choice(world_size, width, replace=False).tolist())
    choice = rng.integers(0, len(sets), num_samples)
    nodes = [rank // 2 for rank in range(world_size)]
    return Placement.from_function(lambda i: sets[choice[i]], num_samples, nodes=nodes)
