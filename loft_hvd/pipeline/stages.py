"""How values of all ranks become one result, stage by stage.

``shard_exchange`` applies a rule on shard owners:

    PACK        values are put into the wire's format
    ALL_TO_ALL  shard j of every rank travels to rank j
    AGGREGATE   rank j applies the rule to its rows, one of every rank
    ALL_GATHER  rank j's result travels to every rank
    UNPACK      values are taken out of the wire's format: the same bits on every rank

``sum_exchange`` is the engine's own all-reduce instead. Both send 2 (n-1)/n of the values' bytes
per rank, which is a ring all-reduce's traffic.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from loft_hvd.aggregation.aggregate import aggregate
from loft_hvd.aggregation.rules import Mean, Rule
from loft_hvd.pipeline.exchange import Exchange, Stage, Step
from loft_hvd.pipeline.trace import Lane
from loft_hvd.pipeline.weights import PassWeights
from loft_hvd.pipeline.wire import Compression, Compressor, Wire
from loft_hvd.transport.base import Transport, Work

__all__ = [
    "Aggregate",
    "MakeExchange",
    "flat_exchange",
    "is_engine_sum",
    "run_rule",
    "shard_exchange",
    "sum_exchange",
]


MakeExchange = Callable[..., Exchange]
"""``(transport, values, *, rule, name, wire, lane)``: see ``flat_exchange``."""

Aggregate = Callable[[Tensor, Rule, PassWeights | None, Tensor], None]
"""``(rows, rule, weights, out)``: rows is [world_size, shard], out is [shard], of one dtype."""


def run_rule(rows: Tensor, rule: Rule, weights: PassWeights | None, out: Tensor) -> None:
    """Apply a rule to rows [world_size, shard]; ``out`` is [shard]."""
    aggregate(
        rows,
        rule,
        weights=None if weights is None else weights.weights,
        present=None if weights is None else weights.present,
        out=out,
    )


def is_engine_sum(rule: Rule, wire: Wire = Compression.none) -> bool:
    """Say whether a rule is the engine's own all-reduce instead of a rule on shard owners.

    Engines add 16-bit values up in 16 bits, or not at all; shard owners do it in float32.
    """
    is_plain_mean = isinstance(rule, Mean) and not rule.reproducible
    return is_plain_mean and wire not in (Compression.fp16, Compression.bf16)


def flat_exchange(
    transport: Transport,
    values: Tensor,
    *,
    rule: Rule,
    name: str,
    wire: Wire,
    lane: Lane,
    run: Aggregate = run_rule,
) -> Exchange:
    """Make the exchange of some values over all ranks of a transport, in place.

    Args:
        transport: the ranks.
        values: a multiple of world_size of them, [world_size * shard]: this rank's before, the
            aggregated ones after.
        rule: how rows are aggregated.
        name: stem of the operations' names, equal on every rank.
        wire: the format in which they travel.
        lane: where the stages show in a trace.
        run: applies the rule, and may look at the rows on the way.
    """
    if values.numel() == 0:
        return Exchange([], held=[], lane=lane)
    if is_engine_sum(rule, wire):
        return sum_exchange(transport, values, name=name, wire=wire, lane=lane)
    return shard_exchange(transport, values, rule=rule, name=name, wire=wire, lane=lane, run=run)


def sum_exchange(
    transport: Transport, values: Tensor, *, name: str, wire: Wire, lane: Lane
) -> Exchange:
    """Sum values by the engine's own all-reduce; each rank's are already scaled by its share."""
    if isinstance(wire, Compression):
        reduce = Step(Stage.ALL_REDUCE, lambda _: transport.allreduce(values, name=name))
        return Exchange([reduce], held=[], lane=lane)
    custom = _Custom(wire)

    def unpack(_: PassWeights | None) -> None:
        values.copy_(custom.take_out())

    return Exchange(
        [
            Step(Stage.PACK, lambda _: custom.put_in(values)),
            Step(Stage.ALL_REDUCE, lambda _: transport.allreduce(custom.sent, name=name)),
            Step(Stage.UNPACK, unpack),
        ],
        held=[],
        lane=lane,
    )


def shard_exchange(
    transport: Transport,
    values: Tensor,
    *,
    rule: Rule,
    name: str,
    wire: Wire,
    lane: Lane,
    run: Aggregate = run_rule,
) -> Exchange:
    """Apply a rule on shard owners; see the module's head, and ``flat_exchange`` for the arguments.

    Args:
        transport: the ranks; they may be some of all, such as one of each node.
        values: [world_size * shard].
        rule: what rank j applies to everybody's shard j.
        name: stem of the operations' names.
        wire: the format in which values travel.
        lane: where the stages show in a trace.
        run: applies the rule, and may look at the rows on the way.
    """
    if not isinstance(wire, Compression):
        return _compressed_exchange(transport, values, rule, name, wire, lane, run)
    dtype = values.dtype if wire.dtype is None else wire.dtype
    sent = values if dtype == values.dtype else torch.empty_like(values, dtype=dtype)
    rows = torch.zeros(transport.world_size, values.numel() // transport.world_size).to(sent)
    reduced = torch.zeros_like(rows[0])
    steps = [
        Step(
            Stage.ALL_TO_ALL,
            lambda _: transport.alltoall(sent, rows.view(-1), name=f"{name}.a2a"),
        ),
        Step(Stage.AGGREGATE, lambda weights: run(rows, rule, weights, reduced)),
        Step(Stage.ALL_GATHER, lambda _: transport.allgather(reduced, sent, name=f"{name}.ag")),
    ]
    if sent is values:
        return Exchange(steps, held=[rows, reduced], lane=lane)

    def pack(_: PassWeights | None) -> None:
        sent.copy_(values)

    def unpack(_: PassWeights | None) -> None:
        values.copy_(sent)

    steps = [Step(Stage.PACK, pack), *steps, Step(Stage.UNPACK, unpack)]
    return Exchange(steps, held=[sent, rows, reduced], lane=lane)


class _Custom:
    """What travels in a user's own wire format; the compressor makes its tensors each time."""

    def __init__(self, compressor: Compressor) -> None:
        self._compressor = compressor
        self._context: Any = None
        self.sent = torch.empty(0)
        self.received = torch.empty(0)

    def put_in(self, values: Tensor) -> None:
        wire, self._context = self._compressor.compress(values)
        self.sent = self.received = wire.contiguous()

    def take_out(self) -> Tensor:
        return self._compressor.decompress(self.received, self._context)


