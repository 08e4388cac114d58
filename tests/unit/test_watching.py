"""What ``loft.watch`` tells of a script's steps, whatever loops and wraps it."""

from __future__ import annotations

import copy
import gc
import importlib
import pickle
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, dataloader

import loft_hvd as loft
from loft_hvd.balance import live
from loft_hvd.balance.interval import RankTimes
from loft_hvd.balance.memory import logged_caps
from loft_hvd.data import fetches
from loft_hvd.errors import ArgumentTypeError
from loft_hvd.optimizer.watching import TrainingWatch
from loft_hvd.transport.local import LocalWorld
from tests.support.clock import Clock
from tests.support.worlds import environment

FETCH, FORWARD, BACKWARD, OTHER = 8.0, 4.0, 2.0, 1.0


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    """Leave torch as it was, whoever was watched."""
    yield
    for watcher in list(fetches._watchers()):
        watcher.detach()
    fetches._leave()


@pytest.fixture(scope="module", autouse=True)
def _forgotten() -> Iterator[None]:
    """Let timers that hear of waits end with this file."""
    yield
    gc.collect()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Return the clock of everything here."""
    made = Clock()
    monkeypatch.setattr(time, "monotonic", made)
    monkeypatch.setattr(live, "run_queue_s", lambda: 0.0)
    return made


class _Slow(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, clock: Clock) -> Tensor:
        ctx.clock = clock
        clock.now += FORWARD
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        ctx.clock.now += BACKWARD
        return gradients[0], None


class _Model(nn.Module):
    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.layer, self.clock = nn.Linear(2, 1), clock

    def forward(self, x: Tensor) -> dict[str, Any]:
        y: Tensor = _Slow.apply(self.layer(x), self.clock)  # type: ignore[no-untyped-call]  # as torch has it
        return {"loss": y.square().mean(), "others": [y]}


class _Samples(Dataset[Tensor]):
    """Each batch of four takes ``FETCH``."""

    def __init__(self, clock: Clock, num_batches: int) -> None:
        self.clock, self.num_batches = clock, num_batches

    def __len__(self) -> int:
        return 4 * self.num_batches

    def __getitem__(self, index: int) -> Tensor:
        self.clock.now += FETCH / 4
        return torch.ones(2)


class _Job:
    """A model that is watched, alone, with its optimizer."""

    def __init__(self, clock: Clock, *, interval: int = 12, log_dir: Path | None = None) -> None:
        self.clock = clock
        self.model = _Model(clock)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.0)
        end = LocalWorld(1).transport(0)
        self.watch = TrainingWatch(
            self.model, interval=interval, log_dir=log_dir, transport=end, clock=clock
        )

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.clock.now += OTHER

    def loader(self, num_batches: int = 12) -> Iterator[Tensor]:
        yield from DataLoader(_Samples(self.clock, num_batches), batch_size=4)

    @property
    def times(self) -> RankTimes:
        self.watch.detach()
        assert self.watch._balancer is not None
        (times,) = self.watch._balancer.times
        return times


def _parts(times: RankTimes) -> tuple[float, ...]:
    backward_s = times.compute_s - times.forward_s
    return times.stall_s, times.forward_s, backward_s, times.other_s, times.wall_s


def _plain(job: _Job) -> None:
    for x in job.loader():
        job.model(x)["loss"].backward()
        job.step()


def _two_passes(job: _Job) -> None:
    for at, x in enumerate(job.loader(24)):
        job.model(x)["loss"].backward()
        if at % 2:
            job.step()


def _ahead(job: _Job) -> None:
    batches = job.loader(13)
    x = next(batches)
    for _ in range(12):
        loss = job.model(x)["loss"]
        x = next(batches)
        loss.backward()
        job.step()


def _two_forwards(job: _Job) -> None:
    for x in job.loader():
        (job.model(x)["loss"] + job.model(x)["loss"]).backward()
        job.step()


def _two_losses(job: _Job) -> None:
    for x in job.loader():
        loss = job.model(x)["loss"]
        loss.backward(retain_graph=True)
        loss.backward()
        job.step()


def _no_loader(job: _Job) -> None:
    for _ in range(12):
        job.clock.now += FETCH
        job.model(torch.ones(4, 2))["loss"].backward()
        job.step()


def _two_optimizers(job: _Job) -> None:
    other = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.0)
    for x in job.loader():
        job.model(x)["loss"].backward()
        other.step()
        job.step()
        other.step()


@pytest.mark.parametrize(
    ("train", "wanted"),
    [
        (_plain, (FETCH, FORWARD, BACKWARD, OTHER)),
        (_two_passes, (2 * FETCH, 2 * FORWARD, 2 * BACKWARD, OTHER)),
        (_ahead, (FETCH, FORWARD, BACKWARD, OTHER)),
        (_two_forwards, (FETCH, 2 * FORWARD, 2 * BACKWARD, OTHER)),
        (_two_losses, (FETCH, FORWARD, 2 * BACKWARD, OTHER)),
        (_no_loader, (FETCH + OTHER, FORWARD, BACKWARD, 0.0)),
        (_two_optimizers, (FETCH, FORWARD, BACKWARD, OTHER)),
    ],
)
def test_a_step_is_taken_apart(
    clock: Clock, train: Callable[[_Job], None], wanted: tuple[float, ...]
) -> None:
    job = _Job(clock)
    train(job)
    assert _parts(job.times) == pytest.approx((*wanted, sum(wanted)))


def test_the_queue_for_a_core_counts_wherever_it_is(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A third of all time that passes is spent queueing.
    monkeypatch.setattr(live, "run_queue_s", lambda: clock.now / 3)
    job = _Job(clock)
    _no_loader(job)
    times = job.times
    fetch_s, forward_s, backward_s, other_s, wall_s = _parts(times)
    assert wall_s == FETCH + OTHER + FORWARD + BACKWARD
    assert times.queued_s == pytest.approx(wall_s / 3)
    own = (fetch_s, forward_s, backward_s)
    wanted = [2 / 3 * part for part in (FETCH + OTHER, FORWARD, BACKWARD)]
    assert own == pytest.approx(tuple(wanted))
    assert other_s == pytest.approx(0.0)


def test_a_step_with_an_evaluation_is_left_out(clock: Clock) -> None:
    job = _Job(clock)
    for at, x in enumerate(job.loader(12)):
        if at % 3 == 2:
            job.model.eval()
            with torch.no_grad():
                job.model(x)
            job.model.train()
        job.model(x)["loss"].backward()
        job.step()
    assert _parts(job.times)[:3] == pytest.approx((FETCH, FORWARD, BACKWARD))


def test_a_checkpoint_within_the_backward_pass_is_no_new_pass(clock: Clock) -> None:
    job = _Job(clock)
    inner = job.model

    def loss(x: Tensor) -> Tensor:
        found: Tensor = inner(x)["loss"]
        return found

    for x in job.loader():
        torch.utils.checkpoint.checkpoint(loss, x, use_reentrant=False).backward()
        job.step()
    # Computed again, it takes its time in the backward pass.
    assert _parts(job.times)[:3] == pytest.approx((FETCH, FORWARD, FORWARD + BACKWARD))


def test_copies_of_a_watched_model_are_not_watched(clock: Clock) -> None:
    job = _Job(clock)
    twin = copy.deepcopy(job.model.layer), copy.deepcopy(job.model)
    again = pickle.loads(pickle.dumps(job.model))
    for x in job.loader():
        twin[1](x)["loss"].backward()
        again(x)["loss"].backward()
    assert job.watch._balancer is None


def test_detach_leaves_nothing_behind(clock: Clock) -> None:
    hooks = importlib.import_module("torch.optim.optimizer")._global_optimizer_post_hooks
    fetch = dataloader._BaseDataLoaderIter.__next__
    before = dict(hooks)
    job = _Job(clock)
    with job.watch:
        assert len(hooks) == len(before) + 1
        assert dataloader._BaseDataLoaderIter.__next__ is not fetch
    assert hooks == before
    assert dataloader._BaseDataLoaderIter.__next__ is fetch
    assert not job.model._forward_pre_hooks
    assert not job.model._forward_hooks
    del job


def test_a_model_that_is_gone_takes_its_hook_along(clock: Clock) -> None:
    hooks = importlib.import_module("torch.optim.optimizer")._global_optimizer_post_hooks
    before = dict(hooks)
    model = nn.Linear(1, 1)
    loft.watch(model)
    del model
    assert hooks == before


def test_a_fault_of_the_watching_is_a_warning(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    job = _Job(clock, interval=-1)
    _plain(job)
    assert "loft.watch ends, and training goes on: " in caplog.text
    assert not job.model._forward_hooks


def test_an_elastic_job_is_told_the_other_way(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    with environment(HOROVOD_ELASTIC="1"):
        job = _Job(clock)
        _plain(job)
    assert "come and go; give a loft.Balancer(batch, 'report') to loft.elastic.State" in caplog.text


def test_ranks_that_have_left_end_the_watching_alone(
    clock: Clock, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(balancer: loft.Balancer) -> None:
        raise RuntimeError("connection closed by peer")

    monkeypatch.setattr(loft.Balancer, "step_ended", fails)
    _plain(_Job(clock))
    assert "training goes on: connection closed by peer" in caplog.text


def test_a_step_asks_the_system_five_times_how_long_it_queued(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[float] = []

    def ask() -> float:
        asked.append(0.0)
        return 0.0

    monkeypatch.setattr(live, "run_queue_s", ask)
    job = _Job(clock, interval=100)
    for _ in range(4):
        asked.clear()
        job.model(torch.ones(4, 2))["loss"].backward()
        job.step()
        # At the pass, the backward pass and its end, behind the wait there, and at the step's end.
        assert len(asked) == 5


def test_what_is_no_model_is_refused() -> None:
    with pytest.raises(ArgumentTypeError, match="the one that the script calls"):
        loft.watch(torch.optim.SGD([torch.zeros(1)]))  # type: ignore[arg-type]  # that is the case


def test_before_any_pass_explain_says_so(clock: Clock) -> None:
    job = _Job(clock)
    assert "no forward pass in training mode" in job.watch.explain()
    job.model(torch.ones(4, 2))["loss"].backward()
    assert "no times yet: ranks exchange them at step 12" in job.watch.explain()
    assert "global_batch_size" not in job.watch.explain()


def test_full_memory_says_nothing_of_sizes_that_nobody_planned(
    clock: Clock, tmp_path: Path
) -> None:
    job = _Job(clock, log_dir=tmp_path)
    job.model(torch.ones(4, 2))
    balancer = job.watch._balancer
    assert balancer is not None
    full = torch.OutOfMemoryError("CUDA out of memory")
    assert balancer._memory.describe_failure(full) is None
    assert logged_caps(tmp_path) == {}
