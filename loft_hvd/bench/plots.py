"""Pictures of benchmarks."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from loft_hvd.bench.kernels import Timing
from loft_hvd.errors import MissingDependencyError

__all__ = ["plot_kernels"]

_SHOWN = ("median", "trimmed_mean f=", "mean_around", "phocas", "torch.median", "numpy.median")


def plot_kernels(timings: Sequence[Timing], path: str | os.PathLike[str]) -> None:
    """Draw passes over row counts, one line a contestant, and write a PNG.

    Raises:
        MissingDependencyError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingDependencyError(
            "plots need matplotlib: pip install 'loft-hvd[plots]'"
        ) from error
    lines: dict[str, list[tuple[int, float]]] = {}
    for timing in timings:
        if not timing.contestant.startswith(_SHOWN) or timing.contestant.endswith("float16"):
            continue
        rule = timing.contestant.split(" f=")[0].split(",")[0]
        if "weighted" in rule or "diagnosed" in rule or "masked" in timing.contestant:
            continue
        lines.setdefault(f"{rule} {timing.level}", []).append((timing.rows, timing.passes))
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for name, points in lines.items():
        style = "--" if name.endswith(" ") else "-"
        axes.plot(*zip(*sorted(points), strict=True), style, marker=".", label=name)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("rows")
    axes.set_ylabel("time, passes over the same memory")
    axes.legend(fontsize="small")
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
