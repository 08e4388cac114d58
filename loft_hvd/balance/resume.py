"""Whether a saved run can go on among the ranks there are now."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from loft_hvd.balance.options import BalancerOptions
from loft_hvd.balance.plan import Plan
from loft_hvd.balance.world import World
from loft_hvd.transport.agreement import check_agreement
from loft_hvd.transport.base import Channel, Transport

__all__ = ["can_go_on", "compare_starts", "plans_of"]

_LOGGER = logging.getLogger(__name__)


def plans_of(state: dict[str, Any]) -> list[Plan]:
    """Return the plans of a balancer's state, the newest last."""
    return [Plan(row[0], row[1], tuple(row[2:])) for row in state["plans"]]


def can_go_on(
    state: dict[str, Any], world: World, options: BalancerOptions, *, warns: bool
) -> bool:
    """Say whether the plans of a state go on here.

    Args:
        state: of a balancer.
        world: the ranks there are now.
        options: what the user asks for now.
        warns: log what has changed although the devices have not.
    """
    newest, keys = plans_of(state)[-1], list(world.keys)
    if newest.world_size != len(keys) or state.get("devices", keys) != keys:
        return False
    changes = [
        f"{name} was {before!r} and is {now!r}"
        for name, before, now in (
            ("policy", state.get("policy", options.policy_text), options.policy_text),
            ("global_batch_size", newest.global_batch_size, options.global_batch_size),
        )
        if before != now
    ]
    changes += [
        f"rank {rank} had {size} samples, but its cap is {cap}"
        for rank, (size, cap) in enumerate(zip(newest.sizes, world.caps, strict=True))
        if cap is not None and size > cap
    ]
    if changes and warns:
        _LOGGER.warning("load_state_dict: sizes start afresh: %s", "; ".join(changes))
    return not changes


def compare_starts(transport: Transport, fields: Mapping[str, str], *, name: str) -> None:
    """Compare what ranks go on from, once they have taken a step; every rank calls it.

    Raises:
        MismatchError: names the ranks and the field that differ.
    """
    check_agreement(
        Channel(transport, f"{name}.state"),
        dict(fields),
        what="Balancer: the state after the first step",
    )
