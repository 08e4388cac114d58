"""``StreamLoader``: shares by plan of data that is no map, each rank reading a stream of its own.

A stream says only what comes next. So which samples form a step is up to what each rank reads, and
the plan says how much of it: ``sizes[rank]`` samples, or samples of so much cost. Before each batch
ranks tell each other, in one all-gather of 16 bytes a rank, whether they have their share and what
it amounts to; that is what gradients are weighted by. The epoch ends for all ranks at the step for
which one of them has no whole share left.
"""

from __future__ import annotations

import logging
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol, cast

import numpy as np
import torch
from torch.utils.data import default_collate

from loft_hvd.balance.plan import Plan, StepSizes
from loft_hvd.data.sampler import PlannedLoader, PlanSource
from loft_hvd.errors import ArgumentError, ArgumentTypeError, DataError
from loft_hvd.transport.base import Channel, Transport

__all__ = ["StreamLoader", "StreamPlanSource"]

_logger = logging.getLogger(__name__)
_MOST_COST = 2**31  # of a sample; bound: sums of all ranks fit an int64


class StreamPlanSource(PlanSource, Protocol):
    """What a ``StreamLoader`` needs of a balancer: also its ranks."""

    @property
    def transport(self) -> Transport: ...

    def exclude(self) -> AbstractContextManager[None]:
        """Leave what runs inside out of all times."""


class _Reader(Protocol):
    """Reads one rank's stream, once."""

    def take(self, share: int) -> tuple[Any, int] | None:
        """Return a batch of at most ``share`` and what it amounts to; None at the stream's end."""

    def dummy(self, num_samples: int) -> Any | None:
        """Return a batch that does not count, of samples that are or will be trained."""


class _Samples:
    """A stream of samples."""

    def __init__(
        self,
        source: Iterable[Any],
        cost: Callable[[Any], int] | None,
        collate: Callable[[list[Any]], Any],
        *,
        rank: int,
    ) -> None:
        self._source = iter(source)
        self._cost = cost
        self._collate = collate
        self._rank = rank
        self._ahead: deque[Any] = deque()  # read, and not handed out
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
        cost = self._cost(sample)
        if isinstance(cost, bool) or not isinstance(cost, int | np.integer):
            raise ArgumentTypeError(
                f"StreamLoader: cost={cost!r} of a sample is of type {type(cost).__name__}; the "
                "function returns a whole number, such as its tokens"
            )
        if not 1 <= cost <= _MOST_COST:
            raise ArgumentError(f"StreamLoader: cost={cost} of a sample must be >= 1 and <= 2**31")
        return int(cost)

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


class _Batches:
    """A stream of batches, cut and joined to other sizes along their first dimension."""

    def __init__(self, source: Iterable[Any]) -> None:
        self._source = iter(source)
        self._ahead: deque[Any] = deque()
        self._num_ahead = 0
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


@dataclass(frozen=True)
class _Offer:
    """What a rank has for a step."""

    batch: Any
    amount: int  # samples, or their cost; 0 for a dummy batch


class StreamLoader(PlannedLoader):
    """Yields each rank's share of every step from a stream that the rank reads by itself.

    For an ``IterableDataset``, a webdataset pipeline, a DALI iterator, or any other iterable; see
    to it that each rank reads samples of its own (``hvd.rank()`` of ``hvd.size()``).

    Promised: a rank's batch is its share by the plan, gradients are weighted by exactly what ranks
    have computed, and all ranks make equally many steps: the epoch ends for all at the step for
    which the stream of one holds no whole share any more. What others have read by then and not
    been given is lost to the epoch. Not promised, other than with ``loft.DataLoader``: that a step
    has the same samples whatever the plan, that every sample is trained, and that a run goes on in
    the middle of an epoch.

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
        ArgumentTypeError: ``source`` is not iterable, or ``cost`` no function.
        ArgumentError: ``batched`` with ``cost`` or ``collate_fn``, or a balancer that plans
            micro-batches.
    """

    _balancer: StreamPlanSource

    def __init__(
        self,
        source: Iterable[Any],
        balancer: StreamPlanSource,
        *,
        cost: Callable[[Any], int] | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        batched: bool = False,
    ) -> None:
        super().__init__(balancer)
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
        if balancer.splits:
            raise ArgumentError(
                "StreamLoader: Balancer(micro_batches=True) is for loft.DataLoader; for a stream "
                "lower global_batch_size, and use backward_passes_per_step"
            )
        self._source = source
        self._cost = cost
        self._collate: Callable[[list[Any]], Any] = collate_fn or default_collate
        self._is_batched = batched

    def set_epoch(self, epoch: int) -> None:
        """Tell the source which epoch comes next, if it has a ``set_epoch``."""
        tell = getattr(self._source, "set_epoch", None)
        if callable(tell):
            tell(epoch)
        self._forget_pending()

    def __iter__(self) -> Iterator[Any]:
        return self._batches(self._begin_iteration(), self._reader())

    def _reader(self) -> _Reader:
        if self._is_batched:
            return _Batches(self._source)
        return _Samples(self._source, self._cost, self._collate, rank=self._balancer.rank)

    def _batches(self, iteration: int, reader: _Reader) -> Iterator[Any]:
        balancer, num_steps = self._balancer, 0
        while True:
            self._check_newest(iteration)
            plan = balancer.plan_at(self._next_step)
            began = time.monotonic()
            offer = self._read(reader, plan.sizes[balancer.rank])
            fetch_s = time.monotonic() - began
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
        balancer.end_epoch()

    def _read(self, reader: _Reader, share: int) -> _Offer | None:
        """Return this rank's batch of a step; None where its stream has ended."""
        if share == 0:
            dummy = reader.dummy(self._balancer.min_batch)
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
