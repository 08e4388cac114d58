"""The policies by name, and those that know their sizes before training."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from loft_hvd.balance.auto import AutoBatch
from loft_hvd.balance.interval import Interval
from loft_hvd.balance.lbbsp import LbBspCpu, LbBspGpu
from loft_hvd.balance.loft import DEAD_BAND, Loft
from loft_hvd.balance.plan import Plan, Sizes, check_sizes, whole_sizes
from loft_hvd.balance.policy import Policy, Proposal, Task
from loft_hvd.codec import Count, decode
from loft_hvd.errors import ArgumentError, ArgumentTypeError, DataError, PlanError
from loft_hvd.runlog import read_json_lines

__all__ = ["POLICIES", "Fixed", "Replay", "Uniform", "Unplanned", "make_auto", "make_policy"]

_GIVE = (
    "give what Balancer.write_plans wrote, a JSON object a line with first_step and sizes, or a "
    "run log"
)
POLICIES = (
    "loft",
    "uniform",
    "report",
    "lbbsp-cpu",
    "lbbsp-cpu:last",
    "lbbsp-cpu:ema",
    "lbbsp-cpu:busy",
    "lbbsp-gpu",
)


class Uniform(Policy):
    """Equal sizes for ever."""

    name = "uniform"
    uses_times = False
    is_adaptive = False

    def propose(self, interval: Interval, *, first_step: int) -> Proposal | None:
        del interval, first_step
        return None


class Unplanned(Uniform):
    """Of a script that is only watched, whose batches are nobody's plan."""

    name = "watch"
    plans_batches = False


class Fixed(Uniform):
    """The user's own sizes for ever, [world_size], adding up to the global batch."""

    name = "fixed"

    def __init__(self, sizes: Sequence[int]) -> None:
        self.sizes = whole_sizes(sizes)

    @property
    def text(self) -> str:
        return str(list(self.sizes))

    @property
    def given_plans(self) -> tuple[Plan, ...]:
        return (Plan(0, 0, self.sizes),)

    def start(self, task: Task) -> Sizes:
        total = task.global_batch_size
        check_sizes(self.sizes, world_size=task.world_size, global_batch_size=total)
        return self.sizes


class Replay(Uniform):
    """Repeats the plans of an earlier run, each from the step it had then.

    Args:
        path: what ``write_plans`` of a balancer wrote, or a run log; every rank reads the same.

    Raises:
        PlanError: the file cannot be read, or holds no plans from step 0 on.
    """

    name = "replay"

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = os.fspath(path)
        try:
            rows = [row for _, row in read_json_lines(path) if _is_plan(row)]
        except (OSError, DataError) as error:
            raise PlanError(f"Replay {self._path}: {error}; {_GIVE}") from error
        plans = [_read_plan(self._path, number, row) for number, row in enumerate(rows)]
        sizes_at = {plan.first_step: plan.sizes for plan in plans}
        if 0 not in sizes_at:
            raise PlanError(
                f"Replay {self._path}: the plans start at steps {sorted(sizes_at)}; one must start "
                "at step 0"
            )
        self.plans = tuple(
            Plan(plan_id, at, sizes_at[at]) for plan_id, at in enumerate(sorted(sizes_at))
        )

    @property
    def given_plans(self) -> tuple[Plan, ...]:
        return self.plans

    def start(self, task: Task) -> Sizes:
        """Return the first sizes of the earlier run; all its plans must fit the task."""
        ranks, total = task.world_size, task.global_batch_size
        for plan in self.plans:
            where = f"Replay {self._path}, step {plan.first_step}: sizes"
            check_sizes(plan.sizes, world_size=ranks, global_batch_size=total, what=where)
            if (np.array(plan.sizes) > task.bounds.cap).any():
                raise PlanError(
                    f"{where}={list(plan.sizes)} are beyond the caps {task.bounds.cap.tolist()}; "
                    "raise max_batch"
                )
        return self.plans[0].sizes

    def propose(self, interval: Interval, *, first_step: int) -> Proposal | None:
        del interval
        sizes = [plan.sizes for plan in self.plans if plan.first_step <= first_step][-1]
        return Proposal(sizes, "as in the run that is replayed")


@dataclass(frozen=True)
class _Row:
    """What a line says of a plan."""

    first_step: Count
    sizes: Sizes


def _read_plan(path: str, number: int, row: Any) -> _Row:
    what, call = f"plan {number}", f"Replay {path}"
    try:
        return decode(_Row, row, what=what, call=call, is_open=True, advice=_GIVE)
    except ArgumentError as error:
        raise PlanError(str(error)) from error


def _is_plan(row: Any) -> bool:
    """Whether a line is of a plan; in a file of plans, without kinds, all are."""
    return not isinstance(row, Mapping) or row.get("kind", "plan") == "plan"


def make_auto(
    policy: str | Sequence[int] | Policy, *, least: object, most: object, dead_band: float
) -> AutoBatch:
    """Return the policy that chooses the global batch, of ``least`` to ``most`` samples."""
    for what, value in (("min_global", least), ("max_global", most)):
        if not isinstance(value, int) or isinstance(value, bool):
            raise ArgumentTypeError(
                f"Balancer: {what}={value!r} must be a whole number with global_batch_size='auto': "
                "give the fewest and the most samples of all ranks in a step, such as "
                "Balancer('auto', min_global=64, max_global=1024)"
            )
    assert isinstance(least, int)
    assert isinstance(most, int)
    if not 1 <= least <= most:
        raise ArgumentError(
            f"Balancer: min_global={least} and max_global={most} must be >= 1 and in this order"
        )
    if policy != "loft":  # who knows no times cannot say what another global batch takes
        raise ArgumentError(
            f"Balancer: policy={policy!r} does not go with global_batch_size='auto'; use 'loft', "
            "or a fixed global batch"
        )
    make = partial(Loft, dead_band=dead_band)
    return AutoBatch(make, least=least, most=most, dead_band=dead_band)


def make_policy(policy: str | Sequence[int] | Policy, *, dead_band: float = DEAD_BAND) -> Policy:
    """Return the policy that a name, or a list of every rank's samples, stands for.

    A policy is returned as it is; ``dead_band`` is of "loft" and "report".
    """
    if isinstance(policy, Policy):
        return policy
    if isinstance(policy, Sequence) and not isinstance(policy, str):
        return Fixed(policy)
    is_name = isinstance(policy, str)
    if not is_name or policy not in POLICIES:
        wrong = "not known" if is_name else f"of type {type(policy).__name__}"
        raise (ArgumentError if is_name else ArgumentTypeError)(
            f"Balancer: policy={policy!r} is {wrong}; it takes {', '.join(map(repr, POLICIES))}, a "
            "policy object, or a list with every rank's samples, such as [96, 96, 48, 16]"
        )
    base, _, kind = policy.partition(":")
    if base in ("loft", "report"):
        return Loft(dead_band=dead_band, acts=base == "loft")
    if base == "uniform":
        return Uniform()
    if base == "lbbsp-gpu":
        return LbBspGpu()
    is_busy = kind == "busy"
    return LbBspCpu("narx" if is_busy else kind or "narx", clock="busy" if is_busy else "compute")
