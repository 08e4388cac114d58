"""Settings of the whole test suite."""

from __future__ import annotations

import pytest
from hypothesis import settings

# The same examples on every machine, so that a failure belongs to the change that shows it. To look
# for new ones: pytest --hypothesis-profile=explore tests/property
settings.register_profile("fixed", derandomize=True, deadline=None)
settings.register_profile("explore", max_examples=2000, deadline=None)
settings.load_profile("fixed")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Whole claims are long, whether their tests say so or not."""
    for item in items:
        if item.get_closest_marker("whole") is not None:
            item.add_marker(pytest.mark.long)
