"""``StreamLoader``: shares by plan of data that is no map, each rank reading a stream of its own.

A stream says only what comes next. So which samples form a step is up to what each rank reads, and
the plan says how much of it: ``sizes[rank]`` samples, or samples of so much cost. Before each batch
ranks tell each other, in one all-gather of 16 bytes a rank, whether they have their share and what
it amounts to; that is what gradients are weighted by. The epoch ends for all ranks at the step for
which one of them has no whole share left.
"""

from __future__ import annotations

import logging
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple, Protocol, cast

import numpy as np
import torch
from torch.utils.data import Sampler, default_collate

from loft_hvd.balance.plan import Plan, StepSizes
from loft_hvd.codec import Count, Within, decode, encode
from loft_hvd.data.costs import whole_cost
from loft_hvd.data.instead import STREAM, in_place_of, refuse_others
from loft_hvd.data.sampler import PlannedLoader, PlanSource, check_epoch
from loft_hvd.errors import ArgumentError, ArgumentTypeError, DataError, UsageError
from loft_hvd.transport.base import Channel, Transport
from loft_hvd.transport.waits import seconds, totals

__all__ = ["StreamLoader", "StreamPlanSource"]

_logger = logging.getLogger(__name__)


class StreamPlanSource(PlanSource, Protocol):
    """What a ``StreamLoader`` needs of a balancer: also its ranks."""

    @property
    def transport(self) -> Transport: ...

    @property
    def min_batch(self) -> int: ...  # least samples of a rank; 0 where ranks may be left out

    def exclude(self) -> AbstractContextManager[None]:
        """Leave what runs inside out of all times."""


class _StreamReader(Protocol):
    """Reads one rank's stream, once."""

    def take(self, share: int) -> tuple[Any, int] | None:
        """Return a batch of at most ``share`` and what it amounts to; None at the stream's end."""

    def dummy(self, num_samples: int) -> Any | None:
        """Return a batch that does not count, of samples that are or will be trained."""

    def ahead(self) -> list[Any]:
        """Return what was read of the stream and not handed out, in its order."""


class _Samples:
    """A stream of samples."""

    def __init__(
        self,
        source: Iterable[Any],
        cost: Callable[[Any], int] | None,
        collate: Callable[[list[Any]], Any],
        *,
        rank: int,
        ahead: Sequence[Any],
    ) -> None:
        self._source = iter(source)
        self._cost = cost
        self._collate = collate
        self._rank = rank
        self._ahead = deque(ahead)  # read, and not handed out
        self._newest: list[Any] = []  # of the batch handed out last

    def _peek(self) -> bool:
        """Say whether there is one more sample; it is then the first one ahead."""
        if not self._ahead:
            try:
                self._ahead.append(next(self._source))
            except StopIteration:
                return False
        return True

    def _cost_of(self, sample: Any) -> int:
        if self._cost is None:
            return 1
        return whole_cost(self._cost(sample))

    def take(self, share: int) -> tuple[Any, int] | None:
        samples: list[Any] = []
        amount = 0
        while amount < share and self._peek():
            cost = self._cost_of(self._ahead[0])
            if amount + cost > share:
                if not samples:
                    raise DataError(
                        f"StreamLoader: a sample costs {cost}, but rank {self._rank}'s share of "
                        f"this step is {share}; leave such samples out, raise global_batch_size, "
                        f"or let no share be smaller: Balancer(..., min_batch={cost})"
                    )
                break  # it begins the next batch
            samples.append(self._ahead.popleft())
            amount += cost
        is_whole = amount == share or (self._cost is not None and bool(self._ahead))
        if not is_whole:
            # The stream has ended within the share: nobody gets what is left.
            self._ahead.extendleft(reversed(samples))
            return None
        self._newest = samples
        return self._collate(samples), amount

    def dummy(self, num_samples: int) -> Any | None:
        samples = self._newest[:num_samples]
        while not self._newest and len(self._ahead) < num_samples:
            try:
                self._ahead.append(next(self._source))
            except StopIteration:
                break
        samples = samples or list(self._ahead)[:num_samples]
        return self._collate(samples) if samples else None

    def ahead(self) -> list[Any]:
        return list(self._ahead)


