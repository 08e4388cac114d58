"""Random calls of the kernels give the bits of the definition."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import loft_hvd as loft
from loft_hvd._native import extension
from tests.faults.kernel_cases import draw_case, wrong_in

pytestmark = [
    pytest.mark.skipif(extension() is None, reason="the C++ extension is not built"),
    pytest.mark.filterwarnings("ignore"),
]


def check(*, num_cases: int, first: int) -> None:
    with np.errstate(all="ignore"):
        cases = map(draw_case, range(first, first + num_cases))
        wrong = [f"{case}: {text}" for case in cases if (text := wrong_in(case))]
    assert wrong == [], "\n".join(wrong[:3])


def test_random_cases_are_right() -> None:
    check(num_cases=800, first=0)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_random_cases_are_right_for_long() -> None:
    check(num_cases=20_000, first=10_000)  # 10^6: python -m tests.faults.kernel_cases 1000000


def test_one_wrong_bit_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    real = loft.aggregate

    def aggregate(*arguments: Any, **options: Any) -> Any:
        result = torch.as_tensor(real(*arguments, **options))
        result.view(torch.uint8)[-1] ^= 1
        return result

    monkeypatch.setattr(loft, "aggregate", aggregate)
    cases = [
        case for case in map(draw_case, range(200)) if not case.every and case.gradients.numel()
    ]
    found = [text for case in cases if (text := wrong_in(case))]
    assert len(found) > 0.9 * len(cases)  # the rest are refused
