"""The robust all-reduce on one tensor, as ``hvd.allreduce`` for a rule.

Every rank ends with the same bits. Cost per rank: 2 (n-1)/n of the tensor's bytes sent, one
tensor-sized receive buffer kept for each of the newest 256 names (two where numel is no multiple of
the number of ranks: such tensors are copied), and one exchange of four numbers that finds ranks
which disagree about shape, dtype, device or rule.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Hashable, Sequence

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
from loft_hvd.pipeline.flights import Flights
from loft_hvd.pipeline.gradients import copy_scaled
from loft_hvd.pipeline.reduction import BucketReduction
from loft_hvd.pipeline.ring import ExchangeSpec
from loft_hvd.pipeline.streams import current_stream, used_here
from loft_hvd.pipeline.tolerance import check_gather
from loft_hvd.pipeline.weights import PassWeights
from loft_hvd.pipeline.wire import own_wire
from loft_hvd.transport.agreement import digest, odd_ones
from loft_hvd.transport.base import Channel, Lane, Transport, Work, watch_of
from loft_hvd.transport.datagram import LossTolerant
from loft_hvd.transport.default import default_transport
from loft_hvd.transport.lanes import Needs, choose_lane

__all__ = ["Handle", "allreduce", "allreduce_async", "forget_reductions"]

# Between polls: of a wait so far this part, and at least and at most so many seconds. Asked every
# 100 us 100 MB on 4 ranks and links of 1 Gb/s took 1.7 s of CPU, where hvd.allreduce takes 1.0.
# The least is bound from Horovod, a tenth of its cycle of 1 ms; the others are choices.
_POLL_PART, _SHORTEST_POLL_S, _LONGEST_POLL_S = 0.005, 100e-6, 1e-3
_MOST_KEPT = (
    256  # names whose buffers are kept; a choice: names with a step in them never come again
)
_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


class NamedReduction:
    """What ``allreduce`` keeps of one name from call to call, and a row's way there and back."""

    def __init__(self, lane: Lane, tensor: Tensor, rule: Rule, name: str) -> None:
        self.lane = lane
        self.kind = _kind_of(lane, tensor, rule)
        self.is_busy = False  # values of other ranks may come into its buffers
        self.failure = ""  # what has ended it: it is busy for good
        spec = ExchangeSpec(
            lane,
            name,
            tensor.numel(),
            tensor.dtype,
            str(tensor.device),
            rule,
            own_wire(tensor.dtype),
        )
        self.is_sum = spec.is_sum
        self._given: tuple[Tensor, PassWeights, float] | None = None
        self._result: Tensor | None = None
        self._reduction = BucketReduction(spec, pack=self._fill, is_given=True)

    def start(self, row: Tensor, weights: PassWeights, *, share: float) -> None:
        """Put a rank's row, of any shape, on the wire; leave it as it is until the end.

        ``share`` is what it is multiplied by before lanes sum, and 0 for an absent rank's.
        """
        flat = row.contiguous().view(-1)
        # Large ones in huge pages: 100 MB of small ones take about 40 ms to fault in.
        on_cpu = flat.device.type == "cpu"
        result = empty_row(flat.numel(), flat.dtype) if on_cpu else torch.empty_like(flat)
        self._given, self._result = (flat, weights, share), result
        self._reduction.start(flat, result)

    def _fill(self, values: Tensor) -> PassWeights:
        assert self._given is not None
        (row, weights, share), self._given = self._given, None
        if values.data_ptr() != row.data_ptr() or not row.numel():
            if share:
                copy_scaled(row, values, share)
            else:
                values.zero_()  # never 0 times what an absent rank has
        return weights

    @property
    def has_news(self) -> bool:
        return self._reduction.has_news

    def advance(self) -> bool:
        """Do what can be done without waiting, and say whether the result is there."""
        return self._reduction.advance()

    def take(self, like: Tensor) -> Tensor:
        """Return the result as a tensor of its own, with shape and dtype of ``like``; once."""
        result, self._result = self._result, None
        assert result is not None
        if like.is_contiguous():
            taken = result.view(like.shape)
        else:
            taken = torch.empty_like(like).copy_(result.view(like.shape))
        self.is_busy = False
        return taken


