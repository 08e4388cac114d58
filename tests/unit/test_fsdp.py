"""What ``fsdp_hook`` refuses, and makes of gradients; with FSDP2: multiprocess/test_fsdp.py."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import loft_hvd as loft
from loft_hvd.balance.plan import Counted
from loft_hvd.errors import ArgumentError, ArgumentTypeError, UsageError
from loft_hvd.pipeline.momentum import WorkerMomentum
from loft_hvd.pipeline.suspicion.judgement import Watching
from loft_hvd.pipeline.weights import capped_weights
from loft_hvd.transport.local import LocalTransport, LocalWorld, run_ranks
from tests.support.passes import Sizes
from tests.support.sharded_groups import Sharded


class DeepSpeedEngine(torch.nn.Module):
    """Stands for DeepSpeed's, which is told by its name."""


class FullyShardedDataParallel(torch.nn.Module):
    """Stands for FSDP1's, which is told by its name."""


@pytest.mark.parametrize(
    ("rule", "options", "said"),
    [
        ("median", {}, r"rule='median' is of type str; pass one such as"),
        (loft.Mean(), {"scope": "auto"}, r'scope="auto" is not offered, as it would hold'),
        (loft.Median(), {"scope": "model"}, r'scope="model" is for rules that judge rows by their'),
        (loft.Mean(), {"quarantine": True}, r"quarantine= needs a robust rule"),
        (
            loft.Mean(),
            {},
            r"fsdp_hook: no module of the model is sharded; call torch's fully_shard",
        ),
    ],
)
def test_fsdp_hook_checks_what_it_is_given(rule: Any, options: dict[str, Any], said: str) -> None:
    with pytest.raises((ArgumentError, ArgumentTypeError), match=said):
        loft.fsdp_hook(torch.nn.Linear(2, 2), rule, **options)


def test_micro_batches_are_refused_as_ranks_gather_in_each_pass() -> None:
    ends = LocalWorld(1).transport(0)
    balancer = loft.Balancer(8, micro_batches=True, max_batch=2, transport=ends)
    with pytest.raises(ArgumentError, match=r"ranks make different numbers of backward passes"):
        loft.fsdp_hook(torch.nn.Linear(2, 2), balancer=balancer)


@pytest.mark.parametrize("kind", [DeepSpeedEngine, FullyShardedDataParallel])
def test_other_ways_to_shard_are_refused_with_the_line_for_exact_weights(
    kind: type[torch.nn.Module],
) -> None:
    said = rf"the model comes from {kind.__name__}: .*balancer\.weigh\(loss\)\.backward\(\) gives"
    for model in (kind(), torch.nn.Sequential(kind())):
        with pytest.raises(ArgumentTypeError, match=said):
            loft.fsdp_hook(model)


def test_a_torch_without_these_parts_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("torch.distributed.fsdp.FSDPModule")
    with pytest.raises(UsageError, match=r"fsdp_hook: FSDP2 of torch 2.* use torch 2\.13"):
        loft.fsdp_hook(torch.nn.Linear(2, 2))


def test_a_model_is_a_module() -> None:
    with pytest.raises(ArgumentTypeError, match=r"model=\[\] is of type list; give the module"):
        loft.fsdp_hook([])  # type: ignore[arg-type]  # that is the point


LENGTHS = [[3, 5], [2]]  # of the parameters' shards, by group
SIZES = [(5, 1, 2, 4), (2, 0, 2, 2), (3, 3, 3, 3)]


