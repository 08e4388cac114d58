"""Tests that every rank of a job runs alike; started by ``tests/multiprocess/test_suite.py``.

By hand: ``horovodrun --gloo -np 3 python -m pytest tests/multiprocess/ranks``.
"""
