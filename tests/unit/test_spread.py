"""Gradients that differ for good are told apart from noise, from batch sizes and from one liar."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import loft_hvd as loft
from loft_hvd.pipeline.suspicion.spread import (
    WARN_ABOVE,
    ShardSpreadWatch,
    Spread,
    SpreadWatch,
    lasting_differences,
    looked_at,
)
from loft_hvd.report.entries import read_lines
from loft_hvd.report.verdict import judge
from loft_hvd.runlog import read_run_log
from loft_hvd.transport.base import Channel
from loft_hvd.transport.local import LocalTransport, run_ranks
from tests.support.ddp_buckets import Bucket

NUM_STEPS, NUM_VALUES = 50, 512
CASES = pytest.mark.parametrize(
    ("rule", "own", "warns", "is_measured"),
    [
        (loft.TrimmedMean(f=1), 2.0, True, True),
        (loft.TrimmedMean(f=1), 0.0, False, True),
        (loft.Mean(), 2.0, False, False),
    ],
    ids=["apart", "alike", "mean"],
)


def noted(offsets: list[float], noises: list[float]) -> Spread:
    """Return the verdict on ranks whose gradients have such offsets, in units of noise 1."""
    random = np.random.default_rng(0)
    world_size = len(offsets)
    drawn = random.standard_normal((world_size, NUM_STEPS, NUM_VALUES))
    signs = random.choice([-1.0, 1.0], (world_size, NUM_VALUES))
    gradients = drawn * np.array(noises)[:, None, None]
    gradients += (signs * np.array(offsets)[:, None])[:, None]
    apart = gradients - np.median(gradients, axis=0)
    counts = np.full(world_size, float(NUM_STEPS))
    return lasting_differences(counts, apart.sum(axis=1), (apart**2).sum(axis=1))


@pytest.mark.parametrize("noises", [[1.0] * 4, [1.0] * 8, [1.0, 3.0, 3.0, 3.0], [1.0, 1.0, 3.0]])
def test_ranks_alike_differ_by_nothing_whatever_their_batches(noises: list[float]) -> None:
    assert max(noted([0.0] * len(noises), noises).ratios) < 0.05  # by chance alone 0.14 and more


def test_a_lasting_difference_is_measured_in_units_of_noise() -> None:
    found = noted([2.0] * 8, [1.0] * 8)
    assert found.usual > 1.5
    assert noted([0.5] * 8, [1.0] * 8).usual < WARN_ABOVE


def test_one_rank_apart_does_not_move_the_usual() -> None:
    found = noted([0.0, 0.0, 0.0, 50.0], [1.0] * 4)
    assert found.usual < 0.2
    assert found.ratios[3] > 10


@pytest.mark.parametrize("noise", [100.0, 1e6, 0.01])
def test_one_noisy_rank_hides_no_lasting_difference_and_makes_none(noise: float) -> None:
    """One wild step is such noise, too; it had raised what all ranks would differ by by chance."""
    noises = [1.0] * 7 + [noise]
    assert noted([1.3] * 8, noises).usual == pytest.approx(
        noted([1.3] * 8, [1.0] * 8).usual, rel=0.1
    )
    assert max(noted([0.0] * 8, noises).ratios[:7]) < 0.15


@pytest.mark.parametrize("variance", [1e-310, 5e-324, 1e300])
def test_a_rank_that_notes_no_noise_or_too_much_ends_nothing(variance: float) -> None:
    counts, sums = np.full(4, 50.0), np.zeros((4, 16))
    squares = np.full((4, 16), 50.0)
    squares[2] = variance
    assert lasting_differences(counts, sums, squares).usual == 0.0


@pytest.mark.parametrize("offset", [0.0, 50.0])
@pytest.mark.parametrize("noise", [1e-3, 1.0, 1e9])
def test_one_of_four_ranks_moves_the_usual_by_little(offset: float, noise: float) -> None:
    honest = noted([0.8] * 4, [1.0] * 4).usual
    found = noted([0.8, 0.8, 0.8, offset], [1.0, 1.0, 1.0, noise]).usual
    assert 0.7 * honest < found < 1.5 * honest


def test_the_figures_have_the_same_bits_in_whatever_order_values_are_added() -> None:
    random = np.random.default_rng(1)
    counts = np.array([50.0, 49.0, 50.0, 31.0])
    sums = random.standard_normal((4, 512)) * 10.0 ** random.uniform(-3, 3, 512)
    squares = sums**2 / counts[:, None] + random.uniform(0.1, 9, (4, 512))
    found = lasting_differences(counts, sums, squares)
    for _ in range(5):
        order = random.permutation(512)
        assert lasting_differences(counts, sums[:, order], squares[:, order]) == found


def test_what_is_not_known_is_nan() -> None:
    nothing = np.zeros((3, 4))
    assert np.isnan(lasting_differences(np.zeros(3), nothing, nothing).usual)


def train(
    transport: LocalTransport,
    *,
    rule: loft.Rule,
    own: float,
    log_dir: Path,
    num_steps: int = NUM_STEPS + 2,
    flips: int = -1,
) -> str:
    """Train on gradients of noise, and of a sign for each rank and coordinate times ``own``.

    Returns the report. Rank ``flips`` sends its own with the other sign and ten times as long.
    """
    random = torch.Generator().manual_seed(100 + transport.rank)
    sign = torch.randn(600, generator=random).sign() * own
    layer = torch.nn.Linear(600, 1, bias=False)
    torch.nn.init.ones_(layer.weight)  # threads share torch's random numbers: else ranks differ
    optimizer = loft.DistributedOptimizer(
        torch.optim.SGD(layer.parameters(), lr=0.0),
        layer.named_parameters(),
        rule=rule,
        transport=transport,
        log_dir=log_dir,
    )
    if transport.rank == flips:

        def flip(_: object, values: torch.Tensor) -> None:
            values.mul_(-10)

        optimizer.register_outgoing_hook(flip)
    for _ in range(num_steps):
        optimizer.zero_grad()
        layer(torch.randn(1, 600, generator=random) + sign).sum().backward()
        optimizer.step()
    return str(optimizer.report())


@CASES
def test_a_robust_rule_over_ranks_apart_warns_once_with_the_figure(
    rule: loft.Rule,
    own: float,
    warns: bool,
    is_measured: bool,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        reports = run_ranks(
            4, lambda transport: train(transport, rule=rule, own=own, log_dir=tmp_path)
        )
    assert caplog.text.count("differ lastingly") == warns
    assert all(("cannot be told from an honest one" in report) == warns for report in reports)
    (path,) = tmp_path.iterdir()
    found = [entry for entry in read_run_log(path) if entry["kind"] == "spread"]
    assert len(found) == is_measured
    if warns:
        assert f"by {found[0]['usual']:.2f} times" in caplog.text
        assert "with_strata" in caplog.text


@pytest.mark.parametrize("num_steps", [NUM_STEPS, pytest.param(150, marks=pytest.mark.long)])
def test_among_ranks_apart_the_report_says_that_flipped_gradients_name_nobody(
    num_steps: int, tmp_path: Path
) -> None:
    """And who stood out until that was found."""
    rule = loft.TrimmedMean(f=1)
    reports = run_ranks(
        8,
        lambda end: train(end, rule=rule, own=1.0, log_dir=tmp_path, num_steps=num_steps, flips=6),
    )
    last = reports[0].splitlines()[-1]
    assert all(report.splitlines()[-1] == last for report in reports)
    assert last.startswith("ranks draw from different data: a worker that sends its gradients fl")
    assert "until step 50 rank 6 stood out, by that or by data far from all" in last
    (path,) = tmp_path.iterdir()
    sentence = next(each for each in judge(read_lines(read_run_log(path))) if "different" in each)
    assert sentence.startswith("Ranks draw from different data: a worker that sends its gradients")


def train_buckets(
    transport: LocalTransport, *, rule: loft.Rule, own: float, log_dir: Path, cuts: list[list[int]]
) -> None:
    """Reduce the gradients of ``train`` by a ``ddp_hook``, the first passes in other buckets.

    They are of parameters of 200 values each; ``cuts`` are how many of them a bucket has.
    """
    random = torch.Generator().manual_seed(100 + transport.rank)
    sign = torch.randn(600, generator=random).sign() * own
    world_size = transport.world_size
    balancer = loft.Balancer(world_size, [1] * world_size, transport=transport, log_dir=log_dir)
    hook = loft.ddp_hook(rule, balancer, transport=transport)
    parameters = [torch.nn.Parameter(torch.zeros(200)) for _ in range(3)]
    for sizes in [*cuts, *[[3]] * (NUM_STEPS + 2)]:
        gradient = torch.randn(1, 600, generator=random).view(-1) + sign
        left = list(parameters)
        with balancer.step(1):
            for at, values in enumerate(gradient.split([200 * size for size in sizes])):
                members, left = left[: sizes[at]], left[sizes[at] :]
                bucket: Any = Bucket(at, len(sizes), members, values)
                hook(None, bucket)


@pytest.mark.every(4)
@pytest.mark.parametrize("cuts", [[], [[1, 2]], [[3], [2, 1], [1, 2]]])
@CASES
def test_a_ddp_hook_warns_once_too_however_its_buckets_change_at_first(
    rule: loft.Rule,
    own: float,
    warns: bool,
    is_measured: bool,
    cuts: list[list[int]],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        run_ranks(
            4,
            lambda transport: train_buckets(
                transport, rule=rule, own=own, log_dir=tmp_path, cuts=cuts
            ),
        )
    assert caplog.text.count("differ lastingly") == warns
    (path,) = tmp_path.iterdir()
    found = [entry for entry in read_run_log(path) if entry["kind"] == "spread"]
    assert len(found) == is_measured
    if is_measured:
        assert all(ratio > 1.5 if warns else ratio < 0.15 for ratio in found[0]["ratios"])
    if warns:
        assert f"by {found[0]['usual']:.2f} times" in caplog.text


def test_a_pass_that_failed_leaves_nothing_behind() -> None:
    def watch(transport: LocalTransport) -> Spread | None:
        spread = SpreadWatch(Channel(transport, "test", 10), [600])
        random = torch.Generator().manual_seed(transport.rank)
        own = torch.randn(600, generator=random)
        found = None
        for step in range(NUM_STEPS):
            values = torch.randn(600, generator=random) + own
            if step == 5:
                spread.sent(0, 1e9 * values)  # and then an error
            spread.sent(0, values)
            found = spread.step_reduced([torch.zeros(600)])
        return found

    for found in run_ranks(4, watch):
        assert found is not None
        assert 0.8 < found.usual < 1.3


def test_results_in_shards_show_what_whole_ones_do() -> None:
    layout = [4 * 90, 4 * 7, 4]

    def watch(transport: LocalTransport) -> list[Spread | None]:
        channel = Channel(transport, "test", 10)
        whole = SpreadWatch(channel.sub("whole"), layout)
        parted = ShardSpreadWatch(channel.sub("parted"), layout)
        random = torch.Generator().manual_seed(transport.rank)
        own = [torch.randn(numel, generator=random) for numel in layout]
        found: list[Spread | None] = [None, None]
        for step in range(NUM_STEPS):
            common = torch.Generator().manual_seed(1000 + step)
            results = [torch.randn(numel, generator=common) for numel in layout]
            for at, numel in enumerate(layout):
                values = torch.randn(numel, generator=random) + own[at]
                whole.sent(at, values)
                parted.sent(at, values)
            shards = {at: each.view(4, -1)[transport.rank] for at, each in enumerate(results)}
            if step == 7:  # counted, and not noted
                shards.pop(1)
            given = [each if at in shards else None for at, each in enumerate(results)]
            found = [whole.step_reduced(given), parted.step_reduced(shards)]
        return found

    for one, other in run_ranks(4, watch):
        assert one is not None
        assert one == other
        assert 0.5 < one.usual < 2.0


def test_a_ddp_hook_and_an_optimizer_find_the_same_figure_for_the_same_gradients(
    tmp_path: Path,
) -> None:
    def found(folder: Path) -> list[float]:
        (path,) = folder.iterdir()
        (entry,) = [entry for entry in read_run_log(path) if entry["kind"] == "spread"]
        return list(entry["ratios"])

    hooked, stepped = tmp_path / "hook", tmp_path / "optimizer"
    rule = loft.TrimmedMean(f=1)
    run_ranks(4, lambda t: train(t, rule=rule, own=1.0, log_dir=stepped))
    run_ranks(4, lambda t: train_buckets(t, rule=rule, own=1.0, log_dir=hooked, cuts=[]))
    # The optimizer notes steps 1 to 50, the hook 2 to 51: its first pass tells it the layout.
    np.testing.assert_allclose(found(hooked), found(stepped), rtol=0.05)


@pytest.mark.parametrize("numel", [30522 * 768, 50257 * 768, 25088 * 4096])
def test_what_is_looked_at_of_a_large_parameter_lies_in_it(numel: int) -> None:
    places = looked_at(numel, numel)
    assert int(places[0]) == 0
    assert int(places[-1]) == numel - 1
