"""The order of what threads queue on a GPU, on streams that only keep account."""

from __future__ import annotations

import pytest

from loft_hvd.pipeline.streams import StreamOrder, current_stream
from tests.support.streams import FakeStream, FakeStreams


def test_a_cpu_has_no_streams() -> None:
    assert current_stream("cpu") is None
    order = StreamOrder("cpu")
    for step in (order.take, order.follow, order.take):
        step()


def test_work_follows_that_of_all_who_had_the_values_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    streams, order = FakeStreams(monkeypatch), StreamOrder("a GPU")
    first, second, reader = FakeStream(), FakeStream(), FakeStream()
    for stream, what in ((first, "pack"), (second, "aggregate")):
        streams.current = stream
        order.take()
        stream.queue(what)
    streams.current = reader
    order.follow()
    assert reader.before == {"pack", "aggregate"}
    reader.queue("read")  # who follows has nothing that others wait for
    streams.current = first
    order.take()
    assert first.before == {"pack", "aggregate"}


def test_on_one_stream_nothing_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    streams, order = FakeStreams(monkeypatch), StreamOrder("a GPU")
    monkeypatch.setattr(FakeStream, "wait_stream", lambda *_: pytest.fail("it waits for itself"))
    streams.current = FakeStream()
    for step in (order.take, order.take, order.follow):
        step()
