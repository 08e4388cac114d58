"""The robust ring all-reduce: how one bucket, or a part of it, becomes the same result everywhere.

``on_shard_owners`` is the way of every rule:

    PACK        values are put into the wire's format
    ALL_TO_ALL  shard j of every rank travels to rank j
    FILL        blocks that did not come are filled from those that did, where the wire may lose
                some
    AGGREGATE   rank j applies the rule to its rows, one of every rank; before that DISTANCES and
                SELECT where a rule judges rows over the whole model (``selection.py``)
    ALL_GATHER  rank j's result travels to every rank
    UNPACK      values are taken out of the wire's format: the same bits on every rank

``as_lane_sum`` is the lane's own all-reduce instead, for a plain mean. ``between_two`` serves
worlds of two ranks, and ``levels.py`` groups of ranks. Each sends 2 (n-1)/n of the values' bytes
per rank, which is a ring all-reduce's traffic, or less. ``to_shard_owners`` ends with AGGREGATE,
where owners keep their results: half of that, a reduce-scatter's traffic.

A way is a generator: it yields each collective that it has put in flight, and goes on when that is
done. An ``Exchange`` moves it on, and never blocks; ``prepare`` tells transports that listen where
its values shall lie, before any are sent.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from loft_hvd.aggregation.aggregate import aggregate
from loft_hvd.aggregation.filling import Holes, fill_holes
from loft_hvd.aggregation.rules import Mean, Rule
from loft_hvd.pipeline.selection import Scope, SelectionPart, total
from loft_hvd.pipeline.streams import used_here
from loft_hvd.pipeline.tolerance import Spans, loss_limits
from loft_hvd.pipeline.trace import TraceRow
from loft_hvd.pipeline.weights import PassWeights
from loft_hvd.pipeline.wire import Compression, Compressor, Wire
from loft_hvd.transport.base import Brought, Lane, Work
from loft_hvd.transport.datagram import LossTolerant

__all__ = [
    "Enter",
    "Exchange",
    "ExchangeSpec",
    "MakeExchange",
    "Owners",
    "Record",
    "Rows",
    "RunRule",
    "Stage",
    "apply_rule",
    "between_two",
    "bring_rows",
    "flat_exchange",
    "holes_of",
    "is_lane_sum",
    "run_rule",
    "suits_two",
    "to_shard_owners",
]


class Stage(enum.Enum):
    """Where values are."""

    IDLE = "idle"
    PACK = "pack"
    ALL_REDUCE = "all-reduce"
    ALL_TO_ALL = "all-to-all"
    FILL = "fill"
    DISTANCES = "distances"
    SELECT = "select"
    AGGREGATE = "aggregate"
    ALL_GATHER = "all-gather"
    UNPACK = "unpack"
    DONE = "done"


@dataclass(frozen=True)
class ExchangeSpec:
    """What is exchanged among whom, and how; equal on every rank."""

    lane: Lane
    name: str  # stem of the operations' names
    numel: int  # values of each rank
    dtype: torch.dtype  # of what is given and returned
    device: str
    rule: Rule  # aggregates the ranks' rows
    wire: Wire = Compression.none  # the format in which values travel
    row: TraceRow = field(default_factory=lambda: TraceRow(None, ""))  # of its stages in a trace
    selection: SelectionPart | None = None  # of a rule that judges rows by their distances
    records: list[Record] | None = None  # where exchanges leave what audits need; None without
    critical: Spans = ()  # values that must arrive, where the lane loses any

    def zeros(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Return a buffer; written once, so that no page of it is faulted in during a step."""
        return torch.zeros(shape, dtype=dtype or self.dtype, device=self.device)

    def sent_from(self, numel: int, *, dtype: torch.dtype | None = None) -> Tensor:
        """Return a buffer, [numel], to send from."""
        return self.lane.zeros(numel, dtype or self.dtype, self.device)

    @property
    def is_sum(self) -> bool:
        """Whether it is the lane's own all-reduce."""
        return is_lane_sum(self.rule, self.wire, self.lane)


@dataclass(eq=False)
class Record:
    """What an exchange on shard owners leaves behind in a step, for an audit of the owners."""

    spec: ExchangeSpec
    sent: Tensor  # this rank's values as they travelled, [numel]
    rows: Tensor  # what it has aggregated as an owner, [n, shard]
    received: Tensor  # the results of all owners as they travelled, [numel]
    weights: PassWeights | None = None


@dataclass(frozen=True)
class Owners:
    """What owners of shards go by, and leave behind."""

    scope: Scope = "shard"  # by which values rules that see rows judge them
    records: list[Record] | None = None  # where exchanges put what audits need; None for none
    gather: LossTolerant | None = None  # how rows may travel to them; None where all arrive


