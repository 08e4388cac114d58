"""A store's server answers honest requests, refuses all others, and stays small."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Callable

import pytest

pytest.importorskip("pyarrow.flight", reason="the extra [store] is not installed")

from tests.faults import store_requests
from tests.faults.store_requests import MOST_GROWN_BYTES, fuzz_server, grown_bytes
from tests.support.processes import where_shown


def check(num_cases: int, *, seed: int) -> None:
    found = fuzz_server(num_cases, seed=seed)
    assert found.faults == [], "\n".join(found.faults[:3])
    assert found.outcomes["honest: answered"] > num_cases / 20


def test_requests_are_answered_or_refused_and_the_server_stays_small() -> None:
    check(300, seed=0)


@pytest.mark.parametrize(("leak_bytes", "is_found"), [(100, True), (0, False)])
def test_a_leak_shows_in_memory_that_goes_up_and_down(leak_bytes: int, is_found: bool) -> None:
    for seed in range(20):
        rng = random.Random(seed)
        begun = [8_000_000 * look for look in range(1, 4)]  # threads and buffers are made
        # 100 looks in 100,000 cases
        late = [
            24_000_000 + 1000 * leak_bytes * look + rng.randint(0, 4_000_000)
            for look in range(3, 100)
        ]
        assert (grown_bytes(begun + late) > MOST_GROWN_BYTES) == is_found
        assert grown_bytes((begun + late)[::-1]) < MOST_GROWN_BYTES
    assert [grown_bytes([1] * number) for number in (0, 1, 2, 9)] == [0.0] * 4


def test_a_server_that_shows_its_key_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    # Inherited, as a launcher's variables are.
    monkeypatch.setenv("LOFT_TEST_KEY", store_requests._KEY.hex())
    assert fuzz_server(20).faults == ["the key is in the server's /proc/.../environ"]


@pytest.mark.parametrize("form", [bytes.hex, lambda key: f"--key={key.hex().upper()}", repr])
def test_a_key_among_the_arguments_is_found(form: Callable[[bytes], str]) -> None:
    key = bytes(range(1, 65))
    command = [sys.executable, "-c", "print(flush=True); input()", form(key)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()  # it runs: only now it shows its arguments
        shown, others = where_shown(key, process.pid), where_shown(key[::-1], process.pid)
        process.communicate(b"\n")
    assert (shown, others) == (["cmdline"], [])


@pytest.mark.long
def test_requests_are_answered_or_refused_for_long() -> None:
    check(10_000, seed=1)  # 100,000: python -m tests.faults.store_requests --cases 100000
