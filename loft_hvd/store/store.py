"""``SampleStore``: a data set that keeps what it has read, and asks peers before the source."""

from __future__ import annotations

import hashlib
import logging
import os
import secrets
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import compress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import Dataset

from loft_hvd.balance.keeping import Keeping, ReadCosts
from loft_hvd.config import config
from loft_hvd.data.draws import Draw
from loft_hvd.data.placement import HomeSet, Placement
from loft_hvd.data.sampler import check_indices, check_length
from loft_hvd.errors import ArgumentError, ArgumentTypeError, DataError, LoftError
from loft_hvd.store.homes import KeptHomes
from loft_hvd.store.keepers import NOBODY, with_keepers
from loft_hvd.store.samples import decode_sample, encode_sample
from loft_hvd.transport.agreement import check_agreement
from loft_hvd.transport.base import Channel, Transport
from loft_hvd.transport.default import default_transport
from loft_hvd.transport.groups import address_for_others, nodes_of

if TYPE_CHECKING:
    from loft_hvd.store.peers import Peers, Received, Server

__all__ = ["SampleStore"]

_logger = logging.getLogger(__name__)
_KEY_BYTES = 32  # bound from SHA-256
# Counters that ranks tell each other. The last two are microseconds.
_READS = ("own", "peer", "source", "own_bytes", "peer_bytes", "peer_us", "source_us")
_NUM_LOOKED_AT = 16  # samples; a choice: other data differ in one of them


