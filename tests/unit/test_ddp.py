"""What ``ddp_hook`` refuses; under DDP it runs in multiprocess/test_torch_distributed.py."""

from __future__ import annotations

import pytest

import loft_hvd as loft
from loft_hvd.errors import ArgumentTypeError, UsageError


def test_ddp_hook_checks_what_it_is_given() -> None:
    with pytest.raises(UsageError, match="init_process_group"):
        loft.ddp_hook(loft.Median())
    with pytest.raises(ArgumentTypeError, match=r"rule='median' is of type str; pass one such as"):
        loft.ddp_hook("median")  # type: ignore[arg-type]  # that is the point
