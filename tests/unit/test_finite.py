"""NaN and infinity in one rank's part of a mean: rank, parameter and step are named at once."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import loft_hvd as loft
from loft_hvd.pipeline import scalers
from loft_hvd.pipeline.suspicion.report import NotFinite, SuspicionReport
from loft_hvd.runlog import read_run_log
from loft_hvd.transport.local import LocalTransport, run_ranks
from tests.support.ddp_buckets import backward

CULPRIT, STEP = 1, 3
Plant = Callable[[torch.nn.Module, int, int], float]
"""Of a model, a rank and a step (from 1): spoils what comes, and returns the loss's factor."""


def in_loss(value: float) -> Plant:
    return lambda _, rank, step: value if (rank, step) == (CULPRIT, STEP) else 1.0


def in_module(value: float, *, is_backward: bool) -> Plant:
    """Spoil one value of what the first layer's activation gives, or of its gradient."""

    def plant(model: torch.nn.Module, rank: int, step: int) -> float:
        if (rank, step) == (CULPRIT, STEP):

            def spoil(_module: object, _given: object, made: Tensor) -> Tensor:
                mask = torch.zeros_like(made)
                mask[0, 0] = value
                if not is_backward:
                    return made + mask
                made.register_hook(lambda gradient: gradient + mask)
                return made

            handle = model[1].register_forward_hook(spoil)  # type: ignore[index]  # Sequential
            model.register_forward_hook(lambda *_: handle.remove())
        return 1.0

    return plant


def in_gradient(value: float) -> Plant:
    """Spoil the last value of the first layer's weight's gradient."""

    def plant(model: torch.nn.Module, rank: int, step: int) -> float:
        if (rank, step) == (CULPRIT, 1):
            num_before = itertools.count(1)

            def spoil(gradient: Tensor) -> Tensor:
                gradient = gradient.clone()
                gradient[-1, -1] = value if next(num_before) == STEP else 0.0
                return gradient

            model[0].weight.register_hook(spoil)  # type: ignore[index]  # Sequential
        return 1.0

    return plant


PLANTS: dict[str, tuple[Callable[[float], Plant], str]] = {
    "loss": (in_loss, "2."),
    "activation": (lambda value: in_module(value, is_backward=False), "2."),
    "gradient of an activation": (lambda value: in_module(value, is_backward=True), "0."),
    "gradient": (in_gradient, "0.weight"),
}


def train(
    transport: LocalTransport,
    model: torch.nn.Module,
    plant: Plant,
    *,
    front: str = "optimizer",
    rule: loft.Rule | None = None,
    num_steps: int = STEP + 2,
    bucket_bytes: int = 1 << 25,
    **options: Any,
) -> tuple[SuspicionReport, torch.nn.Module]:
    model = copy.deepcopy(model)
    named = list(model.named_parameters())
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    hook: Any = None
    if front == "hook":
        hook = loft.ddp_hook(rule, transport=transport, named_parameters=named, **options)
    else:
        optimizer = loft.DistributedOptimizer(
            optimizer,
            named,
            rule=rule,
            transport=transport,
            bucket_bytes=bucket_bytes,
            **options,
        )
    random = torch.Generator().manual_seed(transport.rank)
    for step in range(1, num_steps + 1):
        optimizer.zero_grad()
        factor = plant(model, transport.rank, step)
        x = torch.randn(4, 6, generator=random)
        loss = torch.nn.functional.cross_entropy(model(x), torch.tensor([0, 1, 2, 0]))
        (loss * factor).backward()
        if hook is not None:
            parameters = [p for _, p in reversed(named)]
            given = {p: p.grad.flatten() for p in parameters if p.grad is not None}
            layout = [parameters[:2], parameters[2:]]
            if step == 1:  # as DDP's own before it knows in which order gradients come
                layout = [each[::-1] for each in layout]
            reduced = backward(hook, layout, given)
            for parameter, gradient in reduced.items():
                parameter.grad = gradient.view_as(parameter)
        optimizer.step()
    return (hook or optimizer).report(), model


def network() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))


def reports(world_size: int, plant: Plant, **options: Any) -> list[SuspicionReport]:
    model = network()
    return [
        report
        for report, _ in run_ranks(world_size, lambda ends: train(ends, model, plant, **options))
    ]


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [line for line in caplog.messages if "are not finite, " in line]


