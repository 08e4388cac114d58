"""Data that is no map: shares by plan, exact weights, and an epoch that ends for all at once."""

from __future__ import annotations

import io
import itertools
import json
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import IterableDataset

import loft_hvd as loft
from loft_hvd.errors import ArgumentError, ArgumentTypeError, DataError
from loft_hvd.transport.local import LocalTransport, LocalWorld, run_ranks
from tests.support.alone import ALONE

SIZES = [96, 96, 48, 16]
DIM = 3


class Stream(IterableDataset[Tensor]):
    """Samples of one rank: another ``num_samples`` of them in each epoch."""

    def __init__(self, rank: int, num_samples: int) -> None:
        self.rank, self.num_samples, self.epoch = rank, num_samples, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Tensor]:
        generator = torch.Generator().manual_seed(100 * self.epoch + self.rank)
        for _ in range(self.num_samples):
            yield torch.randn(DIM, generator=generator)


def make_model() -> torch.nn.Module:
    model = torch.nn.Linear(DIM, 1)
    torch.nn.init.constant_(model.weight, 0.3)
    torch.nn.init.constant_(model.bias, 0.1)
    return model


def loss_of(model: torch.nn.Module, x: Tensor) -> Tensor:
    target = torch.sin(x.sum(dim=1, keepdim=True))
    return torch.nn.functional.mse_loss(model(x), target)


