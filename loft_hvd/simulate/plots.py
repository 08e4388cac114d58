"""The plot of a scenario: every policy's step time over the run, and the sizes LOFT chose."""

from __future__ import annotations

import os

import numpy as np

from loft_hvd.errors import MissingDependencyError
from loft_hvd.simulate.simulation import ORACLE, Results

__all__ = ["plot"]


def plot(results: Results, path: str | os.PathLike[str]) -> None:
    """Draw interval means of the step time of each policy, and the last run's sizes, to a file.

    The path's ending chooses the format.
    """
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingDependencyError(
            "plots need matplotlib: pip install '.[plots]' in its checkout"
        ) from error
    scenario = results.scenario
    figure = Figure(figsize=(9, 6), layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True)
    starts = np.arange(0, scenario.steps, scenario.interval)
    for run in results.runs:
        means = [part.mean() for part in np.split(run.step_s, starts[1:])]
        style = {"color": "black", "linestyle": ":"} if run.name == ORACLE else {}
        upper.step(starts, means, where="post", label=run.name, **style)
    upper.set_ylabel("step, s")
    upper.set_ylim(bottom=0)
    upper.legend(fontsize="small")
    upper.set_title(f"{scenario.name}: {scenario.description}", fontsize="medium")
    shown = next((run for run in results.runs if run.name == "loft"), results.runs[0])
    sizes = np.array([made.sizes for made in shown.decisions])
    first_steps = [made.first_step for made in shown.decisions]
    ends = [*first_steps, scenario.steps]
    for rank in range(min(scenario.world_size, 16)):
        lower.step(ends, [*sizes[:, rank], sizes[-1, rank]], where="post", label=f"rank {rank}")
    lower.set_ylabel(f"samples of a rank, {shown.name}")
    lower.set_xlabel("step")
    with rc_context({"svg.fonttype": "none"}):  # text stays text
        figure.savefig(path)
