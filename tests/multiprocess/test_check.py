"""``loft-hvd check``: what a conversion forgets is found, and nothing in what is right."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from loft_hvd.check.run import Checked, check_script
from loft_hvd.doctor.inspect import horovod_build
from tests.support.converted import CONVERTED, DIFFS, EXAMPLE_JOB, converted_example
from tests.support.marks import long_first

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(400)]

ROOT = Path(__file__).parents[2]
SECONDS = 5.0  # after the first step: the script below is through in one
TO_THE_END_S = 120.0  # for scripts that end by themselves, all of whose steps are counted
RIGHT = """
import horovod.torch as hvd
import torch
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import loft_hvd as loft


def train_epoch(loader):
    total, count = 0.0, 0
    for (x,) in loader:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        total += float(loss.detach()) * len(x)
        count += len(x)
    return total / count, count


hvd.init()
torch.set_num_threads(1)
torch.manual_seed(hvd.rank())
data = TensorDataset(torch.randn(96, 8, generator=torch.Generator().manual_seed(0)))
model = torch.nn.Linear(8, 1)
balancer = loft.Balancer(24, policy=[16, 8])
loader = loft.DataLoader(data, balancer, seed=3)
optimizer = loft.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.01), model.named_parameters(), balancer=balancer
)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)
for epoch in range(3):
    loader.set_epoch(epoch)
    value, count = train_epoch(loader)
    mean = loft.average(value, count, name="loss")
    if hvd.rank() == 0:
        print(f"epoch {epoch}: loss {mean:.4f}")
"""
LOSS = 'loft.average(value, count, name="loss")'
# What each conversion has instead, what is found, and a piece of the line that is named.
MISTAKES = {
    "parameters that nobody broadcast": (
        [("hvd.broadcast_parameters(model.state_dict(), root_rank=0)\n", "")],
        "different first parameters",
        "optimizer = loft.DistributedOptimizer(",
    ),
    "a learning rate of each rank's own": (
        [
            ("lr=0.01", "lr=0.001 * balancer.local_batch_size"),
            ("hvd.broadcast_optimizer_state(optimizer, root_rank=0)\n", ""),
        ],
        "different options: lr",
        "optimizer = loft.DistributedOptimizer(",
    ),
    "an average on rank 0 alone": (
        [
            (f"    mean = {LOSS}\n", ""),
            ("    if hvd.rank() == 0:\n", f"    if hvd.rank() == 0:\n        mean = {LOSS}\n"),
        ],
        "unequal collectives: rank 0 calls loft.average",
        f"mean = {LOSS}",
    ),
    "an all-reduce inside a branch of the loop": (
        [
            (
                "        count += len(x)\n",
                "        count += len(x)\n        if len(x) > 8:\n"
                '            hvd.allreduce(torch.ones(3), name="norm", op=hvd.Sum)\n',
            )
        ],
        "unequal collectives: rank 0 calls hvd.allreduce",
        'hvd.allreduce(torch.ones(3), name="norm", op=hvd.Sum)',
    ),
    "a collective for each part of a batch": (
        [
            (
                "        count += len(x)\n",
                "        count += len(x)\n        for part in x.split(4):\n"
                '            loft.average(float(part.mean()), len(part), name="part")\n',
            )
        ],
        "a loop whose length follows the local batch: rank 0 calls loft.average",
        'loft.average(float(part.mean()), len(part), name="part")',
    ),
    "steps counted by the local batch": (
        [
            (
                "    for (x,) in loader:\n        optimizer.zero_grad()\n"
                "        loss = model(x).square().mean()\n        loss.backward()\n"
                "        optimizer.step()\n",
                "    size = balancer.local_batch_size\n    for at in range(0, 48, size):\n"
                "        x = data.tensors[0][at : at + size]\n        optimizer.zero_grad()\n"
                "        with balancer.step(len(x)):\n"
                "            loss = model(x).square().mean()\n            loss.backward()\n"
                "            optimizer.step()\n",
            )
        ],
        "a loop whose length follows the local batch: rank 1 takes more steps",
        "optimizer.step()",
    ),
    "a loft.DataLoader without set_epoch": (
        [("    loader.set_epoch(epoch)\n", "")],
        "missing set_epoch",
        "loader = loft.DataLoader(data, balancer, seed=3)",
    ),
    "a DistributedSampler without set_epoch": (
        [
            ("    loader.set_epoch(epoch)\n", ""),
            ("policy=[16, 8]", 'policy="report"'),
            (
                "loader = loft.DataLoader(data, balancer, seed=3)",
                "sampler = DistributedSampler(data, hvd.size(), hvd.rank())\n"
                "loader = DataLoader(data, batch_size=12, sampler=sampler)",
            ),
        ],
        "missing set_epoch",
        "loader = DataLoader(data, batch_size=12, sampler=sampler)",
    ),
    "a mean over ranks": (
        [(LOSS, 'hvd.allreduce(torch.tensor(value), name="loss")')],
        "this may be a metric averaged by rank: hvd.allreduce",
        'mean = hvd.allreduce(torch.tensor(value), name="loss")',
    ),
    "a mean over labels of which some are ignored": (
        [
            (
                "loss = model(x).square().mean()",
                "labels = (x[:, 0] > 0).long().masked_fill(x[:, 1] < 0.3, -100)\n"
                "        loss = torch.nn.CrossEntropyLoss()(model(x) * torch.ones(2), labels)",
            )
        ],
        "a mean of means",
        "loss = torch.nn.CrossEntropyLoss()(model(x) * torch.ones(2), labels)",
    ),
    "a loss over gathered features": (
        [
            (
                "loss = model(x).square().mean()",
                'loss = (model(x) - hvd.allgather(model(x), name="all").mean()).square().mean()',
            )
        ],
        "a collective in the backward pass of a loss that is not weighed",
        "loss.backward()",
    ),
    "a loader beside the balancer": (
        [
            (
                "loader = loft.DataLoader(data, balancer, seed=3)",
                "sampler = DistributedSampler(data, hvd.size(), hvd.rank())\n"
                "loader = DataLoader(data, batch_size=12, sampler=sampler)",
            ),
            ("loader.set_epoch", "sampler.set_epoch"),
        ],
        "a loader beside the balancer",
        "loader = DataLoader(data, batch_size=12, sampler=sampler)",
    ),
}
RIGHT_DDP = """
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
torch.set_num_threads(1)
torch.manual_seed(dist.get_rank())
data = TensorDataset(torch.randn(96, 8, generator=torch.Generator().manual_seed(0)))
model = DistributedDataParallel(torch.nn.Linear(8, 1))
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=8, sampler=sampler)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for epoch in range(3):
    sampler.set_epoch(epoch)
    for (x,) in loader:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
    shown = loss.detach()
    dist.all_reduce(shown)
    if dist.get_rank() == 0:
        print(f"epoch {epoch}: loss {shown / dist.get_world_size():.4f}")
