"""What the sample store reads in a second, and what it takes of a step, against its goals.

    python -m benchmarks.store_rates --json benchmarks/results/store-rates.json
    python -m benchmarks.store_rates --parts local,step

Samples are float32 images of 110 kB, read a batch at a time, as a loader reads them. The parts:

    local     samples that this rank keeps, in memory and in a file (in the page cache)
    step      a training step on what the store keeps, against the same on the bare data set
    loopback  samples that a peer keeps, against a bare Arrow Flight ``do_get`` of as many bytes
    link      the same between two hosts with a link of 1 Gb/s, as root (tests/testbed/README.md)

Rounds are short, so that other work on the machine falls between them more often than on them, and
figures are medians over rounds. Contestants take turns within a round, every second round from last
to first, and ratios are those within a round. Steps are judged by CPU seconds: what the store adds
is computing alone, and of two steps of 50 ms other work meets one. Bytes are those of the images,
without what describes them. The exit status is 1 where a goal is missed.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import torch
import torch.nn.functional as F
from pyarrow import flight
from torch import Tensor
from torch.utils.data import Dataset, default_collate

import loft_hvd as loft
from loft_hvd.bench.record import check_writable, write_record
from loft_hvd.store.samples import encode_sample
from loft_hvd.transport.base import Transport
from loft_hvd.transport.default import default_transport
from loft_hvd.transport.local import LocalTransport, LocalWorld, run_ranks
from tests.testbed.hosts import Testbed, why_not

__all__ = ["PARTS", "Goal", "Scale", "main"]

_SIDE = 166  # pixels: 110 kB of float32, as much as an ImageNet photograph
_IMAGE_BYTES = 4 * _SIDE * _SIDE
_KEPT_BYTES = _IMAGE_BYTES + 512  # of a sample in a store, with what describes it
_LINK_BYTES_PER_S = 1e9 / 8
_TIMEOUT_S = 20.0  # of a peer: on a crowded machine nobody shall be left alone for being late
_LONGEST_S = 300.0  # of a part with two ranks
_KEEPER, _READER = 0, 1  # ranks

Call = Callable[[Sequence[int]], object]  # of the samples of a batch


@dataclass(frozen=True)
class Goal:
    """A figure, and what it must not be below, or above."""

    part: str
    what: str
    value: float
    limit: float
    unit: str
    is_most: bool = False

    @property
    def is_met(self) -> bool:
        """Whether it is on the right side of its limit; what is no number is not."""
        return self.value <= self.limit if self.is_most else self.value >= self.limit


@dataclass(frozen=True)
class Scale:
    """How much is measured."""

    num_samples: int = 512  # 56 MB: more than a processor's caches hold
    batch: int = 16  # samples that are read at a time
    rounds: int = 300

    def batches(self) -> Iterator[list[int]]:
        """Yield the samples of each round: all in random order, again and again."""
        generator = torch.Generator().manual_seed(0)
        order: list[int] = []
        for _ in range(self.rounds):
            if len(order) < self.batch:
                order = torch.randperm(self.num_samples, generator=generator).tolist()
            yield [order.pop() for _ in range(self.batch)]


class Images(Dataset[tuple[Tensor, int]]):
    """Images, [num_samples, 1, 166, 166], and their numbers; a sample is a view."""

    def __init__(self, values: Tensor) -> None:
        self.values = values

    @classmethod
    def random(cls, num_samples: int) -> Images:
        """Return the same images on every rank and in every run."""
        generator = torch.Generator().manual_seed(0)
        return cls(torch.rand(num_samples, 1, _SIDE, _SIDE, generator=generator))

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.values[index], index


def prepare() -> None:
    """Leave this process as one that trains is: it has freed large tensors.

    From then on glibc keeps memory of their size, where it otherwise gives that of each batch back.
    """
    torch.set_num_threads(1)
    torch.ones(24 << 20, dtype=torch.uint8)


class Spent(NamedTuple):
    """Seconds of a round, by a clock and of this process's CPU time."""

    wall_s: float
    cpu_s: float


def take_turns(calls: Mapping[str, Call], scale: Scale) -> dict[str, list[Spent]]:
    """Return what each contestant took in each round, after one round to warm up."""
    found: dict[str, list[Spent]] = {name: [] for name in calls}
    for call in calls.values():
        call(range(scale.batch))
    for number, batch in enumerate(scale.batches()):
        turns = list(calls.items())
        for name, call in turns[::-1] if number % 2 else turns:
            began, cpu = time.perf_counter(), time.process_time()
            call(batch)
            found[name].append(Spent(time.perf_counter() - began, time.process_time() - cpu))
    return found


