"""An all-reduce from the caller's tensor straight into a new one, without a bucket in between.

Where shards need no padding, each rank sends from the tensor and receives into the result: no
value is copied before or after.

Two ranks receive each other's whole tensor instead. A ring's two collectives send numel values per
rank in a world of two, and so does this single one; it saves a cycle of the engine, and both ranks
apply the rule to both rows. Kernels give the same bits for the same rows wherever they run, so the
ranks' results agree.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from loft_hvd.aggregation.aggregate import aggregate
from loft_hvd.aggregation.rules import Custom, Rule
from loft_hvd.pipeline.buckets import part_bounds
from loft_hvd.pipeline.exchange import Exchange, Stage, Step
from loft_hvd.pipeline.stages import is_engine_sum, run_rule
from loft_hvd.pipeline.trace import Lane
from loft_hvd.pipeline.weights import PassWeights
from loft_hvd.transport.base import Swaps, Transport

__all__ = ["DirectReduction", "can_swap"]


def can_swap(transport: Transport, rule: Rule) -> bool:
    """Say whether a rule may be applied on both of two ranks instead of on shard owners.

    A ``Custom`` rule may not: it need not give the same values twice.
    """
    is_pair = transport.world_size == 2 and isinstance(transport, Swaps)
    return is_pair and not is_engine_sum(rule) and not isinstance(rule, Custom)


class DirectReduction:
    """One name's all-reduce, again and again; keeps the received rows' buffers only.

    Args:
        transport: the ranks.
        numel: values of the tensor, above 0; a multiple of world_size unless ``can_swap`` holds.
        dtype: dtype of the tensor, float32 or float64.
        device: where it lives.
        rule: how rows are aggregated.
        name: stem of the operations' names, equal on every rank.
        part_bytes: a tensor of at least twice as many is exchanged in parts.
    """

    def __init__(
        self,
        transport: Transport,
        *,
        numel: int,
        dtype: torch.dtype,
        device: str,
        rule: Rule,
        name: str,
        part_bytes: int,
    ) -> None:
        self._transport = transport
        self._rule = rule
        self._like = torch.empty(0, dtype=dtype, device=device)
        self._numel = numel
        self._source = self._result = self._like
        self._share = 1.0
        if is_engine_sum(rule):
            self._exchanges = [self._sum(name)]
            return
        is_swap = can_swap(transport, rule)
        whole = isinstance(rule, Custom)  # it may look at more than one coordinate
        parts = part_bounds(
            numel,
            1 if is_swap else transport.world_size,
            itemsize=dtype.itemsize,
            part_bytes=None if whole else part_bytes,
        )
        spans = list(itertools.pairwise((*parts[:-1], numel)))
        names = [name] if len(spans) == 1 else [f"{name}.p{at}" for at in range(len(spans))]
        make = self._swap if is_swap else self._part
        self._exchanges = [
            make(part, slice(begin, end)) for part, (begin, end) in zip(names, spans, strict=True)
        ]

    def start(self, source: Tensor, weights: PassWeights, *, share: float) -> None:
        """Put a tensor on the wire.

        Args:
            source: this rank's row, [numel]; not to be touched until the result is there.
            weights: of all rows.
            share: what this rank's row is multiplied by when the engine sums.
        """
        self._source = source
        self._result = torch.empty_like(self._like).resize_(self._numel)
        self._share = share
        for exchange in self._exchanges:
            exchange.start(weights)

    def advance(self) -> bool:
        """Do what can be done without waiting, and say whether the result is there."""
        # A list: every part moves on, also behind one that waits.
        return all([exchange.advance() for exchange in self._exchanges])

    def take(self) -> Tensor:
        """Return the result, [numel], and forget it."""
        result = self._result
        self._source = self._result = self._like
        return result

    def _sum(self, name: str) -> Exchange:
        def pack(_: PassWeights | None) -> None:
            if self._share:
                torch.mul(self._source, self._share, out=self._result)
            else:
                self._result.zero_()  # never 0 times what an absent rank has

        return Exchange(
            [
                Step(Stage.PACK, pack),
                Step(
                    Stage.ALL_REDUCE, lambda _: self._transport.allreduce(self._result, name=name)
                ),
            ],
            held=[],
            lane=Lane(None, name),
        )

    def _part(self, name: str, span: slice) -> Exchange:
        world_size = self._transport.world_size
        shard = (span.stop - span.start) // world_size
        rows = self._like.new_zeros(world_size, shard)
        reduced = self._like.new_zeros(shard)
        return Exchange(
            [
                Step(
                    Stage.ALL_TO_ALL,
                    lambda _: self._transport.alltoall(
                        self._source[span], rows.view(-1), name=f"{name}.a2a"
                    ),
                ),
                Step(Stage.AGGREGATE, lambda weights: run_rule(rows, self._rule, weights, reduced)),
                Step(
                    Stage.ALL_GATHER,
                    lambda _: self._transport.allgather(
                        reduced, self._result[span], name=f"{name}.ag"
                    ),
                ),
            ],
            held=[rows, reduced],
            lane=Lane(None, name),
        )

    def _swap(self, name: str, span: slice) -> Exchange:
        transport = self._transport
        assert isinstance(transport, Swaps)
        other, rank, swap = (
            self._like.new_zeros(span.stop - span.start),
            transport.rank,
            transport.swap,
        )

        def apply(weights: PassWeights | None) -> None:
            assert weights is not None
            rows = [self._source[span], other]
            aggregate(
                rows if rank == 0 else rows[::-1],
                self._rule,
                weights=weights.weights,
                present=weights.present,
                out=self._result[span],
            )

        return Exchange(
            [
                Step(
                    Stage.ALL_TO_ALL,
                    lambda _: swap(self._source[span], other, name=f"{name}.swap"),
                ),
                Step(Stage.AGGREGATE, apply),
            ],
            held=[other],
            lane=Lane(None, name),
        )
