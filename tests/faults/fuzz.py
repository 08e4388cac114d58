"""Every reader of files, states and lines from outside, fed with damaged ones.

    python -m tests.faults.fuzz --cases 100000            # all targets, the whole budget
    python -m tests.faults.fuzz --cases 1000 loader report

A case ends in success or in a ``LoftError``; anything else is a fault, and so is more than a second
or, over all cases of a target, more than 100 MB. What has refused a state is as it was before, and
what has taken one works.
"""

from __future__ import annotations

import argparse
import importlib
import io
import itertools
import json
import logging
import random
import resource
import socket
import sys
import tarfile
import tempfile
import time
import traceback
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

import loft_hvd as loft
from loft_hvd.balance.controller import Controller, Decision
from loft_hvd.balance.first_sizes import fit_first_sizes
from loft_hvd.balance.goodput import GradientNoise
from loft_hvd.balance.interval import COLUMNS, Interval, RankTimes
from loft_hvd.balance.memory import logged_caps
from loft_hvd.balance.turns import Crowd, Turns
from loft_hvd.codec import decode
from loft_hvd.errors import LoftError
from loft_hvd.failures.actions import HeartbeatSettings, ProcessControl
from loft_hvd.failures.call_sites import CallSite
from loft_hvd.failures.diagnosis import Diagnosis
from loft_hvd.failures.handshake import Listener, NewLink
from loft_hvd.failures.heartbeat import Heartbeat
from loft_hvd.failures.links import Link, Message
from loft_hvd.failures.process import RankProcess
from loft_hvd.failures.progress import Progress
from loft_hvd.fleet.jobs import Fleet, Host, Job, JobList
from loft_hvd.fleet.parse import read_cluster, read_jobs
from loft_hvd.fleet.run import describe, plan_job, to_dict
from loft_hvd.lightning import LoftCallback
from loft_hvd.pipeline.suspicion.report import NotFinite, SameData, WorkerReport
from loft_hvd.report.page import render_page
from loft_hvd.report.text import render_text
from loft_hvd.runlog import RunLog, read_run_log
from loft_hvd.simulate.scenario import read_scenario, scenario_from_dict
from loft_hvd.transport.datagram import LinkLosses
from loft_hvd.transport.local import LocalWorld
from tests.faults.damage import damaged_bytes, damaged_text, damaged_value
from tests.support.pages import blocks_of, read_page

__all__ = ["TARGETS", "Found", "fuzz", "sample_log"]

Case = Callable[[random.Random], None]  # raises what the reader raises
LIMIT_S, LIMIT_BYTES = 1.0, 100e6
_SCENARIOS = Path(loft.__file__).parent / "simulate" / "scenarios"
_REAL_LOG = Path(__file__).parents[1] / "unit/logs/slow_cpu.jsonl"
_MOST_BYTES = 8 * 2**30  # of address space, of which torch takes 1 to 2 GB


@dataclass
class Found:
    """What came of a target's cases."""

    outcomes: Counter[str] = field(default_factory=Counter)  # "taken", or the error's name
    faults: list[str] = field(default_factory=list)  # seed of the case, and the traceback
    slowest_s: float = 0.0  # of CPU time, of one case
    grown_bytes: float = 0.0  # of the process's peak, over all cases


def fuzz(target: str, *, num_cases: int, seed: int = 0) -> Found:
    """Run cases of a target; each has a seed of its own, named in what is found."""
    found = Found()
    with tempfile.TemporaryDirectory(dir=_fast_folder()) as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        case = TARGETS[target](Path(folder))
        with suppress(Exception):  # what is imported and cached once does not count
            case(random.Random(f"{target} warm"))
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for number in range(seed, seed + num_cases):
            began = time.process_time()
            try:
                case(random.Random(f"{target} {number}"))
                found.outcomes["taken"] += 1
            except LoftError as error:
                found.outcomes[type(error).__name__] += 1
                str(error).encode("utf-8", "backslashreplace")
            except Exception:
                found.faults.append(f"{target} {number}: {traceback.format_exc(limit=-6)}")
            took_s = time.process_time() - began
            found.slowest_s = max(found.slowest_s, took_s)
            if took_s > LIMIT_S:
                found.faults.append(f"{target} {number}: {took_s:.1f} s of CPU time")
        del case
        after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        found.grown_bytes = 1024.0 * (after - before)
        if found.grown_bytes > LIMIT_BYTES:
            found.faults.append(f"{target}: {found.grown_bytes / 1e6:.0f} MB more than before")
    return found


