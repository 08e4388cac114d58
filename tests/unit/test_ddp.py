"""What ``ddp_hook`` refuses and averages; with DDP: multiprocess/test_torch_distributed.py."""

from __future__ import annotations

import gc
import logging
import time
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import loft_hvd as loft
from loft_hvd.errors import ArgumentError, ArgumentTypeError, MismatchError, PeerError, UsageError
from loft_hvd.pipeline.passes import Passes
from loft_hvd.pipeline.suspicion.report import ZeroedParameter
from loft_hvd.pipeline.suspicion.watch import WorkerWatch
from loft_hvd.pipeline.weights import PassWeights
from loft_hvd.runlog import read_run_log
from loft_hvd.transport.base import Abilities, Channel
from loft_hvd.transport.local import LocalTransport, LocalWorld, run_ranks
from tests.support.ddp_buckets import backward
from tests.support.passes import HeldSizes, Sizes
from tests.support.recording import RecordingTransport
from tests.support.wrapped import give_gradients, wrap


def test_ddp_hook_checks_what_it_is_given() -> None:
    with pytest.raises(UsageError, match="init_process_group"):
        loft.ddp_hook(loft.Median())
    with pytest.raises(ArgumentTypeError, match=r"rule='median' is of type str; pass one such as"):
        loft.ddp_hook("median")  # type: ignore[arg-type]  # that is the point
    with pytest.raises(ArgumentError, match=r"worker_momentum=1.5 must be >= 0 and < 1"):
        loft.ddp_hook(worker_momentum=1.5, transport=LocalWorld(1).transport(0))


