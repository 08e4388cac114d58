"""Horovod's process sets: found where they exist, else made, and made again in a new world."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from loft_hvd.errors import ArgumentError, UsageError

__all__ = ["is_member", "own_process_set", "restore_process_set"]

_SHOWN_SETS = 8


def is_member(process_set: Any | None) -> bool:
    """Say whether this rank belongs to a process set; to None, all ranks do."""
    return process_set is None or bool(process_set.included())


def own_process_set(hvd: Any, ops: Any, parts: Sequence[Sequence[int]]) -> Any:
    """Return the process set of the part that this rank is in; every rank calls it alike.

    Sets that were given to ``hvd.init`` are used as they are; the others are added, all of them on
    every rank and in one order.

    Args:
        hvd: ``horovod.torch``.
        ops: ``horovod.torch.mpi_ops``.
        parts: Horovod's ranks of each part, ascending.

    Raises:
        UsageError: a set does not exist, and Horovod may not add any, or not among these ranks.
    """
    known = {
        tuple(ranks): key for key, ranks in ops._basics._get_process_set_ids_and_ranks().items()
    }
    own = None
    for part in parts:
        process_set = hvd.ProcessSet(list(part))
        if tuple(part) in known:
            process_set.process_set_id = known[tuple(part)]
        else:
            if sum(map(len, parts)) < hvd.size():  # Horovod would wait for the rest for ever
                raise UsageError(
                    f"over= with process_set=: Horovod has no process set of ranks {list(part)}, "
                    "and adds one only together with ranks outside of process_set=, which take no "
                    "part here; before this, let every rank make all sets, of each group, of the "
                    "i-th ranks of all groups and that of process_set=, by hvd.add_process_set, or "
                    f"at the start: {_init_with(parts)}; in an elastic job give them to "
                    "loft.elastic.State(process_sets=[...])"
                )
            _add(hvd, process_set, parts)
        if hvd.rank() in part:
            own = process_set
    assert own is not None, parts
    return own


def _add(hvd: Any, process_set: Any, parts: Sequence[Sequence[int]]) -> None:
    try:
        hvd.add_process_set(process_set)
    except ValueError as error:
        raise UsageError(
            f"over=: Horovod has no process set of ranks {process_set.ranks} and may not add one "
            f'now ({error}); initialise it with hvd.init(process_sets="dynamic"), or start with '
            f"HOROVOD_DYNAMIC_PROCESS_SETS=1, or list all sets, of each group and "
            f"of the i-th ranks of all groups: {_init_with(parts)}"
        ) from error


def _init_with(parts: Sequence[Sequence[int]]) -> str:
    sets = ", ".join(f"hvd.ProcessSet({list(part)})" for part in parts[:_SHOWN_SETS])
    sets += ", ..." if len(parts) > _SHOWN_SETS else ""
    return f"hvd.init(process_sets=[{sets}])"


def restore_process_set(hvd: Any, process_set: Any) -> None:
    """Make a process set again in a new world; every rank calls it, members or not.

    Args:
        hvd: ``horovod.torch``.
        process_set: a ``hvd.ProcessSet`` of the old world.

    Raises:
        ArgumentError: the new world lacks one of its ranks.
    """
    if process_set.ranks and max(process_set.ranks) >= hvd.size():
        raise ArgumentError(
            f"the process set of ranks {process_set.ranks} does not fit the new world of "
            f"{hvd.size()} ranks; start with a --min-np that keeps its ranks"
        )
    process_set.process_set_id = None  # of the old world
    if process_set.ranks == list(range(hvd.size())):
        process_set.process_set_id = hvd.global_process_set.process_set_id
    else:
        hvd.add_process_set(process_set)
