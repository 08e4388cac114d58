"""Other ways to the same rules: torch's, NumPy's, and packages with robust rules of their own.

All of them need many passes, so they get fewer coordinates and are compared by the coordinate. Each
is checked against the definition first, on finite rows: NaN is where they differ from each other.
What does not import, run or agree is reported with its reason, and the rest is timed.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from loft_hvd.aggregation.reference import reference
from loft_hvd.aggregation.rules import Median, TrimmedMean
from loft_hvd.bench.contestants import hard_rows, rules_of

__all__ = [
    "PEER_PACKAGES",
    "TORCH_MEDIAN",
    "TORCH_MEDIAN_AGAIN",
    "Untimed",
    "Way",
    "find_ways",
    "peer_calls",
    "peer_rows",
    "peers",
]

PEER_PACKAGES = ("byzfl", "krum", "flwr")
TORCH_MEDIAN, TORCH_MEDIAN_AGAIN = "torch.median", "torch.median again"
_NUMEL = 200_000  # peers take 50 passes and more
_MOST_VALUES = 16_000_000  # torch.quantile, which two of them call, takes no more
_WORST = 1e-5  # relative; what float32 sums of 1,024 values in any order stay below

Array = npt.NDArray[Any]
Call = Callable[[], object]


@dataclass(frozen=True)
class Untimed:
    """What is not timed, and why."""

    contestant: str  # a package with its version, or one of its rules
    rows: int | None  # the row count, None where it does not matter
    reason: str  # what happened


@dataclass(frozen=True)
class Way:
    """Another way to a rule."""

    name: str  # what the table says
    prepare: Callable[[Tensor, int], Call]  # takes rows [rows, numel] and f, and returns the call
    # Takes the same as float64 and returns what the call must return.
    wanted: Callable[[Array, int], Array]
    has_f: bool = False  # f belongs to its name


def _median(values: Array, f: int) -> Array:
    return reference(values, Median())


def _lower_median(values: Array, f: int) -> Array:
    return reference(values, Median("lower"))


def _trimmed_mean(values: Array, f: int) -> Array:
    return reference(values, TrimmedMean(f))


_OWN = (
    Way(TORCH_MEDIAN, lambda rows, f: functools.partial(rows.median, dim=0), _lower_median),
    Way(
        "torch.sort",
        lambda rows, f: functools.partial(rows.sort, dim=0),
        lambda v, f: np.sort(v, 0),
    ),
    Way("numpy.median", lambda rows, f: lambda: np.median(rows.numpy(), axis=0), _median),
    Way(TORCH_MEDIAN_AGAIN, lambda rows, f: functools.partial(rows.median, dim=0), _lower_median),
)


def _as_results(rows: Tensor) -> list[tuple[list[Array], int]]:
    """Return rows as Flower takes them: the layers of a client, and its number of samples."""
    return [([row], 1) for row in rows.numpy()]


# Package, module, name, how to call it, the rule's definition.
# (f + 0.25) / n below: Flower takes a share and rounds share * n down, so f / n might give f - 1.
_THEIRS: tuple[tuple[str, str, str, Callable[[Any, Tensor, int], Call], Any], ...] = (
    ("byzfl", "byzfl", "Median", lambda m, r, f: functools.partial(m.Median(), r), _median),
    ("byzfl", "byzfl", "TrMean", lambda m, r, f: functools.partial(m.TrMean(f), r), _trimmed_mean),
    (
        "krum",
        "krum.primitives.aggregators.median",
        "Median",
        lambda m, r, f: functools.partial(m.Median.aggregate, r),
        _median,
    ),
    (
        "krum",
        "krum.primitives.aggregators.trimmed_mean",
        "TrimmedMean",
        lambda m, r, f: functools.partial(m.TrimmedMean.aggregate, r, f=f),
        _trimmed_mean,
    ),
    (
        "flwr",
        "flwr.server.strategy.aggregate",
        "aggregate_median",
        lambda m, r, f: functools.partial(m.aggregate_median, _as_results(r)),
        _median,
    ),
    (
        "flwr",
        "flwr.server.strategy.aggregate",
        "aggregate_trimmed_avg",  # of a share; it rounds the count down
        lambda m, r, f: functools.partial(
            m.aggregate_trimmed_avg, _as_results(r), (f + 0.25) / len(r)
        ),
        _trimmed_mean,
    ),
)


def peers() -> dict[str, str]:
    """Return the installed packages with robust aggregation of their own, and their versions."""
    found = {}
    for name in PEER_PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def find_ways(report: Callable[[Untimed], None]) -> list[Way]:
    """Import the packages that are installed; return all ways, and report what does not import."""
    # importlib by name: no package is a dependency, and any may break with a version of its own.
    versions = peers()
    ways = list(_OWN)
    for package, path, rule, call, wanted in _THEIRS:
        if package not in versions:
            continue
        name = f"{package} {versions[package]} {rule}"
        try:
            module = importlib.import_module(path)
        except Exception as error:  # whatever its import runs
            report(Untimed(name, None, f"does not import: {_say(error)}"))
            continue
        prepare = functools.partial(call, module)
        ways.append(Way(name, prepare, wanted, has_f=wanted is _trimmed_mean))
    return ways


def peer_calls(
    ways: Sequence[Way], pool: Tensor, report: Callable[[Untimed], None]
) -> tuple[dict[str, Call], int]:
    """Check every way, and try it once on the rows to be timed, float32 [rows, numel].

    Returns the calls by name, and the coordinates of a row that they get. ``report`` takes what
    does not run, or differs from the definition.
    """
    rows, numel = pool.shape
    numel = min(numel, _NUMEL, _MOST_VALUES // rows)
    few = pool[:, :numel].contiguous()
    f = next(rule.f for rule in rules_of(rows).values() if isinstance(rule, TrimmedMean))
    small = _finite_rows(rows)
    calls = {}
    for way in ways:
        name = f"{way.name} f={f}" if way.has_f else way.name
        # A package that raises or is wrong costs a line of the table, and not the others' times.
        try:
            found = _as_array(way.prepare(small, f)())
            wanted = way.wanted(small.double().numpy(), f)
            if found.shape != wanted.shape:
                raise ValueError(f"returns the shape {found.shape} instead of {wanted.shape}")
            # Relative above 1, absolute below: values near 0 come from sums of larger ones.
            error = np.abs(found - wanted) / np.maximum(np.abs(wanted), 1)
            worst = float(np.nan_to_num(error, nan=np.inf).max())
            call = way.prepare(few, f)
            call()
        except Exception as error:  # whatever a package raises
            report(Untimed(name, rows, f"does not run: {_say(error)}"))
            continue
        if worst > _WORST:
            report(Untimed(name, rows, f"differs from the definition by {worst:.2g}"))
            continue
        calls[name] = call
    return calls, numel


def _finite_rows(rows: int) -> Tensor:
    """Return rows with ties, and one row of 1e30 where a rule tolerates one."""
    values = hard_rows(rows)[:, :3000].clone()
    if rows >= 3:
        values[-1] = 1e30
    return values


def _as_array(found: object) -> Array:
    """Return the aggregate as float64, whether it came as a tensor, an array or in a tuple."""
    if isinstance(found, tuple | list):
        found = found[0]
    array: Array = found.numpy() if isinstance(found, Tensor) else np.asarray(found)
    return array.astype(np.float64)


def _say(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"


def peer_rows(untimed: Sequence[Untimed]) -> list[list[str]]:
    """Return rows to print: every package with its version, and what is not timed, and why."""
    versions, body = peers(), []
    for package in PEER_PACKAGES:
        if package not in versions:
            body.append([f"{package}: not installed"])
        elif not any(one.contestant.startswith(package) for one in untimed):
            body.append([f"{package} {versions[package]}: timed"])
    for one in untimed:
        rows = "" if one.rows is None else f", {one.rows} rows"
        body.append([f"{one.contestant}{rows}: {one.reason}"])
    return [["peers"], *body]
