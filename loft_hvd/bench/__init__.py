"""Benchmarks: kernels, all-reduces, training steps."""
