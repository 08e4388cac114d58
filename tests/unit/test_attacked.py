"""Simulated training under attack."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import loft_hvd as loft
from loft_hvd.aggregation.rules import Custom
from loft_hvd.bench import attacked
from loft_hvd.bench.attacked import ATTACKS, NONE, AttackTrial, Setting, count_computing, train
from loft_hvd.bench.defences import Defence
from loft_hvd.bench.skews import draw_batches
from loft_hvd.errors import ArgumentError

pytest.importorskip("sklearn", reason="the digits ship inside scikit-learn")

SETTING = Setting("mlp", 5, 1, steps=60, global_batch=80)


def trial(defence: str = "robust", attack: str = NONE, skew: str = "shuffled") -> AttackTrial:
    return AttackTrial(Defence(defence), attack, skew, seed=0)


def test_it_learns_and_repeats() -> None:
    (first,) = train([trial("mean")], SETTING)
    assert first > 0.7
    assert train([trial("mean")], SETTING) == [first]


def test_runs_side_by_side_are_those_alone() -> None:
    trials = [trial(attack=attack) for attack in ("ALIE z=1", "mimic", "optimised IPM")]
    together = train(trials, SETTING)
    alone = [train([each], SETTING)[0] for each in trials]
    assert together == pytest.approx(alone, abs=0.02)  # products of other shapes round otherwise


@pytest.mark.parametrize("attack", ATTACKS[1:])
def test_attacks_spoil_the_mean_no_less_than_the_advised_rule(attack: str) -> None:
    mean, robust = (train([trial(name, attack)], SETTING)[0] for name in ("mean", "robust"))
    assert robust > mean - 0.05


def test_scope_auto_goes_over_to_shards_after_50_steps_where_workers_are_alike() -> None:
    def trained(name: str, skew: str, steps: int) -> float:
        setting = dataclasses.replace(SETTING, steps=steps)
        return train([trial(name, "IPM 0.1", skew)], setting)[0]

    assert trained("robust, scope auto", "sorted", 60) == trained("robust", "sorted", 60)
    assert trained("robust, scope auto", "shuffled", 50) == trained("robust", "shuffled", 50)


@pytest.mark.parametrize(("apart", "shards"), [(3.0, 1), (0.0, 5)])
def test_scope_auto_is_decided_in_the_50th_step(apart: float, shards: int) -> None:
    aggregator = attacked._Aggregator(trial("robust, scope auto", skew="sorted"), SETTING, 600)
    generator = torch.Generator().manual_seed(0)
    lasting = apart * torch.randn(5, 600, generator=generator)
    lasting[4] = float("nan")  # a worker that sends this is not counted, and holds nobody up
    for _ in range(50):
        assert aggregator.shards == 1
        rows = lasting + torch.randn(5, 600, generator=generator)
        aggregator.aggregate(rows, gradients=rows)
    assert aggregator.shards == shards


def test_who_is_honest_in_even_steps_sends_the_wrong_row_in_odd_ones() -> None:
    honest = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    attack = attacked.make_attack(attacked.ODD_STEPS, loft.Median(), 1)
    sent = [attack(honest, num_rows=2).tolist() for _ in range(4)]  # type: ignore[misc]
    assert sent == [[[2.0, 3.0]] * 2, [[-20.0, -30.0]] * 2] * 2


def test_a_loud_attack_ruins_the_mean_and_not_the_advised_rule() -> None:
    mean, robust = (
        train([trial(name, "sign flip x10")], SETTING)[0] for name in ("mean", "robust in shards")
    )
    assert mean < 0.3
    assert robust > 0.7


def test_twenty_classes_are_learnt_and_flipped_among_twenty() -> None:
    setting = dataclasses.replace(SETTING, model="mlp20", steps=120)
    of_none, of_flips = (train([trial("mean", a)], setting)[0] for a in (NONE, "label flip"))
    assert of_none > 0.7
    assert of_none > of_flips
    data = attacked._DATA["mlp20"]()
    assert data.labels.unique().tolist() == [*range(20)]
    assert (len(data.labels), len(data.test_labels)) == (2000, 360)


@pytest.mark.parametrize(("model", "rate"), [("mlp", 0.5), ("cnn", 0.1)])
def test_a_step_is_that_of_the_plain_formula(model: str, rate: float) -> None:
    """Two steps of worker momentum and the trimmed mean, written out with torch's modules."""
    setting = Setting(model, 4, 1, steps=2, global_batch=32)
    data = attacked.load_digits()
    drawn = draw_batches("shuffled", data.labels.numpy(), num_workers=4, batch=8, steps=2, seed=0)
    torch.manual_seed(0)
    network = attacked.MODELS[model]()
    sums, weight = [torch.zeros(()) for _ in range(4)], 0.0
    for step in range(2):
        weight = 0.9 * weight + 1
        for worker in range(4):
            network.zero_grad()
            chosen = torch.from_numpy(drawn[step, worker])
            F.cross_entropy(network(data.images[chosen]), data.labels[chosen]).backward()
            grads = [p.grad.flatten() for p in network.parameters() if p.grad is not None]
            sums[worker] = 0.9 * sums[worker] + torch.cat(grads)
        update = loft.aggregate([s / weight for s in sums], loft.TrimmedMean(1))
        with torch.no_grad():
            parameters = [*network.parameters()]
            parts = update.split([p.numel() for p in parameters])
            for parameter, part in zip(parameters, parts, strict=True):
                parameter.sub_(part.view_as(parameter), alpha=rate)
    with torch.no_grad():
        right = network(data.test_images).argmax(dim=1) == data.test_labels
    (found,) = train([trial("trimmed_mean")], setting)
    assert found == pytest.approx(float(right.float().mean()), abs=1 / 360 + 1e-6)