Rows = Tensor | Sequence[Tensor]
"""Rows of values, [num_rows, numel], or one by one."""


class RunRule(Protocol):
    """Applies a rule, and may look at the rows on the way."""

    def __call__(
        self,
        rows: Rows,
        rule: Rule,
        weights: PassWeights | None,
        out: Tensor,
        holes: Holes | None = None,
    ) -> None:
        """Aggregate rows [num_rows, numel] into ``out``, [numel], all of one dtype.

        ``holes`` are filled already; it says which values are no row's own.
        """


Enter = Callable[[Stage], None]
Steps = Callable[[Enter, Tensor, Tensor, PassWeights | None], Iterator[Work]]
"""``(enter, source, result, weights)``: says which stage begins, yields what is in flight."""


def run_rule(
    rows: Rows,
    rule: Rule,
    weights: PassWeights | None,
    out: Tensor,
    holes: Holes | None = None,
) -> None:
    """Apply a rule to rows [num_rows, numel], and look at nothing; ``out`` is [numel]."""
    aggregate(
        rows,
        rule,
        weights=None if weights is None else weights.weights,
        present=None if weights is None else weights.present,
        out=out,
    )


def apply_rule(
    spec: ExchangeSpec,
    run: RunRule,
    enter: Enter,
    rows: Rows,
    weights: PassWeights | None,
    out: Tensor,
    holes: Holes | None = None,
) -> Iterator[Work]:
    """Apply the rule to an owner's rows [num_rows, numel]; ``out`` is [numel].

    ``holes`` in them are filled first, in place. Yields what it waits for where the rule judges
    rows over the whole model.
    """
    rule, selection = spec.rule, spec.selection
    if holes is not None and not holes.is_any:
        holes = None
    if holes is not None:
        enter(Stage.FILL)
        fill_holes(
            rows,
            holes,
            rule,
            own=spec.lane.rank,
            weights=None if weights is None else weights.weights,
            present=None if weights is None else weights.present,
        )
    if selection is not None and selection.measures:
        enter(Stage.DISTANCES)
        selection.measure(rows, weights)
        enter(Stage.SELECT)
        yield from selection.wait()
        rule = selection.rule_by(total(selection.sums), weights)
    enter(Stage.AGGREGATE)
    run(rows, rule, weights, out, holes)


def bring_rows(
    spec: ExchangeSpec, sent: Tensor, rows: Tensor | None, weights: PassWeights | None
) -> tuple[Work, Brought]:
    """Start to bring rows to shard owners."""
    limits, lane = None, spec.lane
    if lane.loses:
        num_rows, own = lane.world_size, lane.rank
        limits = loss_limits(spec.rule, num_rows, weights, own=own, critical=spec.critical)
    return lane.bring(sent, rows, name=f"{spec.name}.a2a", limits=limits)


def holes_of(brought: Brought) -> Holes | None:
    """Return what is missing of rows that were brought."""
    return None if brought.missing is None else Holes(brought.missing, brought.block_numel)


class Exchange:
    """Goes one way over the wire, again and again; ``held`` are the buffers that the way owns."""

    def __init__(
        self,
        steps: Steps,
        *,
        row: TraceRow,
        held: Sequence[Tensor] = (),
        prepare: Callable[[Tensor], None] = lambda _: None,
    ) -> None:
        self.stage = Stage.IDLE
        self._way = steps
        self.prepare = prepare  # for the values of the next ``start``, given the result [numel]
        self._row = row
        self._held = tuple(held)
        self._steps: Iterator[Work] = iter(())
        self._work: Work | None = None  # in flight; None when all steps are done

    def start(self, source: Tensor, result: Tensor, weights: PassWeights | None) -> None:
        """Begin, and go on until the first collective is in flight.

        ``source`` and ``result`` are [numel], and may be one tensor. Leave ``source`` as it is.
        """
        self._steps = self._way(self._enter, source, result, weights)
        self._next()

    @property
    def has_news(self) -> bool:
        """Whether what is in flight is done, or nothing is."""
        return self._work is None or self._work.done()

    def advance(self) -> bool:
        """Go as far as is possible without waiting, and say whether all steps are done."""
        while self._work is not None:
            if not self._work.done():
                return False
            self._work.finish()
            self._next()
        return True

    def _next(self) -> None:
        self._work = next(self._steps, None)
        if self._work is None:
            self._enter(Stage.DONE)

    def _enter(self, stage: Stage) -> None:
        self.stage = stage
        self._row.enter("" if stage is Stage.DONE else stage.value)

    def memory_bytes(self) -> int:
        """Return the bytes of its own buffers; source and result are not among them."""
        return sum(tensor.nbytes for tensor in self._held)


