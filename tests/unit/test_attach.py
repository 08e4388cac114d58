"""``attach`` on an optimizer shaped like Horovod's, with ranks that are threads."""

from __future__ import annotations

import functools
import gc
import json
import weakref
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

import loft_hvd as loft
from loft_hvd.balance.plan import StepSizes
from loft_hvd.errors import ArgumentTypeError, MismatchError, UsageError
from loft_hvd.transport.base import Abilities
from loft_hvd.transport.local import LocalTransport, LocalWorld, run_ranks
from tests.support.clock import Clock
from tests.support.passes import HeldSizes
from tests.support.worlds import environment
from tests.support.wrapped import give_gradients, make_parameters


class HorovodLike(torch.optim.SGD):
    """As Horovod's optimizer: ``step`` synchronizes, then calls the user's class's ``step``."""

    backward_passes_per_step = 1
    _parameter_names: Mapping[torch.Tensor, str] = {}
    process_set: Any = None

    def synchronize(self) -> None: ...

    def step(self, closure: Any = None) -> Any:
        self.synchronize()
        return super().step(closure)


class Model(torch.nn.Module):
    def __init__(self, clock: Clock, compute_s: float) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(1, 1, bias=False)
        torch.nn.init.ones_(self.inner.weight)
        self._clock, self._compute_s = clock, compute_s

    def forward(self, x: torch.Tensor) -> Any:
        self._clock.now += self._compute_s
        return self.inner(x)


def train(
    balancer: loft.Balancer, clock: Clock, *, fetch_s: float, compute_s: float, num_steps: int
) -> None:
    model = Model(clock, compute_s)
    optimizer = HorovodLike(model.parameters(), lr=0.0)
    attachment = loft.attach(optimizer, balancer)
    for step in range(num_steps):
        if step % 4 == 2:  # an evaluation, on one rank's clock as long as many steps
            clock.now += 100.0 * balancer.rank
            with torch.no_grad():
                model(torch.ones(2, 1))
        clock.now += fetch_s
        optimizer.zero_grad()
        model(torch.ones(2, 1)).mean().backward()
        optimizer.step()
    attachment.detach()


@pytest.mark.parametrize(
    ("rank", "fetch_s", "compute_s", "cause"), [(2, 4.0, 1.0, "fetch"), (1, 1.0, 4.0, "compute")]
)
def test_an_unchanged_script_learns_which_rank_is_slow_and_why(
    rank: int, fetch_s: float, compute_s: float, cause: str
) -> None:
    def work(transport: LocalTransport) -> tuple[str, float, float]:
        clock = Clock()
        balancer = loft.Balancer(8, "report", interval=10, transport=transport, clock=clock)
        is_slow = transport.rank == rank
        mine = (fetch_s, compute_s) if is_slow else (1.0, 1.0)
        train(balancer, clock, fetch_s=mine[0], compute_s=mine[1], num_steps=20)
        entry = balancer.times[rank]
        return balancer.explain(), entry.fetch_s, entry.compute_s + entry.queued_s

    for text, fetched_s, computed_s in run_ranks(4, work):
        assert f"rank {rank} is slow: {cause}" in text
        assert (fetched_s, computed_s) == pytest.approx(
            (fetch_s, compute_s)
        )  # no evaluation in them


def test_weights_make_an_average_over_ranks_exact() -> None:
    def work(transport: LocalTransport) -> tuple[float, float]:
        clock = Clock()
        balancer = loft.Balancer(8, [5, 3, 0], transport=transport, clock=clock)
        model = Model(clock, 0.0)
        optimizer = HorovodLike(model.parameters(), lr=0.0)
        attachment = loft.attach(optimizer, balancer)
        value = float("nan") if transport.rank == 2 else transport.rank + 1.0
        with balancer.step(2 if transport.rank == 2 else [5, 3][transport.rank]):
            model(torch.full((2, 1), value)).mean().backward()
            optimizer.step()
        attachment.detach()
        weighted = float(model.inner.weight.grad or 0.0)
        optimizer.zero_grad()
        model(torch.full((2, 1), 7.0)).mean().backward()
        return weighted, float(model.inner.weight.grad or 0.0)

    out = run_ranks(3, work)
    assert sum(weighted for weighted, _ in out) / 3 == pytest.approx((5 * 1 + 3 * 2) / 8)
    assert [plain for _, plain in out] == [7.0] * 3  # detached