def _fast_folder() -> str | None:
    return "/dev/shm" if Path("/dev/shm").is_dir() else None


# Files.


def sample_log(folder: Path) -> bytes:
    """Return a log with a line of every kind."""
    log = RunLog(folder)
    log.write("run", world_size=3, global_batch_size=96, policy="loft", devices=["a"], caps=[None])
    log.write("plan", plan_id=0, first_step=0, sizes=[32, 32, 32])
    log.write("rules", rules=["median"], over=None, watched_from=10, note="")
    log.write("schedule", times_at=20, num_passes=2)
    for log.step in (20, 40):
        ranks = [RankTimes(r, 20, 32, 32, 0, 0.1, 0.1, 0.1 + r, 0, 0, 0, 0) for r in range(3)]
        shown = [asdict(rank) for rank in ranks]
        beside = {
            "crowd": asdict(Crowd(3, 2, 0.05, 0.1)),
            "turns": asdict(Turns([0, 1, 2], "fetch", 0.2, 30, 32)),
        }
        log.write("times", since=log.step - 20, num_ranks=3, ranks=shown, **beside)
        fits = [{"rank": rank, "predicted_s": 0.1 + rank} for rank in range(3)]
        log.write("fit", plan_id=0, predicted_s=2.1, ranks=fits)
        log.write_scalars({"loss": 1.0 / log.step})
    made = Decision(1, 86, (40, 40, 16), "5% less predicted", measured_s=2.1)
    log.write("decision", **asdict(made))
    log.write("saved", plan_id=1, share=0.04)
    whole = {"since": 6, "num_steps": 80, "num_bytes": 4_000, "whole_s": 0.02, "waited_s": 0.01}
    log.write("exchange", **whole, lane="mesh", bytes_per_s=None)
    log.write("plan", plan_id=1, first_step=86, sizes=[40, 40, 16])
    log.write("schedule", times_at=60, num_passes=4)
    reads = [{"rank": rank, "own": 9, "peer": 2, "source": 1} for rank in range(3)]
    log.write("store", epoch=1, ranks=reads)
    log.write("scope", scope="model")
    noise = GradientNoise(0.01, 2e-3, 4.0, 0.1, 90.0, 50)
    log.write("noise", **asdict(noise), scale=noise.scale)
    log.write("explain", text="policy loft: no times yet\nrank 1: poor")
    liar = WorkerReport((2,), 0.97, 0.9, 40.0, 0, 20, is_named=True, in_quarantine_until=90)
    honest = WorkerReport((0,), 0.02, 0.4, 1.0, 0, 20, is_named=False)
    log.write("suspicion", num_steps=40, workers=[asdict(honest), asdict(liar)])
    log.write("spread", ratios=[0.1, None, 0.2], usual=0.1)
    log.write("same_data", groups=[asdict(SameData((0, 2), 3, 24, 24))])
    log.write("not_finite", found=asdict(NotFinite(7, (1,), 3, "0.weight", is_nan=True)))
    log.write("cap", rank=1, device="host/1", cap=12, size=16, source="probe")
    log.write("fault", error="PeerError", text="rank 1 went")
    lossy = LinkLosses(peer=1, address="10.0.0.1:5100/udp", packets_sent=900, packets_lost=90)
    log.write("links", since=0, seconds=5.0, rank=0, num_links=1, links=[asdict(lossy)])
    log.write("thinned", num_lines=3)
    assert log.path is not None
    text = log.path.read_bytes()
    log.path.unlink()
    return text


def _damaged_lines(text: bytes, rng: random.Random) -> bytes:
    """Damage the bytes of a file of JSON lines, or the values of one of them."""
    if rng.random() < 0.5:
        return damaged_text(text, rng)
    lines = text.splitlines()
    at = rng.randrange(len(lines))
    # Damage that JSON cannot hold goes into the bytes, above.
    try:
        lines[at] = json.dumps(damaged_value(json.loads(lines[at]), rng)).encode()
    except (ValueError, TypeError, RecursionError):
        return damaged_text(text, rng)
    return b"\n".join(lines) + b"\n"


