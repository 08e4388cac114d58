"""What a run begins with: in a new world, from a saved state, or among devices that come back.

Every rank keeps what was measured of each device (``Archive``), from the exchange that all of them
read, so that it outlives any rank. In a new world, or when a state is loaded into one, policies are
shown what was measured of the devices that are here, as if they had been here all the time.
"""

from __future__ import annotations

import logging
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated

import numpy as np

from loft_hvd.balance.balancer_options import BalancerOptions
from loft_hvd.balance.controller import SETTLE_STEPS, Controller, ControllerState
from loft_hvd.balance.goodput import GradientNoise
from loft_hvd.balance.interval import COLUMNS, SIZE, Amount, Floats, Interval
from loft_hvd.balance.limits import RankLimits
from loft_hvd.balance.plan import Bounds, Ints, Plan, check_history, equal_sizes
from loft_hvd.balance.search import equal_within
from loft_hvd.codec import Count, Shape
from loft_hvd.errors import PlanError

__all__ = [
    "SETTLE_STEPS",
    "Archive",
    "SavedRun",
    "can_go_on",
    "first_plans",
    "make_controller",
]

_logger = logging.getLogger(__name__)
_KEPT = 16  # intervals of a device: a third of what a fit looks at
_DEVICES = 4  # times the present number, that are remembered: bounds a state of changing host names


class Archive:
    """Rows of the last intervals by device, each one's in a ring: its n-th is at ``n % _KEPT``."""

    def __init__(self) -> None:
        self._places: dict[str, int] = {}  # of each device in the arrays
        self._rows: Floats = np.zeros((0, _KEPT, len(COLUMNS)))  # [num_devices, _KEPT, 14]
        self._counts: Ints = np.zeros(0, np.int64)  # rows of each device so far, [num_devices]
        self._heard: Ints = np.zeros(0, np.int64)  # when the newest came, as ``_num_heard`` counts
        self._num_heard = 0
        # The ranks of the newest interval, and their places: mostly those of the next one too.
        self._here: tuple[Sequence[str], Ints] = (), np.zeros(0, np.int64)

    def add(self, keys: Sequence[str], interval: Interval) -> None:
        """Take in an interval of the devices that are here, by rank."""
        if self._here[0] != keys:
            self._here = keys, self._place(keys)
        heard = self._here[1][interval.valid]
        self._rows[heard, self._counts[heard] % _KEPT] = interval.rows[interval.valid]
        self._counts[heard] += 1
        self._note_heard(heard)
        if (self._counts > 0).sum() > _DEVICES * len(keys):
            self._forget(_DEVICES * len(keys))

    def _place(self, keys: Sequence[str]) -> Ints:
        """Return the places of devices, [len(keys)], with room for new ones."""
        places = self._places
        found = np.array([places.setdefault(key, len(places)) for key in keys], np.int64)
        num_new = len(places) - len(self._rows)
        if num_new:
            self._rows = np.concatenate([self._rows, np.zeros((num_new, _KEPT, len(COLUMNS)))])
            self._counts = np.concatenate([self._counts, np.zeros(num_new, np.int64)])
            self._heard = np.concatenate([self._heard, np.full(num_new, -1)])
        return found

    def _note_heard(self, places: Ints) -> None:
        self._heard[places] = self._num_heard + np.arange(len(places))
        self._num_heard += len(places)

    def _by_age(self) -> list[tuple[str, int]]:
        """Return the devices that have rows, and their places, the longest unheard first."""
        known = [(key, place) for key, place in self._places.items() if self._counts[place]]
        return sorted(known, key=lambda each: int(self._heard[each[1]]))

    def _forget(self, most: int) -> None:
        """Drop the devices that were not heard for longest, but for so many."""
        kept = self._by_age()[-most:]
        places = np.array([place for _, place in kept], np.int64)
        self._rows, self._counts = self._rows[places], self._counts[places]
        self._heard = self._heard[places]
        self._places = {key: place for place, (key, _) in enumerate(kept)}
        self._here = (), np.zeros(0, np.int64)

    def recall(self, keys: Sequence[str]) -> list[Interval]:
        """Return what is known of the devices by rank, oldest first; each one's newest come last.

        A device that is not known has no valid rows.
        """
        known = np.array([key in self._places for key in keys], bool)
        places = np.array([self._places.get(key, 0) for key in keys], np.int64)
        counts = np.zeros(len(keys), np.int64)
        counts[known] = self._counts[places[known]]
        intervals = []
        # Rows are aligned at their newest: of ranks with 3 and 1 rows, the second is valid in the
        # last interval alone.
        for back in range(min(int(counts.max(initial=0)), _KEPT), 0, -1):
            valid, rows = counts >= back, np.zeros((len(keys), len(COLUMNS)))
            rows[valid] = self._rows[places[valid], (counts[valid] - back) % _KEPT]
            sizes = rows[:, SIZE].round().astype(np.int64)
            intervals.append(Interval(-back, sizes, rows, valid, float("nan")))
        return intervals

    def rows(self) -> dict[str, list[list[float]]]:
        """Return all rows, by device."""
        found = {}
        for key, place in self._by_age():
            count = int(self._counts[place])
            newest = np.arange(max(count - _KEPT, 0), count) % _KEPT
            found[key] = self._rows[place, newest].tolist()
        return found

    def take(self, rows: Mapping[str, Sequence[list[float]]]) -> None:
        """Take rows that were kept anywhere; those of other devices stay."""
        for key, place in zip(rows, self._place(list(rows)), strict=True):
            # An earlier version's rows have other columns: what they say is not known here.
            whole = [row for row in rows[key] if len(row) == len(COLUMNS)][-_KEPT:]
            self._rows[place, : len(whole)] = np.array(whole).reshape(-1, len(COLUMNS))
            self._counts[place] = len(whole)
        self._note_heard(self._place(list(rows)))


