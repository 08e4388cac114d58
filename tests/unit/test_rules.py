"""Rules: text, limits, what they survive."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from loft_hvd.aggregation.rule_text import parse_rule
from loft_hvd.aggregation.rules import (
    Custom,
    Mean,
    MeanAroundMedian,
    Median,
    Phocas,
    Rule,
    TrimmedMean,
)
from loft_hvd.errors import AggregationError, ArgumentError, ArgumentTypeError
from tests.support.gradients import assert_same_bits

RULES = [
    Mean(),
    Mean(reproducible=True),
    Median(),
    Median("lower"),
    Median("upper"),
    TrimmedMean(0),
    TrimmedMean(f=2),
    MeanAroundMedian(1),
    Phocas(3),
]


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_text_of_a_rule_reads_back_as_the_rule(rule: Rule) -> None:
    assert parse_rule(str(rule)) == rule


@pytest.mark.parametrize(
    "text",
    [
        "",
        "krum",
        "trimmed_mean",
        "trimmed_mean:f=x",
        "trimmed_mean:f=1,f=1",
        "median:f=1",
        "median:kind=middle",
        "mean:reproducible=1",
        "trimmed_mean:f=-1",
        "phocas:f",
    ],
)
def test_wrong_text_is_an_argument_error_that_repeats_it(text: str) -> None:
    with pytest.raises(ArgumentError):
        parse_rule(text)


@pytest.mark.parametrize("f", [1.0, "1", True, None])
def test_f_must_be_an_int(f: object) -> None:
    with pytest.raises(ArgumentTypeError):
        TrimmedMean(f)  # type: ignore[arg-type]  # the wrong type is the test


@pytest.mark.parametrize("rule_type", [TrimmedMean, MeanAroundMedian, Phocas])
@pytest.mark.parametrize("f", [0, 1, 2, 5])
def test_f_needs_two_f_plus_one_rows(rule_type: type[TrimmedMean], f: int) -> None:
    rule = rule_type(f)
    assert rule.min_rows == 2 * f + 1
    assert rule.check(2 * f + 1) == 2 * f + 1
    with pytest.raises(AggregationError, match=f"f={f}" if f else "at least"):
        rule.check(2 * f)


def test_check_counts_rows_present_with_weight() -> None:
    rule = TrimmedMean(1)
    assert rule.check(5, weights=[3, 0, 1, 1, 1], present=[True, True, False, True, True]) == 3
    with pytest.raises(AggregationError, match=r"2 count .*world_size=4.*1 absent.*1 of weight 0"):
        rule.check(4, weights=[1, 0, 1, 1], present=[True, True, True, False])


def test_more_than_1024_rows_are_refused() -> None:
    assert Median().check(1024) == 1024
    with pytest.raises(AggregationError, match="1025 rows"):
        Median().check(1025)


@pytest.mark.parametrize("rows", range(1, 12))
def test_median_survives_fewer_than_half_of_equal_rows(rows: int) -> None:
    survived = Median().tolerance(rows)
    assert survived.rows == (rows - 1) // 2
    assert survived.weight == (rows - 1) // 2


def test_tolerance_of_a_trimmed_mean_counts_rows_whatever_they_weigh() -> None:
    survived = TrimmedMean(1).tolerance([100, 1, 2, 3, 0])
    assert survived.rows == 1
    assert survived.weight == 2  # two rows weigh 3 at least


def test_tolerance_of_a_weighted_median_counts_weight() -> None:
    assert Median().tolerance([1, 1, 1, 97]).rows == 0
    assert Median().tolerance([1, 1, 1, 97]).weight == 49


@pytest.mark.parametrize("rows", [np.int64(5), np.uint8(5), [1] * 5, np.ones(5), torch.ones(5)])
def test_tolerance_takes_any_whole_numbers(rows: Any) -> None:
    assert Median().tolerance(rows) == Median().tolerance(5)
    assert TrimmedMean(np.int64(1)).tolerance(rows) == TrimmedMean(1).tolerance(5)


@pytest.mark.parametrize(
    ("weights", "error", "match"),
    [
        ([1.5, 1, 2, 3], ArgumentTypeError, "weight 1.5 of row 0 is no whole number"),
        ([0.5, 0.5], ArgumentTypeError, "scale shares up"),
        ([1, np.nan], ArgumentTypeError, "weight nan of row 1 .* give a whole number >= 0"),
        (np.ones((5, 1)), ArgumentTypeError, "give one number a row"),
        ([5, -3, 2], ArgumentError, "weight -3 of row 1 must be >= 0"),
        (5.0, ArgumentTypeError, "weights=5.0 .* a list"),
        (True, ArgumentTypeError, "weights=True"),
        (None, ArgumentTypeError, "weights=None"),
        (-2, ArgumentError, "-2 equal rows"),
    ],
)
def test_tolerance_of_no_counts_is_refused(
    weights: Any, error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match):
        Median().tolerance(weights)


@pytest.mark.parametrize(
    ("present", "way_out"),
    [
        ([False] * 5, "give rows that are present"),
        (
            [True] * 2 + [False] * 3,
            "two rows cannot outvote a wrong one; three can.*more of the other 3 count",
        ),
        ([True] * 3 + [False] * 2, "use f <= 1, add workers, or let more of the other 2 count"),
        ([True] * 5, "use f <= 2 or add workers"),
    ],
    ids=["none", "two", "some", "all"],
)
def test_too_few_rows_say_what_helps(present: list[bool], way_out: str) -> None:
    with pytest.raises(AggregationError, match=way_out):
        TrimmedMean(3).check(5, present=present)


def test_mean_survives_nothing() -> None:
    assert Mean().tolerance(5).rows == 0


def test_custom_rule_sets_its_own_minimum() -> None:
    rule = Custom(max, f=1)
    assert rule.min_rows == 3
    with pytest.raises(ArgumentTypeError, match="callable"):
        Custom(3)  # type: ignore[arg-type]  # the wrong type is the test


def test_code_of_the_rules_page_runs() -> None:
    page = Path(__file__).parents[2] / "docs" / "rules.md"
    _, code, *_ = re.split(r"^```(?:python)?\n", page.read_text(), flags=re.MULTILINE)
    names: dict[str, Any] = {}
    exec(code, names)
    given = {name: names[name] for name in ("weights", "present")}
    assert_same_bits(names["out"], names["loft"].trimmed_mean(names["rows"], f=1, **given))
    assert f"# {TrimmedMean(f=1).tolerance([64, 64, 32, 32, 64])}" in code
