"""Which hosts a job should take, with what sizes: from measured models to a line to paste."""
