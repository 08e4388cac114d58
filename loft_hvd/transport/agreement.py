"""Ranks compare what must be equal everywhere, and the error names the rank and the field.

Only fixed-length digests travel: nothing that another rank sent is ever unpickled.
"""

from __future__ import annotations

import functools
import hashlib
import secrets
from collections.abc import Mapping, Sequence

import torch

from loft_hvd.errors import ArgumentError, MismatchError
from loft_hvd.transport.base import Channel

__all__ = [
    "KEY_BYTES",
    "check_agreement",
    "digest",
    "new_number",
    "odd_ones",
    "on_all",
    "share_keys",
]

_SHOWN = 200  # characters of a value; a choice: a line or two of an error
_REFUSAL_BYTES = 1000  # a choice
KEY_BYTES = 32  # bound from SHA-256


def digest(text: str) -> int:
    """Return 63 bits that differ, for all practical purposes, when texts do."""
    # 63: they travel as int64. SHA-256, as ``hash`` is salted anew in every process.
    return (
        int.from_bytes(
            hashlib.sha256(text.encode(errors="backslashreplace")).digest()[:8], "little"
        )
        >> 1
    )


def check_agreement(
    channel: Channel, fields: Mapping[str, str], *, what: str, refusal: str = "", advice: str = ""
) -> None:
    """Raise on every rank when ranks disagree about a field, or one of them cannot go on.

    ``advice`` is the way out where values differ.

    Raises:
        ArgumentError: a rank has a ``refusal``, why it cannot do what it was asked for; every rank
            says it, in that rank's words.
        MismatchError: ranks differ; names the ranks, the first differing field of ``what`` they
            describe, and this rank's value of it.
    """
    keys = sorted(fields)
    # [number of entries, digest of names, digest of values, refused]: one exchange where all agree,
    # a second one, of a digest for each value, only where they do not.
    head = [len(keys), digest("\n".join(keys)), digest("\n".join(fields[key] for key in keys))]
    head += [int(refusal != "")]
    channel = channel.sub("agree")
    # Everyone takes part in each exchange: what heads say is equal on all ranks, so all raise.
    heads = channel.allgather_rows(torch.tensor(head))
    if bool(heads[:, 3].any()):
        _raise_refusal(channel, refusal)
    if bool((heads == heads[0]).all()):
        return
    if not bool((heads[:, :2] == heads[0, :2]).all()):
        values = heads[:, 1].tolist()
        raise MismatchError(
            f"{what}: ranks {odd_ones(values)} describe other things than the rest (number of "
            f"entries by rank: {heads[:, 0].tolist()}); here on rank {channel.rank}: "
            f"{_short(', '.join(keys))}. Build the same model and options on every rank"
        )
    digests = torch.tensor([digest(fields[key]) for key in keys])
    details = channel.sub("fields").allgather_rows(digests)
    # [world_size, num_fields]: a column where some row differs from rank 0's
    differs = (details != details[0]).any(dim=0).tolist()
    column = differs.index(True)
    key = keys[column]
    raise MismatchError(
        f"{what}: {key} differs on ranks {odd_ones(details[:, column].tolist())}; here on rank "
        f"{channel.rank} it is {_short(fields[key])}. {advice or 'It must be equal on every rank'}"
    )


def _raise_refusal(channel: Channel, refusal: str) -> None:
    """Raise what the first rank that cannot go on has to say."""
    # Plain text in a tensor of fixed length; ranks that refuse nothing send zeros.
    own = refusal.encode(errors="backslashreplace")[:_REFUSAL_BYTES].ljust(_REFUSAL_BYTES, b"\0")
    letters = torch.tensor(list(own), dtype=torch.uint8)
    texts = channel.sub("refusal").allgather_rows(letters)
    told = [bytes(row).rstrip(b"\0").decode(errors="replace") for row in texts.tolist()]
    # The first rank that has something to say: the same one on every rank.
    rank, text = next((rank, text) for rank, text in enumerate(told) if text)
    raise ArgumentError(text if rank == channel.rank else f"on rank {rank}: {text}")


@functools.cache
def _next_number() -> list[int]:
    return [0]


def new_number(channel: Channel) -> int:
    """Return a number, equal on all ranks, that none of them has had; every rank calls it alike."""
    # Ranks may have had some with others, or joined late: the highest is new to all.
    own = _next_number()
    number = int(channel.allgather_rows(torch.tensor(own)).max())
    own[0] = max(own[0], number + 1)
    return number


def on_all(channel: Channel, is_so: bool) -> bool:
    """Say whether something is so on every rank; every rank calls it alike."""
    return bool(channel.allgather_rows(torch.tensor([int(is_so)])).all())


def share_keys(channel: Channel) -> list[bytes]:
    """Return a key for each rank, by rank, that this rank has in common with that one alone."""
    # Each makes half of a key, and the engine carries it to that rank only.
    halves = secrets.token_bytes(channel.world_size * KEY_BYTES)
    sent = torch.tensor(list(halves))  # int64, which every engine carries
    received = torch.zeros_like(sent)
    work = channel.transport.alltoall(sent, received, name=channel.name)
    channel.wait(work, what="keys of every two ranks")
    shape = (channel.world_size, KEY_BYTES)
    pairs = zip(sent.view(shape).tolist(), received.view(shape).tolist(), strict=True)
    # The lower rank's half first, on both sides.
    return [
        bytes(own + other if channel.rank < peer else other + own)
        for peer, (own, other) in enumerate(pairs)
    ]


def odd_ones(values: Sequence[float]) -> list[int]:
    """Return the ranks whose value is not the most common one (the lowest rank's in a tie)."""
    common = max(values, key=lambda value: (values.count(value), -values.index(value)))
    return [rank for rank, value in enumerate(values) if value != common]


def _short(text: str) -> str:
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
