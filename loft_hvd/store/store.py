"""``SampleStore``: a data set that keeps what it has read, and asks peers before the source."""

from __future__ import annotations

import hashlib
import os
import secrets
import socket
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import Dataset

from loft_hvd.config import config
from loft_hvd.data.draws import Draw
from loft_hvd.data.placement import HomeSet, Placement
from loft_hvd.data.sampler import check_length
from loft_hvd.errors import ArgumentError, ArgumentTypeError, LoftError
from loft_hvd.store.homes import NOBODY, KeptHomes, with_keepers
from loft_hvd.store.samples import decode_sample, encode_sample
from loft_hvd.transport.addresses import listening_addresses, own_addresses
from loft_hvd.transport.agreement import check_agreement
from loft_hvd.transport.base import Channel, Transport
from loft_hvd.transport.default import default_transport

if TYPE_CHECKING:
    from loft_hvd.store.peers import Peers, Server

__all__ = ["SampleStore"]

_KEY_BYTES = 32  # bound from SHA-256
_NUM_LOOKED_AT = 16  # samples; a choice: other data differ in one of them
_MOST_ADDRESSES = 16  # a choice: they travel at a fixed length


class SampleStore(Dataset[Any]):
    """Keep the samples that this rank has read, and read those of other ranks from them.

    Wraps any map-style data set. A sample is read from the own memory or disk where it is kept,
    else from the rank that keeps it, else from the data set. With ``loft.DataLoader`` or
    ``loft.BatchSampler`` the owners of the next epoch are the ranks that keep the samples: the
    global batches stay the same, only who computes a sample follows the caches.

    Nothing is evicted: each sample is read once an epoch, so what was thrown away would always be
    what is needed next. What a rank keeps is a copy, never the only one: a rank that is lost
    costs time, no sample. A sample must not change in the data set while it is kept: random
    augmentation belongs into ``transform``.

    Every rank makes it at the same place of the script, after ``hvd.init()``.

    Args:
        dataset: the source, with ``__len__`` and ``__getitem__``. Samples are numbers, text, bytes,
            CPU tensors, NumPy arrays and PIL images, in tuples, lists and dicts.
        memory_bytes: most bytes of samples in this rank's memory.
        disk_bytes: most bytes on this rank's disk.
        folder: of the file on disk; a later run that finds it reads from it, where the data set's
            type, length and 16 of its samples are the same. Needed with ``disk_bytes``; a folder
            on this node, not one that all nodes share.
        transform: applied to each sample that is read, wherever it came from.
        transport: the ranks; None for those of Horovod, ``torch.distributed``, or this one alone.
        timeout_s: longest wait for one answer of a peer, in seconds; the source is read then.

    Raises:
        ArgumentTypeError: the data set is not map-style, or holds what cannot be kept.
        ArgumentError: on every rank, when one cannot use its file or start its server.
        MismatchError: ranks have data sets of different lengths.
        MissingDependencyError: the extra ``loft_hvd[store]`` is not installed.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        *,
        memory_bytes: int,
        disk_bytes: int = 0,
        folder: str | os.PathLike[str] | None = None,
        transform: Callable[[Any], Any] | None = None,
        transport: Transport | None = None,
        timeout_s: float = 5.0,
    ) -> None:
        # The store's libraries are extras: ``import loft_hvd`` does without.
        from loft_hvd.store.shelf import Shelf

        self.dataset = dataset
        self.transform = transform
        self.cache_hits = 0  # of this process: kept samples that the placement did not count on
        num_samples = check_length(dataset)
        _check_budgets(memory_bytes, disk_bytes, folder)
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
            )
        except (LoftError, OSError, MemoryError) as error:
            refusal = str(error) or type(error).__name__
        fields = {"number of samples": str(num_samples)}
        check_agreement(channel, fields, what="the sample store", refusal=refusal)
        self._homes: KeptHomes | None = KeptHomes(self._shelf.keepers, channel)
        self._homes.announce(self._shelf.held())
        self._server: Server | None = None
        self._peers: Peers | None = None
        if self.world_size > 1:
            self._open(channel, timeout_s)

    def _open(self, channel: Channel, timeout_s: float) -> None:
        """Start the server and learn where those of the others are."""
        from loft_hvd.store.peers import Address, Peers, Server

        # The engine carries the key; what is not the job's own never sees it.
        key = torch.tensor(list(secrets.token_bytes(_KEY_BYTES)), dtype=torch.uint8)
        channel.sub("key").broadcast(key, what="the store's key")
        secret = bytes(key.tolist())
        host = _host(channel)
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
        self._peers = Peers(addresses, secret, timeout_s=timeout_s)

    def __getstate__(self) -> dict[str, Any]:
        """Describe the store for a loader process that was not forked: it reads, nothing else."""
        return self.__dict__ | {"_homes": None, "_server": None}

    def __len__(self) -> int:
        return self._shelf.num_samples

    def __getitem__(self, index: int) -> Any:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Read a batch: what is kept, then from peers, all asked at once, then from the source."""
        size = len(self)
        numbers = [index + size if -size <= index < 0 else index for index in indices]
        if not all(0 <= number < size for number in numbers):
            raise IndexError(f"samples {list(indices)} of a data set of {size}")
        counts = dict.fromkeys(self._shelf.counters, 0)
        found: dict[int, Any] = {}
        missing = []
        for number in dict.fromkeys(numbers):
            kept = self._shelf.read(number)
            if kept is None:
                missing.append(number)
                continue
            found[number] = decode_sample(kept[0])
            counts["own"] += 1
            counts["own_bytes"] += len(kept[0])
            self.cache_hits += int(self._shelf.keepers[number] != self.rank)
        if missing:
            found |= self._from_peers(missing, counts)
            found |= self._from_source([each for each in missing if each not in found], counts)
        self._shelf.count(**{name: count for name, count in counts.items() if count})
        # A sample that is asked for twice is transformed twice: the draw may be random.
        transform = self.transform
        return [found[each] if transform is None else transform(found[each]) for each in numbers]

    def _from_peers(self, missing: Sequence[int], counts: dict[str, int]) -> dict[int, Any]:
        wanted: dict[int, list[int]] = {}
        for number in missing:
            keeper = int(self._shelf.keepers[number])
            if keeper not in (NOBODY, self.rank):
                wanted.setdefault(keeper, []).append(number)
        if not wanted or self._peers is None:
            return {}
        found = {}
        for number, (data, digest) in self._peers.fetch(wanted).items():
            found[number] = decode_sample(data)
            self._shelf.add(number, data, digest)
            counts["peer"] += 1
            counts["peer_bytes"] += len(data)
        return found

    def _from_source(self, missing: Sequence[int], counts: dict[str, int]) -> dict[int, Any]:
        if not missing:
            return {}
        get_items = getattr(self.dataset, "__getitems__", None)
        samples = get_items(missing) if get_items else [self.dataset[each] for each in missing]
        counts["source"] += len(missing)
        if not self._shelf.is_full:
            for number, sample in zip(missing, samples, strict=True):
                self._shelf.add(number, encode_sample(sample))
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
        if self._homes is None or world_size != self.world_size:
            self._homes = None
            return base
        self._homes.settle(first_step=first_step, held=self._shelf.held())
        return with_keepers(base, self._shelf.keepers)

    def note(self, draw: Draw) -> None:
        """Note who computes the samples of a step."""
        if self._homes is not None:
            self._homes.note(draw)

    # What a user asks.

    @property
    def counters(self) -> Mapping[str, int]:
        """Samples and bytes read since the start, by all loader processes of this rank.

        ``own``, ``peer`` and ``source`` are samples, ``own_bytes`` and ``peer_bytes`` their bytes,
        and ``corrupt`` those whose checksum was wrong.
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
        """End the server and let another store use the folder; what is kept stays readable."""
        if self._server is not None:
            self._server.close()
        self._shelf.close()


def _check_budgets(
    memory_bytes: int, disk_bytes: int, folder: str | os.PathLike[str] | None
) -> None:
    for name, value in (("memory_bytes", memory_bytes), ("disk_bytes", disk_bytes)):
        if isinstance(value, bool) or not isinstance(value, int):
            raise ArgumentTypeError(f"SampleStore: {name}={value!r} must be a whole number")
        if not 0 <= value <= 1 << 37:
            raise ArgumentError(f"SampleStore: {name}={value} must be 0 to {1 << 37} (128 GiB)")
    if (disk_bytes > 0) != (folder is not None):
        raise ArgumentError(
            f"SampleStore: disk_bytes={disk_bytes} and folder={folder!r}; give both or neither"
        )


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


def _host(channel: Channel) -> str:
    """Return the address at which the other ranks reach this one; all ranks call it alike."""
    is_one_host = channel.transport.local_size == channel.world_size
    own = own_addresses()[:_MOST_ADDRESSES]
    row = torch.zeros(_MOST_ADDRESSES, dtype=torch.int64)  # 0: no address
    row[: len(own)] = torch.tensor([int.from_bytes(socket.inet_aton(each), "big") for each in own])
    numbers = channel.sub("hosts").allgather_rows(row).flatten().tolist()
    others = [socket.inet_ntoa(number.to_bytes(4, "big")) for number in numbers if number]
    name = config().interface
    of_interface = own_addresses(name) if name else ()
    return listening_addresses(own, others, is_one_host=is_one_host, of_interface=of_interface)[0]