def test_ranks_that_start_from_different_models_are_told_in_the_first_step() -> None:
    def work(transport: LocalTransport) -> str:
        balancer = loft.Balancer(8, "report", transport=transport)
        model = Model(Clock(), 0.0)
        optimizer = HorovodLike(model.parameters(), lr=0.0)
        optimizer._parameter_names = {model.inner.weight: "inner.weight"}
        if transport.rank == 2:
            torch.nn.init.zeros_(model.inner.weight)
        loft.attach(optimizer, balancer)
        model(torch.ones(2, 1)).mean().backward()
        try:
            optimizer.step()
        except MismatchError as error:
            return str(error)
        return ""

    for told in run_ranks(3, work):
        assert "parameter inner.weight differs on ranks [2]" in told
    with environment(LOFT_HVD_COPIES="ignore"):
        assert run_ranks(3, work) == [""] * 3


def test_a_step_that_reduces_nothing_is_none_of_the_trainings() -> None:
    """As ``hvd.broadcast_optimizer_state`` takes on ranks that have loaded no state."""
    balancer = loft.Balancer(8, "report", transport=LocalWorld(1).transport(0))
    model = Model(Clock(), 0.0)
    torch.optim.SGD(model.parameters(), lr=0.0)  # from here on torch calls hooks in SGD.step
    optimizer = HorovodLike(model.parameters(), lr=0.0)
    loft.attach(optimizer, balancer)
    torch.optim.SGD.step(optimizer)
    assert balancer._live.num_steps == 0
    for step in (1, 2):
        model(torch.ones(2, 1)).mean().backward()
        optimizer.step()
        assert balancer._live.num_steps == step


class _Set:
    """As a process set of Horovod's."""

    def __init__(self, num_ranks: int) -> None:
        self.size = lambda: num_ranks


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_models_of_parts_of_the_ranks_may_differ(num_ranks: int) -> None:
    def work(transport: LocalTransport) -> None:
        balancer = loft.Balancer(8, "report", transport=transport)
        model = Model(Clock(), 0.0)
        torch.nn.init.constant_(model.inner.weight, transport.rank)
        optimizer = HorovodLike(model.parameters(), lr=0.0)
        optimizer.process_set = _Set(num_ranks)
        loft.attach(optimizer, balancer)
        model(torch.ones(2, 1)).mean().backward()
        optimizer.step()

    with pytest.raises(MismatchError) if num_ranks == 2 else nullcontext():
        run_ranks(2, work)


def test_ranks_that_compare_and_ranks_that_do_not_are_told_when_they_attach() -> None:
    def work(transport: LocalTransport) -> None:
        balancer = loft.Balancer(8, "report", transport=transport)
        optimizer = HorovodLike(Model(Clock(), 0.0).parameters(), lr=0.0)
        if transport.rank:
            optimizer.process_set = _Set(1)
        loft.attach(optimizer, balancer)

    with pytest.raises(MismatchError, match="of all the balancer's ranks differs"):
        run_ranks(2, work)


def test_a_pass_begins_once_whichever_devices_thread_comes_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    balancer = loft.Balancer(4, "report", transport=LocalWorld(1).transport(0))
    sizes = HeldSizes((4,))
    monkeypatch.setattr(balancer, "take_step", sizes.take_step)
    params = make_parameters()[:2]
    loft.attach(HorovodLike(params, lr=0.0), balancer)
    given = sizes.arrive(*(functools.partial(give_gradients, [p]) for p in params))
    assert given == [None, None]
    assert sizes.num_taken == 1


def test_losses_without_a_common_parameter_are_one_batch_computed_to_the_last_gradient() -> None:
    def work(transport: LocalTransport) -> tuple[float, float]:
        clock = Clock()
        balancer = loft.Balancer(8, "report", interval=3, transport=transport, clock=clock)
        models = [Model(clock, 1.0), Model(clock, 2.0)]
        optimizer = HorovodLike([p for model in models for p in model.parameters()], lr=0.0)
        attachment = loft.attach(optimizer, balancer)
        for _ in range(8):
            clock.now += 0.5
            for model in models:
                model(torch.ones(2, 1)).mean().backward()
            optimizer.step()
        attachment.detach()
        entry = balancer.times[0]
        return entry.samples, entry.compute_s + entry.queued_s

    for samples, computed_s in run_ranks(2, work):
        assert (samples, computed_s) == pytest.approx((4.0, 3.0))


