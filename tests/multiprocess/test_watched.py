"""``loft.watch`` on plain DDP names whom it must: planted culprits, and nobody in honest runs."""

from __future__ import annotations

import json
import re

import pytest

from loft_hvd.balance.explain import CAUSES
from tests.support.launch import launch

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(280)]
JOB = "tests/multiprocess/jobs/watched.py"

Case = tuple[str, str, int]
_HOWS = ("sleep", "spin")
PLANTED: list[Case] = [
    *((where, _HOWS[r % 2], r) for where in ("fetch", "forward", "backward") for r in range(4)),
    *(("queue", "spin", r) for r in range(4)),
    ("turns fetch", "sleep", 0),
    ("turns forward", "spin", 0),
    ("turns backward", "sleep", 0),
    ("turns fetch", "spin", 0),
]
HONEST: list[Case] = [("", "", 0)] * 10


def _named(sentences: list[str]) -> list[str]:
    """Return who is named for what, in the words of ``wanted``."""
    found = []
    for said in sentences:
        costs = re.match(r"Ranks? ([\d ]+) costs? \d+% of a step by (.*?)( together)?: ", said)
        turns = re.match(r"Ranks ([\d ]+) are slow by turns: .* takes long by (.*), which", said)
        if (match := costs or turns) is not None:
            found.append(f"{'turns ' if turns else ''}{match[1]} {match[2]}")
    return found


def _wanted(where: str, slow: int) -> list[str]:
    if where.startswith("turns "):
        return [f"turns 0 1 2 3 {CAUSES[where.removeprefix('turns ')]}"]
    return [f"{slow} {CAUSES[where]}"] if where else []


def _check(cases: list[Case]) -> None:
    done = launch(4, [JOB, json.dumps(cases)], launcher="torchrun", timeout_s=250)
    found = [json.loads(each) for each in re.findall(r"CASE (\{.*\})", done.succeeded(4))]
    assert [tuple(each["case"]) for each in found] == cases
    wrong = [
        each
        for each in found
        if _named(each["verdict"]) != _wanted(each["case"][0], each["case"][2])
    ]
    assert not wrong, "\n".join(f"{each['case']}: {each['verdict']}" for each in wrong)


def test_some_culprits_are_named_and_nobody_in_an_honest_run() -> None:
    _check(
        [
            ("fetch", "spin", 1),
            ("backward", "sleep", 3),
            ("queue", "spin", 2),
            ("turns forward", "sleep", 0),
            HONEST[0],
        ]
    )


@pytest.mark.long
def test_all_planted_culprits_are_named() -> None:
    _check(PLANTED)


@pytest.mark.long
def test_nobody_is_named_in_honest_runs() -> None:
    _check(HONEST)