def median_wall_s(spent: Sequence[Spent]) -> float:
    """Return the seconds of the median round, by the clock."""
    return statistics.median(each.wall_s for each in spent)


def bytes_per_s(spent: Sequence[Spent], scale: Scale) -> float:
    """Return the bytes of images that the median round read in a second."""
    return scale.batch * _IMAGE_BYTES / median_wall_s(spent)


def check(samples: Sequence[tuple[Tensor, int]], numbers: Sequence[int], data: Images) -> None:
    """End the run where a store does not return what the data set has."""
    for (image, number), asked in zip(samples, numbers, strict=True):
        if number != asked or not torch.equal(image, data.values[asked]):
            raise SystemExit(f"sample {asked} is wrong: nothing is measured")


def one_by_one(data: Dataset[Any]) -> Callable[[Sequence[int]], list[Any]]:
    """Return what reads a batch as a loader reads a data set that has no ``__getitems__``."""
    return lambda batch: [data[each] for each in batch]


def alone(data: Images, *, folder: Path | None = None) -> loft.SampleStore:
    """Return a store of one rank that keeps all samples, in memory or in ``folder``."""
    num_bytes = len(data) * _KEPT_BYTES + (1 << 20)
    disk_bytes, memory_bytes = (num_bytes, 0) if folder else (0, num_bytes)
    store = loft.SampleStore(
        data,
        memory_bytes=memory_bytes,
        disk_bytes=disk_bytes,
        folder=folder,
        transport=LocalWorld(1).transport(0),
    )
    everything = range(len(data))
    store.__getitems__(everything)
    check(store.__getitems__(everything), everything, data)
    if store.counters["own"] != len(data):
        raise SystemExit("the store does not keep all samples: nothing is measured")
    return store


# The parts. Each returns its goals, and the seconds of all rounds.

Found = tuple[list[Goal], dict[str, list[Spent]]]


def local(scale: Scale) -> Found:
    """Read samples that this rank keeps, one by one and by the batch."""
    data = Images.random(scale.num_samples)
    with tempfile.TemporaryDirectory() as name:
        stores = {"memory": alone(data), "a file": alone(data, folder=Path(name))}
        calls: dict[str, Call] = {}
        for where, store in stores.items():
            calls[f"{where}, one by one"] = one_by_one(store)
            calls[f"{where}, by the batch"] = store.__getitems__
        spent = take_turns(calls, scale)
        for store in stores.values():
            store.close()
    goals = [
        Goal("local", f"from {name}", bytes_per_s(each, scale) / 1e9, 2.0, "GB/s")
        for name, each in spent.items()
    ]
    return goals, spent


def step(scale: Scale) -> Found:
    """Train on batches of the bare data set, and on the same through a store."""
    from benchmarks.testbed.contest import make_model  # takes Horovod and scikit-learn

    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def train(get: Callable[[Sequence[int]], list[tuple[Tensor, int]]]) -> Call:
        def call(batch: Sequence[int]) -> None:
            images, numbers = default_collate(get(batch))
            optimizer.zero_grad()
            F.cross_entropy(model(images), numbers % 10).backward()
            optimizer.step()

        return call

    in_memory = Images.random(scale.num_samples)
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "images"
        path.write_bytes(in_memory.values.numpy().data)
        mapped = torch.from_file(
            str(path), shared=False, size=in_memory.values.numel(), dtype=torch.float32
        )
        bare = {"tensors": in_memory, "a mapped file": Images(mapped.view_as(in_memory.values))}
        calls: dict[str, Call] = {}
        for what, data in bare.items():
            calls[what] = train(one_by_one(data))
            calls[f"{what}, kept"] = train(alone(data).__getitems__)
        spent = take_turns(calls, scale)
    goals = []
    for what in bare:
        rounds = zip(spent[f"{what}, kept"], spent[what], strict=True)
        more = statistics.median(kept.cpu_s / each.cpu_s for kept, each in rounds) - 1
        step_ms = 1e3 * statistics.median(each.cpu_s for each in spent[what])
        said = f"more than a step of {step_ms:.0f} ms on {what}"
        goals.append(Goal("step", said, 100 * more, 3.0, "%", is_most=True))
    return goals, spent


