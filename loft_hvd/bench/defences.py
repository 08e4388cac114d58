"""What is tried against attacks: rules with where they look, and where momentum is kept.

ByzFL's rules stand beside ours where it is installed. Of those that both have ours is tried:
tests/property/test_byzfl.py holds nearest neighbours, ARC, Multi-Krum and the geometric median to
the same results. Here are the ones that we lack, and CAF, for which ByzFL draws a direction and
takes one step from there, where ours finds the one in which rows vary most. Its centred clipping is
left out: it needs a length for each problem, and keeps state from call to call.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from loft_hvd.aggregation.rule_text import parse_rule
from loft_hvd.aggregation.rules import Custom, Rule
from loft_hvd.bench.peers import Untimed
from loft_hvd.errors import AggregationError, ArgumentError, MissingDependencyError

__all__ = [
    "ALL_DEFENCES",
    "DEFENCES",
    "PEER_DEFENCES",
    "QUICK_DEFENCES",
    "Defence",
    "find_defences",
]

_SGD = ", momentum in SGD"
_SHARDS, _AUTO = " in shards", ", scope auto"
_BYZFL = "byzfl "
# The advised rule first; then parts of it and what else there is, over whole rows.
DEFENCES = (
    "robust",
    "robust, scope auto",
    "robust in shards",
    "mean, momentum in SGD",
    "trimmed_mean, momentum in SGD",
    "mean",
    "trimmed_mean",
    "median",
    "mean_around_median",
    "nnm+trimmed_mean",
    "arc+trimmed_mean",
    "multi_krum",
    "geometric_median",
    "centred_clipping",
    "caf",
    "arc+caf",
    "minimum_diameter",
    "bulyan",
    "arc+nnm+trimmed_mean",
    "arc+nnm+multi_krum",
    "arc+nnm+geometric_median",
    "arc+nnm+mean_around_median",
)
PEER_DEFENCES = (
    "byzfl GeometricMedian",
    "byzfl MoNNA",
    "byzfl CAF",
    "byzfl ARC+CAF",
    "byzfl SMEA",
    "byzfl ARC+NNM+Median",
    "byzfl ARC+NNM+GeometricMedian",
    "byzfl ARC+NNM+CAF",
    "byzfl ARC+NNM+SMEA",
)
ALL_DEFENCES = (*DEFENCES, *PEER_DEFENCES)
QUICK_DEFENCES = ("robust", "robust, scope auto", "mean", "trimmed_mean")
_WITHOUT_F = ("mean", "median")
_NO_F_THERE = ("Median", "GeometricMedian", "Average")


@dataclass(frozen=True)
class Defence:
    """A rule as its name has it: "robust", "robust, scope auto", "mean, momentum in SGD".

    A name that begins with "byzfl" is of ByzFL's rules, the outermost first.
    """

    name: str

    @property
    def has_sgd_momentum(self) -> bool:
        """Whether momentum is kept behind the rule instead of by workers."""
        return self.name.endswith(_SGD)

    @property
    def is_auto(self) -> bool:
        """Whether rows are in shards from the step at which workers are found to be alike."""
        return self.name.removesuffix(_SGD).endswith(_AUTO)

    def shards(self, num_workers: int) -> int:
        """Return into how many slices rows are cut, at first, before the rule sees them."""
        return num_workers if self.name.removesuffix(_SGD).endswith(_SHARDS) else 1

    def rule(self, f: int) -> Rule:
        """Return the rule that expects f Byzantine rows.

        Raises:
            ArgumentError: no rule has this name.
            MissingDependencyError: ByzFL is not installed.
        """
        text = self.name.removesuffix(_SGD)
        text = text.removesuffix(_AUTO if self.is_auto else _SHARDS)
        if text.startswith(_BYZFL):
            return _from_byzfl(text.removeprefix(_BYZFL), f)
        innermost, _, options = text.rpartition("+")[2].partition(":")
        if innermost in _WITHOUT_F:
            return parse_rule(text)
        return parse_rule(f"{text}{',' if options else ':'}f={f}")


@functools.cache
def _from_byzfl(text: str, f: int) -> Custom:
    """Return ByzFL's rule as one of ours: pre-aggregators, then an aggregator."""
    try:
        module: Any = importlib.import_module("byzfl")
    except Exception as error:  # whatever its import runs
        raise MissingDependencyError(
            f"byzfl's {text} needs byzfl ({type(error).__name__}: {error}); pip install byzfl, or "
            "leave it out"
        ) from error
    steps: list[Callable[[Any], Any]] = []
    for name in text.split("+"):
        made = getattr(module, name, None)
        if made is None:
            raise ArgumentError(f"byzfl has no {name}, of {text!r}")
        steps.append(made() if name in _NO_F_THERE else made(f=f))

    def aggregate(rows: Tensor) -> Tensor:
        found: Any = rows.clone()  # its ARC writes to the rows that it is given
        for step in steps:
            found = step(found)
        result: Tensor = found
        return result

    return Custom(aggregate, f=f)


def find_defences(
    names: tuple[str, ...], counts: tuple[tuple[int, int], ...], report: Callable[[Untimed], None]
) -> dict[tuple[int, int], list[Defence]]:
    """Return which defences are tried with each (workers, f); report the others with the reason."""
    found: dict[tuple[int, int], list[Defence]] = {count: [] for count in counts}
    for name in names:
        for num_workers, f in counts:
            defence = Defence(name)
            try:
                defence.rule(f).check(num_workers)
            except (AggregationError, MissingDependencyError) as error:
                report(Untimed(name, num_workers, str(error)))
                continue
            found[num_workers, f].append(defence)
    return found
