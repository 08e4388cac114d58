"""What of ours is timed: every rule in every form, as kernels and as users call them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from loft_hvd.aggregation.aggregate import aggregate
from loft_hvd.aggregation.rules import Mean, MeanAroundMedian, Median, Phocas, Rule, TrimmedMean
from loft_hvd.config import config

__all__ = [
    "CALLED",
    "DIAGNOSED",
    "EQUAL",
    "KEPT",
    "MASKED",
    "PASS",
    "PASS_AGAIN",
    "PASS_BURSTS",
    "WEIGHTED",
    "Contestant",
    "Place",
    "called_level",
    "contestants",
    "pass_calls",
    "rules_of",
]

PASS, PASS_AGAIN, PASS_BURSTS = "pass", "pass again", "pass in bursts"
WEIGHTED, DIAGNOSED = "trimmed_mean weighted", "trimmed_mean diagnosed 1/16"
# Through `aggregate`, which divides weights by their divisor and leaves out absent rows.
CALLED, EQUAL = "called: trimmed_mean", "called: trimmed_mean, equal weights"
KEPT, MASKED = "called: median of all rows but one", "called: median, one row masked"
_RULE_CODES = {Median: 0, TrimmedMean: 1, Mean: 1, MeanAroundMedian: 2, Phocas: 3}
_DTYPE_CODES = {torch.float64: 0, torch.float32: 1, torch.float16: 2, torch.bfloat16: 3}


def rules_of(rows: int) -> dict[str, Rule]:
    """Return the rules that are timed, by name; f is a quarter of the rows, at least 1."""
    f = max(1, rows // 4) if rows >= 3 else 0
    return {
        "mean": Mean(),
        "median": Median(),
        f"trimmed_mean f={f}": TrimmedMean(f),
        f"mean_around_median f={f}": MeanAroundMedian(f),
        f"phocas f={f}": Phocas(f),
    }


@dataclass(frozen=True)
class Place:
    """Where contestants run.

    Attributes:
        module: the extension.
        pool: float32 rows, [rows, numel], each row's values next to each other.
        out: float32, [numel].
        level: instruction set of the kernels.
        threads: of the kernels.
    """

    module: Any
    pool: Tensor
    out: Tensor
    level: str
    threads: int = 1


@dataclass(frozen=True)
class Contestant:
    """One way to aggregate rows.

    Attributes:
        name: what the table says.
        rule: the rule.
        num_rows: the first rows, which are aggregated.
        dtype: what the first bytes of the float32 rows are read as: noise of every exponent.
        weights: one a row, or None.
        every: one block in so many is diagnosed; 0 for none.
        is_called: by ``aggregate``, at the level that it chooses; else straight by the kernel.
        is_masked: all rows are given, and all but ``num_rows`` are absent.
    """

    name: str
    rule: Rule
    num_rows: int
    dtype: torch.dtype = torch.float32
    weights: tuple[int, ...] | None = None
    every: int = 0
    is_called: bool = False
    is_masked: bool = False

    def values(self, pool: Tensor) -> Tensor:
        """Return the rows [num_rows, numel] that this contestant aggregates."""
        return pool[: self.num_rows].view(self.dtype)[:, : pool.shape[1]]

    def call(self, place: Place) -> Callable[[], object]:
        """Return the call; it fills the first bytes of ``place.out``."""
        if self.is_called:
            given = place.pool if self.is_masked else self.values(place.pool)
            absent = len(given) - self.num_rows
            present = [True] * self.num_rows + [False] * absent if self.is_masked else None
            return functools.partial(
                aggregate, given, self.rule, weights=self.weights, present=present, out=place.out
            )
        job = (
            [row.data_ptr() for row in place.pool[: self.num_rows]],
            place.pool.shape[1],
            _DTYPE_CODES[self.dtype],
            _RULE_CODES[type(self.rule)],
            0,  # of medians the midpoint
            getattr(self.rule, "f", 0),
            list(self.weights or ()),
            place.out.data_ptr(),
        )
        call = place.module.aggregate_cpu
        return functools.partial(call, *job, place.threads, place.level, self.every)


def contestants(rows: int, *, is_called: bool) -> list[Contestant]:
    """Return what is timed at a row count.

    Args:
        rows: row count.
        is_called: with what goes through ``aggregate``, which runs one level only.
    """
    rules = rules_of(rows)
    trimmed = next(rule for rule in rules.values() if isinstance(rule, TrimmedMean))
    found = [Contestant(name, rule, rows) for name, rule in rules.items()]
    for dtype in (torch.bfloat16, torch.float16):
        name = f"median {str(dtype).removeprefix('torch.')}"
        found.append(Contestant(name, Median(), rows, dtype=dtype))
    weights = tuple(1 + place % 3 for place in range(rows))
    found.append(Contestant(WEIGHTED, trimmed, rows, weights=weights))
    found.append(Contestant(DIAGNOSED, trimmed, rows, every=16))
    if is_called:
        found.append(Contestant(CALLED, trimmed, rows, is_called=True))
        found.append(Contestant(EQUAL, trimmed, rows, weights=(3,) * rows, is_called=True))
    if is_called and rows > 1:
        found.append(Contestant(KEPT, Median(), rows - 1, is_called=True))
        found.append(Contestant(MASKED, Median(), rows - 1, is_called=True, is_masked=True))
    return found


def pass_calls(place: Place) -> dict[str, Callable[[], object]]:
    """Return the two ways of reading the memory once, by name."""
    pointers = [row.data_ptr() for row in place.pool]
    job = (pointers, place.pool.shape[1], place.out.data_ptr(), place.threads, place.level)
    return {
        PASS: functools.partial(place.module.pass_cpu, *job, False),
        PASS_BURSTS: functools.partial(place.module.pass_cpu, *job, True),
    }


def called_level(module: Any) -> str:
    """Return the instruction set that ``aggregate`` runs: LOFT_HVD_ISA, else the best one here."""
    return config().isa or str(module.isa_levels()[-1])
