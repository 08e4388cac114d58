"""Which samples form each step of an epoch, and who computes them: pure, equal on every rank."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeVar

import numpy as np
import numpy.typing as npt
from torch import Tensor

from loft_hvd.balance.plan import Plan, Sizes, StepSizes, scale_sizes
from loft_hvd.config import config
from loft_hvd.data.assign import Assignment, Homes, Ints, assign
from loft_hvd.data.blocks import Arrangement, BlockShuffle, Order, ShardOrder
from loft_hvd.data.costs import deal, sizes_by_cost
from loft_hvd.data.placement import Placement
from loft_hvd.errors import ArgumentTypeError, DataError

__all__ = [
    "Draw",
    "EpochOrders",
    "EpochSettings",
    "PlanView",
    "WeightedDraws",
    "Weights",
    "check_weights",
    "count_steps",
    "draw_epoch",
    "epoch_order",
]

_BLOCK = 1 << 17  # samples worked on at a time: a megabyte, which a second-level cache holds
_BIN = 1 << 15  # keys sorted at a time, of up to 30 million: a quarter of a megabyte, likewise
_MOST_BIN_BITS = 10  # a choice: more gain little, as a block's part of a bin gets short
_MOST_NARROW = 2**31 - 1  # samples that 32 bits number
_MANY = 1 << 20  # samples whose order takes long enough, 0.1 s, to be made ahead
_GOLDEN = 0.618033988749895  # the golden ratio less 1: its multiples fill [0, 1) most evenly
_STREAM = 2  # of random words; an order of samples has no such number, one of blocks has another

Weights = Sequence[float] | npt.NDArray[np.floating] | Tensor
_Made = TypeVar("_Made")  # by a thread beside the training


class PlanView(Protocol):
    """The sizes in force, as drawing needs them."""

    @property
    def world_size(self) -> int: ...
    @property
    def rank(self) -> int: ...
    @property
    def global_batch_size(self) -> int: ...  # of all ranks in a step of the newest plan
    def dummy_size(self, step: int) -> int:
        """Return the samples of the dummy batch of a rank that has none in a step, maybe 0."""

    @property
    def min_ranks(self) -> int: ...  # that hold a sample in every step, 2f+1 for a rule with f

    @property
    def splits(self) -> bool: ...  # shares beyond a cap come in micro-batches

    def plan_at(self, step: int) -> Plan:
        """Return the plan in force at a step, counted over epochs; asked once a step, in order."""

    def count_micro(self, sizes: Sizes) -> Sizes:
        """Return how many micro-batches each rank's share takes; empty where none is split."""

    @property
    def pass_caps(self) -> Sequence[int | None]: ...  # most samples of a backward pass of each rank

    def most_micro(self, sizes: Sizes) -> Sizes:
        """Return how many micro-batches each rank's share may take where samples go by cost."""


@dataclass(frozen=True, eq=False)
class WeightedDraws:
    """Samples drawn with replacement, each as often as its weight says.

    Attributes:
        ends: running sums of the weights, as shares of the largest one, [num_samples].
        num_draws: samples of an epoch, >= 0.
    """

    ends: npt.NDArray[np.float64]
    num_draws: int

    def __str__(self) -> str:
        return f"{zlib.crc32(self.ends.tobytes()):08x}"

    def order(self, *, seed: int, epoch: int) -> Order:
        """Draw an epoch's samples, the same on every machine and version.

        Returns int32 where that holds the indices, else int64. The k-th sample is the one in whose
        part of the running sums the k-th raw word of ``PCG64(SeedSequence([seed, epoch, 2]))``
        falls. Weights 1, 0, 3 have the sums 1, 1, 4: a word of 0.2 of its range is 0.8 and sample
        0, one of 0.25 is 1.0 and sample 2, and none is sample 1.
        """
        is_small = len(self.ends) <= _MOST_NARROW
        order = np.empty(self.num_draws, np.int32 if is_small else np.int64)
        for begin, words in _words(self.num_draws, seed, epoch, _STREAM):
            # 53 bits, which a float64 holds: never 1, so never beyond the last sample.
            places = (words >> np.uint64(11)) * (self.ends[-1] * 2.0**-53)
            order[begin : begin + len(words)] = np.searchsorted(self.ends, places, side="right")
        return order


