"""Which rank has failed, told over a TCP connection from each rank to rank 0, and what follows."""
