"""``DataLoader``: torch's loader, with the batch size of each step and rank chosen by the plan.

What travels between the loader and its processes: requests out, timed batches back. At the end,
how these processes are started, so that they really start.
"""

from __future__ import annotations

import functools
import itertools
import logging
import multiprocessing
import os
import signal
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from multiprocessing import context, popen_fork, process
from typing import Any

import torch
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import Dataset, default_collate, get_worker_info

from loft_hvd.balance.plan import MIN_BATCH, Plan, Sizes, StepSizes
from loft_hvd.data.blocks import BlockShuffle, check_shuffle
from loft_hvd.data.contents import content_of
from loft_hvd.data.costs import Costs, check_costs
from loft_hvd.data.draws import Draw, EpochSettings, Weights, check_weights
from loft_hvd.data.instead import LOADER, refuse_others
from loft_hvd.data.placement import Placement, check_placement
from loft_hvd.data.sampler import (
    GlobalBatches,
    PlannedLoader,
    PlanSource,
    check_balancer,
    check_length,
    keeper_of,
    tell_sources,
)
from loft_hvd.errors import DataError
from loft_hvd.transport.waits import seconds, totals

__all__ = ["DataLoader", "FetchingDataset", "Request", "TimedCollate", "WorkerInit", "sure_fork"]

_logger = logging.getLogger(__name__)
START_LIMIT_S = 10.0  # a child takes milliseconds, on a crowded machine a second
_MOST_LENGTHS = 1000  # a choice: a look at all of them in each batch takes 0.1 ms
_MANY_LENGTHS = 4  # different ones of batches, all too short; a choice
_TRIES = 4  # 1 fork in 600 is stuck, measured by a script that forks beside Horovod

Clock = Callable[[], float]


@dataclass(frozen=True)
class Request:
    """One batch to fetch."""

    step: int  # step of the batch, to match it with its draw when it arrives
    indices: list[int]  # samples of this rank
    micro_sizes: Sizes | None = None  # samples of its micro-batches; None where nothing is split


@dataclass(frozen=True)
class Fetched:
    """Samples on their way from the data set to the collate function."""

    step: int
    started_s: float
    samples: list[Any]  # of the batch, or of each micro-batch
    is_split: bool
    cached: int  # samples that the data set's own cache had


class FetchingDataset(Dataset[Any]):
    """The user's data set, asked for whole batches and on the clock."""

    def __init__(self, dataset: Dataset[Any], clock: Clock = time.monotonic) -> None:
        self.dataset = dataset
        self.clock = clock

    def __getitems__(self, request: Request) -> Fetched:
        """Fetch a batch the way torch's own loader would."""
        started_s = self.clock()
        hits = self._hits()
        get_items = getattr(self.dataset, "__getitems__", None)
        indices, samples = iter(request.indices), []
        for size in request.micro_sizes or (len(request.indices),):
            part = list(itertools.islice(indices, size))
            samples.append(get_items(part) if get_items else [self.dataset[at] for at in part])
        is_split = request.micro_sizes is not None
        return Fetched(request.step, started_s, samples, is_split, self._hits() - hits)

    def _hits(self) -> int:
        """Return the samples that the data set's own cache had so far."""
        hits: int = getattr(self.dataset, "cache_hits", 0)
        return hits


class TimedCollate:
    """The user's collate function; adds step, seconds since the fetch began, and cache hits."""

    def __init__(self, collate: Callable[[Any], Any], clock: Clock = time.monotonic) -> None:
        self.collate = collate
        self.clock = clock

    def __call__(self, fetched: Fetched) -> tuple[Any, int, float, int]:
        # Micro-batches are collated one by one: nobody has to know how to cut a batch.
        batches = [self.collate(samples) for samples in fetched.samples if samples]
        batch = batches if fetched.is_split else next(iter(batches), None)
        # A plain tuple, so that torch pins the batch inside it as it would pin the batch alone.
        return batch, fetched.step, self.clock() - fetched.started_s, fetched.cached


class WorkerInit:
    """Shows a loader process the user's own data set, then runs the user's function there."""

    def __init__(self, user_init: Callable[[int], None] | None) -> None:
        self.user_init = user_init

    def __call__(self, worker_id: int) -> None:
        info = get_worker_info()
        if info is not None and isinstance(info.dataset, FetchingDataset):
            # torch freezes this record; users read and change ``get_worker_info().dataset``.
            object.__setattr__(info, "dataset", info.dataset.dataset)
        if self.user_init is not None:
            self.user_init(worker_id)


