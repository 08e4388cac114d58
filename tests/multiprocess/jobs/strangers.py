"""A job with 256 descriptors that tells strangers where to come: ``strangers.py FOLDER WHAT``.

Rank 0 writes to FOLDER/place where its heartbeat listens: with "opening" as soon as it does, before
the other rank knows, and with "training" at step 20. It prints how long the opening took, what
steps took while strangers came here and while they went elsewhere, how much memory all that took,
and a digest of the weights after as many steps as a calm job takes.
"""

from __future__ import annotations

import hashlib
import json
import resource
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import torch

import loft_hvd as loft
from loft_hvd.failures import watched
from loft_hvd.failures.handshake import Listener, OpenedLinks
from loft_hvd.failures.watched import heartbeat_of
from loft_hvd.transport.base import Channel

NUM_STEPS = 400  # before the digest; a job goes on until the strangers have ended
MOST_STEPS = 20_000


def write_place(folder: Path, listener: object) -> None:
    assert isinstance(listener, Listener)
    (address, port), *_ = listener.addresses
    (folder / "part").write_text(f"{address} {port}")
    (folder / "part").rename(folder / "place")


def tell_at_once(folder: Path) -> list[float]:
    """Let strangers be there before any rank; returns a list that takes the seconds of that.

    A crowd of them, if it comes within 7 s: other ranks wait for the door for 10.
    """
    real, waited = Listener.__init__, [0.0]

    def init(self: Listener, *args: object, **options: object) -> None:
        real(self, *args, **options)  # type: ignore[arg-type]
        write_place(folder, self)
        began = time.monotonic()
        while not (folder / "crowd").exists() and time.monotonic() < began + 7:
            time.sleep(0.01)
        waited[0] = time.monotonic() - began

    Listener.__init__ = init  # type: ignore[method-assign]
    return waited


def time_opening() -> list[float]:
    """Return a list that takes how many seconds it took to open the heartbeat."""
    module: Any = watched
    real, taken = module.open_links, [0.0]

    def open_links(channel: Channel) -> OpenedLinks:
        began = time.monotonic()
        links: OpenedLinks = real(channel)
        taken[0] = time.monotonic() - began
        return links

    module.open_links = open_links
    return taken


def read_state(folder: Path) -> str:
    """Return where the strangers go: "flood" (here), "calm" (elsewhere), or "" (not clear)."""
    try:
        return (folder / "state").read_text()
    except FileNotFoundError:
        return ""


def memory_mb() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 1e6


def main(folder: Path, what: str) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
    hvd.init()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    waited = tell_at_once(folder) if what == "opening" else [0.0]
    opening = time_opening()
    model = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.Tanh(), torch.nn.Linear(512, 8))
    optimizer = loft.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.05), model.named_parameters(), rule=loft.Median()
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    x, y = torch.randn(256, 256), torch.randn(256, 8)
    memory = memory_mb()
    times: dict[str, list[float]] = {"flood": [], "calm": []}
    digest = ""
    for step in range(MOST_STEPS):
        began, state = time.monotonic(), read_state(folder)
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        if state in times and read_state(folder) == state:
            times[state].append(time.monotonic() - began)
        if hvd.rank() == 0 and what == "training" and step == 20:
            write_place(folder, heartbeat_of("horovod.0")._connections._maker)  # type: ignore[union-attr]
        if step == NUM_STEPS:
            weights = torch.cat([each.detach().flatten() for each in model.parameters()])
            digest = hashlib.sha256(weights.numpy().tobytes()).hexdigest()
        over = torch.tensor([int(what == "calm" or (folder / "ended").exists())])
        if step % 20 == 0 and step >= NUM_STEPS and hvd.broadcast(over, 0, "over").item():
            break
        time.sleep(0.01)
    found = {
        "start_s": opening[0] - waited[0],
        "num_flooded": len(times["flood"]),
        "num_calm": len(times["calm"]),
        "flooded_ms": 1e3 * statistics.median(times["flood"] or [0.0]),
        "calm_ms": 1e3 * statistics.median(times["calm"] or [0.0]),
        "memory_mb": memory_mb() - memory,
        "digest": digest,
    }
    if hvd.rank() == 0:
        print(f"found {json.dumps(found)}", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