dist.destroy_process_group()
"""
# As MISTAKES.
MISTAKES_DDP = {
    "a model that nothing reduces": (
        [("DistributedDataParallel(torch.nn.Linear(8, 1))", "torch.nn.Linear(8, 1)")],
        "no distributed model",
        "loss.backward()",
    ),
    "a learning rate of each rank's own": (
        [("lr=0.01", "lr=0.01 * (1 + dist.get_rank())")],
        "different options: lr",
        "optimizer.step()",
    ),
    "a model that is changed behind DDP": (
        [
            (
                "sampler = DistributedSampler(data)\n",
                "sampler = DistributedSampler(data)\nmodel.module.weight.data += dist.get_rank()\n",
            )
        ],
        "different first parameters",
        "optimizer.step()",
    ),
    "epochs in one order": (
        [("    sampler.set_epoch(epoch)\n", "")],
        "missing set_epoch",
        "loader = DataLoader(data, batch_size=8, sampler=sampler)",
    ),
}
EXAMPLES = {
    "report_only.py": ["--epochs", "2"],
    "fixed_sizes.py": ["--batch-sizes", "8,24", "--epochs", "2"],
    "unequal_cluster.py": ["--epochs", "2"],
    "digits.py": [],
}


def check(script: Path, *arguments: str, num_ranks: int = 2, seconds: float = SECONDS) -> Checked:
    return check_script(
        str(script), arguments, build=horovod_build(), num_ranks=num_ranks, seconds=seconds
    )


QUICK = "an average on rank 0 alone"
Mistakes = dict[str, tuple[list[tuple[str, str]], str, str]]


def _quick_first(mistakes: Mistakes, quick: str) -> list[Any]:
    """Return one that is quick, and the others as long."""
    others = long_first([name for name in mistakes if name != quick], 2)
    long = (pytest.param(*each.values, marks=[pytest.mark.long, *each.marks]) for each in others)
    return [quick, *long]


@pytest.mark.parametrize("mistake", _quick_first(MISTAKES, QUICK))
def test_a_planted_mistake_is_found_with_its_line(mistake: str, tmp_path: Path) -> None:
    _check_mistake(RIGHT, MISTAKES[mistake], tmp_path)


@pytest.mark.parametrize("mistake", _quick_first(MISTAKES_DDP, "a model that nothing reduces"))
def test_a_mistake_in_a_script_for_torchrun_is_found(mistake: str, tmp_path: Path) -> None:
    _check_mistake(RIGHT_DDP, MISTAKES_DDP[mistake], tmp_path)


@pytest.mark.long
def test_nothing_is_found_in_a_script_for_torchrun(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(RIGHT_DDP)
    checked = check(script, seconds=TO_THE_END_S)
    assert checked.is_fine, checked
    assert checked.num_steps == 3 * 6


def _check_mistake(
    right: str, mistake: tuple[list[tuple[str, str]], str, str], tmp_path: Path
) -> None:
    edits, what, line = mistake
    text = right
    for old, new in edits:
        assert text.count(old) == 1
        text = text.replace(old, new)
    script = tmp_path / "train.py"
    script.write_text(text)
    checked = check(script)
    assert [finding.what[: len(what)] for finding in checked.findings] == [what], checked
    (finding,) = checked.findings
    file, _, number = finding.place.rpartition(":")
    assert file == str(script)
    assert text.splitlines()[int(number) - 1].strip() == line
    assert finding.mend


ENDLESS = RIGHT.replace("for epoch in range(3):", "for epoch in range(10**9):")


def test_a_script_without_an_end_is_stopped_and_its_files_are_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script, log = tmp_path / "train.py", tmp_path / "log"
    script.write_text(ENDLESS)
    monkeypatch.setenv("LOFT_HVD_LOG_DIR", str(log))
    monkeypatch.setenv("LOFT_HVD_TRACE", str(log / "trace.json"))
    checked = check(script)
    assert checked.is_fine, checked
    assert checked.num_steps > 12
    assert not log.exists()


@pytest.mark.long
def test_a_collective_that_the_others_never_make_is_found_in_an_elastic_script(
    tmp_path: Path,
) -> None:
    script = tmp_path / "train.py"
    text, _ = CONVERTED["elastic_mnist"]
    line = "            state.commit()\n"
    wrong = '            if hvd.rank() == 0:\n                hvd.allreduce(loss, name="shown")\n'
    assert text.count(line) == 1
    script.write_text(text.replace(line, wrong + line))
    # The standstill ends it, long before the time is up.
    checked = check_script(str(script), build=horovod_build(), seconds=100.0)
    finding, *others = checked.findings
    assert finding.what.startswith("unequal collectives: rank 0 calls hvd.allreduce here"), checked
    assert "state.commit()" in _line(finding.what.partition("while rank 1 is at ")[2])
    assert all("a metric averaged by rank" in each.what for each in others)
    number = int(finding.place.rpartition(":")[2])
    assert 'name="shown"' in script.read_text().splitlines()[number - 1]


@pytest.mark.long
@pytest.mark.parametrize("name", CONVERTED)
def test_nothing_is_found_in_a_script_like_an_example_of_horovods(
    name: str, tmp_path: Path
) -> None:
    script = tmp_path / "train.py"
    text, num_steps = CONVERTED[name]
    script.write_text(text)
    checked = check(script, str(tmp_path / "checkpoints"), seconds=TO_THE_END_S)
    assert checked.is_fine, checked
    assert checked.num_steps == num_steps


# How many steps each takes: of 192 images two epochs, and one rank's 4 and 16 make a global batch.
STEPS_OF_EXAMPLES = {
    "pytorch_mnist.py": 2 * 4,  # of 3 * 16
    "pytorch_synthetic_benchmark.py": 1 + 3 * 2,  # as its arguments say
    "pytorch_imagenet_resnet50.py": 2 * 12,  # of 2 * 2 * 4
    "pytorch_mnist_elastic.py": 2 * 3,  # of 4 * 16, for any number of ranks
}


@pytest.mark.long
@pytest.mark.parametrize("path", DIFFS)
def test_nothing_is_found_in_an_example_of_horovods_with_the_diff_of_the_docs(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))  # where they keep a lock
    arguments = converted_example(path, tmp_path)
    num_ranks = 3 if "f=1" in DIFFS[path] else 2  # as docs/migrate.md says of `-np`
    checked = check(ROOT / EXAMPLE_JOB, *arguments, num_ranks=num_ranks, seconds=TO_THE_END_S)
    assert checked.is_fine, checked
    assert checked.num_steps == STEPS_OF_EXAMPLES[Path(path).name]


def _line(place: str) -> str:
    """Return the line of "file:line, and more"."""
    file, _, line = place.partition(",")[0].rpartition(":")
    return Path(file).read_text().splitlines()[int(line) - 1]


TESTS_LATE = """
if hvd.rank() == 0:  # the other is done by then
    import time
    time.sleep(17)
    open("tested", "w").write("by rank 0")
"""


@pytest.mark.long
def test_a_rank_that_is_done_lets_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "train.py"
    script.write_text(RIGHT + TESTS_LATE)
    checked = check_script(str(script), build=horovod_build(), seconds=60.0)
    assert checked.is_fine, checked
    assert checked.num_steps == 12
    assert (tmp_path / "tested").read_text() == "by rank 0"


@pytest.mark.long
@pytest.mark.parametrize("name", long_first(EXAMPLES))
def test_nothing_is_found_in_the_examples(name: str) -> None:
    checked = check(ROOT / "examples" / name, *EXAMPLES[name])
    assert checked.is_fine, checked
    assert checked.num_steps > 0


@pytest.mark.long
def test_a_script_that_fails_is_told_as_it_failed(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(RIGHT.replace("for epoch in range(3):", "for epoch in range(tree):"))
    checked = check(script)
    assert not checked.is_fine
    assert "NameError" in checked.failure
    assert f"{script}:" in checked.failure
