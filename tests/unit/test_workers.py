"""Two levels, and who was off: an optimizer over groups of ranks, watched while it trains."""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import loft_hvd as loft
from loft_hvd.aggregation.aggregate import aggregate
from loft_hvd.config import Config, config
from loft_hvd.errors import AggregationError, ArgumentError, ArgumentTypeError, MismatchError
from loft_hvd.optimizer.parameters import ReducedParameters
from loft_hvd.optimizer.wrapper import OptimizerWrapper
from loft_hvd.pipeline.buckets import ParameterSpec
from loft_hvd.pipeline.suspicion.report import SuspicionReport
from loft_hvd.pipeline.weights import capped_weights
from loft_hvd.transport.base import Abilities
from loft_hvd.transport.groups import Over
from loft_hvd.transport.local import Faults, LocalTransport, run_ranks

NUMEL = 1003
MEAN = loft.Mean(reproducible=True)


def rows_of(world_size: int, step: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(100 + step)
    return torch.randn(world_size, NUMEL, generator=generator)


def make(transport: LocalTransport, **options: Any) -> tuple[torch.nn.Parameter, OptimizerWrapper]:
    weight = torch.nn.Parameter(torch.zeros(NUMEL))
    inner = torch.optim.SGD([weight], lr=1.0)
    return weight, loft.DistributedOptimizer(inner, transport=transport, **options)


def reduce_once(
    transport: LocalTransport, sizes: list[int] | None = None, **options: Any
) -> Tensor:
    """Return the reduced gradient of the rows of ``rows_of``, each as large as its rank's batch."""
    if sizes is not None:
        options["balancer"] = balancer = loft.Balancer(sum(sizes), sizes, transport=transport)
    weight, optimizer = make(transport, **options)
    loss = (weight * rows_of(transport.world_size)[transport.rank]).sum()
    if sizes is None:
        loss.backward()
    else:
        with balancer.step(sizes[transport.rank] or balancer.min_batch):
            loss.backward()
    optimizer.synchronize()
    assert weight.grad is not None
    return weight.grad.clone()


def two_levels(
    rows: Tensor, groups: list[list[int]], rule: loft.Rule, sizes: list[int] | None = None
) -> Tensor:
    """Aggregate by definition: a mean by samples inside, the rule with the groups' sums over it."""
    means = []
    for group in groups:
        counts = None if sizes is None else [sizes[rank] for rank in group]
        idle = counts is not None and sum(counts) == 0
        means.append(rows[0] * 0 if idle else aggregate(rows[group], MEAN, weights=counts))
    sums = None if sizes is None else [sum(sizes[rank] for rank in group) for group in groups]
    weights = None if sums is None or isinstance(rule, loft.Median) else capped_weights(sums)
    present = None if sums is None else [total > 0 for total in sums]
    result: Tensor = aggregate(torch.stack(means), rule, weights=weights, present=present)
    return result


@pytest.mark.parametrize(
    ("groups", "rule"),
    [
        ([[0, 1], [2, 3]], loft.Median()),
        ([[0, 1], [2, 3], [4, 5]], loft.TrimmedMean(f=1)),
        ([[0, 3], [1, 4], [2, 5]], loft.Median()),
        ([[0, 1, 2], [3, 4, 5]], loft.Mean(reproducible=True)),
    ],
    ids=str,
)
def test_two_levels_are_a_mean_inside_and_the_rule_over_groups(
    groups: list[list[int]], rule: loft.Rule
) -> None:
    world_size = sum(map(len, groups))
    faults = Faults(seed=3, reorder=True, max_delay_s=0.001)
    found = run_ranks(
        world_size, lambda end: reduce_once(end, rule=rule, over=groups), faults=faults
    )
    expected = two_levels(rows_of(world_size), groups, rule)
    for gradient in found:
        assert torch.equal(gradient, expected)


@pytest.mark.parametrize(
    "sizes", [[3, 1, 2, 2, 9, 4], [3, 0, 2, 2, 0, 5, 1, 1], [0, 0, 2, 2, 1, 5, 3, 3]], ids=str
)
@pytest.mark.parametrize("rule", [loft.TrimmedMean(f=1), loft.Median()], ids=str)
def test_groups_weigh_the_sum_of_their_samples(sizes: list[int], rule: loft.Rule) -> None:
    groups = [[rank, rank + 1] for rank in range(0, len(sizes), 2)]
    found = run_ranks(len(sizes), lambda end: reduce_once(end, sizes, rule=rule, over=groups))
    expected = two_levels(rows_of(len(sizes)), groups, rule, sizes)
    for gradient in found:
        assert torch.equal(gradient, expected)


def test_a_median_over_unequal_batches_takes_no_weights() -> None:
    sizes = [1, 1, 1, 9]
    found = run_ranks(4, lambda end: reduce_once(end, sizes, rule=loft.Median()))
    assert torch.equal(found[0], loft.median(rows_of(4)))


def test_a_median_of_a_users_own_weights_takes_them() -> None:
    rows, weights = rows_of(4), [1, 1, 1, 9]

    def reduce(end: LocalTransport) -> Tensor:
        return loft.allreduce(
            rows[end.rank], loft.Median(), name="x", weights=weights, transport=end
        )

    assert torch.equal(run_ranks(4, reduce)[0], loft.median(rows, weights=weights))


def test_over_nodes_takes_the_ranks_of_each_node() -> None:
    def reduce(end: LocalTransport) -> Tensor:
        return reduce_once(end, rule=loft.Median(), over="nodes")

    expected = two_levels(rows_of(4), [[0, 1], [2, 3]], loft.Median())
    assert torch.equal(run_ranks(4, reduce, ranks_per_node=2)[3], expected)
    flat = run_ranks(4, reduce, ranks_per_node=1)
    assert torch.equal(flat[3], loft.median(rows_of(4)))


def test_a_plain_mean_is_the_same_with_groups() -> None:
    found = run_ranks(4, lambda end: reduce_once(end, over=[[0, 1], [2, 3]]))
    torch.testing.assert_close(found[0], rows_of(4).mean(dim=0))


@pytest.mark.parametrize("wire", [loft.Compression.fp16, loft.Compression.bf16], ids=str)
def test_sixteen_bits_travel_on_both_levels(wire: loft.Compression) -> None:
    found = run_ranks(
        4,
        lambda end: reduce_once(end, rule=loft.Median(), over=[[0, 1], [2, 3]], compression=wire),
    )
    rows = rows_of(4).to(wire.dtype)
    assert torch.equal(found[0], two_levels(rows, [[0, 1], [2, 3]], loft.Median()).float())


def test_f_counts_groups() -> None:
    with pytest.raises(AggregationError, match=r"f counts groups, and there are 2 of 2 ranks each"):
        run_ranks(4, lambda end: make(end, rule=loft.TrimmedMean(f=1), over=[[0, 1], [2, 3]]))


def test_a_balancer_must_leave_enough_groups_samples() -> None:
    def ask(end: LocalTransport) -> int:
        balancer = loft.Balancer(6, "uniform", transport=end)
        over = [[0, 1], [2, 3], [4, 5]]
        make(end, rule=loft.TrimmedMean(f=1), over=over, balancer=balancer)
        return balancer.min_ranks

    assert run_ranks(6, ask) == [5] * 6  # of any 5 ranks, some are in each of the 3 groups


def test_ranks_that_ask_for_other_groups_are_told() -> None:
    with pytest.raises(MismatchError, match="option over differs on ranks"):
        run_ranks(4, lambda end: make(end, over=None if end.rank else "nodes"))


@pytest.mark.parametrize("kind", ["optimizer", "hook"])
def test_ranks_told_otherwise_whether_to_connect_are_told(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One without connections of ours would wait in other exchanges than the rest."""
    usual = config()

    def read() -> Config:
        is_odd = threading.current_thread().name == "loft-rank-1"
        return replace(usual, mesh="off") if is_odd else usual

    monkeypatch.setattr("loft_hvd.optimizer.options.config", read)
    monkeypatch.setattr("loft_hvd.optimizer.hooks.config", read)

    def work(end: LocalTransport) -> None:
        if kind == "optimizer":
            make(end)
        else:
            loft.ddp_hook(transport=end)

    with pytest.raises(MismatchError, match=r"variable LOFT_HVD_MESH differs on ranks \[1\]"):
        run_ranks(3, work)


def test_ranks_whose_models_are_on_other_devices_are_told() -> None:
    def work(end: LocalTransport) -> None:
        model = torch.nn.Linear(2, 2, device="meta" if end.rank == 1 else "cpu")
        loft.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), transport=end
        )

    with pytest.raises(MismatchError, match=r"device of parameter bias differs on ranks \[1\]"):
        run_ranks(3, work)


def test_where_values_of_all_devices_travel_alike_only_what_shares_one_must_agree() -> None:
    def fields(*devices: str) -> dict[str, str]:
        names = enumerate(devices)
        specs = tuple(ParameterSpec(f"p{n}", (2,), torch.float32, device) for n, device in names)
        return ReducedParameters((), specs, (loft.Mean(),)).fields(mixes_devices=True)

    assert fields("cpu", "cpu") == fields("cuda:1", "cuda:1")
    assert fields("cuda:0", "cuda:1") == fields("cuda:2", "cuda:3")
    assert fields("cpu", "cpu") != fields("cuda:0", "cuda:1")


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"diagnostics": 3}, ArgumentTypeError, "diagnostics=3"),
        ({"quarantine": 3}, ArgumentTypeError, "quarantine=3"),
        ({"quarantine": True, "diagnostics": False}, ArgumentError, "needs diagnostics"),
        ({"quarantine": True}, ArgumentError, "robust rule for every parameter group"),
        ({"over": "racks"}, ArgumentError, '"nodes"'),
    ],
)
def test_options_are_checked(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        run_ranks(3, lambda end: make(end, **options))


@pytest.mark.parametrize(("world_size", "is_advised"), [(4, False), (3, True)])
def test_fewer_wrong_workers_are_advised_where_more_than_a_quarter_are_expected(
    world_size: int, is_advised: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="loft_hvd.optimizer.workers"):
        run_ranks(world_size, lambda end: make(end, rule=loft.Robust(1)))
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == int(is_advised), said
    if is_advised:
        assert "more than a quarter of 3 workers" in said[0]
        # What it costs, and the way out.
        assert "digits sorted by class left 75 % right" in said[0]
        way_out = "Placement.with_strata(labels, cap=1.5); then use 4 workers or more"
        assert said[0].endswith(f"First give the placement strata: {way_out}")


def test_the_rule_of_a_group_that_is_added_later_is_advised_on_too(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def add(transport: LocalTransport) -> None:
        _, optimizer = make(transport, rule=loft.TrimmedMean(f=1), worker_momentum=0.0)
        for _ in range(2):  # the second has no rule that is new
            weight = torch.nn.Parameter(torch.zeros(3))
            optimizer.add_param_group({"params": [weight], "rule": loft.Robust(1)})

    with caplog.at_level(logging.WARNING, logger="loft_hvd.optimizer.workers"):
        run_ranks(3, add)
    assert caplog.text.count("robust:f=1 expects more than a quarter of 3 workers") == 1


@pytest.mark.parametrize(
    ("ranks_per_node", "over", "is_advised"),
    [(2, None, True), (4, None, False), (2, "nodes", False)],
)
def test_two_levels_are_advised_where_nodes_have_several_ranks(
    ranks_per_node: int, over: Over, is_advised: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="loft_hvd.optimizer.workers"):
        run_ranks(
            4, lambda end: make(end, rule=loft.Median(), over=over), ranks_per_node=ranks_per_node
        )
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == int(is_advised), said
    if is_advised:
        assert 'over="nodes" would send 1 times' in said[0]
        assert "instead of 1.8 times" in said[0]  # 2 (4-2)/4 + 3/4 = 1.75


# Who was off.

ATTACKED = 3
QUICK = loft.Suspicion(interval=4, patience=8)


def train(
    end: LocalTransport,
    *,
    num_steps: int,
    rows: Callable[[int], Tensor] | None = None,
    attack: loft.attacks.Attack | None = None,
    **options: Any,
) -> tuple[OptimizerWrapper, list[Tensor]]:
    """Take steps on honest rows that agree by halves; return the reduced gradients too."""
    options = {"rule": loft.TrimmedMean(f=1), "diagnostics": QUICK} | options
    weight, optimizer = make(end, **options)
    if attack is not None:
        loft.attacks.attach(optimizer, attack, ranks=[ATTACKED])
    reduced = []
    for step in range(num_steps):
        optimizer.zero_grad()
        common = torch.randn(NUMEL, generator=torch.Generator().manual_seed(step))
        all_rows = rows_of(end.world_size, step) + common if rows is None else rows(step)
        (weight * all_rows[end.rank]).sum().backward()
        optimizer.step()
        assert weight.grad is not None
        reduced.append(weight.grad.clone())
    return optimizer, reduced


@pytest.mark.parametrize("attack", [loft.attacks.NaN(), loft.attacks.Scaled()], ids=str)
def test_a_wrong_rank_is_named_alike_on_every_rank(
    attack: loft.attacks.Attack, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="loft_hvd.pipeline"):
        reports = run_ranks(4, lambda end: train(end, num_steps=60, attack=attack)[0].report())
    assert all(report == reports[0] for report in reports)
    assert [worker.ranks for worker in reports[0].named] == [(ATTACKED,)]
    said = [record.getMessage() for record in caplog.records]
    assert said
    assert all(line.startswith("rank 3 stands out for") for line in said)
    assert all("% of its values are outside the rule's window" in line for line in said)
    assert "STANDS OUT" in str(reports[0]).splitlines()[2 + ATTACKED]


def warnings_under(rule: loft.Rule, caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return what is said of a rank that flips signs under a rule without a window."""

    def run(end: LocalTransport) -> None:
        train(end, rule=rule, num_steps=60, attack=loft.attacks.SignFlip(10))

    with caplog.at_level(logging.WARNING, logger="loft_hvd.pipeline"):
        run_ranks(4, run)
    said = [line for line in caplog.messages if "stands out" in line]
    assert said
    assert not any("window" in line for line in said)
    return said


def test_of_a_rule_that_sees_rows_a_warning_says_what_it_does(
    caplog: pytest.LogCaptureFixture,
) -> None:
    said = warnings_under(loft.Robust(1), caplog)
    found = re.findall(
        r"neighbourhoods lack it to (\d+) %, (\d+) % of its values are clipped", said[0]
    )
    assert max(map(int, found[0])) > 50


def test_of_a_users_own_rule_a_warning_says_nothing_but_distances(
    caplog: pytest.LogCaptureFixture,
) -> None:
    own = loft.Custom(lambda rows: rows.median(dim=0).values, f=1)
    (said, *_) = warnings_under(own, caplog)
    assert "its rule says nothing of single workers" in said


def test_honest_ranks_are_reported_and_not_named() -> None:
    report = run_ranks(4, lambda end: train(end, num_steps=60)[0].report())[0]
    assert report.named == ()
    assert report.num_steps == 60
    assert [worker.num_steps for worker in report.workers] == [56] * 4  # the last 4 not exchanged
    assert all(0.4 < worker.share_outside < 0.6 for worker in report.workers)  # 2 f / n
    assert all(0.8 < worker.distance < 1.2 for worker in report.workers)


def test_equal_rows_accuse_nobody() -> None:
    def equal(step: int) -> Tensor:
        return rows_of(1, step).expand(4, -1)

    report = run_ranks(4, lambda end: train(end, num_steps=30, rows=equal)[0].report())[0]
    assert all(worker.suspicion == 0 for worker in report.workers)


def test_groups_are_watched_as_one_worker_each() -> None:
    groups = [[0, 1], [2, 3], [4, 5]]

    def watch(end: LocalTransport) -> SuspicionReport:
        return train(end, num_steps=60, attack=loft.attacks.NaN(), over=groups)[0].report()

    report = run_ranks(6, watch)[0]
    assert [worker.ranks for worker in report.named] == [(2, 3)]


@pytest.mark.parametrize(
    ("world_size", "options", "why"),
    [
        (1, {}, "reduces alone"),
        (2, {"rule": loft.Median()}, "of 2 workers nobody can say"),
        (4, {"rule": loft.Mean()}, "takes a robust rule"),
        (4, {"diagnostics": False}, "diagnostics=False was given"),
    ],
)
def test_where_nobody_is_watched_the_report_says_why(
    world_size: int, options: dict[str, Any], why: str
) -> None:
    report = run_ranks(world_size, lambda end: train(end, num_steps=2, **options)[0].report())[0]
    assert report.workers == ()
    assert why in str(report)


class Mixed(LocalTransport):
    """A transport whose ranks may be on CPUs and on GPUs, as those of ``torch.distributed``."""

    can = Abilities(mixes_devices=True)


@pytest.mark.parametrize(("on_gpu", "is_watched"), [((0,), False), ((), True)])
def test_ranks_on_cpus_and_gpus_watch_alike(
    on_gpu: tuple[int, ...], is_watched: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def is_on_cpu(_: ReducedParameters) -> bool:
        return threading.current_thread().name not in [f"loft-rank-{rank}" for rank in on_gpu]

    monkeypatch.setattr(ReducedParameters, "are_on_cpu", property(is_on_cpu))

    def work(end: LocalTransport) -> SuspicionReport:
        ends = Mixed(end._world, end.rank)
        # In the 11th step ranks that are watched exchange evidence, as they do every 10 steps.
        return train(ends, num_steps=12, diagnostics=None)[0].report()

    for report in run_ranks(3, work, timeout_s=30.0):
        assert bool(report.workers) == is_watched, report
        assert ("on a GPU that takes diagnostics=True" in report.note) != is_watched


# Quarantine.


def held(
    end: LocalTransport, *, num_steps: int, **options: Any
) -> tuple[SuspicionReport, list[Tensor]]:
    options = {"quarantine": loft.Quarantine(probation=40)} | options
    optimizer, reduced = train(
        end,
        num_steps=num_steps,
        attack=loft.attacks.Scaled(),
        **options,
    )
    return optimizer.report(), reduced


def honest_rows(world_size: int, step: int) -> Tensor:
    common = torch.randn(NUMEL, generator=torch.Generator().manual_seed(step))
    return rows_of(world_size, step) + common


def test_a_named_rank_is_left_out_on_every_rank_from_the_same_step() -> None:
    found = run_ranks(4, lambda end: held(end, num_steps=40))
    report, reduced = found[0]
    for other_report, other in found[1:]:
        assert other_report == report
        assert all(torch.equal(a, b) for a, b in zip(reduced, other, strict=True))
    assert report.workers[ATTACKED].in_quarantine_until is not None
    without = aggregate(
        honest_rows(4, 39), loft.TrimmedMean(f=1), present=[True, True, True, False]
    )
    assert torch.equal(reduced[39], without)
    assert not torch.equal(reduced[0], without)


def test_a_rank_comes_back_on_probation_and_is_held_twice_as_long_the_next_time() -> None:
    options = {"quarantine": loft.Quarantine(probation=10)}

    def run(end: LocalTransport) -> list[int | None]:
        weight, optimizer = make(end, rule=loft.TrimmedMean(f=1), diagnostics=QUICK, **options)
        loft.attacks.attach(optimizer, loft.attacks.NaN(), ranks=[ATTACKED])
        ends = []
        for step in range(120):
            optimizer.zero_grad()
            (weight * honest_rows(4, step)[end.rank]).sum().backward()
            optimizer.step()
            ends.append(optimizer.report().workers[ATTACKED].in_quarantine_until)
        return ends

    found = run_ranks(4, run)
    assert all(ends == found[0] for ends in found)
    spans = []
    for step, until in enumerate(found[0], start=1):
        if until is not None and (step == 1 or found[0][step - 2] is None):
            spans.append(until - step)
    assert spans[:2] == [10, 20], spans


def test_nobody_is_left_out_where_too_few_would_remain(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="loft_hvd.pipeline"):
        found = run_ranks(3, lambda end: _held_of_three(end))
    assert all(report.workers[2].in_quarantine_until is None for report in found)
    said = [r.getMessage() for r in caplog.records if "quarantine" in r.getMessage()]
    assert said == [
        "rank 2 is not put in quarantine: 2 workers would remain, but trimmed_mean:f=1 needs 3"
    ]


def _held_of_three(end: LocalTransport) -> SuspicionReport:
    weight, optimizer = make(end, rule=loft.TrimmedMean(f=1), diagnostics=QUICK, quarantine=True)
    loft.attacks.attach(optimizer, loft.attacks.NaN(), ranks=[2])
    for step in range(60):
        optimizer.zero_grad()
        (weight * honest_rows(3, step)[end.rank]).sum().backward()
        optimizer.step()
    return optimizer.report()


@pytest.mark.parametrize(("world_size", "by"), [(3, [2]), (4, [3]), (5, [3, 4])])
def test_copying_ranks_get_nobody_into_quarantine(
    world_size: int, by: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    def copies(step: int) -> Tensor:
        rows = honest_rows(world_size, step)
        rows[by] = rows[0].clone()
        return rows

    rule = loft.Robust(len(by))
    options: dict[str, Any] = {"rule": rule, "quarantine": True, "rows": copies}
    with caplog.at_level(logging.WARNING, logger="loft_hvd.pipeline"):
        reports = run_ranks(world_size, lambda end: train(end, num_steps=60, **options)[0].report())
    assert all(report == reports[0] for report in reports)
    assert [worker.ranks for worker in reports[0].named] == [(rank,) for rank in (0, *by)]
    assert all(worker.in_quarantine_until is None for worker in reports[0].workers)
    watched = [record for record in caplog.records if record.name.endswith("suspicion.watch")]
    said = [record.getMessage() for record in watched]
    assert said
    assert all("100% equal another worker's bit for bit" in line for line in said), said
    # They may read the same data, and that is asked first.
    ranks = {3: "0 and 2", 4: "0 and 3", 5: "0, 3 and 4"}[world_size]
    asks = f"do ranks {ranks} read the same data? rank "
    assert any(line.startswith(asks) for line in said), said


def test_a_rank_that_copies_one_bucket_and_is_far_off_in_the_other_is_held() -> None:
    def run(end: LocalTransport) -> list[int | None]:
        weights = [torch.nn.Parameter(torch.zeros(numel)) for numel in (550, 450)]
        optimizer = loft.DistributedOptimizer(
            torch.optim.SGD(weights, lr=1.0),
            rule=loft.Robust(1),
            transport=end,
            bucket_bytes=1024,  # each parameter is a bucket
            diagnostics=QUICK,
            quarantine=True,
        )
        for step in range(60):
            rows = honest_rows(4, step)
            rows[ATTACKED, :550] = rows[0, :550]
            rows[ATTACKED, 550:] *= -10
            optimizer.zero_grad()
            copied, far_off = rows[end.rank, :1000].split([550, 450])
            ((weights[0] * copied).sum() + (weights[1] * far_off).sum()).backward()
            optimizer.step()
        return [worker.in_quarantine_until for worker in optimizer.report().workers]

    for held_until in run_ranks(4, run):
        assert [until is not None for until in held_until] == [False, False, False, True]


def test_a_rank_is_left_out_only_in_steps_where_enough_others_have_samples() -> None:
    sizes = [8, 8, 8, 0]

    def run(end: LocalTransport) -> tuple[int | None, float]:
        balancer = loft.Balancer(24, sizes, transport=end)
        weight, optimizer = make(
            end, rule=loft.TrimmedMean(f=1), balancer=balancer, diagnostics=QUICK, quarantine=True
        )
        loft.attacks.attach(optimizer, loft.attacks.NaN(), ranks=[2])
        for step in range(60):
            optimizer.zero_grad()
            with balancer.step(sizes[end.rank] or balancer.min_batch):
                (weight * honest_rows(4, step)[end.rank]).sum().backward()
                optimizer.step()
        return optimizer.report().workers[2].in_quarantine_until, float(weight.detach().sum())

    found = run_ranks(4, run)
    assert found[0][0] is not None
    assert all(each == found[0] for each in found)


def test_a_robust_group_that_is_added_later_is_watched() -> None:
    def run(end: LocalTransport) -> str:
        _, optimizer = make(end)  # Mean
        late = torch.nn.Parameter(torch.zeros(NUMEL))
        optimizer.add_param_group({"params": [late], "rule": "trimmed_mean:f=1"})
        return optimizer.report().note

    assert run_ranks(4, run) == [""] * 4


def test_quarantine_leaves_enough_rows_for_a_rule_that_was_added() -> None:
    def run(end: LocalTransport) -> int | None:
        weight, optimizer = make(
            end, rule=loft.TrimmedMean(f=1), diagnostics=QUICK, quarantine=True
        )
        late = torch.nn.Parameter(torch.zeros(NUMEL))
        optimizer.add_param_group({"params": [late], "rule": "trimmed_mean:f=2"})
        loft.attacks.attach(optimizer, loft.attacks.NaN(), ranks=[2])
        for step in range(60):
            optimizer.zero_grad()
            ((weight + late) * honest_rows(5, step)[end.rank]).sum().backward()
            optimizer.step()
        return optimizer.report().workers[2].in_quarantine_until

    assert run_ranks(5, run) == [None] * 5
