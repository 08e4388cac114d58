"""Attacks send what they say, and nothing else."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import loft_hvd as loft
from loft_hvd import attacks
from loft_hvd.attacks.optimised import aggregate_in_shards
from loft_hvd.errors import AggregationError, ArgumentError, ArgumentTypeError
from loft_hvd.pipeline.buckets import shard_numel
from loft_hvd.transport.local import LocalTransport, run_ranks
from tests.support.wrapped import wrap

HONEST = torch.tensor([[1.0, 2.0, 3.0], [3.0, 2.0, 1.0]])  # mean 2, 2, 2


@pytest.mark.parametrize(
    ("attack", "row"),
    [
        (attacks.SignFlip(), [-2, -2, -2]),
        (attacks.SignFlip(scale=10), [-20, -20, -20]),
        (attacks.Scaled(factor=100), [200, 200, 200]),
        (attacks.Zero(), [0, 0, 0]),
        (attacks.HugeValue(value=1e30), [1e30, 2, 2]),
        (attacks.NaN(), [float("nan")] * 3),
        (attacks.ALIE(z=1.5), [0.5, 2, 0.5]),  # deviations 1, 0, 1
        (attacks.ALIE(z=-1.0), [3, 2, 3]),
        (attacks.IPM(eps=0.5), [-1, -1, -1]),
        (attacks.Mimic(row=1), [3, 2, 1]),
        (attacks.Mimic(row=2), [1, 2, 3]),
        # Squared, honest rows are 2 from their mean and 8 apart: so this one may be 6 from the
        # mean, or 2 where distances add up.
        (attacks.MinMax(along="mean"), [2 - 2**0.5] * 3),
        (attacks.MinSum(along="mean"), [2 - (2 / 3) ** 0.5] * 3),
        (attacks.MinMax(along="sign"), [2 - 2**0.5] * 3),
        (attacks.MinMax(along="deviation"), [2 - 3**0.5, 2, 2 - 3**0.5]),
    ],
)
@pytest.mark.parametrize("num_rows", [1, 3])
def test_rows_sent(attack: attacks.Attack, row: list[float], num_rows: int) -> None:
    rows = attack(HONEST, num_rows=num_rows)
    torch.testing.assert_close(
        rows, torch.tensor([row] * num_rows, dtype=torch.float32), equal_nan=True
    )


def test_gaussian_noise_has_its_sigma_and_repeats() -> None:
    attack = attacks.Gaussian(sigma=5.0)
    rows = attack(torch.zeros(1, 20_000), num_rows=2)
    assert float(rows.std()) == pytest.approx(5.0, rel=0.05)
    assert not torch.equal(rows[0], rows[1])
    assert torch.equal(rows, attack(torch.zeros(1, 20_000), num_rows=2))


@pytest.mark.parametrize(
    "attack",
    [
        attacks.HugeValue(),
        attacks.Gaussian(),
        attacks.SignFlip(),
        attacks.ALIE(),
        attacks.MinMax(),
        attacks.MinSum(along="mean"),
        attacks.Drift(),
        attacks.OptimisedIPM(loft.Robust(1)),
    ],
)
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
    optimizer = SimpleNamespace(rank=0, world_size=2, register_outgoing_hook=None)
    with pytest.raises(ArgumentError, match=r"ranks \[2\] do not exist"):
        attacks.attach(optimizer, attacks.Zero(), ranks=[0, 2])


def test_noise_is_new_at_every_step() -> None:
    attack = attacks.Gaussian(sigma=1.0)
    first, second = torch.zeros(1, 50), torch.ones(1, 50)
    assert torch.equal(attack(first, num_rows=1), attack(first, num_rows=1))
    assert not torch.equal(attack(first, num_rows=1), attack(second, num_rows=1))


@pytest.mark.parametrize(
    "attack", [attacks.ALIE(z=3.0), attacks.MinMax(), attacks.MinSum(along="sign"), attacks.Drift()]
)
def test_alone_a_little_is_nothing(attack: attacks.Attack) -> None:
    own = torch.tensor([[1.0, -2.0]])
    assert torch.equal(attack(own, num_rows=1), own)


@pytest.mark.parametrize("along", ["deviation", "mean", "sign"])
@pytest.mark.parametrize("seed", range(10))
def test_who_hides_among_honest_rows_is_as_far_as_they_are_apart(along: str, seed: int) -> None:
    honest = torch.randn(6, 40, generator=torch.Generator().manual_seed(seed)).double() + 0.3

    def distances(row: torch.Tensor) -> torch.Tensor:
        return (honest - row).square().sum(dim=1)

    between = torch.stack([distances(row) for row in honest])
    by_most = attacks.MinMax(along=along)(honest, num_rows=1)[0]
    assert float(distances(by_most).max()) == pytest.approx(float(between.max()))
    by_sum = attacks.MinSum(along=along)(honest, num_rows=1)[0]
    assert float(distances(by_sum).sum()) == pytest.approx(float(between.sum(dim=1).max()))
    mean = honest.mean(dim=0)
    against = {"deviation": honest.std(dim=0), "mean": mean, "sign": mean.sign()}[along]
    for row in (by_most, by_sum):
        apart = torch.nn.functional.cosine_similarity(mean - row, against, dim=0)
        assert float(apart) == pytest.approx(1.0)


def test_a_hiding_place_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ArgumentError, match="MinSum: along='median' is unknown"):
        attacks.MinSum(along="median")


def test_a_drift_keeps_its_direction_and_is_as_far_off_as_honest_rows() -> None:
    attack, moves = attacks.Drift(scale=2.0), []
    for seed in range(2):
        honest = torch.randn(6, 500, generator=torch.Generator().manual_seed(seed)) + seed
        move = attack(honest, num_rows=1)[0] - honest.mean(dim=0)
        spread = (honest - honest.mean(dim=0)).square().sum(dim=1).mean().sqrt()
        assert float(move.norm()) == pytest.approx(2 * float(spread), rel=1e-4)
        moves.append(move)
    first, second = moves
    alike = torch.nn.functional.cosine_similarity(first, second, dim=0)
    assert float(alike) == pytest.approx(1.0)


@pytest.mark.parametrize("optimised", [attacks.OptimisedALIE, attacks.OptimisedIPM])
def test_optimised_attacks_try_a_dozen_strengths(optimised: Any) -> None:
    assert len(set(optimised.strengths)) == 12


def test_flipped_labels() -> None:
    labels = torch.tensor([0, 1, 9, 4])
    assert attacks.LabelFlip(10)(labels).tolist() == [9, 8, 0, 5]
    assert labels.tolist() == [0, 1, 9, 4]
    with pytest.raises(ArgumentError, match="num_classes=1"):
        attacks.LabelFlip(1)


# --- attacks that know the rule

RULES = [
    loft.TrimmedMean(2),
    loft.Robust(2),
    loft.MultiKrum(2),
    loft.Custom(lambda rows: rows.median(dim=0).values, f=2),
]


def spread_rows() -> torch.Tensor:
    generator = torch.Generator().manual_seed(4)
    return torch.randn(6, 200, generator=generator) + torch.randn(200, generator=generator)


@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("shards", [1, 8])
@pytest.mark.parametrize(
    ("optimised", "family"),
    [(attacks.OptimisedALIE, attacks.ALIE), (attacks.OptimisedIPM, attacks.IPM)],
)
def test_the_strongest_of_a_family_moves_the_rule_most(
    optimised: Any, family: Any, shards: int, rule: loft.Rule
) -> None:
    honest = spread_rows()
    attack = optimised(rule, shards=shards)

    def moved(rows: torch.Tensor) -> float:
        step = shard_numel(200, shards) if shards > 1 else 200
        parts = [
            loft.aggregate(torch.cat([honest, rows])[:, at : at + step].contiguous(), rule)
            for at in range(0, 200, step)
        ]
        return float((torch.cat(parts) - honest.mean(dim=0)).norm())

    by_strength = {s: moved(family(s)(honest, num_rows=2)) for s in attack.strengths}
    sent = attack(honest, num_rows=2)
    assert moved(sent) == max(by_strength.values())
    assert len(set(by_strength.values())) > 1  # it had a choice
    assert torch.equal(sent, attack.strongest(honest, num_rows=2)(honest, num_rows=2))


def test_strength_depends_on_the_rule_that_is_attacked() -> None:
    honest = spread_rows()
    chosen = {
        str(rule): attacks.OptimisedIPM(rule).strongest(honest, num_rows=2)
        for rule in (loft.Mean(), loft.MultiKrum(2))
    }
    assert chosen["mean"] == attacks.IPM(10.0)  # the mean follows the loudest
    assert chosen["multi_krum:f=2"] != attacks.IPM(10.0)


@pytest.mark.parametrize("rule", [*RULES, loft.Mean()], ids=str)
@pytest.mark.parametrize("shards", [1, 3, 8])
def test_slices_are_aggregated_as_by_aggregate(rule: loft.Rule, shards: int) -> None:
    rows = spread_rows()
    step = shard_numel(200, shards) if shards > 1 else 200
    slices = [rows[:, at : at + step].contiguous() for at in range(0, 200, step)]
    applied = rule.over_model if shards == 1 else rule
    expected = torch.cat([loft.aggregate(part, applied) for part in slices])
    assert torch.equal(aggregate_in_shards(rows, rule, shards=shards), expected)


def test_a_rule_that_does_not_fit_is_refused() -> None:
    with pytest.raises(AggregationError, match="trimmed_mean:f=2"):
        attacks.OptimisedALIE(loft.TrimmedMean(2))(HONEST, num_rows=2)


def test_no_shards_are_refused() -> None:
    with pytest.raises(ArgumentError, match="shards=0"):
        attacks.OptimisedALIE(loft.Robust(1), shards=0)


# --- attackers that collude in a job


def reduced_under(attack: attacks.Attack, *, steps: int = 1) -> list[list[list[float]]]:
    """Train some steps on four ranks, of which 1 and 3 collude; every rank's reduced gradients."""

    def work(transport: LocalTransport) -> list[list[float]]:
        params = [torch.nn.Parameter(torch.zeros(3)), torch.nn.Parameter(torch.zeros(2))]
        optimizer = wrap(params, transport, rule=loft.TrimmedMean(0))
        attacks.attach(optimizer, attack, ranks=[3, 1], colluding=True)
        found = []
        for step in range(steps):
            sent = 1.0 + transport.rank + 10 * step
            given = [torch.full((3,), sent), torch.full((2,), -sent)]
            torch.autograd.backward([p.view_as(p) for p in params], given)
            optimizer.synchronize()
            grads = [param.grad for param in params]
            found.append(torch.cat([g for g in grads if g is not None]).tolist())
            for param in params:
                param.grad = None
        return found

    return run_ranks(4, work)


