"""Settings of the whole test suite."""

from __future__ import annotations

from hypothesis import settings

# The same examples on every machine, so that a failure belongs to the change that shows it. To look
# for new ones: pytest --hypothesis-profile=explore tests/property
settings.register_profile("fixed", derandomize=True, deadline=None)
settings.register_profile("explore", max_examples=2000, deadline=None)
settings.load_profile("fixed")
