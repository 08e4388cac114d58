"""The exactly-once sampler: global batches fixed by (seed, epoch), owners by the plan in force."""

from __future__ import annotations

import logging
import math
import warnings
import zlib
from collections import deque
from collections.abc import Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, replace
from numbers import Integral
from typing import Annotated, Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
from torch import Tensor
from torch.utils.data import IterableDataset, Sampler

from loft_hvd.balance.keeping import Keeping
from loft_hvd.balance.latency import Held
from loft_hvd.balance.plan import MIN_BATCH, Plan, StepSizes
from loft_hvd.codec import Count, Within, decode, encode
from loft_hvd.copies import NeverCopied
from loft_hvd.data.assign import Homes, Ints
from loft_hvd.data.blocks import BlockShuffle, ShardOrder, check_shuffle
from loft_hvd.data.contents import content_of
from loft_hvd.data.costs import Costs, check_costs
from loft_hvd.data.draws import (
    Draw,
    EpochOrders,
    EpochSettings,
    PlanView,
    Weights,
    check_weights,
    count_steps,
    draw_epoch,
)
from loft_hvd.data.instead import SAMPLER, in_place_of, refuse_others
from loft_hvd.data.placement import Placement, check_placement
from loft_hvd.errors import ArgumentTypeError, DataError, UsageError

__all__ = [
    "BatchSampler",
    "EpochState",
    "GlobalBatches",
    "Keeper",
    "PlanSource",
    "PlannedLoader",
    "check_balancer",
    "check_epoch",
    "check_indices",
    "check_length",
    "keeper_of",
    "tell_sources",
]


_logger = logging.getLogger(__name__)
_MOST_WRAPPERS = 8  # a choice: data sets around one another
_MOST_KEPT = 64  # a choice: a state tells so many batches that were fetched ahead


class PlanSource(PlanView, Protocol):
    """What loaders need of a balancer: the sizes in force, and where to say what they hand out.

    ``next_step`` is the next step to train on, counted over epochs. ``plan`` is the newest plan,
    equal on all ranks between the same two steps.

    Both tell ``share_sources`` and ``note_reads`` when an iteration begins.
    ``loft.DataLoader`` calls ``expect_depth`` when it is made, and ``begin_batch`` and
    ``end_epoch`` in the process that trains. A script may fetch ahead: ``num_waiting`` batches were
    yielded and are not trained so far. ``counts_samples``: the script says itself what they hold.
    ``loft.BatchSampler`` does not see batches arrive: it queues sizes with ``push_sizes``, and each
    backward pass takes the next. A loader for evaluation calls ``leave_step_out`` alone, and reads
    ``plan``.
    """

    @property
    def next_step(self) -> int: ...
    @property
    def plan(self) -> Plan: ...

    def expect_depth(self, num_steps: int) -> None:
        """Take how many steps beyond the newest one trained on a loader draws, once it begins."""

    def begin_batch(
        self,
        step_sizes: StepSizes,
        *,
        fetch_s: float,
        stall_s: float,
        local: int,
        remote: int,
        cached: int = 0,
    ) -> None:
        """Take the batch that the script gets now; called right before it is yielded.

        Fetching takes ``fetch_s`` seconds a batch where it takes place, by all loader processes
        together; for this one the script waited ``stall_s``. Of this rank's samples, ``local`` were
        its own or in its cache, ``cached`` of them in the cache alone; ``remote`` came from
        elsewhere.
        """

    def push_sizes(self, step_sizes: StepSizes) -> None:
        """Queue the sizes of a batch whose indices were drawn; torch yields in that order."""

    @property
    def num_waiting(self) -> int: ...
    @property
    def counts_samples(self) -> bool: ...

    def clear_pending(self) -> None:
        """Forget batches that no backward pass took: a run goes on elsewhere."""

    def begin_iteration(self) -> None:
        """Forget batches that none will take, as an iteration begins or an epoch is set."""

    def all_drawn(self) -> None:
        """Note that the last batch of an iteration was queued."""

    def end_epoch(self) -> None:
        """Note that an iteration ran to its end, at the same step on every rank."""

    def share_sources(self, source: Sequence[int]) -> None:
        """Take the number of the source that each rank shares, -1 for none, [world_size]."""

    def share_held(self, held: Held) -> None:
        """Take what ranks keep of the data set, as an iteration begins."""

    def note_reads(self, reads: Sequence[Mapping[str, int]], *, epoch: int) -> None:
        """Take what each rank read of a keeper in an epoch, [world_size]; empty where nothing."""

    def leave_step_out(self) -> None:
        """Leave the step that goes on out of all times: this rank evaluates in between."""


