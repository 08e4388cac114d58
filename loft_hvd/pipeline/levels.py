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
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from loft_hvd.aggregation.aggregate import aggregate
from loft_hvd.aggregation.rules import Mean, Rule
from loft_hvd.errors import ArgumentError
from loft_hvd.pipeline.exchange import Exchange, Stage, Step
from loft_hvd.pipeline.stages import (
    Aggregate,
    MakeExchange,
    flat_exchange,
    is_engine_sum,
    run_rule,
)
from loft_hvd.pipeline.trace import Lane
from loft_hvd.pipeline.weights import PassWeights, capped_weights, in_training
from loft_hvd.pipeline.wire import Compression, Wire
from loft_hvd.transport.base import Transport, Work
from loft_hvd.transport.groups import Groups, subset

__all__ = ["Levels", "exchange_maker", "group_weights", "two_level_exchange"]

_MEAN = Mean(reproducible=True)


@dataclass(frozen=True)
class Levels:
    """The two levels of exchange of one rank.

    Attributes:
        groups: which ranks are together.
        inside: the ranks of this rank's group.
        across: the ranks that have this rank's place in their groups, one a group.
    """

    groups: Groups
    inside: Transport
    across: Transport

    @classmethod
    def of(cls, transport: Transport, groups: Groups) -> Levels:
        """Divide a transport; every rank calls it alike."""
        return cls(groups, subset(transport, groups.members), subset(transport, groups.across))


def group_weights(weights: PassWeights | None, groups: Groups) -> PassWeights | None:
    """Return the weights of the groups' rows: sums over ranks, capped as those of ranks are."""
    if weights is None:
        return None
    counts = weights.counts
    sums = None if counts is None else groups.sums(counts)
    present = tuple(any(weights.present[rank] for rank in group) for group in groups.members)
    return replace(
        weights,
        weights=None if sums is None else capped_weights(sums),
        present=present,
        counts=sums,
    )


def exchange_maker(levels: Levels | None, *, run: Aggregate = run_rule) -> MakeExchange:
    """Return what makes exchanges: over all ranks at once without levels.

    Args:
        levels: inside and across groups, or None.
        run: applies the rule, and may look at the rows on the way.
    """
    if levels is None:
        return functools.partial(flat_exchange, run=run)

    def make(
        transport: Transport, values: Tensor, *, rule: Rule, name: str, wire: Wire, lane: Lane
    ) -> Exchange:
        if values.numel() == 0 or is_engine_sum(rule, wire):
            return flat_exchange(transport, values, rule=rule, name=name, wire=wire, lane=lane)
        return two_level_exchange(
            transport, levels, values, rule=rule, name=name, wire=wire, lane=lane, run=run
        )

    return make


class _Together:
    """Two collectives that are waited for as one."""

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
    transport: Transport,
    levels: Levels,
    values: Tensor,
    *,
    rule: Rule,
    name: str,
    wire: Wire,
    lane: Lane,
    run: Aggregate = run_rule,
) -> Exchange:
    """Make the exchange of some values inside and across groups, in place.

    Args:
        transport: all ranks.
        levels: inside and across their groups.
        values: [num_ranks * shard]: this rank's before, the aggregated ones after.
        rule: how the groups' rows are aggregated.
        name: stem of the operations' names, equal on every rank.
        wire: the format in which values travel; a 16-bit one rounds the group's mean as well.
        lane: where the stages show in a trace.
        run: applies the rule, and may look at the rows on the way.

    Raises:
        ArgumentError: a wire format of the user's own.
    """
    if not isinstance(wire, Compression):
        raise ArgumentError(
            f"over= takes Compression.none, .fp16 and .bf16, not {wire!r}: a group's mean is "
            "computed with what has travelled; use one of these, or leave over= away"
        )
    groups, inside, across = levels.groups, levels.inside, levels.across
    dtype = values.dtype if wire.dtype is None else wire.dtype
    sent = values if dtype == values.dtype else torch.empty_like(values, dtype=dtype)
    ours = torch.zeros(groups.group_size, values.numel() // groups.group_size).to(sent)
    mean = torch.zeros_like(ours[0])
    rows = torch.zeros(groups.num_groups, mean.numel() // groups.num_groups).to(sent)
    reduced = torch.zeros_like(rows[0])
    members = groups.members[groups.index_of(_world_rank(levels))]

    def average(weights: PassWeights | None) -> None:
        _average(ours, members, weights, mean)

    def apply(weights: PassWeights | None) -> None:
        by_group = group_weights(weights, groups)
        run(rows, rule, None if by_group is None else in_training(rule, by_group), reduced)

    mark = torch.zeros(1)

    def give(_: PassWeights | None) -> Work:
        work = inside.allgather(mean, sent, name=f"{name}.in.ag")
        # All ranks meet at the end: one that went on to shut Horovod down while another group is
        # not done would take the engine away from it.
        return _Together(work, transport.allreduce(mark, name=f"{name}.end"))

    steps = [
        Step(
            Stage.ALL_TO_ALL,
            lambda _: inside.alltoall(sent, ours.view(-1), name=f"{name}.in.a2a"),
        ),
        Step(Stage.AGGREGATE, average),
        Step(Stage.ALL_TO_ALL, lambda _: across.alltoall(mean, rows.view(-1), name=f"{name}.a2a")),
        Step(Stage.AGGREGATE, apply),
        Step(Stage.ALL_GATHER, lambda _: across.allgather(reduced, mean, name=f"{name}.ag")),
        Step(Stage.ALL_GATHER, give),
    ]
    if sent is values:
        return Exchange(steps, held=[ours, mean, rows, reduced], lane=lane)

    def pack(_: PassWeights | None) -> None:
        sent.copy_(values)

    def unpack(_: PassWeights | None) -> None:
        values.copy_(sent)

    steps = [Step(Stage.PACK, pack), *steps, Step(Stage.UNPACK, unpack)]
    return Exchange(steps, held=[sent, ours, mean, rows, reduced], lane=lane)


def _world_rank(levels: Levels) -> int:
    """Return this rank's number among all: its group's place in ``across``, its own inside."""
    return levels.groups.members[levels.across.rank][levels.inside.rank]


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
