"""``cluster.toml`` from what is there: the ranks of a launcher, or the nodes that Slurm knows.

What could not be learnt stands in comments, and a key that a plan needs is left out: so a plan asks
for it by name.
"""

from __future__ import annotations

import math
import re
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from loft_hvd.doctor.ranks import RankFacts, gather_facts, look_here, run_launched
from loft_hvd.errors import MissingDependencyError, UsageError
from loft_hvd.transport.base import Channel, Transport

__all__ = ["FoundHost", "cluster_text", "hosts_of_ranks", "launched_hosts", "slurm_hosts"]

_WHAT, _STEM = "inventory", "loft_hvd.fleet.inventory"
# Bytes that two hosts send each other, time after time: the first warms connections up, later ones
# are left out once one takes as long as tells enough. Choices, as of the mesh's own trial.
_TRIED_BYTES, _LONG_TRY_S = (2**20, 2**20, 2**23, 2**25), 0.1
_SLURM_S = 30.0
_GRES = re.compile(r"gpu(?::([^:,()]+))?:(\d+)(?=[(,]|$)")
_NO_NAME = re.compile(r"[^A-Za-z0-9 ._+-]+")  # what a device class may not hold


@dataclass(frozen=True)
class FoundHost:
    """What is known of a host."""

    name: str
    slots: Mapping[str, int]  # ranks by device class
    cpus: int | None = None
    memory_bytes: float | None = None
    link_bytes_per_s: float | None = None
    note: str = ""


def launched_hosts(*, timeout_s: float) -> tuple[int, list[FoundHost]]:
    """Return this rank, and the hosts of all ranks that a launcher has started.

    Each host's link is tried with every other host, pair by pair, where ranks have a mesh.

    Raises:
        UsageError: no launcher has started this.
    """

    def work(transport: Transport, engine: str) -> tuple[int, list[FoundHost]]:
        del engine
        channel = Channel(transport, _STEM, timeout_s)
        facts = gather_facts(channel, look_here())
        return transport.rank, hosts_of_ranks(facts, _try_pairs(channel, facts))

    return run_launched(work, what=_WHAT, timeout_s=timeout_s)


def _class_name(name: str) -> str:
    return " ".join(_NO_NAME.sub(" ", name).split())[:64] or "device"


def hosts_of_ranks(facts: Sequence[RankFacts], bytes_per_s: Mapping[str, float]) -> list[FoundHost]:
    """Return the hosts of ranks, with what their links were found to carry, by name."""
    found = []
    for host in dict.fromkeys(each.host for each in facts):
        here = [each for each in facts if each.host == host]
        gpus = here[0].facts.get("GPUs", "none")
        slots = {
            _class_name(name): int(count)
            for count, _, name in (each.partition(" ") for each in gpus.split(", "))
            if count.isdecimal()
        }
        slots = slots or {_class_name(f"CPU {here[0].facts.get('CPU', '')}"): len(here)}
        cpus = len({cpu for each in here for cpu in each.cpus})
        note = "" if host in bytes_per_s else "ranks have no mesh: give the rate of its link"
        rate = bytes_per_s.get(host)
        found.append(FoundHost(host, slots, cpus or None, None, rate, note))
    return found


def _try_pairs(
    channel: Channel, facts: Sequence[RankFacts], *, clock: Callable[[], float] = time.monotonic
) -> dict[str, float]:
    """Return the bytes a second of each host's link; empty where ranks have no mesh.

    In each round every host sends to one other and receives from it, so that no two pairs share a
    link. A host's link is as fast as its fastest pair: the other end may be slower.
    """
    first: dict[str, int] = {}
    for rank, each in enumerate(facts):
        first.setdefault(each.host, rank)
    open_mesh = channel.transport.can.open_mesh
    mesh = None if open_mesh is None or len(first) < 2 else open_mesh(channel.sub("mesh"))
    if mesh is None:
        return {}
    hosts = list(first)
    best = 0.0
    try:
        for number, pairs in enumerate(_rounds(len(hosts))):
            channel.sub(f"round {number}").allgather_rows(torch.zeros(1))
            mine = [[first[hosts[at]] for at in pair] for pair in pairs]
            pair = next((sorted(each) for each in mine if channel.rank in each), None)
            if pair is None:
                continue
            both = mesh.subset(pair)
            for at, num_bytes in enumerate(_TRIED_BYTES):
                sent, received = torch.zeros((2, 2 * num_bytes), dtype=torch.uint8)
                began = clock()
                both.alltoall(sent, received, name=f"try {number} {at}")()
                took_s = clock() - began
                best = max(best, num_bytes / took_s) if at else best
                # Both ends leave together: they measure about the same, not the same.
                told = torch.tensor([took_s > _LONG_TRY_S], dtype=torch.uint8).repeat(2)
                other = torch.zeros_like(told)
                both.alltoall(told, other, name=f"enough {number} {at}")()
                if at and bool(other.any()):
                    break
    finally:
        rates = channel.sub("rates").allgather_rows(torch.tensor([best], dtype=torch.float64))
        mesh.close()
    return {host: float(rates[rank]) for host, rank in first.items() if rates[rank] > 0}