@runtime_checkable
class Keeper(Protocol):
    """A data set that keeps samples where they were computed, so that owners can follow them."""

    def placement_after(
        self, given: Placement | None, *, first_step: int, world_size: int
    ) -> Placement:
        """Return who holds what once the steps before ``first_step`` are trained.

        ``given`` is the user's placement, if any. Called on every rank when an iteration begins.
        """

    def note(self, draw: Draw) -> None:
        """Note who computes the samples of a step that was drawn, perhaps ahead of its turn."""

    def reads(self) -> Sequence[Mapping[str, int]]:
        """Return what each rank read in the iteration before, by name, [world_size]; or nothing."""

    @property
    def keeping(self) -> Keeping | None:
        """What ranks should keep in this iteration beside what they compute anyway."""

    @property
    def sample_bytes(self) -> float:
        """Bytes of a usual sample; 0 where none is known."""


def check_balancer(balancer: object) -> None:
    """Raise an ArgumentTypeError for what cannot say the sizes of a step."""
    if not hasattr(balancer, "plan_at"):
        raise ArgumentTypeError(
            f"balancer={balancer!r} is of type {type(balancer).__name__}; give a "
            "loft_hvd.Balancer(global_batch_size), which has the samples of all ranks in a step: "
            "64 * hvd.size() where each rank had a batch_size of 64"
        )


class PlannedLoader(NeverCopied):
    """What loaders have in common: the batch yielded last, and the step that comes next.

    Args:
        balancer: hears of batches.
        evaluates: in place of the balancer, where a loader only evaluates: nobody hears of those.
    """

    _in_place_of_a_copy = "its state_dict() can be, or make another one with the same arguments"

    def __init__(self, balancer: PlanSource, *, evaluates: PlanView | None = None) -> None:
        check_balancer(balancer)
        self._balancer = balancer
        self._trains = evaluates is None
        self._view: PlanView = balancer if evaluates is None else evaluates
        self._next_step = 0  # counted over epochs
        self._resumed_step = 0  # of a loaded state, for the next iteration
        self._num_iterations = 0
        self._yielded: StepSizes | None = None
        # Next steps and positions after the batches yielded last, and where the iteration began.
        self._stands: deque[tuple[int, int]] = deque(maxlen=_MOST_KEPT)

    @property
    def step_sizes(self) -> StepSizes:
        """Plan, step and sizes of the batch yielded last; a DataError before the first.

        The sizes of a stream with ``cost`` are what each rank's batch amounts to.
        """
        if self._yielded is None:
            raise DataError("no batch has been yielded yet; ask inside the loop over the loader")
        return self._yielded

    @property
    def local_batch_size(self) -> int:
        """This rank's part of ``step_sizes``, 0 for padding: the count of a metric."""
        return self.step_sizes.sizes[self._view.rank]

    @property
    def is_padding(self) -> bool:
        """Whether the batch yielded last is a dummy, of which nothing may count."""
        return self.local_batch_size == 0

    def _begin_iteration(self) -> int:
        """Go on behind all that was trained; returns the iteration's number."""
        if self._trains:
            self._balancer.begin_iteration()
            # Not behind what was yielded: a look at a batch on one rank moves no step of its.
            self._next_step = max(self._resumed_step, self._balancer.next_step)
            self._resumed_step = 0
        self._stands.clear()
        self._num_iterations += 1
        return self._num_iterations

    def _epoch_set(self) -> None:
        """Tell the balancer that another iteration will begin."""
        if self._trains:
            self._balancer.begin_iteration()

    def _forget_pending(self) -> None:
        """Forget batches that will not be trained: a run goes on elsewhere."""
        if self._trains:
            self._balancer.clear_pending()

    def _check_newest(self, iteration: int) -> None:
        if iteration != self._num_iterations:
            raise DataError(
                "this iteration over the loader ended when a newer one began; take batches "
                "from one iterator at a time, or make two loaders"
            )

    def _note(self, step_sizes: StepSizes, position: int = 0) -> None:
        """Note the batch that is yielded now, and the samples consumed once it is trained."""
        self._yielded, self._next_step = step_sizes, step_sizes.step + 1
        self._stands.append((self._next_step, position))

    def _stand(self, position: int = 0) -> tuple[int, int]:
        """Return the next step and the position, before batches that were fetched ahead.

        ``position`` is that after the newest.
        """
        num_waiting = self._balancer.num_waiting if self._trains else 0
        if not num_waiting:
            return self._next_step, position
        if num_waiting >= len(self._stands):
            raise UsageError(
                f"state_dict: {num_waiting} batches were fetched ahead and are not trained, the "
                "first of them of the epoch before, or too many; save when fewer wait"
            )
        return self._stands[-1 - num_waiting]