def _report(folder: Path) -> Case:
    text, path = sample_log(folder), folder / "loft-x.jsonl"

    def case(rng: random.Random) -> None:
        path.write_bytes(_damaged_lines(text, rng))
        entries = read_run_log(path)
        words, page = render_text(entries), render_page(entries, title="\x1b[2J\udc80")
        for shown in (words, page):
            shown.encode()
            assert not set(shown) & set(map(chr, [*range(9), *range(11, 32), *range(127, 160)]))

    return case


def _replay(folder: Path) -> Case:
    path = folder / "plans.jsonl"
    rows = [{"first_step": at, "sizes": [32 + at, 32 - at]} for at in (0, 5, 9)]
    plans = "".join(json.dumps(row) + "\n" for row in rows).encode()
    log = sample_log(folder)

    def case(rng: random.Random) -> None:
        path.write_bytes(_damaged_lines(rng.choice([plans, log]), rng))
        policy = loft.Replay(path)
        Controller(64, 2, policy, max_batch=60)

    return case


def _caps(folder: Path) -> Case:
    text, path = sample_log(folder), folder / "loft-x.jsonl"

    def case(rng: random.Random) -> None:
        path.write_bytes(_damaged_lines(text, rng))
        assert all(type(cap) is int and cap > 0 for cap in logged_caps(folder).values())

    return case


def _scenario(folder: Path) -> Case:
    toml = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    texts = [path.read_bytes() for path in sorted(_SCENARIOS.glob("*.toml"))]
    contents = [toml.loads(text.decode()) for text in texts]
    path = folder / "s.toml"

    def case(rng: random.Random) -> None:
        if rng.random() < 0.5:
            path.write_bytes(damaged_text(rng.choice(texts), rng))
            read_scenario(path)
        else:
            content = damaged_value(rng.choice(contents), rng)
            scenario_from_dict(content)

    return case


def _plan(folder: Path) -> Case:
    """The files of docs/plan.md, one of them damaged; what is read is planned."""
    paths = folder / "cluster.toml", folder / "jobs.toml"
    blocks = [block.text for block in blocks_of(read_page("plan.md")) if block.kind == "toml"][:2]
    toml = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    contents = [toml.loads(text) for text in blocks]

    def read(rng: random.Random, spoilt: int) -> tuple[Fleet, list[Job]]:
        if rng.random() < 0.5:
            for at, (path, text) in enumerate(zip(paths, blocks, strict=True)):
                whole = text.encode()
                path.write_bytes(damaged_text(whole, rng) if at == spoilt else whole)
            fleet = read_cluster(paths[0])
            return fleet, list(read_jobs(paths[1], fleet).values())
        found = [damaged_value(x, rng) if at == spoilt else x for at, x in enumerate(contents)]
        jobs = decode(JobList, found[1], what="jobs").jobs
        return decode(Fleet, found[0], what="cluster"), jobs

    def case(rng: random.Random) -> None:
        fleet, jobs = read(rng, rng.randrange(2))
        for job in jobs:
            plan = plan_job(fleet, job, simulates=False)
            json.dumps(to_dict(plan), allow_nan=False)
            describe(plan)

    return case


def _plan_log(folder: Path) -> Case:
    path, text = folder / "loft-1.jsonl", _REAL_LOG.read_bytes()
    fleet = Fleet([Host("vm", {"CPU": 3}, 1e9)])
    job = Job("job", ["x"], 4.0, 36, steps=1, logs=[str(path)])

    def case(rng: random.Random) -> None:
        path.write_bytes(_damaged_lines(text, rng))
        plan_job(fleet, job, simulates=False, assume=rng.random() < 0.5)

    return case


def _first_sizes(folder: Path) -> Case:
    path = folder / "sizes.json"
    text = json.dumps({"global_batch_size": 24, "hosts": {"a": [8, 8], "b": [8]}}).encode()

    def case(rng: random.Random) -> None:
        path.write_bytes(damaged_text(text, rng))
        assert sum(fit_first_sizes(path, ["a", "b", "a"], 24)) == 24

    return case