def test_colluding_attackers_know_every_honest_row() -> None:
    # Honest rows 1 and 3 (mean 2, deviation 1): both attackers send 2 - 2 * 1 = 0. Of the second
    # parameter they are -1 and -3, and both attackers send -2 - 2 * 1 = -4.
    expected = [(1 + 3 + 0 + 0) / 4] * 3 + [(-1 - 3 - 4 - 4) / 4] * 2
    assert reduced_under(attacks.ALIE(z=2.0)) == [[expected]] * 4


def test_each_attacker_sends_its_own_row_at_every_step() -> None:
    class Numbered:
        def __call__(self, honest: torch.Tensor, *, num_rows: int) -> torch.Tensor:
            assert honest.shape[0] == 2
            return torch.arange(num_rows).float()[:, None].expand(-1, honest.shape[1]).clone()

    # Rank 1 sends 0 and rank 3 sends 1, whatever order they are named in.
    assert (
        reduced_under(Numbered(), steps=3)
        == [
            [
                [(1 + 3 + 20 * step + 1) / 4] * 3 + [(-1 - 3 - 20 * step + 1) / 4] * 2
                for step in range(3)
            ]
        ]
        * 4
    )


def test_collusion_is_said_loudly(caplog: pytest.LogCaptureFixture) -> None:
    optimizer = SimpleNamespace(rank=0, world_size=2, register_outgoing_hook=lambda hook: hook)
    with caplog.at_level(logging.WARNING):
        attacks.attach(optimizer, attacks.IPM(), ranks=[1])
        assert not caplog.records
        attacks.attach(optimizer, attacks.IPM(), ranks=[1], colluding=True)
    (record,) = caplog.records
    assert "ATTACK TRIAL: ranks [1] collude" in record.message
    assert "for trials only" in record.message


