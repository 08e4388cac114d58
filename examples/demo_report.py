"""How the demo shows its progress and its results; rank 0 alone prints."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import matplotlib as mpl
from rich.console import Console
from rich.table import Table

WIDTH = 30
COLOURS = {"equal": "tab:orange", "fitted": "tab:blue"}


class Progress:
    """A progress bar in lines, since launchers forward whole lines; one line each tenth.

    Args:
        title: what is running.
        num_steps: steps in all.
    """

    def __init__(self, title: str, num_steps: int) -> None:
        self._title = title
        self._num_steps = num_steps
        self._done = 0
        self._began = time.monotonic()

    def advance(self) -> None:
        """Count a step."""
        self._done += 1
        tenth = self._done * 10 // self._num_steps
        if hvd.rank() != 0 or tenth == (self._done - 1) * 10 // self._num_steps:
            return
        filled = self._done * WIDTH // self._num_steps
        rate_ms = 1e3 * (time.monotonic() - self._began) / self._done
        print(
            f"{self._title:28s} [{'#' * filled:{WIDTH}s}] {self._done:4d}/{self._num_steps} steps "
            f"{rate_ms:6.1f} ms/step",
            flush=True,
        )


def print_table(rows: Sequence[Mapping[str, Any]], folder: Path) -> None:
    """Print one line a run."""
    table = Table(title="rank 2 works three times as long, rank 3 sends its gradients times -10")
    for column in ("rule", "sizes", "local batch sizes", "test accuracy", "step ms", "wall s"):
        table.add_column(column, justify="left" if column in ("rule", "sizes") else "right")
    table.add_column("ranks identical")
    for row in rows:
        table.add_row(
            row["rule"],
            row["sizes"],
            " ".join(str(size) for size in row["local_batch_sizes"]),
            f"{row['test_accuracy']:.1%}",
            f"{row['step_s'] * 1e3:.1f}",
            f"{row['wall_s']:.1f}",
            "yes" if row["identical"] else "NO",
        )
    console = Console(width=100)
    console.print(table)
    console.print(f"written to {folder}: summary.json, steps.png, every rank's weights")


def plot(
    step_s: Mapping[str, Sequence[float]], rows: Sequence[Mapping[str, Any]], file: Path
) -> None:
    """Draw how long steps take at each choice of sizes, and what each run learnt, as a PNG."""
    mpl.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4), layout="constrained")
    for label, times in step_s.items():
        rule, sizes = label.split(", ")
        style = "-" if rule == "trimmed_mean" else ":"
        ordered = sorted(1e3 * seconds for seconds in times)
        share = [100 * (at + 1) / len(ordered) for at in range(len(ordered))]
        left.plot(ordered, share, style, color=COLOURS[sizes], label=label.replace("_", " "))
    left.set(xlabel="step time, ms", ylabel="% of steps at most this long", xlim=(0, None))
    left.legend()
    labels = [f"{row['rule'].replace('_', ' ')}\n{row['sizes']}" for row in rows]
    heights = [100 * row["test_accuracy"] for row in rows]
    bars = right.bar(labels, heights, color=[COLOURS[row["sizes"]] for row in rows])
    right.bar_label(bars, fmt="%.1f")
    right.set(ylabel="test accuracy, %", ylim=(0, 105))
    right.set_title("with rank 3's gradients times -10")
    left.set_title("with rank 2 three times slower")
    figure.savefig(file, dpi=120)
    pyplot.close(figure)
