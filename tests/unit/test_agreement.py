"""Ranks compare what must be equal: in silence, or with an error that names rank and field."""

from __future__ import annotations

import pytest

from loft_hvd.errors import MismatchError
from loft_hvd.transport.agreement import check_agreement, odd_ones
from loft_hvd.transport.base import Channel
from loft_hvd.transport.local import LocalTransport, run_ranks


@pytest.mark.parametrize("world_size", [1, 2, 3, 5, 8])
def test_agreement_passes_in_silence(world_size: int) -> None:
    def work(transport: LocalTransport) -> None:
        check_agreement(Channel(transport, "n", 10), {"a": "1", "b": "2"}, what="it")

    run_ranks(world_size, work)


@pytest.mark.parametrize(
    ("odd_fields", "message"),
    [
        ({"a": "1", "b": "3"}, r"it: b differs on ranks \[2\]"),
        ({"a": "1"}, r"it: ranks \[2\] describe other things"),
        ({"a": "\udcff", "b": "2"}, r"it: a differs on ranks \[2\]"),  # no text in UTF-8
        ({"a": "1", "c": "2"}, r"it: ranks \[2\] describe other things"),
    ],
)
def test_disagreement_names_rank_and_field_on_every_rank(
    odd_fields: dict[str, str], message: str
) -> None:
    def work(transport: LocalTransport) -> None:
        fields = odd_fields if transport.rank == 2 else {"a": "1", "b": "2"}
        with pytest.raises(MismatchError, match=message):
            check_agreement(Channel(transport, "n", 10), fields, what="it")

    run_ranks(4, work)


@pytest.mark.parametrize(
    ("values", "odd"), [([5, 5, 7], [2]), ([7, 5, 5], [0]), ([5, 7], [1]), ([7, 5, 5, 7], [1, 2])]
)
def test_the_most_common_value_is_right_and_in_a_tie_the_lowest_ranks(
    values: list[float], odd: list[int]
) -> None:
    assert odd_ones(values) == odd
