"""What limits ranks' batches: the devices that they tell each other, and what follows from them.

Every rank tells the others its device once a world. Limits are worked out from that alike on all
ranks; what only rank 0 knows, caps that an earlier run found, it broadcasts.
"""

from __future__ import annotations

import logging
import math
import socket
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from loft_hvd.balance.balancer_options import BalancerOptions
from loft_hvd.balance.first_sizes import fit_first_sizes, sizes_by_memory
from loft_hvd.balance.plan import MOST_MICRO, Sizes, count_micro
from loft_hvd.config import config
from loft_hvd.errors import ArgumentError, PlanError
from loft_hvd.topology import cpu_name
from loft_hvd.transport.agreement import digest
from loft_hvd.transport.base import Channel, Transport

__all__ = ["Device", "RankLimits", "assume_limits", "meet"]

_logger = logging.getLogger(__name__)
Caps = tuple[int | None, ...]  # most samples of each rank; None for no limit

# On CUDA each new size may cost a recompilation or a round of autotuning: sizes are multiples of 8,
# and a rank has at most 8 of them in a run.
_CUDA_GRAIN, _CUDA_SIZES = 8, 8
_NO_CAP = -1  # on the wire
_NAME_BYTES = 96  # of a host's or a device's name on the wire; longer ones are cut


@dataclass(frozen=True)
class Device:
    """What a rank computes on."""

    host: str
    number: int  # counts the ranks of that host, from 0
    name: str  # such as "Tesla T4" or "CPU AMD EPYC 7B13"
    is_cuda: bool
    memory: int = 0  # bytes that nothing holds as ranks meet; 0 where it is not known

    @property
    def key(self) -> str:
        """Tells a device that comes back from any other."""
        return f"{self.host}/{self.number}"


@dataclass(frozen=True)
class RankLimits:
    """The limits of the ranks there are now."""

    devices: tuple[Device, ...]  # [world_size]
    caps: Caps  # most samples of each rank, [world_size]; None where no limit is known
    grain: int  # adaptive sizes are multiples of it
    max_sizes: int | None  # distinct ones that a rank may have in a run; None for any number
    found: Mapping[str, int]  # caps that were found by trying, by ``Device.key``
    splits: bool = False  # a share beyond a rank's cap is computed in micro-batches
    first: Sizes = ()  # that adaptive ones start from, [world_size]; empty for equal ones
    num_micro: int = 1  # of which any rank may have so many, where samples go by cost
    nodes: tuple[int, ...] = ()  # number of each rank's node, [world_size]; empty until ranks meet

    def __len__(self) -> int:
        return len(self.devices)

    @cached_property
    def keys(self) -> tuple[str, ...]:
        """The keys of all devices, [world_size]."""
        return tuple(device.key for device in self.devices)

    @cached_property
    def share_caps(self) -> Caps:
        """Most samples of each rank's share of a step, [world_size]; None for no limit."""
        most = MOST_MICRO if self.splits else 1
        return tuple(None if cap is None else cap * most for cap in self.caps)

    def count_micro(self, sizes: Sequence[int]) -> Sizes:
        """Return how many micro-batches each rank's share takes; empty where none is split."""
        return count_micro(sizes, self.caps) if self.splits else ()

    def most_micro(self, sizes: Sequence[int]) -> Sizes:
        """Return how many micro-batches each rank's share may take where samples go by cost."""
        if not self.splits:
            return (1,) * len(sizes)
        return tuple(max(num, self.num_micro) for num in count_micro(sizes, self.caps))

    @classmethod
    def of(
        cls, options: BalancerOptions, devices: tuple[Device, ...], found: Mapping[str, int]
    ) -> RankLimits:
        """Work out limits; an error where ``max_batch`` does not fit the ranks there are."""
        has_cuda = any(device.is_cuda for device in devices)
        grain, max_sizes = options.grain, options.max_sizes
        if grain is None:
            share = options.global_batch_size // len(devices)
            # Equal shares stay equal: ranks with 12 samples each get a grain of 4, not of 8.
            grain = math.gcd(_CUDA_GRAIN, share) if has_cuda else 1
        if max_sizes is None and has_cuda:
            max_sizes = _CUDA_SIZES
        caps = []
        for cap, device in zip(_given_caps(options, devices), devices, strict=True):
            known = [each for each in (cap, found.get(device.key)) if each is not None]
            caps.append(min(known, default=None))
        num_micro = int(options.micro_batches)  # True is 1
        splits = options.splits
        return cls(devices, tuple(caps), grain, max_sizes, found, splits, num_micro=num_micro)

    @property
    def tell_memory(self) -> bool:
        """Whether any device tells how much of its memory is used."""
        return any(device.is_cuda for device in self.devices)

    def within(self, rooms: Caps) -> RankLimits:
        """Return the limits where ranks have room for so many samples in a pass, [world_size]."""
        pairs = zip(self.caps, rooms, strict=True)
        known = ([each for each in pair if each is not None] for pair in pairs)
        return replace(self, caps=tuple(min(each, default=None) for each in known))

    def check_sizes(self, sizes: Sequence[int], *, what: str) -> None:
        """Raise a PlanError when a rank's size is above its cap."""
        for rank, (size, cap) in enumerate(zip(sizes, self.share_caps, strict=True)):
            if cap is not None and size > cap:
                times = f" in up to {MOST_MICRO} micro-batches" if self.splits else ""
                raise PlanError(
                    f"{what}: rank {rank} should compute {size} samples, but its cap is "
                    f"{self.caps[rank]}{times}; sizes must keep within max_batch"
                )

    @contextmanager
    def blaming_caps(self) -> Iterator[None]:
        """Say of an error within that some caps come from earlier runs."""
        try:
            yield
        except PlanError as error:
            found = {key: self.found[key] for key in self.keys if key in self.found}
            if not found:
                raise
            raise PlanError(
                f"{error} (caps found when memory was full, by a probe or earlier runs in log_dir: "
                f"{found}; another log_dir forgets them)"
            ) from error


