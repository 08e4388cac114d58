"""Loops that fetch a batch ahead of its step: each backward pass takes the sizes of its own."""

from __future__ import annotations

import copy
import itertools
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader as TorchDataLoader

import loft_hvd as loft
from loft_hvd.balance.plan import StepSizes
from loft_hvd.errors import PlanError, UsageError
from loft_hvd.transport.local import LocalTransport, LocalWorld, run_ranks
from tests.support.clock import Clock
from tests.support.training import OPTIMIZERS, make_data, make_model, max_difference, train_alone

pytestmark = pytest.mark.filterwarnings("ignore:.* batches were taken from the loader:UserWarning")

MODEL = make_model()
TOTAL, NUM_SAMPLES = 16, 16 * 6 + 5  # 6 steps and one of 5 samples an epoch
# Sizes that change in mid-epoch, at its last batch, and at the first of one.
PLANS = [(0, [8, 8]), (3, [12, 4]), (6, [5, 11]), (7, [4, 12]), (12, [14, 2]), (16, [0, 16])]


def replay(path: Path) -> loft.Replay:
    lines = [json.dumps({"first_step": at, "sizes": sizes}) for at, sizes in PLANS]
    path.write_text("\n".join(lines) + "\n")
    return loft.Replay(path)


def endless(loader: Any, ours: Any) -> Iterator[Any]:
    """Yield batches epoch after epoch, as a script's ``get_batch`` does."""
    epoch = 0
    while True:
        ours.set_epoch(epoch)
        yield from loader
        epoch += 1


class Trainer:
    """One rank that trains; ``train`` is a step on a batch, with something in its middle."""

    def __init__(self, transport: LocalTransport, policy: Any, **given: Any) -> None:
        self.balancer = loft.Balancer(TOTAL, policy, interval=3, transport=transport, **given)
        self.model = copy.deepcopy(MODEL)  # the seed is the process's, and ranks are threads
        self.optimizer = loft.DistributedOptimizer(
            OPTIMIZERS["sgd"](self.model.parameters()),
            self.model.named_parameters(),
            balancer=self.balancer,
            transport=transport,
        )
        self.rank = transport.rank
        self.num_steps = 0

    def train(self, batch: Any, between: Callable[[], Any] = lambda: None) -> Any:
        x, y = batch
        loss = torch.nn.functional.mse_loss(self.model(x), y)
        following = between()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.num_steps += 1
        return following


def loaders(trainer: Trainer, kind: str, num_workers: int = 0) -> tuple[Any, Any]:
    data = make_data(NUM_SAMPLES)
    if kind == "loader":
        loader: Any = loft.DataLoader(data, trainer.balancer, seed=3, num_workers=num_workers)
        return loader, loader
    sampler = loft.BatchSampler(data, trainer.balancer, seed=3)
    return TorchDataLoader(data, batch_sampler=sampler, num_workers=num_workers), sampler


def difference(work: Callable[[LocalTransport], Trainer], num_steps: int) -> float:
    trainers = run_ranks(2, work)
    assert [trainer.num_steps for trainer in trainers] == [num_steps] * 2
    alone = train_alone(
        make_data(NUM_SAMPLES), OPTIMIZERS["sgd"], global_batch_size=TOTAL, num_steps=num_steps
    )
    return max(max_difference(trainer.model, alone) for trainer in trainers)


@pytest.mark.every(5)
@pytest.mark.parametrize("num_ahead", [1, 2])
@pytest.mark.parametrize("order", ["between", "before", "after"])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_endless_loop_that_fetches_ahead_trains_as_one_process(
    num_ahead: int, order: str, num_workers: int, tmp_path: Path
) -> None:
    """The next batch is fetched after the forward pass, in front of it, or behind the step."""

    def work(transport: LocalTransport) -> Trainer:
        trainer = Trainer(transport, replay(tmp_path / f"{transport.rank}.jsonl"))
        batches = endless(*loaders(trainer, "loader", num_workers))
        held = [next(batches) for _ in range(num_ahead)]
        while trainer.num_steps < 20:
            if order == "before":
                held.append(next(batches))
                trainer.train(held.pop(0))
            elif order == "between":
                held.append(trainer.train(held.pop(0), lambda: next(batches)))
            else:
                trainer.train(held.pop(0))
                held.append(next(batches))
        return trainer

    assert difference(work, 20) <= 1e-5