# What a peer keeps.


def open_store(data: Images, folder: Path, transport: Transport | None = None) -> loft.SampleStore:
    """Open a store of two ranks: the keeper has all samples, in ``folder``, the reader none."""
    transport = default_transport() if transport is None else transport
    if transport.rank == _KEEPER:
        alone(data, folder=folder).close()  # an earlier run: what it has kept is announced
        return loft.SampleStore(
            data,
            memory_bytes=0,
            disk_bytes=len(data) * _KEPT_BYTES + (1 << 20),
            folder=folder,
            transport=transport,
        )
    return loft.SampleStore(data, memory_bytes=0, transport=transport, timeout_s=_TIMEOUT_S)


@contextmanager
def from_peer_alone(store: loft.SampleStore) -> Iterator[None]:
    """End the run where a sample that is read in the block does not come from the peer."""
    before = dict(store.counters)
    yield
    if store.counters["source"] > before["source"] or store.counters["peer"] == before["peer"]:
        raise SystemExit("samples came from the source: the figures are none of a peer")


def serve_bare(told: Connection, scale: Scale) -> None:
    """Send batches of as many bytes as a store's samples have, which are there from the start."""
    image, number = Images.random(1)[0]
    length = len(encode_sample((image, number)))
    values = np.random.default_rng(0).integers(0, 256, scale.num_samples * length, np.uint8)
    whole = scale.batch * length
    offsets = pa.py_buffer(np.arange(scale.batch + 1, dtype=np.int64) * length)
    batches = []
    for first in range(0, len(values) - whole + 1, whole):
        buffers = [None, offsets, pa.py_buffer(values[first : first + whole])]
        column = pa.LargeBinaryArray.from_buffers(pa.large_binary(), scale.batch, buffers)
        batches.append(pa.record_batch([column], names=["bytes"]))

    class Server(flight.FlightServerBase):  # type: ignore[misc]  # pyarrow has no types
        def do_get(self, context: Any, ticket: Any) -> Any:
            batch = batches[int(ticket.ticket) % len(batches)]
            return flight.RecordBatchStream(pa.table([batch.column(0)], names=["bytes"]))

    told.send(Server("grpc://127.0.0.1:0").port)
    told.poll(None)  # until the other end is closed
    os._exit(0)  # gRPC's own way down waits for connections


@contextmanager
def bare_flight(scale: Scale) -> Iterator[Call]:
    """Return what asks a bare server in a process of its own for a batch, while the block runs."""
    context = multiprocessing.get_context("spawn")
    told, tells = context.Pipe()
    process = context.Process(target=serve_bare, args=(tells, scale), daemon=True)
    process.start()
    tells.close()
    try:
        client = flight.FlightClient(f"grpc://127.0.0.1:{told.recv()}")

        def call(batch: Sequence[int]) -> None:
            ticket = flight.Ticket(str(batch[0]).encode())
            if sum(chunk.data.num_rows for chunk in client.do_get(ticket)) != len(batch):
                raise SystemExit("the bare server does not send all samples: nothing is measured")

        yield call
    finally:
        told.close()
        process.join(_TIMEOUT_S)


def loopback(scale: Scale) -> Found:
    """Read samples that a peer on this machine keeps, by turns with a bare server."""
    data, is_over = Images.random(scale.num_samples), threading.Event()

    def work(transport: LocalTransport) -> dict[str, list[Spent]]:
        store = open_store(data, Path(name), transport)
        try:
            if transport.rank == _KEEPER:
                is_over.wait(_LONGEST_S)
                return {}
            with bare_flight(scale) as bare, from_peer_alone(store):
                first = range(scale.batch)
                check(store.__getitems__(first), first, data)
                return take_turns({"do_get": bare, "store": store.__getitems__}, scale)
        finally:
            is_over.set()
            store.close()

    with tempfile.TemporaryDirectory() as name:
        spent = run_ranks(2, work, timeout_s=_LONGEST_S)[_READER]
    rounds = zip(spent["do_get"], spent["store"], strict=True)
    share = statistics.median(bare.wall_s / kept.wall_s for bare, kept in rounds)
    rate = bytes_per_s(spent["do_get"], scale) / 1e9
    said = f"of a bare do_get, which has {rate:.2f} GB/s"
    return [Goal("loopback", said, 100 * share, 50.0, "%")], spent


