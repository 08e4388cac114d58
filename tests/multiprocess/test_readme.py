"""The code of the pages runs: both sides of the README's diff, and what docs/migrate.md shows."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.launch import ROOT, launch

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(150)]

README = (ROOT / "README.md").read_text()
# What the README takes as given: a model, data, and the names a torch script has imported.
PRELUDE = """
import torch
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
torch.manual_seed(0)
torch.set_num_threads(1)
epochs, loss_fn, model = 2, torch.nn.CrossEntropyLoss(), torch.nn.Linear(8, 3)
before = model.weight.detach().clone()
dataset = TensorDataset(torch.randn(400, 8), torch.randint(0, 3, (400,)))
"""
CHECK = """
assert not torch.equal(model.weight, before), "nothing was trained"
print(f"rank {hvd.rank()} of {hvd.size()} has finished")
"""


def side_of_diff(sign: str) -> str:
    diff = re.search(r"```diff\n(.*?)```", README, re.DOTALL)
    assert diff is not None
    lines = diff.group(1).splitlines()
    return "\n".join(line[1:] for line in lines if line[:1] in ("", " ", sign))


def test_script_of_the_diff_trains_on_three_ranks(tmp_path: Path) -> None:
    """With what it adds; without, it trains in the next test."""
    script = tmp_path / "train.py"
    script.write_text(PRELUDE + side_of_diff("+") + CHECK)
    done = launch(3, [str(script)], timeout_s=120)
    done.succeeded(3)
    assert done.output.count("of global_batch_size=192") == 1, done.output


@pytest.mark.long
def test_the_two_lines_report_on_plain_horovod(tmp_path: Path) -> None:
    block = re.search(
        r"```python\n(loft\.attach\(.*?)```\n\n    (loft-hvd report runs)", README, re.DOTALL
    )
    assert block is not None
    attach, command = block.groups()
    plain = side_of_diff("-").replace(
        "for epoch in", f"import loft_hvd as loft\n{attach}for epoch in"
    )
    script = tmp_path / "train.py"
    script.write_text(f"import os\nos.chdir({str(tmp_path)!r})\n{PRELUDE}{plain}{CHECK}")
    done = launch(3, [str(script)], timeout_s=120)
    done.succeeded()
    (_, *words) = command.replace("runs", str(tmp_path / "runs")).split()
    told = launch(1, ["-m", "loft_hvd.cli", *words], launcher="none")
    told.succeeded()
    assert "global_batch_size=192" in told.output


@pytest.mark.long
def test_the_converted_loop_trains_on_three_ranks(tmp_path: Path) -> None:
    page = (ROOT / "docs/migrate.md").read_text()
    block = re.search(r"```python\n(balancer = .*?)```", page, re.DOTALL)
    assert block is not None
    head = "import horovod.torch as hvd\nimport loft_hvd as loft\nhvd.init()\n"
    script = tmp_path / "train.py"
    script.write_text(head + PRELUDE + block.group(1) + CHECK)
    done = launch(3, [str(script)], timeout_s=120)
    done.succeeded(3)


@pytest.mark.long
def test_the_notebooks_cell_trains_on_three_ranks() -> None:
    page = (ROOT / "docs/migrate.md").read_text()
    cell = re.search(r"```python\n(import horovod\n.*?)```", page, re.DOTALL)
    assert cell is not None
    # As a notebook runs it: the function is in __main__, of which no file tells other processes.
    check = """
assert [each[0] for each in results] == [losses] * 3, results
assert [each[1] is None for each in results] == [False, True, True]
assert losses[-1] < 0.5 * losses[0], losses
assert abs(float(weights["weight"].mean()) - 1) < 0.5
"""
    done = launch(1, ["-c", cell.group(1) + check], launcher="none", timeout_s=120)
    done.succeeded()
    assert "of global_batch_size=60" in done.output, done.output
