from __future__ import annotations

import inspect
import pickle

import pytest

from loft_hvd import errors
from loft_hvd.errors import LoftError

_BUILTIN = {
    "LoftError": Exception,
    "ArgumentError": ValueError,
    "AggregationError": ValueError,
    "PlanError": ValueError,
    "DataError": ValueError,
    "MismatchError": ValueError,
    "ArgumentTypeError": TypeError,
    "UsageError": AssertionError,
    "AllocationError": MemoryError,
    "AuditError": Exception,
    "MissingDependencyError": ImportError,
    "TransportError": RuntimeError,
    "TransportTimeoutError": TimeoutError,
    "PeerError": RuntimeError,
}


def test_every_error_is_listed_and_exported() -> None:
    classes = {name for name, value in vars(errors).items() if inspect.isclass(value)}
    assert classes == set(_BUILTIN) == set(errors.__all__)


@pytest.mark.parametrize("name", sorted(_BUILTIN))
def test_error_is_caught_as_loft_error_and_as_its_builtin(name: str) -> None:
    error = getattr(errors, name)
    assert issubclass(error, LoftError)
    assert issubclass(error, _BUILTIN[name])


@pytest.mark.parametrize("name", sorted(_BUILTIN))
def test_error_survives_a_trip_between_processes(name: str) -> None:
    error = getattr(errors, name)("f=2 is too large for 4 ranks; use f <= 1")
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert str(copy) == str(error)
