"""Sparse gradients under a mean: the step of one process, by the rows that ranks have touched."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import loft_hvd as loft
from loft_hvd.errors import ArgumentTypeError, PeerError
from loft_hvd.pipeline.sparse import as_sparse, sum_sparse
from loft_hvd.transport.base import Channel
from loft_hvd.transport.local import LocalTransport, run_ranks
from tests.support.recording import RecordingTransport

NUM_ROWS, DIM, SAMPLES = 12, 3, 6  # of the table; indices of a step's global batch

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.5),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.5, momentum=0.5),
    "sparse_adam": lambda parameters: torch.optim.SparseAdam(list(parameters), lr=0.1),
}


class Model(torch.nn.Module):
    """A table, and a layer behind it unless all parameters are to be sparse."""

    def __init__(self, *, has_layer: bool = True, sparse: bool = True) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(NUM_ROWS, DIM, sparse=sparse)
        self.layer = torch.nn.Linear(DIM, 1) if has_layer else torch.nn.Identity()
        generator = torch.Generator().manual_seed(3)  # ranks are threads with one generator
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.rand(parameter.shape, generator=generator))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = (self.layer(self.table(x)) ** 2).mean()
        return result


def indices_of(step: int) -> Tensor:
    """Return the indices of a step's global batch: some of them twice."""
    generator = torch.Generator().manual_seed(step)
    return torch.randint(NUM_ROWS, (SAMPLES,), generator=generator)


def train(
    transport: LocalTransport,
    kind: str,
    sizes: Sequence[int],
    *,
    num_steps: int = 4,
    **options: Any,
) -> Model:
    model = Model(has_layer=kind != "sparse_adam")
    balancer = loft.Balancer(SAMPLES, list(sizes), transport=transport)
    optimizer = loft.DistributedOptimizer(
        OPTIMIZERS[kind](model.parameters()),
        model.named_parameters(),
        balancer=balancer,
        transport=transport,
        **options,
    )
    rank = transport.rank
    begin = sum(sizes[:rank])
    num_passes = options.get("backward_passes_per_step", 1)
    for step in range(num_steps):
        optimizer.zero_grad()
        for number in range(num_passes):
            mine = indices_of(step * num_passes + number)[begin : begin + sizes[rank]]
            # A rank without samples computes on what it has, and nothing of it counts.
            x = mine if len(mine) else torch.tensor([0, 1])
            with balancer.step(len(mine) or 2):
                (model(x) * (1.0 if len(mine) else float("nan"))).backward()
        optimizer.step()
    return model


def train_alone(kind: str, *, num_steps: int = 4, num_passes: int = 1) -> Model:
    model = Model(has_layer=kind != "sparse_adam")
    optimizer = OPTIMIZERS[kind](model.parameters())
    for step in range(num_steps):
        optimizer.zero_grad()
        for number in range(num_passes):
            model(indices_of(step * num_passes + number)).backward()
        optimizer.step()
    return model


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("sizes", [[3, 3], [4, 1, 1], [4, 0, 2]], ids=str)
@pytest.mark.parametrize("rule", [loft.Mean(), loft.Mean(reproducible=True)], ids=str)
def test_training_equals_one_process(kind: str, sizes: list[int], rule: loft.Rule) -> None:
    alone = train_alone(kind)
    for model in run_ranks(len(sizes), lambda transport: train(transport, kind, sizes, rule=rule)):
        for name, value in alone.named_parameters():
            torch.testing.assert_close(
                dict(model.named_parameters())[name], value, rtol=0, atol=1e-5
            )


@pytest.mark.parametrize("sizes", [[3, 3], [4, 2]], ids=str)
def test_several_passes_are_one_step(sizes: list[int]) -> None:
    alone = train_alone("sgd", num_passes=2)
    models = run_ranks(
        2, lambda transport: train(transport, "sgd", sizes, backward_passes_per_step=2)
    )
    for model in models:
        torch.testing.assert_close(model.table.weight, alone.table.weight, rtol=0, atol=1e-5)


def test_only_rows_that_were_touched_travel_from_the_second_step_on() -> None:
    def work(end: LocalTransport) -> list[tuple[int, bool]]:
        transport = RecordingTransport(end)
        table = torch.nn.Embedding(10_000, DIM, sparse=True)
        torch.nn.init.ones_(table.weight)
        optimizer = loft.DistributedOptimizer(
            torch.optim.SGD(table.parameters(), lr=0.1), transport=transport
        )
        seen = []
        for _ in range(3):
            transport.sent_bytes = 0
            transport.names.clear()
            optimizer.zero_grad()
            table(torch.tensor([end.rank, 5])).sum().backward()
            optimizer.step()
            grad = table.weight.grad
            assert grad is not None
            assert grad.layout == torch.sparse_coo
            assert grad.coalesce().indices()[0].tolist() == [0, 1, 5]
            assert grad.to_dense()[[0, 1, 5], 0].tolist() == [0.5, 0.5, 1.0]
            has_bucket = any(".b00" in name for name in transport.names)
            seen.append((transport.sent_bytes, has_bucket))
        return seen

    (first, has_bucket), *later = run_ranks(2, work)[0]
    assert has_bucket
    assert first >= 10_000 * DIM * 4
    for num_bytes, has_bucket in later:
        # Two rows of three float32 values with an index each, and small exchanges of each step.
        assert not has_bucket
        assert 2 * (8 + DIM * 4) <= num_bytes <= 1000