ROBUST = loft.Robust(2)


@pytest.mark.parametrize(
    "attack",
    [
        attacks.OptimisedALIE(ROBUST, shards=5),
        attacks.OptimisedIPM(ROBUST, shards=5),
        attacks.IPM(eps=0.1),
        attacks.Mimic(row=1),
    ],
    ids=lambda attack: type(attack).__name__,
)
def test_an_attack_in_a_job_is_the_attack_on_its_rows(attack: attacks.Attack) -> None:
    rows = torch.randn(5, 2000, generator=torch.Generator().manual_seed(7)) + 1

    def work(transport: LocalTransport) -> torch.Tensor:
        (param,) = params = [torch.nn.Parameter(torch.zeros(2000))]
        optimizer = wrap(params, transport, rule=ROBUST, worker_momentum=0, scope="shard")
        attacks.attach(optimizer, attack, ranks=[3, 4], colluding=True)
        param.backward(rows[transport.rank])
        optimizer.synchronize()
        assert param.grad is not None
        return param.grad.clone()

    sent = torch.cat([rows[:3], attack(rows[:3], num_rows=2)])
    expected = aggregate_in_shards(sent, ROBUST, shards=5)
    assert not torch.equal(expected, aggregate_in_shards(rows, ROBUST, shards=5))
    for reduced in run_ranks(5, work):
        assert torch.equal(reduced, expected)


