"""Which samples the numbers of a data set mean, as far as it says so: ranks compare it.

Ranks share a global batch by the samples' numbers. Where these mean other samples on each rank (a
random split without a seed, a folder that each host lists in an order of its own), some are
trained twice, others never, and those kept for validation are trained.
"""

from __future__ import annotations

import contextlib
import operator
import os
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

__all__ = ["content_of"]

_MOST_SETS = 64  # a choice: data sets around, or beside, one another
_MOST_ITEMS = 4096  # of a list; a choice: some milliseconds
# What torch's Subset has, torchvision's folders, and many a script's own data set.
_LISTS = ("indices", "samples", "files", "paths")


def content_of(dataset: object) -> int:
    """Return 32 bits of the lists by which a data set, and those inside it, find samples; or 0."""
    content = 0
    for own in _sets(dataset):
        for name in _LISTS:
            for text in _items(own.get(name)):
                content = zlib.crc32(text.encode(errors="surrogateescape"), content)
    return content


def _sets(dataset: object) -> Iterator[dict[str, Any]]:
    """Yield the attributes of a data set and of those that it wraps or joins."""
    waiting = [dataset]
    for _ in range(_MOST_SETS):
        if not waiting:
            return
        own = getattr(waiting.pop(), "__dict__", {})  # no properties: they may do anything
        yield own
        inner = own.get("datasets")
        waiting += list(inner)[::-1] if isinstance(inner, list | tuple) else []
        if (wrapped := own.get("dataset")) is not None:
            waiting.append(wrapped)


def _items(items: Any) -> Iterator[str]:
    """Yield what tells the entries of a list, evenly over it; nothing of what may be anything."""
    if hasattr(items, "to_numpy"):  # pandas, whose items are found by label
        items = items.to_numpy()
    if isinstance(items, np.ndarray | torch.Tensor):
        items = items if items.ndim == 1 else ()
    if not isinstance(items, list | tuple | range | np.ndarray | torch.Tensor) or not len(items):
        return
    yield str(len(items))
    for at in range(0, len(items), -(-len(items) // _MOST_ITEMS)):
        item = items[at]
        if isinstance(item, tuple | list) and item:  # (path, class)
            item = item[0]
        if isinstance(item, str | os.PathLike):
            yield os.path.basename(os.fspath(item))  # folders may be others on each host
        else:
            with contextlib.suppress(TypeError):
                yield str(operator.index(item))  # type: ignore[arg-type]  # else a TypeError
