"""What a script wants done to each bucket of a rank's gradients before it is sent."""

from __future__ import annotations

from collections import OrderedDict

from torch import Tensor
from torch.utils.hooks import RemovableHandle

from loft_hvd.pipeline.buckets import Bucket
from loft_hvd.pipeline.settings import OutgoingHook

__all__ = ["OutgoingHooks"]


class OutgoingHooks:
    """An optimizer's outgoing hooks; they outlive its reducers.

    Horovod calls the function of ``hvd.elastic.run`` anew in every world, so a hook that it
    registers would run once more in each, and on ranks that join only once. Those end with the
    world they were added in; those from before the first world stay.
    """

    def __init__(self) -> None:
        self._hooks: OrderedDict[int, OutgoingHook] = OrderedDict()
        self._lasting: frozenset[int] | None = None  # those from before the first world

    def add(self, hook: OutgoingHook) -> RemovableHandle:
        """Call a hook from now on, after those there are; ``remove()`` of the handle ends that."""
        handle = RemovableHandle(self._hooks)
        self._hooks[handle.id] = hook
        return handle

    def begin_world(self) -> None:
        """Drop the hooks that were added in the world before."""
        if self._lasting is None:
            self._lasting = frozenset(self._hooks)
        for key in self._hooks.keys() - self._lasting:
            del self._hooks[key]

    def __bool__(self) -> bool:
        return bool(self._hooks)

    def call(self, bucket: Bucket, values: Tensor) -> None:
        """Let every hook look at, or change, the values of a bucket, [numel]."""
        for hook in list(self._hooks.values()):  # one may take itself away
            hook(bucket, values)
