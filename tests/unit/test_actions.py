"""What follows from a verdict: who is told, and which processes are doomed; without a thread."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator

import pytest

from loft_hvd.failures.actions import Actions, HeartbeatSettings, ProcessControl, read_verdict
from loft_hvd.failures.connections import Connections
from loft_hvd.failures.diagnosis import Diagnosis, Verdict
from loft_hvd.failures.links import Link
from loft_hvd.failures.process import ProcessExit, RankProcess

Make = Callable[..., tuple[Actions, dict[int, Link]]]


@pytest.fixture
def make() -> Iterator[Make]:
    """Return a maker of rank 0's actions, and of the far ends of its links to ranks 1 and 2."""
    ends: list[Connections | Link | Actions] = []

    def maker(
        *, is_elastic: bool = False, end: ProcessExit | None = None
    ) -> tuple[Actions, dict[int, Link]]:
        pairs = {rank: socket.socketpair() for rank in (1, 2)}
        far = {rank: Link(theirs) for rank, (_, theirs) in pairs.items()}
        links = {rank: Link(ours) for rank, (ours, _) in pairs.items()}
        connections = Connections(links, period_s=60.0)
        known = {rank: RankProcess(7, 1000 + rank, 5, "here") for rank in pairs}
        actions = Actions(
            Diagnosis(0, known),
            connections,
            settings=HeartbeatSettings(is_elastic=is_elastic),
            control=ProcessControl(exit=end),
            engine_is_down=lambda: False,
        )
        ends.extend([*far.values(), connections, actions])
        return actions, far

    yield maker
    for each in ends:
        each.close()


@pytest.mark.parametrize(
    "verdict",
    [
        Verdict(1, "rank 1 is frozen"),
        Verdict(1, "rank 1 has been silent", is_unseen=True),
        Verdict(1, "rank 1 takes other steps", is_mismatch=True),
        Verdict(1, "host1 does not reach host2", is_cut=True),
    ],
)
def test_all_but_a_rank_that_has_failed_are_told_the_first_verdict(
    verdict: Verdict, make: Make
) -> None:
    actions, far = make()
    actions.decide(None)
    assert not actions.has_verdict.is_set()
    actions.decide(verdict)
    actions.decide(Verdict(2, "rank 2 is frozen"))
    assert actions.verdict == verdict
    assert [read_verdict(each) for each in far[2].receive()] == [verdict]
    # Who is astray, or not reached, lives, and has to end by the same error.
    told = [read_verdict(each) for each in far[1].receive()]
    assert told == ([verdict] if verdict.is_mismatch or verdict.is_cut else [])


class _Armed(ProcessExit):
    """Stands for the end of a process whose script an error has ended."""

    is_armed = True


@pytest.mark.parametrize(
    ("is_elastic", "end", "dooms"),
    [(False, None, False), (True, None, True), (False, _Armed(leave_s=None), True)],
)
def test_a_stopped_rank_is_doomed_where_the_job_goes_on_or_is_over_without_it(
    is_elastic: bool, end: ProcessExit | None, dooms: bool, make: Make
) -> None:
    actions, _ = make(is_elastic=is_elastic, end=end)
    assert not actions.dooms(1)  # nobody is, before there is a verdict
    actions.decide(Verdict(1, "rank 1 is frozen"))
    assert actions.dooms(1) == dooms
    assert not actions.dooms(2)
