"""Plain words for what ranks measured and what models say: who is slow, why, what is not known."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from loft_hvd.balance.fit import Fit
from loft_hvd.balance.interval import RankTimes
from loft_hvd.balance.turns import Crowd, Turns

__all__ = [
    "CAUSES",
    "WORK",
    "SlowRank",
    "describe",
    "describe_fit",
    "find_slow",
    "fit_record",
    "ranks_to_log",
    "say_crowd",
    "say_turns",
    "versus",
    "waited_share",
    "why_none",
]

# A rank is slow when its own work takes a tenth more than the median of the others', when the
# difference is 3 % of a step (less is not worth words),
# and when it is three of its standard errors: chance makes one in 700.
_SLOW_RATIO, _SLOW_SHARE, _SLOW_ERRORS = 1.10, 0.03, 3.0
# Where ranks queue for cores, which of them meets a warm cache or an idle twin of its core stays so
# for many steps: equal ranks then differ by a tenth of what they queue, and no error tells it.
_SLOW_QUEUED = 0.25
# What is beside a rank's own work (its queue for a core, and the script between steps) makes it
# slow when it is a tenth of a step above that of each other rank, twice as long, and the others
# wait for most of that: where waits are not known, they are in it.
_BESIDE_SHARE, _BESIDE_WAITED = 0.10, 0.5
WORK = {"queue": "work with the queue", "other": "time in a step"}  # what takes so much more
CAUSES = {
    "fetch": "fetching",
    "forward": "its forward passes",
    "backward": "its backward passes",
    "compute": "computing",  # where it is not known in which pass
    "queue": "queueing for a core",
    "other": "what it does between its passes",
}


@dataclass(frozen=True)
class SlowRank:
    """A rank that the others wait for."""

    rank: int
    ratio: float  # its own work a step over the median of the other ranks'
    cause: str  # of ``CAUSES``, whichever is furthest above the median of the others'
    share: float  # of a step that would be saved without it and all slower ones


def _differs(one: RankTimes, others: Sequence[RankTimes], *, step_s: float) -> float:
    """Return by how many seconds a rank's own work differs from the others'; 0 where by chance."""
    usual_s = statistics.median(each.busy_s for each in others)
    error_s = math.hypot(one.busy_error_s, statistics.median(each.busy_error_s for each in others))
    difference = one.busy_s - usual_s
    ratio_s = (_SLOW_RATIO - 1.0) * min(usual_s, one.busy_s)
    queued_s = _queued(one, others)
    least = max(ratio_s, _SLOW_SHARE * step_s, _SLOW_ERRORS * error_s, _SLOW_QUEUED * queued_s)
    return difference if abs(difference) > least else 0.0


def _queued(one: RankTimes, others: Sequence[RankTimes]) -> float:
    """Return the seconds of a step that a rank queues for cores, as far as others do so, too."""
    return min(one.queued_s, statistics.median_low(each.queued_s for each in (one, *others)))


def find_slow(times: Sequence[RankTimes]) -> tuple[SlowRank, ...]:
    """Return the ranks whose own work takes well over that of the others, slowest first.

    Each is compared with the median of the other ranks: of two with the other one. Or the rank that
    is slow by what is beside its own work, where that costs more.
    """
    measured = [time for time in times if time.samples > 0]
    if len(measured) < 2:
        return ()
    step_s = max(time.wall_s for time in measured)
    longest_s = max(time.busy_s for time in measured)
    slow: list[SlowRank] = []
    names: set[int] = set()
    for time in sorted(measured, key=lambda each: (-each.busy_s, each.rank)):
        others = [each for each in measured if each is not time]
        usual_s = statistics.median(each.busy_s for each in others)
        if not (usual_s > 0 and _differs(time, others, step_s=step_s) > 0):
            continue
        # Of several slow ranks the next one hides what the first costs: each goes on from what
        # those before it would save.
        names.add(time.rank)
        rest_s = max((each.busy_s for each in measured if each.rank not in names), default=0.0)
        share = (longest_s - rest_s) / step_s if step_s > 0 else 0.0
        slow.append(SlowRank(time.rank, time.busy_s / usual_s, _cause(time, others), share))
    beside = _find_beside(measured, step_s=step_s)
    # Whoever costs more hides what the others' own work would save.
    by_work = max((each.share for each in slow), default=0.0)
    return beside if any(each.share > by_work for each in beside) else tuple(slow)


def _parts(time: RankTimes) -> dict[str, float]:
    """Return what a rank's own work consists of, by ``CAUSES``."""
    if time.forward_s > 0:
        backward_s = time.compute_s - time.forward_s
        return {"fetch": time.stall_s, "forward": time.forward_s, "backward": backward_s}
    return {"compute": time.compute_s, "fetch": time.stall_s}


