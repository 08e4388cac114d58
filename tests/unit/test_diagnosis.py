"""Who is silent, gone or astray: conclusions on a fake clock."""

from __future__ import annotations

from dataclasses import replace

import pytest

from loft_hvd.errors import MismatchError, PeerError
from loft_hvd.failures.call_sites import CallSite
from loft_hvd.failures.cuts import ConnectionEnd
from loft_hvd.failures.diagnosis import Diagnosis, DiagnosisLimits
from loft_hvd.failures.process import RankProcess
from loft_hvd.failures.progress import Progress, ProgressMeter, key_of


def at(waited_s: float, in_flight: str = "", started: str | None = None) -> Progress:
    """Return a progress; each letter of in_flight is an operation, as often as in started."""
    counts = {key_of(name): (started or in_flight).count(name) for name in started or in_flight}
    flying = tuple((name, counts[key_of(name)]) for name in in_flight)
    return Progress(waited_s, flying, counts)


LIMITS = DiagnosisLimits(suspect_s=3.0, silent_s=10.0, stall_s=5.0)
WAITING = at(10.0, "a")


class Clock:
    """Seconds that pass only when told."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def diagnosis(clock: Clock) -> Diagnosis:
    """Return what rank 0 knows of ranks 1 and 2, who have just been heard."""
    processes = {rank: RankProcess(rank, 1000 + rank, 5, f"host{rank}") for rank in (1, 2)}
    return Diagnosis(0, processes, limits=LIMITS, clock=clock)


def hear(diagnosis: Diagnosis, *ranks: int, progress: Progress | None = None) -> None:
    for rank in ranks:
        diagnosis.heard(rank, Progress() if progress is None else progress)


def test_ranks_that_beat_are_left_in_peace(diagnosis: Diagnosis, clock: Clock) -> None:
    for _ in range(100):
        clock.now += 1.0
        hear(diagnosis, 1, 2, progress=WAITING)
        assert diagnosis.suspects() == []
        assert diagnosis.judge(at(50.0, "a")) is None


@pytest.mark.parametrize(
    ("state", "silent_s", "own", "says"),
    [
        ("T", 3.0, WAITING, "rank 1 (process 1001 on host1) is frozen"),
        ("T", 2.9, WAITING, None),
        ("T", 3.0, Progress(), "is frozen"),  # others may wait in calls that are not ours
        ("X", 3.0, Progress(), "rank 1 (process 1001 on host1) has ended without a word"),
        ("Z", 3.0, WAITING, "has ended without a word"),
        ("R", 1e6, WAITING, None),  # it runs: its interpreter is held, as in a long call
        ("S", 1e6, WAITING, None),
        ("D", 1e6, WAITING, None),
        ("t", 1e6, WAITING, None),  # in a debugger
        ("?", 9.9, WAITING, None),
        ("?", 10.0, WAITING, "has been silent for 10 s"),
        ("?", 1e6, at(9.9, "a"), None),  # others have waited for less: it may only compute
        ("?", 1e6, Progress(), None),
    ],
)
def test_silence_counts_by_what_the_process_does(
    state: str,
    silent_s: float,
    own: Progress,
    says: str | None,
    diagnosis: Diagnosis,
    clock: Clock,
) -> None:
    clock.now += silent_s
    hear(diagnosis, 2)
    if diagnosis.is_silent(1):
        diagnosis.saw(1, state)
    verdict = diagnosis.judge(own)
    assert (verdict is None) == (says is None)
    if verdict is not None and says is not None:
        assert verdict.rank == 1
        assert says in verdict.text
        assert isinstance(verdict.error(), PeerError)


def test_a_peer_that_is_heard_again_is_no_suspect(diagnosis: Diagnosis, clock: Clock) -> None:
    clock.now += 8.0
    assert diagnosis.suspects() == [1, 2]
    diagnosis.saw(1, "T")
    hear(diagnosis, 1, 2)
    assert diagnosis.suspects() == []
    clock.now += 4.0
    assert diagnosis.judge(WAITING) is None  # what was seen then does not count now


def test_a_look_that_fails_tells_nothing(diagnosis: Diagnosis) -> None:
    diagnosis.saw(1, "X")
    diagnosis.saw(1, "?")
    assert diagnosis.is_silent(1)
    diagnosis.found(1)
    assert not diagnosis.is_silent(1)


def test_a_living_rank_without_a_link_does_not_hide_who_was_told(
    diagnosis: Diagnosis, clock: Clock
) -> None:
    diagnosis.lost(1)
    diagnosis.saw(1, "S")
    diagnosis.told(2)
    clock.now += 0.5
    diagnosis.lost(2)
    diagnosis.saw(2, "X")
    verdict = diagnosis.judge(moved(1e6))
    assert verdict is not None
    assert verdict.rank == 2


def test_a_rank_that_was_out_itself_starts_anew(diagnosis: Diagnosis, clock: Clock) -> None:
    clock.now += 1000.0
    diagnosis.restarted()
    assert diagnosis.suspects() == []


def test_only_a_rank_that_runs_but_is_silent_is_warned_of_once(
    diagnosis: Diagnosis, clock: Clock
) -> None:
    clock.now += 11.0
    diagnosis.saw(1, "R")
    diagnosis.saw(2, "T")
    (warning,) = diagnosis.warnings()
    assert "rank 1 (process 1001 on host1) runs, but has been silent for 11 s" in warning
    assert diagnosis.warnings() == []


# A lost link: a failure only with a second sign.


def moved(seconds_ago: float, waited_s: float = 50.0) -> Progress:
    """Return the progress of a rank on which an operation over all ranks has ended."""
    return replace(at(waited_s, "a"), moved_s=seconds_ago)


@pytest.mark.parametrize("is_closed", [False, True])
def test_a_lost_link_is_no_failure_while_collectives_go_on(
    is_closed: bool, diagnosis: Diagnosis, clock: Clock
) -> None:
    if is_closed:
        diagnosis.lost(1)
    warnings = []
    for _ in range(60):
        clock.now += 1.0
        hear(diagnosis, 2)
        assert diagnosis.judge(moved(0.5)) is None
        assert diagnosis.misses_link(1) == (is_closed or clock.now >= 103.0)
        assert diagnosis.suspects() == []
        warnings += diagnosis.warnings()
    (warning,) = warnings
    assert "link to rank 1 (process 1001 on host1) is lost" in warning
    diagnosis.found(1)
    hear(diagnosis, 1)
    assert not diagnosis.misses_link(1)


@pytest.mark.parametrize("sign", ["engine", "X", "Z"])
def test_a_lost_link_and_one_more_sign_are_an_end_without_a_word(
    sign: str, diagnosis: Diagnosis, clock: Clock
) -> None:
    diagnosis.moved(1.0)
    diagnosis.lost(2)
    assert diagnosis.suspects() == [2]  # to be looked at, at once
    assert diagnosis.judge(moved(1.0)) is None
    if sign == "engine":
        diagnosis.engine_failed()
    else:
        diagnosis.saw(2, sign)
    verdict = diagnosis.judge(moved(1.0))
    assert verdict is not None
    assert "rank 2 (process 1002 on host2) has ended without a word" in verdict.text


def test_a_link_that_was_lost_before_does_not_count_when_the_engine_fails(
    diagnosis: Diagnosis, clock: Clock
) -> None:
    diagnosis.lost(1)
    clock.now += 60.0
    hear(diagnosis, 2)
    diagnosis.moved(1.0)
    diagnosis.lost(2)
    diagnosis.engine_failed()
    verdict = diagnosis.judge(moved(1.0))
    assert verdict is not None
    assert verdict.rank == 2


def test_an_operation_that_is_taken_up_late_says_nothing_of_what_came_before(
    diagnosis: Diagnosis, clock: Clock
) -> None:
    """Its end is seen when the script asks for it: a rank may have died meanwhile."""
    clock.now += 1.0
    diagnosis.lost(2)
    clock.now += 0.5
    diagnosis.engine_failed()
    verdict = diagnosis.judge(replace(moved(0.1), began_s=2.0))
    assert verdict is not None
    assert verdict.rank == 2
    # One that has begun since then has had an answer of that rank: its link alone was lost.
    assert diagnosis.judge(replace(moved(0.1), began_s=0.3)) is None


@pytest.mark.parametrize("order", [(1, 2), (2, 1)])
def test_of_ranks_that_ended_after_each_other_the_first_is_named(
    order: tuple[int, int], diagnosis: Diagnosis, clock: Clock
) -> None:
    """A launcher ends the others, and those may have been heard since the first fell silent."""
    for rank in order:
        diagnosis.lost(rank)
        clock.now += 0.5
        hear(diagnosis, *order[order.index(rank) + 1 :])
    for rank in order:
        diagnosis.saw(rank, "X")
    verdict = diagnosis.judge(moved(1e6))
    assert verdict is not None
    assert verdict.rank == order[0]


def test_a_link_that_was_lost_long_before_does_not_hide_who_has_ended(
    diagnosis: Diagnosis, clock: Clock
) -> None:
    """No operation has begun since: steps may take long."""
    diagnosis.lost(1)
    for _ in range(5):
        clock.now += 1.0
        hear(diagnosis, 2)
    diagnosis.lost(2)
    diagnosis.engine_failed()
    verdict = diagnosis.judge(moved(20.0))
    assert verdict is not None
    assert verdict.rank == 2


def test_a_rank_that_is_told_to_end_is_named_for_that(diagnosis: Diagnosis, clock: Clock) -> None:
    diagnosis.told(2)
    assert diagnosis.is_over()
    assert diagnosis.judge(moved(1e6)) is None  # it lives
    clock.now += 0.5
    diagnosis.lost(2)
    assert diagnosis.judge(moved(1e6)) is None  # the link alone
    diagnosis.engine_failed()
    verdict = diagnosis.judge(moved(1e6))
    assert verdict is not None
    assert verdict.text.startswith(
        "rank 2 (process 1002 on host2) has ended: it was told to by SIGTERM"
    )


@pytest.mark.parametrize("state", ["?", "X"])
def test_who_is_told_is_not_named_while_an_earlier_end_is_not_proven(
    state: str, diagnosis: Diagnosis, clock: Clock
) -> None:
    """A launcher on other hosts may tell rank 2, and not this one, that rank 1 was killed."""
    diagnosis.lost(1)
    diagnosis.told(2)
    clock.now += 0.5
    diagnosis.lost(2)
    diagnosis.saw(2, state)
    assert diagnosis.judge(moved(1e6)) is None
    diagnosis.engine_failed()
    verdict = diagnosis.judge(moved(1e6))
    assert verdict is not None
    assert verdict.text.startswith("rank 1 (process 1001 on host1) has ended without a word")
    assert "rank 2 (" not in verdict.text


@pytest.mark.parametrize(("own_s", "names"), [(0.1, False), (0.6, True)])
def test_a_launcher_tells_all_at_once_and_who_was_told_before_is_named(
    own_s: float, names: bool, diagnosis: Diagnosis, clock: Clock
) -> None:
    diagnosis.told(2)
    clock.now += own_s
    diagnosis.told()
    diagnosis.lost(2)
    diagnosis.engine_failed()
    assert (diagnosis.judge(moved(1e6)) is not None) == names


@pytest.mark.parametrize(("later_s", "names"), [(0.1, True), (0.4, False)])
def test_the_end_that_comes_with_a_launchers_word_was_before_it(
    later_s: float, names: bool, diagnosis: Diagnosis, clock: Clock
) -> None:
    """Who ends later was told, too, but could not say so: something held its interpreter."""
    diagnosis.told()
    clock.now += later_s
    diagnosis.lost(2)
    diagnosis.engine_failed()
    assert (diagnosis.judge(moved(1e6)) is not None) == names


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("is_lost", [False, True])
def test_who_was_killed_is_named_and_not_who_was_told_to_end(
    is_lost: bool, own: bool, diagnosis: Diagnosis
) -> None:
    """All is read at one moment; what the killed one has forked may hold its link for long."""
    if own:
        diagnosis.told()
    diagnosis.told(1)
    diagnosis.lost(1)
    if is_lost:
        diagnosis.lost(2)
    for rank in (1, 2):
        diagnosis.saw(rank, "X")
    verdict = diagnosis.judge(moved(1e6))
    assert verdict is not None
    assert verdict.text.startswith("rank 2 (process 1002 on host2) has ended without a word")
    assert "rank 1 (" not in verdict.text


def test_who_ends_by_the_end_of_one_that_was_told_is_not_named(
    diagnosis: Diagnosis, clock: Clock
) -> None:
    """Horovod may abort the others, right after."""
    diagnosis.told(2)
    clock.now += 0.5
    for rank in (2, 1):
        diagnosis.lost(rank)
        diagnosis.saw(rank, "X")
    verdict = diagnosis.judge(moved(1e6))
    assert verdict is not None
    assert verdict.text.startswith("rank 2 (process 1002 on host2) has ended: it was told to")
    assert "rank 1 (" not in verdict.text


def test_ranks_that_go_on_were_not_told_for_long(diagnosis: Diagnosis, clock: Clock) -> None:
    """A script may prevent its end."""
    diagnosis.told(2)
    diagnosis.told()
    clock.now += 2.5
    hear(diagnosis, 1, 2)
    assert not diagnosis.is_over()
    diagnosis.lost(2)
    assert diagnosis.judge(moved(1e6)) is None  # the link alone
    diagnosis.saw(2, "X")
    verdict = diagnosis.judge(moved(1e6))
    assert verdict is not None
    assert "has ended without a word" in verdict.text


def test_a_rank_that_the_engine_has_ended_is_not_to_blame_at_once(
    diagnosis: Diagnosis, clock: Clock
) -> None:
    diagnosis.heard(1, Progress(counts={}))
    diagnosis.left(1, by_error=True)
    for second in range(1, 10):
        clock.now += 1.0
        hear(diagnosis, 2)
        assert diagnosis.judge(at(float(second), "a")) is None
    clock.now += 1.0
    hear(diagnosis, 2)
    verdict = diagnosis.judge(at(10.0, "a"))
    assert verdict is not None  # nobody else was behind it
    assert "rank 1 (process 1001 on host1) has ended its script" in verdict.text
    assert "an error of the engine" in verdict.text


def test_a_good_bye_makes_the_end_of_a_link_none(diagnosis: Diagnosis) -> None:
    diagnosis.left(1)
    diagnosis.lost(1)
    diagnosis.engine_failed()
    assert diagnosis.judge(Progress()) is None
    assert not diagnosis.misses_link(1)
    assert diagnosis.left_ranks() == [1]


def test_the_verdict_of_a_lost_host_says_what_its_launcher_does(clock: Clock) -> None:
    known = {1: RankProcess(1, 1001, 5, "host1")}
    diagnosis = Diagnosis(0, known, limits=LIMITS, hint="; mpirun waits", clock=clock)
    clock.now += 20.0
    verdict = diagnosis.judge(WAITING)
    assert verdict is not None
    assert verdict.text.endswith("; mpirun waits")


def test_a_rank_that_is_waited_for_outside_of_our_operations_is_named_too(
    diagnosis: Diagnosis, clock: Clock
) -> None:
    """As where a script averages a metric while a cable is pulled."""
    for second in range(1, 11):
        clock.now += 1.0
        hear(diagnosis, 2)
        outside = Progress(site=CallSite("train.py:9 in main", "allreduce 'loss'", second - 0.1))
        assert diagnosis.judge(outside) is None
    clock.now += 1.0
    verdict = diagnosis.judge(replace(outside, site=replace(outside.site, call_s=10.9)))
    assert verdict is not None
    assert (verdict.rank, verdict.is_unseen) == (1, True)


@pytest.mark.parametrize(
    ("waited_s", "has_failed", "is_named"),
    [(5.0, True, True), (5.0, False, False), (4.9, True, False), (10.0, False, True)],
)
def test_an_engine_that_fails_while_a_rank_is_silent_shortens_the_wait_for_its_name(
    waited_s: float, has_failed: bool, is_named: bool, diagnosis: Diagnosis, clock: Clock
) -> None:
    """Horovod's elastic mode leaves no time after Gloo's own timeout of 10 s."""
    clock.now += waited_s
    hear(diagnosis, 2)
    if has_failed:
        diagnosis.engine_failed()
    verdict = diagnosis.judge(moved(waited_s, waited_s=waited_s))
    assert (None if verdict is None else verdict.rank) == (1 if is_named else None)


def test_a_wait_that_the_engines_failure_has_ended_still_counts(
    diagnosis: Diagnosis, clock: Clock
) -> None:
    clock.now += 9.0
    hear(diagnosis, 2)
    assert diagnosis.judge(moved(9.0, waited_s=9.0)) is None
    diagnosis.engine_failed()
    verdict = diagnosis.judge(moved(9.0, waited_s=0.0))  # as it asks who is behind the failure
    assert verdict is not None
    assert verdict.rank == 1


@pytest.mark.parametrize(
    ("silent_hosts", "later", "named"),
    [
        ((1, 2), 0.0, 0),  # all others at once: its own link
        ((1, 1), 0.0, 1),  # one other host there is: that may be the one
        ((1, 2), 4.0, 2),  # one after the other: two faults
        ((1, 0), 0.0, 1),  # rank 2 is of this host, and heard
    ],
)
def test_a_rank_that_hears_no_other_host_names_itself(
    silent_hosts: tuple[int, int], later: float, named: int, clock: Clock
) -> None:
    known = {1: RankProcess(silent_hosts[0], 1001, 5, "a"), 2: RankProcess(0, 1002, 5, "b")}
    known[2] = replace(known[2], host_key=silent_hosts[1])
    own = RankProcess(0, 1000, 5, "host0")
    diagnosis = Diagnosis(0, known, limits=LIMITS, own=own, clock=clock)
    clock.now += later
    hear(diagnosis, 2)
    for second in range(10):
        clock.now += 1.0
        if silent_hosts[1] == 0:
            hear(diagnosis, 2)
        assert second == 9 or later or diagnosis.judge(at(second, "a")) is None
    verdict = diagnosis.judge(WAITING)
    assert verdict is not None
    assert verdict.rank == named
    assert ("is cut off: none of the other 2 hosts" in verdict.text) == (named == 0)


@pytest.mark.parametrize("is_closed", [False, True])
def test_who_falls_silent_as_the_job_stops_is_named_and_not_whose_link_was_lost_before(
    is_closed: bool, diagnosis: Diagnosis, clock: Clock
) -> None:
    if is_closed:
        diagnosis.lost(1)
    for _ in range(20):
        clock.now += 1.0
        hear(diagnosis, 2)
        assert diagnosis.judge(moved(0.0)) is None
    for second in range(1, 10):  # rank 2 freezes, on a host of its own
        clock.now += 1.0
        assert diagnosis.judge(moved(second, waited_s=second)) is None
    clock.now += 1.0
    verdict = diagnosis.judge(moved(10.0, waited_s=10.0))
    assert verdict is not None
    assert verdict.rank == 2


def test_a_rank_behind_a_lost_link_is_named_when_all_others_wait_for_it_alone(
    diagnosis: Diagnosis, clock: Clock
) -> None:
    clock.now += 20.0
    diagnosis.moved(0.0)
    for second in range(1, 11):
        clock.now += 1.0
        hear(diagnosis, 2, progress=at(float(second), "a"))
        assert diagnosis.judge(moved(second, waited_s=second - 0.1)) is None
    hear(diagnosis, 2, progress=at(10.0, "", "a"))  # computes: it may be what is waited for
    assert diagnosis.judge(moved(10.0)) is None
    hear(diagnosis, 2, progress=at(10.0, "b"))  # has not come to what rank 0 waits for
    assert diagnosis.judge(moved(10.0)) is None
    hear(diagnosis, 2, progress=at(10.0, "a"))
    verdict = diagnosis.judge(moved(10.0))
    assert verdict is not None
    assert verdict.rank == 1


@pytest.mark.parametrize(("world_size", "names"), [(2, True), (3, False)])
def test_a_rank_that_sees_rank_0_only_blames_it_only_where_nobody_else_is(
    world_size: int, names: bool, clock: Clock
) -> None:
    known = {0: RankProcess(0, 1000, 5, "host0")}
    diagnosis = Diagnosis(1, known, world_size=world_size, limits=LIMITS, clock=clock)
    clock.now += 20.0
    diagnosis.moved(0.0)  # the link was lost by then
    clock.now += 30.0
    assert (diagnosis.judge(moved(30.0)) is not None) == names


def test_a_pulse_tells_who_holds_the_interpreter_from_who_is_frozen(
    diagnosis: Diagnosis, clock: Clock
) -> None:
    for _ in range(16):
        clock.now += 1.0
        hear(diagnosis, 2)
        diagnosis.pulsed(1)
        assert diagnosis.judge(WAITING) is None
    (warning,) = diagnosis.warnings()
    assert "rank 1 (process 1001 on host1) runs, but has been silent for 16 s" in warning
    clock.now += 10.0
    hear(diagnosis, 2)
    verdict = diagnosis.judge(WAITING)
    assert verdict is not None
    assert verdict.rank == 1


@pytest.mark.parametrize("waits", ["inside", "outside", "not", "only lately"])
@pytest.mark.parametrize("sign", ["pulse", "S"])
def test_a_rank_whose_interpreter_stands_still_is_named_once_others_have_waited_for_long(
    sign: str, waits: str, diagnosis: Diagnosis, clock: Clock
) -> None:
    for second in range(1, 301):
        clock.now += 1.0
        hear(diagnosis, 2)
        if sign == "pulse":
            diagnosis.pulsed(1)
        elif diagnosis.is_silent(1):
            diagnosis.saw(1, sign)
        waited_s = second - 100.0 if waits == "only lately" else float(second)
        own = Progress() if waits == "not" else at(max(waited_s, 0.0), "a")
        if waits == "outside":
            own = Progress(site=CallSite("train.py:9 in main", "allreduce 'loss'", waited_s))
        assert diagnosis.is_held(1) == (second == 300)
        verdict = diagnosis.judge(own)
        assert verdict is None or second == 300
    assert (verdict is not None) == (waits in ("inside", "outside"))
    if verdict is not None:
        assert (verdict.rank, verdict.is_held) == (1, True)
        assert "rank 1 (process 1001 on host1) runs, but its Python interpreter" in verdict.text
        assert "for 300 s" in verdict.text


def test_who_beats_again_stands_still_no_more(diagnosis: Diagnosis, clock: Clock) -> None:
    for _ in range(400):
        clock.now += 1.0
        diagnosis.pulsed(1)
    assert diagnosis.is_held(1)
    hear(diagnosis, 1)
    assert not diagnosis.is_held(1)


def test_a_rank_that_left_while_others_wait_is_named(diagnosis: Diagnosis) -> None:
    diagnosis.heard(2, at(0.0, "", "ab"))
    diagnosis.left(2)
    assert diagnosis.judge(at(4.9, "b", "abb")) is None
    assert diagnosis.judge(at(50.0, "b", "ab")) is None  # it did its part; the link is slow
    verdict = diagnosis.judge(at(5.0, "b", "abb"))
    assert verdict is not None
    assert verdict.rank == 2
    assert "has ended its script while others wait for it in 'b'" in verdict.text


@pytest.mark.parametrize(
    ("ranks", "odd"),
    [
        ([at(5.0, "a"), at(5.0, "b"), at(5.0, "a")], [1]),
        ([at(5.0, "a"), at(5.0, "b"), at(5.0, "b")], [0]),
        ([at(5.0, "a"), at(4.9, "b"), at(5.0, "a")], None),
        ([at(50.0, "a")] * 3, None),
        # Rank 1 has done its part of a and gone on to b: the others' link is slow.
        ([at(50.0, "a"), at(50.0, "b", "ab"), at(50.0, "a")], None),
        ([at(50.0, "ab"), at(50.0, "bc"), at(50.0, "b")], None),  # b is on its way
        ([at(50.0, "ab"), at(50.0, "bc"), at(50.0, "ca")], [1]),
        ([at(50.0, "a"), at(0.0), at(50.0, "a")], None),  # rank 1 still computes
        # One rank is a step behind, in the same operation: not the same number of them.
        ([at(50.0, "a", "aab"), at(50.0, "b", "abb"), at(50.0, "a", "aab")], [1]),
        ([at(50.0, "*a"), at(50.0, "*b"), at(50.0, "*a")], None),  # of some ranks only
        ([at(50.0, "a"), Progress(50.0, (("b", 1),)), at(50.0, "a")], None),
    ],
)
def test_all_waiting_for_what_others_lack_is_a_mismatch(
    ranks: list[Progress], odd: list[int] | None, diagnosis: Diagnosis, clock: Clock
) -> None:
    for rank in (1, 2):
        diagnosis.heard(rank, ranks[rank])
    assert diagnosis.judge(ranks[0]) is None  # it may pass
    clock.now += 2.6
    verdict = diagnosis.judge(ranks[0])
    assert (verdict is None) == (odd is None)
    if verdict is not None:
        assert f"ranks {odd} wait for" in verdict.text
        assert isinstance(verdict.error(), MismatchError)


@pytest.mark.parametrize("rank", [1, 2])
def test_only_rank_0_finds_a_mismatch_as_others_do_not_see_all_ranks(
    rank: int, clock: Clock
) -> None:
    processes = {0: RankProcess(0, 1000, 5, "host0")}
    diagnosis = Diagnosis(
        rank,
        processes,
        limits=LIMITS,
        clock=clock,
    )
    for _ in range(10):
        diagnosis.heard(0, at(50.0, "a"))
        assert diagnosis.judge(at(50.0, "b")) is None
        clock.now += 2.6


def test_a_stall_that_moves_is_none(diagnosis: Diagnosis, clock: Clock) -> None:
    for step in range(1, 20):
        mine, theirs = at(50.0, "a", "a" * step), at(50.0, "b", "b" * step)
        hear(diagnosis, 1, 2, progress=theirs)
        assert diagnosis.judge(mine) is None
        clock.now += 2.0


def outside(call_s: float, *, started: str = "", num_others: int = 3) -> Progress:
    """Return a rank that waits in its ``num_others``-th call of the engine's."""
    site = CallSite("train.py:160 in update", "allreduce 'loss'", call_s, num_others)
    return replace(at(0.0, "", started), site=site)


