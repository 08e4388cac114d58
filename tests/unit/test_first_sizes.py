"""A run starts from sizes that somebody knows, where they are of these ranks."""

from __future__ import annotations

import json
import logging
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import loft_hvd as loft
from loft_hvd.balance.controller import Controller
from loft_hvd.balance.first_sizes import fit_first_sizes, sizes_by_memory
from loft_hvd.balance.interval import COLUMNS, COMPUTE, LOCAL, SIZE, screen
from loft_hvd.balance.limits import own_device
from loft_hvd.config import config
from loft_hvd.errors import ArgumentTypeError, PlanError
from loft_hvd.transport.local import LocalTransport, LocalWorld, run_ranks
from tests.support.live import SECONDS, Run


def write(path: Path, hosts: Any, total: int = 24) -> Path:
    path.write_text(json.dumps({"global_batch_size": total, "hosts": hosts}))
    return path


def test_a_file_s_sizes_go_to_the_ranks_of_their_hosts(tmp_path: Path) -> None:
    path = write(tmp_path / "s.json", {"a": [12, 4], "b.lab": [8]})
    assert fit_first_sizes(path, ["a", "a", "b.lab"], 24) == (12, 4, 8)
    assert fit_first_sizes(path, ["b", "a.lab", "a.lab"], 24) == (8, 12, 4)
    assert fit_first_sizes(None, ["a"], 24) == ()


@pytest.mark.parametrize(
    ("hosts", "total", "match"),
    [
        (["a", "a", "c"], 24, r"rank 2 is on host 'c', of which .* has none sizes; .*\['a', 'b'\]"),
        (["a", "a", "a"], 24, "rank 2 is on host 'a', of which .* has no more sizes"),
        (["a", "b"], 24, "are 2 sizes for 20 samples, but there are 2 ranks"),
        (["a", "a", "b"], 25, "are 3 sizes for 24 samples, but .*global_batch_size=25"),
    ],
)
def test_sizes_of_other_ranks_do_not_fit(
    tmp_path: Path, hosts: list[str], total: int, match: str
) -> None:
    path = write(tmp_path / "s.json", {"a": [12, 4], "b": [8]})
    with pytest.raises(PlanError, match=match):
        fit_first_sizes(path, hosts, total)


@pytest.mark.parametrize(
    "text",
    ["", "[1]", '{"hosts": {}}', '{"global_batch_size": 24, "hosts": {"a": [-1]}}', "[" * 100_000],
)
def test_a_file_that_holds_no_sizes_is_a_plan_error(tmp_path: Path, text: str) -> None:
    (tmp_path / "s.json").write_text(text)
    with pytest.raises(PlanError, match=r"first_sizes"):
        fit_first_sizes(tmp_path / "s.json", ["a"], 24)
    with pytest.raises(PlanError, match="cannot be read"):
        fit_first_sizes(tmp_path / "none.json", ["a"], 24)


def test_every_rank_starts_from_rank_0_s_sizes(tmp_path: Path) -> None:
    path = write(tmp_path / "s.json", {own_device()[0]: [12, 4, 8]})

    def work(transport: LocalTransport) -> tuple[int, ...]:
        first = path if transport.rank == 0 else None
        return loft.Balancer(24, first_sizes=first, transport=transport).plan.sizes

    assert run_ranks(3, work) == [(12, 4, 8)] * 3


def test_the_first_steps_are_as_short_as_settled_ones() -> None:
    """Rank 1 takes three times as long a sample, so that 48 and 16 of 64 are best."""

    def work(transport: LocalTransport, first: list[int] | None) -> list[float]:
        run = Run(transport, first_sizes=first)
        for _ in range(200):
            run.step()
        return [max(np.array(sizes) * SECONDS) for sizes in run.sizes]

    known, equal = (run_ranks(2, partial(work, first=first))[0] for first in ([47, 17], None))
    settled_s = np.mean(known[100:])
    assert settled_s == pytest.approx(0.48, rel=0.02)
    assert np.mean(known[:100]) <= 1.05 * settled_s
    assert np.mean(equal[:100]) > 1.1 * settled_s


def test_the_environment_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "s.json", {own_device()[0]: [24]})
    monkeypatch.setenv("LOFT_HVD_FIRST_SIZES", str(path))
    config.cache_clear()
    try:
        transport = LocalWorld(1).transport(0)
        assert loft.Balancer(24, transport=transport).plan.sizes == (24,)
    finally:
        monkeypatch.undo()
        config.cache_clear()


