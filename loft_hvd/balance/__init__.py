"""Who computes how much: latency models, search, policies, plans."""