def _given_caps(options: BalancerOptions, devices: tuple[Device, ...]) -> Caps:
    limit = options.max_batch
    if limit is None or isinstance(limit, int):
        return (limit,) * len(devices)
    if not isinstance(limit, Mapping):
        if len(limit) != len(devices):
            raise ArgumentError(
                f"Balancer: max_batch={list(limit)} has {len(limit)} entries for {len(devices)} "
                "ranks; give one for each, one number for all, or numbers by device name"
            )
        return tuple(limit)
    return tuple(_by_name(limit, device, rank) for rank, device in enumerate(devices))


def _by_name(limits: Mapping[str, int | None], device: Device, rank: int) -> int | None:
    """Return the limit of the longest name that the device's own name contains."""
    fitting = [name for name in limits if name.lower() in device.name.lower()]
    if not fitting:
        raise PlanError(
            f"Balancer: rank {rank} on {device.host} has the device {device.name!r}, which "
            f"max_batch={dict(limits)} does not name; add it, or a part of its name (None for no "
            "limit)"
        )
    return limits[max(fitting, key=len)]


# What ranks tell each other.


def own_device() -> tuple[str, str, bool, int]:
    """Return this process's host, its device's name, whether it is a CUDA device, free bytes."""
    host = socket.gethostname()
    if torch.cuda.is_available():
        told = torch.cuda.get_device_properties(torch.cuda.current_device())
        free, _ = torch.cuda.mem_get_info()
        unused = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()  # torch keeps it
        return host, told.name, True, free + unused
    return host, f"CPU {cpu_name()}".strip(), False, 0


def assume_limits(options: BalancerOptions) -> RankLimits:
    """Return the limits of a world of devices like this one, until ranks have met."""
    host, name, is_cuda, memory = own_device()
    devices = tuple(
        Device(host, number, name, is_cuda, memory) for number in range(options.world_size)
    )
    return RankLimits.of(options, devices, {})


