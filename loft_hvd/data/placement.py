"""Placement: which ranks, nodes or shared sources hold which samples of a data set."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

import numpy as np
import numpy.typing as npt

from loft_hvd.data.assign import HolderSets, Homes
from loft_hvd.errors import ArgumentTypeError, DataError

__all__ = ["HomeSet", "Placement", "Where", "check_placement"]

_MOST_SAMPLES = 2**28  # of a file, which may be damaged: 4 bytes each, so 1 GB

Where = int | str | Iterable[int | str]


@dataclass(frozen=True, order=True)
class HomeSet:
    """The homes of a sample; without ranks and nodes every read is remote."""

    ranks: tuple[int, ...] = ()  # ranks that hold the sample
    nodes: tuple[str, ...] = ()  # nodes that hold it, so all of their ranks do
    shared: tuple[str, ...] = ()  # sources that serve it to any rank, local to none
    is_everywhere: bool = False  # every rank holds it, however many there are

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


@dataclass(frozen=True, eq=False)
class Placement:
    """Which ranks, nodes or shared sources hold which samples.

    Locality changes who computes a sample, never which samples form a step.

    Attributes:
        groups: index into ``home_sets`` of each sample, [num_samples], int32.
        home_sets: the distinct sets of homes.
        nodes: the node of each rank, [world_size], or None when no home is a node.
        strata: number of the stratum (label) of each sample, [num_samples], int32, or None.
        strata_cap: how many times its fair share of a stratum one rank may take in a step.
    """

    groups: npt.NDArray[np.int32]
    home_sets: tuple[HomeSet, ...]
    nodes: tuple[str, ...] | None = None
    strata: npt.NDArray[np.int32] | None = None
    strata_cap: Fraction = Fraction(1)

    def __len__(self) -> int:
        return len(self.groups)

    @classmethod
    def replicated(cls, num_samples: int) -> Placement:
        """Every rank holds every sample: nothing is remote, and owners are slices of the batch."""
        return cls(_groups(np.zeros(num_samples)), (HomeSet(is_everywhere=True),))

    @classmethod
    def sharded(
        cls, num_samples: int, world_size: int, *, nodes: Sequence[int | str] | None = None
    ) -> Placement:
        """Cut the samples, in order, into equal shards: one a rank, or one a node.

        Args:
            num_samples: samples of the data set.
            world_size: number of ranks.
            nodes: node of each rank, [world_size]; the shards then belong to the nodes, in the
                order in which they first occur, and are local to all of a node's ranks.
        """
        if world_size < 1 or (nodes is not None and len(nodes) != world_size):
            raise DataError(
                f"sharded: world_size={world_size} must be >= 1, and nodes={nodes!r} one a rank"
            )
        names = None if nodes is None else tuple(str(node) for node in nodes)
        homes = (
            tuple(HomeSet(ranks=(rank,)) for rank in range(world_size))
            if names is None
            else tuple(HomeSet(nodes=(name,)) for name in dict.fromkeys(names))
        )
        # 10 samples, 3 shards: 0 0 0 0 1 1 1 2 2 2; sizes differ by one at most.
        shard = np.arange(num_samples) * len(homes) // max(num_samples, 1)
        return cls(_groups(shard), homes, names)

    @classmethod
    def from_function(
        cls,
        locate: Callable[[int], Where],
        num_samples: int,
        *,
        nodes: Sequence[int | str] | None = None,
    ) -> Placement:
        """Ask ``locate(index)`` for the homes of each sample.

        Args:
            locate: gives a rank number, "node:NAME", "shared:NAME" (a source that is no rank's own,
                a host without a rank too), "everywhere", or several.
            num_samples: samples of the data set.
            nodes: node of each rank, [world_size]; needed when a home is a node.
        """
        number: dict[HomeSet, int] = {}
        groups = np.empty(num_samples, np.int32)
        for index in range(num_samples):
            groups[index] = number.setdefault(HomeSet.parse(locate(index)), len(number))
        names = None if nodes is None else tuple(str(node) for node in nodes)
        return cls(groups, tuple(number), names)

    @classmethod
    def from_json(cls, path: str | os.PathLike[str]) -> Placement:
        """Read ``{"nodes": [...] or null, "runs": [{"count": n, "homes": [...]}, ...]}``.

        Runs follow the order of the samples; homes are written as for ``from_function``.

        Raises:
            DataError: the file does not have that form, or has more than 268 million samples.
        """
        try:
            with open(path, encoding="utf-8") as file:
                content = json.load(file)
            nodes, runs = content["nodes"], content["runs"]
            homes = [HomeSet.parse(run["homes"]) for run in runs]
            counts = [_count(run["count"]) for run in runs]
            if not isinstance(nodes, list | None):
                raise TypeError(f"nodes={nodes!r}")
            if sum(counts) > _MOST_SAMPLES:
                raise ValueError(f"{sum(counts)} samples are more than {_MOST_SAMPLES}")
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise DataError(
                f'placement {os.fspath(path)}: {error!r}; it must be {{"nodes": [...] or null, '
                '"runs": [{"count": n, "homes": [...]}, ...]}'
            ) from error
        names = None if nodes is None else tuple(str(node) for node in nodes)
        home_sets = tuple(dict.fromkeys(homes))
        groups = np.repeat(_groups([home_sets.index(home) for home in homes]), counts)
        return cls(groups, home_sets, names)

    def with_strata(self, labels: npt.ArrayLike, *, cap: float = 1.5) -> Placement:
        """Cap a rank's share of every stratum, for robust rules on data sorted by label.

        In a step, a rank that computes ``x`` of the ``X`` samples gets at most
        ``ceil(cap * x / X * c)`` of the ``c`` samples of a stratum. 1 makes every local batch
        look like the global one; a large cap leaves locality alone.

        Args:
            labels: stratum of each sample, such as its class, [num_samples], of any type that
                NumPy can sort.
            cap: how many times its fair share a rank may take, >= 1.
        """
        given = np.asarray(labels)
        if given.shape != (len(self),) or not 1 <= cap < float("inf"):
            raise DataError(
                f"with_strata: labels of shape {given.shape} for {len(self)} samples, cap={cap}; "
                "give one label a sample and a finite cap >= 1"
            )
        strata = _groups(np.unique(given, return_inverse=True)[1])
        return replace(self, strata=strata, strata_cap=Fraction(cap).limit_denominator(1000))

    def subset(self, indices: Sequence[int]) -> Placement:
        """Return the placement of ``torch.utils.data.Subset(dataset, indices)``."""
        chosen = np.asarray(indices, dtype=np.int64)
        strata = None if self.strata is None else self.strata[chosen]
        return replace(self, groups=self.groups[chosen], strata=strata)

    def shared_sources(self, world_size: int) -> tuple[int, ...]:
        """Return the number of the source that each rank shares with others, -1 for none.

        A rank shares a source when at least half of the samples that it does not hold come from
        there: its reads then wait for other ranks' reads. Otherwise ranks of one node share the
        node's link, where they read from other nodes. ``loft.Loft(source=...)`` takes these
        numbers; a loader tells them to the balancer itself.
        """
        names = sorted({name for home in self.home_sets for name in home.shared})
        if not names and self.nodes is None:
            return (-1,) * world_size
        homes, ranks = self.at(world_size), np.arange(world_size)
        holders = homes.local.holders
        remote = len(self) - np.bincount(homes.rows, minlength=len(holders)) @ holders
        served = np.zeros((max(len(names), 1), world_size), np.int64)  # [source, rank], samples
        counts = np.bincount(self.groups, minlength=len(self.home_sets)).tolist()
        for home, count in zip(self.home_sets, counts, strict=True):
            if home.shared and not (home.ranks or home.nodes or home.is_everywhere):
                numbers = np.array([names.index(name) for name in home.shared])
                served[numbers[ranks % len(numbers)], ranks] += count
        is_shared = 2 * served.max(axis=0) >= np.maximum(remote, 1)
        is_shared &= served.max(axis=0) > 0
        source = np.where(is_shared, served.argmax(axis=0), -1)
        if self.nodes is not None and homes.near is not None:
            node = np.unique(np.array(self.nodes), return_inverse=True)[1]  # [world_size]
            is_far = (
                np.bincount(homes.rows, minlength=len(holders))
                @ ~homes.near.holders[homes.near_rows]
            )  # samples that no rank of the node holds
            waits = (np.bincount(node)[node] > 1) & (is_far > 0) & ~is_shared
            source = np.where(waits, len(names) + node, source)
        return tuple(source.tolist())

    def at(self, world_size: int) -> Homes:
        """Prepare the assignment for so many ranks; a DataError where homes name others."""
        if self.nodes is not None and len(self.nodes) != world_size:
            raise DataError(
                f"placement: nodes names the node of {len(self.nodes)} ranks, but "
                f"world_size={world_size}; build the placement for this world"
            )
        holders = np.zeros((max(len(self.home_sets), 1), world_size), bool)
        for group, home in enumerate(self.home_sets):
            holding = range(world_size) if home.is_everywhere else self._holding_ranks(home)
            if holding and max(holding) >= world_size:
                raise DataError(
                    f"placement: rank {max(holding)} holds samples, but world_size={world_size}; "
                    "build the placement for this world"
                )
            holders[group, list(holding)] = True
        # Groups with the same holders become one row: 0, and [0, "shared:nfs"], are both rank 0's.
        rows, row_of_group = np.unique(holders, axis=0, return_inverse=True)
        near = near_rows = None
        if self.nodes is not None:
            names = np.unique(self.nodes, return_inverse=True)[1]
            is_near = rows @ (
                names[:, None] == names
            )  # [num_rows, world_size]: some holder is near
            sets, near_rows = np.unique(is_near, axis=0, return_inverse=True)
            near, near_rows = HolderSets(sets), near_rows.reshape(-1).astype(np.int64)
        return Homes(
            rows=row_of_group.reshape(-1).astype(np.int32)[self.groups],
            local=HolderSets(rows),
            near=near,
            near_rows=near_rows,
            strata=self.strata,
            strata_cap=self.strata_cap,
        )

    def _holding_ranks(self, home: HomeSet) -> list[int]:
        """Return the ranks of ``home``, its nodes' ranks included."""
        if home.nodes and (self.nodes is None or not set(home.nodes) <= set(self.nodes)):
            raise DataError(
                f"placement: homes on nodes {list(home.nodes)}, but the nodes of the ranks are "
                f"{self.nodes}; give nodes= with the node of each rank, and 'shared:NAME' for what "
                "lies on a host without one"
            )
        on_nodes = [r for r, node in enumerate(self.nodes or ()) if node in home.nodes]
        return sorted({*home.ranks, *on_nodes})


def _count(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"count={value!r} is no whole number >= 0")
    return value


def _groups(values: npt.ArrayLike) -> npt.NDArray[np.int32]:
    return np.asarray(values).astype(np.int32)


def check_placement(placement: Placement | None, num_samples: int) -> Placement:
    """Return ``placement``, or everything everywhere for None; raise where it does not fit."""
    if placement is None:
        return Placement.replicated(num_samples)
    if not isinstance(placement, Placement):
        raise ArgumentTypeError(
            f"placement={placement!r} is of type {type(placement).__name__}; give a "
            "loft_hvd.Placement"
        )
    if len(placement) != num_samples:
        raise DataError(
            f"the placement places {len(placement)} samples, but the data set has {num_samples}; "
            "build it with the data set's length (for a Subset use placement.subset(indices))"
        )
    return placement
