"""Decisions as lines of ``plans.jsonl``, and a policy that repeats them."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from loft_hvd.balance.interval import Interval
from loft_hvd.balance.plan import Plan
from loft_hvd.balance.policies import Fixed, Proposal, Task, Uniform
from loft_hvd.errors import PlanError

__all__ = ["Decision", "Replay", "record", "write_decisions"]


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


def write_decisions(path: str | os.PathLike[str], decisions: Iterable[Decision]) -> None:
    """Write decisions, one JSON object a line; ``Replay`` reads them."""
    with open(path, "w", encoding="utf-8") as file:
        file.writelines(json.dumps(asdict(made)) + "\n" for made in decisions)


class Replay(Uniform):
    """Repeats the plans of an earlier run, each from the step it had then.

    Args:
        path: what ``write_plans`` of a balancer wrote, or a run log; every rank reads the same.

    Attributes:
        plans: all of them, by their first step.

    Raises:
        PlanError: the file cannot be read, or holds no plans from step 0 on.
    """

    name = "replay"

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = os.fspath(path)
        try:
            rows = _rows(Path(path).read_text(encoding="utf-8").splitlines())
            sizes_at = dict(_read(row) for row in rows if row.get("kind", "plan") == "plan")
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise PlanError(
                f"Replay {self._path}: {error!r}; give what Balancer.write_plans wrote, a JSON "
                "object a line with first_step and sizes, or a run log"
            ) from error
        if 0 not in sizes_at:
            raise PlanError(
                f"Replay {self._path}: the plans start at steps {sorted(sizes_at)}; one must start "
                "at step 0"
            )
        self.plans = tuple(
            Plan(plan_id, at, sizes_at[at]) for plan_id, at in enumerate(sorted(sizes_at))
        )

    def start(self, task: Task) -> tuple[int, ...]:
        """Return the first sizes of the earlier run.

        Raises:
            PlanError: a plan is of another world or global batch, or beyond a cap.
        """
        for plan in self.plans:
            try:
                Fixed(plan.sizes).start(task)
            except PlanError as error:
                raise PlanError(f"Replay {self._path}, step {plan.first_step}: {error}") from error
            if (np.array(plan.sizes) > task.bounds.cap).any():
                raise PlanError(
                    f"Replay {self._path}, step {plan.first_step}: sizes {list(plan.sizes)} are "
                    f"beyond the caps {task.bounds.cap.tolist()}; raise max_batch"
                )
        return self.plans[0].sizes

    def propose(self, interval: Interval, *, first_step: int) -> Proposal | None:
        """Return the sizes that the earlier run had at ``first_step``."""
        del interval
        sizes = [plan.sizes for plan in self.plans if plan.first_step <= first_step][-1]
        return Proposal(sizes, "as in the run that is replayed")


def _rows(lines: Sequence[str]) -> list[Any]:
    """Return what lines hold; the last one of a run log may have been cut off by a crash."""
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            rows += [json.loads(line)] if line.strip() else []
        except ValueError:
            if not rows or number < len(lines):
                raise
    return rows


def _read(row: Mapping[str, Any]) -> tuple[int, tuple[int, ...]]:
    counts = [row["first_step"], *row["sizes"]]
    if not all(type(count) is int and count >= 0 for count in counts):
        raise ValueError(f"first_step={counts[0]} and sizes={counts[1:]} are not all counts")
    return counts[0], tuple(counts[1:])
