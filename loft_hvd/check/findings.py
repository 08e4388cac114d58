"""From what ranks noted to what the script forgot, each with its line and its mend. Pure."""

from __future__ import annotations

import ast
import linecache
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from loft_hvd.check.notes import STEP, BalancerNote, Call, LoaderNote, Notes

__all__ = ["Finding", "find"]


@dataclass(frozen=True)
class Finding:
    """One thing that a conversion forgot."""

    place: str  # file:line
    what: str
    mend: str


def find(ranks: Sequence[Notes]) -> list[Finding]:
    """Return what is wrong in the order of its weight, each line once.

    Args:
        ranks: the notes of every rank, in their order.
    """
    found = [*_parameters(ranks), *_calls(ranks), *_loaders(ranks), *_means(ranks)]
    unique = list({(each.place, each.mend): each for each in reversed(found)}.values())[::-1]
    return unique or list(_errors(ranks))


def _parameters(ranks: Sequence[Notes]) -> Iterator[Finding]:
    """Compare what ranks' optimizers began with."""
    for each in zip(*(notes.optimizers for notes in ranks), strict=False):
        first = each[0]
        odd = [rank for rank, note in enumerate(each) if note.digest != first.digest]
        if odd:
            yield Finding(
                first.made,
                f"different first parameters: those of {_names(odd)} are not rank 0's when the "
                "first step is taken",
                "hvd.broadcast_parameters(model.state_dict(), root_rank=0), after the model is "
                "made or loaded and before the first step",
            )
        for rank, note in enumerate(each):
            wrong = sorted(
                name for name in first.options if note.options.get(name) != first.options[name]
            )
            if wrong:
                name = wrong[0]
                yield Finding(
                    first.made,
                    f"different options: {name} is {first.options[name]} on rank 0 and "
                    f"{note.options.get(name, 'not there')} on rank {rank}",
                    "hvd.broadcast_optimizer_state(optimizer, root_rank=0), after it is made or "
                    "loaded; and let no rank compute an option from its own batch",
                )
                break


