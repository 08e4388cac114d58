"""Which of a host's addresses other hosts of the job reach it by, and so on which to listen."""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import socket
import struct
from collections.abc import Callable, Sequence

__all__ = ["listening_addresses", "own_addresses"]

_SIOCGIFADDR = 0x8915  # from the kernel's sockios.h: ask for an interface's address


def own_addresses(interface: str = "") -> list[str]:
    """Return this host's IPv4 addresses but loopback's, or those of one interface."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            if interface and name != interface:
                continue
            with contextlib.suppress(OSError):
                # In: a name of at most 15 bytes. Out: the address is in bytes 20 to 24, behind
                # the name (16), its family (2) and its port (2).
                request = struct.pack("256s", name.encode()[:15])
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
                found.append(socket.inet_ntoa(answer[20:24]))
    return sorted(address for address in set(found) if interface or not _is_loopback(address))


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address).is_loopback


def _source_for(address: str) -> str:
    """Return this host's address on the way to another; "" where none leads there."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
        probe.connect((address, 9))  # sends nothing: it only asks for the route
        return str(probe.getsockname()[0])
    return ""


def listening_addresses(
    own: Sequence[str],
    others: Sequence[str],
    *,
    is_one_host: bool,
    of_interface: Sequence[str] = (),
    source_for: Callable[[str], str] = _source_for,
) -> list[str]:
    """Return on which of its addresses a rank listens.

    Args:
        own: the addresses of the rank's host.
        others: those of the other ranks' hosts.
        is_one_host: whether all ranks run on one host.
        of_interface: those of the interface that the engine was told to use, if it was told any.
        source_for: this host's address on the way to another, "" where none leads there.
    """
    if is_one_host:
        return ["127.0.0.1"]
    if of_interface:
        return list(of_interface)
    # What another host has too, such as a bridge of its containers, leads back to this one.
    routes = {source_for(address) for address in others if address not in own}
    found = sorted(address for address in routes if address and not _is_loopback(address))
    # None: containers of one host that share its network, or a host without one.
    return found or list(own) or ["127.0.0.1"]
