"""A run log for other tools: scalars by name for a writer, and a text file for Prometheus."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from loft_hvd.errors import ArgumentTypeError, DataError
from loft_hvd.report.entries import (
    Fault,
    Fits,
    Line,
    LinksLine,
    Plans,
    Scalars,
    Store,
    SuspicionLine,
    Times,
    newest_of,
    of_kind,
)
from loft_hvd.report.follow import LogFollower
from loft_hvd.report.screen import PARTS, throughput
from loft_hvd.report.verdict import newest_world, step_s

__all__ = ["ScalarFeed", "prometheus_text", "scalars_of"]
_logger = logging.getLogger(__name__)
_SOURCES = ("own", "peer", "source")  # of a store's samples


def scalars_of(line: Line) -> dict[str, float]:
    """Return the numbers of a line by name, such as ``loft/rank 2/compute_s``; finite ones alone.

    Seconds are of an average batch; a script's own numbers keep the names that it gave them.
    """
    return {name: value for name, value in _named(line) if math.isfinite(value)}


def _named(line: Line) -> Iterator[tuple[str, float]]:
    if isinstance(line, Times):
        yield from _named_times(line)
    elif isinstance(line, Fits):
        yield "loft/predicted_step_s", line.predicted_s
    elif isinstance(line, Plans):
        yield "loft/plan", line.plan_id
    elif isinstance(line, SuspicionLine):
        for worker in line.workers:
            yield f"loft/suspicion/{' '.join(map(str, worker.ranks))}", worker.suspicion
    elif isinstance(line, Store):
        for reads in line.ranks:
            for source in _SOURCES:
                yield f"loft/rank {reads.rank}/from_{source}", float(getattr(reads, source))
    elif isinstance(line, LinksLine):
        yield "loft/filled_in", line.filled_share
        for link in line.links:
            yield f"loft/link {link.peer}/lost", link.lost_share
            yield f"loft/link {link.peer}/filled_in", link.filled_share
    elif isinstance(line, Scalars):
        yield from line.values.items()


def _named_times(line: Times) -> Iterator[tuple[str, float]]:
    rate = throughput(line)
    if rate is not None:
        yield "loft/step_s", step_s(line.ranks)
        yield "loft/samples_per_s", rate
    for each in line.ranks:
        yield f"loft/rank {each.rank}/samples", each.samples
        for part in PARTS:
            yield f"loft/rank {each.rank}/{part}_s", getattr(each, f"{part}_s")


class ScalarFeed:
    """Hands the numbers of a run log to a writer, while it is written or afterwards::

        feed = loft.ScalarFeed("runs", SummaryWriter("runs/tb"))     # on rank 0
        for epoch in range(epochs):
            ...
            feed.update()

    Args:
        log: a run log, or a folder: of its logs the newest at the first ``update``, and no other
            afterwards. Where several jobs write to one folder name the log.
        writer: has ``add_scalar(name, value, step)``, as TensorBoard's ``SummaryWriter``, or
            ``log(values, step=)``, as a run of Weights and Biases.

    Raises:
        ArgumentTypeError: the writer has neither.
    """

    def __init__(self, log: str | os.PathLike[str], writer: Any) -> None:
        if not (hasattr(writer, "add_scalar") or hasattr(writer, "log")):
            raise ArgumentTypeError(
                f"ScalarFeed: writer={writer!r} has neither add_scalar(name, value, step) nor "
                "log(values, step=); give a TensorBoard SummaryWriter, or what wandb.init returned"
            )
        self._writer = writer
        self._follower = LogFollower(Path(log), stays=True)
        self._step = -1  # of the newest line: what a writer takes must not go back
        self._newest: set[str] = set()  # the lines of that step, as text

    def update(self) -> int:
        """Hand over what the log has got since the last call; returns how many numbers.

        A log that cannot be read is a warning: it must not end the training.
        """
        follower, count = self._follower, 0
        try:
            follower.look()
        except DataError as error:
            _logger.warning("no numbers are handed over: %s", error)
            return 0
        # Of a log that was thinned, and so is read anew, what was handed over is not again.
        before, known = (self._step, set(self._newest)) if follower.is_anew else (-1, set())
        for line in follower.new:
            text = repr(line)
            if line.step < before or text in known:
                continue
            if line.step > self._step:
                self._step = line.step
                self._newest.clear()
            if line.step == self._step:
                self._newest.add(text)
            values = scalars_of(line)
            count += len(values)
            if values:
                self._hand_over(values)
        return count

    def _hand_over(self, values: Mapping[str, float]) -> None:
        if hasattr(self._writer, "add_scalar"):
            for name, value in values.items():
                self._writer.add_scalar(name.replace(" ", "_"), value, self._step)
        else:
            self._writer.log(dict(values), step=self._step)


def prometheus_text(lines: Sequence[Line]) -> str:
    """Return the newest numbers of a log as Prometheus' text format, for its textfile collector."""
    world = newest_world(lines)
    metrics = _Metrics()
    step = max((line.step for line in world), default=0)
    metrics.add("loft_step", "Optimizer steps taken.", step)
    stamp = world[-1].time_s if world else math.nan
    metrics.add("loft_last_line_timestamp_seconds", "When the log was last written to.", stamp)
    metrics.add("loft_faults", "Errors that the log has.", len(of_kind(Fault, world)))
    times = newest_of(Times, world)
    if times is not None and times.ranks:
        rate = throughput(times)
        metrics.add("loft_step_seconds", "An average step.", step_s(times.ranks))
        metrics.add("loft_samples_per_second", "Of all ranks.", math.nan if rate is None else rate)
        for each in times.ranks:
            rank = {"rank": str(each.rank)}
            metrics.add("loft_rank_samples", "A rank's samples of a step.", each.samples, rank)
            for part in PARTS:
                help_text = "A part of a rank's average step."
                seconds = getattr(each, f"{part}_s")
                metrics.add("loft_rank_seconds", help_text, seconds, rank | {"part": part})
    fit, plan = newest_of(Fits, world), newest_of(Plans, world)
    if fit is not None:
        help_text = "What models expect of a step."
        metrics.add("loft_predicted_step_seconds", help_text, fit.predicted_s)
    if plan is not None:
        metrics.add("loft_plan", "Number of the newest plan.", plan.plan_id)
    suspicion = newest_of(SuspicionLine, world)
    for worker in [] if suspicion is None else suspicion.workers:
        who = {"ranks": " ".join(map(str, worker.ranks))}
        metrics.add("loft_worker_suspicion", "0 as the others to 1.", worker.suspicion, who)
        metrics.add("loft_worker_stands_out", "1 where it is warned of.", worker.is_named, who)
    links = newest_of(LinksLine, world)
    for link in [] if links is None else links.links:
        peer = {"peer": str(link.peer)}
        metrics.add("loft_link_lost", "Share of rank 0's packets.", link.lost_share, peer)
        help_text = "Share of a peer's values that were filled in."
        metrics.add("loft_link_filled_in", help_text, link.filled_share, peer)
        metrics.add("loft_link_waits", "1 where whole rows are waited for.", link.waits, peer)
    store = newest_of(Store, world)
    for reads in [] if store is None else store.ranks:
        for source in _SOURCES:
            help_text = "Samples that a rank read in the newest epoch told of."
            labels = {"rank": str(reads.rank), "from": source}
            metrics.add("loft_store_samples", help_text, getattr(reads, source), labels)
    scalars = newest_of(Scalars, world)
    for name, value in ({} if scalars is None else scalars.values).items():
        metrics.add("loft_scalar", "What the script says of itself.", value, {"name": name})
    return metrics.text()


class _Metrics:
    """Gauges by name, each with its help and its values by labels."""

    def __init__(self) -> None:
        self._found: dict[str, list[str]] = {}

    def add(
        self, name: str, help_text: str, value: float, labels: Mapping[str, str] | None = None
    ) -> None:
        """Add a value; what is not finite is left out."""
        if not math.isfinite(value):
            return
        head = [f"# HELP {name} {help_text}", f"# TYPE {name} gauge"]
        pairs = ",".join(f'{key}="{_escaped(text)}"' for key, text in (labels or {}).items())
        where = f"{{{pairs}}}" if pairs else ""
        self._found.setdefault(name, head).append(f"{name}{where} {float(value)!r}")

    def text(self) -> str:
        return "".join(f"{line}\n" for lines in self._found.values() for line in lines)


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
