"""Which batch a backward pass belongs to, and how far loaders have drawn ahead of training."""

from __future__ import annotations

import zlib
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch

from loft_hvd.balance.plan import Plan, Sizes, StepSizes
from loft_hvd.errors import PlanError, UsageError

__all__ = ["OTHER_THREAD", "BatchQueue", "plan_in_force"]

_MANY_BATCHES = 10  # a script may look at a few batches before it trains
_MOST_AHEAD = 4  # a choice: batches that a loop fetches ahead; one that resumes skips many more
_FETCH_LATER = (
    "Fetch each batch when the one before it has been trained (num_workers= loads ahead all the "
    "same), or call balancer.clear_pending() behind batches that are skipped"
)
_AHEAD = (
    "batches were taken from the loader before the first backward pass: the loop is taken to fetch "
    "ahead, so that each backward pass has the sizes of the oldest batch that was not trained. If "
    "it skips the first batches instead, call balancer.clear_pending() behind them"
)
_NEWEST = (
    "batches were taken from the loader before the first backward pass: all but the newest are "
    "taken to be skipped. A loop that fetches so many ahead leaves that to num_workers= and "
    "prefetch_factor="
)
OTHER_THREAD = (
    "batches are taken from the loader in another thread than the one that trains, so that chance "
    "decides which of them a backward pass takes the sizes of; take them where they are trained, "
    "and let num_workers= and prefetch_factor= load ahead"
)
_OTHER_LOADER = (
    "a batch was taken from the loader before the one before it was trained, and two loaders share "
    "this balancer: a backward pass takes the sizes of the newest batch; train each batch before "
    "the next is taken, or use loft.BatchSampler, which queues sizes"
)


def plan_in_force(plans: Sequence[Plan], step: float) -> Plan:
    """Return the plan of a step, counted over epochs; the newest has the last word."""
    return next(plan for plan in reversed(plans) if plan.first_step <= step)