def link(scale: Scale) -> Found:
    """Read samples that a peer keeps behind a link of 1 Gb/s."""
    testbed = Testbed(os.environ.get("TESTBED_NAME", f"rates{os.getpid()}"))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "scale.json").write_text(json.dumps(asdict(scale)))
        try:
            testbed.up(2, "--rate", "1gbit")
            done = testbed.run(
                ["-m", "benchmarks.store_rates", "--rank", name], timeout_s=_LONGEST_S
            )
        finally:
            testbed.down()
        if done.returncode != 0:
            raise SystemExit(f"the job on the testbed failed:\n{done.output[-6000:]}")
        spent = [Spent(*each) for each in json.loads((folder / "spent.json").read_text())]
    share = bytes_per_s(spent, scale) / _LINK_BYTES_PER_S
    return [Goal("link", "of 1 Gb/s", 100 * share, 80.0, "%")], {"store": spent}


def be_rank(folder: Path) -> None:
    """Be one of the two ranks of ``link``, on a host of its own."""
    import horovod.torch as hvd

    prepare()
    hvd.init()
    scale = Scale(**json.loads((folder / "scale.json").read_text()))
    data = Images.random(scale.num_samples)
    store = open_store(data, folder / "kept")
    if hvd.rank() == _READER:
        with from_peer_alone(store):
            first = range(scale.batch)
            check(store.__getitems__(first), first, data)
            spent = take_turns({"store": store.__getitems__}, scale)["store"]
        (folder / "spent.json").write_text(json.dumps(spent))
    hvd.barrier()  # until then the reader may ask
    store.close()
    hvd.shutdown()


PARTS: dict[str, Callable[[Scale], Found]] = {
    "local": local,
    "step": step,
    "loopback": loopback,
    "link": link,
}
_SCALES = {"step": Scale(rounds=150)}  # a step is a hundred times as long as a read


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what the command line says, print it, and return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.store_rates",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--parts", default=",".join(PARTS), help="some of %(default)s")
    parser.add_argument("--rounds", type=int, help="of each part")
    parser.add_argument("--batch", type=int, help="samples that are read at a time")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rank", type=Path, help=argparse.SUPPRESS)  # what a host runs
    given = parser.parse_args(arguments)
    if given.rounds is not None and given.rounds < 2:
        parser.error(f"--rounds {given.rounds}: give at least 2, of which a median can be told")
    if given.rank:
        be_rank(given.rank)
        return 0
    parts = given.parts.split(",")
    if unknown := ", ".join(sorted(set(parts) - set(PARTS))):
        parser.error(f"no part {unknown}; there are {', '.join(PARTS)}")
    if "link" in parts and (reason := why_not()):
        parser.error(f"{reason}; leave out the part link")
    check_writable(given.json)
    prepare()
    asked = {name: getattr(given, name) for name in ("rounds", "batch") if getattr(given, name)}
    goals: list[Goal] = []
    found: dict[str, Any] = {}
    for part in parts:
        scale = replace(_SCALES.get(part, Scale()), **asked)
        load = os.getloadavg()[0]
        of_part, spent = PARTS[part](scale)
        took = {name: quartiles(rounds) for name, rounds in spent.items()}
        found[part] = {"scale": asdict(scale), "load_1_min": round(load, 1), "seconds": took}
        for goal in of_part:
            sys.stdout.write(line_of(goal) + "\n")
            sys.stdout.flush()
        goals += of_part
    if given.json:
        command = ["python", "-m", "benchmarks.store_rates", *(arguments or sys.argv[1:])]
        told = {"goals": [asdict(goal) | {"is_met": goal.is_met} for goal in goals]}
        write_record(given.json, told | found, command=command)
    return 0 if all(goal.is_met for goal in goals) else 1


def quartiles(rounds: Sequence[Spent]) -> dict[str, list[float]]:
    """Return the quartiles of the seconds of a round, for JSON."""
    clocks = zip(Spent._fields, zip(*rounds, strict=True), strict=True)
    return {name: statistics.quantiles(each) for name, each in clocks}


def line_of(goal: Goal) -> str:
    """Return a row of the table."""
    word, bound = "met" if goal.is_met else "MISSED", "at most" if goal.is_most else "at least"
    value, limit = f"{goal.value:.3g} {goal.unit}", f"{bound} {goal.limit:g} {goal.unit}"
    return f"{word:6} {goal.part:9}{value:>10} {goal.what}, {limit}"


if __name__ == "__main__":
    sys.exit(main())
