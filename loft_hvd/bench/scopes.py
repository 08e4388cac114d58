"""What ``Robust`` costs in a step, and ``scope="model"`` beside its formula; on every rank.

In shards all but the last results travel during the backward pass. Over the whole model they travel
after it, so that this should be left when the last rank has ended its backward pass:

    max(0, all-to-all - backward) + table + (choosing and mixing) + all-gather

A step should take as much longer than computing alone, where computing and sending do not slow each
other. Each of these is timed alone, in turn with whole steps.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from loft_hvd.aggregation.mixing import Floats
from loft_hvd.aggregation.row_rules import RowRule
from loft_hvd.pipeline.buckets import Bucket, shard_numel
from loft_hvd.pipeline.ring import run_rule
from loft_hvd.pipeline.selection import decide_by, measure, num_pairs, total
from loft_hvd.transport.base import Channel, Transport, Work, wait_for
from loft_hvd.transport.lanes import Needs, choose_lane

__all__ = [
    "COMPUTING",
    "FORWARD",
    "MODEL",
    "MODEL_EXPOSED",
    "SHARDS",
    "SHARDS_EXPOSED",
    "ScopeCost",
    "cost_of",
    "part_calls",
]

COMPUTING, FORWARD = "computing alone", "forward alone"
SHARDS, MODEL = "robust, in shards", "robust, whole model"
SHARDS_EXPOSED, MODEL_EXPOSED = f"{SHARDS}: exposed", f"{MODEL}: exposed"
ALL_TO_ALL, DISTANCES, TABLE = "all-to-alls alone", "distances alone", "table alone"
MIXING, ALL_GATHER = "choosing and mixing alone", "all-gathers alone"


class _Parts:
    """The parts of a step's exchange, each by itself, for buckets of float32 on the CPU."""

    def __init__(self, transport: Transport, rule: RowRule, buckets: Sequence[Bucket]) -> None:
        lane = self._lane = choose_lane(Channel(transport, "bench.scopes"), Needs("cpu"))
        self._rule = rule
        size = transport.world_size
        generator = torch.Generator().manual_seed(transport.rank)
        shards = [shard_numel(bucket.numel, size) for bucket in buckets]
        f32 = torch.float32
        self._sent = [
            lane.zeros(size * shard, f32).normal_(generator=generator) for shard in shards
        ]
        self._rows = [torch.zeros(size, shard) for shard in shards]
        self._results = [lane.zeros(shard, f32) for shard in shards]
        self._table = lane.zeros(num_pairs(size), torch.float64)
        self._tables = torch.zeros(size * num_pairs(size), dtype=torch.float64)
        self.exchange_rows()
        self._sums = total(self.measure())  # squared distances of each two rows in the shards here

    def exchange_rows(self) -> None:
        pairs = enumerate(zip(self._sent, self._rows, strict=True))
        self._wait(
            self._lane.alltoall(sent, rows.view(-1), name=f"bench.scopes.{at}.a2a")
            for at, (sent, rows) in pairs
        )

    def measure(self) -> list[Floats]:
        return [measure(self._rule, rows, None) for rows in self._rows]

    def exchange_tables(self) -> None:
        name = "bench.scopes.tables"
        self._wait([self._lane.allgather(self._table, self._tables, name=name)])

    def mix(self) -> None:
        decided = decide_by(self._rule, self._sums, None, precision=torch.float32)
        for rows, result in zip(self._rows, self._results, strict=True):
            run_rule(rows, decided, None, result)

    def exchange_results(self) -> None:
        pairs = enumerate(zip(self._results, self._sent, strict=True))
        self._wait(
            self._lane.allgather(result, received, name=f"bench.scopes.{at}.ag")
            for at, (result, received) in pairs
        )

    def _wait(self, works: Iterable[Work]) -> None:
        for work in list(works):  # all are under way before the first is waited for
            wait_for(work, what="bench step", timeout_s=300.0)


def part_calls(
    transport: Transport, rule: RowRule, buckets: Sequence[Bucket]
) -> dict[str, Callable[[], object]]:
    """Return what is timed beside steps, by name; every rank calls each alike."""
    parts = _Parts(transport, rule, buckets)
    return {
        ALL_TO_ALL: parts.exchange_rows,
        DISTANCES: parts.measure,
        TABLE: parts.exchange_tables,
        MIXING: parts.mix,
        ALL_GATHER: parts.exchange_results,
    }


@dataclass(frozen=True)
class ScopeCost:
    """Steps of ``Robust``, in seconds; medians over rounds."""

    over_trimmed_mean: float  # a step in shards over one of ``TrimmedMean``, round by round
    shards_step_s: float
    step_s: float  # over the whole model, as all that follows
    step_formula_s: float
    shards_exposed_s: float  # left when the last rank has ended its backward pass
    exposed_s: float
    exposed_formula_s: float

    @property
    def exposed_ratio(self) -> float:
        """What is left after the backward pass, of what should be."""
        return self.exposed_s / self.exposed_formula_s


def cost_of(samples: Mapping[str, Sequence[float]], trimmed_mean: str) -> ScopeCost:
    """Return what steps took and should take, from the seconds of every round by name.

    Args:
        samples: of all that ``bench step`` has timed.
        trimmed_mean: the name there of ``TrimmedMean`` of the same f.
    """
    took = {name: statistics.median(seconds) for name, seconds in samples.items()}
    backward_s = took[COMPUTING] - took[FORWARD]
    exposed_s = max(0.0, took[ALL_TO_ALL] - backward_s)
    exposed_s += took[TABLE] + took[MIXING] + took[ALL_GATHER]
    rounds = zip(samples[SHARDS], samples[trimmed_mean], strict=True)
    return ScopeCost(
        over_trimmed_mean=statistics.median(ours / theirs for ours, theirs in rounds),
        shards_step_s=took[SHARDS],
        step_s=took[MODEL],
        step_formula_s=took[COMPUTING] + exposed_s,
        shards_exposed_s=took[SHARDS_EXPOSED],
        exposed_s=took[MODEL_EXPOSED],
        exposed_formula_s=exposed_s,
    )
