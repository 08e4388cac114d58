"""Random calls of the kernels against the definition, bit for bit.

    python -m tests.faults.kernel_cases 1000000             # cases 0 to 999,999
    python -m tests.faults.kernel_cases 10000 --first 5000  # 5,000 to 14,999

A case is one call of ``loft.aggregate`` or ``loft.diagnose``: any rule, dtype and instruction set
of this build, rows of any values at any place in memory, with weights, absent rows, threads. What
it must give is computed by ``reference.py``; where that refuses the rows, the call must refuse them
with the same error. The seed of a case is its number.
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor

import loft_hvd as loft
from loft_hvd._native import extension
from loft_hvd.aggregation import compute
from loft_hvd.aggregation.row_rules import RowRule
from loft_hvd.aggregation.rules import Rule
from loft_hvd.config import Config
from loft_hvd.errors import AggregationError, LoftError
from tests.support.gradients import DTYPES, as_found, bits, expected, hard_gradients

__all__ = ["Case", "draw_case", "wrong_in"]

_BITS = {8: torch.int64, 4: torch.int32, 2: torch.int16}
_MOST_WEIGHT = 2**30 - 1  # of all rows together, csrc/rules.h


@dataclass(frozen=True)
class Case:
    """One call."""

    seed: int
    gradients: Tensor  # [rows, numel]
    given: Any  # the same values, as they are passed
    rule: Rule
    weights: list[int] | None
    present: list[Any] | None  # [rows], or [rows, blocks]
    level: str
    threads: int
    every: int  # 0: aggregate, else diagnose

    def __str__(self) -> str:
        rows, numel = self.gradients.shape
        return (
            f"case {self.seed}: {self.rule} of {rows} rows of {numel} {self.gradients.dtype} as "
            f"{type(self.given).__name__}, weights {self.weights}, present {self.present}, "
            f"{self.level}, {self.threads} threads, diagnose every {self.every}"
        )


def draw_case(seed: int) -> Case:
    """Return the case of a seed."""
    draw = np.random.default_rng(seed)
    rows = _draw_rows(draw)
    numel = _draw_numel(draw, rows)
    dtype = DTYPES[draw.integers(len(DTYPES))]
    gradients = _draw_values(draw, rows, numel, dtype)
    rule = _draw_rule(draw, rows)
    is_far = draw.random() < 0.02  # from what rules take: too many Byzantine rows, absent ones
    every = 0
    weights, present = _draw_weights(draw, rows), _draw_present(draw, rows, rule, is_far=is_far)
    if present is None and (weights is None or min(weights) > 0) and draw.random() < 0.3:
        every = int(draw.choice([1, 2, 16]))
    module = extension()
    assert module is not None, "the C++ extension is not built"
    level = str(draw.choice(module.isa_levels()))
    threads = int(draw.integers(1, 5))
    given = _draw_layout(draw, gradients)
    return Case(seed, gradients, given, rule, weights, present, level, threads, every)


def _draw_rows(draw: np.random.Generator) -> int:
    kind = draw.random()
    if kind < 0.01:
        return int(draw.integers(65, 400))
    return int(draw.integers(1, 10 if kind < 0.6 else 65))


def _draw_numel(draw: np.random.Generator, rows: int) -> int:
    kind = draw.random()
    if kind < 0.0002:  # several blocks and threads
        return int(4_500_000 / rows) if rows < 12 else 40_000
    if kind < 0.004:
        return int(draw.integers(1000, 40_000)) // (1 + rows // 16)
    return int(draw.integers(0, 700 if kind < 0.1 else 70))


def _draw_values(draw: np.random.Generator, rows: int, numel: int, dtype: torch.dtype) -> Tensor:
    kind = draw.integers(8)
    if kind == 0:  # any bits
        width = _BITS[torch.empty(0, dtype=dtype).element_size()]
        raw = np.frombuffer(draw.bytes(rows * numel * 8), np.int64).reshape(rows, numel)
        return torch.from_numpy(raw.copy()).to(width).view(dtype)
    if kind <= 2:
        return hard_gradients(rows, numel, dtype, seed=int(draw.integers(2**31)))
    values = draw.standard_normal((rows, numel))
    if kind == 3:  # ties, also of zeros of both signs
        values = np.round(values) * draw.choice([-1.0, 1.0], values.shape)
    elif kind == 4:  # next to overflow, or below the smallest normal value
        largest, smallest = torch.finfo(dtype).max, torch.finfo(dtype).tiny
        values = values / 3 * float(draw.choice([largest, smallest], p=[0.7, 0.3]))
    elif kind == 5 and numel:  # rows that are off as a whole
        wrong = draw.integers(rows, size=1 + rows // 3)
        values[wrong] = draw.choice([np.nan, np.inf, -np.inf, 1e4, 0.0])
    with np.errstate(all="ignore"):
        return torch.from_numpy(values).to(dtype)


def _draw_layout(draw: np.random.Generator, gradients: Tensor) -> Any:
    """Return the same values as a matrix, as rows anywhere in memory, or as NumPy arrays."""
    kind = draw.integers(6)
    rows, numel = gradients.shape
    if kind == 0:
        return gradients
    if kind == 1:  # a transposed matrix: values of a row are not neighbours
        return gradients.t().contiguous().t()
    if kind == 2:  # a part of a wider one
        left, right = int(draw.integers(9)), int(draw.integers(9))
        wide = torch.empty(rows, left + numel + right, dtype=gradients.dtype)
        wide[:, left : left + numel] = gradients
        return wide[:, left : left + numel]
    if kind == 3 and gradients.dtype != torch.bfloat16:
        return gradients.numpy()
    return [_moved(row, int(draw.integers(17))) for row in gradients]


def _moved(row: Tensor, offset: int) -> Tensor:
    """Return a copy that begins ``offset`` values after the begin of its memory."""
    copied = torch.empty(offset + len(row), dtype=row.dtype)[offset:]
    copied.copy_(row)
    return copied


def _draw_rule(draw: np.random.Generator, rows: int) -> Rule:
    most = (rows - 1) // 2
    f = int(draw.integers(most + 1)) if draw.random() < 0.98 else most + 1
    coordinate: list[Callable[[], Rule]] = [
        loft.Mean,
        lambda: loft.Median(str(draw.choice(["midpoint", "lower", "upper"]))),
        lambda: loft.TrimmedMean(f),
        lambda: loft.MeanAroundMedian(f),
        lambda: loft.Phocas(f),
    ]
    if draw.random() < 0.8 or rows > 40:
        return coordinate[draw.integers(len(coordinate))]()
    inner = coordinate[draw.integers(2, 5)]
    seeing: list[Callable[[], Rule]] = [
        lambda: loft.ARC(inner()),
        lambda: loft.NNM(inner()),
        lambda: loft.ARC(loft.NNM(inner())),
        lambda: loft.Clip(inner(), norm=float(draw.choice([0.1, 1.0, 30.0]))),
        lambda: loft.Bucketing(loft.Median(), size=int(draw.integers(1, 4))),
        lambda: loft.MultiKrum(f),
        lambda: loft.GeometricMedian(f),
        lambda: loft.CentredClipping(f),
        lambda: loft.CAF(f),
        lambda: loft.PrincipalAxis(f),
        lambda: loft.Bulyan(f // 2),
        lambda: loft.MinimumDiameter(min(f, 4)),
        lambda: loft.Robust(f),
    ]
    return seeing[draw.integers(len(seeing))]()


def _draw_weights(draw: np.random.Generator, rows: int) -> list[int] | None:
    kind = draw.random()
    if kind < 0.5:
        return None
    if kind < 0.55:
        return [int(draw.integers(1, 9))] * rows
    if kind < 0.6:  # as large as they may be
        return [int(count) for count in draw.integers(1, _MOST_WEIGHT // rows + 1, rows)]
    least = 0 if kind < 0.7 else 1
    return [int(count) for count in draw.integers(least, 7, rows)]


def _draw_present(
    draw: np.random.Generator, rows: int, rule: Rule, *, is_far: bool
) -> list[Any] | None:
    if draw.random() < 0.75:
        return None
    # What a rule sees as a row ends where others are present: there the two may differ in blocks.
    shape = (
        (rows,) if isinstance(rule, RowRule) or draw.random() < 0.7 else (rows, draw.integers(1, 6))
    )
    mask = draw.random(shape) < (0.3 if is_far else 0.9)
    present: list[Any] = mask.tolist()
    return present


def wrong_in(case: Case) -> str:
    """Return what is wrong with what the kernels make of a case, or ""."""
    settings = partial(Config, isa=case.level, threads=case.threads)
    options: dict[str, Any] = {"weights": case.weights, "present": case.present}
    found: Any = None
    diagnostics = None
    error: LoftError | None = None
    with mock.patch.object(compute, "config", new=settings):
        try:
            if case.every:
                found, diagnostics = loft.diagnose(
                    case.given, case.rule, every=case.every, **options
                )
            else:
                found = loft.aggregate(case.given, case.rule, **options)
        except LoftError as raised:
            error = raised
    try:
        wanted = expected(case.gradients, case.rule, **options)
    except AggregationError as raised:
        return "" if type(error) is type(raised) else f"{error!r}, not {raised!r}"
    if error is not None:
        return f"{error!r}, where there is a result"
    has, should = bits(found), bits(wanted)
    if not torch.equal(has, should):
        at = int((has != should).nonzero()[0])
        return f"coordinate {at}: {has[at]:#x}, not {should[at]:#x}"
    if diagnostics is not None:
        told = as_found(case.gradients, wanted, case.rule, case.weights, every=case.every)
        for name in ("num_seen", "num_outside", "num_non_finite"):
            if getattr(diagnostics, name) != getattr(told, name):
                return f"{name} {getattr(diagnostics, name)}, not {getattr(told, name)}"
        pairs = diagnostics.squared_distance, told.squared_distance
        if not np.allclose(*pairs, rtol=1e-9, atol=0.0):
            return f"squared_distance {pairs[0]}, not {pairs[1]}"
    return ""


def main(number: int, first: int) -> int:
    began, wrong, drawn = time.monotonic(), [], Counter[str]()
    for seed in range(first, first + number):
        case = draw_case(seed)
        drawn[type(case.rule).__name__] += 1
        if text := wrong_in(case):
            wrong.append(case.seed)
            print(f"{case}\n    {text}", flush=True)
            if len(wrong) == 20:
                break
    done = sum(drawn.values())
    print(f"{done} cases from {first}, {len(wrong)} wrong, {time.monotonic() - began:.0f} s")
    print(", ".join(f"{name} {count}" for name, count in sorted(drawn.items())))
    return 1 if wrong else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("number", type=int, nargs="?", default=1_000_000)
    parser.add_argument("--first", type=int, default=0, help="the seed of the first case")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        sys.exit(main(options.number, options.first))
