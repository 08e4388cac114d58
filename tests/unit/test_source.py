"""Which engine a script is for, by what it imports."""

from __future__ import annotations

from pathlib import Path

import pytest

from loft_hvd.check.source import is_for_torchrun, own_launcher


@pytest.mark.parametrize(
    ("text", "is_torchrun"),
    [
        ("import torch.distributed as dist", True),
        ("from torch import distributed", True),
        ("from torch.nn.parallel import DistributedDataParallel", True),
        ("from accelerate import Accelerator", True),
        ("def f():\n    import transformers", True),
        ("import horovod.torch as hvd\nimport torch.distributed as dist", False),
        ("import torch, loft_hvd", False),  # the modules of the script may import either
        ("this is no Python", False),
    ],
)
def test_a_script_is_for_torchrun_by_its_imports(
    text: str, is_torchrun: bool, tmp_path: Path
) -> None:
    script = tmp_path / "train.py"
    script.write_text(text)
    assert is_for_torchrun(str(script)) is is_torchrun


@pytest.mark.parametrize(
    ("text", "module"),
    [
        ("import ray.train.torch", "ray.train"),
        ("import ray\nfrom ray.train.torch import TorchTrainer", "ray.train"),
        ("from ray import train", "ray.train"),
        ("from horovod.ray import RayExecutor", "horovod.ray"),
        ("import horovod.spark", "horovod.spark"),
        ("import ray.data\nimport torch.distributed", None),
        ("import ray.trainable", None),
        ("import horovod.torch as hvd", None),
    ],
)
def test_a_script_that_starts_its_ranks_itself_is_known_by_its_imports(
    text: str, module: str | None, tmp_path: Path
) -> None:
    script = tmp_path / "train.py"
    script.write_text(text)
    assert own_launcher(str(script)) == module
