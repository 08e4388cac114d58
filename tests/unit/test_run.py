"""``loft-hvd doctor --run``: when two ranks count as right."""

from __future__ import annotations

import time

import pytest

from loft_hvd.doctor import run as doctor_run
from loft_hvd.doctor.inspect import HorovodBuild
from loft_hvd.doctor.run import run_check

_BOTH = HorovodBuild("0.28.1", ("PyTorch",), ("MPI", "Gloo"), ("MPI", "Gloo"))
_SAYS = "loft_hvd: the robust all-reduce is right on rank"


@pytest.mark.parametrize(
    ("shell", "is_right"),
    [
        (f"echo '{_SAYS} 0 of 2'; echo '{_SAYS} 1 of 2'", True),
        (f"echo '{_SAYS} 0 of 2'; echo '{_SAYS} 1 of 2'; exit 1", False),
        (f"echo '{_SAYS} 0 of 2'", False),
        ("echo 'wrong on rank 1 of 2'", False),
        ("exit 0", False),
    ],
)
def test_run_is_right_only_when_both_ranks_say_so_and_exit_well(
    monkeypatch: pytest.MonkeyPatch, shell: str, is_right: bool
) -> None:
    monkeypatch.setattr(doctor_run, "launch_command", lambda *_, **__: ("sh", "-c", shell))
    assert run_check(_BOTH).is_right is is_right


def test_run_that_hangs_is_ended_and_not_right(monkeypatch: pytest.MonkeyPatch) -> None:
    command = ("sh", "-c", "sleep 60 & sleep 60")
    monkeypatch.setattr(doctor_run, "launch_command", lambda *_, **__: command)
    start = time.monotonic()
    result = run_check(_BOTH, timeout_s=0.2)
    assert not result.is_right
    assert "not done within 0.2 s" in result.output
    assert time.monotonic() - start < 30
