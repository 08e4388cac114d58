"""A link that is cut in one direction is named as that; what only looks like it is not."""

from __future__ import annotations

import itertools
import random
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.launch import Finished
from tests.support.marks import long_first
from tests.testbed.hosts import Testbed
from tests.testbed.test_lost_links import JOB, run, wait_place

pytestmark = [pytest.mark.multiprocess, pytest.mark.long, pytest.mark.timeout(300)]

HOSTS = ("host0", "host1", "host2")
MOST_S = 15.0
SEED = 5


@contextmanager
def cut_ways(testbed: Testbed, *ways: tuple[str, str]) -> Iterator[None]:
    """Lose all that some hosts send to others, as with a wrong route."""
    routes = [
        ["ip", "-n", f"{testbed.name}-{sender}", "route", "VERB", "blackhole", f"{address}/32"]
        for sender, receiver in ways
        for address in [f"10.77.0.{10 + int(receiver.removeprefix('host'))}"]
    ]
    for route in routes:
        run([word.replace("VERB", "add") for word in route])
    try:
        yield
    finally:
        for route in routes:
            run([word.replace("VERB", "del") for word in route])


def run_cut(
    testbed: Testbed, folder: Path, what: str, mesh: str, ways: list[tuple[str, str]]
) -> tuple[Finished, float]:
    """Run the job and cut some ways once it trains; returns how many seconds it took to end."""
    testbed.up(3)
    at = 0.0

    def cut() -> None:
        nonlocal at
        wait_place(folder)
        time.sleep(2.0)
        with cut_ways(testbed, *ways):
            at = time.time()
            until = at + 60.0
            while testbed.tell("ranks") and time.time() < until:
                time.sleep(0.2)
            ended.append(time.time())

    ended: list[float] = []
    env = {"LOFT_HVD_MESH": mesh}
    done = testbed.run([JOB, str(folder), what], timeout_s=150, env=env, during=cut)
    assert ended, done.output[-9000:]
    return done, ended[0] - at


CASES = [
    (way, what, mesh)
    for what in ("nothing", "torch")
    for mesh in ("auto", "off")
    for way in itertools.permutations(HOSTS, 2)
]
# First what is least alike: a way without rank 0, to it and from it, and with the other engine.
FIRST = [
    (("host1", "host2"), "nothing", "off"),
    (("host2", "host0"), "nothing", "auto"),
    (("host0", "host1"), "torch", "auto"),
]


@pytest.mark.parametrize(
    ("way", "what", "mesh"),
    long_first([*FIRST, *(case for case in CASES if case not in FIRST)], len(FIRST)),
)
def test_a_way_that_is_cut_is_named_and_every_process_ends(
    way: tuple[str, str], what: str, mesh: str, testbed: Testbed, tmp_path: Path
) -> None:
    done, took_s = run_cut(testbed, tmp_path, what, mesh, [way])
    assert done.returncode not in (0, None), done.output[-9000:]
    named = set(re.findall(r"(host\d) does not reach (host\d)", done.output))
    assert named == {way}, done.output[-9000:]
    assert took_s <= MOST_S, done.output[-9000:]


@pytest.mark.whole
@pytest.mark.parametrize("what", ["nothing", "attached", "torch"])
@pytest.mark.parametrize("pair", list(itertools.combinations(HOSTS, 2)))
def test_a_link_that_is_cut_both_ways_is_named(
    pair: tuple[str, str], what: str, testbed: Testbed, tmp_path: Path
) -> None:
    ways = [pair, pair[::-1]]
    done, took_s = run_cut(testbed, tmp_path, what, "auto", ways)
    named = set(re.findall(r"(host\d) does not reach (host\d)", done.output))
    assert named, done.output[-9000:]
    assert named <= set(ways), done.output[-9000:]
    assert took_s <= MOST_S, done.output[-9000:]


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


@pytest.mark.parametrize("what", ["nothing", "torch"])
@pytest.mark.parametrize(
    "trouble",
    [
        pause_all,
        pytest.param(slow_down, marks=pytest.mark.whole),
        pytest.param(stop_at_random, marks=pytest.mark.whole),
    ],
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
