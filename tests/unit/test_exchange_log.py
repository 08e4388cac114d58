"""The run log says how long gradients travel, and how fast links are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import loft_hvd as loft
from loft_hvd.pipeline import exchange_log
from loft_hvd.pipeline.exchange_log import ExchangeLog, ExchangeTimes
from loft_hvd.runlog import RunLog, read_run_log
from loft_hvd.transport.base import Lane
from loft_hvd.transport.local import LocalTransport, LocalWorld, run_ranks
from tests.support.clock import Clock


def exchanges_of(folder: Path) -> list[dict[str, Any]]:
    (path,) = folder.glob("*.jsonl")
    return [entry for entry in read_run_log(path) if entry["kind"] == "exchange"]


def test_a_line_has_what_steps_usually_took_and_what_links_carry(tmp_path: Path) -> None:
    lane, clock = Lane(LocalWorld(2).transport(0)), Clock()
    lane.bytes_per_s = 117e6
    log = RunLog(tmp_path)
    written = ExchangeLog(log, lane, num_bytes=400, clock=clock)
    for step in range(20):
        log.step += 1
        clock.now += 0.3
        written.step_ended(ExchangeTimes(9.0 if step == 3 else 0.2, 0.1))  # one long step is none
    written.step_ended(None)
    (line,) = exchanges_of(tmp_path)
    assert (line["since"], line["num_steps"], line["step"]) == (0, 17, 17)
    assert (line["lane"], line["bytes_per_s"], line["num_bytes"]) == (
        "the engine's own",
        117e6,
        400,
    )
    assert (line["whole_s"], line["waited_s"]) == (pytest.approx(0.2), pytest.approx(0.1))


def test_an_optimizer_logs_its_exchange(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange_log, "_FIRST_S", 0.0)

    def work(transport: LocalTransport) -> None:
        layer = torch.nn.Linear(3, 1)
        for each in layer.parameters():
            torch.nn.init.zeros_(each)
        sgd = torch.optim.SGD(layer.parameters(), lr=0.1)
        folder = tmp_path if transport.rank == 0 else None
        optimizer = loft.DistributedOptimizer(
            sgd, rule=loft.Median(), transport=transport, log_dir=folder
        )
        layer(torch.ones(2, 3)).sum().backward()
        optimizer.step()

    run_ranks(2, work)
    (line,) = exchanges_of(tmp_path)
    assert line["num_bytes"] == 16
    assert line["whole_s"] >= line["waited_s"] > 0
    assert line["bytes_per_s"] is None  # nobody tries what is no link