class EvaluationView:
    """Evaluation by one plan from its first batch to its last; nothing is ever skipped.

    The plan is the newest when the iteration begins: between the same two training steps it is the
    same on every rank, within the caps, and no slow rank has an equal share.
    """

    min_ranks = 1

    def __init__(self, balancer: PlanSource) -> None:
        check_balancer(balancer)
        self._balancer = balancer  # asked each time: in an elastic job the world changes
        self._sizes = balancer.plan.sizes

    def begin(self) -> None:
        """Take the plan of an iteration, whatever training does meanwhile."""
        self._sizes = self._balancer.plan.sizes

    @property
    def world_size(self) -> int:
        return self._balancer.world_size

    @property
    def rank(self) -> int:
        return self._balancer.rank

    @property
    def global_batch_size(self) -> int:
        return sum(self._sizes)

    def dummy_size(self, step: int) -> int:
        return self._balancer.dummy_size(step) or MIN_BATCH  # whoever evaluates looks at batches

    def plan_at(self, step: int) -> Plan:
        return Plan(0, 0, self._sizes)

    @property
    def splits(self) -> bool:
        return self._balancer.splits

    def count_micro(self, sizes: Sizes) -> Sizes:
        return self._balancer.count_micro(sizes)

    @property
    def pass_caps(self) -> Sequence[int | None]:
        return self._balancer.pass_caps

    def most_micro(self, sizes: Sizes) -> Sizes:
        return self._balancer.most_micro(sizes)