def check_weights(
    weights: Weights | None,
    num_draws: int | None,
    num_samples: int,
    *,
    shuffle: bool | BlockShuffle | None,
) -> WeightedDraws | None:
    """Return how a loader draws by ``weights``, or None where it has none.

    ``num_draws`` is the loader's argument ``num_samples``; ``num_samples`` are the data set's.
    """
    if weights is None:
        if num_draws is not None:
            raise DataError(
                f"num_samples={num_draws} is how many samples an epoch draws by weights=, and "
                "without them each sample comes once an epoch; leave it away, or give a "
                "torch.utils.data.Subset"
            )
        return None
    if shuffle not in (None, True):
        raise DataError(
            f"shuffle={shuffle} orders samples that come once an epoch, and weights= draws at "
            "random; leave shuffle away"
        )
    try:
        given = weights.detach().cpu().double().numpy() if isinstance(weights, Tensor) else weights
        values = np.array(given, np.float64)
    except (TypeError, ValueError) as error:
        raise ArgumentTypeError(
            f"weights= is of type {type(weights).__name__} and no row of numbers ({error}); give "
            "one weight for each sample"
        ) from None
    if values.shape != (num_samples,):
        raise DataError(
            f"weights= has the shape {list(values.shape)}, but the data set has {num_samples} "
            "samples; give one weight for each sample: with one for each class that is "
            "class_weights[labels]"
        )
    bad = np.flatnonzero(~(np.isfinite(values) & (values >= 0)))
    if len(bad):
        raise DataError(
            f"weights= must be finite and >= 0, but {len(bad)} of {num_samples} are not: that of "
            f"sample {bad[0]} is {values[bad[0]]}; give 0 to samples that are never to be drawn"
        )
    if not values.any():
        raise DataError(
            f"weights= are 0 for all of the {num_samples} samples; at least one must be positive"
        )
    if num_draws is None:
        num_draws = num_samples
    if isinstance(num_draws, bool) or not isinstance(num_draws, int):
        raise ArgumentTypeError(f"num_samples={num_draws!r} must be a whole number")
    if num_draws < 1:
        raise DataError(f"num_samples={num_draws} must be >= 1: so many samples an epoch draws")
    return WeightedDraws(np.cumsum(values / values.max()), num_draws)


@dataclass(frozen=True)
class EpochSettings:
    """What decides which samples form a step, whatever the sizes."""

    placement: Placement  # who holds which sample; its length is that of the data set
    shuffle: bool | ShardOrder  # permute the samples each epoch, or blocks of them
    seed: int  # of the permutations, >= 0
    drop_last: bool  # leave out the samples that do not fill a global batch
    relaxed: bool  # spread each holder's samples evenly over the epoch
    weighted: WeightedDraws | None = None  # draws with replacement, in place of each sample once

    def __post_init__(self) -> None:
        if isinstance(self.seed, bool) or not isinstance(self.seed, int) or self.seed < 0:
            raise DataError(f"seed={self.seed!r} must be a whole number >= 0")
        if self.relaxed and not self.shuffle:
            raise DataError(
                "relaxed=True chooses the order of the samples, shuffle=False keeps the data "
                "set's; drop one of them"
            )
        if self.relaxed and isinstance(self.shuffle, ShardOrder):
            raise DataError(
                "relaxed=True spreads single samples over the epoch, but the data set is in shards "
                "that are read in blocks; drop relaxed=True"
            )
        if self.relaxed and self.weighted is not None:
            raise DataError(
                "relaxed=True spreads samples over the epoch that come once in it, and weights= "
                "draws at random; drop relaxed=True"
            )

    @property
    def num_samples(self) -> int:
        """Samples of an epoch: those of the data set, or so many draws by weight."""
        return len(self.placement) if self.weighted is None else self.weighted.num_draws

    def order(self, epoch: int, *, done: npt.NDArray[np.bool_] | None = None) -> Order:
        """Return the samples in the order of this epoch, those of ``done`` first.

        ``done`` are those consumed in an order that this world no longer has, [num_samples]; None
        where they are drawn by weight.
        """
        if self.weighted is not None:
            order = self.weighted.order(seed=self.seed, epoch=epoch)
        elif isinstance(self.shuffle, ShardOrder):
            order = self.shuffle.order(seed=self.seed, epoch=epoch)
        else:
            order = epoch_order(self.num_samples, seed=self.seed, epoch=epoch, shuffle=self.shuffle)
        if self.relaxed:
            order = spread(order, self.placement.groups)
        if done is not None:
            order = np.concatenate([order[done[order]], order[~done[order]]])
        return order

    def arrangement(self, epoch: int) -> Arrangement | None:
        """Return how the samples of a step stand in this epoch; None: as they come."""
        if not isinstance(self.shuffle, ShardOrder):
            return None
        return self.shuffle.arrangement(seed=self.seed, epoch=epoch)


