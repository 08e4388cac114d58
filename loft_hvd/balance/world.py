"""What a world of ranks is to a balancer: their devices, and the limits that follow from them.

Every rank tells the others its device once a world. Limits are worked out from that alike on all
ranks; what only rank 0 knows, caps that an earlier run found, it broadcasts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from loft_hvd.balance.controller import Controller
from loft_hvd.balance.devices import NO_CAP, Device, own_device, tell_devices
from loft_hvd.balance.options import SETTLE_STEPS, BalancerOptions, Caps
from loft_hvd.balance.plan import Bounds, Plan, Sizes, equal_sizes
from loft_hvd.balance.search import equal_within
from loft_hvd.errors import ArgumentError, PlanError
from loft_hvd.transport.base import Channel, Transport

__all__ = ["World", "assume", "meet"]


_CUDA_GRAIN = 8
_CUDA_SIZES = 8  # distinct sizes of a rank in a run: each may cost a recompilation or autotuning


@dataclass(frozen=True)
class World:
    """The ranks there are now.

    Attributes:
        devices: of each rank, [world_size].
        caps: most samples of each rank, [world_size]; None where no limit is known.
        grain: adaptive sizes are multiples of it.
        max_sizes: distinct sizes that a rank may have in a run; None for any number.
        found: caps that were found by trying, by device key.
    """

    devices: tuple[Device, ...]
    caps: tuple[int | None, ...]
    grain: int
    max_sizes: int | None
    found: Mapping[str, int]

    def __len__(self) -> int:
        return len(self.devices)

    def head(self, options: BalancerOptions) -> dict[str, Any]:
        """Return what a run log begins with."""
        return {
            "world_size": len(self),
            "global_batch_size": options.global_batch_size,
            "policy": options.policy_text,
            "devices": [f"{device.key} {device.name}" for device in self.devices],
            "caps": list(self.caps),
        }

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys of all devices, [world_size]."""
        return tuple(device.key for device in self.devices)

    def make_controller(self, options: BalancerOptions) -> Controller | None:
        """Return the policy's controller, or None where sizes are given or nothing is fitted.

        Raises:
            PlanError: no sizes within the limits add up to the global batch.
        """
        is_too_small = options.global_batch_size < len(self) * options.min_batch
        if not options.policy.uses_times or (is_too_small and not options.is_adaptive):
            return None
        with self._blaming_caps():
            controller = Controller(
                options.global_batch_size,
                len(self),
                options.policy,
                min_batch=options.min_batch,
                max_batch=self.caps,
                grain=self.grain if options.is_adaptive else 1,
                settle_steps=SETTLE_STEPS,
                max_sizes=self.max_sizes,
            )
        controller.warm_up([cap is not None for cap in self.caps])
        return controller

    def first_plans(self, options: BalancerOptions, controller: Controller | None) -> list[Plan]:
        """Return the plan that a run starts with, or all plans that it repeats.

        Raises:
            PlanError: the caps leave no room for the global batch, or for the sizes given.
        """
        first = Plan(0, 0, self.first_sizes(options, controller))
        return list(options.policy.given_plans) or [first]

    def first_sizes(self, options: BalancerOptions, controller: Controller | None) -> Sizes:
        """Return the sizes of the first plan, [world_size].

        Raises:
            PlanError: the caps leave no room for the global batch, or for the sizes given.
        """
        if controller is not None:
            return controller.plan.sizes
        given, total = options.policy.given_plans, options.global_batch_size
        with self._blaming_caps():
            for plan in given:
                what = f"policy {options.policy_text}, step {plan.first_step}"
                self.check_sizes(plan.sizes, what=what)
            if given:
                return given[0].sizes
            if not any(self.caps):
                return equal_sizes(total, len(self))
            highest = [total if cap is None else min(cap, total) for cap in self.caps]
            return equal_within(total, Bounds.of(len(self), cap=highest))

    @contextmanager
    def _blaming_caps(self) -> Iterator[None]:
        """Say of an error within that some caps come from earlier runs."""
        try:
            yield
        except PlanError as error:
            found = {key: self.found[key] for key in self.keys if key in self.found}
            if not found:
                raise
            raise PlanError(
                f"{error} (caps found when memory was full, by a probe or earlier runs in log_dir: "
                f"{found}; another log_dir forgets them)"
            ) from error

    def check_sizes(self, sizes: Sequence[int], *, what: str) -> None:
        """Raise when a rank's size is above its cap.

        Raises:
            PlanError: names the rank, its size and its cap.
        """
        for rank, (size, cap) in enumerate(zip(sizes, self.caps, strict=True)):
            if cap is not None and size > cap:
                raise PlanError(
                    f"{what}: rank {rank} should compute {size} samples, but its cap is {cap}; "
                    "sizes must keep within max_batch"
                )

    def check_plan(self, plan: Plan, *, after: Plan, rank: int) -> None:
        """Raise on a plan that this rank must not follow.

        Args:
            plan: what rank 0 has sent.
            after: the newest plan here.
            rank: this rank, for the message.

        Raises:
            PlanError: it is not the next plan, or gives a rank more than its cap.
        """
        if plan.plan_id != after.plan_id + 1:
            raise PlanError(
                f"plan {plan.plan_id} from rank 0 does not follow plan {after.plan_id} of rank "
                f"{rank}; load the same state on every rank"
            )
        self.check_sizes(plan.sizes, what=f"plan {plan.plan_id}")

    @classmethod
    def of(
        cls, options: BalancerOptions, devices: tuple[Device, ...], found: Mapping[str, int]
    ) -> World:
        """Work out limits.

        Args:
            options: what the user asked for.
            devices: of each rank, [world_size].
            found: caps that were found by trying, by device key.

        Raises:
            PlanError: ``max_batch`` names other devices than there are.
            ArgumentError: ``max_batch`` is a list for another number of ranks.
        """
        has_cuda = any(device.is_cuda for device in devices)
        grain = options.grain
        if grain is None:
            share = options.global_batch_size // len(devices)
            grain = math.gcd(_CUDA_GRAIN, share) if has_cuda else 1  # equal shares stay equal
        max_sizes = options.max_sizes
        if max_sizes is None and has_cuda:
            max_sizes = _CUDA_SIZES
        caps = [
            min(
                (limit for limit in (cap, found.get(device.key)) if limit is not None), default=None
            )
            for cap, device in zip(_given_caps(options, devices), devices, strict=True)
        ]
        return cls(devices, tuple(caps), grain, max_sizes, found)