# In a new world.


def make_controller(options: BalancerOptions, limits: RankLimits) -> Controller | None:
    """Return the policy's controller, or None where sizes are given or nothing is fitted."""
    is_adaptive = options.policy.is_adaptive
    is_too_small = options.global_batch_size < len(limits) * options.min_batch
    # Only who changes sizes needs room to do so: "report" may run with a sample a rank.
    if not options.policy.uses_times or (is_too_small and not is_adaptive):
        return None
    with limits.blaming_caps():
        controller = Controller(
            options.global_batch_size,
            len(limits),
            options.policy,
            min_batch=options.min_batch,
            max_batch=limits.share_caps,
            pass_caps=limits.caps if limits.splits else None,
            grain=limits.grain if is_adaptive else 1,
            max_sizes=limits.max_sizes,
            first_sizes=limits.first,
        )
    controller.warm_up([cap is not None for cap in limits.caps])
    return controller


def first_plans(
    options: BalancerOptions, limits: RankLimits, controller: Controller | None
) -> list[Plan]:
    """Return the plan that a run starts with, or all plans that are given."""
    if controller is not None:
        return [controller.plan]
    given, total = list(options.policy.given_plans), options.global_batch_size
    with limits.blaming_caps():
        for plan in given:
            what = f"policy {options.policy.text}, step {plan.first_step}"
            limits.check_sizes(plan.sizes, what=what)
        if given:
            return given
        if not any(limits.share_caps):
            return [Plan(0, 0, equal_sizes(total, len(limits)))]
        highest = [total if cap is None else min(cap, total) for cap in limits.share_caps]
        return [Plan(0, 0, equal_within(total, Bounds.of(len(limits), cap=highest)))]


# From a saved state.

_Row = Annotated[list[Amount], Shape(len(COLUMNS))]


@dataclass(frozen=True)
class SavedRun:
    """What a balancer's ``state_dict`` holds."""

    num_steps: Count  # optimizer steps taken
    plans: list[list[Count]]  # plan_id, first_step and sizes of each, the newest last
    controller: ControllerState | None  # what rank 0's has learnt; None of another rank, or policy
    next_step: Count | None = None  # to train on, counted over epochs; None for ``num_steps``
    policy: str | None = None  # its name or sizes; None fits any
    devices: list[str] | None = None  # keys by rank, [world_size]; None fits any
    measured: dict[str, list[_Row]] = field(default_factory=dict)  # rows of the ``Archive``
    noise: GradientNoise | None = None  # of the gradients, as last measured

    def __post_init__(self) -> None:
        if not all(len(row) > 2 for row in self.plans):
            raise PlanError(f"plans={reprlib.repr(self.plans)}: one has no sizes")
        plans = self.history
        check_history(plans)
        # The controller may know one more, on its way to the ranks.
        if self.controller is not None:
            pairs = zip(self.controller.history, plans, strict=False)
            if any(made.plan != plan for made, plan in pairs):
                raise PlanError(f"plans={reprlib.repr(self.plans)} are not its controller's")

    @property
    def history(self) -> list[Plan]:
        """The plans."""
        return [Plan(row[0], row[1], tuple(row[2:])) for row in self.plans]


def can_go_on(
    saved: SavedRun, limits: RankLimits, options: BalancerOptions, *, warns: bool
) -> bool:
    """Say whether the plans of a state go on among the ranks there are, with what is asked now.

    ``warns`` logs what has changed although the devices have not.
    """
    first, newest, keys = saved.history[0], saved.history[-1], list(limits.keys)
    # Sizes belong to devices, not to rank numbers: the same devices in another order start afresh.
    if newest.world_size != len(keys) or saved.devices not in (None, keys):
        return False
    changes = [
        f"{name} was {reprlib.repr(before)} and is {now!r}"
        for name, before, now in (
            ("policy", saved.policy or options.policy.text, options.policy.text),
            (
                "global_batch_size",
                newest.global_batch_size,
                options.nearest(newest.global_batch_size),
            ),
        )
        if before != now
    ]
    # The first sizes too: a policy judges plans by the equal sizes of its run, and must be able to
    # measure them anew.
    largest = map(max, first.sizes, newest.sizes)
    changes += [
        f"rank {rank} had {size} samples, but its cap is {cap}"
        for rank, (size, cap) in enumerate(zip(largest, limits.share_caps, strict=True))
        if cap is not None and size > cap
    ]
    if changes and warns:  # with other devices nobody expects the old sizes
        _logger.warning("load_state_dict: sizes start afresh: %s", "; ".join(changes))
    return not changes
