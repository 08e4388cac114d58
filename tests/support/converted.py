"""Horovod's four examples for PyTorch, converted.

``CONVERTED`` are scripts like them, on small made data; ``DIFFS`` are what ``docs/migrate.md``
shows of the examples themselves, which ``converted_example`` writes and ``EXAMPLE_JOB`` runs.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

__all__ = ["CONVERTED", "DIFFS", "EXAMPLE_JOB", "converted_example", "horovods_source"]

_PAGE = (Path(__file__).parents[2] / "docs/migrate.md").read_text(encoding="utf-8")
DIFFS: dict[str, str] = {
    path: diff
    for path, diff in re.findall(
        r"^`(examples/\S+)`[^\n]*\n\n```diff\n(.*?)```$", _PAGE, re.M | re.S
    )
}
"""By the example's path in Horovod's repository."""
EXAMPLE_JOB = "tests/multiprocess/jobs/horovods_example.py"
_ARGUMENTS = {  # of each, by its name
    "pytorch_mnist.py": "--batch-size 16 --epochs 2 --no-cuda",
    "pytorch_synthetic_benchmark.py": (
        "--batch-size 4 --num-warmup-batches 1 --num-batches-per-iter 2 --num-iters 3 --no-cuda"
    ),
    "pytorch_imagenet_resnet50.py": (
        "--batch-size 4 --batches-per-allreduce 2 --epochs 2 --no-cuda --train-dir train "
        "--val-dir validation"
    ),
    "pytorch_mnist_elastic.py": "--batch-size 16 --epochs 2 --log-interval 1000 --no-cuda",
}


def horovods_source() -> Path:
    """Return the folder with Horovod's repository, or skip the test."""
    source = os.environ.get("HOROVOD_SOURCE")
    if source is None:
        pytest.skip("HOROVOD_SOURCE names no folder with Horovod's repository at v0.28.1")
    return Path(source)


def converted_example(path: str, folder: Path, *, end: str = "") -> list[str]:
    """Write an example of Horovod's, converted, into a folder; or skip the test.

    Args:
        path: of the example in Horovod's repository, one of ``DIFFS``.
        folder: for the script and for its checkpoints.
        end: lines to write behind it.

    Returns:
        The script and its arguments, as ``EXAMPLE_JOB`` takes them.
    """
    script = folder / Path(path).name
    text = _patched((horovods_source() / path).read_text(encoding="utf-8"), DIFFS[path])
    script.write_text(text + end, encoding="utf-8")
    arguments = [str(script), *_ARGUMENTS[script.name].split()]
    if "imagenet" in path:
        arguments += ["--checkpoint-format", str(folder / "checkpoint-{epoch}.pt")]
    return arguments


def _patched(text: str, diff: str) -> str:
    """Return a text with a diff's hunks, each at the first place that it fits after the last."""
    done = ""
    for hunk in diff.removeprefix("@@\n").split("\n@@\n"):
        lines = hunk.splitlines(keepends=True)
        lines[-1] = lines[-1].rstrip("\n") + "\n"
        old = "".join(line[1:] for line in lines if not line.startswith("+"))
        new = "".join(line[1:] for line in lines if not line.startswith("-"))
        assert old in text, old
        before, _, text = text.partition(old)
        done += before + new
    return done + text


_DATA = """
import horovod.torch as hvd
import torch
import torch.nn.functional as F
from torch.utils.data import TensorDataset

import loft_hvd as loft


def made(num_samples, seed):
    rows = torch.randn(num_samples, 1, 8, 8, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(rows, (rows.mean((1, 2, 3)) > 0).long())


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = torch.nn.Conv2d(1, 4, 3)
        self.dropout = torch.nn.Dropout2d()
        self.out = torch.nn.Linear(36, 2)

    def forward(self, x):
        x = F.relu(F.max_pool2d(self.dropout(self.conv(x)), 2))
        return F.log_softmax(self.out(x.view(-1, 36)), dim=1)


hvd.init()
torch.manual_seed(42)
torch.set_num_threads(1)
"""

_MNIST = (
    _DATA
    + """
def metric_average(value, count, name):
    return loft.average(value, count, name=name)


def train(epoch):
    model.train()
    train_loader.set_epoch(epoch)
    for batch_idx, (data, target) in enumerate(train_loader):
        optimizer.zero_grad()
        loss = F.nll_loss(model(data), target)
        loss.backward()
        optimizer.step()
        if batch_idx % 2 == 0 and hvd.rank() == 0:
            print(f"epoch {epoch} [{batch_idx}/{len(train_loader)}] loss {loss.item():.4f}")


def test():
    model.eval()
    loss, correct, count = 0.0, 0.0, 0
    with torch.no_grad():
        for data, target in test_loader:
            output = model(data)
            loss += F.nll_loss(output, target, reduction="sum").item()
            correct += output.argmax(1).eq(target).sum().item()
            count += len(target)
    loss = metric_average(loss / max(count, 1), count, "avg_loss")
    accuracy = metric_average(correct / max(count, 1), count, "avg_accuracy")
    if hvd.rank() == 0:
        print(f"test: loss {loss:.4f}, accuracy {accuracy:.2%}")


balancer = loft.Balancer(16 * hvd.size())
train_loader = loft.DataLoader(made(128, 1), balancer)
test_loader = loft.DataLoader(made(50, 2), balancer, train=False)
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01 * hvd.size(), momentum=0.5)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)
optimizer = loft.DistributedOptimizer(
    optimizer, named_parameters=model.named_parameters(), op=hvd.Average, balancer=balancer
)
for epoch in range(1, 3):
    train(epoch)
    test()
"""
)

