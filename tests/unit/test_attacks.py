"""Attacks send what they say, and nothing else."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from loft_hvd import attacks
from loft_hvd.errors import ArgumentError

HONEST = torch.tensor([[1.0, 2.0, 3.0], [3.0, 2.0, 1.0]])  # mean 2, 2, 2


@pytest.mark.parametrize(
    ("attack", "row"),
    [
        (attacks.SignFlip(), [-2, -2, -2]),
        (attacks.SignFlip(scale=10), [-20, -20, -20]),
        (attacks.Scaled(factor=100), [200, 200, 200]),
        (attacks.Zero(), [0, 0, 0]),
        (attacks.HugeValue(value=1e30, coordinate=4), [2, 1e30, 2]),
        (attacks.NaN(), [float("nan")] * 3),
    ],
)
@pytest.mark.parametrize("num_rows", [1, 3])
def test_rows_sent(attack: attacks.Attack, row: list[float], num_rows: int) -> None:
    rows = attack(HONEST, num_rows=num_rows)
    torch.testing.assert_close(
        rows, torch.tensor([row] * num_rows, dtype=torch.float32), equal_nan=True
    )


def test_gaussian_noise_has_its_sigma_and_repeats() -> None:
    attack = attacks.Gaussian(sigma=5.0, seed=3)
    rows = attack(torch.zeros(1, 20_000), num_rows=2)
    assert float(rows.std()) == pytest.approx(5.0, rel=0.05)
    assert not torch.equal(rows[0], rows[1])
    assert torch.equal(rows, attack(torch.zeros(1, 20_000), num_rows=2))


@pytest.mark.parametrize("attack", [attacks.HugeValue(), attacks.Gaussian(), attacks.SignFlip()])
def test_empty_buckets_are_no_trouble(attack: attacks.Attack) -> None:
    assert attack(torch.zeros(1, 0), num_rows=2).shape == (2, 0)


def test_only_the_named_ranks_attack_whoever_has_these_numbers() -> None:
    hooks: list[Any] = []
    optimizer = SimpleNamespace(rank=0, world_size=2, register_outgoing_hook=hooks.append)
    attacks.attach(optimizer, attacks.Zero(), ranks=[1])
    sent = []
    for optimizer.rank in (0, 1, 0):  # numbered anew twice
        values = torch.ones(3)
        for hook in hooks:
            hook(None, values)
        sent.append(values.tolist())
    assert sent == [[1.0] * 3, [0.0] * 3, [1.0] * 3]


def test_ranks_that_do_not_exist_are_refused() -> None:
    optimizer = SimpleNamespace(rank=0, world_size=2)
    with pytest.raises(ArgumentError, match=r"ranks \[2\] do not exist"):
        attacks.attach(optimizer, attacks.Zero(), ranks=[0, 2])


def test_noise_is_new_at_every_step() -> None:
    attack = attacks.Gaussian(sigma=1.0, seed=3)
    first, second = torch.zeros(1, 50), torch.ones(1, 50)
    assert torch.equal(attack(first, num_rows=1), attack(first, num_rows=1))
    assert not torch.equal(attack(first, num_rows=1), attack(second, num_rows=1))
