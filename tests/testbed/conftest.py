"""Tests over several hosts: skipped, with the reason, where this machine cannot make them."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.testbed.hosts import Testbed, why_not


@pytest.fixture(scope="session")
def _testbed() -> Iterator[Testbed]:
    if reason := why_not():
        pytest.skip(reason)
    testbed = Testbed(f"test{os.getpid()}")
    try:
        yield testbed
    finally:
        testbed.down()


@pytest.fixture
def testbed(_testbed: Testbed) -> Testbed:
    """A testbed of this session's own; a test says ``testbed.up(num_hosts, ...)`` first."""
    return _testbed