def make_optimizer(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


class Trained(NamedTuple):
    weight: Tensor
    batches: list[Tensor]  # of real samples
    amounts: list[tuple[int, ...]]


def train(
    transport: LocalTransport, sizes: list[int], num_samples: list[int], *, num_epochs: int = 2
) -> Trained:
    model = make_model()
    balancer = loft.Balancer(sum(sizes), sizes, transport=transport)
    optimizer = loft.DistributedOptimizer(
        make_optimizer(model), balancer=balancer, transport=transport
    )
    stream = Stream(transport.rank, num_samples[transport.rank])
    loader = loft.StreamLoader(stream, balancer)
    batches, amounts = [], []
    for epoch in range(num_epochs):
        loader.set_epoch(epoch)
        for x in loader:
            optimizer.zero_grad()
            loss = loss_of(model, x) * (torch.nan if loader.is_padding else 1.0)
            loss.backward()
            optimizer.step()
            batches.append(x[: loader.local_batch_size])
            amounts.append(loader.step_sizes.sizes)
    return Trained(torch.cat([p.detach().flatten() for p in model.parameters()]), batches, amounts)


def check_one_process_trains_the_same(found: list[Trained]) -> None:
    """Train on what all ranks have read of each step, and compare the weights."""
    alone = make_model()
    optimizer = make_optimizer(alone)
    for parts in zip(*(each.batches for each in found), strict=True):
        optimizer.zero_grad()
        loss_of(alone, torch.cat(parts)).backward()
        optimizer.step()
    weight = torch.cat([p.detach().flatten() for p in alone.parameters()])
    for each in found:
        torch.testing.assert_close(each.weight, weight, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("sizes", "num_samples"),
    [
        (SIZES, [500, 400, 1000, 70]),
        ([6, 0, 2], [40, 5, 11]),
        ([5, 3], [30, 30]),
    ],
    ids=str,
)
def test_training_is_that_of_one_process_on_what_all_ranks_have_read(
    sizes: list[int], num_samples: list[int]
) -> None:
    num_epochs = 2
    num_steps = min(n // size for n, size in zip(num_samples, sizes, strict=True) if size)
    found = run_ranks(len(sizes), lambda end: train(end, sizes, num_samples))
    for rank, each in enumerate(found):
        assert [len(x) for x in each.batches] == [sizes[rank]] * num_steps * num_epochs
        assert each.amounts == [tuple(sizes)] * num_steps * num_epochs
        # In the stream's own order, none twice and none left out until its end.
        streams = [Stream(rank, num_steps * sizes[rank]) for _ in range(num_epochs)]
        for epoch, stream in enumerate(streams):
            stream.set_epoch(epoch)
        if sizes[rank]:
            expected = torch.stack([x for stream in streams for x in stream])
            assert torch.equal(torch.cat(each.batches), expected)
    check_one_process_trains_the_same(found)


def sentences(rank: int, *, num_samples: int = 40) -> list[Tensor]:
    """Return samples of 1 to 9 tokens."""
    generator = torch.Generator().manual_seed(rank)
    lengths = torch.randint(1, 10, (num_samples,), generator=generator).tolist()
    return [torch.randn(length, DIM, generator=generator) for length in lengths]


def joined(samples: list[Tensor]) -> Tensor:
    return torch.cat(samples)


def test_tokens_are_the_unit_of_sizes_and_weights() -> None:
    sizes = [40, 24, 12]

    def work(transport: LocalTransport) -> Trained:
        model = make_model()
        balancer = loft.Balancer(sum(sizes), sizes, transport=transport)
        optimizer = loft.DistributedOptimizer(
            make_optimizer(model), balancer=balancer, transport=transport
        )
        loader = loft.StreamLoader(sentences(transport.rank), balancer, cost=len, collate_fn=joined)
        batches, amounts = [], []
        for x in loader:
            optimizer.zero_grad()
            loss_of(model, x).backward()  # a mean over tokens
            optimizer.step()
            batches.append(x)
            amounts.append(loader.step_sizes.sizes)
            assert loader.local_batch_size == len(x)
        weight = torch.cat([p.detach().flatten() for p in model.parameters()])
        return Trained(weight, batches, amounts)

    found = run_ranks(3, work)
    assert len({tuple(each.amounts) for each in found}) == 1
    assert len(found[0].amounts) > 2
    for rank, each in enumerate(found):
        assert [len(x) for x in each.batches] == [amount[rank] for amount in each.amounts]
        # At most one sample short of the share.
        assert all(sizes[rank] - 9 < len(x) <= sizes[rank] for x in each.batches)
    assert any(sum(amount) < sum(sizes) for amount in found[0].amounts)
    check_one_process_trains_the_same(found)


def test_tokens_are_timed_though_batches_are_a_little_smaller_than_planned() -> None:
    def work(transport: LocalTransport) -> int:
        balancer = loft.Balancer(40, "report", interval=3, transport=transport)
        model = make_model()
        optimizer = loft.DistributedOptimizer(
            make_optimizer(model), balancer=balancer, transport=transport
        )
        samples = sentences(transport.rank, num_samples=100)
        for x in loft.StreamLoader(samples, balancer, cost=len, collate_fn=joined):
            optimizer.zero_grad()
            loss_of(model, x).backward()
            optimizer.step()
        return len(balancer.times)

    assert run_ranks(2, work) == [2, 2]


def take(loader: loft.StreamLoader, balancer: loft.Balancer) -> list[Any]:
    """Return the batches of an epoch, each taken by a backward pass and a step."""
    batches = []
    for batch in loader:
        balancer.take_step()
        balancer.step_ended()
        batches.append(batch)
    return batches


class Pair(NamedTuple):
    x: Tensor
    label: Any


def test_batches_of_any_length_are_cut_and_joined() -> None:
    balancer = loft.Balancer(4, transport=ALONE)

    def batch(*numbers: int) -> dict[str, Any]:
        values = torch.tensor(numbers)
        return {"pair": Pair(values, np.array(numbers)), "more": [values * 10]}

    source = [batch(0, 1, 2), batch(3, 4, 5, 6, 7, 8), batch(9), batch(10, 11, 12)]
    loader = loft.StreamLoader(source, balancer, batched=True)
    for _ in range(2):  # epochs
        found = take(loader, balancer)
        assert [each["pair"].x.tolist() for each in found] == [
            [0, 1, 2, 3],
            [4, 5, 6, 7],
            [8, 9, 10, 11],
        ]
        for each in found:
            assert isinstance(each["pair"], Pair)
            assert each["pair"].label.tolist() == each["pair"].x.tolist()
            assert each["more"][0].tolist() == [10 * x for x in each["pair"].x.tolist()]


def test_a_rank_without_a_share_gets_a_dummy_of_batches_too() -> None:
    def work(transport: LocalTransport) -> list[tuple[list[int], bool]]:
        balancer = loft.Balancer(4, [4, 0], transport=transport)
        source = [torch.arange(3) + 10 * transport.rank, torch.arange(3, 9)]
        loader = loft.StreamLoader(source, balancer, batched=True)
        return [(x.tolist(), loader.is_padding) for x in take_all(loader, balancer)]

    def take_all(loader: loft.StreamLoader, balancer: loft.Balancer) -> Iterator[Tensor]:
        for x in loader:
            yield x
            balancer.take_step()
            balancer.step_ended()

    assert run_ranks(2, work) == [
        [([0, 1, 2, 3], False), ([4, 5, 6, 7], False)],
        [([10, 11], True), ([10, 11], True)],
    ]


def test_torchs_loader_over_a_stream_is_a_source() -> None:
    balancer = loft.Balancer(4, transport=ALONE)
    loader = loft.StreamLoader(TorchDataLoader(Stream(0, 9), batch_size=None), balancer)
    assert [x.shape for x in take(loader, balancer)] == [(4, DIM), (4, DIM)]


def test_a_generator_that_is_used_up_warns_in_its_second_epoch() -> None:
    balancer = loft.Balancer(2, transport=ALONE)
    loader = loft.StreamLoader((x for x in torch.arange(4)), balancer)
    assert len(take(loader, balancer)) == 2
    with pytest.warns(UserWarning, match="an epoch without a step.*ranks \\[0\\].*begins anew"):
        assert take(loader, balancer) == []


class Resumable(Stream):
    """A stream that knows where it stands, and numbers its samples."""

    def __init__(self, rank: int, num_samples: int, *, num_together: int = 0) -> None:
        super().__init__(rank, num_samples)
        self.num_together = num_together  # in a batch; 0 yields samples
        self.at = self.resume_at = 0

    def __iter__(self) -> Iterator[Tensor]:
        first, self.resume_at = self.resume_at, 0
        for at in range(first + 1, self.num_samples + 1):
            self.at = at
            values = torch.arange(self.num_together or 1) + (self.num_together or 1) * at
            yield 1000 * self.rank + (values if self.num_together else values[0])

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.resume_at = state["at"]


@pytest.mark.parametrize("num_trained", [0, 1, 4])
@pytest.mark.parametrize(
    ("num_together", "options"),
    [(0, {}), (0, {"cost": lambda sample: 1 + int(sample) % 3}), (3, {"batched": True})],
    ids=["samples", "cost", "batches"],
)
def test_a_stream_that_knows_its_position_goes_on_in_mid_epoch(
    num_together: int, options: dict[str, Any], num_trained: int
) -> None:
    sizes = [8, 0, 5]

    def work(transport: LocalTransport) -> tuple[list[Any], list[Any], list[Any]]:
        def begin() -> tuple[loft.Balancer, loft.StreamLoader]:
            balancer = loft.Balancer(sum(sizes), sizes, transport=transport)
            source = Resumable(transport.rank, 60, num_together=num_together)
            loader = loft.StreamLoader(source, balancer, **options)
            loader.set_epoch(2)
            return balancer, loader

        def some(balancer: loft.Balancer, loader: loft.StreamLoader, most: int) -> list[Any]:
            found = []
            for batch in itertools.islice(loader, most):
                balancer.take_step()
                balancer.step_ended()
                sizes_of = loader.step_sizes.step, loader.step_sizes.sizes
                found.append((sizes_of, loader.local_batch_size and batch.tolist()))
            return found

        balancer, loader = begin()
        before = some(balancer, loader, num_trained)
        buffer = io.BytesIO()
        torch.save([loader.state_dict(), balancer.state_dict()], buffer)
        buffer.seek(0)
        saved = torch.load(buffer, weights_only=True)
        balancer, loader = begin()
        loader.load_state_dict(saved[0])
        balancer.load_state_dict(saved[1])
        loader.set_epoch(2)
        assert loader.state_dict() == saved[0]  # until it goes on
        after = some(balancer, loader, 100)
        return before, after, some(*begin(), 100)

    for before, after, whole in run_ranks(3, work):
        assert len(before) == num_trained
        assert len(whole) > 5
        assert before + after == whole


def resumed(state: dict[str, Any], source: Any) -> tuple[loft.Balancer, loft.StreamLoader]:
    balancer = loft.Balancer(4, transport=ALONE)
    loader = loft.StreamLoader(source, balancer)
    loader.load_state_dict(state)
    return balancer, loader


def state_after(source: Any, *, num_trained: int) -> dict[str, Any]:
    balancer = loft.Balancer(4, transport=ALONE)
    loader = loft.StreamLoader(source, balancer)
    for _ in itertools.islice(loader, num_trained):
        balancer.take_step()
        balancer.step_ended()
    return loader.state_dict()


def test_a_stream_without_a_position_begins_anew_and_its_steps_go_on() -> None:
    state = state_after(torch.arange(12), num_trained=2)
    assert state == {"epoch": 0, "step": 2, "rank": 0, "world_size": 1, "position": None}
    balancer, loader = resumed(json.loads(json.dumps(state)), torch.arange(12))
    assert next(iter(loader)).tolist() == [0, 1, 2, 3]
    assert loader.step_sizes.step == 2
    assert balancer.plan_at(loader.step_sizes.step).sizes == (4,)


def test_a_position_is_of_its_epoch_and_ends_with_it() -> None:
    state = state_after(Resumable(0, 12), num_trained=2)
    _, loader = resumed(state, Resumable(0, 12))
    loader.set_epoch(1)
    assert next(iter(loader)).tolist() == [1, 2, 3, 4]
    assert state_after(Resumable(0, 12), num_trained=4)["position"] is None


def test_another_ranks_position_is_not_taken() -> None:
    state = state_after(Resumable(0, 12), num_trained=2) | {"rank": 1, "world_size": 2}
    with pytest.warns(UserWarning, match=r"of rank 1 of 2, this is rank 0 of 1.*on every rank"):
        _, loader = resumed(state, Resumable(0, 12))
    assert next(iter(loader)).tolist() == [1, 2, 3, 4]
    assert loader.step_sizes.step == 2


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        ({"step": -1}, ArgumentError, "step"),
        ({"position": {"source": {}}}, ArgumentError, "position holds no source and ahead"),
        ({"position": 3}, ArgumentError, "position holds no source and ahead"),
        ({}, DataError, r"of type list, has no state_dict.*\"position\": None"),
    ],
)
def test_states_that_cannot_be_are_refused_and_change_nothing(
    change: dict[str, Any], error: type[Exception], says: str
) -> None:
    state = state_after(Resumable(0, 12), num_trained=2) | change
    loader = loft.StreamLoader([0, 1, 2, 3], loft.Balancer(4, transport=ALONE))
    before = loader.state_dict()
    with pytest.raises(error, match=says):
        loader.load_state_dict(state)
    assert loader.state_dict() == before


