"""Pictures of benchmarks."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from loft_hvd.bench.kernels import Timing
from loft_hvd.bench.peers import PEER_PACKAGES
from loft_hvd.errors import MissingDependencyError

__all__ = ["lines_of", "plot_kernels"]

_RULES = ("mean", "median", "trimmed_mean", "mean_around_median", "phocas")
_STYLES = {"avx512": "-", "avx2": "--", "baseline": ":", "": "-."}


def lines_of(timings: Sequence[Timing]) -> dict[tuple[str, str], list[tuple[int, float]]]:
    """Return what is drawn: row counts and passes of every line, by contestant and level.

    A line is one of our rules in float32 without weights, or another way to a rule, at level "".
    """
    theirs = ("torch.median", "numpy.median", *(f"{package} " for package in PEER_PACKAGES))
    lines: dict[tuple[str, str], list[tuple[int, float]]] = {}
    for timing in timings:
        name = timing.contestant.partition(" f=")[0]
        if name in _RULES or (name.startswith(theirs) and not name.endswith(" again")):
            lines.setdefault((name, timing.level), []).append((timing.rows, timing.passes))
    return lines


def plot_kernels(timings: Sequence[Timing], path: str | os.PathLike[str]) -> None:
    """Draw passes over row counts, one line a contestant, and write a PNG.

    A colour is a contestant, and a way of dashing an instruction set.

    Raises:
        MissingDependencyError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingDependencyError(
            "plots need matplotlib: pip install '.[plots]' in its checkout"
        ) from error
    lines = lines_of(timings)
    colours = {name: f"C{i % 10}" for i, name in enumerate(dict.fromkeys(n for n, _ in lines))}
    figure = Figure(figsize=(10, 6), layout="constrained")
    axes = figure.subplots()
    for (name, level), points in lines.items():
        style, colour = _STYLES.get(level, "-"), colours[name]
        label = f"{name} {level}".strip()
        marker = "." if level or name in _RULES else "x"
        rows, passes = zip(*sorted(points), strict=True)
        axes.plot(rows, passes, style, color=colour, marker=marker, label=label)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("rows")
    axes.set_ylabel("time, passes over the same memory")
    figure.legend(loc="outside right upper", fontsize="small")
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
