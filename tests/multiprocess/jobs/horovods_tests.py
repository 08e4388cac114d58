"""Runs tests of Horovod's own optimizer: ``horovods_tests.py SOURCE ours|theirs TEST..``.

With "ours" ``hvd.DistributedOptimizer`` is ``loft_hvd``'s while they run.
"""

from __future__ import annotations

import importlib
import sys
import unittest
import unittest.mock
from pathlib import Path

import torch


def main(source: Path, whose: str, names: list[str]) -> int:
    """Return 0 where no test fails; each result is printed."""
    sys.modules.setdefault("mock", unittest.mock)  # the package of that name, in Python since 3.3
    sys.path.insert(0, str(source / "test" / "parallel"))
    # It knows only matrices, and these tests give each optimizer of torch's vectors, too.
    if muon := getattr(torch.optim, "Muon", None):
        muon.__module__ = "left out"
    theirs = importlib.import_module("test_torch")
    if whose == "ours":
        import loft_hvd as loft

        theirs.hvd.DistributedOptimizer = loft.DistributedOptimizer
    num_wrong = 0
    for name in names:
        result = unittest.TestResult()
        theirs.TorchTests(name).run(result)
        said = "".join(text for _, text in (*result.failures, *result.errors))
        skipped = [reason for _, reason in result.skipped]
        num_wrong += not result.wasSuccessful()
        sys.stdout.write(f"{name}: {said or skipped or 'passed'}\n")
        sys.stdout.flush()
    return num_wrong


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2], sys.argv[3:]))
