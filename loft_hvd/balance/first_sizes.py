"""Sizes that an adaptive run starts from, where somebody knows better than equal ones.

They come as a list, or as a file that ``loft-hvd plan`` has written, which has them by host: ranks
may be numbered in any order, and hosts may call themselves by a longer or a shorter name.

Where none are given, and devices have unequal free memory, sizes start in proportion to that. A
batch of ``x`` takes ``a + b x`` bytes more, so wherever equal sizes fit these do as well: with the
least memory ``m``, ``a + b X / n <= m``, a rank of ``k m`` gets at most ``k X / n``, and
``a + k b X / n`` is at most ``k m``. And they fit where equal ones do not: with ``a = 0``, once the
model and all else is on the device, wherever any sizes do.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from loft_hvd.balance.plan import Sizes, proportional_sizes
from loft_hvd.codec import Within, decode, parse_json
from loft_hvd.errors import ArgumentError, PlanError

__all__ = ["FirstSizes", "fit_first_sizes", "sizes_by_memory"]

FirstSizes = Sequence[int] | str | os.PathLike[str] | None
_Size = Annotated[int, Within(0, 1e12)]
_ALIKE = 0.9  # of the most memory: devices of one kind may differ by some that is set aside


@dataclass(frozen=True)
class _SizesByHost:
    """What such a file holds."""

    global_batch_size: _Size
    hosts: dict[str, list[_Size]]  # of each host's ranks, in the order of their numbers


def fit_first_sizes(given: FirstSizes, hosts: Sequence[str], global_batch_size: int) -> Sizes:
    """Return the sizes of ranks on ``hosts`` [world_size]; empty where none are given.

    Raises:
        PlanError: the file cannot be read, or is of other hosts or another global batch.
    """
    if given is None:
        return ()
    if not isinstance(given, str | os.PathLike):
        sizes = tuple(given)
        what = f"first_sizes={list(sizes)}"
    else:
        path = os.fspath(given)
        sizes = _by_host(_read(path), hosts, path)
        what = f"first_sizes={list(sizes)} of {path}"
    if len(sizes) != len(hosts) or sum(sizes) != global_batch_size:
        raise PlanError(
            f"{what} are {len(sizes)} sizes for {sum(sizes)} samples, but there are {len(hosts)} "
            f"ranks and global_batch_size={global_batch_size}"
        )
    return sizes


def sizes_by_memory(memory: Sequence[int], global_batch_size: int, *, min_batch: int) -> Sizes:
    """Return sizes in proportion to devices' free bytes, [world_size]; empty where these are alike.

    0 bytes are not known.
    """
    if min(memory) == 0 or min(memory) >= _ALIKE * max(memory):
        return ()
    return proportional_sizes(memory, global_batch_size, min_batch=min_batch)


def _read(path: str) -> _SizesByHost:
    try:
        content = parse_json(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise PlanError(f"first_sizes: {path!r} cannot be read ({error})") from error
    try:
        return decode(
            _SizesByHost,
            content,
            what="sizes",
            call=f"first_sizes {path}",
            advice="give what `loft-hvd plan --sizes` wrote",
        )
    except ArgumentError as error:
        raise PlanError(str(error)) from error


def _by_host(known: _SizesByHost, hosts: Sequence[str], path: str) -> Sizes:
    """Return the size of each rank: the next one of its host."""
    left = {name: list(sizes) for name, sizes in known.hosts.items()}
    found = []
    for rank, host in enumerate(hosts):
        name = next((each for each in left if _is_same(each, host)), None)
        if name is None or not left[name]:
            has = "has no more" if name is not None else "has none"
            raise PlanError(
                f"first_sizes: rank {rank} is on host {host!r}, of which {path} {has} sizes; it "
                f"has those of {sorted(known.hosts)}"
            )
        found.append(left[name].pop(0))
    return tuple(found)


def _is_same(one: str, other: str) -> bool:
    """Say whether two names are one host's: equal, or one is the other without its domain."""
    return one == other or one == other.split(".")[0] or one.split(".")[0] == other
