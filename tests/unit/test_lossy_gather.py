"""Training on a local world that loses blocks of rows: one model on all ranks, whatever is lost."""

from __future__ import annotations

import contextlib
import re
import threading
import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import loft_hvd as loft
from loft_hvd.aggregation.rules import Rule
from loft_hvd.errors import ArgumentError
from loft_hvd.transport.base import LossLimits
from loft_hvd.transport.datagram import LossTolerant
from loft_hvd.transport.local import Faults, LocalLane, LocalTransport, run_ranks
from tests.support.ddp_buckets import backward

NUM_RANKS = 5
SHAPES = [(90, 40), (40,), (70, 40), (70,)]  # 6,510 values: shards of 5 blocks
LOSSES = [0.1, 0.3]
RULES: list[tuple[Rule, Any]] = [
    (loft.Mean(), None),
    (loft.TrimmedMean(1), None),
    (loft.Median(), None),
    (loft.Robust(1), "shard"),
    (loft.Robust(1), "model"),
]
Train = Callable[[LocalTransport, int], Tensor]


def gradient(rank: int, step: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def with_optimizer(
    end: LocalTransport,
    steps: int,
    *,
    num_passes: int = 1,
    sizes: list[int] | None = None,
    **options: Any,
) -> Tensor:
    """Return the parameters, [numel], after some steps of seeded gradients."""
    params = [torch.nn.Parameter(torch.zeros(shape)) for shape in SHAPES]
    balancer = None if sizes is None else loft.Balancer(sum(sizes), sizes, transport=end)
    options = {"gather": LossTolerant(), "balancer": balancer, **options}
    optimizer: Any = loft.DistributedOptimizer(
        torch.optim.SGD(params, lr=0.1),
        [(f"p{at}", p) for at, p in enumerate(params)],
        transport=end,
        backward_passes_per_step=num_passes,
        **options,
    )
    for step in range(steps):
        with contextlib.ExitStack() as batch:
            if balancer is not None and sizes is not None:
                batch.enter_context(balancer.step(sizes[end.rank] or balancer.min_batch))
            optimizer.zero_grad()
            for turn in range(num_passes):
                grads = gradient(end.rank, num_passes * step + turn)
                torch.autograd.backward([p.view_as(p) for p in params], grads)
            optimizer.step()
    return torch.cat([p.detach().flatten() for p in params])


def with_hook(end: LocalTransport, steps: int, **options: Any) -> Tensor:
    """Return the same as DDP would train it, in two buckets."""
    params = [torch.nn.Parameter(torch.zeros(shape)) for shape in SHAPES]
    rule = options.pop("rule", None)
    options = {"gather": LossTolerant(), **options}
    hook = loft.ddp_hook(rule, transport=end, worker_momentum=0.0, **options)
    for step in range(steps):
        grads = [grad.flatten() for grad in gradient(end.rank, step)]
        reduced = backward(hook, [params[:2], params[2:]], dict(zip(params, grads, strict=True)))
        with torch.no_grad():
            for p in params:
                p.sub_(reduced[p].view_as(p), alpha=0.1)
    return torch.cat([p.detach().flatten() for p in params])


def same_on_all(found: list[Tensor]) -> Tensor:
    assert found[0].isfinite().all()
    for rank, each in enumerate(found):
        assert torch.equal(each, found[0]), f"rank {rank} differs from rank 0"
    return found[0]


def trained(
    train: Any,
    steps: int,
    loss: Any,
    *,
    num_ranks: int = NUM_RANKS,
    timeout_s: float = 60,
    **options: Any,
) -> Tensor:
    def work(end: LocalTransport) -> Tensor:
        given: Tensor = train(end, steps, **options)
        return given

    faults = Faults(seed=1, loss=loss)
    return same_on_all(run_ranks(num_ranks, work, faults=faults, timeout_s=timeout_s))


BOTH = pytest.mark.parametrize("train", [with_optimizer, with_hook])


@pytest.mark.every(3)
@BOTH
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize(("rule", "scope"), RULES, ids=str)
def test_ranks_have_one_model_whatever_rows_have_lost(
    rule: Rule, scope: Any, loss: float, train: Any
) -> None:
    lossy = trained(train, 8, loss, rule=rule, scope=scope)
    again = trained(train, 8, loss, rule=rule, scope=scope)
    assert torch.equal(lossy, again), "the same blocks are lost every time"
    whole = trained(train, 8, 0.0, rule=rule, scope=scope)
    assert 0 < (lossy - whole).abs().max() < 0.8  # of 8 steps of 0.1 by gradients of length 1


@BOTH
@pytest.mark.parametrize(("rule", "scope"), RULES, ids=str)
def test_where_nothing_is_lost_results_have_the_bits_of_no_gather(
    rule: Rule, scope: Any, train: Any
) -> None:
    whole = trained(train, 5, 0.0, rule=rule, scope=scope)
    reliable = LossTolerant(reliable=True)
    assert torch.equal(whole, trained(train, 5, 0.9, rule=rule, scope=scope, gather=reliable))
    none = trained(train, 5, 0.9, rule=rule, scope=scope, gather=None)
    if isinstance(rule, loft.Mean):  # without a gather the engine's own sum, in another order
        torch.testing.assert_close(whole, none, rtol=0, atol=1e-6)
    else:
        assert torch.equal(whole, none)


@pytest.mark.long
@pytest.mark.every(3)
@BOTH
@pytest.mark.parametrize("loss", LOSSES)
def test_a_thousand_steps_leave_one_model_and_take_no_memory(loss: float, train: Any) -> None:
    steps, early = 1000, 500  # much is imported and warmed up by then
    taken: dict[int, int] = {}
    meeting = threading.Barrier(NUM_RANKS)
    draw = gradient

    def watched(rank: int, step: int) -> list[Tensor]:
        if step in (early, steps - 1):
            meeting.wait(60)
            if rank == 0:
                taken[step] = tracemalloc.get_traced_memory()[0]
            meeting.wait(60)
        return draw(rank, step)

    tracemalloc.start()
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(globals(), "gradient", watched)
        try:
            trained(train, steps, loss, rule=loft.TrimmedMean(1), timeout_s=240)
        finally:
            tracemalloc.stop()
    # Of 500 steps 50 bytes each, of all ranks: names, counts and draws are not kept.
    assert taken[steps - 1] - taken[early] < 25_000, taken


@pytest.mark.parametrize(("rule", "scope"), RULES, ids=str)
def test_sizes_may_be_unequal_and_a_rank_absent(rule: Rule, scope: Any) -> None:
    sizes = [7, 5, 4, 4, 4, 0]
    due = torch.zeros(sum(torch.Size(shape).numel() for shape in SHAPES))
    rows = [torch.cat([g.flatten() for g in gradient(rank, 0)]) for rank in range(6)]
    for size, row in zip(sizes, rows, strict=True):
        due += row * size / sum(sizes)

    options: dict[str, Any] = {"sizes": sizes, "rule": rule, "scope": scope, "num_ranks": 6}
    lossy = trained(with_optimizer, 6, 0.3, **options)
    whole = trained(with_optimizer, 6, 0.0, **options)
    assert not torch.equal(lossy, whole)
    if isinstance(rule, loft.Mean):
        one_step = trained(with_optimizer, 1, 0.0, **options)
        torch.testing.assert_close(one_step, -0.1 * due, rtol=1e-5, atol=1e-6)


def test_a_rank_that_is_absent_changes_nothing_and_fills_nothing() -> None:
    rule, present = loft.TrimmedMean(1), [True] * 5 + [False]

    def reduce(end: LocalTransport, absent: float) -> Tensor:
        generator = torch.Generator().manual_seed(end.rank)
        row = (
            torch.randn(20_000, generator=generator)
            if end.rank < 5
            else torch.full((20_000,), absent)
        )
        return loft.allreduce(
            row, rule, name="x", present=present, transport=end, gather=LossTolerant()
        )

    faults = Faults(loss=0.3)
    found = [
        same_on_all(run_ranks(6, lambda end, a=absent: reduce(end, a), faults=faults))  # type: ignore[misc]  # mypy has no type for a default
        for absent in (0.0, 1e30, float("nan"))
    ]
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


@pytest.mark.parametrize("loss", [0.3, 1.0])
def test_only_the_exchange_across_groups_is_lossy(
    loss: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    across: set[tuple[int, ...]] = set()
    bring: Any = LocalLane.bring

    def noted(lane: LocalLane, *args: Any, limits: LossLimits | None = None, **given: Any) -> Any:
        work, brought = bring(lane, *args, limits=limits, **given)
        across.add(lane._members)
        return work, brought

    monkeypatch.setattr(LocalLane, "bring", noted)
    groups = [[0, 1], [2, 3], [4, 5], [6, 7]]
    options: dict[str, Any] = {"over": groups, "rule": loft.TrimmedMean(1)}
    lossy = trained(with_optimizer, 6, loss, num_ranks=8, **options)
    assert across == {(0, 2, 4, 6), (1, 3, 5, 7)}
    whole = trained(with_optimizer, 6, 0.0, num_ranks=8, **options)
    none = trained(with_optimizer, 6, loss, num_ranks=8, **{**options, "gather": None})
    assert torch.equal(whole, none)
    assert not torch.equal(lossy, whole)


@pytest.mark.parametrize("rule", [loft.Mean(), loft.Robust(1)], ids=str)
def test_a_step_may_have_two_backward_passes(rule: Rule) -> None:
    lossy = trained(with_optimizer, 6, 0.3, num_passes=2, rule=rule)
    assert not torch.equal(lossy, trained(with_optimizer, 6, 0.0, num_passes=2, rule=rule))


@pytest.mark.every(3)
@pytest.mark.parametrize("wire", [loft.Compression.fp16, loft.Compression.bf16], ids=str)
@pytest.mark.parametrize("rule", [loft.Mean(), loft.TrimmedMean(1)], ids=str)
def test_rows_of_16_bits_lose_blocks_of_640_values(rule: Rule, wire: Any) -> None:
    whole = trained(with_optimizer, 6, 0.0, rule=rule, compression=wire)
    lossy = trained(with_optimizer, 6, 0.3, rule=rule, compression=wire)
    assert not torch.equal(lossy, whole)
    plain = trained(with_optimizer, 6, 0.0, rule=rule)
    torch.testing.assert_close(whole, plain, rtol=0, atol=0.018)


@pytest.mark.parametrize(
    ("lossy", "arrives"),
    [((), ()), (("p0", "p2"), ("p0", "p2")), (("*",), ("p0", "p1", "p2", "p3"))],
)
def test_what_is_critical_arrives(lossy: tuple[str, ...], arrives: tuple[str, ...]) -> None:
    """Each parameter in a bucket of its own, by rules of their own."""
    rule = {f"p{at}": loft.TrimmedMean(1) if at % 2 else loft.Median() for at in range(4)}
    options: dict[str, Any] = {"rule": rule, "bucket_bytes": 1}
    gather = LossTolerant(critical=lossy)
    found = trained(with_optimizer, 3, 0.9, gather=gather, **options)
    whole = trained(with_optimizer, 3, 0.9, gather=None, **options)
    begin = 0
    for at, shape in enumerate(SHAPES):
        end = begin + torch.Size(shape).numel()
        assert torch.equal(found[begin:end], whole[begin:end]) == (f"p{at}" in arrives), f"p{at}"
        begin = end


# A mean.


def weight_of_each(weights: list[int] | None, loss: float, num_ranks: int) -> Tensor:
    """Return what a rank's row weighs in the mean of 4,000 blocks, [num_ranks], exact ones 1.

    Of ranks that send ones where another sends zeros the mean's value is what they weigh.
    """
    numel = num_ranks * 160 * 800

    def work(end: LocalTransport) -> list[float]:
        return [
            float(
                loft.allreduce(
                    torch.full((numel,), float(end.rank == rank), dtype=torch.float64),
                    name=f"of {rank}",
                    weights=weights,
                    transport=end,
                    gather=LossTolerant(),
                ).mean()
            )
            for rank in range(num_ranks)
        ]

    found = torch.tensor(run_ranks(num_ranks, work, faults=Faults(loss=loss))[0])
    exact = torch.ones(num_ranks) if weights is None else torch.tensor(weights).float()
    return found * exact.sum() / exact


@pytest.mark.parametrize("num_ranks", [4, 8])
def test_under_a_mean_each_row_keeps_its_weight(num_ranks: int) -> None:
    weights = weight_of_each(None, 0.1, num_ranks)
    assert (weights - 1).abs().max() < 0.01, weights


def test_under_a_mean_rows_of_unequal_batches_keep_their_weights() -> None:
    weights = weight_of_each([3, 3, 1, 1, 1, 1], 0.1, 6)  # by samples alone 0.986 and 1.029
    assert (weights - 1).abs().max() < 0.012, weights


# What is refused.


def refused(call: Callable[[LocalTransport], Any], told: str) -> None:
    with pytest.raises(ArgumentError, match=re.escape(told)):
        run_ranks(NUM_RANKS, call)


CUSTOM = loft.Custom(lambda rows: rows[0])
NO_STAND_IN = "does not go with gather=LossTolerant(): nobody knows what stands"


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (
            {"audit": 0.5, "rule": loft.TrimmedMean(1)},
            "audit=0.5 does not go with gather=LossTolerant()",
        ),
        ({"rule": CUSTOM}, NO_STAND_IN),
        ({"rule": loft.Mean(reproducible=True)}, "mean:reproducible=True " + NO_STAND_IN),
        ({"rule": {"p0": CUSTOM, "*": loft.Mean()}}, NO_STAND_IN),
        ({"rule": loft.TrimmedMean(2)}, "trimmed_mean:f=2 needs 5 rows at each value"),
    ],
)
def test_an_optimizer_refuses_what_cannot_miss_rows(options: dict[str, Any], told: str) -> None:
    refused(lambda end: with_optimizer(end, 1, **options), told)
    reliable = LossTolerant(reliable=True)
    run_ranks(NUM_RANKS, lambda end: with_optimizer(end, 1, gather=reliable, **options))


REFUSED = pytest.mark.parametrize(
    ("rule", "told"),
    [
        (CUSTOM, NO_STAND_IN),
        (loft.Mean(reproducible=True), NO_STAND_IN),
        (loft.Median(), ""),
        (loft.TrimmedMean(2), "trimmed_mean:f=2 needs 5 rows at each value"),
    ],
    ids=str,
)


@REFUSED
def test_a_hook_and_an_all_reduce_refuse_what_cannot_miss_rows(rule: Rule, told: str) -> None:
    def hook(end: LocalTransport) -> Tensor:
        return with_hook(end, 1, rule=rule)

    def reduce(end: LocalTransport, gather: LossTolerant | None = None) -> Tensor:
        gather = LossTolerant() if gather is None else gather
        return loft.allreduce(torch.ones(10), rule, name="x", transport=end, gather=gather)

    if told:
        refused(hook, told)
        refused(reduce, told)
    else:
        run_ranks(NUM_RANKS, hook)
    run_ranks(NUM_RANKS, lambda end: reduce(end, LossTolerant(reliable=True)))
