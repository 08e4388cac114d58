"""Horovod's own ImageNet example, converted as the docs say: unequal sub-batches, and a slow rank.

The example is in Horovod's repository alone: ``HOROVOD_SOURCE`` names a folder with v0.28.1 of it.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.converted import EXAMPLE_JOB, horovods_source
from tests.support.launch import Finished, launch

pytestmark = [pytest.mark.multiprocess, pytest.mark.long, pytest.mark.timeout(400)]

EXAMPLE = "examples/pytorch/pytorch_imagenet_resnet50.py"
LIMIT_S = 20.0
# What docs/migrate.md says of each line; and when training begins.
CONVERSION = {
    "import horovod.torch as hvd\n": "import horovod.torch as hvd\nimport loft_hvd as loft\n",
    "    hvd.init()\n": (
        "    hvd.init()\n    balancer = loft.Balancer(6 * args.batch_size, policy=[24, 16, 8])\n"
    ),
    "    train_sampler.set_epoch(epoch)\n": "    train_loader.set_epoch(epoch)\n",
    "    train_sampler = torch.utils.data.distributed.DistributedSampler(\n"
    "        train_dataset, num_replicas=hvd.size(), rank=hvd.rank())\n"
    "    train_loader = torch.utils.data.DataLoader(\n"
    "        train_dataset, batch_size=allreduce_batch_size,\n"
    "        sampler=train_sampler, **kwargs)\n": (
        "    train_loader = loft.DataLoader(train_dataset, balancer, **kwargs)\n"
    ),
    "        gradient_predivide_factor=args.gradient_predivide_factor)\n": (
        "        gradient_predivide_factor=args.gradient_predivide_factor)\n"
        "    optimizer = loft.DistributedOptimizer(optimizer, balancer=balancer)\n"
    ),
    "    for epoch in range(resume_from_epoch, args.epochs):\n": (
        "    import time\n    print(f'fault at {time.time()}', flush=True)\n"
        "    for epoch in range(resume_from_epoch, args.epochs):\n"
    ),
}
END = "        save_checkpoint(epoch)\n"
# "use loft.Metric in its place, whose update() waits for nobody, and read its avg on every rank,
# not on rank 0 alone": the class that averages a value over ranks, and who reads it.
CHANGE = {
    "if __name__ == '__main__':\n": "Metric = loft.Metric\n\n\nif __name__ == '__main__':\n"
} | {
    f"    if log_writer:\n        log_writer.add_scalar('{kind}/loss', {kind}_loss.avg, epoch)\n"
    f"        log_writer.add_scalar('{kind}/accuracy', {kind}_accuracy.avg, epoch)\n": (
        f"    mean_loss, mean_accuracy = {kind}_loss.avg, {kind}_accuracy.avg\n"
        f"    if log_writer:\n        log_writer.add_scalar('{kind}/loss', mean_loss, epoch)\n"
        f"        log_writer.add_scalar('{kind}/accuracy', mean_accuracy, epoch)\n"
    )
    for kind in ("train", "val")
}


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """Return the example, converted; a copy under its own name."""
    source = horovods_source()
    path = tmp_path / Path(EXAMPLE).name
    text = (source / EXAMPLE).read_text(encoding="utf-8")
    assert text.endswith(END)
    path.write_text(edited(text, CONVERSION) + "    print('trained', flush=True)\n")
    return path


def edited(text: str, edits: dict[str, str]) -> str:
    for old, new in edits.items():
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    return text


# One rank takes longer for each batch, before the metrics that all ranks average.
SLOW = {
    "6 * args.batch_size, policy=[24, 16, 8]": '3 * args.batch_size, policy="report", interval=8',
    "                output = model(data_batch)\n": (
        "                __import__('time').sleep(0.3 if hvd.rank() == 2 else 0.05)\n"
        "                output = model(data_batch)\n"
    ),
}


def train(script: Path, *, passes: int = 3, epochs: int = 2) -> Finished:
    options = ["--batch-size", "8", "--batches-per-allreduce", f"{passes}", "--no-cuda"]
    options += ["--epochs", f"{epochs}"]
    folders = ["--train-dir", "train", "--val-dir", "validation"]
    checkpoint = ["--checkpoint-format", str(script.with_name("checkpoint-{epoch}.pt"))]
    arguments = [EXAMPLE_JOB, str(script), *options, *folders, *checkpoint]
    return launch(3, arguments, timeout_s=180)


def test_horovods_imagenet_example_ends_with_both_places_named(script: Path) -> None:
    done = train(script)
    assert "trained" not in done.output
    line = r"at pytorch_imagenet_resnet50\.py:\d+ in"
    says = (
        rf"ranks \[2\] wait for '[^']+' {line} train while ranks \[0, 1\] wait outside of "
        rf"loft_hvd, in the engine's allreduce 'train_accuracy' {line} update; .* use loft\.Metric"
    )
    done.failed(says, within_s=LIMIT_S)


def test_horovods_imagenet_example_runs_after_the_change_that_the_error_tells(
    script: Path,
) -> None:
    text = script.read_text(encoding="utf-8")
    script.write_text(edited(text, CHANGE), encoding="utf-8")
    done = train(script)
    done.succeeded()
    assert done.output.count("trained") == 3
    assert script.with_name("checkpoint-2.pt").exists()


def test_horovods_imagenet_example_names_the_rank_that_is_slow(script: Path) -> None:
    """Its metrics average over all ranks before ``backward``: fast ranks wait there."""
    text = edited(script.read_text(encoding="utf-8"), SLOW)
    told = "    print(f'rank {hvd.rank()} reads: {balancer.explain()}', flush=True)\n"
    script.write_text(text + told, encoding="utf-8")
    output = train(script, passes=1, epochs=3).succeeded()
    assert len(re.findall(r"rank \d reads:", output)) == 3
    assert set(re.findall(r"rank (\d is slow: \w+)", output)) == {"2 is slow: compute"}, output
