"""The balancer on ranks that are threads and a clock of the test's own."""

from __future__ import annotations

from typing import Any

import pytest

import loft_hvd as loft
from loft_hvd.balance.plan import Plan, StepSizes
from loft_hvd.errors import ArgumentError, ArgumentTypeError, LoftError, PlanError, UsageError
from loft_hvd.transport import waits
from loft_hvd.transport.local import LocalTransport, LocalWorld, run_ranks
from tests.support.clock import Clock


def alone(*arguments: Any, **options: Any) -> loft.Balancer:
    return loft.Balancer(*arguments, transport=LocalWorld(1).transport(0), **options)


def begin(balancer: loft.Balancer, sizes: StepSizes, *, fetch_s: float = 0.0) -> None:
    local = sizes.sizes[balancer.rank]
    balancer.begin_batch(sizes, fetch_s=fetch_s, stall_s=fetch_s, local=local, remote=0)


def train(
    balancer: loft.Balancer, clock: Clock, *, fetch_s: float, compute_s: float, num_steps: int
) -> None:
    """Go through steps whose parts take the given times."""
    for step in range(num_steps):
        clock.now += fetch_s
        plan = balancer.plan_at(step)
        begin(balancer, StepSizes(plan.plan_id, step, plan.sizes), fetch_s=fetch_s)
        balancer.take_step()
        clock.now += compute_s
        balancer.gradient_arrived(blocked_s=0.0)
        balancer.computing_ended()
        balancer.step_ended()


@pytest.mark.parametrize(
    ("compute_s", "fetch_s", "rank", "cause"),
    [((1, 1, 3, 1), (1, 1, 1, 1), 2, "compute"), ((1, 1, 1, 1), (1, 4, 1, 1), 1, "fetch")],
)
def test_report_names_the_slow_rank_and_its_cause_on_every_rank(
    compute_s: tuple[float, ...], fetch_s: tuple[float, ...], rank: int, cause: str
) -> None:
    def work(transport: LocalTransport) -> str:
        clock = Clock()
        balancer = loft.Balancer(64, "report", interval=5, transport=transport, clock=clock)
        assert "no times yet" in balancer.explain()
        train(
            balancer,
            clock,
            fetch_s=fetch_s[transport.rank],
            compute_s=compute_s[transport.rank],
            num_steps=10,
        )
        return balancer.explain()

    texts = run_ranks(4, work)
    assert all(f"rank {rank} is slow: {cause}" in text for text in texts)
    assert len(set(texts[1:])) == 1
    assert "policy report" in texts[0]  # rank 0 also says what its models make of the times


def test_suggested_sizes_even_the_times_out() -> None:
    def work(transport: LocalTransport) -> tuple[int, ...]:
        clock = Clock()
        balancer = loft.Balancer(80, "report", interval=5, transport=transport, clock=clock)
        with pytest.raises(UsageError, match="no times yet"):
            balancer.suggest_sizes()
        seconds = 3.0 if transport.rank == 2 else 1.0
        train(balancer, clock, fetch_s=0.0, compute_s=seconds, num_steps=5)
        return balancer.suggest_sizes()

    assert run_ranks(4, work) == [(24, 24, 8, 24)] * 4


def test_an_epoch_shorter_than_an_interval_still_reports() -> None:
    def work(transport: LocalTransport) -> int:
        clock = Clock()
        balancer = loft.Balancer(8, "report", interval=50, transport=transport, clock=clock)
        train(balancer, clock, fetch_s=0.0, compute_s=1.0, num_steps=5)
        balancer.end_epoch()
        return balancer.times[1].steps

    assert run_ranks(2, work) == [2, 2]  # the first three are left out


def test_a_backward_pass_takes_the_sizes_of_its_own_batch() -> None:
    balancer = alone(8, "uniform")
    first, second = StepSizes(0, 0, (8,)), StepSizes(0, 1, (3,))
    begin(balancer, first)
    balancer.clear_pending()  # the first one is never trained on
    begin(balancer, second)
    assert balancer.take_step() == second
    balancer.push_sizes(first)
    balancer.push_sizes(second)
    assert [balancer.take_step(), balancer.take_step()] == [first, second]