class DataLoader(PlannedLoader):
    """Loads each rank's share of every global batch; batches are those of torch's own loader.

    Which samples form a step depends on ``seed``, the epoch and ``global_batch_size`` alone; the
    balancer's plan and the placement decide which rank computes them. Every sample is loaded once
    an epoch and all ranks make ``len(loader)`` steps. A rank without samples in a step gets a
    dummy batch, and ``is_padding`` is true.

    With ``Balancer(min_batch=0)`` such a rank mostly gets None instead, or an empty list of
    micro-batches: then it computes nothing, and only takes the optimizer's step.

    With ``Balancer(micro_batches=True)`` each item is the list of the step's micro-batches, often
    one: run forward and backward on each, then take one optimizer step.

    A batch is drawn, up to ``num_workers * prefetch_factor`` steps ahead, with the plan in force
    at its own step, and tells the balancer its sizes when it is yielded. Plans start behind what
    loaders may have drawn: make all loaders of a run before it trains.

    Args:
        dataset: map-style data set: anything with ``__len__`` and ``__getitem__``. One that keeps
            samples from elsewhere in a cache counts those it served from there in ``cache_hits``;
            they are told apart in the times, and planned with as local ones.
        balancer: gives the sizes, and takes times and sizes of the batches yielded.
        placement: who holds which sample; None when every rank holds all.
        shuffle: permute the samples each epoch; None shuffles for training only. Data in shards
            (``loft.TarShards``, ``loft.ParquetShards``, whatever has ``shard_sizes``) are shuffled
            in blocks, by a ``loft.BlockShuffle``.
        seed: of the permutations, equal on all ranks.
        drop_last: leave out the samples that do not fill a global batch.
        relaxed: spread each holder's samples evenly over the epoch (more local reads, another
            order of samples).
        weights: draw samples with replacement, each with a probability in proportion to its weight,
            [number of samples of the data set], finite and >= 0; as torch's
            ``WeightedRandomSampler`` does. In place of each sample once an epoch.
        num_samples: samples that an epoch draws by ``weights``; None for as many as the data set
            has.
        cost: what each sample costs, such as its tokens: a whole number >= 1 for each sample of the
            data set. A step's samples then go to ranks so that what they cost, padded to the
            longest of a batch or micro-batch, is shared as the plan's sizes say; how many samples a
            rank has follows from it, at most ``max_batch`` in a backward pass.
        train: False for evaluation: every sample once, by the plan there is when an iteration
            begins (begin it between the same two steps on every rank); no sizes or times reach the
            balancer.
        num_workers: loader processes.
        collate_fn: see ``torch.utils.data.DataLoader``, as for all that follow.
        pin_memory: copy batches into pinned memory.
        prefetch_factor: batches that each loader process holds ready.
        persistent_workers: keep the loader processes between epochs.
        worker_init_fn: called in each loader process with its number.
        generator: seeds the loader processes; by default by rank, and by torch's own generator, so
            that ranks that are seeded alike do not augment their samples alike.
        timeout: seconds to wait for a batch from a loader process, 0 for no limit.
        multiprocessing_context: start method of the loader processes; forked ones are started again
            when they do not come up.

    Raises:
        ArgumentTypeError: torch's ``batch_size``, ``sampler`` or ``batch_sampler``, which the
            balancer stands for, an argument nobody knows, or one behind ``balancer`` that has no
            name.
    """

    def __init__(  # noqa: PLR0913 - torch's own arguments, by name
        self,
        dataset: Dataset[Any],
        balancer: PlanSource,
        *positional: Any,
        placement: Placement | None = None,
        shuffle: bool | BlockShuffle | None = None,
        seed: int = 0,
        drop_last: bool = False,
        relaxed: bool = False,
        weights: Weights | None = None,
        num_samples: int | None = None,
        cost: Costs | None = None,
        train: bool = True,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        pin_memory: bool = False,
        prefetch_factor: int | None = None,
        persistent_workers: bool = False,
        worker_init_fn: Callable[[int], None] | None = None,
        generator: torch.Generator | None = None,
        timeout: float = 0,
        multiprocessing_context: Any = None,
        **others: Any,
    ) -> None:
        super().__init__(balancer, evaluates=None if train else EvaluationView(balancer))
        refuse_others("DataLoader", positional, others, LOADER)
        given, placement = placement, check_placement(placement, check_length(dataset))
        weighted = check_weights(weights, num_samples, len(placement), shuffle=shuffle)
        if weighted is not None and not train:
            raise DataError(
                "train=False takes every sample once, and weights= draws some of them several "
                "times; leave weights= away, and weigh what is counted"
            )
        order = check_shuffle(train if shuffle is None else shuffle, dataset)
        settings = EpochSettings(placement, order, seed, drop_last, relaxed, weighted)
        self.dataset = dataset
        self.num_workers = num_workers
        self.drop_last = drop_last
        self.pin_memory = pin_memory
        self.collate_fn: Callable[[list[Any]], Any] = collate_fn or default_collate
        keeper = keeper_of(dataset) if train else None
        has_places = given is not None or keeper is not None
        self._batches = GlobalBatches(
            settings,
            self._view,
            keeper=keeper,
            given=given,
            content=content_of(dataset),
            costs=check_costs(cost, len(placement), has_places=has_places),
        )
        self._position = 0  # samples of the epoch, of all ranks, in the batches yielded
        # Of batches and their tensors, as far as seen; None once nothing more is to be told.
        self._lengths: set[tuple[int, int]] | None = set()
        self._seeds = torch.Generator()  # of loader processes, where the script gives none
        self._feed = _Feed(self._batches)
        feed: Any = self._feed  # torch expects lists of samples; requests carry more
        collate: Any = TimedCollate(self.collate_fn)
        self._loader = TorchDataLoader(
            FetchingDataset(dataset),
            batch_sampler=feed,
            collate_fn=collate,
            num_workers=num_workers,
            pin_memory=pin_memory,
            prefetch_factor=prefetch_factor,
            persistent_workers=persistent_workers,
            worker_init_fn=WorkerInit(worker_init_fn),
            generator=generator or self._seeds,
            timeout=timeout,
            multiprocessing_context=sure_fork(multiprocessing_context, num_workers=num_workers),
        )
        if train:
            # What torch has asked for beyond the batch that it yields: without processes nothing.
            requested = num_workers * (self._loader.prefetch_factor or 0)
            balancer.expect_depth(requested + 1)

    def __len__(self) -> int:
        return len(self._batches)

    @property
    def num_left(self) -> int:
        """Steps of the epoch that are left behind the batch yielded last."""
        return self._batches.count_left(self._position)

    # What scripts read of torch's own loader, as far as it means something here.

    @property
    def batch_size(self) -> int:
        """Samples of this rank in a batch by the newest plan; it may change with each plan."""
        # Not ``plan_at``, which is asked for batches that are drawn.
        return (self._balancer.plan if self._trains else self._view.plan_at(0)).sizes[
            self._view.rank
        ]

    @property
    def sampler(self) -> Sized:
        """What has a length, as a ``DistributedSampler``: an equal share of an epoch's samples."""
        # Rounded up: scripts look at len(sampler) * world_size for samples that are left over.
        return range(-(-self._batches.settings.num_samples // self._view.world_size))

    @property
    def batch_sampler(self) -> Sized:
        """What has a length: the steps of an epoch."""
        return range(len(self))

    def __iter__(self) -> Iterator[Any]:
        iteration = self._begin_iteration()
        # As torch seeds loader processes: one draw an iteration; and by rank.
        drawn = int(torch.empty((), dtype=torch.int64).random_())
        self._seeds.manual_seed((drawn + self._view.rank) % 2**63)
        if isinstance(self._view, EvaluationView):
            self._balancer.leave_step_out()
            self._view.begin()
        self._position = self._feed.start(first_step=self._next_step)
        self._stands.append((self._next_step, self._position))
        if self._trains:
            tell_sources(self._balancer, self._batches)
        return self._batches_of(iter(self._loader), iteration)

    def _batches_of(self, fetched: Iterator[Any], iteration: int) -> Iterator[Any]:
        while True:
            began, waits = time.monotonic(), totals()
            try:
                batch, step, fetch_s, cached = next(fetched)
            except StopIteration:
                break
            # A data set that meets other ranks waits for them there.
            stall_s = time.monotonic() - began - seconds([threading.get_ident()], waits)
            self._check_newest(iteration)
            draw = self._feed.drawn.popleft()
            assert draw.step_sizes.step == step  # torch yields in the order of the requests
            self._position = draw.position
            self._note(draw.step_sizes, draw.position)
            if self._trains:
                # Side by side: eight loader processes that take 16 s each bring a batch every 2 s.
                self._begin(draw, fetch_s / max(self.num_workers, 1), stall_s, cached)
                if self.collate_fn is not default_collate:
                    self._look_for_dropped(batch, draw.step_sizes)
            yield batch
        if iteration == self._num_iterations:
            self._position = self._batches.settings.num_samples
            self._resumed_step = self._next_step  # also where nobody trains what is yielded
            if self._trains:
                self._balancer.end_epoch()

    def _look_for_dropped(self, batch: Any, sizes: StepSizes) -> None:
        """Warn, once, of a batch whose tensors hold fewer samples than were planned for it."""
        planned = sizes.sizes[self._view.rank] if not self._view.splits else 0
        lengths = {len(each) for each in _tensors(batch)}
        if not planned or len(lengths) != 1 or self._lengths is None:
            return
        (length,) = lengths
        # A tensor's first dimension is its samples if it was all of them once, or is any number of
        # them at most; else it is another one.
        if length > planned or len(self._lengths) > _MOST_LENGTHS:
            self._lengths = None
            return
        self._lengths.add((length, planned))
        is_length = any(each == most for each, most in self._lengths) or (
            len(self._lengths) > _MANY_LENGTHS and all(each < most for each, most in self._lengths)
        )
        if is_length and length < planned and not self._balancer.counts_samples:
            self._lengths = None
            warnings.warn(
                f"rank {self._view.rank}: step {sizes.step} was planned with {planned} samples, "
                f"and collate_fn returned {length}: gradients are weighted by the plan. "
                "Drop samples from the data set before, or say what each loss is the mean of, on "
                "every rank: balancer.weigh(loss, num_samples).backward()",
                stacklevel=3,
            )

    def _begin(self, draw: Draw, fetch_s: float, stall_s: float, cached: int) -> None:
        rank = self._view.rank
        # Of samples that went by cost all are local; times are fitted over what is planned.
        shares = draw.step_sizes.shares
        local = shares[rank] if shares else int(draw.assignment.local[rank])
        remote = 0 if shares else draw.step_sizes.sizes[rank] - local
        cached = max(0, min(cached, remote))  # what a user's data set counts is not ours to trust
        self._balancer.begin_batch(
            draw.step_sizes,
            fetch_s=fetch_s,
            stall_s=stall_s,
            local=local + cached,
            remote=remote - cached,
            cached=cached,
        )

    def set_epoch(self, epoch: int) -> None:
        """Choose the permutation of the next iteration; call it on every rank."""
        if epoch != self._batches.epoch:
            self._position = 0
            self._stands.clear()
        self._batches.set_epoch(epoch)
        self._epoch_set()

    def state_dict(self) -> dict[str, Any]:
        """Describe the run after the batch yielded last: save it once that batch is trained.

        Batches that the loop has fetched ahead come again where a run goes on.
        """
        step, position = self._stand(self._position)
        return self._batches.state_dict(position=position, step=step)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next iteration go on where ``state`` was taken, with any number of ranks."""
        loaded = self._batches.load_state_dict(state)
        self._next_step = self._resumed_step = loaded.step
        self._position = loaded.position
        self._forget_pending()


def _tensors(batch: Any, depth: int = 3) -> Iterator[torch.Tensor]:
    """Yield the tensors in a batch that have a first dimension."""
    if isinstance(batch, torch.Tensor):
        if batch.dim():
            yield batch
    elif depth and isinstance(batch, Mapping):
        for each in batch.values():
            yield from _tensors(each, depth - 1)
    elif depth and isinstance(batch, list | tuple):
        for each in batch:
            yield from _tensors(each, depth - 1)


class _Feed:
    """The batch sampler inside torch's loader: the requests of the loader's current iteration."""

    def __init__(self, batches: GlobalBatches) -> None:
        self._batches = batches
        self._draws: Iterator[Draw] = iter(())
        self.drawn: deque[Draw] = deque()  # not yet yielded; a new queue for each iteration

    def start(self, *, first_step: int) -> int:
        """Begin an iteration at ``first_step``; returns its position in the epoch."""
        position, self._draws = self._batches.start(first_step=first_step)
        self.drawn = deque()
        return position

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[Request]:
        return self._requests(self._draws, self.drawn)

    def _requests(self, draws: Iterator[Draw], drawn: deque[Draw]) -> Iterator[Request]:
        view, homes = self._batches.view, self._batches.homes
        for draw in draws:
            drawn.append(draw)
            dummy_size = view.dummy_size(draw.step_sizes.step)
            indices = draw.indices(view.rank, dummy_size=dummy_size, homes=homes)
            micro_sizes = None
            if view.splits:  # a dummy batch has samples too, in one micro-batch
                sizes = draw.step_sizes.micro_sizes(view.rank)
                micro_sizes = sizes if sum(sizes) else (len(indices),)
            yield Request(draw.step_sizes.step, indices, micro_sizes)


# Before Python 3.12 a forked child waits for ever when, at the moment of the fork, a native thread
# was making or dropping its Python thread state: the child needs a lock that nobody will release.
# Horovod's background thread does so whenever it lets go of a tensor. Here the child says that it
# runs, and one that does not is ended and forked again.


class _Popen(popen_fork.Popen):
    """A forked child that has told its parent that it runs."""

    def _launch(self, process_obj: Any) -> None:
        for tries in range(1, _TRIES + 1):
            said, says = multiprocessing.Pipe(duplex=False)
            process_obj._bootstrap = functools.partial(_tell_and_run, says, process_obj._bootstrap)
            try:
                super()._launch(process_obj)  # type: ignore[misc]  # not in typeshed
            finally:
                del process_obj._bootstrap
                says.close()
            is_running = said.poll(START_LIMIT_S)  # true also when the child has already ended
            said.close()
            if is_running:
                return
            _logger.warning("loader process %d did not start (try %d); again", self.pid, tries)
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
            finalizer: Any = self.finalizer
            finalizer()  # closes this child's pipes
        raise DataError(
            f"a loader process did not start within {START_LIMIT_S:g} s, {_TRIES} times; use "
            'num_workers=0, or multiprocessing_context="forkserver" with a script that keeps its '
            'work under if __name__ == "__main__"'
        )


def _tell_and_run(says: Any, run: Callable[..., int], **arguments: Any) -> int:
    says.send_bytes(b"runs")
    says.close()
    return run(**arguments)


class _ForkProcess(process.BaseProcess):
    _start_method = "fork"

    @staticmethod
    def _Popen(process_obj: Any) -> _Popen:  # noqa: N802 - multiprocessing's own name
        return _Popen(process_obj)


class _ForkContext(context.ForkContext):
    Process = _ForkProcess  # type: ignore[assignment]


def sure_fork(wanted: Any, *, num_workers: int) -> Any:
    """Return the start method for loader processes: ``wanted``, made sure where it forks.

    ``wanted`` is a name, a context, or None for the platform's default.
    """
    if num_workers == 0 or not (wanted is None or wanted == "fork"):
        return wanted
    default = multiprocessing.get_start_method(allow_none=True)  # asking must not settle it
    method = wanted or default or multiprocessing.get_all_start_methods()[0]
    return _ForkContext() if method == "fork" else wanted