class EpochOrders:
    """The orders of a run's epochs; a large one is made beside the training on the one before it.

    That takes 10 bytes a sample for a moment, 48 where samples are spread over the epoch
    (``relaxed``), and 4 until its turn comes.
    """

    def __init__(self, settings: EpochSettings) -> None:
        self._settings = settings
        self._thread = ThreadPoolExecutor(1, "loft_hvd-order")  # starts with the first task
        self._ahead: tuple[int, Future[Order]] | None = None

    def take(self, epoch: int, *, done: npt.NDArray[np.bool_] | None = None) -> Order:
        """Return ``EpochSettings.order``, and begin that of the epoch after it."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None and ahead[0] == epoch and done is None:
            since = "the end of the epoch before it"
            order = _in_time(ahead[1], what=f"epoch {epoch}: its order", since=since)
        else:
            order = self._settings.order(epoch, done=done)
        if self._settings.shuffle and self._settings.num_samples >= _MANY:
            self._ahead = epoch + 1, self._thread.submit(self._settings.order, epoch + 1)
        return order


def _in_time(future: Future[_Made], *, what: str, since: str) -> _Made:
    """Return what a thread makes beside the training; a DataError where it takes too long."""
    timeout_s = config().timeout_s
    if not wait([future], timeout_s).done:
        raise DataError(
            f"{what} has not been made within {timeout_s:g} s of {since}; this machine is very "
            "slow (raise LOFT_HVD_TIMEOUT_S to wait longer)"
        )
    return future.result()


@dataclass(frozen=True)
class Draw:
    """One step: its global batch, and who computes which sample of it."""

    step_sizes: StepSizes  # plan, step and samples of each rank
    batch: Order  # indices of the samples in the data set, [num_samples]
    assignment: Assignment  # the owner of each, and local samples of each rank
    position: int  # samples of the epoch consumed once this step is trained

    def indices(self, rank: int, *, dummy_size: int, homes: Homes) -> list[int]:
        """Return the samples of ``rank``, or those of its dummy batch where it has none.

        The dummy batch takes ``dummy_size`` samples of the same global batch, local ones first, so
        that a rank without samples has nothing extra to fetch where that can be helped.
        """
        places = self.assignment.places
        is_mine = self.assignment.owners == rank
        mine = self.batch[is_mine] if places is None else self.batch[places[is_mine[places]]]
        if not len(mine):
            is_remote = ~homes.local.holders[homes.rows[self.batch], rank]
            mine = self.batch[np.argsort(is_remote, kind="stable")[:dummy_size]]
        indices: list[int] = mine.tolist()
        return indices


def epoch_order(num_samples: int, *, seed: int, epoch: int, shuffle: bool = True) -> Order:
    """Permute ``range(num_samples)`` by seed and epoch, the same on every machine and version.

    Returns int32 where that holds the indices, else int64.

    Each sample's key is a raw 64-bit word of ``PCG64(SeedSequence([seed, epoch]))`` whose low bits,
    as many as the largest index needs, give way to the index; the order is that of the keys.
    NumPy fixes those words for good, while the stream behind ``Generator.permutation`` may change
    with a release, and ranks may run different ones. Keys are distinct, so any sort will do.
    """
    is_small = num_samples <= _MOST_NARROW
    if not shuffle:
        return np.arange(num_samples, dtype=np.int32 if is_small else np.int64)
    # One array from the words to the order: an epoch may have many millions of samples. They go
    # into bins by their highest bits first, as a bin is sorted in a core's own cache: 20 million
    # take 0.9 to 1.2 s of CPU, and 1.6 at once. Words are drawn twice, which costs less than room.
    bits = min(max((num_samples // _BIN).bit_length(), 1), _MOST_BIN_BITS)
    shift = np.uint64(64 - bits)
    # Six samples, the largest is 5: low = 0b111, and the word ..10110 of sample 2 becomes ..10010.
    low = np.uint64((1 << max(num_samples - 1, 0).bit_length()) - 1)
    counts = np.zeros(1 << bits, np.int64)  # keys of each bin
    for _, words in _words(num_samples, seed, epoch):
        counts += np.bincount((words >> shift).view(np.int64), minlength=len(counts))
    ends = np.cumsum(counts)
    filled = ends - counts  # where the next key of each bin goes
    keys = np.empty(num_samples, np.uint64)
    for begin, words in _words(num_samples, seed, epoch):
        words &= ~low
        words |= np.arange(begin, begin + len(words), dtype=np.uint64)
        bins = (words >> shift).astype(np.uint16)  # sorted without comparing any
        words = words[np.argsort(bins, kind="stable")]
        new = np.bincount(bins, minlength=len(counts))  # keys of each bin in this block
        # Two keys of bin 0 and one of bin 1, which go to 7 and 40: 0 1 2 + 7 7 38 = 7 8 40.
        places = np.arange(len(words))
        places += np.repeat(filled - (np.cumsum(new) - new), new)
        keys[places] = words
        filled += new
    # Indices take half of a key's bytes. They are written where keys were that have been read, and
    # the other half of the array goes back.
    order = keys.view(np.int32 if is_small else np.int64)
    for begin, end in itertools.pairwise([0, *ends.tolist()]):
        keys[begin:end].sort()
        order[begin:end] = keys[begin:end] & low
    if not is_small:
        return order
    del order  # a view of memory that may move
    keys.resize(-(-num_samples // 2), refcheck=False)
    return keys.view(np.int32)[:num_samples]


def _words(num_samples: int, *key: int) -> Iterator[tuple[int, npt.NDArray[np.uint64]]]:
    """Yield the words of an epoch's samples, block by block, each with where it begins."""
    generator = np.random.PCG64(np.random.SeedSequence(key))
    for begin in range(0, num_samples, _BLOCK):
        yield begin, generator.random_raw(min(_BLOCK, num_samples - begin))


