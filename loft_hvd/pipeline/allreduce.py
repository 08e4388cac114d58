"""The robust all-reduce on one tensor, as ``hvd.allreduce`` for a rule.

Every rank ends with the same bits. Cost per rank: 2 (n-1)/n of the tensor's bytes sent, one
tensor-sized receive buffer kept for each of the newest 256 names (two where numel is no multiple of
the number of ranks: such tensors are copied), and one exchange of four numbers that finds ranks
which disagree about shape, dtype, device or rule.
"""

from __future__ import annotations

import functools
import threading
import time
import weakref
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from loft_hvd.aggregation.pages import empty_row
from loft_hvd.aggregation.rules import Mean, Rule
from loft_hvd.config import config
from loft_hvd.errors import (
    AggregationError,
    ArgumentError,
    ArgumentTypeError,
    MismatchError,
    TransportTimeoutError,
)
from loft_hvd.pipeline.gradients import copy_scaled
from loft_hvd.pipeline.reduction import BucketReduction, needs_no_bucket
from loft_hvd.pipeline.ring import ExchangeSpec, RunRule, flat_exchange, is_engine_sum, run_rule
from loft_hvd.pipeline.selection import SelectionPart
from loft_hvd.pipeline.streams import StreamOrder, used_here
from loft_hvd.pipeline.weights import PassWeights
from loft_hvd.pipeline.wire import Compression
from loft_hvd.transport.agreement import digest, odd_ones
from loft_hvd.transport.base import Transport, Work, mixes_devices, watch_of
from loft_hvd.transport.default import default_transport
from loft_hvd.transport.mesh import connections_of, meshed

__all__ = [
    "Handle",
    "allreduce",
    "allreduce_async",
    "forget_reductions",
    "forget_transport",
    "start_allreduce",
]

# Between polls: of a wait so far this part, and at least and at most so many seconds. Asked every
# 100 us 100 MB on 4 ranks and links of 1 Gb/s took 1.7 s of CPU, where hvd.allreduce takes 1.0.
# The least is bound from Horovod, a tenth of its cycle of 1 ms; the others are choices.
_POLL_PART, _SHORTEST_POLL_S, _LONGEST_POLL_S = 0.005, 100e-6, 1e-3
_MOST_KEPT = (
    256  # names whose buffers are kept; a choice: names with a step in them never come again
)
_WIRES = {torch.float16: Compression.fp16, torch.bfloat16: Compression.bf16}
_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


class NamedReduction:
    """What ``allreduce`` keeps of one name from call to call, and a row's way there and back.

    A row goes from the tensor itself into the new one that is returned where shards need no
    padding; else through a bucket, with a copy before and after.
    """

    def __init__(
        self,
        transport: Transport,
        tensor: Tensor,
        rule: Rule,
        name: str,
        selection: SelectionPart | None = None,
        run: RunRule = run_rule,
    ) -> None:
        numel, device = tensor.numel(), str(tensor.device)
        wire = _WIRES.get(tensor.dtype, Compression.none)
        spec = ExchangeSpec(
            transport, name, numel, tensor.dtype, device, rule, wire, selection=selection
        )
        self.kind = _kind_of(transport, tensor, rule, selection, run)
        self.is_busy = False  # values of other ranks may come into its buffers
        self.failure = ""  # what has ended it: it is busy for good
        self.is_direct = needs_no_bucket(transport, rule, numel)
        self.is_engine_sum = is_engine_sum(rule, wire)
        self.streams = StreamOrder(device)  # of who moves it on: any thread that waits for any
        self._result: Tensor | None = None  # of a direct one; else it is in the bucket
        self._reduction = BucketReduction(
            spec,
            has_bucket=not self.is_direct,
            make_exchange=functools.partial(flat_exchange, run=run),
        )
        self.overlaps = self._reduction.overlaps  # with others, on connections of our own

    def start(self, row: Tensor, weights: PassWeights, *, share: float) -> None:
        """Put a rank's row, of any shape, on the wire; leave it as it is until the end.

        ``share`` is what it is multiplied by before engines sum, and 0 for an absent rank's.
        """
        source = result = self._reduction.padded
        if self.is_direct:
            source = row.contiguous().view(-1)
            # Large ones in huge pages: 100 MB of small ones take about 40 ms to fault in.
            on_cpu = source.device.type == "cpu"
            self._result = result = (
                empty_row(source.numel(), source.dtype) if on_cpu else torch.empty_like(source)
            )
        if not self.is_direct or self.is_engine_sum:  # both work in place
            source = result
            values = result[: row.numel()].view(row.shape)
            if share:
                copy_scaled(row, values, share)
            else:
                values.zero_()  # never 0 times what an absent rank has
        self._reduction.start_from(source, result, weights)

    def advance(self) -> bool:
        """Do what can be done without waiting, and say whether the result is there."""
        return self._reduction.advance()

    def fail(self, error: BaseException) -> None:
        """Note what has ended it; other ranks may not have heard of that, and go on."""
        self.failure = f"{type(error).__name__}: {error}"

    def take(self, like: Tensor) -> Tensor:
        """Return the result as a tensor of its own, with shape and dtype of ``like``; once."""
        result, self._result = self._result, None
        if result is not None and like.is_contiguous():
            taken = result.view(like.shape)
        else:
            values = self._reduction.values if result is None else result
            taken = torch.empty_like(like).copy_(values.view(like.shape))
        self.is_busy = False
        return taken


