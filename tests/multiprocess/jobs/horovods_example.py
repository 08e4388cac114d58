"""Runs a copy of an example of Horovod's on tiny data: ``horovods_example.py SCRIPT ARGUMENTS..``.

Stands for torchvision, of which the examples take data and models; and for tqdm and tensorboard,
which show how it goes, where they are not installed. From the first step on there is $HOME/trains.
"""

from __future__ import annotations

import importlib.util
import os
import runpy
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import TensorDataset

NUM_IMAGES = {"train": 48 * 4, "validation": 24}
SIDE, NUM_CLASSES = 8, 10


def images(count: int, *shape: int) -> TensorDataset:
    """Return images of a shape, each with its class."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(count, *shape, generator=generator)
    return TensorDataset(values, torch.randint(NUM_CLASSES, (count,), generator=generator))


def image_folder(folder: str, transform: object) -> TensorDataset:
    """Return as many images as the folder of that name stands for."""
    return images(NUM_IMAGES[folder], 3, SIDE, SIDE)


def digits(root: str, train: bool, transform: object, download: bool = False) -> TensorDataset:
    """Return images of MNIST's shape."""
    return images(NUM_IMAGES["train" if train else "validation"], 1, 28, 28)


class Net(torch.nn.Module):
    """A small model of images of any size."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = torch.nn.Conv2d(3, 4, 3)
        self.norm = torch.nn.BatchNorm2d(4)
        self.fc = torch.nn.Linear(4, 1000)

    def forward(self, images: Tensor) -> Tensor:
        out: Tensor = self.fc(self.norm(self.conv(images)).relu().mean((2, 3)))
        return out


class Shown:
    """What shows how it goes, and is shown to nobody."""

    def __init__(self, *_: object, **__: object) -> None: ...

    def __enter__(self) -> Shown:
        return self

    def __exit__(self, *_: object) -> None: ...

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: None


def module(name: str, **content: Any) -> ModuleType:
    made = ModuleType(name)
    made.__spec__ = ModuleSpec(name, None)  # torch looks for it
    made.__dict__.update(content)
    sys.modules[name] = made
    return made


def main(script: str) -> None:
    nothing = module("torchvision.transforms")
    for name in ("Compose", "RandomResizedCrop", "RandomHorizontalFlip", "ToTensor", "Normalize"):
        setattr(nothing, name, Shown)
    nothing.Resize = nothing.CenterCrop = Shown  # type: ignore[attr-defined]  # a module's content
    module(
        "torchvision",
        transforms=nothing,
        datasets=module("torchvision.datasets", ImageFolder=image_folder, MNIST=digits),
        models=module("torchvision.models", resnet50=Net),
    )
    if importlib.util.find_spec("tqdm") is None:
        module("tqdm", tqdm=Shown)
    if importlib.util.find_spec("tensorboard") is None:
        module("torch.utils.tensorboard", SummaryWriter=Shown)
    sign = Path(os.environ["HOME"]) / "trains"
    register_optimizer_step_post_hook(lambda *_: sign.touch())
    del sys.argv[0]  # the script's own name is next
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1])
