"""Who is named when ranks train on real digits, attacked or not, whatever data each of them has."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

import loft_hvd as loft
from loft_hvd.transport.local import LocalTransport, run_ranks
from tests.support.marks import long_first

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

NUM_RANKS, F, LOCAL_BATCH = 8, 2, 32
ATTACKERS = [6, 7]
Homes = list[npt.NDArray[np.int64]]


def homes_of(kind: str, labels: npt.NDArray[np.int64], *, seed: int) -> Homes:
    """Say which samples each rank has."""
    random = np.random.default_rng(seed)
    mixed = random.permutation(len(labels))
    if kind == "shuffled":
        return np.array_split(mixed, NUM_RANKS)
    if kind == "sorted":
        return np.array_split(mixed[np.argsort(labels[mixed], kind="stable")], NUM_RANKS)
    homes: list[list[int]] = [list(random.choice(mixed, 4)) for _ in range(NUM_RANKS)]
    for label in range(10):  # "dirichlet"
        members = mixed[labels[mixed] == label]
        shares = np.cumsum(random.dirichlet([0.1] * NUM_RANKS))[:-1]
        for home, part in zip(
            homes, np.split(members, (shares * len(members)).astype(int)), strict=True
        ):
            home.extend(part.tolist())
    return [np.array(home) for home in homes]


def train(kind: str, attack: Any, *, num_steps: int, seed: int) -> dict[int, int]:
    """Train an MLP by ``Robust``, and return who was named, and in which step first."""
    digits = pytest.importorskip("sklearn.datasets").load_digits()
    x, y = torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target)
    homes = homes_of(kind, digits.target, seed=seed)

    def work(transport: LocalTransport) -> dict[int, int]:
        rank = transport.rank
        # Who copies rank 0 computes what rank 0 does.
        source = 0 if attack == "copy" and rank in ATTACKERS else rank
        random = np.random.default_rng([seed, source])
        generator = torch.Generator().manual_seed(seed)
        model = torch.nn.Sequential(
            torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10)
        )
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.uniform_(-0.125, 0.125, generator=generator)
        optimizer = loft.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.5),
            model.named_parameters(),
            rule=loft.Robust(F),
            transport=transport,
        )
        if attack not in (None, "copy"):
            loft.attacks.attach(optimizer, attack, ranks=ATTACKERS)
        first: dict[int, int] = {}
        for step in range(1, num_steps + 1):
            batch = random.choice(homes[source], LOCAL_BATCH)
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(x[batch]), y[batch]).backward()
            optimizer.step()
            for worker in optimizer.report().named:
                first.setdefault(worker.ranks[0], step)
        return first

    found = run_ranks(NUM_RANKS, work, timeout_s=800)
    assert all(each == found[0] for each in found)  # every rank says the same
    return found[0]


@pytest.mark.parametrize("seed", long_first([0, 1]))
@pytest.mark.parametrize(
    "attack",
    ["copy", loft.attacks.SignFlip(10), loft.attacks.Scaled(10)],
    ids=["copy", "sign flip x10", "scaled x10"],
)
def test_a_loud_or_copying_worker_is_named_within_200_steps(attack: Any, seed: int) -> None:
    first = train("shuffled", attack, num_steps=200, seed=seed)
    victims = {0} if attack == "copy" else set()  # nobody can know who was first
    assert set(first) == set(ATTACKERS) | victims, first
    assert max(first.values()) <= 200


@pytest.mark.parametrize("seed", long_first([0, 1]))
@pytest.mark.parametrize("kind", long_first(["dirichlet", "sorted", "shuffled"]))
def test_nobody_is_named_in_a_thousand_steps_without_an_attacker(kind: str, seed: int) -> None:
    assert train(kind, None, num_steps=1000, seed=seed) == {}
