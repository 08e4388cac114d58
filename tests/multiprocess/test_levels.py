"""Two levels on Horovod's process sets, and who was off under a growing loss scale."""

from __future__ import annotations

import pytest

from tests.support.launch import launch

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(200)]

JOBS = "tests.multiprocess.jobs"


@pytest.mark.parametrize(
    ("launcher", "sets"),
    [
        ("gloo", "dynamic"),
        pytest.param("gloo", "listed", marks=pytest.mark.long),
        pytest.param("mpi", "dynamic", marks=pytest.mark.long),
    ],
)
def test_two_levels_over_process_sets_equal_the_definition(launcher: str, sets: str) -> None:
    done = launch(4, ["-m", f"{JOBS}.levels", sets], launcher=launcher, timeout_s=120)
    done.succeeded()
    assert done.output.count(": equal") == 4, done.output[-4000:]


@pytest.mark.long
def test_without_process_sets_the_error_says_how() -> None:
    done = launch(4, ["-m", f"{JOBS}.levels", "none"], timeout_s=120)
    assert done.output.count("refused: over=: Horovod has no process set") == 4, done.output[-4000:]
    assert 'hvd.init(process_sets="dynamic")' in done.output
    assert "HOROVOD_DYNAMIC_PROCESS_SETS=1" in done.output


@pytest.mark.parametrize(
    ("num_steps", "attacked"),
    [
        (150, 2),
        pytest.param(1000, 2, marks=pytest.mark.whole),
        pytest.param(1000, None, marks=pytest.mark.long),
    ],
)
def test_overflow_names_nobody_and_nan_names_its_rank(num_steps: int, attacked: int | None) -> None:
    whom = [] if attacked is None else [str(attacked)]
    done = launch(4, ["-m", f"{JOBS}.scaler", str(num_steps), *whom], timeout_s=180)
    done.succeeded()
    expected = [] if attacked is None else [[attacked]]
    assert f"named {expected}, held {expected}, skipped" in done.output, done.output[-4000:]
    assert "skipped 0 of" not in done.output, "the loss scale never grew too far"