@pytest.mark.parametrize("colluding", [False, True])
def test_an_attack_on_labels_is_not_attached(colluding: bool) -> None:
    optimizer: Any = SimpleNamespace(rank=0, world_size=3, register_outgoing_hook=None)
    flip: Any = attacks.LabelFlip(10)
    with pytest.raises(ArgumentTypeError, match=r"LabelFlip\(num_classes=10\)\(labels\)"):
        attacks.attach(optimizer, flip, ranks=[1], colluding=colluding)


def test_what_is_no_optimizer_of_ours_is_not_attacked() -> None:
    hook: Any = object()
    with pytest.raises(ArgumentTypeError, match="DistributedOptimizer, not a obj"):
        attacks.attach(hook, attacks.SignFlip(), ranks=[0])


def test_attackers_alone_have_nobody_to_learn_from() -> None:
    optimizer = SimpleNamespace(rank=0, world_size=2, register_outgoing_hook=None)
    with pytest.raises(ArgumentError, match="no honest row"):
        attacks.attach(optimizer, attacks.IPM(), ranks=[0, 1], colluding=True)


def test_rows_of_zeros_are_not_learnt_from() -> None:
    rows = torch.tensor([[1.0, 3.0], [0.0, 0.0], [7.0, 7.0]])  # rank 1 has no samples
    hooks: list[Any] = []
    optimizer = SimpleNamespace(
        rank=2,
        world_size=3,
        register_outgoing_hook=hooks.append,
        gather_outgoing=lambda values, name: rows,
    )
    attacks.attach(optimizer, attacks.SignFlip(), ranks=[2], colluding=True)
    values = rows[2].clone()
    hooks[0](SimpleNamespace(index=0), values)
    assert values.tolist() == [-1.0, -3.0]