def test_sizes_that_do_not_fit_leave_equal_ones_with_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def work(transport: LocalTransport) -> tuple[int, ...]:
        return loft.Balancer(24, first_sizes=[20, 8], transport=transport).plan.sizes

    with caplog.at_level(logging.WARNING):
        assert run_ranks(2, work) == [(12, 12)] * 2
    (told,) = [each.message for each in caplog.records if "first_sizes" in each.message]
    assert told.endswith("the run starts with equal sizes")


def test_only_a_policy_that_changes_sizes_takes_them() -> None:
    def work(transport: LocalTransport) -> tuple[int, ...]:
        return loft.Balancer(24, "report", first_sizes=[20, 4], transport=transport).plan.sizes

    assert run_ranks(2, work) == [(12, 12)] * 2


def test_what_is_no_list_of_counts_is_refused() -> None:
    with pytest.raises(ArgumentTypeError, match=r"first_sizes=\[1.5\]"):
        loft.Balancer(
            24,
            first_sizes=[1.5],  # type: ignore[list-item] # what is tested
            transport=LocalWorld(1).transport(0),
        )


def test_first_sizes_beyond_a_cap_become_the_nearest_legal_ones() -> None:
    controller = Controller(100, 2, max_batch=[60, None], first_sizes=(90, 10))
    assert controller.plan.sizes == (60, 40)
    assert Controller(96, 2, grain=8, first_sizes=(83, 13)).plan.sizes == (88, 8)


def test_a_rank_grows_from_its_first_size_not_from_the_equal_one() -> None:
    """Rank 0 is so fast that it should have nearly all; equal sizes would let it have 50."""
    controller = Controller(100, 4, first_sizes=(76, 8, 8, 8))
    for step in range(10, 60, 10):
        sizes = np.array(controller.plan.sizes)
        rows = np.zeros((4, len(COLUMNS)))
        rows[:, SIZE] = rows[:, LOCAL] = sizes
        rows[:, COMPUTE] = np.array([1e-4, 1e-2, 1e-2, 1e-2]) * sizes
        step_s = float(rows[:, COMPUTE].max())
        controller.observe(screen(rows, step=step, sizes=sizes.tolist(), step_s=step_s))
        controller.decide(step + 4)
    assert controller.plan.sizes[0] > 90


@pytest.mark.parametrize(
    ("memory", "sizes"),
    [
        ((24, 24, 24), ()),
        ((80, 79, 76), ()),  # of one kind
        ((24, 0, 12), ()),  # not known of one
        ((24, 24, 12), (40, 40, 20)),
        ((96, 1, 3), (95, 2, 3)),
    ],
)
def test_sizes_follow_memory_where_it_is_unequal(
    memory: tuple[int, ...], sizes: tuple[int, ...]
) -> None:
    assert sizes_by_memory(memory, 100, min_batch=2) == sizes


def test_memory_that_models_and_others_hold_is_no_room_for_samples(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The model takes 6 bytes of each rank's 24 and 12, and somebody else 3 of the second."""
    told = {
        "is_available": lambda: True,
        "current_device": lambda: 0,
        "get_device_properties": lambda _: SimpleNamespace(name="GPU", total_memory=24),
        "mem_get_info": lambda: (16, 24),  # torch holds 8, of which 2 are unused
        "memory_reserved": lambda: 8,
        "memory_allocated": lambda: 6,
    }
    for name, call in told.items():
        monkeypatch.setattr(torch.cuda, name, call)
    assert own_device()[1:] == ("GPU", True, 18)
    assert sizes_by_memory((18, 12 - 6 - 3), 21, min_batch=1) == (18, 3)


@given(
    memory=st.lists(st.integers(1, 100), min_size=2, max_size=6),
    fixed=st.floats(0, 0.95),
    share=st.integers(1, 50),
)
def test_sizes_by_memory_fit_wherever_equal_ones_do(
    memory: list[int], fixed: float, share: int
) -> None:
    total = share * len(memory)
    sizes = sizes_by_memory(memory, total, min_batch=1)
    per_sample = (1 - fixed) * min(memory) / share  # an equal share just fits the least memory
    for size, room in zip(sizes, memory, strict=bool(sizes)):
        # A size is rounded up by less than a sample.
        assert size < (room - fixed * min(memory)) / per_sample + 1 + 1e-9
