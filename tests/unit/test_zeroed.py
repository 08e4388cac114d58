"""Rules by parameters' names, and what a robust rule takes from those that few ranks use."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import Tensor

import loft_hvd as loft
from loft_hvd.errors import ArgumentError, ArgumentTypeError
from loft_hvd.pipeline.suspicion import zeroed
from loft_hvd.pipeline.suspicion.report import ZeroedParameter
from loft_hvd.transport.local import LocalTransport, run_ranks
from tests.support.alone import wrap as wrap_alone


class Model(torch.nn.Module):
    """A table, of which each rank touches a row of its own and all touch one, and a branch."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(8, 2)
        self.layer = torch.nn.Linear(2, 1)
        self.branch = torch.nn.Linear(2, 1)
        for parameter in self.parameters():
            torch.nn.init.constant_(parameter, 0.5)

    def forward(self, x: Tensor, *, takes_branch: bool) -> Tensor:
        h = self.table(x)
        result: Tensor = self.layer(h).sum()
        return result + self.branch(h).sum() if takes_branch else result


def train(transport: LocalTransport, rule: Any, *, num_steps: int = 1) -> tuple[Model, Any]:
    model = Model()
    optimizer = loft.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1),
        model.named_parameters(),
        rule=rule,
        transport=transport,
    )
    for _ in range(num_steps):
        optimizer.zero_grad()
        rows = torch.tensor([transport.rank, 7])
        model(rows, takes_branch=transport.rank == 1).backward()
        optimizer.step()
    return model, optimizer.report()


def test_a_parameter_that_few_ranks_use_is_reported_with_its_share(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        reports = [
            report for _, report in run_ranks(4, lambda end: train(end, loft.TrimmedMean(1)))
        ]
    expected = (
        ZeroedParameter("branch.bias", 1, 1),
        ZeroedParameter("branch.weight", 2, 2),
        # Rows 0 to 3 are one rank's each, row 7 everybody's; of two values.
        ZeroedParameter("table.weight", 10, 8),
    )
    assert [report.zeroed for report in reports] == [expected] * 4
    assert "80.0% of         10 values  table.weight" in str(reports[0])
    said = [each.getMessage() for each in caplog.records if each.name == zeroed.__name__]
    assert len(said) == 1
    assert (
        "of 3 parameters: branch.bias (100%), branch.weight (100%), table.weight (80%)" in said[0]
    )
    assert "'branch.bias': loft.Mean()" in said[0]


def test_a_rule_of_its_own_lets_it_train_and_tells_nothing() -> None:
    rule = {"table.*": loft.Mean(), "branch.*": "mean", "*": loft.TrimmedMean(1)}
    plain, _ = run_ranks(4, lambda end: train(end, loft.Mean(), num_steps=2))[0]
    for model, report in run_ranks(4, lambda end: train(end, rule, num_steps=2)):
        assert report.zeroed == ()
        torch.testing.assert_close(model.table.weight, plain.table.weight)
        torch.testing.assert_close(model.branch.weight, plain.branch.weight)


def test_a_rule_over_the_ranks_that_touched_it_keeps_their_median() -> None:
    def of_those_that_touched(gradients: Tensor) -> Tensor:
        """Return the median of the values that are not zero, [numel]."""
        touched = gradients.masked_fill(gradients == 0, torch.nan)
        return touched.nanmedian(dim=0).values.nan_to_num(0.0)

    rule = {"table.*": loft.Custom(of_those_that_touched), "*": loft.TrimmedMean(1)}
    for model, report in run_ranks(4, lambda end: train(end, rule)):
        # Of h = 0.5, each value's gradient is 0.5, and 1 where the branch is taken: rank 1's.
        assert model.table.weight.detach()[:, 0].tolist() == pytest.approx(
            [0.45, 0.40, 0.45, 0.45, 0.5, 0.5, 0.5, 0.45]
        )
        assert [each.name for each in report.zeroed] == ["branch.bias", "branch.weight"]


@pytest.mark.parametrize("rule", [loft.Mean(), loft.Median()], ids=str)
def test_what_all_ranks_use_is_not_told_and_no_step_after_the_looks_costs(rule: loft.Rule) -> None:
    def work(transport: LocalTransport) -> tuple[Any, bool]:
        weight = torch.nn.Parameter(torch.zeros(5))
        sgd = torch.optim.SGD([weight], lr=0.0)
        optimizer = loft.DistributedOptimizer(sgd, rule=rule, transport=transport)
        for step in range(205):
            optimizer.zero_grad()
            (weight * (1.0 + step + transport.rank)).sum().backward()
            optimizer.step()
        watch: Any = optimizer._world._judgement._zeroed  # type: ignore[union-attr]  # it has ranks
        return optimizer.report().zeroed, watch.has_ended

    assert run_ranks(3, work) == [((), True)] * 3


def test_first_pattern_that_fits_counts_and_a_groups_own_rule_goes_before() -> None:
    names = {"a.weight": (2,), "a.bias": (1,), "b.weight": (3,), "own": (4,)}
    params = {name: torch.nn.Parameter(torch.zeros(shape)) for name, shape in names.items()}
    groups: list[dict[str, Any]] = [
        {"params": [params[name] for name in list(names)[:3]]},
        {"params": [params["own"]], "rule": "median"},
    ]
    rule = {"*.bias": "mean", "a.*": loft.Median(), "*": loft.TrimmedMean(1)}
    optimizer = wrap_alone(
        torch.optim.SGD(groups, lr=0.1), named_parameters=params.items(), rule=rule
    )
    found = optimizer._options.collect()
    rules = {spec.name: str(found.rules[spec.rule]) for spec in found.specs}
    assert rules == {
        "a.weight": "median",
        "a.bias": "mean",
        "b.weight": "trimmed_mean:f=1",
        "own": "median",
    }
    with pytest.raises(ArgumentError, match=r"no pattern for parameter 'b\.weight', only 'a\.\*'"):
        wrap_alone(
            torch.optim.SGD(groups, lr=0.1),
            named_parameters=params.items(),
            rule={"a.*": rule["*"]},
        )


@pytest.mark.parametrize(
    ("rule", "error", "says"),
    [
        ({"tabel.*": loft.Mean(), "*": loft.Median()}, ArgumentError, "matches 'tabel"),
        ({3: loft.Mean()}, ArgumentTypeError, "pattern 3 must be a text"),
        ({"*": torch.median}, ArgumentTypeError, "is not a rule"),
        ({}, ArgumentError, r'no pattern for .* end it with one for all others: "\*"'),
    ],
)
def test_patterns_that_cannot_be_meant_are_refused(
    rule: Any, error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says):
        wrap_alone(rule=rule)


def test_a_rule_that_judges_rows_among_others_is_judged_by_the_model_too() -> None:
    rule = {"noname.0.0": loft.Mean(), "*": loft.Robust(1)}
    optimizer = wrap_alone(rule=rule, worker_momentum=0.0)
    assert optimizer._options.settings.scope == "auto"
    assert (
        wrap_alone(rule=rule, worker_momentum=0.0, scope="model")._options.settings.scope == "model"
    )
