"""From gradients on every rank to one aggregated gradient, bucket by bucket."""
