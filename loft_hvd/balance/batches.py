"""Which batch a backward pass belongs to, and how far loaders have drawn ahead of training."""

from __future__ import annotations

import zlib
from array import array
from collections import deque
from collections.abc import Callable, Sequence

import torch

from loft_hvd.balance.plan import Plan, Sizes, StepSizes
from loft_hvd.errors import PlanError, UsageError

__all__ = ["BatchQueue", "plan_in_force"]

_MANY_BATCHES = 10  # a script may look at a few batches before it trains


def plan_in_force(plans: Sequence[Plan], step: float) -> Plan:
    """Return the plan of a step, counted over epochs; the newest has the last word."""
    return next(plan for plan in reversed(plans) if plan.first_step <= step)


class BatchQueue:
    """The sizes of batches between the loader that draws them and the backward pass they are for.

    ``loft.DataLoader`` says when it yields a batch (``begin``), which then stands for every
    backward pass until the next. A ``loft.BatchSampler`` runs ahead of its loader and queues sizes
    (``push``); each backward pass takes one.

    Attributes:
        trained: sizes of the newest batch that a backward pass has taken.
        in_work: sizes of the batch that is being computed; None between two steps.
        trail: 32 bits that depend on every batch taken: its plan, step, sizes and samples. Equal
            on all ranks between the same two steps.
    """

    def __init__(self) -> None:
        self._pending: deque[StepSizes] = deque()  # of a BatchSampler, in the order of training
        self._current: StepSizes | None = None  # of a DataLoader
        self._last_trained: int | None = None  # step of the newest backward pass
        self._first_step = 0  # where the run goes on
        self._lookahead = 0  # most steps that were ever drawn beyond the newest one trained on
        self._depth = 0  # most that a loader has said it will draw
        self.trained: StepSizes | None = None
        self.in_work: StepSizes | None = None
        # How many micro-batches sizes take; the limits of the ranks there are say so.
        self.count_micro: Callable[[Sizes], Sizes] = lambda _: ()
        self.trail = 0
        self._taken: list[StepSizes] = []  # since the last step's end
        self._largest: list[int] = []  # samples that each rank has computed in a backward pass
        self._done: tuple[Sizes, Sizes] = (), ()  # the newest sizes that are in it
        self._num_begun = 0  # before any backward pass took one
        self._num_untaken = 0  # begun in an iteration before its first backward pass
        self._has_taken = False  # in this iteration
        self._taken_in = -1  # backward pass, as autograd counts them, that took the newest batch
        self.weighed: StepSizes | None = None  # the newest batch whose loss was weighed
        self._num_weighed = 0  # losses of it

    def push(self, step_sizes: StepSizes) -> None:
        """Queue the sizes of a batch that will be trained on, in order."""
        self._pending.append(step_sizes)

    def begin(self, step_sizes: StepSizes) -> None:
        """Note the batch that the script gets now, in place of any before it."""
        self._drop()
        self._num_untaken += not self._has_taken
        self._current = self.in_work = step_sizes
        if self.trained is None:
            self._num_begun += 1

    def upcoming(self, plans: Sequence[Plan]) -> StepSizes:
        """Return the sizes queued for the next backward pass, or those of the plan in force."""
        if self._pending:
            return self._pending[0]
        plan = plan_in_force(plans, self.next_step)
        num_micro = self.count_micro(plan.sizes)
        return StepSizes(plan.plan_id, self.next_step, plan.sizes, num_micro=num_micro)

    def current(self, plans: Sequence[Plan]) -> StepSizes:
        """Return the sizes of the batch that was begun last, or else what ``upcoming`` does."""
        fresh = self._current if self.has_fresh else None
        return fresh or self.upcoming(plans)

    def begin_next(self, plans: Sequence[Plan]) -> StepSizes:
        """Return what ``upcoming`` does, and begin that batch unless it is queued."""
        sizes = self.upcoming(plans)
        if not self._pending:
            self.drawn(sizes.step)
            self.begin(sizes)
        return sizes

    def clear(self) -> None:
        """Forget batches that will not be trained on."""
        self._drop()
        self._num_untaken, self._has_taken = 0, False

    def _drop(self) -> None:
        self._pending.clear()
        self._current = self.in_work = None

    def restart(self, *, next_step: int = 0) -> None:
        """Forget all batches: a run goes on from elsewhere, at a step counted over epochs."""
        self.clear()
        self._first_step = next_step
        self._last_trained = self.trained = None
        self._lookahead = self.trail = 0
        self._taken.clear()
        self._largest.clear()
        self._done = (), ()

    def forward(self, plans: Sequence[Plan]) -> StepSizes:
        """Return the sizes of the batch that a forward pass is for: the next one to be taken."""
        if self.trained is not None and self._taken_in == torch._C._current_graph_task_id() != -1:
            return self.trained  # computed again within the backward pass that has taken it
        if self._current is not None and not self._pending:
            return self._current
        return self.upcoming(plans)

    def weigh(self, sizes: StepSizes, *, rank: int) -> float:
        """Return by what a batch's loss is weighed: n x_i / X, of a micro-batch's its part of it.

        Called once for each micro-batch, in their order, or any number of times without such.
        """
        if sizes is not self.weighed:
            self.weighed, self._num_weighed = sizes, 0
        micro = sizes.micro_sizes(rank)
        size = micro[self._num_weighed % len(micro)]
        self._num_weighed += 1
        return size * len(sizes.sizes) / sizes.total

    @property
    def is_ahead(self) -> bool:
        """Whether an iteration's first batches were begun before a backward pass took one.

        Later ones may be skipped for their content.
        """
        return self._num_untaken > 1 and not self._has_taken

    def take(self) -> StepSizes:
        """Return the sizes of the batch that the next backward pass belongs to, or a UsageError."""
        taken = self._pending.popleft() if self._pending else self._current
        if taken is None:
            raise UsageError(
                "a backward pass without a batch: the optimizer has a balancer, so each backward "
                "pass needs a batch from loft.DataLoader, a loft.BatchSampler, or "
                "`with balancer.step(n)`"
            )
        if taken is not self.trained:  # once a batch: ranks may cut theirs into more passes or less
            # Not ``hash``: other processes salt it otherwise, and ranks compare the trail.
            mark = f"{taken.plan_id} {taken.step} {taken.digest}"
            self.trail = zlib.crc32(mark.encode(), self.trail)
            # Their bytes: the text of thousands of sizes takes three times as long.
            self.trail = zlib.crc32(array("q", taken.sizes), self.trail)
        self._has_taken = True
        self._taken_in = torch._C._current_graph_task_id()
        self.trained = self.in_work = taken
        self._taken.append(taken)
        self._last_trained = taken.step
        return taken

    def step_ended(self) -> None:
        """Note that all batches taken so far have been computed, on every rank."""
        # Only now: the reduction of a step ends on no rank before all have computed theirs.
        for taken in self._taken:
            done = taken.sizes, taken.num_micro
            if done != self._done:  # of thousands of ranks: mostly those of the step before
                sizes = taken.largest_micro
                self._largest = list(map(max, self._largest or sizes, sizes))
                self._done = done
        self._taken.clear()
        self.in_work = None

    def largest_done(self, rank: int) -> int:
        """Return the most samples that a rank has computed in one backward pass, 0 at first."""
        return self._largest[rank] if self._largest else 0

    def drawn(self, step: int) -> None:
        """Note that a batch of a step has been drawn, perhaps ahead of training."""
        if self._last_trained is None:
            self._last_trained = step - 1
        self._lookahead = max(self._lookahead, step - self._last_trained)

    @property
    def seems_forgotten(self) -> bool:
        """Whether many batches went out by now and no backward pass has taken any; true once."""
        return self.num_untold == _MANY_BATCHES

    @property
    def num_untold(self) -> int:
        """Batches that went out while no backward pass has ever taken one."""
        return self._num_begun if self.trained is None else 0

    def expect_depth(self, num_steps: int) -> None:
        """Note how many steps beyond the newest one trained on a loader may draw, once it begins.

        It holds for the life of the loader, so also where a run goes on from elsewhere.
        """
        self._depth = max(self._depth, num_steps)

    def check_start(self, plan: Plan, *, rank: int) -> None:
        """Raise when a plan starts at a step that loaders may have drawn by an older one."""
        if plan.first_step <= self.drawn_ahead:
            raise PlanError(
                f"rank {rank}: plan {plan.plan_id} starts at step {plan.first_step}, but steps up "
                f"to {self.drawn_ahead} may be drawn already: a loader that draws deeper than "
                "those before it began while the plan was on its way. Make every loft.DataLoader "
                "before training; for a loader of another kind call "
                f"balancer.expect_depth({self._lookahead}) on every rank before training"
            )

    @property
    def has_fresh(self) -> bool:
        """Whether a loader has begun a batch that no backward pass has taken yet."""
        current = self._current
        return current is not None and current.step >= self.next_step

    @property
    def next_step(self) -> int:
        """The step after the newest one trained on."""
        return self._first_step if self._last_trained is None else self._last_trained + 1

    @property
    def step_began(self) -> int:
        """The step of the first batch of the optimizer step that goes on, or of the next one."""
        return self._taken[0].step if self._taken else self.next_step

    @property
    def drawn_ahead(self) -> int:
        """The deepest step that may be drawn by now, also across the end of an epoch."""
        # Not the deepest step seen: a loader between two epochs has drawn nothing, and in the next
        # moment it has drawn as far ahead as it ever does.
        return self.next_step - 1 + self._lookahead

    @property
    def may_be_drawn(self) -> int:
        """The deepest step that would be drawn by now if the deepest loader there is had begun."""
        # A plan starts behind it, since any loader may begin while the plan is on its way.
        return self.next_step - 1 + max(self._lookahead, self._depth)
