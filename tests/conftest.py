"""Settings of the whole test suite."""

from __future__ import annotations

import gc
import os
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import settings

# The same examples on every machine, so that a failure belongs to the change that shows it. To look
# for new ones: pytest --hypothesis-profile=explore tests/property
settings.register_profile("fixed", derandomize=True, deadline=None)
settings.register_profile("explore", max_examples=2000, deadline=None)
settings.load_profile("fixed")

# Processes that tests start take the imports of torch without collections of garbage.
_IMPORTS = str(Path(__file__).parent / "support" / "imports")
_PATHS = os.environ.get("PYTHONPATH", "").split(os.pathsep)
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, dict.fromkeys([_IMPORTS, *_PATHS])))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave cases of tests marked `every` to the next larger run; whole claims are long, too."""
    cases: Counter[str] = Counter()
    for item in items:
        test = item.nodeid.split("[")[0]
        sampled = item.get_closest_marker("every")
        if sampled is not None and cases[test] % sampled.args[0] != 0:
            is_long = item.get_closest_marker("long") is not None
            item.add_marker(pytest.mark.whole if is_long else pytest.mark.long)
        cases[test] += 1
        if item.get_closest_marker("whole") is not None:
            item.add_marker(pytest.mark.long)


def pytest_collection_finish() -> None:
    """Leave thousands of tests, which stay to the end, out of what the collector looks through."""
    gc.collect()
    gc.freeze()
