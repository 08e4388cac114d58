"""Mistakes that a script makes at the face: each is an error that says what was meant."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import loft_hvd as loft
from loft_hvd.errors import ArgumentError, ArgumentTypeError, LoftError, PlanError, UsageError
from tests.support.alone import ALONE, model, wrap

UNTYPED: Any = loft  # calls that a type checker would refuse


# What an optimizer of Horovod's keeps.
KEPT: dict[str, Any] = {
    "_parameter_names": {},
    "_compression": None,
    "_groups": None,
    "process_set": None,
    "op": None,
    "backward_passes_per_step": 1,
    "gradient_predivide_factor": 1.0,
    "sparse_as_dense": False,
    "_grad_accs": [],
    "_handles": {},
    "_allreduce_delay": {},
}


def horovod_like(**kept: Any) -> torch.optim.Optimizer:
    kind = type("SGD", (torch.optim.SGD,), {"__module__": "horovod.torch.optimizer"})
    made: torch.optim.Optimizer = kind(model().parameters(), lr=0.1)
    vars(made).update(kept)
    return made


def used_up() -> Any:
    names = model().named_parameters()
    list(names)
    return names


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: wrap(horovod_like()), ArgumentTypeError, "no _parameter_names.* the torch opt"),
        (lambda: wrap(horovod_like(_starting_models={})), ArgumentError, "Adasum .* not offered"),
        (lambda: wrap(horovod_like(**KEPT, step=print)), UsageError, "step.. of .* was replaced"),
        (lambda: wrap(horovod_like(**{**KEPT, "_handles": {1: 2}})), UsageError, "on their way"),
        (lambda: wrap(horovod_like(**KEPT), op="sum"), ArgumentError, "op is taken over from"),
        (lambda: type(wrap())([], None), ArgumentTypeError, "turn them round: loft.Distributed"),
        (lambda: wrap(wrap()), ArgumentTypeError, "distributed already"),
        (lambda: wrap(balancer=48), ArgumentTypeError, "of type int; give a loft.Balancer"),
        (lambda: wrap(rule=torch.median), ArgumentTypeError, "is not a rule; give one such as"),
        (lambda: wrap(rule=loft.Median), ArgumentTypeError, "is not a rule; give one such as"),
        (lambda: wrap(named_parameters=used_up()), ArgumentError, "is empty; a generator gives"),
        (
            lambda: wrap(named_parameters=model().named_parameters),
            ArgumentTypeError,
            "is a function; give what it returns",
        ),
        (lambda: wrap(rule=loft.Median(), op="sum"), ArgumentError, "does not take op=Sum"),
        (lambda: loft.average(1.0, -1, transport=ALONE), ArgumentError, "count=-1 must be >= 0"),
        (lambda: UNTYPED.average(1.0, 0.5), ArgumentTypeError, "count=0.5 is of type float"),
        (lambda: UNTYPED.Balancer(8, None, transport=ALONE), ArgumentTypeError, "of type NoneType"),
        (
            lambda: UNTYPED.Balancer(8, np.array([8]), transport=ALONE),
            ArgumentTypeError,
            "of type ndarray; it takes 'uniform'|of type ndarray; it",
        ),
        (lambda: UNTYPED.Balancer(8, [8.9], transport=ALONE), ArgumentTypeError, "8.9 is of type"),
        (lambda: UNTYPED.Balancer(8, ["8"], transport=ALONE), ArgumentTypeError, "'8' is of type"),
        (lambda: loft.Balancer(8, [10, -2], transport=ALONE), PlanError, "-2 is negative"),
        (lambda: loft.Balancer(8, [], transport=ALONE), PlanError, r"policy=\[\] has no samples"),
        (lambda: loft.Balancer(8, [0], transport=ALONE), PlanError, r"policy=\[0\] has no samples"),
        (
            lambda: UNTYPED.allreduce(np.ones(3), loft.Median(), name="x", transport=ALONE),
            ArgumentTypeError,
            "of type ndarray; give a torch.Tensor",
        ),
        (lambda: UNTYPED.median([[1.0], [2.0]]), ArgumentTypeError, "these is of type list"),
    ],
)
def test_a_mistake_is_named(call: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message) as caught:
        call()
    assert isinstance(caught.value, LoftError)
