"""A run log in plain text: plans, which rank was slow and why, who was off, what went wrong."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from loft_hvd.balance.explain import describe
from loft_hvd.balance.interval import RankTimes
from loft_hvd.errors import DataError
from loft_hvd.pipeline.suspicion.report import SuspicionReport, WorkerReport

__all__ = ["render_text"]

Entry = dict[str, Any]


def render_text(entries: Sequence[Entry]) -> str:
    """Say what a run log holds, the entries of ``read_run_log``."""
    try:
        return "\n".join([*_history(entries), *_newest(entries)])
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(
            f"report: a line lacks or has too many fields ({error}); was the log written by "
            "another version of loft_hvd?"
        ) from error


def _history(entries: Sequence[Entry]) -> Iterator[str]:
    """Say what happened, in the order in which it did."""
    for entry in entries:
        kind = entry["kind"]
        if kind == "run":
            line = f"{entry['world_size']} ranks"
            if "policy" in entry:
                line += (
                    f", global_batch_size={entry['global_batch_size']}, policy {entry['policy']}"
                )
            yield line
        elif kind == "plan":
            yield (
                f"plan {entry['plan_id']} from step {entry['first_step']}: sizes {entry['sizes']}"
            )
        elif kind == "fault":
            yield f"{entry['error']} at step {entry['step']}: {entry['text']}"


def _newest(entries: Sequence[Entry]) -> Iterator[str]:
    """Say what was known last of times, models, gradients and workers."""
    last = {entry["kind"]: entry for entry in entries}  # later lines replace earlier ones
    if "thinned" in last:
        yield thinned_line(last["thinned"])
    if "times" in last:
        times = last["times"]
        yield f"times up to step {times['step']}{which_ranks(times)}:"
        yield describe([RankTimes(**rank) for rank in times["ranks"]])
    else:
        yield "no times yet"
    if "explain" in last:
        yield last["explain"]["text"]
    if "spread" in last:
        yield spread_line(last["spread"])
    if "suspicion" in last:
        yield f"workers {read_suspicion(last['suspicion'])}"


def thinned_line(entry: Entry) -> str:
    """Say what is not in the log, from a ``thinned`` line."""
    return (
        f"{entry['num_lines']} older lines of times, fits and suspicion were left out, to keep the "
        "log small or because the disk was full"
    )


def which_ranks(times: Entry) -> str:
    """Say which ranks stand for all in a ``times`` line; empty where all are there."""
    if len(times["ranks"]) == times["num_ranks"]:
        return ""
    return f", {len(times['ranks'])} of {times['num_ranks']} ranks from the fastest to the slowest"


def spread_line(entry: Entry) -> str:
    """Say how much ranks' gradients differ, from a ``spread`` line."""
    # JSON has no NaN: a rank of which too little was seen is null.
    ratios = ", ".join("unknown" if r is None else f"{r:.2f}" for r in entry["ratios"])
    return (
        f"lasting difference of each rank's gradients in the first {entry['step']} steps, over "
        f"their noise from step to step, 0 for ranks alike: {ratios}"
    )


def read_suspicion(entry: Entry) -> SuspicionReport:
    """Turn a ``suspicion`` line back into the report it was made of."""
    # JSON made lists of tuples; a frozen report compares and hashes by its tuples.
    workers = (
        WorkerReport(**{**worker, "ranks": tuple(worker["ranks"])}) for worker in entry["workers"]
    )
    return SuspicionReport(entry["num_steps"], tuple(workers))
