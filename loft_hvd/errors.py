"""Every error that loft_hvd raises on purpose.

LoftError
├── ArgumentError (also ValueError)       a value outside its limits
│   ├── AggregationError                  a rule that does not fit the rows it was given
│   ├── PlanError                         batch sizes that cannot be, or are not, a plan
│   ├── DataError                         data and its placement, sampler or loader do not fit
│   └── MismatchError                     ranks that disagree; names the rank and the field
├── ArgumentTypeError (also TypeError)    a value of the wrong type or dtype
├── UsageError (also AssertionError)      calls in an order that cannot work, as Horovod raises it
├── AllocationError (also MemoryError)     no memory for a result
├── AuditError                            a rank's work for others is not what they compute from it
├── MissingDependencyError (also ImportError)  an optional part that is not installed or not built
└── TransportError (also RuntimeError)    communication failed
    ├── TransportTimeoutError (also TimeoutError)  a wait reached its limit
    └── PeerError                         another rank failed; names it

Horovod's own ``HorovodInternalError`` and ``HostsUpdatedInterrupt`` are never wrapped: elastic
training restores and retries on them, and must not do so for a mistake in a script.
"""

from __future__ import annotations

__all__ = [
    "AggregationError",
    "AllocationError",
    "ArgumentError",
    "ArgumentTypeError",
    "AuditError",
    "DataError",
    "LoftError",
    "MismatchError",
    "MissingDependencyError",
    "PeerError",
    "PlanError",
    "TransportError",
    "TransportTimeoutError",
    "UsageError",
]


class LoftError(Exception):
    """Base class of every error that loft_hvd raises on purpose."""


# Each also is what Python itself would raise, so that a script's own ``except ValueError`` holds.


class ArgumentError(LoftError, ValueError):
    """A value is outside its limits."""


class ArgumentTypeError(LoftError, TypeError):
    """A value has the wrong type or dtype."""


class AggregationError(ArgumentError):
    """A rule does not fit the rows it was given."""


class PlanError(ArgumentError):
    """Batch sizes cannot be, or are not, a plan."""


class DataError(ArgumentError):
    """A placement, sampler or loader does not fit its data set."""


class MismatchError(ArgumentError):
    """Ranks disagree about something that must be equal everywhere."""


class UsageError(LoftError, AssertionError):
    """Calls came in an order that cannot work."""

    # Horovod raises an AssertionError for the same mistakes; scripts and tests may expect that.


class AllocationError(LoftError, MemoryError):
    """There is no memory for a result, or for a copy of what was given."""


class AuditError(LoftError):
    """A rank's work as the owner of a shard differs from what another rank has computed."""


class MissingDependencyError(LoftError, ImportError):
    """An optional part is not installed or not built."""


class TransportError(LoftError, RuntimeError):
    """Communication between ranks failed."""


class TransportTimeoutError(TransportError, TimeoutError):
    """A wait for other ranks reached its limit."""


class PeerError(TransportError):
    """Another rank failed; the message names it."""