def _cause(time: RankTimes, others: Sequence[RankTimes]) -> str:
    """Return what is furthest above the median of the others'."""
    usual = [_parts(each) for each in others]
    above = {
        part: seconds - statistics.median(each.get(part, 0.0) for each in usual)
        for part, seconds in _parts(time).items()
    }
    return max(above, key=lambda part: above[part])


def _find_beside(measured: Sequence[RankTimes], *, step_s: float) -> tuple[SlowRank, ...]:
    """Return the rank that is slow by what is not its own work, if one is."""
    found = []
    for time in measured:
        others = [each for each in measured if each is not time]
        for cause, part in (("queue", "queued"), ("other", "other")):
            own_s, error_s = _usual(time, part)
            known = [_usual(each, part) for each in others]
            longest_s = max(seconds for seconds, _ in known)
            error_s = math.hypot(error_s, statistics.median(error for _, error in known))
            more_s = own_s - longest_s
            waited_s = statistics.median(each.wait_s for each in others) - time.wait_s
            least_s = max(_BESIDE_SHARE * step_s, _SLOW_ERRORS * error_s, longest_s)
            if more_s > least_s and waited_s > _BESIDE_WAITED * more_s:
                usual_s = statistics.median(each.busy_s for each in others) + longest_s
                ratio = (time.busy_s + own_s) / usual_s if usual_s > 0 else math.inf
                found.append(SlowRank(time.rank, ratio, cause, more_s / step_s))
    return tuple(sorted(found, key=lambda entry: -entry.share)[:1])


def _usual(time: RankTimes, part: str) -> tuple[float, float]:
    """Return what a part of a rank's steps usually takes, and the error of that."""
    spread_s2 = getattr(time, f"{part}_spread_s2")
    return getattr(time, f"typical_{part}_s"), math.sqrt(spread_s2 / max(time.steps, 1))


def why_none(times: Sequence[RankTimes]) -> str:
    """Say why ranks wait though none is slow; "" where they hardly wait."""
    measured = [time for time in times if time.samples > 0]
    step_s = max((time.wall_s for time in measured), default=0.0)
    if len(measured) < 2 or waited_share(times) < _SLOW_SHARE:
        return ""
    fast = [
        str(time.rank)
        for time in measured
        if _differs(time, [each for each in measured if each is not time], step_s=step_s) < 0
    ]
    if fast:
        if len(fast) > 1:
            return f"ranks {' '.join(fast)} are faster than the others, and wait for them"
        return f"rank {fast[0]} is faster than the others, and waits for them"
    longest = max(measured, key=lambda each: each.busy_s)
    others = [each for each in measured if each is not longest]
    usual_s = statistics.median(each.busy_s for each in others)
    if longest.busy_s - usual_s <= (_SLOW_RATIO - 1.0) * usual_s:
        return "none takes a tenth more than the others"
    if longest.busy_s - usual_s <= _SLOW_QUEUED * _queued(longest, others):
        return "they differ by less than a quarter of what they queue for cores"
    return "their times vary too much, or are too few, to say which rank is the slow one"


def waited_share(times: Sequence[RankTimes], slow: Sequence[SlowRank] = ()) -> float:
    """Return the share of a step that ranks wait for the longest one, on average.

    Args:
        times: of the ranks.
        slow: what ``find_slow`` says of them: a step waits for what is beside a rank's work, too.
    """
    step_s = max((each.wall_s for each in times if each.samples > 0), default=0.0)
    beside_s = {each.rank: each.share * step_s for each in slow if each.cause in WORK}
    busy = [each.busy_s + beside_s.get(each.rank, 0.0) for each in times if each.samples > 0]
    if not (busy and step_s > 0):
        return 0.0
    return max(max(busy) - statistics.fmean(busy), 0.0) / step_s  # not -0.0, by rounding