def test_a_backward_pass_without_a_batch_is_an_error_with_the_way_out() -> None:
    balancer = alone(8, "uniform")
    with pytest.raises(UsageError, match=r"loft\.DataLoader"):
        balancer.take_step()
    begin(balancer, StepSizes(0, 0, (8,)))
    balancer.end_epoch()
    with pytest.raises(UsageError, match=r"loft\.DataLoader"):
        balancer.take_step()


def test_foreign_loaders_must_bring_the_planned_size() -> None:
    balancer = alone(8, "uniform")
    with balancer.step(8):
        assert balancer.take_step().sizes == (8,)
    with pytest.raises(PlanError, match="a batch of 5 samples"), balancer.step(5):
        pass


def test_a_sampler_of_ours_behind_a_foreign_loader_is_measured_too() -> None:
    clock = Clock()
    balancer = alone(8, "report", interval=5, clock=clock)
    for step in range(10):
        balancer.push_sizes(StepSizes(0, step, (8,)))
    for step in range(10):
        with balancer.step(8, fetch_s=0.25):
            assert balancer.take_step().step == step
            clock.now += 2.0
            balancer.gradient_arrived(blocked_s=0.0)
            balancer.step_ended()
    assert balancer.times[0].compute_s == pytest.approx(2.0)
    assert balancer.times[0].stall_s == pytest.approx(0.25)


def test_the_rule_must_find_enough_ranks_with_samples() -> None:
    def work(transport: LocalTransport) -> None:
        balancer = loft.Balancer(8, [8, 0, 0], transport=transport)
        with pytest.raises(PlanError, match="needs 3 ranks"):
            balancer.require(min_ranks=3, num_passes=1)
        balancer.require(min_ranks=1, num_passes=1)
        assert balancer.min_ranks == 1

    run_ranks(3, work)


def test_state_goes_on_with_the_plan_or_starts_equal_in_another_world() -> None:
    balancer = alone(8, "uniform")
    state = balancer.state_dict() | {"num_steps": 12, "plans": [[0, 0, 8], [1, 5, 8]]}
    balancer.load_state_dict(state)
    assert balancer.plan == Plan(1, 5, (8,))
    assert (balancer.plan_at(4).plan_id, balancer.plan_at(5).plan_id) == (0, 1)
    balancer.load_state_dict({"num_steps": 3, "plans": [[0, 0, 4, 4]], "controller": None})
    assert balancer.plan.world_size == 1


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((0,), ArgumentError, "global_batch_size=0 must be >= 1"),
        ((1.5,), ArgumentTypeError, "must be a whole number"),
        ((True,), ArgumentTypeError, "must be a whole number"),
        ((8, "fastest"), ArgumentError, "policy='fastest' is not known"),
        ((8, [4, 4]), PlanError, "has 2 sizes, but world_size=1"),
        ((8, [9]), PlanError, "adds up to 9"),
    ],
)
def test_arguments_are_checked(
    arguments: tuple[Any, ...], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message) as caught:
        alone(*arguments)
    assert isinstance(caught.value, LoftError)


def test_a_batch_smaller_than_the_world_is_refused() -> None:
    def work(transport: LocalTransport) -> None:
        with pytest.raises(PlanError, match="smaller than world_size=3"):
            loft.Balancer(2, "uniform", transport=transport)

    run_ranks(3, work)


@pytest.mark.parametrize(
    ("num_steps", "error"),
    [(-1, ArgumentError), (2.5, ArgumentTypeError), (True, ArgumentTypeError)],
)
def test_a_depth_is_a_count_of_steps(num_steps: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=f"expect_depth: num_steps={num_steps} must be"):
        alone(8).expect_depth(num_steps)


