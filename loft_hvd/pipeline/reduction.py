"""One bucket's way: PACK, the exchange of each of its parts, UNPACK.

A large bucket is cut into parts, each with shards of its own: the rule of one part runs while the
next is on the wire. Rules that work on single coordinates give the same bits however it is cut.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from loft_hvd.aggregation.rules import Custom, Rule
from loft_hvd.pipeline.buckets import part_bounds
from loft_hvd.pipeline.exchange import Stage
from loft_hvd.pipeline.stages import MakeExchange, flat_exchange, is_engine_sum
from loft_hvd.pipeline.trace import Lane
from loft_hvd.pipeline.weights import PassWeights
from loft_hvd.pipeline.wire import Compression, Wire
from loft_hvd.transport.base import Transport

__all__ = ["Pack", "Reduction", "Unpack"]

Pack = Callable[[Tensor], PassWeights | None]
"""Fills a bucket's values, [numel], and returns the weights of this time."""

Unpack = Callable[[Tensor], None]
"""Takes a bucket's aggregated values, [numel], which it may change in place."""


# Engines copy smaller parts of a sum together again; larger ones are more values than MPI counts.
_SUM_BYTES = 2**31


class Reduction:
    """What the engine drives: one bucket, again and again.

    Args:
        transport: the ranks.
        numel: values of the bucket.
        dtype: dtype of the bucket.
        device: where it lives.
        rule: how rows are aggregated.
        name: stem of the operations' names, equal on every rank.
        wire: the format in which values travel.
        lane: where its stages show in a trace.
        make_exchange: how values go over the wire.
        part_bytes: a bucket of at least twice as many is cut into parts.
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
        wire: Wire = Compression.none,
        lane: Lane | None = None,
        make_exchange: MakeExchange = flat_exchange,
        part_bytes: int | None = None,
    ) -> None:
        is_whole = isinstance(rule, Custom)  # it may look at more than one coordinate
        if part_bytes is not None and is_engine_sum(rule, wire):
            part_bytes = max(part_bytes, _SUM_BYTES)
        bounds = part_bounds(
            numel,
            transport.world_size,
            itemsize=dtype.itemsize,
            part_bytes=None if is_whole else part_bytes,
        )
        self._lane = Lane(None, "") if lane is None else lane
        self._inside = self._lane.row(self._lane.name)
        self._padded = torch.zeros(bounds[-1], dtype=dtype, device=device)
        self._numel = numel
        self._device = torch.device(device)
        self._stage = Stage.IDLE
        self._unpack: Unpack | None = None
        spans = list(itertools.pairwise(bounds))
        names = [name] if len(spans) == 1 else [f"{name}.p{at}" for at in range(len(spans))]
        self._exchanges = [
            make_exchange(
                transport,
                self._padded[begin:end],
                rule=rule,
                name=part,
                wire=wire,
                lane=self._lane.row(f"{self._lane.name}{part.removeprefix(name)}"),
            )
            for part, (begin, end) in zip(names, spans, strict=True)
        ]

    @property
    def bucket(self) -> Tensor:
        """The flat values, [numel]: this rank's, or the aggregated ones when DONE."""
        return self._padded[: self._numel]

    @property
    def stage(self) -> Stage:
        """Where the bucket is; where its first part is that is not done, while on the wire."""
        if self._stage is not Stage.ALL_TO_ALL:
            return self._stage
        return next((e.stage for e in self._exchanges if e.stage is not Stage.DONE), Stage.UNPACK)

    def start(self, pack: Pack, unpack: Unpack | None = None) -> None:
        """Fill the bucket and put it on the wire.

        Args:
            pack: fills the values; its weights hold for this time.
            unpack: takes the aggregated values before the bucket is DONE.
        """
        with self._on_device():
            self._stage, self._unpack = Stage.PACK, unpack
            self._lane.enter(self._lane.name)
            self._inside.enter(Stage.PACK.value)
            weights = pack(self.bucket)
            self._inside.leave()
            self._stage = Stage.ALL_TO_ALL
            for exchange in self._exchanges:
                exchange.start(weights)

    def advance(self) -> bool:
        """Do what can be done without waiting, and say whether the bucket is DONE."""
        with self._on_device():
            if self._stage is Stage.ALL_TO_ALL:
                # A list: every part moves on, also behind one that waits.
                if not all([exchange.advance() for exchange in self._exchanges]):
                    return False
                self._stage = Stage.UNPACK
                self._inside.enter(Stage.UNPACK.value)
                if self._unpack is not None:
                    unpack, self._unpack = self._unpack, None
                    unpack(self.bucket)
                self._inside.leave()
                self._stage = Stage.DONE
                self._lane.leave()
        return self._stage is Stage.DONE

    def memory_bytes(self) -> int:
        """Return the bytes of the bucket and of what its exchanges hold."""
        return self._padded.nbytes + sum(each.memory_bytes() for each in self._exchanges)

    def _on_device(self) -> AbstractContextManager[object]:
        if self._device.type == "cuda":
            return torch.cuda.device(self._device)
        return contextlib.nullcontext()