MakeExchange = Callable[[ExchangeSpec], Exchange]


def is_lane_sum(rule: Rule, wire: Wire, lane: Lane) -> bool:
    """Say whether a rule is the lane's own all-reduce instead of a rule on shard owners.

    Engines add 16-bit values up in 16 bits, or not at all; shard owners do it in float32. What a
    user's own format makes of values only that can add up.
    """
    if not isinstance(rule, Mean) or rule.reproducible:
        return False
    return lane.adds_up if wire is Compression.none else not isinstance(wire, Compression)


def suits_two(lane: Lane, rule: Rule) -> bool:
    """Say whether a rule may be applied on both of two ranks instead of on shard owners.

    One that sees rows may not: its result is that of shards, whoever computes them. Nor where rows
    are read in place: nobody would tell when they have been.
    """
    is_sum = is_lane_sum(rule, Compression.none, lane)
    return lane.world_size == 2 and not (is_sum or rule.sees_rows or lane.lends or lane.loses)


def flat_exchange(spec: ExchangeSpec, *, run: RunRule = run_rule) -> Exchange:
    """Make the exchange over all ranks at once, of a multiple of world_size values.

    ``run`` applies the rule, and may look at the rows on the way.
    """
    if spec.numel == 0:
        return Exchange(lambda *_: iter(()), row=spec.row)
    if spec.is_sum:
        return as_lane_sum(spec)
    if isinstance(spec.wire, Compression):
        return on_shard_owners(spec, spec.wire, run)
    return on_shard_owners_compressed(spec, spec.wire, run)