def _compressed_exchange(
    transport: Transport,
    values: Tensor,
    rule: Rule,
    name: str,
    compressor: Compressor,
    lane: Lane,
    run: Aggregate,
) -> Exchange:
    """Apply a rule on shard owners; values and results travel in a user's own format."""
    rows = torch.zeros_like(values).view(transport.world_size, -1)
    reduced = torch.zeros_like(rows[0])
    there, back = _Custom(compressor), _Custom(compressor)

    def all_to_all(_: PassWeights | None) -> Work:
        there.received = torch.empty_like(there.sent)
        return transport.alltoall(there.sent, there.received, name=f"{name}.a2a")

    def apply(weights: PassWeights | None) -> None:
        rows.view(-1).copy_(there.take_out())
        run(rows, rule, weights, reduced)
        back.put_in(reduced)

    def all_gather(_: PassWeights | None) -> Work:
        back.received = there.received  # of the size of all shards
        return transport.allgather(back.sent, back.received, name=f"{name}.ag")

    def unpack(_: PassWeights | None) -> None:
        values.copy_(back.take_out())

    return Exchange(
        [
            Step(Stage.PACK, lambda _: there.put_in(values)),
            Step(Stage.ALL_TO_ALL, all_to_all),
            Step(Stage.AGGREGATE, apply),
            Step(Stage.ALL_GATHER, all_gather),
            Step(Stage.UNPACK, unpack),
        ],
        held=[rows, reduced],
        lane=lane,
    )