def inside(num_others: int) -> Progress:
    return replace(at(6.0, "b"), site=CallSite("train.py:88 in train", num_others=num_others))


INSIDE = inside(2)


@pytest.mark.parametrize(
    ("ranks", "away"),
    [
        ([outside(6.0), INSIDE, outside(6.0)], [0, 2]),
        ([INSIDE, outside(6.0), INSIDE], [1]),
        ([INSIDE, outside(4.9), INSIDE], None),  # it has just come there
        ([outside(60.0), outside(60.0), outside(60.0)], None),  # no operation of ours
        ([outside(60.0), at(0.0), INSIDE], None),  # rank 1 computes
        ([outside(60.0), outside(60.0, started="b"), outside(60.0, started="b")], None),
        ([outside(60.0, started="b"), INSIDE, outside(60.0, started="b")], None),  # b may be slow
        # A call that a rank waits for is slow: others, which are inside, have come to it, too.
        ([outside(60.0), inside(3), outside(60.0)], None),
        ([inside(3), inside(3), outside(60.0)], None),
        ([outside(60.0), inside(2), outside(60.0, num_others=2)], None),
        ([inside(3), inside(2), outside(60.0)], [2]),
        ([outside(60.0), inside(-1), outside(60.0)], None),  # nobody counts
        ([outside(60.0, num_others=-1), inside(2), outside(60.0)], None),
    ],
)
def test_ranks_that_wait_outside_while_others_wait_inside_are_told_apart(
    ranks: list[Progress], away: list[int] | None, diagnosis: Diagnosis, clock: Clock
) -> None:
    for _ in range(2):
        for rank in (1, 2):
            diagnosis.heard(rank, Progress.decode(ranks[rank].waited_s, ranks[rank].encode(1000)))
        verdict = diagnosis.judge(ranks[0])
        clock.now += 2.6
    assert (verdict is None) == (away is None)
    if verdict is not None:
        here = [rank for rank in range(3) if rank not in (away or [])]
        assert f"ranks {here} wait for 'b' at train.py:88 in train while ranks {away} wait" in (
            verdict.text
        )
        assert "the engine's allreduce 'loss' at train.py:160 in update" in verdict.text
        assert "loft.Metric" in verdict.text
        assert isinstance(verdict.error(), MismatchError)


