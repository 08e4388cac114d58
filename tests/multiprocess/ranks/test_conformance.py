"""Horovod's ranks pass the conformance suite, with the bits that local ranks give."""

from __future__ import annotations

import horovod.torch as hvd
import pytest
import torch

from loft_hvd.config import config
from loft_hvd.transport.base import Channel
from loft_hvd.transport.conformance import CHECKS
from loft_hvd.transport.horovod import HorovodTransport
from loft_hvd.transport.lanes import Needs, choose_lane
from loft_hvd.transport.local import run_ranks
from loft_hvd.transport.shared_memory import SharedMemoryLane
from tests.support.fingerprint import RULES, fingerprint, train


@pytest.mark.parametrize("check", CHECKS)
def test_horovod_conforms(check: str) -> None:
    CHECKS[check](HorovodTransport())


@pytest.mark.skipif(
    hvd.size() == 1 or config().mesh != "auto" or config().lane != "auto",
    reason="another lane is wanted, or one rank is alone",
)
def test_ranks_of_one_host_share_memory() -> None:
    ends = choose_lane(Channel(HorovodTransport(), "test"), Needs("cpu"))
    assert isinstance(ends, SharedMemoryLane)
    before = ends.memory.num_posted
    train(HorovodTransport(), RULES[0], num_steps=2)
    assert ends.memory.num_posted > before


@pytest.mark.parametrize("rule", RULES)
def test_rules_on_shard_owners_give_the_bits_of_local_ranks(rule: str) -> None:
    local = run_ranks(hvd.size(), lambda transport: train(transport, rule, num_steps=20))
    mine = train(HorovodTransport(), rule, num_steps=20)
    assert fingerprint(mine) == fingerprint(local[hvd.rank()])
    assert torch.equal(mine, local[0])
