"""Which ranks a call takes when a script names none."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

import loft_hvd as loft
from loft_hvd.errors import UsageError
from loft_hvd.transport.torch_distributed import TorchDistributedTransport
from tests.support.worlds import environment


@pytest.mark.parametrize(
    ("told", "message"),
    [({"HOROVOD_SIZE": "4"}, "one of 4 ranks"), ({"HOROVOD_ELASTIC": "1"}, "an elastic rank")],
)
def test_one_of_several_ranks_never_trains_alone(told: dict[str, str], message: str) -> None:
    with (
        environment(**told),
        pytest.raises(UsageError, match=f"{message}.*call one of them before"),
    ):
        loft.Balancer(8)


def test_ranks_on_another_backend_have_one_gloo_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch keeps each group that it made: one for every ddp_hook would add up."""
    made: list[object] = []

    def new_group(ranks: list[int], *, backend: str) -> object:
        made.append((ranks, backend))
        return object()

    fake = SimpleNamespace(
        is_available=lambda: True,
        is_initialized=lambda: True,
        group=SimpleNamespace(WORLD=object()),
        Backend=SimpleNamespace(GLOO="gloo"),
        get_backend=lambda _: "nccl",
        get_process_group_ranks=lambda _: [0, 1],
        get_rank=lambda _: 0,
        get_world_size=lambda: 1,  # a launcher has told of all
        new_group=new_group,
    )
    monkeypatch.setattr("loft_hvd.transport.torch_distributed.dist", fake)
    for _ in range(3):
        TorchDistributedTransport()
    assert made == [([0, 1], "gloo")]
