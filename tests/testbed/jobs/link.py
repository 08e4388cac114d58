"""What a link between two hosts is like: ``link.py PACKETS BYTES PER_S``, on two of them.

Rank 0 sends datagrams to rank 1, which says how many came, in which order and how fast; before
that it times round trips of single ones. It prints round_trip_ms, lost, in_order and mbit_per_s.
"""

from __future__ import annotations

import os
import socket
import statistics
import struct
import sys
import time

PORT, TRIPS, LIMIT_S, PING = 5099, 200, 60.0, b"there and back"
num_packets, num_bytes, per_s = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
rank = int(os.environ["HOROVOD_RANK"])
hosts = ["10.77.0.10", "10.77.0.11"]
ends = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
ends.setsockopt(socket.SOL_SOCKET, 33, 64 << 20)  # SO_RCVBUFFORCE: nothing is lost here
ends.bind((hosts[rank], PORT))
ends.settimeout(LIMIT_S)
there = hosts[1 - rank], PORT
if rank == 1:
    numbers: list[int] = []
    began = ended = 0.0
    while True:
        packet = ends.recv(65536)
        if packet == PING:
            ends.sendto(packet, there)
            continue
        (number,) = struct.unpack_from("=q", packet)
        if number < 0:
            break
        ended = time.monotonic()
        began = began or ended
        numbers.append(number)
    rate = 8e-6 * num_bytes * len(numbers) / (ended - began)
    lost = 1 - len(numbers) / num_packets
    print(
        f"lost {lost:.6f} in_order {numbers == sorted(numbers)} mbit_per_s {rate:.1f}", flush=True
    )
else:
    time.sleep(1.0)  # the other end listens by then
    trips: list[float] = []
    ends.settimeout(0.5)
    while len(trips) < TRIPS:
        began = time.perf_counter()
        ends.sendto(PING, there)
        try:
            ends.recv(64)
        except TimeoutError:  # lost: the other end counts what comes
            continue
        trips.append(time.perf_counter() - began)
    print(f"round_trip_ms {1e3 * statistics.median(trips):.3f}", flush=True)
    began = time.perf_counter()
    filler = bytes(num_bytes - 8)
    for number in range(num_packets):
        while number > per_s * (time.perf_counter() - began):
            time.sleep(1e-4)
        ends.sendto(struct.pack("=q", number) + filler, there)
    for _ in range(50):  # some are lost
        time.sleep(0.02)
        ends.sendto(struct.pack("=q", -1), there)
