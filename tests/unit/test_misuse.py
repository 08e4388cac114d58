"""Mistakes that a script makes: each is an error that says what was meant, or what was meant."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import loft_hvd as loft
from loft_hvd.config import Config
from loft_hvd.errors import ArgumentError, ArgumentTypeError, LoftError, PlanError, UsageError
from loft_hvd.runlog import RunLog
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


def test_a_parameter_that_thaws_is_not_left_to_each_rank() -> None:
    def work(transport: LocalTransport) -> None:
        found = model()
        found.first.weight.requires_grad_(False)
        optimizer = wrap(torch.optim.SGD(found.parameters(), lr=0.1), transport=transport)
        found.first.weight.requires_grad_(True)
        found(torch.ones(2, 3)).sum().backward()
        with pytest.raises(UsageError, match=r"shape \[4, 3\], has a gradient, but was frozen"):
            optimizer.step()

    run_ranks(2, work)


def test_a_group_is_added_whole_or_not_at_all() -> None:
    def work(transport: LocalTransport) -> tuple[float, float]:
        found = model()
        names = found.named_parameters()
        optimizer = wrap(
            torch.optim.SGD(found.parameters(), lr=0.1), named_parameters=names, transport=transport
        )
        with pytest.raises(ArgumentTypeError, match="is not a rule"):
            optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))], "rule": 3})
        assert len(optimizer.param_groups) == 1
        late = torch.nn.Parameter(torch.ones(1))
        optimizer.add_param_group({"params": [late]})
        (found(torch.ones(2, 3)).sum() + float(transport.rank) * late.sum()).backward()
        optimizer.step()
        return float(late.detach()), float(found.first.weight.detach().sum())

    first, second = run_ranks(2, work)
    assert first == second
    assert first[0] == pytest.approx(1.0 - 0.1 * 0.5)


def test_a_closure_may_be_evaluated_twice_in_a_step() -> None:
    class Twice(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            closure()
            return super().step(closure)

    def work(transport: LocalTransport) -> float:
        found = model()
        optimizer = wrap(Twice(found.parameters(), lr=0.1), transport=transport)

        def closure() -> float:
            optimizer.zero_grad()
            loss = found(torch.full((2, 3), 1.0 + transport.rank)).sum()
            loss.backward()
            return float(loss.detach())

        optimizer.step(closure)
        return float(found.first.weight.detach().sum())

    assert len(set(run_ranks(2, work))) == 1


def test_a_grad_scaler_reaches_a_fused_optimizer() -> None:
    values = []
    for is_wrapped in (False, True):
        found = model()
        inner = torch.optim.AdamW(found.parameters(), lr=0.1, fused=True)
        optimizer: Any = wrap(inner) if is_wrapped else inner
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40, growth_interval=1000)
        for step in range(12):
            optimizer.zero_grad()
            loss = found(torch.full((2, 3), 1e12 if step == 3 else 1.0)).sum()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        values.append(torch.cat([parameter.detach().flatten() for parameter in found.parameters()]))
    assert bool(values[0].isfinite().all())
    torch.testing.assert_close(values[1], values[0], rtol=0, atol=0)


def test_noise_is_new_at_every_step() -> None:
    attack = loft.attacks.Gaussian(sigma=1.0, seed=3)
    first, second = torch.zeros(1, 50), torch.ones(1, 50)
    assert torch.equal(attack(first, num_rows=1), attack(first, num_rows=1))
    assert not torch.equal(attack(first, num_rows=1), attack(second, num_rows=1))


def test_parameters_are_not_added_while_a_step_is_under_way() -> None:
    def work(transport: LocalTransport) -> list[float]:
        parameter, late = (torch.nn.Parameter(torch.zeros(1)) for _ in range(2))
        sgd = torch.optim.SGD([parameter], lr=1.0)
        optimizer = loft.DistributedOptimizer(sgd, [("p", parameter)], transport=transport)
        (4 * parameter).sum().backward()
        with pytest.raises(UsageError, match="between steps"):
            optimizer.add_param_group({"params": [late]})
        optimizer.step()
        optimizer.add_param_group({"params": [late]})
        optimizer.zero_grad()
        (2 * parameter + 3 * late).sum().backward()
        optimizer.step()
        return [*parameter.tolist(), *late.tolist()]

    assert run_ranks(2, work) == [[-6.0, -3.0]] * 2


def test_a_log_folder_that_works_is_taken_after_one_that_did_not(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    log = RunLog(None)
    log.try_open(tmp_path / "file" / "below")
    assert "no run log can be made there" in log.refusal
    log.try_open(tmp_path / "good")
    assert log.refusal == ""
    assert log.path is not None