def test_a_rank_that_touches_nothing_takes_part_and_none_at_all_is_no_row() -> None:
    def work(transport: LocalTransport) -> list[list[int]]:
        table = torch.nn.Embedding(4, 2, sparse=True)
        torch.nn.init.ones_(table.weight)
        other = torch.nn.Parameter(torch.zeros(1))
        sgd = torch.optim.SGD([table.weight, other], lr=0.1)
        optimizer = loft.DistributedOptimizer(sgd, transport=transport)
        rows = []
        for step in range(3):
            optimizer.zero_grad()
            loss = other.sum()
            if step == 0 or (step == 1 and transport.rank == 1):
                loss = loss + table(torch.tensor([transport.rank])).sum()
            loss.backward()
            optimizer.step()
            assert table.weight.grad is not None
            rows.append(table.weight.grad.coalesce().indices()[0].tolist())
        return rows

    assert run_ranks(2, work) == [[[0, 1], [1], []]] * 2


@pytest.mark.parametrize("rule", [loft.Mean(), loft.Median()], ids=str)
def test_sparse_as_dense_goes_with_an_optimizer_of_sparse_gradients(rule: loft.Rule) -> None:
    def work(transport: LocalTransport) -> Tensor:
        model = Model(has_layer=False)
        adam = torch.optim.SparseAdam(list(model.parameters()), lr=0.1)
        optimizer = loft.DistributedOptimizer(
            adam, rule=rule, sparse_as_dense=True, transport=transport
        )
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.tensor([2, 5])).backward()
            optimizer.step()
        return model.table.weight.detach()

    alone = Model(has_layer=False)
    adam = torch.optim.SparseAdam(list(alone.parameters()), lr=0.1)
    for _ in range(2):
        adam.zero_grad()
        alone(torch.tensor([2, 5])).backward()
        adam.step()
    for weights in run_ranks(3, work):
        torch.testing.assert_close(weights, alone.table.weight.detach(), rtol=0, atol=1e-6)


ROBUST = {"rule": loft.Robust(f=1)}  # with worker momentum unless told otherwise


def step_of_both(transport: LocalTransport, table_rule: loft.Rule | None, **options: Any) -> None:
    """Take a step of a table, with a rule of its own if given, and a layer behind it."""
    model = Model()
    groups: list[dict[str, Any]] = [
        {"params": [model.table.weight]} | ({} if table_rule is None else {"rule": table_rule}),
        {"params": list(model.layer.parameters())},
    ]
    sgd = torch.optim.SGD(groups, lr=0.1)
    optimizer = loft.DistributedOptimizer(
        sgd, model.named_parameters(), transport=transport, **options
    )
    model(torch.tensor([1, 2])).backward()
    optimizer.step()


@pytest.mark.parametrize(
    ("table_rule", "options", "way_out"),
    [
        (None, {"rule": loft.Median()}, "or give its parameter group the rule"),
        (None, {"worker_momentum": 0.5}, "or use worker_momentum=0, with the rule"),
        (loft.Mean(), ROBUST, "or use worker_momentum=0, with the rule"),
    ],
    ids=["robust", "momentum", "advised momentum"],
)
def test_what_needs_all_values_refuses_sparse_gradients(
    table_rule: loft.Rule | None, options: dict[str, Any], way_out: str
) -> None:
    def work(transport: LocalTransport) -> None:
        with pytest.raises(
            (ArgumentTypeError, PeerError), match=rf"'table.weight'.*{way_out} loft.Mean\(\)"
        ):
            step_of_both(transport, table_rule, **options)

    run_ranks(3, work)


@pytest.mark.parametrize(
    ("table_rule", "options"),
    [
        (loft.Mean(), {"rule": loft.Median()}),
        (loft.Mean(), ROBUST | {"worker_momentum": 0}),
        (None, ROBUST | {"sparse_as_dense": True}),
    ],
    ids=["mean", "mean without momentum", "as dense"],
)
def test_the_ways_out_for_sparse_gradients_are_taken(
    table_rule: loft.Rule | None, options: dict[str, Any]
) -> None:
    run_ranks(3, lambda transport: step_of_both(transport, table_rule, **options))


def test_gradients_of_two_sparse_dimensions_and_dense_ones_are_added() -> None:
    def work(transport: LocalTransport) -> list[Tensor]:
        like = torch.zeros(3, 2)
        mine = [None, torch.eye(3, 2), torch.ones(3, 2).to_sparse(2)][transport.rank]
        sums = sum_sparse(Channel(transport, "t"), [as_sparse(mine, like, 1)] * 2, name="rows")
        return [each.to_dense() for each in sums]

    for sums in run_ranks(3, work):
        for each in sums:
            assert torch.equal(each, torch.eye(3, 2) + 1)
