"""A launcher's ranks that an engine has not connected never train a model each, without a word."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.launch import launch
from tests.support.marks import long_first

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(90)]

HOROVOD = """
import horovod.torch as hvd, torch, loft_hvd as loft
hvd.init()
model = torch.nn.Linear(2, 1)
loft.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), rule=loft.Median())
print(f"has finished, one of {hvd.size()}\\n", end="", flush=True)
"""
TORCH = """
import sys, torch, torch.distributed as dist, loft_hvd as loft
mine = sys.argv[1:] == ["alone"]
if mine:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
else:
    dist.init_process_group("gloo")
loft.ddp_hook(loft.Median())
print(f"has finished, one of {dist.get_world_size()}\\n", end="", flush=True)
"""


@pytest.mark.parametrize(
    ("script", "arguments", "launcher", "says"),
    [
        (HOROVOD, [], "torchrun", "it reads nothing of torchrun's; start `horovodrun -np 3"),
        pytest.param(
            TORCH, ["alone"], "torchrun", "torch.distributed connects 1", marks=pytest.mark.long
        ),
        (TORCH, ["alone"], "mpi", "mpirun has started this process as one of 3 ranks"),
    ],
    ids=["torchrun-horovod", "torchrun-alone", "mpirun-alone"],
)
def test_an_error_names_the_launcher_and_the_way_out(
    script: str,
    arguments: list[str],
    launcher: str,
    says: str,
    tmp_path: Path,
) -> None:
    job = tmp_path / "train.py"
    job.write_text(script, encoding="utf-8")
    done = launch(3, [str(job), *arguments], launcher=launcher, timeout_s=60)
    assert done.returncode not in (0, None), done.output[-4000:]
    assert "has finished" not in done.output
    assert says in done.output, done.output[-4000:]


@pytest.mark.long  # every other test of ranks says so, too
@pytest.mark.parametrize(
    ("script", "launcher"), long_first([(HOROVOD, "mpi"), (HOROVOD, "gloo"), (TORCH, "torchrun")])
)
def test_ranks_that_meet_are_not_refused(script: str, launcher: str, tmp_path: Path) -> None:
    job = tmp_path / "train.py"
    job.write_text(script, encoding="utf-8")
    done = launch(3, [str(job)], launcher=launcher, timeout_s=60)
    assert done.succeeded(3).count("has finished, one of 3") == 3
