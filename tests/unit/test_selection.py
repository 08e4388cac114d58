"""Rules that judge rows over the whole model: one table, one choice, the same bits everywhere."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import loft_hvd as loft
from loft_hvd.errors import ArgumentError, MismatchError
from loft_hvd.runlog import read_run_log
from loft_hvd.transport.local import Faults, LocalTransport, run_ranks
from tests.support.passes import Sizes
from tests.support.recording import RecordingTransport
from tests.support.wrapped import give_gradients, make_parameters, wrap
from tests.unit.test_reducer import backward

SHAPES = [(30, 40), (7,), (0,), (501,), (2, 3, 4)]
# Of two rows the geometric median is any point between them: three tell.
CASES = [("robust:f={f}", size) for size in range(1, 9)]
CASES += [
    (text, 5)
    for text in (
        "multi_krum:f=1",
        "geometric_median:f=2",
        "centred_clipping:f=1",
        "caf:f=1",
        "bucketing:size=2+median",
        "clip:norm=9.0+phocas:f=1",
    )
]
CASES += [("nnm+bulyan:f=1", 8)]


def row_of(rank: int, seed: int = 0) -> list[Tensor]:
    """Return a rank's gradients, apart from the others' by more in some parameters than others."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    return [
        (1 + (rank * at) % 5) * torch.randn(shape, generator=generator)
        for at, shape in enumerate(SHAPES)
    ]


def flat(tensors: list[Tensor]) -> Tensor:
    return torch.cat([tensor.flatten() for tensor in tensors])


def reduce(
    end: LocalTransport, rule: loft.Rule, rows: list[list[Tensor]], **options: Any
) -> list[Tensor]:
    """Return the gradients of some steps, each flat; in ``rows`` by rank, step and parameter."""
    params = make_parameters(SHAPES)
    options = {"bucket_bytes": 2000, "worker_momentum": 0.0, **options}
    optimizer = wrap(params, end, rule=rule, **options)
    results = []
    for row in rows:
        backward(params, row)
        optimizer.synchronize()
        results.append(flat([p.grad for p in params]).clone())  # type: ignore[misc]
        optimizer.zero_grad()
    return results


