"""A host's link to the switch: its rate by the kernel's tbf, what makes it far by a relay."""

from __future__ import annotations

import array
import contextlib
import fcntl
import hashlib
import signal
import socket
import struct
import subprocess
import sys
from pathlib import Path

from tests.testbed.tool.state import (
    NET,
    STATE,
    SWITCH,
    TESTBED,
    Conf,
    Host,
    TestbedError,
    alive,
    kill_and_wait,
    netns,
    process,
    save,
    sh,
)

__all__ = [
    "lay",
    "make_switch",
    "parse_gaps",
    "parse_loss",
    "parse_rate",
    "parse_time_ms",
    "plug",
    "pull",
    "renew",
    "set_offloads",
]

_RATE_UNITS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9}
_TIME_UNITS_MS = {"us": 1e-3, "ms": 1.0, "s": 1e3, "": 1.0}
_RELAY = Path(__file__).with_name("relay.cpp")
_SIOCETHTOOL = 0x8946
_CHECKSUMS_SEGMENTS = (0x17, 0x1F, 0x24)  # ETHTOOL_STXCSUM, _STSO, _SGSO


def _split(text: str) -> tuple[str, str]:
    """Split "10mbit" into "10" and "mbit"."""
    word = text.strip().lower()
    number = word.rstrip("abcdefghijklmnopqrstuvwxyz")
    return number, word[len(number) :]


def parse_rate(text: str) -> int:
    """Return bits a second."""
    number, unit = _split(text)
    try:
        return int(float(number) * _RATE_UNITS[unit.removesuffix("bit")])
    except (ValueError, KeyError):
        raise TestbedError(f"rate {text!r}: want e.g. 10mbit, 1gbit") from None


def parse_time_ms(text: str) -> float:
    """Return milliseconds."""
    number, unit = _split(text)
    try:
        return float(number) * _TIME_UNITS_MS[unit]
    except (ValueError, KeyError):
        raise TestbedError(f"time {text!r}: want e.g. 5ms, 500us") from None


def parse_loss(text: str) -> float:
    """Return the chance, 0 to 1."""
    word = text.strip()
    try:
        chance = float(word[:-1]) / 100 if word.endswith("%") else float(word)
    except ValueError:
        chance = -1
    if not 0 <= chance <= 1:
        raise TestbedError(f"loss {text!r}: want e.g. 1% or 0.01")
    return chance


def parse_gaps(text: str) -> tuple[float, float]:
    """Return milliseconds of a link's gaps, and from the start of one to that of the next."""
    gap, _, every = text.partition("/")
    gap_ms, every_ms = parse_time_ms(gap), parse_time_ms(every)
    if not 0 < gap_ms < every_ms:
        raise TestbedError(f"gaps {text!r}: want e.g. 300ms/3s")
    return gap_ms, every_ms


def make_switch(mtu: int) -> None:
    """Make the namespace of the switch, and its bridge."""
    sh("ip", "netns", "add", SWITCH)
    sh("ip", "-n", SWITCH, "link", "set", "lo", "up")
    bridge = "link add br0 type bridge stp_state 0 forward_delay 0"
    sh("ip", "-n", SWITCH, *bridge.split())
    sh("ip", "-n", SWITCH, "link", "set", "br0", "mtu", str(mtu), "up")


def lay(conf: Conf, host: str) -> None:
    """Make a host's network namespace and its cable to the switch."""
    space, port, own, mtu = netns(host), _port(host), conf.hosts[host].address, str(conf.mtu)
    sh("ip", "netns", "add", space)
    # The end called eth0 is made in the host's namespace from the start: the machine's own
    # namespace never sees any of these devices.
    peer = ["peer", "name", "eth0", "mtu", mtu, "netns", space]
    sh("ip", "-n", SWITCH, "link", "add", port, "mtu", mtu, "type", "veth", *peer)
    sh("ip", "-n", space, "link", "set", "lo", "up")
    sh("ip", "-n", space, "addr", "add", f"{own}/24", "dev", "eth0")
    sh("ip", "-n", space, "link", "set", "eth0", "up")
    sh("ip", "-n", SWITCH, "link", "set", port, "up")
    if conf.tcp != "-":
        # By route: the sysctl takes only what the machine's own list allows.
        route = f"route change {NET}0/24 dev eth0 src {own} proto kernel scope link"
        sh("ip", "-n", space, *route.split(), "congctl", conf.tcp)