def on_shard_owners(spec: ExchangeSpec, wire: Compression, run: RunRule) -> Exchange:
    """Apply a rule on shard owners; see the module's head."""
    # Others may read in place what is sent here: shard j of it is overwritten only by rank j's
    # result, which rank j sends once it has read it, and a result once all have sent rows again.
    lane, name, num_ranks = spec.lane, spec.name, spec.lane.world_size
    # A narrower wire needs a copy to send from, and to receive into; others need none. An audit
    # asks for what was sent when results are there, so then the two are apart.
    is_own = wire.dtype in (None, spec.dtype)
    narrow = None if is_own else spec.sent_from(spec.numel, dtype=wire.dtype)
    kept = None if spec.records is None else spec.sent_from(spec.numel, dtype=wire.dtype)
    rows = None  # [n, shard], where owners do not read them in their ranks' own memory
    if spec.records is not None or not lane.lends:
        rows = spec.zeros(num_ranks, spec.numel // num_ranks, dtype=wire.dtype)
    reduced = spec.sent_from(spec.numel // num_ranks, dtype=wire.dtype)  # [shard]
    record = None if kept is None or rows is None else Record(spec, kept, rows, received=kept)
    if spec.records is not None and record is not None:
        spec.records.append(record)

    def steps(
        enter: Enter, source: Tensor, result: Tensor, weights: PassWeights | None
    ) -> Iterator[Work]:
        sent, received = source, result if narrow is None else narrow
        if (copy := narrow if kept is None else kept) is not None:
            enter(Stage.PACK)
            sent = copy.copy_(source)
        if record is not None:
            record.received, record.weights = received, weights
        enter(Stage.ALL_TO_ALL)
        work, brought = bring_rows(spec, sent, rows, weights)
        yield work
        yield from apply_rule(spec, run, enter, brought.rows, weights, reduced, holes_of(brought))
        brought.release()
        # What was sent may be overwritten from here on: its collective is done.
        enter(Stage.ALL_GATHER)
        yield lane.allgather(reduced, received, name=f"{name}.ag")
        if narrow is not None:
            enter(Stage.UNPACK)
            result.copy_(narrow)

    def prepare(result: Tensor) -> None:
        if rows is not None:
            lane.expect(rows.view(-1), name=f"{name}.a2a")
        # Also where that still holds what is to be sent: rank j sends its shard of the result only
        # once it has what lies there.
        lane.expect(result if narrow is None else narrow, name=f"{name}.ag")

    held = [each for each in (narrow, kept, rows, reduced) if each is not None]
    return Exchange(steps, row=spec.row, held=held, prepare=prepare)


def to_shard_owners(
    spec: ExchangeSpec, *, room: Tensor | None, run: RunRule = run_rule
) -> Exchange:
    """Apply a rule on shard owners, who keep the results: ``result`` is [numel / world_size].

    What was sent may be changed once the next exchange among these ranks has ended: each of them
    begins that after it has read the rows of this one.

    Args:
        spec: of a multiple of world_size values, which travel as they are.
        room: where rows come, [world_size, shard]; None where the lane ``lends``.
        run: applies the rule, and may look at the rows on the way.
    """

    def steps(
        enter: Enter, source: Tensor, result: Tensor, weights: PassWeights | None
    ) -> Iterator[Work]:
        enter(Stage.ALL_TO_ALL)
        work, brought = bring_rows(spec, source, room, weights)
        yield work
        yield from apply_rule(spec, run, enter, brought.rows, weights, result, holes_of(brought))
        brought.release()

    return Exchange(steps, row=spec.row)


def on_shard_owners_compressed(
    spec: ExchangeSpec, compressor: Compressor, run: RunRule
) -> Exchange:
    """Apply a rule on shard owners; values and results travel in a user's own format."""
    lane, name, num_ranks = spec.lane, spec.name, spec.lane.world_size
    rows = spec.zeros(num_ranks, spec.numel // num_ranks)  # [n, shard]
    reduced = torch.zeros_like(rows[0])  # [shard]

    def steps(
        enter: Enter, source: Tensor, result: Tensor, weights: PassWeights | None
    ) -> Iterator[Work]:
        enter(Stage.PACK)
        sent, context = _compressed(compressor, source)
        enter(Stage.ALL_TO_ALL)
        received = torch.empty_like(sent)
        yield lane.alltoall(sent, received, name=f"{name}.a2a")
        enter(Stage.UNPACK)
        rows.view(-1).copy_(_decompressed(compressor, received, context))
        yield from apply_rule(spec, run, enter, rows, weights, reduced)
        own, context = _compressed(compressor, reduced)
        enter(Stage.ALL_GATHER)
        yield lane.allgather(own, received, name=f"{name}.ag")  # of the size of all shards
        enter(Stage.UNPACK)
        result.copy_(_decompressed(compressor, received, context))

    return Exchange(steps, row=spec.row, held=[rows, reduced])


def as_lane_sum(spec: ExchangeSpec) -> Exchange:
    """Sum by the lane's own all-reduce, in place; each rank's are already scaled by its share."""

    def steps(
        enter: Enter, source: Tensor, result: Tensor, weights: PassWeights | None
    ) -> Iterator[Work]:
        assert source is result
        if isinstance(spec.wire, Compression):
            enter(Stage.ALL_REDUCE)
            yield spec.lane.allreduce(result, name=spec.name)
            return
        enter(Stage.PACK)
        sent, context = _compressed(spec.wire, source)
        enter(Stage.ALL_REDUCE)
        yield spec.lane.allreduce(sent, name=spec.name)
        enter(Stage.UNPACK)
        result.copy_(_decompressed(spec.wire, sent, context))

    return Exchange(steps, row=spec.row)


def between_two(spec: ExchangeSpec) -> Exchange:
    """Exchange the whole rows of two ranks, each of which then applies the rule to both.

    A ring sends numel values per rank in a world of two, in two collectives; so does this, in one.
    Kernels give the same bits for the same rows wherever they run, so the two results agree.
    """
    # One collective saves a cycle of the engine, which is most of a small tensor's time: 4 MB on 2
    # MPI ranks took 1.72 times hvd.allreduce's time on shard owners, 1.20 times so (`loft-hvd bench
    # collectives`, 2 shared cores, 2026-11-21). An all-gather of the rows would also copy a rank's
    # own row: 1.15 times as long from 25 MB on (2 Gloo ranks, 2 shared cores, 2026-11-22).
    lane, name, rank = spec.lane, spec.name, spec.lane.rank
    other = spec.zeros(spec.numel)

    def steps(
        enter: Enter, source: Tensor, result: Tensor, weights: PassWeights | None
    ) -> Iterator[Work]:
        enter(Stage.ALL_TO_ALL)
        yield lane.alltoall(source, other, name=f"{name}.swap", skips_own=True)
        enter(Stage.AGGREGATE)
        # Rows are in rank order, so that weights belong to them.
        run_rule([source, other] if rank == 0 else [other, source], spec.rule, weights, result)

    def prepare(_: Tensor) -> None:
        lane.expect(other, name=f"{name}.swap", skips_own=True)

    return Exchange(steps, row=spec.row, held=[other], prepare=prepare)


def _compressed(compressor: Compressor, values: Tensor) -> tuple[Tensor, Any]:
    sent, context = compressor.compress(values)
    return sent.contiguous(), context


def _decompressed(compressor: Compressor, received: Tensor, context: Any) -> Tensor:
    values = compressor.decompress(received, context)
    # They are of one exchange only, and of the thread that moved it on before.
    used_here(received, context)
    return values
