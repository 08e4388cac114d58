"""Runs a case on hosts of this machine, as root: prints a table, its goals, and keeps all figures.

python -m benchmarks.testbed serial --json benchmarks/results/testbed-serial.json

The exit status is 1 where a goal is missed. ``tests/testbed/README.md`` says what the hosts are.
"""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import asdict
from pathlib import Path

from benchmarks.testbed.cases import CASES, Options
from loft_hvd.bench.record import write_record
from tests.testbed.hosts import Testbed, why_not


def main() -> int:
    """Run what the command line says."""
    cases = "".join(f"\n  {name:10} {case.__doc__}" for name, case in CASES.items())
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.testbed",
        epilog=f"cases:{cases}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("case", choices=CASES)
    parser.add_argument("--epochs", type=int, help="two at least; jobs for cold")
    parser.add_argument("--ratio", type=float, default=2.3, help="worst fetch over worst computing")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    if given.epochs is not None and given.epochs < 2:
        parser.error(f"--epochs {given.epochs}: later epochs are compared, so two at least")
    if reason := why_not():
        parser.error(reason)
    testbed = Testbed(os.environ.get("TESTBED_NAME", f"bench{os.getpid()}"))
    try:
        record = CASES[given.case](testbed, Options(given.epochs, given.ratio))
    finally:
        testbed.down()
    goals = record.pop("goals")
    for goal in goals:
        word = "met" if goal.is_met else "MISSED"
        sys.stdout.write(f"{word:6} {goal.what}: {goal.value:.3g}, at most {goal.limit:g}\n")
    if given.json:
        told = {"case": given.case, "goals": [asdict(goal) for goal in goals]}
        # Of a module that is run, sys.argv[0] is a path of this machine.
        command = ["python", "-m", "benchmarks.testbed", *sys.argv[1:]]
        write_record(given.json, told | record, command=command)
    return 0 if all(goal.is_met for goal in goals) else 1


if __name__ == "__main__":
    sys.exit(main())
