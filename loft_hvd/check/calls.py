"""Where ranks part: the first call that they do not make alike, and the line to mend. Pure.

Ranks are compared two by two and call by call. What follows once two have parted says nothing, so
there is one finding at most.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations

from loft_hvd.check.notes import JOIN, STANDSTILL_S, STEP, Call, Finding, Notes
from loft_hvd.check.source import branches_around, is_inside, loop_around

__all__ = ["find_parting", "find_unfinished"]


def find_parting(ranks: Sequence[Notes]) -> Finding | None:
    """Return what keeps ranks from meeting in their calls, if anything does."""
    is_still = _stand_still(ranks)
    pairs = list(combinations(ranks, 2))
    found = [_parting(*pair, is_still=is_still) for pair in pairs]
    if is_still:
        found += [*(_unmatched(*pair) for pair in pairs), _standstill(ranks)]
    return next((each for each in found if each is not None), None)


def find_unfinished(ranks: Sequence[Notes]) -> str:
    """Say which rank was in a call that another had not come to at the end; "" if none."""
    for one, other in combinations(ranks, 2):
        both = {one.rank, other.rank}
        for more, less in ((one, other), (other, one)):
            calls = _shared(more, both)
            if len(calls) > len(_shared(less, both)) and not calls[-1].is_done:
                return (
                    f"rank {more.rank} was in {calls[-1].what} ({calls[-1].place}), and rank "
                    f"{less.rank} had not come to it"
                )
    return ""


def _stand_still(ranks: Sequence[Notes]) -> bool:
    """Say whether nobody works any more: all wait for each other, but for those that are done."""
    waits = [notes.wait for notes in ranks if notes.ended != "done"]
    return bool(waits) and all(each and each.seconds >= STANDSTILL_S for each in waits)


def _shared(notes: Notes, ranks: set[int]) -> list[Call]:
    """Return the calls that these ranks must make in one order."""
    return [
        call
        for call in notes.calls
        if call.is_ordered and (call.members is None or ranks <= set(call.members))
    ]


def _until_joins(notes: Notes, ranks: set[int]) -> Iterator[tuple[Notes, bool]]:
    """Yield the calls up to each ``hvd.join``, and those after the last; whether it ends them."""
    part: list[Call] = []
    for call in _shared(notes, ranks):
        if call.what == JOIN:
            yield replace(notes, calls=part), True
            part = []
        else:
            part.append(call)
    yield replace(notes, calls=part), False


def _parting(one: Notes, other: Notes, *, is_still: bool) -> Finding | None:
    """Compare two ranks, call by call."""
    both = {one.rank, other.rank}
    # A call that has not returned may be any other one's partner: by its line, where that matters.
    is_strict = is_still or "error" in (one.ended, other.ended)
    for (first, first_joins), (second, second_joins) in zip(
        _until_joins(one, both), _until_joins(other, both), strict=False
    ):
        num = min(len(first.calls), len(second.calls))
        pairs = zip(first.calls, second.calls, strict=False)
        at = next(
            (n for n, pair in enumerate(pairs) if not _is_same(*pair, is_strict=is_strict)), num
        )
        if at < num:
            return _explain(first, second, _first_extra(first, second, at))
        if len(first.calls) == len(second.calls):
            continue
        # One has called more. Unless the other can not, it may be on its way there.
        is_less = len(first.calls) < len(second.calls)
        less, joins = (first, first_joins) if is_less else (second, second_joins)
        if joins:  # the others go on without it
            continue
        if less.ended == "crashed":  # what one calls alone has ended both, or another fault
            extra = (second if is_less else first).calls[num]
            if extra.what == STEP or extra.is_done:
                return None
        elif less.ended != "done" and not is_still:
            return None
        return _explain(first, second, _first_extra(first, second, num))
    return None


def _is_same(one: Call, other: Call, *, is_strict: bool) -> bool:
    """Say whether two ranks meet in a call; they may call it from two lines."""
    if one.what != other.what:
        return False
    return one.place == other.place or (one.is_done and other.is_done) or not is_strict


def _first_extra(one: Notes, other: Notes, at: int) -> int:
    """Return where ranks have parted: it may be before the call at which it shows.

    An extra all-reduce meets the next one of another rank, and so on:

        rank 0:  extra  loss  step
        rank 1:  loss   step
    """
    for number in range(at):
        mine, theirs = one.calls[number], other.calls[number]
        if mine.place != theirs.place and (
            _follows(one, number, theirs) or _follows(other, number, mine)
        ):
            return number
    return at


def _follows(notes: Notes, number: int, call: Call) -> bool:
    return number + 1 < len(notes.calls) and _key(notes.calls[number + 1]) == _key(call)


def _key(call: Call) -> tuple[str, str]:
    return call.what, call.place


def _explain(one: Notes, other: Notes, at: int) -> Finding:
    """Say at which call ranks part: one that only some make, or one in a loop that some end sooner.

    One of the two may have left the script before.
    """
    sides = [
        (notes, against) for notes, against in ((one, other), (other, one)) if at < len(notes.calls)
    ]
    alone = [side for side in sides if _is_in_branch(*side, at)]
    if len(alone) == 1:
        return _unequal(*alone[0], at, is_sure=True)
    for notes, against in sides:
        call = notes.calls[at]
        window = _window(notes, at)
        if _is_looped(notes, against, at) and (
            call.what != STEP or _is_left_behind(notes, against, at)
        ):
            return _loop(call, notes, against, window)
    # The call that the other rank never makes; of a step all ranks have some.
    sides.sort(key=lambda side: side[0].calls[at].what == STEP)
    is_sure = len(sides) == 1 or sides[1][0].calls[at].what == STEP
    return _unequal(*sides[0], at, is_sure=is_sure)


def _window(notes: Notes, at: int) -> int:
    """Return the first call of the loop that one may be in.

    Of the same line since the last step: a loop over parts of a batch. In all: over steps.
    """
    if notes.calls[at].what == STEP:
        return 0
    steps = (n + 1 for n in range(at - 1, -1, -1) if notes.calls[n].what == STEP)
    return next(steps, 0)


def _is_looped(notes: Notes, other: Notes, at: int) -> bool:
    """Say whether both ranks have made a rank's call before, in the same loop."""
    key, window = _key(notes.calls[at]), _window(notes, at)
    return all(key in map(_key, each.calls[window:at]) for each in (notes, other))


