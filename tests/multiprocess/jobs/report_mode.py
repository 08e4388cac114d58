"""Prepared jobs for the report mode: ``report_mode.py cpu|disk|link|faulty|nothing [POLICY]``.

Every rank's device is emulated: a batch takes a fixed time. Then rank 2 computes more (cpu), its
data set reads slowly (disk), it gets its samples over a throttled connection (link), it sends its
gradients sign-flipped (faulty), or all are alike (nothing). Rank 0 prints what the balancer says.
"""

from __future__ import annotations

import http.client
import http.server
import sys
import threading
import time

import horovod.torch as hvd
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import loft_hvd as loft

SLOW_RANK, LOCAL_BATCH, NUM_SAMPLES, NUMEL = 2, 12, 4800, 8192
DEVICE_S = 0.04  # of a batch
EXTRA_CPU_S = 0.005  # of a sample, by the thread's own CPU clock
DISK_S = 0.007  # of a sample
LINK_BYTES_PER_S = 4.5e6  # a sample is 32 kB: 7 ms
INTERVAL, NUM_STEPS, LOG_EVERY = 15, 46, 5
FAULTY_INTERVAL, FAULTY_STEPS = 40, 80  # until a worker stands out beyond chance


class Samples(Dataset[Tensor]):
    """Made up where they are asked for; reading one takes ``read_s``."""

    def __init__(self, read_s: float = 0.0) -> None:
        self._read_s = read_s

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> Tensor:
        time.sleep(self._read_s)
        return torch.full((NUMEL,), float(index))


class RemoteSamples(Samples):
    """Reads samples that another rank serves, one connection a loader process."""

    def __init__(self, port: int) -> None:
        super().__init__()
        self._port = port
        self._connection: http.client.HTTPConnection | None = None

    def __getitem__(self, index: int) -> Tensor:
        if self._connection is None:
            self._connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=30)
        self._connection.request("GET", f"/{hvd.rank()}/{index}")
        body = self._connection.getresponse().read()
        return torch.frombuffer(bytearray(body), dtype=torch.float32)


class Server(http.server.BaseHTTPRequestHandler):
    """Serves ``/RANK/INDEX``; the slow rank's link takes so many bytes a second."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # or each answer waits 40 ms for an acknowledgement

    def do_GET(self) -> None:
        _, rank, index = self.path.split("/")
        body = torch.full((NUMEL,), float(index)).numpy().tobytes()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        began = time.monotonic()
        for start in range(0, len(body), 4096):
            self.wfile.write(body[start : start + 4096])
            if int(rank) == SLOW_RANK:
                due = began + (start + 4096) / LINK_BYTES_PER_S
                time.sleep(max(0.0, due - time.monotonic()))

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


def serve() -> int:
    """Start the server on rank 0 and return its port on every rank."""
    port = 0
    if hvd.rank() == 0:
        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server)
        threading.Thread(target=server.serve_forever, name="samples", daemon=True).start()
        port = server.server_address[1]
    return int(hvd.broadcast(torch.tensor(port), root_rank=0, name="port"))


class Device(nn.Module):
    """A layer on an emulated device, and for the slow CPU a good deal of real work."""

    def __init__(self, extra_s: float) -> None:
        super().__init__()
        self.layer = nn.Linear(NUMEL, 2)
        self._extra_s = extra_s

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(DEVICE_S)
        began = time.thread_time()
        work = torch.ones(64, 64)
        while time.thread_time() - began < self._extra_s * len(x):
            work = work @ work / 64
        out: Tensor = self.layer(x)
        return out


def main() -> None:
    kind = sys.argv[1]
    hvd.init()
    torch.set_num_threads(1)
    torch.manual_seed(0)  # one start for all ranks
    is_slow = hvd.rank() == SLOW_RANK
    placement, dataset = None, Samples(DISK_S if kind == "disk" and is_slow else 0.0)
    if kind == "link":  # all samples are on rank 0
        placement = loft.Placement.from_function(lambda index: [0], NUM_SAMPLES)
        dataset = RemoteSamples(serve())
    model = Device(EXTRA_CPU_S if kind == "cpu" and is_slow else 0.0)
    policy = sys.argv[2] if len(sys.argv) > 2 else "report"
    interval = FAULTY_INTERVAL if kind == "faulty" else INTERVAL
    balancer = loft.Balancer(LOCAL_BATCH * hvd.size(), policy, interval=interval)
    loader = loft.DataLoader(dataset, balancer, placement=placement, num_workers=1)
    optimizer = loft.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=1e-4),
        model.named_parameters(),
        rule=loft.TrimmedMean(f=1) if kind == "faulty" else loft.Mean(),
        balancer=balancer,
    )
    if kind == "faulty":
        loft.attacks.attach(optimizer, loft.attacks.SignFlip(scale=10), ranks=[SLOW_RANK])
    num_steps = FAULTY_STEPS if kind == "faulty" else NUM_STEPS
    for step, x in zip(range(num_steps), loader, strict=False):
        optimizer.zero_grad()
        loss = (model(x / NUM_SAMPLES) - 1).square().mean()
        loss.backward()
        optimizer.step()
        if step % LOG_EVERY == 0:
            optimizer.log_scalars(loss=loss)
    if hvd.rank() == 0:
        print("\n" + balancer.explain(), flush=True)
    hvd.barrier()  # the samples' server stays up until all are done


if __name__ == "__main__":
    main()
