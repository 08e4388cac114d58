"""What follows from the ranks' devices: grain, number of sizes, caps, and what warm-up does."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import loft_hvd as loft
from loft_hvd.balance.controller import Controller
from loft_hvd.balance.interval import COLUMNS, COMPUTE, LOCAL, SIZE, screen
from loft_hvd.balance.limits import Device, RankLimits, meet
from loft_hvd.balance.plan import StepSizes
from loft_hvd.balance.resume import first_plans
from loft_hvd.errors import ArgumentError, ArgumentTypeError, PlanError
from loft_hvd.transport.local import LocalTransport, LocalWorld, run_ranks
from tests.support.plans import Wandering, make_options

T4 = Device("node1", 0, "Tesla T4", True)
A100 = Device("node2", 0, "NVIDIA A100-SXM4-40GB", True)
EPYC = Device("node3", 0, "CPU AMD EPYC 7B13", False)


@pytest.mark.parametrize(
    ("devices", "total", "given", "grain", "max_sizes"),
    [
        ((EPYC, EPYC), 256, {}, 1, None),
        ((T4, EPYC), 256, {}, 8, 8),
        ((T4, A100), 12, {}, 2, 8),  # equal shares of 6 stay equal
        ((T4, A100), 6, {}, 1, 8),
        ((T4,) * 8, 32, {}, 4, 8),
        ((T4,) * 4, 100, {}, 1, 8),
        ((T4, A100), 256, {"grain": 2, "max_sizes": 99}, 2, 99),
        ((EPYC, EPYC), 256, {"grain": 16, "max_sizes": 3}, 16, 3),
    ],
)
def test_grain_and_number_of_sizes_follow_the_devices_unless_asked(
    devices: tuple[Device, ...], total: int, given: Any, grain: int, max_sizes: int | None
) -> None:
    limits = RankLimits.of(make_options(total, len(devices), **given), devices, {})
    assert (limits.grain, limits.max_sizes) == (grain, max_sizes)


@pytest.mark.parametrize(
    ("max_batch", "found", "caps"),
    [
        (None, {}, (None, None, None)),
        (64, {}, (64, 64, 64)),
        ([64, None, 8], {}, (64, None, 8)),
        ({"t4": 64, "A100": 256, "CPU": None}, {}, (64, 256, None)),
        ({"T4": 64, "A100": 256, "A100-SXM4-40": 128, "EPYC": 8}, {}, (64, 128, 8)),
        ([64, 200, None], {"node1/0": 80, "node2/0": 96, "node3/0": 5, "node9/0": 1}, (64, 96, 5)),
    ],
)
def test_caps_are_the_least_of_what_was_given_and_found(
    max_batch: Any, found: dict[str, int], caps: tuple[int | None, ...]
) -> None:
    assert RankLimits.of(make_options(max_batch=max_batch), (T4, A100, EPYC), found).caps == caps


def test_a_device_without_a_name_in_max_batch_is_named_with_its_rank() -> None:
    with pytest.raises(PlanError, match=r"rank 2 on node3 has the device 'CPU AMD EPYC 7B13'"):
        RankLimits.of(make_options(max_batch={"T4": 64, "A100": 128}), (T4, A100, EPYC), {})


def test_a_list_of_caps_for_another_number_of_ranks_is_refused() -> None:
    with pytest.raises(ArgumentError, match="2 entries for 3 ranks"):
        RankLimits.of(make_options(max_batch=[64, 64]), (T4, A100, EPYC), {})


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ({"max_batch": 0}, ArgumentError),
        ({"max_batch": [4, 2.5]}, ArgumentTypeError),
        ({"max_batch": {"T4": -1}}, ArgumentError),
        ({"max_sizes": 0}, ArgumentError),
        ({"on_resize": "grow"}, ArgumentError),
    ],
)
def test_limits_are_checked(given: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error, match=next(iter(given))):
        make_options(**given)


def test_ranks_tell_each_other_their_devices_and_take_caps_from_rank_0() -> None:
    def work(transport: LocalTransport) -> RankLimits:
        mine = meet(transport, make_options(), found={})
        keys = [device.key for device in mine.devices]
        assert len(set(keys)) == 3
        found = {keys[1]: 40} if transport.rank == 0 else {keys[1]: 50, keys[2]: 60}
        return meet(transport, make_options(), found=found)

    assert [limits.caps for limits in run_ranks(3, work)] == [(None, 40, None)] * 3


def test_equal_sizes_keep_within_caps() -> None:
    balancer = loft.Balancer(8, "uniform", max_batch=8, transport=LocalWorld(1).transport(0))
    assert balancer.plan.sizes == (8,)
    given = make_options(100, policy="uniform", max_batch=[10, None, None])
    limits = RankLimits.of(given, (T4, T4, T4), {})
    assert first_plans(given, limits, None)[0].sizes == (10, 45, 45)


def test_sizes_that_a_rank_could_not_hold_before_are_refused() -> None:
    given = make_options(100, policy=[50, 25, 25])
    limits = RankLimits.of(given, (T4, A100, EPYC), {"node1/0": 40})
    with pytest.raises(PlanError, match=r"50 samples, but its cap is 40.*runs in log_dir"):
        first_plans(given, limits, None)


def test_a_global_batch_beyond_all_caps_says_how_many_passes_would_do() -> None:
    with pytest.raises(PlanError, match="backward_passes_per_step=2"):
        loft.Balancer(100, "loft", max_batch=60, transport=LocalWorld(1).transport(0))


def observe(controller: Controller, seconds: list[float], step: int) -> None:
    """Let a controller see an interval in which ranks took so long for a sample."""
    sizes = controller.plan.sizes
    rows = np.zeros((len(sizes), len(COLUMNS)))
    rows[:, SIZE] = rows[:, LOCAL] = sizes
    rows[:, COMPUTE] = np.array(seconds) * sizes
    step_s = float(rows[:, COMPUTE].max())
    controller.observe(screen(rows, step=step, sizes=sizes, step_s=step_s))


@pytest.mark.parametrize("policy", ["loft", "lbbsp-cpu", "lbbsp-gpu"])
def test_in_warm_up_only_ranks_with_a_known_cap_grow(policy: str) -> None:
    controller = Controller(96, 3, policy, max_batch=[None, 60, None])
    controller.warm_up([False, True, False])
    observe(controller, [1e-3, 1e-3, 4e-3], 4)
    plan = controller.decide(8)
    assert plan is not None, "rank 1 can take what rank 2 is too slow for"
    assert plan.sizes[0] <= 32
    assert 32 < plan.sizes[1] <= 60
    for step in (20, 30, 40, 50):
        observe(controller, [1e-3, 1e-3, 4e-3], step)
        controller.decide(step + 4)
    assert controller.plan.sizes[0] > 32


def test_in_warm_up_nothing_moves_where_no_cap_is_known() -> None:
    controller = Controller(96, 3, "lbbsp-cpu")
    controller.warm_up([False] * 3)
    observe(controller, [1e-3, 1e-3, 4e-3], 4)
    assert controller.decide(8) is None
    assert "sizes stay: in proportion to predicted speeds; warm-up: no" in controller.explain()
    observe(controller, [1e-3, 1e-3, 4e-3], 12)
    assert controller.decide(16) is not None
    assert "sizes stay" not in controller.explain()


def run(transport: LocalTransport, **options: Any) -> loft.Balancer:
    """Take 200 steps under a policy that changes sizes at every chance."""
    balancer = loft.Balancer(24, Wandering(24), interval=4, transport=transport, **options)
    for step in range(200):
        plan = balancer.plan_at(step)
        sizes = StepSizes(plan.plan_id, step, plan.sizes)
        own = plan.sizes[transport.rank]
        balancer.begin_batch(sizes, fetch_s=1e-3, stall_s=1e-3, local=own, remote=0)
        balancer.take_step()
        balancer.gradient_arrived(blocked_s=0.0)
        balancer.step_ended()
    return balancer


@pytest.mark.parametrize("max_sizes", [1, 2, 3])
def test_no_rank_has_more_sizes_in_a_run_than_asked(max_sizes: int) -> None:
    def work(transport: LocalTransport) -> list[int]:
        history = run(transport, max_sizes=max_sizes).history
        return [len(set(column)) for column in zip(*(plan.sizes for plan in history), strict=True)]

    counts = run_ranks(3, work)
    assert all(max(of_rank) <= max_sizes for of_rank in counts)
    assert max(counts[0]) == max_sizes


def test_what_a_policy_wants_beyond_a_cap_is_brought_within_it() -> None:
    def work(transport: LocalTransport) -> list[int]:
        return [max(plan.sizes) for plan in run(transport, max_batch=9).history]

    largest = run_ranks(3, work)
    assert largest == [largest[0]] * 3
    assert set(largest[0]) == {8, 9}


def test_a_plan_beyond_a_cap_is_refused_on_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks trust no plan: here rank 0's controller has lost its own check."""
    monkeypatch.setattr(Controller, "_within_caps", lambda _, proposal: proposal)

    def work(transport: LocalTransport) -> None:
        with pytest.raises(PlanError, match=r"rank \d should compute 11 samples, but its cap is 9"):
            run(transport, max_batch=9)

    run_ranks(3, work)
