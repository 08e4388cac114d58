"""Trials of a live job's defences: some of its ranks attack, alone or together."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import Tensor
from torch.utils.hooks import RemovableHandle

from loft_hvd.attacks.attack import Attack, LabelFlip
from loft_hvd.errors import ArgumentError, ArgumentTypeError

__all__ = ["attach"]

_logger = logging.getLogger(__name__)


class AttackableOptimizer(Protocol):
    """What ``attach`` needs of an optimizer."""

    @property
    def rank(self) -> int: ...
    @property
    def world_size(self) -> int: ...
    # With each bucket, before it is sent, [numel].
    def register_outgoing_hook(self, hook: Callable[[Any, Tensor], None]) -> RemovableHandle: ...
    # Every rank's values of a bucket, [world_size, numel]; a collective.
    def gather_outgoing(self, values: Tensor, *, name: str) -> Tensor: ...


def attach(
    optimizer: AttackableOptimizer,
    attack: Attack,
    *,
    ranks: Sequence[int],
    colluding: bool = False,
) -> RemovableHandle:
    """Make some ranks of a running job Byzantine: they send what ``attack`` makes of their rows.

    Call it on every rank alike; in an elastic job once, before ``hvd.elastic.run``. An attacker
    sees its own gradients only, unless attackers collude.

    **Colluding is for trials only.** Before a bucket is sent, an all-gather that exists for nothing
    else gives every rank's values to every rank: n times a bucket's bytes travel and lie in memory
    on each, nothing overlaps with it, and a real attacker would have to break into the other ranks
    to learn as much. A rank without samples, whose row is all zeros, is not learnt from.

    Args:
        optimizer: a ``loft_hvd.DistributedOptimizer``.
        attack: what the ranks send. Of a bucket it gets the rows that it knows: with ``colluding``
            every honest rank's, before other hooks of theirs that were registered later.
        ranks: the Byzantine ranks, each 0 <= rank < world_size; in later worlds of an elastic job
            whoever has these numbers.
        colluding: whether the attackers know the honest rows and act as one.

    Returns:
        A handle whose ``remove()`` makes this rank honest again; with ``colluding`` call it on
        every rank, between the same two steps.

    Raises:
        ArgumentError: a rank that does not exist, or nobody is left to be honest.
        ArgumentTypeError: ``attack`` is a ``LabelFlip``, which changes labels, or ``optimizer`` is
            none of ours, such as a ``ddp_hook``.
    """
    if isinstance(attack, LabelFlip):
        raise ArgumentTypeError(
            f"attach: {attack} changes labels, not the rows that ranks send; on the attacking "
            "ranks give it the labels before the loss, such as "
            f"loss_function(output, {attack}(labels)), and attach nothing"
        )
    if not hasattr(optimizer, "register_outgoing_hook"):
        raise ArgumentTypeError(
            f"attach: takes a loft_hvd.DistributedOptimizer, not a {type(optimizer).__name__}; try "
            "the rule with such an optimizer in place of DistributedDataParallel or Lightning"
        )
    chosen = sorted(set(ranks))
    outside = [rank for rank in chosen if not 0 <= rank < optimizer.world_size]
    if outside:
        raise ArgumentError(
            f"attach: ranks {outside} do not exist; a world of {optimizer.world_size} has ranks "
            f"0 to {optimizer.world_size - 1}"
        )
    if not colluding:

        def send_wrong(_: Any, values: Tensor) -> None:
            # Asked each time: an elastic world may give this process another number.
            if optimizer.rank in chosen:
                values.copy_(attack(values.unsqueeze(0), num_rows=1)[0])  # of [1, numel]

        return optimizer.register_outgoing_hook(send_wrong)

    if len(chosen) == optimizer.world_size:
        raise ArgumentError(
            f"attach: colluding=True with all {optimizer.world_size} ranks as attackers leaves no "
            "honest row to learn; leave a rank out"
        )
    _logger.warning(
        "ATTACK TRIAL: ranks %s collude. Before each bucket is sent every rank's gradients are "
        "gathered on every rank, so that the attackers know the honest ones. This slows the job "
        "and is for trials only: never leave it in a job whose model you want to keep",
        chosen,
    )

    def send_together(bucket: Any, values: Tensor) -> None:
        rows = optimizer.gather_outgoing(values, name=f"attack.{bucket.index}.{values.numel()}")
        if optimizer.rank not in chosen:
            return
        others = [rank for rank in range(optimizer.world_size) if rank not in chosen]
        honest = rows[others or [optimizer.rank]]  # an elastic world may hold attackers alone
        working = honest[honest.ne(0).any(dim=1)]
        known = working if len(working) else honest
        wrong = attack(known, num_rows=len(chosen))  # [attackers, numel]
        values.copy_(wrong[chosen.index(optimizer.rank)])

    return optimizer.register_outgoing_hook(send_together)