def _kind_of(
    transport: Transport,
    tensor: Tensor,
    rule: Rule,
    selection: SelectionPart | None,
    run: RunRule,
) -> tuple[object, ...]:
    # What calls of one name must share to use its buffers again.
    shape, dtype, device = tensor.shape, tensor.dtype, str(tensor.device)
    size, lines = transport.world_size, connections_of(transport)
    return (shape, dtype, device, rule, size, selection, lines, run)


@functools.cache
def _reductions() -> weakref.WeakKeyDictionary[Transport, dict[str, NamedReduction]]:
    return weakref.WeakKeyDictionary()


def forget_reductions() -> None:
    """Drop all buffers, also of operations in flight: their world has ended."""
    _reductions().clear()
    _in_flight().clear()
    _kept_end.cache_clear()


def forget_transport(transport: Transport) -> None:
    """Drop the buffers of a transport that nobody will use again."""
    # Weak keys do not: buffers hold their transport.
    _reductions().pop(transport, None)
    _in_flight().pop(transport, None)


class Handle:
    """An all-reduce in flight; made by ``allreduce_async``.

    Whoever asks for one moves all of the same transport on, in the order in which they began: ranks
    may wait for theirs in any order.
    """

    def __init__(
        self,
        transport: Transport,
        tensor: Tensor,
        reduction: NamedReduction | None,
        *,
        name: str,
        agreement: tuple[Work, Tensor, Tensor] | None,
        start: Callable[[], None] | None = None,
    ) -> None:
        self._transport = transport
        self._tensor = tensor
        self._reduction = reduction
        self._name = name
        self._agreement = agreement  # its row is kept with it: it is being sent
        self._start = start  # what begins once ranks agree; None where it has begun
        self._result = tensor.clone() if reduction is None else None
        self._is_over = reduction is None
        self._failure: BaseException | None = None
        self._claiming = threading.RLock()  # a signal handler of the script's may reduce, too
        self._mover: object = None  # who moves it; None when nobody does

    @property
    def failure(self) -> BaseException | None:
        """What has ended it, as far as it was moved on; None while nothing has."""
        return self._failure

    def done(self) -> bool:
        """Say whether ``wait`` would return at once; moves work on, never blocks."""
        if not self._is_over and self._failure is None:
            others = _in_flight().get(self._transport, [])
            for handle in others.copy():
                handle._move()
            if self not in others:  # over by now; or forgotten, as its world has ended
                self._move()
        if self._failure is not None:
            raise self._failure
        return self._is_over

    def _move(self) -> None:
        """Do what can be done without waiting; an error is told to who asks for this handle."""
        # Threads may wait for handles of their own: what one of them moves, the rest leave alone.
        mine = object()
        try:
            with self._claiming:
                if self._mover is None:
                    self._mover = mine
            if self._mover is not mine:
                return
            self._move_on()
            # Only who moves it: of two that find it in the list, one would not find it any more.
            others = _in_flight().get(self._transport, [])
            if (self._is_over or self._failure is not None) and self in others:
                others.remove(self)
        finally:
            # An interrupt comes after calls only, of which there is none here: with a lock, taken
            # right before the ``try`` or given back in here, nobody might move it any more.
            if self._mover is mine:
                self._mover = None

    def _move_on(self) -> None:
        if self._is_over or self._failure is not None:
            return
        assert self._reduction is not None
        try:
            self._reduction.streams.take()
            if self._advance(self._reduction):
                # At once, so that the name is free: nobody may ask for this handle any more, as
                # where a wait for it has ended by its limit.
                self._result = self._reduction.take(self._tensor)
                self._is_over = True  # last: another thread may wait for it
        except BaseException as error:
            self._failure = error  # what the buffers hold by now is no result: asked again, too
            self._reduction.fail(error)
            if not isinstance(error, Exception):  # as when the user interrupts
                raise

    def _advance(self, reduction: NamedReduction) -> bool:
        if self._agreement is not None:
            work, _, rows = self._agreement
            if not work.done():
                return False
            work.finish()
            self._agreement = None
            self._check_agreement(rows)
        if self._start is not None:
            self._start()
            self._start = None
        return reduction.advance()

    def wait(self, timeout_s: float | None = None, *, beside: Sequence[Handle] = ()) -> Tensor:
        """Return the aggregated tensor.

        Args:
            timeout_s: longest wait in seconds; None takes ``LOFT_HVD_TIMEOUT_S``.
            beside: handles that this one may wait for, as where one selection decides over all:
                what fails of them ends the wait, too.

        Returns:
            A new tensor with shape, dtype and device of the input, equal bits on every rank.

        Raises:
            TransportTimeoutError: other ranks did not answer in time.
            MismatchError: ranks brought different shapes, dtypes, rules or weights.
        """
        limit_s = config().timeout_s if timeout_s is None else timeout_s
        began, watch = time.monotonic(), watch_of(self._transport)
        with watch.waiting():
            while not self.done():
                for failure in (handle.failure for handle in beside):
                    if failure is not None:
                        raise failure
                waited_s = time.monotonic() - began
                if waited_s > limit_s:
                    who = f"; ranks {late} have not come to it" if (late := watch.late()) else ""
                    raise TransportTimeoutError(
                        f"allreduce {self._name!r}: no answer from all "
                        f"{self._transport.world_size} ranks within {limit_s:g} s{who}; every rank "
                        "must call it, in time"
                    )
                time.sleep(min(max(_POLL_PART * waited_s, _SHORTEST_POLL_S), _LONGEST_POLL_S))
        assert self._result is not None
        if self._reduction is not None:
            self._reduction.streams.follow()
            used_here(self._result)
        return self._result

    def _check_agreement(self, rows: Tensor) -> None:
        fields = ("numel", "dtype", "rule, weights, present or scope", "device")
        for column, field in enumerate(fields):
            values = rows[:, column].tolist()
            if len(set(values)) == 1:
                continue
            _reductions()[self._transport].pop(self._name, None)
            by_rank = f" (by rank: {values})" if field == "numel" else ""
            raise MismatchError(
                f"allreduce {self._name!r}: {field} differs on ranks {odd_ones(values)}{by_rank}; "
                f"rank {self._transport.rank} brought {self._tensor.numel()} values of "
                f"{self._tensor.dtype} on {self._tensor.device}. Every rank must bring the same"
            )


