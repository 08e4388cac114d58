"""Fixed, unequal batch sizes: one number for each rank, weighed exactly.

    horovodrun -np 4 --gloo python examples/fixed_sizes.py --batch-sizes 2,2,2,15

For a cluster whose ranks you know: three small GPUs and a large one, say. Gradients are averaged by
samples, so training equals one process with batches of 21; the learning rate belongs to those 21.
"""

import argparse

import horovod.torch as hvd
import sklearn.datasets
import torch
import torch.nn.functional as F
from torch.utils.data import TensorDataset

import loft_hvd as loft

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--batch-sizes", default="2,2,2,15")
parser.add_argument("--epochs", type=int, default=3)
options = parser.parse_args()
sizes = [int(part) for part in options.batch_sizes.split(",")]
hvd.init()
torch.set_num_threads(1)  # the ranks share this machine's cores
torch.manual_seed(1)
images, labels = sklearn.datasets.load_digits(return_X_y=True)
dataset = TensorDataset(torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels))
model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))
balancer = loft.Balancer(sum(sizes), policy=sizes)
loader = loft.DataLoader(dataset, balancer, seed=3)
optimizer = loft.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
    named_parameters=model.named_parameters(),
    balancer=balancer,
)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)
for epoch in range(options.epochs):
    loader.set_epoch(epoch)
    loss_sum, count = 0.0, 0
    for x, y in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        loss_sum += float(loss.detach()) * loader.local_batch_size  # 0 for padding
        count += loader.local_batch_size
    mean = loft.average(loss_sum / max(count, 1), count)  # over samples, not over ranks
    if hvd.rank() == 0:
        print(f"epoch {epoch}: loss {mean:.4f} over {len(dataset)} samples")
if hvd.rank() == 0:
    print(balancer.explain())