def test_a_script_that_still_starts_operations_is_not_astray(
    diagnosis: Diagnosis, clock: Clock
) -> None:
    """Beats are of different moments: a rank may be about to come to what others wait for."""
    for num_others in range(2, 12):
        hear(diagnosis, 1, 2, progress=inside(num_others))
        assert diagnosis.judge(outside(60.0, num_others=num_others + 1)) is None
        clock.now += 2.0


def test_late_ranks_have_not_started_what_is_waited_for(diagnosis: Diagnosis) -> None:
    diagnosis.heard(1, at(0.0, "", "z"))
    diagnosis.heard(2, at(2.0, "b", "ab"))
    assert diagnosis.late_for(0, WAITING) == [1]
    assert diagnosis.late_for(2, WAITING) == [0, 1]
    assert diagnosis.late_for(0, Progress()) == []


def test_a_rank_of_1200_names_is_still_found_astray(diagnosis: Diagnosis, clock: Clock) -> None:
    meters = [ProgressMeter(clock) for _ in range(3)]
    for rank, meter in enumerate(meters):
        for number in range(3600):
            meter.ended(meter.posted(f"gradient.of.layer.{number % 1200}.weight"))
        for number in range(1200):  # all in flight at once
            meter.posted(f"gradient.of.layer.{number}.{'bias' if rank == 1 else 'weight'}")
    asked: list[str] = []
    with meters[0].waiting(), meters[1].waiting(), meters[2].waiting():
        clock.now += 6.0
        for _ in range(6):
            for rank in (1, 2):
                told = meters[rank].progress()
                text = told.encode(12_000, asked=asked)
                assert len(text) <= 12_000
                hear(diagnosis, rank, progress=Progress.decode(told.waited_s, text))
            asked = diagnosis.asked_for(meters[0].progress())
            verdict = diagnosis.judge(meters[0].progress())
            clock.now += 1.0
    assert verdict is not None
    assert "ranks [1] wait for 'gradient.of.layer.0.bias'" in verdict.text