@functools.cache
def _in_flight() -> weakref.WeakKeyDictionary[Transport, list[Handle]]:
    """Return the handles that are not over, by transport, in the order in which they began."""
    return weakref.WeakKeyDictionary()


def allreduce_async(
    tensor: Tensor,
    rule: Rule | None = None,
    *,
    name: str,
    weights: Sequence[int] | None = None,
    present: Sequence[bool] | None = None,
    transport: Transport | None = None,
) -> Handle:
    """Start a robust all-reduce; see ``allreduce``. Leave the tensor as it is until it is done."""
    return start_allreduce(
        tensor, rule, name=name, weights=weights, present=present, transport=transport
    )


def start_allreduce(
    tensor: Tensor,
    rule: Rule | None,
    *,
    name: str,
    weights: Sequence[int] | None,
    present: Sequence[bool] | None,
    transport: Transport | None,
    selection: SelectionPart | None = None,
    run: RunRule = run_rule,
) -> Handle:
    """Start a robust all-reduce; with ``selection`` its rows are judged together with others'.

    ``run`` applies the rule, and may look at the rows on the way.
    """
    rule = Mean() if rule is None else rule
    if not isinstance(tensor, Tensor):
        raise ArgumentTypeError(
            f"allreduce {name!r}: the value is of type {type(tensor).__name__}; give a torch.Tensor"
        )
    if tensor.dtype not in _DTYPES:
        raise ArgumentTypeError(
            f"allreduce {name!r}: a rule aggregates floating point values, but the tensor is "
            f"{tensor.dtype}; convert it, for instance with .float()"
        )
    ends = _default_end() if transport is None else transport
    world_size = ends.world_size
    row_weights = _checked(weights, "weights", name, world_size)
    row_present = _checked(present, "present", name, world_size)
    if world_size == 1:
        return Handle(ends, tensor.detach(), None, name=name, agreement=None)
    counts = (1,) * world_size if row_weights is None else row_weights
    if row_present is not None:
        counts = tuple(
            count if is_there else 0 for count, is_there in zip(counts, row_present, strict=True)
        )
    alive = tuple(count > 0 for count in counts)
    rule.check(sum(alive))
    reduction = _reduction_of(ends, tensor.detach(), rule, name, selection, run)
    lines = meshed(ends)
    scope = "" if selection is None else " over the whole model"
    device = "any" if mixes_devices(ends) else tensor.device.type
    kinds = (str(tensor.dtype), f"{rule} {row_weights} {alive}{scope}", device)
    row = torch.tensor([tensor.numel(), *map(digest, kinds)])
    rows = torch.empty(world_size, row.numel(), dtype=row.dtype)
    agreement = (lines.allgather(row, rows.view(-1), name=f"{name}.agree"), row, rows)
    # Engines only sum, so their rows are weighed here; a rule weighs the rows that it gets.
    share = counts[ends.rank] / sum(counts) if reduction.is_engine_sum else float(alive[ends.rank])
    weighed = PassWeights(weights=row_weights, present=alive, row_scale=1.0)
    start = functools.partial(reduction.start, tensor.detach(), weighed, share=share)
    reduction.is_busy = True
    reduction.streams.take()  # what is queued for the tensor by now is in it
    # On an engine with its own negotiation beside the agreement, not after it: to find ranks that
    # differ costs no waiting. Where values take a mesh after it, which takes one round trip: what
    # ranks that differ had begun would stay in the way of the name's next call.
    if reduction.overlaps:
        handle = Handle(ends, tensor, reduction, name=name, agreement=agreement, start=start)
    else:
        try:
            start()
        except BaseException as error:
            reduction.fail(error)
            raise
        handle = Handle(ends, tensor, reduction, name=name, agreement=agreement)
    _in_flight().setdefault(ends, []).append(handle)
    return handle


