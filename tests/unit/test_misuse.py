"""Mistakes that a script makes: each is an error that says what was meant, or what was meant."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import loft_hvd as loft
from loft_hvd.config import Config
from loft_hvd.errors import ArgumentError, ArgumentTypeError, LoftError, PlanError, UsageError
from loft_hvd.transport import default
from loft_hvd.transport.local import LocalTransport, LocalWorld, run_ranks

UNTYPED: Any = loft  # calls that a type checker would refuse
ALONE: Any = LocalWorld(1).transport(0)


class Model(torch.nn.Module):
    """Two layers; ranks are threads, which would draw from one generator."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(3, 4), torch.nn.Linear(4, 1)
        for parameter in self.parameters():
            torch.nn.init.constant_(parameter, 0.5)

    def forward(self, x: torch.Tensor) -> Any:
        return self.second(self.first(x))


def model() -> Model:
    return Model()


def wrap(inner: torch.optim.Optimizer | None = None, **options: Any) -> Any:
    found = model()
    inner = torch.optim.SGD(found.parameters(), lr=0.1) if inner is None else inner
    return loft.DistributedOptimizer(inner, **{"transport": ALONE, **options})


def horovod_like() -> torch.optim.Optimizer:
    kind = type("SGD", (torch.optim.SGD,), {"__module__": "horovod.torch.optimizer"})
    made: torch.optim.Optimizer = kind(model().parameters(), lr=0.1)
    return made


def used_up() -> Any:
    names = model().named_parameters()
    list(names)
    return names


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: wrap(horovod_like()), ArgumentTypeError, "distributed already"),
        (lambda: wrap(wrap()), ArgumentTypeError, "distributed already"),
        (lambda: wrap(balancer=48), ArgumentTypeError, "of type int; give a loft.Balancer"),
        (lambda: wrap(rule=torch.median), ArgumentTypeError, "is not a rule; give one such as"),
        (lambda: wrap(rule=loft.Median), ArgumentTypeError, "is not a rule; give one such as"),
        (lambda: wrap(named_parameters=used_up()), ArgumentError, "is empty; a generator gives"),
        (
            lambda: wrap(named_parameters=model().named_parameters),
            ArgumentTypeError,
            "is a function; call it",
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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch_size": 16}, "'batch_size'; leave it away: the balancer gives"),
        ({"sampler": None}, "'sampler'; leave it away: seed="),
        ({"workers": 3}, "'workers'; it takes those of torch's own but"),
    ],
)
def test_a_ported_loader_hears_what_stands_for_its_arguments(
    arguments: dict[str, Any], message: str
) -> None:
    balancer = loft.Balancer(8, transport=ALONE)
    with pytest.raises(ArgumentTypeError, match=message):
        loft.DataLoader([1, 2, 3], balancer, **arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize("epoch", ["a", 1.5, None])
def test_an_epoch_is_a_whole_number(epoch: Any) -> None:
    loader: Any = loft.BatchSampler(10, loft.Balancer(8, transport=ALONE))
    with pytest.raises(ArgumentTypeError, match="give a whole number"):
        loader.set_epoch(epoch)


@pytest.mark.parametrize(
    ("told", "message"),
    [(Config(ranks=4), "one of 4 ranks"), (Config(is_elastic=True), "an elastic rank")],
)
def test_one_of_several_ranks_never_trains_alone(
    told: Config, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(default, "config", lambda: told)
    with pytest.raises(UsageError, match=f"{message}.*call hvd.init"):
        loft.Balancer(8)


def test_a_forgotten_balancer_is_missed() -> None:
    def work(transport: LocalTransport) -> int:
        balancer = loft.Balancer(6, "uniform", transport=transport)
        loader = loft.DataLoader(list(range(90)), balancer)  # type: ignore[arg-type]
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in loader:
                pass
        return sum("no backward pass takes their sizes" in str(one.message) for one in caught)

    # Threads share the filters of warnings, so say only that one came, and from one rank.
    assert sum(run_ranks(2, work)) in (1, 2)


def test_an_epoch_without_a_step_is_said() -> None:
    balancer = loft.Balancer(6, "uniform", transport=ALONE)
    loader = loft.DataLoader(list(range(5)), balancer, drop_last=True)  # type: ignore[arg-type]
    with pytest.warns(UserWarning, match="an epoch has no step: 5 samples, global_batch_size=6"):
        assert list(loader) == []
