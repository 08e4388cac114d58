"""Train with Horovod across unequal machines and unreliable workers."""

__version__ = "0.1.0"