@pytest.fixture(autouse=True)
def _no_scaler_of_another_test() -> None:
    scalers._told().used.clear()


@pytest.mark.every(3)
@pytest.mark.parametrize("front", ["optimizer", "hook"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("where", PLANTS)
def test_rank_parameter_and_step_are_named_before_the_optimizer_steps(
    where: str, value: float, front: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make, parameter = PLANTS[where]
    for report in reports(3, make(value), front=front, log_dir=tmp_path):
        first = report.not_finite[0]
        assert (first.step, first.ranks) == (STEP, (CULPRIT,))
        assert first.parameter.startswith(parameter)
    (line,) = told(caplog)  # and not of all ranks, once all models have it
    assert line.startswith(f"step {STEP}: gradients of rank {CULPRIT} are not finite, ")
    assert f" in parameter '{parameter}" in line
    (path,) = tmp_path.iterdir()
    (entry,) = [entry for entry in read_run_log(path) if entry["kind"] == "not_finite"]
    assert (entry["step"], entry["found"]["ranks"]) == (STEP - 1, [CULPRIT])


@pytest.mark.every(3)
@pytest.mark.parametrize("rule", [loft.Mean(), loft.Mean(reproducible=True)], ids=str)
@pytest.mark.parametrize("bucket_bytes", [4, 1 << 25])
@pytest.mark.parametrize("world_size", [2, 5])
def test_it_is_named_whatever_the_buckets_and_the_lane(
    world_size: int, bucket_bytes: int, rule: loft.Rule
) -> None:
    found = reports(world_size, in_gradient(float("nan")), bucket_bytes=bucket_bytes, rule=rule)
    expected = NotFinite(STEP, (CULPRIT,), world_size, "0.weight", True)
    assert [report.not_finite[0] for report in found] == [expected] * world_size


@pytest.mark.parametrize("front", ["optimizer", "hook"])
def test_the_first_step_counts_back_from_the_loss_too(front: str) -> None:
    plant: Plant = lambda *_: float("nan")  # noqa: E731 - shorter than a function
    for report in reports(2, plant, front=front, num_steps=1):
        assert report.not_finite[0].ranks == (0, 1)
        assert report.not_finite[0].parameter.startswith("2.")
        assert str(report).startswith("step 1: gradients of both ranks are not finite, ")


def test_large_values_are_finite_although_their_sum_is_not() -> None:
    def reduce(transport: LocalTransport) -> SuspicionReport:
        weight = torch.nn.Parameter(torch.zeros(1000))
        optimizer = loft.DistributedOptimizer(
            torch.optim.SGD([weight], lr=0.0), [("weight", weight)], transport=transport
        )
        (weight * 1e38).sum().backward()
        optimizer.step()
        assert weight.grad is not None
        assert bool(weight.grad.isfinite().all())
        return optimizer.report()

    assert not run_ranks(2, reduce)[0].not_finite


def test_large_values_of_16_bits_are_finite_too() -> None:
    def reduce(transport: LocalTransport) -> SuspicionReport:
        weight = torch.nn.Parameter(torch.zeros(1000, dtype=torch.float16))
        hook = loft.ddp_hook(transport=transport)
        gradient = torch.full((1000,), 3e4, dtype=torch.float16)
        assert bool(backward(hook, [[weight]], {weight: gradient})[weight].isfinite().all())
        return hook.report()

    assert not run_ranks(2, reduce)[0].not_finite


def test_a_robust_rule_lets_none_through_and_marks_nothing() -> None:
    def reduce(transport: LocalTransport) -> Tensor:
        weight = torch.nn.Parameter(torch.zeros(5))
        optimizer = loft.DistributedOptimizer(
            torch.optim.SGD([weight], lr=0.0),
            [("weight", weight)],
            rule=loft.Median(),
            transport=transport,
        )
        rows = torch.ones(5)
        rows[3] = torch.nan if transport.rank == CULPRIT else 1.0
        (weight * rows).sum().backward()
        optimizer.step()
        assert not optimizer.report().not_finite
        assert weight.grad is not None
        return weight.grad

    assert all(grad.tolist() == [1.0] * 5 for grad in run_ranks(3, reduce))


def test_values_without_nan_keep_their_bits() -> None:
    model, plant = network(), in_loss(1.0)
    watched = run_ranks(3, lambda ends: train(ends, model, plant))[0][1]
    alone = run_ranks(3, lambda ends: train(ends, model, plant, diagnostics=False))[0][1]
    pairs = zip(watched.parameters(), alone.parameters(), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)


def test_nobody_looks_where_nobody_is_to_be_watched(caplog: pytest.LogCaptureFixture) -> None:
    found = reports(3, in_loss(float("nan")), diagnostics=False)
    assert not any(report.not_finite for report in found)
    assert not told(caplog)


@pytest.mark.parametrize("num_steps", [5, 25])
def test_a_step_that_a_scaler_skips_is_nobodys_fault_unless_it_skips_all(
    num_steps: int, caplog: pytest.LogCaptureFixture
) -> None:
    scaler = torch.amp.GradScaler("cpu")
    infinite = torch.tensor(float("inf"))
    found = reports(3, lambda *_: float(scaler.scale(infinite)), num_steps=num_steps)
    assert len(found[0].not_finite) == min(num_steps, 8)  # the report has it all the same
    assert len(told(caplog)) == (num_steps > 20)


@pytest.mark.parametrize("kind", ["gone", "disabled", "idle"])
def test_a_scaler_that_scales_no_loss_hides_nothing(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    scaler = torch.amp.GradScaler("cpu", enabled=kind != "disabled")
    spoil = in_gradient(float("nan"))

    def plant(model: torch.nn.Module, rank: int, step: int) -> float:
        factor = spoil(model, rank, step)
        if kind == "gone" and step == 1:
            torch.amp.GradScaler("cpu").scale(torch.ones(()))
        elif kind == "disabled":
            scaler.scale(torch.ones(()))
        return factor

    reports(3, plant)
    assert scaler.is_enabled() == (kind != "disabled")
    assert len(told(caplog)) == 1


class OwnScaler(torch.amp.GradScaler):
    """As torch's ``ShardedGradScaler``: it scales by itself."""

    def scale(self, outputs: Any) -> Any:
        return outputs * 2.0**16


@pytest.mark.parametrize("front", ["optimizer", "hook"])
def test_one_of_several_scalers_hides_a_step_that_overflows(
    front: str, caplog: pytest.LogCaptureFixture
) -> None:
    scaler, off = OwnScaler("cpu"), torch.amp.GradScaler("cpu", enabled=False)

    def plant(*_: object) -> float:
        factor = float(scaler.scale(torch.tensor(float("inf"))))
        off.scale(torch.ones(()))
        return factor

    reports(3, plant, front=front)
    assert not told(caplog)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # as torch traces any call
def test_a_compiled_scale_is_known_by_the_scalers_step(caplog: pytest.LogCaptureFixture) -> None:
    def reduce(transport: LocalTransport) -> bool:
        weight = torch.nn.Parameter(torch.ones(3))
        optimizer = loft.DistributedOptimizer(
            torch.optim.SGD([weight], lr=0.0), [("weight", weight)], transport=transport
        )
        scaler = torch.amp.GradScaler("cpu")
        compiled = torch.compile(lambda: scaler.scale((weight * torch.inf).sum()), backend="eager")
        compiled().backward()
        scaler.step(optimizer)
        return bool(optimizer.report().not_finite)

    assert run_ranks(2, reduce)[0]
    assert not told(caplog)


def test_what_goes_on_is_told_ever_more_seldom(caplog: pytest.LogCaptureFixture) -> None:
    def reduce(transport: LocalTransport) -> None:
        weight = torch.nn.Parameter(torch.zeros(3))
        optimizer = loft.DistributedOptimizer(
            torch.optim.SGD([weight], lr=0.0), [("weight", weight)], transport=transport
        )
        for _ in range(20):
            optimizer.zero_grad()
            (weight * (torch.nan if transport.rank == CULPRIT else 1.0)).sum().backward()
            optimizer.synchronize()  # and the script skips the step

    run_ranks(3, reduce)
    assert len(told(caplog)) == 5  # after 1, 2, 4, 8, 16
