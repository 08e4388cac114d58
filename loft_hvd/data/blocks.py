"""The order of an epoch for data in shards: block by block, shards inside windows.

A read of a tar or Parquet file costs about as much for sixteen neighbours as for one sample. So the
unit that is shuffled is a block, a run of neighbours in one shard, and the samples of a step that
are of one shard stand together, for an assignment to give them to few ranks.

The order of an epoch is a function of the seed, the epoch and the sizes of the shards alone, as
that of ``draws.epoch_order`` is one of the seed, the epoch and the number of samples.
"""

from __future__ import annotations

import itertools
import zlib
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from loft_hvd.errors import ArgumentTypeError, DataError

__all__ = ["Arrangement", "BlockShuffle", "Order", "ShardOrder", "check_shuffle"]

_AT_ONCE = 1 << 18  # samples worked on at a time: two megabytes, which a second-level cache holds
_STREAM = 1  # of random words; those of an order without shards have no such number

Order = npt.NDArray[np.signedinteger[Any]]  # indices of samples, int32 or int64
_Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class BlockShuffle:
    """How to shuffle a data set in shards, so that a read brings a block and not one sample.

    An epoch takes the shards in random order and cuts each into blocks of neighbours, at other
    places in each epoch. The blocks of about ``window`` samples in this order are then shuffled. So
    the samples of a block are in as few steps as hold it, two that follow one another at most where
    ``block`` is no longer than a global batch; and all samples of a
    shard are within one window of the epoch. Each sample comes once.

    Small blocks and large windows mix better, large blocks are read faster. ``block=1`` with a
    window of the whole data set is the usual shuffle.

    Args:
        block: most samples of a block, >= 1.
        window: samples, >= 1. A shard belongs to the window in which it begins, so that a window
            has less than ``window`` samples and the longest shard together.

    Raises:
        ArgumentTypeError: one of them is no whole number.
        DataError: one of them is below 1.
    """

    block: int = 16  # a choice: 16 images of 100 kB are a read of 1.6 MB
    window: int = 1 << 16  # a choice: many steps, and a few dozen shards of the usual length

    def __post_init__(self) -> None:
        for name, value in (("block", self.block), ("window", self.window)):
            if isinstance(value, bool) or not isinstance(value, int):
                raise ArgumentTypeError(f"BlockShuffle: {name}={value!r} must be a whole number")
            if value < 1:
                raise DataError(f"BlockShuffle: {name}={value} must be at least 1 sample")


@dataclass(frozen=True)
class Arrangement:
    """The shards of one epoch, to put the samples of a step in their order."""

    ends: _Ints  # the sample behind each shard, [num_shards]
    places: _Ints  # of each shard in the epoch, [num_shards]

    def __call__(self, batch: Order) -> Order:
        """Return the samples of a global batch, those of a shard together and in its order.

        Ranks get runs of what is returned, so that of ``k`` shards and ``n`` ranks no more than
        ``k + n - 1`` pairs of a rank and a shard meet. A shard keeps its place among the others
        through all steps of its window: the same ranks go on with it.
        """
        shard = np.searchsorted(self.ends, batch, side="right")
        arranged: Order = batch[np.lexsort((batch, self.places[shard]))]
        return arranged


