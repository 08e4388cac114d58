"""``torch.distributed`` as the engine: conformance, ``ddp_hook``, and what a failing rank does."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.launch import launch

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(150)]

JOB = "tests/multiprocess/jobs/torch_ranks.py"
long = pytest.mark.long


whole = pytest.mark.whole


@pytest.mark.parametrize(
    ("whats", "num_ranks"),
    [
        ("conform ddp modes left_out", 3),
        *(pytest.param("conform", n, marks=whole) for n in (1, 2, 4, 6, 7, 8)),
        pytest.param("conform", 5, marks=whole),
        pytest.param("ddp modes refused", 2, marks=long),
        pytest.param("whole auto held_back averaged", 3, marks=long),
        pytest.param("levels watched", 4, marks=long),
        pytest.param("same_data not_finite", 3, marks=long),
        pytest.param("same_data", 8, marks=whole),
    ],
)
def test_torch_ranks(whats: str, num_ranks: int, tmp_path: Path) -> None:
    """Ranks pass one job after the other in one process group."""
    done = launch(1, [JOB, whats, str(num_ranks), str(tmp_path)], launcher="none", timeout_s=140)
    done.succeeded(num_ranks)


@pytest.mark.long
def test_a_ddp_hook_says_once_that_ranks_lie_apart_for_good(tmp_path: Path) -> None:
    done = launch(1, [JOB, "spread", "3", str(tmp_path)], launcher="none", timeout_s=120)
    done.succeeded()
    assert done.output.count("differ lastingly, by") == 1, done.output[-6000:]


@pytest.mark.parametrize(
    ("what", "says"),
    [
        pytest.param("kill", r"bucket 0 \(.*0\.weight.*\).*rank 1 .*has ended without", marks=long),
        pytest.param("freeze", r"PeerError: bucket 0 \(.*0\.weight.*\).*rank 1 .* is", marks=long),
        pytest.param("raise", r"bucket 0 .*rank 1 .*has failed: RuntimeError: rank 1", marks=long),
    ],
)
def test_a_failing_rank_ends_all_and_is_named(what: str, says: str, tmp_path: Path) -> None:
    done = launch(1, [JOB, what, "3", str(tmp_path)], launcher="none", timeout_s=60)
    done.failed(says, within_s=20.0)


@pytest.mark.long
@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("kill", r"rank 1 .*has ended without a word"),
        ("freeze", r"PeerError: bucket 0 \(.*0\.weight.*\).*rank 1 .* is frozen"),
        ("raise", r"rank 1 .*has failed: RuntimeError: rank 1"),
    ],
)
def test_a_rank_that_fails_while_others_wait_inside_a_collective_is_named(
    what: str, says: str, tmp_path: Path
) -> None:
    """As on the device lane, where nothing but the collective itself is waited for."""
    env = {"LOFT_HVD_LANE": "device"}
    done = launch(1, [JOB, what, "3", str(tmp_path)], launcher="none", timeout_s=60, env=env)
    done.failed(says, within_s=20.0)
