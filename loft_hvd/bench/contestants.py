"""What of ours is timed: every rule in every form, as kernels and as users call them.

Before anything is timed, every contestant is checked against the definition, on rows made to break
it: ties, zeros of both signs, NaN, infinities and 1e30.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from loft_hvd.aggregation.aggregate import aggregate
from loft_hvd.aggregation.distances import distance_sums, mixed_rows
from loft_hvd.aggregation.mixing import Mix
from loft_hvd.aggregation.reference import reference, window
from loft_hvd.aggregation.rules import Mean, MeanAroundMedian, Median, Phocas, Rule, TrimmedMean
from loft_hvd.config import config
from loft_hvd.errors import AggregationError

__all__ = [
    "CALLED",
    "DIAGNOSED",
    "DISTANCES",
    "EQUAL",
    "KEPT",
    "MASKED",
    "MIXED",
    "NEW",
    "PASS",
    "PASS_AGAIN",
    "PASS_BURSTS",
    "WEIGHTED",
    "Contestant",
    "KernelRun",
    "called_level",
    "check_contestants",
    "check_rules",
    "check_threads",
    "contestants",
    "hard_rows",
    "pass_calls",
    "random_mix",
    "row_calls",
    "rules_of",
]

_NUMEL = 4099  # vectors of every width, and a tail: a prime
_POISON = -3e33  # what no result is: outputs hold it before a call
PASS, PASS_AGAIN, PASS_BURSTS = "pass", "pass again", "pass in bursts"
WEIGHTED, DIAGNOSED = "trimmed_mean weighted", "trimmed_mean diagnosed 1/16"
# What rules that see rows are made of: their table, and rows mixed and aggregated in one call.
DISTANCES, MIXED = "distances", "mixed trimmed_mean"
# Through `aggregate`, which divides weights by their divisor and leaves out absent rows.
CALLED, EQUAL = "called: trimmed_mean", "called: trimmed_mean, equal weights"
KEPT, MASKED = "called: median of all rows but one", "called: median, one row masked"
NEW = "called: median, new result"
_DTYPE_CODES = {torch.float64: 0, torch.float32: 1, torch.float16: 2, torch.bfloat16: 3}


def rules_of(rows: int) -> dict[str, Rule]:
    """Return the rules that are timed, by name; f is a quarter of the rows, at least 1."""
    # One f of many. Of 17 to 32 rows rules around a centre took at most 1.28 times as long as the
    # trimmed mean with any other (c2dec97, 753032e; 2-core AMD EPYC, 2026-11-21).
    f = max(1, rows // 4) if rows >= 3 else 0
    return {
        "mean": Mean(),
        "median": Median(),
        f"trimmed_mean f={f}": TrimmedMean(f),
        f"mean_around_median f={f}": MeanAroundMedian(f),
        f"phocas f={f}": Phocas(f),
    }


@dataclass(frozen=True)
class KernelRun:
    """What contestants work on, and how."""

    module: Any  # the extension
    pool: Tensor  # float32 rows, [rows, numel], each row's values next to each other
    out: Tensor  # float32, [numel]
    level: str  # instruction set of the kernels
    threads: int = 1  # of the kernels


@dataclass(frozen=True)
class Contestant:
    """One way to aggregate rows."""

    name: str  # what the table says
    rule: Rule
    num_rows: int  # the first rows, which are aggregated
    # What the first bytes of the float32 rows are read as: noise of every exponent.
    dtype: torch.dtype = torch.float32
    weights: tuple[int, ...] | None = None  # one a row, or None
    every: int = 0  # one block in so many is diagnosed; 0 for none
    # By `aggregate`, at the level that it chooses; else straight by the kernel.
    is_called: bool = False
    is_masked: bool = False  # all rows are given, and all but `num_rows` are absent
    is_new: bool = False  # the result is a new tensor

    def values(self, pool: Tensor) -> Tensor:
        """Return the rows [num_rows, numel] that this contestant aggregates."""
        # [num_rows, numel] float32 seen as 16 bits is [num_rows, 2 numel]; the first half is kept.
        return pool[: self.num_rows].view(self.dtype)[:, : pool.shape[1]]

    def call(self, run: KernelRun) -> Callable[[], object]:
        """Return the call; it fills the first bytes of ``run.out``, or returns a new tensor."""
        if self.is_called:
            given = run.pool if self.is_masked else self.values(run.pool)
            absent = len(given) - self.num_rows
            present = [True] * self.num_rows + [False] * absent if self.is_masked else None
            out = None if self.is_new else run.out
            return functools.partial(
                aggregate, given, self.rule, weights=self.weights, present=present, out=out
            )
        # Straight to the extension, with the addresses ready: what is timed is the kernel alone.
        job = (
            [row.data_ptr() for row in run.pool[: self.num_rows]],
            run.pool.shape[1],
            _DTYPE_CODES[self.dtype],
            self.rule.code,
            self.rule.kind_code,
            self.rule.f,
            list(self.weights or ()),
            run.out.data_ptr(),
        )
        call = run.module.aggregate_cpu
        return functools.partial(call, *job, run.threads, run.level, self.every)


def contestants(rows: int, *, is_called: bool) -> list[Contestant]:
    """Return what is timed at a row count; ``is_called`` with what goes through ``aggregate``."""
    rules = rules_of(rows)
    trimmed = next(rule for rule in rules.values() if isinstance(rule, TrimmedMean))
    found = [Contestant(name, rule, rows) for name, rule in rules.items()]
    for dtype in (torch.bfloat16, torch.float16):
        name = f"median {str(dtype).removeprefix('torch.')}"
        found.append(Contestant(name, Median(), rows, dtype=dtype))
    # 1 2 3 1 2 3 ...: no two of three rows weigh the same, so nothing is left out as equal.
    weights = tuple(1 + row % 3 for row in range(rows))
    found.append(Contestant(WEIGHTED, trimmed, rows, weights=weights))
    found.append(Contestant(DIAGNOSED, trimmed, rows, every=16))
    if is_called:
        found.append(Contestant(CALLED, trimmed, rows, is_called=True))
        found.append(Contestant(EQUAL, trimmed, rows, weights=(3,) * rows, is_called=True))
        found.append(Contestant(NEW, Median(), rows, is_called=True, is_new=True))
    if is_called and rows > 1:
        # The same n - 1 rows, given alone and beside a masked one: a mask is to cost nothing.
        found.append(Contestant(KEPT, Median(), rows - 1, is_called=True))
        found.append(Contestant(MASKED, Median(), rows - 1, is_called=True, is_masked=True))
    return found


def pass_calls(run: KernelRun) -> dict[str, Callable[[], object]]:
    """Return the two ways of reading the memory once, by name."""
    pointers = [row.data_ptr() for row in run.pool]
    job = (pointers, run.pool.shape[1], run.out.data_ptr(), run.threads, run.level)
    return {
        PASS: functools.partial(run.module.pass_cpu, *job, False),
        PASS_BURSTS: functools.partial(run.module.pass_cpu, *job, True),
    }


def random_mix(rows: int) -> Mix:
    """Return NNM around the trimmed mean, of rows of which each leaves out f others at random."""
    # The dearest case: rows that lie together leave out the same others, and are mixed once.
    (rule,) = (rule for rule in rules_of(rows).values() if isinstance(rule, TrimmedMean))
    random = np.random.default_rng(rows)
    matrix = np.full((rows, rows), 1 / (rows - rule.f))
    for row in range(rows):
        others = np.delete(np.arange(rows), row)
        matrix[row, random.choice(others, rule.f, replace=False)] = 0
    return Mix(np.ones(rows), matrix, None, rule)


def row_calls(run: KernelRun) -> dict[str, Callable[[], object]]:
    """Return what rules that see rows ask of the kernels, by name.

    DISTANCES returns its table, of squared distances above the diagonal; MIXED fills ``run.out``.
    """
    rows, numel = run.pool.shape
    job = ([row.data_ptr() for row in run.pool], numel, _DTYPE_CODES[torch.float32])
    how = (run.threads, run.level)
    table = np.zeros((rows + 1, rows + 1))
    mix = random_mix(rows)
    rule = (mix.rule.code, mix.rule.kind_code, mix.rule.f)
    by = (mix.scales.tolist(), mix.matrix.ravel().tolist(), rows)
    mixed: tuple[object, ...] = (*by, *rule, [], run.out.data_ptr())

    def measure() -> object:
        run.module.distances_cpu(*job, table.ctypes.data, *how)
        return table

    return {DISTANCES: measure, MIXED: functools.partial(run.module.mix_cpu, *job, *mixed, *how, 0)}


def called_level(module: Any) -> str:
    """Return the instruction set that ``aggregate`` runs: LOFT_HVD_ISA, else the best one here."""
    return config().isa or str(module.isa_levels()[-1])


def hard_rows(rows: int) -> Tensor:
    """Return float32 [rows, 4099] with ties, zeros of both signs, NaN, infinities and 1e30."""
    # The last of three and more rows is all NaN, infinite or 1e30, as one wrong row may be. In the
    # stretch from 3000 on more rows are so than any rule tolerates.
    random = np.random.default_rng(rows)
    values = random.standard_normal((rows, _NUMEL)).astype(np.float32)
    values[:, 1000:2000] = np.round(2 * values[:, 1000:2000]) / 2  # ties and zeros of both signs
    values[:, 2000:2100] = values[0, 2000:2100]  # all alike
    if rows >= 3:  # fewer tolerate none
        values[-1, ::3], values[-1, 1::3], values[-1, 2::3] = np.nan, np.inf, 1e30
    special = np.array([np.nan, np.inf, -np.inf, 1e30, -1e30, 0.0], np.float32)
    values[:, 3000:3200] = random.choice(special, (rows, 200))
    return torch.from_numpy(values)


def check_rules(rows: int, *, device: torch.device | None = None) -> None:
    """Compare every rule, as ``aggregate`` runs it on a device, with its definition, bit by bit."""
    pool = hard_rows(rows)
    # Rows that begin on 64 bytes, as shards in training do: kernels then take them in vectors.
    room = -_NUMEL % 16
    gradients = torch.nn.functional.pad(pool, (0, room)).to(device or "cpu")[:, :_NUMEL]
    for name, rule in rules_of(rows).items():
        out = torch.full((_NUMEL,), _POISON, device=gradients.device)
        aggregate(gradients, rule, out=out)
        _compare(name, rows, out.cpu(), _wanted(Contestant(name, rule, rows), pool))


def check_contestants(module: Any, rows: int, levels: Sequence[str]) -> None:
    """Compare contestants of a row count, and the passes, with the definition, at every level."""
    pool = hard_rows(rows)
    # The pass adds in row order, as this loop does: the same bits.
    total = torch.zeros(_NUMEL)
    for row in pool:
        total += row
    table, mix = distance_sums(list(pool)), random_mix(rows)
    mixed = torch.stack(mixed_rows(list(pool), mix)).numpy()
    wanted = torch.from_numpy(reference(mixed, mix.rule, precision=np.dtype(np.float32)))
    kept: dict[str, tuple[Tensor, object]] = {}
    for level in levels:
        run = KernelRun(module, pool, torch.empty(_NUMEL), level)
        for name, call in pass_calls(run).items():
            run.out.fill_(_POISON)
            call()
            _compare(f"{name}, {level},", rows, run.out, total)
        calls = row_calls(run)
        if not np.array_equal(np.asarray(calls[DISTANCES]()), table, equal_nan=True):
            raise AggregationError(f"bench kernels: {DISTANCES}, {level}, of {rows} rows differ")
        run.out.fill_(_POISON)
        calls[MIXED]()
        _compare(f"{MIXED}, {level},", rows, run.out, wanted.to(run.out.dtype))
        for contestant in contestants(rows, is_called=level == called_level(module)):
            found = _run(contestant, run)
            name = f"{contestant.name}, {level},"
            # The definition is slow and is asked once; other levels must have the first one's bits.
            if contestant.name in kept:
                first, first_diagnosis = kept[contestant.name]
                _compare(name, rows, found[0], first)
                if found[1] != first_diagnosis:
                    raise AggregationError(f"bench kernels: {name} of {rows} rows diagnoses others")
                continue
            _compare(name, rows, found[0], _wanted(contestant, pool))
            if contestant.every:
                _check_diagnosis(name, contestant, pool, found[1])
            kept[contestant.name] = found


def check_threads(one: KernelRun, many: KernelRun) -> None:
    """Compare what contestants give by one thread and by several, on the same rows, by bits."""
    rows = len(one.pool)
    # An error at the seam of two threads shows only where each has enough bytes to be started.
    pairs = [(name, call, pass_calls(many)[name]) for name, call in pass_calls(one).items()]
    pairs.append((MIXED, row_calls(one)[MIXED], row_calls(many)[MIXED]))
    for contestant in contestants(rows, is_called=False):
        pairs.append((contestant.name, contestant.call(one), contestant.call(many)))
    for name, call, other in pairs:
        one.out.fill_(_POISON)
        call()
        wanted = one.out.clone()
        many.out.fill_(_POISON)
        other()
        if not torch.equal(wanted.view(torch.int32), many.out.view(torch.int32)):
            raise AggregationError(
                f"bench kernels: {name} of {rows} rows differs with {many.threads} threads"
            )


def _run(contestant: Contestant, run: KernelRun) -> tuple[Tensor, object]:
    """Return the result on poisoned output, and the diagnosis or None."""
    run.out.fill_(_POISON)
    found = contestant.call(run)()
    if contestant.is_new:
        assert isinstance(found, Tensor)
        return found, None
    result = contestant.values(run.out[None])[0].clone()
    return result, found if contestant.every else None


def _wanted(contestant: Contestant, pool: Tensor) -> Tensor:
    """Return what the definition gives in the kernels' precision, as the contestant's dtype."""
    values = contestant.values(pool).float().numpy()
    wanted = reference(
        values, contestant.rule, weights=contestant.weights, precision=np.dtype(np.float32)
    )
    return torch.from_numpy(wanted).to(contestant.dtype)


def _compare(name: str, rows: int, found: Tensor, wanted: Tensor) -> None:
    """Raise unless every value is the same, zeros in their sign too; NaN is NaN."""
    # +0 == -0, so the signs are compared too; which NaN it is, unit tests compare.
    is_number = (found == wanted) & (found.signbit() == wanted.signbit())
    is_same = is_number | (found.isnan() & wanted.isnan())
    if not bool(is_same.all()):
        at = int((~is_same).nonzero()[0])
        raise AggregationError(
            f"bench kernels: {name} of {rows} rows differs from its definition in "
            f"{int((~is_same).sum())} of {len(is_same)} coordinates, the first of them {at}: "
            f"{float(found[at]):g} instead of {float(wanted[at]):g}"
        )


def _check_diagnosis(name: str, contestant: Contestant, pool: Tensor, diagnosis: Any) -> None:
    """Raise unless the counts of each row are those of the definition's window."""
    values = contestant.values(pool).numpy()
    low, high = window(values, contestant.rule, precision=np.dtype(np.float32))
    is_nan = np.isnan(values)  # above +inf
    is_below = (values < low) | (~is_nan & np.isnan(low))
    is_above = (values > high) | (is_nan & ~np.isnan(high))
    wanted = (
        values.shape[1],
        (is_below | is_above).sum(axis=1).tolist(),
        (~np.isfinite(values)).sum(axis=1).tolist(),
    )
    seen, outside, non_finite, _ = diagnosis
    if (seen, list(outside), list(non_finite)) != wanted:
        raise AggregationError(
            f"bench kernels: {name} of {pool.shape[0]} rows finds (coordinates, outside, not "
            f"finite) = {(seen, outside, non_finite)}; by its definition it is {wanted}"
        )
