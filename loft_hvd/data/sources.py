"""Homes of a sample, and the sources from which a rank reads it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from loft_hvd.errors import DataError

__all__ = ["HomeSet", "Source", "Where"]

Where = int | str | Iterable[int | str]


@dataclass(frozen=True, order=True)
class Source:
    """Where a rank reads a sample: its own store, another rank, or something all ranks share.

    Attributes:
        kind: "local", "peer" or "shared".
        name: the rank that serves a peer read ("rank 3"), the shared source ("nfs"), or "".
    """

    kind: Literal["local", "peer", "shared"]
    name: str = ""


@dataclass(frozen=True, order=True)
class HomeSet:
    """The homes of a sample: ranks, nodes and shared sources; no rank means every read is remote.

    Attributes:
        ranks: ranks that hold the sample.
        nodes: nodes that hold it, so all of their ranks do.
        shared: sources that serve it to any rank, local to none.
        is_everywhere: every rank holds it, however many there are.
    """

    ranks: tuple[int, ...] = ()
    nodes: tuple[str, ...] = ()
    shared: tuple[str, ...] = ()
    is_everywhere: bool = False

    @classmethod
    def parse(cls, where: Where) -> HomeSet:
        """Read what a user writes: 3, "node:a", "shared:nfs", "everywhere", or several of them."""
        items = (
            list(where) if isinstance(where, Iterable) and not isinstance(where, str) else [where]
        )
        ranks, names = set[int](), set[str]()
        for item in items:
            if isinstance(item, str):
                names.add(item)
            elif isinstance(item, int | np.integer) and item >= 0:
                ranks.add(int(item))
            else:
                raise DataError(
                    f"home {item!r} of {where!r} is no rank: ranks are whole numbers >= 0"
                )
        nodes = {name[5:] for name in names if name.startswith("node:")}
        shared = {name[7:] for name in names if name.startswith("shared:")}
        everywhere = "everywhere" in names
        if not items or len(nodes) + len(shared) + everywhere != len(names):
            raise DataError(
                f"homes {where!r} of a sample must be at least one of: a rank number, "
                '"node:NAME", "shared:NAME", "everywhere"'
            )
        ordered = (tuple(sorted(ranks)), tuple(sorted(nodes)), tuple(sorted(shared)))
        return cls(*ordered, is_everywhere=everywhere)

    def to_list(self) -> list[int | str]:
        """Return the homes as ``parse`` reads them."""
        names = [f"node:{name}" for name in self.nodes] + [f"shared:{name}" for name in self.shared]
        return [*self.ranks, *names, *(["everywhere"] if self.is_everywhere else [])]