def _kind_of(lane: Lane, tensor: Tensor, rule: Rule) -> tuple[object, ...]:
    # What calls of one name must share to use its buffers again.
    return (tensor.shape, tensor.dtype, str(tensor.device), rule, lane)


class _World:
    """The all-reduces among some ranks: their lanes, what is under way, and buffers by name."""

    def __init__(self, transport: Transport, gather: LossTolerant | None) -> None:
        self.channel = Channel(transport, "loft.allreduce")
        self.gather = gather
        self.flights = Flights(name=self.channel.name)
        self.by_name: dict[str, NamedReduction] = {}
        self._lanes: dict[str, Lane] = {}

    def lane(self, device: str) -> Lane:
        """Return the lane of a device's values, which the first call chooses with all ranks."""
        if device not in self._lanes:
            if device != "cpu":
                # All flights need it, and ranks that begin with values of different devices meet
                # in it; opened here, where the caller waits, and not in the thread that moves on.
                self.lane("cpu")
            needs = Needs(device, is_named=True, gather=self.gather)
            lane = self._lanes[device] = choose_lane(self.channel, needs)
            self.flights.add(device, lane)
        return self._lanes[device]

    def reduction(self, tensor: Tensor, rule: Rule, name: str) -> NamedReduction:
        """Return the buffers of a name: those of its last call, unless they do not fit."""
        kept, lane = self.by_name.get(name), self.lane(str(tensor.device))
        if kept is not None and kept.failure:
            raise ArgumentError(
                f"allreduce {name!r}: an all-reduce of that name has failed before "
                f"({kept.failure}), and other ranks may still send their values for it; use "
                "another name"
            )
        if kept is not None and kept.is_busy:
            raise ArgumentError(
                f"allreduce {name!r}: an all-reduce of that name is in flight; wait for its handle "
                "first, or use another name"
            )
        if kept is None or kept.kind != _kind_of(lane, tensor, rule):
            kept = NamedReduction(lane, tensor, rule, name)
        self.by_name.pop(name, None)
        self.by_name[name] = kept  # last: those at the front were not used for longest
        if len(self.by_name) > _MOST_KEPT:
            idle = next((name for name, each in self.by_name.items() if not each.is_busy), name)
            if idle != name:
                del self.by_name[idle]
        return kept

    def close(self) -> None:
        self.flights.close()


@functools.cache
def _worlds() -> weakref.WeakKeyDictionary[Transport, dict[LossTolerant | None, _World]]:
    return weakref.WeakKeyDictionary()


def _world_of(transport: Transport, gather: LossTolerant | None) -> _World:
    worlds = _worlds().get(transport)
    if worlds is None:
        worlds = _worlds()[transport] = {}
        transport.can.at_end(functools.partial(_forget, weakref.ref(transport)))
    if gather not in worlds:
        worlds[gather] = _World(transport, gather)
    return worlds[gather]


def _forget(transport: weakref.ref[Transport]) -> None:
    """Drop all buffers of some ranks, also of operations in flight: their world has ended."""
    if (alive := transport()) is not None:
        for world in _worlds().pop(alive, {}).values():
            world.close()


def forget_reductions() -> None:
    """Drop all buffers, also of operations in flight: their world has ended."""
    for worlds in _worlds().values():
        for world in worlds.values():
            world.close()
    _worlds().clear()
    _kept_end.cache_clear()