@pytest.mark.parametrize(
    ("later_s", "state", "names_both"),
    [
        (0.0, "X", True),
        (0.2, "Z", True),
        (0.4, "X", False),
        (0.0, "R", False),
        (None, "X", True),  # its link has not ended yet: seen in /proc only
        (None, "S", False),
    ],
)
def test_ranks_that_die_at_one_moment_are_all_named(
    later_s: float | None, state: str, names_both: bool, diagnosis: Diagnosis, clock: Clock
) -> None:
    clock.now += 1.0
    diagnosis.lost(1)
    if later_s is not None:
        clock.now += later_s
        diagnosis.lost(2)
    diagnosis.saw(1, "X")
    diagnosis.saw(2, state)
    verdict = diagnosis.judge(WAITING)
    assert verdict is not None
    named = [rank for rank in (1, 2) if f"rank {rank} (process" in verdict.text]
    assert named == [1, 2] if names_both else len(named) == 1
    if state in "RS":
        assert named == [1]


# What does not arrive: ``test_cuts.py`` has who is behind it.

ADDRESSES = {f"10.0.0.{rank}": rank for rank in range(3)}


def sees(
    rank: int, peer: int, clock: Clock, *, vain_s: float = 0.0, hears: bool = False
) -> ConnectionEnd:
    """Return what a rank sees now at its end of a connection, which it has watched for long."""
    now = clock.now
    return ConnectionEnd(
        f"10.0.0.{rank} {rank + peer}",
        f"10.0.0.{peer} {rank + peer}",
        now - 20.0,
        now,
        now - vain_s if vain_s else float("inf"),
        6 * (vain_s > 0),
        now - 2.0 if vain_s else -float("inf"),
        now - 1.0 if hears else -float("inf"),
    )


