"""From what ranks noted to what the script forgot, each with its line and its mend. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from loft_hvd.check.calls import find_parting
from loft_hvd.check.notes import BalancerNote, Finding, LoaderNote, Notes
from loft_hvd.check.source import is_looped

__all__ = ["find"]


def find(ranks: Sequence[Notes]) -> list[Finding]:
    """Return what is wrong in the order of its weight, each line once.

    Args:
        ranks: the notes of every rank, in their order.
    """
    parting = find_parting(ranks)
    found = [*_parameters(ranks), *([] if parting is None else [parting])]
    found += [*_unreduced(ranks), *_loaders(ranks), *_means(ranks), *_means_of_labels(ranks)]
    unique = list({(each.place, each.mend): each for each in reversed(found)}.values())[::-1]
    return unique or list(_errors(ranks))


def _parameters(ranks: Sequence[Notes]) -> Iterator[Finding]:
    """Compare what ranks' optimizers began with, among the ranks that each reduces over."""
    most = max((len(notes.optimizers) for notes in ranks), default=0)
    for number in range(most):
        made = [
            (notes, notes.optimizers[number]) for notes in ranks if number < len(notes.optimizers)
        ]
        root, first = made[0]
        each = [
            (notes, note)
            for notes, note in made
            if note.members == first.members
            and (note.members is None or {root.rank, notes.rank} <= set(note.members))
        ]
        odd = [notes.rank for notes, note in each if note.digest != first.digest]
        if odd and not any(notes.ignores_copies for notes in ranks):
            yield Finding(
                first.made,
                f"different first parameters: those of {_names(odd)} are not rank {root.rank}'s "
                "when the first step is taken",
                "load and change the model before DistributedDataParallel(model), which takes "
                "rank 0's, or alike on every rank"
                if root.is_torchrun
                else f"hvd.broadcast_parameters(model.state_dict(), root_rank={root.rank}), after "
                "the model is made or loaded and before the first step",
            )
        for notes, note in each:
            wrong = sorted(
                name for name in first.options if note.options.get(name) != first.options[name]
            )
            if wrong:
                name = wrong[0]
                yield Finding(
                    first.made,
                    f"different options: {name} is {first.options[name]} on rank {root.rank} and "
                    f"{note.options.get(name, 'not there')} on rank {notes.rank}",
                    "let no rank compute an option from its own batch, and load the optimizer's "
                    "state on every rank"
                    if root.is_torchrun
                    else f"hvd.broadcast_optimizer_state(optimizer, root_rank={root.rank}), after "
                    "it is made or loaded; and let no rank compute an option from its own batch",
                )
                break


def _names(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _unreduced(ranks: Sequence[Notes]) -> Iterator[Finding]:
    """Find backward passes whose gradients no rank ever sends."""
    for notes in ranks:
        by_hand = sum(
            "allreduce" in call.what.replace("_", "") and call.num_values != 1
            for call in notes.calls
        )
        if notes.num_backward and not notes.has_reducer and by_hand < max(notes.num_plain_steps, 1):
            yield Finding(
                notes.first_backward,
                f"no distributed {'model' if notes.is_torchrun else 'optimizer'}: backward passes "
                "are made here, and every rank keeps its gradients to itself",
                "train DistributedDataParallel(model), or what fully_shard(model) returned"
                if notes.is_torchrun
                else "give the optimizer to loft.DistributedOptimizer, and step that one",
            )
            return


def _loaders(ranks: Sequence[Notes]) -> Iterator[Finding]:
    notes = ranks[0]
    for loader in notes.loaders:
        trained = [each for each in loader.rounds if each.is_trained]
        if not trained:
            continue
        again = _missing_set_epoch(loader, notes)
        if loader.shuffles and again:
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


def _missing_set_epoch(loader: LoaderNote, notes: Notes) -> str:
    """Say how it is seen that a shuffling loader's epochs have one order; "" where they do not."""
    trained = [each for each in loader.rounds if each.is_trained]
    epochs = [each.epoch for each in trained if each.epoch is not None]
    if len(epochs) > len(set(epochs)):
        return f"{len(epochs)} epochs had the same order"
    if notes.says_set_epoch:
        return ""
    # Of one epoch nothing is known yet, unless a loop around it begins the next one.
    if len(trained) > 1 or (notes.ended != "done" and is_looped(trained[0].begun)):
        return "nothing calls it"
    return ""


def _stands_beside(loader: LoaderNote, balancer: BalancerNote, notes: Notes) -> bool:
    """Say whether a torch loader gives other batches than a balancer plans."""
    if balancer.policy in ("report", "uniform") or balancer.has_steps:
        return False
    if balancer.is_adaptive or notes.rank >= len(balancer.sizes):
        return True
    return loader.batch_size != balancer.sizes[notes.rank]


def _means(ranks: Sequence[Notes]) -> Iterator[Finding]:
    """Find means over ranks that are not over samples, where ranks have unequal batches."""
    for notes in ranks:
        unequal = [each for each in notes.balancers if each.policy not in ("report", "uniform")]
        if not any(each.is_adaptive or len(set(each.sizes)) > 1 for each in unequal):
            continue
        if notes.met_backward:
            yield Finding(
                notes.met_backward,
                "a collective in the backward pass of a loss that is not weighed: "
                "gradients that cross ranks there count the samples of small batches for more",
                "balancer.weigh(loss).backward()",
            )
        for call in notes.calls:
            if call.is_mean_of_one:
                yield Finding(
                    call.place,
                    f"this may be a metric averaged by rank: {call.what} weighs every rank the "
                    "same, however many samples it has; right for sums and counts that are "
                    "divided by each other, and for what does not depend on the batch",
                    "loft.average(value, count), with the samples behind the value, or loft.Metric",
                )


def _means_of_labels(ranks: Sequence[Notes]) -> Iterator[Finding]:
    """Find losses that are means over labels, of which batches have unequally many a sample."""
    if any(notes.says_counts for notes in ranks):
        return
    places = {loss.place: None for notes in ranks for loss in notes.losses}
    for place in places:
        seen = [
            each
            for notes in ranks
            for loss in notes.losses
            if loss.place == place
            for each in (loss.thinnest, loss.fullest)
        ]
        thin, full = min(seen, key=_per_sample), max(seen, key=_per_sample)
        if thin[0] * full[1] != full[0] * thin[1]:
            yield Finding(
                place,
                f"a mean of means: the loss is the mean over {thin[0]} labels of {thin[1]} samples "
                f"in one batch and over {full[0]} of {full[1]} in another, and gradients are "
                "weighed by samples: labels count for more where a rank has few",
                "balancer.count(number of labels that count), in front of loss.backward()",
            )


def _per_sample(seen: tuple[int, int]) -> float:
    return seen[0] / seen[1]


def _errors(ranks: Sequence[Notes]) -> Iterator[Finding]:
    for notes in ranks:
        if notes.error is not None and notes.error.is_ours:
            yield Finding(
                notes.error.place,
                f"{notes.error.kind} on rank {notes.rank}",
                notes.error.text.partition("\n")[0],
            )
            return
