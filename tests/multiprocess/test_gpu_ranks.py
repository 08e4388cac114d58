"""The steps of ``scripts/gpu_check`` that need no GPU to run in part: ranks that train."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from scripts.gpu_check import main

pytestmark = [pytest.mark.multiprocess, pytest.mark.long, pytest.mark.timeout(400)]


@pytest.mark.parametrize("step", ["ddp", "horovod"])
def test_ranks_end_where_one_process_does(step: str, tmp_path: Path) -> None:
    folder = tmp_path / "found"
    main(["--folder", str(folder), "--steps", step])
    (found,) = json.loads((folder / "summary.json").read_text())
    log = (folder / f"0-{step}.log").read_text()
    assert found["result"] in ("passed", "passed in part"), log
    assert "3 ranks on" in log, log
    assert "equal bits" in log, log
