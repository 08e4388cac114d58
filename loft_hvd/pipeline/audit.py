"""Audits of shard owners: another rank does a part of an owner's work again, and compares bits.

Every rank trusts the owner of a shard for its results, and for its table of distances. Both follow
from the rows that ranks sent, with the same bits wherever they are computed. So:

1. A rank keeps what it sent until the step ends.
2. When all results are there, every rank publishes the digest of a number that it has drawn, and
   that of the tables that it has measured (64 bytes a rank).
3. Every rank tells its number (32 bytes a rank). Nobody knew all of them before, and what owners
   say cannot be changed any more. The numbers together decide whether this step is audited.
4. In an audited step they also say which part of each owner's work, 1/16 of its shard of every
   bucket, is done again by whom. Ranks send the auditors their values of it, owners their tables.
5. The auditor measures and aggregates the part. A bit that differs ends the job on every rank, and
   the error names owner and auditor: one of the two is wrong. Both tell digests of the part's rows,
   so that a third rank is named which has sent the two other values.

``audit=p`` makes p audits a step on average. They come n at a time, one of each owner, in p/n of
the steps: an owner that lies everywhere is met in the first of these, and ranks do not wait for
each other's audits. One moves (n-1) / (16 n) of the d values of a step, which moves
2 (n-1) d: that is p / (32 n) of the traffic.

Where a rule sees rows, an owner's tables come on top: 64 n (n+1) bytes a bucket. They are meant for
its auditor alone, but an all-to-all has equal parts, so a rank sends n-1 times as much. That is
32 p n (n+1) / B of the traffic, where B are a bucket's bytes. With 25 MiB it is 2 % of what the
rows take at n = 8, as much as these at n = 29, and ten times as much at n = 64.
"""

from __future__ import annotations

import hashlib
import random
import secrets
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from loft_hvd.aggregation.mixing import Floats
from loft_hvd.errors import AuditError, MismatchError
from loft_hvd.pipeline.ring import Record, run_rule
from loft_hvd.pipeline.selection import (
    NUM_SLICES,
    Selection,
    measure,
    num_pairs,
    slice_of,
    total,
)
from loft_hvd.transport.base import Channel

__all__ = ["Audit"]

_DIGEST_BYTES = 32  # of SHA-256
# What an auditor finds; they travel as numbers.
_FOUND = (
    "",
    "another result",
    "another table of distances",
    "tables of distances other than those that were published",
)
_RESULT, _TABLE, _PUBLISHED = range(1, 4)


class _AuditDraw(NamedTuple):
    """Who audits what in a step."""

    shift: int  # owner j's auditor is rank j + shift, modulo the ranks
    slices: list[int]  # by owner: which of NUM_SLICES of its shards


class _AuditFinding(NamedTuple):
    """The first difference that an auditor has found."""

    what: int = 0  # index of _FOUND; 0 for none
    record: int = 0  # index of the exchange
    coordinate: int = 0  # of the owner's shard


