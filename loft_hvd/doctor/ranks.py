"""``loft-hvd doctor --ranks``: what differs between the ranks that a launcher has started.

Every rank looks at itself, all exchange what they found, and each judges the same rows: so all end
with the same status, and rank 0 prints. ``judge`` and ``describe`` are pure.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist

from loft_hvd._native import extension
from loft_hvd.aggregation.compute import num_threads
from loft_hvd.codec import decode, encode, parse_json, printable
from loft_hvd.config import VARIABLES, config
from loft_hvd.doctor.inspect import installed
from loft_hvd.errors import ArgumentError, LoftError, TransportError, UsageError
from loft_hvd.topology import cpu_name
from loft_hvd.transport.base import Channel, Transport
from loft_hvd.transport.horovod import HorovodTransport, horovod_module
from loft_hvd.transport.torch_distributed import TorchDistributedTransport

__all__ = [
    "Difference",
    "Offset",
    "RankComparison",
    "RankFacts",
    "clock_offsets",
    "compare",
    "compare_launched",
    "describe",
    "gather_facts",
    "judge",
    "look_here",
    "run_launched",
    "to_json",
]

_Result = TypeVar("_Result")
_STEM = "loft_hvd.doctor.ranks"
_MOST_BYTES = 64 * 1024  # of what one rank says; it is about 1 KiB, more where there are many CPUs
_CLOCK_ROUNDS = 20  # a choice: Horovod takes some 2 ms a round, and one quick round is enough
_CLOCK_S = 0.1  # a choice: what is off by more is seen in traces, and file times mislead
_SHOWN_HOSTS = 32  # a choice: more than that are counted, not listed
# Settings that each rank may have for itself; all others are compared in a job's first step, too.
_OWN_SETTINGS = ("threads", "isa", "log_dir", "first_sizes", "trace_file")
_INSTALL = (
    "install the same on every host: one wheel, or one environment on a shared folder "
    "(docs/recipes.md)"
)
# What must be equal, and the way out where it is not. A name that begins with LOFT_HVD_ is a
# setting.
_MUST_BE_EQUAL = {
    "loft-hvd": _INSTALL,
    "loft-hvd files": f"versions are equal, the files are not: {_INSTALL}",
    "Python": _INSTALL,
    "torch": _INSTALL,
    "Horovod": _INSTALL,
    "GPU": (
        "give every rank a GPU, or none: check CUDA_VISIBLE_DEVICES, the driver and --gres on the "
        "odd hosts. torchrun's ranks may differ, Horovod's may not"
    ),
}
_SETTING_ADVICE = "set it alike on every rank; mpirun hands a variable on with -x NAME"
# What may differ, and why that is no harm.
_MAY_DIFFER = {
    "kernels": "results have the same bits; the better ones are faster",
    "CPU": "the balancer is for that",
    "GPUs": "the balancer is for that",
}


@dataclass(frozen=True)
class RankFacts:
    """What a rank found where it runs."""

    host: str
    cpus: tuple[int, ...]  # numbers of the CPUs that it may run on
    threads: int  # most that torch or a kernel of ours starts
    facts: dict[str, str]  # what is compared, by name


@dataclass(frozen=True)
class Offset:
    """How far a rank's wall clock is ahead of rank 0's, in seconds."""

    seconds: float
    error_s: float  # it is off by no more than that


@dataclass(frozen=True)
class Difference:
    """What is not equal on all ranks, or not as it should be."""

    name: str  # what
    value: str  # which value on which ranks
    advice: str = ""  # the way out; empty where none is needed
    is_fault: bool = False  # whether a job may fail by it


@dataclass(frozen=True)
class RankComparison:
    """What all ranks found, judged."""

    rank: int  # which of them this is
    engine: str  # such as "Horovod on Gloo"
    ranks: tuple[RankFacts, ...]
    offsets: tuple[Offset, ...]
    differences: tuple[Difference, ...]

    @property
    def is_fit(self) -> bool:
        """Whether nothing was found that a job may fail by."""
        return not any(each.is_fault for each in self.differences)


def look_here() -> RankFacts:
    """Return what this rank finds where it runs."""
    settings = config()
    module = extension()
    levels = [] if module is None else [str(level) for level in module.isa_levels()]
    kernels = settings.isa or (levels[-1] if levels else "none, torch does their work")
    if module is not None and module.has_cuda:
        kernels += " and CUDA"
    names = [torch.cuda.get_device_name(at) for at in range(torch.cuda.device_count())]
    facts = {
        "loft-hvd": installed("loft-hvd") or "not installed",
        "loft-hvd files": _digest_of_files(Path(__file__).parents[1]),
        "Python": ".".join(platform.python_version_tuple()[:2]),
        "torch": torch.__version__,
        "Horovod": installed("horovod") or "not installed",
        "numpy": installed("numpy"),
        "system": f"{platform.system()} {platform.machine()}, {' '.join(platform.libc_ver())}",
        "CPU": cpu_name(),
        "kernels": kernels,
        "GPU": "yes" if names else "no",
        "GPUs": ", ".join(f"{names.count(name)} {name}" for name in dict.fromkeys(names)) or "none",
    }
    for name, variable in VARIABLES.items():
        if name not in _OWN_SETTINGS:
            facts[variable] = str(getattr(settings, name))
    return RankFacts(
        host=socket.gethostname(),
        cpus=tuple(sorted(os.sched_getaffinity(0))) if hasattr(os, "sched_getaffinity") else (),
        threads=max(torch.get_num_threads(), num_threads()),
        facts=facts,
    )


def _digest_of_files(package: Path) -> str:
    """Return eight digits that differ when the Python files of a package do."""
    # The version of a checkout stays while its files change; the extension may be built for a host.
    content = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        content.update(path.relative_to(package).as_posix().encode() + b"\0" + path.read_bytes())
    return content.hexdigest()[:8]


def gather_facts(channel: Channel, own: RankFacts) -> tuple[RankFacts, ...]:
    """Return what every rank found, in rank order; every rank calls it alike."""
    said = json.dumps(encode(own)).encode()
    if len(said) > _MOST_BYTES:
        raise ArgumentError(
            f"doctor --ranks: rank {channel.rank} has {len(said)} bytes to say, more than "
            f"{_MOST_BYTES}; unset what is not needed of LOFT_HVD_*"
        )
    sizes = channel.sub("sizes").allgather_rows(torch.tensor([len(said)])).view(-1)
    row = torch.zeros(min(max(1, int(sizes.max())), _MOST_BYTES), dtype=torch.uint8)
    row[: len(said)] = torch.tensor(list(said), dtype=torch.uint8)
    rows = channel.sub("facts").allgather_rows(row)
    texts = [bytes(text[:size].tolist()) for text, size in zip(rows, sizes.tolist(), strict=True)]
    return tuple(_read(text, rank) for rank, text in enumerate(texts))


def _read(said: bytes, rank: int) -> RankFacts:
    """Read what a rank says, which may run another version of this file."""
    try:
        return decode(
            RankFacts,
            parse_json(said.decode(errors="replace")),
            what=f"rank {rank}",
            is_open=True,
            call="doctor --ranks",
            advice=_INSTALL,
        )
    except (ArgumentError, ValueError) as error:
        return RankFacts("unknown", (), 0, {"loft-hvd": f"another version ({error})"})


def clock_offsets(
    channel: Channel, *, clock: Callable[[], float] = time.time
) -> tuple[Offset, ...]:
    """Return how far each rank's clock is ahead of rank 0's; every rank calls it alike.

    An all-gather ends nowhere before all ranks have begun it. So rank r's beginning lies before
    rank 0's end, and rank 0's beginning before rank r's end, in every round:

        began[r] - offset <= ended[0]    and    began[0] <= ended[r] - offset
    """
    began, ended = [], []
    for _ in range(_CLOCK_ROUNDS):
        began.append(clock())
        channel.sub("clock").allgather_rows(torch.zeros(1))
        ended.append(clock())
    row = torch.tensor([began, ended], dtype=torch.float64).view(-1)
    rows = channel.sub("clocks").allgather_rows(row)
    times = rows.view(-1, 2, _CLOCK_ROUNDS)  # [world_size, began or ended, round]
    least = (times[:, 0] - times[0, 1]).amax(dim=1)
    most = (times[:, 1] - times[0, 0]).amin(dim=1)
    offsets = [
        # abs: a clock that was set meanwhile has no offset, and the bounds cross.
        Offset((low + high) / 2, abs(high - low) / 2)
        for low, high in zip(least.tolist(), most.tolist(), strict=True)
    ]
    return (Offset(0.0, 0.0), *offsets[1:])  # rank 0's clock is the measure, not measured


def judge(ranks: Sequence[RankFacts], offsets: Sequence[Offset]) -> tuple[Difference, ...]:
    """Say what differs between ranks, what a job may fail by first."""
    names = dict.fromkeys(name for each in ranks for name in each.facts)
    # A rank of another version may not tell all: that version is then the difference.
    told = [
        _compared(
            name, {rank: each.facts[name] for rank, each in enumerate(ranks) if name in each.facts}
        )
        for name in names
    ]
    found = [*filter(None, told), *_crowded(ranks), *_clocks(offsets)]
    return tuple(sorted(found, key=lambda each: (not each.is_fault, not each.advice)))


def _compared(name: str, values: Mapping[int, str]) -> Difference | None:
    """Return how a fact differs between ranks, or None where it does not."""
    places = _by_value(values)
    if len(places) == 1:
        return None
    value = "; ".join(f"{each} on {_ranks(ranks)}" for each, ranks in places.items())
    if name.startswith("LOFT_HVD_"):
        return Difference(name, value, _SETTING_ADVICE, is_fault=True)
    if name in _MUST_BE_EQUAL:
        return Difference(name, value, _MUST_BE_EQUAL[name], is_fault=True)
    why = _MAY_DIFFER.get(name, "")
    return Difference(name, f"{value} (fine: {why})" if why else value)


def _by_value(values: Mapping[int, str]) -> dict[str, list[int]]:
    """Return the ranks of each value, that of most ranks first."""
    places: dict[str, list[int]] = {}
    for rank, value in values.items():
        places.setdefault(value, []).append(rank)
    return dict(sorted(places.items(), key=lambda item: -len(item[1])))


def _hosts(ranks: Sequence[RankFacts]) -> dict[str, list[int]]:
    """Return the ranks of each host."""
    return _by_value({rank: each.host for rank, each in enumerate(ranks)})


def _crowded(ranks: Sequence[RankFacts]) -> list[Difference]:
    """Say on which hosts ranks start more threads than they may use CPUs."""
    found = []
    for host, members in _hosts(ranks).items():
        cpus = {cpu for rank in members for cpu in ranks[rank].cpus}
        threads = sum(ranks[rank].threads for rank in members)
        if cpus and threads > max(len(cpus), len(members)):
            share = max(1, len(cpus) // len(members))
            value = (
                f"{_ranks(members)} on {host} start {threads} threads and may use {len(cpus)} CPUs"
            )
            found.append(Difference("threads", value, f"OMP_NUM_THREADS={share} on that host"))
    return found


def _clocks(offsets: Sequence[Offset]) -> list[Difference]:
    """Say whose clocks are off."""
    off = {
        rank: each
        for rank, each in enumerate(offsets)
        if abs(each.seconds) - each.error_s > _CLOCK_S
    }
    if not off:
        return []
    by = ", ".join(
        f"rank {rank} by {each.seconds:+.3f} s (to within {each.error_s:.3f} s)"
        for rank, each in off.items()
    )
    advice = "let chrony or ntpd set the clocks: traces and file times are off by as much"
    return [Difference("clocks", f"off from rank 0's: {by}", advice)]


def _ranks(ranks: Sequence[int]) -> str:
    """Write ranks as a person would: "rank 3", "ranks 0 to 2 and 5"."""
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    # Two in a row are named, three or more are a span.
    words = [
        word
        for first, last in spans
        for word in ([f"{first} to {last}"] if last - first > 1 else sorted({first, last}))
    ]
    text = [str(word) for word in words]
    listed = " and ".join(filter(None, [", ".join(text[:-1]), text[-1]]))
    return f"rank{'s' * (len(ranks) > 1)} {listed}"


def describe(comparison: RankComparison) -> list[str]:
    """Return what a person reads of it, the verdict in the last line."""
    ranks, differences = comparison.ranks, comparison.differences
    hosts = _hosts(ranks)
    many = f"{len(ranks)} ranks on {len(hosts)} host{'s' * (len(hosts) > 1)}"
    lines = [f"{many}, {comparison.engine}"]
    for host, members in list(hosts.items())[:_SHOWN_HOSTS]:
        first = ranks[members[0]]
        cpus = {cpu for rank in members for cpu in ranks[rank].cpus}
        threads = sorted({ranks[rank].threads for rank in members})
        parts = [
            f"{len(cpus)} CPUs",
            f"threads a rank {' or '.join(map(str, threads))}",
            *(first.facts.get(name, "not told") for name in ("CPU", "kernels")),
            f"GPUs {first.facts.get('GPUs', 'not told')}",
        ]
        lines.append(f"  {host}: {_ranks(members)}; {', '.join(filter(None, parts))}")
    if len(hosts) > _SHOWN_HOSTS:
        lines.append(f"  and {len(hosts) - _SHOWN_HOSTS} more hosts")
    # What a host's own line has, and settings, of which there are many, are not told again.
    apart = {each.name for each in differences} | {"GPU", "GPUs", "CPU", "kernels"}
    equal = [
        f"{name} {value}"
        for name, value in ranks[0].facts.items()
        if name not in apart and not name.startswith("LOFT_HVD_")
    ]
    lines.append("equal on all: " + ", ".join(equal))
    worst = max(comparison.offsets, key=lambda each: abs(each.seconds) + each.error_s)
    lines.append(f"clocks: at most {abs(worst.seconds) + worst.error_s:.3f} s off from rank 0's")
    for each in differences:
        lines.append(f"{each.name}: {each.value}")
        if each.advice:
            lines.append(f"  -> {each.advice}")
    lines.append(_verdict(len(ranks), differences))
    return [printable(line) for line in lines]


def _verdict(num_ranks: int, differences: Sequence[Difference]) -> str:
    faults = [each for each in differences if each.is_fault]
    hints = [each.name for each in differences if each.advice and not each.is_fault]
    if faults:
        first = faults[0]
        more = f" (and {len(faults) - 1} more, marked ->)" * (len(faults) > 1)
        return f"Verdict: mend {first.name} first, {first.value}: {first.advice}{more}."
    slower = f"; worth mending: {', '.join(dict.fromkeys(hints))} (marked ->)" if hints else ""
    return f"Verdict: the {num_ranks} ranks fit together{slower}."


def compare(
    transport: Transport,
    own: RankFacts,
    *,
    engine: str,
    timeout_s: float,
    clock: Callable[[], float] = time.time,
) -> RankComparison:
    """Compare ranks over a transport; every rank calls it alike, and all return the same.

    Args:
        transport: the ranks.
        own: what this rank found.
        engine: what moves their values, for the reader.
        timeout_s: longest wait of each exchange in seconds.
        clock: this rank's wall clock.

    Raises:
        TransportTimeoutError: ranks did not come.
    """
    channel = Channel(transport, _STEM, timeout_s)
    ranks = gather_facts(channel, own)
    offsets = clock_offsets(channel, clock=clock)
    return RankComparison(transport.rank, engine, ranks, offsets, judge(ranks, offsets))


def compare_launched(*, timeout_s: float) -> RankComparison:
    """Start the engine of the launcher that has started this process, and compare its ranks.

    As ``run_launched``.
    """

    def work(transport: Transport, engine: str) -> RankComparison:
        return compare(transport, look_here(), engine=engine, timeout_s=timeout_s)

    return run_launched(work, what="doctor --ranks", timeout_s=timeout_s)


def run_launched(
    work: Callable[[Transport, str], _Result], *, what: str, timeout_s: float
) -> _Result:
    """Start the engine of the launcher that has started this process, and work with its ranks.

    Where that takes longer than the limit, the process says where it stands and ends with status 1:
    an engine that waits for a rank inside its own library can be left in no other way.

    Args:
        work: is given the ranks, and what moves their values; every rank does it alike.
        what: the command that does so, for errors.
        timeout_s: longest wait for all of it.

    Raises:
        UsageError: no launcher has started this as one of several ranks, or the engine has found
            fewer ranks than that.
    """
    started = config().ranks
    if started < 2:
        raise UsageError(
            f"{what} asks all ranks, but no launcher has told this process that it is one of "
            f"several; start it as your script: mpirun -np 4 loft-hvd {what}, or with "
            "horovodrun, srun --mpi=pmix, or torchrun --no-python"
        )
    stages = ["starting the engine"]
    results: list[_Result] = []
    errors: list[BaseException] = []

    def start() -> None:
        try:
            transport, engine, stop = _start_engine(timeout_s)
            if transport.world_size != started:
                raise UsageError(_too_few(started, transport.world_size, engine))
            stages.append("comparing with the other ranks")
            results.append(work(transport, engine))
            stages.append("shutting the engine down")
            stop()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=start, name="loft-launched", daemon=True)
    thread.start()
    thread.join(timeout_s)
    here = socket.gethostname()
    if thread.is_alive():
        text = (
            f"loft-hvd: on {here}: {what} was not done after {timeout_s:g} s; this rank "
            f"was {stages[-1]}, and others have not come as far. Look for their own lines, or run "
            "`loft-hvd doctor` on each host; --timeout-s gives more time\n"
        )
        _leave(text)
    if errors:
        if isinstance(errors[0], LoftError):
            raise errors[0]
        raise TransportError(
            f"on {here}, {stages[-1]}: {type(errors[0]).__name__}: {errors[0]}"
        ) from errors[0]
    return results[0]


def _start_engine(timeout_s: float) -> tuple[Transport, str, Callable[[], object]]:
    """Return the ranks, what they are reached by, and what ends that."""
    if config().is_torchrun:
        dist.init_process_group("gloo", timeout=timedelta(seconds=timeout_s))
        transport = TorchDistributedTransport()
        return transport, "torch.distributed on Gloo", dist.destroy_process_group
    hvd = horovod_module()
    hvd.init()
    engine = f"Horovod on {'MPI' if hvd.mpi_enabled() else 'Gloo'}"
    return HorovodTransport(), engine, hvd.shutdown


def _too_few(started: int, found: int, engine: str) -> str:
    return (
        f"the launcher has started {started} ranks, but {engine} knows {found}: each trains for "
        "itself. With srun, --mpi=pmix and an Open MPI built with PMIx (`srun --mpi=list`); with "
        "mpirun, a Horovod built with MPI, by the same MPI (`loft-hvd doctor`)"
    )


def _leave(text: str) -> None:
    """Say why, and leave the process without the engine's own way down, which may wait."""
    sys.stdout.flush()
    sys.stderr.write(text)
    sys.stderr.flush()
    os._exit(1)


def to_json(comparison: RankComparison) -> Mapping[str, object]:
    """Return it as values that JSON can hold."""
    return encode(comparison) | {"is_fit": comparison.is_fit}