def _names(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _calls(ranks: Sequence[Notes]) -> Iterator[Finding]:
    """Find the first call that not all ranks make alike; what follows from it says nothing."""
    first, *others = (
        replace(notes, calls=[call for call in notes.calls if call.is_ordered]) for notes in ranks
    )
    for notes in others:
        finding = _parting(first, notes)
        if finding is not None:
            yield finding
            return


def _parting(one: Notes, other: Notes) -> Finding | None:
    """Compare two ranks, call by call."""
    both = min(len(one.calls), len(other.calls))
    at = next(
        (number for number in range(both) if _key(one.calls[number]) != _key(other.calls[number])),
        None,
    )
    if at is None:
        # One has called more. Unless the other has left the script, it may be on its way there.
        more, less = (one, other) if len(one.calls) > both else (other, one)
        if len(more.calls) == both or less.ended != "done":
            return None
        at = both
    return _explain(one, other, at)


def _key(call: Call) -> tuple[str, str]:
    return call.what, call.place


def _explain(one: Notes, other: Notes, at: int) -> Finding:
    """Say at which call ranks part: one that only some make, or one in a loop that some end sooner.

    One of the two may have left the script before.
    """
    sides = [
        (notes, against) for notes, against in ((one, other), (other, one)) if at < len(notes.calls)
    ]
    for notes, against in sides:
        call = notes.calls[at]
        # Of the same line since the last step: a loop over parts of a batch. In all: over steps.
        window = 0 if call.what == STEP else _since_step(notes, at)
        in_both = all(_key(call) in map(_key, each.calls[window:at]) for each in (notes, against))
        if in_both and (call.what != STEP or _is_left_behind(notes, against, at)):
            return _loop(call, notes, against, window)
    # The call that the other rank never makes; of a step all ranks have some.
    sides.sort(key=lambda side: side[0].calls[at].what == STEP)
    notes, against = sides[0]
    return _unequal(notes.calls[at], notes, against, at)


def _is_left_behind(notes: Notes, other: Notes, at: int) -> bool:
    """Say whether a rank takes one more step in a loop that another has left."""
    step = notes.calls[at]
    before = next(call for call in reversed(notes.calls[:at]) if _key(call) == _key(step))
    if step.round != before.round:  # it has begun the loop anew, so it has left it too
        return False
    if at >= len(other.calls):
        return True
    for place in step.stack:
        file, _, line = place.rpartition(":")
        loop = _loop_around(file, int(line))
        if loop is not None:
            return not any(_is_in(loop, file, each) for each in other.calls[at].stack)
    return False


def _is_in(lines: range, file: str, place: str) -> bool:
    name, _, line = place.rpartition(":")
    return name == file and int(line) in lines


def _loop_around(file: str, line: int) -> range | None:
    """Return the lines of the innermost loop around a line, if any; of no file there are none."""
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except SyntaxError:
        return None
    loops = [
        range(node.lineno, (node.end_lineno or node.lineno) + 1)
        for node in ast.walk(tree)
        if isinstance(node, ast.For | ast.While | ast.AsyncFor)
    ]
    return min((each for each in loops if line in each), key=len, default=None)


def _unequal(call: Call, notes: Notes, against: Notes, at: int) -> Finding:
    instead = "the script's end"
    if at < len(against.calls):
        instead = f"{against.calls[at].what} at {against.calls[at].place}"
    return Finding(
        call.place,
        f"unequal collectives: rank {notes.rank} calls {call.what} here, while rank "
        f"{against.rank} is at {instead}",
        "let every rank call it: take it out of the branch that some ranks do not enter, such as "
        "`if hvd.rank() == 0`",
    )


def _since_step(notes: Notes, at: int) -> int:
    """Return the number of the first call after the last step before a call."""
    return next(
        (number + 1 for number in range(at - 1, -1, -1) if notes.calls[number].what == STEP), 0
    )


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


def _loaders(ranks: Sequence[Notes]) -> Iterator[Finding]:
    notes = ranks[0]
    for loader in notes.loaders:
        trained = [each for each in loader.rounds if each.is_trained]
        if not trained:
            continue
        epochs = [each.epoch for each in trained]
        repeats = len(epochs) > len(set(epochs))
        if loader.shuffles and (repeats or not notes.says_set_epoch):
            again = f"{len(epochs)} epochs had the same order" if repeats else "nothing calls it"
            yield Finding(
                loader.made,
                f"missing set_epoch: {again}",
                "loader.set_epoch(epoch), or that of the sampler, at the start of each epoch",
            )
        for balancer in notes.balancers:
            if loader.kind == "torch" and _stands_beside(loader, balancer, notes):
                yield Finding(
                    loader.made,
                    f"a loader beside the balancer of {balancer.made}: it gives batches of "
                    f"{loader.batch_size}, whatever the plan says",
                    "loft.DataLoader(dataset, balancer, ...), or "
                    "batch_sampler=loft.BatchSampler(dataset, balancer), or each step inside "
                    "`with balancer.step(num_samples)`",
                )


def _stands_beside(loader: LoaderNote, balancer: BalancerNote, notes: Notes) -> bool:
    """Say whether a torch loader gives other batches than a balancer plans."""
    if balancer.policy in ("report", "uniform") or balancer.has_steps:
        return False
    if balancer.is_adaptive or notes.rank >= len(balancer.sizes):
        return True
    return loader.batch_size != balancer.sizes[notes.rank]


def _means(ranks: Sequence[Notes]) -> Iterator[Finding]:
    """Find averages over ranks, where ranks have unequal batches."""
    for notes in ranks:
        unequal = [each for each in notes.balancers if each.policy not in ("report", "uniform")]
        if not any(each.is_adaptive or len(set(each.sizes)) > 1 for each in unequal):
            continue
        for call in notes.calls:
            if call.is_mean_of_one:
                yield Finding(
                    call.place,
                    f"a metric averaged by rank: {call.what} weighs every rank the same, however "
                    "many samples it has",
                    "loft.average(value, count), with the samples behind the value, or loft.Metric",
                )


def _errors(ranks: Sequence[Notes]) -> Iterator[Finding]:
    for notes in ranks:
        if notes.error is not None and notes.error.is_ours:
            yield Finding(
                notes.error.place,
                f"{notes.error.kind} on rank {notes.rank}",
                notes.error.text.partition("\n")[0],
            )
            return
