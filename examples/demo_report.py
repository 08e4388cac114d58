"""How the demo shows its progress, its warnings and its results; rank 0 alone prints."""

from __future__ import annotations

import logging
import sys
import textwrap
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import demo_engine as engine
import matplotlib as mpl
from rich.console import Console
from rich.table import Table

WIDTH = 30
WIDTH_OF_TEXT = 100
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
        if engine.rank() != 0 or tenth == (self._done - 1) * 10 // self._num_steps:
            return
        filled = self._done * WIDTH // self._num_steps
        rate_ms = 1e3 * (time.monotonic() - self._began) / self._done
        print(
            f"{self._title:28s} [{'#' * filled:{WIDTH}s}] {self._done:4d}/{self._num_steps} steps "
            f"{rate_ms:6.1f} ms/step",
            flush=True,
        )


class Warnings(logging.StreamHandler[Any]):
    """Prints what loft_hvd warns of between the progress bars, each warning once, with its run.

    The four runs go on for long with the same faulty rank, so they warn of it again and again.
    """

    def __init__(self) -> None:
        super().__init__(sys.stdout)
        self._said: set[tuple[str, int]] = set()
        self._run = ""

    @contextmanager
    def of_run(self, name: str) -> Iterator[None]:
        """Put a run's name before what is warned of inside; runs take turns with their epochs."""
        self._run = name
        try:
            yield
        finally:
            self._run = ""

    def emit(self, record: logging.LogRecord) -> None:
        """Print a record unless the same line of code has warned before."""
        place = (record.pathname, record.lineno)
        if place not in self._said:
            self._said.add(place)
            super().emit(record)

    def format(self, record: logging.LogRecord) -> str:
        """Return the message in lines that fit a terminal."""
        text = super().format(record)
        named = f"{self._run}: {text}" if self._run else text
        return textwrap.fill(named, WIDTH_OF_TEXT, subsequent_indent="    ")


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
    console = Console(width=WIDTH_OF_TEXT)
    console.print(table)
    console.print(f"written to {folder}: summary.json, steps.png, every rank's weights")


def plot(
    step_s: Mapping[str, Sequence[float]], rows: Sequence[Mapping[str, Any]], file: Path
) -> None:
    """Draw a PNG: above what each run costs and learns, below how its step times spread.

    Args:
        step_s: seconds of each step, by "rule, sizes".
        rows: the results of the runs, in the order of the bars.
        file: where to write.
    """
    mpl.use("Agg")
    from matplotlib import pyplot

    figure, places = pyplot.subplot_mosaic(
        [["times", "accuracies"], ["spread", "spread"]],
        height_ratios=(3, 2),
        figsize=(11, 8),
        layout="constrained",
    )
    times, accuracies, spread = (places[name] for name in ("times", "accuracies", "spread"))
    figure.suptitle("Four ranks: rank 2 is three times slower, rank 3 sends gradients times -10")
    labels = [f"{row['rule'].replace('_', ' ')}\n{row['sizes']} sizes" for row in rows]
    colours = [COLOURS[row["sizes"]] for row in rows]
    step_ms = [1e3 * row["step_s"] for row in rows]
    for axes, heights, full, fmt in (
        (times, step_ms, max(step_ms), "%.0f ms"),
        (accuracies, [100 * row["test_accuracy"] for row in rows], 100, "%.1f %%"),
    ):
        axes.bar_label(axes.bar(labels, heights, color=colours), fmt=fmt)
        axes.tick_params("x", labelsize=9)  # four labels of twelve letters side by side
        axes.set_ylim(0, 1.1 * full)  # room for the numbers above the bars
        axes.spines[["top", "right"]].set_visible(False)
    times.set(title="Time of a step: shorter is better", ylabel="milliseconds, median")
    accuracies.set(title="Test accuracy: higher is better", ylabel="% of the test images")
    for label, seconds in step_s.items():
        rule, sizes = label.split(", ")
        style = "-" if rule == "trimmed_mean" else ":"
        ordered = sorted(1e3 * one for one in seconds)
        share = [100 * (at + 1) / len(ordered) for at in range(len(ordered))]
        name = label.replace("_", " ") + " sizes"
        spread.plot(ordered, share, style, color=COLOURS[sizes], label=name)
    spread.set(
        title="All steps, not only the median one",
        xlabel="step time, milliseconds",
        ylabel="% of steps that took\nat most this long",
        # A single step that the machine held up would squeeze all others to the left.
        xlim=(0, 1.5 * max(sorted(one)[len(one) * 95 // 100] for one in step_s.values()) * 1e3),
    )
    spread.legend(loc="lower right")
    figure.savefig(file, dpi=120)
    pyplot.close(figure)