def _rounds(count: int) -> list[list[tuple[int, int]]]:
    """Return rounds of pairs in which each of so many meets each other once.

    The circle method: one stays, the others go round. Of an odd number one rests in each round.
    """
    places = list(range(count + count % 2))
    rounds = []
    for _ in range(len(places) - 1):
        half = len(places) // 2
        pairs = zip(places[:half], reversed(places[half:]), strict=True)
        rounds.append([pair for pair in pairs if max(pair) < count])
        places = [places[0], places[-1], *places[1:-1]]
    return rounds


def slurm_hosts() -> list[FoundHost]:
    """Return the nodes that Slurm knows.

    Raises:
        MissingDependencyError: ``scontrol`` is not here, or does not answer.
    """
    command = ["scontrol", "show", "node", "--oneliner"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SLURM_S, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        raise MissingDependencyError(
            f"inventory --slurm: `{' '.join(command)}` failed ({error}); run it where Slurm's "
            "commands work, or under the launcher of the job: horovodrun ... loft-hvd inventory"
        ) from error
    found = read_nodes(done.stdout)
    if not found:
        raise UsageError(f"inventory --slurm: `{' '.join(command)}` names no node")
    return found


def read_nodes(text: str) -> list[FoundHost]:
    """Read what ``scontrol show node --oneliner`` prints: ``NodeName=a CPUTot=8 Gres=gpu:t4:2``."""
    found = []
    for line in text.splitlines():
        known = dict(re.findall(r"(\w+)=(\S*)", line))
        if "NodeName" not in known:
            continue
        slots: Counter[str] = Counter()
        # gpu:a100:4(S:0-1),gpu:2 and others, such as nic:1
        for kind, count in re.findall(
            r"gpu(?::([^:,()]+))?:(\d+)(?=[(,]|$)", known.get("Gres", "")
        ):
            slots[_class_name(kind or "gpu")] += int(count)
        cpus = int(known.get("CPUTot", "0")) or None
        memory = float(known.get("RealMemory", "0")) * 2**20 or None  # told in MiB
        note = "Slurm does not know links"
        if not slots:
            slots["CPU"] = 1
            note += "; slots: how many ranks share its CPUs is for you to say"
        found.append(FoundHost(known["NodeName"], dict(slots), cpus, memory, None, note))
    return found


def cluster_text(hosts: Sequence[FoundHost], *, source: str) -> str:
    """Return the text of a ``cluster.toml``, which says what was not learnt."""
    lines = [
        f"# From {source}. Not learnt: racks and their links, prices, data and its homes, budgets "
        "of stores,",
        "# the latency between hosts. docs/plan.md has the keys.",
    ]
    for host in hosts:
        slots = ", ".join(f'"{name}" = {count}' for name, count in host.slots.items())
        lines += ["", "[[hosts]]", f'name = "{host.name}"', f"slots = {{ {slots} }}"]
        if host.link_bytes_per_s is None:
            lines.append(f"# link_bytes_per_s was not learnt: {host.note}")
        else:
            lines.append(f"link_bytes_per_s = {_rounded(host.link_bytes_per_s):.3g}")
        lines += [f"cpus = {host.cpus}"] if host.cpus else ["# cpus were not learnt"]
        if host.memory_bytes:
            lines.append(f"memory_bytes = {host.memory_bytes:.4g}")
        else:
            lines.append("# memory_bytes was not learnt")
    return "\n".join(lines) + "\n"


def _rounded(rate: float) -> float:
    """Return a rate to two digits: a trial tells no more."""
    return float(f"{rate:.1e}") if math.isfinite(rate) and rate > 0 else 1.0
