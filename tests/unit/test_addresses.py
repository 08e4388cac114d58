"""A rank listens where the other hosts of its job reach it, and nowhere else."""

from __future__ import annotations

import pytest

from loft_hvd.transport.addresses import listening_addresses, own_addresses

ROUTES = {"10.0.0.6": "10.0.0.5", "172.17.0.1": "172.17.0.1", "192.168.1.6": "192.168.1.5"}


@pytest.mark.parametrize(
    ("others", "options", "listening"),
    [
        (["10.0.0.6"], {"is_one_host": True}, ["127.0.0.1"]),
        (["10.0.0.6"], {"of_interface": ["10.1.0.5"]}, ["10.1.0.5"]),
        (["10.0.0.6"], {}, ["10.0.0.5"]),
        # A bridge of containers, which every host has at the same address.
        (["10.0.0.6", "172.17.0.1"], {}, ["10.0.0.5"]),
        (["10.0.0.6", "192.168.1.6"], {}, ["10.0.0.5", "192.168.1.5"]),
        (["10.9.9.9"], {}, ["10.0.0.5", "172.17.0.1"]),  # no way there: all there are
        (["10.0.0.5", "172.17.0.1"], {}, ["10.0.0.5", "172.17.0.1"]),  # containers of one host
    ],
)
def test_a_rank_listens_where_the_engine_does(
    others: list[str], options: dict[str, object], listening: list[str]
) -> None:
    found = listening_addresses(
        ["10.0.0.5", "172.17.0.1"],
        others,
        **{"is_one_host": False, **options},  # type: ignore[arg-type]
        source_for=lambda address: ROUTES.get(address, ""),
    )
    assert found == listening


def test_loopback_is_an_address_only_by_its_name() -> None:
    assert not any(address.startswith("127.") for address in own_addresses())
    assert own_addresses("lo") == ["127.0.0.1"]