class _AllreduceFlight:
    """One all-reduce on its way; see ``Flight``."""

    place = ""  # errors name the all-reduce themselves

    def __init__(
        self,
        world: _World,
        tensor: Tensor,
        reduction: NamedReduction,
        *,
        name: str,
        weights: PassWeights,
        share: float,
        fields: Sequence[int],
    ) -> None:
        self.device = str(tensor.device)
        self.result: Tensor | None = None
        self.failure: BaseException | None = None
        self._world = world
        self._tensor = tensor
        self._reduction = reduction
        self._name = name
        self._weights = weights
        self._share = share
        self._fields = fields  # by which ranks see that they mean the same
        self._agreement: tuple[Work, Tensor, Tensor] | None = None
        self._has_started = False

    @property
    def has_news(self) -> bool:
        if self._agreement is not None:  # also where what was begun beside it never comes
            return self._agreement[0].done()
        return not self._has_started or self._reduction.has_news

    def begin(self) -> None:
        lane = self._world.lane("cpu")  # where the numbers are
        row = lane.zeros(len(self._fields), torch.int64).copy_(torch.tensor(self._fields))
        rows = torch.empty(lane.world_size, row.numel(), dtype=row.dtype)
        work = lane.allgather(row, rows.view(-1), name=f"{self._name}.agree")
        self._agreement = work, row, rows  # its row is kept with it: it is being sent
        # On an engine with its own negotiation beside the agreement, not after it: to find ranks
        # that differ costs no waiting. On other lanes after it: what ranks that differ had begun
        # would stay in the way of the name's next call.
        is_engines_own = type(self._reduction.lane) is Lane and not self._reduction.lane.overlaps
        if self._reduction.is_sum or is_engines_own:
            self._start()

    def _start(self) -> None:
        self._has_started = True
        self._reduction.start(self._tensor, self._weights, share=self._share)

    def advance(self) -> bool:
        if self._agreement is not None:
            work, _, rows = self._agreement
            if not work.done():
                return False
            work.finish()
            self._agreement = None
            self._check_agreement(rows)
        if not self._has_started:
            self._start()
        if not self._reduction.advance():
            return False
        # At once, so that the name is free: nobody may ask for the handle any more, as where a
        # wait for it has ended by its limit.
        self.result = self._reduction.take(self._tensor)
        return True

    def failed(self, error: BaseException) -> None:
        self.failure = error  # what the buffers hold by now is no result: asked again, too
        self._reduction.failure = f"{type(error).__name__}: {error}"

    def _check_agreement(self, rows: Tensor) -> None:
        fields = ("numel", "dtype", "rule, weights or present", "device")
        for column, field in enumerate(fields):
            values = rows[:, column].tolist()
            if len(set(values)) == 1:
                continue
            self._world.by_name.pop(self._name, None)
            by_rank = f" (by rank: {values})" if field == "numel" else ""
            raise MismatchError(
                f"allreduce {self._name!r}: {field} differs on ranks {odd_ones(values)}{by_rank}; "
                f"rank {self._world.channel.rank} brought {self._tensor.numel()} values of "
                f"{self._tensor.dtype} on {self._tensor.device}. Every rank must bring the same"
            )


