"""A store's server answers honest requests, refuses all others, and stays small."""

from __future__ import annotations

import pytest

pytest.importorskip("pyarrow.flight", reason="the extra [store] is not installed")

from tests.faults.store_requests import fuzz_server


def check(num_cases: int, *, seed: int) -> None:
    found = fuzz_server(num_cases, seed=seed)
    assert found.faults == [], "\n".join(found.faults[:3])
    assert found.outcomes["honest: answered"] > num_cases / 20


def test_requests_are_answered_or_refused_and_the_server_stays_small() -> None:
    check(300, seed=0)


@pytest.mark.long
def test_requests_are_answered_or_refused_for_long() -> None:
    check(10_000, seed=1)  # 100,000: python -m tests.faults.store_requests --cases 100000