def _placement(folder: Path) -> Case:
    path = folder / "placement.json"
    runs = [{"count": 4, "homes": [0, "node:a"]}, {"count": 3, "homes": ["shared:nfs", 1]}]
    text = json.dumps({"nodes": ["a", "b"], "runs": runs}).encode() + b"\n"

    def case(rng: random.Random) -> None:
        path.write_bytes(_damaged_lines(text, rng))
        loft.Placement.from_json(path).at(2)

    return case


def _tar(folder: Path) -> Case:
    """A file that is taken has its samples, each with its members, of their lengths.

    One whose headers were damaged, and given a checksum that fits, is just another file.
    """
    path = folder / "x.tar"
    whole = [_packed(path, "d", format_) for format_ in _TAR_FORMATS]
    right = [_lengths(sample) for sample in _all_samples(loft.TarShards([path]))]
    # A name that is too long for a header is in a block without a checksum.
    long = [_packed(path, "d" * 120, format_) for format_ in _TAR_FORMATS]

    def case(rng: random.Random) -> None:
        is_forged = rng.random() < 0.5
        text, damage = (rng.choice(long), _forged_tar) if is_forged else (
            rng.choice(whole), damaged_text,
        )  # fmt: skip
        path.write_bytes(damage(text, rng))
        samples = _all_samples(loft.TarShards([path]))
        # What members hold has no checksum.
        assert is_forged or [_lengths(sample) for sample in samples] == right

    return case


_TAR_FORMATS = (tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT)


def _packed(path: Path, folder: str, format_: int) -> bytes:
    """Return a tar file of 30 samples of two members."""
    with tarfile.open(path, "w", format=format_) as tar:
        for number, end in itertools.product(range(30), ("jpg", "cls")):
            info = tarfile.TarInfo(f"{folder}/{number:03d}.{end}")
            info.size = 3 * number
            tar.addfile(info, io.BytesIO(end.encode() * number))
    return path.read_bytes()


def _lengths(sample: dict[str, Any]) -> dict[str, Any]:
    return {name: value if name == "__key__" else len(value) for name, value in sample.items()}


def _all_samples(dataset: Any) -> list[dict[str, Any]]:
    return [dict(dataset[number]) for number in range(len(dataset))]


