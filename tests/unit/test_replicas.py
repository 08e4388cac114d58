"""Copies of a model that differ between ranks end the job, with the rank and the field."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

import loft_hvd as loft
from loft_hvd.errors import MismatchError
from loft_hvd.optimizer import replicas
from loft_hvd.optimizer.replicas import ReplicaCheck, bits_of, describe
from loft_hvd.transport.base import Channel
from loft_hvd.transport.local import LocalTransport, run_ranks
from tests.support.training import make_data, make_model
from tests.support.worlds import environment

MODEL = make_model()  # one for all: threads share torch's random numbers


def train(
    transport: LocalTransport,
    *,
    spoil: Callable[[torch.nn.Module, torch.optim.Optimizer], None] = lambda model, optimizer: None,
    at_step: int = 0,
    num_steps: int = 3,
    seed: int = 3,
    rule: loft.Rule | None = None,
) -> int:
    """Train, with a slip on rank 1 before a step, and return how many steps were taken."""
    model = copy.deepcopy(MODEL)
    balancer = loft.Balancer(12, "uniform", transport=transport)
    inner = torch.optim.Adam(model.parameters(), lr=0.01)
    optimizer = loft.DistributedOptimizer(
        inner, model.named_parameters(), balancer=balancer, rule=rule, transport=transport
    )
    step = 0
    loader = loft.DataLoader(make_data(12 * num_steps), balancer, seed=seed)
    for x, y in loader:
        if transport.rank == 1 and step == at_step:
            spoil(model, inner)
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        step += 1
    return step


def shift(model: torch.nn.Module, _: torch.optim.Optimizer) -> None:
    with torch.no_grad():
        next(model.parameters())[0, 0] += 1e-6


def reseed(model: torch.nn.Module, _: torch.optim.Optimizer) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.uniform_(-0.5, 0.5)


def load_state(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for parameter in model.parameters():
        optimizer.state[parameter] = {
            "step": torch.tensor(7.0),
            "exp_avg": torch.ones_like(parameter),
            "exp_avg_sq": torch.ones_like(parameter),
        }


def set_rate(_: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.param_groups[0]["lr"] = 0.02


@pytest.mark.parametrize(
    ("spoil", "field"),
    [
        (shift, r"parameter 0\.weight differs on ranks \[1\].*float32 \[16, 6\], first value"),
        (reseed, r"parameter 0\.bias differs on ranks \[1\].*hvd\.broadcast_parameters"),
        (load_state, r"optimizer state of parameter 0\.bias differs on ranks \[1\]"),
        (set_rate, r"option lr of parameter group 0 differs on ranks \[1\]"),
    ],
)
@pytest.mark.parametrize("rule", [None, loft.Median()], ids=str)
def test_copies_that_differ_end_the_first_step_on_every_rank(
    spoil: Any, field: str, rule: loft.Rule | None
) -> None:
    def work(transport: LocalTransport) -> None:
        with pytest.raises(MismatchError, match=f"DistributedOptimizer, step 1: {field}"):
            train(transport, spoil=spoil, rule=rule)

    run_ranks(3, work)


def test_another_seed_of_the_data_ends_the_first_step() -> None:
    def work(transport: LocalTransport) -> None:
        with pytest.raises(MismatchError, match=r"batch trained on \(data set, seed.* \[1\]"):
            train(transport, seed=4 if transport.rank == 1 else 3)

    run_ranks(3, work)


def test_a_copy_that_changes_later_is_found_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicas, "_FEWEST_STEPS", 5)
    monkeypatch.setattr(replicas, "_MOST_STEPS", 5)
    monkeypatch.setattr(replicas, "_LOOK_BYTES", 1)  # one parameter a look, of four

    def work(transport: LocalTransport) -> None:
        with pytest.raises(MismatchError, match=r"step (6|11|16|21): .*parameter \S+ differs"):
            train(transport, spoil=shift, at_step=2, num_steps=30)

    run_ranks(3, work)


def test_what_has_set_copies_apart_is_named_before_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicas, "_FEWEST_STEPS", 5)

    def work(transport: LocalTransport) -> None:
        told = r"step 6: option lr of parameter group 0 differs .* \[1\].*loft.average\(loss"
        with pytest.raises(MismatchError, match=told):
            train(transport, spoil=set_rate, at_step=2, num_steps=30)

    run_ranks(3, work)


def test_copies_are_compared_once_where_ranks_sum_by_other_numbers_of_threads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(replicas, "_FEWEST_STEPS", 5)
    monkeypatch.setattr(replicas, "_MOST_STEPS", 5)

    def count() -> int:
        return 2 if threading.current_thread().name == "loft-rank-1" else 1

    monkeypatch.setattr(torch, "get_num_threads", count)
    # As an optimizer's sums may, in the last bit.
    found = run_ranks(3, lambda end: train(end, spoil=shift, at_step=2, num_steps=30))
    assert found == [30] * 3

    def work(transport: LocalTransport) -> None:  # options are no sums
        with pytest.raises(MismatchError, match=r"step 6: option lr .* \[1\]"):
            train(transport, spoil=set_rate, at_step=2, num_steps=30)

    run_ranks(3, work)


def test_copies_that_differ_on_purpose_train_on() -> None:
    with environment(LOFT_HVD_COPIES="ignore"):
        assert run_ranks(3, lambda end: train(end, spoil=reseed)) == [3] * 3


def test_equal_copies_train_on() -> None:
    assert run_ranks(3, lambda end: train(end, num_steps=120)) == [120] * 3


def test_looks_take_a_thousandth_of_the_time() -> None:
    def work(transport: LocalTransport) -> list[int]:
        now, looks = [0.0], []
        parameter = torch.nn.Parameter(torch.ones(3))

        def batch() -> str:  # asked once a look, which takes 40 ms on rank 1, 10 ms on rank 0
            now[0] += 0.01 + 0.03 * transport.rank
            looks.append(check.num_steps)
            return ""

        check = ReplicaCheck(
            Channel(transport, "x", 10.0),
            torch.optim.SGD([parameter], lr=1.0),
            [("w", parameter)],
            batch=batch,
            clock=lambda: now[0],
        )
        for _ in range(12_200):
            now[0] += 0.01
            check.gradients_reduced()
        return looks

    first, second = run_ranks(2, work)
    # 40 ms are a thousandth of 4000 steps of 10 ms.
    assert first == second == pytest.approx([1, 101, 4101, 8101, 12_101], abs=3)
    assert run_ranks(1, work) == [[]]  # alone there is nobody to compare with


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (torch.tensor([0.0]), torch.tensor([-0.0])),
        (torch.tensor([1.0, 2.0]), torch.tensor([2.0, 1.0])),
        (torch.zeros(2), torch.zeros(2, dtype=torch.float64)),
        (torch.zeros(2, 3), torch.zeros(3, 2)),
        ({"step": 1}, {"step": 2}),
        ({"step": 1}, {"number": 1}),
        ([1.0, None], [1.0]),
        (torch.tensor(float("nan")), torch.tensor(1.0)),
    ],
)
def test_values_that_differ_are_described_otherwise(one: object, other: object) -> None:
    assert describe(one) == describe(one)
    assert describe(one) != describe(other)


@pytest.mark.parametrize(
    "values",
    [
        torch.empty(0),
        torch.tensor(3.0, dtype=torch.bfloat16),
        torch.ones(4, 6).t(),
        torch.ones(2, 3, 4, 4).to(memory_format=torch.channels_last),
        torch.ones(3, dtype=torch.complex64).conj(),
        torch.tensor([True, False]),
        torch.ones(3, requires_grad=True),
    ],
)
def test_bits_of_any_dense_tensor_are_those_of_its_values(values: torch.Tensor) -> None:
    assert bits_of(values) == bits_of(values.detach().clone().contiguous())
    assert "bits" in describe(values)
    assert describe(torch.ones(3, device="meta")) == "float32 [3]"
    assert describe(torch.eye(3).to_sparse()) == "float32 [3, 3]"
    assert describe(object()) == "object"
