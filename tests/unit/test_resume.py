"""What of a saved state counts when the run that loads it was set up in another way."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest

import loft_hvd as loft
from loft_hvd.balance.controller import Controller
from loft_hvd.balance.limits import Device, RankLimits
from loft_hvd.balance.resume import first_plans, make_controller
from loft_hvd.errors import PlanError
from loft_hvd.transport.local import LocalTransport, run_ranks
from tests.support.plans import make_options

STATE: dict[str, Any] = {
    "num_steps": 500,
    "next_step": 500,
    "plans": [[0, 0, 32, 32], [1, 480, 48, 16]],
    "controller": None,
    "policy": "loft",
}


def load(transport: LocalTransport, total: int, policy: Any, **given: Any) -> loft.Balancer:
    balancer = loft.Balancer(total, policy, transport=transport, **given)
    balancer.load_state_dict(json.loads(json.dumps(STATE)))
    return balancer


@pytest.mark.parametrize(
    ("total", "policy", "given", "sizes", "change"),
    [
        (64, "loft", {}, (48, 16), None),
        (64, "uniform", {}, (32, 32), "policy was 'loft' and is 'uniform'"),
        (64, "report", {}, (32, 32), "policy was 'loft' and is 'report'"),
        (64, [16, 48], {}, (16, 48), "policy was 'loft' and is '[16, 48]'"),
        (32, "loft", {}, (16, 16), "global_batch_size was 64 and is 32"),
        (128, "loft", {}, (64, 64), "global_batch_size was 64 and is 128"),
        (64, "loft", {"max_batch": 40}, (32, 32), "rank 0 had 48 samples, but its cap is 40"),
    ],
)
def test_sizes_of_another_setting_start_afresh_with_one_warning(
    total: int,
    policy: Any,
    given: Any,
    sizes: tuple[int, ...],
    change: str | None,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def work(transport: LocalTransport) -> tuple[int, ...]:
        balancer = load(transport, total, policy, **given)
        own = balancer.plan_at(balancer.next_step).sizes
        assert balancer.local_batch_size == own[transport.rank]
        assert balancer.next_step == 500
        return own

    with caplog.at_level(logging.WARNING):
        assert run_ranks(2, work) == [sizes] * 2
    said = [record.getMessage() for record in caplog.records]
    assert said == ([] if change is None else [f"load_state_dict: sizes start afresh: {change}"])


@pytest.mark.parametrize(
    ("total", "policy", "wrong"),
    [
        (32, "lbbsp-cpu:ema", "global_batch_size=64 instead of 32"),
        (64, "lbbsp-cpu", "policy='lbbsp-cpu:ema' instead of 'lbbsp-cpu'"),
        (64, "lbbsp-cpu:busy", "policy='lbbsp-cpu:ema' instead of 'lbbsp-cpu:busy'"),
    ],
)
def test_a_controller_refuses_the_state_of_another(total: int, policy: str, wrong: str) -> None:
    state = Controller(64, 2, "lbbsp-cpu:ema").state_dict()
    with pytest.raises(PlanError, match=wrong):
        Controller(total, 2, policy).load_state_dict(state)


@pytest.mark.parametrize(("policy", "sizes"), [("report", (10,) * 4), ("loft", (16, 8, 8, 8))])
def test_only_adaptive_policies_look_at_the_grain(policy: str, sizes: tuple[int, ...]) -> None:
    options = make_options(40, 4, policy=policy, grain=8)
    limits = RankLimits.of(options, (Device("node", 0, "Tesla T4", True),) * 4, {})
    (plan,) = first_plans(options, limits, make_controller(options, limits))
    assert plan.sizes == sizes