def keeper_of(dataset: object) -> Keeper | None:
    """Return the data set as a keeper of samples; None, with a warning, where it only holds one."""
    if isinstance(dataset, Keeper):
        return dataset
    inner = dataset
    for _ in range(_MOST_WRAPPERS):
        inner = getattr(inner, "dataset", None)
        if isinstance(inner, Keeper):
            warnings.warn(
                f"a {type(inner).__name__} inside a {type(dataset).__name__}: owners cannot follow "
                "what it keeps, and peers are not asked; give the store itself to the loader, with "
                "transform= for what is done to each sample",
                stacklevel=4,
            )
            return None
    return None


def tell_sources(balancer: PlanSource, batches: GlobalBatches) -> None:
    """Say what an iteration knows that begins: who shares a source, what was read, who keeps."""
    balancer.share_sources(batches.placement.shared_sources(balancer.world_size))
    balancer.note_reads(batches.reads(), epoch=batches.epoch_before)
    if (held := batches.held()) is not None:
        balancer.share_held(held)


@dataclass(frozen=True)
class EpochState:
    """Where a run stands, in samples of all ranks, so that any number of them can go on."""

    epoch: Count
    position: Count  # samples of the epoch's order that are consumed
    step: Count  # the next one to train on, counted over epochs
    done: str | None  # one bit a sample consumed, hexadecimal; None where position says it
    num_samples: Count  # of an epoch; this and what follows must be equal where a run goes on
    seed: Annotated[int, Within(0, math.inf)]
    shuffle: bool
    relaxed: bool
    blocks: str | None = None  # how data in shards are shuffled
    weights: str | None = None  # a digest of those that samples are drawn by

    def __post_init__(self) -> None:
        if self.position > self.num_samples:
            raise DataError(f"position={self.position} is beyond num_samples={self.num_samples}")
        mask = self.mask()
        if mask is None and self.relaxed and self.position:
            raise DataError("the order is relaxed, and done does not say which samples are")
        if mask is not None and mask.sum() != self.position:
            raise DataError(f"position={self.position}, but done has {mask.sum()} samples")

    def mask(self) -> npt.NDArray[np.bool_] | None:
        """Return which samples are done, [num_samples]; None where ``position`` says it."""
        if self.done is None:
            return None
        num_bytes = -(-self.num_samples // 8)
        if len(self.done) != 2 * num_bytes or not set(self.done) <= set("0123456789abcdef"):
            raise DataError(
                f"done has {len(self.done)} characters, but {self.num_samples} samples take "
                f"{2 * num_bytes} hexadecimal ones"
            )
        packed = np.frombuffer(bytes.fromhex(self.done), np.uint8)
        # The last byte is padded with zeros: without count they would be samples.
        return np.unpackbits(packed, count=self.num_samples).astype(bool)


class GlobalBatches:
    """Draws the steps of epochs, one iteration at a time, and says where a run stands."""

    def __init__(
        self,
        settings: EpochSettings,
        view: PlanView,
        *,
        keeper: Keeper | None = None,
        given: Placement | None = None,
        content: int = 0,
        costs: Ints | None = None,
    ) -> None:
        self.settings = settings
        self._costs = costs  # of the samples of the data set, where owners go by these
        self._content = content if costs is None else zlib.crc32(costs.tobytes(), content)
        self._orders = EpochOrders(settings)
        self.view = view
        self._keeper, self._given = keeper, given  # what the user gave, which None leaves open
        self.epoch = self.epoch_before = 0  # before: of the iteration that ended last
        self._epoch_begun = 0
        self.placement = settings.placement  # who holds what in this iteration
        self.homes: Homes = settings.placement.at(view.world_size)
        self._resume_position: int | None = None
        self._done: npt.NDArray[np.bool_] | None = None  # of self.epoch, in an older order
        self._has_warned = self._has_warned_of_order = False
        self._drawn_epoch: int | None = None  # which has been drawn to its end

    def __len__(self) -> int:
        return count_steps(self.settings.num_samples, self.view, drop_last=self.settings.drop_last)

    def count_left(self, position: int) -> int:
        """Return the steps of an epoch behind so many of its samples."""
        num_left = self.settings.num_samples - position
        return count_steps(num_left, self.view, drop_last=self.settings.drop_last)

    def set_epoch(self, epoch: int) -> None:
        """Choose the permutation; a position loaded for another epoch is dropped."""
        check_epoch(epoch)
        if epoch != self.epoch:
            self._resume_position, self._done = None, None
        self.epoch = epoch

    def start(self, *, first_step: int) -> tuple[int, Iterator[Draw]]:
        """Begin an iteration; returns its position in the epoch and its steps, drawn lazily."""
        position = self._resume_position or 0
        self._warn_of_order()
        if self._resume_position is None:
            self._done = None
        self._resume_position = None
        self.epoch_before, self._epoch_begun = self._epoch_begun, self.epoch
        if self._keeper is not None:
            world_size = self.view.world_size
            self.placement = self._keeper.placement_after(
                self._given, first_step=first_step, world_size=world_size
            )
            self.homes = self.placement.at(world_size)
            keeping = self._keeper.keeping
            if keeping is not None and any(keeping.adopts):
                num_steps = self.count_left(position)
                self.homes = replace(
                    self.homes,
                    adopts=np.array(keeping.of_a_step(num_steps), np.int64),
                    adopts_first=keeping.comes_first,
                )
        elif self.homes.world_size != self.view.world_size:
            self.homes = self.settings.placement.at(self.view.world_size)
        return position, self._draw(position, first_step)

    def reads(self) -> Sequence[Mapping[str, int]]:
        """Return what each rank read of the keeper in the iteration before, [world_size]."""
        return () if self._keeper is None else self._keeper.reads()

    def held(self) -> Held | None:
        """Return what each rank keeps in this iteration; None where nobody's cache grows."""
        if self._keeper is None:
            return None
        sets, num_samples = self.homes.local.holders, len(self.homes.rows)
        counts = np.bincount(self.homes.rows, minlength=len(sets)) @ sets
        shares = counts / max(num_samples, 1)
        keeping = self._keeper.keeping
        if keeping is not None and keeping.comes_first:
            # In this iteration a rank computes others in place of so many that it holds.
            shares = np.maximum(shares - np.array(keeping.adopts) / max(num_samples, 1), 0.0)
        return Held(tuple(shares.tolist()), num_samples, self._keeper.sample_bytes, keeping)

    def _draw(self, position: int, first_step: int) -> Iterator[Draw]:
        epoch = self.epoch  # it may be another one by the end
        order = self._orders.take(epoch, done=self._done)
        num_left = len(order) - position
        self._warn_of_skipped(num_left, tail=num_left % self.view.global_batch_size)
        for draw in draw_epoch(
            order,
            self.homes,
            self.view,
            first_step=first_step,
            position=position,
            drop_last=self.settings.drop_last,
            arrangement=self.settings.arrangement(self.epoch),
            content=self._content,
            costs=self._costs,
        ):
            if self._keeper is not None:
                self._keeper.note(draw)
            yield draw
            num_left = len(order) - draw.position
        self._warn_of_skipped(num_left, tail=num_left)  # where the global batch has changed
        self._drawn_epoch = epoch

    def _warn_of_order(self) -> None:
        """Say on rank 0, once, that an epoch comes again in the order that it had."""
        is_again = self._resume_position is None and self._drawn_epoch == self.epoch
        is_drawn = self.settings.shuffle or self.settings.weighted is not None
        if is_again and is_drawn and not self._has_warned_of_order:
            self._has_warned_of_order = True
            if self.view.rank == 0:
                _logger.warning(
                    "epoch %d begins again, with the same samples in each step as before: call "
                    "set_epoch(epoch) on every rank before each epoch",
                    self.epoch,
                )

    def _warn_of_skipped(self, num_left: int, *, tail: int) -> None:
        """Say on rank 0, once, that samples are left out, as a last batch is too small."""
        view, drop_last, text = self.view, self.settings.drop_last, ""
        if num_left == self.settings.num_samples and len(self) == 0:
            text = (
                f"an epoch has no step: {num_left} samples, global_batch_size="
                f"{view.global_batch_size}, drop_last={drop_last}, and every step needs samples "
                f"for {view.min_ranks} ranks; nothing is trained"
            )
        elif 0 < tail < view.min_ranks and not drop_last:
            text = (
                f"the last batch of the epoch has {tail} samples, fewer than the "
                f"{view.min_ranks} ranks that the rule needs: it is skipped on all ranks, in "
                "every epoch; another global_batch_size, a smaller f, or drop_last=True avoids it"
            )
        if text and not self._has_warned and view.rank == 0:
            self._has_warned = True
            warnings.warn(text, stacklevel=2)

    def state_dict(self, *, position: int, step: int) -> dict[str, Any]:
        """Describe a run that has consumed ``position`` samples of the epoch in all ranks."""
        settings = self.settings
        done = None
        # A relaxed order depends on the placement, and an order with a past on that past: a new
        # world has neither, so the state holds the samples themselves, one bit each.
        if settings.relaxed or self._done is not None:
            mask = np.zeros(settings.num_samples, bool)
            mask[settings.order(self.epoch, done=self._done)[:position]] = True
            done = np.packbits(mask).tobytes().hex()
        state = EpochState(self.epoch, position, step, done, *self._fixed().values())
        return encode(state)

    def _fixed(self) -> dict[str, Any]:
        """Return what a state shares with the run that goes on from it, by name."""
        settings = self.settings
        return {
            "num_samples": settings.num_samples,
            "seed": settings.seed,
            "shuffle": bool(settings.shuffle),  # a script may say 1
            "relaxed": bool(settings.relaxed),
            "blocks": str(settings.shuffle) if isinstance(settings.shuffle, ShardOrder) else None,
            "weights": None if settings.weighted is None else str(settings.weighted),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> EpochState:
        """Go on where ``state`` was taken, and return it; DataError for other data or order."""
        loaded = decode(EpochState, state, what="data")
        for name, here in self._fixed().items():
            if getattr(loaded, name) != here:
                raise DataError(
                    f"load_state_dict: {name} is {here!r} here but {getattr(loaded, name)!r} in "
                    "the state; the rest of the epoch would not be what was left"
                )
        self.epoch, self._resume_position = loaded.epoch, loaded.position
        self._done = loaded.mask()
        return loaded


class BatchSampler(NeverCopied, Sampler[list[int]]):
    """Index lists for a user's own ``torch.utils.data.DataLoader(batch_sampler=...)``.

    Torch draws index lists ahead of the batches it yields, and yields them in that order. So each
    list's sizes join the balancer's FIFO when the list is drawn, and every backward pass takes
    those of its own batch. What an early ``break`` leaves in the FIFO is cleared by ``set_epoch``
    or by the next iteration, whichever comes first; where the last list had been drawn, only by
    ``balancer.clear_pending()``, since the loop may have fetched ahead. An iteration begins at the
    step after the newest one trained, which all ranks know, however far torch drew ahead on each.

    Args:
        dataset: the data set, or its number of samples.
        balancer: gives the sizes and takes what was drawn.
        placement, shuffle, seed, drop_last, relaxed, weights, num_samples, cost: see
            ``loft.DataLoader``.

    Raises:
        ArgumentTypeError: a sampler or indices in the data set's place, or an argument of torch's
            samplers and loader that has no place here.
        DataError: the options, or one of them and the data set, do not fit.
    """

    _in_place_of_a_copy = PlannedLoader._in_place_of_a_copy

    def __init__(
        self,
        dataset: Sized | int,
        balancer: PlanSource,
        *positional: Any,
        placement: Placement | None = None,
        shuffle: bool | BlockShuffle = True,
        seed: int = 0,
        drop_last: bool = False,
        relaxed: bool = False,
        weights: Weights | None = None,
        num_samples: int | None = None,
        cost: Costs | None = None,
        **others: Any,
    ) -> None:
        check_balancer(balancer)
        refuse_others("BatchSampler", positional, others, SAMPLER)
        _check_no_indices(dataset)
        given, placement = placement, check_placement(placement, check_length(dataset))
        weighted = check_weights(weights, num_samples, len(placement), shuffle=shuffle)
        order = check_shuffle(shuffle, dataset)
        settings = EpochSettings(placement, order, seed, drop_last, relaxed, weighted)
        keeper = keeper_of(dataset)
        has_places = given is not None or keeper is not None
        self._balancer = balancer
        self._batches = GlobalBatches(
            settings,
            balancer,
            keeper=keeper,
            given=given,
            content=content_of(dataset),
            costs=check_costs(cost, len(placement), has_places=has_places),
        )
        self._resume_step: int | None = None
        self._start = (0, 0)  # position and step at which the iteration began
        self._drawn: list[tuple[StepSizes, int]] = []  # sizes, and position once trained

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[list[int]]:
        # A generator, so that nothing starts before the first list: torch makes two iterators of
        # a batch sampler when it has loader processes, and drops the first.
        self._balancer.begin_iteration()
        resumed, self._resume_step = self._resume_step, None
        first_step = self._balancer.next_step if resumed is None else resumed
        position, draws = self._batches.start(first_step=first_step)
        tell_sources(self._balancer, self._batches)
        self._start = position, first_step
        drawn: list[tuple[StepSizes, int]] = []
        self._drawn = drawn
        view, homes = self._balancer, self._batches.homes
        for draw in draws:
            drawn.append((draw.step_sizes, draw.position))
            self._balancer.push_sizes(draw.step_sizes)
            # Torch can yield no batch that is none: a loop may pass over it all the same.
            dummy_size = view.dummy_size(draw.step_sizes.step) or MIN_BATCH
            yield draw.indices(view.rank, dummy_size=dummy_size, homes=homes)
        self._balancer.all_drawn()

    def set_epoch(self, epoch: int) -> None:
        """Choose the permutation of the next iteration; call it on every rank."""
        if epoch != self._batches.epoch:
            step = self._balancer.next_step if self._resume_step is None else self._resume_step
            self._start, self._drawn = (0, step), []
        self._batches.set_epoch(epoch)
        self._balancer.begin_iteration()

    def step_sizes_at(self, index: int) -> StepSizes:
        """Return the sizes of the ``index``-th batch of this iteration; 0 here is padding."""
        return self._drawn[index][0]

    def state_dict(self, *, num_trained: int) -> dict[str, Any]:
        """Describe the run after ``num_trained`` batches of this iteration.

        The sampler cannot know how many of the batches drawn ahead were trained, so say it.
        """
        if not 0 <= num_trained <= len(self._drawn):
            raise DataError(
                f"state_dict: num_trained={num_trained}, but this iteration drew "
                f"{len(self._drawn)} batches; count the batches trained since iter(loader)"
            )
        position, step = self._start
        if num_trained:
            last, position = self._drawn[num_trained - 1]
            step = last.step + 1
        return self._batches.state_dict(position=position, step=step)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next iteration go on where ``state`` was taken, with any number of ranks."""
        loaded = self._batches.load_state_dict(state)
        self._resume_step = loaded.step
        self._start, self._drawn = (loaded.position, loaded.step), []
        self._balancer.clear_pending()


def check_epoch(epoch: object) -> None:
    """Raise for what is no number of an epoch."""
    if not isinstance(epoch, Integral):
        raise ArgumentTypeError(f"set_epoch: epoch={epoch!r}; give a whole number")
    if epoch < 0:
        raise DataError(f"set_epoch: epoch={epoch} must be >= 0")


def check_length(dataset: object) -> int:
    """Return the number of samples of a data set; ArgumentTypeError if it is not map-style."""
    if isinstance(dataset, int) and not isinstance(dataset, bool) and dataset >= 0:
        return dataset
    if isinstance(dataset, Sampler):
        raise ArgumentTypeError(
            f"the data set is of type {type(dataset).__name__}, a sampler, and here ranks share "
            f"global batches of the data set: {in_place_of(dataset)}"
        )
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
        raise ArgumentTypeError(
            f"the data set is of type {type(dataset).__name__}: exactly-once batches of unequal "
            "sizes need a map-style data set, with __len__ and __getitem__. Read tar files with "
            "loft.TarShards and Parquet files with loft.ParquetShards, which are map-style and "
            "read blocks; for any other stream use loft.StreamLoader, or index it"
        )
    if not (hasattr(dataset, "__getitem__") or hasattr(dataset, "__getitems__")):
        raise ArgumentTypeError(
            f"the data set is of type {type(dataset).__name__}: give the map-style data set "
            "itself, with __len__ and __getitem__"
        )
    return len(dataset)


def _check_no_indices(dataset: object) -> None:
    """Raise an ArgumentTypeError for numbers of samples, whose places would be drawn."""
    if not isinstance(dataset, list | tuple | range | np.ndarray | Tensor) or not len(dataset):
        return
    if isinstance(dataset, list | tuple) and not all(isinstance(at, Integral) for at in dataset):
        return
    numbers = np.asarray(dataset)
    if numbers.ndim != 1 or numbers.dtype.kind not in "iu":
        return
    if not np.array_equal(numbers, np.arange(len(numbers))):
        raise ArgumentTypeError(
            f"the data set is a {type(dataset).__name__} of {len(numbers)} whole numbers from "
            f"{numbers.min()} to {numbers.max()}, of which places would be drawn. If they are "
            "indices, give torch.utils.data.Subset(dataset, indices), here and to torch's loader; "
            "if they are the samples, give len() of them"
        )


def check_indices(indices: Sequence[int], num_samples: int) -> list[int]:
    """Return indices of samples counted from 0 on; IndexError where there is no such sample."""
    numbers = [index + num_samples if -num_samples <= index < 0 else index for index in indices]
    if not all(0 <= number < num_samples for number in numbers):
        raise IndexError(f"samples {list(indices)} of a data set of {num_samples}")
    return numbers