class SampleStore(Dataset[Any]):
    """Keep the samples that this rank has read, and read those of other ranks from them.

    Wraps any map-style data set. A sample is read from the own memory or disk where it is kept,
    else from the rank that keeps it, else from the data set. With ``loft.DataLoader`` or
    ``loft.BatchSampler`` the owners of the next epoch are the ranks that keep the samples: the
    global batches stay the same, only who computes a sample follows the caches.

    Nothing is evicted: each sample is read once an epoch, so what was thrown away would always be
    what is needed next. What a rank keeps is a copy, never the only one: a rank that is lost
    costs time, no sample. Random augmentation belongs into ``transform``.

    A few of the samples kept are read from the data set again and compared. Where one has changed,
    all that ranks keep is thrown away, with a warning, and kept anew.

    Every rank makes it at the same place of the script, after ``hvd.init()``. In an elastic job
    each rank reads its own store and the source: peers are not asked.

    Args:
        dataset: the source, with ``__len__`` and ``__getitem__``. Samples are numbers, text, bytes,
            CPU tensors, NumPy arrays and PIL images, in tuples, lists and dicts.
        memory_bytes: most bytes of samples in this rank's memory.
        disk_bytes: most bytes on this rank's disk.
        folder: of the file on disk; a later run that finds it reads from it, where the data set's
            type, length and 16 of its samples are the same. Needed with ``disk_bytes``; a folder
            on this node, not one that all nodes share.
        version: of the data set, any text or number, the same on all ranks; a folder that was
            filled with another one is emptied, with a warning. Give it another value when the
            data set has changed.
        transform: applied to each sample that is read, wherever it came from.
        transport: the ranks; None for those of Horovod, ``torch.distributed``, or this one alone.
        timeout_s: longest wait for one answer of a peer, in seconds; the source is read then.

    Raises:
        ArgumentTypeError: the data set is not map-style, or holds what cannot be kept.
        ArgumentError: on every rank, when one cannot use its file or start its server; in an
            elastic job on that rank alone.
        MismatchError: ranks have data sets of different lengths; in an elastic job nobody compares.
        MissingDependencyError: the extra ``loft_hvd[store]`` is not installed.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        *,
        memory_bytes: int,
        disk_bytes: int = 0,
        folder: str | os.PathLike[str] | None = None,
        version: str | float | None = None,
        transform: Callable[[Any], Any] | None = None,
        transport: Transport | None = None,
        timeout_s: float = 5.0,
    ) -> None:
        # The store's libraries are extras: ``import loft_hvd`` does without.
        from loft_hvd.store.checks import Checks
        from loft_hvd.store.shelf import Shelf

        self.dataset = dataset
        self.transform = transform
        # Of this process, for a loader: kept samples that the placement did not count on.
        self.cache_hits = 0
        num_samples = check_length(dataset)
        _check_budgets(folder, memory_bytes=memory_bytes, disk_bytes=disk_bytes)
        _check_version(version, folder)
        transport = default_transport() if transport is None else transport
        channel = Channel(transport, "loft.store")
        self.rank, self.world_size = channel.rank, channel.world_size
        refusal = ""
        try:
            self._shelf = Shelf(
                num_samples,
                memory_bytes=memory_bytes,
                disk_bytes=disk_bytes,
                path=None if folder is None else _file_in(Path(folder), self.rank),
                identity=0 if folder is None else _identity(dataset, num_samples),
                version=_number_of(str(version).encode()),
            )
        except (LoftError, OSError, MemoryError) as error:
            refusal = str(error) or type(error).__name__
        self._homes: KeptHomes | None = None  # None: each rank keeps for itself
        self._nodes: tuple[str, ...] | None = None
        self._given: Placement | None = None  # that the newest iteration was given
        self._told: dict[str, int] = {}  # the counters when ranks last told each other
        self._costs = ReadCosts()
        self._settled = 0  # the generation of the shelf that all ranks know of
        self.keeping: Keeping | None = None  # of this iteration; None before the first
        self._server: Server | None = None
        self._peers: Peers | None = None
        self._timeout_s = timeout_s
        if config().is_elastic:
            # A rank that joins makes its store while the others train: they would not answer.
            if refusal:
                raise ArgumentError(refusal)
            if self.rank == 0:
                _logger.warning(
                    "in an elastic job each rank reads its own sample store and the source: peers "
                    "are not asked"
                )
            self._shelf.is_of_earlier_run[:] = self._shelf.held()
            self._checks = Checks(partial(_read_from, dataset), self._shelf, rank=self.rank)
            return
        self._meet(channel, {"number of samples": num_samples, "version": version}, refusal)
        if (self._shelf.keepers != NOBODY).any():  # else nothing is written: zeros take no memory
            self._shelf.is_of_earlier_run[:] = self._shelf.keepers != NOBODY
        self._checks = Checks(partial(_read_from, dataset), self._shelf, rank=self.rank)
        if self.world_size > 1:
            self._open(channel)

    def _meet(self, channel: Channel, compared: Mapping[str, object], refusal: str) -> None:
        """Compare data sets, and learn what the others keep, and on which nodes."""
        fields = {name: str(value) for name, value in compared.items()}
        check_agreement(channel, fields, what="the sample store", refusal=refusal)
        self._homes = KeptHomes(self._shelf.keepers, self._shelf.copies, channel)
        self._homes.announce(self._shelf.held())
        self._nodes = _shared_nodes(channel)

    def _open(self, channel: Channel) -> None:
        """Start the server and learn where those of the others are."""
        from loft_hvd.store.peers import Address, Peers, Server

        # The engine carries the key; what is not the job's own never sees it.
        key = torch.tensor(list(secrets.token_bytes(_KEY_BYTES)), dtype=torch.uint8)
        channel.sub("key").broadcast(key, what="the store's key")
        secret = bytes(key.tolist())
        host = address_for_others(channel)
        port, refusal = 0, ""
        try:
            self._server = Server(self._shelf, host=host, key=secret, owner=self.rank)
            port = self._server.address().port
        except (LoftError, OSError) as error:
            refusal = str(error)
        check_agreement(channel.sub("open"), {}, what="the store's server", refusal=refusal)
        number = int.from_bytes(socket.inet_aton(host), "big")
        rows = channel.sub("servers").allgather_rows(torch.tensor([number, port])).tolist()
        addresses = [Address(socket.inet_ntoa(row[0].to_bytes(4, "big")), row[1]) for row in rows]
        self._peers = Peers(addresses, secret, timeout_s=self._timeout_s)

    def __getstate__(self) -> dict[str, Any]:
        """Describe the store for a loader process that was not forked: it reads, nothing else."""
        return self.__dict__ | dict.fromkeys(("_homes", "_server"))

    def __len__(self) -> int:
        return self._shelf.num_samples

    @property
    def shard_sizes(self) -> Any:
        """Samples of each shard of the data set; None where it is not in shards."""
        return getattr(self.dataset, "shard_sizes", None)

    def __getitem__(self, index: int) -> Any:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Read a batch: what is kept, then from peers, all asked at once, then from the source."""
        numbers = check_indices(indices, len(self))
        counts = dict.fromkeys(self._shelf.counters, 0)
        generation = self._shelf.generation
        wanted = list(dict.fromkeys(numbers))
        found, digests = self._from_shelf(wanted, generation, counts)
        asked = [each for each in wanted if each not in found and self._keeper(each) is not None]
        if asked:
            for number, received in self._from_peers(asked, generation, counts).items():
                found[number], digests[number] = received.value, received.digest
        if digests and not self._are_true(digests, generation, counts):
            found = {}  # all of it may be old
            counts |= dict.fromkeys(("own", "own_bytes", "peer", "peer_bytes"), 0)
        found |= self._from_source([each for each in wanted if each not in found], counts)
        self._shelf.count(**{name: count for name, count in counts.items() if count})
        # A sample that is asked for twice is transformed twice: the draw may be random.
        transform = self.transform
        return [found[each] if transform is None else transform(found[each]) for each in numbers]

    def _from_shelf(
        self, wanted: Sequence[int], generation: int, counts: dict[str, int]
    ) -> tuple[dict[int, Any], dict[int, int]]:
        """Return what this rank keeps, and the checksums."""
        found: dict[int, Any] = {}
        digests: dict[int, int] = {}
        for number in wanted:
            kept = self._shelf.read(number)
            if kept is None:
                continue
            try:
                found[number] = decode_sample(kept[0])
            except DataError:
                if self._shelf.generation == generation:
                    raise
                continue  # another process has thrown it away, and writes there
            digests[number] = kept[1]
            counts["own"] += 1
            counts["own_bytes"] += len(kept[0])
            self.cache_hits += not self._is_placed_here(number)
        return found, digests

    def _are_true(
        self, digests: Mapping[int, int], generation: int, counts: dict[str, int]
    ) -> bool:
        """Look at some of the samples that were kept; False where what ranks keep is old."""
        chosen = self._checks.chosen(list(digests))
        if chosen:
            counts["checked"] += len(chosen)
            changed = self._checks.find_changed({each: digests[each] for each in chosen})
            if changed is not None:
                self._throw_away(generation + 1, changed)
        return self._shelf.generation == generation

    def _throw_away(self, generation: int, changed: int) -> None:
        """Empty this rank's shelf and those of the others, unless somebody has done so."""
        if not self._shelf.empty(generation):
            return
        _logger.warning(
            "rank %d found that sample %d of the data set is not what it was when it was kept: all "
            "that ranks keep is thrown away, and kept anew as it is read. When a data set changes "
            "give the store another version=: then nothing old is read",
            self.rank, changed,
        )  # fmt: skip
        if self._peers is not None:
            self._peers.tell_changed(generation, rank=self.rank)

    def _is_placed_here(self, number: int) -> bool:
        """Say whether the placement has a sample on this rank: then it counts as local there."""
        shelf = self._shelf
        is_kept = self.rank in (shelf.keepers[number], shelf.copies[number] - 1)  # 0 for no copy
        return is_kept or shelf.is_home(number)

    def _keeper(self, number: int) -> int | None:
        """Return the other rank that keeps a sample; None where none does."""
        keeper = int(self._shelf.keepers[number])
        if keeper in (NOBODY, self.rank) or self._peers is None or self._shelf.is_home(number):
            return None
        if not self._shelf.is_settled:  # the others may not know yet that what they keep is old
            return None
        return keeper

    def _from_peers(
        self, wanted: Sequence[int], generation: int, counts: dict[str, int]
    ) -> dict[int, Received]:
        by_keeper: dict[int, list[int]] = {}
        for number in wanted:
            by_keeper.setdefault(int(self._shelf.keepers[number]), []).append(number)
        if not by_keeper or self._peers is None:
            return {}
        began = time.monotonic()
        received = self._peers.fetch(by_keeper, decode_sample)
        counts["peer_us"] += round(1e6 * (time.monotonic() - began))
        # Once all have come: the peer's time for an answer must not run while this disk writes.
        for number, (data, digest, _) in received.items():
            self._shelf.add(number, data, digest, is_copy=True, generation=generation)
            counts["peer"] += 1
            counts["peer_bytes"] += len(data)
        return received

    def _from_source(self, missing: Sequence[int], counts: dict[str, int]) -> dict[int, Any]:
        if not missing:
            return {}
        shelf = self._shelf
        copies = [self._keeper(number) is not None for number in missing]
        kept = [
            not shelf.is_full
            and not shelf.is_home(number)
            and not (is_copy and shelf.copies_left <= 0)
            for number, is_copy in zip(missing, copies, strict=True)
        ]
        generation = shelf.generation
        with shelf.clearing(sum(kept)):
            began = time.monotonic()
            samples = _read_from(self.dataset, missing)
            seconds = time.monotonic() - began
        counts["source"] += len(missing)
        counts["source_us"] += round(1e6 * seconds)
        for number, sample, is_copy in compress(zip(missing, samples, copies, strict=True), kept):
            shelf.add(number, encode_sample(sample), is_copy=is_copy, generation=generation)
        return dict(zip(missing, samples, strict=True))

    # What a sampler asks of it (``Keeper``), in the process that trains.

    def placement_after(
        self, given: Placement | None, *, first_step: int, world_size: int
    ) -> Placement:
        """Return who holds what, now that the steps before ``first_step`` are trained.

        Every rank calls it with the same step, when an iteration begins. In a world of another
        size ranks have other numbers: then nobody's store is counted on, and each reads its own.
        """
        base = Placement(np.zeros(len(self), np.int32), (HomeSet(shared=("source",)),))
        base = base if given is None else given
        if base.nodes is None and world_size == self.world_size:
            base = replace(base, nodes=self._nodes)
        if self._homes is None or world_size != self.world_size:
            self._homes = self.keeping = None
            self._shelf.allow_copies()
            return base
        now = self._shelf.counters
        counts = [now[name] - self._told.get(name, 0) for name in _READS]
        # What the source sends has no length here; the samples kept have.
        counts.append(int((now["source"] - self._told.get("source", 0)) * self.sample_bytes))
        counts.append(self._shelf.generation)
        self._told = now
        shelf, homes = self._shelf, self._homes
        if given is not None and given is not self._given:
            self._given = given
            self._live_at(base, homes)
        homes.settle(first_step=first_step, held=shelf.held(), room=shelf.room, counts=counts)
        self._agree_on_generation(homes)
        self._costs = _measured(homes.counts, self._costs)
        self.keeping = homes.choose(self._costs)
        shelf.copies_left = self.keeping.copies[self.rank]
        self._keep_serving()
        return with_keepers(base, homes.keepers)

    def _agree_on_generation(self, homes: KeptHomes) -> None:
        """Where a rank has found that the data set has changed: go on from there, on all ranks."""
        generation = max(row[-1] for row in homes.counts)
        if generation == self._settled:
            return
        if self._shelf.empty(generation):
            _logger.warning(
                "the data set has changed: what rank %d keeps is thrown away", self.rank
            )
        homes.announce(self._shelf.held())
        self._settled = generation
        self._shelf.settle(generation)

    def _live_at(self, base: Placement, homes: KeptHomes) -> None:
        """Leave out what ranks have anyway, such as on a disk that the data set reads."""
        at = base.at(self.world_size)
        homes.keepers.live_at(at)
        self._shelf.set_homes(at.local.holders[at.rows, self.rank])

    def _keep_serving(self) -> None:
        """Start the server again where it has ended; nothing raises.

        The other ranks go on to train: a rank that raised alone would leave them waiting.
        """
        if self._server is None or self._server.process.poll() is None:
            return
        _logger.warning(
            "the store's server of rank %d has ended (%d): it is started again",
            self.rank,
            self._server.process.returncode,
        )
        try:
            self._server = self._server.again()
        except OSError as error:
            _logger.warning("peers read this rank's samples from the source: %s", error)
            self._server = None

    def reads(self) -> list[dict[str, int]]:
        """Return what each rank read between the last two iterations, as ``counters`` has it.

        It is [world_size], and empty where nobody has read anything yet. ``source_bytes`` are as
        many as those samples had if they were as long as those kept.
        """
        told = [] if self._homes is None else self._homes.counts
        if not any(any(counts[:-1]) for counts in told):
            return []
        names = (*_READS, "source_bytes")  # and the generation, which is no read
        return [
            {name: count for name, count in zip(names, counts, strict=False) if name[-3:] != "_us"}
            for counts in told
        ]

    @property
    def sample_bytes(self) -> float:
        """Bytes that a usual sample takes of a budget; 0 where none is kept."""
        return sum(self.bytes_kept) / max(self.num_kept, 1)

    def note(self, draw: Draw) -> None:
        """Note who computes the samples of a step."""
        if self._homes is not None:
            self._homes.note(draw)

    # What a user asks.

    @property
    def counters(self) -> Mapping[str, int]:
        """Samples and bytes read since the start, by all loader processes of this rank.

        ``own``, ``peer`` and ``source`` are samples, ``own_bytes`` and ``peer_bytes`` their bytes;
        ``corrupt`` are those whose checksum was wrong, ``checked`` those that were read from the
        data set again to be compared. ``peer_us`` and ``source_us`` are the microseconds that
        reading took.
        """
        return self._shelf.counters

    @property
    def num_kept(self) -> int:
        """Samples that this rank keeps."""
        return self._shelf.num_kept

    @property
    def bytes_kept(self) -> tuple[int, int]:
        """Bytes that this rank has taken of ``memory_bytes`` and of ``disk_bytes``."""
        return self._shelf.bytes_kept

    def close(self) -> None:
        """End the server, and let another store use the folder; it stays readable."""
        if self._server is not None:
            self._server.close()
            self._server = None  # or the next epoch would start it again
        self._shelf.close()


