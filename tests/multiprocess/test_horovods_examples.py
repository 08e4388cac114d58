"""Horovod's own examples train with what ``docs/migrate.md`` changes in them.

They are in Horovod's repository alone: ``HOROVOD_SOURCE`` names a folder with v0.28.1 of it.
"""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.support.converted import DIFFS, EXAMPLE_JOB, converted_example
from tests.support.elastic import launch_elastic
from tests.support.launch import Finished, launch

pytestmark = [pytest.mark.multiprocess, pytest.mark.long, pytest.mark.timeout(200)]

# What each prints, and how often.
SAID = {
    "pytorch_mnist.py": ("Test set: Average loss", 2),
    "pytorch_synthetic_benchmark.py": ("Total img/sec on 3 CPU(s)", 1),
    "pytorch_imagenet_resnet50.py": ("trained", 3),
    "pytorch_mnist_elastic.py": ("trained on 3", 3),
}
LONG_ENOUGH = ["--epochs", "150"]  # in place of 2: the third rank comes after some ten epochs


def run(folder: Path, arguments: list[str], *, is_elastic: bool) -> Finished:
    env = {"HOME": str(folder)}  # where they keep a lock
    if not is_elastic:
        return launch(3, arguments, timeout_s=150, env=env)

    def add_host(found: Path) -> None:
        until = time.monotonic() + 100.0
        while not (folder / "trains").exists() and time.monotonic() < until:
            time.sleep(0.1)
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
    end = "\nprint(f'trained on {hvd.size()}', flush=True)\n"
    arguments = [EXAMPLE_JOB, *converted_example(path, tmp_path, end=end)]
    is_elastic = "elastic" in path
    if is_elastic:
        arguments += LONG_ENOUGH
    done = run(tmp_path, arguments, is_elastic=is_elastic)
    done.succeeded()
    said, count = SAID[Path(path).name]
    assert done.output.count(said) == count, done.output[-6000:]
