"""Run a scenario: the real controller, policies and sampler on a virtual clock."""

from __future__ import annotations

import copy
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from loft_hvd.balance.controller import Controller, Decision
from loft_hvd.balance.interval import screen, typical
from loft_hvd.balance.latency import StepModel
from loft_hvd.balance.loft import Loft
from loft_hvd.balance.policy import Policy
from loft_hvd.balance.search import exact
from loft_hvd.simulate.build import Draws, build_cluster
from loft_hvd.simulate.cluster import Served
from loft_hvd.simulate.scenario import Scenario, read_scenario
from loft_hvd.simulate.stores import Stores

__all__ = ["PolicyRun", "Results", "rows", "run_file", "simulate"]

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

ORACLE = "oracle"


@dataclass(frozen=True)
class PolicyRun:
    """One policy's run."""

    name: str  # of the policy, or the list of sizes that it stands for, such as "[96, 32]"
    step_s: Floats  # of every step, [steps]
    decisions: tuple[Decision, ...]  # every plan
    # Share of the usual step that each plan saved in its first interval, against the sizes before
    # it in those very steps; None for the first plan and one that saw no interval.
    realised_gain: tuple[float | None, ...]
    explanation: str = ""  # what the controller says at the end
    local: Floats = field(default_factory=lambda: np.zeros((0, 0)))  # samples, [steps, world_size]

    @property
    def mean_s(self) -> float:
        """Mean seconds of a step over the whole run."""
        return float(self.step_s.mean())

    @property
    def p95_s(self) -> float:
        """95th percentile of the seconds of a step."""
        return float(np.percentile(self.step_s, 95))

    @property
    def settled_s(self) -> float:
        """Mean seconds of a step over the second half of the run."""
        return float(self.step_s[len(self.step_s) // 2 :].mean())


@dataclass(frozen=True)
class Results:
    """All policies of a scenario; the oracle, which knows the true times, is the last."""

    scenario: Scenario
    runs: tuple[PolicyRun, ...]

    def run(self, name: str) -> PolicyRun:
        """Return the run of a policy."""
        return next(run for run in self.runs if run.name == name)

    def to_dict(self) -> dict[str, Any]:
        """Return step times in seconds and every plan of each policy, JSON-able."""
        told = ("description", "seed", "steps", "world_size", "global_batch_size")
        return {
            "scenario": self.scenario.name,
            **{name: getattr(self.scenario, name) for name in told},
            "policies": {
                run.name: {
                    "mean_step_s": run.mean_s,
                    "p95_step_s": run.p95_s,
                    "settled_step_s": run.settled_s,
                    "num_plans": len(run.decisions),
                    "plans": [
                        {**asdict(made), "realised_gain": gain}
                        for made, gain in zip(run.decisions, run.realised_gain, strict=True)
                    ],
                }
                for run in self.runs
            },
        }


class _Caches:
    """Samples that ranks keep: a hit turns a remote sample into a local one."""

    def __init__(self, scenario: Scenario, draws: Draws) -> None:
        self._draws = draws
        self._capacity = np.minimum(scenario.values("cache_samples"), scenario.num_samples)
        self._num_samples = scenario.num_samples
        self._kept = np.zeros(scenario.world_size)

    @property
    def hit_share(self) -> Floats:
        """Probability that a remote sample is kept, [world_size]: all are as likely to come."""
        share: Floats = self._kept / self._num_samples
        return share

    def serve(self, first: int, last: int, sizes: Ints) -> Served:
        """Return local samples with hits of steps first..last-1, and keep what was fetched."""
        local = self._draws.local(first, last, sizes)
        if not self._capacity.any():
            return Served(local, np.zeros_like(local))
        hits = (sizes - local) * self.hit_share
        missed = (sizes - local - hits).sum(axis=0)
        self._kept = np.minimum(self._kept + missed, self._capacity)
        return Served(local + hits, np.zeros_like(local))

    def model(self, model: StepModel) -> StepModel:
        """Return the model with the average hits of now."""
        share = self.hit_share
        return replace(
            model,
            remote_s=(1.0 - share) * model.remote_s + share * model.local_s,
            shared_s=(1.0 - share) * model.shared_s,
        )


def simulate(scenario: Scenario) -> Results:
    """Run every policy of a scenario, and the oracle, on the same noise, events and samples."""
    draws = Draws(scenario)
    runs = [_run_policy(scenario, policy, draws) for policy in scenario.policies]
    return Results(scenario, (*runs, _run_policy(scenario, ORACLE, draws)))


def run_file(path: str | os.PathLike[str]) -> Results:
    """Read, check and run a scenario file."""
    return simulate(read_scenario(path))


def _controller(scenario: Scenario, policy: str | Sequence[int]) -> Controller:
    chosen: str | Sequence[int] | Policy = policy
    if policy == "loft" and scenario.knows_sources and scenario.sources:
        known = sorted(scenario.sources)
        names = scenario.names("source")
        chosen = Loft(source=[known.index(name) if name else -1 for name in names])
    caps = scenario.max_batch
    per_rank = [cap or None for cap in ([caps] if isinstance(caps, int) else caps)]
    return Controller(
        scenario.global_batch_size,
        scenario.world_size,
        "uniform" if policy == ORACLE else chosen,
        min_batch=scenario.min_batch,
        max_batch=per_rank[0] if len(per_rank) == 1 else per_rank,
        grain=scenario.grain,
        max_sizes=scenario.max_sizes or None,
    )


def _run_policy(scenario: Scenario, policy: str | Sequence[int], draws: Draws) -> PolicyRun:
    controller = _controller(scenario, policy)
    cluster = build_cluster(scenario, draws.average_hits)
    caches = Stores(scenario, cluster.model) if scenario.store else _Caches(scenario, draws)
    peer_s = caches.peer_s if isinstance(caches, Stores) else None
    local: list[Floats] = []
    times: list[Floats] = []
    decisions: list[Decision] = []
    gains: list[float | None] = [None]  # of each plan that has begun
    sizes = np.array(controller.plan.sizes)
    in_force = 0  # steps that these sizes have been in force for
    replaced: Ints | None = None  # sizes that a plan replaces which begins with this block
    # One block of steps an interval, as in training: the times of a block lead to a plan that
    # comes into force with the next one. Only the oracle plans for the block that it is in.
    for first in range(0, scenario.steps, scenario.interval):
        last = min(first + scenario.interval, scenario.steps)
        if policy == ORACLE:
            model = caches.model(cluster.mean_model(first, last))
            best = exact(model, controller.task.global_batch_size, controller.task.bounds)
            if not decisions or best != decisions[-1].sizes:
                decisions.append(Decision(len(decisions), first, best, "knows the true times"))
                replaced = sizes if first else None
            sizes = np.array(best)
        instead = None if replaced is None else _fork(caches).serve(first, last, replaced)
        served = caches.serve(first, last, sizes)
        if isinstance(caches, Stores):
            controller.policy.share_held(caches.held())
        local.append(served.local)
        block = cluster.run(first, sizes, served, steps_at_sizes=in_force, peer_s=peer_s)
        times.append(block.step_s)
        in_force += last - first
        if replaced is not None and instead is not None:
            other = cluster.run(first, replaced, instead, steps_at_sizes=first, peer_s=peer_s)
            usual, other_usual = (typical(each.step_s)[0] for each in (block, other))
            gains.append(float(1.0 - usual / other_usual))
            replaced = None
        if policy == ORACLE:
            continue
        told = cluster.report(block, controller.is_settled)
        controller.observe(
            screen(
                told.rows,
                step=last - 1,
                sizes=sizes.tolist(),
                step_s=told.step_s,
                step_error_s=told.step_error_s,
            )
        )
        plan = controller.decide(last)
        if plan is not None:
            replaced, sizes, in_force = sizes, np.array(plan.sizes), 0
    made = tuple(decisions) if policy == ORACLE else tuple(controller.history)
    name = policy if isinstance(policy, str) else str(list(policy))
    gains += [None] * (len(made) - len(gains))  # of plans that nobody trained by
    explanation = "" if policy == ORACLE else controller.explain()
    step_s, kept = np.concatenate(times), np.concatenate(local)
    return PolicyRun(name, step_s, made, tuple(gains), explanation, kept)


def _fork(caches: _Caches | Stores) -> _Caches | Stores:
    """Return a copy that may serve other sizes, and leaves what ranks keep as it is."""
    return copy.deepcopy(caches) if isinstance(caches, Stores) else copy.copy(caches)


def rows(results: Results) -> list[list[str]]:
    """Return a table: a header, then a row a policy, fastest settled step first."""
    base = results.runs[0]
    oracle_s = results.run(ORACLE).settled_s
    table = [
        ["policy", "mean s", "p95 s", "settled s", f"against {base.name}", "above oracle", "plans"]
    ]
    for run in sorted(results.runs, key=lambda run: run.settled_s):
        table.append(
            [
                run.name,
                f"{run.mean_s:.4f}",
                f"{run.p95_s:.4f}",
                f"{run.settled_s:.4f}",
                f"{run.mean_s / base.mean_s - 1:+.1%}",
                f"{run.settled_s / oracle_s - 1:+.1%}",
                str(len(run.decisions)),
            ]
        )
    return table