def spread(order: Order, groups: npt.NDArray[np.int32]) -> Order:
    """Reorder so that any run of samples holds every group in its overall proportion, within 1.

    The k-th of a group's m samples moves to the place ``(k + offset) / m`` of the epoch; offsets
    step by the golden ratio so that groups do not arrive in lockstep. Within a group the order
    stays random. Four samples of group 0 and two of group 1, with offsets 0.5 and 0.118::

        group 0     0.125  0.375  0.625  0.875
        group 1     0.059  0.559
        result      1  0  0  1  0  0
    """
    by_group = np.argsort(groups[order], kind="stable")  # [num_samples], places in ``order``
    sizes = np.bincount(groups)  # [num_groups]
    group = groups[order[by_group]]  # [num_samples], ascending
    start = np.cumsum(sizes) - sizes  # [num_groups]
    offset = (0.5 + _GOLDEN * group) % 1.0
    place = (np.arange(len(order)) - start[group] + offset) / sizes[group]  # in [0, 1)
    spread_order: Order = order[by_group[np.argsort(place, kind="stable")]]
    return spread_order


def count_steps(num_samples: int, view: PlanView, *, drop_last: bool) -> int:
    """Return the steps that ``num_samples`` make by the newest plan, the same on every rank.

    A last batch of fewer than ``min_ranks`` samples is no step.
    """
    full, tail = divmod(num_samples, view.global_batch_size)
    return full + (not drop_last and tail >= max(view.min_ranks, 1))