def meet(
    transport: Transport,
    options: BalancerOptions,
    *,
    found: Mapping[str, int],
    own_cap: int | None = None,
) -> RankLimits:
    """Tell all ranks this one's device, and learn theirs; every rank calls it.

    ``found`` are caps that were found by trying, by ``Device.key``, of which rank 0's count;
    ``own_cap``, just found for this rank's own device, goes before all others.
    """
    channel = Channel(transport, "loft.balancer")
    devices, nodes, fresh = _tell_devices(channel, own_cap=own_cap)
    caps = torch.tensor([found.get(device.key, _NO_CAP) for device in devices], dtype=torch.int64)
    channel.sub("caps").broadcast(caps, what="broadcast of caps")
    # What counts, from last to first: just found, known to rank 0, known here of devices that are
    # away and may come back.
    pairs = zip(devices, caps.tolist(), strict=True)
    known = {device.key: cap for device, cap in pairs if cap > 0}
    here = {device.key for device in devices}
    away = {key: cap for key, cap in found.items() if key not in here}
    limits = RankLimits.of(options, devices, {**away, **known, **fresh})
    return replace(limits, first=_first_sizes(channel, options, devices), nodes=nodes)


def _first_sizes(channel: Channel, options: BalancerOptions, devices: Sequence[Device]) -> Sizes:
    """Return rank 0's first sizes, on every rank; empty where they do not fit these ranks."""
    if not options.policy.is_adaptive:
        return ()
    sizes: Sizes = ()
    if channel.rank == 0:
        given = config().first_sizes if options.first_sizes is None else options.first_sizes
        hosts, total = [device.host for device in devices], options.global_batch_size
        try:
            sizes = fit_first_sizes(given, hosts, total)
        except PlanError as error:  # other ranks wait: a run with equal sizes is better than none
            _logger.warning("%s; the run starts with equal sizes", error)
        if given is None and total >= options.min_batch * len(devices):
            memory = [device.memory for device in devices]
            sizes = sizes_by_memory(memory, total, min_batch=options.min_batch)
    told = torch.tensor(sizes or [0] * len(devices), dtype=torch.int64)
    channel.sub("first").broadcast(told, what="broadcast of first sizes")
    return tuple(told.tolist()) if told.any() else ()


def _tell_devices(
    channel: Channel, *, own_cap: int | None
) -> tuple[tuple[Device, ...], tuple[int, ...], dict[str, int]]:
    """Return all ranks' devices and nodes, [world_size], and the caps just found, by their keys."""
    host, name, is_cuda, memory = own_device()
    cap = _NO_CAP if own_cap is None else own_cap
    texts = [text.encode()[:_NAME_BYTES].ljust(_NAME_BYTES, b"\0") for text in (host, name)]
    # [196]: the cap, whether the device is a CUDA device, its memory, a digest of the node, 96
    # bytes of the host, 96 of the device. Several hosts may be one node, as containers may be.
    node = digest(channel.transport.node)
    row = torch.tensor([cap, int(is_cuda), memory, node, *texts[0], *texts[1]], dtype=torch.int64)
    rows = channel.sub("devices").allgather_rows(row)
    numbers: Counter[str] = Counter()
    devices, caps = [], {}
    nodes: dict[int, int] = {}  # the number of each
    # Ranks of a host are counted in the order of their ranks, so that all ranks number alike.
    for cap, is_cuda, memory, node, *letters in rows.tolist():
        host, name = _text(letters[:_NAME_BYTES]), _text(letters[_NAME_BYTES:])
        devices.append(Device(host, numbers[host], name, bool(is_cuda), memory))
        numbers[host] += 1
        nodes.setdefault(node, len(nodes))
        if cap > 0:
            caps[devices[-1].key] = cap
    return tuple(devices), tuple(nodes[node] for node in rows[:, 3].tolist()), caps


def _text(letters: list[int]) -> str:
    return bytes(each & 0xFF for each in letters).rstrip(b"\0").decode(errors="replace")
