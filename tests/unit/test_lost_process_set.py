"""A process set that Horovod has lost with its world."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from loft_hvd.config import Config
from loft_hvd.transport.horovod import HorovodTransport


class _InternalError(RuntimeError):
    """Stands for Horovod's own, which ``hvd.elastic.run`` recovers from."""


def _transport_that_finds(message: str) -> HorovodTransport:
    def ask() -> int:
        raise ValueError(message)

    transport = HorovodTransport.__new__(HorovodTransport)
    transport.__dict__["_set"] = SimpleNamespace(rank=ask, size=ask)
    transport.__dict__["_ops"] = SimpleNamespace(HorovodInternalError=_InternalError)
    return transport


@pytest.mark.parametrize("ask", ["rank", "world_size"])
@pytest.mark.parametrize(
    ("is_elastic", "message", "raised"),
    [
        (True, "Process set does not exist or has not been registered.", _InternalError),
        (False, "Process set does not exist or has not been registered.", ValueError),
        (True, "Horovod has not been initialized; use hvd.init().", ValueError),
    ],
    ids=["lost", "not elastic", "not begun"],
)
def test_an_elastic_job_recovers_from_a_set_that_is_gone_but_not_from_mistakes(
    is_elastic: bool,
    message: str,
    raised: type[Exception],
    ask: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("loft_hvd.transport.horovod.config", lambda: Config(is_elastic=is_elastic))
    with pytest.raises(raised, match=message.split(";", maxsplit=1)[0]):
        getattr(_transport_that_finds(message), ask)
