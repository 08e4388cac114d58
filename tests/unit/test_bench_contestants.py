"""What the kernels' benchmark checks before it times: a wrong contestant of any form is found."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch

from loft_hvd._native import extension
from loft_hvd.aggregation.aggregate import aggregate
from loft_hvd.bench import contestants, kernels
from loft_hvd.bench.contestants import (
    KernelRun,
    check_contestants,
    check_rules,
    check_threads,
    hard_rows,
)
from loft_hvd.bench.kernels import KernelBench
from loft_hvd.errors import AggregationError

pytestmark = pytest.mark.skipif(extension() is None, reason="the extension is not built here")


class Job(NamedTuple):
    rows: list[int]
    numel: int
    dtype: int
    rule: int
    kind: int
    f: int
    weights: list[int]
    out: int
    threads: int
    isa: str
    every: int


class Broken:
    """The extension, but where ``when`` says so the last value of a result is another."""

    def __init__(
        self, when: Callable[[Job], bool], *, diagnosis: bool = False, byte: int = 1
    ) -> None:
        self._when = when
        self._byte = byte
        self._diagnosis = diagnosis
        self._real: Any = extension()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def aggregate_cpu(self, *values: Any) -> Any:
        job = Job(*values)
        found = self._real.aggregate_cpu(*values)
        if self._when(job) and self._diagnosis:
            seen, outside, *others = found
            return (seen, [outside[0] + 1, *outside[1:]], *others)
        if self._when(job):
            width = {1: 4, 2: 2, 3: 2}[job.dtype]
            ctypes.memset(job.out + width * (job.numel - 1), self._byte, width)
        return found


@pytest.mark.parametrize("rows", [1, 2, 3, 8, 33])
def test_every_contestant_passes_at_every_level(rows: int) -> None:
    module = extension()
    assert module is not None
    check_rules(rows)
    check_contestants(module, rows, module.isa_levels())


WRONG: dict[str, Callable[[Job], bool]] = {
    "median, baseline,": lambda job: job.rule == 0 and job.isa == "baseline",
    "trimmed_mean f=2, LAST,": lambda job: job.rule == 1 and job.isa != "baseline" and job.f == 2,
    "mean, baseline,": lambda job: job.rule == 1 and job.f == 0,
    "median bfloat16, baseline,": lambda job: job.dtype == 3,
    "median float16, LAST,": lambda job: job.dtype == 2 and job.isa != "baseline",
    "trimmed_mean weighted, baseline,": lambda job: bool(job.weights),
    "trimmed_mean diagnosed 1/16, baseline,": lambda job: job.every == 16,
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_contestant_of_any_form_is_named(name: str) -> None:
    module: Any = Broken(WRONG[name])
    levels = module.isa_levels()
    if "LAST" in name and len(levels) == 1:
        pytest.skip("this CPU runs one level")
    levels = [levels[0], levels[-1]]
    with pytest.raises(AggregationError, match=name.replace("LAST", levels[-1])):
        check_contestants(module, 8, levels)


def test_nan_is_right_only_where_the_definition_has_it() -> None:
    module: Any = Broken(lambda job: job.rule == 0, byte=0xFF)
    with pytest.raises(AggregationError, match=r"median, baseline, of 8 rows.* 4098: nan instead"):
        check_contestants(module, 8, ["baseline"])


def test_a_kernel_that_writes_nothing_is_found() -> None:
    class Idle(Broken):
        def aggregate_cpu(self, *values: Any) -> Any:
            return None

    module: Any = Idle(lambda job: False)
    with pytest.raises(AggregationError, match="4099 of 4099"):
        check_contestants(module, 8, ["baseline"])


def test_a_wrong_diagnosis_is_found() -> None:
    module: Any = Broken(lambda job: job.every == 16, diagnosis=True)
    with pytest.raises(AggregationError, match="by its definition it is"):
        check_contestants(module, 8, ["baseline"])


def test_a_level_that_diagnoses_otherwise_is_found() -> None:
    module: Any = Broken(lambda job: job.every == 16 and job.isa != "baseline", diagnosis=True)
    levels = module.isa_levels()
    if len(levels) == 1:
        pytest.skip("this CPU runs one level")
    with pytest.raises(AggregationError, match="diagnoses others"):
        check_contestants(module, 8, levels)


@pytest.mark.parametrize(
    ("argument", "name"), [("weights", "equal weights"), ("present", "one row masked")]
)
def test_what_users_call_is_checked_too(
    argument: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:

    def wrong(gradients: torch.Tensor, rule: Any, **options: Any) -> Any:
        if options.get(argument) is not None:
            gradients, options = gradients.clamp(-1, 1), {"out": options["out"]}
        return aggregate(gradients, rule, **options)

    monkeypatch.setattr(contestants, "aggregate", wrong)
    module: Any = extension()
    with pytest.raises(AggregationError, match=name):
        check_contestants(module, 8, [contestants.called_level(module)])


def test_a_wrong_pass_is_found() -> None:
    class Short(Broken):
        def pass_cpu(self, rows: list[int], *others: Any) -> None:
            self._real.pass_cpu(rows[:-1], *others)

    module: Any = Short(lambda job: False)
    with pytest.raises(AggregationError, match="pass, baseline,"):
        check_contestants(module, 2, ["baseline"])


def test_a_wrong_rule_fails_the_check(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(gradients: torch.Tensor, rule: object, *, out: torch.Tensor) -> None:
        torch.mean(gradients[:-1], dim=0, out=out)

    monkeypatch.setattr(contestants, "aggregate", wrong)
    with pytest.raises(AggregationError, match="mean of 8 rows differs"):
        check_rules(8)


def test_threads_must_give_the_same_bits() -> None:
    pool = hard_rows(8)
    module: Any = extension()
    one = KernelRun(module, pool, torch.empty(pool.shape[1]), "baseline")
    check_threads(one, replace(one, threads=2))
    module = Broken(lambda job: job.threads == 2 and job.rule == 3)
    one = replace(one, module=module)
    with pytest.raises(AggregationError, match="phocas f=2 of 8 rows differs with 2 threads"):
        check_threads(one, replace(one, threads=2))


@pytest.mark.parametrize(
    ("when", "name"),
    [
        (lambda job: bool(job.weights), "trimmed_mean weighted, baseline,"),
        (lambda job: job.threads == 2 and job.dtype == 3, "median bfloat16 of 4 rows differs with"),
    ],
)
def test_nothing_is_timed_before_it_is_checked(
    when: Callable[[Job], bool], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: object, **options: object) -> None:
        raise AssertionError("timed first")

    monkeypatch.setattr(kernels, "extension", lambda: Broken(when))
    monkeypatch.setattr(kernels, "interleaved_minimum", refuse)
    bench = KernelBench(rows=(4,), numel=1024, threads=2, levels=("baseline",))
    with pytest.raises(AggregationError, match=name):
        list(kernels.measure_kernels(bench, report=print))