@pytest.mark.parametrize("lookahead", [0, 4])
def test_an_adaptive_plan_evens_times_out_and_starts_at_one_step_everywhere(lookahead: int) -> None:
    """Rank 2 needs three times as long for a sample; steps are drawn ahead of training."""

    def work(transport: LocalTransport) -> list[Plan]:
        clock = Clock()
        balancer = loft.Balancer(96, "loft", interval=8, transport=transport, clock=clock)
        per_sample_s = 3e-3 if transport.rank == 2 else 1e-3
        drawn = [balancer.plan_at(step) for step in range(lookahead)]
        for step in range(120):
            drawn.append(balancer.plan_at(step + lookahead))
            plan = drawn[step]
            assert plan == balancer.plan_at(step), "a plan came into force behind what is drawn"
            clock.now += 1e-3
            begin(balancer, StepSizes(plan.plan_id, step, plan.sizes), fetch_s=1e-3)
            balancer.take_step()
            clock.now += 5e-3 + per_sample_s * plan.sizes[transport.rank]
            balancer.gradient_arrived(blocked_s=0.0)
            balancer.computing_ended()
            slowest = max(
                (3e-3 if rank == 2 else 1e-3) * size for rank, size in enumerate(plan.sizes)
            )
            waited_s = slowest - per_sample_s * plan.sizes[transport.rank]
            clock.now += waited_s
            waits.add(waited_s)
            balancer.step_ended()
        return balancer.history

    histories = run_ranks(4, work)
    assert all(history == histories[0] for history in histories)
    sizes = histories[0][-1].sizes
    assert len(histories[0]) > 1
    assert sum(sizes) == 96
    assert 8 <= sizes[2] <= 12
    assert max(sizes) - min(size for rank, size in enumerate(sizes) if rank != 2) <= 4


def test_an_interval_too_short_for_a_plan_is_refused() -> None:
    with pytest.raises(ArgumentError, match="interval=2 is too short"):
        alone(8, "loft", interval=2)


def exchanges_of(step_s: float, num_steps: int) -> list[int]:
    """Return the steps after which times were exchanged, at the default interval."""

    def work(transport: LocalTransport) -> list[int]:
        clock = Clock()
        balancer = loft.Balancer(8, "report", transport=transport, clock=clock)
        found: list[int] = []
        seen: object = ()
        for step in range(num_steps):
            clock.now += step_s * (1 + transport.rank)  # clocks differ: rank 0's decides
            begin(balancer, StepSizes(0, step, balancer.plan.sizes))
            balancer.take_step()
            clock.now += 0.0
            balancer.gradient_arrived(blocked_s=0.0)
            balancer.step_ended()
            if balancer.times is not seen:
                seen = balancer.times
                found.append(step + 1)
        return found

    first, second = run_ranks(2, work)
    assert first == second
    return first


def test_an_interval_is_20_steps_and_30_seconds_by_default() -> None:
    assert exchanges_of(step_s=0.5, num_steps=200) == [20, 80, 140, 200]
    assert exchanges_of(step_s=10.0, num_steps=70) == [20, 40, 60]


def test_steps_that_nobody_times_are_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    """A sampler of ours behind a foreign loader, without ``balancer.step``."""
    balancer = alone(8, "loft", interval=4)
    for step in range(40):
        balancer.push_sizes(StepSizes(0, step, (8,)))
        balancer.take_step()
        balancer.step_ended()
    said = [record.getMessage() for record in caplog.records]
    assert [text[:44] for text in said] == ["no step has been timed in the first 8, so si"]
    assert "with balancer.step(num_samples)" in said[0]


def test_batches_without_a_gradient_are_told_with_the_way_out() -> None:
    balancer = loft.Balancer(8, "report", transport=LocalWorld(1).transport(0))
    for _ in range(60):
        with balancer.step(8):
            pass
    assert "60 batches have gone out, and no gradient has come" in balancer.explain()
    assert "loft.attach(optimizer, balancer)" in balancer.explain()
