"""A link that is cut in one direction is named as that; what only looks like it is not."""

from __future__ import annotations

import itertools
import random
import re
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.launch import Finished
from tests.support.marks import long_first
from tests.testbed.hosts import Testbed
from tests.testbed.test_faults import LOADED_S
from tests.testbed.test_lost_links import JOB, address_of, lose, run, wait_place

pytestmark = [pytest.mark.multiprocess, pytest.mark.long, pytest.mark.timeout(300)]

HOSTS = ("host0", "host1", "host2")
MOST_S = 15.0  # on idle cores
SEED = 5


Cut = Callable[[Testbed, Path], AbstractContextManager[None]]


@contextmanager
def cut_ways(testbed: Testbed, *ways: tuple[str, str]) -> Iterator[None]:
    """Lose all that some hosts send to others, as with a wrong route."""
    routes = [
        (f"{testbed.name}-{sender}", ["blackhole", f"{address_of(receiver)}/32"])
        for sender, receiver in ways
    ]
    for host, route in routes:
        run(["ip", "-n", host, "route", "add", *route])
    try:
        yield
    finally:
        for host, route in routes:
            run(["ip", "-n", host, "route", "del", *route])


@contextmanager
def cut_data(testbed: Testbed, folder: Path, sender: str, receiver: str) -> Iterator[None]:
    """Lose what a host sends to another on all ports but ssh's and the heartbeat's."""
    host = f"{testbed.name}-{receiver}"
    shown = subprocess.run(
        ["ip", "netns", "exec", host, "ss", "-Htn", "dst", address_of(sender)],
        check=True,
        timeout=30,
        capture_output=True,
        text=True,
    ).stdout
    kept = {2222, wait_place(folder)[1]}
    matches = [
        f"match ip src {address_of(sender)}/32 match ip sport {theirs} 0xffff "
        f"match ip dport {ours} 0xffff"
        for ours, theirs in re.findall(r"\S+:(\d+) +\S+:(\d+)", shown)
        if not kept & {int(ours), int(theirs)}
    ]
    assert matches, shown
    with lose(testbed, receiver, matches):
        yield


@dataclass(frozen=True)
class RunCut:
    """How a job ended whose links were cut."""

    done: Finished
    named: set[tuple[str, str]]
    took_s: float  # from the cut until no rank was left

    def ended(self) -> None:
        assert self.done.returncode not in (0, None), self.done.output[-9000:]
        assert self.took_s <= MOST_S + LOADED_S, self.done.output[-9000:]


def run_cut(testbed: Testbed, folder: Path, what: str, cut: Cut, mesh: str = "auto") -> RunCut:
    """Run the job and cut something once it trains, until no rank is left."""
    testbed.up(3)
    took_s = float("nan")

    def wait_end() -> None:
        nonlocal took_s
        wait_place(folder)
        time.sleep(2.0)
        with cut(testbed, folder):
            at = time.monotonic()
            while testbed.tell("ranks") and time.monotonic() - at < 60.0:
                time.sleep(0.2)
            took_s = time.monotonic() - at

    env = {"LOFT_HVD_MESH": mesh}
    done = testbed.run([JOB, str(folder), what], timeout_s=150, env=env, during=wait_end)
    named = set(re.findall(r"(host\d) does not reach (host\d)", done.output))
    return RunCut(done, named, took_s)


CASES = [
    (way, what, mesh)
    for what in ("nothing", "torch")
    for mesh in ("auto", "off")
    for way in itertools.permutations(HOSTS, 2)
]
# First what is least alike: a way without rank 0, of which both ends tell; and one to rank 0, of
# which a third rank does.
FIRST = [(("host1", "host2"), "nothing", "off"), (("host2", "host0"), "torch", "auto")]


@pytest.mark.parametrize(
    ("way", "what", "mesh"),
    long_first([*FIRST, *(case for case in CASES if case not in FIRST)], len(FIRST)),
)
def test_a_way_that_is_cut_is_named_and_every_process_ends(
    way: tuple[str, str], what: str, mesh: str, testbed: Testbed, tmp_path: Path
) -> None:
    cut = run_cut(testbed, tmp_path, what, lambda bed, _: cut_ways(bed, way), mesh)
    assert cut.named == {way}, cut.done.output[-9000:]
    cut.ended()


@pytest.mark.whole
@pytest.mark.parametrize("what", ["nothing", "attached", "torch"])
@pytest.mark.parametrize("pair", list(itertools.combinations(HOSTS, 2)))
def test_a_link_that_is_cut_both_ways_is_named(
    pair: tuple[str, str], what: str, testbed: Testbed, tmp_path: Path
) -> None:
    ways = pair, pair[::-1]
    cut = run_cut(testbed, tmp_path, what, lambda bed, _: cut_ways(bed, *ways))
    assert cut.named, cut.done.output[-9000:]
    assert cut.named <= set(ways), cut.done.output[-9000:]
    cut.ended()


@pytest.mark.whole
@pytest.mark.parametrize("way", list(itertools.permutations(HOSTS, 2)))
def test_a_way_that_is_cut_for_data_alone_is_named(
    way: tuple[str, str], testbed: Testbed, tmp_path: Path
) -> None:
    """As by a firewall that has the heartbeat's port open."""
    cut = run_cut(testbed, tmp_path, "nothing", lambda bed, folder: cut_data(bed, folder, *way))
    assert cut.named == {way}, cut.done.output[-9000:]
    cut.ended()


def pause_all(testbed: Testbed) -> None:
    """Stop every rank for 15 s, as when a machine is moved, and wake one host after the other."""
    for host in HOSTS:
        testbed.tell("signal", host, "STOP")
    time.sleep(15.0)
    for host in HOSTS:
        testbed.tell("signal", host, "CONT")
        time.sleep(2.0)


def stop_at_random(testbed: Testbed) -> None:
    """Stop a rank for up to 2.5 s, 90 times."""
    generator = random.Random(SEED)
    for _ in range(90):
        host = generator.choice(HOSTS)
        testbed.tell("signal", host, "STOP")
        time.sleep(generator.uniform(0.1, 2.5))
        testbed.tell("signal", host, "CONT")
        time.sleep(generator.uniform(0.0, 0.5))


def slow_down(testbed: Testbed) -> None:
    """Make one host's link slow, long and lossy for 30 s."""
    testbed.tell("link", "host1", "--rate", "1mbit", "--delay", "50ms", "--loss", "2%")
    time.sleep(30.0)
    testbed.tell("link", "host1", "--rate", "0", "--delay", "0", "--loss", "0")


@pytest.mark.parametrize(
    ("trouble", "what"),
    long_first(itertools.product((pause_all, slow_down, stop_at_random), ("nothing", "torch"))),
)
def test_what_stops_or_slows_ranks_is_no_cut_and_training_goes_on(
    trouble: Callable[[Testbed], None], what: str, testbed: Testbed, tmp_path: Path
) -> None:
    testbed.up(3)

    def disturb() -> None:
        wait_place(tmp_path)
        trouble(testbed)
        time.sleep(5.0)
        (tmp_path / "stop").touch()

    done = testbed.run([JOB, str(tmp_path), what], timeout_s=280, during=disturb)
    done.succeeded(3)
    assert "does not reach" not in done.output