@pytest.mark.parametrize(
    ("arguments", "error", "says"),
    [
        ({"source": 3}, ArgumentTypeError, "source=3 is of type int, which is not iterable"),
        ({"cost": 2}, ArgumentTypeError, "cost=2 must be a function"),
        ({"cost": len, "batched": True}, ArgumentError, "takes no cost"),
        ({"balancer": 8}, ArgumentTypeError, "give a loft_hvd.Balancer"),
        (
            {"balancer": loft.Balancer(8, max_batch=8, micro_batches=True, transport=ALONE)},
            ArgumentError,
            "micro_batches=True",
        ),
    ],
)
def test_what_cannot_work_is_refused(
    arguments: dict[str, Any], error: type[Exception], says: str
) -> None:
    given: dict[str, Any] = {
        "source": [],
        "balancer": loft.Balancer(8, transport=ALONE),
    } | arguments
    with pytest.raises(error, match=says):
        loft.StreamLoader(**given)


@pytest.mark.parametrize(
    ("cost", "error", "says"),
    [
        (lambda _: 9, DataError, r"costs 9, but rank 0's share of this step is 8;.*min_batch=9"),
        (lambda _: 0.5, ArgumentTypeError, "cost=0.5 of a sample is of type float"),
        (lambda _: 0, ArgumentError, "cost=0 of a sample must be >= 1"),
    ],
)
def test_costs_that_cannot_be_are_refused(cost: Any, error: type[Exception], says: str) -> None:
    balancer = loft.Balancer(8, transport=ALONE)
    with pytest.raises(error, match=says):
        take(loft.StreamLoader([torch.zeros(1)], balancer, cost=cost), balancer)


