"""DistributedDataParallel with unequal batches and a robust rule, started by torchrun.

    torchrun --nproc-per-node 4 examples/ddp.py --batch-sizes 16,16,8,4 --faulty 3

Marked ``# loft``: what is new. The faulty rank computes from garbage: it is named, and left out.
"""

import argparse
from contextlib import nullcontext

import sklearn.datasets
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

import loft_hvd as loft

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--batch-sizes", default="16,16,8,4")
parser.add_argument("--faulty", type=int, default=-1, help="a rank that computes from garbage")
parser.add_argument("--passes", type=int, default=1, help="backward passes of a step")
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
model = DistributedDataParallel(torch.nn.Sequential(*layers))
balancer = loft.Balancer(sum(sizes), policy=sizes)  # loft
loader = loft.DataLoader(dataset, balancer, drop_last=True, seed=3)  # loft: no sampler
rule = loft.TrimmedMean(f=1) if len(sizes) > 2 else loft.Mean()  # loft
hook = loft.ddp_hook(rule, balancer, quarantine=len(sizes) > 2)  # loft
model.register_comm_hook(None, hook)  # loft
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
for epoch in range(options.epochs):
    loader.set_epoch(epoch)
    shown = loft.Metric("loss", loader=loader)  # loft: over samples, not over ranks
    for number, (x, y) in enumerate(loader, start=1):
        # DDP's way to sum several passes into a step; each is weighed by its own batch.
        is_last = number % options.passes == 0 or number == len(loader)
        with nullcontext() if is_last else model.no_sync():
            loss = F.cross_entropy(model(-100 * x if rank == options.faulty else x), y)
            (loss / options.passes).backward()
        if is_last:
            optimizer.step()
            optimizer.zero_grad()
        if rank != options.faulty:
            shown.update(loss.detach(), len(y))
    mean = shown.avg  # on every rank: reading it is a collective
    if rank == 0:
        print(f"epoch {epoch}: loss {mean:.4f}")
if rank == 0:
    print(hook.report())  # loft
dist.destroy_process_group()
