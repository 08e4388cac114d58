"""Our rules give ByzFL's results: 2,500 random inputs a rule. ``make test-all`` brings ByzFL along.

In float64: its distances come from products of rows, which in float32 lose what rows differ by.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import loft_hvd as loft


def _import_rules() -> Any:
    """Return ByzFL's rules without its own ``__init__``, which imports what its examples need."""
    spec = importlib.util.find_spec("byzfl")
    if spec is None:
        pytest.skip("no byzfl here; make test-all compares with it", allow_module_level=True)
    package = types.ModuleType("byzfl")
    package.__path__ = list(spec.submodule_search_locations or ())
    sys.modules["byzfl"] = package
    return importlib.import_module("byzfl.aggregators")


byzfl = _import_rules()

_NUM_INPUTS = 2500  # a rule
# Relative to the largest value of the input. Of one that is 400 times its result ByzFL's geometric
# median lies 1.6e-5 of the result away, however many steps it takes, and its sum of distances is
# the larger one.
_MOST = 1e-5


def _trimmed_after(name: str) -> Callable[[Tensor, int], Tensor]:
    def call(rows: Tensor, f: int) -> Tensor:
        found: Tensor = byzfl.TrMean(f)(getattr(byzfl, name)(f=f)(rows.clone()))
        return found

    return call


class _Torch:
    """torch for ByzFL's CAF, which draws a direction and takes one step of the power method.

    What is drawn is the direction to which many steps lead. Rows that have lost all weight lie on
    the mean: ByzFL measures the others' distances by the largest of all, so one that lies far away
    makes it go on for ever.
    """

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def randn(self, *_: Any, **__: Any) -> Tensor:
        caller = sys._getframe(1).f_locals
        away, left = caller["diffs"], caller["c"]
        away[left == 0] = 0.0
        found: Tensor = torch.linalg.svd(left.sqrt()[:, None] * away).Vh[0]
        return found


def _caf(rows: Tensor, f: int) -> Tensor:
    module = importlib.import_module("byzfl.aggregators.aggregators")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "check_vectors_type", lambda vectors: (_Torch(), vectors))
        patch.setattr(module, "torch", _Torch())
        found: Tensor = byzfl.CAF(f)(rows)
    return found


def _geometric_median(rows: Tensor, f: int) -> Tensor:
    # By default it takes three steps from zero; the rule is where they lead.
    found: Tensor = byzfl.GeometricMedian(nu=1e-12, T=1500)(rows)
    return found


_PAIRS: dict[str, tuple[Callable[[int], loft.Rule], Callable[[Tensor, int], Tensor]]] = {
    "nnm": (lambda f: loft.NNM(loft.TrimmedMean(f)), _trimmed_after("NNM")),
    "arc": (lambda f: loft.ARC(loft.TrimmedMean(f)), _trimmed_after("ARC")),
    "multi_krum": (loft.MultiKrum, lambda rows, f: byzfl.MultiKrum(f)(rows)),
    "geometric_median": (loft.GeometricMedian, _geometric_median),
    "caf": (loft.CAF, _caf),
}


def _random_input(seed: int) -> tuple[Tensor, int]:
    """Return rows [n, d] of 3 to 16 workers, and an f that fits."""
    generator = np.random.default_rng(seed)
    num_rows = int(generator.integers(3, 17))
    f = int(generator.integers(1, (num_rows - 1) // 2 + 1))
    numel = int(generator.integers(2, 40))
    rows = generator.normal(size=(num_rows, numel)) + generator.normal(size=numel)
    wrong = generator.integers(0, f + 1)
    rows[:wrong] *= 10 ** generator.uniform(-1, 3)
    return torch.from_numpy(rows * 10 ** generator.uniform(-3, 3)), f


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", _PAIRS)
def test_results_are_those_of_byzfl(name: str) -> None:
    ours, theirs = _PAIRS[name]
    worst, at = 0.0, -1
    for seed in range(_NUM_INPUTS):
        rows, f = _random_input(seed)
        away = loft.aggregate(rows, ours(f)) - theirs(rows, f)
        found = float(away.abs().max() / rows.abs().max())
        if not found <= worst:
            worst, at = found, seed
    assert worst < _MOST, f"{name}: differs by {worst:.2g}, seed {at}"