@pytest.mark.parametrize("order", ["aabb", "abab", "abba"])
def test_a_parameters_kth_gradient_is_of_the_steps_kth_batch(order: str) -> None:
    sizes = [(5, 3), (3, 5), (8, 0), (6, 2)]

    def work(transport: LocalTransport) -> list[dict[str, float]]:
        balancer = loft.Balancer(8, [4, 4], transport=transport)
        models = {name: Model(Clock(), 0.0) for name in "ab"}
        optimizer = HorovodLike([p for m in models.values() for p in m.parameters()], lr=0.0)
        optimizer.backward_passes_per_step = 2
        attachment = loft.attach(optimizer, balancer)
        for step, each in enumerate(sizes):  # as a batch sampler queues them
            balancer.push_sizes(StepSizes(0, step, each))
        sums = []
        for _ in range(2):
            optimizer.zero_grad()
            for name in order:
                models[name](torch.ones(2, 1)).mean().backward()
            optimizer.step()
            sums.append({name: float(m.inner.weight.grad or 0.0) for name, m in models.items()})
        attachment.detach()
        return sums

    for rank, sums in enumerate(run_ranks(2, work)):
        for step, each in enumerate(sums):
            expected = sum(2 * size[rank] / 8 for size in sizes[2 * step : 2 * step + 2])
            assert each == pytest.approx({"a": expected, "b": expected})


@pytest.mark.parametrize("num_passes", [1, 2])
def test_a_step_of_other_passes_than_asked_warns_once(
    num_passes: int, caplog: pytest.LogCaptureFixture
) -> None:
    balancer = loft.Balancer(8, [8], transport=LocalWorld(1).transport(0))
    model = Model(Clock(), 0.0)
    optimizer = HorovodLike(model.parameters(), lr=0.0)
    optimizer.backward_passes_per_step = 2
    attachment = loft.attach(optimizer, balancer)
    for step in range(2 * num_passes):
        balancer.push_sizes(StepSizes(0, step, (8,)))
    for _ in range(2):
        for _ in range(num_passes):
            model(torch.ones(2, 1)).mean().backward()
        optimizer.step()
    attachment.detach()
    says = "rank 0: a step ends after 1 of backward_passes_per_step=2 backward passes"
    assert caplog.text.count(says) == 2 - num_passes


class Broken(HorovodLike):
    """Its engine fails."""

    def synchronize(self) -> None:
        raise RuntimeError("the engine is down")


def test_the_run_log_of_an_attached_job_names_the_rank_behind_an_engines_error(
    tmp_path: Path,
) -> None:
    def explain(error: Exception) -> None:
        """Say which rank is behind an error, as a heartbeat does."""
        vars(error)["__notes__"] = ["loft_hvd: rank 1 has ended"]  # add_note: from 3.11 on

    ends = LocalWorld(1).transport(0)
    ends.can = Abilities(explain=explain)
    balancer = loft.Balancer(2, "report", transport=ends, log_dir=str(tmp_path))
    parameter = torch.nn.Parameter(torch.ones(1))
    optimizer = Broken([parameter], lr=0.1)
    attachment = loft.attach(optimizer, balancer)
    parameter.sum().backward()
    with pytest.raises(RuntimeError, match="the engine is down"):
        optimizer.step()
    attachment.detach()
    lines = [
        json.loads(line) for file in tmp_path.iterdir() for line in file.read_text().splitlines()
    ]
    faults = [line["text"] for line in lines if line["kind"] == "fault"]
    assert faults == ["the engine is down\nloft_hvd: rank 1 has ended"]


