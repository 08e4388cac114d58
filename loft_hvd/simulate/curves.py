"""Measured tables in a simulated cluster: seconds of computing by batch, read from CSV files.

The shipped ones, in ``curves/``, are MODEL-GPU: one GPU's steps without the exchange of gradients,
from the traces of Sia (Jayaram Subramanya et al., SOSP 2023), github.com/siasosp23/artifacts. They
are as measured: flat where a launch costs more than the samples, with steps, and here and there a
larger batch takes less.
"""

from __future__ import annotations

import csv
import os
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from loft_hvd.balance.latency import Curves, StepModel
from loft_hvd.balance.plan import Floats
from loft_hvd.errors import ArgumentError

__all__ = ["MeasuredModel", "Table", "read_table", "shipped_tables"]

_COLUMNS = ("local_batch_size", "compute_s")


@dataclass(frozen=True)
class Table:
    """Batches, rising, and the seconds that each took."""

    sizes: Floats
    seconds: Floats

    def at(self, sizes: Floats) -> Floats:
        """Return seconds by straight lines between what was measured.

        A smaller batch takes as long as the smallest, a larger one in proportion to the largest.
        """
        beyond = np.maximum(sizes / self.sizes[-1], 1.0)
        seconds: Floats = np.interp(sizes, self.sizes, self.seconds) * beyond
        return seconds


def shipped_tables() -> dict[str, Path]:
    """Return the tables that come with the package, by name."""
    folder = Path(__file__).parent / "curves"
    return {path.stem: path for path in sorted(folder.glob("*.csv"))}


def read_table(path: str | os.PathLike[str]) -> Table:
    """Read a table, a CSV file or the name of a shipped one.

    Raises:
        ArgumentError: it does not have the columns, or batches that do not rise, or no seconds.
        OSError: it cannot be read.
    """
    if not os.path.exists(path):
        path = shipped_tables().get(os.fspath(path), path)
    where = f"curve {os.fspath(path)}"
    with open(path, newline="", encoding="utf-8") as file:
        rows = csv.DictReader(file)
        if tuple(rows.fieldnames or ()) != _COLUMNS:
            raise ArgumentError(
                f"{where}: the first line is {rows.fieldnames}, but must name the columns "
                f"{', '.join(_COLUMNS)}"
            )
        try:
            known = np.array([[float(row[name]) for name in _COLUMNS] for row in rows])
        except (TypeError, ValueError) as error:
            raise ArgumentError(f"{where}: line {rows.line_num}: {error}; give numbers") from error
    if known.size == 0 or not np.isfinite(known).all() or not (known > 0).all():
        raise ArgumentError(f"{where} must have rows of finite numbers > 0, but has {known}")
    if not (np.diff(known[:, 0]) > 0).all():
        raise ArgumentError(f"{where}: batches must rise, but are {known[:, 0]}")
    return Table(known[:, 0], known[:, 1])


@dataclass(frozen=True)
class MeasuredModel(StepModel):
    """A model whose computing follows tables; ``compute_s`` is the factor on each of them."""

    tables: tuple[Table, ...] = field(default=())

    def compute(self, sizes: Floats) -> Floats:
        by_rank = [table.at(sizes[..., rank]) for rank, table in enumerate(self.tables)]
        return self.compute_s * np.stack(by_rank, axis=-1)

    def curves(self, low: Floats, high: Floats) -> Curves:
        """Tabulate every size; where a larger batch takes less, it counts as taking as long."""
        most = int((high - low).max())
        sizes = np.minimum(low + np.arange(most + 1)[:, None], high)  # [num_knots, world_size]
        return Curves(sizes.T, np.maximum.accumulate(self.times(sizes), axis=0).T)