@pytest.mark.parametrize(
    ("batch", "error", "says"),
    [
        (["text"], ArgumentTypeError, "holds a str"),
        ((torch.zeros(2), torch.zeros(3)), DataError, r"have \[2, 3\] samples"),
    ],
)
def test_batches_that_cannot_be_cut_are_refused(
    batch: Any, error: type[Exception], says: str
) -> None:
    balancer = loft.Balancer(2, transport=ALONE)
    with pytest.raises(error, match=says):
        take(loft.StreamLoader([batch], balancer, batched=True), balancer)


def test_a_rank_that_claims_more_or_less_than_its_share_is_named() -> None:
    def work(transport: LocalTransport) -> None:
        balancer = loft.Balancer(16, transport=transport)
        # Rank 1 counts what rank 0 takes one by one: its batch amounts to 6 of its share of 8.
        cost = (lambda _: 3) if transport.rank == 1 else None
        loader = loft.StreamLoader(torch.zeros(20, 1), balancer, cost=cost)
        if transport.rank == 0:
            with pytest.raises(DataError, match="rank 1 says that its batch amounts to 6, but its"):
                next(iter(loader))
        else:
            next(iter(loader))

    run_ranks(2, work)


def test_one_iteration_at_a_time() -> None:
    balancer = loft.Balancer(2, transport=LocalWorld(1).transport(0))
    loader = loft.StreamLoader(torch.arange(8), balancer)
    with pytest.raises(DataError, match="no batch has been yielded"):
        _ = loader.step_sizes
    first = iter(loader)
    next(first)
    next(iter(loader))
    with pytest.raises(DataError, match="ended when a newer one began"):
        next(first)