@pytest.mark.every(3)
@pytest.mark.parametrize("num_ahead", [1, 2])
@pytest.mark.parametrize("kind", ["loader", "sampler"])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_prefetcher_that_ends_with_its_epoch_trains_as_one_process(
    num_ahead: int, kind: str, num_workers: int, tmp_path: Path
) -> None:
    """As many public prefetchers do: the last batches are trained before the next epoch begins."""

    def prefetch(loader: Any) -> Iterator[Any]:
        held: list[Any] = []
        for batch in loader:
            held.append(batch)
            if len(held) > num_ahead:
                yield held.pop(0)
        yield from held

    def work(transport: LocalTransport) -> Trainer:
        trainer = Trainer(transport, replay(tmp_path / f"{transport.rank}.jsonl"))
        loader, ours = loaders(trainer, kind, num_workers)
        for epoch in range(3):
            ours.set_epoch(epoch)
            for batch in prefetch(loader):
                trainer.train(batch)
        return trainer

    assert difference(work, 21) <= 1e-5


def fetch_own(trainer: Trainer, num_samples: int, step: int) -> Any:
    """Load a batch as a script without a loader does: this rank's part of a step's samples."""
    data = make_data(NUM_SAMPLES)
    size = num_samples or trainer.balancer.min_batch
    first = 0 if trainer.rank == 0 else TOTAL - size
    begin = step % 6 * TOTAL + first
    return data[begin : begin + size]


def alone_on_own(num_steps: int) -> torch.nn.Module:
    model = make_model()
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    data = make_data(NUM_SAMPLES)
    for step in range(num_steps):
        x, y = data[step % 6 * TOTAL : (step % 6 + 1) * TOTAL]
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    return model


@pytest.mark.parametrize("num_ahead", [0, 1, 2])
def test_a_loop_with_a_loader_of_its_own_fetches_ahead(num_ahead: int, tmp_path: Path) -> None:
    def work(transport: LocalTransport) -> Trainer:
        trainer = Trainer(transport, replay(tmp_path / f"{transport.rank}.jsonl"))
        balancer, rank = trainer.balancer, transport.rank

        def get(step: int) -> Any:
            return fetch_own(trainer, balancer.plan_at(step).sizes[rank], step)

        held = [get(step) for step in range(num_ahead)]
        while trainer.num_steps < 20:
            if num_ahead:
                with balancer.step(len(held[0][0])):
                    following = trainer.train(
                        held.pop(0), lambda: get(balancer.next_step + num_ahead)
                    )
                held.append(following)
            else:
                batch = fetch_own(trainer, balancer.local_batch_size, trainer.num_steps)
                with balancer.step(len(batch[0])):
                    trainer.train(batch)
        return trainer

    trainers = run_ranks(2, work)
    assert max(max_difference(each.model, alone_on_own(20)) for each in trainers) <= 1e-5


# What is told apart, and what is refused.


def alone(total: int = 8, **given: Any) -> loft.Balancer:
    return loft.Balancer(total, "report", transport=LocalWorld(1).transport(0), **given)


def sizes_at(step: int) -> StepSizes:
    return StepSizes(0, step, (8 - step % 3,))  # of another size from step to step


def play(balancer: loft.Balancer, text: str, *, first_step: int = 0) -> list[int]:
    """Do what each letter says; returns the steps that were trained, pass by pass.

    F fetches from a loader, D draws for a sampler, A has it draw its last, B is a backward pass, S
    the step's end, E the end of an iteration, I the beginning of one, C forgets what was fetched.
    """
    trained, fetched = [], first_step
    for letter in text:
        if letter == "F":
            balancer.begin_batch(sizes_at(fetched), fetch_s=0.0, stall_s=0.0, local=8, remote=0)
            fetched += 1
        elif letter == "D":
            balancer.push_sizes(sizes_at(fetched))
            fetched += 1
        elif letter == "B":
            taken = balancer.take_step()
            assert taken == sizes_at(taken.step)
            trained.append(taken.step)
        elif letter != " ":
            {
                "A": balancer.all_drawn,
                "S": balancer.step_ended,
                "E": balancer.end_epoch,
                "I": balancer.begin_iteration,
                "C": balancer.clear_pending,
            }[letter]()
    return trained