class _Batches:
    """A stream of batches, cut and joined to other sizes along their first dimension."""

    def __init__(self, source: Iterable[Any], *, ahead: Sequence[Any]) -> None:
        self._source = iter(source)
        self._ahead = deque(ahead)
        self._num_ahead = sum(map(_length, ahead))
        self._newest: Any = None

    def _read(self) -> bool:
        try:
            batch = next(self._source)
        except StopIteration:
            return False
        self._ahead.append(batch)
        self._num_ahead += _length(batch)
        return True

    def take(self, share: int) -> tuple[Any, int] | None:
        while self._num_ahead < share:
            if not self._read():
                return None
        parts, missing = [], share
        while missing:
            batch = self._ahead.popleft()
            length = _length(batch)
            if length > missing:
                self._ahead.appendleft(_slice(batch, slice(missing, None)))
                batch = _slice(batch, slice(missing))
            parts.append(batch)
            missing -= min(length, missing)
        self._num_ahead -= share
        self._newest = parts[0] if len(parts) == 1 else _map(parts, _join)
        return self._newest, share

    def dummy(self, num_samples: int) -> Any | None:
        if self._newest is None and not self._ahead and not self._read():
            return None
        batch = self._ahead[0] if self._newest is None else self._newest
        return _slice(batch, slice(num_samples))

    def ahead(self) -> list[Any]:
        return list(self._ahead)


def _map(batches: Sequence[Any], change: Callable[[list[Any]], Any]) -> Any:
    """Return a batch of the batches' structure, of what ``change`` makes of each place's leaves."""
    first = batches[0]
    if isinstance(first, Mapping):
        return {key: _map([batch[key] for batch in batches], change) for key in first}
    if isinstance(first, tuple | list):
        parts = [_map(list(leaves), change) for leaves in zip(*batches, strict=True)]
        if hasattr(first, "_fields"):  # a named tuple
            return type(first)(*parts)
        return tuple(parts) if isinstance(first, tuple) else parts
    return change(list(batches))


def _slice(batch: Any, samples: slice) -> Any:
    return _map([batch], lambda leaves: leaves[0][samples])


def _leaves(batch: Any) -> Iterator[Any]:
    if isinstance(batch, Mapping):
        batch = tuple(batch.values())
    if isinstance(batch, tuple | list):
        for part in batch:
            yield from _leaves(part)
    else:
        yield batch


def _length(batch: Any) -> int:
    """Return the samples of a batch."""
    lengths = set()
    for leaf in _leaves(batch):
        if not isinstance(leaf, torch.Tensor | np.ndarray) or not leaf.ndim:
            raise ArgumentTypeError(
                f"StreamLoader(batched=True): a batch holds a {type(leaf).__name__}; it takes "
                "tensors and arrays whose first dimension are samples, in tuples, lists and dicts"
            )
        lengths.add(len(leaf))
    if len(lengths) != 1:
        raise DataError(
            f"StreamLoader(batched=True): the parts of a batch have {sorted(lengths)} samples; "
            "they must have equally many"
        )
    return lengths.pop()


def _join(leaves: list[Any]) -> Any:
    joined = torch.cat if isinstance(leaves[0], torch.Tensor) else np.concatenate
    return cast("Callable[[list[Any]], Any]", joined)(leaves)


def _has_state(source: object) -> bool:
    return all(callable(getattr(source, name, None)) for name in ("state_dict", "load_state_dict"))


def _position_of(state: object) -> _Position | None:
    """Return the position in a loader's state; an ArgumentError where it is none."""
    given = state.get("position") if isinstance(state, Mapping) else None
    if given is None:
        return None
    if not (
        isinstance(given, Mapping)
        and given.keys() == set(_Position._fields)
        and isinstance(given["ahead"], list | tuple)
    ):
        raise ArgumentError(
            "load_state_dict: StreamLoader.position holds no source and ahead; give what "
            "state_dict of this version returned, whole"
        )
    return _Position(given["source"], list(given["ahead"]))


@dataclass(frozen=True)
class _Offer:
    """What a rank has for a step."""

    batch: Any
    amount: int  # samples, or their cost; 0 for a dummy batch


@dataclass(frozen=True)
class StreamState:
    """Where a run stands; with ``position``, which is the source's own, also in its epoch."""

    epoch: Count
    step: Count  # the next one to train on, counted over epochs
    rank: Count  # whose position it is
    world_size: Annotated[int, Within(1)]


class _Position(NamedTuple):
    """Where a rank's stream stands."""

    source: Any  # what its ``state_dict`` returned
    ahead: list[Any]  # what was read by then and not handed out


