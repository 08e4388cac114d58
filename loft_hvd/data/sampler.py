"""The exactly-once sampler: global batches fixed by (seed, epoch), owners by the plan in force."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sized
from numbers import Integral
from typing import Any

import numpy as np
import numpy.typing as npt
from torch.utils.data import IterableDataset, Sampler

from loft_hvd.balance.plan import StepSizes
from loft_hvd.data.draws import Draw, EpochSettings, PlanView, count_steps, draw_epoch
from loft_hvd.data.homes import Homes
from loft_hvd.data.placement import Placement, check_placement
from loft_hvd.data.plan_source import PlanSource, check_balancer
from loft_hvd.errors import ArgumentTypeError, DataError

__all__ = ["BatchSampler", "GlobalBatches", "check_length"]


class GlobalBatches:
    """Draws the steps of epochs, one iteration at a time, and says where a run stands.

    Args:
        settings: what decides which samples form a step.
        view: the sizes in force.
    """

    def __init__(self, settings: EpochSettings, view: PlanView) -> None:
        self.settings = settings
        self.view = view
        self.epoch = 0
        self.homes: Homes = settings.placement.at(view.world_size)
        self.deepest_drawn_step = -1
        self._resume_position: int | None = None
        self._done: npt.NDArray[np.bool_] | None = None  # of self.epoch, in an older order
        self._has_warned = False

    def __len__(self) -> int:
        return count_steps(self.settings.num_samples, self.view, drop_last=self.settings.drop_last)

    def set_epoch(self, epoch: int) -> None:
        """Choose the permutation; a position loaded for another epoch is dropped."""
        if not isinstance(epoch, Integral):
            raise ArgumentTypeError(f"set_epoch: epoch={epoch!r}; give a whole number")
        if epoch < 0:
            raise DataError(f"set_epoch: epoch={epoch} must be >= 0")
        if epoch != self.epoch:
            self._resume_position, self._done = None, None
        self.epoch = epoch

    def start(self, *, first_step: int) -> tuple[int, Iterator[Draw]]:
        """Begin an iteration; returns its position in the epoch and its steps, drawn lazily."""
        position = self._resume_position or 0
        if self._resume_position is None:
            self._done = None
        self._resume_position = None
        if self.homes.world_size != self.view.world_size:
            self.homes = self.settings.placement.at(self.view.world_size)
        self.deepest_drawn_step = first_step - 1
        return position, self._draw(position, first_step)

    def _draw(self, position: int, first_step: int) -> Iterator[Draw]:
        drop_last = self.settings.drop_last
        order = self.settings.order(self.epoch, done=self._done)
        self._warn_of_skipped(len(order) - position)
        for draw in draw_epoch(
            order,
            self.homes,
            self.view,
            first_step=first_step,
            position=position,
            drop_last=drop_last,
        ):
            self.deepest_drawn_step = draw.step_sizes.step
            yield draw

    def _warn_of_skipped(self, num_left: int) -> None:
        if self._has_warned or self.view.rank != 0:
            return
        tail = num_left % self.view.global_batch_size
        if num_left == self.settings.num_samples and len(self) == 0:
            self._has_warned = True
            warnings.warn(
                f"an epoch has no step: {num_left} samples, global_batch_size="
                f"{self.view.global_batch_size}, drop_last={self.settings.drop_last}, and every "
                f"step needs samples for {self.view.min_ranks} ranks; nothing is trained",
                stacklevel=2,
            )
        elif 0 < tail < self.view.min_ranks and not self.settings.drop_last:
            self._has_warned = True
            warnings.warn(
                f"the last batch of the epoch has {tail} samples, fewer than the "
                f"{self.view.min_ranks} ranks that the rule needs: it is skipped on all ranks, in "
                "every epoch; another global_batch_size, a smaller f, or drop_last=True avoids it",
                stacklevel=2,
            )

    def state_dict(self, *, position: int, step: int) -> dict[str, Any]:
        """Describe a run that has consumed ``position`` samples of the epoch in all ranks."""
        settings = self.settings
        done = None
        if settings.relaxed or self._done is not None:
            mask = np.zeros(settings.num_samples, bool)
            mask[settings.order(self.epoch, done=self._done)[:position]] = True
            done = np.packbits(mask).tobytes().hex()
        return {
            "epoch": self.epoch,
            "position": position,
            "step": step,
            "done": done,
            "num_samples": settings.num_samples,
            "seed": settings.seed,
            "shuffle": settings.shuffle,
            "relaxed": settings.relaxed,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> int:
        """Go on where ``state`` was taken; returns the number of the next step.

        Raises:
            DataError: the state is of another data set, seed or order.
        """
        for name in ("num_samples", "seed", "shuffle", "relaxed"):
            here = getattr(self.settings, name)
            if state.get(name) != here:
                raise DataError(
                    f"load_state_dict: {name} is {here!r} here but {state.get(name)!r} in the "
                    "state; the rest of the epoch would not be what was left"
                )
        self.epoch, self._resume_position = int(state["epoch"]), int(state["position"])
        self._done = None
        if state["done"] is not None:
            packed = np.frombuffer(bytes.fromhex(state["done"]), np.uint8)
            self._done = np.unpackbits(packed, count=self.settings.num_samples).astype(bool)
        return int(state["step"])


class BatchSampler(Sampler[list[int]]):
    """Index lists for a user's own ``torch.utils.data.DataLoader(batch_sampler=...)``.

    Torch draws index lists ahead of the batches it yields, and yields them in that order. So each
    list's sizes join the balancer's FIFO when the list is drawn, and every backward pass takes
    those of its own batch. What an early ``break`` leaves in the FIFO is cleared by ``set_epoch``
    or by the next iteration, whichever comes first. An iteration begins at the step after the
    newest one trained, which all ranks know, however far torch drew ahead on each.

    Args:
        dataset: the data set, or its number of samples.
        balancer: gives the sizes and takes what was drawn.
        placement: who holds which sample; None when every rank holds all.
        shuffle: permute the samples each epoch.
        seed: of the permutations, equal on all ranks.
        drop_last: leave out the samples that do not fill a global batch.
        relaxed: spread each holder's samples evenly over the epoch (more local reads, another
            order of samples).
    """

    def __init__(
        self,
        dataset: Sized | int,
        balancer: PlanSource,
        *,
        placement: Placement | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        relaxed: bool = False,
    ) -> None:
        check_balancer(balancer)
        placement = check_placement(placement, check_length(dataset))
        settings = EpochSettings(placement, shuffle, seed, drop_last, relaxed)
        self._balancer = balancer
        self._batches = GlobalBatches(settings, balancer)
        self._resume_step: int | None = None
        self._start = (0, 0)  # position and step at which the iteration began
        self._drawn: list[tuple[StepSizes, int]] = []  # sizes, and position once trained

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[list[int]]:
        # A generator, so that nothing starts before the first list: torch makes two iterators of
        # a batch sampler when it has loader processes, and drops the first.
        self._balancer.clear_pending()
        resumed, self._resume_step = self._resume_step, None
        first_step = self._balancer.next_step if resumed is None else resumed
        position, draws = self._batches.start(first_step=first_step)
        self._start = position, first_step
        drawn: list[tuple[StepSizes, int]] = []
        self._drawn = drawn
        view, homes = self._balancer, self._batches.homes
        for draw in draws:
            drawn.append((draw.step_sizes, draw.position))
            self._balancer.push_sizes(draw.step_sizes)
            yield draw.indices(view.rank, min_batch=view.min_batch, homes=homes)

    def set_epoch(self, epoch: int) -> None:
        """Choose the permutation of the next iteration; call it on every rank."""
        self._batches.set_epoch(epoch)
        self._balancer.clear_pending()

    @property
    def deepest_drawn_step(self) -> int:
        """The last step, over epochs, whose samples are drawn on this rank."""
        return self._batches.deepest_drawn_step

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
        self._resume_step = self._batches.load_state_dict(state)
        self._balancer.clear_pending()


def check_length(dataset: object) -> int:
    """Return the number of samples of a map-style data set.

    Raises:
        ArgumentTypeError: the data set has no length, or is an ``IterableDataset``.
    """
    if isinstance(dataset, int) and not isinstance(dataset, bool) and dataset >= 0:
        return dataset
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
        raise ArgumentTypeError(
            f"the data set is of type {type(dataset).__name__}: exactly-once batches of unequal "
            "sizes need a map-style data set, with __len__ and __getitem__; wrap or index the "
            "stream"
        )
    return len(dataset)
