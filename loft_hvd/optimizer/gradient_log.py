"""What a run log says of gradients: how far ranks lie apart for good, and who was off."""

from __future__ import annotations

from dataclasses import asdict

from loft_hvd.aggregation.rules import Mean
from loft_hvd.optimizer.parameters import GradientSet
from loft_hvd.pipeline.suspicion.report import SuspicionReport
from loft_hvd.pipeline.suspicion.spread import ParameterSpread
from loft_hvd.pipeline.suspicion.watch import Unwatched, WorkerWatch
from loft_hvd.runlog import RunLog
from loft_hvd.transport.base import Channel

__all__ = ["GradientLog"]

_LOOK_EVERY = 10  # steps; evidence is not exchanged more often by default
_WRITE_EVERY = 100


class GradientLog:
    """Looks at each step of an optimizer once its gradients are reduced.

    Make it on every rank alike, before what else hooks into the gradients.

    Args:
        found: the parameters and their rules.
        channel: the ranks.
    """

    def __init__(self, found: GradientSet, channel: Channel) -> None:
        robust = [
            parameter
            for parameter, spec in zip(found.parameters, found.specs, strict=True)
            if not isinstance(found.rules[spec.rule], Mean)
        ]
        self._spread = ParameterSpread(robust, channel)
        self._num_steps = 0
        self._seen: tuple[object, ...] = ()

    def step_reduced(self, log: RunLog, watch: WorkerWatch | Unwatched) -> None:
        """Compare ranks when enough steps were seen; write what is new."""
        self._num_steps += 1
        spread = self._spread.step_reduced()
        if spread is not None:
            log.write("spread", **asdict(spread))
        if log.path is None or self._num_steps % _LOOK_EVERY:
            return
        report = watch.report()
        standing = tuple((worker.is_named, worker.in_quarantine_until) for worker in report.workers)
        if report.workers and (standing != self._seen or self._num_steps % _WRITE_EVERY == 0):
            self._seen = standing
            log.write("suspicion", **_record(report))

    def detach(self) -> None:
        """Take the hooks off the parameters."""
        self._spread.detach()


def _record(report: SuspicionReport) -> dict[str, object]:
    return {
        "num_steps": report.num_steps,
        "workers": [asdict(worker) for worker in report.workers],
    }