def _is_in_branch(notes: Notes, other: Notes, at: int) -> bool:
    """Say whether a rank's call stands in a branch of its own, of which the other's is outside."""
    call = notes.calls[at]
    if call.what == STEP or _is_looped(notes, other, at):
        return False
    theirs = branches_around(other.calls[at].stack) if at < len(other.calls) else frozenset()
    return bool(branches_around(call.stack) - theirs)


def _is_left_behind(notes: Notes, other: Notes, at: int) -> bool:
    """Say whether a rank takes one more step in a loop that another has left."""
    step = notes.calls[at]
    before = next(call for call in reversed(notes.calls[:at]) if _key(call) == _key(step))
    if step.round != before.round:  # it has begun the loop anew, so it has left it too
        return False
    if at >= len(other.calls):
        return True
    for place in step.stack:
        loop = loop_around(place)
        if loop is not None:
            return not any(is_inside(loop, each, place) for each in other.calls[at].stack)
    return False


def _unequal(notes: Notes, against: Notes, at: int, *, is_sure: bool) -> Finding:
    call, rank = notes.calls[at], _rank_of(notes)
    branch = f"a branch that some ranks do not enter, such as `if {rank} == 0`"
    mend = f"let every rank call it: take it out of {branch}"
    if not is_sure:
        mend = (
            "let all ranks make the same calls in the same order: one of the two lines may be in "
            f"{branch}, or behind an early return"
        )
    return Finding(
        call.place,
        f"unequal collectives: rank {notes.rank} calls {call.what} here, while rank "
        f"{against.rank} is at {_instead(against, at)}",
        mend,
    )


def _rank_of(notes: Notes) -> str:
    return "dist.get_rank()" if notes.is_torchrun else "hvd.rank()"


def _instead(notes: Notes, at: int) -> str:
    """Say where a rank is that does not make a call."""
    if at < len(notes.calls):
        return f"{notes.calls[at].what} at {notes.calls[at].place}"
    if notes.ended == "crashed":
        return "its next step"
    if notes.ended != "done" and notes.wait is not None:
        return f"{notes.wait.place}, where it waits for other ranks"
    return "the script's end"


def _loop(call: Call, longer: Notes, shorter: Notes, window: int) -> Finding:
    counts = [
        sum(_key(each) == _key(call) for each in notes.calls[window:])
        for notes in (longer, shorter)
    ]
    sizes = [next(iter(_sizes(notes)), None) for notes in (longer, shorter)]
    whose = "" if None in sizes else f" (local batches of {sizes[0]} and {sizes[1]})"
    if call.what == STEP:
        return Finding(
            call.place,
            f"a loop whose length follows the local batch: rank {longer.rank} takes more steps "
            f"here than rank {shorter.rank}{whose}",
            "iterate over the loader itself: loft.DataLoader gives every rank equally many steps, "
            "and len(loader) is their number",
        )
    return Finding(
        call.place,
        f"a loop whose length follows the local batch: rank {longer.rank} calls {call.what} here "
        f"at least {counts[0]} times in a step, rank {shorter.rank} {counts[1]} times{whose}",
        "take the collective out of the loop: add up in it, then loft.average(mean, count) once "
        "behind it, or loft.Metric",
    )


def _sizes(notes: Notes) -> Iterator[int]:
    for balancer in notes.balancers:
        if notes.rank < len(balancer.sizes):
            yield balancer.sizes[notes.rank]


def _unmatched(one: Notes, other: Notes) -> Finding | None:
    """Find a call by name that only one of two ranks has made."""
    both = {one.rank, other.rank}
    for notes, against in ((one, other), (other, one)):
        theirs = Counter((call.what, call.name) for call in against.calls)
        for call in notes.calls:
            if call.is_ordered or not (call.members is None or both <= set(call.members)):
                continue
            theirs[call.what, call.name] -= 1
            if theirs[call.what, call.name] < 0:
                return Finding(
                    call.place,
                    f"unequal collectives: rank {notes.rank} calls {call.what} by the name "
                    f"{call.name!r}, and rank {against.rank} does not",
                    "let every rank call it, by the same name",
                )
    return None


def _standstill(ranks: Sequence[Notes]) -> Finding | None:
    """Say where all ranks wait, where no watched call tells why."""
    places = {notes.rank: notes.wait.place for notes in ranks if notes.wait is not None}
    if len(places) < len(ranks):  # the others are done
        first = next(iter(places))
        what = f"a standstill: rank {first} waits here for ranks that have left the script"
        return Finding(places[first], what, "let every rank come to it, or none")
    first, *others = places
    where = ", ".join(f"rank {rank} at {places[rank]}" for rank in others)
    return Finding(
        places[first],
        f"a standstill: rank {first} waits here for other ranks, {where}, and none goes on",
        "let all ranks come to the same calls in the same order: look for a branch, such as "
        f"`if {_rank_of(ranks[0])} == 0`, or a loop that some end sooner; or for an exchange that "
        f"takes longer than {STANDSTILL_S:g} s",
    )
