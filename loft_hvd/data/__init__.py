"""The data room: who holds which sample, who computes it, and how it reaches the training loop."""
