"""Who keeps which sample: first keepers and copies, as every rank works them out for itself."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from loft_hvd.data.assign import Homes
from loft_hvd.data.blocks import Order
from loft_hvd.data.draws import Draw
from loft_hvd.data.placement import HomeSet, Placement

__all__ = ["NOBODY", "Claims", "Drawn", "Keepers", "Ranks", "grant", "with_keepers"]

NOBODY = -1
Ranks = npt.NDArray[np.int16]
_Bools = npt.NDArray[np.bool_]
_BLOCK = 1 << 18  # samples worked on at a time: a megabyte or two, which a second-level cache holds
_MANY_KEYS = 1 << 24  # triples of homes and keepers; more take more memory than sorting does


class Claims(NamedTuple):
    """Samples that the ranks which compute them may keep, in that order."""

    samples: Order
    owners: Ranks
    is_copy: _Bools  # another rank keeps it, too


class Drawn(NamedTuple):
    """What is left of a step that was drawn."""

    step: int
    claims: Claims
    digest: int  # of its samples and their owners
    position: int  # samples of the epoch up to its end
    follows: bool  # it begins where the one noted before it ended


_NO_CLAIMS = Claims(np.zeros(0, np.int32), np.zeros(0, np.int16), np.zeros(0, bool))


class Keepers:
    """The first keeper of every sample, and one more rank that has a copy.

    Args:
        first: rank that keeps each sample, [num_samples], int16, ``NOBODY`` where none does.
        second: rank that has a copy, plus 1; 0 where none does: pages of memory that nobody has
            written are zeros, and take nothing as long as there are no copies.
    """

    def __init__(self, first: Ranks, second: Ranks) -> None:
        self.first, self.second = first, second
        self.has_copies = False
        self._homes: Homes | None = None

    def live_at(self, homes: Homes) -> None:
        """Take where samples are whatever is kept: what a rank has there it need not keep."""
        self._homes = homes if homes.local.width.any() else None

    @property
    def num_unkept(self) -> int:
        """Samples that no rank has."""
        is_unkept = self.first == NOBODY
        if self._homes is not None:
            is_unkept &= (self._homes.local.width == 0)[self._homes.rows]
        return int(np.count_nonzero(is_unkept))

    def forget(self) -> None:
        """Forget all keepers."""
        self.first[:] = NOBODY
        if self.has_copies:
            self.second[:] = 0
        self.has_copies = False

    def begin(self, copies: Sequence[int]) -> None:
        """Begin an iteration; ``copies`` is how many each rank may keep, [world_size]."""
        self._may_copy = np.array(copies) > 0
        self._is_open = bool((self.first == NOBODY).any() or self._may_copy.any())

    def drawn(self, draw: Draw, before: Drawn | None) -> Drawn:
        """Note a step of the iteration; ``before`` is the step noted before it."""
        samples, owners = draw.batch, draw.assignment.owners.astype(np.int16)
        digest = zlib.crc32(owners.tobytes(), draw.step_sizes.digest)
        begin = draw.position - len(samples)
        follows = before is not None and begin == before.position
        claims = self._claims_of(samples, owners) if self._is_open else _NO_CLAIMS
        return Drawn(draw.step_sizes.step, claims, digest, draw.position, follows)

    def _claims_of(self, samples: Order, owners: Ranks) -> Claims:
        first = self.first.take(samples)
        is_claimed = is_new = first == NOBODY
        if self._may_copy.any():
            is_copy = ~is_new & (first != owners) & self._may_copy[owners]
            if self.has_copies:
                is_copy &= self.second[samples] == 0
            is_claimed = is_new | is_copy
        if self._homes is not None:
            is_claimed = is_claimed & ~self._homes.local.holders[self._homes.rows[samples], owners]
        if is_new.all() and is_claimed.all():  # as in a first epoch: parts of its order, no copies
            return Claims(samples, owners, np.broadcast_to(np.False_, len(samples)))
        return Claims(samples[is_claimed], owners[is_claimed], ~is_new[is_claimed])

    def claims(self, done: Sequence[Drawn]) -> Iterator[Claims]:
        """Yield the claims of steps that were trained.

        Some steps come at a time: of an epoch of many samples nothing is copied as a whole.
        """
        # Of two loaders, both may have had a sample; within an epoch each comes once.
        is_one_epoch = all(each.follows for each in done[1:])
        seen = None if is_one_epoch else np.zeros(len(self.first), bool)
        begin = 0
        while begin < len(done):
            end, size = begin + 1, len(done[begin].claims.samples)
            while end < len(done) and done[end].follows and size < _BLOCK:
                size += len(done[end].claims.samples)
                end += 1
            samples, owners, is_copy = (
                np.concatenate(parts)
                for parts in zip(*(each.claims for each in done[begin:end]), strict=True)
            )
            begin = end
            if seen is not None:
                is_fresh = ~seen[samples]
                seen[samples] = True
                samples, owners, is_copy = samples[is_fresh], owners[is_fresh], is_copy[is_fresh]
            if len(samples):
                yield Claims(samples, owners, is_copy)

    def take(self, claims: Claims, is_granted: _Bools) -> None:
        """Note the claims that were granted."""
        samples, owners, is_copy = claims
        is_new = is_granted & ~is_copy
        self.first[samples[is_new]] = owners[is_new]
        is_copied = is_granted & is_copy
        if is_copied.any():
            self.has_copies = True
            self.second[samples[is_copied]] = owners[is_copied] + np.int16(1)

    def read(self, held: Iterator[tuple[int, _Bools]]) -> None:
        """Take what ranks say that they keep: rank and what it keeps, the last rank first.

        Of several the first two count, unless one was known.
        """
        num_samples = len(self.first)
        first, second = np.full(num_samples, NOBODY, np.int16), np.zeros(num_samples, np.int16)
        is_first_still = np.zeros(num_samples, bool)
        for rank, mask in held:
            # Whoever was first so far comes second now.
            second[mask] = first[mask] + np.int16(1)
            first[mask] = rank
            is_first_still |= mask & (self.first == rank)
        known = self.first[is_first_still]
        # The known one goes to the front; of the two others the first stays.
        others = first[is_first_still]
        second[is_first_still] = np.where(others == known, second[is_first_still], others + 1)
        first[is_first_still] = known
        self.first[:] = first
        if self.has_copies or second.any():
            self.has_copies = bool(second.any())
            self.second[:] = second


def grant(
    claims: Claims, new_left: npt.NDArray[np.int64], copies_left: npt.NDArray[np.int64]
) -> _Bools:
    """Return which claims are within what each rank may still take, in order.

    Both are [world_size], and are used up.
    """
    granted = np.ones(len(claims.samples), bool)
    for left, kind in ((new_left, ~claims.is_copy), (copies_left, claims.is_copy)):
        claimed = np.bincount(claims.owners[kind], minlength=len(left))
        for rank in np.flatnonzero(claimed > left).tolist():  # its budget ended here
            granted[np.flatnonzero(kind & (claims.owners == rank))[left[rank] :]] = False
        left[:] = np.maximum(left - claimed, 0)
    return granted


def with_keepers(placement: Placement, keepers: Keepers) -> Placement:
    """Return a placement in which samples are also where they are kept."""
    first, second = keepers.first, keepers.second
    # Of 3 ranks, group 2 kept by nobody is 2 * 4 + 0, by rank 1 it is 2 * 4 + 2; with copies that
    # is one more digit: 0 without one, 3 for a copy at rank 2.
    base = int(first.max(initial=NOBODY)) + 2
    bases = [base, int(second.max(initial=0)) + 1] if keepers.has_copies else [base]
    num_keys = len(placement.home_sets) * int(np.prod(bases))
    dtype = np.int32 if num_keys < 2**31 else np.int64
    keys: npt.NDArray[Any] = np.empty(len(first), dtype)
    found = np.zeros(num_keys, bool) if num_keys <= _MANY_KEYS else None
    for begin in range(0, len(keys), _BLOCK):
        part = slice(begin, begin + _BLOCK)
        keys[part] = placement.groups[part].astype(dtype) * base
        keys[part] += first[part] + np.int16(1)
        if keepers.has_copies:
            keys[part] = keys[part] * bases[1] + second[part]
        if found is not None:
            found[keys[part]] = True
    if found is None:
        used, groups = np.unique(keys, return_inverse=True)
        groups = groups.reshape(-1).astype(np.int32)
    else:
        used = np.flatnonzero(found)
        number = np.zeros(num_keys, np.int32)
        number[used] = np.arange(len(used))
        for begin in range(0, len(keys), _BLOCK):  # in place: there may be many millions
            keys[begin : begin + _BLOCK] = number[keys[begin : begin + _BLOCK]]
        groups = keys
    sets = []
    for key in used.tolist():
        rest, kept = key, set[int]()
        for radix in reversed(bases):
            rest, digit = divmod(rest, radix)
            kept |= {digit - 1} if digit else set()  # a digit is a rank plus 1, or 0
        home = placement.home_sets[rest]
        ranks = tuple(sorted({*home.ranks, *kept})) if kept else home.ranks
        sets.append(HomeSet(ranks, home.nodes, home.shared, is_everywhere=home.is_everywhere))
    return replace(placement, groups=np.asarray(groups, np.int32), home_sets=tuple(sets))
