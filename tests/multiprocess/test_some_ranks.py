"""An optimizer over a process set of some ranks, wrapped around Horovod's and by itself."""

from __future__ import annotations

import pytest

from tests.support.launch import launch

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(120)]


def test_wrapping_takes_over_the_process_set() -> None:
    done = launch(3, ["tests/multiprocess/jobs/some_ranks.py"], timeout_s=100)
    done.succeeded(3)