def cut_diagnosis(rank: int, clock: Clock) -> Diagnosis:
    """Return what a rank knows of those that it has a link to, and where all ranks are."""
    processes = {each: RankProcess(each, 1000 + each, 5, f"host{each}") for each in range(3)}
    own = processes.pop(rank)
    peers = processes if rank == 0 else {0: processes[0]}
    return Diagnosis(
        rank, peers, world_size=3, limits=LIMITS, own=own, ranks_at=ADDRESSES, clock=clock
    )


def test_a_host_that_does_not_reach_another_is_named_with_it(clock: Clock) -> None:
    diagnosis = cut_diagnosis(0, clock)
    diagnosis.told_ends(1, [sees(1, 2, clock, vain_s=6.0, hears=True)])
    diagnosis.told_ends(2, [sees(2, 1, clock, vain_s=6.0)])
    hear(diagnosis, 1, 2, progress=WAITING)
    verdict = diagnosis.judge(WAITING)
    assert verdict is not None
    assert verdict.text.startswith(
        "host1 does not reach host2: what rank 1 (process 1001 on host1) sends to rank 2 (process "
        "1002 on host2) has not arrived for 10 s"
    )
    assert (verdict.is_cut, verdict.is_unseen, type(verdict.error())) == (True, False, PeerError)