@pytest.mark.parametrize(
    "rule", [loft.Mean(), loft.Mean(reproducible=True), loft.Median()], ids=str
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_averages_stay_with_their_parameters_when_ddps_buckets_change(
    rule: loft.Rule, dtype: torch.dtype
) -> None:
    sizes = [(5, 2, 1), (4, 0, 4), (2, 4, 2)]

    def grads_of(rank: int, step: int, params: list[torch.nn.Parameter]) -> list[Tensor]:
        random = torch.Generator().manual_seed(10 * step + rank)
        return [torch.randn(p.numel(), generator=random).to(dtype) for p in params]

    def work(transport: LocalTransport) -> list[list[Tensor]]:
        params = [torch.nn.Parameter(torch.zeros(n, dtype=dtype)) for n in (3, 5, 2)]
        first, second, third = params
        planned: Any = Sizes(list(sizes))
        hook = loft.ddp_hook(rule, planned, transport=transport, worker_momentum=0.9)
        found = []
        for step in range(len(sizes)):
            layout = [[first], [second, third]] if step == 0 else [[third, second], [first]]
            grads = grads_of(transport.rank, step, params)
            reduced = backward(hook, layout, dict(zip(params, grads, strict=True)))
            found.append([reduced[p].clone() for p in params])
        return found

    weights, expected = [0.0] * 3, []
    params = [torch.nn.Parameter(torch.zeros(n)) for n in (3, 5, 2)]
    sums = [[torch.zeros(p.numel()) for p in params] for _ in range(3)]
    for step, counts in enumerate(sizes):
        for rank, count in enumerate(counts):
            weights[rank] = 0.9 * weights[rank] + count
            for total, grad in zip(sums[rank], grads_of(rank, step, params), strict=True):
                total.mul_(0.9).add_(grad.float(), alpha=count)
        rows = [
            torch.stack([sums[rank][at] / weights[rank] for rank in range(3)]) for at in range(3)
        ]
        share = torch.tensor(weights)[:, None] / sum(weights)
        is_mean = isinstance(rule, loft.Mean)
        expected.append([(r * share).sum(0) if is_mean else r.median(0).values for r in rows])
    tolerance = 1e-6 if dtype == torch.float32 else 2e-2
    for found in run_ranks(3, work):
        for got, wanted in zip(found, expected, strict=True):
            for one, other in zip(got, wanted, strict=True):
                torch.testing.assert_close(one.float(), other, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("rule", [loft.Mean(), loft.TrimmedMean(1), loft.Robust(1)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_gradients_travel_in_their_own_width(rule: loft.Rule, dtype: torch.dtype) -> None:
    numel = 4 * 16 * 100  # whole shards, without padding

    def work(end: LocalTransport) -> int:
        transport = RecordingTransport(end)
        parameter = torch.nn.Parameter(torch.zeros(numel, dtype=dtype))
        hook = loft.ddp_hook(rule, transport=transport, worker_momentum=0.0, scope="shard")
        before = 0
        for step in range(3):
            before = transport.sent_bytes
            gradient = torch.full((numel,), 1.0 + end.rank + step, dtype=dtype)
            backward(hook, [[parameter]], {parameter: gradient})
        return transport.sent_bytes - before

    # Rows and results: each rank sends three quarters of the bucket, twice.
    values = 2 * numel * 3 // 4 * dtype.itemsize
    for sent in run_ranks(4, work):
        assert values <= sent <= values + 200  # and a few words of agreement


def test_a_pass_begins_once_whichever_devices_thread_comes_first() -> None:
    sizes = HeldSizes((3, 1))
    passes = Passes(sizes, Channel(LocalWorld(2).transport(0), "passes"))
    passes.has_shares = True

    def weigh() -> Any:
        passes.begin(0)
        return passes.weigh(0, torch.ones(2), is_mean=True)

    weighed: list[Any] = sizes.arrive(weigh, weigh)
    assert [values.tolist() for values in weighed] == [[1.5, 1.5]] * 2  # of 2 ranks, 3 of 4 samples
    assert sizes.num_taken == 1


@pytest.mark.parametrize("scope", ["shard", "model"])
def test_a_bucket_that_fails_ends_the_pass_at_once(scope: Any) -> None:
    def work(transport: LocalTransport) -> str:
        dtypes = [torch.float32] * 3
        if transport.rank == 1:
            dtypes[1] = torch.float64
        layout = [[torch.nn.Parameter(torch.zeros(6, dtype=dtype))] for dtype in dtypes]
        hook = loft.ddp_hook(
            loft.Robust(1), scope=scope, transport=transport, timeout_s=4, worker_momentum=0.0
        )
        with pytest.raises((MismatchError, PeerError)) as caught:  # its own, or a faster rank's
            backward(hook, layout, {p: torch.ones_like(p) for (p,) in layout})
        return str(caught.value)

    for said in run_ranks(3, work):
        assert "ddp_hook: bucket 1 (shape [6]): dtype differs on ranks [1]" in said


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_folder_that_takes_no_log_is_an_error_on_every_rank(
    world_size: int, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")

    def work(transport: LocalTransport) -> str:
        with pytest.raises(ArgumentError) as caught:
            loft.ddp_hook(transport=transport, log_dir=tmp_path / "file" / "runs")
        return str(caught.value)

    for said in run_ranks(world_size, work):
        assert f"{tmp_path}/file/runs" in said


def test_a_faulty_worker_is_named_held_and_left_out(tmp_path: Path) -> None:
    watching = loft.Suspicion(every=1, interval=5, patience=5)

    def work(transport: LocalTransport) -> tuple[str, list[Tensor]]:
        generator = torch.Generator().manual_seed(transport.rank)
        params = [torch.nn.Parameter(torch.zeros(n)) for n in (300, 100)]
        balancer = loft.Balancer(4, [1] * 4, transport=transport, log_dir=tmp_path)
        hook = loft.ddp_hook(
            loft.TrimmedMean(1),
            balancer,
            diagnostics=watching,
            quarantine=True,
            transport=transport,
        )
        assert "no gradient has come" in str(hook.report())
        for _ in range(60):
            grads = {p: 1 + 0.1 * torch.randn(p.numel(), generator=generator) for p in params}
            if transport.rank == 3:
                grads = {p: grad * -20 for p, grad in grads.items()}
            with balancer.step(1):
                backward(hook, [[p] for p in params], grads)
        (held,) = [w for w in hook.report().workers if w.in_quarantine_until is not None]
        assert held.ranks == (3,)
        # A row of NaN is not looked at any more.
        with balancer.step(1):
            row = float("nan") if transport.rank == 3 else float(transport.rank)
            last = backward(
                hook, [[p] for p in params], {p: torch.full_like(p, row) for p in params}
            )
        return str(hook.report()), [last[p].clone() for p in params]

    reports, results = zip(*run_ranks(4, work), strict=True)
    assert len(set(reports)) == 1
    # Of rows 0, 1 and 2 the middle one stays.
    assert all(torch.equal(values, torch.ones_like(values)) for each in results for values in each)
    (log,) = tmp_path.iterdir()
    lines = list(read_run_log(log))
    assert [line["rules"] for line in lines if line["kind"] == "rules"] == [["trimmed_mean:f=1"]]
    told = [line for line in lines if line["kind"] == "suspicion"]
    assert [w["ranks"] for w in told[-1]["workers"] if w["in_quarantine_until"]] == [[3]]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"quarantine": True}, "quarantine= needs a robust rule"),
        ({"rule": loft.Median(), "quarantine": True, "diagnostics": False}, "needs diagnostics"),
        ({"diagnostics": 3}, "diagnostics=3 must be True, False or a loft.Suspicion"),
    ],
)
def test_watching_that_cannot_be_is_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises((ArgumentError, ArgumentTypeError), match=says):
        loft.ddp_hook(transport=LocalWorld(1).transport(0), **options)


class Mixed(LocalTransport):
    """A transport whose ranks may be on CPUs and on GPUs, as those of ``torch.distributed``."""

    can = Abilities(mixes_devices=True)


@pytest.mark.parametrize(("on_gpu", "is_watched"), [((0,), False), ((), True)])
def test_ranks_on_cpus_and_gpus_watch_alike(on_gpu: tuple[int, ...], is_watched: bool) -> None:
    def work(transport: LocalTransport) -> bool:
        ends = Mixed(transport._world, transport.rank)
        hook = loft.ddp_hook(loft.TrimmedMean(1), transport=ends)
        hook._begin_step(torch.device("cuda" if ends.rank in on_gpu else "cpu"))
        return bool(hook.report().workers)

    assert run_ranks(3, work) == [is_watched] * 3


def test_fsdps_flat_gradients_are_refused_by_name() -> None:
    hook = loft.ddp_hook(transport=LocalWorld(1).transport(0))
    gradient: Any = torch.zeros(3)
    with pytest.raises(ArgumentTypeError, match=r"FullyShardedDataParallel: .*fsdp_hook"):
        hook(None, gradient, gradient)


@pytest.mark.parametrize(
    ("rule", "given", "changes"),
    [
        (loft.Robust(1), {}, 1),  # its default
        (loft.Robust(1), {"scope": "auto"}, 1),
        (loft.Robust(1), {"scope": "shard"}, 0),
        (loft.NNM(loft.TrimmedMean(1)), {}, 0),
        (loft.TrimmedMean(1), {"scope": "auto"}, 0),
    ],
)
def test_auto_changes_its_scope_only_where_the_rule_judges_rows(
    rule: loft.Rule, given: dict[str, Any], changes: int, tmp_path: Path
) -> None:
    def work(transport: LocalTransport) -> None:
        generator = torch.Generator().manual_seed(transport.rank)
        parameter = torch.nn.Parameter(torch.zeros(600))
        balancer = loft.Balancer(4, [1] * 4, transport=transport, log_dir=tmp_path)
        options = {"transport": transport, "worker_momentum": 0.0, **given}
        hook = loft.ddp_hook(rule, balancer, **options)
        for _ in range(55):
            with balancer.step(1):
                gradient = torch.randn(600, generator=generator)
                backward(hook, [[parameter]], {parameter: gradient})

    run_ranks(4, work)
    (log,) = tmp_path.iterdir()
    kinds = [line["kind"] for line in read_run_log(log)]
    assert kinds.count("spread") == 1
    assert kinds.count("scope") == changes


def test_the_advised_rule_says_what_the_optimizer_must_leave_out(caplog: Any) -> None:
    alone = LocalWorld(1).transport(0)
    loft.ddp_hook(loft.Robust(0), transport=alone, worker_momentum=0.9)
    loft.ddp_hook(loft.Robust(0), transport=alone, worker_momentum=0.0)
    assert not caplog.records
    loft.ddp_hook(loft.Robust(0), transport=alone)
    assert "SGD momentum=0 and lr / 0.1, or Adam betas=(0.0, b2)" in caplog.text


@pytest.mark.parametrize(("world_size", "is_advised"), [(4, False), (3, True)])
def test_fewer_wrong_workers_are_advised_once_as_by_the_optimizer(
    world_size: int, is_advised: bool, caplog: pytest.LogCaptureFixture
) -> None:
    def work(transport: LocalTransport) -> None:
        parameter = torch.nn.Parameter(torch.zeros(6))
        hook = loft.ddp_hook(loft.Robust(1), transport=transport, worker_momentum=0.0)
        for _ in range(2):
            backward(hook, [[parameter]], {parameter: torch.ones(6)})

    with caplog.at_level(logging.WARNING):
        run_ranks(world_size, work)
    assert caplog.text.count("robust:f=1 expects more than a quarter of 3 workers") == is_advised


def test_parameters_that_the_rule_zeroes_are_reported_whatever_their_buckets(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def work(transport: LocalTransport) -> list[tuple[ZeroedParameter, ...]]:
        shared, rare, other = (torch.nn.Parameter(torch.zeros(n)) for n in (4, 5, 2))
        hook = loft.ddp_hook(
            loft.TrimmedMean(1),
            named_parameters=[("shared", shared), ("rare", rare)],
            transport=transport,
        )
        found = []
        for step in range(10):
            layout = [[shared], [rare, other]] if step == 0 else [[other, rare], [shared]]
            # Of "rare" each of 4 ranks has one value, and nobody has the fifth.
            own = torch.zeros(5)
            own[transport.rank] = 1.0
            grads = {shared: torch.ones(4), rare: own, other: torch.ones(2)}
            backward(hook, layout, grads)
            found.append(hook.report().zeroed)
        return found

    with caplog.at_level(logging.WARNING):
        told = run_ranks(4, work)
    for found in told:
        assert found[:9] == [(ZeroedParameter("rare", 4, 4),)] * 9
        assert found[9] == (ZeroedParameter("rare", 8, 8),)  # the second look
    assert caplog.text.count("of 1 parameters: rare (100%). ddp_hook has one rule") == 1


def test_a_rank_without_samples_has_no_say_in_what_is_zeroed() -> None:
    def work(transport: LocalTransport) -> tuple[ZeroedParameter, ...]:
        planned: Any = Sizes([(2, 2, 2, 0)])
        parameter = torch.nn.Parameter(torch.zeros(2))
        hook = loft.ddp_hook(loft.Median(), planned, transport=transport)
        # Of a dummy batch: it is not in the result either.
        own = torch.ones(2) if transport.rank == 3 else torch.zeros(2)
        backward(hook, [[parameter]], {parameter: own})
        return hook.report().zeroed

    assert run_ranks(4, work) == [()] * 4


def test_a_hook_takes_its_buffers_with_it() -> None:
    def work(transport: LocalTransport) -> bool:
        hook = loft.ddp_hook(loft.Median(), transport=transport)
        parameter = torch.nn.Parameter(torch.zeros(6))
        backward(hook, [[parameter]], {parameter: torch.ones(6)})
        engine = weakref.ref(hook._engine)
        del hook
        until = time.monotonic() + 20.0
        while engine() is not None and time.monotonic() < until:  # its thread may be at work
            gc.collect()
            time.sleep(0.01)
        return engine() is None

    assert run_ranks(2, work) == [True] * 2


def test_a_hook_without_a_balancer_writes_a_run_log(tmp_path: Path) -> None:
    def work(transport: LocalTransport) -> None:
        generator = torch.Generator().manual_seed(transport.rank)
        parameter = torch.nn.Parameter(torch.zeros(40))
        hook = loft.ddp_hook(loft.Median(), transport=transport, log_dir=tmp_path)
        for _ in range(10):
            gradient = 1 + torch.randn(40, generator=generator)
            backward(hook, [[parameter]], {parameter: gradient})

    run_ranks(3, work)
    (log,) = tmp_path.iterdir()
    lines = [(line["kind"], line["step"]) for line in read_run_log(log)]
    assert lines == [("run", 0), ("rules", 0), ("suspicion", 9)]


@pytest.mark.parametrize("wraps", ["hook", "optimizer"])
def test_rows_are_scored_in_the_next_step_while_its_buckets_are_on_the_wire(
    wraps: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not after its last result, when every rank would wait for it."""

    def names_of(watch: WorkerWatch) -> list[str]:
        assert isinstance(watch._channel.transport, RecordingTransport)
        return watch._channel.transport.names

    score, step_reduced = WorkerWatch.score, WorkerWatch.step_reduced

    def noted_score(self: WorkerWatch) -> None:
        names_of(self).append("scored")
        score(self)

    def noted_step_reduced(self: WorkerWatch, weights: PassWeights) -> None:
        names_of(self).append("closed")
        step_reduced(self, weights)

    monkeypatch.setattr(WorkerWatch, "score", noted_score)
    monkeypatch.setattr(WorkerWatch, "step_reduced", noted_step_reduced)

    def work(end: LocalTransport) -> list[list[str]]:
        transport = RecordingTransport(end)
        params = [torch.nn.Parameter(torch.zeros(6)) for _ in range(2)]
        if wraps == "optimizer":
            optimizer = wrap(params, transport, rule=loft.Median(), bucket_bytes=24)
        else:
            hook = loft.ddp_hook(loft.Median(), transport=transport)
        steps = []
        for _ in range(3):
            transport.names.clear()
            if wraps == "optimizer":
                give_gradients(params)
                optimizer.step()
            else:
                backward(hook, [[p] for p in params], {p: torch.ones(6) for p in params})
            steps.append(list(transport.names))
        return steps

    for steps in run_ranks(3, work):
        for names in steps:
            at = names.index("scored")
            assert sum(name.endswith(".a2a") for name in names[:at]) == 2
            assert names[at:].count("closed") == 1
            assert names.count("scored") == 1


@pytest.mark.parametrize("fewer", [[2, 1, 0], [1]])
def test_rows_are_judged_over_the_model_when_ddp_has_fewer_buckets(fewer: list[int]) -> None:
    """Its second pass has other buckets: none of them is measured when the last one has begun."""

    def work(transport: LocalTransport) -> list[Tensor]:
        params = [torch.nn.Parameter(torch.zeros(400)) for _ in range(3)]
        hook = loft.ddp_hook(
            loft.GeometricMedian(f=1), transport=transport, scope="model", worker_momentum=0.0
        )
        random = torch.Generator().manual_seed(transport.rank)
        rest = [at for at in range(3) if at not in fewer]
        layouts = [[[0], [1], [2]], [fewer, rest] if rest else [fewer]]
        found = []
        for layout in layouts:
            grads = {p: torch.randn(400, generator=random) for p in params}
            given = [[params[at] for at in members] for members in layout]
            reduced = backward(hook, given, grads)
            found.append(torch.cat([reduced[p] for p in params]))
        return found

    randoms = [torch.Generator().manual_seed(rank) for rank in range(3)]
    for step in range(2):
        rows = torch.stack(
            [torch.cat([torch.randn(400, generator=r) for _ in range(3)]) for r in randoms]
        )
        expected = loft.aggregate(rows, loft.GeometricMedian(f=1))
        for found in run_ranks(3, work):
            torch.testing.assert_close(found[step], expected)
