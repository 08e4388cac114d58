"""Plans that are written down, and repeated: by file or run log, at any interval, on every rank."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import loft_hvd as loft
from loft_hvd.balance.controller import Controller
from loft_hvd.errors import MismatchError, PlanError
from loft_hvd.transport.local import LocalTransport, run_ranks
from tests.support.live import Run

PLANS = [(0, [32, 32]), (23, [48, 16]), (43, [40, 24]), (44, [44, 20])]


def write(path: Path, plans: list[tuple[Any, Any]]) -> Path:
    lines = [json.dumps({"first_step": at, "sizes": sizes}) for at, sizes in plans]
    path.write_text("\n".join(lines) + "\n")
    return path


def sizes_of_steps(policy: Any, *, num_steps: int, **given: Any) -> list[list[tuple[int, ...]]]:
    def work(transport: LocalTransport) -> list[tuple[int, ...]]:
        run = Run(transport, policy=policy, **given)
        for _ in range(num_steps):
            run.step()
        return run.sizes

    return run_ranks(2, work)


@pytest.mark.parametrize("interval", [3, 20, 30, 1000])
def test_every_plan_is_repeated_from_its_step_at_any_interval(
    interval: int, tmp_path: Path
) -> None:
    policy = loft.Replay(write(tmp_path / "plans.jsonl", PLANS))
    sizes, others_sizes = sizes_of_steps(policy, num_steps=50, interval=interval)
    assert sizes == others_sizes
    changes = [step for step in range(1, 50) if sizes[step] != sizes[step - 1]]
    assert changes == [23, 43, 44]
    assert [sizes[step] for step in (0, 23, 43, 44)] == [tuple(of_plan) for _, of_plan in PLANS]


@pytest.mark.parametrize("kind", ["plans", "log"])
def test_a_run_is_repeated_from_what_it_wrote(kind: str, tmp_path: Path) -> None:
    def work(transport: LocalTransport) -> list[tuple[int, ...]]:
        run = Run(transport, log_dir=tmp_path / "log")
        for _ in range(70):
            run.step()
        run.balancer.write_plans(tmp_path / f"plans-{transport.rank}.jsonl")
        return run.sizes

    sizes = run_ranks(2, work)[0]
    assert not (tmp_path / "plans-1.jsonl").exists()
    (log,) = (tmp_path / "log").glob("*.jsonl")
    with log.open("a") as file:
        file.write('{"kind": "pl')  # cut off by a crash
    policy = loft.Replay(tmp_path / "plans-0.jsonl" if kind == "plans" else log)
    assert sizes_of_steps(policy, num_steps=70) == [sizes] * 2
    assert len(set(sizes)) > 1


def test_a_repeated_run_goes_on_where_it_was_saved(tmp_path: Path) -> None:
    path = write(tmp_path / "plans.jsonl", PLANS)

    def work(transport: LocalTransport) -> list[tuple[int, ...]]:
        run = Run(transport, policy=loft.Replay(path))
        for _ in range(30):
            run.step()
        assert run.balancer.plan.sizes == (48, 16)
        again = Run(
            transport, json.loads(json.dumps(run.balancer.state_dict())), policy=loft.Replay(path)
        )
        for _ in range(20):
            again.step()
        return again.sizes

    assert run_ranks(2, work)[0] == [(48, 16)] * 13 + [(40, 24)] + [(44, 20)] * 6


def test_ranks_with_other_plans_are_named_before_the_first_step(tmp_path: Path) -> None:
    paths = [write(tmp_path / "0.jsonl", PLANS), write(tmp_path / "1.jsonl", PLANS[:1])]

    def work(transport: LocalTransport) -> None:
        with pytest.raises(MismatchError, match=r"plans to repeat differs on ranks \[1\]"):
            loft.Balancer(64, loft.Replay(paths[transport.rank]), transport=transport)

    run_ranks(2, work)


@pytest.mark.parametrize(
    ("plans", "match"),
    [
        ([(100, [32, 32])], r"start at steps \[100\]; one must start at step 0"),
        ([(0, [32, -32])], r"plan 0.sizes\[1\] needs int 0 to .*but got -32.*write_plans"),
        ([(0, [32.0, 32])], r"plan 0.sizes\[0\] needs int, but got 32.0"),
        ([(-1, [32, 32])], "plan 0.first_step needs int 0 to .*but got -1"),
        ([(0, 64)], "plan 0.sizes needs tuple, but got 64"),
        ([], r"start at steps \[\]"),
    ],
)
def test_a_file_without_the_plans_of_a_run_is_refused(
    plans: list[tuple[Any, Any]], match: str, tmp_path: Path
) -> None:
    with pytest.raises(PlanError, match=match):
        loft.Replay(write(tmp_path / "plans.jsonl", plans))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"nowhere.jsonl.*write_plans"):
        loft.Replay(tmp_path / "nowhere.jsonl")


@pytest.mark.parametrize(
    ("later", "match"),
    [([32, 16], "adds? up to 48"), ([32, 16, 16], "one a rank|3 sizes"), ([60, 4], "cap")],
)
def test_plans_of_another_world_batch_or_memory_are_refused_at_the_start(
    later: list[int], match: str, tmp_path: Path
) -> None:
    policy = loft.Replay(write(tmp_path / "plans.jsonl", [(0, [32, 32]), (50, later)]))
    with pytest.raises(PlanError, match=match):
        Controller(64, 2, policy, max_batch=50)

    def work(transport: LocalTransport) -> None:
        with pytest.raises(PlanError, match=match):
            loft.Balancer(64, policy, max_batch=50, transport=transport)

    run_ranks(2, work)