@pytest.mark.parametrize(("waited_s", "names"), [(4.9, False), (5.0, True)])
def test_what_nobody_waits_for_long_is_not_judged(
    waited_s: float, names: bool, clock: Clock
) -> None:
    diagnosis = cut_diagnosis(0, clock)
    diagnosis.told_ends(1, [sees(1, 2, clock, vain_s=9.0, hears=True)])
    hear(diagnosis, 1, 2)
    assert (diagnosis.judge(at(waited_s, "a")) is not None) == names


def test_operations_that_end_show_that_the_way_is_open(clock: Clock) -> None:
    diagnosis = cut_diagnosis(0, clock)
    diagnosis.told_ends(1, [sees(1, 2, clock, vain_s=9.0, hears=True)])
    assert diagnosis.judge(moved(4.9)) is None
    clock.now += 0.2
    assert diagnosis.judge(moved(5.1)) is not None


def test_what_was_told_is_taken_back_and_grows_old(clock: Clock) -> None:
    diagnosis = cut_diagnosis(0, clock)
    told = [sees(1, 2, clock, vain_s=9.0, hears=True)]
    diagnosis.told_ends(1, told)
    assert diagnosis.asks_about() == ["10.0.0.1", "10.0.0.2"]
    diagnosis.told_ends(1, [])
    assert (diagnosis.judge(WAITING), diagnosis.asks_about()) == (None, [])
    diagnosis.told_ends(1, told)
    clock.now += 3.0
    hear(diagnosis, 1, 2)
    assert (diagnosis.judge(WAITING), diagnosis.asks_about()) == (None, [])