def pull(host: str) -> None:
    """Pull a host's cable."""
    sh("ip", "-n", SWITCH, "link", "set", _port(host), "down")


def plug(host: str) -> None:
    """Plug a host's cable in."""
    sh("ip", "-n", SWITCH, "link", "set", _port(host), "up")


def renew(conf: Conf, host: str) -> None:
    """Bring a host's link to what the testbed's settings say."""
    asked, port, tap = conf.hosts[host], _port(host), f"t-{host}"
    if alive(asked.relay):
        kill_and_wait(asked.relay, signal.SIGTERM)
    asked.relay = None
    _limit_rate(netns(host), "eth0", asked.rate)
    _limit_rate(SWITCH, port, asked.rate)
    if asked.is_far:
        _offload(host, False)
        sh("ip", "-n", SWITCH, "link", "set", port, "nomaster")
        if "mtu" not in sh("ip", "-n", SWITCH, "link", "show", tap, check=False):
            sh("ip", "-n", SWITCH, "tuntap", "add", "dev", tap, "mode", "tap")
        sh("ip", "-n", SWITCH, "link", "set", tap, "mtu", str(conf.mtu), "master", "br0", "up")
        _start_relay(asked, host, port, tap)
    else:
        sh("ip", "-n", SWITCH, "link", "del", tap, check=False)
        _offload(host, True)
        sh("ip", "-n", SWITCH, "link", "set", port, "master", "br0")
    save(conf)


def _port(host: str) -> str:
    return f"p-{host}"


def _limit_rate(space: str, device: str, rate: int | None) -> None:
    if rate is None:
        sh("tc", "-n", space, "qdisc", "del", "dev", device, "root", check=False)
        return
    burst = max(16 << 10, rate // 8 // 400)  # bytes: 2.5 ms, at least 16 KiB
    limit = burst + max(64 << 10, rate // 8 // 40)  # bytes: a queue of 25 ms, at least 64 KiB
    shape = f"tbf rate {rate}bit burst {burst}b limit {limit}b"
    sh("tc", "-n", space, "qdisc", "replace", "dev", device, "root", *shape.split())


def _start_relay(asked: Host, host: str, port: str, tap: str) -> None:
    seed = int(host.removeprefix("host"))  # each host's own, the same in every run
    numbers = [asked.delay_ms, asked.jitter_ms, asked.loss, seed, asked.gap_ms, asked.every_ms]
    command = [str(_compiled_relay()), port, tap, *map(str, numbers)]
    with (STATE / f"relay-{host}.log").open("ab") as log:
        started = subprocess.Popen(
            ["ip", "netns", "exec", SWITCH, *command],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    asked.relay = process(started.pid)


def _compiled_relay() -> Path:
    """Return the relay's program, compiled anew where its source has changed."""
    program = STATE / f"relay-{hashlib.sha256(_RELAY.read_bytes()).hexdigest()[:16]}"
    if not program.exists():
        sh("g++", "-O2", "-std=c++17", "-o", f"{program}.new", str(_RELAY))
        Path(f"{program}.new").rename(program)
    return program


def _offload(host: str, is_on: bool) -> None:
    command = [sys.executable, str(TESTBED), "_offload", "eth0", str(int(is_on))]
    sh("ip", "netns", "exec", netns(host), *command)


def set_offloads(device: str, is_on: bool) -> None:
    """Turn segmentation and checksums by a device on or off; off: no packet is beyond its MTU."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asks:
        for command in _CHECKSUMS_SEGMENTS:
            value = array.array("B", struct.pack("II", command, int(is_on)))
            request = struct.pack("16sP16x", device.encode(), value.buffer_info()[0])
            with contextlib.suppress(OSError):  # a device without it
                fcntl.ioctl(asks, _SIOCETHTOOL, request)