@pytest.mark.parametrize(
    ("text", "trained"),
    [
        ("I FBS FBS FBS E I FBS", [0, 1, 2, 3]),
        ("I FBS FFBS FBS", [0, 2, 3]),  # one is skipped for what it holds
        ("I FC FBS FBS", [1, 2]),  # the first is skipped
        ("I FFFFFBS FBS", [0, 1]),
        ("I FFFFFFFBS FFBS", [6, 8]),  # those that an earlier run had
        ("I FBBS FBBS", [0, 0, 1, 1]),  # a batch that the script cuts up
        ("I FBFBS FBFBS", [0, 1, 2, 3]),
        ("I FFBS FBS FBS E BS I FFBS", [0, 1, 2, 3, 4]),  # the last one before the next epoch
        ("I FFBS FBS E II FBS FBS", [0, 1, 2, 3]),  # and in it
        ("I FFFBS FBS E I FBS FBS FBS", [0, 1, 2, 3, 4]),
        ("I FFFBS FBS E BS I FBS FBS", [0, 1, 2, 3, 4]),
        ("I FFBS FBS E I FFBS FBS", [0, 1, 3, 4]),  # the last one is never trained
        ("I FFBS FBS IC FBS FBS", [0, 1, 3, 4]),  # left early, said so
        ("I FFBS FBS I FFBS FBS", [0, 1, 3, 4]),  # and fetches ahead again
        ("I FFBBS FFBBS E", [0, 1, 2, 3]),  # a step's batches at once
        ("I FF I FBS", [2]),  # a look at two batches
        ("I DDDBS DBS I DBS", [0, 1, 4]),
        ("I DDDABS I DC DBS", [0, 4]),
        ("I DDDA I DBS", [3]),  # nothing was trained: an evaluation
    ],
)
def test_each_backward_pass_is_of_the_batch_that_the_loop_means(
    text: str, trained: list[int]
) -> None:
    assert play(alone(), text) == trained


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("I FFBS FFBS", r"3 batches wait .* fetched 1 ahead .* differ \(\[\[7\], \[6\], \[8\]\]\)"),
        ("I FFBBS FBB", "a second backward pass takes the batch of step 2"),
        ("I FFBS FBS I FB", r"left with 1 batches fetched ahead .*balancer.clear_pending\(\)"),
        ("I FFBS FBS E I FBS FBS I FB", "left with 1 batches fetched ahead"),
        ("I FFBS FBS E BS B", "a backward pass without a batch"),
        ("I FBS E B", "a backward pass without a batch"),
        ("I DDDBS ABS I DB", r"1 batches of a loft.BatchSampler .*balancer.clear_pending\(\)"),
    ],
)
def test_what_cannot_be_told_is_refused_with_the_way_out(text: str, message: str) -> None:
    balancer = alone()
    with pytest.raises(UsageError, match=message):
        play(balancer, text)


def test_batches_of_equal_sizes_may_be_skipped_in_a_loop_that_fetches_ahead() -> None:
    balancer = alone()
    for step in range(9):
        balancer.begin_batch(StepSizes(0, step, (8,)), fetch_s=0, stall_s=0, local=8, remote=0)
        if step in (1, 2, 5, 6):
            assert balancer.take_step().sizes == (8,)
            balancer.step_ended()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("I FFB", "^2 batches were taken .* is taken to fetch ahead, .*clear_pending"),
        ("I FFFFFFB", "^6 batches were taken .* all but the newest are taken to be skipped"),
    ],
)
def test_what_was_guessed_is_said_once(text: str, message: str) -> None:
    balancer = alone()
    with pytest.warns(UserWarning, match=message) as told:
        play(balancer, f"{text} S C {text}")
    assert len(told) == 1


def test_two_loaders_that_take_turns_are_told() -> None:
    balancer = alone(8)
    pairs = zip(*(loft.DataLoader(make_data(32), balancer) for _ in range(2)), strict=True)
    next(pairs)
    with pytest.warns(UserWarning, match="two loaders share this balancer"):
        balancer.take_step()


def test_a_thread_that_fetches_beside_the_training_is_told() -> None:
    balancer = alone()
    batches = iter(loft.DataLoader(make_data(32), balancer))
    fetching = threading.Thread(target=lambda: next(batches), name="prefetch")
    fetching.start()
    fetching.join(30.0)
    balancer.take_step()
    with pytest.warns(UserWarning, match="in another thread than the one that trains"):
        balancer.step_ended()


