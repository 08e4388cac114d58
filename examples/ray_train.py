"""Ray Train's torch trainer with unequal batches and a robust rule; one rank is faulty.

    python examples/ray_train.py --sizes 16 16 8 --faulty 2

What loft_hvd changes in a script of Ray Train is marked ``# loft``. It needs ``ray[train]``.
"""

import argparse
from typing import Any

import ray.train
import ray.train.torch
import sklearn.datasets
import torch
import torch.nn.functional as F
from torch.utils.data import TensorDataset

import loft_hvd as loft


def train(options: dict[str, Any]) -> None:
    """Train on one rank: Ray calls it on each of them."""
    rank, sizes = ray.train.get_context().get_world_rank(), options["sizes"]
    torch.manual_seed(1)
    images, labels = sklearn.datasets.load_digits(return_X_y=True)
    dataset = TensorDataset(torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels))
    layers = torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10)
    model = ray.train.torch.prepare_model(torch.nn.Sequential(*layers))
    balancer = loft.Balancer(sum(sizes), policy=sizes)  # loft
    loader = loft.DataLoader(dataset, balancer, drop_last=True)  # loft: no prepare_data_loader
    hook = loft.ddp_hook(loft.TrimmedMean(f=1), balancer)  # loft
    model.register_comm_hook(None, hook)  # loft
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for epoch in range(options["epochs"]):
        loader.set_epoch(epoch)
        shown = loft.Metric("loss", loader=loader)  # loft: over samples, not over ranks
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(-100 * x if rank == options["faulty"] else x), y)
            loss.backward()
            optimizer.step()
            if rank != options["faulty"]:
                shown.update(loss.detach(), len(y))
        mean = float(shown.avg)  # on every rank: reading it is a collective
        ray.train.report({"loss": mean})  # Ray takes no tensors
        if rank == 0:
            print(f"epoch {epoch}: loss {mean:.4f}")
    if rank == 0:
        print(hook.report())  # loft


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=[16, 16, 8])
    parser.add_argument("--faulty", type=int, default=-1, help="a rank that computes from garbage")
    parser.add_argument("--epochs", type=int, default=4)
    given = vars(parser.parse_args())
    ray.init(num_cpus=len(given["sizes"]), include_dashboard=False)  # they share the cores here
    scaling = ray.train.ScalingConfig(num_workers=len(given["sizes"]))
    ray.train.torch.TorchTrainer(train, train_loop_config=given, scaling_config=scaling).fit()