def draw_epoch(
    order: Order,
    homes: Homes,
    view: PlanView,
    *,
    first_step: int,
    position: int,
    drop_last: bool,
    arrangement: Arrangement | None = None,
    content: int = 0,
    costs: Ints | None = None,
) -> Iterator[Draw]:
    """Cut an epoch's order into global batches and assign each, lazily.

    The plan of a step is asked for when the step is drawn; its sum is how many samples follow.
    ``position`` samples of the order are consumed already; steps count over epochs from
    ``first_step``. Each batch is put in the order of ``arrangement``: an assignment gives runs of
    it to ranks. ``content`` tells the data set from others. A dear assignment is begun while the
    step before it is trained, on a thread of its own and by the plan of that step; where another
    plan comes into force it is made anew. With ``costs``, of the samples of the data set, sizes are
    shares of these.
    """
    thread = ThreadPoolExecutor(1, "loft_hvd-assign")  # starts with the first task
    fewest = max(view.min_ranks, 1)

    def begun(step: int, plan: Plan, begin: int) -> tuple[Order, Sizes, Callable[[], Assignment]]:
        batch = order[begin : begin + plan.global_batch_size]
        if arrangement is not None:
            batch = arrangement(batch)
        sizes = _sizes_of(plan, batch, view)
        task = partial(assign, batch, np.array(sizes, np.int64), homes)
        if costs is not None:
            caps, slots = view.pass_caps, view.most_micro(sizes)
            task = partial(deal, costs.take(batch), sizes, caps=caps, slots=slots)
        elif not homes.is_dear:
            return batch, sizes, task
        what = f"step {step}: the assignment of its samples to ranks"
        since = "when training needed it"
        return batch, sizes, partial(_in_time, thread.submit(task), what=what, since=since)

    try:
        likely: Sizes | None = None  # sizes of the plan by which the step's assignment has begun
        for step in itertools.count(first_step):
            num_left = len(order) - position
            if num_left < fewest:
                return
            plan = view.plan_at(step)
            if drop_last and num_left < plan.global_batch_size:
                return
            if plan.sizes != likely:
                following = begun(step, plan, position)
            batch, sizes, assigned = following
            assignment, position = assigned(), position + len(batch)
            num_left, likely = len(order) - position, None
            if num_left >= (plan.global_batch_size if drop_last else fewest):
                following, likely = begun(step + 1, plan, position), plan.sizes
            # Ranks compare it: they drew the same samples.
            digest = zlib.crc32(batch.tobytes(), content)
            step_sizes = StepSizes(plan.plan_id, step, sizes, digest, view.count_micro(sizes))
            if assignment.micro:
                step_sizes = sizes_by_cost(step_sizes, assignment.micro, splits=view.splits)
            yield Draw(step_sizes, batch, assignment, position)
    finally:
        # Not waited for: an iteration that was left is closed by whichever thread collects it.
        thread.shutdown(wait=False, cancel_futures=True)


def _sizes_of(plan: Plan, batch: Order, view: PlanView) -> Sizes:
    """Return the samples of each rank in a step of a plan, which the last batch may not fill."""
    sizes = scale_sizes(plan.sizes, len(batch), min_ranks=view.min_ranks)
    assert sizes is not None  # smaller batches are left out
    return sizes