def test_momentum_in_sgd_is_kept_behind_the_rule() -> None:
    """Without an attack, the mean of momenta is the momentum of means, but for the start."""
    setting = dataclasses.replace(SETTING, steps=120)
    at_workers, behind = (
        train([trial(name)], setting)[0] for name in ("mean", "mean, momentum in SGD")
    )
    assert at_workers == pytest.approx(behind, abs=0.03)
    assert at_workers != behind


def test_honest_workers_alone_compute_but_for_label_flips() -> None:
    assert [count_computing(attack, SETTING) for attack in ATTACKS] == [5, *[4] * 10, 5]


def test_unknown_models_and_attacks_are_refused() -> None:
    with pytest.raises(ArgumentError, match="'lstm' is unknown"):
        train([trial()], dataclasses.replace(SETTING, model="lstm"))
    with pytest.raises(ArgumentError, match="'gas' is unknown"):
        train([trial(attack="gas")], SETTING)


def watching(found: list[Tensor], draws: list[float]) -> Defence:
    """Return a mean that notes the rows that it is given, and draws as ByzFL's rules do."""

    def aggregate(rows: Tensor) -> Tensor:
        found.append(rows.clone())
        draws.append(float(torch.rand(())))
        return rows.mean(dim=0)

    class Watching(Defence):
        def rule(self, f: int) -> Custom:
            return Custom(aggregate, f=f)

    return Watching("mean")


EIGHT = Setting("mlp", 8, 2)


@pytest.mark.parametrize(("attack", "num_rows"), [("IPM 0.1", 6), ("label flip", 8)])
def test_ranks_hold_the_rows_of_the_honest_and_of_the_attackers(attack: str, num_rows: int) -> None:
    found: list[Tensor] = []
    for seed in range(4):
        watched = AttackTrial(watching(found, []), attack, "shuffled", seed)
        aggregator = attacked._Aggregator(watched, EIGHT, 3)
        rows = torch.arange(1.0, num_rows + 1)[:, None].expand(-1, 3).clone()
        for _ in range(2):
            aggregator.aggregate(rows, gradients=rows)
        assert torch.equal(found[-1], found[-2])  # one placement for all steps
        sent = found[-1][:, 0].tolist()
        wrong = [7.0, 8.0] if attack == "label flip" else [-0.35, -0.35]
        assert sorted(sent) == pytest.approx(sorted([1, 2, 3, 4, 5, 6, *wrong]))


@pytest.mark.parametrize("setting", [EIGHT, Setting("mlp", 16, 3), Setting("mlp", 4, 3)])
def test_every_rank_attacks_within_as_many_seeds_as_can_be(setting: Setting) -> None:
    num_honest = setting.num_workers - setting.f
    num_seeds = -(-setting.num_workers // setting.f)
    rows = [attacked.row_by_rank(setting, seed) for seed in range(num_seeds)]
    assert all(sorted(held) == list(range(setting.num_workers)) for held in rows)
    attacks = [[row >= num_honest for row in held] for held in rows]
    assert all(map(any, zip(*attacks, strict=True)))
    assert rows[0] != [*range(setting.num_workers)]


def test_an_attack_tries_the_rule_with_the_draws_that_it_will_make() -> None:
    of_seeds = []
    for seed in range(2):
        draws: list[float] = []
        watched = AttackTrial(watching([], draws), "optimised IPM", "shuffled", seed)
        aggregator = attacked._Aggregator(watched, EIGHT, 3)
        for _ in range(2):
            aggregator.aggregate(torch.randn(6, 3), gradients=torch.zeros(6, 3))
        first, second = draws[: len(draws) // 2], draws[len(draws) // 2 :]
        assert len(first) > 2
        assert len(set(first)) == len(set(second)) == 1
        of_seeds += [first[0], second[0]]
    assert len(set(of_seeds)) == 4


@pytest.mark.parametrize("rule", ["mean", "median"])
def test_rules_without_f_are_tried_with_half_of_the_workers_attacking(rule: str) -> None:
    setting = dataclasses.replace(SETTING, num_workers=4, f=2, steps=3)
    assert len(train([trial(rule, "IPM 0.1")], setting)) == 1