def versus(num_ranks: int) -> str:
    """Name what a rank's own work is compared with."""
    return "the other rank's" if num_ranks == 2 else "the median of the others'"


def describe(
    times: Sequence[RankTimes], crowd: Crowd | None = None, turns: Turns | None = None
) -> str:
    """Say what waiting costs and who causes it, then what each rank spent its steps on.

    ``stall`` is the part of ``fetch`` that the script waited for; a rank's own work is its stall
    and its computing. ``overlap`` is how much of the shorter of fetch and computing was hidden.
    """
    lines = [] if crowd is None else [say_crowd(crowd)]
    lines += _describe_waits(times, crowd, turns)
    columns = ["fetch", "stall", "compute", "queued", "wait", "other"]
    if any(time.forward_s > 0 for time in times):
        columns[2:3] = ["forward", "backward"]
    titles = "".join(f"{column + ' ms':>12s}" for column in columns)
    lines.append(f"rank  samples{titles}   samples/s  overlap")
    for time in times:
        known = asdict(time) | {"backward_s": time.compute_s - time.forward_s}
        cells = "".join(f"{1e3 * known[f'{column}_s']:12.2f}" for column in columns)
        ends = f"{time.samples_per_s:12.0f}{time.overlap:9.0%}"
        lines.append(f"{time.rank:4d}  {time.samples:7.1f}{cells}{ends}")
    lines += [
        f"rank {time.rank}: {time.paused_s * time.steps:.2f} s of pauses are left out"
        for time in times
        if time.paused_s > 0
    ]
    return "\n".join(lines)


def say_crowd(crowd: Crowd) -> str:
    """Say what it costs that ranks share cores."""
    return (
        f"{crowd.num_ranks} ranks share {crowd.cpus} core{'s' * (crowd.cpus > 1)}: each waits "
        f"{1e3 * crowd.queued_s:.3g} ms a step for a core, {crowd.share:.0%} of it"
    )


def say_turns(turns: Turns) -> str:
    """Say what it costs that ranks are slow by turns."""
    cause = CAUSES.get(turns.cause, turns.cause)  # a log comes from anywhere
    return (
        f"ranks {' '.join(map(str, turns.ranks))} are slow by turns: in {turns.steps} of the last "
        f"{turns.num_steps} steps one of them alone takes long by {cause}, which "
        f"costs {turns.share:.0%} of a step"
    )


def _describe_waits(
    times: Sequence[RankTimes], crowd: Crowd | None, turns: Turns | None
) -> list[str]:
    """Say what waiting for others costs, and which ranks cause it by how much."""
    measured = [time for time in times if time.samples > 0]
    step_s = max((time.wall_s for time in measured), default=0.0)
    slow, lines = find_slow(times), []
    if turns is not None:  # on average nobody waits for anybody
        lines.append(say_turns(turns))
    elif step_s > 0 and len(measured) > 1:
        share = waited_share(times, slow)
        lines.append(
            f"ranks wait for the longest one {1e3 * share * step_s:.1f} ms of a step of "
            f"{1e3 * step_s:.1f} ms on average, {share:.0%}"
        )
    by_rank = {time.rank: time for time in times}
    for number, entry in enumerate(slow):
        work = WORK.get(entry.cause, "own work")
        why = f"its {work} takes {entry.ratio:.2f}x {versus(len(measured))}"
        if entry.cause == "fetch" and by_rank[entry.rank].remote > 0:
            why += f"; {by_rank[entry.rank].remote:.1f} samples a batch come from elsewhere"
        line = f"rank {entry.rank} is slow: {entry.cause} ({why})"
        if step_s > 0:
            so_far = "without it" if number == 0 else "without it and those above"
            line += f"; {so_far} a step would be {entry.share:.1%} shorter"
        lines.append(line)
    if not (slow or turns or crowd):
        why = why_none(times)
        lines.append(f"no rank is slow: {why}" if why else "no rank is slow")
    lines += [
        f"rank {time.rank}: a few long steps add {1e3 * time.accident_s:.1f} ms to its average; "
        "sizes do not follow them"
        for time in measured
        if turns is None and time.accident_s > _SLOW_SHARE * max(step_s, 1e-9)
    ]
    return lines


_TERMS = {  # of a model, as explain and the run log name them
    "fetch_fixed_s": "fetch: fixed",
    "local_s": "fetch: a local sample",
    "remote_s": "fetch: a remote sample",
    "shared_s": "fetch: the shared source",
    "compute_fixed_s": "compute: fixed",
    "compute_s": "compute: a sample",
}


