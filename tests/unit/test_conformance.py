"""Every transport passes the conformance suite, and the local one under every scripted fault."""

from __future__ import annotations

import re

import pytest
import torch

from loft_hvd.errors import ArgumentError, LoftError, PeerError, TransportError
from loft_hvd.errors import TransportTimeoutError as Late
from loft_hvd.transport.conformance import CHECKS
from loft_hvd.transport.local import Faults, LocalTransport, LocalWorld, _LocalWork, run_ranks
from tests.support.fingerprint import RULES, train

HARMLESS = {
    "delays": Faults(seed=1, max_delay_s=0.0004),
    "reordering": Faults(seed=2, reorder=True),
    "slow rank": Faults(seed=3, slow={1: 0.0003}),
    "all three": Faults(seed=4, max_delay_s=0.0002, reorder=True, slow={2: 0.0002}),
}


@pytest.mark.every(2)
@pytest.mark.parametrize(
    "world_size", [1, 2, 3, 5, 8, *(pytest.param(n, marks=pytest.mark.long) for n in (4, 6, 7))]
)
def test_local_ranks_conform(world_size: int) -> None:
    def work(transport: LocalTransport) -> None:
        for check in CHECKS.values():
            check(transport)

    run_ranks(world_size, work)


BY_FAULT = pytest.mark.parametrize(
    "fault",
    [pytest.param(n, marks=() if n == "all three" else pytest.mark.long) for n in HARMLESS],
)


@BY_FAULT
def test_local_ranks_conform_under_faults(fault: str) -> None:
    def work(transport: LocalTransport) -> None:
        for name, check in CHECKS.items():
            if name != "polling":
                check(transport)

    run_ranks(3, work, faults=HARMLESS[fault])


class Broken(LocalTransport):
    """A transport with one of the faults that the suite must find."""

    fault = ""

    def alltoall(
        self, send: torch.Tensor, recv: torch.Tensor, *, name: str, skips_own: bool = False
    ) -> _LocalWork:
        if self.fault == "bfloat16 by way of float16" and send.dtype == torch.bfloat16:
            send = send.half().bfloat16()
        if self.fault == "shards reversed":
            send = send.view(self.world_size, -1).flip(0).reshape(-1)
        if self.fault == "output elsewhere":
            recv = recv.clone()
        work = super().alltoall(send, recv, name=name, skips_own=skips_own)
        if self.fault == "input written":
            send.add_(1)
        return work

    def allgather(self, send: torch.Tensor, recv: torch.Tensor, *, name: str) -> _LocalWork:
        if self.fault == "large results reversed" and recv.nbytes > 2**20:
            send = send.flip(0)
        return super().allgather(send, recv, name=name)

    def allreduce(self, buffer: torch.Tensor, *, name: str) -> _LocalWork:
        if self.fault == "sum differs by rank" and self.rank:
            buffer.mul_(2)
        return super().allreduce(buffer, name=name)

    def broadcast(self, buffer: torch.Tensor, *, name: str) -> _LocalWork:
        return super().broadcast(buffer.clone() if self.fault == "no root" else buffer, name=name)


@pytest.mark.parametrize(
    "fault",
    [
        "bfloat16 by way of float16",
        "shards reversed",
        "output elsewhere",
        "input written",
        "large results reversed",
        "sum differs by rank",
        "no root",
    ],
)
def test_the_suite_finds_what_is_broken(fault: str) -> None:
    def work(transport: LocalTransport) -> None:
        broken = Broken(transport._world, transport.rank)
        broken.fault = fault
        for check in CHECKS.values():
            check(broken)

    with pytest.raises(TransportError, match="conformance: rank"):
        run_ranks(3, work)


def steps_200(transport: LocalTransport) -> torch.Tensor:
    return train(transport, "trimmed_mean", num_steps=200)


@pytest.fixture(scope="module")
def calm() -> torch.Tensor:
    """Return what three ranks end with when nothing goes wrong."""
    return run_ranks(3, steps_200)[0]