class Handle:
    """An all-reduce in flight; made by ``allreduce_async``."""

    def __init__(
        self, world: _World, name: str, call: _AllreduceFlight | None, alone: Tensor | None
    ) -> None:
        self._world = world
        self._name = name
        self._call = call
        self._alone = alone  # the result in a world of one, where nothing travels

    def done(self) -> bool:
        """Say whether ``wait`` would return at once; raises what has ended it. Never blocks."""
        if self._call is None:
            return True
        if self._call.failure is not None:
            raise self._call.failure
        return self._call.result is not None

    def wait(self, timeout_s: float | None = None) -> Tensor:
        """Return the aggregated tensor.

        Args:
            timeout_s: longest wait in seconds; None takes ``LOFT_HVD_TIMEOUT_S``.

        Returns:
            A new tensor with shape, dtype and device of the input, equal bits on every rank.

        Raises:
            TransportTimeoutError: other ranks did not answer in time.
            MismatchError: ranks brought different shapes, dtypes, rules or weights.
        """
        if self._call is None:
            assert self._alone is not None
            return self._alone
        limit_s = config().timeout_s if timeout_s is None else timeout_s
        if not self.done():
            with watch_of(self._world.channel.transport).waiting():
                self._world.flights.wait(
                    self.done,
                    timeout_s=limit_s,
                    too_late=lambda: self._too_late(limit_s),
                    pauses=lambda waited_s: min(
                        max(_POLL_PART * waited_s, _SHORTEST_POLL_S), _LONGEST_POLL_S
                    ),
                )
        assert self._call.result is not None
        self._world.flights.follow()
        used_here(self._call.result)
        return self._call.result

    def _too_late(self, limit_s: float) -> TransportTimeoutError:
        late = watch_of(self._world.channel.transport).late()
        who = f"; ranks {late} have not come to it" if late else ""
        return TransportTimeoutError(
            f"allreduce {self._name!r}: no answer from all {self._world.channel.world_size} ranks "
            f"within {limit_s:g} s{who}; every rank must call it, in time"
        )


def allreduce_async(
    tensor: Tensor,
    rule: Rule | None = None,
    *,
    name: str,
    weights: Sequence[int] | None = None,
    present: Sequence[bool] | None = None,
    transport: Transport | None = None,
    gather: LossTolerant | None = None,
) -> Handle:
    """Start a robust all-reduce; see ``allreduce``. Leave the tensor as it is until it is done."""
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
    check_gather(gather, [rule], world_size, what=f"allreduce {name!r}")
    world = _world_of(ends, gather)
    if world_size == 1:
        return Handle(world, name, None, tensor.detach().clone())
    counts = (1,) * world_size if row_weights is None else row_weights
    if row_present is not None:
        counts = tuple(
            count if is_there else 0 for count, is_there in zip(counts, row_present, strict=True)
        )
    alive = tuple(count > 0 for count in counts)
    rule.check(sum(alive))
    reduction = world.reduction(tensor.detach(), rule, name)
    device = "any" if ends.can.mixes_devices else tensor.device.type
    kinds = (str(tensor.dtype), f"{rule} {row_weights} {alive}", device)
    # Lanes only sum, so their rows are weighed here; a rule weighs the rows that it gets.
    share = counts[ends.rank] / sum(counts) if reduction.is_sum else float(alive[ends.rank])
    call = _AllreduceFlight(
        world,
        tensor.detach(),
        reduction,
        name=name,
        weights=PassWeights(weights=row_weights, present=alive, row_scale=1.0),
        share=share,
        fields=(tensor.numel(), *map(digest, kinds)),
    )
    reduction.is_busy = True
    # What is queued for the tensor by now is in it.
    stream = current_stream(call.device)
    world.flights.post(call, [] if stream is None else [stream.record_event()])
    return Handle(world, name, call, None)


def allreduce(
    tensor: Tensor,
    rule: Rule | None = None,
    *,
    name: str,
    weights: Sequence[int] | None = None,
    present: Sequence[bool] | None = None,
    transport: Transport | None = None,
    timeout_s: float | None = None,
    gather: LossTolerant | None = None,
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
        gather: ``loft.LossTolerant()`` for links that lose packets; equal on every rank.

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
        tensor,
        rule,
        name=name,
        weights=weights,
        present=present,
        transport=transport,
        gather=gather,
    )
    return handle.wait(timeout_s)


@functools.cache
def _kept_end(kind: type[Transport], world: Hashable, world_size: int, rank: int) -> Transport:
    return default_transport()


def _default_end() -> Transport:
    """Return one transport object per world, so that its buffers are found again."""
    fresh = default_transport()
    return _kept_end(type(fresh), fresh.can.world, fresh.world_size, fresh.rank)


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
