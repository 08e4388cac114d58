"""What is connected to other ranks refuses to be copied."""

from __future__ import annotations

from typing import Any

from loft_hvd.errors import UsageError

__all__ = ["NeverCopied"]


class NeverCopied:
    """Base of what is connected to other ranks, of which a copy would be a second one here."""

    _in_place_of_a_copy = ""  # the way out

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse to be copied or pickled, by ``UsageError``."""
        raise UsageError(
            f"{type(self).__name__}: it is connected to the other ranks, so it cannot be copied or "
            f"pickled; {self._in_place_of_a_copy}"
        )
