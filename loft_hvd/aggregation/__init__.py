"""Robust aggregation of one gradient row per worker into one row."""

from loft_hvd.aggregation.aggregate import (
    aggregate,
    mean,
    mean_around_median,
    median,
    phocas,
    trimmed_mean,
)
from loft_hvd.aggregation.diagnostics import Diagnostics, diagnose
from loft_hvd.aggregation.rules import (
    Custom,
    Mean,
    MeanAroundMedian,
    Median,
    Phocas,
    Rule,
    Tolerance,
    TrimmedMean,
    parse_rule,
)

__all__ = [
    "Custom",
    "Diagnostics",
    "Mean",
    "MeanAroundMedian",
    "Median",
    "Phocas",
    "Rule",
    "Tolerance",
    "TrimmedMean",
    "aggregate",
    "diagnose",
    "mean",
    "mean_around_median",
    "median",
    "parse_rule",
    "phocas",
    "trimmed_mean",
]
