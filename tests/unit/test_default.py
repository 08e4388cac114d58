"""Which ranks a call takes when a script names none."""

from __future__ import annotations

import pytest

import loft_hvd as loft
from loft_hvd.errors import UsageError
from tests.support.worlds import environment


@pytest.mark.parametrize(
    ("told", "message"),
    [({"HOROVOD_SIZE": "4"}, "one of 4 ranks"), ({"HOROVOD_ELASTIC": "1"}, "an elastic rank")],
)
def test_one_of_several_ranks_never_trains_alone(told: dict[str, str], message: str) -> None:
    with environment(**told), pytest.raises(UsageError, match=f"{message}.*call hvd.init"):
        loft.Balancer(8)