def _read_from(dataset: Dataset[Any], numbers: Sequence[int]) -> Sequence[Any]:
    """Return samples of a data set, read in one call where it offers that."""
    get_items = getattr(dataset, "__getitems__", None)
    if get_items is None:
        return [dataset[number] for number in numbers]
    found: Sequence[Any] = get_items(numbers)
    return found


def _check_budgets(folder: str | os.PathLike[str] | None, **budgets: int) -> None:
    for name, value in budgets.items():
        if isinstance(value, bool) or not isinstance(value, int):
            raise ArgumentTypeError(f"SampleStore: {name}={value!r} must be a whole number")
        if not 0 <= value <= 1 << 37:
            raise ArgumentError(f"SampleStore: {name}={value} must be 0 to {1 << 37} (128 GiB)")
    disk_bytes = budgets["disk_bytes"]
    if (disk_bytes > 0) != (folder is not None):
        raise ArgumentError(
            f"SampleStore: disk_bytes={disk_bytes} and folder={folder!r}; give both or neither"
        )


def _check_version(version: object, folder: str | os.PathLike[str] | None) -> None:
    if version is not None and not isinstance(version, str | int | float):
        raise ArgumentTypeError(
            f"SampleStore: version={version!r} must be a text or a number, such as '2024-05' or 3"
        )
    if version is not None and folder is None:
        raise ArgumentError(
            f"SampleStore: version={version!r} is of the samples in folder=, and there is none; "
            "give both, or neither"
        )