class Audit:
    """Audits the owners of shards; every rank makes one alike.

    ``share`` are the audits a step, on average, each of one owner. ``draw`` returns so many bytes
    that no other rank knows.
    """

    def __init__(self, share: float, *, draw: Callable[[int], bytes] = secrets.token_bytes) -> None:
        self._share = share
        self._draw = draw
        self.num_steps = 0
        self.num_audited = 0  # of these steps

    def lay_out(self, channel: Channel, records: Sequence[Record]) -> None:
        """Audit from now on the exchanges that leave ``records``."""
        self._channel = channel.sub("audit")
        self._records = list(records)
        self._chance = self._share / channel.world_size  # of a step

    def step_reduced(self) -> None:
        """Close a step: all results are there, and nobody has changed them or what was sent.

        Raises:
            AuditError: owner and auditor differ; on every rank.
            MismatchError: a rank tells another number than it has drawn; on every rank.
        """
        self.num_steps += 1
        number = self._draw(_DIGEST_BYTES)
        tables = b"".join(sums.tobytes() for sums in self._measured())
        published = self._gather("published", _digest(number) + _digest(tables))
        # What all others have published is here: only now may they know this rank's number.
        numbers = self._gather("numbers", number)
        pairs = enumerate(zip(numbers, published, strict=True))
        wrong = [rank for rank, (told, was) in pairs if _digest(told) != was[:_DIGEST_BYTES]]
        if wrong:
            raise MismatchError(
                f"audit of step {self.num_steps}: ranks {wrong} tell other numbers than they had "
                "drawn, by which it is decided who is audited; look at those machines"
            )
        draws = random.Random(_digest(b"".join(numbers)))
        if draws.random() >= self._chance:
            return
        self.num_audited += 1
        size = self._channel.world_size
        shift = 1 + int(draws.random() * (size - 1))
        drawn = _AuditDraw(shift, [int(draws.random() * NUM_SLICES) for _ in range(size)])
        self._audit(drawn, tables, [each[_DIGEST_BYTES:] for each in published])

    def _gather(self, what: str, row: bytes) -> list[bytes]:
        """Return what every rank tells, all of equal length."""
        values = torch.frombuffer(bytearray(row), dtype=torch.uint8)
        return [each.tobytes() for each in self._channel.sub(what).allgather_rows(values).numpy()]

    def _measured(self) -> list[Floats]:
        """Return the tables of this rank's shards, [NUM_SLICES, pairs] each."""
        parts = [record.spec.selection for record in self._records]
        return [part.sums for part in parts if part is not None]

    def _audit(self, drawn: _AuditDraw, tables: bytes, published: list[bytes]) -> None:
        rank, size = self._channel.rank, self._channel.world_size
        received = self._exchange(drawn, tables)
        # What this rank has held as an owner, and what it has been sent as an auditor.
        held = [record.rows[:, self._span(record, rank, drawn)] for record in self._records]
        owner = (rank - drawn.shift) % size
        rows, at = [], 0
        for record in self._records:
            span = self._span(record, owner, drawn)
            rows.append(_values(received[:, at:], span.stop - span.start, record.sent.dtype))
            at += _room(record)
        told = received[owner, at:].numpy().tobytes()
        finding = self._compare(owner, drawn, rows, told, published[owner])
        line = torch.tensor([*finding, *_row_digests(held), *_row_digests(rows)])
        lines = self._channel.sub("findings").allgather_rows(line)
        if bool(lines[:, 0].any()):
            raise AuditError(self._describe(drawn, lines.numpy()))

    def _span(self, record: Record, owner: int, drawn: _AuditDraw) -> slice:
        return slice_of(record.rows.shape[1], drawn.slices[owner])

    def _exchange(self, drawn: _AuditDraw, tables: bytes) -> Tensor:
        """Return what ranks send this one as an auditor, [world_size, bytes].

        A row holds the rank's values of every bucket, each with room for the longest slice, and at
        last tables: those of the owner that is audited.
        """
        rank, size = self._channel.rank, self._channel.world_size
        room = sum(map(_room, self._records))
        sent = torch.zeros(size, room + len(tables), dtype=torch.uint8)
        for auditor in range(size):
            owner, at = (auditor - drawn.shift) % size, 0
            for record in self._records:
                shard = record.sent.view(size, -1)[owner]
                values = _bytes(shard[self._span(record, owner, drawn)])
                sent[auditor, at : at + len(values)] = values
                at += _room(record)
        if tables:
            own = torch.frombuffer(bytearray(tables), dtype=torch.uint8)
            sent[(rank + drawn.shift) % size, room:] = own
        received = torch.zeros_like(sent)
        channel = self._channel.sub("rows")
        work = channel.transport.alltoall(sent.view(-1), received.view(-1), name=channel.name)
        channel.wait(work, what="exchange of what is audited")
        return received

    def _compare(
        self, owner: int, drawn: _AuditDraw, rows: list[Tensor], told: bytes, published: bytes
    ) -> _AuditFinding:
        """Do an owner's part again: ``rows`` are [n, numel] of each bucket, ``told`` its tables."""
        if _digest(told) != published:
            return _AuditFinding(_PUBLISHED)
        size = self._channel.world_size
        tables = iter(np.frombuffer(told).reshape(-1, NUM_SLICES, num_pairs(size)))
        models: dict[Selection, list[Floats]] = {}  # what decides over several buckets
        for number, (record, part) in enumerate(zip(self._records, rows, strict=True)):
            span, selection = self._span(record, owner, drawn), record.spec.selection
            rule = record.spec.rule
            if selection is not None:
                table = next(tables)  # [NUM_SLICES, pairs]
                found = measure(record.spec.rule, part, record.weights)
                if found.tobytes() != table[drawn.slices[owner]].tobytes():
                    return _AuditFinding(_TABLE, number, span.start)
                sums = total(table)
                rule = selection.rule_by(sums, record.weights)
                if selection.is_model:
                    models.setdefault(selection.selection, []).append(sums)
            result = torch.zeros(part.shape[1], dtype=part.dtype)
            run_rule(part, rule, record.weights, result)
            other = record.received.view(size, -1)[owner][span]
            differs = (_bytes(result) != _bytes(other)).nonzero()
            if len(differs):
                first = int(differs[0]) // part.element_size()
                return _AuditFinding(_RESULT, number, span.start + first)
        for whole, shares in models.items():
            assert whole.told is not None
            if total(shares).tobytes() != whole.told[owner].tobytes():
                return _AuditFinding(_PUBLISHED)
        return _AuditFinding()

    def _describe(self, drawn: _AuditDraw, lines: npt.NDArray[np.int64]) -> str:
        """Say which audits have found what; ``lines`` are those of all ranks."""
        size, said = self._channel.world_size, []
        digests = lines[:, len(_AuditFinding()) :].reshape(size, 2, size)  # as owner, as auditor
        for auditor, line in enumerate(lines.tolist()):
            finding = _AuditFinding(*line[: len(_AuditFinding())])
            if finding.what == 0:
                continue
            owner = (auditor - drawn.shift) % size
            apart = np.flatnonzero(digests[owner, 0] != digests[auditor, 1]).tolist()
            senders = f", or ranks {apart}, whose values reached them with other bits" * bool(apart)
            said.append(
                f"rank {auditor} has {_FOUND[finding.what]} than rank {owner}, the owner, from "
                f"coordinate {finding.coordinate} of its shard of "
                f"{self._records[finding.record].spec.row.name}; rank {owner} or rank {auditor} "
                f"is wrong{senders}"
            )
        return (
            f"audit of step {self.num_steps}: {'; '.join(said)}. No rank may go on: what was "
            "trained since the last audit may be wrong; look at these machines, and restart from "
            "a checkpoint without them"
        )


def _digest(values: bytes) -> bytes:
    return hashlib.sha256(values).digest()


def _number(values: bytes) -> int:
    """Return 63 bits of a digest: they travel as int64."""
    return int.from_bytes(_digest(values)[:8], "little") >> 1


def _bytes(values: Tensor) -> Tensor:
    """Return the bits of a 1-D tensor, uint8 on the CPU."""
    return values.cpu().contiguous().view(torch.uint8)


def _room(record: Record) -> int:
    """Return the bytes of the longest slice of a shard."""
    shard = record.rows.shape[1]
    return -(-shard // NUM_SLICES) * record.rows.element_size()


def _values(received: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
    """Return the values at the front of every row of bytes, [rows, numel]."""
    front = received[:, : numel * dtype.itemsize].contiguous()
    return front.view(-1).view(dtype).view(len(received), numel)


def _row_digests(parts: Sequence[Tensor]) -> list[int]:
    """Return 63 bits of every row's values in all parts, [rows, numel] each."""
    return [
        _number(b"".join(_bytes(part[row]).numpy().tobytes() for part in parts))
        for row in range(len(parts[0]))
    ]