def test_attach_refuses_what_it_cannot_watch() -> None:
    balancer = loft.Balancer(2, "report", transport=LocalWorld(1).transport(0))
    parameter = torch.nn.Parameter(torch.ones(1))
    with pytest.raises(ArgumentTypeError, match="synchronize"):
        loft.attach(torch.optim.SGD([parameter], lr=0.1), balancer)
    optimizer = HorovodLike([parameter], lr=0.1)
    attachment = loft.attach(optimizer, balancer)
    with pytest.raises(UsageError, match="closure"):
        optimizer.step(lambda: 0.0)
    attachment.detach()


@pytest.mark.parametrize("where", ["transform", "loader process", "teacher"])
def test_only_this_process_and_the_trained_model_begin_a_batch(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    balancer = loft.Balancer(4, "report", transport=LocalWorld(1).transport(0))
    heard: list[str] = []
    monkeypatch.setattr(balancer, "begin_own_batch", lambda: heard.append("begun"))
    monkeypatch.setattr(balancer, "leave_step_out", lambda: heard.append("left out"))
    model = Model(Clock(), 0.0)
    attachment = loft.attach(HorovodLike(model.parameters(), lr=0.0), balancer)
    if where == "loader process":  # a fork has a copy of the hook
        monkeypatch.setattr("os.getpid", lambda: -1)
        model(torch.ones(1, 1))
    elif where == "transform":  # torchvision's are modules
        torch.nn.Identity()(torch.ones(1))
    else:
        with torch.no_grad():
            Model(Clock(), 0.0).eval()(torch.ones(1, 1))
    monkeypatch.undo()
    attachment.detach()
    assert heard == []


@pytest.mark.parametrize("is_training", [True, False])
def test_a_frozen_teacher_is_no_evaluation(is_training: bool) -> None:
    clock = Clock()
    end = LocalWorld(1).transport(0)
    balancer = loft.Balancer(8, "report", interval=3, clock=clock, transport=end)
    # Models are fine-tuned in eval() mode, too, for their running averages.
    model, teacher = Model(clock, 1.0).train(is_training), Model(clock, 0.0).eval()
    optimizer = HorovodLike(model.parameters(), lr=0.0)
    attachment = loft.attach(optimizer, balancer)
    for _ in range(9):
        clock.now += 2.0
        with torch.no_grad():
            teacher(torch.ones(2, 1))
        model(torch.ones(2, 1)).mean().backward()
        optimizer.step()
    attachment.detach()
    assert balancer.times[0].fetch_s == pytest.approx(2.0)


@pytest.mark.parametrize("what", ["plain", "eval with gradients", "a copy of averages", "replaced"])
def test_an_evaluation_now_and_then_is_left_out(what: str) -> None:
    clock = Clock()
    end = LocalWorld(1).transport(0)
    balancer = loft.Balancer(8, "report", interval=12, clock=clock, transport=end)
    model, copy = Model(clock, 1.0), Model(clock, 10.0)
    optimizer = HorovodLike(model.parameters(), lr=0.0)
    attachment = loft.attach(optimizer, balancer)
    for step in range(24):
        clock.now += 2.0
        if step % 6 == 4:
            with torch.set_grad_enabled(what == "eval with gradients"):
                if what == "a copy of averages":
                    copy.eval()(torch.ones(2, 1))
                elif what == "replaced":
                    given = {name: p.detach().clone() for name, p in model.named_parameters()}
                    torch.func.functional_call(model, given, torch.ones(2, 1))
                else:
                    model.eval()(torch.ones(2, 1))
                    model.train()
        model(torch.ones(2, 1)).mean().backward()
        optimizer.step()
    attachment.detach()
    (times,) = balancer.times
    assert (times.fetch_s, times.compute_s) == pytest.approx((2.0, 1.0))


def test_a_training_that_is_over_is_not_kept_by_its_hook_on_all_modules() -> None:
    def work(transport: LocalTransport) -> weakref.ref[torch.Tensor]:
        balancer = loft.Balancer(8, "report", transport=transport)
        model = Model(Clock(), 0.0)
        optimizer = HorovodLike(model.parameters(), lr=0.0)
        loft.attach(optimizer, balancer)
        optimizer.zero_grad()
        model(torch.ones(2, 1)).mean().backward()
        optimizer.step()  # now it waits for the next forward pass, of any module
        return weakref.ref(model.inner.weight)

    (weight,) = run_ranks(1, work)
    gc.collect()
    assert weight() is None
