"""How parameters are laid out in buckets, and buckets in parts and shards.

Pure arithmetic on what is equal on every rank, but for ``agree_on_order``: the order in which
rank 0's gradients became ready, by which buckets are laid out after the first step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from loft_hvd.errors import ArgumentError, MismatchError
from loft_hvd.transport.agreement import check_agreement
from loft_hvd.transport.base import Channel

__all__ = [
    "Bucket",
    "ParameterSpec",
    "Slot",
    "accumulation_dtype",
    "agree_on_order",
    "lay_out",
    "part_bounds",
    "shard_numel",
]

# Values, so that a shard of float32 starts on a cache line of 64 bytes. It is fixed for every
# dtype: what travels must have the same layout whatever the wire's format.
_SHARD_ALIGNMENT = 16

# No backward pass hides what the last bucket takes: if it is large, what is ready last becomes a
# small one, and the rest begins earlier; and what is last of that once more. Measured on ResNet-18,
# 4 ranks (docs/benchmarks.md): of 16 MB, 4 MiB left less after the backward pass than 1 MiB on
# Gloo, and as little on MPI; with 512 KiB of these 4 MiB behind them 9.6 ms were left instead of 15
# on MPI, with 1 MiB 11.5.
_TAILS_BYTES = (4 << 20, 512 << 10)


@dataclass(frozen=True)
class ParameterSpec:
    """What the layout needs to know of a parameter; equal on every rank."""

    name: str  # the user's, unique
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: str = "cpu"
    rule: int = 0  # index of the one that aggregates it
    group: int | None = None  # index of the user's group that it must stay together with

    @property
    def numel(self) -> int:
        """Number of values."""
        return int(torch.Size(self.shape).numel())

    @property
    def num_bytes(self) -> int:
        """Bytes in its bucket."""
        return self.numel * accumulation_dtype(self.dtype).itemsize


@dataclass(frozen=True)
class Slot:
    """A parameter's place in its bucket: values [offset, offset + numel)."""

    parameter: int
    name: str
    offset: int
    numel: int
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Bucket:
    """Parameters whose gradients travel together, as one flat tensor of one dtype."""

    index: int
    dtype: torch.dtype
    device: str
    rule: int
    slots: tuple[Slot, ...]

    @property
    def numel(self) -> int:
        """Number of values."""
        return sum(slot.numel for slot in self.slots)

    def __str__(self) -> str:
        """Name the bucket by its number and its first and last parameter."""
        first, last = self.slots[0].name, self.slots[-1].name
        return f"bucket {self.index} ({first if first == last else f'{first} .. {last}'})"


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which gradients of ``dtype`` are sent and aggregated."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def shard_numel(numel: int, world_size: int) -> int:
    """Return the values of one rank's shard when ``numel`` values are cut into world_size shards.

    Shards are equal and the last ones may be padding; one rank needs no padding at all.
    """
    if world_size == 1:
        return numel
    shard = -(-numel // world_size)
    return -(-shard // _SHARD_ALIGNMENT) * _SHARD_ALIGNMENT


def part_bounds(
    numel: int, world_size: int, *, itemsize: int, part_bytes: int | None
) -> tuple[int, ...]:
    """Cut a bucket into parts that are exchanged by themselves, each with shards of its own.

    A part has at least ``part_bytes``; None makes a single one. Returns where parts begin, and
    where the last one ends, which is padded to whole shards; the others need no padding.
    """
    # 1000 values of 4 bytes, 2 ranks, parts of 1500 bytes: 2 parts of whole units of 2 * 16 values.
    # The first ends at 512 = 2 shards of 256; the second has 488 values in 2 shards of 256, so it
    # ends at 1024, and the last 24 values are padding: (0, 512, 1024).
    num_parts = 1 if part_bytes is None else max(1, numel * itemsize // part_bytes)
    unit = 1 if world_size == 1 else world_size * _SHARD_ALIGNMENT
    part = -(-numel // (num_parts * unit)) * unit
    begins = range(0, max(numel, 1), max(part, 1))
    rest = numel - begins[-1]
    return (*begins, begins[-1] + world_size * shard_numel(rest, world_size))


def lay_out(
    parameters: Sequence[ParameterSpec], *, bucket_bytes: int, order: Sequence[int] | None = None
) -> tuple[Bucket, ...]:
    """Lay parameters out in buckets of at most ``bucket_bytes``, in the order they become ready.

    A parameter larger than ``bucket_bytes`` gets a bucket of its own; a bucket holds one
    accumulation dtype, device and rule; a user's group is one bucket for each of these. Buckets
    are numbered by when their last parameter is ready, and their exchange starts in that order.
    Of a kind's last bucket, if it has 8 MiB or more and is no user's group, the parameters ready
    last are one by themselves, 4 MiB at most; and of that, if it has 1 MiB or more, 512 KiB at
    most.

    ``order`` is the parameters' indices as their gradients become ready, equal on every rank; None
    stands for last parameter first, which is roughly what a backward pass does.
    """
    if bucket_bytes <= 0:
        raise ArgumentError(f"bucket_bytes={bucket_bytes} must be > 0; a good start is 33554432")
    # One open bucket a kind: kinds may alternate along a model (weights of one rule, biases of
    # another) without leaving a trail of small buckets behind.
    gathered: list[list[int]] = []  # parameter indices of each bucket
    filling: dict[tuple[object, ...], int] = {}  # kind -> the bucket that still takes parameters
    num_bytes: list[int] = []
    in_order = list(reversed(range(len(parameters)))) if order is None else list(order)
    for index in in_order:
        spec = parameters[index]
        dtype = accumulation_dtype(spec.dtype)
        kind = (dtype, spec.device, spec.rule, spec.group)
        size = spec.num_bytes
        at = filling.get(kind)
        if at is None or (spec.group is None and num_bytes[at] + size > bucket_bytes):
            at = filling[kind] = len(gathered)
            gathered.append([])
            num_bytes.append(0)
        gathered[at].append(index)
        num_bytes[at] += size
    for (*_, group), at in filling.items():
        last = at
        for most in _TAILS_BYTES if group is None else ():
            gathered[last], tail = _without_tail(gathered[last], parameters, most_bytes=most)
            if not tail:
                break
            last = len(gathered)
            gathered.append(tail)
    # A bucket can start when its last member is ready; a kind that is rare fills late, though its
    # bucket was opened early.
    ready_at = {parameter: at for at, parameter in enumerate(in_order)}
    gathered.sort(key=lambda members: ready_at[members[-1]])
    return tuple(_bucket(index, members, parameters) for index, members in enumerate(gathered))


def _without_tail(
    members: list[int], parameters: Sequence[ParameterSpec], *, most_bytes: int
) -> tuple[list[int], list[int]]:
    """Return a bucket's members, and those ready last that become one by themselves, or none."""
    at, tail = len(members), 0
    while at and tail + parameters[members[at - 1]].num_bytes <= most_bytes:
        at -= 1
        tail += parameters[members[at]].num_bytes
    whole = sum(parameters[each].num_bytes for each in members)
    is_cut = tail > 0 and whole >= 2 * most_bytes
    return (members[:at], members[at:]) if is_cut else (members, [])


def _bucket(index: int, members: list[int], parameters: Sequence[ParameterSpec]) -> Bucket:
    slots = []
    offset = 0
    for parameter in members:
        spec = parameters[parameter]
        slots.append(Slot(parameter, spec.name, offset, spec.numel, spec.shape))
        offset += spec.numel
    first = parameters[members[0]]
    return Bucket(index, accumulation_dtype(first.dtype), first.device, first.rule, tuple(slots))


def agree_on_order(
    channel: Channel, arrived: Sequence[int], num_parameters: int
) -> tuple[int, ...]:
    """Return the order of rank 0's gradients; every rank calls it alike.

    Parameters that are not in ``arrived``, the order in which they came on this rank, go last.

    Raises:
        MismatchError: ranks end with different orders, or with one that is none.
        TransportTimeoutError: other ranks did not answer in time.
    """
    # Ranks may see other orders, where a branch of the model runs on some of them only.
    came = set(arrived)
    missing = [index for index in reversed(range(num_parameters)) if index not in came]
    row = torch.tensor([*arrived, *missing], dtype=torch.int64)
    channel = channel.sub("order")
    channel.broadcast(row, what="the order of gradients")
    order = tuple(row.tolist())
    if sorted(order) != list(range(num_parameters)):
        raise MismatchError(
            f"rank {channel.rank}: rank 0's order of gradients is no order of this rank's "
            f"{num_parameters} parameters; build the same model on every rank"
        )
    # A rank with another order would send one parameter's values where others send another's.
    fields = {"order of gradients": " ".join(map(str, order))}
    check_agreement(channel, fields, what="DistributedOptimizer")
    return order