def _given_caps(options: BalancerOptions, devices: tuple[Device, ...]) -> Caps:
    limit = options.max_batch
    if limit is None or isinstance(limit, int):
        return (limit,) * len(devices)
    if not isinstance(limit, Mapping):
        if len(limit) != len(devices):
            raise ArgumentError(
                f"Balancer: max_batch={list(limit)} has {len(limit)} entries for {len(devices)} "
                "ranks; give one for each, one number for all, or numbers by device name"
            )
        return tuple(limit)
    return tuple(_by_name(limit, device, rank) for rank, device in enumerate(devices))


def _by_name(limits: Mapping[str, int | None], device: Device, rank: int) -> int | None:
    """Return the limit of the longest name that the device's own name contains."""
    fitting = [name for name in limits if name.lower() in device.name.lower()]
    if not fitting:
        raise PlanError(
            f"Balancer: rank {rank} on {device.host} has the device {device.name!r}, which "
            f"max_batch={dict(limits)} does not name; add it, or a part of its name (None for no "
            "limit)"
        )
    return limits[max(fitting, key=len)]


def assume(options: BalancerOptions) -> World:
    """Return a world of devices like this one, until ranks have met."""
    host, name, is_cuda = own_device()
    devices = tuple(Device(host, number, name, is_cuda) for number in range(options.world_size))
    return World.of(options, devices, {})


def meet(
    transport: Transport,
    options: BalancerOptions,
    *,
    found: Mapping[str, int],
    own_cap: int | None = None,
) -> World:
    """Tell all ranks this one's device, and learn theirs; every rank calls it.

    Args:
        transport: the ranks.
        options: what the user asked for, equal on all ranks.
        found: caps that were found by trying, by ``Device.key``; rank 0's count.
        own_cap: what this rank has just found for its own device; goes before all others.
    """
    channel = Channel(transport, "loft.balancer")
    devices, fresh = tell_devices(channel, own_cap=own_cap)
    caps = torch.tensor([found.get(device.key, NO_CAP) for device in devices], dtype=torch.int64)
    channel.sub("caps").broadcast(caps, what="broadcast of caps")
    pairs = zip(devices, caps.tolist(), strict=True)
    known = {device.key: cap for device, cap in pairs if cap > 0}
    here = {device.key for device in devices}
    away = {key: cap for key, cap in found.items() if key not in here}
    return World.of(options, devices, {**away, **known, **fresh})
