"""Mistakes end on every rank with an error that names them, and no rank hangs."""

from __future__ import annotations

import horovod.torch as hvd
import pytest
import torch

import loft_hvd as loft
from loft_hvd.errors import AggregationError, ArgumentError, MismatchError, PlanError
from tests.support.training import make_model

pytestmark = pytest.mark.skipif("hvd.size() == 1", reason="needs two ranks")


def wrap(model: torch.nn.Module, **options: object) -> object:
    make = loft.DistributedOptimizer
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    return make(sgd, model.named_parameters(), **options)  # type: ignore[arg-type]  # any option


def test_f_too_large() -> None:
    with pytest.raises(AggregationError, match=rf"f={hvd.size()} needs"):
        wrap(make_model(), rule=loft.TrimmedMean(f=hvd.size()))


def test_sizes_that_do_not_add_up() -> None:
    with pytest.raises(PlanError, match="adds up to"):
        loft.Balancer(16, policy=[1] * hvd.size() if hvd.size() != 16 else [2] * 16)


def test_wrong_number_of_sizes() -> None:
    with pytest.raises(PlanError, match=f"world_size={hvd.size()}"):
        loft.Balancer(16, policy=[1] * hvd.size() + [16 - hvd.size()])


def test_too_few_ranks_with_samples_for_the_rule() -> None:
    if hvd.size() < 3:
        pytest.skip("a rule with f=1 needs three ranks")
    balancer = loft.Balancer(16, policy=[8, 8] + [0] * (hvd.size() - 2))
    with pytest.raises(PlanError, match="needs 3 ranks"):
        wrap(make_model(), rule=loft.TrimmedMean(f=1), balancer=balancer)


def test_duplicate_names() -> None:
    model = make_model()
    names = [("same", parameter) for parameter in model.parameters()]
    with pytest.raises(ArgumentError, match="more than once"):
        loft.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), names)


def test_shapes_that_differ_name_rank_and_parameter() -> None:
    model = torch.nn.Linear(4 if hvd.rank() else 5, 3)
    odd = "[0]" if hvd.size() > 2 else "[1]"  # in a tie the lower rank is right
    with pytest.raises(MismatchError) as caught:
        wrap(model)
    assert "parameter weight" in str(caught.value)
    assert f"on ranks {odd}" in str(caught.value)


def test_rules_that_differ_are_named() -> None:
    rule = loft.Median() if hvd.rank() else loft.Mean()
    with pytest.raises(MismatchError, match=r"rule= of parameter \S+ differs on ranks \[[01]\]"):
        wrap(make_model(), rule=rule)


def test_a_missing_parameter_on_one_rank() -> None:
    model = torch.nn.Linear(4, 3, bias=hvd.rank() == 0)
    with pytest.raises(MismatchError, match="other things"):
        wrap(model)


def test_balancers_that_differ_are_named() -> None:
    odd = hvd.size() - 1
    with pytest.raises(MismatchError, match=rf"global_batch_size differs on ranks \[{odd}\]"):
        loft.Balancer(64 + (hvd.rank() == odd))


def test_integer_parameters_are_refused() -> None:
    whole = torch.nn.Parameter(torch.zeros(3, dtype=torch.int64), requires_grad=False)
    with pytest.raises(ArgumentError, match="no parameter requires a gradient"):
        loft.DistributedOptimizer(torch.optim.SGD([whole], lr=0.1), [("whole", whole)])