def describe_fit(fit: Fit, *, acts: bool = True) -> list[str]:
    """Return a line a rank: what its time is made of, what hides what, and what is not known.

    ``acts`` says whether sizes follow from the fit.
    """
    held = "; it is kept at its equal share" if acts else ""
    model, lines = fit.model, []
    for rank in range(model.world_size):
        if fit.is_poor[rank]:
            lines.append(f"rank {rank}: no usable times{held}")
            continue
        overlap = float(model.overlap[rank])
        hides = {0.0: "one after the other", 1.0: "fully overlapped"}.get(
            overlap, f"{overlap:.0%} overlapped"
        )
        # A remote sample also waits for its share of a source that several ranks read.
        per_local, per_remote = model.local_s[rank], model.remote_s[rank] + model.shared_s[rank]
        knee = f", no less below {fit.knee[rank]:.0f} in a pass" if fit.knee[rank] > 0 else ""
        line = (
            f"rank {rank}: fetch {1e3 * model.fetch_fixed_s[rank]:.2f} ms + "
            f"{1e3 * per_local:.3f} ms a local and {1e3 * per_remote:.3f} ms a remote sample; "
            f"compute {1e3 * max(model.compute_fixed_s[rank], 0.0):.2f} ms + "
            f"{1e3 * model.compute_s[rank]:.3f} ms a sample{knee}; {hides}"
        )
        if np.isfinite(model.hits[rank]):
            line += f"; {model.hits[rank]:.0f} samples of a global batch are local"
        if fit.unclear[rank]:
            terms = ", ".join(_TERMS[name] for name in fit.unclear[rank])
            line += f"; cannot be told apart yet: {terms}"
        lines.append(line)
    return lines


# What the run log holds of it.


def ranks_to_log(times: Sequence[RankTimes], *, most: int) -> tuple[int, ...]:
    """Return the ranks that stand for all, at most ``most`` >= 2: every rank of a small world.

    Of a large one they are evenly spaced by their own work, from the fastest to the slowest: what
    is usual, and how far the slowest is from it, is as of all. Ranks without samples come last.
    """
    if len(times) <= most:
        return tuple(range(len(times)))
    order = sorted(times, key=lambda time: (time.samples == 0, time.busy_s, time.rank))
    num_busy = sum(time.samples > 0 for time in times) or len(times)
    # Of 7 ranks 3: the places 0, 3 and 6.
    places = {round(at * (num_busy - 1) / (most - 1)) for at in range(most)}
    return tuple(sorted(order[place].rank for place in places))


def summarise_fit(fit: Fit) -> str:
    """Say in a sentence how much the models of all ranks can be trusted."""
    poor = np.flatnonzero(fit.is_poor)
    vague = sum(bool(terms) for terms in fit.unclear)
    num_ranks = fit.model.world_size
    known = f"the times of {num_ranks - len(poor)} of {num_ranks} ranks fit their models"
    if vague:
        known += f"; how they depend on the batch is not yet clear for {vague}, until sizes vary"
    return known + " (explain(verbose=True) lists the models)"


def fit_record(fit: Fit, ranks: Sequence[int], *, sizes: Sequence[int]) -> list[dict[str, Any]]:
    """Return what a fit says of some ranks, JSON-able: terms in seconds, an entry a rank.

    ``predicted_s`` is its own work on a batch of ``sizes`` [world_size], and ``error_s`` the
    standard error of that; both are NaN where no model fits. ``errors`` are those of the terms.
    """
    model = fit.model
    predicted = np.where(fit.is_poor, np.nan, model.times(sizes))
    errors = np.where(fit.is_poor, np.nan, fit.stderr(sizes))
    return [
        {
            "rank": rank,
            "predicted_s": float(predicted[rank]),
            "error_s": float(errors[rank]),
            **{term: float(getattr(model, term)[rank]) for term in _TERMS},
            "errors": fit.term_errors(rank),
            "knee": float(fit.knee[rank]),
            "overlap": float(model.overlap[rank]),
            "hits": float(model.hits[rank]),
            "is_poor": bool(fit.is_poor[rank]),
            "unclear": list(fit.unclear[rank]),
        }
        for rank in ranks
    ]