def allreduce(
    tensor: Tensor,
    rule: Rule | None = None,
    *,
    name: str,
    weights: Sequence[int] | None = None,
    present: Sequence[bool] | None = None,
    transport: Transport | None = None,
    timeout_s: float | None = None,
) -> Tensor:
    """Aggregate a tensor over all ranks by a rule; every rank calls it alike.

    Args:
        tensor: this rank's row, any shape, floating point.
        rule: how rows are aggregated; ``Mean()`` by default.
        name: tells this all-reduce from others in flight; equal on every rank.
        weights: whole-number weight of each rank's row, [world_size], equal on every rank.
        present: which ranks' rows count, [world_size], equal on every rank.
        transport: the ranks; by default Horovod's, else those of torch.distributed, else this one
            alone.
        timeout_s: longest wait in seconds; None takes ``LOFT_HVD_TIMEOUT_S``.

    Returns:
        A new tensor with shape, dtype and device of ``tensor``, equal bits on every rank. A world
        of one rank returns its own row.

    Raises:
        ArgumentTypeError: the tensor is not floating point, or weights are no whole numbers.
        ArgumentError: an all-reduce of that name is in flight, or has failed.
        AggregationError: the rule does not fit the rows that are present.
        MismatchError: ranks brought different shapes, dtypes, rules or weights.
        TransportTimeoutError: other ranks did not answer in time.
    """
    handle = allreduce_async(
        tensor, rule, name=name, weights=weights, present=present, transport=transport
    )
    return handle.wait(timeout_s)


@functools.cache
def _kept_end(world_size: int, rank: int) -> Transport:
    return default_transport()


def _default_end() -> Transport:
    """Return one transport object per Horovod world, so that its buffers are found again."""
    fresh = default_transport()
    return _kept_end(fresh.world_size, fresh.rank)


def _checked(
    values: Sequence[int] | None, what: str, name: str, world_size: int
) -> tuple[int, ...] | None:
    if values is None:
        return None
    if not all(float(value).is_integer() for value in values):
        raise ArgumentTypeError(
            f"allreduce {name!r}: {what}={list(values)} must hold whole numbers; weights are "
            "sample counts: scale shares up"
        )
    numbers = tuple(int(value) for value in values)
    if len(numbers) != world_size or min(numbers) < 0:
        raise AggregationError(
            f"allreduce {name!r}: {what}={list(numbers)} must hold one number >= 0 for each of "
            f"the {world_size} ranks"
        )
    return numbers


def _reduction_of(
    transport: Transport,
    tensor: Tensor,
    rule: Rule,
    name: str,
    selection: SelectionPart | None,
    run: RunRule,
) -> NamedReduction:
    """Return the buffers of a name: those of its last call, unless they do not fit."""
    by_name = _reductions().setdefault(transport, {})
    kept = by_name.get(name)
    if kept is not None and kept.failure:
        raise ArgumentError(
            f"allreduce {name!r}: an all-reduce of that name has failed before ({kept.failure}), "
            "and other ranks may still send their values for it; use another name"
        )
    if kept is not None and kept.is_busy:
        raise ArgumentError(
            f"allreduce {name!r}: an all-reduce of that name is in flight; wait for its handle "
            "first, or use another name"
        )
    if kept is None or kept.kind != _kind_of(transport, tensor, rule, selection, run):
        kept = NamedReduction(transport, tensor, rule, name, selection, run)
    by_name.pop(name, None)
    by_name[name] = kept  # last: those at the front were not used for longest
    if len(by_name) > _MOST_KEPT:
        idle = next((name for name, each in by_name.items() if not each.is_busy), name)
        if idle != name:
            del by_name[idle]
    return kept
