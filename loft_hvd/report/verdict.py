"""What a run log comes to, in sentences, the weightiest first.

Who ended the run, whose gradients are off, which rank costs what share of a step and by what, and
what the plans have won: what somebody who opens a report wants to know before any picture.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

from loft_hvd.balance.explain import (
    CAUSES,
    WORK,
    SlowRank,
    find_slow,
    say_crowd,
    say_turns,
    versus,
    waited_share,
    why_none,
)
from loft_hvd.balance.interval import RankTimes
from loft_hvd.pipeline.suspicion.report import WorkerReport, tell_limits
from loft_hvd.pipeline.suspicion.spread import WARN_ABOVE
from loft_hvd.report.entries import (
    Fault,
    Line,
    LinksLine,
    NotFiniteLine,
    PassCounts,
    Plans,
    Rules,
    Run,
    SameDataLine,
    ScheduleLine,
    SpreadLine,
    SuspicionLine,
    Times,
    newest_of,
    of_kind,
)

__all__ = ["in_steps_of_log", "judge", "newest_world", "step_s", "when_measured", "worlds"]

_MOST_NAMED = 3  # sentences on slow ranks, or on links; the pictures show the others
_MOST_TOGETHER = 8  # ranks in one of them
_COST = 0.005  # of a step: less would be told as 0 %
_QUEUED = 0.10  # of a step, as the least that makes a rank slow
_STARVED = 0.30  # of a step that most ranks wait for data: then no sizes help
_LOOKED_BACK = 8  # intervals, to see whether the slow rank moves,
_FEWEST_NAMED = 4  # and in how many there must have been one
_WON = 0.01  # of a step: less is within the noise of most runs


def judge(read: Sequence[Line]) -> list[str]:
    """Return what the lines of a run log come to: at least one sentence."""
    world = newest_world(read)
    sentences = [*_ended(world), *_off(world), *_times(world), *_links(world)]
    return sentences or [f"Nothing has gone wrong so far; times are {when_measured(world)}."]


def worlds(read: Sequence[Line]) -> list[Sequence[Line]]:
    """Return the lines of each world: an elastic job begins each with a ``run`` line."""
    starts = [place for place, line in enumerate(read) if isinstance(line, Run)]
    return [read[begin:end] for begin, end in pairwise([0, *starts, len(read)])]


def newest_world(read: Sequence[Line]) -> Sequence[Line]:
    """Return the lines of the newest world."""
    return worlds(read)[-1]


def when_measured(world: Sequence[Line]) -> str:
    """Say when times come, where there are none yet."""
    run = newest_of(Run, world)
    said = (line.times_at for line in reversed(world) if isinstance(line, Run | ScheduleLine))
    times_at = next((each for each in said if each is not None), None)
    if times_at is not None:
        return f"not measured yet, first at step {times_at}"
    if run is not None and run.policy is None:
        return "not measured: that takes a Balancer, or attach"
    return "not measured yet"


def step_s(times: Sequence[RankTimes]) -> float:
    """Return what a step took, wait and aggregation included; 0 where nobody has counted one.

    Of usual steps, where ranks know them: a pause of the machine is no pace.
    """
    usual = [each.typical_wall_s for each in times if each.samples > 0]
    return max(usual, default=0.0) or max((each.wall_s for each in times), default=0.0)


def _ended(world: Sequence[Line]) -> Iterator[str]:
    fault: Fault | None = None
    last_step = 0
    for line in world:
        if isinstance(line, Fault):
            fault, last_step = line, line.step
        last_step = max(last_step, line.step) if fault is not None else 0
    if fault is None:
        return
    first = fault.text.partition("\n")[0].rstrip(".")
    if last_step > fault.step:  # a script may catch an error, and a thread beside it meet one
        yield f"{fault.error} at step {fault.step}: {first}. The run went on to step {last_step}."
    else:
        yield f"The run ended at step {fault.step} with {fault.error}: {first}."


def in_steps_of_log(line: SuspicionLine) -> list[WorkerReport]:
    """Return the workers with quarantines that end at a step of the log.

    Who watches counts the steps that it has seen: after a resume those are fewer.
    """
    num_before = max(line.step + 1 - line.num_steps, 0)
    return [
        worker
        if worker.in_quarantine_until is None
        else replace(worker, in_quarantine_until=num_before + worker.in_quarantine_until)
        for worker in line.workers
    ]


def _off(world: Sequence[Line]) -> Iterator[str]:
    for lost in of_kind(NotFiniteLine, world)[:1]:  # the later ones may follow from it
        yield f"S{str(lost.found)[1:]}."
    for line in of_kind(SameDataLine, world)[-1:]:
        for group in line.groups:
            asked = str(group)
            yield f"{asked[0].upper()}{asked[1:]}."
    for spread in of_kind(SpreadLine, world)[-1:]:
        if spread.usual > WARN_ABOVE:
            limits = tell_limits((), spread.step)
            yield f"{limits[0].upper()}{limits[1:]}."
    newest = newest_of(SuspicionLine, world)
    if newest is None:
        return
    named = [each for each in in_steps_of_log(newest) if each.is_named]
    for worker in sorted(named, key=lambda each: -each.suspicion):
        until = worker.in_quarantine_until
        held = "" if until is None else f", in quarantine until step {until}"
        who = " ".join(map(str, worker.ranks))
        sends = "sends" if len(worker.ranks) == 1 else "send"
        yield (
            f"Rank{'s' if len(worker.ranks) > 1 else ''} {who} {sends} gradients that are off: "
            f"suspicion {worker.suspicion:.2f} of 1{held}."
        )


def _times(world: Sequence[Line]) -> Iterator[str]:
    entries = of_kind(Times, world)
    if not entries:
        return
    newest, crowd, turns = entries[-1].ranks, entries[-1].crowd, entries[-1].turns
    if crowd is not None:
        yield f"{say_crowd(crowd)}."
    if turns is not None:
        said = say_turns(turns)
        yield f"{said[0].upper()}{said[1:]}."
    slow = find_slow(newest)
    yield from _moved(entries)
    than = versus(sum(each.samples > 0 for each in newest))
    yield from _slow(slow, than)
    if slow and entries[-1].which:
        yield (
            f"The log holds {len(newest)} of {entries[-1].num_ranks} ranks, from the fastest to "
            "the slowest: ranks between the slow ones are as slow."
        )
    if crowd is None and not any(entry.cause == "queue" for entry in slow):
        yield from _queued(newest)
    why = why_none(newest)
    won = list(_won(world, entries, is_even=not (slow or why)))
    yield from won
    if not (slow or turns or crowd) and (why or not won):
        waits = f"No rank is slow: ranks wait for the longest {waited_share(newest):.1%} of a step"
        yield f"{waits}; {why}." if why else f"{waits}."
    yield from _starved(newest)


def _slow(slow: Sequence[SlowRank], than: str) -> Iterator[str]:
    before, num_told = 0.0, 0
    held: list[SlowRank] = []  # ranks that cost something only together with the next
    for entry in slow:
        held.append(entry)
        added = entry.share - before
        if num_told < _MOST_NAMED and added >= _COST:
            yield _cost(held, added, than, is_another=num_told > 0)
            before, num_told, held = entry.share, num_told + 1, []
    if held and num_told:
        yield f"{len(held)} more rank{'s are' if len(held) > 1 else ' is'} slow."
    elif held:
        yield (
            f"Rank {held[0].rank} is slow: its own work takes {held[0].ratio:.2f}x {than}. "
            "Another takes longer, but its times vary too much to say whether it is slow."
        )


def _cost(ranks: Sequence[SlowRank], share: float, than: str, *, is_another: bool) -> str:
    """Say what share of a step some ranks cost together."""
    by = " and ".join(dict.fromkeys(CAUSES[each.cause] for each in ranks))
    costs = f"{'another ' if is_another else ''}{share:.0%} of a step by {by}"
    takes = f"takes {min(each.ratio for each in ranks):.2f}x {than}"
    if len(ranks) == 1:
        work = WORK.get(ranks[0].cause, "own work")
        return f"Rank {ranks[0].rank} costs {costs}: its {work} {takes}."
    names = [str(each.rank) for each in sorted(ranks, key=lambda each: each.rank)]
    more = f" and {len(names) - _MOST_TOGETHER} more" if len(names) > _MOST_TOGETHER else ""
    return (
        f"Ranks {' '.join(names[:_MOST_TOGETHER])}{more} cost {costs} together: the own work of "
        f"each {takes} or more."
    )


def _moved(entries: Sequence[Times]) -> Iterator[str]:
    """Say that the slow rank was another one in most intervals."""
    newest = entries[-_LOOKED_BACK:]
    named = [slow[0].rank for entry in newest if (slow := find_slow(entry.ranks))]
    if len(named) < _FEWEST_NAMED or 2 * max(map(named.count, named)) > len(named):
        return
    yield (
        f"The slow rank moves: in the last {len(newest)} intervals it was "
        f"{', '.join(map(str, named))}, so look for what moves with it, such as data, rather than "
        "at one machine."
    )


def _queued(times: Sequence[RankTimes]) -> Iterator[str]:
    whole_s = max((each.wall_s for each in times), default=0.0)
    queued = [each for each in times if whole_s > 0 and each.queued_s > _QUEUED * whole_s]
    if queued:
        worst = max(queued, key=lambda each: each.queued_s)
        others = f", and {len(queued) - 1} more ranks queue too" if len(queued) > 1 else ""
        yield (
            f"Rank {worst.rank} queues for a CPU {worst.queued_s / whole_s:.0%} of a step: its "
            f"machine has more busy threads than CPUs{others}."
        )


def _won(world: Sequence[Line], entries: Sequence[Times], *, is_even: bool) -> Iterator[str]:
    """Say what the plans have won over the first sizes, and from whom they took."""
    passes = PassCounts(world)
    plans = [passes.in_steps(plan) for plan in of_kind(Plans, world)]
    changed = [plan for plan in plans[1:] if plan.sizes != plans[0].sizes]
    first = [entry for entry in entries if not changed or entry.step <= changed[0].first_step]
    after = [entry for entry in entries if changed and entry.step > plans[-1].first_step]
    # Where the first sizes are in force again, their difference is chance.
    if not first or not after or plans[-1].sizes == plans[0].sizes:
        return
    before_s = statistics.median(step_s(entry.ranks) for entry in first)
    now_s = step_s(after[-1].ranks)
    if not (before_s > 0 and now_s > 0):
        return
    share = 1.0 - now_s / before_s
    took = f"{1e3 * before_s:.3g} ms, now {1e3 * now_s:.3g} ms"
    if share > _WON:
        cause = ""
        for entry in find_slow(first[-1].ranks)[:1]:
            cause = f"; rank {entry.rank} cost {entry.share:.0%} by {CAUSES[entry.cause]}"
        yield (
            f"Plan {plans[-1].plan_id} made steps {share:.0%} shorter than the first sizes did "
            f"({took}){cause}{', and no rank is slow now' if is_even else ''}."
        )
    elif share < -_WON:
        yield f"Steps are {-share:.0%} longer than with the first sizes ({took})."


def _starved(times: Sequence[RankTimes]) -> Iterator[str]:
    measured = [each for each in times if each.samples > 0]
    whole_s = step_s(times)
    # The lower one of two: what more than half of the ranks wait at least, of two ranks both.
    stall_s = statistics.median_low(each.stall_s for each in measured) if measured else 0.0
    if whole_s > 0 and stall_s > _STARVED * whole_s:
        yield (
            f"More than half of the ranks wait for their data {stall_s / whole_s:.0%} of a step or "
            "more: more loader processes, a faster source or a SampleStore would help all."
        )


def _links(world: Sequence[Line]) -> Iterator[str]:
    """Say which links have no deadline, or lose much, in the newest interval."""
    newest = newest_of(LinksLine, world)
    if newest is None:
        return
    # Those that wait first: they cost most.
    links = sorted(newest.links, key=lambda each: (not each.waits, -each.lost_share))
    told = [each for link in links for each in link.news(newest.rank)]
    for news in told[:_MOST_NAMED]:
        yield f"{news[0].upper()}{news[1:]}."
    if len(told) > _MOST_NAMED:
        yield f"The table of links has {len(told) - _MOST_NAMED} more."


def rules_of(world: Sequence[Line]) -> str:
    """Return the rules of a run's optimizers, in words; empty where none is known."""
    return ", ".join(dict.fromkeys(each for line in of_kind(Rules, world) for each in line.rules))
