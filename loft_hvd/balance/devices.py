"""What each rank computes on, told to all ranks by one exchange of fixed shape."""

from __future__ import annotations

import socket
from collections import Counter
from dataclasses import dataclass

import torch

from loft_hvd.topology import cpu_name
from loft_hvd.transport.base import Channel

__all__ = ["NO_CAP", "Device", "own_device", "tell_devices"]

NO_CAP = -1
_TEXT = 96  # bytes of a name


@dataclass(frozen=True)
class Device:
    """What a rank computes on.

    Attributes:
        host: the machine's name.
        number: counts the ranks of that machine, from 0.
        name: such as "Tesla T4" or "CPU AMD EPYC 7B13".
        is_cuda: whether torch sees a CUDA device.
    """

    host: str
    number: int
    name: str
    is_cuda: bool

    @property
    def key(self) -> str:
        """Tells a device that comes back from any other."""
        return f"{self.host}/{self.number}"


def own_device() -> tuple[str, str, bool]:
    """Return this process's host, its device's name, and whether it is a CUDA device."""
    host = socket.gethostname()
    if torch.cuda.is_available():
        return host, torch.cuda.get_device_name(), True
    return host, f"CPU {cpu_name()}".strip(), False


def tell_devices(
    channel: Channel, *, own_cap: int | None
) -> tuple[tuple[Device, ...], dict[str, int]]:
    """Tell all ranks this one's device, and learn theirs; every rank calls it.

    Args:
        channel: the ranks.
        own_cap: what this rank has just found for its own device, if it has.

    Returns:
        The devices, [world_size], and the caps just found, by ``Device.key``.
    """
    cap = NO_CAP if own_cap is None else own_cap
    row = torch.tensor([cap, *_encode(*own_device())], dtype=torch.int64)
    rows = channel.sub("devices").allgather_rows(row)
    numbers: Counter[str] = Counter()
    devices, caps = [], {}
    for cap, *values in rows.tolist():
        host, name, is_cuda = _decode(values)
        devices.append(Device(host, numbers[host], name, is_cuda))
        numbers[host] += 1
        if cap > 0:
            caps[devices[-1].key] = cap
    return tuple(devices), caps


def _encode(host: str, name: str, is_cuda: bool) -> list[int]:
    texts = [text.encode()[:_TEXT].ljust(_TEXT, b"\0") for text in (host, name)]
    return [int(is_cuda), *texts[0], *texts[1]]


def _decode(values: list[int]) -> tuple[str, str, bool]:
    host, name = (
        bytes(value & 0xFF for value in values[at : at + _TEXT]).rstrip(b"\0")
        for at in (1, 1 + _TEXT)
    )
    return host.decode(errors="replace"), name.decode(errors="replace"), bool(values[0])
