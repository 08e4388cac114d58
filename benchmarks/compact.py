"""How much shorter compact messages are, and how fast they are written and read.

    OMP_NUM_THREADS=1 python benchmarks/compact.py --json FILE

Shares are those of the bytes of values as they are: of normal values, and of gradients and of their
averages over time (0.9, as worker momentum keeps) of networks that learn scikit-learn's digits, at
the last step. Speeds are of a million normal values, on one core and with the kernels that
``LOFT_HVD_ISA`` says, the best of 30 times.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from loft_hvd.bench.models import MODELS
from loft_hvd.bench.record import write_record
from loft_hvd.transport import compact

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
STEPS = {"resnet18": 40, "mlp": 300}


def digits() -> tuple[Tensor, Tensor]:
    """Return images [1797, 1, 8, 8] and labels [1797]."""
    from sklearn.datasets import load_digits  # an extra: for this script only

    images, labels = load_digits(return_X_y=True)
    return torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 16, torch.tensor(labels)


def gradients(name: str) -> Iterator[tuple[Tensor, Tensor]]:
    """Train a network; yield each step's gradient and its average over time, [parameters]."""
    torch.manual_seed(0)
    images, labels = digits()
    if name == "mlp":
        hidden = [nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU()]
        model: nn.Module = nn.Sequential(nn.Flatten(), *hidden, nn.Linear(256, 10))
    else:
        model = MODELS[name]()
        images = nn.functional.interpolate(images.repeat(1, 3, 1, 1), size=32)
    average: Tensor | None = None
    while True:
        chosen = torch.randint(0, len(images), (16,))
        model.zero_grad()
        nn.functional.cross_entropy(model(images[chosen]), labels[chosen]).backward()
        gradient = torch.cat([each.grad.flatten() for each in model.parameters()])
        average = gradient if average is None else 0.9 * average + 0.1 * gradient
        yield gradient, average
        with torch.no_grad():
            for each in model.parameters():
                each -= 0.05 * each.grad


def share(values: Tensor, dtype: torch.dtype) -> float:
    """Return a message's bytes over those of the values."""
    given = values.to(dtype)
    return compact.message_of(given).numel() / given.nbytes


def best_s(call: Callable[[], object]) -> float:
    """Return the least seconds of a call."""
    took = []
    for _ in range(30):
        began = time.perf_counter()
        call()
        took.append(time.perf_counter() - began)
    return min(took)


def main() -> None:
    """Measure, and report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", default="")
    args = parser.parse_args()
    normal = torch.randn(1_000_000, generator=torch.Generator().manual_seed(0))
    what = {"normal values": normal}
    for name, steps in STEPS.items():
        made = gradients(name)
        for _ in range(steps):
            next(made)
        what[f"{name}, gradient"], what[f"{name}, its average"] = next(made)
    results: list[dict[str, Any]] = []
    for name, values in what.items():
        for dtype in DTYPES:
            results.append({"values": name, "dtype": str(dtype), "share": share(values, dtype)})
            said = f"{results[-1]['share']:.3f} of the bytes"
            print(f"{name:24} {dtype!s:16} {said}")  # noqa: T201 - a script that reports
    for dtype in DTYPES:
        given = normal.to(dtype)
        message, back = compact.message_of(given), torch.empty_like(given)
        write_s = best_s(partial(compact.message_of, given))
        read_s = best_s(partial(compact.read, message, back))
        speeds = {"write": given.nbytes / write_s, "read": given.nbytes / read_s}
        results.append({"dtype": str(dtype), "bytes_per_s": speeds})
        said = f"{1e-9 * speeds['write']:.1f} GB/s written, {1e-9 * speeds['read']:.1f} read"
        print(f"{'speed':24} {dtype!s:16} {said}")  # noqa: T201 - a script that reports
    if args.json:
        write_record(args.json, {"results": results}, command=sys.argv)


if __name__ == "__main__":
    main()
