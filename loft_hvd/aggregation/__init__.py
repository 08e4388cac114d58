"""Robust aggregation of one gradient row per worker into one row."""
