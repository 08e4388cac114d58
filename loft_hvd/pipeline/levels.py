"""Two levels: a plain mean inside each group of ranks, the rule over the groups.

With m ranks in each of g groups, such as nodes, and d values:

    PACK        values are put into the wire's format
    ALL_TO_ALL  inside a group: part j of d/m values goes to the group's rank j
    AGGREGATE   the mean over the group's ranks, by their samples: one row of the group
    ALL_TO_ALL  across groups, among the ranks j of all groups: shard k of d/(m g) values to group k
    AGGREGATE   the rule over the groups' rows
    ALL_GATHER  across groups, then inside: the result travels to every rank
    UNPACK      values are taken out of the wire's format: the same bits on every rank

2 (g-1)/g d values leave a group, however many ranks it has; a ring over all ranks sends
2 (m g - 1)/(m g) d, and shards of all ranks at once many times that (docs/levels.md).
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from loft_hvd.aggregation.aggregate import aggregate
from loft_hvd.aggregation.rules import Mean
from loft_hvd.errors import ArgumentError
from loft_hvd.pipeline.ring import (
    Enter,
    Exchange,
    ExchangeSpec,
    MakeExchange,
    RunRule,
    Stage,
    apply_rule,
    bring_rows,
    flat_exchange,
    holes_of,
    run_rule,
)
from loft_hvd.pipeline.weights import PassWeights, capped_weights, in_training
from loft_hvd.pipeline.wire import Compression
from loft_hvd.transport.base import Lane, Work
from loft_hvd.transport.groups import Groups

__all__ = ["exchange_maker", "group_weights", "two_level_exchange"]

_MEAN = Mean(reproducible=True)


def group_weights(weights: PassWeights, groups: Groups) -> PassWeights:
    """Return the weights of the groups' rows: sums over ranks, capped as those of ranks are."""
    counts = weights.counts
    sums = None if counts is None else groups.sums(counts)
    present = tuple(any(weights.present[rank] for rank in group) for group in groups.members)
    return replace(
        weights,
        weights=None if sums is None else capped_weights(sums),
        present=present,
        counts=sums,
    )


def exchange_maker(groups: Groups | None, *, run: RunRule = run_rule) -> MakeExchange:
    """Return what makes exchanges, over all ranks at once without groups; every rank alike.

    ``run`` applies the rule, and may look at the rows on the way.
    """
    if groups is None:
        return functools.partial(flat_exchange, run=run)
    # Of each lane, those of its parts: made once, as all ranks make them together.
    parts: weakref.WeakKeyDictionary[Lane, tuple[Lane, Lane]] = weakref.WeakKeyDictionary()

    def make(spec: ExchangeSpec) -> Exchange:
        if spec.numel == 0 or spec.is_sum:
            return flat_exchange(spec, run=run)
        if spec.lane not in parts:
            parts[spec.lane] = (
                spec.lane.subset(groups.members),
                spec.lane.subset(groups.across),
            )
        return two_level_exchange(spec, groups, *parts[spec.lane], run=run)

    return make


class _Together:
    """Two collectives that are waited for as one."""

    watch = None

    def __init__(self, *works: Work) -> None:
        self._works = works

    def done(self) -> bool:
        """Say whether both have ended."""
        return all([work.done() for work in self._works])  # a list: each moves on

    def finish(self) -> None:
        """Release both."""
        for work in self._works:
            work.finish()


def two_level_exchange(
    spec: ExchangeSpec, groups: Groups, inside: Lane, across: Lane, *, run: RunRule
) -> Exchange:
    """Make the exchange of some values among the ranks of this rank's group, and across groups.

    A wire of 16 bits rounds the group's mean as well.
    """
    if not isinstance(spec.wire, Compression):
        raise ArgumentError(
            f"over= takes Compression.none, .fp16 and .bf16, not {spec.wire!r}: a group's mean is "
            "computed with what has travelled; use one of these, or leave over= away"
        )
    name, dtype, of_groups = spec.name, spec.wire.dtype, replace(spec, lane=across)
    size, num_groups = groups.group_size, groups.num_groups
    # With 2 groups of 4 ranks and 800 values: 4 rows of 200 become a mean of 200, of which 2 rows
    # of 100 become a result of 100. 2 results are a group's 200 values, and 4 of these all 800.
    narrow = None if dtype is None else spec.zeros(spec.numel, dtype=dtype)
    ours = spec.zeros(size, spec.numel // size, dtype=dtype)  # [m, d/m]
    mean = torch.zeros_like(ours[0])  # [d/m]
    rows = spec.zeros(num_groups, mean.numel() // num_groups, dtype=dtype)  # [g, d/(m g)]
    reduced = torch.zeros_like(rows[0])  # [d/(m g)]
    mark = torch.zeros(1)
    members = groups.members[across.rank]  # of this rank's group: one rank of each is across

    def steps(
        enter: Enter, source: Tensor, result: Tensor, weights: PassWeights | None
    ) -> Iterator[Work]:
        sent, received = source, result
        if narrow is not None:
            enter(Stage.PACK)
            sent = received = narrow.copy_(source)
        enter(Stage.ALL_TO_ALL)
        yield inside.alltoall(sent, ours.view(-1), name=f"{name}.in.a2a")
        enter(Stage.AGGREGATE)
        _average(ours, members, weights, mean)
        if weights is not None:
            weights = in_training(spec.rule, group_weights(weights, groups))
        enter(Stage.ALL_TO_ALL)
        work, brought = bring_rows(of_groups, mean, rows, weights)
        yield work
        yield from apply_rule(of_groups, run, enter, rows, weights, reduced, holes_of(brought))
        enter(Stage.ALL_GATHER)
        yield across.allgather(reduced, mean, name=f"{name}.ag")
        enter(Stage.ALL_GATHER)
        work = inside.allgather(mean, received, name=f"{name}.in.ag")
        # All ranks meet at the end: one that went on to shut Horovod down while another group is
        # not done would take the engine away from it.
        yield _Together(work, spec.lane.allreduce(mark, name=f"{name}.end"))
        if narrow is not None:
            enter(Stage.UNPACK)
            result.copy_(narrow)

    held = [ours, mean, rows, reduced] if narrow is None else [narrow, ours, mean, rows, reduced]
    return Exchange(steps, row=spec.row, held=held)


def _average(
    rows: Tensor, members: Sequence[int], weights: PassWeights | None, out: Tensor
) -> None:
    """Average a group's rows [group_size, part] by samples; zeros where nobody has any."""
    if weights is None:
        aggregate(rows, _MEAN, out=out)
        return
    present = [weights.present[rank] for rank in members]
    if not any(present):
        out.zero_()
        return
    counts = None if weights.counts is None else [weights.counts[rank] for rank in members]
    aggregate(rows, _MEAN, weights=counts, present=present, out=out)
