"""Which rank is slow, and why: a plain Horovod script and four more lines, marked `# loft`.

    horovodrun -np 6 --gloo python examples/report_only.py
    horovodrun -np 6 --gloo python examples/report_only.py --slow-disk 5

Model, loader, optimizer and training loop are Horovod's own and stay as they were. `--slow-disk R`
makes rank R's data set slow, to see what the report says then. With LOFT_HVD_LOG_DIR=runs the same
is logged while training, for `loft-hvd report FILE`.
"""

from __future__ import annotations

import argparse
import time

import horovod.torch as hvd
import sklearn.datasets
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import loft_hvd as loft  # loft

LOCAL_BATCH_SIZE = 32


class Digits(Dataset[tuple[Tensor, Tensor]]):
    """scikit-learn's handwritten digits; reading one image takes `read_s`."""

    def __init__(self, read_s: float) -> None:
        images, labels = sklearn.datasets.load_digits(return_X_y=True)
        self._x = torch.tensor(images, dtype=torch.float32).div(16)
        self._y = torch.tensor(labels)
        self._read_s = read_s

    def __len__(self) -> int:
        return len(self._y)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        time.sleep(self._read_s)
        return self._x[index], self._y[index]


def main() -> None:
    """Train for a few epochs, then say which rank is slow."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--slow-disk", type=int, default=-1, metavar="RANK")
    options = parser.parse_args()
    hvd.init()
    torch.set_num_threads(1)  # the ranks share this machine's cores
    torch.manual_seed(1)
    dataset = Digits(read_s=2e-3 if hvd.rank() == options.slow_disk else 0.0)
    sampler: DistributedSampler[tuple[Tensor, Tensor]] = DistributedSampler(
        dataset, hvd.size(), hvd.rank()
    )
    loader = DataLoader(dataset, batch_size=LOCAL_BATCH_SIZE, sampler=sampler, drop_last=True)
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        named_parameters=model.named_parameters(),
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    balancer = loft.Balancer(LOCAL_BATCH_SIZE * hvd.size(), policy="report")  # loft
    loft.attach(optimizer, balancer)  # loft
    for epoch in range(options.epochs):
        sampler.set_epoch(epoch)
        for images, labels in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(images), labels).backward()
            optimizer.step()
    if hvd.rank() == 0:
        print(balancer.explain())  # loft


if __name__ == "__main__":
    main()
