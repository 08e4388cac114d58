"""Loader processes start, or are started again."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from loft_hvd.data import forks
from loft_hvd.data.forks import sure_fork
from loft_hvd.errors import DataError


class StuckForks:
    """``os.fork`` whose first children never get anywhere."""

    def __init__(self, num_stuck: int) -> None:
        self.num_stuck = num_stuck
        self.pids: list[int] = []
        self._fork: Callable[[], int] = os.fork

    def __call__(self) -> int:
        pid = self._fork()
        if pid == 0 and len(self.pids) < self.num_stuck:
            while True:
                signal.pause()
        self.pids.append(pid)
        return pid


def batches(context: Any) -> list[int]:
    data = TensorDataset(torch.arange(12))
    loader = DataLoader(data, batch_size=4, num_workers=1, multiprocessing_context=context)
    return [int(value) for (batch,) in loader for value in batch]


@pytest.mark.parametrize("num_stuck", [0, 1, 2])
def test_a_loader_process_that_does_not_start_is_started_again(
    num_stuck: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    stuck = StuckForks(num_stuck)
    monkeypatch.setattr(os, "fork", stuck)
    monkeypatch.setattr(forks, "_START_LIMIT_S", 1.0)
    assert batches(sure_fork(None, num_workers=1)) == list(range(12))
    assert len(stuck.pids) == num_stuck + 1
    assert caplog.text.count("did not start") == num_stuck
    for pid in stuck.pids[:num_stuck]:
        with pytest.raises(ProcessLookupError):  # ended and waited for
            os.kill(pid, 0)


def test_too_many_that_do_not_start_are_an_error_with_the_way_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "fork", StuckForks(99))
    monkeypatch.setattr(forks, "_START_LIMIT_S", 0.05)
    process = sure_fork("fork", num_workers=1).Process(target=print)
    with pytest.raises(DataError, match="num_workers=0"):
        process.start()


@pytest.mark.parametrize(("wanted", "num_workers"), [("spawn", 2), ("forkserver", 1), ("fork", 0)])
def test_other_start_methods_are_left_alone(wanted: str, num_workers: int) -> None:
    assert sure_fork(wanted, num_workers=num_workers) is wanted
