"""An all-reduce between two ranks in one exchange: each receives the other's whole tensor.

A ring's two collectives send world_size * shard = numel values per rank in a world of two, and so
does this single one; it saves a cycle of the engine, and both ranks apply the rule to all rows.
Kernels give the same bits for the same rows wherever they run, so the ranks' results agree.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from loft_hvd.aggregation.aggregate import aggregate
from loft_hvd.aggregation.rules import Custom, Rule
from loft_hvd.pipeline.buckets import part_bounds
from loft_hvd.pipeline.exchange import Exchange, Stage, Step
from loft_hvd.pipeline.stages import is_engine_sum
from loft_hvd.pipeline.trace import Lane
from loft_hvd.pipeline.weights import PassWeights
from loft_hvd.transport.base import Swaps, Transport

__all__ = ["SwapReduction", "can_swap"]


def can_swap(transport: Transport, rule: Rule) -> bool:
    """Say whether a rule may be applied on both of two ranks instead of on shard owners.

    A ``Custom`` rule may not: it need not give the same values twice.
    """
    is_pair = transport.world_size == 2 and isinstance(transport, Swaps)
    return is_pair and not is_engine_sum(rule) and not isinstance(rule, Custom)


class SwapReduction:
    """One name's all-reduce between two ranks, again and again; keeps the other's row only.

    Args:
        transport: the ranks, for which ``can_swap`` holds.
        numel: values of the tensor, above 0.
        dtype: dtype of the tensor, float32 or float64.
        device: where it lives.
        rule: how rows are aggregated.
        name: stem of the operations' names, equal on both ranks.
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
        assert isinstance(transport, Swaps)
        self._swap = transport.swap
        self._rank = transport.rank
        self._rule = rule
        self._other = torch.zeros(numel, dtype=dtype, device=device)
        self._empty = self._other[:0]
        self._source = self._result = self._empty
        bounds = part_bounds(numel, 1, itemsize=dtype.itemsize, part_bytes=part_bytes)
        spans = [slice(begin, end) for begin, end in itertools.pairwise(bounds)]
        self._exchanges = [
            self._part(name if len(spans) == 1 else f"{name}.p{at}", span)
            for at, span in enumerate(spans)
        ]

    def start(self, source: Tensor, weights: PassWeights, *, share: float) -> None:
        """Put a tensor on the wire.

        Args:
            source: this rank's row, [numel]; not to be touched until the result is there.
            weights: of both rows.
            share: not used: no engine sums here.
        """
        self._source = source
        self._result = torch.empty_like(self._other)
        for exchange in self._exchanges:
            exchange.start(weights)

    def advance(self) -> bool:
        """Do what can be done without waiting, and say whether the result is there."""
        # A list: every part moves on, also behind one that waits.
        return all([exchange.advance() for exchange in self._exchanges])

    def take(self) -> Tensor:
        """Return the result, [numel], and forget it."""
        result = self._result
        self._source = self._result = self._empty
        return result

    def _part(self, name: str, span: slice) -> Exchange:
        received = self._other[span]

        def apply(weights: PassWeights | None) -> None:
            assert weights is not None
            rows = [self._source[span], received]
            aggregate(
                rows if self._rank == 0 else rows[::-1],
                self._rule,
                weights=weights.weights,
                present=weights.present,
                out=self._result[span],
            )

        return Exchange(
            [
                Step(
                    Stage.ALL_TO_ALL,
                    lambda _: self._swap(self._source[span], received, name=f"{name}.swap"),
                ),
                Step(Stage.AGGREGATE, apply),
            ],
            held=[received],
            lane=Lane(None, name),
        )