def test_nobody_is_asked_about_hosts_without_ranks(clock: Clock) -> None:
    diagnosis = cut_diagnosis(0, clock)
    stranger = replace(sees(1, 2, clock, vain_s=9.0), peer="10.9.9.9 443")
    diagnosis.told_ends(1, [stranger])
    assert diagnosis.asks_about() == ["10.0.0.1"]


def test_a_rank_that_does_not_reach_rank_0_says_so_itself(clock: Clock) -> None:
    diagnosis = cut_diagnosis(1, clock)
    diagnosis.told_ends(
        1, [sees(1, 0, clock, vain_s=6.0, hears=True), sees(1, 2, clock, vain_s=6.0, hears=True)]
    )
    verdict = diagnosis.judge(WAITING)
    assert verdict is not None
    assert verdict.text.startswith("host1 does not reach host0: what rank 1 ")


def test_a_silent_rank_whose_host_others_hear_does_not_reach_rank_0(clock: Clock) -> None:
    diagnosis = cut_diagnosis(0, clock)
    clock.now += 7.0
    hear(diagnosis, 2, progress=WAITING)
    diagnosis.told_ends(0, [sees(0, 1, clock, vain_s=6.0)])
    diagnosis.told_ends(2, [sees(2, 1, clock, hears=True)])
    verdict = diagnosis.judge(WAITING)
    assert verdict is not None
    assert verdict.text.startswith("host1 does not reach host0: what rank 1 ")


