"""Laws that hold for every policy, and policies by name."""

from __future__ import annotations

import numpy as np
import pytest

from loft_hvd.balance.controller import Controller
from loft_hvd.balance.latency import StepModel
from loft_hvd.balance.policies import POLICIES, make_policy
from loft_hvd.errors import ArgumentError, PlanError
from tests.support.clusters import drive


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_keeps_the_global_batch_and_the_bounds(policy: str) -> None:
    rng = np.random.default_rng(1)
    model = StepModel.build(
        5, compute_s=rng.uniform(1e-3, 5e-3, 5), remote_s=rng.uniform(0, 5e-3, 5), hits=10.0
    )
    controller = Controller(200, 5, policy, min_batch=4, max_batch=70)
    plans = np.array(drive(lambda _: model, controller, intervals=25, seed=0))
    assert (plans.sum(axis=1) == 200).all()
    assert plans.min() >= 4
    assert plans.max() <= 70
    assert policy in controller.explain() or policy.startswith("lbbsp-cpu:")


def test_a_wrong_policy_names_those_there_are() -> None:
    with pytest.raises(ArgumentError, match=r"'lofty' is not known.*'lbbsp-gpu'"):
        make_policy("lofty")
    with pytest.raises(PlanError, match="adding up to global_batch_size=10"):
        Controller(10, 2, [4, 4])


def test_fixed_sizes_stay() -> None:
    model = StepModel.build(4, compute_s=np.array([1, 2, 3, 4]) * 1e-3)
    plans = drive(lambda _: model, Controller(21, 4, [2, 2, 2, 15]), intervals=5, seed=0)
    assert set(plans) == {(2, 2, 2, 15)}
