"""Every rank runs every test, and all reach one verdict, so that none waits for another."""

from __future__ import annotations

import os
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
import torch

IS_LAUNCHED = any(name in os.environ for name in ("HOROVOD_RANK", "OMPI_COMM_WORLD_RANK"))


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    return None if IS_LAUNCHED else True


if IS_LAUNCHED:
    import horovod.torch as hvd

    hvd.init()
    torch.set_num_threads(1)

    @pytest.hookimpl(wrapper=True)
    def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, Any, Any]:
        """Fail a test on every rank when it fails on one."""
        error: BaseException | None = None
        result = None
        try:
            result = yield
        except BaseException as caught:
            error = caught
        is_skip = isinstance(error, pytest.skip.Exception)
        mine = torch.tensor([0 if error is None else (1 if is_skip else 2)])
        verdicts = hvd.allgather(mine, name=f"verdict.{pyfuncitem.nodeid}").tolist()
        if error is not None:
            raise error
        if any(verdicts):
            ranks = [rank for rank, verdict in enumerate(verdicts) if verdict]
            raise AssertionError(f"passed here, but failed or skipped on ranks {ranks}")
        return result
