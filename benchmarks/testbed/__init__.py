"""Policies, stores and faults on the hosts of the testbed: ``python -m benchmarks.testbed CASE``.

``__main__.py`` has the commands, ``cases.py`` what they compare. ``clusters.py`` makes the hosts
and runs jobs there. Every host runs ``contest.py``, or ``survivors.py`` where one is to die, on the
data of ``shares.py``.
"""
