"""An optimizer that is somebody else's: the base of the distributed wrapper."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["Delegate"]


_OF_GRAD_SCALER = ("grad_scale", "found_inf")  # which it sets for a fused optimizer's step


class Delegate(torch.optim.Optimizer):
    """Everything a ``torch.optim.Optimizer`` has, taken from the user's own."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        # No super().__init__: it would build a second state and second parameter groups.
        self._optimizer = optimizer

    def __getattr__(self, name: str) -> Any:
        if name == "_optimizer":  # not there yet, while being copied or unpickled
            raise AttributeError(name)
        return getattr(self._optimizer, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _OF_GRAD_SCALER:
            setattr(self._optimizer, name, value)
        else:
            super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        if name in _OF_GRAD_SCALER:
            delattr(self._optimizer, name)
        else:
            super().__delattr__(name)

    @property
    def state(self) -> Any:  # type: ignore[override]  # an attribute in the base class
        """The user's optimizer's state."""
        return self._optimizer.state

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]  # as above
        """The user's optimizer's parameter groups."""
        return self._optimizer.param_groups

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]  # as above
        """The user's optimizer's defaults."""
        return self._optimizer.defaults

    def state_dict(self) -> dict[str, Any]:
        """Return the user's optimizer's state; it loads into that optimizer, wrapped or not."""
        return self._optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what ``state_dict`` returned, of this optimizer wrapped or not."""
        self._optimizer.load_state_dict(state_dict)

    def step(  # type: ignore[override]  # one signature for both of the base's overloads
        self, closure: Callable[[], float] | None = None
    ) -> float | None:
        """Create the optimizer's state without moving a parameter.

        ``hvd.broadcast_optimizer_state`` calls this, with zero gradients, where a state is still
        empty (a new run, or a worker that joins one).
        """
        groups = self._optimizer.param_groups
        decays = [group.get("weight_decay") for group in groups]
        kept = [[p.detach().clone() for p in group["params"]] for group in groups]
        for group in groups:
            if "weight_decay" in group:
                group["weight_decay"] = 0
        try:
            self._optimizer.step()
        finally:
            for group, decay, values in zip(groups, decays, kept, strict=True):
                if decay is not None:
                    group["weight_decay"] = decay
                with torch.no_grad():
                    for parameter, value in zip(group["params"], values, strict=True):
                        parameter.copy_(value)
        for entry in self._optimizer.state.values():
            if "step" in entry:
                entry["step"] = entry["step"] * 0
        return None

    step.hooked = True  # type: ignore[attr-defined]  # the user's own step runs the step hooks