def gradients_of(rank: int, step: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    random = torch.Generator().manual_seed(100 * step + rank)
    return [torch.randn(4 * sum(each), generator=random).to(dtype) for each in LENGTHS]


def shards(step: int, at: int, owner: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the rows of an owner's shard, [4, shard]."""
    return torch.stack([gradients_of(r, step, dtype)[at].view(4, -1)[owner] for r in range(4)])


def run_steps(
    end: LocalTransport, rule: loft.Rule, *, dtype: torch.dtype = torch.float32, **options: Any
) -> list[list[Tensor]]:
    sharded = Sharded(end, rule, LENGTHS, batches=Sizes(list(SIZES)), dtype=dtype, **options)
    steps = range(len(SIZES))
    return [sharded.backward(gradients_of(end.rank, step, dtype)) for step in steps]


@pytest.mark.parametrize("rule", [loft.Mean(), loft.TrimmedMean(1), loft.Median()], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_owners_get_the_rules_result_of_weighed_rows(rule: loft.Rule, dtype: torch.dtype) -> None:
    found = run_ranks(4, lambda end: run_steps(end, rule, dtype=dtype))
    for owner, steps in enumerate(found):
        for step, results in enumerate(steps):
            sizes = torch.tensor(SIZES[step])
            for at, result in enumerate(results):
                rows = shards(step, at, owner, dtype)
                if isinstance(rule, loft.Mean):
                    wanted = (rows.float() * sizes[:, None] / sizes.sum()).sum(dim=0)
                    tolerance = 1e-6 if dtype == torch.float32 else 2e-2
                    torch.testing.assert_close(
                        result.float(), wanted, rtol=tolerance, atol=tolerance
                    )
                    continue
                weights = None if rule.counts_weight else capped_weights(SIZES[step])
                present = [size > 0 for size in SIZES[step]]
                wanted = loft.aggregate(rows, rule, weights=weights, present=present)
                assert torch.equal(result, wanted), (step, at)


@pytest.mark.parametrize(
    ("op", "divided_by", "factor"),
    [
        (dist.ReduceOp.AVG, None, 1.0),
        (dist.ReduceOp.SUM, None, 4.0),  # FSDP2 divides what a sum gives
        (dist.ReduceOp.PREMUL_SUM, 2.0, 2.0),
    ],
)
def test_a_result_is_what_fsdp2_asks_for(op: Any, divided_by: float | None, factor: float) -> None:
    def work(end: LocalTransport) -> list[Tensor]:
        sharded = Sharded(end, loft.TrimmedMean(1), LENGTHS)
        for inner in sharded.inners:
            inner.gradient_divide_factor = divided_by
        return sharded.backward(gradients_of(end.rank, 0), op)

    for owner, results in enumerate(run_ranks(4, work)):
        for at, result in enumerate(results):
            wanted = loft.trimmed_mean(shards(0, at, owner), f=1) * factor
            assert torch.equal(result, wanted)


def test_averages_go_on_from_what_was_saved() -> None:
    def work(end: LocalTransport, *, is_resumed: bool) -> list[Tensor]:
        sharded = Sharded(end, loft.Median(), LENGTHS, momentum=WorkerMomentum(0.5))
        sharded.backward(gradients_of(end.rank, 0))
        if is_resumed:
            state = sharded.hook.state_dict()
            sharded = Sharded(end, loft.Median(), LENGTHS, momentum=WorkerMomentum(0.5))
            sharded.hook.load_state_dict(state)
        return sharded.backward(gradients_of(end.rank, 1))

    for is_resumed in (False, True):
        found = run_ranks(4, partial(work, is_resumed=is_resumed))
        for owner, results in enumerate(found):
            for at, result in enumerate(results):
                rows = (0.5 * shards(0, at, owner) + shards(1, at, owner)) / 1.5
                torch.testing.assert_close(result, loft.median(rows), rtol=1e-6, atol=1e-6)


def test_a_state_of_other_parameters_is_refused() -> None:
    def work(end: LocalTransport) -> None:
        sharded = Sharded(end, loft.Median(), LENGTHS, momentum=WorkerMomentum(0.5))
        sharded.backward(gradients_of(end.rank, 0))
        other = Sharded(end, loft.Median(), [[3]], momentum=WorkerMomentum(0.5))
        with pytest.raises(ArgumentError, match=r"there is no parameter 'group 0 \(p0 .. p1\)'"):
            other.hook.load_state_dict(sharded.hook.state_dict())

    run_ranks(4, work)


def test_who_sends_nan_into_a_mean_is_told_on_every_rank(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def work(end: LocalTransport) -> Any:
        sharded = Sharded(end, loft.Mean(), LENGTHS)
        given = gradients_of(end.rank, 0)
        if end.rank == 2:
            given[0][4] = torch.nan  # of the first shard's second parameter
        sharded.backward(given)
        return sharded.hook.report().not_finite

    for (lost,) in run_ranks(4, work):
        assert (lost.step, lost.ranks, lost.parameter, lost.is_nan) == (1, (2,), "p1", True)
    assert caplog.text.count("are not finite") == 1


def test_the_whole_model_decides_at_the_end_of_the_backward_pass() -> None:
    rule = loft.Robust(1)

    def work(end: LocalTransport) -> list[Tensor]:
        return Sharded(end, rule, LENGTHS, watching=Watching("model")).backward(
            gradients_of(end.rank, 0)
        )

    found = run_ranks(4, work)
    wanted = loft.aggregate(
        torch.stack([torch.cat(gradients_of(rank, 0)) for rank in range(4)]), rule.over_model
    ).split([4 * sum(each) for each in LENGTHS])
    for at, part in enumerate(wanted):
        got = torch.cat([results[at] for results in found])
        torch.testing.assert_close(got, part, rtol=1e-6, atol=1e-6)


def test_a_result_that_is_cast_does_not_wait_for_the_model() -> None:
    def work(end: LocalTransport) -> None:
        sharded = Sharded(end, loft.Robust(1), LENGTHS, watching=Watching("model"))
        with pytest.raises(UsageError, match=r"needed before: it is cast from torch.bfloat16 to"):
            sharded.backward(gradients_of(end.rank, 0, torch.bfloat16))

    run_ranks(4, work)


def test_passes_that_are_held_back_are_weighed_by_their_own_batches() -> None:
    sizes = [(3, 1, 2, 2), (1, 0, 5, 2)]

    def work(end: LocalTransport) -> list[Tensor]:
        sharded = Sharded(end, loft.Mean(), LENGTHS, batches=Sizes(list(sizes)))
        for inner in sharded.inners:
            inner.reduce_grads = False
        sharded.hook._forward_began()
        held = [_weighed(sharded, each) for each in gradients_of(end.rank, 0)]
        for inner in sharded.inners:
            inner.reduce_grads = True
        sharded.hook._forward_began()
        last = [_weighed(sharded, each) for each in gradients_of(end.rank, 1)]
        return sharded.backward([a + b for a, b in zip(held, last, strict=True)], is_new=False)

    found = run_ranks(4, work)
    for owner, results in enumerate(found):
        for at, result in enumerate(results):
            wanted = torch.zeros_like(result)
            for step, counts in enumerate(sizes):
                share = torch.tensor(counts)[:, None] / sum(counts)
                wanted += (shards(step, at, owner) * share).sum(dim=0)
            torch.testing.assert_close(result, wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("rule", [loft.Mean(), loft.Median()], ids=str)
@pytest.mark.parametrize("op", [dist.ReduceOp.AVG, dist.ReduceOp.SUM], ids=str)
def test_rows_weigh_what_their_losses_are_over(rule: loft.Rule, op: Any) -> None:
    claims = [(30, 3, 12, 5), (0, 8, 8, 1), (7, 7, 0, 7)]

    def work(end: LocalTransport) -> list[list[Tensor]]:
        counts = [Counted(row[end.rank], float(row[end.rank]), True) for row in claims]
        planned = Sizes([(4, 4, 4, 4)] * len(claims), counts=counts)
        sharded = Sharded(end, rule, LENGTHS, batches=planned)
        found = []
        for step, row in enumerate(claims):
            given = gradients_of(end.rank, step)
            if not row[end.rank]:  # a mean over nothing
                given = [torch.full_like(each, torch.nan) for each in given]
            found.append(sharded.backward(given, op))
        return found

    for owner, steps in enumerate(run_ranks(4, work)):
        for step, results in enumerate(steps):
            part = torch.tensor(claims[step]) / sum(claims[step])
            for at, result in enumerate(results):
                rows = shards(step, at, owner)
                wanted = part @ rows if isinstance(rule, loft.Mean) else loft.median(rows[part > 0])
                wanted *= 4 if op == dist.ReduceOp.SUM else 1
                torch.testing.assert_close(result, wanted, rtol=1e-6, atol=1e-6)


def _weighed(sharded: Sharded, gradient: Tensor) -> Tensor:
    weighed = sharded.hook._weigh(gradient)
    return gradient if weighed is None else weighed
