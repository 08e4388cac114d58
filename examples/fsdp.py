"""FSDP2 with unequal batches and a robust rule, started by torchrun.

    torchrun --nproc-per-node 4 examples/fsdp.py --batch-sizes 16,16,8,4 --faulty 3

What loft_hvd changes in a script with ``fully_shard`` is marked ``# loft``. The faulty rank
computes from garbage: it is named, and left out while enough others remain.
"""

import argparse

import sklearn.datasets
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import TensorDataset

import loft_hvd as loft

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--batch-sizes", default="16,16,8,4")
parser.add_argument("--faulty", type=int, default=-1, help="a rank that computes from garbage")
parser.add_argument("--epochs", type=int, default=4)
options = parser.parse_args()
sizes = [int(part) for part in options.batch_sizes.split(",")]
dist.init_process_group("gloo")  # on GPUs "nccl", and set_device and .cuda() as in any script
rank = dist.get_rank()
torch.set_num_threads(1)  # the ranks share this machine's cores
torch.manual_seed(1)
images, labels = sklearn.datasets.load_digits(return_X_y=True)
dataset = TensorDataset(torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels))
layers = torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10)
model = torch.nn.Sequential(*layers)
mesh = init_device_mesh("cpu", (len(sizes),))  # "cuda" on GPUs
for module in (layers[0], layers[2], model):
    fully_shard(module, mesh=mesh)
balancer = loft.Balancer(sum(sizes), policy=sizes)  # loft
loader = loft.DataLoader(dataset, balancer, drop_last=True, seed=3)  # loft: no sampler
hook = loft.fsdp_hook(model, loft.TrimmedMean(f=1), balancer, quarantine=True)  # loft
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
for epoch in range(options.epochs):
    loader.set_epoch(epoch)
    shown = loft.Metric("loss", loader=loader)  # loft: over samples, not over ranks
    for x, y in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(-100 * x if rank == options.faulty else x), y)
        loss.backward()
        optimizer.step()
        if rank != options.faulty:
            shown.update(loss.detach(), len(y))
    mean = shown.avg  # on every rank: reading it is a collective
    if rank == 0:
        print(f"epoch {epoch}: loss {mean:.4f}")
if rank == 0:
    print(hook.report())  # loft
dist.destroy_process_group()
