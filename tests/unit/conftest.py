"""Fixtures that several unit tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from loft_hvd._native import extension
from loft_hvd.aggregation import compute
from loft_hvd.pipeline.allreduce import forget_reductions
from loft_hvd.transport import lanes


@pytest.fixture(params=["extension", "plain torch"])
def both_paths(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the test with the extension, and once more in plain torch."""
    if request.param == "plain torch":
        monkeypatch.setattr(compute, "extension", lambda: None)
        monkeypatch.setattr(compute, "warn_once", lambda: None)
    elif extension() is None:
        pytest.skip("the C++ extension is not built")


@pytest.fixture(autouse=True)
def no_world_stays_open(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Close what a test's ranks have opened for their lanes, as the end of an engine does.

    Before what the test has replaced is put back: no thread of it may meet the original.
    """
    yield
    forget_reductions()
    for world in list(lanes._worlds()):
        lanes._close(world)