_SYNTHETIC = (
    _DATA
    + """
import timeit

import numpy as np

model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01 * hvd.size())
optimizer = loft.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)
data, target = torch.randn(16, 1, 8, 8), torch.zeros(16, dtype=torch.long)


def benchmark_step():
    optimizer.zero_grad()
    F.cross_entropy(model(data), target).backward()
    optimizer.step()


def log(text):
    if hvd.rank() == 0:
        print(text)


timeit.timeit(benchmark_step, number=2)
rates = []
for at in range(3):
    rates.append(16 * 2 / timeit.timeit(benchmark_step, number=2))
    log(f"iteration {at}: {rates[-1]:.1f} samples/s")
log(f"in all: {hvd.size() * np.mean(rates):.1f} samples/s")
"""
)

_IMAGENET = (
    _DATA
    + """
import os
import sys

folder = sys.argv[1]
checkpoint = os.path.join(folder, "checkpoint-{epoch}.pt")
epochs, sub_batch, batches_per_allreduce = 3, 8, 3


def train(epoch):
    model.train()
    train_loader.set_epoch(epoch)
    train_loss = loft.Metric("train_loss", loader=train_loader)
    for batch_idx, (data, target) in enumerate(train_loader):
        for group in optimizer.param_groups:
            group["lr"] = 0.01 * (1 + epoch / epochs)
        optimizer.zero_grad()
        for at in range(0, len(data), sub_batch):
            part, part_target = data[at : at + sub_batch], target[at : at + sub_batch]
            loss = F.cross_entropy(model(part), part_target)
            train_loss.update(loss.detach(), len(part))
            loss.mul_(len(part) / len(data))
            loss.backward()
        optimizer.step()
    mean = train_loss.avg
    if hvd.rank() == 0:
        print(f"epoch {epoch}: loss {float(mean):.4f}")


def validate(epoch):
    model.eval()
    correct, count = 0.0, 0
    with torch.no_grad():
        for data, target in val_loader:
            correct += model(data).argmax(1).eq(target).sum().item()
            count += len(target)
    accuracy = loft.average(correct / max(count, 1), count, name="accuracy")
    if hvd.rank() == 0:
        print(f"epoch {epoch}: accuracy {accuracy:.2%}")


def save_checkpoint(epoch):
    if hvd.rank() == 0:
        os.makedirs(folder, exist_ok=True)
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(state, checkpoint.format(epoch=epoch))


balancer = loft.Balancer(16 * hvd.size(), max_batch=sub_batch * batches_per_allreduce)
train_loader = loft.DataLoader(made(128, 1), balancer)
val_loader = loft.DataLoader(made(50, 2), balancer, train=False)
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=5e-5)
if hvd.rank() == 0:  # what a run before has left
    optimizer.zero_grad()
    model(torch.randn(4, 1, 8, 8)).square().mean().backward()
    optimizer.step()
    save_checkpoint(0)
optimizer = loft.DistributedOptimizer(
    hvd.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        backward_passes_per_step=batches_per_allreduce,
    ),
    balancer=balancer,
)
resume_from_epoch = 0
for try_epoch in range(epochs, -1, -1):
    if os.path.exists(checkpoint.format(epoch=try_epoch)):
        resume_from_epoch = try_epoch + 1
        break
resume_from_epoch = hvd.broadcast(torch.tensor(resume_from_epoch), 0, "resume_from_epoch").item()
if resume_from_epoch > 0 and hvd.rank() == 0:
    state = torch.load(checkpoint.format(epoch=resume_from_epoch - 1))
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)
for epoch in range(resume_from_epoch, epochs):
    train(epoch)
    validate(epoch)
    save_checkpoint(epoch)
"""
)

_ELASTIC = (
    _DATA
    + """
balancer = loft.Balancer(32)
train_loader = loft.DataLoader(made(128, 1), balancer)
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01 * hvd.size(), momentum=0.5)
optimizer = loft.DistributedOptimizer(
    optimizer, named_parameters=model.named_parameters(), balancer=balancer
)


@hvd.elastic.run
def train(state):
    for state.epoch in range(state.epoch, 2):
        train_loader.set_epoch(state.epoch)
        for batch_idx, (data, target) in enumerate(train_loader):
            optimizer.zero_grad()
            loss = F.nll_loss(model(data), target)
            loss.backward()
            optimizer.step()
            state.commit()
        if hvd.rank() == 0:
            print(f"epoch {state.epoch}: loss {loss.item():.4f}")


state = loft.elastic.State(
    model=model, optimizer=optimizer, balancer=balancer, loader=train_loader, epoch=0
)
train(state)
"""
)

# The script of each, and how many steps it takes. That of ImageNet asks for a folder.
CONVERTED = {
    "mnist": (_MNIST, 2 * 4),
    "synthetic_benchmark": (_SYNTHETIC, 2 + 3 * 2),
    "imagenet_resnet50": (_IMAGENET, 2 * 4),
    "elastic_mnist": (_ELASTIC, 2 * 4),
}