def _number_of(text: bytes) -> int:
    """Return 63 bits of a text."""
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "little") >> 1


def _shared_nodes(channel: Channel) -> tuple[str, ...] | None:
    """Return the node of each rank; None where all are on one, or each on a node of its own."""
    nodes = nodes_of(channel)
    if len(nodes) in (1, channel.world_size):
        return None
    node_of = {rank: str(number) for number, ranks in enumerate(nodes) for rank in ranks}
    return tuple(node_of[rank] for rank in range(channel.world_size))


def _measured(told: Sequence[Sequence[int]], before: ReadCosts) -> ReadCosts:
    """Return what reading a sample took over all ranks; what was not read took what it did before.

    ``told`` are the counts of each rank, as ``_READS`` names them.
    """
    total = dict(zip(_READS, np.sum(told, axis=0).tolist(), strict=False))
    peer_s, source_s = (
        1e-6 * total[f"{name}_us"] / total[name] if total[name] else known_s
        for name, known_s in (("peer", before.peer_s), ("source", before.source_s))
    )
    return ReadCosts(peer_s, source_s)


def _file_in(folder: Path, rank: int) -> Path:
    """Return this rank's file: ranks of one node may share the folder."""
    return folder / f"loft_hvd.rank{rank}.samples"


def _identity(dataset: Dataset[Any], num_samples: int) -> int:
    """Return 63 bits of what the data set is: its type, its length, some of its samples."""
    text = f"{type(dataset).__module__}.{type(dataset).__qualname__} {num_samples} "
    whole = hashlib.sha256(text.encode())
    for place in range(min(_NUM_LOOKED_AT, num_samples)):
        whole.update(
            encode_sample(dataset[place * num_samples // min(_NUM_LOOKED_AT, num_samples)])
        )
    return int.from_bytes(whole.digest()[:8], "little") >> 1
