"""Decisions as lines of ``plans.jsonl``, and a policy that repeats them."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass

from loft_hvd.balance.observations import Interval
from loft_hvd.balance.plan import Plan
from loft_hvd.balance.policies import Fixed, Proposal, Task, Uniform
from loft_hvd.errors import PlanError

__all__ = ["Decision", "Replay", "record"]


@dataclass(frozen=True)
class Decision:
    """A plan and why it was made: one line of ``plans.jsonl``.

    Attributes:
        plan_id: number of the plan.
        first_step: first step with it.
        sizes: samples of each rank, [world_size].
        reason: why, in plain words.
        predicted_s: seconds of a step with it; None when not predicted.
        predicted_gain: share of the step that it should save; None likewise.
        measured_s: seconds of a step before it, by rank 0's clock; None when not measured.
    """

    plan_id: int
    first_step: int
    sizes: tuple[int, ...]
    reason: str
    predicted_s: float | None = None
    predicted_gain: float | None = None
    measured_s: float | None = None

    @property
    def plan(self) -> Plan:
        """The plan itself."""
        return Plan(self.plan_id, self.first_step, self.sizes)


def record(plan: Plan, proposal: Proposal, *, measured_s: float) -> Decision:
    """Return the line of ``plans.jsonl`` for a plan made from a proposal."""
    then_s, now_s = proposal.predicted_s, proposal.instead_of_s
    is_predicted = then_s > 0 and now_s > 0
    return Decision(
        plan.plan_id,
        plan.first_step,
        plan.sizes,
        proposal.reason,
        predicted_s=then_s if is_predicted else None,
        predicted_gain=1.0 - then_s / now_s if is_predicted else None,
        measured_s=measured_s if measured_s > 0 else None,
    )


class Replay(Uniform):
    """Repeats the plans of an earlier run, each from the step it had then.

    Args:
        path: what ``Controller.write_plans`` wrote.
    """

    name = "replay"

    def __init__(self, path: str | os.PathLike[str]) -> None:
        with open(path, encoding="utf-8") as file:
            try:
                lines = [json.loads(line) for line in file if line.strip()]
                self._plans = [(int(row["first_step"]), tuple(row["sizes"])) for row in lines]
            except (ValueError, KeyError, TypeError) as error:
                raise PlanError(
                    f"Replay {os.fspath(path)}: {error!r}; each line must be a JSON object with "
                    "first_step and sizes, as Controller.write_plans writes them"
                ) from error
        if not self._plans:
            raise PlanError(f"Replay {os.fspath(path)}: the file holds no plan")

    def start(self, task: Task) -> tuple[int, ...]:
        """Return the first sizes of the earlier run.

        Raises:
            PlanError: they are of another world or global batch.
        """
        return Fixed(self._plans[0][1]).start(task)

    def propose(self, interval: Interval, *, first_step: int) -> Proposal | None:
        """Return the sizes that the earlier run had at ``first_step``."""
        del interval
        sizes = [sizes for at, sizes in self._plans if at <= first_step][-1]
        return Proposal(sizes, "as in the run that is replayed")
