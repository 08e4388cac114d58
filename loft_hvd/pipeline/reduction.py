"""One bucket's, or one tensor's, way: PACK, the exchange of each of its parts, UNPACK.

A large one is cut into parts, each with shards of its own, of which a few are under way at once:
the rule of one part runs, and its result travels, while the rows of the next ones do. Rules that
work on single coordinates give the same bits however it is cut.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace

import torch
from torch import Tensor

from loft_hvd.pipeline.buckets import part_bounds
from loft_hvd.pipeline.ring import (
    Exchange,
    ExchangeSpec,
    MakeExchange,
    Stage,
    between_two,
    flat_exchange,
    suits_two,
)
from loft_hvd.pipeline.tolerance import Spans
from loft_hvd.pipeline.weights import PassWeights
from loft_hvd.pipeline.wire import Compression

__all__ = ["OVERLAPPING_PART_BYTES", "PART_BYTES", "BucketReduction", "Pack"]

Pack = Callable[[Tensor], PassWeights | None]
"""Fills in what a rank sends, [numel], and returns the weights of this time."""

# Where an engine has one operation at a time. Bound from Horovod's cycle of 1 ms, which each part
# waits for once more: 16 MiB take 13 ms on a link of 10 Gb/s.
PART_BYTES = 16 * 1024 * 1024
# Where operations overlap: bytes of a part, for links of up to so many bytes a second. A part costs
# some 2 ms of CPU, which fast links lose by; beside other work small ones keep hosts in step. Steps
# instead of a formula, so that one cluster is cut alike from run to run. 4 hosts on 2 cores, 25 MB,
# times of hvd.allreduce (2026-11-23 and -24, docs/benchmarks.md): links without a limit, parts of
# 2, 4 and 8 MB, 1.51, 1.18, 0.98; 1 Gb/s, parts of 2, 4, 6 and 8 MiB, 0.96, 0.92, 0.85, 0.91;
# 200 Mb/s, parts of 2 and 4 MB, in four jobs 1.01 and 1.03, 1.00 and 1.01, 0.97 and 0.99, 1.02 and
# 1.00. At 1 Gb/s 6.25 MB of float16 took 90 to 94 ms as one part, 83 to 86 as two; 12.5 MB as two
# and five parts 157 to 161, 157 and 158 (2026-11-26).
_FAST_BYTES_PER_S = 160e6
OVERLAPPING_PART_BYTES = (  # least and most; between them a fifth of the values
    (60e6, 2 * 2**20, 2 * 2**20),
    (_FAST_BYTES_PER_S, 2 * 2**20, 4 * 2**20),
    (math.inf, 6 * 2**20, 6 * 2**20),
)
_USUAL_PARTS = 5
_UNTRIED_PART_BYTES = 4 * 2**20  # on links that nobody has tried
_MOST_PARTS = 12  # then they get longer
_MAX_UNDER_WAY = 6  # parts; 3 of 12, 4 of 16, and 4, 6 or 12 of 24 were no better at 200 Mb/s
# Horovod's fusion would copy smaller parts of a sum together again. Parts are below twice this, so
# at most 2**30 values of 4 bytes: MPI counts values in 31 bits.
_SUM_PART_BYTES = 2**31


class BucketReduction:
    """Reduces some values, again and again; a lane carries them.

    ``start`` has ``pack`` fill in what this rank sends, and gives the weights of this time. Values
    lie in a bucket of its own, this rank's before and the aggregated ones after. With ``is_given``
    they come from one tensor of the caller's and the aggregated ones go into another, or into the
    same one (``is_in_place``), and a bucket is between only where the lane or the shards' length
    asks for one. Aggregated values are
    multiplied by ``factor`` at last. Values of at least twice ``part_bytes`` are cut into parts;
    None for what suits the lane.
    """

    def __init__(
        self,
        spec: ExchangeSpec,
        *,
        pack: Pack,
        is_given: bool = False,
        is_in_place: bool = False,
        factor: float = 1.0,
        make_exchange: MakeExchange = flat_exchange,
        part_bytes: int | None = None,
    ) -> None:
        lane, num_shards = spec.lane, spec.lane.world_size
        is_two = is_given and not is_in_place and suits_two(lane, spec.rule)
        if is_two:
            make_exchange, num_shards = between_two, 1
        bounds = _bounds(spec, num_shards, part_bytes)
        # Whole shards need no padding at the end, and so no memory of our own for a result.
        self._is_exact = is_given and (is_two or spec.is_sum or spec.numel % lane.world_size == 0)
        if self._is_exact:
            bounds = (*bounds[:-1], spec.numel)
        self.is_sum = spec.is_sum
        self.selection = spec.selection
        self._pack = pack
        self._factor = factor
        self._row = spec.row
        self._bucket_stages = spec.row.row(spec.row.name)  # within the bucket's own span
        device = torch.device(spec.device)
        self._on_device: Callable[[], AbstractContextManager[object]] = contextlib.nullcontext
        if device.type == "cuda":
            self._on_device = functools.partial(torch.cuda.device, device)
        self._stage = Stage.IDLE
        has_bucket = not self._is_exact or (lane.lends and not spec.is_sum)
        self.padded = spec.sent_from(bounds[-1] if has_bucket else 0)  # to whole shards
        self.values = self.padded[: spec.numel]
        self._result: Tensor | None = None  # that is given, until values are in it
        spans = [slice(begin, end) for begin, end in itertools.pairwise(bounds)]
        suffixes = [""] if len(spans) == 1 else [f".p{at}" for at in range(len(spans))]
        self._under_way: deque[Exchange] = deque()
        self._to_come: deque[Callable[[], Exchange]] = deque()  # each starts a part
        self._parts = [
            (
                span,
                make_exchange(
                    replace(
                        spec,
                        name=f"{spec.name}{suffix}",
                        numel=span.stop - span.start,
                        row=spec.row.row(f"{spec.row.name}{suffix}"),
                        critical=_within(spec.critical, span),
                    )
                ),
            )
            for span, suffix in zip(spans, suffixes, strict=True)
        ]

    @property
    def num_parts(self) -> int:
        """In how many parts values are exchanged."""
        return len(self._parts)

    @property
    def stage(self) -> Stage:
        """Where values are; where the first part is that is not done, while on the wire."""
        if self._stage is not Stage.ALL_TO_ALL:
            return self._stage
        parts = (exchange.stage for _, exchange in self._parts)
        return next((stage for stage in parts if stage is not Stage.DONE), Stage.UNPACK)

    def start(self, row: Tensor | None = None, result: Tensor | None = None) -> None:
        """Fill in what is sent and put it on the wire.

        Where values are given, ``row`` has this rank's, [numel], and ``result`` gets the aggregated
        ones. Where there is no bucket ``pack`` fills ``row`` itself, or
        ``result`` where that is summed in place, and both are to be left alone until the end.
        """
        with self._on_device():
            self._stage = Stage.PACK
            self._row.enter(self._row.name)
            self._bucket_stages.enter(Stage.PACK.value)
            source, into = self.padded, self.padded
            sent = self.values
            if row is not None and result is not None:
                self._result = result
                if self._is_exact:
                    into = result
                    if self.padded.numel() == 0:
                        source = result if self.is_sum else row
                        sent = source
            weights = self._pack(sent)
            self._bucket_stages.enter("")
            self._send(source, into, weights)

    def _send(self, source: Tensor, result: Tensor, weights: PassWeights | None) -> None:
        self._stage = Stage.ALL_TO_ALL

        def start(span: slice, exchange: Exchange) -> Exchange:
            part = source[span]
            exchange.start(part, part if result is source else result[span], weights)
            return exchange

        # The first part is on the wire while the others are prepared, which takes 5 to 40 ms where
        # 4 ranks share 2 cores. They are before the second is sent: on one connection the word that
        # a rank is ready to receive would wait behind the values of other parts.
        self._to_come.extend(functools.partial(start, *each) for each in self._parts)
        for at, (span, exchange) in enumerate(self._parts):
            exchange.prepare(result[span])
            if at == 0:
                self._under_way.append(self._to_come.popleft()())
        self._fill()

    def _fill(self) -> None:
        """Start parts, in their order, while there is room for more under way."""
        while self._to_come and len(self._under_way) < _MAX_UNDER_WAY:
            self._under_way.append(self._to_come.popleft()())

    @property
    def has_news(self) -> bool:
        """Whether ``advance`` has something to do; asking costs little."""
        return not self._under_way or any(exchange.has_news for exchange in self._under_way)

    def advance(self) -> bool:
        """Do what can be done without waiting, and say whether the result is there."""
        with self._on_device():
            if self._stage is Stage.ALL_TO_ALL:
                for exchange in list(self._under_way):  # also those behind one that waits
                    if exchange.advance():
                        self._under_way.remove(exchange)
                        self._fill()
                if self._under_way:
                    return False
                self._stage = Stage.UNPACK
                self._bucket_stages.enter(Stage.UNPACK.value)
                values, result, self._result = self.values, self._result, None
                if result is not None:
                    if not self._is_exact:
                        result.copy_(values)
                    values = result
                if self._factor != 1.0:
                    values.mul_(self._factor)
                self._bucket_stages.enter("")
                self._stage = Stage.DONE
                self._row.enter("")
        return self._stage is Stage.DONE

    def memory_bytes(self) -> int:
        """Return the bytes of the bucket, and of what its exchanges hold."""
        return self.padded.nbytes + sum(each.memory_bytes() for _, each in self._parts)


def _within(spans: Spans, part: slice) -> Spans:
    """Return what of some spans lies in a part, counted from its beginning."""
    cut = ((max(begin, part.start), min(end, part.stop)) for begin, end in spans)
    return tuple((begin - part.start, end - part.start) for begin, end in cut if begin < end)


def _bounds(spec: ExchangeSpec, num_shards: int, part_bytes: int | None) -> tuple[int, ...]:
    if part_bytes is None and spec.lane.has_parts:
        part_bytes = _overlapping_bytes(spec) if spec.lane.overlaps else PART_BYTES
    if spec.rule.sees_rows:
        part_bytes = None  # its result depends on the block: whole shards, however long
    elif spec.is_sum and part_bytes is not None:
        part_bytes = max(part_bytes, _SUM_PART_BYTES)
    return part_bounds(spec.numel, num_shards, itemsize=spec.dtype.itemsize, part_bytes=part_bytes)


def _overlapping_bytes(spec: ExchangeSpec) -> int:
    """Return how long parts are whose operations overlap, in bytes of the values' own dtype."""
    rate = spec.lane.bytes_per_s
    counted = own = spec.dtype.itemsize
    # Slow links count the bytes that travel; those of a user's own format nobody knows.
    is_slow = rate is not None and rate <= _FAST_BYTES_PER_S
    if is_slow and isinstance(spec.wire, Compression) and spec.wire.dtype is not None:
        counted = spec.wire.dtype.itemsize
    num_bytes, part = spec.numel * counted, _UNTRIED_PART_BYTES
    if rate is not None:
        least, longest = next(each[1:] for each in OVERLAPPING_PART_BYTES if rate <= each[0])
        part = min(longest, max(least, num_bytes // _USUAL_PARTS))
    return max(part, num_bytes // _MOST_PARTS) * own // counted
