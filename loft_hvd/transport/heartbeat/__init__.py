"""A small TCP connection from each rank to rank 0, which names the rank that failed."""