def _forged_tar(text: bytes, rng: random.Random) -> bytes:
    """Damage fields of headers, which then have checksums that fit."""
    data = bytearray(text)
    for _ in range(rng.choice([1, 1, 2, 4])):
        begin = 512 * rng.randrange(len(data) // 512)
        header = data[begin : begin + 512]
        # Where name, length, kind, link, magic and sparse parts begin.
        at = rng.choice([0, 124, 124, 156, 156, 157, 257, 386, 482]) + rng.choice([0, 0, 1, 10])
        value = rng.choice(_FIELDS)
        header[at : at + len(value)] = value
        header[148:156] = b" " * 8
        header[148:156] = b"%06o\0 " % sum(header)
        data[begin : begin + 512] = header
    return bytes(data)


_FIELDS = (
    b"\x80",
    b"\xff" * 12,
    b"7" * 11,
    b"\x80\0\0\0\x7f",
    b"-1",
    b"\0",
    *map(bytes, zip(b"LKxgSs012")),
)


def _parquet(folder: Path) -> Case:
    """Pages have checksums: of a file that is damaged there alone, what is taken is right."""
    import pyarrow as pa
    from pyarrow import parquet

    path, texts, number = folder / "x.parquet", [], range(40)
    table = pa.table(
        {
            "image": [{"bytes": b"%d" % i * i, "path": f"p{i}"} for i in number],
            "cls": [i % 7 for i in number],
            "words": [[f"w{k}" for k in range(i % 4)] for i in number],
            "weight": [None if i % 3 else 0.5 * i for i in number],
        }
    )
    for compression, version in (("NONE", "1.0"), ("SNAPPY", "1.0"), ("ZSTD", "2.0")):
        parquet.write_table(
            table, path, row_group_size=10, compression=compression, data_page_version=version,
            write_page_checksum=True,
        )  # fmt: skip
        texts.append(path.read_bytes())
    right = _all_samples(loft.ParquetShards([path]))

    def case(rng: random.Random) -> None:
        text = rng.choice(texts)
        footer = len(text) - 8 - int.from_bytes(text[-8:-4], "little")
        kind = rng.randrange(3)
        if kind == 0:
            data = damaged_text(text, rng)
        elif kind == 1:  # of the footer, which says what is where
            content = damaged_bytes(text[footer:-8], rng)
            data = text[:footer] + content + len(content).to_bytes(4, "little") + text[-4:]
        else:
            data = damaged_bytes(text[:footer], rng)[:footer].ljust(footer, b"\0") + text[footer:]
        path.write_bytes(data)
        samples = _all_samples(loft.ParquetShards([path]))
        assert kind != 2 or samples == right

    return case


# States.


def _interval(step: int, sizes: tuple[int, ...]) -> Interval:
    rows = np.zeros((len(sizes), len(COLUMNS)))
    for rank, size in enumerate(sizes):
        rows[rank, :6] = [size, size, 0, 0.01, 0.01, 1e-3 * size * (rank + 1)]
    return Interval(step, np.array(sizes), rows, np.ones(len(sizes), bool), 0.2)


def _text(state: object) -> str:
    # Only compared with its like: keys that JSON cannot hold are a damage that is left out of both.
    return json.dumps(state, sort_keys=True, default=repr, skipkeys=True)


def _of_controller(policy: str) -> Callable[[Path], Case]:
    def make(folder: Path) -> Case:
        del folder
        saved = Controller(96, 3, policy)
        for step in range(20, 20 * 20, 20):
            saved.observe(_interval(step, saved.plan_at(step).sizes))
            saved.decide(step + 5)
        state = json.loads(json.dumps(saved.state_dict()))

        def case(rng: random.Random) -> None:
            fresh = Controller(96, 3, policy)
            before = _text(fresh.state_dict())
            try:
                fresh.load_state_dict(damaged_value(state, rng))
            except LoftError:
                assert _text(fresh.state_dict()) == before
                raise
            json.dumps(fresh.state_dict())
            if rng.random() < 0.2:
                for step in (10**6, 10**6 + 20):
                    fresh.observe(_interval(step, fresh.plan_at(step).sizes))
                    fresh.decide(step + 5)
                    fresh.explain()

        return case

    return make


def _balancer(folder: Path) -> Case:
    del folder
    transport = LocalWorld(1).transport(0)
    balancer = loft.Balancer(64, "loft", transport=transport, interval=5)
    saved = balancer.state_dict()
    key = saved["devices"][0]
    rows = _interval(0, (64,)).rows.tolist() * 3
    saved |= {"measured": {key: rows, "gone/0": rows}, "num_steps": 40, "next_step": 40}
    saved = json.loads(json.dumps(saved))

    def case(rng: random.Random) -> None:
        balancer.load_state_dict(saved)
        before = _text(balancer.state_dict())
        try:
            balancer.load_state_dict(damaged_value(saved, rng))
        except LoftError:
            assert _text(balancer.state_dict()) == before
            raise
        assert balancer.local_batch_size == 64
        assert balancer.plan_at(balancer.next_step).sizes == (64,)
        balancer.explain()

    return case


def _lightning(folder: Path) -> Case:
    del folder
    transport = LocalWorld(1).transport(0)
    # As the trainer has it once it has begun, and without Lightning, which calls nothing else here.
    callback = LoftCallback(
        lambda: loft.Balancer(64, "report", transport=transport),
        lambda balancer, **_: loft.ddp_hook(balancer=balancer),
    )
    callback.setup(SimpleNamespace(world_size=1), None, "fit")
    state = json.loads(json.dumps(callback.state_dict()))

    def case(rng: random.Random) -> None:
        callback.load_state_dict(state)
        before = _text(callback.state_dict())
        try:
            callback.load_state_dict(damaged_value(state, rng))
        except LoftError:
            assert _text(callback.state_dict()) == before
            raise

    return case


class _Samples(torch.utils.data.Dataset[int]):
    def __len__(self) -> int:
        return 53

    def __getitem__(self, index: int) -> int:
        return index


def _loader(*, relaxed: bool) -> Callable[[Path], Case]:
    def make(folder: Path) -> Case:
        del folder
        balancer = loft.Balancer(8, "uniform", transport=LocalWorld(1).transport(0))
        loader = loft.DataLoader(_Samples(), balancer, train=False, shuffle=True, relaxed=relaxed)
        sampler = loft.BatchSampler(_Samples(), balancer, relaxed=relaxed)
        loader.set_epoch(1)
        batches = iter(loader)
        consumed = [next(batches) for _ in range(3)]
        state = json.loads(json.dumps(loader.state_dict()))
        assert state["position"] == sum(map(len, consumed))

        def case(rng: random.Random) -> None:
            loader.load_state_dict(state)
            damaged = damaged_value(state, rng)
            before = _text(loader.state_dict())
            try:
                loader.load_state_dict(damaged)
            except LoftError:
                assert _text(loader.state_dict()) == before
                raise
            sampler.load_state_dict(damaged)
            left = 53 - loader.state_dict()["position"]
            drawn = [index for batch in sampler for index in batch]
            assert len(drawn) == len(set(drawn)) == left

        return case

    return make


class _Stream:
    """A stream that takes any position."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(53))

    def state_dict(self) -> dict[str, int]:
        return {"at": 17}

    def load_state_dict(self, state: object) -> None:
        del state


def _stream(folder: Path) -> Case:
    del folder
    balancer = loft.Balancer(8, "uniform", transport=LocalWorld(1).transport(0))
    loader = loft.StreamLoader(_Stream(), balancer)
    next(iter(loader))
    state = json.loads(json.dumps(loader.state_dict()))

    def case(rng: random.Random) -> None:
        loader.load_state_dict(state)
        before = _text(loader.state_dict())
        try:
            loader.load_state_dict(damaged_value(state, rng))
        except LoftError:
            assert _text(loader.state_dict()) == before
            raise
        loader.set_epoch(loader.state_dict()["epoch"])

    return case


def _optimizer(folder: Path) -> Case:
    del folder
    transport = LocalWorld(1).transport(0)
    wrapped, states = [], []
    for make in (partial(torch.optim.SGD, momentum=0.9), torch.optim.Adam):
        layer = torch.nn.Linear(3, 2)
        plain = make(layer.parameters(), lr=0.1)
        wrapped.append(loft.DistributedOptimizer(plain, transport=transport))
        layer(torch.ones(1, 3)).sum().backward()
        wrapped[-1].step()
        states.append(wrapped[-1].state_dict())

    def case(rng: random.Random) -> None:
        at = rng.randrange(2)
        optimizer, state = wrapped[at], states[at]
        optimizer.load_state_dict(state)
        before = _text(optimizer.state_dict())
        try:
            optimizer.load_state_dict(damaged_value(state, rng))
        except LoftError:
            assert _text(optimizer.state_dict()) == before
            raise

    return case


# Lines.


class _Still(Heartbeat):
    """Rank 0's heartbeat without its thread: a case lets it read, and looks at it."""

    def _run(self) -> None: ...


def _says(rng: random.Random) -> bytes:
    """Return what a rank 1 may say, damaged or not."""
    site = CallSite("train.py:9 in main", "allreduce 'loss'", 3.0, 7)
    progress = Progress(2.0, (("a", 1), ("b", 2)), {"1f": 3, "2e": 1}, site=site)
    lines = [
        Message("beat", 1, 2.0, progress.encode(12_000)),
        Message("failed", 1, 0.0, "rank 1 (process 1001 on host1) has failed: ValueError: no"),
        Message("hello", 1, 0.0, "0123456789abcdef"),
        Message("proof", 1, 0.0, "0" * 64 + " 1 2 3 host1"),
        *(
            Message(kind, rng.choice([0, 1, 2]), 1.0, "X")
            for kind in ("left", "state", "engine", "term")
        ),
        *(Message(kind, 2, 1.0, "1|2|2") for kind in ("verdict", "late", "ask", "look", "pulse")),
    ]
    said = b"".join(each.encode() for each in rng.choices(lines, k=rng.randint(1, 4)))
    return damaged_text(said, rng)[:60_000] if rng.random() < 0.8 else said


def _wire(folder: Path) -> Case:
    """A rank speaks of itself only, and a stranger is no rank, whatever they say."""
    del folder
    others = {rank: RankProcess(rank, 1000 + rank, 5, f"host{rank}") for rank in (1, 2)}
    pairs = {rank: socket.socketpair() for rank in others}
    heart = _Still(
        {rank: Link(ours) for rank, (ours, _) in pairs.items()},
        Diagnosis(0, others, clock=lambda: 100.0),
        settings=HeartbeatSettings(),
        control=ProcessControl(look=lambda pid, start: "S", kill=lambda pid: None),
    )
    observer, actions = heart._observer, heart._actions
    for rank in others:
        observer.watch(rank)
    ends = {rank: theirs for rank, (_, theirs) in pairs.items()}
    listener = Listener({1: b"1" * 32}, others[1], ["127.0.0.1"])

    def case(rng: random.Random) -> None:
        said = _says(rng)
        if rng.random() < 0.3:  # by a stranger
            with (
                socket.create_connection(listener.addresses[0]) as stranger,
                suppress(ConnectionError),
            ):
                stranger.sendall(said[:4096])
                for _ in range(3):
                    assert listener.poll() == []
            assert listener.num_strangers <= 64
            return
        if heart._connections.is_lost(1) or heart._diagnosis.left_ranks():
            ends[1].close()
            ours, ends[1] = socket.socketpair()
            fresh = Diagnosis(0, others, clock=lambda: 100.0)
            heart._diagnosis = observer._diagnosis = actions._diagnosis = fresh
            observer.gone.clear()
            observer.go_on(NewLink(1, Link(ours), others[1], []))
        ends[1].setblocking(False)
        with suppress(BlockingIOError):
            ends[1].send(said)
            observer.receive(1)
        heart._judge()
        for end in ends.values():
            with suppress(BlockingIOError):
                end.setblocking(False)
                while end.recv(2**16):
                    pass
        assert set(heart.left_ranks()) <= {1}
        verdict, actions.verdict = heart.verdict, None
        if verdict is not None:
            assert verdict.rank == 1
            assert verdict.text.startswith("rank 1 (process 1001 on host1) ")

    def close() -> None:
        heart.close()
        heart._connections.close()
        listener.close()
        for end in ends.values():
            end.close()

    weakref.finalize(case, close)  # with the last case, while warnings are still let pass
    return case


TARGETS: dict[str, Callable[[Path], Case]] = {
    "report": _report,
    "replay": _replay,
    "caps": _caps,
    "scenario": _scenario,
    "plan": _plan,
    "plan-log": _plan_log,
    "first-sizes": _first_sizes,
    "placement": _placement,
    "tar": _tar,
    "parquet": _parquet,
    "controller-loft": _of_controller("loft"),
    "controller-lbbsp-cpu": _of_controller("lbbsp-cpu"),
    "controller-lbbsp-gpu": _of_controller("lbbsp-gpu"),
    "balancer": _balancer,
    "loader": _loader(relaxed=False),
    "loader-relaxed": _loader(relaxed=True),
    "stream": _stream,
    "optimizer": _optimizer,
    "wire": _wire,
    "lightning": _lightning,
}


def main() -> None:
    """Run the targets named, or all, and say what came of each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("targets", nargs="*", default=[], help=f"of {', '.join(TARGETS)}")
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    has_faults = False
    # What asks for more ends in a MemoryError, a fault, and not in the end of other processes.
    resource.setrlimit(resource.RLIMIT_AS, (_MOST_BYTES, resource.getrlimit(resource.RLIMIT_AS)[1]))
    logging.disable()  # what is said of damaged states is not at issue
    for target in options.targets or TARGETS:
        found = fuzz(target, num_cases=options.cases, seed=options.seed)
        has_faults |= bool(found.faults)
        print(
            f"{target}: {dict(found.outcomes)}, {len(found.faults)} faults, slowest "
            f"{found.slowest_s:.3f} s, {found.grown_bytes / 1e6:.0f} MB",
            flush=True,
        )
        for fault in found.faults[:5]:
            print(fault)
    sys.exit(has_faults)


if __name__ == "__main__":
    main()