@BY_FAULT
def test_200_steps_under_harmless_faults_give_the_same_bits(fault: str, calm: torch.Tensor) -> None:
    for values in run_ranks(3, steps_200, faults=HARMLESS[fault]):
        assert torch.equal(values, calm)


@pytest.mark.parametrize("rule", RULES)
def test_faults_do_not_change_what_a_rule_gives(rule: str) -> None:
    def steps(transport: LocalTransport) -> torch.Tensor:
        return train(transport, rule, num_steps=5)

    calm = run_ranks(4, steps)
    for values in run_ranks(4, steps, faults=HARMLESS["all three"]):
        assert torch.equal(values, calm[0])


def outcomes(faults: Faults) -> list[LoftError]:
    """Return how each of three ranks ends 200 steps under some faults."""

    def steps(transport: LocalTransport) -> LoftError:
        with pytest.raises(LoftError) as caught:
            train(transport, "median", num_steps=200)
        return caught.value

    return run_ranks(3, steps, faults=faults)


def test_a_failing_operation_ends_all_ranks_with_its_name() -> None:
    first, second, third = outcomes(Faults(fail={1: 500}))
    assert "rank 1: its operation 500" in str(second)
    for error in (first, third):
        assert isinstance(error, PeerError)
        assert "rank 1 has failed: TransportError: bucket" in str(error)
        assert "operation 500" in str(error)


def test_a_rank_that_stops_is_named_when_the_others_have_waited_long_enough(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("LOFT_HVD_TIMEOUT_S", "1")
    from loft_hvd.config import config

    config.cache_clear()
    try:
        first, stopped, third = outcomes(Faults(stop={1: 500}))
    finally:
        monkeypatch.undo()
        config.cache_clear()
    # Its engine's thread was the one to stop, and its own waited for that; or else its own stopped.
    assert isinstance(stopped, Late | PeerError)
    assert re.search(
        r"rank 1 of 3 waited 1 s for bucket|rank 1 was told to stop at its operation "
        r"(500|501, 'loft\.\w+\.evidence')",  # by its own thread, beside the engine's 500th
        str(stopped),
    )
    for error in (first, third):
        assert isinstance(error, Late)
        assert "ranks [1] have not come to it" in str(error)
        assert "for bucket" in str(error)


def test_the_same_seed_gives_the_same_faults() -> None:
    one, same, other = Faults(5, 1.0), Faults(5, 1.0), Faults(6, 1.0)
    drawn = [one.delay_s(rank, number) for rank in range(3) for number in range(100)]
    assert drawn == [same.delay_s(rank, number) for rank in range(3) for number in range(100)]
    assert drawn != [other.delay_s(rank, number) for rank in range(3) for number in range(100)]
    assert all(0 <= delay < 1 for delay in drawn)
    assert len(set(drawn)) == len(drawn)


def test_reordering_ends_a_later_operation_first() -> None:
    world = LocalWorld(1, Faults(seed=0, reorder=True))
    transport = world.transport(0)
    works = [transport.allreduce(torch.zeros(1), name=str(number)) for number in range(8)]
    ended: list[int] = []
    for _ in range(30):
        ended += [n for n, work in enumerate(works) if n not in ended and work.done()]
    assert sorted(ended) == list(range(8))
    assert ended != sorted(ended)


def test_a_slow_rank_is_late_for_all() -> None:
    now = [0.0]
    world = LocalWorld(2, Faults(slow={1: 2.0}), clock=lambda: now[0])
    works = [world.transport(rank).allreduce(torch.zeros(1), name="x") for rank in (0, 1)]
    for seconds, is_done in ((0.0, False), (1.9, False), (2.0, True)):
        now[0] = seconds
        assert [work.done() for work in works] == [is_done, is_done]


@pytest.mark.parametrize(
    "make",
    [
        lambda: Faults(max_delay_s=-1.0),
        lambda: Faults(slow={0: float("nan")}),
        lambda: Faults(stop={0: -1}),
        lambda: LocalWorld(2, Faults(slow={2: 1.0})),
    ],
)
def test_faults_are_checked(make: object) -> None:
    with pytest.raises(ArgumentError, match="Faults"):
        make()  # type: ignore[operator]  # a lambda
