"""What a script writes in the place of torch's own arguments and samplers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch.utils.data import (
    BatchSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

from loft_hvd.errors import ArgumentTypeError

__all__ = ["LOADER", "SAMPLER", "STREAM", "in_place_of", "refuse_others"]

_ORDER = (
    "leave it away: seed= and set_epoch choose the order, placement= the owners, and "
    "weights=weights draws by weight as WeightedRandomSampler does"
)
_SHARE = "leave it away: the balancer gives each rank its share of global_batch_size"
_RANKS = "leave it away: ranks are those of the balancer"
_SUBSET = "give torch.utils.data.Subset(dataset, indices) as the data set"
_LOADERS = "it is for the torch.utils.data.DataLoader that gets this as batch_sampler="
_SOURCES = (
    "it is the source's own: torch.utils.data.DataLoader(source, batch_size=None, num_workers=2) "
    "is a source, too"
)
_CHOSEN = "which samples come, and in which order, is up to the source"

# What torch's loader and samplers take and these classes do not, by name.
_BOTH = {
    "sampler": _ORDER,
    "num_replicas": _RANKS,
    "rank": _RANKS,
    "indices": _SUBSET,
    "data_source": "give it as the data set, the first argument",
    "replacement": "weights= draws with replacement: torch.ones(len(dataset)) draws all alike",
}
LOADER = {
    **_BOTH,
    "batch_size": _SHARE,
    "batch_sampler": "leave it away, or give torch's own loader a loft.BatchSampler",
    "in_order": "leave it away: batches come in order, which is that of all ranks",
    "pin_memory_device": "leave it away: pin_memory=True takes the current accelerator",
}
SAMPLER = {
    **_BOTH,
    "batch_size": _SHARE,
    "generator": "leave it away: seed= gives the order, the same on every rank",
    **dict.fromkeys(
        (
            "num_workers",
            "collate_fn",
            "pin_memory",
            "timeout",
            "worker_init_fn",
            "multiprocessing_context",
            "prefetch_factor",
            "persistent_workers",
            "pin_memory_device",
            "batch_sampler",
            "in_order",
        ),
        _LOADERS,
    ),
}
STREAM = {
    "batch_size": _SHARE,
    "drop_last": "leave it away: what is less than a whole share is left out",
    **dict.fromkeys(
        (
            "num_workers",
            "pin_memory",
            "timeout",
            "worker_init_fn",
            "multiprocessing_context",
            "generator",
            "prefetch_factor",
            "persistent_workers",
            "pin_memory_device",
            "in_order",
        ),
        _SOURCES,
    ),
    **dict.fromkeys(("num_replicas", "rank"), f"{_CHOSEN}, such as urls[rank::size]"),
    **dict.fromkeys(
        ("shuffle", "seed", "weights", "num_samples", "replacement", "indices", "placement"),
        _CHOSEN,
    ),
    **dict.fromkeys(
        ("sampler", "batch_sampler", "dataset", "data_source"),
        f"{_CHOSEN}; a map-style data set goes to loft.DataLoader",
    ),
}


def refuse_others(
    what: str, positional: Sequence[Any], others: Mapping[str, Any], instead: Mapping[str, str]
) -> None:
    """Raise an ArgumentTypeError for arguments that have no place here, with what stands for them.

    Args:
        what: the class.
        positional: values behind the balancer, which take a name.
        others: by their names, which the class does not have.
        instead: what is written instead, by name.
    """
    if positional:
        shown = ", ".join(map(repr, positional))
        raise ArgumentTypeError(
            f"{what}: {shown} came behind the balancer without a name; all arguments from there on "
            "have one, such as drop_last=True, since their order is not that of torch's"
        )
    for name, value in others.items():
        advice = instead.get(name)
        if name == "sampler" and value is not None and advice is not None:
            advice = in_place_of(value)
        if advice is None:
            advice = "there is no argument of this name"
        raise ArgumentTypeError(f"{what}: unexpected argument {name!r}; {advice}")


def in_place_of(sampler: object) -> str:
    """Return what a script writes in the place of a sampler of torch's."""
    if isinstance(sampler, BatchSampler):
        return in_place_of(sampler.sampler)
    if isinstance(sampler, WeightedRandomSampler):
        by_weight = f"give the data set, weights=weights, num_samples={sampler.num_samples}"
        if sampler.replacement:
            return by_weight
        return f"draws by weight without replacement are not served; with it, {by_weight}"
    if isinstance(sampler, SubsetRandomSampler):
        return _SUBSET
    if isinstance(sampler, RandomSampler) and sampler.replacement:
        num_draws = sampler.num_samples
        return f"give the data set, weights=torch.ones(len(dataset)), num_samples={num_draws}"
    is_in_order = isinstance(sampler, DistributedSampler) and not sampler.shuffle
    if is_in_order or isinstance(sampler, SequentialSampler):
        return "give the data set, and shuffle=False; train=False to evaluate"
    if isinstance(sampler, DistributedSampler | RandomSampler):
        return "give the data set, which is shuffled; set_epoch(epoch) is called here, too"
    return f"give the data set, and torch.utils.data.Subset for some of its samples; {_ORDER}"
