"""Every block of docs/recipes.md runs as it stands, or is marked there as shown once."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.launch import ROOT, launch, launcher_here
from tests.support.pages import Block, blocks_of, read_page

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(250)]

PAGE = read_page("recipes.md")
ELASTIC = "Elastic launch"
CHECK = """
assert 0.5 < mean_loss < 2.0, mean_loss
assert 0.0 <= accuracy <= 1.0, accuracy
weights = [model.weight.detach().clone(), small.weight.detach().clone()]
hvd.barrier()  # the file of rank 0 is there
torch.nn.init.zeros_(model.weight)
assert load("checkpoint.pt") == 2
assert torch.equal(model.weight, weights[0]), "the checkpoint is not what was saved"
rows = hvd.allgather(torch.cat(weights).view(1, -1), name="weights")
assert all(torch.equal(row, rows[0]) for row in rows), "ranks have different weights"
print(f"rank {hvd.rank()} of {hvd.size()} has finished")
"""


BLOCKS = [block for block in blocks_of(PAGE) if not block.is_shown_once]
COMMANDS = [block for block in BLOCKS if block.kind == "bash"]


def python_of(*headings: str) -> str:
    return "\n".join(b.text for b in BLOCKS if b.kind == "python" and b.heading in headings)


def test_each_block_is_run_or_marked() -> None:
    kinds = {block.kind for block in BLOCKS}
    assert kinds == {"python", "bash"}
    ran = {"", "Metrics", "Sub-batches", "Evaluation", "Checkpoints", ELASTIC}
    assert {block.heading for block in BLOCKS if block.kind == "python"} == ran


def test_the_python_of_the_page_trains_saves_and_goes_on(tmp_path: Path) -> None:
    # One script: each part goes on from the first block, and none spoils another.
    body = python_of("", "Metrics", "Sub-batches", "Evaluation", "Checkpoints")
    script = tmp_path / "train.py"
    script.write_text(f"import os\nos.chdir({str(tmp_path)!r})\n{body}\n{CHECK}")
    done = launch(3, [str(script)], timeout_s=200)
    done.succeeded()
    assert done.output.count("of 3 has finished") == 3
    assert len(re.findall(r"loss \d\.\d{4}", done.output)) == 1


def _run(block: Block, folder: Path) -> str:
    """Run a block's commands in a folder, the first failure ends it; returns what they print."""
    outer = ("HOROVOD_", "OMPI_", "PMIX_")
    environ = {name: value for name, value in os.environ.items() if not name.startswith(outer)}
    environ |= {
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), environ.get("PATH", "")]),
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",  # as in a container
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    }
    done = subprocess.run(
        ["bash", "-euc", block.text],
        cwd=folder,
        env=environ,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


@pytest.mark.long
@pytest.mark.parametrize("block", COMMANDS, ids=lambda block: block.text.split()[0])
def test_commands_of_the_page_run(block: Block, tmp_path: Path) -> None:
    if "mpirun" in block.text and not launcher_here("mpi"):
        pytest.skip("no mpirun on this machine")
    says = "Verdict: the 2 ranks fit together"
    if block.heading == ELASTIC:
        says = "has finished epoch 2"
        end = 'print(f"rank {hvd.rank()} has finished epoch {state.epoch}", flush=True)'
        script = python_of("", ELASTIC) + f"\n{end}\n"
        (tmp_path / "train.py").write_text(script)
    assert says in _run(block, tmp_path)