@pytest.mark.parametrize(("text", "world_size"), CASES)
def test_the_whole_model_is_the_rule_on_whole_gradients(text: str, world_size: int) -> None:
    rule = loft.parse_rule(text.format(f=(world_size - 1) // 3))
    num_steps = 2

    def work(end: LocalTransport) -> list[Tensor]:
        rows = [row_of(end.rank, seed) for seed in range(num_steps)]
        return reduce(end, rule, rows, scope="model")

    results = run_ranks(world_size, work)
    for seed in range(num_steps):
        whole = torch.stack([flat(row_of(rank, seed)) for rank in range(world_size)])
        expected = whole[0] if world_size == 1 else loft.aggregate(whole, rule.over_model)
        for reduced in results:
            torch.testing.assert_close(reduced[seed], expected, rtol=1e-6, atol=1e-6)
            assert torch.equal(reduced[seed], results[0][seed])


@pytest.mark.parametrize("scope", ["shard", "model"])
@pytest.mark.parametrize(  # in several buckets and shards
    ("wrong", "place"), [(float("nan"), 0), (float("inf"), 1204), (-1e30, 1726), (1e30, 5)]
)
def test_what_f_ranks_send_moves_no_result_beyond_the_others(
    scope: str, wrong: float, place: int
) -> None:
    def work(end: LocalTransport) -> Tensor:
        values = flat(row_of(end.rank))
        if end.rank in (1, 4):
            values[place + end.rank] = wrong
        split = values.split([torch.Size(shape).numel() for shape in SHAPES])
        row = [part.view(shape) for part, shape in zip(split, SHAPES, strict=True)]
        return reduce(end, loft.Robust(2), [row], scope=scope)[0]

    results = run_ranks(7, work)
    honest = torch.stack([flat(row_of(rank)) for rank in (0, 2, 3, 5, 6)])
    distances = torch.cdist(honest, honest)
    assert float((results[0] - honest.mean(dim=0)).norm()) <= float(distances.max())
    assert all(torch.equal(result, results[0]) for result in results)


FAR_RULE = loft.GeometricMedian(1)
FAR_ROWS = torch.randn(4, 512, generator=torch.Generator().manual_seed(0)).double()
FAR_ROWS[3] += 3e5  # farther than distances in float32 reach


def reduce_far_rows(dtypes: list[torch.dtype], **options: Any) -> list[Tensor]:
    """Return the results of one parameter of each dtype, whose rows are FAR_ROWS."""

    def work(end: LocalTransport) -> list[Tensor]:
        params = [torch.nn.Parameter(torch.zeros(512, dtype=dtype)) for dtype in dtypes]
        optimizer = wrap(params, end, rule=FAR_RULE, worker_momentum=0.0, **options)
        backward(params, [FAR_ROWS[end.rank].to(dtype) for dtype in dtypes])
        optimizer.synchronize()
        return [p.grad.clone() for p in params]  # type: ignore[union-attr]

    found = run_ranks(4, work)
    for results in found:
        assert all(map(torch.equal, results, found[0]))
    return found[0]


def test_far_rows_of_float64_count_over_the_whole_model() -> None:
    (found,) = reduce_far_rows([torch.float64], scope="model")
    torch.testing.assert_close(found, loft.aggregate(FAR_ROWS, FAR_RULE), rtol=1e-9, atol=1e-9)
    without = loft.aggregate(FAR_ROWS[:3], FAR_RULE)
    assert (found - without).abs().max() > 1e-2  # else nothing would be shown


def test_far_rows_of_float64_count_in_shards_whose_parts_are_audited() -> None:
    (found,) = reduce_far_rows([torch.float64], scope="shard", audit=1.0)
    shards = [loft.aggregate(rows, FAR_RULE) for rows in FAR_ROWS.split(128, dim=1)]
    torch.testing.assert_close(found, torch.cat(shards), rtol=1e-9, atol=1e-9)


def test_far_rows_are_left_out_where_float32_is_judged_with_them() -> None:
    wide, narrow = reduce_far_rows([torch.float64, torch.float32], scope="model")
    expected = loft.aggregate(FAR_ROWS.float(), FAR_RULE)
    torch.testing.assert_close(narrow, expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(wide.float(), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("text", ["robust:f=1", "geometric_median:f=1"])
@pytest.mark.parametrize("sizes", [(40, 1, 3, 0, 2), (2, 2, 0, 2, 2)], ids=str)
def test_absent_ranks_are_not_read_and_weights_are_those_of_training(
    text: str, sizes: tuple[int, ...]
) -> None:
    rule = loft.parse_rule(text)

    def work(end: LocalTransport) -> Tensor:
        row = row_of(end.rank)
        if sizes[end.rank] == 0:
            row = [torch.full_like(part, float("nan")) for part in row]
        return reduce(end, rule, [row], scope="model", balancer=Sizes([sizes]))[0]

    present = [rank for rank, size in enumerate(sizes) if size]
    capped = [min(len(present) * sizes[rank], 2 * sum(sizes)) for rank in present]
    weights = None if rule.counts_weight else capped
    whole = torch.stack([flat(row_of(rank)) for rank in present])
    expected = loft.aggregate(whole, rule.over_model, weights=weights)
    for reduced in run_ranks(5, work):
        torch.testing.assert_close(reduced, expected, rtol=1e-6, atol=1e-6)


def test_each_rule_judges_its_own_parameters() -> None:
    rules: list[loft.Rule] = [loft.Robust(1), loft.MultiKrum(1)]

    def work(end: LocalTransport) -> list[Tensor]:
        params, row = make_parameters(SHAPES), row_of(end.rank)
        groups = [{"params": params[at::2], "rule": rule} for at, rule in enumerate(rules)]
        names = [(f"p{at}", p) for at, p in enumerate(params)]
        sgd = torch.optim.SGD(groups, lr=1.0)
        optimizer = loft.DistributedOptimizer(
            sgd, names, transport=end, scope="model", worker_momentum=0.0
        )
        backward(params, row)
        optimizer.synchronize()
        return [p.grad for p in params]  # type: ignore[misc]

    for reduced in run_ranks(5, work):
        for at, rule in enumerate(rules):
            whole = torch.stack([flat(row_of(rank)[at::2]) for rank in range(5)])
            expected = loft.aggregate(whole, rule.over_model)
            torch.testing.assert_close(flat(reduced[at::2]), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("wire", [loft.Compression.bf16, loft.Compression.fp16])
def test_what_travels_in_16_bits_is_judged_as_it_came(wire: loft.Compression) -> None:
    rule = loft.parse_rule("arc+nnm+trimmed_mean:f=1")  # whose weights a last bit does not change

    def work(end: LocalTransport) -> Tensor:
        return reduce(end, rule, [row_of(end.rank)], scope="model", compression=wire)[0]

    whole = torch.stack([flat(row_of(rank)).to(wire.dtype) for rank in range(4)])
    expected = loft.aggregate(whole, rule)
    for reduced in run_ranks(4, work):
        assert torch.equal(reduced, expected.float())


def test_groups_are_judged_over_the_whole_model() -> None:
    groups = [[0, 1], [2, 3], [4, 5]]

    def work(end: LocalTransport) -> Tensor:
        row = [row_of(end.rank)]
        return reduce(end, loft.MultiKrum(1), row, scope="model", over=groups)[0]

    rows = [flat(row_of(rank)) for rank in range(6)]
    means = torch.stack([(rows[a] + rows[b]) / 2 for a, b in groups])
    expected = loft.aggregate(means, loft.MultiKrum(1))
    results = run_ranks(6, work)
    for reduced in results:
        torch.testing.assert_close(reduced, expected, rtol=1e-6, atol=1e-6)
        assert torch.equal(reduced, results[0])


@pytest.mark.parametrize("seed", range(3))
def test_the_order_in_which_buckets_come_changes_no_bit(seed: int) -> None:
    def work(end: LocalTransport) -> list[Tensor]:
        rows = [row_of(end.rank, step) for step in range(3)]
        return reduce(end, loft.Robust(1), rows, scope="model")

    orderly = run_ranks(4, work)[0]
    faults = Faults(seed=seed, max_delay_s=0.002, reorder=True, slow={2: 0.003})
    for results in run_ranks(4, work, faults=faults):
        assert all(torch.equal(a, b) for a, b in zip(results, orderly, strict=True))


def test_it_sends_a_table_more_and_results_after_it() -> None:
    def work(end: LocalTransport) -> tuple[list[str], int, int]:
        transport = RecordingTransport(end)
        params = make_parameters(SHAPES)
        optimizer = wrap(params, transport, rule=loft.Robust(1), bucket_bytes=2000, scope="model")
        give_gradients(params)
        optimizer.synchronize()
        optimizer.zero_grad()
        transport.names.clear()
        transport.sent_bytes = 0
        backward(params, row_of(end.rank))
        optimizer.synchronize()
        num_padded = sum(
            member.reduction.padded.nbytes for member in optimizer._world._reducer.engine._members
        )
        return transport.names, transport.sent_bytes, num_padded

    for names, sent_bytes, num_padded in run_ranks(4, work):
        kinds = [name.rpartition(".")[2] for name in names]
        num_buckets = kinds.count("a2a")
        assert num_buckets > 2
        assert kinds == ["a2a"] * num_buckets + ["tables"] + ["ag"] * num_buckets
        # 10 pairs of 4 rows and the zero vector, to 3 others; the rest is a ring's.
        assert sent_bytes == 2 * num_padded * 3 // 4 + 3 * 8 * 10


class OnceReleased(RecordingTransport):
    """A transport whose works, as Horovod's, may not be asked once they are released."""

    def allgather(self, send: Tensor, recv: Tensor, *, name: str) -> Any:
        work = super().allgather(send, recv, name=name)
        finish = work.finish

        def release() -> None:
            finish()
            work.done = work.finish = None

        work.finish = release
        return work


def test_tables_are_asked_for_no_more_once_they_are_read() -> None:
    def work(end: LocalTransport) -> None:
        rows = [row_of(end.rank, step) for step in range(3)]
        reduce(OnceReleased(end), loft.Robust(1), rows, scope="model")

    run_ranks(4, work)


class LyingOwner(RecordingTransport):
    """An owner that tells a squared distance that no rows have."""

    def allgather(self, send: Tensor, recv: Tensor, *, name: str) -> Any:
        if name.endswith(".tables") and self.rank == 2:
            send = send.clone()
            send[3] = -1.0
        return super().allgather(send, recv, name=name)


def test_distances_below_zero_end_the_job_and_name_the_owner() -> None:
    def work(end: LocalTransport) -> str:
        with pytest.raises(MismatchError) as caught:
            reduce(LyingOwner(end), loft.Robust(1), [row_of(end.rank)], scope="model")
        return str(caught.value)

    for said in run_ranks(4, work):
        assert "ranks [2] tell squared distances below 0" in said
        assert "in select" in said


@pytest.mark.parametrize(
    ("scope", "rule", "message"),
    [
        ("rows", loft.Robust(1), r"scope='rows' must be .shard., .model. or .auto."),
        ("model", loft.TrimmedMean(1), r"not for trimmed_mean:f=1: it looks at coordinates one by"),
        ("model", loft.Mean(), r"not for mean: it looks at coordinates one by one"),
        ("model", loft.Custom(torch.Tensor.sum), r"what its function looks at is not known"),
    ],
)
def test_scopes_are_checked(scope: str, rule: loft.Rule, message: str) -> None:
    def work(end: LocalTransport) -> None:
        with pytest.raises(ArgumentError, match=message):
            wrap(make_parameters(), end, rule=rule, scope=scope)

    run_ranks(1, work)


def test_ranks_must_agree_about_the_scope() -> None:
    def work(end: LocalTransport) -> None:
        scope = "model" if end.rank == 1 else "shard"
        with pytest.raises(MismatchError, match=r"option scope differs on ranks \[1\]"):
            wrap(make_parameters(), end, rule=loft.Robust(1), scope=scope)

    run_ranks(3, work)


# Scope "auto": in shards once ranks' gradients are found to be alike.


def steps_apart(
    end: LocalTransport,
    apart: float,
    *,
    noise: float = 1.0,
    lay_out_every: int = 1000,
    **options: Any,
) -> tuple[list[str], Any]:
    """Take 60 steps of one parameter whose gradients differ by rank; return what was sent."""
    transport = RecordingTransport(end)
    params = make_parameters([(600,)])
    options = {"rule": loft.Robust(1), "worker_momentum": 0.0, **options}
    optimizer = wrap(params, transport, **options)
    generator = torch.Generator().manual_seed(end.rank)
    mean = apart * torch.randn(600, generator=generator)
    sent = []
    for step in range(60):
        if step % lay_out_every == lay_out_every - 1:
            optimizer.set_backward_passes_per_step(1)
        transport.names.clear()
        optimizer.zero_grad()
        backward(params, [mean + noise * torch.randn(600, generator=generator)])
        optimizer.step()
        sent.append("model" if any(name.endswith(".tables") for name in transport.names) else "")
    return sent, optimizer


MODEL, SHARDS = ["model"] * 60, [""] * 60
AUTO = ["model"] * 50 + [""] * 10  # where ranks are found to be alike


@pytest.mark.parametrize("apart", [0.0, 0.15])
def test_auto_goes_over_to_shards_where_ranks_are_alike(
    apart: float, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    def work(end: LocalTransport) -> list[str]:
        return steps_apart(end, apart, log_dir=tmp_path)[0]

    with caplog.at_level(logging.INFO, logger="loft_hvd"):
        assert run_ranks(4, work) == [AUTO] * 4
    assert caplog.text.count("workers are judged shard by shard") == 1
    (log,) = tmp_path.glob("**/*.jsonl")
    (line,) = [line for line in read_run_log(log) if line["kind"] == "scope"]
    assert line["scope"] == "shard"


@pytest.mark.parametrize("apart", [0.5, 3.0])  # 0.5 as under a strata cap of 1.5
def test_auto_stays_with_the_model_where_ranks_differ_lastingly(
    apart: float, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    def work(end: LocalTransport) -> list[str]:
        return steps_apart(end, apart, log_dir=tmp_path)[0]

    assert run_ranks(4, work) == [MODEL] * 4
    assert caplog.text.count("workers are judged by their whole gradients") == 1
    # Only what differs more is told of strata: a cap of 1.5 is what that warning advises.
    assert ("Placement.with_strata" in caplog.text) == (apart == 3.0)
    (log,) = tmp_path.glob("**/*.jsonl")
    assert not [line for line in read_run_log(log) if line["kind"] == "scope"]


@pytest.mark.parametrize(("apart", "scope"), [(0.0, "model"), (3.0, "shard")])
def test_a_scope_that_is_asked_for_stays(apart: float, scope: str) -> None:
    expected = MODEL if scope == "model" else SHARDS
    assert run_ranks(4, lambda end: steps_apart(end, apart, scope=scope)[0]) == [expected] * 4


def test_auto_is_in_shards_from_the_start_where_nobody_compares() -> None:
    def work(end: LocalTransport) -> list[str]:
        return steps_apart(end, 0.0, rule=loft.Robust(0))[0]

    assert run_ranks(2, work) == [SHARDS] * 2


@pytest.mark.parametrize("rule", [loft.TrimmedMean(1), loft.Custom(lambda rows: rows.mean(0))])
def test_nothing_is_said_to_change_where_no_rule_judges_rows(
    rule: loft.Rule, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    def work(end: LocalTransport) -> list[str]:
        return steps_apart(end, 3.0, rule=rule, scope="auto", log_dir=tmp_path)[0]

    assert run_ranks(4, work) == [SHARDS] * 4
    assert "differ lastingly" in caplog.text
    assert "judged by their whole gradients" not in caplog.text
    (log,) = tmp_path.glob("**/*.jsonl")
    assert not [line for line in read_run_log(log) if line["kind"] == "scope"]


def test_one_noisy_rank_does_not_bring_the_others_into_shards() -> None:
    def work(end: LocalTransport) -> list[str]:
        return steps_apart(end, 1.5, noise=100.0 if end.rank == 3 else 1.0)[0]

    assert run_ranks(4, work) == [MODEL] * 4


@pytest.mark.parametrize("every", [20, 55])
def test_the_decision_stands_and_comes_when_buckets_are_laid_out_anew(
    every: int, tmp_path: Path
) -> None:
    def work(end: LocalTransport) -> list[str]:
        return steps_apart(end, 0.0, lay_out_every=every, log_dir=tmp_path)[0]

    assert run_ranks(4, work) == [AUTO] * 4
    (log,) = tmp_path.glob("**/*.jsonl")
    assert [line["scope"] for line in read_run_log(log) if line["kind"] == "scope"] == ["shard"]


def scope_of(optimizer: Any) -> str:
    return "model" if optimizer._world._judgement.is_model else "shard"


def test_ranks_are_compared_anew_for_parameters_that_are_added_and_scope_follows(
    tmp_path: Path,
) -> None:
    def work(end: LocalTransport) -> list[str]:
        _, optimizer = steps_apart(end, 0.0, log_dir=tmp_path)
        params = [optimizer.param_groups[0]["params"][0], torch.nn.Parameter(torch.zeros(600))]
        optimizer.add_param_group({"params": [params[1]]})
        generator = torch.Generator().manual_seed(10 + end.rank)
        mean = 3.0 * torch.randn(600, generator=generator)
        scopes = []
        for _ in range(60):
            optimizer.zero_grad()
            backward(params, [mean + torch.randn(600, generator=generator) for _ in params])
            optimizer.step()
            scopes.append(scope_of(optimizer))
        return scopes

    assert run_ranks(4, work) == [["shard"] * 49 + ["model"] * 11] * 4
    (log,) = tmp_path.glob("**/*.jsonl")
    lines = read_run_log(log)
    assert len([line for line in lines if line["kind"] == "spread"]) == 2
    assert [line["scope"] for line in lines if line["kind"] == "scope"] == ["shard", "model"]


def test_ranks_that_cannot_be_compared_stay_with_the_model(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def work(end: LocalTransport) -> list[str]:
        params = make_parameters([(600,), (5,)])
        optimizer = wrap(params, end, rule=loft.Robust(1), worker_momentum=0.0)
        generator = torch.Generator().manual_seed(end.rank)
        for _ in range(55):
            optimizer.zero_grad()
            backward(params[:1], [torch.randn(600, generator=generator)])
            optimizer.step()
        return [scope_of(optimizer)]

    assert run_ranks(4, work) == [["model"]] * 4
    assert caplog.text.count("ranks could not be compared") == 1
    assert "nan" not in caplog.text


def test_a_robust_group_that_is_added_to_means_begins_with_the_model() -> None:
    def work(end: LocalTransport) -> list[str]:
        params = make_parameters([(600,)])
        optimizer = wrap(params, end, scope="auto")
        scopes = [scope_of(optimizer)]
        more = torch.nn.Parameter(torch.zeros(600))
        optimizer.add_param_group({"params": [more], "rule": loft.MultiKrum(1)})
        return [*scopes, scope_of(optimizer)]

    assert run_ranks(4, work) == [["shard", "model"]] * 4


def test_ranks_are_compared_anew_where_a_step_has_other_passes(tmp_path: Path) -> None:
    def work(end: LocalTransport) -> None:
        params = make_parameters([(600,)])
        optimizer = wrap(params, end, rule=loft.Robust(1), worker_momentum=0.0, log_dir=tmp_path)
        generator = torch.Generator().manual_seed(end.rank)
        mean = 0.5 * torch.randn(600, generator=generator)
        for step in range(90):
            if step == 40:
                optimizer.set_backward_passes_per_step(16)
            optimizer.zero_grad()
            for _ in range(optimizer.backward_passes_per_step):
                backward(params, [mean + torch.randn(600, generator=generator)])
            optimizer.step()

    run_ranks(4, work)
    (log,) = tmp_path.glob("**/*.jsonl")
    (line,) = [line for line in read_run_log(log) if line["kind"] == "spread"]
    assert line["usual"] > 1.5  # a sum of 16 passes has four times the noise, and 16 times the mean


@pytest.mark.parametrize(
    ("options", "scope"),
    [
        ({"rule": loft.Robust(0)}, "auto"),
        ({"rule": "robust:f=0"}, "auto"),
        ({"rule": {"p0": "mean", "*": "robust:f=0"}}, "auto"),
        ({"rule": "robust:f=0", "scope": "shard"}, "shard"),
        ({"rule": loft.MultiKrum(0)}, "shard"),
        ({"rule": "median"}, "shard"),
        ({}, "shard"),
    ],
)
def test_auto_is_the_default_of_the_advised_rule_alone(options: dict[str, Any], scope: str) -> None:
    def work(end: LocalTransport) -> str:
        found = wrap(make_parameters(), end, **options)._options.settings.scope
        return str(found)

    assert run_ranks(1, work) == [scope]


def test_a_parameter_groups_rule_brings_its_scope() -> None:
    def work(end: LocalTransport) -> str:
        first, second = make_parameters([(3,), (4,)])
        groups: Any = [{"params": [first]}, {"params": [second], "rule": "robust:f=0"}]
        optimizer = torch.optim.SGD(groups, lr=0.1)
        return str(loft.DistributedOptimizer(optimizer, transport=end)._options.settings.scope)

    assert run_ranks(1, work) == ["auto"]