def test_a_batch_that_was_fetched_too_early_is_refused_with_the_way_out(tmp_path: Path) -> None:
    def work(transport: LocalTransport) -> str:
        trainer = Trainer(transport, replay(tmp_path / f"{transport.rank}.jsonl"))
        balancer = trainer.balancer
        batch = fetch_own(trainer, balancer.local_batch_size, 0)
        for step in range(1, 9):
            following = fetch_own(trainer, balancer.local_batch_size, step)
            try:
                with balancer.step(len(batch[0])):
                    trainer.train(batch)
            except PlanError as error:
                return str(error)
            batch = following
        return ""

    for told in run_ranks(2, work):
        assert "a batch of 8 samples, but the sizes of step 3 are [12, 4]" in told
        assert "balancer.plan_at(balancer.next_step + 1).sizes[rank]" in told


# What else goes by the batch in turn.


@pytest.mark.parametrize("num_ahead", [0, 1, 2])
def test_times_are_those_of_the_batch_that_is_computed(num_ahead: int) -> None:
    """A forward pass of 1 s, a fetch of 4 s that the script waits for, a backward pass of 2 s."""
    clock = Clock()
    balancer = alone(clock=clock, interval=10)
    steps = itertools.count()

    def fetch() -> None:
        clock.now += 4.0
        sizes = StepSizes(0, next(steps), (8,))
        balancer.begin_batch(sizes, fetch_s=4.0, stall_s=4.0, local=8, remote=0)

    for _ in range(num_ahead):
        fetch()
    for at in range(13):
        if not num_ahead:
            fetch()
        clock.now += 1.0
        if num_ahead:
            fetch()
        assert balancer.take_step().step == at
        clock.now += 2.0
        balancer.gradient_arrived(blocked_s=0.0)
        balancer.computing_ended()
        balancer.step_ended()
    (times,) = balancer.times
    found = times.samples, times.fetch_s, times.stall_s, times.compute_s, times.other_s
    assert found == pytest.approx((8, 4.0, 4.0, 3.0, 0.0))
    assert times.steps == 5  # no more than without a batch ahead


@pytest.mark.parametrize("num_ahead", [1, 2])
def test_a_checkpoint_holds_what_was_trained(num_ahead: int) -> None:
    """Batches that were fetched ahead come again."""
    data = make_data(40)
    balancer = alone()
    loader = loft.DataLoader(data, balancer, seed=3)
    seen, held = [], []
    for batch in loader:
        held.append(batch)
        if len(held) > num_ahead:
            balancer.take_step()
            balancer.step_ended()
            seen.append(held.pop(0)[0])
            if len(seen) == 2:
                break
    state = json.loads(json.dumps(loader.state_dict()))
    assert (state["position"], state["step"]) == (16, 2)
    again = loft.DataLoader(data, alone(), seed=3)
    again.load_state_dict(state)
    seen += [x for x, _ in again]
    torch.testing.assert_close(
        torch.cat(seen), torch.cat([x for x, _ in loft.DataLoader(data, alone(), seed=3)])
    )


def test_a_checkpoint_between_two_epochs_is_refused_while_one_is_not_trained() -> None:
    balancer = alone()
    batches, loader = None, loft.DataLoader(make_data(24), balancer)
    batches = endless(loader, loader)
    for step in range(4):
        next(batches)
        if step > 1:
            balancer.take_step()
            balancer.step_ended()
    with pytest.raises(UsageError, match=r"2 batches were fetched ahead .* of the epoch before"):
        loader.state_dict()


def test_a_stream_that_is_read_ahead_trains_by_what_each_batch_holds(tmp_path: Path) -> None:
    data = make_data(20 * TOTAL)
    plans = [[8, 8], [12, 4], [5, 11], [4, 12]]

    def work(transport: LocalTransport) -> Trainer:
        trainer = Trainer(transport, replay(tmp_path / f"{transport.rank}.jsonl"))
        first = 0 if transport.rank == 0 else 10 * TOTAL
        loader = loft.StreamLoader(
            [data[at] for at in range(first, 10 * TOTAL + first)], trainer.balancer
        )
        batches = iter(loader)
        batch = next(batches)
        for _ in range(8):
            batch = trainer.train(batch, lambda: next(batches))
        return trainer

    model = copy.deepcopy(MODEL)
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    places = [0, 10 * TOTAL]
    for step in range(8):
        sizes = plans[sum(step >= at for at in (3, 6, 7))]
        parts = [range(place, place + size) for place, size in zip(places, sizes, strict=True)]
        places = [place + size for place, size in zip(places, sizes, strict=True)]
        x, y = data[[at for part in parts for at in part]]
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    trainers = run_ranks(2, work)
    assert max(max_difference(trainer.model, model) for trainer in trainers) <= 1e-5