class BatchQueue:
    """The sizes of batches between the loader that draws them and the backward pass they are for.

    ``loft.DataLoader`` says when it yields a batch (``begin``), which then stands for every
    backward pass until the next one is taken. A ``loft.BatchSampler`` runs ahead of its loader and
    queues sizes (``push``); each backward pass takes one.

    A loop may fetch batches ahead of their steps: then those yielded wait for their turn. How many
    wait is learnt in an iteration's first backward pass, and stays. Of ``F`` that fetches and ``B``
    that takes::

        F B F B F B              none ahead: the newest batch is meant
        F B F F B F B            none ahead: a batch was skipped, and the newest is meant
        F F B F B F B B          one ahead: the oldest that waits is meant, to the epoch's end

    A batch that is skipped at the very beginning looks like one fetched ahead; ``guess`` says so.

    Attributes:
        trained: sizes of the newest batch that a backward pass has taken.
        in_work: sizes of the batch that is being computed; None between two steps.
        trail: 32 bits that depend on every batch taken: its plan, step, sizes and samples. Equal
            on all ranks between the same two steps.
        num_passes: most backward passes of an optimizer step, as far as known.
        guess: what the newest ``take`` went by, where a script may mean something else; else "".
        arrivals: by step, what the timer hears of batches that wait once it is their turn.
    """

    def __init__(self) -> None:
        self._pending: deque[StepSizes] = deque()  # of a BatchSampler, in the order of training
        self._waiting: deque[StepSizes] = deque()  # yielded by a DataLoader, and not taken
        self._current: StepSizes | None = None  # taken last
        self._num_ahead: int | None = None  # batches that wait behind the one meant; None: unknown
        self._told_ahead: int | None = None  # by who knows it, for every iteration
        self._num_left: int | None = None  # that wait of an iteration that has ended
        self._is_own = False  # the newest batch was begun without a loader of ours
        self._has_taken = False  # of this iteration
        self._is_all_drawn = False  # of an iteration of a BatchSampler
        # What an iteration was left with, and how many batches the first backward pass of the next
        # must find if these were not meant to be trained.
        self._doubt: tuple[str, int] | None = None
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
        self._taken_in = -1  # backward pass, as autograd counts them, that took the newest batch
        self.weighed: StepSizes | None = None  # the newest batch whose loss was weighed
        self._num_weighed = 0  # losses of it
        self.num_passes = 1
        self.guess = ""
        self.arrivals: dict[int, dict[str, Any]] = {}

    def push(self, step_sizes: StepSizes) -> None:
        """Queue the sizes of a batch that will be trained on, in order."""
        self._pending.append(step_sizes)

    def begin(self, step_sizes: StepSizes, *, is_own: bool = False) -> bool:
        """Note a batch that the script gets now; say whether it may wait behind others.

        ``is_own``: it is of a loader of the script's own.
        """
        self._pending.clear()
        if self._waiting and step_sizes.step != self._waiting[-1].step + 1:
            self._waiting.clear()
            self.arrivals.clear()
            self.guess = "" if self._is_own else _OTHER_LOADER
        self._is_own = is_own
        self._waiting.append(step_sizes)
        if self._num_ahead is None and len(self._waiting) > _MOST_AHEAD + self.num_passes + 1:
            self.arrivals.pop(self._waiting.popleft().step, None)  # it is the newest that is meant
        if self.trained is None:
            self._num_begun += 1
        is_ahead = len(self._waiting) > 1 and self._num_ahead != 0
        if not is_ahead:
            self.in_work = step_sizes
        return is_ahead

    def upcoming(self, plans: Sequence[Plan]) -> StepSizes:
        """Return the sizes queued for the next backward pass, or those of the plan in force."""
        if self._pending:
            return self._pending[0]
        plan = plan_in_force(plans, self.next_step)
        num_micro = self.count_micro(plan.sizes)
        return StepSizes(plan.plan_id, self.next_step, plan.sizes, num_micro=num_micro)

    def current(self, plans: Sequence[Plan]) -> StepSizes:
        """Return the sizes of the batch whose turn it is, or else what ``upcoming`` does."""
        if not self._waiting:
            return self.upcoming(plans)
        return self._waiting[0 if self.is_ahead else -1]

    def begin_next(self, plans: Sequence[Plan]) -> StepSizes:
        """Return what ``upcoming`` does, and begin that batch unless it is queued."""
        sizes = self.upcoming(plans)
        if not self._pending:
            self.drawn(sizes.step)
            self.begin(sizes, is_own=True)
        return sizes

    def expect_ahead(self, num_batches: int) -> None:
        """Note how many batches loops fetch ahead of the one that they train."""
        self._told_ahead = self._num_ahead = num_batches

    def all_drawn(self) -> None:
        """Note that a ``BatchSampler`` has queued the last batch of its iteration."""
        self._is_all_drawn = True

    def end_iteration(self) -> None:
        """Note that the script has got the last batch of an iteration; those that wait may come."""
        if self.num_waiting:
            self._num_left = self.num_waiting
        else:
            self.drop()

    def begin_iteration(self) -> None:
        """Forget batches that will not be trained on: an iteration begins, or will.

        Those that a loop had fetched ahead when the one before it ended will be, in front of it.
        """
        if self._num_left is not None and self._waiting:
            return
        doubt = None
        if self._num_ahead and self._waiting:
            doubt = f"{len(self._waiting)} batches fetched ahead", 1 + self._num_ahead
        elif self._pending and self._is_all_drawn and self._has_taken:
            doubt = f"{len(self._pending)} batches of a loft.BatchSampler", 1
        self.drop()
        self._doubt = doubt

    def drop(self) -> None:
        """Forget all batches that no backward pass has taken."""
        self._pending.clear()
        self._waiting.clear()
        self.arrivals.clear()
        self._current = self.in_work = self._num_left = self._doubt = None
        self._num_ahead = self._told_ahead
        self._is_all_drawn = self._has_taken = False

    @property
    def first_step(self) -> int:
        """Where the run goes on, counted over epochs."""
        return self._first_step

    def restart(self, *, next_step: int = 0) -> None:
        """Forget all batches: a run goes on from elsewhere, at a step counted over epochs."""
        self.drop()
        self._first_step = next_step
        self._last_trained = self.trained = self.weighed = None
        self._lookahead = self.trail = 0
        self._taken.clear()
        self._largest.clear()
        self._done = (), ()

    def forward(self, plans: Sequence[Plan]) -> StepSizes:
        """Return the sizes of the batch that a forward pass is for: the next one to be taken."""
        if self.trained is not None and self._taken_in == torch._C._current_graph_task_id() != -1:
            return self.trained  # computed again within the backward pass that has taken it
        if self._pending:
            return self._pending[0]
        if self._waiting:
            is_ahead = self._guessed_ahead() if self._num_ahead is None else self._num_ahead
            return self._waiting[0 if is_ahead else -1]
        return self._current or self.upcoming(plans)

    def _guessed_ahead(self) -> int:
        """Return how many batches a loop fetches ahead, by those that wait for its first pass."""
        num_waiting = len(self._waiting)
        return num_waiting - 1 if num_waiting <= _MOST_AHEAD + self.num_passes else 0

    def pass_on(self, plans: Sequence[Plan]) -> StepSizes:
        """Return the batch whose loss is there, where no backward pass takes it: it is done."""
        batch = self._pending.popleft() if self._pending else self._next_in_turn()
        if batch is None:
            return self.upcoming(plans)
        self.arrivals.pop(batch.step, None)
        self.guess = ""
        self._current = batch
        return batch

    def recount(self, planned: StepSizes, real: StepSizes) -> bool:
        """Let a batch that no backward pass has taken have the sizes of what it really holds.

        Returns:
            Whether there is such a batch.
        """
        for queue in (self._pending, self._waiting):
            for at, each in enumerate(queue):
                if each is planned:
                    queue[at] = real
                    return True
        return False

    def weigh(self, sizes: StepSizes, *, rank: int) -> float:
        """Return by what a batch's loss is weighed: n x_i / X, of a micro-batch's its part of it.

        Called once for each micro-batch, in their order, or any number of times without such.
        """
        if self.weighed is None or sizes.step != self.weighed.step:
            self.weighed, self._num_weighed = sizes, 0
        micro = sizes.micro_sizes(rank)
        size = micro[self._num_weighed % len(micro)]
        self._num_weighed += 1
        return size * len(sizes.sizes) / sizes.total

    @property
    def is_ahead(self) -> bool:
        """Whether the loop of this iteration fetches ahead."""
        return bool(self._num_ahead)

    @property
    def num_waiting(self) -> int:
        """Batches that a loop has fetched ahead by now, and that will be trained."""
        return len(self._waiting) if self.is_ahead else 0

    def take(self) -> StepSizes:
        """Return the sizes of the batch that the next backward pass belongs to, or a UsageError."""
        if self._doubt is not None:
            self._resolve(*self._doubt)
        taken = self._pending.popleft() if self._pending else self._next_in_turn()
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

    def pass_by(self) -> None:
        """Note a batch of a script that is only watched, whose sizes nobody knows."""
        self._last_trained = self.next_step

    def step_ended(self) -> None:
        """Note that all batches taken so far have been computed, on every rank."""
        # Only now: the reduction of a step ends on no rank before all have computed theirs.
        for taken in self._taken:
            done = taken.sizes, taken.largest_micro
            if done != self._done:  # of thousands of ranks: mostly those of the step before
                sizes = done[1]
                self._largest = list(map(max, self._largest or sizes, sizes))
                self._done = done
        self._taken.clear()
        self.in_work = self._waiting[0] if self.num_waiting else None
        if self._num_left is not None and not self._waiting:
            self.drop()  # the last batch of the iteration

    def _next_in_turn(self) -> StepSizes | None:
        """Return the batch whose turn it is, or the one taken last where none waits."""
        if not self._waiting:
            if self._num_ahead and self._current is not None:
                raise UsageError(
                    f"a second backward pass takes the batch of step {self._current.step}, in a "
                    f"loop that fetches {self._num_ahead} ahead: which batch a pass is of cannot "
                    f"be told there. {_FETCH_LATER}"
                )
            return self._current
        num_waiting = len(self._waiting)
        if self._num_ahead is None:
            self._num_ahead = self._guessed_ahead()
            if num_waiting > 1:
                self.guess = f"{num_waiting} {_AHEAD if self._num_ahead else _NEWEST}"
        extra = num_waiting - 1 - self._num_ahead
        if extra > 0:
            self._leave_out(extra)
        self._current = self._waiting.popleft()
        if self._num_left is not None:
            self._num_left -= 1
            if not self._num_left and self._waiting:
                self._num_left = None  # the next iteration has begun
        return self._current

    def _resolve(self, what: str, least: int) -> None:
        """Raise a UsageError where a backward pass may be of a batch that was dropped."""
        if self._waiting and len(self._waiting) >= least:
            self._doubt = None
            return
        raise UsageError(
            f"an iteration was left with {what} that no backward pass had taken, and another "
            "began: whether this backward pass is of one of them cannot be told. A loop that "
            "leaves early calls balancer.clear_pending() where it does; one that fetches ahead "
            "goes on to the end of a loft.DataLoader, whose last batches are then trained in front "
            "of the next epoch's"
        )

    def _leave_out(self, num_batches: int) -> None:
        """Drop batches that wait and that no backward pass will take, as far as that is sure."""
        assert self._num_ahead is not None
        is_sure = not self._num_ahead or num_batches == self._num_left
        kinds = {(each.sizes, each.num_micro, each.micro) for each in self._waiting}
        if not is_sure and len(kinds) > 1:
            sizes = [list(each.sizes) for each in self._waiting]
            raise UsageError(
                f"{len(self._waiting)} batches wait for a backward pass, in a loop that fetched "
                f"{self._num_ahead} ahead so far: which of them was skipped cannot be told, and "
                f"their sizes differ ({sizes}). {_FETCH_LATER}"
            )
        for _ in range(num_batches):
            self.arrivals.pop(self._waiting.popleft().step, None)
        self._num_left = None

    def has_none(self, rank: int, plans: Sequence[Plan]) -> bool:
        """Say whether a batch waits to be trained of which a rank has no samples."""
        return bool(self._pending or self._waiting) and self.current(plans).sizes[rank] == 0

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
        return bool(self._waiting)

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