@pytest.mark.parametrize("hears", [True, False])
@pytest.mark.parametrize(("lost_s", "names"), [(2.9, True), (3.0, False)])
def test_a_heartbeat_that_was_cut_while_operations_ended_is_no_cut_link(
    lost_s: float, names: bool, hears: bool, clock: Clock
) -> None:
    """As by a firewall: one rank may compute for long then, while the others wait for it."""
    diagnosis = cut_diagnosis(0, clock)
    clock.now += lost_s
    diagnosis.moved(0.0)
    clock.now += 7.0
    hear(diagnosis, 2, progress=WAITING)
    diagnosis.told_ends(0, [sees(0, 1, clock, vain_s=6.0, hears=hears)])
    diagnosis.told_ends(2, [sees(2, 1, clock, hears=True)])
    assert (diagnosis.judge(at(7.0, "a")) is not None) == names


def test_of_many_ways_the_first_are_shown(clock: Clock) -> None:
    diagnosis = cut_diagnosis(0, clock)
    for rank in range(3):
        others = [other for other in range(3) if other != rank]
        ends = [sees(rank, other, clock, vain_s=6.0, hears=True) for other in others]
        diagnosis.told_ends(rank, ends)
    verdict = diagnosis.judge(WAITING)
    assert verdict is not None
    assert verdict.text.startswith("host0 does not reach host1, host0 does not reach host2, ")
    assert ", 2 more ways are cut: what rank 0 " in verdict.text
