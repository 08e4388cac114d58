"""Horovod's own examples train with what ``docs/migrate.md`` changes in them.

They are in Horovod's repository alone: ``HOROVOD_SOURCE`` names a folder with v0.28.1 of it.
"""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.support.converted import DIFFS, horovods_source, patched
from tests.support.elastic import launch_elastic
from tests.support.launch import Finished, launch

pytestmark = [pytest.mark.multiprocess, pytest.mark.long, pytest.mark.timeout(200)]

JOB = "tests/multiprocess/jobs/horovods_example.py"
# The arguments of each, and what it prints how often.
RUNS = {
    "pytorch_mnist.py": ("--batch-size 16 --epochs 2 --no-cuda", "Test set: Average loss", 2),
    "pytorch_synthetic_benchmark.py": (
        "--batch-size 4 --num-warmup-batches 1 --num-batches-per-iter 2 --num-iters 3 --no-cuda",
        "Total img/sec on 3 CPU(s)",
        1,
    ),
    "pytorch_imagenet_resnet50.py": (
        "--batch-size 4 --batches-per-allreduce 2 --epochs 2 --no-cuda --train-dir train "
        "--val-dir validation",
        "trained",
        3,
    ),
    # Long enough for the third rank to come.
    "pytorch_mnist_elastic.py": (
        "--batch-size 16 --epochs 300 --log-interval 1000 --no-cuda",
        "trained on 3",
        3,
    ),
}


def run(folder: Path, arguments: list[str], *, is_elastic: bool) -> Finished:
    env = {"HOME": str(folder)}  # where they keep a lock
    if not is_elastic:
        return launch(3, arguments, timeout_s=150, env=env)

    def add_host(found: Path) -> None:
        time.sleep(15.0)  # by then the first two train
        found.write_text("localhost:2\n127.0.0.1:1\n")

    return launch_elastic(
        folder,
        arguments,
        hosts=["localhost:2"],
        num_ranks=2,
        min_ranks=2,
        timeout_s=150.0,
        gloo_timeout_s=40,
        env=env,
        during=add_host,
    )


@pytest.mark.parametrize("path", DIFFS)
def test_a_converted_example_of_horovods_trains(path: str, tmp_path: Path) -> None:
    source = horovods_source()
    script = tmp_path / Path(path).name
    text = patched((source / path).read_text(encoding="utf-8"), DIFFS[path])
    text += "\nprint(f'trained on {hvd.size()}', flush=True)\n"
    script.write_text(text, encoding="utf-8")
    words, said, count = RUNS[script.name]
    arguments = [JOB, str(script), *words.split()]
    if "imagenet" in path:
        arguments += ["--checkpoint-format", str(tmp_path / "checkpoint-{epoch}.pt")]
    done = run(tmp_path, arguments, is_elastic="elastic" in path)
    assert done.returncode == 0, done.output[-6000:]
    assert done.output.count(said) == count, done.output[-6000:]
