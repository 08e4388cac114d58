"""From a run log to words."""
