"""The learning rate of a global batch that changes: multiplied for the time of each step alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

from loft_hvd.balance.goodput import LR_RULES, LrRule
from loft_hvd.errors import ArgumentError, ArgumentTypeError

__all__ = ["read_lr_scale", "scale_lr"]


class _Factor(Protocol):
    def __call__(self, *, is_adaptive: bool) -> float:
        """Return the factor on the learning rates of the step that ends now."""


def read_lr_scale(lr_scale: object, *, is_auto: bool) -> LrRule | None:
    """Return the rule that a user asks for; None for what suits the optimizer."""
    if lr_scale is None:
        return None
    if not is_auto:
        raise ArgumentError(
            f"Balancer: lr_scale={lr_scale!r} is of a global batch that changes, and this one is "
            "fixed; leave it away, or use Balancer('auto', min_global=, max_global=)"
        )
    if callable(lr_scale):
        rule: LrRule = lr_scale
        return rule
    if not isinstance(lr_scale, str):
        raise ArgumentTypeError(
            f"Balancer: lr_scale={lr_scale!r} is of type {type(lr_scale).__name__}; give a name "
            "or a function"
        )
    if lr_scale not in LR_RULES:
        raise ArgumentError(
            f"Balancer: lr_scale={lr_scale!r} is not known; it takes "
            f"{', '.join(map(repr, LR_RULES))}, or a function"
        )
    return LR_RULES[lr_scale]


def scale_lr(optimizer: torch.optim.Optimizer, factor: _Factor) -> Callable[[], None]:
    """Multiply an optimizer's learning rates by ``factor`` while it takes a step.

    Returns:
        What ends it, when it is called.
    """
    given: list[tuple[dict[str, Any], Any]] = []  # groups and their rates, while a step goes on

    def before(stepped: torch.optim.Optimizer, *_: Any) -> None:
        after()  # a step that has failed leaves its rates behind
        times = factor(is_adaptive="betas" in stepped.defaults)
        for group in stepped.param_groups:
            given.append((group, group["lr"]))
            group["lr"] = group["lr"] * times

    def after(*_: Any) -> None:
        for group, lr in given:
            group["lr"] = lr
        given.clear()

    handles = optimizer.register_step_pre_hook(before), optimizer.register_step_post_hook(after)

    def end() -> None:
        for handle in handles:
            handle.remove()

    return end
