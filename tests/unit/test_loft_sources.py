"""LOFT is told which ranks share a source: by the user, or by a loader's placement."""

from __future__ import annotations

import re

import numpy as np
import pytest

import loft_hvd as loft
from loft_hvd.balance.controller import Controller
from loft_hvd.balance.interval import COLUMNS, COMPUTE, FETCH, REMOTE, SIZE, STALL, screen
from loft_hvd.errors import PlanError


def fitted_source(policy: loft.Loft, world_size: int) -> list[int]:
    """Show the policy one interval and return what its model takes for shared sources."""
    controller = Controller(8 * world_size, world_size, policy)
    rows = np.zeros((world_size, len(COLUMNS)))
    rows[:, SIZE] = rows[:, REMOTE] = 8
    rows[:, FETCH] = rows[:, STALL] = rows[:, COMPUTE] = 0.1
    controller.observe(screen(rows, step=10, sizes=[8] * world_size, step_s=0.2))
    controller.decide(20)
    assert policy.fit is not None
    found: list[int] = policy.fit.model.source.tolist()
    return found


def test_what_a_loader_says_reaches_the_model() -> None:
    policy = loft.Loft()
    policy.share_sources((0, 0, -1, 1))
    assert fitted_source(policy, 4) == [0, 0, -1, 1]


def test_the_users_word_goes_before_the_loaders() -> None:
    policy = loft.Loft(source=[1, 1, 0])
    policy.share_sources((0, 0, 0))
    assert fitted_source(policy, 3) == [1, 1, 0]


def test_what_was_said_of_another_world_is_forgotten() -> None:
    policy = loft.Loft()
    policy.share_sources((0, 0, -1, 1))
    assert fitted_source(policy, 3) == [-1, -1, -1]


def test_a_source_for_another_world_is_refused() -> None:
    policy = loft.Loft(source=[0, 0, 1, 1])
    Controller(64, 4, policy)
    with pytest.raises(PlanError, match=r"source=.* has 4 entries, but world_size=3"):
        Controller(64, 3, policy)  # as when an elastic world shrinks


def test_explain_says_how_much_better_any_sizes_could_be() -> None:
    policy = loft.Loft(source=[0, 0, 1])
    fitted_source(policy, 3)
    (line,) = (each for each in policy.explain() if "share sources" in each)
    longest, least = (float(each) for each in re.findall(r"([\d.]+) s\b", line))
    assert 0 < least <= longest
    alone = loft.Loft()
    fitted_source(alone, 3)
    assert not any("share sources" in each for each in alone.explain())