class StreamLoader(PlannedLoader):
    """Yields each rank's share of every step from a stream that the rank reads by itself.

    For an ``IterableDataset``, a webdataset pipeline, a DALI iterator, or any other iterable; see
    to it that each rank reads samples of its own (``hvd.rank()`` of ``hvd.size()``).

    Promised: a rank's batch is its share by the plan, gradients are weighted by exactly what ranks
    have computed, and all ranks make equally many steps: the epoch ends for all at the step for
    which the stream of one holds no whole share any more. What others have read by then and not
    been given is lost to the epoch. Not promised, other than with ``loft.DataLoader``: that a step
    has the same samples whatever the plan, that every sample is trained, and, unless the source has
    ``state_dict`` and ``load_state_dict``, that a run goes on in the middle of an epoch.

    With ``cost`` the unit of ``Balancer(global_batch_size)``, of sizes and of weights is the cost,
    such as tokens: a rank takes samples up to its share, at most one sample short of it, and what
    they really cost is their weight. Let the loss then be a mean over that unit.

    Args:
        source: this rank's samples; ``iter(source)`` begins an epoch. A ``set_epoch`` of it is
            called by ours.
        balancer: gives the sizes, and takes times and what batches amounted to.
        cost: what a sample costs, a whole number >= 1; None counts samples.
        collate_fn: makes a batch of a list of samples; torch's own by default.
        batched: ``source`` yields batches, which are cut and joined along their first dimension.

    Raises:
        ArgumentTypeError: ``source`` is not iterable or a sampler, ``cost`` no function, or an
            argument of torch's loader, which has no place here.
        ArgumentError: ``batched`` with ``cost`` or ``collate_fn``, or a balancer that plans
            micro-batches.
    """

    _balancer: StreamPlanSource

    def __init__(
        self,
        source: Iterable[Any],
        balancer: StreamPlanSource,
        *positional: Any,
        cost: Callable[[Any], int] | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        batched: bool = False,
        **others: Any,
    ) -> None:
        super().__init__(balancer)
        refuse_others("StreamLoader", positional, others, STREAM)
        if isinstance(source, Sampler):
            raise ArgumentTypeError(
                f"StreamLoader: the source is a {type(source).__name__}, which yields numbers of "
                f"samples; a map-style data set goes to loft.DataLoader: {in_place_of(source)}"
            )
        if not hasattr(source, "__iter__"):
            raise ArgumentTypeError(
                f"StreamLoader: source={source!r} is of type {type(source).__name__}, which is not "
                "iterable; for a data set with __getitem__ use loft.DataLoader"
            )
        if cost is not None and not callable(cost):
            raise ArgumentTypeError(
                f"StreamLoader: cost={cost!r} must be a function of a sample, such as "
                "lambda sample: len(sample['tokens'])"
            )
        if batched and (cost is not None or collate_fn is not None):
            raise ArgumentError(
                "StreamLoader: batched=True takes no cost and no collate_fn, which are of samples; "
                "give a source that yields samples"
            )
        if balancer.min_batch == 0:
            raise ArgumentError(
                "StreamLoader: Balancer(min_batch=0) is for loft.DataLoader; a rank's stream goes "
                "on only while it reads, so give min_batch=1 or more"
            )
        if balancer.splits:
            raise ArgumentError(
                "StreamLoader: Balancer(micro_batches=True) is for loft.DataLoader; for a stream "
                "lower global_batch_size, and use backward_passes_per_step"
            )
        self._source = source
        self._cost = cost
        self._collate: Callable[[list[Any]], Any] = collate_fn or default_collate
        self._is_batched = batched
        self._epoch = 0
        self._reader: _StreamReader | None = None  # of the newest iteration, until it has ended
        self._resumed: _Position | None = None  # where the next iteration goes on

    def set_epoch(self, epoch: int) -> None:
        """Tell the source which epoch comes next, if it has a ``set_epoch``.

        A position loaded for another epoch is dropped.
        """
        check_epoch(epoch)
        if epoch != self._epoch:
            self._epoch, self._reader, self._resumed = int(epoch), None, None
            self._stands.clear()
        tell = getattr(self._source, "set_epoch", None)
        if callable(tell):
            tell(epoch)
        self._epoch_set()

    def __iter__(self) -> Iterator[Any]:
        iteration, ahead = self._begin_iteration(), []
        self._stands.append((self._next_step, 0))
        if self._resumed is not None:
            source: Any = self._source
            source.load_state_dict(self._resumed.source)
            ahead, self._resumed = self._resumed.ahead, None
        self._reader = self._make_reader(ahead)
        return self._batches(iteration, self._reader)

    def _make_reader(self, ahead: Sequence[Any]) -> _StreamReader:
        if self._is_batched:
            return _Batches(self._source, ahead=ahead)
        rank = self._balancer.rank
        return _Samples(self._source, self._cost, self._collate, rank=rank, ahead=ahead)

    def _batches(self, iteration: int, reader: _StreamReader) -> Iterator[Any]:
        balancer, num_steps = self._balancer, 0
        while True:
            self._check_newest(iteration)
            plan = balancer.plan_at(self._next_step)
            began, waits = time.monotonic(), totals()
            offer = self._read(reader, plan.sizes[balancer.rank])
            fetch_s = time.monotonic() - began - seconds([threading.get_ident()], waits)
            with balancer.exclude():  # it waits for the slowest reader
                amounts = self._compare(plan, offer, num_steps)
            if amounts is None or offer is None:
                break
            sizes = StepSizes(plan.plan_id, self._next_step, amounts, planned=plan.sizes)
            self._note(sizes)
            num_steps += 1
            balancer.begin_batch(
                sizes,
                fetch_s=fetch_s,
                stall_s=fetch_s,
                local=plan.sizes[balancer.rank],  # times are fitted over what is planned
                remote=0,
            )
            yield offer.batch
        self._reader = None  # what others have left of the epoch is lost: the next begins anew
        self._resumed_step = self._next_step  # also where nobody trains what is yielded
        balancer.end_epoch()

    def state_dict(self) -> dict[str, Any]:
        """Describe the run after the batch yielded last: save it once that batch is trained.

        Epoch and step are those of all ranks. ``position`` is this rank's own: what the source's
        ``state_dict`` returns, and the samples that were read ahead of it, at most one with
        ``cost`` and the rest of a batch with ``batched``; None where the source has no
        ``state_dict``, or no iteration is under way. So save it on every rank.
        """
        position, num_waiting = self._resumed, self._balancer.num_waiting
        step, _ = self._stand()
        if self._reader is not None and _has_state(self._source):
            if num_waiting:
                raise UsageError(
                    f"state_dict: {num_waiting} batches were fetched ahead and are not trained, "
                    "and a stream cannot go back to them; fetch each batch when the one before it "
                    "has been trained"
                )
            source: Any = self._source
            position = _Position(source.state_dict(), self._reader.ahead())
        balancer = self._balancer
        state = StreamState(self._epoch, step, balancer.rank, balancer.world_size)
        return encode(state) | {"position": None if position is None else position._asdict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next iteration go on where ``state`` was taken, on every rank.

        Steps, and so the plans in force, go on. So does the stream, where the state has this rank's
        position; else the epoch's stream begins anew, and a warning says so where the position is
        another rank's, or of another number of ranks.

        Raises:
            ArgumentError: it is no state of a ``StreamLoader``.
            DataError: it has a position, and the source has no ``load_state_dict``.
        """
        position = _position_of(state)
        loaded = decode(StreamState, state, what="StreamLoader", is_open=True)
        if position is not None and not _has_state(self._source):
            raise DataError(
                f"StreamLoader: the state has a position of its source, but this source, of type "
                f"{type(self._source).__name__}, has no state_dict and load_state_dict; give one "
                'that has, or begin its epoch anew: load_state_dict(state | {"position": None})'
            )
        balancer = self._balancer
        of, here = (loaded.rank, loaded.world_size), (balancer.rank, balancer.world_size)
        if position is not None and of != here:
            warnings.warn(
                f"StreamLoader: the state is that of rank {of[0]} of {of[1]}, this is rank "
                f"{here[0]} of {here[1]}: its stream begins anew; save the loader's state on every "
                "rank, and load each rank's own",
                stacklevel=2,
            )
            position = None
        self._epoch, self._next_step = loaded.epoch, loaded.step
        self._resumed_step = loaded.step
        self._reader, self._resumed = None, position
        self._forget_pending()

    def _read(self, reader: _StreamReader, share: int) -> _Offer | None:
        """Return this rank's batch of a step; None where its stream has ended."""
        if share == 0:
            dummy = reader.dummy(self._balancer.dummy_size(self._next_step))
            return None if dummy is None else _Offer(dummy, 0)
        taken = reader.take(share)
        return None if taken is None else _Offer(*taken)

    def _compare(self, plan: Plan, offer: _Offer | None, num_steps: int) -> tuple[int, ...] | None:
        """Return what each rank's batch amounts to, or None where a stream has ended."""
        channel = Channel(self._balancer.transport, "loft.stream")
        row = torch.tensor([int(offer is not None), 0 if offer is None else offer.amount])
        rows = channel.allgather_rows(row)
        ended = [rank for rank, has_share in enumerate(rows[:, 0].tolist()) if not has_share]
        if ended:
            if channel.rank == 0:
                self._tell_end(ended, num_steps)
            return None
        amounts = tuple(rows[:, 1].tolist())
        # Weights stay within the plan, whatever a rank says.
        for rank, (amount, share) in enumerate(zip(amounts, plan.sizes, strict=True)):
            least = share if self._cost is None else min(share, 1)
            if not least <= amount <= share:
                raise DataError(
                    f"StreamLoader: rank {rank} says that its batch amounts to {amount}, but its "
                    f"share by plan {plan.plan_id} is {share}; give every rank the same arguments"
                )
        return amounts

    def _tell_end(self, ended: Sequence[int], num_steps: int) -> None:
        if num_steps == 0:
            warnings.warn(
                f"StreamLoader: an epoch without a step: the streams of ranks {list(ended)} hold "
                "no whole share; a generator gives its samples only once, so give an object whose "
                "__iter__ begins anew",
                stacklevel=5,
            )
        _logger.info(
            "the epoch ends after %d steps: the streams of ranks %s have ended", num_steps, ended
        )
