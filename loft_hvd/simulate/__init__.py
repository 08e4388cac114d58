"""The simulator: real controller, policies and sampler on a virtual clock."""