@dataclass(frozen=True, eq=False)
class ShardOrder:
    """``BlockShuffle`` for the shards of one data set."""

    sizes: _Ints  # samples of each shard, [num_shards]
    blocks: BlockShuffle

    def __str__(self) -> str:
        digest = zlib.crc32(self.sizes.tobytes())
        return f"block={self.blocks.block} window={self.blocks.window} shards={digest:08x}"

    def order(self, *, seed: int, epoch: int) -> Order:
        """Return the samples in the order of an epoch, int32 where that holds the indices.

        Takes 4 bytes a sample (8 beyond int32) and for a moment about 40 a block.
        """
        words, shards = self._shuffled_shards(seed, epoch)
        sizes, ends = self.sizes[shards], np.cumsum(self.sizes)[shards]
        block = min(self.blocks.block, max(int(sizes.max(initial=0)), 1))  # longer is no other
        # The first block of a shard is shorter, by chance: neighbours part ways in other epochs.
        # A shard of 10 with blocks of 4 and a first one of 3 is cut into 3 4 3.
        first = 1 + (words.random_raw(len(shards)) % np.uint64(block)).astype(np.int64)
        first = np.where(sizes <= block, sizes, first)
        counts = (sizes > 0) + -(-(sizes - first) // block)  # blocks of each shard
        before = np.cumsum(counts) - counts

        num_blocks, num_samples = int(counts.sum()), int(sizes.sum())
        keys = _sorted_keys(words, num_blocks, self._window_starts(sizes, before))
        order = np.empty(
            num_samples, np.int32 if num_samples <= np.iinfo(np.int32).max else np.int64
        )
        done, at_once = 0, max(_AT_ONCE // block, 1)
        for at in range(0, num_blocks, at_once):
            chosen = keys[at : at + at_once]  # numbers of blocks, [num_chosen]
            shard = np.searchsorted(before, chosen, side="right") - 1
            # An empty shard begins where the next one does; the last that begins there has blocks.
            later = first[shard] + (chosen - before[shard]) * block  # where the next block begins
            begin = ends[shard] - sizes[shard] + np.maximum(later - block, 0)
            length = ends[shard] - sizes[shard] + np.minimum(later, sizes[shard]) - begin
            # Blocks that begin at 7 and 2 with 2 and 3 samples: 7 8 2 3 4 is 0 1 2 3 4 and so much.
            total = int(length.sum())
            run = np.repeat(begin - (np.cumsum(length) - length), length)
            order[done : done + total] = run + np.arange(total)
            done += total
        return order

    def arrangement(self, *, seed: int, epoch: int) -> Arrangement:
        """Return what puts the samples of a step in the order of the epoch's shards."""
        shards = self._shuffled_shards(seed, epoch)[1]
        places = np.empty_like(shards)
        places[shards] = np.arange(len(shards))
        return Arrangement(np.cumsum(self.sizes), places)

    def _shuffled_shards(self, seed: int, epoch: int) -> tuple[np.random.PCG64, _Ints]:
        """Return the random words of an epoch, of which the first order the shards, and that."""
        # Raw words, which NumPy fixes for good: see ``epoch_order``.
        words = np.random.PCG64(np.random.SeedSequence([seed, epoch, _STREAM]))
        return words, np.argsort(words.random_raw(len(self.sizes)), kind="stable")

    def _window_starts(self, sizes: _Ints, before: _Ints) -> _Ints:
        """Return the number of the first block of each window; shards are in their new order."""
        length = min(self.blocks.window, max(int(sizes.sum()), 1))  # longer is no other
        windows = (np.cumsum(sizes) - sizes) // length  # of each shard
        starts: _Ints = before[np.flatnonzero(np.diff(windows, prepend=-1))]
        return starts


def _sorted_keys(words: np.random.PCG64, num_blocks: int, starts: _Ints) -> _Ints:
    """Return the numbers of the blocks, shuffled inside each window, [num_blocks].

    The keys are those of ``epoch_order``: random words whose low bits give way to the number.
    """
    low = np.uint64((1 << max(num_blocks - 1, 0).bit_length()) - 1)
    keys = words.random_raw(num_blocks)
    keys &= ~low
    for at in range(0, num_blocks, _AT_ONCE):
        end = min(at + _AT_ONCE, num_blocks)
        keys[at:end] |= np.arange(at, end, dtype=np.uint64)
    for begin, end in itertools.pairwise([*starts.tolist(), num_blocks]):
        keys[begin:end].sort()
    keys &= low
    return keys.view(np.int64)


def check_shuffle(shuffle: bool | BlockShuffle, dataset: object) -> bool | ShardOrder:
    """Return how to shuffle a data set: its shards in blocks, where it says that it has some.

    Such a data set has ``shard_sizes``, the samples of each shard in the order of their indices.
    ``shuffle=True`` takes the default ``BlockShuffle`` there.
    """
    sizes = getattr(dataset, "shard_sizes", None)
    if sizes is None:
        if isinstance(shuffle, BlockShuffle):
            raise DataError(
                f"shuffle={shuffle} is for data in shards, and the data set, a "
                f"{type(dataset).__name__}, has no shard_sizes; give loft.TarShards or "
                "loft.ParquetShards, or your data set an attribute shard_sizes with the samples "
                "of each shard"
            )
        return shuffle
    if not shuffle:
        return False
    given = np.asarray(sizes)
    length = len(dataset)  # type: ignore[arg-type]  # check_length has asked it
    is_whole = given.ndim == 1 and (given.dtype.kind in "iu" or given.size == 0)
    if not is_whole or (given < 0).any() or int(given.sum()) != length:
        raise DataError(
            f"shard_sizes of the data set, a {type(dataset).__name__}, must be the whole number of "
            f"samples of each shard, {length} in all, but is {sizes!r}"
        )
    blocks = shuffle if isinstance(shuffle, BlockShuffle) else BlockShuffle()
    return ShardOrder(given.astype(np.int64), blocks)
